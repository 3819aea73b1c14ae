"""How long work shows its progress: by a bar in a notebook, or on standard error if that is a terminal, otherwise not.

A server and an engine in a process of its own log lines instead, because their standard error is a log: `log_progress`.
"""

from __future__ import annotations

import builtins
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeAlias, TypeVar

from tqdm import tqdm

from quire.common import log
from quire.common.outputs import EngineStats

_T = TypeVar("_T")
BarChoice: TypeAlias = "bool | Callable[..., tqdm[Any]]"
"""Whether a call shows a bar; or what makes the bar in place of tqdm, with tqdm's arguments, terminal or not."""
DELAY_S = 1.0
"""A bar appears after this time, so that short work shows none."""
LOG_INTERVAL_S = 3.0
_REFRESH_S = 0.1
_COMPILING_S = 1.0
"""Grammars that are compiled within this time are not mentioned."""

_has_log = False


def log_progress() -> None:
    """From now on, this process logs its progress and shows no bars."""
    global _has_log
    _has_log = True


def _is_logged() -> bool:
    return _has_log or log.chosen_format is not None


def shows_bars() -> bool:
    """Return whether bars appear in this process: in a notebook, or on a terminal as standard error."""
    return not _is_logged() and (_in_notebook() or (sys.stderr is not None and sys.stderr.isatty()))


def _in_notebook() -> bool:
    """Whether this runs in a notebook. IPython is not imported for it: its kernels have the builtin `get_ipython`."""
    get_ipython = getattr(builtins, "get_ipython", None)
    kinds = () if get_ipython is None else type(get_ipython()).__mro__  # Colab's shell is a subclass
    return any(kind.__name__ == "ZMQInteractiveShell" for kind in kinds)


def _bar_class() -> Any:
    """tqdm's class for where bars appear. In a notebook without ipywidgets, its bars are text, as on a terminal."""
    if not _in_notebook():
        return tqdm
    from tqdm.auto import tqdm as automatic

    return automatic


@contextmanager
def progress(
    what: str, total: int, unit: str, *, initial: int = 0, at_once: bool = False
) -> Iterator[Callable[..., object]]:
    """Show how much of `total` is done, of which `initial` was done before, until the block ends.

    Call the function with the number of units, by default 1, that have been done since its last call. The unit `"B"` is
    bytes; only these are logged. With `at_once` the bar appears at once and stays on the screen.
    """
    if _is_logged():
        yield LoggedBytes(what, total).update if unit == "B" else _show_nothing
    elif not shows_bars():
        yield _show_nothing
    else:
        look = _look(what, total, unit)
        with _bar_class()(**look, initial=initial, leave=at_once, delay=0 if at_once else DELAY_S) as bar:
            yield bar.update


def _show_nothing(num: int = 1) -> None:
    """In place of a bar: tqdm would start a process for its lock even where it shows nothing."""


def tracked(cases: Sequence[_T], what: str) -> Iterator[_T]:
    """Yield the cases of a benchmark, and show how many of them are done."""
    with progress(what, len(cases), "case") as advance:
        for case in cases:
            yield case
            advance()


def _look(what: str, total: int, unit: str) -> dict[str, Any]:
    return {
        "desc": what,
        "total": total,
        "unit": unit if unit == "B" else f" {unit}",
        "unit_scale": unit == "B",
        "miniters": 1,
        "smoothing": 0,
        "dynamic_ncols": True,
    }


@contextmanager
def above_bars() -> Iterator[None]:
    """Bars leave the screen for the time in which the block prints to standard output."""
    with tqdm.external_write_mode(file=sys.stdout) if shows_bars() else nullcontext():
        yield


class Download:
    """How much of a download is done. It counts the downloads that begin in the context in which it was made current,
    and in copies of that context; other threads may read it."""

    num_bytes = 0
    total = 0
    """0 while it is not known."""

    def count(self, num_bytes: int, total: int) -> None:
        """Note the state of one bar. The hub library shows the same bytes in two bars, of which one may lag behind."""
        self.num_bytes, self.total = max(self.num_bytes, num_bytes), max(self.total, total)


