"""The wrappers choose a backend by the device of their tensors."""

import pytest
import torch

from quire import kernels
from quire.common.errors import KernelError
from quire.kernels.backends import _backends
from quire.kernels.backends.reference_backend import ReferenceBackend


class MetaBackend(ReferenceBackend):
    """The reference on torch's meta device, which has shapes and no values, so that no value can be checked."""

    def __init__(self) -> None:
        super().__init__("meta")
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> object:
        if name in ("matmul", "rms_norm", "gated_activation", "make_layer_cache"):
            super().__getattribute__("calls").append(name)
        return super().__getattribute__(name)


@pytest.fixture
def meta(monkeypatch: pytest.MonkeyPatch) -> MetaBackend:
    backend = MetaBackend()
    monkeypatch.setitem(_backends, "meta", backend)
    return backend


def test_a_second_backend_serves_the_tensors_of_its_device(meta: MetaBackend) -> None:
    packed = kernels.pack_weight(torch.zeros(6, 4, device="meta"))
    hidden = kernels.rms_norm(torch.zeros(3, 4, device="meta"), torch.ones(4, device="meta"), 1e-5)
    out = kernels.gated_activation(kernels.matmul(hidden, packed), "silu")
    assert (out.device, out.shape) == (torch.device("meta"), (3, 3))
    k_cache, _ = kernels.make_layer_cache(
        torch.zeros(4096, dtype=torch.uint8, device="meta"), 2, 4, 1, 8, torch.float32
    )
    assert k_cache.is_meta
    assert meta.calls == ["rms_norm", "matmul", "gated_activation", "make_layer_cache"]
    assert kernels.backend_of(out) is kernels.backend_for("meta") is meta
    with pytest.raises(KernelError, match="cannot be recorded"):
        meta.graph()


def test_tensors_of_two_devices_are_refused(meta: MetaBackend) -> None:
    packed = kernels.pack_weight(torch.zeros(6, 4))
    with pytest.raises(KernelError, match=r"matmul takes .* on cpu, .*got x: float32 \[3, 4\] on meta"):
        kernels.matmul(torch.zeros(3, 4, device="meta"), packed)
    with pytest.raises(KernelError, match=r"add takes .* on one device"):
        kernels.add(torch.zeros(3, 4), torch.zeros(3, 4, device="meta"))


def test_tensors_of_a_device_without_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(_backends, "meta")
    with pytest.raises(KernelError, match="no kernels for tensors on meta, only for those on cpu"):
        kernels.activation(torch.zeros(3, device="meta"), "relu")
