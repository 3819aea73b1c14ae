"""How fast weights are read: measured in a few milliseconds, whatever the machine and whatever else runs there."""

from collections.abc import Callable

import pytest
import torch

from quire import kernels
from quire.kernels.backends.native import reading
from quire.kernels.backends.reference_backend import ReferenceBackend

from .isas import needs_native

MIB = 2**20


class Machine:
    """A clock, and memory that is read at a speed which the time and the number of reads decide."""

    def __init__(self, speed: Callable[[float, int], float]) -> None:
        self.now_s, self.num_reads, self.ends, self._speed = 100.0, 0, set[int](), speed

    def perf_counter(self) -> float:
        return self.now_s

    def read_memory(self, address: int, num_bytes: int) -> None:
        self.now_s += num_bytes / self._speed(self.now_s - 100.0, self.num_reads)
        self.num_reads += 1
        self.ends.add(address + num_bytes)


@pytest.fixture
def weights() -> list[torch.Tensor]:
    """64 MiB, of which a kernel reads nothing here."""
    return [torch.empty(size, dtype=torch.uint8) for size in (1, 33 * MIB, 15 * MIB, 16 * MIB - 1)]


def measured(machine: Machine, weights: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> float | None:
    monkeypatch.setattr(reading.time, "perf_counter", machine.perf_counter)
    return reading.reading_rate(machine, weights)


@pytest.mark.parametrize("speed", [2e9, 2e10, 5e11])
def test_the_speed_is_measured_within_20_ms(
    speed: float, weights: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(lambda now_s, num_reads: speed)
    assert measured(machine, weights, monkeypatch) == pytest.approx(speed)
    assert machine.now_s - 100.0 <= 0.02
    if speed == 5e11:
        assert {each.data_ptr() + each.nbytes for each in weights} <= machine.ends, "all bytes of all tensors"


def test_the_best_moment_counts(weights: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Another program disturbs all but two milliseconds."""
    machine = Machine(lambda now_s, num_reads: 2e10 if now_s > 0.009 else 5e9)
    assert measured(machine, weights, monkeypatch) == pytest.approx(2e10, rel=0.2)


def test_the_first_time_does_not_count(weights: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a mapped file whose pages are in memory."""
    machine = Machine(lambda now_s, num_reads: 3e9 if num_reads < 6 else 2e10)
    assert measured(machine, weights, monkeypatch) == pytest.approx(2e10)


def test_a_disk_is_not_waited_for(weights: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda now_s, num_reads: 5e8)
    assert measured(machine, weights, monkeypatch) is None
    assert machine.now_s - 100.0 <= 0.02 + 4 * MIB / 5e8


@pytest.mark.parametrize("num_bytes", [0, 15 * MIB])
def test_what_a_cache_may_hold_is_not_measured(num_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(lambda now_s, num_reads: 1e11)
    assert measured(machine, [torch.empty(num_bytes, dtype=torch.uint8)], monkeypatch) is None


@needs_native
def test_this_machine_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_PATIENCE_S", 60.0)  # with sanitizers a core reads less than a gigabyte in a second
    rate = kernels.backend_for("cpu").reading_rate([torch.ones(32 * MIB, dtype=torch.uint8)])
    assert rate is not None
    assert 1e7 < rate < 1e14


def test_the_reference_does_not_measure() -> None:
    assert ReferenceBackend("cpu").reading_rate([torch.ones(32 * MIB, dtype=torch.uint8)]) is None