current_download: ContextVar[Download | None] = ContextVar("current_download", default=None)


class LoggedBytes:
    """Logs how many bytes of the total are done, every LOG_INTERVAL_S at most; nothing if all is done sooner."""

    def __init__(self, what: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.what = what
        self.total = total
        self.num_bytes = 0
        self._clock = clock
        self._due_s = clock() + LOG_INTERVAL_S

    def update(self, num_bytes: int = 1) -> None:
        """Count bytes that have been done."""
        self.num_bytes += num_bytes
        if (now := self._clock()) >= self._due_s:
            self._due_s = now + LOG_INTERVAL_S
            size, unit = (1e9, "GB") if self.total >= 1e9 else (1e6, "MB")
            log.logger.info("%s: %.1f of %.1f %s", self.what, self.num_bytes / size, self.total / size, unit)


class PromptsBar:
    """The bar of calls that run prompts: those that have finished, tokens, and tokens per second."""

    def __init__(
        self,
        total: int,
        stats: Callable[[], EngineStats],
        num_compiling: Callable[[], int],
        shown: BarChoice,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`num_compiling` returns how many requests wait for their grammars."""
        make = shown if callable(shown) else _bar_class() if shown and shows_bars() else None
        self._bar: Any = None
        self._stats, self._num_compiling, self._clock = stats, num_compiling, clock
        self._num_finished = 0  # not shown yet
        if make is None:  # statistics take longer than all else here
            return
        look = _look("Processed prompts", total, "prompt") | {"miniters": 0, "mininterval": 0}  # shown at every update
        self._bar = make(**look)
        self._start, self._start_s = stats(), clock()
        self._idle_s = self._start_s  # when grammars were last not being compiled
        self._due_s = self._start_s

    def update(self, num_finished: int) -> None:
        """Count prompts that have finished. Call it after every step; it costs little between two updates."""
        self._num_finished += num_finished
        if self._bar is not None and (now := self._clock()) >= self._due_s:
            self._due_s = now + _REFRESH_S
            self._show(now)

    def close(self) -> None:
        """Show the last state, and leave it on the screen."""
        if self._bar is not None:
            self._show(self._clock())
            self._bar.close()

    def _show(self, now: float) -> None:
        elapsed_s, stats = max(now - self._start_s, 1e-9), self._stats()
        num_generated = stats.num_generated_tokens - self._start.num_generated_tokens
        input_rate = (stats.num_prompt_tokens - self._start.num_prompt_tokens) / elapsed_s
        output_rate = num_generated / elapsed_s
        text = f"{num_generated} tokens, input {input_rate:.0f} tokens/s, output {output_rate:.0f} tokens/s"
        num_compiling = self._num_compiling()
        if not num_compiling:
            self._idle_s = now
        elif now - self._idle_s >= _COMPILING_S:
            text += f", compiling {num_compiling} grammar{'s' if num_compiling > 1 else ''}"
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.update(self._num_finished)
        self._num_finished = 0


def hub_bar(base: type[Any], name: str) -> type[Any]:
    """Return a class of bars for the download of `name`, which appear or are logged as all others.

    `base` is the hub library's own class, which obeys its environment variables.
    """

    download = current_download.get()

    class HubBar(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            if not shows_bars():
                kwargs["disable"] = True
            super().__init__(*args, **kwargs)
            self._num_bytes = 0
            self._has_bytes = kwargs.get("unit") == "B"
            is_logged = _is_logged() and self._has_bytes
            self._logged = LoggedBytes(f"{name}: {kwargs.get('desc') or 'downloading'}", 0) if is_logged else None

        def update(self, n: float | None = 1) -> Any:
            if self._logged is not None:
                self._logged.total = self.total or 0
                self._logged.update(int(n or 0))
            if download is not None and self._has_bytes:
                self._num_bytes += int(n or 0)
                download.count(self._num_bytes, int(self.total or 0))
            return super().update(n)

    return HubBar
