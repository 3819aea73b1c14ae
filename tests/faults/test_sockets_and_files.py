"""What fails between the processes, to and from clients, and on the disk is the matter of those it happens to."""

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from quire.common.errors import QuireError, RequestFailedError
from quire.common.faults import Fault, inject
from quire.common.log import LIBRARIES, set_up_logging
from quire.interfaces.async_llm.output_processor import RequestState
from quire.server.api.responses.store import ResponseStore, StoredResponse, StoreError
from quire.server.config import ServerArgs
from quire.server.http.auth import ApiKeys
from quire.server.operations.lifecycle import DrainGate
from quire.server.serve import build_app
from quire.text.grammar.trial import TrialProcess, TrialSettings
from tests.async_llm.door import Door
from tests.async_llm.local_engine import local_llm
from tests.scripted_engine import scripted_llm
from tests.server.in_process import Server, serve
from tests.server.test_operations import ListenedLLM
from tests.server.test_run_batch import Batch, line

LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, output_kind="delta")
LONGER = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True, output_kind="delta")


@pytest.fixture(autouse=True)
def _silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("quire"), "disabled", True)


# Between the processes


@pytest.fixture(scope="module")
def door() -> Iterator[Door]:
    door = Door(num_gpu_blocks_override=64, num_threads=1)
    yield door
    door.close()


@pytest.mark.parametrize(
    "fault",
    [
        Fault("api.send", error="EPIPE"),
        Fault("api.send", "write"),
        Fault("api.receive", subject="StepDone", after=5),
        Fault("api.receive", error="ECONNRESET", subject="StepDone", after=5),
    ],
    ids=lambda fault: f"{fault.point} {fault.action} {fault.error}",
)
def test_a_connection_that_fails_is_a_death_and_what_runs_goes_on(door: Door, fault: Fault) -> None:
    num_restarts = door.llm.num_restarts
    expected = [token_id for output in door.run(door.outputs("a", LONG)) for token_id in output.outputs[0].token_ids]
    with inject(fault) as injected:
        outputs = door.run(door.outputs("a", LONG))
    assert injected.num_fired == 1
    assert [token_id for output in outputs for token_id in output.outputs[0].token_ids] == expected
    assert door.llm.num_restarts == num_restarts + 1


def test_a_text_that_cannot_be_encoded_is_one_requests_failure(door: Door) -> None:
    with inject(Fault("tokenizer.encode")), pytest.raises(RequestFailedError, match="when it was added"):
        door.run(door.outputs("bad", LONG))
    with inject(Fault("tokenizer.encode")), pytest.raises(RequestFailedError, match="when it was added"):
        door.run(door.llm.score_tokens("a", "b", request_id="score"))
    assert door.run(door.outputs("good", LONG))[-1].finished


@pytest.mark.parametrize(("point", "after"), [("detokenizer.append", 3), ("detokenizer.text", 0)])
def test_a_text_that_cannot_be_made_is_one_requests_failure(door: Door, point: str, after: int) -> None:
    """A slow reader gets all tokens as one text, so that the first may be the only one."""
    expected = door.run(door.outputs("good", LONG))
    with (
        inject(Fault(point, after=after)) as injected,
        pytest.raises(RequestFailedError, match="when its output was made"),
    ):
        door.run(door.outputs("bad", LONG))
    assert injected.num_fired == 1
    again = door.run(door.outputs("good", LONG))
    assert "".join(each.outputs[0].text for each in again) == "".join(each.outputs[0].text for each in expected)


def token_ids(outputs: list[RequestOutput]) -> list[int]:
    """Of a stream's deltas."""
    return [token_id for output in outputs for token_id in output.outputs[0].token_ids]


