"""Which kernels serve, on how many threads, and what happens where the extension is missing."""

import contextlib
import os
import re
import subprocess
import sys
import sysconfig
import threading
import time
import warnings

import pytest
import torch

from quire import kernels
from quire.common.errors import ConfigError
from quire.common.faults import Fault, environment, inject
from quire.kernels import backends

from .isas import ISAS, native, needs_native, using


def run_python(code, **environment):
    inherited = {name: value for name, value in os.environ.items() if name != "QUIRE_ISA"}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_the_extension_is_used_by_default():
    if os.environ.get("QUIRE_ISA") == "reference":
        assert kernels.isa() == "reference"
    else:
        assert kernels.isa() in ISAS


@needs_native
@pytest.mark.parametrize("isa", ISAS)
def test_an_isa_can_be_forced(isa):
    with using(kernels.isa()):
        assert backends.choose_cpu_backend(isa).isa == isa


@pytest.mark.parametrize("name", ["OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY"])
def test_threads_run_on_all_cpus_whatever_binds_those_of_openmp(name):
    """The library binds the thread that loads it to one CPU."""
    value = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "GOMP_CPU_AFFINITY": "0"}[name]
    code = "from quire import kernels; import os; print(kernels.num_threads(), sorted(os.sched_getaffinity(0)))"
    expected = run_python(code)
    assert expected.returncode == 0, expected.stderr
    bound = run_python(code, **{name: value})
    assert (bound.stdout, bound.stderr) == (expected.stdout, expected.stderr)


def test_a_thread_that_openmp_has_bound_already_is_told():
    code = "import os, torch; print(len(os.sched_getaffinity(0))); import quire"
    done = run_python(code, OMP_PROC_BIND="true")
    assert done.returncode == 0
    is_told = "OMP_PROC_BIND has bound this thread" in done.stderr
    assert is_told == (done.stdout == "1\n")


@needs_native
def test_an_empty_isa_is_none():
    with using(kernels.isa()):
        assert backends.choose_cpu_backend("").isa == backends.choose_cpu_backend(None).isa


@pytest.mark.parametrize(("wanted", "nearest"), [("avx513", "avx512"), ("AVX2", "avx2")])
def test_an_unknown_isa_is_refused_with_the_nearest_name(wanted, nearest):
    with pytest.raises(ConfigError, match=rf"QUIRE_ISA={wanted} .*did you mean '{nearest}'"):
        backends.choose_cpu_backend(wanted)


@needs_native
def test_an_isa_this_cpu_lacks_is_refused(monkeypatch):
    class OldCpu:
        use_isa = staticmethod(lambda isa: False)
        available_isas = staticmethod(lambda: ["portable"])

    monkeypatch.setitem(sys.modules, "quire._native", OldCpu)
    with pytest.raises(ConfigError, match="QUIRE_ISA=avx2 cannot run here; this CPU has portable"):
        backends.choose_cpu_backend("avx2")


def test_a_missing_extension_gives_one_loud_warning(monkeypatch):
    monkeypatch.setitem(sys.modules, "quire._native", None)
    with pytest.warns(RuntimeWarning, match="WITHOUT ITS NATIVE KERNELS") as warned:
        assert backends.choose_cpu_backend(None).isa == "reference"
    assert len(warned) == 1


def test_where_the_extension_is_broken_the_reference_serves_after_one_warning(tmp_path):
    (tmp_path / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}").write_bytes(b"half an extension")
    code = f"""if True:
        import sys
        import quire
        sys.meta_path = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]  # editable
        quire.__path__.insert(0, {str(tmp_path)!r})
        import torch
        from quire import kernels
        packed = kernels.pack_weight(torch.eye(3))
        print(kernels.isa(), kernels.matmul(torch.ones(2, 3), packed).tolist())
        kernels.embedding(torch.tensor([1]), packed)
        kernels.set_num_threads(1)
        assert kernels.num_threads() == 1
    """
    done = run_python(code)
    assert done.stdout.split(" ", 1) == ["reference", "[[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]]\n"], done.stderr
    assert done.stderr.count("WITHOUT ITS NATIVE KERNELS") == 1


def test_asking_for_the_reference_gives_no_warning_and_the_cpuset_sizes_the_pool():
    """Two matters in one process, as starting one takes seconds."""
    code = """if True:
        import os, sys
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        from quire import kernels
        assert kernels.isa() == "reference"
        del os.environ["QUIRE_ISA"]
        from quire.kernels import backends
        native = backends.choose_cpu_backend(None)
        assert native.num_threads() == 1, native.num_threads()
    """
    if kernels.isa() == "reference":
        code = "from quire import kernels; assert kernels.isa() == 'reference'"
    done = run_python(code, QUIRE_ISA="reference", PYTHONWARNINGS="error::RuntimeWarning")
    assert (done.returncode, done.stderr) == (0, "")


