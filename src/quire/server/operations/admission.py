"""Admission: who may start a request now, and when the others may come again. No I/O; the clock is given."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from quire.server.config import ServerArgs

RefusalReason = Literal["queue_full", "too_many_at_once", "requests_per_minute", "tokens_per_minute"]
MAX_RETRY_AFTER_S = 60
_PRUNE_ABOVE = 1024
_SMOOTHING = 0.2


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request may not start now."""

    reason: RefusalReason
    message: str
    retry_after_s: int
    """whole seconds, from 1"""


class Bucket:
    """So many units a minute, all of them at once if need be; it may go into debt, which is waited off first."""

    __slots__ = ("_level", "_per_minute", "_time")

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._time = now

    def take(self, units: float, now: float) -> None:
        """Use up units, whether they are there or not."""
        self._refill(now)
        self._level -= units

    def wait_s(self, units: float, now: float) -> float:
        """Seconds until so many units are there; 0 if they are."""
        self._refill(now)
        return max(0.0, (units - self._level) * 60 / self._per_minute)

    def is_full(self, now: float) -> bool:
        """Whether nothing was used lately."""
        self._refill(now)
        return self._level >= self._per_minute

    def _refill(self, now: float) -> None:
        self._level = min(self._per_minute, self._level + (now - self._time) * self._per_minute / 60)
        self._time = now


class _Tenant:
    """What one tenant has used."""

    __slots__ = ("num_running", "requests", "tokens")

    def __init__(self, args: ServerArgs, now: float) -> None:
        self.num_running = 0
        self.requests = Bucket(args.requests_per_minute, now) if args.requests_per_minute else None
        self.tokens = Bucket(args.tokens_per_minute, now) if args.tokens_per_minute else None

    def is_idle(self, now: float) -> bool:
        """Whether forgetting the tenant changes nothing."""
        return not self.num_running and all(b is None or b.is_full(now) for b in (self.requests, self.tokens))


class Admission:
    """Counts what runs and what each tenant uses. Each `enter` that was granted is followed by one `leave`.

    A tenant's tokens are charged when they are known, after the request: the limit holds over time, one request may
    exceed it, and the tenant then waits until the debt is paid.
    """

    def __init__(
        self, args: ServerArgs, *, max_num_seqs: int, num_waiting: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        """`num_waiting` is the engine's count of queued requests, `max_num_seqs` what it runs at once."""
        self._args = args
        self._max_num_seqs = max_num_seqs
        self._num_waiting = num_waiting
        self._clock = clock
        self._tenants: dict[str, _Tenant] = {}
        self._last_leave: float | None = None
        self._interval_s = 1.0  # between the ends of requests
        self.num_running = 0
        """requests granted and not yet left"""
        self.num_refused: Counter[str] = Counter()

    def enter(self, tenant: str) -> Refusal | None:
        """Grant a request, or say why not."""
        now = self._clock()
        if len(self._tenants) > _PRUNE_ABOVE:
            self._tenants = {name: t for name, t in self._tenants.items() if not t.is_idle(now)}
        account = self._account(tenant, now)
        refusal = self._tenant_refusal(account, now) or self._queue_refusal()
        if refusal is not None:
            self.num_refused[refusal.reason] += 1
            return refusal
        account.num_running += 1
        self.num_running += 1
        if account.requests is not None:
            account.requests.take(1, now)
        return None

    def leave(self, tenant: str, num_tokens: int) -> None:
        """A granted request has ended, having used so many tokens, of prompts and outputs."""
        now = self._clock()
        account = self._tenants[tenant]
        account.num_running -= 1
        self.num_running -= 1
        self.charge(tenant, num_tokens)
        if self._last_leave is not None:
            interval_s = min(now - self._last_leave, MAX_RETRY_AFTER_S)  # an idle hour says nothing of the pace
            self._interval_s += _SMOOTHING * (interval_s - self._interval_s)
        self._last_leave = now

    def charge(self, tenant: str, num_tokens: int) -> None:
        """A tenant's request has used so many tokens, be it after it has left."""
        now = self._clock()
        tokens = self._account(tenant, now).tokens
        if tokens is not None:
            tokens.take(num_tokens, now)

    def _account(self, tenant: str, now: float) -> _Tenant:
        account = self._tenants.get(tenant)
        if account is None:
            account = self._tenants[tenant] = _Tenant(self._args, now)
        return account

    def _tenant_refusal(self, account: _Tenant, now: float) -> Refusal | None:
        args = self._args
        if args.max_concurrent_per_tenant is not None and account.num_running >= args.max_concurrent_per_tenant:
            message = f"{account.num_running} requests are running, and no more are allowed at once"
            return Refusal("too_many_at_once", message, _whole_s(self._interval_s * self.num_running))
        if account.requests is not None and (wait_s := account.requests.wait_s(1, now)):
            message = f"the rate limit of {args.requests_per_minute} requests per minute is reached"
            return Refusal("requests_per_minute", message, math.ceil(wait_s))
        if account.tokens is not None and (wait_s := account.tokens.wait_s(1, now)):
            message = f"the rate limit of {args.tokens_per_minute} tokens per minute is reached"
            return Refusal("tokens_per_minute", message, math.ceil(wait_s))
        return None

    def _queue_refusal(self) -> Refusal | None:
        """The engine's count knows of requests with many prompts; our own is never late. Both must be in bounds."""
        args, num_waiting = self._args, self._num_waiting()
        num_places = self._max_num_seqs + args.max_waiting
        if self.num_running < num_places and (num_waiting == 0 or num_waiting < args.max_waiting):
            return None
        num_too_many = max(num_waiting - args.max_waiting, self.num_running - num_places) + 1
        message = f"too many requests are waiting for their turn already (at most {args.max_waiting} may)"
        return Refusal("queue_full", message, _whole_s(self._interval_s * num_too_many))


def _whole_s(seconds: float) -> int:
    return min(max(math.ceil(seconds), 1), MAX_RETRY_AFTER_S)
