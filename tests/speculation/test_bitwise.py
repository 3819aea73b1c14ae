"""Requests that ask for everything a request can ask for get the same bits with drafts of any kind and without.

`pytest -m thorough tests/speculation` runs 1,000 requests with each drafter in each format.
"""

import pytest

from quire import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from quire.common.faults import Fault, inject
from quire.common.outputs import RequestMetrics
from quire.engine.process.messages import Progress
from quire.engine.requests.sequence import SequenceGroup

from .mixed import DRAFTERS, FORMATS, POLICIES, check, make_llm, make_requests, run, write_adapters


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    return write_adapters(tmp_path_factory.mktemp("adapters"))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("part", "format_name"), list(enumerate(FORMATS)))
def test_no_drafter_changes_a_bit(part: int, format_name: str, adapters: list[LoRARequest]) -> None:
    policy = POLICIES[part % len(POLICIES)]
    found = check(
        make_llm(format_name, scheduling_policy=policy, num_gpu_blocks_override=12), make_requests(24, part, adapters)
    )
    for name in DRAFTERS:
        assert found[name].num_drafts > 0, name
    assert found["wrong"].num_accepted <= 0.02 * found["wrong"].num_drafts, "but for samples that are not returned"
    assert found["mostly right"].num_accepted > 0.3 * found["mostly right"].num_drafts
    assert found["prediction"].num_accepted > 20
    assert found["mostly right"].num_steps < found["off"].num_steps
    assert sum(told.num_preemptions for told in found.values()) > 0


@pytest.mark.thorough
@pytest.mark.parametrize("format_name", FORMATS)
def test_no_drafter_changes_a_bit_of_a_thousand_requests(format_name: str, adapters: list[LoRARequest]) -> None:
    for part, policy in enumerate(POLICIES):
        check(make_llm(format_name, scheduling_policy=policy), make_requests(250, 100 + part, adapters))


def test_lookups_that_adapt_change_no_bit(adapters: list[LoRARequest]) -> None:
    """As an engine does without a word about speculation. How many drafts there are depends on the times of steps."""
    llm, requests = make_llm("bf16"), make_requests(40, 99, adapters)
    drafting = llm.engine.scheduler.drafting
    assert drafting is not None
    without = run(llm, requests)
    samples = {}
    llm.engine.scheduler.drafting = llm.engine.committer.drafting = drafting
    for request in requests:
        llm.engine.add_request(request.name, request.prompt, request.params, lora_request=request.adapter)
    while llm.engine.has_unfinished_requests():
        for output in llm.engine.step():
            if output.finished:
                samples[output.request_id] = [o.token_ids for o in output.outputs]
        llm.engine.requests.check_integrity()
    for request in requests:
        assert samples[request.name] == [tokens for tokens, *_ in without.samples[request.name][:-1]]
    assert not drafting.num_errors


REPEATED = "one two three four five six seven eight nine ten one two three four five six seven"


def repeated(llm: LLM, name: str, **params: object) -> list[int]:
    settings = {"temperature": 0, "max_tokens": 60, "ignore_eos": True, "repetition_penalty": 0.5}
    llm.engine.add_request(name, REPEATED, SamplingParams(**settings | params))
    while llm.engine.has_unfinished_requests():
        outputs = llm.engine.step()
    return list(outputs[-1].outputs[0].token_ids)


def test_a_text_that_repeats_itself_takes_fewer_steps() -> None:
    def steps(**config: object) -> tuple[list[int], int]:
        llm = LLM(max_model_len=256, num_gpu_blocks_override=64, speculative_config=config)
        return repeated(llm, "a"), llm.engine.scheduler.num_steps

    expected, num_steps = steps(method="off")
    for method in ("ngram", "suffix", "auto"):
        token_ids, num_with = steps(method=method, adaptive=False)
        assert token_ids == expected
        assert num_with < 0.6 * num_steps


def test_a_request_that_another_engine_began_goes_on_with_the_same_tokens() -> None:
    """After a crash its tokens so far come with it, drafted or not."""
    config = {"method": "auto", "adaptive": False}
    for temperature in (0.0, 1.0):
        params = {"temperature": temperature, "seed": 3}
        llm = LLM(max_model_len=256, num_gpu_blocks_override=64, speculative_config=config)
        whole = repeated(llm, "a", **params)
        engine = LLM(max_model_len=256, num_gpu_blocks_override=64, speculative_config=config).engine
        settings = {"max_tokens": 60, "ignore_eos": True, "repetition_penalty": 0.5} | params
        progress = Progress(RequestMetrics(0.0), 0, whole[:23])
        engine.add_request("a", REPEATED, SamplingParams(**settings), progress=progress)
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert list(outputs[-1].outputs[0].token_ids) == whole
        assert engine.scheduler.drafting.stats["own"].num_drafts > 0


def test_a_failed_step_with_drafts_is_tried_again_and_changes_nothing() -> None:
    llm = LLM(max_model_len=256, num_gpu_blocks_override=64, speculative_config={"adaptive": False})
    expected = repeated(llm, "a")
    execute, failed = llm.engine.executor.execute, []

    def failing(batch):
        if not failed and any(s.num_drafts for s in batch.sequences):
            failed.append(batch.step)
            raise RuntimeError("planted")
        return execute(batch)

    llm.engine.executor.execute = failing
    assert repeated(llm, "b") == expected
    assert failed


