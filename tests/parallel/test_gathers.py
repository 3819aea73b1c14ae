"""What ranks gather: among those of a machine, and of several over connections, also when some fail and begin anew."""

import os
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.config.parallel import Shard
from tests.kernels.isas import needs_native

pytestmark = needs_native
SLOT_BYTES = 1024
DTYPES = (torch.float32, torch.bfloat16)


class Group:
    """Ranks of some machines, each in a thread of its own when they gather."""

    def __init__(self, num_ranks: int, num_machines: int, patience_s: float = 30.0, shared_bytes: int = 0) -> None:
        own = num_ranks // num_machines
        self.wires = [socket.socketpair() for _ in range(num_machines - 1)]
        self.files = [os.memfd_create("ranks") for _ in range(num_machines)]
        self.ranks = list[kernels.Ranks]()
        for rank in range(num_ranks):
            machine = rank // own
            file = self.files[machine]
            os.ftruncate(file, kernels.rank_memory_bytes(num_ranks, SLOT_BYTES, shared_bytes))
            sockets = [theirs.fileno() for _, theirs in self.wires[machine - 1 : machine]]
            if machine == 0:
                sockets = [ours.fileno() for ours, _ in self.wires]
            here = (machine * own, (machine + 1) * own)
            given: dict[str, Any] = {"own": here, "sockets": sockets if rank == here[0] else ()}
            self.ranks.append(kernels.Ranks.join(Shard(rank, num_ranks), file, SLOT_BYTES, patience_s, **given))

    def run(self, call: Callable[[kernels.Ranks], Any]) -> list[Any]:
        """What the call returns or raises in each rank."""
        results = [None] * len(self.ranks)

        def keep(rank: int) -> None:
            try:
                results[rank] = call(self.ranks[rank])
            except RuntimeError as error:
                self.ranks[rank].stop()
                results[rank] = error  # type: ignore[call-overload]

        threads = [threading.Thread(target=keep, args=(rank,)) for rank in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return results

    def restart(self) -> None:
        for ranks in self.ranks[1:]:
            ranks.restart()
        self.ranks[0].restart()

    def close(self) -> None:
        for wire in self.wires:
            for end in wire:
                end.close()
        for file in self.files:
            os.close(file)


@pytest.fixture
def make() -> Iterator[Callable[..., Group]]:
    made = list[Group]()

    def make(*given: Any) -> Group:
        made.append(Group(*given))
        return made[-1]

    yield make
    for group in made:
        group.close()


LAYOUTS = [(4, 1), (2, 2), (4, 2), (3, 3), (6, 3)]


def parts_of(x: Tensor, sizes: list[int]) -> list[Tensor]:
    return [x[:, start:end].contiguous() for start, end in pairwise((0, *accumulate(sizes)))]


@pytest.mark.parametrize(("num_ranks", "num_machines"), LAYOUTS)
def test_parts_of_all_machines_are_put_side_by_side(
    num_ranks: int, num_machines: int, make: Callable[..., Group]
) -> None:
    group, sizes = make(num_ranks, num_machines), [32 - 3 * rank for rank in range(num_ranks)]
    wholes = [torch.randn(rows, sum(sizes)) for rows in (1, 5, 60)]  # the last goes in several pieces
    parts = [parts_of(whole, sizes) for whole in wholes]

    def call(ranks: kernels.Ranks) -> list[Tensor]:
        gather, first = kernels.Gather(ranks, sizes), kernels.Gather(ranks, sizes, first_only=True)
        got = []
        for each in (*parts, *parts):
            own = each[ranks.shard.rank]
            got += [gather(own), first(own)]
        return got

    for rank, got in enumerate(group.run(call)):
        for whole, its, (all_of_it, at_first) in zip(
            wholes * 2, parts * 2, zip(got[::2], got[1::2], strict=True), strict=True
        ):
            assert torch.equal(all_of_it, whole)
            assert torch.equal(at_first, its[rank] if rank else whole)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_parts_that_are_written_where_all_read_them_are_not_copied(num_ranks: int, make: Callable[..., Group]) -> None:
    sizes = [32 - 3 * rank for rank in range(num_ranks)]
    group = make(num_ranks, 1, 30.0, 4 * 60 * sum(sizes))
    wholes = [torch.randn(rows, sum(sizes)).to(dtype) for dtype in DTYPES for rows in (1, 5, 60)] * 20
    parts = [parts_of(whole, sizes) for whole in wholes]
    assert not group.ranks[0].have_all(wholes[0])

    def call(ranks: kernels.Ranks) -> None:
        gather = kernels.Gather(ranks, sizes)
        assert gather.place(61) is None
        for whole, part in zip(wholes, parts, strict=True):
            place = gather.place(len(whole), whole.dtype)
            assert place is not None
            place.copy_(part[ranks.shard.rank])
            placed = gather.placed(len(whole), whole.dtype)
            assert torch.equal(placed, whole)
            assert ranks.have_all(placed)

    assert group.run(call) == [None] * num_ranks
    assert kernels.Gather(make(2, 2).ranks[0], [32, 32]).place(1) is None


def test_a_place_is_written_again_only_when_all_ranks_have_come_for_it(make: Callable[..., Group]) -> None:
    group, events = make(2, 1, 30.0, 4 * 64), list[str]()
    may_go = threading.Event()

    def call(ranks: kernels.Ranks) -> None:
        gather = kernels.Gather(ranks, [32, 32])
        if ranks.shard.rank == 0:
            may_go.wait(30)
            events.append("read")
        else:
            may_go.set()
        assert gather.place(1) is not None
        events.append("placed")

    group.run(call)
    assert events == ["read", "placed", "placed"]


@pytest.mark.parametrize(("num_ranks", "num_machines"), LAYOUTS)
def test_each_rank_gets_the_rows_of_all_experts(num_ranks: int, num_machines: int, make: Callable[..., Group]) -> None:
    """Some ranks have no rows, some have more than a slot holds, and some steps have none at all."""
    sizes, width = [2 - rank % 2 for rank in range(num_ranks)], 48
    group = make(num_ranks, num_machines)
    chosen = [torch.randint(0, high, (rows, 2)) for rows, high in ((60, sum(sizes)), (3, sum(sizes)), (9, 1), (0, 1))]
    steps = [
        (rows := kernels.group_by_expert(ids.int(), sum(sizes)), torch.randn(len(rows.pairs), width)) for ids in chosen
    ]

    def call(ranks: kernels.Ranks) -> list[Tensor]:
        gather, (first, end), got = kernels.GatherRows(ranks, sizes), ranks.shard.range_of(sizes), []
        for rows, y in steps * 3:
            its = torch.full_like(y, -1.0)
            own = slice(*rows.starts[[first, end]].tolist())
            its[own] = y[own]
            got.append(gather(its, rows))
        return got

    for got in group.run(call):
        for its, (_, y) in zip(got, steps * 3, strict=True):
            assert torch.equal(its, y)


@pytest.mark.parametrize("kind", ["silu", "gelu"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_activations_of_own_experts_leave_the_other_rows_alone(
    dtype: torch.dtype, kind: Any, make: Callable[..., Group]
) -> None:
    rows = kernels.group_by_expert(torch.randint(0, 5, (30, 2)).int(), 5)
    x = torch.randn(60, 96).to(dtype)
    expected = kernels.gated_activation(x, kind)

    def call(ranks: kernels.Ranks) -> None:
        first, end = ranks.shard.range_of([3, 2])
        own = slice(*rows.starts[[first, end]].tolist())
        gather = kernels.GatherRows(ranks, [3, 2])
        got = gather.gated_activation(x, rows.of_experts(first, end), kind)
        assert torch.equal(got[own], expected[own])

    assert make(2, 1).run(call) == [None, None]


@pytest.mark.parametrize(("num_ranks", "num_machines"), LAYOUTS)
def test_rows_of_a_table_come_from_the_rank_that_has_them(
    num_ranks: int, num_machines: int, make: Callable[..., Group]
) -> None:
    group, table = make(num_ranks, num_machines), torch.randn(64 * num_ranks, 32)
    ids = torch.randint(0, len(table), (40,))

    def call(ranks: kernels.Ranks) -> Tensor:
        first = 64 * ranks.shard.rank
        own = kernels.pack_weight(table[first : first + 64])
        found: Tensor = kernels.SharedTable(ranks, [64] * num_ranks)(ids, own)
        return found

    for found in group.run(call):
        assert torch.equal(found, table[ids])


@pytest.mark.parametrize("culprit", range(4))
def test_all_machines_stop_when_a_rank_fails_and_begin_anew(culprit: int, make: Callable[..., Group]) -> None:
    group, x = make(4, 2), torch.randn(60, 32)

    def fail(ranks: kernels.Ranks) -> None:
        gather = kernels.Gather(ranks, [32] * 4)
        gather(x)
        if ranks.shard.rank == culprit:
            raise RuntimeError("it fails")
        while True:
            gather(x)

    def work(ranks: kernels.Ranks) -> Tensor:
        return kernels.Gather(ranks, [32] * 4)(x)

    for _ in range(3):
        failures = group.run(fail)
        assert str(failures.pop(culprit)) == "it fails"
        assert ["stopped" in str(failure) for failure in failures] == [True] * 3
        group.restart()
        assert all(torch.equal(got, x.repeat(1, 4)) for got in group.run(work))


def test_what_is_left_of_a_part_that_was_broken_off_is_dropped(make: Callable[..., Group]) -> None:
    group, x = make(2, 2), torch.randn(7, 32)
    header = (
        bytes(4) + (1).to_bytes(4, "little") + bytes(8)
    )  # a part of another epoch, of which the end is still to come
    gather = [kernels.Gather(ranks, [32, 32]) for ranks in group.ranks]
    for ranks in group.ranks:
        ranks.stop()
    group.restart()
    group.wires[0][1].sendall(header + bytes(8) + (900).to_bytes(8, "little") + bytes(900))
    got = group.run(lambda ranks: gather[ranks.shard.rank](x))
    assert all(torch.equal(each, x.repeat(1, 2)) for each in got)


@pytest.mark.parametrize("num_machines", [1, 2])
def test_parts_of_another_pass_are_not_taken(num_machines: int, make: Callable[..., Group]) -> None:
    group, x = make(2, num_machines), torch.randn(7, 32)
    gather = [kernels.Gather(ranks, [32, 32]) for ranks in group.ranks]

    def call(ranks: kernels.Ranks) -> Tensor:
        return gather[ranks.shard.rank](x)

    for _ in range(3):
        for ranks in group.ranks:
            ranks.begin()
        assert all(torch.equal(each, x.repeat(1, 2)) for each in group.run(call))
    group.ranks[0].begin()
    assert any("computes something else" in str(each) for each in group.run(call))
    group.restart()
    assert all(torch.equal(each, x.repeat(1, 2)) for each in group.run(call))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: 7}, "another machine sends nonsense"),
        ({4: 0}, "rank 0 computes something else"),
        ({4: 9}, "rank 9 computes something else"),
        ({8: 5}, "rank 1 computes something else"),
        ({16: 5}, "rank 1 computes something else"),
        ({24: 1}, "rank 1 computes something else"),
        ({26: 1}, "another machine sends nonsense"),
        ({4: 255, 5: 255, 6: 255, 7: 255}, "the ranks were stopped"),
        (None, "another machine has closed its connection"),
    ],
)
def test_nonsense_from_another_machine_is_noticed(
    change: dict[int, int] | None, message: str, make: Callable[..., Group]
) -> None:
    group, x = make(2, 2), torch.randn(1, 32)
    theirs = group.wires[0][1]
    sent = list[bytes]()

    def other() -> None:  # what the other machine would send, changed
        header = bytearray(theirs.recv(32, socket.MSG_WAITALL))
        assert len(theirs.recv(128, socket.MSG_WAITALL)) == 128
        header[4] = 1
        for place, value in (change or {}).items():
            header[place] = value
        sent.append(bytes(header))
        if change is None:
            theirs.shutdown(socket.SHUT_RDWR)
        else:
            theirs.sendall(header + bytes(128))

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(RuntimeError, match=message):
        kernels.Gather(group.ranks[0], [32, 32])(x)
    thread.join(30)
    assert sent


def test_a_machine_that_sends_nothing_is_not_awaited_for_ever(make: Callable[..., Group]) -> None:
    group = make(2, 2, 0.2)
    with pytest.raises(RuntimeError, match="another machine made no progress for 0 s"):
        kernels.Gather(group.ranks[0], [32, 32])(torch.randn(1, 32))
    group.ranks[0].restart()
    group.ranks[0].stop()
    with pytest.raises(RuntimeError, match="the ranks were stopped"):
        kernels.Gather(group.ranks[0], [32, 32])(torch.randn(1, 32))


def test_large_parts_cross_while_both_machines_send(make: Callable[..., Group]) -> None:
    group, x = make(2, 2), torch.randn(20_000, 128)  # far more than connections hold
    for ends in group.wires:
        for end in ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    got = group.run(lambda ranks: kernels.Gather(ranks, [128, 128])(x))
    assert all(torch.equal(each, x.repeat(1, 2)) for each in got)
