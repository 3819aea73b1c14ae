"""LLM's cache: pinned prefixes, salts, prefixes that are forgotten, memory that is given back."""

import weakref

import pytest

from quire import LLM, SamplingParams
from quire.common.errors import InvalidPromptError, RequestError
from tests.scripted_engine import scripted_llm

GREEDY = SamplingParams(temperature=0, max_tokens=50)


def test_a_pinned_prefix_stays_until_it_is_unpinned() -> None:
    llm, executor = scripted_llm(num_gpu_blocks_override=12, max_model_len=160, pinned_fraction=0.5)
    prefix = [5] * 70
    pin = llm.pin_prefix(prefix)
    assert (pin.num_tokens, pin.num_blocks) == (70, 5)
    num_steps = executor.num_steps
    for i in range(6):  # enough to evict all else
        llm.generate([10 + i] * 100, GREEDY, use_tqdm=False)
    assert llm.generate([*prefix, 6], GREEDY, use_tqdm=False)[0].num_cached_tokens == 70
    assert executor.num_steps > num_steps
    with pytest.raises(RequestError, match=r"takes 4 more blocks, and 5 of at most 6 are pinned"):
        llm.pin_prefix([7] * 64)
    assert llm.engine.stats().num_pinned_blocks == 5
    llm.unpin_prefix(pin)
    assert llm.engine.stats().num_used_blocks == 0
    with pytest.raises(RequestError, match="pin 0 is unknown"):
        llm.unpin_prefix(pin)
    with pytest.raises(RequestError, match="pin=None: must be the PinnedPrefix that pin_prefix returned"):
        llm.unpin_prefix(None)  # type: ignore[arg-type]


def test_pinning_needs_the_prefix_cache() -> None:
    llm, _ = scripted_llm(enable_prefix_caching=False)
    with pytest.raises(RequestError, match="enable_prefix_caching"):
        llm.pin_prefix([5] * 20)


def test_requests_of_different_salts_share_nothing(llm: LLM) -> None:
    def cached(salt: str) -> int:
        prompt = {"prompt_token_ids": [77] * 40, "cache_salt": salt}
        return llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens

    assert [cached("a"), cached("b"), cached("a"), cached("b")] == [0, 0, 39, 39]
    with pytest.raises(InvalidPromptError, match="cache_salt=3: must be a Unicode string"):
        llm.generate({"prompt": "Hi", "cache_salt": 3})


def test_cached_prefixes_can_be_forgotten_but_not_pinned_ones(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2)
    pinned, other = list(range(10, 90)), list(range(100, 180))
    pin = llm.pin_prefix(pinned)
    llm.generate(other, params)
    assert llm.generate(other, params)[0].num_cached_tokens > 64
    llm.engine.add_request("running", other, params)
    assert not llm.reset_prefix_cache()
    llm.engine.abort_request("running")
    assert llm.reset_prefix_cache()
    llm.engine.blocks.check_integrity()
    assert llm.generate(other, params)[0].num_cached_tokens == 0
    assert llm.generate(pinned, params)[0].num_cached_tokens > 64
    llm.unpin_prefix(pin)


def test_a_sleeping_engine_gives_its_memory_back_and_wakes_up_the_same() -> None:
    llm = LLM(model="quire-tiny", max_model_len=256, kv_cache_memory="64MiB")
    params = SamplingParams(temperature=0, max_tokens=8)
    before = llm.generate("What does", params)
    llm.pin_prefix(list(range(10, 90)))
    llm.engine.add_request("running", "a", params)
    with pytest.raises(RequestError, match="cannot sleep while requests run"):
        llm.sleep()
    llm.engine.abort_request("running")
    cache = weakref.ref(llm.engine.executor.cache_engine)
    llm.sleep(level=1)
    assert cache() is None
    assert llm.engine.stats().num_used_blocks == 0
    assert [llm.engine.step() for _ in range(10)] == [[]] * 10
    with pytest.raises(RequestError, match="the engine sleeps"):
        llm.generate("What does", params)
    with pytest.raises(RequestError, match="the engine sleeps"):  # and no list of ignored prompts
        llm.generate(["What does", "a"], params)
    assert llm.engine.is_sleeping()
    llm.wake_up()
    llm.wake_up(tags=["weights"])
    assert not llm.engine.is_sleeping()
    llm.engine.sleep(2)
    llm.engine.wake_up(["kv_cache"])
    after = llm.generate("What does", params)
    assert [output.outputs[0].token_ids for output in after] == [output.outputs[0].token_ids for output in before]
    assert after[0].num_cached_tokens == 0
    llm.engine.blocks.check_integrity()
