"""AsyncLLM.encode: the vectors of LLM, also if engines die meanwhile."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import (
    LLM,
    EngineDeadError,
    InvalidParamsError,
    InvalidPromptError,
    LoRARequest,
    PoolingParams,
    PromptTooLongError,
    RequestError,
    RequestFailedError,
    SamplingParams,
)
from quire.engine.process import messages
from tests.async_llm.door import Door
from tests.async_llm.local_engine import local_llm
from tests.models.adapters import make_tensors, tiny_sizes, write_adapter
from tests.server.in_process import Server, state_over

from .models import BROKEN, NAN, TinyEmbedder, TinyEncoder, made_llm

TEXTS = ["Once upon a time", "def f(x):", "a", "The old house stood on the hill", "b c d"]


class PoolingDoor(Door):
    """Over an engine in a thread, which dies when it is told; `oracle` computes the same texts."""

    def __init__(self, engine: LLM, oracle: LLM, *, holds: bool = True) -> None:
        self.deaths: list[int | None] = []
        self.oracle = oracle
        super().__init__(make=lambda: local_llm(engine.engine, self._lives(), holds=holds))

    def _lives(self) -> Iterator[int | None]:
        while True:
            yield self.deaths.pop(0) if self.deaths else None

    def die_after(self, *num_frames: int | None) -> None:
        self.llm.group.engines[0]._client._num_left, *self.deaths = num_frames

    async def encode(self, prompt: Any, **params: Any) -> Any:
        [output] = [output async for output in self.llm.encode(prompt, PoolingParams(**params), self.new_id())]
        return output

    async def many(self, prompts: list[Any], **params: Any) -> Any:
        return await self.llm.encode_many(prompts, PoolingParams(**params), [self.new_id() for _ in prompts])

    def sent(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """The messages to the engine from now on."""
        client, sent = self.llm.group.engines[0]._client, []
        send = client.send
        monkeypatch.setattr(client, "send", lambda message: (sent.append(message), send(message)))
        return sent

    async def all(self, prompts: list[Any], **params: Any) -> list[Any]:
        return await asyncio.gather(*(self.encode(prompt, **params) for prompt in prompts), return_exceptions=True)


@pytest.fixture(scope="module", params=[TinyEncoder, TinyEmbedder])
def door(request: pytest.FixtureRequest) -> Iterator[PoolingDoor]:
    with made_llm(request.param, max_num_seqs=2) as oracle, made_llm(request.param, max_num_seqs=2) as llm:
        made = PoolingDoor(llm, oracle)
        yield made
        made.close()


@pytest.mark.parametrize("task", ["embed", "token_embed", "classify", "score"])
def test_the_vectors_are_those_of_llm(door: PoolingDoor, task: str) -> None:
    expected = door.oracle.encode(TEXTS, pooling_task=task, use_tqdm=False)
    for output, other in zip(door.run(door.all(TEXTS, task=task)), expected, strict=True):
        assert np.array_equal(output.outputs.data, other.outputs.data)
        assert output.outputs.data.dtype == np.float32
        assert output.prompt_token_ids == other.prompt_token_ids
        assert output.finished
    assert all("stop" in event for event in door.record.of("end")[-len(TEXTS) :])


def test_texts_and_pairs_are_tokenized_together_and_errors_take_their_places(door: PoolingDoor) -> None:
    params = PoolingParams(task="embed")
    given = ["a", "word " * 100, ("a", "b"), [7, 8], {"prompt_token_ids": 5}, {"prompt": "a", "cache_salt": "s"}]
    ids, error, pair, same, wrong, salted = door.run(door.llm.pooling_prompts(given, params))
    assert ids.token_ids == door.llm.tokenizer.encode("a")
    assert isinstance(error, PromptTooLongError)
    assert pair.token_ids == [*door.llm.tokenizer.encode("a"), *door.llm.tokenizer.encode("b")]
    assert pair.token_type_ids == (0, 1)
    assert same.token_ids == [7, 8]
    assert isinstance(wrong, InvalidPromptError)
    assert salted.cache_salt == "s"
    for prompt in ids, pair, same, salted:
        assert door.run(door.encode(prompt)).finished


def test_a_prompt_that_was_made_for_other_parameters_is_checked_again(door: PoolingDoor) -> None:
    params = PoolingParams(task="embed")
    pair, salted = door.run(door.llm.pooling_prompts([("a", "b"), {"prompt": "a", "cache_salt": "s"}], params))
    params.truncate_prompt_tokens = 1
    assert door.run(door.encode(pair)).prompt_token_ids == pair.token_ids
    (cut,) = door.run(door.llm.encode_many([pair], params, [door.new_id()]))
    assert cut.prompt_token_ids == pair.token_ids[-1:]
    with pytest.raises(InvalidParamsError, match="they differ"):
        door.run(door.encode(salted, cache_salt="t"))


def test_vllms_arguments_for_the_tokenizer_are_those_of_llm(door: PoolingDoor) -> None:
    async def encode(prompt: Any, **given: Any) -> Any:
        params = PoolingParams(task="embed")
        (output,) = [output async for output in door.llm.encode(prompt, params, door.new_id(), **given)]
        return output

    text = "word " * 100
    for arguments in ({"truncate_prompt_tokens": 5, "add_special_tokens": False}, {"truncation": True}, {}):
        prompt = text if arguments else "a b"
        (expected,) = door.oracle.embed(prompt, tokenization_kwargs=arguments, use_tqdm=False)
        output = door.run(encode(prompt, tokenization_kwargs=arguments, priority=1))
        assert output.prompt_token_ids == expected.prompt_token_ids
        assert list(output.outputs.data) == expected.outputs.embedding
    for prompt, given, wrong in (
        (text, {}, PromptTooLongError),
        ("a", {"stride": 3}, InvalidParamsError),
        (5, {"truncation": True}, InvalidPromptError),
    ):
        with pytest.raises(wrong):
            door.run(encode(prompt, tokenization_kwargs=given))


def test_what_is_wrong_is_refused_before_it_is_sent(door: PoolingDoor) -> None:
    with pytest.raises(PromptTooLongError):
        door.run(door.encode("word " * 100))
    with pytest.raises(InvalidParamsError, match="this model has"):
        door.run(door.encode("a", task="token_classify"))
    with pytest.raises(RequestError, match="cannot generate"):
        door.run(door.outputs("a", SamplingParams()))
    with pytest.raises(InvalidParamsError, match="must be PoolingParams"):
        door.run(anext(door.llm.encode("a", SamplingParams(), "x")))  # type: ignore[arg-type]


def test_a_text_whose_vector_is_not_finite_fails_and_others_do_not(door: PoolingDoor) -> None:
    fine, bad, broken = door.run(door.all([[7, 8], [7, NAN], [7, BROKEN]]))
    assert fine.finished
    assert isinstance(bad, RequestFailedError)
    assert "not finite" in str(bad)
    assert isinstance(broken, RequestFailedError)


def test_closing_the_generator_aborts_the_request(door: PoolingDoor) -> None:
    async def begin() -> None:
        tasks = [asyncio.ensure_future(door.encode([7, 8, 9 + i])) for i in range(10)]
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await door.drained()

    door.run(begin())
    assert len(door.record.of("start")) == len(door.record.of("end"))


def test_many_texts_cross_in_few_messages(door: PoolingDoor, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts: list[Any] = [[10 + i % 30, 11, 12 + i % 7] for i in range(150)]
    expected = door.oracle.encode(prompts, use_tqdm=False)
    sent = door.sent(monkeypatch)
    outputs = door.run(door.many(prompts))
    assert [len(message.requests) for message in sent] == [64, 64, 22]
    for output, other in zip(outputs, expected, strict=True):
        assert np.array_equal(output.outputs.data, other.outputs.data)
        assert output.prompt_token_ids == other.prompt_token_ids


def test_one_of_many_fails_and_the_others_are_aborted_in_one_message(
    door: PoolingDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = door.sent(monkeypatch)
    with pytest.raises(RequestFailedError, match="not finite"):
        # so many that the engine cannot have answered all of them before the first answer is read
        door.run(door.many([[7, NAN], *([7, 8 + i % 40] for i in range(1000))]))
    door.run(door.drained())
    (abort,) = [message for message in sent if isinstance(message, messages.Abort)]
    assert 0 < len(abort.request_ids) <= 1000
    with pytest.raises(InvalidPromptError):
        door.run(door.many([*([7, 8 + i] for i in range(70)), [10**6]]))
    door.run(door.drained())
    assert len(door.record.of("start")) == len(door.record.of("end"))


def test_many_texts_of_a_cancelled_call_are_aborted_in_one_message(
    door: PoolingDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def cancel() -> None:
        task = asyncio.ensure_future(door.many([[7, 8, 9 + i] for i in range(60)]))
        while not sent:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await door.drained()

    sent = door.sent(monkeypatch)
    door.run(cancel())
    assert [type(message) for message in sent] == [messages.AddMany, messages.Abort]
    assert len(door.record.of("start")) == len(door.record.of("end"))


def test_ids_in_use_are_refused(door: PoolingDoor) -> None:
    with pytest.raises(RequestError, match="in use"):
        door.run(door.llm.encode_many([[7], [8]], PoolingParams(), ["same", "same"]))


def test_another_tenant_does_not_wait_for_many_texts() -> None:
    async def both() -> None:
        many = asyncio.ensure_future(door.many([[7, 8, 9 + i % 50] for i in range(400)], tenant="bulk"))
        await door.record.until(lambda: bool(door.record.of("start")))
        await door.encode([7, 8], tenant="other")
        await many

    with made_llm(TinyEncoder, max_num_seqs=2, scheduling_policy="fair") as llm:
        door = PoolingDoor(llm, llm)
        door.run(both())
        ended = [event[0] for event in door.record.of("end")]
        door.close()
    assert ended.index("request-401") < 200


@pytest.mark.essential
@pytest.mark.parametrize("num_frames", [0, 1, 2])
def test_texts_are_computed_again_by_the_next_engine(door: PoolingDoor, num_frames: int) -> None:
    prompts = [[10 + i, 11, 12 + i] for i in range(9)]
    expected = door.oracle.encode(prompts, use_tqdm=False)
    before = door.llm.num_restarts
    door.die_after(num_frames)
    outputs, many = door.run(door.all(prompts)), door.run(door.many(prompts))
    for output, same, other in zip(outputs, many, expected, strict=True):
        assert np.array_equal(output.outputs.data, other.outputs.data)
        assert np.array_equal(same.outputs.data, other.outputs.data)
    assert door.llm.num_restarts == before + 1
    door.run(door.drained())


def test_texts_that_follow_others_wait_with_them_when_the_engine_dies() -> None:
    async def drain_until_it_is_dead() -> None:
        while door.llm.is_running:
            await asyncio.sleep(0)

    prompts: list[Any] = [[10 + i % 30, 11, 12 + i % 7] for i in range(150)]
    with made_llm(TinyEncoder, max_num_seqs=2) as llm, closing(PoolingDoor(llm, llm, holds=False)) as door:
        expected = door.run(door.many(prompts))
        door.die_after(0)
        door.llm.group.engines[0]._client.drain = drain_until_it_is_dead  # between two messages with texts
        outputs = door.run(door.many(prompts))
        assert door.llm.num_restarts == 1
        door.run(door.drained())
    for output, other in zip(outputs, expected, strict=True):
        assert np.array_equal(output.outputs.data, other.outputs.data)


def test_a_text_that_was_running_in_two_engines_that_died_fails(door: PoolingDoor) -> None:
    door.die_after(0, 0)
    outputs = door.run(door.all([[10, 11]]))
    assert isinstance(outputs[0], EngineDeadError)
    assert door.run(door.encode([10, 11])).finished


def test_vectors_pass_through_a_message_bit_by_bit() -> None:
    for array in np.float32([1e-40, -0.0, 3.5]), np.zeros((0,), np.float32), np.ones((2, 3), np.float32):
        vectors = messages.Vectors.pack(array)
        assert vectors.unpack().tobytes() == array.tobytes()
        assert vectors.unpack().shape == array.shape
    assert messages.Vectors.pack(None) is None


@pytest.fixture
def adapted(tmp_path: Path) -> Iterator[tuple[PoolingDoor, LoRARequest]]:
    """A decoder that pools, and an adapter that it knows and that its engine has not loaded."""
    with made_llm(TinyEmbedder, enable_lora=True) as llm, closing(PoolingDoor(llm, llm)) as door:
        tensors = make_tensors(tiny_sizes(llm.engine.model_config), 2)
        adapter = LoRARequest("ax", 1, str(write_adapter(tmp_path / "ax", tensors, r=2, lora_alpha=2)))
        door.run(door.llm.add_lora(adapter))
        yield door, adapter
        door.run(door.drained())


def test_an_adapter_that_cannot_be_loaded_fails_its_texts(adapted: tuple[PoolingDoor, LoRARequest]) -> None:
    door, adapter = adapted
    shutil.rmtree(adapter.lora_path)
    for prompts in ([[7, 8]], [[7, 8], [7, 9]]):
        ids = [door.new_id() for _ in prompts]
        with pytest.raises(RequestError, match="adapter 'ax' could not be loaded"):
            door.run(door.llm.encode_many(prompts, PoolingParams(), ids, lora_request=adapter))
    assert [event[1] for event in door.record.of("end")] == ["error"] * 3
    assert door.run(door.encode([7, 8])).error is None

    server = Server(state_over(door.llm, "base"))
    for path, body in (
        ("/v1/embeddings", {"input": ["a", "b"]}),
        ("/pooling", {"input": "a", "encoding_format": "bytes"}),
        ("/classify", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/v2/embed", {"texts": ["a"]}),
        ("/api/embed", {"input": "a"}),
    ):
        answer = door.run(server.request("POST", path, json.dumps({"model": "ax"} | body).encode()))
        assert (answer.status, b"adapter 'ax' could not be loaded" in answer.body) == (400, True), answer.body


def test_vectors_that_are_too_many_for_a_message_fail_their_text(
    door: PoolingDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "MAX_FRAME_BYTES", 3000)
    with pytest.raises(RequestError, match="too many to be sent"):
        door.run(door.encode([7] * 40, task="token_embed"))
    assert door.run(door.encode([7, 8])).error is None
    door.run(door.drained())


def test_a_text_that_is_aborted_says_so_and_the_others_are_computed(
    door: PoolingDoor, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def encode() -> list[Any]:
        task = asyncio.ensure_future(door.llm.encode_many([[7, 8]] * 30, PoolingParams(), ids))
        while not sent:
            await asyncio.sleep(0)
        await door.llm.abort(ids[-1])  # two run in a step
        return await task

    sent, ids = door.sent(monkeypatch), [door.new_id() for _ in range(30)]
    *others, aborted = door.run(encode())
    assert (aborted.error, aborted.finished, aborted.outputs.data.size) == ("the request was aborted", True, 0)
    assert all(other.error is None and other.outputs.data.size for other in others)
    door.run(door.drained())


@pytest.mark.parametrize("num_ids", [0, 1, 69, 71])
def test_another_number_of_ids_is_refused_before_any_text_is_sent(door: PoolingDoor, num_ids: int) -> None:
    num_started = len(door.record.of("start"))
    with pytest.raises(RequestError, match=f"{num_ids} request_ids for 70 prompts"):
        door.run(door.llm.encode_many([[7, 8]] * 70, PoolingParams(), [door.new_id() for _ in range(num_ids)]))
    assert len(door.record.of("start")) == num_started
