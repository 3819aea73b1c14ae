"""GGUF headers and files: what is read, and what is refused before anything is allocated."""

import random
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from quire.common.errors import CheckpointError, QuireError, UnsupportedModelError
from quire.config.checkpoint.formats import open_checkpoint, weight_files
from quire.config.checkpoint.gguf.files import is_gguf, models_in, only_model, read_gguf
from quire.config.checkpoint.gguf.header import Array, read_header
from quire.config.checkpoint.gguf.weights import open_gguf
from quire.config.model import ModelConfig
from tests.config.gguf_file import (
    ARRAY,
    BOOL,
    F32,
    LLAMA,
    STRING,
    TABLE,
    U32,
    U64,
    Stored,
    Typed,
    encoded,
    gguf_bytes,
    string,
    write_gguf,
)

Q4_K, Q8_0 = 12, 8


def refused(path: Path, data: bytes, match: str, error: type[Exception] = CheckpointError) -> None:
    path.write_bytes(data)
    with pytest.raises(error, match=match) as raised:
        read_header(path)
    assert str(raised.value).startswith(str(path))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.gguf"


# What is read


@pytest.mark.parametrize("version", [2, 3])
def test_values_of_every_type_are_read(path: Path, version: int) -> None:
    numbers = {
        0: 255,
        1: -128,
        2: 65535,
        3: -32768,
        4: 2**32 - 1,
        5: -(2**31),
        6: 0.5,
        10: 2**64 - 1,
        11: -(2**63),
        12: 0.1,
    }
    keys = {f"k{kind}": Typed(kind, value) for kind, value in numbers.items()}
    keys |= {"yes": True, "no": False, "text": "Grüße ▁", "empty": ""}
    write_gguf(path, keys, version=version)
    expected = {f"k{kind}": value for kind, value in numbers.items()}
    assert read_header(path).metadata == expected | {"yes": True, "no": False, "text": "Grüße ▁", "empty": ""}
    assert read_header(path).metadata["yes"] is True


def test_arrays_are_decoded_when_they_are_asked_for(path: Path) -> None:
    arrays = {"words": ["a", "", "zwei ▁"], "ids": [Typed(5, -1), Typed(5, 7)], "flags": [True, False], "none": []}
    write_gguf(path, arrays)
    found = read_header(path).metadata
    assert all(isinstance(value, Array) for value in found.values())
    assert found["words"].strings() == ["a", "", "zwei ▁"]
    assert (found["ids"].numbers(), found["flags"].numbers(), found["none"].strings()) == ([-1, 7], [True, False], [])
    with pytest.raises(CheckpointError, match=r"'words' must be an array of numbers"):
        found["words"].numbers()
    with pytest.raises(CheckpointError, match=r"'ids' must be an array of strings"):
        found["ids"].strings()


def test_text_of_an_array_must_be_utf_8(path: Path) -> None:
    write_gguf(path, {"words": ["a", b"\xff"]})
    with pytest.raises(CheckpointError, match=r"'words': string 1 is not valid UTF-8"):
        read_header(path).metadata["words"].strings()


@pytest.mark.parametrize("alignment", [1, 8, 32, 64])
def test_tensors_lie_where_the_header_says(path: Path, alignment: int) -> None:
    tensors = [
        Stored("a", (3, 2), 0, struct.pack("<6f", *range(6))),
        Stored("b", (256, 2), Q4_K, bytes(range(144)) * 2),
        Stored("c", (5,), 1, bytes(range(10))),
    ]
    write_gguf(path, {"general.alignment": alignment}, tensors, alignment=alignment)
    header = read_header(path)
    a, b, c = header.tensors.values()
    assert (a.name, a.dtype, a.shape, a.num_bytes, a.logical_shape) == ("a", "float32", (2, 3), 24, (2, 3))
    assert (b.dtype, b.shape, b.num_bytes, b.block_type, b.logical_shape) == ("uint8", (2, 144), 288, "q4_k", (2, 256))
    assert (c.dtype, c.shape, c.block_type) == ("float16", (5,), None)
    for tensor, stored in zip(header.tensors.values(), tensors, strict=True):
        assert tensor.offset % alignment == 0
        assert path.read_bytes()[tensor.offset : tensor.offset + tensor.num_bytes] == stored.data


