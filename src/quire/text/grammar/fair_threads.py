"""Threads that tenants share fairly."""

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

_Result = TypeVar("_Result")


class FairThreads(Generic[_Result]):
    """Runs jobs in a few threads. Next comes the oldest job of the tenant that has fewest running, and among equals of
    the one that has taken the least time since a tenant last had to wait: slow jobs hold up those of their own tenant.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, name)
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[tuple[Future[_Result], Callable[[], _Result]]]] = {}
        self._num_running: Counter[str] = Counter()
        self._used_s: defaultdict[str, float] = defaultdict(float)

    def submit(self, tenant: str, job: Callable[[], _Result]) -> Future[_Result]:
        """Run `job` when its turn comes; until then the future can be cancelled."""
        future: Future[_Result] = Future()
        with self._lock:
            self._waiting.setdefault(tenant, deque()).append((future, job))
        self._threads.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        with self._lock:
            tenant = min(self._waiting, key=lambda name: (self._num_running[name], self._used_s[name]))
            future, job = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            self._num_running[tenant] += 1
        start_s = time.monotonic()
        try:
            if future.set_running_or_notify_cancel():
                future.set_result(job())
        except BaseException as error:  # panics of a native library too: it is the caller's to see
            future.set_exception(error)
        finally:
            with self._lock:
                self._num_running[tenant] -= 1
                self._used_s[tenant] += time.monotonic() - start_s
                if not self._waiting:
                    self._num_running += Counter()  # drops zeros: names do not pile up
                    self._used_s.clear()
