"""Logits processors by name, since a Batch is a plain value and cannot carry functions. Does not import torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from itertools import count
from typing import Any, ClassVar, TypeAlias
from weakref import WeakValueDictionary

from quire.common.errors import InvalidParamsError

LogitsProcessor: TypeAlias = Callable[[list[int], Any], Any] | Callable[[list[int], list[int], Any], Any]
"""A caller's own change of the logits, before any other change is made: a function of the tokens generated so far, or
of the prompt's and these, and of logits [vocab] float32, a torch tensor of its own. It returns the changed logits."""


class NamedProcessor:
    """A logits processor that draws in this process can name for as long as this object lives."""

    _numbers: ClassVar[count[int]] = count()
    _by_name: ClassVar[WeakValueDictionary[str, NamedProcessor]] = WeakValueDictionary()

    def __init__(self, processor: LogitsProcessor) -> None:
        self.processor: Any = processor
        kind = getattr(processor, "__qualname__", None) or type(processor).__qualname__
        self.name = f"{kind}#{next(self._numbers)}"
        self._takes_prompt = _num_parameters(processor) == 3
        self._by_name[self.name] = self

    def __call__(self, prompt_token_ids: list[int], output_token_ids: list[int], logits: Any) -> Any:
        """Call the processor with the arguments that it takes."""
        token_ids = (prompt_token_ids, output_token_ids) if self._takes_prompt else (output_token_ids,)
        return self.processor(*token_ids, logits)

    @classmethod
    def named(cls, name: str) -> NamedProcessor:
        """Raises InvalidParamsError for a name that this process does not know."""
        found = cls._by_name.get(name)
        if found is None:
            raise InvalidParamsError("it is unknown in the process that draws")
        return found


def _num_parameters(function: Any) -> int:
    try:
        return len(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some functions of C libraries have no signature
        return 2
