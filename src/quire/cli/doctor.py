"""Examine this machine and installation: what Quire finds and uses, and what would make it faster."""

import argparse
import importlib
import json
import os
import platform
import re
import resource
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from quire.common.errors import QuireError
from quire.common.version import __version__
from quire.config.machine import allowed_cpus, cpu_quota, format_bytes, machine_memory, text_of

_FEATURES = (
    "avx2",
    "fma",
    "f16c",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "asimd",
    "asimddp",
    "bf16",
    "i8mm",
    "sve",
)
_SMALL_MEMORY = 2 * 2**30
_SMALL_DISK = 10 * 2**30
_MIN_FILES = 4096
_REMOTE = ("nfs", "cifs", "smb", "fuse", "9p", "virtiofs", "ceph", "glusterfs", "lustre")
_BYTES_PER_WEIGHT = {"bfloat16": 2.0, "int8": 1.0, "int4": 0.5}


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about the machine or the installation."""

    area: str
    name: str
    value: str
    advice: str = ""
    """What to do about it; empty if nothing needs to be done."""
    is_fatal: bool = False
    """Whether models cannot run as long as it is so."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--json", action="store_true", help="print one JSON object per finding")
    parser.add_argument("--no-measure", action="store_true", help="leave out the two seconds of measurements")


def run(options: argparse.Namespace) -> int:
    """Print all findings. The exit status is 1 if models cannot run."""
    findings = list(examine(Path("/"), measures=not options.no_measure))
    for line in [json.dumps(asdict(found)) for found in findings] if options.json else _lines(findings):
        print(line)
    return int(any(found.is_fatal for found in findings))


def examine(root: Path, measures: bool) -> Iterator[Finding]:
    """Yield all findings; files of the system are read below `root`."""
    installed = list(_installation())
    can_run = not any(found.is_fatal for found in installed)
    yield from installed
    yield from _processor(root, can_run)
    yield from _memory(root)
    yield from _storage(root)
    if measures and can_run:
        yield from _speeds(root)


def _lines(findings: list[Finding]) -> Iterator[str]:
    area, width = "", max(len(found.name) for found in findings)
    for found in findings:
        if found.area != area:
            area = found.area
            yield area
        mark = "FAIL" if found.is_fatal else "hint" if found.advice else "ok"
        yield f"  {mark:4}  {found.name:{width}}  {found.value}"
        if found.advice:
            yield f"        {'':{width}}  -> {found.advice}"
    num_hints = sum(bool(found.advice) for found in findings)
    yield f"{num_hints} hint{'s' * (num_hints != 1)}" if num_hints else "nothing to improve was found"


def _installation() -> Iterator[Finding]:
    area = "installation"
    yield Finding(area, "quire", f"{__version__}, Python {platform.python_version()}, {platform.platform()}")
    try:
        import torch
    except (ImportError, OSError) as error:
        advice = "install it as docs/how-to/install.md says, in the environment that has Quire"
        yield Finding(area, "torch", f"cannot be imported: {error}", advice, is_fatal=True)
        return
    advice = (
        "the CPU build saves gigabytes of disk; docs/how-to/install.md says how to install it"
        if torch.version.cuda
        else ""
    )
    yield Finding(area, "torch", torch.__version__, advice)
    wanted = os.environ.get("QUIRE_ISA")
    try:
        from quire import kernels
    except QuireError as error:
        yield Finding(area, "kernels", str(error), "unset QUIRE_ISA, or set it to one of these", is_fatal=True)
        return
    try:
        best, *_ = variants = _variants()
    except ImportError as error:
        advice = "install Quire from a wheel, or again where there is a C++20 compiler"
        yield Finding(area, "kernels", f"the native kernels cannot be imported: {error}", advice)
        return
    advice = f"QUIRE_ISA={wanted} is set: without it {best} is used" if wanted and wanted != best else ""
    yield Finding(area, "kernels", f"{kernels.isa()}, of {', '.join(variants)}", advice)


