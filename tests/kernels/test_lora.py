"""Adapters added to the rows of a batch: as the reference has them, and with bits that only the row decides."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import kernels
from quire.common.errors import KernelError
from quire.kernels.backends import reference
from quire.kernels.lora import Factors
from tests.effort import examples

from .isas import ISAS, needs_native, using
from .tolerances import assert_close

DTYPES = [torch.float32, torch.bfloat16]
MAX_RANK = 64
RANKS = ((16, 16, 16), (4, None, 9), (None, 64, None), (1, 2, 3), (None, None, 8))


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_factors(ranks, sizes, k, dtype, seed) -> list[Factors | None]:
    return [
        None
        if rank is None
        else ((randn(rank, k, seed=seed + 7 * i) / k**0.5).to(dtype), (randn(n, rank, seed=seed + i) / 4).to(dtype))
        for i, (rank, n) in enumerate(zip(ranks, sizes, strict=True))
    ]


def make_table(sizes, k, dtype) -> tuple[kernels.LoRATable, list[list[Factors | None]]]:
    """An adapter in each slot but the last, which is free."""
    num_slots = len(RANKS)
    table = kernels.LoRATable(sizes, k, dtype, num_slots + 1, MAX_RANK)
    given = [make_factors(RANKS[slot][: len(sizes)], sizes, k, dtype, seed=slot) for slot in range(num_slots)]
    given = [factors if any(factors) else make_factors((5,) * len(sizes), sizes, k, dtype, 3) for factors in given]
    for slot, factors in enumerate(given):
        table.put(slot, kernels.pack_lora(factors, sizes, k, dtype))
    return table, given


def expected_row(out, x, factors):
    present = [pair or (x.new_zeros(0, x.shape[1]), x.new_zeros(n, 0)) for pair, n in factors]
    ranks = [len(a) for a, _ in present]
    return reference.with_lora(out, x, torch.cat([a for a, _ in present]), [b for _, b in present], ranks)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "k"), [((32,), 1), ((33, 5, 40), 7), ((64, 96), 129), ((200, 31, 1), 515), ((896,), 64)]
)
def test_sums_are_the_references_for_any_number_of_rows(isa, dtype, sizes, k):
    table, given_factors = make_table(sizes, k, dtype)
    with using(isa):
        for rows in (0, 1, 2, 3, 5, 9, 40, 193):
            x, before = randn(rows, k, seed=rows).to(dtype), randn(rows, sum(sizes), seed=rows + 1).to(dtype)
            slots = torch.arange(rows) * 7 % (len(given_factors) + 2) - 1
            out = before.clone()
            kernels.add_lora(x, out, table, slots)
            for row, slot in enumerate(slots.tolist()):
                if slot in (-1, len(given_factors)):
                    assert torch.equal(out[row], before[row])
                else:
                    factors = list(zip(given_factors[slot], sizes, strict=True))
                    expected = expected_row(before[row : row + 1], x[row : row + 1], factors)
                    assert_close("add_lora", out[row : row + 1], expected)


@pytest.mark.essential
@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
@settings(max_examples=examples(15), deadline=None)
def test_a_row_alone_has_the_bits_it_has_in_any_batch_on_any_number_of_threads(isa, dtype, data):
    sizes = data.draw(st.sampled_from([(300,), (96, 32, 33), (128, 129)]), "sizes")
    k = data.draw(st.sampled_from([1, 3, 64, 515, 1024]), "k")
    rows = data.draw(st.integers(1, 150), "rows")
    table, given_factors = make_table(sizes, k, dtype)
    slots = torch.tensor(
        data.draw(st.lists(st.integers(-1, len(given_factors)), min_size=rows, max_size=rows), "slots")
    )
    chosen = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=5, unique=True), "chosen")
    x, before = randn(rows, k).to(dtype), randn(rows, sum(sizes), seed=5).to(dtype)
    whole, part = before.clone(), before[chosen]
    with using(isa, num_threads=data.draw(st.integers(1, 4), "threads of the batch")):
        kernels.add_lora(x, whole, table, slots)
    with using(isa, num_threads=data.draw(st.integers(1, 4), "threads of the part")):
        kernels.add_lora(x[chosen], part, table, slots[chosen])
        assert torch.equal(whole[chosen], part)


@needs_native
def test_a_recording_reads_the_adapters_and_slots_of_each_replay():
    sizes, k = (40, 8), 24
    table, given_factors = make_table(sizes, k, torch.float32)
    backend, workspace = kernels.backend_for("cpu"), kernels.Workspace()
    x, out, slots = randn(3, k), torch.zeros(3, 48), torch.tensor([-1, 0, 1])
    graph = backend.graph()
    with workspace, workspace.recording(), graph.record():
        kernels.add_lora(x, out, table, slots)
    larger = make_factors((MAX_RANK, MAX_RANK), sizes, k, torch.float32, 9)
    table.put(2, kernels.pack_lora(larger, sizes, k, torch.float32))
    table.put(1, None)
    slots.copy_(torch.tensor([2, 1, -1]))
    out.zero_()
    graph.replay()
    assert_close("add_lora", out[:1], expected_row(out[:1] * 0, x[:1], list(zip(larger, sizes, strict=True))))
    assert out[1:].eq(0).all()
    slots[0] = len(given_factors) + 1
    with pytest.raises(KernelError, match=r"adapter slot 6 is not in \[-1, 6\)"):
        graph.replay()


@pytest.mark.parametrize("slot", [-2, 6])
def test_slots_that_do_not_exist_are_refused(slot):
    table, _ = make_table((8,), 4, torch.float32)
    with pytest.raises(KernelError, match=rf"adapter slot {slot} is not in \[-1, 6\)"):
        kernels.add_lora(torch.zeros(1, 4), torch.zeros(1, 8), table, torch.tensor([slot]))


@needs_native
def test_true_ranks_are_kept_and_only_panels_are_filled():
    sizes, k = (64, 32, 1), 896
    weight = kernels.pack_lora(make_factors((6, None, 5), sizes, k, torch.bfloat16, 0), sizes, k, torch.bfloat16)
    assert weight.nbytes == 2 * (12 * 896 + 64 * 6 + 32 * 5)


@pytest.mark.parametrize(
    "changed",
    [
        {"x": torch.zeros(2, 5)},
        {"x": torch.zeros(2, 4, dtype=torch.bfloat16)},
        {"x": torch.zeros(4, 2).T},
        {"out": torch.zeros(2, 9)},
        {"out": torch.zeros(3, 8)},
        {"out": torch.zeros(2, 16)[:, :8]},
        {"slots": torch.zeros(2, dtype=torch.int32)},
        {"slots": torch.zeros(2, 1, dtype=torch.int64)},
        {"slots": torch.zeros(2, dtype=torch.int64, device="meta")},
    ],
)
def test_what_does_not_fit_is_refused(changed):
    table, _ = make_table((8,), 4, torch.float32)
    good = {"x": torch.zeros(2, 4), "out": torch.zeros(2, 8), "slots": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(KernelError, match=r"add_lora takes x \[num_tokens, 4\]"):
        kernels.add_lora(adapters=table, **(good | changed))


@pytest.mark.parametrize(
    ("factors", "sizes"),
    [
        ([None], (8,)),
        ([], ()),
        ([(torch.zeros(2, 4), torch.zeros(8, 2))], (8, 8)),
        ([(torch.zeros(2, 4), torch.zeros(8, 2))] * 4, (8, 8, 8, 8)),
        ([(torch.zeros(2, 5), torch.zeros(8, 2))], (8,)),
        ([(torch.zeros(2, 4), torch.zeros(8, 3))], (8,)),
        ([(torch.zeros(2, 4), torch.zeros(7, 2))], (8,)),
        ([(torch.zeros(0, 4), torch.zeros(8, 0))], (8,)),
        ([(torch.zeros(2, 4, dtype=torch.int8), torch.zeros(8, 2))], (8,)),
    ],
)
def test_factors_that_do_not_fit_are_refused(factors, sizes):
    with pytest.raises(KernelError, match="pack_lora takes"):
        kernels.pack_lora(factors, sizes, 4, torch.float32)


def test_an_adapter_of_another_projection_is_not_put_into_a_table():
    table, _ = make_table((8,), 4, torch.float32)
    for sizes, k, rank in (((7,), 4, 2), ((8,), 5, 2), ((8,), 4, MAX_RANK + 1)):
        factors = make_factors((rank,), sizes, k, torch.float32, 0)
        with pytest.raises(KernelError, match="LoRATable takes"):
            table.put(0, kernels.pack_lora(factors, sizes, k, torch.float32))
