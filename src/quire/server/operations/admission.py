"""Admission control: which requests may start now, and when refused ones may be sent again. No I/O, injected clock."""

import ipaddress
import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from quire.server.config import ServerArgs

RefusalReason = Literal["queue_full", "too_many_at_once", "requests_per_minute", "tokens_per_minute"]
MAX_RETRY_AFTER_S = 60
MAX_TENANTS = 65_536
"""Bound on the tenants that are remembered, apart from those with a running request."""
_LOOKS = 2
"""Remembered tenants that each granted request examines: more than it adds, so the idle ones are found."""
_SMOOTHING = 0.2


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request may not start now."""

    reason: RefusalReason
    message: str
    retry_after_s: int
    """Whole seconds, at least 1."""


class Bucket:
    """A token bucket that holds one minute's units. Its level may become negative; it must then refill first."""

    __slots__ = ("_level", "_per_minute", "_time")

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._time = now

    def take(self, units: float, now: float) -> None:
        """Use up units, even if the bucket holds fewer."""
        self._refill(now)
        self._level -= units

    def wait_s(self, units: float, now: float) -> float:
        """Seconds until the bucket holds `units`; 0 if it does now."""
        self._refill(now)
        return max(0.0, (units - self._level) * 60 / self._per_minute)

    def is_full(self, now: float) -> bool:
        """Whether everything used has been refilled."""
        self._refill(now)
        return self._level >= self._per_minute

    def _refill(self, now: float) -> None:
        self._level = min(self._per_minute, self._level + (now - self._time) * self._per_minute / 60)
        self._time = now


class _Tenant:
    """A tenant's running requests and its recent use."""

    __slots__ = ("num_running", "requests", "tokens")

    def __init__(self, args: ServerArgs, now: float) -> None:
        self.num_running = 0
        self.requests = Bucket(args.requests_per_minute, now) if args.requests_per_minute else None
        self.tokens = Bucket(args.tokens_per_minute, now) if args.tokens_per_minute else None

    def is_idle(self, now: float) -> bool:
        """Whether nothing runs and all buckets are full, so that this object can be replaced by a new one."""
        return not self.num_running and all(b is None or b.is_full(now) for b in (self.requests, self.tokens))


