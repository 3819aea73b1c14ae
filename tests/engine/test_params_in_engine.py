"""What the engine makes of params: draws in token ids, limits of this model, and no harm from wrong ones."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from quire import LLM, SamplingParams
from quire.common.batch import Draw
from quire.common.errors import (
    CheckpointError,
    ConfigError,
    InvalidParamsError,
    InvalidPromptError,
    PromptTooLongError,
    RequestError,
)
from quire.engine.requests import input_processor
from quire.engine.requests.input_processor import recommended_params
from tests.scripted_engine import RecitingExecutor, recital, scripted_llm

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def shared() -> tuple[LLM, RecitingExecutor]:
    return scripted_llm(max_num_seqs=8)


@pytest.fixture
def llm(shared: tuple[LLM, RecitingExecutor]) -> Iterator[LLM]:
    """Whatever a test did, the engine is as good as new."""
    yield shared[0]
    assert not shared[0].engine.has_unfinished_requests()
    assert shared[0].engine.stats().num_used_blocks == 0
    assert generate(shared[0], temperature=0, max_tokens=50).outputs[0].text == recital(len(PROMPT))


@pytest.fixture
def executor(shared: tuple[LLM, RecitingExecutor]) -> RecitingExecutor:
    return shared[1]


def generate(llm: LLM, prompt: Any = PROMPT, **params: Any) -> Any:
    return llm.generate(prompt, SamplingParams(**params), use_tqdm=False)[0]


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
    tokenizer = llm.get_tokenizer()
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
    ("prompt", "message"),
    [
        ({"text": "x"}, r"has 'prompt' or 'prompt_token_ids', .* not \['text'\]"),
        ({}, r"not \[\]"),
        ({"prompt": 5}, "the prompt's text must be a string, not int"),
        ({"prompt_token_ids": "abc"}, "the prompt's token ids must be a list of integers, not str"),
        ({"prompt_token_ids": 5}, "must be a list of integers, not int"),
        ({"cache_salt": "a"}, "neither text nor token ids"),
        ({"prompt": "x", "cache_salt": 3}, "cache_salt=3: must be a Unicode string"),
    ],
)
def test_invalid_prompts_are_refused(llm: LLM, prompt: Any, message: str) -> None:
    with pytest.raises(InvalidPromptError, match=message):
        llm.engine.add_request("x", prompt, SamplingParams())


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
        params = params | {"allowed_token_ids": llm.get_tokenizer().encode("return")}
    llm.engine.add_request("other", PROMPT, SamplingParams(temperature=0, max_tokens=50))
    llm.engine.step()
    with pytest.raises(InvalidParamsError, match=message):
        llm.engine.add_request("wrong", PROMPT, SamplingParams(**params))
    outputs = []
    while llm.engine.has_unfinished_requests():
        outputs += llm.engine.step()
    assert {output.request_id for output in outputs} == {"other"}
    assert outputs[-1].outputs[0].text == recital(len(PROMPT))


@pytest.mark.parametrize(
    ("keep", "max_tokens", "kept"),
    [(5, 16, 5), (255, 16, 100), (-1, 16, 100), (-1, 200, 56), (-1, 999, 1), (-1, None, 100)],
)
def test_the_end_of_a_long_prompt_is_kept(llm: LLM, keep: int, max_tokens: int | None, kept: int) -> None:
    prompt = list(range(100, 200))
    output = generate(llm, prompt, truncate_prompt_tokens=keep, max_tokens=max_tokens, temperature=0)
    assert output.prompt_token_ids == prompt[-kept:]


def test_a_prompt_longer_than_the_context_runs_truncated(llm: LLM) -> None:
    with pytest.raises(PromptTooLongError):
        generate(llm, [5] * 300)
    assert generate(llm, [5] * 300, truncate_prompt_tokens=-1, max_tokens=6).prompt_token_ids == [5] * 250


@pytest.fixture
def num_chars(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each text that tokens are made of."""
    found: list[int] = []
    encode = llm.engine.tokenizer.encode

    def noting(text: str, add_special_tokens: bool = True) -> list[int]:
        found.append(len(text))
        return encode(text, add_special_tokens)

    monkeypatch.setattr(llm.engine.tokenizer, "encode", noting)
    return found


