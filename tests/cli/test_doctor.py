"""`quire doctor`: what it finds on machines of several kinds, laid out as folders."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire import kernels
from quire.cli import main
from quire.cli.doctor import Finding, examine

_MIB = 1024  # in KiB, the unit of /proc/meminfo
_GIB = 1024 * _MIB


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def meminfo(total_gib: int, available_mib: int, swap_gib: int = 0) -> str:
    """/proc/meminfo of a machine whose swap is in use."""
    sizes = {"MemTotal": total_gib * _GIB, "MemFree": 0, "MemAvailable": available_mib * _MIB}
    sizes |= {"SwapTotal": swap_gib * _GIB, "SwapFree": 0}
    return "".join(f"{name}: {kib} kB\n" for name, kib in sizes.items())


def machine(root: Path, **changes: str) -> Path:
    """A machine without anything to improve, except for `changes`: texts of the files."""
    texts = {
        "cpuinfo": "model name : Fast CPU\nflags : fpu avx2 fma f16c avx512f avx512_bf16\n",
        "meminfo": meminfo(64, 48 * 1024),
        "mounts": "/dev/sda / ext4 rw 0 0\n",
        "hugepages": "always [madvise] never\n",
        "governor": "performance\n",
    } | changes
    files = {
        "proc/cpuinfo": texts["cpuinfo"],
        "proc/meminfo": texts["meminfo"],
        "proc/mounts": texts["mounts"],
        "sys/kernel/mm/transparent_hugepage/enabled": texts["hugepages"],
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": texts["governor"],
    }
    return lay_out(root, files)


def finding(root: Path, name: str) -> Finding:
    (found,) = [found for found in examine(root, measures=False) if found.name == name]
    return found


@pytest.mark.parametrize("name", ["instructions", "memory", "huge pages", "clock governor"])
def test_a_good_machine_gets_no_advice(tmp_path, name):
    assert finding(machine(tmp_path), name).advice == ""


@pytest.mark.parametrize(
    ("change", "name", "value", "advice"),
    [
        (
            {"cpuinfo": "model name : Old\nflags : avx2 fma f16c avx512f\n"},
            "instructions",
            "avx2 fma f16c avx512f",
            "--quantization int8",
        ),
        ({"cpuinfo": "flags : avx2 fma\n"}, "instructions", "avx2 fma", "without f16c the portable kernels run"),
        (
            {"cpuinfo": "flags : avx2 fma hypervisor\n"},
            "instructions",
            "avx2 fma",
            "let the virtual machine have its host's",
        ),
        ({"cpuinfo": "flags : sse2\n"}, "instructions", "basic", "without avx2, fma, f16c the portable kernels run"),
        ({"hugepages": "always madvise [never]\n"}, "huge pages", "never", "echo madvise"),
        ({"governor": "powersave\n"}, "clock governor", "powersave", "--governor performance"),
        ({"meminfo": meminfo(8, 4096, 1)}, "swap", "1.00 GiB in use", "--kv-cache-memory"),
        ({"mounts": "server:/models / nfs4 rw 0 0\n"}, "models", "(nfs4)", "HF_HOME"),
    ],
)
def test_what_slows_a_machine_down_gets_advice(tmp_path, change, name, value, advice):
    found = finding(machine(tmp_path, **change), name)
    assert value in found.value
    assert advice in found.advice


def test_a_machine_with_several_nodes_gets_advice(tmp_path):
    root = machine(tmp_path)
    nodes = {f"sys/devices/system/node/node{i}/cpulist": cpus for i, cpus in enumerate(("0-1\n", "2-3\n", "\n"))}
    lay_out(root, nodes)  # the last one has only memory
    found = finding(root, "NUMA nodes")
    assert found.value == "2"
    assert "numactl" in found.advice


def test_threads_that_share_a_core_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr("quire.kernels.num_threads", lambda: 2)
    topology = {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": "0-1\n" for cpu in (0, 1)}
    found = finding(lay_out(machine(tmp_path), topology), "threads")
    assert "1 cores" in found.value
    assert "--num-threads 1" in found.advice


@pytest.mark.parametrize(
    ("quota", "limit", "advice"),
    [
        ("250000 100000", "; a control group (container) limits them to the time of 2.5 CPUs", "leaves CPUs unused"),
        ("50000 100000", "; a control group (container) limits them to the time of 0.5 CPUs", "to at least 1 CPU"),
        ("max 100000", "", ""),
    ],
)
def test_a_quota_is_shown_with_what_it_costs(tmp_path, monkeypatch, quota, limit, advice):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr("quire.kernels.num_threads", lambda: 2)
    group = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": quota}
    found = finding(lay_out(machine(tmp_path), group), "threads")
    assert found.value.endswith(f"8 cores{limit}")
    assert advice in found.advice
    assert bool(advice) == bool(found.advice), "other limits of threads are not a quota"


def test_a_control_group_s_limit_is_named(tmp_path):
    group = {"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/memory.max": str(4 * 2**30)}
    found = finding(lay_out(machine(tmp_path), group), "memory")
    assert "of 4.00 GiB; the machine has 64.00 GiB" in found.value


def test_the_nearest_mount_tells_the_file_system(tmp_path, monkeypatch):
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    mounts = f"/dev/sda / ext4 rw 0 0\nnas:/ {tmp_path} cifs rw 0 0\n"
    assert "(cifs)" in finding(machine(tmp_path / "root", mounts=mounts), "models").value


def test_an_instruction_set_that_was_chosen_is_named(tmp_path, monkeypatch):
    native = pytest.importorskip("quire._native")
    monkeypatch.setenv("QUIRE_ISA", "portable")
    if native.available_isas()[0] != "portable":
        assert "QUIRE_ISA=portable is set" in finding(machine(tmp_path), "kernels").advice


def test_amx_that_is_not_granted_gets_advice(tmp_path, monkeypatch):
    flags = "flags : avx2 fma f16c avx512f avx512_bf16 amx_bf16\n"
    for variants, words in ((["avx512_bf16"], "is not granted"), (["amx", "avx512_bf16"], "")):
        monkeypatch.setattr("quire.cli.doctor._variants", lambda variants=variants: variants)
        found = finding(machine(tmp_path / str(len(variants)), cpuinfo=flags), "instructions")
        assert words in found.advice
        assert bool(words) == bool(found.advice)


def test_a_model_cache_that_may_not_be_entered_is_looked_at_from_outside(tmp_path, monkeypatch):
    exists = os.path.exists

    def denied(path):
        if "hub" in str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return True

    monkeypatch.setattr("pathlib.Path.exists", denied)
    monkeypatch.setattr("os.path.exists", lambda path: "hub" not in str(path) and exists(path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert str(tmp_path / "hub") in finding(machine(tmp_path / "root"), "models").value


def test_little_memory_is_why_nothing_is_measured(tmp_path):
    found = examine(machine(tmp_path, meminfo=meminfo(64, 1024)), measures=True)
    assert [f.value for f in found if f.area == "speed"] == ["not measured: less than 2.00 GiB of memory is available"]


def test_torch_that_cannot_be_imported_is_fatal(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    found = finding(machine(tmp_path), "torch")
    assert found.is_fatal
    assert "install.md" in found.advice


def test_sizes_that_are_missing_are_passed_over(tmp_path):
    assert finding(machine(tmp_path, meminfo="SwapTotal:\n" + meminfo(64, 48 * 1024)), "memory").advice == ""


@pytest.mark.parametrize("broken", ["instructions", "torch"])
def test_the_command_prints_its_findings_where_models_cannot_run(tmp_path, broken):
    variables = {"QUIRE_ISA": "avx513"}
    if broken == "torch":
        lay_out(tmp_path, {"torch/__init__.py": "raise OSError('libtorch_cpu.so: not found')\n"})
        variables = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    command = [sys.executable, "-m", "quire", "doctor", "--json"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (1, "")
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    fatal = {row["name"]: row["value"] for row in rows if row["is_fatal"]}
    assert fatal.keys() == {"torch" if broken == "torch" else "kernels"}
    assert {"threads", "memory", "models"} <= {row["name"] for row in rows}


def test_a_machine_without_these_files_is_examined(tmp_path):
    """As on macOS. Every finding that needs no file is there."""
    assert {"quire", "kernels", "threads", "memory", "models"} <= {f.name for f in examine(tmp_path, measures=False)}


def test_the_command_prints_findings_and_their_number(capsys):
    assert main(["doctor", "--no-measure"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("installation\n")
    assert out.splitlines()[-1].endswith(("hint", "hints", "was found"))


def test_the_command_prints_json(capsys):
    assert main(["doctor", "--no-measure", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"area", "name", "value", "advice", "is_fatal"} == set(rows[0])


def test_speeds_are_measured(capsys):
    pytest.importorskip("quire._native")
    assert main(["doctor", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (reads,) = [row["value"] for row in rows if row["name"] == "memory reads"]
    assert float(reads.removesuffix(" GB/s")) > 0
    (peaks,) = [row["value"] for row in rows if row["name"] == "multiplications"]
    assert peaks.startswith(f"with the kernels {kernels.isa()}, ")
    assert all(float(peak.split()[0].replace(",", "")) > 0 for peak in peaks.partition(": ")[2].split(", "))
