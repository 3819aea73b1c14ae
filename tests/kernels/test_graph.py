"""Workspaces and recorded kernels."""

import errno
import mmap
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire import kernels
from quire.common.errors import KernelError, OutOfMemoryError
from quire.kernels.backends.workspace import WeightMemory, empty
from tests.kernels.isas import ISAS, needs_native, using

LARGE = 70_000  # bytes: what a workspace does not leave to the system


def test_small_matrices_share_memory_which_goes_when_all_of_them_are_gone():
    memory = WeightMemory()
    pieces = [memory.empty(LARGE + i).fill_(i) for i in range(3)]
    assert all(piece.data_ptr() % 64 == 0 and bool((piece == i).all()) for i, piece in enumerate(pieces))
    assert pieces[2].data_ptr() - pieces[0].data_ptr() < 3 * LARGE
    assert memory.empty(100).shape == (100,)
    large = memory.empty(2**26)
    assert large.nbytes == 2**26
    assert memory._region() is not None
    del pieces
    assert memory._region() is None
    assert memory.empty(LARGE).shape == (LARGE,)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), max_size=40))
@settings(deadline=None)
def test_live_tensors_never_overlap_and_dead_ones_give_their_memory_back(steps):
    """Each step makes a tensor of so many pieces, or drops one of those alive; a region holds about 20."""
    workspace = kernels.Workspace(region_bytes=20 * LARGE)
    alive: list[tuple[torch.Tensor, int]] = []
    with workspace:
        for number, (pieces, drop) in enumerate(steps):
            if alive and drop > 2:
                del alive[drop % len(alive)]
            tensor = empty((pieces, LARGE), torch.uint8)
            assert tensor.data_ptr() % 64 == 0
            alive.append((tensor.fill_(number)[:, 5:][-1], number))  # a view keeps the whole
            del tensor
            assert all(bool((view == value).all()) for view, value in alive)
    del alive
    assert workspace.num_bytes_taken == 0


