"""Every architecture and variant: several ranks give the tokens and log-probabilities of one process, bit by bit."""

import re
import zlib
from typing import Any

import pytest

from quire import ConfigError, SamplingParams
from tests.kernels.isas import needs_native
from tests.models.test_windows_in_the_engine import make_llm
from tests.models.variants import VARIANTS
from tests.parallel.ranks import answers, in_threads

pytestmark = needs_native
PROMPTS = [[7 * i % 90 + 3 for i in range(29)], [5, 6, 7], [7 * i % 90 + 3 for i in range(12)] + [4]]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1, seed=1, max_tokens=9, ignore_eos=True, logprobs=0),
    SamplingParams(temperature=0.8, seed=2, n=2, max_tokens=5, ignore_eos=True, logprobs=0),
]


def run(folder: Any, num_ranks: int, **given: Any) -> list[Any]:
    """Chunks of prompts, hits, and few blocks."""
    how = {"block_size": 4, "max_model_len": 64, "max_num_batched_tokens": 12, "num_gpu_blocks_override": 40} | given
    with in_threads():
        llm = make_llm(folder, tensor_parallel_size=num_ranks, num_threads=1, **how)
        try:
            return answers(llm, PROMPTS, PARAMS)
        finally:
            llm.engine.executor.close()


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("variant", "all_counts"),
    [(name, False) for name in VARIANTS] + [pytest.param(name, True, marks=pytest.mark.thorough) for name in VARIANTS],
)
def test_ranks_give_the_bits_of_one_process(variant: str, all_counts: bool, save_checkpoint: Any) -> None:
    """Two ranks, or three or four, whichever; with `all_counts`, all of these."""
    architecture, fields = VARIANTS[variant]
    folder, _ = save_checkpoint(architecture, **fields | {"vocab_size": 8192})
    expected = run(folder, 1)
    assert len({token for outputs, _, _ in expected for output in outputs for token in output.token_ids}) > 3
    counts = [2, 3, 4] if all_counts else [2 + zlib.crc32(variant.encode()) % 3]
    for num_ranks in counts:
        try:
            got = run(folder, num_ranks)
        except ConfigError as error:  # there are fewer heads
            most = re.search(r"has (\d+) attention heads.*: at most (\d+)", str(error))
            assert most is not None
            assert 2 <= int(most[2]) < num_ranks
            got = run(folder, int(most[2]))
        assert got == expected, num_ranks
