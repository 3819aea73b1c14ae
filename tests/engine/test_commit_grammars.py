"""What a step's result changes where a grammar says what may come."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import pytest

from quire.engine.requests.sequence import SequenceGroup, SequenceStatus

from .fake import Harness, drafting_by, expected_output, history, next_token
from .test_commit import PROMPT, WRONG, commit, count_steps


class Spelled:
    """A grammar of one text. Some of its tokens are forced, and it may end at some places before its end."""

    error: str | None = None

    def __init__(self, text: list[int], forced: Collection[int] = (), ends: Collection[int] = (), place: int = 0):
        self.text, self.forced, self.ends, self.place = text, forced, ends, place
        self.is_usable = True

    def fork(self) -> Spelled:
        return Spelled(self.text, self.forced, self.ends, self.place)

    trial = fork

    def mask(self) -> np.ndarray:
        return np.full(2, -1, np.int32)

    def advance(self, token_id: int) -> bool:
        self.is_usable &= self.text[self.place : self.place + 1] == [token_id]
        self.place += 1
        return self.is_usable

    def num_allowed(self, token_ids: Collection[int]) -> int:
        return len(token_ids)

    def forced_tokens(self) -> list[int]:
        end = self.place
        while end in self.forced:
            end += 1
        return self.text[self.place : end]

    @property
    def may_end(self) -> bool:
        return self.is_usable and self.place in self.ends

    @property
    def is_finished(self) -> bool:
        return self.is_usable and self.place == len(self.text)


def spelled(text: list[int], max_tokens: int = 8, **grammar: object) -> tuple[Harness, SequenceGroup]:
    """A harness with one request, which has this grammar."""
    harness = count_steps(Harness(num_blocks=20))
    group = harness.add(PROMPT, max_tokens)
    group.seqs[0].grammar = Spelled(text, **grammar)
    return harness, group


def test_forced_tokens_follow_without_a_draw_and_the_next_is_drawn_behind_them():
    first = expected_output(PROMPT, 1)
    forced = [*first, WRONG, WRONG + 1]
    harness, group = spelled([*forced, next_token(history(PROMPT + forced)), WRONG], forced={1, 2, 4})
    assert commit(harness) == [group]
    assert harness.output(group) == forced
    assert commit(harness) == [group]
    assert harness.output(group) == group.seqs[0].grammar.text
    assert group.seqs[0].status is SequenceStatus.FINISHED_STOPPED, "the grammar is complete"
    assert (harness.committer.num_generated_tokens, group.error) == (5, None)
    assert not harness.requests


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_forced_tokens_end_where_the_request_does(max_tokens):
    text = expected_output(PROMPT, 1) + [WRONG] * 5
    harness, group = spelled(text, max_tokens, forced=range(1, 6))
    assert commit(harness) == [group]
    assert harness.output(group) == text[:max_tokens]
    assert (group.seqs[0].status, group.error) == (SequenceStatus.FINISHED_LENGTH_CAPPED, None)


def test_nothing_is_forced_between_accepted_drafts():
    expected = expected_output(PROMPT, 9)
    harness, group = spelled([*expected, WRONG], 9, forced={3})
    drafting = drafting_by(lambda group, seq: expected[seq.num_output_tokens :][:3], 80)
    harness.scheduler.drafting = harness.committer.drafting = drafting
    harness.run()
    harness.check_output(group)
    assert group.error is None
    assert harness.scheduler.num_steps == 3, "drafts are accepted"


@pytest.mark.parametrize("error", [None, "too many items"])
def test_a_draw_that_the_grammar_rejects_ends_the_request_with_the_tokens_before(error):
    expected = expected_output(PROMPT, 2)
    harness, group = spelled([*expected, WRONG])
    for _ in range(2):
        harness.step()
    group.seqs[0].grammar.error = error
    assert commit(harness) == [group]
    reason = error or "the grammar does not allow the token that was drawn"
    assert group.error == f"stopped after 2 tokens: {reason}"
    assert harness.output(group) == expected
    assert group.seqs[0].status is SequenceStatus.FINISHED_LENGTH_CAPPED
    assert group.metrics.finished_time == 3
    assert not harness.requests


def test_a_draw_that_the_grammar_rejects_where_it_may_end_ends_the_request_without_an_error():
    expected = expected_output(PROMPT, 2)
    harness, group = spelled([*expected, WRONG], ends={2})
    harness.run()
    assert (harness.output(group), group.error) == (expected, None)
    assert group.seqs[0].status is SequenceStatus.FINISHED_STOPPED
