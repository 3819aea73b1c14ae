"""Faults fire where, when and as often as they say, in this process and in one to come; nothing else notices."""

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from io import BytesIO

import pytest

from quire.common.errors import ConfigError
from quire.common.faults import Fault, environment, fault_point, fault_write, inject


def fails(*passes: tuple[str, object]) -> list[bool]:
    """Which of these passes raise."""
    outcomes = []
    for point, subject in passes:
        try:
            fault_point(point, subject)
        except RuntimeError:
            outcomes.append(True)
        else:
            outcomes.append(False)
    return outcomes


def test_a_point_does_nothing_unless_a_fault_is_armed_there():
    fault_point("step.start")
    with inject(Fault("step.end")) as injected:
        fault_point("step.start")
        assert injected.num_passed == injected.num_fired == 0
        with pytest.raises(RuntimeError, match=r"injected at step\.end"):
            fault_point("step.end")
    fault_point("step.end")
    assert injected.num_fired == 1


@pytest.mark.parametrize(
    ("after", "times", "expected"),
    [(0, 1, [1, 0, 0, 0]), (2, 1, [0, 0, 1, 0]), (1, 2, [0, 1, 1, 0]), (1, None, [0, 1, 1, 1])],
)
def test_passes_fail_after_a_number_and_a_number_of_times(after, times, expected):
    with inject(Fault("step.start", after=after, times=times)) as injected:
        assert fails(*[("step.start", None)] * 4) == [bool(failed) for failed in expected]
    assert (injected.num_passed, injected.num_fired) == (4, sum(expected))


def test_passes_fail_with_a_probability():
    with inject(Fault("step.start", times=None, probability=0.3)) as injected:
        assert 200 < sum(fails(*[("step.start", None)] * 1000)) < 400
    with inject(Fault("step.start", times=None, probability=0)):
        assert not any(fails(*[("step.start", None)] * 9))
    assert injected.num_passed == 1000


def test_a_fault_is_limited_to_a_subject_and_remembers_whom_it_hit():
    with inject(Fault("sampler.row", subject=7, after=1, times=None)) as injected:
        passes = [("sampler.row", seq_id) for seq_id in (7, 8, 7, 7)]
        assert fails(*passes) == [False, False, True, True]
    with inject(Fault("sampler.row", after=1)) as other:
        assert fails(*passes) == [False, True, False, False]
    assert injected.subjects == [7, 7]
    assert other.subjects == [8]


def test_several_faults_count_each_for_itself():
    with inject(Fault("step.start", after=1)), inject(Fault("step.start", after=2)):
        assert fails(*[("step.start", None)] * 4) == [False, True, True, False]


@pytest.mark.parametrize(
    ("name", "kind", "number"),
    [
        ("MemoryError", MemoryError, None),
        ("KeyError", KeyError, None),
        ("ENOSPC", OSError, errno.ENOSPC),
        ("ECONNRESET", ConnectionResetError, errno.ECONNRESET),
    ],
)
def test_what_is_raised_is_named(name, kind, number):
    with inject(Fault("step.start", error=name)), pytest.raises(kind, match=r"injected at step\.start") as raised:
        fault_point("step.start")
    assert number is None or raised.value.errno == number


def test_a_delay_lasts():
    with inject(Fault("step.start", "delay", seconds=0.02)):
        start_s = time.monotonic()
        fault_point("step.start")
    assert time.monotonic() - start_s >= 0.02


def test_a_write_comes_in_part_or_not_at_all():
    file = BytesIO()
    assert fault_write("step.end", file.write, b"0123456789") == 10
    for action, expected in (("raise", b"0123456789"), ("write", b"012345678901234")):
        with inject(Fault("step.end", action, error="ENOSPC")), pytest.raises(OSError, match="No space left"):
            fault_write("step.end", file.write, b"0123456789")
        assert file.getvalue() == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"point": "step.stat"}, r"unknown fault point 'step.stat', did you mean 'step.start'\?"),
        ({"point": "step.end", "error": "Sorry"}, "'Sorry' is neither"),
        ({"point": "step.end", "error": "print"}, "'print' is neither"),
        ({"point": "step.end", "error": "SystemExit"}, "'SystemExit' is neither"),
        ({"point": "step.end", "error": "UnicodeDecodeError"}, "'UnicodeDecodeError' is neither"),
        ({"point": "step.end", "probability": 1.5}, "probability=1.5 is not between 0 and 1"),
    ],
)
def test_what_there_is_not_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Fault(**given)


def test_a_point_that_is_not_in_the_table_is_noticed():
    with inject(Fault("step.end")), pytest.raises(AssertionError, match=r"'step\.middle' is not in the table"):
        fault_point("step.middle")


def test_threads_share_the_count():
    num_failed: list[int] = []
    with inject(Fault("step.start", after=100, times=300)) as injected:
        threads = [
            threading.Thread(target=lambda: num_failed.append(sum(fails(*[("step.start", None)] * 200))))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(num_failed) == injected.num_fired == 300
    assert injected.num_passed == 800


def run(code: str, faults: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = f"from quire.common.faults import fault_point\n{code}"
    whole = dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))) | faults
    return subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=False, env=whole)


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (Fault("step.end", "exit", status=7, after=1), 7),
        (Fault("step.end", "kill", after=1), -signal.SIGKILL),
        (Fault("step.end", error="ENOSPC", after=1), 1),
        (Fault("step.start", "exit", status=7), 0),
    ],
)
def test_another_process_is_armed_by_its_environment(fault, code):
    result = run("fault_point('step.end'); print('once', flush=True); fault_point('step.end')", environment(fault))
    assert (result.returncode, result.stdout) == (code, "once\n"), result.stderr
    assert f"this process will fail on purpose, at {fault.point}" in result.stderr
    assert ("No space left on device" in result.stderr) == (fault.error == "ENOSPC")


@pytest.mark.parametrize(
    "given", ["step.end", '[{"point": "nowhere"}]', '[{"point": "step.end", "rate": 1}]', "\udcff"]
)
def test_a_wrong_environment_is_refused(given):
    result = run("", {"QUIRE_FAULTS": given})
    assert result.returncode == 1
    assert "is not a JSON list of faults" in result.stderr