@pytest.mark.parametrize("stops", [False, True])
def test_a_row_that_fails_behind_drafts_costs_no_token_before_it(stops: bool) -> None:
    """As without drafts, where the row behind a stop token is not drawn."""
    prompt, found = {"prompt_token_ids": [5, 6, 7, 8]}, []
    for config in ({"method": "off"}, {"method": "prediction", "adaptive": False}):
        llm = LLM(max_model_len=64, num_gpu_blocks_override=20, speculative_config=config)
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logit_bias={1: -1.0})
        expected = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        params.prediction = tuple(expected)
        params.stop_token_ids = [expected[3]] if stops else []
        with inject(Fault("sampler.row", after=4)):
            output = llm.generate(prompt, params, use_tqdm=False)[0]
        llm.engine.requests.check_integrity()
        found.append((list(output.outputs[0].token_ids), output.outputs[0].finish_reason, output.error is None))
    assert found[0] == found[1] == (list(expected[:4]), "stop" if stops else "abort", stops)


@pytest.mark.parametrize("params", [{"logits_processors": [lambda tokens, logits: logits]}, {"beams": True}])
def test_beams_and_processors_take_no_drafts(params: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    from quire import BeamSearchParams

    llm = LLM(max_model_len=256, num_gpu_blocks_override=64, speculative_config={"adaptive": False})
    asked: list[SequenceGroup] = []
    drafting = llm.engine.scheduler.drafting
    monkeypatch.setattr(drafting, "propose", lambda sequences, *_: asked.extend(sequences) or [()] * len(sequences))
    if "beams" in params:
        llm.engine.add_request("a", REPEATED, BeamSearchParams(beam_width=2, max_tokens=8))
    else:
        llm.engine.add_request("a", REPEATED, SamplingParams(max_tokens=8, **params))
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    assert not asked


def test_drafts_of_a_request_whose_prefix_another_joins_in_the_same_step_change_no_bit() -> None:
    """Of the first block they compute only a part, since a third request has the rest."""
    llm = LLM(num_gpu_blocks_override=32, num_threads=1, speculative_config={"adaptive": False})
    prompt = [*range(100, 130)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (alone,) = llm.generate({"prompt_token_ids": prompt}, params, use_tqdm=False)
    expected = alone.outputs[0]
    assert llm.engine.reset_prefix_cache()
    llm.generate({"prompt_token_ids": prompt[:7]}, SamplingParams(max_tokens=1), use_tqdm=False)
    predicted = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prediction=expected.text)
    given = [{"prompt_token_ids": prompt} for _ in range(2)]
    outputs = llm.generate(given, [predicted, params], use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [list(expected.token_ids)] * 2
    assert outputs[0].num_cached_tokens == 7
    assert outputs[1].num_cached_tokens == 16, "it joins a block"
    assert outputs[0].metrics.num_drafts


def test_a_grammar_that_becomes_too_complex_does_so_at_the_same_token_with_drafts() -> None:
    """After some 18 tokens here; drafts that it allows, and that are wrong, make it so earlier."""
    prediction = "the quick brown fox jumps over the lazy dog and returns one more than another value of the same kind "
    pattern = StructuredOutputsParams(regex=r"[a-z ]*[aeiou][a-z ]{40}")

    def run(max_tokens: int, config: dict[str, object]) -> tuple[list[int], str | None]:
        params = SamplingParams(
            temperature=1, seed=3, max_tokens=max_tokens, structured_outputs=pattern, prediction=prediction
        )
        llm = LLM(max_model_len=256, num_gpu_blocks_override=20, speculative_config=config)
        (output,) = llm.generate(["def main():"], params, use_tqdm=False)
        llm.engine.requests.check_integrity()
        return list(output.outputs[0].token_ids), output.error

    off: dict[str, object] = {"method": "off"}
    drafting: dict[str, object] = {"method": "prediction", "num_speculative_tokens": 32, "adaptive": False}
    token_ids, error = run(40, off)
    assert error is not None
    assert 10 < len(token_ids) < 40
    assert run(40, drafting) == (token_ids, error)
    num_before = len(token_ids) - 1
    assert run(num_before, drafting) == run(num_before, off) == (token_ids[:num_before], None)


@pytest.mark.parametrize(("method", "is_predicted"), [("prediction", True), ("suffix", False)])
def test_places_of_accepted_drafts_say_which_are_from_the_prediction(method: str, is_predicted: bool) -> None:
    drafting = {"method": method, "num_speculative_tokens": 4, "adaptive": False}
    llm = LLM(num_gpu_blocks_override=40, max_model_len=128, speculative_config=drafting, enable_prefix_caching=False)
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 6, 7, 8] * 8}
    text = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].text  # what follows it is known to `suffix` now
    params.prediction = text if is_predicted else None
    (output,) = llm.generate(prompt, params, use_tqdm=False)[0].outputs
    assert len(output.accepted_drafts) > 10
    assert output.accepted_drafts == sorted(set(output.accepted_drafts))
    assert output.predicted_drafts == (output.accepted_drafts if is_predicted else [])
