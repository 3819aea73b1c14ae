"""Watch a running server in the terminal: cache blocks, queues, each request's progress, tokens per second and events.

It shows the same data as the server's web page. With --once, or where the output is not a terminal, it prints one
snapshot as plain text and exits.
"""

import argparse
import http.client
import math
import os
import shutil
import signal
import sys
import textwrap
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator
from urllib.parse import urlencode

import msgspec

from quire.common.errors import ConfigError, QuireError
from quire.engine.view.cache_frame import CacheEvent, CacheMirror, CacheUpdate, RequestRow

_PATH = "/debug/cache/events"
_TIMEOUT_S = 30.0  # an idle server sends comments more often than this
_WINDOW_S = 5.0
_MAX_LINE = 256 * 2**20
_USUAL_SIZE = (100, 40)  # columns and lines, where the output is not a terminal
_CELLS = " ▁▂▃▄▅▆▇█"
_STATE_MARKS = "·░█▓"  # free, cached, owned, pinned; distinct without colour
_STATE_COLOURS = ("2", "33", "34", "31")
_ALTERNATE_SCREEN = "\x1b[?1049h\x1b[?25l\x1b[?7l"  # without a cursor, and without wrapping of names in wide characters
_USUAL_SCREEN = "\x1b[?7h\x1b[?25h\x1b[?1049l"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server (default: %(default)s)")
    parser.add_argument("--model", metavar="NAME", help="which of the server's models (default: its first one)")
    parser.add_argument("--engine", type=int, default=0, help="which of the model's engines (default: %(default)s)")
    parser.add_argument("--api-key", default=None, metavar="KEY", help="the server's API key (default: $QUIRE_API_KEY)")
    parser.add_argument("--once", action="store_true", help="print one snapshot and exit")