def test_a_large_vocabulary_takes_little_time(path: Path) -> None:
    write_gguf(path, {"tokens": [f"token{i}" for i in range(150_000)]})
    started = time.process_time()
    read_header(path).metadata["tokens"].strings()
    assert time.process_time() - started < 1.5  # a fifth of a second; machines that run tests may be slow


# What is refused


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "does not begin with 'GGUF'"),
        (b"GGML" + bytes(40), "does not begin with 'GGUF'"),
        (b"GGUF" + bytes(8), "truncated: 12 bytes"),
        (gguf_bytes(num_tensors=10**12), "promises 1000000000000 tensors"),
        (gguf_bytes(num_keys=10**12), "promises 1000000000000 keys"),
        (gguf_bytes(num_keys=2**64 - 1), "promises 18446744073709551615 keys"),
        (gguf_bytes({"a": "12"}, num_keys=2) + bytes(7), "truncated at the length of a key"),
        (gguf_bytes([("k" * 70_000, 1)]), "a key has a length of 70000 bytes"),
        (gguf_bytes([(b"\xff", 1)]), "a key is not valid UTF-8"),
        (gguf_bytes([("a", 1), ("a", 1)]), "the key 'a' appears twice"),
        (gguf_bytes({"a": Typed(13, 1)}), "'a' has the unknown type 13"),
        (gguf_bytes({"a": Typed(BOOL, 2)}), "'a' is 2, but must be 0 or 1"),
        (gguf_bytes({"a": b"\xff"}), "the value of 'a' is not valid UTF-8"),
        (gguf_bytes({"a": "x"})[:-13] + struct.pack("<IQ", STRING, 2**30) + b"x", "length of 1073741824 bytes"),
        (gguf_bytes({"a": "x"})[:-13] + struct.pack("<IQ", STRING, 2**64 - 1) + b"x", "length of 184467"),
        (gguf_bytes({"a": 1})[:-8] + struct.pack("<IIQ", ARRAY, U32, 10**12), "promises 1000000000000 items of 'a'"),
        (gguf_bytes({"a": 1})[:-8] + struct.pack("<IIQ", ARRAY, STRING, 10**12), "promises 1000000000000 items"),
        (gguf_bytes({"a": 1})[:-8] + struct.pack("<IIQ", ARRAY, ARRAY, 1) + bytes(20), "arrays of arrays are not"),
        (gguf_bytes({"a": 1})[:-8] + struct.pack("<IIQ", ARRAY, 99, 1) + bytes(20), "items of type 99"),
        (gguf_bytes({"a": ["x", "yy"]})[:-1], "a string of the array 'a' is longer than the file"),
        (gguf_bytes({"a": 1})[:-8] + struct.pack("<IIQQQ", ARRAY, STRING, 2, 2**63, 1), "is longer than the file"),
        (gguf_bytes({"general.alignment": 0}), "general.alignment is 0"),
        (gguf_bytes({"general.alignment": 24}), "general.alignment is 24"),
        (gguf_bytes({"general.alignment": Typed(U64, 2**40)}), "general.alignment is 1099511627776"),
        (gguf_bytes({"general.alignment": "32"}), "general.alignment is '32'"),
        (gguf_bytes(tensors=[Stored("a", ())]), "'a' has 0 dimensions"),
        (gguf_bytes(tensors=[Stored("a", (1,) * 5)]), "'a' has 5 dimensions"),
        (gguf_bytes(tensors=[Stored("a", (4,), 99)]), "'a' has the unknown type 99"),
        (gguf_bytes(tensors=[Stored("a", (4, 0))]), r"has shape \[0, 4\]: sizes must be at least 1"),
        (gguf_bytes(tensors=[Stored("a", (2**62, 2**62))]), "sizes must be at least 1"),
        (gguf_bytes(tensors=[Stored("a", (2**32, 2**32, 2**32, 2**32))]), "sizes must be at least 1"),
        (gguf_bytes(tensors=[Stored("a", (48,), Q8_0)]), "rows multiples of 32"),
        (gguf_bytes(tensors=[Stored("a", offset=8)]), "not a multiple of 32"),
        (gguf_bytes(tensors=[Stored("a", offset=2**63)]), "beyond the end of the file"),
        (gguf_bytes(tensors=[Stored("a", (2**40,))]), "beyond the end of the file"),
        (gguf_bytes(tensors=[Stored("a"), Stored("a")]), "there are two tensors 'a'"),
        (gguf_bytes(tensors=[Stored("a"), Stored("b", offset=0)]), "'b' overlaps"),
        (gguf_bytes(tensors=[Stored("a", offset=32)]) + bytes(64), "'a' leaves a hole after"),
        (gguf_bytes(tensors=[Stored("a", (12,))])[:-20], "promises 112 bytes, the file has 76"),
        (gguf_bytes(tensors=[Stored("a")]) + b"x", "1 bytes after the last tensor"),
        (gguf_bytes({"a": 1}, [Stored("b")])[:50], "truncated"),
        (gguf_bytes({"a": 1})[:-8] + struct.pack("<IIQ", ARRAY, U32, 9), "9 items of 'a', but at most 0 .* truncated"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_malformed_headers_are_refused(path: Path, data: bytes, match: str) -> None:
    refused(path, data, match)


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (gguf_bytes(version=1), "has version 1 of the format"),
        (gguf_bytes(version=4), "has version 4"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
        (gguf_bytes(tensors=[Stored("a", (256,), 16)]), "'a' is of type iq2_xxs; supported are f32"),
    ],
)
def test_what_quire_does_not_read_is_named(path: Path, data: bytes, match: str) -> None:
    refused(path, data, match, UnsupportedModelError)


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_header(tmp_path / "none.gguf")


