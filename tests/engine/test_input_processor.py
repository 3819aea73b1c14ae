"""What requests are made of: texts that are read in pieces, scored prompts, seeds, banned words and detokenizers."""

import dataclasses

import numpy as np
import pytest

from quire import BeamSearchParams, EngineArgs, PoolingParams, SamplingParams
from quire.common.errors import InvalidParamsError, InvalidPromptError, PromptTooLongError, RequestError
from quire.common.lora import KnownAdapter
from quire.common.params import PoolerInfo
from quire.config.args import EngineConfig
from quire.engine.requests import input_processor
from quire.engine.requests.beam_search import BeamSearch
from quire.engine.requests.input_processor import InputProcessor
from quire.engine.requests.new_group import new_group, new_scoring_group
from quire.kv.prefix_cache.content_hash import ContentKey
from quire.runner.memory_plan import plan_memory
from tests.tokenizer.made import word_piece

BOS = 1
PIECE = 100


class LetterTokenizer:
    """A token for each character, or one for several; a special token comes first."""

    max_token_len = 8

    def __init__(self, chars_per_token: int = 1) -> None:
        self.chars_per_token = chars_per_token
        self.num_chars: list[int] = []
        """Of each text that was encoded."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.num_chars.append(len(text))
        return [BOS] * add_special_tokens + [ord(letter) for letter in text[:: self.chars_per_token]]


def make_config(max_model_len: int = 252) -> EngineConfig:
    args = EngineArgs(num_gpu_blocks_override=64, max_model_len=max_model_len, max_num_seqs=4)
    return plan_memory(args).config


@pytest.fixture
def inputs() -> InputProcessor:
    return InputProcessor(make_config(), LetterTokenizer())


@pytest.fixture
def in_pieces(inputs: InputProcessor, monkeypatch: pytest.MonkeyPatch) -> InputProcessor:
    """Texts of more than 252 characters are read in pieces of 100. Three pieces have 252 tokens without those that
    their borders may add, which the context holds."""
    monkeypatch.setattr(input_processor, "_PIECE_CHARS", PIECE)
    monkeypatch.setattr(input_processor, "_USUAL_CHARS", 1)
    return inputs


# Texts


def test_special_tokens_are_added_unless_they_are_left_out(inputs):
    assert inputs.encode("ab") == [BOS, 97, 98]
    assert inputs.encode("ab", add_special_tokens=False) == [97, 98]


@pytest.mark.parametrize("num_chars", [252, 8 * 252])
def test_a_text_of_usual_length_is_encoded_once(num_chars, monkeypatch):
    monkeypatch.setattr(input_processor, "_PIECE_CHARS", PIECE)
    inputs = InputProcessor(make_config(), LetterTokenizer(chars_per_token=8))
    assert len(inputs.encode("a" * num_chars)) == 1 + -(-num_chars // 8)
    assert inputs.tokenizer.num_chars == [num_chars]


def test_a_text_of_the_most_characters_that_the_context_can_hold_is_accepted_and_one_more_is_not():
    inputs = InputProcessor(make_config(), LetterTokenizer(chars_per_token=8))
    assert len(inputs.encode("a" * 2016, add_special_tokens=False)) == 252
    with pytest.raises(
        PromptTooLongError, match=r"2,017 characters, .* context length is 252 tokens, which have at most 2,"
    ):
        inputs.encode("a" * 2017)


def test_a_text_in_pieces_is_encoded_as_a_whole_if_its_pieces_fit(in_pieces):
    text = "a" * 260
    assert in_pieces.encode(text) == [BOS, *[97] * 260]
    assert in_pieces.tokenizer.num_chars == [100, 100, 60, 260]


def test_pieces_that_fill_the_context_exactly_fit_and_one_token_more_does_not(in_pieces):
    assert len(in_pieces.encode("a" * 300)) == 301
    with pytest.raises(PromptTooLongError, match=r"more than 252 tokens, .* maximum context length is 251 tokens"):
        InputProcessor(make_config(251), LetterTokenizer()).encode("a" * 300)


def test_a_text_whose_beginning_is_cut_off_is_read_from_its_end_until_the_context_is_full(in_pieces):
    assert in_pieces.encode("b" * 1000 + "a" * 400, cuts=True) == [BOS, *[97] * 400]
    assert in_pieces.tokenizer.num_chars == [100, 100, 100, 100, 400]


def test_the_first_and_the_last_token_of_the_vocabulary_are_allowed_and_the_next_is_not(inputs):
    assert inputs.prompt([0, 8191]) == (None, [0, 8191], ContentKey())
    with pytest.raises(InvalidPromptError, match="token id 8192 is not one of this model's, 0 to 8191"):
        inputs.prompt([0, 8192])
    with pytest.raises(InvalidPromptError, match="the prompt is empty"):
        inputs.prompt([])


def test_token_ids_may_be_an_array_or_numbers_of_numpy(inputs):
    for given in ({"prompt_token_ids": np.array([5, 6])}, [np.int64(5), np.uint8(6)]):
        _, token_ids, _ = inputs.prompt(given)
        assert token_ids == [5, 6]
        assert [type(token_id) for token_id in token_ids] == [int, int]
    with pytest.raises(InvalidPromptError, match=r"token id 5\.0 is not one of this model's"):
        inputs.prompt({"prompt_token_ids": np.array([5, 1.5])})


def test_a_prompt_leaves_one_token_of_the_context_to_the_output(inputs):
    assert inputs.prompt([5] * 251)[1] == [5] * 251
    with pytest.raises(
        PromptTooLongError, match=r"has 252 tokens, .* maximum context length is 252 tokens, one of them"
    ):
        inputs.prompt([5] * 252)


@pytest.mark.parametrize(
    ("keep", "max_tokens", "num_kept"), [(1, 8, 1), (2, 8, 2), (-1, 8, 244), (-1, None, 251), (-1, 252, 1)]
)
def test_the_end_of_a_prompt_that_is_truncated_is_kept(inputs, keep, max_tokens, num_kept):
    params = SamplingParams(truncate_prompt_tokens=keep, max_tokens=max_tokens)
    _, token_ids, _ = inputs.prompt([2] * 10 + [3] * 300, params)
    assert token_ids == [3] * num_kept


def test_a_salt_belongs_to_the_prompt_and_is_empty_unless_it_is_given(inputs):
    assert inputs.prompt({"prompt_token_ids": [5]})[2] == ContentKey(cache_salt="")
    assert inputs.prompt({"prompt_token_ids": [5], "cache_salt": "salt"})[2] == ContentKey(cache_salt="salt")
    with pytest.raises(InvalidPromptError, match=r"^cache_salt"):
        inputs.prompt({"prompt_token_ids": [5], "cache_salt": 5})


def test_a_request_keeps_its_id_its_text_and_when_it_arrived(inputs):
    outputs = inputs.request("name", "ab", SamplingParams(detokenize=False), 12.5).outputs
    assert (outputs.request_id, outputs.prompt, outputs.prompt_token_ids) == ("name", "ab", [BOS, 97, 98])
    assert outputs.metrics.arrival_time == 12.5


# Scoring


def test_without_a_continuation_all_tokens_but_the_first_are_scored(inputs):
    token_ids, first, _ = inputs.continuation([5, 6, 7], None)
    assert (token_ids, first) == ([5, 6, 7], 1)
    token_ids, first, _ = inputs.continuation("ab", None)
    assert (token_ids, first) == ([BOS, 97, 98], 1)


def test_an_empty_text_has_nothing_to_score(inputs):
    with pytest.raises(InvalidPromptError, match="the context has 1 tokens and the continuation 0"):
        inputs.continuation("", None)


@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        ({"prompt": "a", "prompt_token_ids": [97]}, "b"),
        ("a", {"prompt": "b", "prompt_token_ids": [98]}),
        ("a", [98]),
        ([97], "b"),
    ],
)
def test_a_context_and_its_continuation_must_be_given_in_the_same_way(inputs, context, continuation):
    with pytest.raises(InvalidPromptError, match="must both be text, or both token ids"):
        inputs.continuation(context, continuation)


def test_a_scoring_request_knows_when_it_arrived_and_wants_no_other_tokens(inputs):
    request = inputs.scoring_request("a", [5, 6], [7, 8], 12.5)
    assert request.outputs.metrics.arrival_time == 12.5
    scores = request.outputs.scores
    assert (scores.first, scores.token_ids, scores.num_top) == (2, [7, 8], 0)


def test_a_scoring_request_uses_only_the_prefixes_of_its_own_salt(inputs):
    context = {"prompt_token_ids": [5, 6], "cache_salt": "salt"}
    group = new_scoring_group(inputs.scoring_request("a", context, [7, 8], 0.0), 3)
    assert group.content_key == ContentKey(cache_salt="salt")
    assert (group.order, group.seqs[0].token_ids) == (3, [5, 6, 7]), "what follows the last token is not wanted"


# Adapters, predictions, pooling

ADAPTER = KnownAdapter("name", 4, "/folder", "digest", 1, "given")


def test_an_adapter_belongs_to_the_request_and_to_the_key_of_its_blocks(inputs):
    prompt = {"prompt_token_ids": [5, 6], "cache_salt": "salt"}
    params = SamplingParams(detokenize=False)
    drawn = new_group(inputs, inputs.request("a", prompt, params, 0.0, ADAPTER), 3)
    scored = new_scoring_group(inputs.scoring_request("a", prompt, [7], 0.0, ADAPTER), 3)
    for group in (drawn, scored):
        assert (group.adapter, group.content_key) == (ADAPTER, ContentKey("digest", "salt"))
        assert group.outputs.lora_request == ADAPTER.request
    plain = new_group(inputs, inputs.request("a", prompt, params, 0.0), 3)
    assert (plain.adapter, plain.content_key, plain.outputs.lora_request) == (None, ContentKey("", "salt"), None)


def test_the_callers_own_functions_are_named_in_the_draws_and_live_as_long_as_the_request(inputs):
    functions = [lambda output, logits: logits, lambda prompt, output, logits: logits]
    params = SamplingParams(logits_processors=functions, detokenize=False)
    group = new_group(inputs, inputs.request("a", [5], params, 0.0), 3)
    assert [each.processor for each in group.processors] == functions
    (draw,) = group.seqs[0].draws
    assert draw.processors == tuple([each.name for each in group.processors])
    plain = new_group(inputs, inputs.request("b", [5], SamplingParams(detokenize=False), 0.0), 4)
    assert (plain.processors, plain.seqs[0].draws[0].processors) == ((), ())


@pytest.mark.parametrize("prediction", ["ab", [97, 98]])
def test_a_prediction_is_the_tokens_of_its_text(inputs, prediction):
    params = SamplingParams(prediction=prediction, detokenize=False)
    group = new_group(inputs, inputs.request("a", [5], params, 0.0), 3)
    assert (group.prediction.tolist(), group.prediction.dtype) == ([97, 98], np.int32)
    plain = inputs.request("a", [5], SamplingParams(detokenize=False), 0.0)
    assert new_group(inputs, plain, 3).prediction is None


def test_a_prediction_is_no_longer_than_the_context_and_has_tokens_of_the_model(inputs):
    def checked(prediction: str | list[int]) -> list[int]:
        params = SamplingParams(prediction=prediction, detokenize=False)
        return inputs.request("a", [5], params, 0.0).outputs.params.prediction

    assert len(checked([5] * 252)) == 252
    with pytest.raises(InvalidParamsError, match="prediction has 253 tokens, and the context holds 252"):
        checked([5] * 253)
    with pytest.raises(InvalidParamsError, match=r"^prediction: the text has"):
        checked("x" * 10_000)
    with pytest.raises(InvalidParamsError, match=r"^prediction.*8192"):
        checked([8192])


def pooling_inputs(**fields: object) -> InputProcessor:
    info = PoolerInfo(
        **{"tasks": ("embed",), "whole_tasks": ("embed",), "max_whole_tokens": 99, "dimensions": 8} | fields
    )
    return InputProcessor(make_config(), LetterTokenizer(), info)


def test_a_request_for_a_vector_has_all_that_its_prompt_and_params_say():
    inputs, params = pooling_inputs(), PoolingParams(priority=2, tenant="t")
    prompt = {"prompt_token_ids": [5, 6], "prompt": "text", "cache_salt": "salt", "token_type_ids": [0, 1]}
    request = inputs.request("name", prompt, params, 12.5, ADAPTER)
    group = new_group(inputs, request, 3)
    (seq,), outputs = group.seqs, group.outputs
    assert (group.request_id, group.order, group.tenant, group.params.priority) == ("name", 3, "t", 2)
    assert (outputs.prompt, seq.token_ids, outputs.metrics.arrival_time) == ("text", [5, 6], 12.5)
    assert (group.adapter, group.content_key) == (ADAPTER, ContentKey("digest", "salt"))
    assert outputs.lora_request == ADAPTER.request
    assert (seq.draws, seq.is_whole, seq.pooling) == ((), True, outputs.pooling)
    assert seq.output is request.sample
    assert (request.sample.params, group.prediction) == (outputs.params, None)
    assert (seq.pooling.spec.task, seq.pooling.num_tokens, seq.pooling.token_type_ids) == ("embed", 2, (0, 1))


def test_a_model_that_pools_does_not_generate_or_score():
    config = make_config()
    pools = dataclasses.replace(config, model=dataclasses.replace(config.model, runner="pooling"))
    inputs = InputProcessor(pools, LetterTokenizer())
    with pytest.raises(RequestError, match="cannot generate"):
        inputs.request("a", [5], SamplingParams(), 0.0)
    with pytest.raises(RequestError, match="cannot generate"):
        inputs.scoring_request("a", [5, 6], None, 0.0)


def test_of_a_text_that_is_cut_at_its_end_only_the_start_is_read(in_pieces):
    assert len(in_pieces.readable("x" * 5000, True, keeps_start=True)) < 5000
    assert in_pieces.readable("ab" * 20, True, keeps_start=True) == "ab" * 20
    with pytest.raises(PromptTooLongError):
        in_pieces.readable("x" * 5000, False, keeps_start=True)


# Params


def test_the_seed_of_a_request_is_that_of_its_place_by_arrival(inputs):
    drawn = [inputs.draws(SamplingParams())[0].random_key for _ in range(4)]
    seeded = [inputs.draws(SamplingParams(seed=inputs.seed(place)))[0].random_key for place in range(4)]
    assert drawn == seeded
    assert len(set(drawn)) == 4


def test_the_seeds_of_requests_are_the_same_in_each_version(inputs):
    assert [inputs.seed(place) for place in range(2)] == [7307476576739544, 1123069430784311]


def test_the_logits_processors_of_a_request_are_named_in_each_draw(inputs):
    draws = inputs.draws(SamplingParams(n=2), ("first", "second"))
    assert [draw.processors for draw in draws] == [("first", "second")] * 2


@pytest.mark.parametrize(("top_k", "drawn"), [(-1, 0), (0, 0), (1, 1), (8191, 8191), (8192, 0)])
def test_a_top_k_that_leaves_out_no_token_is_none(inputs, top_k, drawn):
    assert inputs.draws(SamplingParams(top_k=top_k))[0].top_k == drawn


def test_bad_words_have_no_special_tokens_and_the_space_before_them_does_not_count(inputs):
    (draw,) = inputs.draws(SamplingParams(bad_words=["ab", " ab", "c ", " "]))
    assert draw.bad_words == ((97, 98), (99, 32), (32,))


def test_a_bad_word_of_tokens_that_the_model_does_not_have_is_refused(inputs):
    with pytest.raises(InvalidParamsError, match=r"^bad_words has 128512: this model's token ids end at 8191"):
        inputs.draws(SamplingParams(bad_words=["😀"]))


def test_tokens_that_end_a_bad_word_count_as_forbidden_where_min_tokens_forbids_the_others(inputs):
    allowed = [ord("c"), 50]
    params = SamplingParams(allowed_token_ids=allowed, stop_token_ids=[50], bad_words=["abc"])
    inputs.check_params(params)
    with pytest.raises(InvalidParamsError, match="min_tokens=1 may leave none of allowed_token_ids"):
        inputs.check_params(
            SamplingParams(allowed_token_ids=allowed, stop_token_ids=[50], bad_words=["abc"], min_tokens=1)
        )


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"n": 5}, "^n=5: this engine runs at most max_num_seqs=4 at once"),
        ({"n": 1, "best_of": 5}, "^best_of=5: this engine runs at most max_num_seqs=4 at once"),
        ({"logprobs": 21}, "^logprobs=21: this engine gives at most max_logprobs=20"),
        ({"prompt_logprobs": 21}, "^prompt_logprobs=21: this engine gives at most max_logprobs=20"),
        ({"logprobs": -1}, "^logprobs=-1: this engine gives at most max_logprobs=20"),
    ],
)
def test_what_is_more_than_the_engine_allows_is_refused_by_name(inputs, params, message):
    inputs.check_params(SamplingParams(n=2, best_of=4, logprobs=20, prompt_logprobs=20))
    with pytest.raises(InvalidParamsError, match=message):
        inputs.check_params(SamplingParams(**params))


@pytest.mark.parametrize(("max_logprobs", "allowed"), [(8191, False), (8192, True), (-1, True)])
def test_all_log_probabilities_are_one_for_each_token_of_the_vocabulary(max_logprobs, allowed):
    inputs = InputProcessor(dataclasses.replace(make_config(), max_logprobs=max_logprobs), LetterTokenizer())
    params = SamplingParams(logprobs=-1, prompt_logprobs=-1, detokenize=False)
    if allowed:
        assert inputs.request("a", [5, 6], params, 0.0).outputs.scores.num_top == 8192
        assert inputs.draws(params)[0].logprobs == 8192
    else:
        with pytest.raises(InvalidParamsError, match=r"^logprobs=-1"):
            inputs.check_params(params)


def test_requests_without_log_probabilities_need_no_allowance_for_them():
    inputs = InputProcessor(dataclasses.replace(make_config(), max_logprobs=0), LetterTokenizer())
    inputs.check_params(SamplingParams())
    with pytest.raises(InvalidParamsError, match=r"^logprobs=1: this engine gives at most max_logprobs=0"):
        inputs.check_params(SamplingParams(logprobs=1))


def test_a_beam_search_is_checked_against_the_limits_of_the_engine(inputs):
    request = inputs.request("a", [5, 6], BeamSearchParams(4, 8, detokenize=False), 0.0)
    assert isinstance(request.search, BeamSearch)
    assert inputs.request("b", [5, 6], SamplingParams(detokenize=False), 0.0).search is None
    with pytest.raises(InvalidParamsError, match="beam_width=5: this engine runs at most max_num_seqs=4"):
        inputs.request("a", [5, 6], BeamSearchParams(5, 8), 0.0)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "cat cat"),
        ({"skip_special_tokens": False}, "cat <s> </s> cat"),
        ({"skip_special_tokens": False, "spaces_between_special_tokens": False}, "cat <s></s> cat"),
        ({"stop": ["cat"], "min_tokens": 1}, "cat "),
        ({"stop": ["cat"], "min_tokens": 1, "include_stop_str_in_output": True}, "cat cat"),
    ],
)
def test_the_text_of_an_output_is_made_as_the_params_say(params, text):
    tokenizer = word_piece()
    inputs = InputProcessor(make_config(), tokenizer)
    sample = inputs.request("a", [5, 6], SamplingParams(ignore_eos=True, **params), 0.0).sample
    for token in ("cat", "<s>", "</s>", "cat"):
        sample.append(tokenizer._backend.token_to_id(token))
    assert sample.detokenizer.text.lstrip() == text
