"""The engine process's loop, run here in the test's own thread: what it is told decides what it is asked next."""

import logging
import socket
from collections.abc import Callable
from io import BytesIO
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
import numpy as np
import pytest

from quire import LLMEngine, SamplingParams
from quire.common.batch import Batch, StepResult, TokenLogprobs
from quire.common.errors import EngineBrokenError
from quire.common.faults import Fault, inject
from quire.engine.process import engine_process, messages
from quire.engine.process.engine_process import EngineProcess, read_messages
from quire.engine.process.messages import (
    Abort,
    AddRequest,
    AddScoring,
    CacheFrame,
    ProtocolError,
    Ready,
    RequestDelta,
    Rows,
    SetCacheView,
    StepDone,
    ToClient,
    read_frame,
    to_frame,
)

from ..scripted_engine import RecitingExecutor, recital, scripted_llm

FAILED = "RequestFailedError"


class Client:
    """`on_step` is called with each step's message, and may answer; the conversation ends when all keys have."""

    def __init__(self, engine: LLMEngine, on_step: Callable[[StepDone], object] = lambda step: None) -> None:
        self.engine = engine
        self.inbox: SimpleQueue[Any] = SimpleQueue()
        self.on_step = on_step
        self.steps: list[StepDone] = []
        self.cache_frames: list[bytes] = []
        self.deltas: dict[int, list[RequestDelta]] = {}
        self.left: set[int] = set()

    def add(self, key: int, prompt_len: int = 3, **params: Any) -> None:
        self.left.add(key)
        encoded = msgspec.Raw(msgspec.msgpack.encode(SamplingParams(temperature=0, detokenize=False, **params)))
        self.inbox.put(AddRequest(key, f"r{key}", [5] * prompt_len, "", 0.0, False, encoded))

    def run(self, **kwargs: Any) -> None:
        EngineProcess(self.engine, self.inbox, self._take, **kwargs).run()
        assert not self.engine.has_unfinished_requests()
        assert self.engine.stats().num_used_blocks == 0

    def _take(self, frame: bytes) -> None:
        message = msgspec.msgpack.decode(read_frame(BytesIO(frame)), type=ToClient)
        if isinstance(message, CacheFrame):
            self.cache_frames.append(message.payload)
        if isinstance(message, Ready):
            assert message.max_model_len == 256
        if not isinstance(message, StepDone):
            return
        self.steps.append(message)
        for delta in message.deltas:
            self.deltas.setdefault(delta.key, []).append(delta)
            self.left -= {delta.key} if delta.finished else set()
        self.on_step(message)
        if not self.left:
            self.inbox.put(None)

    def tokens(self, key: int) -> list[int]:
        return [token_id for delta in self.deltas[key] for token_id in delta.sequences[0].token_ids]


@pytest.fixture
def scripted() -> tuple[LLMEngine, RecitingExecutor]:
    llm, executor = scripted_llm(max_num_seqs=2)
    return llm.engine, executor


def test_a_frame_for_each_step_brings_what_is_new(scripted: tuple[LLMEngine, RecitingExecutor]) -> None:
    client = Client(scripted[0])
    client.add(1, max_tokens=50)
    client.add(2, max_tokens=4)
    client.run()
    reply = [*scripted[0].tokenizer.encode(recital(3)), 2]
    assert client.tokens(1) == reply
    assert client.tokens(2) == reply[:4]
    assert [len(step.deltas) for step in client.steps[:4]] == [2] * 4
    assert all(len(delta.sequences[0].token_ids) == 1 for delta in client.deltas[1])
    assert [delta.sequences[0].finish_reason for delta in (client.deltas[1][-1], client.deltas[2][-1])] == [
        "stop",
        "length",
    ]
    assert client.steps[-1].stats.num_generated_tokens == len(reply) + 4


