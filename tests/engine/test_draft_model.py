"""Another model drafts, with keys and values in the same blocks: outputs stay the same, whatever happens to blocks."""

import json
import random
import shutil
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, EngineArgs, SamplingParams
from quire.common.batch import (
    Ahead,
    Batch,
    Correction,
    Drafted,
    Draw,
    DrawnRows,
    ScheduledSequence,
    StepResult,
    decode,
    encode,
)
from quire.common.errors import ConfigError, OutOfMemoryError
from quire.common.faults import Fault, inject
from quire.config.checkpoint.location import EMBEDDED_ROOT
from quire.config.kv_cache import FullAttentionSpec, KVCacheGroup, LatentSpec, NoCacheSpec, SlidingWindowSpec
from quire.config.kv_layout import kv_cache_config, with_draft_layers
from quire.runner.draft_runner import Reading, with_room_of_rejected
from quire.runner.memory_plan import plan_memory
from quire.text.tokenizer.tokenizer import Tokenizer
from tests.speculation import heads

from .test_mixed_requests import any_params, any_prompt, told

VOCAB = 8192


def make(draft: str | None, *, k: int = 3, adaptive: bool = False, **arguments: object) -> LLM:
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": k, "adaptive": adaptive}
    settings = {"max_model_len": 128, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 48} | arguments
    return LLM(speculative_config=config if draft else {"method": "off"}, **settings)


def run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], preempts: bool = False) -> list:
    engine, done, rng = llm.engine, {}, random.Random(0)
    for i, (prompt, its_params) in enumerate(zip(prompts, params, strict=True)):
        engine.add_request(str(i), prompt, its_params)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[int(output.request_id)] = output
        engine.requests.check_integrity()
        if preempts and engine.requests.running and rng.random() < 0.1:
            engine.scheduler.preemptor.preempt(rng.choice(engine.requests.running))
    assert not engine.blocks.num_used_blocks
    return [done[i] for i in range(len(prompts))]


@pytest.mark.parametrize(
    "arguments",
    [{}, {"swap_space": 0.01, "preemption_mode": "swap"}, {"quantization": "int8", "kv_cache_dtype": "int8"}],
    ids=["bfloat16", "swapped", "int8"],
)
def test_requests_of_every_kind_get_what_they_get_without_a_draft_model(arguments):
    rng = random.Random(4)
    shared = [rng.randrange(3, VOCAB) for _ in range(40)]
    prompts = [any_prompt(rng, shared) for _ in range(40)]
    params = [any_params(rng) for _ in prompts]
    expected = run(make(None, **arguments), prompts, params)
    llm = make("quire-draft", num_gpu_blocks_override=200, max_num_batched_tokens=256, **arguments)
    assert [told(output) for output in run(llm, prompts, params, preempts=True)] == [told(one) for one in expected]
    assert llm.engine.scheduler.drafting.stats["model"].num_tokens > 60


def test_drafts_take_no_slots_that_another_request_may_need():
    prompts, params = [[5, 6, 7 + i] * 10 for i in range(2)], SamplingParams(temperature=0, max_tokens=30)
    arguments = {"num_gpu_blocks_override": 5, "max_model_len": 64}
    expected, found = (run(make(draft, **arguments), prompts, [params] * 2) for draft in (None, "quire-draft"))
    assert [told(output) for output in found] == [told(output) for output in expected]


class Same:
    """A model that drafts for itself: each draft must be right, or its keys and values are not those of its tokens."""

    def __init__(self, **arguments: object) -> None:
        self.llm = make("quire-tiny", **arguments)

    def check(self, prompts: list[list[int]], preempts: bool = False, **params: object) -> None:
        stats = self.llm.engine.scheduler.drafting.stats["model"]
        before = stats.num_tokens
        each = [SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, **params) for _ in prompts]
        run(self.llm, prompts, each, preempts)
        assert stats.num_tokens > before + 15 * len(prompts)
        assert stats.num_accepted == stats.num_tokens


@pytest.fixture(scope="module")
def same() -> Same:
    return Same(swap_space=0.01)


