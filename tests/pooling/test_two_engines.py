"""Many texts over two engines: each gets its part in one message, and what was refused leaves nothing behind."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from quire import LLM, InvalidParamsError, PoolingParams
from quire.engine.process import messages
from tests.async_llm.door import Door
from tests.async_llm.local_engine import local_llm

from .models import TinyEmbedder, made_llm

PROMPTS: list[Any] = [[10 + i % 30, 11, 12 + i % 7, *range(20, 20 + i % 5)] for i in range(60)]


class TwoEngines(Door):
    """Over two engines in threads."""

    def __init__(self, first: LLM, second: LLM) -> None:
        super().__init__(make=lambda: local_llm(first.engine, iter(()), second.engine))

    async def many(self, prompts: list[Any]) -> Any:
        return await self.llm.encode_many(prompts, PoolingParams(), [self.new_id() for _ in prompts])

    def sent(self, monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
        """By engine, the messages from now on."""
        sent: list[list[Any]] = []
        for engine in self.llm.group.engines:
            sent.append([])
            send, found = engine._client.send, sent[-1]
            monkeypatch.setattr(engine._client, "send", lambda m, send=send, found=found: (found.append(m), send(m)))
        return sent

    def is_clean(self) -> bool:
        requests, loads = self.llm._requests, self.llm._requests._router.loads.values()
        assert all(load.num_queued == load.num_running == 0 for load in loads)
        return not requests._request_ids and not any(table.requests for table in requests.tables)


@pytest.fixture(scope="module")
def door() -> Iterator[TwoEngines]:
    with made_llm(TinyEmbedder, max_num_seqs=4) as first, made_llm(TinyEmbedder, max_num_seqs=4) as second:
        made = TwoEngines(first, second)
        yield made
        made.close()


@pytest.fixture(scope="module")
def oracle() -> Iterator[LLM]:
    with made_llm(TinyEmbedder) as llm:
        yield llm


def test_many_texts_are_shared_in_one_message_for_each_engine(
    door: TwoEngines, oracle: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = oracle.encode(PROMPTS, use_tqdm=False)
    sent = door.sent(monkeypatch)
    outputs = door.run(door.many(PROMPTS))
    added = [[message for message in found if isinstance(message, messages.AddMany)] for found in sent]
    assert [len(found) for found in added] == [1, 1]
    tokens = [sum(len(request.token_ids) for request in found[0].requests) for found in added]
    assert max(tokens) <= 1.1 * min(tokens)
    for output, other in zip(outputs, expected, strict=True):
        assert np.array_equal(output.outputs.data, other.outputs.data)
    assert door.is_clean()


def test_what_one_engine_received_is_aborted_if_another_refuses_its_part(
    door: TwoEngines, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = door.sent(monkeypatch)
    client = door.llm.group.engines[1]._client
    send = client.send

    def refuse(message: Any) -> None:
        if isinstance(message, messages.AddMany):
            raise messages.ProtocolError("too large")
        send(message)

    with monkeypatch.context() as patched:
        patched.setattr(client, "send", refuse)
        with pytest.raises(InvalidParamsError, match="cannot be sent to the engine: too large"):
            door.run(door.many(PROMPTS))
    assert door.is_clean()
    received = {
        request.request_id for message in first if isinstance(message, messages.AddMany) for request in message.requests
    }
    aborted = {
        request_id for message in first if isinstance(message, messages.Abort) for request_id in message.request_ids
    }
    assert received
    assert received <= aborted
    assert not any(isinstance(message, messages.AddMany) for message in second)
    door.run(door.drained())
    assert len(door.run(door.many(PROMPTS[:5]))) == 5


def test_texts_of_a_cancelled_call_leave_nothing_in_either_engine(door: TwoEngines) -> None:
    async def cancel() -> None:
        task = asyncio.ensure_future(door.many(PROMPTS))
        while not door.llm._requests._request_ids:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await door.drained()

    door.run(cancel())
    assert door.is_clean()
