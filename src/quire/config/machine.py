"""The memory that this process may use: the machine's, or less if a container sets a limit; sizes in bytes as text; and
the speed of disks."""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quire.common.errors import ConfigError, OutOfMemoryError

_CPUS = Path("/sys/devices/system/cpu")
_GROUP_FILES = {
    "memory": (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")),
    "cpu": (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")),
}
"""The files of a control group that say (limit, use) or (quota, period), in version 2 and in version 1."""
_PIECE_BYTES = 1024 * 1024
_MEASURED_S, _MAX_PIECES = 0.1, 64
_ASSUMED_BYTES_PER_S = 1e9
"""A solid-state disk's, or a fast network's."""
ENGINE_BYTES = 256 * 1024**2
"""What the process of an engine needs beside the plan: Python and torch, and what grows under load."""


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """The most memory this process can ever use, and the memory that is available to it now, in bytes."""

    limit_bytes: int
    available_bytes: int

    def limited(self, limit_bytes: int | None) -> MachineMemory:
        """The same, but no more than `limit_bytes`; None for no further limit."""
        if limit_bytes is None:
            return self
        return MachineMemory(min(self.limit_bytes, limit_bytes), min(self.available_bytes, limit_bytes))

    def for_plans(self, share: float, num_new: int, used_bytes: int = 0) -> int:
        """The bytes for the plans of all engines, `num_new` of which do not run yet; the plans of the others take
        `used_bytes`. At most `share` of the limit, and at least a quarter of what is available."""
        available = self.available_bytes + used_bytes
        return min(int(self.limit_bytes * share), max(available - num_new * ENGINE_BYTES, available // 4))


def machine_memory(root: Path = Path("/")) -> MachineMemory:
    """Read /proc/meminfo and every control group above this process (v2 and v1) below `root`.

    Every level of the hierarchy may set a limit. The lowest limit applies, and the least memory that any level has left
    is available. Pages that the kernel can drop (inactive file cache) count as available. On systems without /proc, the
    physical memory is returned.
    """
    sizes = re.findall(r"^(\w+):[ \t]*([0-9]+)", text_of(root / "proc/meminfo"), re.MULTILINE)
    info = {name: int(kib) * 1024 for name, kib in sizes}
    if not info.keys() >= {"MemTotal", "MemFree"}:
        return _physical_memory()
    limit, available = info["MemTotal"], info.get("MemAvailable", info["MemFree"])
    for folder, names in _control_groups(root, "memory"):
        group_limit = _number(folder / names[0])
        if group_limit is None:
            continue
        used = (_number(folder / names[1]) or 0) - _inactive_file_bytes(folder)
        limit = min(limit, group_limit)
        available = min(available, max(0, group_limit - used))
    return MachineMemory(limit, available)


def _control_groups(root: Path, controller: str) -> list[tuple[Path, tuple[str, ...]]]:
    """Return the folders of the control groups in which `controller` limits this process, each with the names of its
    files."""
    v2, v1 = _GROUP_FILES[controller]
    found = []
    for controllers, path in re.findall(r"^[0-9]+:([^:\n]*):(.*)$", text_of(root / "proc/self/cgroup"), re.MULTILINE):
        if controllers and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if controllers else "")
        folder = top / path.lstrip("/")
        while True:
            found.append((folder, v1 if controllers else v2))
            if folder == top:
                break
            folder = folder.parent
    return found


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return how many CPUs' time the control groups above this process allow it; None if they set no limit."""
    quotas = []
    for folder, names in _control_groups(root, "cpu"):
        with contextlib.suppress(ValueError, ArithmeticError):  # "max" and -1 are no limit
            quota, period = " ".join(text_of(folder / name) for name in names).split()
            quotas.append(int(quota) / int(period))
    return min((quota for quota in quotas if quota > 0), default=None)


def text_of(path: Path) -> str:
    """Return the text of a file of the system, without space around it; empty if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").strip()
    except OSError:
        return ""


def _inactive_file_bytes(folder: Path) -> int:
    values: dict[str, str] = dict(re.findall(r"^(\w+) ([0-9]+)$", text_of(folder / "memory.stat"), re.MULTILINE))
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def _physical_memory() -> MachineMemory:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError) as error:
        raise OutOfMemoryError("cannot determine how much memory this machine has: set kv_cache_memory") from error
    return MachineMemory(total, total)


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Bytes per second, and whether they were measured or are assumed."""

    bytes_per_s: float
    is_measured: bool


def disk_speed(path: Path) -> DiskSpeed:
    """Read pieces of 1 MiB all over the file, for 0.1 s, past the page cache.

    A speed is assumed where the system or the file system cannot read so, or the file is smaller than a piece.
    """
    count = min(_MAX_PIECES, path.stat().st_size // _PIECE_BYTES)
    if not hasattr(os, "O_DIRECT") or count == 0:
        return DiskSpeed(_ASSUMED_BYTES_PER_S, is_measured=False)
    places = [i * (path.stat().st_size // count) // mmap.PAGESIZE * mmap.PAGESIZE for i in range(count)]
    num_bytes, started = 0, time.perf_counter()
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            with mmap.mmap(-1, _PIECE_BYTES) as piece:  # in whole pages, as O_DIRECT wants
                for place in places:
                    num_bytes += os.preadv(file, [piece], place)
                    if time.perf_counter() - started > _MEASURED_S:
                        break
        finally:
            os.close(file)
    except OSError:
        return DiskSpeed(_ASSUMED_BYTES_PER_S, is_measured=False)
    return DiskSpeed(num_bytes / (time.perf_counter() - started), is_measured=True)


_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNITS |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def parse_bytes(name: str, value: int | str) -> int:
    """Return the bytes of an integer or a text such as `"64MiB"` or `"500MB"`; `name` appears in the error message."""
    if isinstance(value, int) and not isinstance(value, bool):
        num_bytes = value
    else:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", str(value).strip().lower())
        if match is None or match[2] not in _UNITS:
            raise ConfigError(f'{name}={value!r}: must be a number of bytes, or text such as "64MiB" or "2GiB"')
        num_bytes = int(float(match[1]) * _UNITS[match[2]])
    if num_bytes <= 0:
        raise ConfigError(f"{name}={value!r}: must be more than 0 bytes")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """Format `num_bytes` in the largest unit that gives at least 1, such as `1.50 GiB`."""
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"


def neighbours_first(cpus: Iterable[int]) -> list[int]:
    """Return CPUs in an order in which those of a memory node, of a package (socket), and of a core, lie together."""
    return sorted(cpus, key=lambda cpu: (_node(cpu), *_core(cpu), cpu))


def _core(cpu: int) -> list[int]:
    """The numbers of a CPU's package, die and core: only together they identify the core."""
    return [_number(_CPUS / f"cpu{cpu}/topology" / name) or 0 for name in ("physical_package_id", "die_id", "core_id")]


def _node(cpu: int) -> int:
    """The memory node of a CPU; 0 if it is unknown."""
    found = [re.fullmatch(r"node([0-9]+)", path.name) for path in (_CPUS / f"cpu{cpu}").glob("node*")]
    return next((int(match[1]) for match in found if match), 0)


def _number(path: Path) -> int | None:
    """The number that a file of the system begins with; None if there is none, as in a limit of `max`."""
    found = re.match(r"-?[0-9]+", text_of(path))
    return int(found[0]) if found else None


def allowed_cpus() -> list[int]:
    """Return the CPUs that this process may use, sorted."""
    return sorted(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def largest_cache_bytes(cpus: Path = _CPUS) -> int:
    """Return the size of the largest caches of all CPUs that this process may use; 0 if they are unknown. A
    cache that CPUs share counts once."""
    largest: dict[str, int] = {}
    for cpu in allowed_cpus():
        found = (cpus / f"cpu{cpu}/cache").glob("index*")
        caches = [(_number(each / "size") or 0, text_of(each / "shared_cpu_list") or str(cpu)) for each in found]
        kib, sharing = max(caches, default=(0, ""))
        largest[sharing] = kib
    return sum(largest.values()) * 1024