def numbers(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def test_drafts_are_right_behind_cached_prefixes_copied_tails_and_chunks(same):
    prompt = numbers(1, 90)
    same.check([prompt])
    same.check([prompt])
    same.check([[*prompt[:37], 5, 6], [*prompt[:37], 7], prompt[:64]])


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_drafts_are_right_after_preemptions(same, monkeypatch, mode):
    monkeypatch.setattr(same.llm.engine.scheduler.preemptor, "_mode", mode)
    same.check([numbers(seed, 30) for seed in range(10, 18)], preempts=True)


def test_penalties_and_bans_hold_for_drafts_too(same):
    same.check([numbers(2, 20)], presence_penalty=1.0, repetition_penalty=1.3, min_tokens=9, bad_words=["the"])


def test_each_sample_of_a_prompt_is_drafted_for(same):
    stats = same.llm.engine.scheduler.drafting.stats["model"]
    run(same.llm, [numbers(3, 21)], [SamplingParams(n=3, top_k=1, temperature=1.0, seed=1, max_tokens=30)])
    assert stats.num_accepted == stats.num_tokens


def test_what_it_has_not_read_is_read_when_drafts_are_wanted_again(same, monkeypatch):
    model, num_calls = same.llm.engine.scheduler.drafting.model, 0
    ahead = model.ahead

    def now_and_then(seq, reading, num_tokens, num_drafts, least_odds):
        nonlocal num_calls
        num_calls += 1
        return ahead(seq, reading, num_tokens, num_drafts if num_calls % 6 == 1 else 0, least_odds)

    monkeypatch.setattr(model, "ahead", now_and_then)
    stats = same.llm.engine.scheduler.drafting.stats["model"]
    before = stats.num_tokens
    run(same.llm, [numbers(7, 33)], [SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)])
    assert stats.num_tokens > before + 8
    assert stats.num_accepted == stats.num_tokens


def test_a_failure_of_the_draft_model_costs_the_drafts(same, quiet):
    prompt, params = numbers(8, 20), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (expected,) = run(same.llm, [prompt], [params])
    stats = same.llm.engine.scheduler.drafting.stats["model"]
    before = stats.num_tokens

    with inject(Fault("draft.model", times=None)):
        (output,) = run(same.llm, [prompt], [params])
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    assert stats.num_tokens == before


