"""ModelEntry: where one of the server's models is between never loaded, loaded, and asleep."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Literal

from quire.interfaces.async_llm.listener import RequestListener
from quire.server.models.served_model import ServedModel
from quire.server.models.spec import ModelSpec

if TYPE_CHECKING:
    from quire.interfaces.async_llm.async_llm import AsyncLLM

ModelStatus = Literal["loaded", "restarting", "loading", "asleep", "failed"]
MAX_KEEP_ALIVE_S = 1e9
"""A longer time is for ever: 30 years."""


class ModelEntry:
    """One model of a ModelPool, which alone changes it. Others may read everything, and add listeners."""

    def __init__(self, spec: ModelSpec, keep_alive_s: float | None) -> None:
        self.spec = spec
        self.served: ServedModel | None = None
        """Set when the model is loaded for the first time; it remains while the model sleeps."""
        self.is_awake = False
        """Whether weights and cache are in memory."""
        self.is_held_asleep = False
        """Whether requests are refused until an administrator wakes the model up."""
        self.wakes_with_others = False
        """Whether it was awake when an administrator put it to sleep."""
        self.loading: asyncio.Task[Exception | None] | None = None
        """The task that loads the model or wakes it up, and returns the error if that fails."""
        self.failure: Exception | None = None
        """Why the model was not loaded the last time; None if it was."""
        self.failed_s = 0.0
        self.num_uses = 0
        """Requests that use the model, or wait until it is loaded."""
        self.last_use_s = 0.0
        """In seconds of time.monotonic()."""
        self.keep_alive_s = keep_alive_s
        """After this time without use the model is put to sleep; None: only when its memory is needed."""
        self.timer: asyncio.TimerHandle | None = None
        self._listeners: list[RequestListener] = []

    @property
    def name(self) -> str:
        """The model's first name."""
        return self.spec.name

    @property
    def llm(self) -> AsyncLLM | None:
        """The model's interface; None before it is loaded for the first time."""
        return None if self.served is None else self.served.llm

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The LoRA adapters of the model, whose names clients may use as model names."""
        if self.llm is None:
            return tuple(request.lora_name for request in self.spec.engine.lora_requests())
        return tuple(adapter.name for adapter in self.llm.adapters)

    @property
    def num_bytes(self) -> int:
        """Memory that the model uses while it is awake; 0 if that is unknown."""
        return 0 if self.served is None else self.served.llm.num_bytes

    @property
    def is_idle(self) -> bool:
        """Whether the model is awake and no request uses it."""
        return self.is_awake and not self.num_uses

    @property
    def status(self) -> ModelStatus:
        """The state in one word; `asleep` includes a model that was never loaded."""
        if self.is_awake:
            return "loaded" if self.llm is None or self.llm.death is None else "restarting"
        if self.loading is not None:
            return "loading"
        return "asleep" if self.failure is None else "failed"

    @property
    def expires_at(self) -> float | None:
        """The time (in seconds of time.time()) at which the model is put to sleep if it is not used; None: never."""
        if self.keep_alive_s is None or self.keep_alive_s > MAX_KEEP_ALIVE_S:
            return None
        since_s = time.monotonic() if self.num_uses else self.last_use_s
        return time.time() + since_s + self.keep_alive_s - time.monotonic()

    def add_listener(self, listener: RequestListener) -> None:
        """Report the events of the model's requests to a listener, also if it is loaded only later."""
        self._listeners.append(listener)
        if self.served is not None:
            self.served.llm.add_listener(listener)

    def set_loaded(self, served: ServedModel) -> None:
        """The model was loaded for the first time."""
        self.served, self.is_awake = served, True
        for listener in self._listeners:
            served.llm.add_listener(listener)
