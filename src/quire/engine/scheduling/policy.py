"""Which request starts next, and which is preempted first when blocks run out. This module does not import torch.

A policy owns the queue of the requests that do not run: new, preempted for recomputation, or swapped out. The scheduler
alone changes it: `add` and `remove` as requests come and go, `charge` from commit, `forget` when one has ended.
"""

import heapq
import math
from abc import ABC, abstractmethod
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import ClassVar

from quire.config.scheduler import SchedulerConfig
from quire.engine.requests.sequence import SequenceGroup, SequenceStatus

_PIECE = 256  # How many entries of a queue are copied at once.
_PREFIX_WINDOW = 64  # Number of candidates that are looked up in the prefix cache.
_MAX_IDLE_TENANTS = 1024


class SchedulingPolicy(ABC):
    """Owns the requests that do not run. A new policy needs an order, a rank, and a name in SchedulerConfig's POLICIES
    and in `make_policy`."""

    counts_tokens: ClassVar[bool] = False
    """Whether `charge` does anything."""

    @abstractmethod
    def add(self, group: SequenceGroup) -> None:
        """Queue a request, new or preempted."""

    @abstractmethod
    def remove(self, group: SequenceGroup) -> None:
        """Remove a request that starts, is swapped in or is aborted. Raises KeyError if it is not queued."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, group: SequenceGroup) -> bool: ...

    @abstractmethod
    def queued(self, limit: int) -> list[SequenceGroup]:
        """At most `limit` of the queued requests, for the live view: by arrival, or tenant by tenant."""

    @abstractmethod
    def candidates(self, now_s: float) -> Iterator[SequenceGroup]:
        """Yield the queued requests in the order in which to start them, each once. They may be removed meanwhile."""

    @abstractmethod
    def rank(self, group: SequenceGroup) -> float:
        """Running requests with the largest rank are preempted first; among equal ranks the preemptor chooses."""

    def charge(self, group: SequenceGroup, num_tokens: int) -> None:  # noqa: B027
        """Count `num_tokens` tokens that were computed for a request not yet forgotten."""

    def forget(self, group: SequenceGroup) -> None:  # noqa: B027
        """Forget a request that has ended and is not queued. Called once for each request that was ever added."""


class FirstComeFirstServed(SchedulingPolicy):
    """Orders requests by rank, which is the same for all here, then by arrival. A queued request's rank is fixed."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, SequenceGroup]] = []  # sorted; orders are unique, groups not compared

    def add(self, group: SequenceGroup) -> None:
        insort(self._entries, (self.rank(group), group.order, group))

    def remove(self, group: SequenceGroup) -> None:
        if (index := self._index(group)) is None:
            raise KeyError(f"request {group.request_id!r} is not queued")
        del self._entries[index]

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, group: SequenceGroup) -> bool:
        return self._index(group) is not None

    def queued(self, limit: int) -> list[SequenceGroup]:
        return [group for _, _, group in self._entries[:limit]]

    def candidates(self, now_s: float) -> Iterator[SequenceGroup]:
        start = 0
        while piece := self._entries[start : start + _PIECE]:
            for _, _, group in piece:
                yield group
            rank, order, _ = piece[-1]
            start = bisect_left(self._entries, (rank, order + 1))

    def rank(self, group: SequenceGroup) -> float:
        return 0.0

    def _index(self, group: SequenceGroup) -> int | None:
        """The place of a queued request; None for another."""
        index = bisect_left(self._entries, (self.rank(group), group.order))
        return index if index < len(self._entries) and self._entries[index][2] is group else None


class AgingPriority(FirstComeFirstServed):
    """Starts the smallest `params.priority` first, where `aging_s` seconds of waiting count as one level.

    All requests age alike, so their order never changes: it is that of `arrival_time + priority * aging_s`. No request
    starves: a later one overtakes it only by arriving within `aging_s` times the number of levels between them.
    """

    def __init__(self, aging_s: float) -> None:
        super().__init__()
        self._aging_s = aging_s

    def rank(self, group: SequenceGroup) -> float:
        return group.metrics.arrival_time + group.params.priority * self._aging_s


