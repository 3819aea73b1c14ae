"""What the engine makes of params: draws in token ids, limits of this model, and no harm from wrong ones."""

import math
from typing import Any

import pytest
from msgspec.structs import replace

from quire import LLM, SamplingParams
from quire.common.batch import Draw
from quire.common.errors import (
    CheckpointError,
    ConfigError,
    InvalidParamsError,
)
from quire.engine.requests.recommended import recommended_params
from tests.engine.reciting import PROMPT, generate
from tests.scripted_engine import RecitingExecutor, recital, scripted_llm


def draw(llm: LLM, **params: Any) -> Draw:
    """What a request is drawn with."""
    settings = SamplingParams(**params)
    llm.engine.inputs.check_params(settings)
    return llm.engine.inputs.draws(settings)[0]


def test_plain_values_pass_into_the_draw_as_they_are(llm: LLM) -> None:
    fields = {
        "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5,
        "repetition_penalty": 1.2,
    }  # fmt: skip
    made = draw(llm, **fields, logit_bias={3: 1.5, 9: -100}, allowed_token_ids=[9, 3, 9], logprobs=2)
    assert {name: getattr(made, name) for name in fields} == fields
    assert made.logit_bias == ((3, 1.5), (9, -100))
    assert made.allowed_token_ids == (3, 9)
    assert made.logprobs == 2
    assert (made.min_tokens, made.stop_token_ids, made.bad_words) == (0, (), ())
    assert made.needs_history


def test_a_draw_without_settings_changes_nothing(llm: LLM) -> None:
    made = draw(llm)
    assert made == Draw(1.0, 0, 1.0, made.random_key)
    assert not made.needs_history


@pytest.mark.parametrize("top_k", [-1, 0, 8192, 2**70])
def test_a_top_k_of_the_whole_vocabulary_or_more_has_no_effect(llm: LLM, top_k: int) -> None:
    assert draw(llm, top_k=top_k).top_k == 0


def test_a_temperature_next_to_zero_is_zero(llm: LLM) -> None:
    assert draw(llm, temperature=1e-6).temperature == 0.0


def test_min_tokens_holds_back_whatever_would_end_the_output(llm: LLM) -> None:
    eos = llm.engine.model_config.eos_token_ids
    for ignore_eos in (False, True):
        made = draw(llm, min_tokens=3, stop_token_ids=[7, 5], ignore_eos=ignore_eos)
        assert made.stop_token_ids == tuple(sorted({*eos, 5, 7}))
        assert made.min_tokens == 3


def test_samples_differ_in_key_and_index_alone(llm: LLM) -> None:
    draws = llm.engine.inputs.draws(SamplingParams(n=2, best_of=4, seed=3))
    assert [d.index for d in draws] == [0, 1, 2, 3]
    assert len({d.random_key for d in draws}) == 4
    assert all(d.logprobs == 0 for d in draws), "to rank them"
    assert len({replace(d, index=0, random_key=b"") for d in draws}) == 1


def test_a_bad_word_is_banned_with_and_without_a_space_before_it(llm: LLM) -> None:
    tokenizer = llm.engine.tokenizer
    words = ["return", " return", "json.dumps", "\n", "return"]
    expected: list[tuple[int, ...]] = []
    for word in words:  # vLLM's rule, spelled out
        plain = tokenizer.encode(word.lstrip() or word, add_special_tokens=False)
        spaced = tokenizer.encode(" " + (word.lstrip() or word), add_special_tokens=False)
        expected.append(tuple(plain))
        if spaced[0] != plain[0] and len(spaced) == len(plain):
            expected.append(tuple(spaced))
    assert draw(llm, bad_words=words).bad_words == tuple(dict.fromkeys(expected))
    assert {len(word) for word in expected} >= {1, 3}


