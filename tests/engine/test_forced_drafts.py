"""What a grammar forces is drafted, and what it nearly forces; outputs are the same with and without."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.common.params import StructuredOutputsParams
from quire.engine.drafting.forced import ForcedTokens
from quire.engine.drafting.trust import SequenceDrafts

SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"module": {"enum": ["json", "pickle"]}, "return_type": {"type": "integer", "maximum": 9}},
        "required": ["module", "return_type"],
        "additionalProperties": False,
    },
    "minItems": 4,
    "maxItems": 4,
}
JSON = StructuredOutputsParams(json=SCHEMA)
REQUESTS = {
    "plain": {"temperature": 0},
    "drawn": {"seed": 3, "temperature": 1.5},
    "compact": {"seed": 4, "structured_outputs": StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)},
    "logprobs": {"temperature": 0.5, "seed": 5, "logprobs": 2},
    "stopped": {"seed": 6, "stop": ["return_ty"]},
    "stopped by a token": {"seed": 6, "stop_token_ids": [95]},
    "long": {"seed": 7, "min_tokens": 30},
    "short": {"seed": 8, "max_tokens": 9},
    "samples": {"seed": 9, "n": 2},
    "banned": {"seed": 10, "bad_words": ["json"], "presence_penalty": 0.5},
    "regex": {"seed": 11, "structured_outputs": StructuredOutputsParams(regex="(abc|abd){3} = [0-9]{4} hello world")},
}


def run(method: str) -> tuple[dict[str, object], int]:
    """The outputs, and the steps of the request with the most. When a request begins depends on its grammar's trial."""
    config = {"method": method, "adaptive": False}
    engine = LLM(max_model_len=256, num_gpu_blocks_override=256, speculative_config=config).engine
    for name, changed in REQUESTS.items():
        params = SamplingParams(**{"max_tokens": 120, "structured_outputs": JSON} | changed)
        engine.add_request(name, f"Some {name} modules as JSON:", params)
    outputs, num_steps = {}, Counter[str]()
    while engine.has_unfinished_requests():
        for output in engine.step():
            num_steps[output.request_id] += 1
            outputs[output.request_id] = [(s.token_ids, s.text, s.logprobs, s.finish_reason) for s in output.outputs]
        engine.requests.check_integrity()
    return outputs, max(num_steps.values())


def test_outputs_are_those_without_drafts_in_fewer_steps():
    (expected, num_steps), (found, num_fewer) = run("off"), run("forced")
    assert found == expected
    assert num_fewer < 0.75 * num_steps
    assert len(expected["samples"]) == 2


class Spelled:
    """A grammar of a text of letters in which some places are forced, and capitals may be anything."""

    def __init__(self, text: str, forced: str = "", place: int = 0) -> None:
        self.text, self.forced, self.place = text, forced, place

    def fork(self):
        return Spelled(self.text, self.forced, self.place)

    trial = fork

    def mask(self):
        words = np.zeros(16, np.int32)
        words[:] = -1 if self.text[self.place].isupper() else 0
        words[0] |= 1 + self.text[self.place].islower()
        return words

    def advance(self, token_id):
        self.place += 1
        return True

    def forced_tokens(self, *, always):
        assert always
        text = self.text[self.place :]
        return [ord(letter) for letter in text[: len(text) - len(text.lstrip(self.forced))]]

    @property
    def is_finished(self):
        return self.place >= len(self.text)


def sequence(text: str, done: str = "", forced: str = "f"):
    tokens = [1, *map(ord, done)]
    grammar = Spelled(text, forced, len(done))
    return SimpleNamespace(seq_id=1, token_ids=tokens, grammar=grammar, drafting=SequenceDrafts({}))


def go_on(seq, text: str) -> None:
    for letter in text:
        seq.token_ids.append(ord(letter))
        seq.grammar.advance(ord(letter))


def drafted(drafter, seq, tenant: str = "a", most: int = 8) -> str:
    group = SimpleNamespace(tenant=tenant, content_key=0)
    return "".join(map(chr, drafter.propose(group, seq, most).token_ids))


def odds(drafter, seq) -> tuple[float, ...]:
    return drafter.propose(SimpleNamespace(tenant="a", content_key=0), seq, 8).odds


def test_what_is_forced_is_certain_and_what_was_drawn_once_is_not():
    drafter, seq = ForcedTokens(), sequence("fffaffa")
    assert odds(drafter, seq) == (1.0,) * 3
    go_on(seq, "fffa")
    assert odds(drafter, seq) == pytest.approx((1.0, 1.0, 1 / 1.5))


def test_what_was_drawn_behind_the_same_token_counts_or_else_what_was_drawn_in_such_a_place():
    drafter, seq = ForcedTokens(), sequence("a" * 60)
    for letter in "x" * 10 + "y" * 4:
        drafted(drafter, seq)
        go_on(seq, letter)
    assert drafted(drafter, seq, most=1) == "y"
    assert odds(drafter, seq)[0] == pytest.approx(3 / 3.5), "three times behind another y"
    seq.token_ids[-1] = ord("z")
    assert drafted(drafter, seq, most=1) == "x"
    assert odds(drafter, seq)[0] == pytest.approx(10 / 14.5)