class LongestPrefixFirst(FirstComeFirstServed):
    """Starts, of the `_PREFIX_WINDOW` oldest requests, the one with the longest prefix hit (Zheng et al. 2024, SGLang).

    The delay is bounded: requests that have waited longer than `max_delay_s` come first, by arrival. A request that is
    swapped out counts as a full hit.
    """

    def __init__(self, max_delay_s: float, cached_tokens: Callable[[SequenceGroup], int]) -> None:
        super().__init__()
        self._max_delay_s = max_delay_s
        self._cached_tokens = cached_tokens

    def candidates(self, now_s: float) -> Iterator[SequenceGroup]:
        head = super().candidates(now_s)
        fresh = []
        for group in islice(head, _PREFIX_WINDOW):
            if now_s - group.metrics.arrival_time > self._max_delay_s:
                yield group
            else:
                fresh.append(group)
        yield from sorted(fresh, key=self._hit_tokens, reverse=True)  # stable: ties stay in order of arrival
        yield from head

    def _hit_tokens(self, group: SequenceGroup) -> int:
        if any(seq.status is SequenceStatus.SWAPPED for seq in group.seqs):
            return max(seq.num_tokens for seq in group.seqs)
        return self._cached_tokens(group)


class _Tenant:
    """The requests of a tenant, and the tokens computed for it over its weight."""

    def __init__(self, name: str, weight: float, queue: SchedulingPolicy) -> None:
        self.name = name
        self.weight = weight
        self.queue = queue
        self.counter = 0.0
        self.since = 0  # Order of the request that put it in the queue: unique, so the oldest wins of equal counters.
        self.live: set[int] = set()  # `order` of each of its requests, queued or running.

    @property
    def entry(self) -> tuple[float, int, "_Tenant"]:
        """A sort key: by counter. Tenants themselves are never compared."""
        return self.counter, self.since, self