@needs_native
@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "max 100000"}, 0),
        ("0::/\n", {"cpu.max": "150000 100000"}, 1.5),
        (
            "0::/pod/app\n",
            {"pod/app/cpu.max": "max 100000", "pod/cpu.max": "400000 100000", "cpu.max": "max 100000"},
            4,
        ),
        ("0::/pod/app\n", {"pod/app/cpu.max": "50000 100000", "pod/cpu.max": "400000 100000"}, 0.5),
        ("0::/not/mounted/here\n", {"cpu.max": "300000 100000"}, 3),
        ("4:cpu,cpuacct:/app\n", {"cpu/app/cpu.cfs_quota_us": "250000", "cpu/app/cpu.cfs_period_us": "100000"}, 2.5),
        ("4:cpuacct,cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 0),
        ("garbage\n0::/\n", {"cpu.max": "garbage"}, 0),
        ("0::/\n", {"cpu.max": "garbage 100000"}, 0),
        ("0::/\n", {"cpu.max": "1e400 100000"}, 0),
    ],
)
def test_cpu_quotas_are_read_from_the_group_and_its_ancestors(tmp_path, groups, files, quota):
    (tmp_path / "groups").write_text(groups)
    for name, text in files.items():
        (tmp_path / "mount" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mount" / name).write_text(text + "\n")
    assert native.cpu_quota(str(tmp_path / "groups"), str(tmp_path / "mount")) == quota


@needs_native
def test_the_pool_has_no_more_threads_than_the_process_may_use():
    assert 1 <= native.available_cpus() <= len(os.sched_getaffinity(0))


def test_the_number_of_threads_can_be_set_and_must_be_positive():
    with using(kernels.isa()):
        kernels.set_num_threads(3)
        assert kernels.num_threads() == 3
        for count in (0, -1, 1025):
            with pytest.raises(ConfigError, match=f"num_threads={count}: must be 1 to 1024"):
                kernels.set_num_threads(count)


@needs_native
@pytest.mark.parametrize(("count", "cpus"), [(2, [0]), (1, [0, 0]), (1, [-1]), (2, [0, 10**9]), (2, [0, 2**31 - 1])])
def test_threads_are_pinned_to_as_many_cpus_as_there_are_threads(count, cpus):
    allowed = re.escape(str(sorted(os.sched_getaffinity(0))))
    with pytest.raises(ConfigError, match=rf"must be {count} of the CPUs that this process may use, {allowed}"):
        kernels.set_num_threads(count, cpus)


@needs_native
def test_threads_that_cannot_be_started_are_an_error_and_fewer_work():
    code = """
import resource, torch, quire
from quire import kernels
x, w = torch.ones(512, 64), kernels.pack_weight(torch.ones(640, 64))
pages = int(open("/proc/self/statm").read().split()[0])
resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (200 << 20),) * 2)
kernels.set_num_threads(1024)
try:
    kernels.matmul(x, w)
except quire.QuireError as error:
    print(error)
kernels.set_num_threads(2)
print(float(kernels.matmul(x, w).sum()))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    error, total = result.stdout.splitlines()
    assert re.fullmatch(r"only \d+ of 1024 threads could be started \(.*\): lower num_threads", error)
    assert float(total) == 512 * 640 * 64


def affinities(known=()):
    """The CPUs that each thread of this process but the `known` ones may run on, by thread."""
    found = {}
    for thread in set(map(int, os.listdir("/proc/self/task"))) - set(known):
        with contextlib.suppress(ProcessLookupError):  # one that is just ending
            found[thread] = os.sched_getaffinity(thread)
    return found


@needs_native
def test_workers_are_pinned_to_the_cpus_named_and_the_calling_thread_is_not():
    allowed = os.sched_getaffinity(0)
    first, last = min(allowed), max(allowed)
    with using(kernels.isa(), num_threads=1):
        multiply = large_product()
        expected, others = multiply(), affinities()
        kernels.set_num_threads(4, [last, first, last, first])
        assert kernels.num_threads() == 4
        assert torch.equal(multiply(), expected)
        workers = affinities(others)
        assert sorted(map(sorted, workers.values())) == sorted([[first], [last], [first]])
        assert os.sched_getaffinity(0) == allowed
        kernels.set_num_threads(4)
        assert torch.equal(multiply(), expected)
        assert list(affinities({**others, **workers}).values()) == [allowed] * 3


def test_the_reference_pins_no_threads(monkeypatch):
    monkeypatch.setitem(backends._backends, "cpu", backends.choose_cpu_backend("reference"))
    with pytest.raises(ConfigError, match="only the native kernels' threads"):
        kernels.set_num_threads(1, [0])
    with pytest.raises(ConfigError, match="only the native kernels' threads"):
        kernels.backend_for("cpu").threads(None, [0])


def large_product():
    """A product that is certainly shared among threads, and what it should be."""
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(640, 300, generator=generator), torch.randn(20, 300, generator=generator)
    packed = kernels.pack_weight(weight)
    return lambda: kernels.matmul(x, packed)


def test_several_python_threads_may_call_kernels_at_once():
    with using(kernels.isa(), num_threads=3):
        multiply = large_product()
        expected, wrong = multiply(), []

        def work(thread):
            for round_ in range(200):
                if thread == 0 and round_ % 50 == 0:
                    kernels.set_num_threads(1 + round_ // 50)
                if not torch.equal(multiply(), expected):
                    wrong.append(thread)

        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


@needs_native
def test_every_task_of_every_region_runs_once():
    """Several callers take turns; workers that wake late must not run what is no longer, or not yet, theirs."""
    code = """if True:
        from concurrent.futures import ThreadPoolExecutor
        from quire import _native
        for num_threads in (1, 2, 5):
            _native.set_num_threads(num_threads)
            with ThreadPoolExecutor(3) as callers:
                assert list(callers.map(_native.exercise_pool, [50_000] * 3)) == [0, 0, 0]
        pool = _native.ThreadPool(3, [])

        def enter_and_run(num_regions):
            wrong = 0
            for _ in range(2_000):
                with pool:  # wakes workers that sleep, also while another caller's region runs
                    wrong += _native.exercise_pool(num_regions)
            return wrong

        for num_callers in (1, 3):
            with ThreadPoolExecutor(num_callers) as callers:
                assert not any(callers.map(enter_and_run, range(num_callers)))
    """
    done = run_python(code)  # in a process of its own, since what goes wrong here may end in waiting for ever
    assert (done.returncode, done.stderr) == (0, "")


@needs_native
@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_a_task_that_fails_fails_the_call_and_the_pool_goes_on(num_threads):
    """It asks for scratch memory; the tasks of one region fail in turn, whichever thread they run on."""
    with using(kernels.isa(), num_threads):
        for after in range(60):
            native.refuse_memory(after)
            with pytest.raises(MemoryError):
                native.exercise_pool(20)
            assert native.exercise_pool(20) == 0


@needs_native
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_kernel_that_gets_no_memory_raises_and_the_next_call_is_right(num_threads):
    with using(kernels.isa(), num_threads):
        multiply = large_product()
        expected = multiply()
        for after in range(4):
            with inject(Fault("memory.native", after=after)) as injected:
                with pytest.raises(MemoryError):
                    [multiply() for _ in range(6)]
                assert torch.equal(multiply(), expected)
            assert injected.num_fired == 1
        with inject(Fault("memory.native", after=10**9)) as injected:
            assert torch.equal(multiply(), expected)
        assert injected.num_fired == 0


@needs_native
def test_the_environment_says_what_memory_a_process_is_refused():
    code = """if True:
        import torch
        from quire import kernels
        packed = kernels.pack_weight(torch.eye(3))
        for _ in range(3):
            try:
                print(kernels.matmul(torch.ones(1, 3), packed).sum().item())
            except MemoryError as error:
                print("refused")
    """
    done = run_python(code, **environment(Fault("memory.native", after=1)))
    assert done.stdout.split() == ["3.0", "refused", "3.0"], done.stderr


@needs_native
def test_a_forked_child_starts_its_own_threads():
    with using(kernels.isa(), num_threads=2):
        multiply = large_product()
        expected = multiply()  # the parent's workers exist now; the child's do not
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python warns of any fork beside threads
            child = os.fork()
        if child == 0:
            os._exit(0 if all(torch.equal(multiply(), expected) for _ in range(5)) else 1)
        deadline = time.monotonic() + 60
        while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < deadline:
            time.sleep(0.01)
        if done == (0, 0):
            os.kill(child, 9)
            os.waitpid(child, 0)
        assert done == (child, 0)
        assert torch.equal(multiply(), expected)


@needs_native
def test_waiting_threads_cost_no_cpu_time():
    with using(kernels.isa(), num_threads=4):
        large_product()()
        before = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - before < 0.05
