"""What attention keeps of one call for the next: its plan, as long as all that it was made of stays the same."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quire import kernels
from quire.common.errors import KernelError
from quire.kernels.variants import AttentionVariant
from tests.effort import examples
from tests.kernels.isas import native, needs_native, using
from tests.kernels.paged import Heads, PagedBatch, make_stream, same_bits

LENS = [1100, 1100, 40]
"""Of sequences, whose first two may share their first 512 positions or more."""


@dataclass(frozen=True)
class Call:
    num_threads: int = 2
    window: int | None = None
    ends: tuple[int, int, int] = (1100, 1100, 40)
    """Of what each sequence has in the cache, the last of it asked for."""
    query_len: int = 1
    num_shared: int = 0
    """Blocks that the second sequence has in common with the first."""


VALUES = {
    "num_threads": st.sampled_from([1, 2, 3]),
    "window": st.sampled_from([None, 600]),
    "ends": st.tuples(st.sampled_from([700, 1100]), st.sampled_from([700, 1100]), st.sampled_from([8, 40])),
    "query_len": st.sampled_from([0, 1, 5]),
    "num_shared": st.sampled_from([0, 32, 64]),
}
changes = st.one_of([st.tuples(st.just(name), values) for name, values in VALUES.items()])


@needs_native
@settings(max_examples=examples(25), deadline=None)
@given(changes=st.lists(changes, min_size=1, max_size=10))
def test_no_call_is_computed_by_the_plan_of_another(changes):
    streams = [make_stream(Heads(4, 2, 16, torch.float32), n, seed) for seed, n in enumerate(LENS)]
    batch = PagedBatch(Heads(4, 2, 16, torch.float32), streams, block_size=16)
    batch.inputs([(0, n) for n in LENS])
    tables = batch.block_tables.clone()

    def attend(call: Call) -> tuple[list[Tensor], int]:
        batch.block_tables[1, : call.num_shared] = tables[0, : call.num_shared]
        batch.block_tables[1, call.num_shared :] = tables[1, call.num_shared :]
        begins = [end - min(call.query_len, end) for end in call.ends]
        query = torch.cat([s.query[begin:end] for s, begin, end in zip(streams, begins, call.ends, strict=True)])
        counts = [end - begin for begin, end in zip(begins, call.ends, strict=True)]
        starts = torch.tensor([0, *counts]).cumsum(0).int()
        ends = torch.tensor(call.ends, dtype=torch.int32)
        caches = batch.k_cache, batch.v_cache
        variant = AttentionVariant(call.window)
        out = kernels.paged_attention(query, *caches, starts, ends, batch.block_tables, 0.25, variant)
        return list(out.split(counts)), native.attention_sections_read()

    call = Call()
    for name, value in changes:
        call = dataclasses.replace(call, **{name: value})
        with using(kernels.isa(), call.num_threads), ThreadPoolExecutor(1) as fresh:
            found, num_read = attend(call)
            expected, expected_read = fresh.submit(attend, call).result()
        assert all(map(same_bits, found, expected))
        assert num_read == expected_read


@needs_native
def test_what_is_refused_is_refused_again_and_what_was_computed_before_still_is():
    heads = Heads(4, 2, 16, torch.float32)
    batch = PagedBatch(heads, [make_stream(heads, 100, seed=1)], block_size=16)
    (before,) = batch.attend([(0, 100)])
    right = int(batch.block_tables[0, 2])
    batch.block_tables[0, 2] = 10_000
    inputs = (torch.ones(100, 4, 16), batch.k_cache, batch.v_cache, torch.tensor([0, 100], dtype=torch.int32))
    for _ in range(2):
        with pytest.raises(KernelError, match="block id 10000"):
            kernels.paged_attention(*inputs, torch.tensor([100], dtype=torch.int32), batch.block_tables, 0.25)
    batch.block_tables[0, 2] = right
    assert same_bits(batch.attend([(0, 100)])[0], before)