def test_a_place_is_taken_again_at_once():
    workspace = kernels.Workspace()
    with workspace:
        first = empty((LARGE,), torch.float32)
        address = first.data_ptr()
        second = empty((LARGE,), torch.float32)
        assert second.data_ptr() != address
        del first
        assert empty((LARGE // 2,), torch.float32).data_ptr() == address


def test_what_does_not_fit_a_region_gets_one_of_its_own():
    workspace = kernels.Workspace(region_bytes=LARGE)
    with workspace:
        tensors = [empty((size, LARGE), torch.uint8) for size in (1, 1, 30)]
    assert len({t.data_ptr() for t in tensors}) == 3
    assert workspace.num_bytes_taken >= 32 * LARGE


def test_a_system_that_refuses_huge_pages_gives_small_ones(monkeypatch):
    class WithoutHugePages(mmap.mmap):
        def madvise(self, option: int) -> None:
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", WithoutHugePages)
    with kernels.Workspace():
        assert empty((LARGE,), torch.uint8).fill_(3).sum() == 3 * LARGE
    assert WeightMemory().empty(LARGE).shape == (LARGE,)


def test_memory_that_the_machine_refuses_is_an_error_with_advice():
    with (
        kernels.Workspace(region_bytes=2**62),
        pytest.raises(OutOfMemoryError, match=r"refused 4611686018427387904 .*low"),
    ):
        empty((LARGE,), torch.uint8)


def test_outside_a_workspace_and_in_another_thread_memory_is_the_systems():
    import threading

    workspace = kernels.Workspace()
    made = []
    with workspace:
        thread = threading.Thread(target=lambda: made.append(empty((LARGE,), torch.uint8)))
        thread.start()
        thread.join()
        assert empty((0, 3), torch.float32).shape == (0, 3)
    made.append(empty((LARGE,), torch.uint8))
    assert workspace.num_bytes_taken == 0
    assert [t.shape for t in made] == [(LARGE,), (LARGE,)]


def test_a_workspace_that_was_entered_twice_is_left_by_leaving_twice():
    workspace = kernels.Workspace()
    with workspace:
        with workspace.recording():
            inner = empty((LARGE,), torch.uint8)
        outer = empty((LARGE,), torch.uint8)
    after = empty((LARGE,), torch.uint8)
    assert [workspace.holds(each.data_ptr()) for each in (inner, outer, after)] == [True, True, False]


@needs_native
def test_a_replay_computes_from_what_is_in_place_now():
    workspace, graph = kernels.Workspace(), kernels.backend_for("cpu").graph()
    weight, x = kernels.pack_weight(torch.randn(8, 6)), torch.randn(3, 6)
    with workspace.recording(), graph.record():
        out = kernels.activation(kernels.matmul(x, weight), "relu")
    assert len(graph) == 2
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, kernels.activation(kernels.matmul(x, weight), "relu"))
    assert len(graph) == 2, "nothing is recorded any more"


def run_and_compute(x: torch.Tensor) -> None:
    kernels.scale(x, 5.0)
    x.sum()


@needs_native
@pytest.mark.parametrize("with_torch", [False, True])
def test_kernels_run_when_all_are_recorded_or_at_once_beside_torch(with_torch):
    values = np.ones((2, 8), np.float32)
    x, graph = torch.from_numpy(values), kernels.backend_for("cpu").graph()
    with kernels.Workspace().recording(), graph.record(with_torch=with_torch):
        kernels.scale(x, 2.0)
        assert (values == (2 if with_torch else 1)).all()
        kernels.scale(x, 3.0)
    assert (values == 6).all(), "each once"
    with pytest.raises(KernelError, match="missing in the replay"), kernels.Workspace().recording(), graph.record():
        run_and_compute(x)
    assert (values == 6).all(), "a recording that failed is not run"


CONSTANTS = torch.linspace(0.5, 2, 8), torch.arange(6), torch.linspace(-1, 1, 24).view(6, 4)


def run_on_rows(x: torch.Tensor, constants: Sequence[torch.Tensor] = CONSTANTS) -> list[torch.Tensor]:
    """Call each kernel that works on rows alone on x [6, 8]; those in place change it."""
    weight, positions, cos_sin = constants
    kernels.scale(x, 0.75)
    kernels.softcap(x, 3.0)
    kernels.rotary_embedding(x.view(6, 2, 4), positions, cos_sin, interleaved=True)
    return [
        kernels.layer_norm(x, weight, None, 1e-5),
        kernels.add_layer_norm(x, x, weight, None, 1e-5),
        kernels.activation(x, kernels.XIELU(0.8, 1.3)),
        kernels.gated_activation(x, kernels.ClampedSwiGLU()),
    ]


WEIGHT, BIAS = torch.linspace(0.5, 2, 96), torch.linspace(-1, 1, 96)


def norm_and_multiply(x, residual, matrix, is_rms):
    """Both kernels, whose outputs are in memory that what is made here first leaves, if it may be used again."""
    x = kernels.activation(x, "relu")
    normed = (
        kernels.add_rms_norm(x, residual, WEIGHT, 1e-5)
        if is_rms
        else kernels.add_layer_norm(x, residual, WEIGHT, BIAS, 1e-5)
    )
    del x
    return normed, kernels.matmul(normed, matrix)


@needs_native
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_rms", [True, False])
@pytest.mark.parametrize("rows", [1, 9, 600])
@pytest.mark.parametrize("joins_norms", [True, False])
def test_a_norm_is_computed_within_the_product_that_comes_next(isa, dtype, is_rms, rows, joins_norms):
    x, start = torch.randn(rows, 96).to(dtype), torch.randn(rows, 96).to(dtype)
    residual, graph = start.clone(), kernels.backend_for("cpu").graph()
    with using(isa):
        matrix = kernels.quantize_weight(torch.randn(96, 96).to(dtype), "int8")
        with kernels.Workspace().recording(joins_norms=joins_norms), graph.record():
            normed, out = norm_and_multiply(x, residual, matrix, is_rms)
        assert len(graph) == (2 if joins_norms else 3), "where the product's outputs take the place of the norm's input"
        for _ in range(2):
            expected = norm_and_multiply(x, start, matrix, is_rms)
            assert torch.equal(normed, expected[0])
            assert torch.equal(out, expected[1])
            assert torch.equal(residual, start)
            x.neg_()
            graph.replay()


def other_rows(normed: torch.Tensor, matrix: kernels.QuantizedWeight) -> torch.Tensor:
    return kernels.matmul(normed[:3], matrix)


def another_kernel_between(normed: torch.Tensor, matrix: kernels.QuantizedWeight) -> torch.Tensor:
    return kernels.matmul(kernels.activation(normed, "relu"), matrix)


@needs_native
@pytest.mark.parametrize(("multiply", "num_calls"), [(other_rows, 2), (another_kernel_between, 3)])
def test_a_norm_of_which_the_next_product_reads_less_is_computed_before_it(multiply, num_calls):
    matrix, graph = kernels.quantize_weight(torch.randn(40, 96), "int8"), kernels.backend_for("cpu").graph()
    x = torch.randn(5, 96)
    with kernels.Workspace().recording(joins_norms=True), graph.record():
        normed = kernels.layer_norm(x, WEIGHT, None, 1e-5)
        out = multiply(normed, matrix)
    assert len(graph) == num_calls
    x.normal_()
    graph.replay()
    expected = kernels.layer_norm(x, WEIGHT, None, 1e-5)
    assert torch.equal(normed, expected)
    assert torch.equal(out, multiply(expected, matrix))


@needs_native
def test_kernels_on_rows_are_recorded() -> None:
    graph, x = kernels.backend_for("cpu").graph(), torch.randn(6, 8)
    with kernels.Workspace().recording(), graph.record():
        outs = run_on_rows(x)
    assert len(graph) == 7
    for seed in range(2):
        x.copy_(torch.randn(6, 8, generator=torch.Generator().manual_seed(seed)))
        expected = run_on_rows(x.clone())
        graph.replay()
        assert all(map(torch.equal, outs, expected))


def test_kernels_on_rows_allocate_their_outputs_alone() -> None:
    meter, x, constants = kernels.Meter(), torch.zeros(6, 8, device="meta"), [each.to("meta") for each in CONSTANTS]
    with meter.counting():
        outs = run_on_rows(x, constants)
    assert meter.peak_bytes == sum(-(-out.nbytes // 64) * 64 for out in outs)


@needs_native
@pytest.mark.parametrize(
    "compute",
    [lambda x: x + 1, lambda x: x.add_(1), lambda x: x.T.contiguous(), lambda x: torch.empty(3), lambda x: x.sum()],
)
def test_what_a_replay_would_miss_is_refused(compute):
    graph = kernels.backend_for("cpu").graph()
    x = torch.randn(3, 6)
    with torch.inference_mode(), pytest.raises(KernelError, match="missing in the replay"), graph.record():
        compute(x)
    kernels.activation(x, "relu")
    assert len(graph) == 0


@needs_native
@torch.inference_mode()
def test_what_torch_computes_between_kernels_is_replayed_on_the_same_places():
    def run(x):
        y = kernels.activation((x.to(torch.bfloat16) * 2).float().T.contiguous(), "relu")
        y.add_(1)
        largest, where = y.max(dim=1)
        return torch.cat([y.mT, torch.zeros(1)[:, None].expand(3, 1), torch.outer(x[0], x[0])[:3]], 1), largest, where

    graph, x, workspace = kernels.backend_for("cpu").graph(), torch.randn(3, 6), kernels.Workspace()
    with workspace.recording(), graph.record(with_torch=True):
        outs = [kernels.borrowed(out) for out in run(x)]
    assert 2 < len(graph) < 6, "operations that follow each other are one call"
    assert workspace.num_bytes_taken == 0
    for seed in range(2):
        x.copy_(torch.randn(3, 6, generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert all(map(torch.equal, outs, run(x.clone())))


@needs_native
@pytest.mark.parametrize("compute", [lambda x: x.sum().item(), lambda x: bool((x > 0).any())])
def test_what_leaves_torch_is_refused_in_a_recording(compute):
    graph, workspace = kernels.backend_for("cpu").graph(), kernels.Workspace()
    refused = pytest.raises(KernelError, match="missing in the replay")
    with torch.inference_mode(), refused, workspace.recording(), graph.record(with_torch=True):
        compute(torch.randn(3, 6))


@needs_native
@torch.inference_mode()
def test_an_operation_that_cannot_write_where_it_is_told_is_copied_there():
    graph, x = kernels.backend_for("cpu").graph(), torch.randn(4, 6)
    with kernels.Workspace().recording(), graph.record(with_torch=True):
        out = torch.ops.aten._fused_rms_norm(x, [6], None, 1e-6)[0]
    x.mul_(-1).add_(1)
    graph.replay()
    assert torch.equal(out, torch.ops.aten._fused_rms_norm(x, [6], None, 1e-6)[0])


@needs_native
def test_a_replay_that_fails_says_why():
    graph = kernels.backend_for("cpu").graph()
    table, ids = torch.randn(5, 4), torch.tensor([1, 2])
    with kernels.Workspace().recording(), graph.record():
        kernels.embedding(ids, table)
    ids[1] = 5
    with pytest.raises(KernelError, match=r"token id 5 is not in \[0, 5\)"):
        graph.replay()


@needs_native
def test_outputs_that_no_workspace_keeps_are_refused():
    with pytest.raises(KernelError, match="no Workspace"), kernels.backend_for("cpu").graph().record():
        kernels.activation(torch.randn(3, 6), "relu")
