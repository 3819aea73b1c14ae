"""Reading the tensors of mapped files: their bytes, and how much of this process's memory they take."""

import json
import mmap
from pathlib import Path

import pytest

from quire.config.checkpoint.formats import open_checkpoint
from quire.config.checkpoint.tensors import MappedCheckpoint

MIB = 1024**2
SMAPS = Path("/proc/self/smaps")


def write(folder: Path, tensors: dict[str, bytes], data_start: int | None = None) -> MappedCheckpoint:
    """A checkpoint of one file with these tensors, one behind the other, the first at `data_start`."""
    header, end = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text = text.ljust(len(text) if data_start is None else data_start - 8)
    path = folder / "model.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(tensors.values()))
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, MappedCheckpoint)
    return checkpoint


def resident_bytes(path: Path) -> int:
    """What the pages of a mapped file count in this process's memory."""
    total, is_of_file = 0, False
    for line in SMAPS.read_text().splitlines():
        name, *values = line.split(maxsplit=5)
        if not name.endswith(":"):
            is_of_file = line.endswith(str(path))
        elif name == "Rss:" and is_of_file:
            total += int(values[0]) * 1024
    return total


@pytest.mark.skipif(not SMAPS.exists(), reason="needs /proc")
def test_a_tensor_takes_no_memory_after_it_has_been_read_and_others_stay(tmp_path: Path) -> None:
    size, slack = 8 * MIB, 4 * MIB  # neighbours share a page, which may have 2 MiB
    tensors = {"before": bytes(size + 100), "read": b"r" * size, "held": b"h" * size}
    checkpoint, path = write(tmp_path, tensors), tmp_path / "model.safetensors"
    with checkpoint.reading("held") as held:
        assert bytes(held) == tensors["held"]
        with checkpoint.reading("read") as data:
            assert bytes(data) == tensors["read"]
            assert resident_bytes(path) >= 2 * size
        assert size - slack <= resident_bytes(path) <= size + slack
    assert resident_bytes(path) <= slack
    assert bytes(data) == tensors["read"], "it can be read again"


@pytest.mark.parametrize("length", [1, 100, mmap.PAGESIZE - 512, mmap.PAGESIZE])
def test_a_tensor_at_the_end_of_a_page_and_of_the_file_is_read(tmp_path: Path, length: int) -> None:
    data = bytes(range(256)) * (length // 256) + bytes(range(length % 256))
    checkpoint = write(tmp_path, {"a": data}, data_start=2 * mmap.PAGESIZE - length)
    assert (tmp_path / "model.safetensors").stat().st_size == 2 * mmap.PAGESIZE
    for _ in range(2):
        with checkpoint.reading("a") as found:
            assert bytes(found) == data
