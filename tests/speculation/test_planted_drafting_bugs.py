"""Bugs planted where drafts are verified: the tests that everything relies on see each of them."""

from collections.abc import Callable

import pytest

from quire.engine.scheduling import scheduled
from quire.engine.step import commit
from quire.engine.step.commit import Committer
from quire.runner.sampling import draw_tensors
from quire.text.grammar.state import GrammarState
from tests.engine import test_drafts as checks

Plant = Callable[[pytest.MonkeyPatch], None]


def accept_one_too_many(patch: pytest.MonkeyPatch) -> None:
    accepted = commit.accepted_drafts

    def one_more(step, drawn):
        drafts = step.token_ids[len(step.token_ids) - step.num_drafts :]
        return list(drafts[: len(accepted(step, drawn)) + 1])

    patch.setattr(commit, "accepted_drafts", one_more)


def publish_before_the_check(patch: pytest.MonkeyPatch) -> None:
    original = Committer.commit

    def commit_published(self, batch, result):
        steps, blocks = {s.seq_id: s for s in batch.sequences}, self.requests.blocks
        publish = blocks.publish

        def publish_all(seq_id, token_ids, num_computed):
            step, (_, seq) = steps[seq_id], self.requests.owners[seq_id]
            drafts = step.token_ids[len(step.token_ids) - step.num_drafts :]
            publish(seq_id, [*seq.token_ids, *drafts], step.end)

        patch.setattr(blocks, "publish", publish_all)
        changed = original(self, batch, result)
        patch.setattr(blocks, "publish", publish)
        return changed

    patch.setattr(Committer, "commit", commit_published)


def keep_the_grammar_where_the_drafts_lead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GrammarState, "trial", lambda self: self)


def leave_the_masks_of_drafts_out(patch: pytest.MonkeyPatch) -> None:
    masks = scheduled._masks
    patch.setattr(scheduled, "_masks", lambda seq, drafts: masks(seq, drafts)[:1] * (1 + len(drafts)))


def draw_by_row(patch: pytest.MonkeyPatch) -> None:
    positions = draw_tensors._positions
    patch.setattr(draw_tensors, "_positions", lambda sequences: list(range(len(positions(sequences)))))


def on_the_fake_model() -> None:
    checks.test_right_drafts_save_steps_and_wrong_ones_cost_none(1.0, 12)


def on_a_real_model() -> None:
    checks.test_a_real_model_says_the_same_with_drafts({})


@pytest.mark.parametrize(
    ("plant", "check"),
    [
        (accept_one_too_many, on_the_fake_model),
        (publish_before_the_check, checks.test_only_accepted_tokens_can_be_found_in_the_cache),
        (keep_the_grammar_where_the_drafts_lead, on_a_real_model),
        (leave_the_masks_of_drafts_out, on_a_real_model),
        (draw_by_row, on_a_real_model),
    ],
)
def test_a_planted_bug_is_seen(plant: Plant, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check()