def test_drafts_end_with_the_context_and_with_max_tokens(same):
    prompts = [numbers(9, 110), numbers(9, 20)]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (18, 2)]
    outputs = run(same.llm, prompts, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [18, 2]


def test_it_drafts_until_the_next_draft_is_not_worth_its_time():
    sequence = ScheduledSequence(1, (5,), 3, (), DrawnRows((Draw(0.0, 0, 1.0, b""),), 0))

    def drafted(ahead: Ahead) -> int:
        reading = Reading(0, sequence, ahead, 0)
        return next(count for count, odds in enumerate([0.5] * 9, start=1) if not reading.take(7, odds))

    assert drafted(Ahead(4)) == 4
    assert drafted(Ahead(8, (), (0.9, 0.5, 0.2, 0.2))) == 3, "what it gave before asking does not matter"
    corrected = Ahead(8, (), (0.9, 0.5, 0.2, 0.2), correction=Correction(2.0))
    assert drafted(corrected) == 8, "the odds are twice as good as they say"


def test_rejected_drafts_make_room_for_others():
    sequence = ScheduledSequence(1, (5, 6, 7, 8), 3, (), DrawnRows((Draw(0.0, 0, 1.0, b""),), 0, 4))
    for num_more, expected in ((0, 1), (1, 2), (9, 3)):
        assert with_room_of_rejected(sequence, Ahead(1, num_more=num_more), (6, 9, 9, 9)).num_drafts == expected
    assert with_room_of_rejected(sequence, Ahead(1, num_more=9), (6, 7, 8, 9)).num_drafts == 1


def test_an_adaptive_engine_gives_the_same_and_drafts(same):
    llm = make("quire-tiny", adaptive=True)
    prompt, params = numbers(8, 20), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    (expected,), (output,) = run(same.llm, [prompt], [params]), run(llm, [prompt], [params])
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


# The cache

FULL = FullAttentionSpec(2, 64, "bfloat16")


def test_the_layers_of_a_draft_model_lie_in_the_blocks_of_the_first_group_that_keeps_enough():
    window, draft = SlidingWindowSpec(2, 64, "bfloat16", 16), FullAttentionSpec(1, 48, "bfloat16")
    groups = (KVCacheGroup((0,), window), KVCacheGroup((1,), FULL), KVCacheGroup((2,), LatentSpec(8, 8, "bfloat16")))
    assert [group.draft_specs for group in with_draft_layers(groups, [draft])] == [(), (draft,), ()]
    assert [group.draft_specs for group in with_draft_layers(groups, [window])] == [(window,), (), ()]
    with pytest.raises(ConfigError, match=r"layer 0 of the draft .* sees all tokens, but .* keep at most 16; choose"):
        with_draft_layers(groups[:1], [draft])
    with pytest.raises(ConfigError, match="choose another draft model"):
        with_draft_layers(groups, [NoCacheSpec()])
    plain, both = (kv_cache_config([FULL] * 2, 16, num_blocks=9, draft_specs=specs) for specs in ((), [draft]))
    assert both.block_bytes == plain.block_bytes + 16 * draft.bytes_per_token
    assert both.bytes_per_token == plain.bytes_per_token + draft.bytes_per_token


def test_the_plan_counts_the_draft_model(same):
    settings = {"max_model_len": 128, "num_gpu_blocks_override": 40, "max_num_batched_tokens": 48}
    alone = LLM(speculative_config={"method": "ngram", "num_speculative_tokens": 3}, **settings).engine.plan
    plan = same.llm.engine.plan
    assert plan.weight_bytes == 2 * alone.weight_bytes
    assert plan.activation_bytes == 2 * alone.activation_bytes
    assert plan.kv_cache.block_bytes == 2 * alone.kv_cache.block_bytes
    assert "drafts      by the draft model quire-tiny, counted" in str(plan)


def test_what_goes_to_a_draft_model_and_comes_from_it_can_be_sent():
    scheduled = ScheduledSequence(1, (5, 6), 3, (), ahead=Ahead(3, (7, 8), (0.25, 0.5)))
    assert decode(encode(Batch(1, (scheduled,))), Batch).sequences[0].ahead == scheduled.ahead
    result = StepResult((4,), drafted={0: Drafted((9, 9), (0.5, 0.25))}, drafting_s=0.125)
    assert decode(encode(result), StepResult) == result


# What is refused


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"method": "draft_model"}, "needs a model"),
        ({"method": "ngram", "model": "quire-draft"}, r"takes no model \(draft_model, eagle, eagle3, mtp do\)"),
        ({"method": "draft_model", "model": 3}, "model=3 must be of the type str"),
    ],
)
def test_a_draft_model_comes_with_its_method(config, message):
    with pytest.raises(ConfigError, match=message):
        LLM(speculative_config=config)


def test_a_model_that_pools_takes_no_draft_model():
    with pytest.raises(ConfigError, match="generates nothing"):
        LLM(runner="pooling", speculative_config={"method": "draft_model", "model": "quire-draft"})


def test_another_vocabulary_is_refused(monkeypatch):
    monkeypatch.setattr(Tokenizer, "vocabulary", property(lambda tokenizer: {str(id(tokenizer)): 0}))
    with pytest.raises(ConfigError, match="draft model quire-draft has other tokens than the model"):
        make("quire-draft")


def copied(path: Path, *, without: str = "") -> Path:
    """quire-draft in a folder of its own."""
    shutil.copytree(EMBEDDED_ROOT / "quire-draft", path, ignore=shutil.ignore_patterns(without))
    return path


def test_a_draft_model_needs_a_tokenizer_of_its_own(tmp_path):
    path = copied(tmp_path / "draft", without="tokenizer*")
    message = (
        f"^speculative_config: the draft model {path}: {path} has no tokenizer: .*must have one beside its weights$"
    )
    with pytest.raises(ConfigError, match=message):
        plan_memory(EngineArgs(tokenizer="quire-tiny", speculative_config={"model": str(path)}))


@pytest.mark.parametrize("has_tokenizer", [False, True])
def test_a_head_is_no_draft_model(tmp_path, has_tokenizer):
    path = heads.write(tmp_path / "head", heads.eagle(), heads.EAGLE_NAMES)
    if has_tokenizer:
        shutil.copy(EMBEDDED_ROOT / "quire-tiny" / "tokenizer.json", path)
    given = {"method": "draft_model", "model": str(path)}
    with pytest.raises(
        ConfigError, match=f"^speculative_config: {path} is a draft head, and no model; leave out 'meth"
    ):
        EngineArgs(speculative_config=given).resolve()
    del given["method"]
    assert EngineArgs(speculative_config=given).resolve().speculative.method == "eagle"


