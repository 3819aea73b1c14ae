"""A process that was forked from the one with an engine of several ranks or stages leaves that engine alone."""

import os
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.common.batch import Batch
from quire.common.errors import EngineBrokenError
from tests.kernels.isas import needs_native
from tests.parallel.ranks import answers, in_threads

pytestmark = needs_native
ASKED: Any = [[5, 6, 7]], [SamplingParams(temperature=0, max_tokens=4)]


@pytest.mark.parametrize("given", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_a_fork_neither_uses_nor_ends_what_belongs_to_its_parent(
    given: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_threads():
        llm = LLM(max_model_len=64, num_gpu_blocks_override=40, num_threads=1, enable_lora=True, **given)
        executor, expected = llm.engine.executor, answers(llm, *ASKED)
        with monkeypatch.context() as fork:
            fork.setattr(os, "getpid", lambda: -1)
            for use in (lambda: executor.execute(Batch(0, ())), lambda: executor.unload_adapter(0)):
                with pytest.raises(EngineBrokenError, match="belongs to process"):
                    use()
            _, end, given_to_it, _ = executor._finalizer._finalize.peek()
            end(*given_to_it)  # which is what Python does when the fork ends
        assert answers(llm, *ASKED) == expected
        executor.close()