class FairShare(SchedulingPolicy):
    """Serves the tenant with the fewest computed tokens relative to its weight, and the users of a tenant, as `a/b` of
    `a`, in the same way: a client gets no more by naming users. Within a user, by arrival.

    This is the Virtual Token Counter (Sheng et al. 2024, Fairness in Serving Large Language Models, OSDI). When a
    tenant without queued requests queues one, its counter is raised to the floor: the smallest counter of the queued
    tenants or, if there are none, the counter of the tenant that was queued last. So neither idleness nor a light load
    earns credit. The floor never falls, so an idle tenant at or below it need not be remembered. Of the idle tenants
    above it, the `_MAX_IDLE_TENANTS` with the largest counters are kept, and the others start again at the floor, as
    do all users of an idle tenant. So memory is bounded by that number, for the users of each tenant that is not idle
    too, and the unfinished requests.
    """

    counts_tokens = True

    def __init__(self, weights: Mapping[str, float], *, of_users: bool = False) -> None:
        self._weights = dict(weights)
        self._user_weights = {name: weight for name, weight in weights.items() if "/" in name}
        self._of_users = of_users
        self._tenants: dict[str, _Tenant] = {}  # Those with unfinished requests, and idle ones above the floor.
        self._queued: list[tuple[float, int, _Tenant]] = []  # Sorted entries of the tenants with queued requests.
        self._idle: list[tuple[float, int, _Tenant]] = []  # Sorted entries of the tenants without unfinished requests.
        self._last = _Tenant("", 1.0, FirstComeFirstServed())  # The tenant that was queued last.
        self._num_queued = 0

    def _name(self, group: SequenceGroup) -> str:
        return group.tenant if self._of_users else group.tenant.partition("/")[0]

    def _queue(self) -> SchedulingPolicy:
        """Return the queue of one tenant."""
        return FirstComeFirstServed() if self._of_users else FairShare(self._user_weights, of_users=True)

    def add(self, group: SequenceGroup) -> None:
        tenant = self._tenants.get(name := self._name(group))
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(name, self._weights.get(name, 1.0), self._queue())
        elif not tenant.live:
            _discard(self._idle, tenant)
        tenant.live.add(group.order)
        if not tenant.queue:
            tenant.counter = max(tenant.counter, self._floor)
            tenant.since = group.order
            insort(self._queued, tenant.entry)
        tenant.queue.add(group)
        self._num_queued += 1

    def remove(self, group: SequenceGroup) -> None:
        tenant = self._tenants[self._name(group)]
        tenant.queue.remove(group)
        self._num_queued -= 1
        if not tenant.queue:
            _discard(self._queued, tenant)
            self._last = tenant

    def __len__(self) -> int:
        return self._num_queued

    def __contains__(self, group: SequenceGroup) -> bool:
        tenant = self._tenants.get(self._name(group))
        return tenant is not None and group in tenant.queue

    def queued(self, limit: int) -> list[SequenceGroup]:
        groups: list[SequenceGroup] = []
        for _, _, tenant in self._queued[:limit]:
            groups += tenant.queue.queued(limit - len(groups))
        return groups

    def candidates(self, now_s: float) -> Iterator[SequenceGroup]:
        """Requests that start meanwhile are charged within this iteration, so that no tenant gets the whole step."""
        heap = self._queued.copy()  # sorted, hence a heap
        heads: dict[str, Iterator[SequenceGroup]] = {}
        while heap:
            counter, since, tenant = heap[0]
            group = next(heads.setdefault(tenant.name, tenant.queue.candidates(now_s)), None)
            if group is None:
                heapq.heappop(heap)
                continue
            yield group
            if group not in tenant.queue:
                counter += sum(seq.num_uncomputed_tokens for seq in group.unfinished_seqs) / tenant.weight
                heapq.heapreplace(heap, (counter, since, tenant))

    def rank(self, group: SequenceGroup) -> float:
        return self._tenants[self._name(group)].counter

    def charge(self, group: SequenceGroup, num_tokens: int) -> None:
        if self._of_users and len(self._tenants) == 1:
            return  # the next user will begin where this one is
        tenant = self._tenants[self._name(group)]
        if group.order not in tenant.live:
            raise KeyError(f"request {group.request_id!r} is charged, but was forgotten or never added")
        if tenant.queue:
            _discard(self._queued, tenant)
        tenant.counter += num_tokens / tenant.weight
        tenant.queue.charge(group, num_tokens)
        if tenant.queue:
            insort(self._queued, tenant.entry)

    def forget(self, group: SequenceGroup) -> None:
        tenant = self._tenants[self._name(group)]
        tenant.live.remove(group.order)
        tenant.queue.forget(group)
        if tenant.live:
            return
        tenant.queue = self._queue()
        insort(self._idle, tenant.entry)
        num_redundant = bisect_left(self._idle, (self._floor, math.inf))
        num_dropped = max(num_redundant, len(self._idle) - _MAX_IDLE_TENANTS)
        for _, _, dropped in self._idle[:num_dropped]:
            del self._tenants[dropped.name]
        del self._idle[:num_dropped]

    @property
    def _floor(self) -> float:
        return self._queued[0][0] if self._queued else self._last.counter


def _discard(entries: list[tuple[float, int, _Tenant]], tenant: _Tenant) -> None:
    del entries[bisect_left(entries, tenant.entry[:2])]


def make_policy(config: SchedulerConfig, cached_tokens: Callable[[SequenceGroup], int]) -> SchedulingPolicy:
    """The policy that `config.policy` names; `cached_tokens` returns how many tokens of a queued request are cached."""
    match config.policy:
        case "priority":
            return AgingPriority(config.priority_aging_s)
        case "fair":
            return FairShare(config.tenant_weights)
        case "prefix":
            return LongestPrefixFirst(config.prefix_max_delay_s, cached_tokens)
        case _:
            return FirstComeFirstServed()
