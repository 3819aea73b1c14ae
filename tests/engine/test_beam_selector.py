"""A beam search by itself: what it asks of the model, and how it chooses among the candidates of its beams."""

from types import SimpleNamespace

import numpy as np
import pytest

from quire import BeamSearchParams, InvalidParamsError
from quire.common.batch import Draw, TokenLogprobs
from quire.engine.requests.beam_search import BeamSearch
from quire.engine.requests.output import SampleOutput
from quire.engine.requests.sequence import Sequence

EOS, STOP = 7, 41


class Letters:
    """A detokenizer for which each token is a letter."""

    def __init__(self, text: str = "") -> None:
        self.text = text

    def append(self, token_id: int) -> None:
        self.text += chr(ord("a") + token_id)

    def fork(self) -> "Letters":
        return Letters(self.text)


def make_search(width: int = 2, max_tokens: int = 8, max_num_seqs: int = 8, **params: object) -> BeamSearch:
    model = SimpleNamespace(eos_token_ids=frozenset({EOS}), vocab_size=50, max_model_len=12)
    return BeamSearch(BeamSearchParams(width, max_tokens, **params), model, max_num_seqs)


def start(search: BeamSearch, num_tokens: int = 3) -> Sequence:
    params = search.params.sampling_params()
    seq = Sequence(0, [1] * num_tokens, (Draw(0.7, 0, 1.0, b""),), SampleOutput(params, detokenizer=Letters()))
    search.start(seq)
    return seq


def beam(candidates: dict[int, float] | None, *output: int) -> SimpleNamespace:
    """A beam with this output, and by token the log-probabilities of its candidates, likeliest first."""
    rows = None
    if candidates is not None:
        token_ids, logprobs = [0, *candidates], [0.0, *candidates.values()]
        rows = TokenLogprobs(np.array([token_ids], np.int32), np.array([logprobs], np.float32), np.ones(1, np.int32))
    sample = SimpleNamespace(token_ids=list(output), finish_reason="abort")
    return SimpleNamespace(beam_candidates=rows, num_output_tokens=len(output), output=sample)


@pytest.mark.parametrize(
    ("params", "eos", "ends", "num_candidates"),
    [
        ({}, {EOS}, {EOS}, 6),
        ({"stop_token_ids": [STOP, 42, 43]}, {EOS}, {EOS, STOP, 42, 43}, 15),
        ({"stop_token_ids": [STOP], "ignore_eos": True}, set(), {STOP}, 6),
        ({"ignore_eos": True}, set(), set(), 6),
    ],
)
def test_enough_candidates_are_compared_that_the_tokens_that_end_an_output_leave_others(
    params, eos, ends, num_candidates
):
    search = make_search(3, **params)
    assert (search.eos_token_ids, search.end_token_ids) == (eos, ends)
    assert search.num_candidates == num_candidates
    assert [draw.logprobs for draw in start(search).draws] == [num_candidates] * 3


def test_a_search_may_be_as_wide_as_the_engine_and_the_vocabulary_allow():
    assert make_search(25, max_num_seqs=25).num_candidates == 50
    with pytest.raises(InvalidParamsError, match="beam_width=25: this engine runs at most max_num_seqs=24"):
        make_search(25, max_num_seqs=24)
    with pytest.raises(InvalidParamsError, match="compares 52 candidates in a step, and this model has only 50"):
        make_search(26, max_num_seqs=26)


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(3, 8), (4, 8), (5, 7), (11, 1)])
def test_an_output_is_no_longer_than_the_context_allows(num_tokens, max_tokens):
    search = make_search()
    start(search, num_tokens)
    assert search.max_tokens == max_tokens


@pytest.mark.parametrize(("temperature", "drawn"), [(0.0, 0.0), (0.5, 0.5), (1.0, 0.0), (2.0, 2.0)])
def test_a_temperature_that_changes_no_log_probability_is_left_out(temperature, drawn):
    (draw, _) = start(make_search(temperature=temperature)).draws
    assert (draw.temperature, draw.logprobs_mode) == (drawn, "processed_logprobs")


def test_a_beam_without_candidates_is_an_error():
    search = make_search()
    start(search)
    assert search.select([beam({1: -1.0, 2: -2.0, 3: -3.0, 4: -4.0})]) == [(0, 1), (0, 2)]
    with pytest.raises(ValueError, match="zip"):
        search.select([beam({1: -1.0, 2: -2.0, 3: -3.0, 4: -4.0}, 1), beam(None, 2)])


def test_a_search_ends_when_its_beams_can_at_most_be_as_good_as_what_it_has_found():
    search = make_search(1)
    start(search)
    assert search.select([beam({EOS: -1.0, 1: -1.0})]) == []
    better = make_search(1)
    start(better)
    assert better.select([beam({EOS: -1.0, 1: -0.5})]) == [(0, 1)]


def test_the_outputs_of_a_search_that_is_cut_short_are_numbered_and_have_their_text():
    search = make_search(2)
    start(search)
    assert search.select([beam({1: -1.0, EOS: -2.0, 2: -3.0, 3: -4.0})]) == [(0, 1), (0, 2)]
    found, cut = search.outputs([beam(None, 1), beam(None, 2)])
    assert (found.index, found.token_ids, found.text, found.finish_reason) == (0, [], "", "stop")
    assert (cut.index, cut.token_ids, cut.text, cut.finish_reason) == (1, [1], "b", "abort")
    assert (found.cumulative_logprob, cut.cumulative_logprob) == (-2.0, -1.0)
