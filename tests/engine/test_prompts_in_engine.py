"""What the engine makes of prompts: refused, truncated, salted, or scored."""

import contextlib
import math
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.common.errors import (
    InvalidParamsError,
    InvalidPromptError,
    PromptTooLongError,
    RequestError,
)
from quire.engine.requests import input_processor
from tests.engine.reciting import generate
from tests.scripted_engine import RecitingExecutor, scripted_llm


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
    with pytest.raises(PromptTooLongError, match=r"10,000,000 characters.*length is 256 tokens, which have at most"):
        generate(llm, "a" * 10**7)
    assert num_chars == []
    monkeypatch.setattr(llm.engine.tokenizer, "max_token_len", 10**6)
    with pytest.raises(PromptTooLongError, match=r"10,000,000 characters and more than [\d,]+ tokens.*length is 256"):
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


# Scoring


def test_continuations_are_scored_and_nothing_is_generated(llm: LLM) -> None:
    generated = llm.engine.stats().num_generated_tokens
    scores = llm.score_tokens("The answer is", [" yes", " no, it is not"], use_tqdm=False)
    whole = [llm.engine.tokenizer.encode("The answer is" + text) for text in (" yes", " no, it is not")]
    context = llm.engine.tokenizer.encode("The answer is")
    assert [score.token_ids for score in scores] == [ids[len(context) :] for ids in whole]
    for score in scores:
        assert score.logprobs == [pytest.approx(-math.log(2))] * len(score.token_ids)
        assert score.sum_logprob == pytest.approx(-math.log(2) * len(score.token_ids))
        assert score.is_greedy == [False] * len(score.token_ids)
    assert llm.engine.stats().num_generated_tokens == generated


def test_a_token_across_the_border_belongs_to_the_continuation(llm: LLM) -> None:
    tokenizer = llm.engine.tokenizer
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
        ([[5] * 256], [[6]], PromptTooLongError, "257 tokens.* length is 256"),
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