def _variants() -> list[str]:
    """The variants of the native kernels that this CPU has, best first."""
    found: list[str] = importlib.import_module("quire._native").available_isas()
    return found


def _processor(root: Path, can_run: bool) -> Iterator[Finding]:
    area = "processor"
    info = _table(root / "proc/cpuinfo")
    has = set(info.get("flags", info.get("Features", "")).split())
    yield Finding(area, "model", info.get("model name", platform.machine()))
    if has:
        advice = ""
        missing = [name for name in ("avx2", "fma", "f16c") if name not in has]
        if missing and platform.machine() in ("x86_64", "AMD64"):
            advice = (
                f"without {', '.join(missing)} the portable kernels run, many times slower: use a CPU of 2013 or later"
            )
            advice += ", or let the virtual machine have its host's (KVM: -cpu host)" * ("hypervisor" in has)
        elif "amx_bf16" in has and can_run and "amx" not in _variants():
            advice = (
                "AMX is there, but is not granted to this process: it takes Linux 5.16 or later, also around containers"
            )
        elif "avx512f" in has and "avx512_bf16" not in has:
            advice = "products in bfloat16 are converted to float32 here: `--quantization int8` avoids that"
        yield Finding(area, "instructions", " ".join(name for name in _FEATURES if name in has) or "basic", advice)
    yield _threads(root, can_run)
    nodes = (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")
    num_nodes = sum(text_of(cpus) != "" for cpus in nodes)  # some nodes have only memory
    if num_nodes > 1:
        advice = "start each server on one node: numactl --cpunodebind=0 --membind=0 quire serve ..."
        yield Finding(area, "NUMA nodes", str(num_nodes), advice)
    governor = text_of(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor:
        advice = "the clock rises slowly: cpupower frequency-set --governor performance" * (governor == "powersave")
        yield Finding(area, "clock governor", governor, advice)


def _threads(root: Path, can_run: bool) -> Finding:
    """The threads of the kernels, and the CPUs and cores that they have."""
    cpus, quota = allowed_cpus(), cpu_quota(root)
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    siblings = {text_of(root / topology.format(cpu)) or str(cpu) for cpu in cpus}
    value = f"{len(cpus)} CPUs of {os.cpu_count()}, {len(siblings)} cores"
    if quota is not None:
        value += f"; a control group (container) limits them to the time of {quota:g} CPUs"
    num_threads = len(cpus)
    if can_run:
        from quire import kernels

        num_threads = kernels.num_threads()
    advice = ""
    if quota is not None and quota < 1:
        advice = "each step stalls when the quota is used up: raise it to at least 1 CPU (docker: --cpus)"
    elif quota is not None and quota < len(cpus):
        advice = "the container's CPU quota leaves CPUs unused: raise it (docker: --cpus)"
    elif len(siblings) < num_threads:
        advice = f"two threads share a core: compare `quire bench throughput` with --num-threads {len(siblings)}"
    return Finding("processor", "threads", f"{num_threads}; {value}", advice)


def _memory(root: Path) -> Iterator[Finding]:
    area = "memory"
    info = _table(root / "proc/meminfo")
    memory = machine_memory(root)
    total = _kib(info, "MemTotal")
    value = f"{format_bytes(memory.available_bytes)} available of {format_bytes(memory.limit_bytes)}"
    if memory.limit_bytes < total:
        value += f"; the machine has {format_bytes(total)}, and a control group (container) limits it"
    advice = "end other programs or raise the limit; `quire plan MODEL` says what a model needs"
    yield Finding(area, "memory", value, advice if memory.available_bytes < _SMALL_MEMORY else "")
    swapped = _kib(info, "SwapTotal") - _kib(info, "SwapFree")
    if swapped > 0:
        advice = "weights or cache in swap make each step wait for the disk: lower --kv-cache-memory"
        yield Finding(area, "swap", f"{format_bytes(swapped)} in use", advice)
    setting = text_of(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if setting:
        chosen = setting.partition("[")[2].partition("]")[0]
        advice = "weights are read up to a quarter slower; as root: echo madvise > "
        advice += "/sys/kernel/mm/transparent_hugepage/enabled"
        yield Finding(area, "huge pages", chosen, advice if chosen == "never" else "")


def _storage(root: Path) -> Iterator[Finding]:
    from huggingface_hub import get_token
    from huggingface_hub.constants import HF_HUB_CACHE, HF_HUB_OFFLINE

    area, folder = "storage", Path(HF_HUB_CACHE)
    present = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    free, kind = shutil.disk_usage(present).free, _file_system(root, present)
    advice = ""
    if kind.startswith(_REMOTE):
        advice = "models are read over a network: set HF_HOME to a local disk"
    elif not os.access(present, os.W_OK):
        advice = "models cannot be downloaded to it: set HF_HOME to a folder that can be written"
    elif free < _SMALL_DISK:
        advice = "a model of 7 billion weights takes 15 GB: make room, or set HF_HOME to another disk"
    yield Finding(area, "models", f"{folder}, {format_bytes(free)} free{f' ({kind})' if kind else ''}", advice)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < _MIN_FILES:
        advice = f"each connection of a server is one: raise it to {_MIN_FILES} or more (ulimit -Hn, LimitNOFILE)"
        yield Finding(area, "open files", f"at most {hard}", advice)
    token = "with" if get_token() else "without"
    yield Finding(area, "hub", "offline (HF_HUB_OFFLINE)" if HF_HUB_OFFLINE else f"{token} a token for gated models")


def _speeds(root: Path) -> Iterator[Finding]:
    """What the memory and the cores can do, which bounds the tokens per second of every model."""
    if machine_memory(root).available_bytes < _SMALL_MEMORY:
        yield Finding(
            "speed", "limits", f"not measured: less than {format_bytes(_SMALL_MEMORY)} of memory is available"
        )
        return
    try:
        from quire import kernels
        from quire.cli.bench.limits import Limits

        limits = {name: Limits.measure(name, repeats=3) for name in _BYTES_PER_WEIGHT}
    except (ImportError, QuireError) as error:
        yield Finding("speed", "limits", f"not measured: {error}")
        return
    rate = max(limit.read_bytes_per_s for limit in limits.values())
    rates = ", ".join(f"{rate / 1e9 / size:.0f} in {name}" for name, size in _BYTES_PER_WEIGHT.items())
    yield Finding("speed", "memory reads", f"{rate / 1e9:.1f} GB/s")
    yield Finding("speed", "one sequence", f"of a model with 1 billion weights, at most, in tokens/s: {rates}")
    peaks = ", ".join(f"{limit.flops_per_s / 1e9:,.0f} in {name}" for name, limit in limits.items())
    yield Finding("speed", "multiplications", f"with the kernels {kernels.isa()}, at most, in GFLOP/s: {peaks}")
    prompts = ", ".join(f"{limit.flops_per_s / 2e9:,.0f} in {name}" for name, limit in limits.items())
    yield Finding("speed", "prompts", f"of a model with 1 billion weights, at most, in tokens/s: {prompts}")


def _table(path: Path) -> dict[str, str]:
    """The first value of each name in a file of lines `name: value`."""
    found: dict[str, str] = {}
    for line in text_of(path).splitlines():
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.strip(), value.strip())
    return found


def _kib(table: dict[str, str], name: str) -> int:
    """A size of /proc/meminfo in bytes; 0 if it is missing."""
    found = re.match("[0-9]+", table.get(name, ""))
    return int(found[0]) * 1024 if found else 0


def _file_system(root: Path, path: Path) -> str:
    """The type of the file system that holds `path`; empty if it is unknown."""
    mounts = [line.split() for line in text_of(root / "proc/mounts").splitlines()]
    folders = [(fields[1].replace("\\040", " "), fields[2]) for fields in mounts if len(fields) > 2]
    found = [(len(folder), kind) for folder, kind in folders if path.resolve().is_relative_to(folder)]
    return max(found, default=(0, ""))[1]
