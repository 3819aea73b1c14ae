"""What programs that step vLLM's LLMEngine themselves call."""

import math

import pytest

from quire import InvalidParamsError, LLMEngine, SamplingParams
from quire.engine.requests.sequence import SequenceStatus

from .failing import add, check_nothing_is_held, make_engine, run, token_ids

pytestmark = pytest.mark.usefixtures("quiet")

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)


def test_several_requests_are_aborted_and_counted():
    engine = make_engine()
    for name in "abcd":
        add(engine, name, [3] * 3)
    assert engine.get_num_unfinished_requests() == 4
    engine.step()
    assert engine.abort_request(["a", "c", "unknown"]) is None
    assert engine.get_num_unfinished_requests() == 2
    assert run(engine).keys() == {"b", "d"}
    assert not engine.has_unfinished_requests()


def test_a_priority_may_be_given_with_a_request():
    engine = make_engine(scheduling_policy="priority", max_num_seqs=1)
    for name, priority in [("later", 5), ("first", -1), ("second", None)]:
        engine.add_request(name, [3] * 3, GREEDY, priority=priority)
    assert list(run(engine)) == ["first", "second", "later"]
    assert GREEDY.priority == 0
    with pytest.raises(InvalidParamsError, match=r"priority=1\.5: must be a 32-bit integer"):
        engine.add_request("a", [3] * 3, GREEDY, priority=1.5)


@pytest.mark.parametrize("arrival_time", [math.nan, math.inf, "now"])
def test_a_time_of_arrival_is_a_finite_number(arrival_time):
    engine = make_engine()
    with pytest.raises(InvalidParamsError, match=r"arrival_time=.*: must be a finite number of seconds"):
        engine.add_request("a", [3] * 3, GREEDY, arrival_time=arrival_time)
    assert not engine.has_unfinished_requests()


@pytest.mark.parametrize("num_steps", range(6))
def test_requests_in_the_host_tier_compute_their_tokens_again_after_a_reset(num_steps):
    def crowded() -> LLMEngine:
        engine = make_engine(num_blocks=8, num_host_blocks=30, preemption_mode="swap")
        for i in range(5):
            add(engine, str(i), [i + 3] * 7, max_tokens=10, n=1 + i % 2)
        return engine

    expected, engine = run(crowded()), crowded()
    while not engine.requests.swapped:
        engine.step()
    for _ in range(num_steps):
        engine.step()
    assert engine.reset_prefix_cache(reset_running_requests=True)
    assert (engine.stats().num_running, engine.stats().num_swapped, engine.stats().num_used_blocks) == (0, 0, 0)
    assert engine.blocks.tiers.pools[1].num_free_blocks == 30
    assert {seq.status for _, seq in engine.requests.owners.values()} == {SequenceStatus.WAITING}
    engine.executor.slots[:] = engine.executor.host_slots[:] = -1
    outputs = run(engine)
    assert all(token_ids(output) == token_ids(expected[name]) for name, output in outputs.items())
    check_nothing_is_held(engine)