def test_no_damage_is_answered_with_anything_but_an_error_of_ours(path: Path) -> None:
    keys = LLAMA | {"tokenizer.ggml.tokens": ["a", "b"], "flag": True, "ids": [1, 2]}
    whole = gguf_bytes(keys, [TABLE, Stored("blk.0.attn_q.weight", (16, 16), 0, bytes(1024))])
    header_bytes = len(whole) - 512 - 1024
    rng = random.Random(0)

    def attempt(data: bytes) -> None:
        path.write_bytes(data)
        try:
            ModelConfig.resolve(path)
            open_checkpoint(path)
        except QuireError:
            pass

    for length in range(0, header_bytes, 7):
        attempt(whole[:length])
    for _ in range(400):
        damaged = bytearray(whole)
        at = rng.randrange(header_bytes)
        width = rng.choice((1, 4, 8))
        damaged[at : at + width] = rng.choice((bytes(width), b"\xff" * width, rng.randbytes(width)))
        attempt(bytes(damaged))


# Several files


def write_parts(folder: Path, count: int = 3, **changes: Any) -> Path:
    """A model in parts, each with one tensor; `changes` are to the keys of the second."""
    for i in range(count):
        keys: dict[str, Any] = {"split.no": Typed(2, i), "split.count": Typed(2, count), "split.tensors.count": count}
        keys = (LLAMA if i == 0 else {}) | keys | (changes if i == 1 else {})
        stored = TABLE if i == 0 else Stored(f"blk.{i}.attn_norm.weight", (16,), 0, bytes(64))
        write_gguf(folder / f"m-{i + 1:05}-of-{count:05}.gguf", keys, [stored])
    return folder / f"m-00001-of-{count:05}.gguf"