def test_an_abort_frees_the_blocks_within_two_steps(scripted: tuple[LLMEngine, RecitingExecutor]) -> None:
    def abort(step: StepDone) -> None:
        if len(client.steps) == 3:
            client.inbox.put(Abort(["r1"]))
            client.inbox.put(Abort(["unknown"]))
        elif len(client.steps) > 3:
            client.left.clear()

    client = Client(scripted[0], abort)
    client.add(1, prompt_len=100, max_tokens=100, ignore_eos=True)
    client.run()
    before, after = client.steps[2:]
    assert before.stats.num_used_blocks > 0
    assert after.stats.num_used_blocks == 0
    assert after.stats.num_steps <= before.stats.num_steps + 2
    assert len(client.deltas[1]) == 3


def test_a_request_that_fails_ends_and_no_other(
    scripted: tuple[LLMEngine, RecitingExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, executor = scripted
    execute = executor.execute

    def fail(batch: Batch) -> StepResult:
        if batch.step > 2 and any(len(s.token_ids) + s.start == 9 for s in batch.sequences):
            raise RuntimeError("planted failure")
        return execute(batch)

    monkeypatch.setattr(executor, "execute", fail)
    monkeypatch.setattr(logging.getLogger("quire"), "disabled", True)
    client = Client(engine)
    for key, prompt_len in ((1, 3), (2, 7), (3, 3)):  # the last one waits
        client.add(key, prompt_len, max_tokens=5)
    client.run()
    last = client.deltas[2][-1]
    assert (last.error, last.error_kind) == ("request 'r2' failed when it was executed: RuntimeError", FAILED)
    assert last.sequences[0].finish_reason == "abort"
    assert len(client.tokens(2)) == 2
    for key in (1, 3):
        assert client.deltas[key][-1].error is None
        assert len(client.tokens(key)) == 5


def test_a_request_whose_output_cannot_be_made_ends(
    scripted: tuple[LLMEngine, RecitingExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "disabled", True)
    client = Client(scripted[0])
    for key in (1, 2):
        client.add(key, max_tokens=5)
    with inject(Fault("output.make", subject="r1", after=2)):
        client.run()
    last = client.deltas[1][-1]
    assert (last.error, last.error_kind) == ("request 'r1' failed when its output was made: RuntimeError", FAILED)
    assert (len(client.deltas[1]), len(client.tokens(2))) == (3, 5)


@pytest.mark.parametrize("place", ["schedule", "commit"])
def test_inconsistent_block_accounting_ends_the_process(
    scripted: tuple[LLMEngine, RecitingExecutor], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    engine, _ = scripted
    owner = engine.scheduler if place == "schedule" else engine.committer
    working, calls = getattr(owner, place), [0]

    def broken(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise ValueError("planted bug")
        return working(*args)

    monkeypatch.setattr(owner, place, broken)
    monkeypatch.setattr(logging.getLogger("quire"), "disabled", True)
    client = Client(engine)
    client.add(1, max_tokens=5)
    with pytest.raises(EngineBrokenError, match="accounting is inconsistent: ValueError: planted bug"):
        client.run()


def test_what_the_engine_refuses_after_all_ends_alone(
    scripted: tuple[LLMEngine, RecitingExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "disabled", True)
    client = Client(scripted[0])
    client.add(1, max_tokens=2)
    client.add(2, prompt_len=1000)
    client.left.add(3)
    client.inbox.put(AddRequest(3, "r3", [5], "", 0.0, True, msgspec.Raw(msgspec.msgpack.encode({"beam_width": 0}))))
    client.left.add(4)
    client.inbox.put(AddScoring(4, "r4", [5], "", 1))
    client.run()
    assert client.deltas[1][-1].error_kind is None
    assert [client.deltas[key][-1].error_kind for key in (2, 3, 4)] == [
        "PromptTooLongError",
        "ValidationError",
        "InvalidPromptError",
    ]


def test_what_is_too_large_for_a_message_ends_its_request(
    scripted: tuple[LLMEngine, RecitingExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 3000)
    client = Client(scripted[0])
    client.add(1, prompt_len=100, prompt_logprobs=10, max_tokens=5)
    client.add(2, max_tokens=5)
    client.run()
    assert "too many" in (client.deltas[1][-1].error or "")
    assert len(client.tokens(2)) == 5


def test_requests_that_come_on_and_on_do_not_hold_up_those_that_run(
    scripted: tuple[LLMEngine, RecitingExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_process, "_MESSAGES_S", 0.0)
    client = Client(scripted[0])
    client.add(1, max_tokens=8, ignore_eos=True)
    for key in range(2, 6):
        client.add(key, max_tokens=1)
    client.run()
    ends = {delta.key: number for number, step in enumerate(client.steps) for delta in step.deltas if delta.finished}
    assert ends[2] < ends[3] < ends[4] < ends[5] <= ends[1]


def test_the_cache_view_is_made_only_while_it_is_on(scripted: tuple[LLMEngine, RecitingExecutor]) -> None:
    told: list[str] = []

    class View:
        def __init__(self, engine: LLMEngine) -> None:
            self.engine = engine

        def frame(self, now: float) -> bytes | None:
            num_steps = self.engine.stats().num_steps
            return str(num_steps).encode() if num_steps % 2 else None

        def restart(self) -> None:
            told.append("restart")

        def close(self) -> None:
            told.append("close")

    def switch(step: StepDone) -> None:
        if step.stats.num_steps in (2, 4, 6):
            client.inbox.put(SetCacheView(step.stats.num_steps < 6))

    client = Client(scripted[0], switch)
    client.add(1, max_tokens=8, ignore_eos=True)
    client.run(make_cache_view=View)
    assert client.cache_frames == [b"3", b"5"]
    assert told == ["restart", "close"]


def framed(content: bytes) -> bytes:
    return len(content).to_bytes(4, "little") + content


def test_reading_ends_with_the_client_and_with_nonsense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "disabled", True)
    good = to_frame(Abort(["a"]))
    no_text = b"\x82\xa4type\xa5Abort\xaarequest_id\xa1\xff"
    too_deep = b"\x82\xa4type\xa5Start\xa4args\x81\xa1a" + b"\x91" * 10_000 + b"\x01"
    for rest in (b"", good[:-1], b"\x01", b"\xff\xff\xff\xff", *map(framed, (b"\xc1", b"\x91\x01", no_text, too_deep))):
        inbox: SimpleQueue[Any] = SimpleQueue()
        read_messages(BytesIO(good + rest), inbox)
        assert inbox.get() == Abort(["a"])
        assert inbox.get() is None
        assert inbox.empty()


def test_a_client_that_ends_with_unread_messages_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    inbox: SimpleQueue[Any] = SimpleQueue()
    ours, clients = socket.socketpair()
    with ours, ours.makefile("rb") as stream:
        ours.sendall(to_frame(Abort(["a"])))
        clients.close()
        read_messages(stream, inbox)
    assert inbox.get() is None
    assert caplog.records == []


def test_what_is_too_large_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 50)
    with pytest.raises(ProtocolError, match="at most 50"):
        to_frame(Abort(["a" * 50]))


def test_log_probabilities_arrive_as_they_were() -> None:
    sent = TokenLogprobs(
        np.arange(12, dtype=np.int32).reshape(3, 4),
        -np.arange(12, dtype=np.float32).reshape(3, 4) / 7,
        np.array([1, 2, 7], np.int32),
    )
    got = msgspec.msgpack.decode(msgspec.msgpack.encode(Rows.pack(sent)), type=Rows).unpack()
    for name in ("token_ids", "logprobs", "ranks"):
        np.testing.assert_array_equal(getattr(got, name), getattr(sent, name))


def test_memory_is_given_back_while_nothing_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(engine_process, "give_back_memory", lambda: told.append("given back"))

    class Inbox:
        def get(self, timeout: float | None = None) -> None:
            told.append(timeout)
            if timeout is not None:
                raise Empty

    inbox: Any = Inbox()
    EngineProcess(scripted_llm()[0].engine, inbox, lambda frame: None).run()
    assert told == [engine_process.IDLE_S, "given back", None]