def test_a_draft_model_that_ranks_cannot_divide_is_named():
    args = EngineArgs(tensor_parallel_size=3, num_threads=1, speculative_config={"model": "quire-draft"})
    message = "^speculative_config: the draft model quire-draft: tensor_parallel_size=3: a layer has 2 attention heads"
    with pytest.raises(ConfigError, match=message):
        plan_memory(args)


@pytest.mark.parametrize(
    "limits", [{"memory_limit": "12MiB"}, {"kv_cache_memory": "1KiB"}, {"num_gpu_blocks_override": 1}]
)
def test_what_does_not_fit_names_the_share_of_the_drafts(tmp_path, limits):
    path = heads.write(tmp_path / "head", heads.eagle(), heads.EAGLE_NAMES)
    for model, name in (("quire-draft", "the draft model quire-draft"), (str(path), f"the eagle head of {path}")):
        given = {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 32, **limits}
        message = (
            rf"(memory|KV cache).*\. For drafts, {name} takes [\d.]+ MiB for weights .*; speculative_config=\{{'met"
        )
        with pytest.raises(OutOfMemoryError, match=message):
            plan_memory(EngineArgs(speculative_config={"model": model}, **given))
        with pytest.raises(OutOfMemoryError, match=r"^((?!For drafts).)*$"):
            plan_memory(EngineArgs(**given | {"memory_limit": "1MiB"}))


def test_a_draft_model_with_fewer_or_more_numbers_than_tokens(same, monkeypatch):
    """Checkpoints of one family pad their vocabularies to different sizes."""
    prompt = numbers(8, 20)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias={8191: -1.0})
    (expected,) = run(same.llm, [prompt], [params])
    runner = same.llm.engine.executor._drafts
    for sizes in ((VOCAB - 200, VOCAB), (VOCAB, VOCAB - 200)):
        monkeypatch.setattr(runner, "_vocab_sizes", sizes)
        (output,) = run(same.llm, [prompt], [params])
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """quire-tiny with 64 more numbers than tokens, with quire-tiny as the draft model."""
    source = EMBEDDED_ROOT / "quire-tiny"
    folder = tmp_path_factory.mktemp("padded") / "model"
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": VOCAB + 64}
    (folder / "config.json").write_text(json.dumps(config))
    for file in folder.glob("*.safetensors"):
        tensors = {
            name: torch.cat([x, x.new_zeros(64, *x.shape[1:])]) if len(x) == VOCAB else x
            for name, x in load_file(file).items()
        }
        save_file(tensors, file)
    return make("quire-tiny", model=str(folder))


@pytest.mark.parametrize(
    "about_last",
    [
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.5, "min_tokens": 8, "stop_token_ids": [VOCAB + 9]},
        {"logit_bias": {VOCAB + 9: -1.0}, "allowed_token_ids": [*range(1000), VOCAB + 9]},
        {"allowed_token_ids": [VOCAB + 9]},
    ],
)
def test_tokens_that_the_draft_model_lacks_cost_no_drafts(padded: LLM, about_last: dict[str, object]) -> None:
    """Of requests that name them, and of requests beside these."""
    prompts, drafting = [[*numbers(8, 19), VOCAB + 8], numbers(9, 20)], padded.engine.scheduler.drafting
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    before = drafting.stats["model"].num_tokens
    run(padded, prompts, [msgspec.structs.replace(params, **about_last), params])
    assert not drafting.num_errors
    assert drafting.stats["model"].num_tokens > before + 12


@pytest.mark.parametrize("num_seqs", [1, 2])
def test_drafts_are_verified_while_as_many_sequences_run_as_may(num_seqs):
    llm = make("quire-tiny", max_num_seqs=num_seqs)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    run(llm, [[5, 6, 7 + i] for i in range(num_seqs)], [params] * num_seqs)
    stats = llm.engine.scheduler.drafting.stats["model"]
    assert stats.num_accepted == stats.num_tokens > 10 * num_seqs