def run(options: argparse.Namespace) -> int:
    """Show the server's state until Ctrl-C. Raises QuireError if there is no server or its data is invalid."""
    try:
        return _show(options)
    except QuireError:
        raise
    except (LookupError, ArithmeticError, TypeError, ValueError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise QuireError(
            f"the server at {options.url} sent invalid data ({reason}): is it a newer version of Quire?"
        ) from error


def _show(options: argparse.Namespace) -> int:
    keys = options.api_key or os.environ.get("QUIRE_API_KEY", "")  # may list several keys
    key = keys.split(",")[0].strip() or None
    once = options.once or not sys.stdout.isatty()
    picture = Picture(CacheMirror(), is_coloured=not once and "NO_COLOR" not in os.environ)
    updates = watch(options.url, key, options.model, options.engine)
    if once:
        for update in updates:
            picture.add(update)
            if picture.is_whole:
                print("\n".join(picture.lines(*shutil.get_terminal_size(_USUAL_SIZE))))
                return 0
        raise QuireError(f"the server at {options.url} closed the connection before it had sent a whole snapshot")
    handler = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    sys.stdout.write(_ALTERNATE_SCREEN)
    try:
        for update in updates:
            picture.add(update)
            lines = [f"{line}\x1b[K" for line in picture.lines(*shutil.get_terminal_size(_USUAL_SIZE))]
            sys.stdout.write("\x1b[H" + "\n".join(lines) + "\x1b[J")
            sys.stdout.flush()
    finally:
        sys.stdout.write(_USUAL_SCREEN)
        signal.signal(signal.SIGTERM, handler)
    raise QuireError(f"the server at {options.url} closed the connection")


def watch(url: str, key: str | None, model: str | None = None, engine: int = 0) -> Iterator[CacheUpdate]:
    """Yield the CacheUpdates of an engine of a model, by default the first of each. Raises ConfigError for an invalid
    address, QuireError if no server answers, it has no such model or it ends the stream with an error."""
    decoder = msgspec.json.Decoder(CacheUpdate)
    for data in _events(url, key, model, engine):
        if data.startswith(b'{"error"'):
            raise QuireError(f"the server at {url}: {msgspec.json.decode(data)['error']['message']}")
        yield decoder.decode(data)


def _events(url: str, key: str | None, model: str | None, engine: int) -> Iterator[bytes]:
    """Yield the data of each event of the stream. Raises what `watch` raises, except for the error in the stream."""
    headers = {"Accept": "text/event-stream"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url {url!r}: must begin with http:// or https://")
    try:
        query = urlencode(({} if model is None else {"model": model}) | ({"engine": engine} if engine else {}))
        request = urllib.request.Request(f"{url.rstrip('/')}{_PATH}{'?' if query else ''}{query}", headers=headers)
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            while line := response.readline(_MAX_LINE):
                if line.startswith(b"data:"):
                    yield line[5:].strip()
    except urllib.error.HTTPError as error:
        with error:
            raise QuireError(f"the server at {url} answers {error.code}: {_reason(error)}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise QuireError(
            f"no quire server answers at {url} ({reason}): start one with `quire serve`, or give --url"
        ) from error


def _reason(error: urllib.error.HTTPError) -> str:
    try:
        return str(msgspec.json.decode(error.read(65536))["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        hint = ": is it a Quire server?" if error.code == 404 else ""
        return f"{error.reason}{hint}"


class Picture:
    """The server's state as lines of text for the terminal."""

    def __init__(self, mirror: CacheMirror, *, is_coloured: bool) -> None:
        self.mirror = mirror
        self._is_coloured = is_coloured
        self._tokens: deque[tuple[float, int]] = deque()
        self._events: deque[CacheEvent] = deque(maxlen=50)

    @property
    def is_whole(self) -> bool:
        """Whether every block that is not free has been received; a large cache arrives in several frames."""
        counters, blocks = self.mirror.counters, self.mirror.tiers["device"].values()
        num_blocks = counters.get("used_blocks", 0) + counters.get("cached_blocks", 0)
        return self.mirror.setup is not None and sum(b["states"] > 0 for b in blocks) >= num_blocks

    def add(self, update: CacheUpdate) -> None:
        """Apply one frame of the server."""
        if update.setup is None and self.mirror.setup is None:
            return  # a change from before this connection; a snapshot follows
        self.mirror.apply(update)
        self._events.extend(update.events)
        self._tokens.append((update.time_s, self.mirror.counters["generated_tokens"]))
        while self._tokens[0][0] < update.time_s - _WINDOW_S:
            self._tokens.popleft()

    def lines(self, width: int, height: int) -> list[str]:
        """Return the lines to show, at most `height` of them."""
        if self.mirror.setup is None:
            return ["waiting for the engine"]
        queues = {name: self._queue(name) for name in ("running", "waiting", "swapped")}
        first, *more = textwrap.wrap(self._summary(), width) + textwrap.wrap(self._cache_line(), width)
        first = self._style("1", first[:5]) + first[5:]
        head = [first, *more, *self._map(width, max(2, height // 4)), ""]
        num_left = max(6, height - len(head) - 2)
        lines = []
        for name, rows in queues.items():
            lines.append(self._style("1", f"{name} {self.mirror.counters[name]}"[:width]))
            lines += [self._request(row, width) for row in rows[: max(1, num_left // (2 if name == "running" else 8))]]
        num_events = max(1, height - len(head) - len(lines) - 2)
        recent = [self._event(event)[:width] for event in list(self._events)[-num_events:]]
        return [*head, *lines, "", *reversed(recent)][:height]

    def _style(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._is_coloured else text

    def _summary(self) -> str:
        counters = self.mirror.counters
        (start_s, start), (end_s, end) = self._tokens[0], self._tokens[-1]
        speed = (end - start) / max(end_s - start_s, 1e-9) if end > start else 0.0
        hit_rate = counters["prefix_hit"] / max(1, counters["prefix_queried"])
        swaps = f" ({counters['preemptions_by_swap']} by swap)" if counters["preemptions_by_swap"] else ""
        return (
            f"quire {speed:.1f} tokens/s  {counters['generated_tokens']:,} generated  prefix hits {hit_rate:.0%}  "
            f"preemptions {counters['preemptions']:,}{swaps}  evicted {counters['prefix_evicted']:,} tokens"
        )

    def _cache_line(self) -> str:
        setup, counters = self.mirror.setup, self.mirror.counters
        assert setup is not None
        states = [sum(b["states"] == state for b in self.mirror.tiers["device"].values()) for state in range(4)]
        states[0] = setup.num_blocks - sum(states[1:])
        share = counters["used_blocks"] / max(1, setup.num_blocks)
        names = ("free", "cached", "owned", "pinned")
        parts = [f"{mark} {count:,} {name}" for mark, count, name in zip(_STATE_MARKS, states, names, strict=True)]
        return f"cache {share:.1%} of {setup.num_blocks:,} blocks of {setup.block_size} in use: " + "  ".join(parts)

    def _map(self, width: int, height: int) -> list[str]:
        """Return rows of marks that cover all blocks; a mark shows the busiest state of the blocks it stands for."""
        assert self.mirror.setup is not None
        num_blocks, blocks = self.mirror.setup.num_blocks, self.mirror.tiers["device"]
        per_mark = max(1, math.ceil(num_blocks / (width * height)))
        states = [0] * math.ceil(num_blocks / per_mark)
        for block_id, block in blocks.items():
            states[block_id // per_mark] = max(states[block_id // per_mark], block["states"])
        rows = []
        for start in range(0, len(states), width):
            row = states[start : start + width]
            rows.append("".join(self._style(_STATE_COLOURS[state], _STATE_MARKS[state]) for state in row))
        return rows

    def _queue(self, name: str) -> list[RequestRow]:
        return sorted((r for r in self.mirror.requests.values() if r.queue == name), key=lambda r: r.order)

    def _request(self, row: RequestRow, width: int) -> str:
        limit = f"/{row.max_tokens}" if row.max_tokens else ""
        computed = min(row.num_computed_tokens, row.num_prompt_tokens)
        share = row.num_generated_tokens / row.max_tokens if row.max_tokens else 0.0
        details = f"{row.num_generated_tokens}{limit} tokens, {row.num_blocks} blocks"
        if row.adapter:
            details += f", adapter {row.adapter}"
        if row.num_preemptions:
            details += f", preempted {row.num_preemptions}x"
        name_width = max(12, width - 84)
        prompt = _bar(computed / row.num_prompt_tokens)
        name = f"{row.request_id[:name_width]:<{name_width}}"
        return _plain(f"  {name} {row.stage:<7} prompt {prompt} output {_bar(share)} {details}"[:width])

    def _event(self, event: CacheEvent) -> str:
        times = f" x{event.count}" if event.count > 1 else ""
        blocks = f" blocks {', '.join(map(str, event.block_ids[:8]))}" if event.block_ids else ""
        took = f" after {event.e2e_s:.2f} s" if event.e2e_s is not None else ""
        return _plain(f"  {event.kind}{times} {event.request_id}{blocks} {event.reason}{took}".rstrip())


def _plain(text: str) -> str:
    """Replace characters that a terminal would interpret as control sequences."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _bar(share: float) -> str:
    """Return a bar of ten characters, drawn in eighths of a character."""
    eighths = round(min(max(share, 0.0), 1.0) * 80)
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (_CELLS[rest] if rest else "")).ljust(10, "·")