def test_a_bad_word_without_a_token_is_refused(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(llm.engine.inputs.tokenizer, "encode", lambda *_, **__: [])
        with pytest.raises(InvalidParamsError, match=r"bad_words has 'x', of which .* makes no token"):
            draw(llm, bad_words=["x"])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 9}, "n=9: this engine runs at most max_num_seqs=8"),
        ({"best_of": 9}, "best_of=9: this engine"),
        ({"stop_token_ids": [8192]}, "stop_token_ids has 8192: this model's token ids end at 8191"),
        ({"allowed_token_ids": [1, 8192]}, "allowed_token_ids has 8192"),
        ({"logit_bias": {8192: 1}}, "logit_bias has 8192"),
        ({"logprobs": 21}, "logprobs=21: this engine gives at most max_logprobs=20"),
        ({"logprobs": -1}, "logprobs=-1: this engine"),
        ({"prompt_logprobs": 21}, "prompt_logprobs=21: this engine"),
        ({"truncate_prompt_tokens": 256}, "truncate_prompt_tokens=256: the context holds 256"),
        ({"allowed_token_ids": [0, 2], "min_tokens": 1}, "min_tokens=1 may leave none of allowed_token_ids"),
        ({"allowed_token_ids": "return", "bad_words": ["return"]}, "bad_words may leave none of allowed_token_ids"),
    ],
)
def test_what_this_engine_cannot_do_is_refused_and_others_go_on(llm: LLM, params: dict, message: str) -> None:
    if isinstance(params.get("allowed_token_ids"), str):
        params = params | {"allowed_token_ids": llm.engine.tokenizer.encode("return")}
    llm.engine.add_request("other", PROMPT, SamplingParams(temperature=0, max_tokens=50))
    llm.engine.step()
    with pytest.raises(InvalidParamsError, match=message):
        llm.engine.add_request("wrong", PROMPT, SamplingParams(**params))
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    assert {output.request_id for output in outputs} == {"other"}
    assert outputs[-1].outputs[0].text == recital(len(PROMPT))


def encoded(llm: LLM) -> list[int]:
    """The tokens that the executor recites."""
    return llm.engine.tokenizer.encode(recital(len(PROMPT)))


def test_a_stop_token_ends_the_text_before_it_and_is_among_the_tokens(llm: LLM) -> None:
    reply = encoded(llm)
    stop = reply[3]
    for include in (False, True):
        output = generate(llm, stop_token_ids=[stop], include_stop_str_in_output=include).outputs[0]
        assert output.token_ids == reply[:4]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.text == llm.engine.tokenizer.decode(reply[: 4 if include else 3])


def test_the_end_of_sequence_is_not_part_of_the_text_even_where_special_tokens_are(llm: LLM) -> None:
    output = generate(llm, max_tokens=50, skip_special_tokens=False).outputs[0]
    assert output.text == recital(len(PROMPT))
    assert (output.finish_reason, output.stop_reason) == ("stop", None)
    whole = generate(llm, max_tokens=50, skip_special_tokens=False, include_stop_str_in_output=True).outputs[0]
    assert whole.text.startswith(recital(len(PROMPT)))
    assert len(whole.text) > len(output.text)


@pytest.mark.parametrize("min_tokens", [0, 1, 3, 30])
def test_nothing_ends_an_output_before_min_tokens(llm: LLM, min_tokens: int) -> None:
    """The executor does not hold back what a sampler would: what it gives all the same does not end the output."""
    reply = [*encoded(llm), llm.engine.tokenizer.eos_token_id]
    period = reply * 5
    limits = {"max_tokens": 60, "min_tokens": min_tokens}
    for stop in (period[0], period[2]):
        output = generate(llm, stop_token_ids=[stop], ignore_eos=True, **limits).outputs[0]
        expected = next(i for i, token_id in enumerate(period, start=1) if token_id == stop and i > min_tokens)
        assert output.token_ids == period[:expected]
    output = generate(llm, **limits).outputs[0]
    assert output.finish_reason == "stop"
    assert len(output.token_ids) == len(reply) * (1 if min_tokens < len(reply) else -(-(min_tokens + 1) // len(reply)))


def test_stop_strings_count_once_a_token_after_min_tokens_completes_them(llm: LLM) -> None:
    tokenizer, reply = llm.engine.tokenizer, encoded(llm)
    texts = [tokenizer.decode(reply[:i]) for i in range(len(reply) + 1)]
    for min_tokens in range(6):
        output = generate(llm, stop=["re", "d 3"], min_tokens=min_tokens, max_tokens=50).outputs[0]
        ends = [texts[-1].find(stop) + len(stop) for stop in ("re", "d 3")]
        stops = [(end, stop) for end, stop in zip(ends, ("re", "d 3"), strict=True) if end > len(texts[min_tokens])]
        if stops:
            end, stop = min(stops)
            assert output.stop_reason == stop
            assert output.text == texts[-1][: end - len(stop)]
        else:
            assert output.text == texts[-1]


def test_generation_config_is_recommended_whole() -> None:
    config = {
        "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 99,
        "do_sample": True, "num_beams": 4,
    }  # fmt: skip
    expected = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1, repetition_penalty=1.05, max_tokens=99)
    assert recommended_params(config) == expected
    greedy = SamplingParams(temperature=0.0, repetition_penalty=1.05, max_tokens=99)
    assert recommended_params(config | {"do_sample": False}) == greedy
    assert recommended_params({"temperature": None}) == SamplingParams()


@pytest.mark.parametrize("config", [{"temperature": "hot"}, {"top_p": 7}, {"max_new_tokens": 0}, {"top_k": [1]}])
def test_a_malformed_generation_config_is_the_checkpoints_fault(config: dict) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config.json: \w+=.*: must be .*generation_config='none'"):
        recommended_params(config)


@pytest.mark.parametrize("given", ["auto", "none", "vllm"])
def test_generation_config_can_be_turned_off_but_for_its_end_tokens(given: str) -> None:
    llm, _ = scripted_llm(generation_config=given)
    assert bool(llm.engine.model_config.generation_config) is (given == "auto")
    assert llm.engine.model_config.eos_token_ids == {0, 2}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"generation_config": "nome"}, "generation_config='nome', did you mean 'none'"),
        ({"logprobs_mode": "raw"}, "logprobs_mode='raw'.*allowed: raw_logprobs, processed_logprobs"),
        ({"max_logprobs": -2}, "max_logprobs=-2: must be"),
    ],
)
def test_wrong_engine_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scripted_llm(**arguments)