@pytest.mark.parametrize("number", [1, 3])
def test_any_part_stands_for_all(tmp_path: Path, number: int) -> None:
    write_parts(tmp_path)
    model = read_gguf(tmp_path / f"m-0000{number}-of-00003.gguf")
    assert list(model.tensors) == ["token_embd.weight", "blk.1.attn_norm.weight", "blk.2.attn_norm.weight"]
    assert [tensor.path.name[6] for tensor in model.tensors.values()] == ["1", "2", "3"]
    assert model.metadata["general.architecture"] == "llama"
    assert weight_files(tmp_path / f"m-0000{number}-of-00003.gguf") == sorted(tmp_path.iterdir())
    assert weight_files(tmp_path) == [], "a folder's are safetensors"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"split.no": 2}, "says that it is part 2"),
        ({"split.count": 4}, "of 4, but its name says part 1 of 3"),
    ],
)
def test_parts_that_contradict_their_names_are_refused(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        read_gguf(write_parts(tmp_path, **changes))


def test_parts_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    first = write_parts(tmp_path)
    second = tmp_path / "m-00002-of-00003.gguf"
    split = {"split.no": 1, "split.count": 3}
    write_gguf(second, split, [TABLE])
    with pytest.raises(CheckpointError, match=r"holds 'token_embd.weight' again"):
        read_gguf(first)
    write_gguf(second, split)
    with pytest.raises(CheckpointError, match=r"promises 3 tensors, the 3 parts hold 2"):
        read_gguf(first)
    second.unlink()
    with pytest.raises(CheckpointError, match=r"lacks m-00002-of-00003\.gguf"):
        read_gguf(first)


def test_a_part_that_was_renamed_is_refused(tmp_path: Path) -> None:
    renamed = write_parts(tmp_path).rename(tmp_path / "whole.gguf")
    with pytest.raises(CheckpointError, match=r"part 0 .* of 3, but its name says part 0 of 1"):
        read_gguf(renamed)
    with pytest.raises(CheckpointError, match="is called part 4 of 3"):
        read_gguf(tmp_path / "m-00004-of-00003.gguf")
    alone = write_gguf(tmp_path / "alone.gguf", {"split.count": 1, "split.no": 0})
    assert read_gguf(alone).tensors == {}


def test_a_folder_may_hold_one_model_or_a_name_chooses(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has 0 GGUF models: give"):
        only_model(tmp_path)
    first = write_parts(tmp_path)
    (tmp_path / "mmproj-F16.gguf").touch()
    assert only_model(tmp_path) == first
    (tmp_path / "Tiny-Q4_K_M.gguf").touch()
    (tmp_path / "Tiny-IQ4_NL.gguf").touch()
    for wanted in ("Q4_K_M", "q4_k_m", "Tiny-Q4_K_M", "Tiny-Q4_K_M.gguf"):
        assert only_model(tmp_path, wanted).name == "Tiny-Q4_K_M.gguf"
    assert only_model(tmp_path, "m") == first
    with pytest.raises(CheckpointError, match=r"has 0 GGUF models named 'Q4_NL' \(there are Tiny-IQ4_NL\.gguf, Tiny"):
        only_model(tmp_path, "Q4_NL")
    for i in range(9):
        (tmp_path / f"x{i}.gguf").touch()
    with pytest.raises(CheckpointError, match=r"has 12 GGUF models .* and others"):
        only_model(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "deep.gguf").touch()
    assert (len(models_in(tmp_path)), len(models_in(tmp_path, recursive=True))) == (12, 13)


def test_a_model_of_one_file_may_say_so(tmp_path: Path) -> None:
    for i, split in enumerate(
        ({"split.count": 1, "split.no": 0}, {"split.count": 0}, {"split.count": 1, "split.no": 3})
    ):
        write_gguf(tmp_path / f"{i}.gguf", LLAMA | split, [TABLE])
        assert list(read_gguf(tmp_path / f"{i}.gguf").tensors) == ["token_embd.weight"]
    write_gguf(tmp_path / "2.gguf", LLAMA | {"split.count": 2}, [TABLE])
    message = r"2\.gguf says that it is part 0 \(from 0\) of 2, but its name says part 0 of 1: the parts"
    with pytest.raises(CheckpointError, match=message):
        read_gguf(tmp_path / "2.gguf")


def test_parts_say_which_they_are_and_need_not_say_how_many_tensors_there_are(tmp_path: Path) -> None:
    paths = [tmp_path / f"m-0000{i}-of-00002.gguf" for i in (1, 2)]
    for i, path in enumerate(paths):
        write_gguf(path, {"split.no": i, "split.count": 2}, [Stored(str(i))])
    model = read_gguf(paths[1])
    assert (list(model.tensors), model.metadata.source) == (["0", "1"], str(paths[0]))
    write_gguf(paths[1], {}, [Stored("1")])
    with pytest.raises(CheckpointError, match=r"says that it is part 0 \(from 0\) of 1, but its name says part 1 of 2"):
        read_gguf(paths[0])


def test_a_whole_name_goes_before_the_end_of_one(tmp_path: Path) -> None:
    for name in ("tiny", "big-tiny", "small.tiny", "mytiny", *"abcd"):
        (tmp_path / f"{name}.gguf").touch()
    assert only_model(tmp_path, "TINY") == only_model(tmp_path, "tiny.GGUF") == tmp_path / "tiny.gguf"
    (tmp_path / "tiny.gguf").unlink()
    message = r"has 2 GGUF models named 'tiny' \(there are a\.gguf, .*, small\.tiny\.gguf\): give the path of one"
    with pytest.raises(CheckpointError, match=message):
        only_model(tmp_path, "tiny")
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "e.gguf").touch()
    with pytest.raises(CheckpointError, match=r"d\.gguf, e/e\.gguf, mytiny\.gguf, small\.tiny\.gguf\): give"):
        only_model(tmp_path, recursive=True)
    (tmp_path / "f.gguf").touch()
    with pytest.raises(CheckpointError, match=r"mytiny\.gguf and others\): give"):
        only_model(tmp_path, recursive=True)


def test_a_folder_is_not_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "folder.gguf").mkdir()
    names = ("folder.gguf", "m.gguf", "m.GGUF", "m.safetensors")
    assert [name for name in names if is_gguf(tmp_path / name)] == ["m.gguf", "m.GGUF"]


