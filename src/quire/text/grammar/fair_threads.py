"""Threads that are shared fairly between tenants."""

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from quire.common.params.base import shares_of

_Result = TypeVar("_Result")


class FairThreads(Generic[_Result]):
    """Runs jobs in a few threads, so that a tenant's slow jobs delay only that tenant.

    The next job is the oldest one of the API key with the fewest running jobs; among equals, of the key that has used
    the least time since the queue was last empty; and of that key's tenant of which the same holds.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[tuple[Future[_Result], Callable[[], _Result]]]] = {}
        self._num_running: Counter[str] = Counter()
        self._used_s: defaultdict[str, float] = defaultdict(float)

    def submit(self, tenant: str, job: Callable[[], _Result]) -> Future[_Result]:
        """Queue a job; the future can be cancelled until the job starts."""
        future: Future[_Result] = Future()
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append((future, job))
        self._threads.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        with self._lock:
            tenant = min(
                self._waiting, key=lambda name: [(self._num_running[n], self._used_s[n]) for n in shares_of(name)]
            )
            future, job = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            self._num_running.update(shares_of(tenant))
        start_s = time.monotonic()
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(job())
        except BaseException as error:  # includes panics of a native library; the caller gets them
            future.set_exception(error)
        finally:
            with self._lock:
                for name in shares_of(tenant):
                    self._num_running[name] -= 1
                    self._used_s[name] += time.monotonic() - start_s
                if not self._waiting:
                    self._num_running += Counter()  # drops zeros, so that names do not accumulate
                    self._used_s.clear()
