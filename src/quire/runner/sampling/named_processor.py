"""Logits processors by name, since a Batch is a plain value and cannot carry functions. Does not import torch."""

from __future__ import annotations

from itertools import count
from typing import Any, ClassVar, Protocol
from weakref import WeakValueDictionary

from quire.common.errors import InvalidParamsError


class LogitsProcessor(Protocol):
    """A caller's own change of the logits, before any other change is made."""

    def __call__(self, output_token_ids: list[int], logits: Any, /) -> Any:
        """The tokens generated so far and logits [vocab] float32 (a torch tensor of its own) -> changed logits."""
        ...


class NamedProcessor:
    """A logits processor that draws in this process can name for as long as this object lives."""

    _numbers: ClassVar[count[int]] = count()
    _by_name: ClassVar[WeakValueDictionary[str, NamedProcessor]] = WeakValueDictionary()

    def __init__(self, processor: LogitsProcessor) -> None:
        self.processor = processor
        kind = getattr(processor, "__qualname__", None) or type(processor).__qualname__
        self.name = f"{kind}#{next(self._numbers)}"
        self._by_name[self.name] = self

    @classmethod
    def named(cls, name: str) -> LogitsProcessor:
        """Raises InvalidParamsError for a name that this process does not know."""
        found = cls._by_name.get(name)
        if found is None:
            raise InvalidParamsError("it is unknown in the process that draws")
        return found.processor
