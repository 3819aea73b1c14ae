"""What a step's result changes where a prompt is pooled."""

from __future__ import annotations

import numpy as np

from quire.engine.requests.sequence import SequenceStatus

from .fake import Harness
from .test_commit import PROMPT, commit, count_steps


def test_a_prompt_is_pooled_when_all_of_it_is_computed():
    harness = count_steps(Harness(num_blocks=20, max_num_batched_tokens=4))
    group, vector = harness.add_pooled(PROMPT[:6]), np.ones(3, np.float32)
    assert [commit(harness), commit(harness, pooled={0: vector})] == [[], [group]]
    seq = group.seqs[0]
    assert (seq.pooling.result is vector, seq.status, group.error) == (True, SequenceStatus.FINISHED_STOPPED, None)
    assert (group.metrics.first_token_time, group.metrics.finished_time) == (2, 2)
    assert (harness.committer.num_prompt_tokens, harness.committer.num_tokens) == (6, 6)
    assert not harness.requests


def test_a_prompt_whose_pooling_failed_ends_alone_with_the_reason():
    harness = Harness(num_blocks=20)
    bad, other = harness.add_pooled(PROMPT[:6]), harness.add_pooled(PROMPT[:5])
    vector = np.ones(3, np.float32)
    assert commit(harness, pooled={1: vector}, pool_errors={0: "not finite"}) == [bad, other]
    assert (bad.error, bad.has_failed) == ("request '0': not finite", True)
    assert (other.error, other.seqs[0].pooling.result is vector) == (None, True)
    assert not harness.requests
