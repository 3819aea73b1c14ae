"""Weights that do not fit the config, missing shards, false headers: each a clear error. Correct files are read."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.common.errors import CheckpointError
from quire.config.checkpoint.formats import open_checkpoint
from quire.config.checkpoint.safetensors import read_header
from quire.config.model import ModelConfig
from quire.models.weights.loader import reading, weight_bytes
from tests.effort import examples
from tests.models.small_checkpoint import FIELDS, SHAPES, load, weights, write

# --- weights that are not those of the config


def test_every_wrong_weight_is_named(folder: Path) -> None:
    tensors = weights()
    del tensors["model.norm.weight"], tensors["model.layers.0.self_attn.k_proj.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(12, 9)
    tensors["model.extra.weight"] = torch.zeros(2)
    write(folder, FIELDS, tensors)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    message = str(caught.value)
    assert "2 weight(s) missing: layers.0.self_attn.k_proj.weight, norm.weight" in message
    assert "1 weight(s) unexpected: model.extra.weight" in message
    assert "layers.0.mlp.up_proj.weight [12, 9] instead of [12, 8]" in message


def test_of_many_wrong_weights_some_are_named(folder: Path) -> None:
    write(folder, FIELDS, weights() | {f"model.extra{i:04}": torch.zeros(1) for i in range(1000)})
    with pytest.raises(
        CheckpointError, match=r"1000 weight\(s\) unexpected: model\.extra0000, .* and others"
    ) as caught:
        load(folder)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("others", [{}, {"{name}": torch.ones(8)}], ids=["unexpected", "twice"])
def test_names_of_weights_are_cut_and_have_no_control_characters(folder: Path, others: dict[str, torch.Tensor]) -> None:
    name = "a\x1b[2J" + "x" * 100_000
    extra = {each.format(name=name): tensor for each, tensor in others.items()}
    write(folder, FIELDS, weights() | {f"model.{name}": torch.zeros(8)} | extra)
    with pytest.raises(CheckpointError, match=r"model\.a\\x1b\[2Jxxx") as caught:
        load(folder)
    assert len(str(caught.value)) < 1_000


def test_weight_of_unreadable_dtype(folder: Path) -> None:
    write(folder, FIELDS, weights() | {"model.norm.weight": torch.zeros(8, dtype=torch.int64)})
    with pytest.raises(CheckpointError, match=r"1 weight\(s\) of a wrong dtype: model\.norm\.weight int64"):
        load(folder)


def test_saved_rotary_tables_are_ignored(folder: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    before = weight_bytes(ModelConfig.resolve(folder))
    write(folder, FIELDS, weights() | extra)
    load(folder)
    assert weight_bytes(ModelConfig.resolve(folder)) == before


def test_second_copy_of_a_tied_head_must_be_the_same(folder: Path) -> None:
    tensors = weights()
    write(folder, FIELDS, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    load(folder)
    for dtype in (torch.float32, torch.float8_e4m3fn, torch.float8_e5m2):
        write(folder, FIELDS, tensors | {"lm_head.weight": torch.zeros(16, 8).to(dtype)})
        with pytest.raises(CheckpointError, match="tie_word_embeddings"):
            load(folder)


def test_same_weight_under_two_names(folder: Path) -> None:
    write(folder, FIELDS, weights() | {"norm.weight": torch.ones(8)})
    with pytest.raises(CheckpointError, match="same weight"):
        load(folder)


# --- shards


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "sub/a.safetensors", "a.bin", "..", 3, None])
def test_index_that_leads_out_of_the_folder(folder: Path, file: Any) -> None:
    write_index(folder, {"model.norm.weight": file})
    with pytest.raises(CheckpointError, match="must be a safetensors file of the same folder"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "shown"),
    [("model-00002-of-00002", "model-00002-of-00002.safetensors"), ("x" * 300, "x" * 200), ("\0", r"\x00.safetensors"),
     ("\ud800", r"\ud800.safetensors")],
)  # fmt: skip
def test_missing_shard_is_named(folder: Path, name: str, shown: str) -> None:
    write_index(folder, {"model.norm.weight": f"{name}.safetensors"})
    with pytest.raises(CheckpointError, match=rf"lacks the weight file {re.escape(shown)}, which"):
        load(folder)


def test_tensor_that_its_shard_lacks_is_named(folder: Path) -> None:
    write_index(folder, dict.fromkeys([*SHAPES, "model.gone.weight"], "model-00001-of-00001.safetensors"))
    with pytest.raises(CheckpointError, match=r"lacks 1 tensor\(s\) that .* to it: model\.gone\.weight$"):
        load(folder)


def test_of_many_tensors_that_a_shard_lacks_some_are_named(folder: Path) -> None:
    write_index(folder, {f"{number}\x1b[2J" + "x" * 999: "model-00001-of-00001.safetensors" for number in range(999)})
    with pytest.raises(
        CheckpointError, match=r"lacks 999 tensor\(s\) that .* to it: 0\\x1b\[2Jx+, 1.* and others$"
    ) as caught:
        load(folder)
    assert len(str(caught.value)) < 6_000


def test_only_the_tensors_that_the_index_names_are_taken(folder: Path) -> None:
    names = [name for name in SHAPES if name != "model.norm.weight"]
    write_index(folder, dict.fromkeys(names, "model-00001-of-00001.safetensors"))
    assert list(open_checkpoint(folder).tensors) == names


@pytest.mark.parametrize("weight_map", [None, [], {}, "x"])
def test_index_without_a_map(folder: Path, weight_map: Any) -> None:
    write_index(folder, weight_map)
    with pytest.raises(CheckpointError, match="weight_map"):
        load(folder)


def test_shards_without_an_index(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="incomplete"):
        load(folder)


# --- safetensors headers


def raw_file(path: Path, header: Any, data: bytes, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), start: Any = 0, end: Any = 8) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{not json", b"", "not valid JSON"),
        (b"[" * 100_000, b"", "not valid JSON"),
        ([1], b"", "JSON list"),
        ({"a": 1}, b"", "not an object"),
        ({"a": entry(dtype="F33")}, bytes(8), "tensor 'a' has dtype 'F33'"),
        ({"a": entry(shape=[-1])}, bytes(8), r"has shape \[-1\] and data_offsets \[0, 8\]: malformed"),
        ({"a": entry(shape=[0, 2**62])}, bytes(8), "malformed"),
        ({"a": entry(shape=[0, 2**62 - 1])}, bytes(8), "needs 0 bytes"),
        ({"a": entry(shape=[1] * 65)}, bytes(8), "malformed"),
        ({"a": entry(shape=[2.0])}, bytes(8), "malformed"),
        ({"a": entry(start=8, end=0)}, bytes(8), "malformed"),
        ({"a": entry(start=None)}, bytes(8), "malformed"),
        ({"a": entry(shape=[3])}, bytes(8), "needs 12 bytes"),
        ({"a": entry(shape=[2**40, 2**40])}, bytes(8), "needs"),
        ({"a": entry()}, bytes(7), "truncated: its header promises"),
        ({"a": entry()}, bytes(9), "1 bytes after its last tensor"),
        ({"a": entry(), "b": entry(start=4, end=12)}, bytes(12), "tensor 'b' overlaps 'a':"),
        ({"a": entry(), "b": entry(start=12, end=20)}, bytes(20), "tensor 'b' leaves a hole after 'a':"),
        ({"a": entry(start=1, end=9)}, bytes(9), "tensor 'a' leaves a hole after 'the header':"),
        ({"a": entry(shape=[2**61] * 100_000)}, bytes(8), "malformed"),
        ({"a" * 100_000: entry(dtype="F" * 100_000)}, bytes(8), "has dtype"),
        ({"a": entry(shape="9" * 100_000)}, bytes(8), "malformed"),
        (b'{"a": ' + b"9" * 10_000 + b"}", b"", "not valid JSON"),
        (b'{"a\xff": 1}', b"", "not valid JSON"),
        (b'{"a": {"dtype": "F32"}, "a": {}}', b"", "appears twice"),
    ],
)
def test_lying_header(tmp_path: Path, header: Any, data: bytes, message: str) -> None:
    path = raw_file(tmp_path / "model.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 500 + len(str(path))


def test_tensors_may_be_listed_in_another_order_than_they_lie_in_the_file(tmp_path: Path) -> None:
    entries = {"b": entry(start=8, end=16), "empty": entry(shape=[0], start=8, end=8), "a": entry(shape=[1] * 63 + [2])}
    assert list(read_header(raw_file(tmp_path / "model.safetensors", entries, bytes(16)))) == ["a", "empty", "b"]


@pytest.mark.parametrize("excess", [2**63, 10**9, 100, 1])
def test_header_longer_than_the_file(tmp_path: Path, excess: int) -> None:
    text = json.dumps({"a": entry()}).encode()
    path = raw_file(tmp_path / "model.safetensors", text, bytes(8), len(text) + 8 + excess)
    with pytest.raises(CheckpointError, match="truncated, or not a safetensors file"):
        read_header(path)


def test_every_truncation_is_noticed(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for length in (*range(0, len(whole), 97), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"model\.safetensors.*truncated"):
            load(folder)


@settings(max_examples=examples(200), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(edits=st.lists(st.tuples(st.integers(0, 1199), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_header_never_reads_outside_the_file(folder: Path, edits: list[tuple[int, int]]) -> None:
    path = folder / "damaged.safetensors"
    data = bytearray((folder / "model.safetensors").read_bytes())
    for position, value in edits:
        data[position] = value
    path.write_bytes(data)
    try:
        tensors = read_header(path)
    except CheckpointError:
        return
    assert all(t.offset >= 8 and t.offset + t.num_bytes <= len(data) for t in tensors.values())


def test_reader_agrees_with_safetensors(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    for name, tensor in safetensors.torch.load_file(folder / "model.safetensors").items():
        with reading(checkpoint, name) as mapped:
            assert torch.equal(mapped, tensor)
        assert torch.equal(mapped, tensor)


def test_some_rows_of_a_tensor_are_read(tmp_path: Path) -> None:
    values = torch.arange(12, dtype=torch.float32).reshape(4, 3)
    entries = {"before": entry("U8", [5], 0, 5), "a": entry("F32", [4, 3], 5, 53)}
    raw_file(tmp_path / "model.safetensors", entries, bytes(5) + values.numpy().tobytes())
    checkpoint = open_checkpoint(tmp_path)
    for first, end in ((0, 4), (0, 1), (1, 3), (3, 4), (2, 2)):
        with checkpoint.reading("a", (first, end)) as data:
            assert bytes(data) == values[first:end].numpy().tobytes()


def test_tensors_without_elements_are_read_where_a_file_has_no_data(tmp_path: Path) -> None:
    raw_file(tmp_path / "model.safetensors", {"a": entry("F32", [0, 4], 0, 0)}, b"")
    with reading(open_checkpoint(tmp_path), "a") as tensor:
        assert tensor.shape == (0, 4)


def test_unaligned_tensor(tmp_path: Path) -> None:
    values = torch.tensor([1.5, -2.5])
    data = bytes(1) + values.numpy().tobytes()
    raw_file(tmp_path / "model.safetensors", {"a": entry("U8", [1], 0, 1), "b": entry("F32", [2], 1, 9)}, data)
    with reading(open_checkpoint(tmp_path), "b") as tensor:
        assert torch.equal(tensor, values)