def test_the_latest_sixteen_tokens_of_a_place_are_remembered_and_of_equals_the_newest_is_drafted():
    drafter, seq = ForcedTokens(), sequence("a" * 60)
    for letter in "x" * 9 + "y" * 8:
        drafted(drafter, seq)
        go_on(seq, letter)
    assert drafted(drafter, seq, most=1) == "y"
    seq.token_ids[-1] = ord("z")
    assert drafted(drafter, seq, most=1) == "y"
    assert odds(drafter, seq)[0] == pytest.approx(8 / 16.5)


def test_forced_tokens_are_drafted_up_to_the_first_choice():
    assert drafted(ForcedTokens(), sequence("fffaf")) == "fff"
    assert drafted(ForcedTokens(), sequence("fffaf"), most=2) == "ff"
    assert drafted(ForcedTokens(), sequence("affaf", "a")) == "ff"
    assert drafted(ForcedTokens(), sequence("ff", "f")) == "f", "and not beyond the end"
    assert drafted(ForcedTokens(), SimpleNamespace(grammar=None)) == ""


def test_a_choice_is_drafted_as_it_was_made_before_by_the_same_tenant():
    drafter, first = ForcedTokens(), sequence("affaff")
    assert drafted(drafter, first) == ""
    go_on(first, "aff")
    assert drafted(drafter, first) == "aff", "where the grammar allows the same"
    drafter.finish(None, first)
    assert drafted(drafter, sequence("affaff")) == "affaff"
    assert drafted(drafter, sequence("affaff"), tenant="b") == ""


def test_wrong_drafts_are_unlearned_and_teach_nothing_behind_them():
    drafter, seq = ForcedTokens(), sequence("a" * 40)
    drafted(drafter, seq)
    go_on(seq, "x")
    assert drafted(drafter, seq) == "xxxxxxxx"
    go_on(seq, "y")
    assert drafted(drafter, seq) == "yyyyyyyy"
    kept = sorted(bytes(drawn).decode() for drawn in drafter._drawn.values())
    assert kept == ["x", "xy", "y"], "the places behind the wrong draft tell nothing"
    assert odds(drafter, seq) == pytest.approx((1 / 2.5,) * 8), "one of two times"


def test_the_text_of_values_is_not_drafted():
    drafter, seq = ForcedTokens(), sequence("AAf")
    assert drafted(drafter, seq) == ""
    go_on(seq, "A")
    assert drafted(drafter, seq) == ""
    go_on(seq, "A")
    assert drafted(drafter, seq) == "f"


def test_only_the_latest_places_are_remembered(monkeypatch):
    monkeypatch.setattr("quire.engine.drafting.forced._MOST_PLACES", 2)
    drafter = ForcedTokens()
    for newest in "bcd":
        seq = sequence("a" * 9, newest)
        drafted(drafter, seq)
        go_on(seq, "a")
        drafter.finish(None, seq)
    assert len(drafter._drawn) == 2
    assert drafted(drafter, sequence("a" * 9, "z"), most=1) == "a", "what is known of any newest token was used last"
    assert [place[2:] for place in drafter._drawn] == [(ord("d"),), ()]


def test_what_follows_a_likely_token_is_what_followed_it_before():
    drafter, seq = ForcedTokens(), sequence("a" * 9)
    for letter in "xyzz":
        drafted(drafter, seq)
        go_on(seq, letter)
    drafter.finish(None, seq)
    assert drafted(drafter, sequence("a" * 9), most=2) == "xy"


def test_places_where_the_grammar_allows_other_tokens_are_apart():
    drafter, seq = ForcedTokens(), sequence("a")
    drafted(drafter, seq)
    go_on(seq, "x")
    drafter.finish(None, seq)
    assert drafted(drafter, sequence("a")) == "x"
    assert drafted(drafter, sequence("0")) == ""


def test_it_goes_no_further_than_the_number_of_drafts_that_is_wanted():
    drafter, seq = ForcedTokens(), sequence("faaa")
    assert drafted(drafter, seq, most=1) == "f"
    assert seq.drafting.walk.places == [()]


@pytest.mark.parametrize("adaptive", [True, False])
def test_drafts_of_a_sequence_with_a_grammar_are_looked_for_in_each_step(adaptive):
    config = {"method": "forced", "adaptive": adaptive}
    engine = LLM(max_model_len=64, num_gpu_blocks_override=16, speculative_config=config).engine
    drafting = engine.scheduler.drafting
    seq = sequence("a")
    seq.drafting.pause = 9
    assert not drafting._pauses(seq)
    seq.grammar = None
    assert drafting._pauses(seq) is adaptive
