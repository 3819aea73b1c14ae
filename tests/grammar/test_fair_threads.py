"""Threads shared by tenants: nobody's jobs hold up another's for longer than the one that runs."""

import threading
from concurrent.futures import Future

import pytest

from quire.text.grammar.fair_threads import FairThreads


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


def held_threads(gate: threading.Event) -> FairThreads[str]:
    """One thread, busy with a job of the flooding tenant until the gate opens."""
    threads: FairThreads[str] = FairThreads(1, "test")
    begun = threading.Event()

    def job() -> str:
        begun.set()
        gate.wait(60)
        return "first"

    threads.submit("flood", job)
    assert begun.wait(60)
    return threads


def test_a_tenant_does_not_wait_for_a_queue_of_another(gate) -> None:
    threads, order = held_threads(gate), []
    futures: list[Future] = [threads.submit("flood", lambda i=i: order.append(f"flood {i}")) for i in range(5)]
    futures += [threads.submit("polite", lambda i=i: order.append(f"polite {i}")) for i in range(2)]
    gate.set()
    for future in futures:
        future.result(30)
    assert order[0] == "polite 0", "the flooding tenant has used the thread, the polite one has not"
    assert [job for job in order if job.startswith("flood")] == [f"flood {i}" for i in range(5)]


def test_users_of_a_key_share_its_turns(gate) -> None:
    threads, order = held_threads(gate), list[str]()
    tenants = ["flood/1", "flood/2", "flood/1", "polite"]
    futures = [threads.submit(tenant, lambda tenant=tenant: order.append(tenant)) for tenant in tenants]
    gate.set()
    for future in futures:
        future.result(30)
    assert order == ["polite", "flood/1", "flood/2", "flood/1"]


def test_cancelled_jobs_do_not_run(gate) -> None:
    threads, order = held_threads(gate), []
    dropped = threads.submit("a", lambda: order.append("dropped"))
    kept = threads.submit("a", lambda: order.append("kept"))
    assert dropped.cancel()
    gate.set()
    kept.result(30)
    assert order == ["kept"]


def test_an_exception_is_the_callers(gate) -> None:
    gate.set()
    threads = held_threads(gate)

    def job() -> str:
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        threads.submit("a", job).result(30)
    assert threads.submit("a", lambda: "goes on").result(30) == "goes on"


def test_names_of_tenants_do_not_pile_up() -> None:
    threads: FairThreads[str] = FairThreads(1, "test")
    for i in range(50):
        threads.submit(str(i), lambda: "done").result(30)
    threads.submit("last", lambda: "done").result(30)
    assert len(threads._used_s) <= 1
    assert len(threads._num_running) <= 2