# Tensors


def test_tensors_have_the_names_of_a_hugging_face_checkpoint(path: Path) -> None:
    names = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output.weight": "lm_head.weight",
        "blk.11.attn_v.bias": "model.layers.11.self_attn.v_proj.bias",
        "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
        "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
        "blk.0.unheard.weight": "blk.0.unheard.weight",
        "other": "other",
        "rope_freqs.weight": None,
    }
    write_gguf(path, LLAMA, [Stored(name) for name in names])
    assert list(open_checkpoint(path).tensors) == [name for name in names.values() if name]


def test_rows_that_a_converter_reordered_come_in_their_first_order(path: Path) -> None:
    def stored(name: str, rows: list[int]) -> Stored:
        return Stored(name, (2, len(rows)), 0, b"".join(struct.pack("<2f", row, -row) for row in rows))

    # two heads of 8 rows; the converter puts row i + 4 j of a head at 2 i + j
    query = [8 * head + i + 4 * j for head in range(2) for i in range(4) for j in range(2)]
    key = [i + 4 * j for i in range(4) for j in range(2)]
    tensors = [
        stored("blk.0.attn_q.weight", query),
        stored("blk.0.attn_k.weight", key),
        stored("blk.0.attn_v.weight", key),
    ]
    bias = Stored("blk.0.attn_q.bias", (16,), 0, struct.pack("<16f", *query))
    write_gguf(path, LLAMA, [*tensors, bias])
    checkpoint = open_gguf(path)

    def rows(name: str, *between: int) -> list[float]:
        with checkpoint.reading(f"model.layers.0.self_attn.{name}", between or None) as data:
            return [value for value in struct.unpack(f"<{len(data) // 4}f", data) if value >= 0]

    with checkpoint.reading("model.layers.0.self_attn.q_proj.weight", (3, 12)) as data:
        assert struct.unpack("<18f", data)[::2] == tuple(range(3, 12))
        assert not data.readonly
    assert rows("q_proj.bias") == list(range(16))
    with checkpoint.reading("model.layers.0.self_attn.k_proj.weight") as data:
        assert struct.unpack("<16f", data)[::2] == tuple(range(8))
    with checkpoint.reading("model.layers.0.self_attn.v_proj.weight") as data:
        assert struct.unpack("<16f", data)[::2] == tuple(key)


def test_rows_that_are_not_those_of_the_heads_are_refused(path: Path) -> None:
    write_gguf(path, LLAMA, [Stored("blk.0.attn_q.weight", (1, 6), 0, bytes(24))])
    with pytest.raises(CheckpointError, match=r"the 6 rows of 'blk.0.attn_q.weight' are not those of 2 heads"):
        open_gguf(path)


def test_helpers_of_this_test_write_what_they_say() -> None:
    assert encoded("a") == struct.pack("<IQ", STRING, 1) + b"a" == struct.pack("<I", STRING) + string("a")
    assert encoded(0.5) == struct.pack("<If", F32, 0.5)
