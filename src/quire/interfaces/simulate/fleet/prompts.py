"""The prompts of a fleet's requests with their hashes, made when they are wanted or, ahead of that, by another process.

What the other process sends depends on the trace alone, so a run is the same with and without it. It also computes the
tokens that the model will draw behind a prompt. Where a sequence has other tokens, the model computes its own, see
`FakeModel.expect`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection

from quire.common.errors import QuireError
from quire.interfaces.simulate.fake_model import FakeModel
from quire.interfaces.simulate.trace import TraceRequest
from quire.kv.prefix_cache.content_hash import BlockHash, ContentHasher, HashChain, token_bytes

MOST_AHEAD = 4096
"""Most tokens of an output that are computed ahead."""
PIECE = 64
"""Number of requests in a message."""

_Made = tuple[bytes, int, list[BlockHash]]
"""Tokens of the prompt and the output, the number of those of the prompt, and the hashes of its full blocks."""
_Message = list[tuple[TraceRequest, _Made | None]] | QuireError
"""Requests in order of the trace, at its end none, or why there are no more."""


@dataclass(slots=True)
class Prompt:
    """The prompt of a request."""

    token_ids: list[int]
    chain: HashChain
    """The hashes of its full blocks."""
    expected: list[int] | None = None
    """The prompt and the tokens that will be drawn behind it, where they are known."""


class Prompts:
    """Makes each prompt when it is wanted. `trace` yields the requests."""

    def __init__(self, trace: Iterable[TraceRequest], key: bytes, block_size: int) -> None:
        self.trace = trace
        self._hasher, self._block_size = ContentHasher(key), block_size

    def take(self, index: int, request: TraceRequest, history: list[int]) -> Prompt:
        """Return the prompt of request number `index`, once; `history` is the conversation before it."""
        return self.of(history + request.prompt_token_ids(index))

    def of(self, token_ids: list[int]) -> Prompt:
        """Return a prompt of these tokens."""
        chain = HashChain(self._hasher, self._block_size)
        chain.extend(len(token_ids) // self._block_size, token_ids)
        return Prompt(token_ids, chain)


class _PromptsAhead(Prompts):
    """Has the prompts of single samples outside sessions made by the process at the other end of the connection."""

    def __init__(self, connection: Connection, key: bytes, block_size: int) -> None:
        super().__init__(self._receive(), key, block_size)
        self._connection = connection
        self._made: dict[int, _Made] = {}

    def _receive(self) -> Iterator[TraceRequest]:
        index = 0
        try:
            while message := self._connection.recv():
                if isinstance(message, QuireError):
                    raise message
                for request, made in message:
                    if made is not None:
                        self._made[index] = made
                    yield request
                    index += 1
        except EOFError:
            raise QuireError("the process that makes the prompts of the simulation has ended too early") from None

    def take(self, index: int, request: TraceRequest, history: list[int]) -> Prompt:
        made = self._made.pop(index, None)
        if made is None:
            return super().take(index, request, history)
        data, prompt_len, hashes = made
        expected = array("q", data).tolist()
        token_ids = expected[:prompt_len]
        chain = HashChain(self._hasher, self._block_size)
        chain.adopt(hashes, data)
        return Prompt(token_ids, chain, expected)


@contextmanager
def prompts_ahead(make_trace: Callable[[], Iterable[TraceRequest]], key: bytes, block_size: int) -> Iterator[Prompts]:
    """Let another process make the trace, which must not depend on this process, and its prompts. It ends at the latest
    with the context."""
    context = get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, make_trace, key, block_size), daemon=True)
    process.start()
    sender.close()
    try:
        yield _PromptsAhead(receiver, key, block_size)
    finally:
        receiver.close()
        process.terminate()
        process.join()


def _send(sender: Connection, make_trace: Callable[[], Iterable[TraceRequest]], key: bytes, block_size: int) -> None:
    """The other process: send what `_PromptsAhead` receives."""
    piece: list[tuple[TraceRequest, _Made | None]] = []
    try:
        prompts = Prompts(make_trace(), key, block_size)
        for index, request in enumerate(prompts.trace):
            piece.append((request, _made(prompts, index, request)))
            if len(piece) == PIECE:
                sender.send(piece)
                piece = []
        sender.send(piece)
        sender.send([])
    except QuireError as error:
        if piece:  # an empty message is the end of the trace
            sender.send(piece)
        sender.send(error)
    except (BrokenPipeError, KeyboardInterrupt):  # the simulation has ended
        pass


def _made(prompts: Prompts, index: int, request: TraceRequest) -> _Made | None:
    if request.session is not None or max(request.n, request.beam_width) > 1:
        return None
    prompt = prompts.take(index, request, [])
    model = FakeModel(lambda seq_id: prompt.token_ids)
    start, output_len = len(prompt.token_ids) - 1, min(request.output_len, MOST_AHEAD)
    output = model.next_tokens(0, start, prompt.token_ids[-1], 0, output_len)
    return token_bytes(prompt.token_ids + output), start + 1, prompt.chain.blocks()