class Broken:
    """A detokenizer of which nothing can be had any more."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


async def beside_a_bad_one(door: Door, spoil: Callable[[RequestState], None]) -> list[list[int]]:
    """What is told of four requests, with one before them in every frame that is spoilt when all have begun."""
    num_before = len(door.record.of("start"))
    bad = door.llm.generate("bad", LONGER, request_id="bad")
    await anext(bad)
    others = asyncio.create_task(door.all_outputs([(f"good {i}", LONG) for i in range(4)]))
    await door.record.until(lambda: len(door.record.of("start")) == num_before + 5)
    (request,) = (r for r in door.llm._requests.tables[0].requests.values() if r.message.request_id == "bad")
    spoil(request)
    with pytest.raises(RequestFailedError, match="when its output was made"):
        async for _ in bad:
            pass
    return [token_ids(outputs) for outputs in await others]


def raises(*_: object, **__: object) -> Any:
    raise KeyError("planted")


def test_a_text_that_cannot_be_made_again_costs_no_other_request_a_token(door: Door) -> None:
    def spoil(request: RequestState) -> None:
        request.samples[0].detokenizer = Broken()  # type: ignore[assignment]

    alone = door.run(door.all_outputs([(f"good {i}", LONG) for i in range(4)]))
    num_ended = len(door.record.of("end"))
    assert door.run(beside_a_bad_one(door, spoil)) == [token_ids(outputs) for outputs in alone]
    assert [event[1] for event in door.record.of("end")[num_ended:] if event[0] == "bad"] == ["error"]


def test_a_message_that_cannot_be_taken_is_brought_again(door: Door) -> None:
    def spoil(request: RequestState) -> None:
        def abort() -> None:
            del request.abort  # type: ignore[method-assign]
            raises()

        request.update = raises  # type: ignore[method-assign]
        request.abort = abort  # type: ignore[method-assign]

    num_restarts = door.llm.num_restarts
    alone = door.run(door.all_outputs([(f"good {i}", LONG) for i in range(4)]))
    assert door.run(beside_a_bad_one(door, spoil)) == [token_ids(outputs) for outputs in alone]
    assert door.llm.num_restarts == num_restarts + 1


def test_samples_and_grammars_that_fail_in_the_engine_say_why() -> None:
    engine = LLM(num_gpu_blocks_override=64, max_model_len=96, num_threads=1).engine
    door = Door(make=lambda: local_llm(engine, iter(())))
    params = SamplingParams(n=3, max_tokens=4, bad_words=["the"])
    with inject(Fault("sampler.row")), pytest.raises(RequestFailedError, match="its token could not be drawn"):
        door.run(door.outputs("bad", params))
    params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(choice=["yes"]))
    with inject(Fault("grammar.compile")), pytest.raises(RequestFailedError, match="when its grammar was compiled"):
        door.run(door.outputs("bad", params))
    assert door.run(door.outputs("good", params))[-1].finished
    door.close()


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault("trial.send", "write", error="ENOSPC"), OSError),
        (Fault("trial.receive"), RuntimeError),
    ],
    ids=lambda value: value.point if isinstance(value, Fault) else "",
)
def test_a_trial_that_fails_is_one_grammars_matter(fault: Fault, error: type[Exception]) -> None:
    trial = TrialProcess(TrialSettings(1000, {0: "<end>"}))
    first = trial.check(StructuredOutputsParams(regex="a+"))
    with inject(fault), pytest.raises(error):
        trial.check(StructuredOutputsParams(regex="b+"))
    assert trial.check(StructuredOutputsParams(regex="a+")) == first
    trial.close()


# HTTP


@pytest.fixture
def served() -> Server:
    """The application with all that stands around it, over a model that recites."""
    llm, _ = scripted_llm()
    server = serve(llm.engine, args=ServerArgs())
    server.model.llm = ListenedLLM(llm.engine)
    gate = DrainGate(request_timeout_s=None, drain_timeout_s=1)
    server.app = build_app(server.state, gate, ApiKeys.load(server.state.args, {}))
    return server


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "fault",
    [
        Fault("http.send", error="ECONNRESET"),
        Fault("http.send", subject="http.response.body"),
        Fault("http.send", subject="http.response.body", after=2),
        Fault("http.receive", error="ECONNRESET"),
        Fault("http.receive", subject="http.request"),
    ],
    ids=lambda fault: f"{fault.point} {fault.subject} {fault.after}",
)
def test_a_client_that_cannot_be_reached_ends_its_own_request(served: Server, fault: Fault, stream: bool) -> None:
    body = {"prompt": "a", "max_tokens": 20, "ignore_eos": True, "stream": stream}

    async def ask() -> list[Any]:
        asked = [served.request("POST", "/v1/completions", json.dumps(body).encode()) for _ in range(2)]
        return await asyncio.gather(*asked, return_exceptions=True)

    def texts(answer: Any) -> list[str]:
        bodies = answer.events if stream else [answer.json]
        return [choice["text"] for body in bodies for choice in body["choices"]]

    alone = served.post("/v1/completions", body)
    with inject(fault) as injected:
        answers = asyncio.run(ask())
    if not stream and fault.after:
        assert injected.num_fired == 0, "whole answers have one part"
        return
    assert injected.num_fired == 1
    whole = [a for a in answers if not isinstance(a, Exception) and a.status == 200 and a.is_complete]
    assert [texts(answer) for answer in whole] == [texts(alone)]
    assert not served.engine.has_unfinished_requests()
    assert served.engine.stats().num_used_blocks == 0
    assert served.post("/v1/completions", body).status == 200


# Files


def test_a_response_that_cannot_be_stored_leaves_the_others_as_they_are(tmp_path: Any) -> None:
    store = ResponseStore(
        tmp_path / "store", max_responses=10, max_bytes=10_000, fail=lambda response, reason: response
    )
    first, second = (StoredResponse(name, None, False, b"x", b"[]") for name in ("one", "two"))
    asyncio.run(store.add("a", first))
    for action in (store.add("a", second), store.delete("a", "one")):
        reason = "^the disk is full: the response store was not changed; free space on it$"
        with inject(Fault("store.write", error="ENOSPC")), pytest.raises(StoreError, match=reason):
            asyncio.run(action)
    assert asyncio.run(store.get("a", "one")) == first
    assert asyncio.run(store.get("a", "two")) is None
    asyncio.run(store.add("a", second))
    assert asyncio.run(store.get("a", "two")) == second
    store.close()


@pytest.mark.parametrize("action", ["raise", "write"])
@pytest.mark.parametrize(("max_in_flight", "place"), [(1, 4), (4, 1), (4, 3), (4, 9)])
def test_a_batch_goes_on_where_the_disk_was_full(tmp_path: Any, action: Any, max_in_flight: int, place: int) -> None:
    """The first line tells the input, the six behind it the answers; then the output is written."""
    batch = Batch(tmp_path)
    batch.write(*(line(i) for i in range(6)))
    fault = Fault("batch.write", action, error="ENOSPC", after=place)
    with inject(fault), pytest.raises(QuireError, match=r"No space left.*--resume"):
        batch.run(max_in_flight=max_in_flight)
    num_failed, num_asked = batch.run(resume=True)
    assert num_failed == 0
    assert (num_asked == 0) == (place > 6)
    assert [(row["custom_id"], row["response"]["body"]["echo"]["i"]) for row in batch.rows] == [
        (f"line-{i}", i) for i in range(6)
    ]


def test_a_log_that_cannot_be_written_stops_nothing(
    served: Server, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    log, other = logging.getLogger("quire"), logging.getLogger("uvicorn.error")
    monkeypatch.setattr(logging, "captureWarnings", lambda on: None)
    for logger in (log, other, *map(logging.getLogger, LIBRARIES)):
        monkeypatch.setattr(logger, "handlers", [])
        monkeypatch.setattr(logger, "propagate", True)
        monkeypatch.setattr(logger, "level", logger.level)
    monkeypatch.setattr(log, "disabled", False)
    set_up_logging("text")
    monkeypatch.setattr(logging, "raiseExceptions", False)
    body = {"prompt": "a", "max_tokens": 2}
    with inject(Fault("log.write", "write", error="ENOSPC", times=None)) as injected:
        assert served.post("/v1/completions", body).status == 200
    assert injected.num_fired > 0
    assert served.post("/v1/completions", body).status == 200
    assert "POST /v1/completions 200" in capfd.readouterr().err
