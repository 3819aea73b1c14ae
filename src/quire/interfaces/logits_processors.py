"""Logits processors of an engine, as vLLM has them: classes that see each request's parameters and change its logits.

vLLM calls one object for all rows of a batch. Here each request has an object of its own, whose batch is that request,
so a request's tokens depend on no other.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from quire.common.errors import ConfigError, InvalidParamsError
from quire.common.params import SamplingParams
from quire.config.args import EngineConfig

_State = TypeVar("_State")
RequestLogitsProcessor: TypeAlias = (
    Callable[[list[int], Tensor], Tensor] | Callable[[list[int], list[int], Tensor], Tensor]
)
"""A function of (output token ids, logits), or of (prompt token ids, output token ids, logits)."""


class MoveDirectionality(Enum):
    """How a row has moved in a batch. Rows never move here."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    """Which rows of a batch are new or gone. The list of output token ids grows with the output."""

    batch_size: int
    removed: Sequence[int]
    added: Sequence[tuple[int, SamplingParams, list[int] | None, list[int]]]
    """Row, parameters, prompt token ids, output token ids."""
    moved: Sequence[tuple[int, int, MoveDirectionality]]


class LogitsProcessor(ABC):
    """Changes logits of the requests whose parameters ask for it, mostly in `SamplingParams.extra_args`."""

    @classmethod  # noqa: B027  most check nothing
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Raise ValueError for parameters that it cannot process. Called before the request is queued."""

    @abstractmethod
    def __init__(self, vllm_config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None: ...

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called before `apply`; with None if no row is new."""

    @abstractmethod
    def apply(self, logits: Tensor) -> Tensor:
        """Return the changed logits [1, vocab]."""

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether it never changes which token is the likeliest. Quire calls `apply` in any case."""


class AdapterLogitsProcessor(LogitsProcessor):
    """A processor that consists of a function for each request."""

    def __init__(self, vllm_config: EngineConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.req_info: dict[int, Callable[[Tensor], Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """Return the function of a request, or None if its logits are not changed."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Make the functions of new rows."""
        process_dict_updates(self.req_info, batch_update, self._bound)

    def apply(self, logits: Tensor) -> Tensor:
        """Call each row's function."""
        for row, change in self.req_info.items():
            logits[row] = change(logits[row])
        return logits

    def _bound(
        self, params: SamplingParams, prompt_token_ids: list[int] | None, output_token_ids: list[int]
    ) -> Callable[[Tensor], Tensor] | None:
        function = self.new_req_logits_processor(params)
        if function is None:
            return None
        takes_prompt = len(inspect.signature(function).parameters) == 3
        token_ids: list[Any] = [prompt_token_ids, output_token_ids] if takes_prompt else [output_token_ids]
        return partial(function, *token_ids)


def process_dict_updates(
    req_entries: dict[int, _State],
    batch_update: BatchUpdate | None,
    new_state: Callable[[SamplingParams, list[int] | None, list[int]], _State | None],
) -> bool:
    """Keep the states of rows by row, of which `new_state` makes those of new ones. Returns whether any has changed."""
    if batch_update is None:
        return False
    before = dict(req_entries)
    for row, params, prompt_token_ids, output_token_ids in batch_update.added:
        state = new_state(params, prompt_token_ids, output_token_ids)
        req_entries.pop(row, None)
        if state is not None:
            req_entries[row] = state
    for row in batch_update.removed:
        req_entries.pop(row, None)
    return req_entries != before


class EngineProcessors:
    """The processors of an engine."""

    def __init__(self, kinds: Sequence[type[LogitsProcessor]] | type[LogitsProcessor], config: EngineConfig) -> None:
        kinds = kinds if isinstance(kinds, Sequence) else [kinds]
        for kind in kinds:
            if not isinstance(kind, type) or not issubclass(kind, LogitsProcessor):
                raise ConfigError(
                    f"logits_processors has {kind!r}: must be subclasses of quire.v1.sample.logits_processor."
                    "LogitsProcessor; functions are given in SamplingParams.logits_processors"
                )
        self._kinds = kinds
        self._config = config
        self.are_any = bool(kinds)

    def added_to(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with these processors behind their own. Raises InvalidParamsError."""
        if not self._kinds:
            return params
        for kind in self._kinds:
            try:
                kind.validate_params(params)
            except ValueError as error:
                raise InvalidParamsError(str(error)) from error
        functions = [_OfRequest(kind, self._config, params) for kind in self._kinds]
        return replace(params, logits_processors=[*(params.logits_processors or ()), *functions])


class _OfRequest:
    """One processor of a request as a function of its tokens.

    Of several samples of a request, each call for another one than the last makes a new object, so what an object
    remembers must follow from the output token ids.
    """

    def __init__(self, kind: type[LogitsProcessor], config: EngineConfig, params: SamplingParams) -> None:
        self._kind = kind
        self._config = config
        self._params = params
        self._processor: LogitsProcessor | None = None
        self._output: list[int] = []
        self.__qualname__ = kind.__qualname__  # for error messages

    def __call__(self, prompt_token_ids: list[int], output_token_ids: list[int], logits: Tensor) -> Tensor:
        update = None
        if self._processor is not None and output_token_ids and self._output == output_token_ids[:-1]:
            self._output.append(output_token_ids[-1])
        else:
            self._processor = self._kind(self._config, torch.device("cpu"), False)
            self._output = list(output_token_ids)
            update = BatchUpdate(1, (), ((0, self._params, prompt_token_ids, self._output),), ())
        self._processor.update_state(update)
        return self._processor.apply(logits[None])[0]