def test_of_a_text_of_any_length_only_the_end_is_read(llm: LLM, num_chars: list[int]) -> None:
    text = "The wheels of the bus go round and round. " * 250_000
    output = generate(llm, text, truncate_prompt_tokens=200, max_tokens=1)
    assert sum(num_chars) < 100_000
    assert output.prompt_token_ids == llm.engine.tokenizer.encode(text[-50_000:])[-200:]


def test_a_text_of_too_many_tokens_is_refused_before_all_of_them_are_made(
    llm: LLM, num_chars: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PromptTooLongError, match=r"10,000,000 characters.*256 tokens of the context have at most"):
        generate(llm, "a" * 10**7)
    assert num_chars == []
    monkeypatch.setattr(llm.engine.tokenizer, "max_token_len", 10**6)
    with pytest.raises(PromptTooLongError, match=r"10,000,000 characters and more than [\d,]+ tokens.*holds 256"):
        generate(llm, "a b c d e " * 10**6)
    assert sum(num_chars) < 200_000


def test_a_text_of_few_long_tokens_is_read_as_a_whole(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only long texts are looked at in pieces, and their borders do not count."""
    monkeypatch.setattr(input_processor, "_PIECE_CHARS", 100)
    monkeypatch.setattr(input_processor, "_USUAL_CHARS", 1)
    text = "def __init__(self):\n        " * 25
    token_ids = llm.engine.tokenizer.encode(text)
    assert len(token_ids) < 256 < len(text)
    assert generate(llm, text, max_tokens=1).prompt_token_ids == token_ids


def test_of_a_text_in_pieces_no_more_are_read_than_the_prompt_has_room_for(
    llm: LLM, num_chars: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_processor, "_PIECE_CHARS", 400)
    monkeypatch.setattr(input_processor, "_USUAL_CHARS", 1)
    text = "The wheels of the bus go round and round. " * 250
    output = generate(llm, text, truncate_prompt_tokens=200, max_tokens=1)
    assert max(num_chars) == 1200, "pieces of 400, and then three of them at once"
    assert len(text) > 10_000
    assert output.prompt_token_ids == llm.engine.tokenizer.encode(text)[-200:]


def test_a_salt_may_stand_in_the_params_or_with_the_prompt() -> None:
    llm, _ = scripted_llm()

    def cached(in_prompt: str, in_params: str) -> int:
        prompt = {"prompt_token_ids": [77] * 40, "cache_salt": in_prompt}
        return int(generate(llm, prompt, cache_salt=in_params, max_tokens=1).num_cached_tokens)

    assert [cached("a", ""), cached("", "a"), cached("a", "a"), cached("", "b"), cached("", "")] == [0, 39, 39, 0, 0]
    with pytest.raises(InvalidParamsError, match="they differ"):
        cached("a", "b")
    with pytest.raises(InvalidPromptError, match="cache_salt"):
        cached("\ud800", "")


def encoded(llm: LLM) -> list[int]:
    """The tokens that the executor recites."""
    return llm.get_tokenizer().encode(recital(len(PROMPT)))


def test_a_stop_token_ends_the_text_before_it_and_is_among_the_tokens(llm: LLM) -> None:
    reply = encoded(llm)
    stop = reply[3]
    for include in (False, True):
        output = generate(llm, stop_token_ids=[stop], include_stop_str_in_output=include).outputs[0]
        assert output.token_ids == reply[:4]
        assert (output.finish_reason, output.stop_reason) == ("stop", stop)
        assert output.text == llm.get_tokenizer().decode(reply[: 4 if include else 3])


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
    reply = [*encoded(llm), llm.get_tokenizer().eos_token_id]
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
    tokenizer, reply = llm.get_tokenizer(), encoded(llm)
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
    sample, decode = output.outputs[0], llm.get_tokenizer().decode
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
    assert [o.text for o in output.outputs] == [llm.get_tokenizer().decode(o.token_ids) for o in output.outputs]


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


# Scoring


def test_continuations_are_scored_and_nothing_is_generated(llm: LLM) -> None:
    generated = llm.engine.stats().num_generated_tokens
    scores = llm.score_tokens("The answer is", [" yes", " no, it is not"], use_tqdm=False)
    whole = [llm.get_tokenizer().encode("The answer is" + text) for text in (" yes", " no, it is not")]
    context = llm.get_tokenizer().encode("The answer is")
    assert [score.token_ids for score in scores] == [ids[len(context) :] for ids in whole]
    for score in scores:
        assert score.logprobs == [pytest.approx(-math.log(2))] * len(score.token_ids)
        assert score.sum_logprob == pytest.approx(-math.log(2) * len(score.token_ids))
        assert score.is_greedy == [False] * len(score.token_ids)
    assert llm.engine.stats().num_generated_tokens == generated


def test_a_token_across_the_border_belongs_to_the_continuation(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    context, continuation = "x = json.du", "mps(y)"
    (score,) = llm.score_tokens(context, [continuation], use_tqdm=False)
    whole = tokenizer.encode(context + continuation)
    assert score.token_ids == whole[-len(score.token_ids) :]
    assert tokenizer.decode(score.token_ids).endswith(continuation)
    assert whole[: len(whole) - len(score.token_ids)] == tokenizer.encode(context)[: len(whole) - len(score.token_ids)]


def test_token_ids_are_scored_as_they_are(llm: LLM) -> None:
    scores = llm.score_tokens([[5, 6], [7]], [[8], [9, 10]], use_tqdm=False)
    assert [score.token_ids for score in scores] == [[8], [9, 10]]
    longest = llm.score_tokens([[5] * 255], [[6]], use_tqdm=False)
    assert longest[0].token_ids == [6]


@pytest.mark.parametrize(
    ("prompts", "continuations", "error", "message"),
    [
        ("a", [""], InvalidPromptError, "each needs one at least"),
        ([[]], [[5]], InvalidPromptError, "the context has 0 tokens"),
        ([[5]], [[]], InvalidPromptError, "the continuation 0"),
        ([[5]], ["text"], InvalidPromptError, "both be text, or both token ids"),
        ([[5], [6]], [[7], [8], [9]], InvalidPromptError, "2 prompts for 3 continuations"),
        ([[5]], [[8192]], InvalidPromptError, "8192"),
        ([[5] * 256], [[6]], PromptTooLongError, "257 tokens.* holds 256"),
        ([[5], [5]], [[6], [-1]], InvalidPromptError, "-1"),
        (5, [[5]], InvalidPromptError, "not int"),
    ],
)
def test_wrong_pairs_are_refused_and_none_runs(
    llm: LLM, executor: RecitingExecutor, prompts: Any, continuations: Any, error: type[RequestError], message: str
) -> None:
    num_steps = executor.num_steps
    with pytest.raises(error, match=message):
        llm.score_tokens(prompts, continuations, use_tqdm=False)
    assert executor.num_steps == num_steps


def test_perplexity_is_that_of_all_tokens_but_the_first(llm: LLM) -> None:
    assert llm.perplexity(["def f(x):", [5, 6, 7]], use_tqdm=False) == [pytest.approx(2.0)] * 2
    with pytest.raises(InvalidPromptError, match="each needs one at least"):
        llm.perplexity([[5]], use_tqdm=False)


def test_a_scoring_request_can_be_aborted_and_its_id_used_again(llm: LLM) -> None:
    for _ in range(2):
        llm.engine.add_scoring_request("a", [5], [6])
        with pytest.raises(RequestError, match="in use"):
            llm.engine.add_scoring_request("a", [5], [6])
        output = llm.engine.abort_request("a")
        assert output is not None
        assert output.prompt_logprobs == [None]
    with contextlib.suppress(RequestError):
        llm.engine.add_scoring_request("b", [5], [])
    assert llm.engine.abort_request("b") is None
