"""Sizes people write, and the memory a container leaves."""

import pytest

from quire.common.errors import ConfigError, OutOfMemoryError
from quire.config.machine import allowed_cpus, format_bytes, largest_cache_bytes, machine_memory, parse_bytes

GIB = 1024**3


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (4096, 4096),
        ("64MiB", 64 * 1024**2),
        ("64 mib", 64 * 1024**2),
        ("1.5GiB", 3 * GIB // 2),
        ("2G", 2 * GIB),
        ("500MB", 500_000_000),
        ("10", 10),
        (" 3 b ", 3),
        (1, 1),
        *((f"2{letter}", 2 * 1024**power) for power, letter in enumerate("kmgt", start=1)),
        *((f"2{letter}iB", 2 * 1024**power) for power, letter in enumerate("KMGT", start=1)),
        *((f"2{letter}B", 2 * 1000**power) for power, letter in enumerate("KMGT", start=1)),
    ],
)
def test_sizes_are_read(text, num_bytes):
    assert parse_bytes("x", text) == num_bytes


@pytest.mark.parametrize("text", ["", "MiB", "12 parsecs", "-1", "0", 0, -5, True, None, "1e9", "nan"])
def test_wrong_sizes_are_refused_by_name(text):
    with pytest.raises(ConfigError, match="kv_cache_memory="):
        parse_bytes("kv_cache_memory", text)


def test_the_error_names_what_was_given_and_what_is_allowed():
    with pytest.raises(ConfigError, match=r"^x='2XB': must be a number of bytes, or text such as"):
        parse_bytes("x", "2XB")
    with pytest.raises(ConfigError, match=r"^x=0: must be more than 0 bytes$"):
        parse_bytes("x", 0)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (5, "5 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (2048, "2.00 KiB"), (1024**2 - 1024, "1023.00 KiB"),
        (1024**2, "1.00 MiB"), (3 * GIB // 2, "1.50 GiB"), (1024**4, "1.00 TiB"), (5000 * 1024**4, "5000.00 TiB"),
    ],
)  # fmt: skip
def test_sizes_are_written(num_bytes, text):
    assert format_bytes(num_bytes) == text


def write(root, path, text):
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


@pytest.fixture
def root(tmp_path):
    write(
        tmp_path,
        "proc/meminfo",
        f"MemTotal: {16 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {12 * GIB // 1024} kB\n",
    )
    return tmp_path


def test_without_a_container_the_machine_counts(root):
    memory = machine_memory(root)
    assert (memory.limit_bytes, memory.available_bytes) == (16 * GIB, 12 * GIB)


def test_the_tightest_limit_above_the_process_wins(root):
    write(root, "proc/self/cgroup", "0::/pod/container\n")
    write(root, "sys/fs/cgroup/pod/memory.max", f"{4 * GIB}\n")
    write(root, "sys/fs/cgroup/pod/memory.current", f"{3 * GIB}\n")
    write(root, "sys/fs/cgroup/pod/memory.stat", f"anon 5\ninactive_file {GIB}\n")
    write(root, "sys/fs/cgroup/pod/container/memory.max", "max\n")
    memory = machine_memory(root)
    assert (memory.limit_bytes, memory.available_bytes) == (4 * GIB, 2 * GIB)


