"""A model that cannot be loaded is told of, and the next attempt finds nothing amiss."""

import pytest

from quire import LLM
from quire.common.faults import Fault, inject

SMALL = {"num_gpu_blocks_override": 8, "max_model_len": 32}


@pytest.mark.parametrize(("error", "kind"), [("MemoryError", MemoryError), ("EIO", OSError)])
def test_weights_that_cannot_be_read(error, kind):
    with inject(Fault("weights.load", error=error, after=7)) as injected, pytest.raises(kind, match="injected at"):
        LLM(**SMALL)
    assert isinstance(injected.subjects[0], str)
    assert LLM(**SMALL).generate("a", use_tqdm=False)[0].error is None
