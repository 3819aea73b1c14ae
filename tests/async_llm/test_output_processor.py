"""How outputs are made, where nobody else may be kept waiting."""

import asyncio
from types import SimpleNamespace
from typing import Any

from quire.engine.process.messages import AddScoring
from quire.engine.requests.logprobs import LogprobRows
from quire.interfaces.async_llm.output_processor import RequestState
from tests.scripted_engine import logprobs


def test_others_have_their_turn_while_many_logprobs_are_made() -> None:
    rows = [LogprobRows(str), LogprobRows(str)]
    for each in rows:
        each.extend(logprobs(range(1000), 1))
    seqs = [SimpleNamespace(logprobs=each, status=SimpleNamespace(is_finished=True)) for each in rows]
    group: Any = SimpleNamespace(request_id="a", search=None, scores=None, seqs=seqs, to_output=lambda: "the output")
    message = AddScoring(1, "a", [5, 6], 1, "")
    request = RequestState(message, group, SimpleNamespace(eos_token_ids=frozenset()))  # type: ignore[arg-type]

    async def main() -> int:
        making, turns = asyncio.create_task(request.next_output()), 0
        request._changed.set()
        while not making.done():
            turns += 1
            await asyncio.sleep(0)
        assert making.result() == "the output"
        return turns

    assert asyncio.run(main()) > 20