class Admission:
    """Counts running requests and each tenant's use. Each `enter` that was granted must be followed by one `leave`.

    A tenant's tokens are charged once they are known, after the request: the limit holds over time, one request may
    exceed it, and the tenant then waits until the debt is paid.

    Each call takes constant amortized time, however many tenants there are. Idle tenants are forgotten, which changes
    nothing. Only while more than MAX_TENANTS have unpaid use is an older one without a running request forgotten as
    well, and its debt with it: a client needs that many addresses to have one debt cancelled.
    """

    def __init__(
        self, args: ServerArgs, *, max_num_seqs: int, num_waiting: Callable[[], int], clock: Callable[[], float]
    ) -> None:
        """`num_waiting` returns the engine's number of queued requests; `max_num_seqs` is how many it runs at once."""
        self._args = args
        self._max_num_seqs = max_num_seqs
        self._num_waiting = num_waiting
        self._clock = clock
        self.tenants: OrderedDict[str, _Tenant] = OrderedDict()
        """Those that are remembered; the first was granted or examined longest ago."""
        self._last_leave: float | None = None
        self._interval_s = 1.0  # smoothed time between the ends of two requests
        self.num_running = 0
        """Requests that were granted and have not ended."""
        self.num_refused: Counter[str] = Counter()

    def enter(self, tenant: str) -> Refusal | None:
        """Grant a request (None), or say why not. A refused request changes nothing but `num_refused`."""
        now = self._clock()
        account = self.tenants.get(tenant) or _Tenant(self._args, now)
        refusal = self._tenant_refusal(account, now) or self._queue_refusal()
        if refusal is not None:
            self.num_refused[refusal.reason] += 1
            return refusal
        account.num_running += 1
        self.num_running += 1
        if account.requests is not None:
            account.requests.take(1, now)
        self._remember(tenant, account, now)
        return None

    def leave(self, tenant: str, num_tokens: int) -> None:
        """A granted request has ended after using `num_tokens`, those of its prompts and outputs together."""
        now = self._clock()
        account = self.tenants[tenant]
        account.num_running -= 1
        self.num_running -= 1
        self._charge(account, num_tokens, now)
        if account.is_idle(now):
            del self.tenants[tenant]
        if self._last_leave is not None:
            interval_s = min(now - self._last_leave, MAX_RETRY_AFTER_S)  # an idle hour says nothing about the pace
            self._interval_s += _SMOOTHING * (interval_s - self._interval_s)
        self._last_leave = now

    def charge(self, tenant: str, num_tokens: int) -> None:
        """A tenant's request has used `num_tokens` more after it left, in the background."""
        now = self._clock()
        account = self.tenants.get(tenant) or _Tenant(self._args, now)
        self._charge(account, num_tokens, now)
        self._remember(tenant, account, now)

    @staticmethod
    def _charge(account: _Tenant, num_tokens: int, now: float) -> None:
        if account.tokens is not None:
            account.tokens.take(num_tokens, now)

    def _remember(self, tenant: str, account: _Tenant, now: float) -> None:
        """Store an account, and examine a few others that may be forgotten."""
        self.tenants[tenant] = account
        self.tenants.move_to_end(tenant)
        for _ in range(min(_LOOKS, len(self.tenants))):
            oldest, candidate = next(iter(self.tenants.items()))
            num_excess = len(self.tenants) - MAX_TENANTS
            if not candidate.num_running and (num_excess > 0 or candidate.is_idle(now)):
                del self.tenants[oldest]
            elif candidate.num_running or num_excess < 0:
                self.tenants.move_to_end(oldest)

    def _tenant_refusal(self, account: _Tenant, now: float) -> Refusal | None:
        args = self._args
        if args.max_concurrent_per_tenant is not None and account.num_running >= args.max_concurrent_per_tenant:
            message = f"{account.num_running} of your requests are running, the most that are allowed at once"
            return Refusal("too_many_at_once", message, _whole_s(self._interval_s * self.num_running))
        if account.requests is not None and (wait_s := account.requests.wait_s(1, now)):
            message = f"the rate limit of {args.requests_per_minute} requests per minute is reached"
            return Refusal("requests_per_minute", message, math.ceil(wait_s))
        if account.tokens is not None and (wait_s := account.tokens.wait_s(1, now)):
            message = f"the rate limit of {args.tokens_per_minute} tokens per minute is reached"
            return Refusal("tokens_per_minute", message, math.ceil(wait_s))
        return None

    def _queue_refusal(self) -> Refusal | None:
        """Check the engine's number, which counts each prompt of a request, and our own, which is never out of date."""
        args, num_waiting = self._args, self._num_waiting()
        max_running = self._max_num_seqs + args.max_waiting
        if self.num_running < max_running and (num_waiting == 0 or num_waiting < args.max_waiting):
            return None
        num_excess = max(num_waiting - args.max_waiting, self.num_running - max_running) + 1
        message = f"the queue is full: at most {args.max_waiting} requests may wait"
        return Refusal("queue_full", message, _whole_s(self._interval_s * num_excess))


def tenant_of_address(host: str) -> str:
    """The tenant of a client without an API key: its IPv4 address, or its IPv6 /64 network, which one client owns."""
    if ":" not in host:
        return host
    try:
        address = ipaddress.IPv6Address(host.partition("%")[0])
    except ValueError:
        return host
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.IPv6Network((int(address) >> 64 << 64, 64)))


def _whole_s(seconds: float) -> int:
    return min(max(math.ceil(seconds), 1), MAX_RETRY_AFTER_S)