def test_version_1_control_groups_are_read(root):
    write(root, "proc/self/cgroup", "5:cpu:/x\n4:memory:/box\n")
    write(root, "sys/fs/cgroup/memory/box/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/box/memory.usage_in_bytes", f"{GIB // 2}\n")
    memory = machine_memory(root)
    assert (memory.limit_bytes, memory.available_bytes) == (2 * GIB, 3 * GIB // 2)


def test_a_limit_is_looked_for_at_each_level_up_to_the_top(root):
    write(root, "proc/self/cgroup", "1:name=systemd:/x\n0::/pod/container\n")
    write(root, "sys/fs/cgroup/memory.max", f"{2 * GIB}\n")
    write(root, "sys/fs/cgroup/memory.current", f"{GIB}\n")
    write(root, "sys/fs/cgroup/pod/container/memory.max", f"{3 * GIB}\n")
    memory = machine_memory(root)
    assert (memory.limit_bytes, memory.available_bytes) == (2 * GIB, GIB)


def test_the_least_of_what_is_available_at_any_level_counts(root):
    write(root, "proc/self/cgroup", "0::/pod/container\n")
    write(root, "sys/fs/cgroup/pod/container/memory.max", f"{3 * GIB}\n")
    write(root, "sys/fs/cgroup/pod/container/memory.current", f"{3 * GIB - 5}\n")
    write(root, "sys/fs/cgroup/pod/memory.max", f"{2 * GIB}\n")
    memory = machine_memory(root)
    assert (memory.limit_bytes, memory.available_bytes) == (2 * GIB, 5)


def test_a_full_group_above_a_tighter_one_leaves_no_memory(root):
    """Other containers of the same pod have used nearly all that the pod may use."""
    write(root, "proc/self/cgroup", "0::/pod/container\n")
    write(root, "sys/fs/cgroup/pod/container/memory.max", f"{2 * GIB}\n")
    write(root, "sys/fs/cgroup/pod/container/memory.current", f"{GIB // 2}\n")
    write(root, "sys/fs/cgroup/pod/memory.max", f"{4 * GIB}\n")
    write(root, "sys/fs/cgroup/pod/memory.current", f"{4 * GIB - 7}\n")
    memory = machine_memory(root)
    assert (memory.limit_bytes, memory.available_bytes) == (2 * GIB, 7)


def test_a_group_with_the_limit_of_the_machine_may_be_full(root):
    write(root, "proc/self/cgroup", "0::/box\n")
    write(root, "sys/fs/cgroup/box/memory.max", f"{16 * GIB}\n")
    write(root, "sys/fs/cgroup/box/memory.current", f"{16 * GIB - 9}\n")
    memory = machine_memory(root)
    assert (memory.limit_bytes, memory.available_bytes) == (16 * GIB, 9)


def test_names_of_groups_may_contain_colons(root):
    write(root, "proc/self/cgroup", "0::/X:1:a/container:2\n")
    write(root, "sys/fs/cgroup/X:1:a/memory.max", f"{GIB}\n")
    assert machine_memory(root).limit_bytes == GIB


def test_a_group_whose_use_is_unknown_has_all_of_its_limit_left(root):
    write(root, "proc/self/cgroup", "0::/box\n")
    write(root, "sys/fs/cgroup/box/memory.max", f"{GIB}\n")
    assert machine_memory(root).available_bytes == GIB
    write(root, "sys/fs/cgroup/box/memory.current", "5\n")
    write(root, "sys/fs/cgroup/box/memory.stat", "anon 5\n")
    assert machine_memory(root).available_bytes == GIB - 5


def test_of_a_group_that_uses_more_than_its_limit_nothing_is_available(root):
    write(root, "proc/self/cgroup", "0::/box\n")
    write(root, "sys/fs/cgroup/box/memory.max", f"{GIB}\n")
    write(root, "sys/fs/cgroup/box/memory.current", f"{2 * GIB}\n")
    assert machine_memory(root).available_bytes == 0


def test_in_version_1_the_cache_of_the_groups_below_counts_too(root):
    write(root, "proc/self/cgroup", "4:cpu,memory:/box\n")
    write(root, "sys/fs/cgroup/memory/box/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/box/memory.usage_in_bytes", f"{2 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/box/memory.stat", "inactive_file 7\ntotal_inactive_file 9\n")
    assert machine_memory(root).available_bytes == 9


def test_old_kernels_that_do_not_estimate_what_is_available_say_what_is_free(tmp_path):
    write(tmp_path, "proc/meminfo", "MemTotal: 16 kB\nMemFree: 5 kB\n")
    memory = machine_memory(tmp_path)
    assert (memory.limit_bytes, memory.available_bytes) == (16 * 1024, 5 * 1024)


def test_a_limit_above_the_machine_changes_nothing(root):
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/memory.max", f"{64 * GIB}\n")
    write(root, "sys/fs/cgroup/memory.current", f"{15 * GIB}\n")
    memory = machine_memory(root)
    assert (memory.limit_bytes, memory.available_bytes) == (16 * GIB, 12 * GIB)


@pytest.mark.parametrize("line", ["", "no colon", "HugePages_Free:", "        total:    used:    free:"])
def test_lines_that_say_no_size_are_passed_over(root, line):
    for path, text in {
        "proc/meminfo": f"{line}\n{(root / 'proc/meminfo').read_text()}",
        "proc/self/cgroup": f"{line}\n0::/box\n",
        "sys/fs/cgroup/box/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/box/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/box/memory.stat": f"{line}\ninactive_file 7\n{line}\n",
    }.items():
        write(root, path, text)
    memory = machine_memory(root)
    assert (memory.limit_bytes, memory.available_bytes) == (GIB, 7)


def test_the_name_of_a_group_may_be_no_text(root):
    write(root, "proc/self/cgroup", "")
    (root / "proc/self/cgroup").write_bytes(b"0::/caf\xe9\n")
    write(root, "sys/fs/cgroup/caf\udce9/memory.max", f"{GIB}\n")
    assert machine_memory(root).limit_bytes == GIB


def test_without_sizes_in_proc_the_physical_memory_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    for text in (None, "", "MemTotal:\n"):
        if text is not None:
            write(tmp_path, "proc/meminfo", text)
        memory = machine_memory(tmp_path)
        assert (memory.limit_bytes, memory.available_bytes) == (4096 * 1000, 4096 * 1000)


def test_where_the_memory_is_unknown_the_error_says_what_to_set(tmp_path, monkeypatch):
    def unknown(name):
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr("os.sysconf", unknown)
    with pytest.raises(OutOfMemoryError, match="set kv_cache_memory"):
        machine_memory(tmp_path)


def test_the_largest_caches_of_all_cpus_that_may_be_used_count_once_each(tmp_path, monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {2, 3, 4, 5}, raising=False)
    assert largest_cache_bytes(tmp_path) == 0
    for cpu in range(6):  # a cache for each two of them; 0 and 1 may not be used
        for index, size in enumerate(["48K", "2048K", "491520K", "unknown"]):
            write(tmp_path, f"cpu{cpu}/cache/index{index}/size", size + "\n")
            write(tmp_path, f"cpu{cpu}/cache/index{index}/shared_cpu_list", f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n")
    assert largest_cache_bytes(tmp_path) == 2 * 480 * 2**20
    for cpu in (2, 3):
        (tmp_path / f"cpu{cpu}/cache/index2/shared_cpu_list").unlink()
    assert largest_cache_bytes(tmp_path) == 3 * 480 * 2**20


def test_the_cpus_are_those_that_this_process_may_use_or_all(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {5, 2} if pid == 0 else {9}, raising=False)
    assert allowed_cpus() == [2, 5]
    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    assert allowed_cpus() == [0, 1, 2]
    monkeypatch.setattr("os.cpu_count", lambda: None)
    assert allowed_cpus() == [0]