def test_logprobs_come_as_vllm_has_them(llm: LLM) -> None:
    output = generate(llm, logprobs=2, prompt_logprobs=1, max_tokens=3)
    sample, decode = output.outputs[0], llm.engine.tokenizer.decode
    half = pytest.approx(-math.log(2))
    assert sample.cumulative_logprob == pytest.approx(-3 * math.log(2))
    assert len(sample.logprobs) == 3
    for token_id, entries in zip(sample.token_ids, sample.logprobs, strict=True):
        assert list(entries) == [token_id, 0, 1]
        assert [(e.logprob, e.rank) for e in entries.values()] == [(half, 7), (-1.0, 1), (-2.0, 2)]
        assert entries[token_id].decoded_token == decode([token_id], skip_special_tokens=False)
    assert output.prompt_logprobs[0] is None
    assert [list(entries) for entries in output.prompt_logprobs[1:]] == [[6, 0], [7, 0]]
    assert output.prompt_logprobs[1][6].decoded_token == decode([6], skip_special_tokens=False)
    plain = generate(llm, max_tokens=3)
    assert plain.prompt_logprobs is plain.outputs[0].logprobs is plain.outputs[0].cumulative_logprob is None
    silent = generate(llm, logprobs=0, detokenize=False, max_tokens=1).outputs[0]
    assert [e.decoded_token for e in silent.logprobs[0].values()] == [None]


def test_an_engine_may_allow_the_whole_vocabulary() -> None:
    llm, executor = scripted_llm(max_logprobs=-1)
    generate(llm, logprobs=-1, prompt_logprobs=-1, max_tokens=1)
    (sequence,) = executor.batches[-1].sequences
    assert sequence.drawn.draws[0].logprobs == sequence.scored.num_top == 8192


def test_samples_cannot_be_ranked_by_logits() -> None:
    llm, _ = scripted_llm(logprobs_mode="raw_logits")
    with pytest.raises(InvalidParamsError, match=r"best_of=2 ranks samples .*logprobs_mode=raw_logits"):
        generate(llm, best_of=2)


def test_the_best_of_many_samples_comes_out(llm: LLM) -> None:
    output = generate(llm, n=2, best_of=4, max_tokens=4)
    assert [o.index for o in output.outputs] == [0, 1]
    assert [o.cumulative_logprob for o in output.outputs] == [pytest.approx(-4 * math.log(k)) for k in (2, 3)]
    assert [o.logprobs for o in output.outputs] == [None, None], "they only rank the samples"
    assert [o.text for o in output.outputs] == [llm.engine.tokenizer.decode(o.token_ids) for o in output.outputs]


def test_the_executor_gets_what_a_draw_needs(llm: LLM, executor: RecitingExecutor) -> None:
    executor.batches.clear()
    generate(llm, presence_penalty=1, max_tokens=3)
    sequences = [batch.sequences[0] for batch in executor.batches]
    assert all(s.drawn.num_prompt_tokens == len(PROMPT) for s in sequences)
    assert [s.drawn.history.tolist() for s in sequences] == [
        PROMPT,
        PROMPT + encoded(llm)[:1],
        PROMPT + encoded(llm)[:2],
    ]
    executor.batches.clear()
    generate(llm, max_tokens=3)
    assert all(batch.sequences[0].drawn.history is None for batch in executor.batches)
