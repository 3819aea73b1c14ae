"""The getters for a GGUF header's keys, and the rotary embedding that they describe."""

import struct
from pathlib import Path
from typing import Any

import pytest

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.gguf.architectures import Architecture
from quire.config.checkpoint.gguf.files import GGUFModel, read_gguf
from quire.config.checkpoint.gguf.header import Array
from quire.config.checkpoint.gguf.keys import Keys
from quire.config.checkpoint.gguf.rope import rope_parameters
from tests.config.gguf_file import Stored, write_gguf


def model_of(folder: Path, values: dict[str, Any], *tensors: Stored) -> GGUFModel:
    named = {f"a.{key}": value for key, value in values.items()}
    return read_gguf(write_gguf(folder / "m.gguf", {"general.architecture": "a"} | named, tensors))


def keys_of(folder: Path, values: dict[str, Any]) -> Keys:
    return Keys(model_of(folder, values).metadata)


def test_values_and_their_defaults(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, {"size": 3, "zero": 0, "number": 0.5})
    assert (keys.prefix, keys.get("size"), keys.get("gone")) == ("a", 3, None)
    assert (keys.size("size"), keys.size("size", 7), keys.size("gone", 7)) == (3, 3, 7)
    assert (keys.number("number"), keys.number("number", 7.0), keys.number("gone", 7.0)) == (0.5, 0.5, 7.0)
    assert (keys.count("size"), keys.count("zero"), keys.count("gone")) == (3, 0, 0)
    with pytest.raises(CheckpointError, match=r"m\.gguf has no 'a\.gone'"):
        keys.size("gone")
    with pytest.raises(CheckpointError, match=r"m\.gguf has no 'a\.gone'"):
        keys.number("gone")
    with pytest.raises(CheckpointError, match=r"m\.gguf: 'a\.number' is 0\.5, but must be an integer"):
        keys.count("number")


def test_heads_of_keys_are_those_of_queries_unless_the_header_says_otherwise(tmp_path: Path) -> None:
    assert keys_of(tmp_path, {"attention.head_count": 4}).heads() == (4, 4)
    assert keys_of(tmp_path, {"attention.head_count": 4, "attention.head_count_kv": 2}).heads() == (4, 2)


def test_layers_that_predict_further_tokens_do_not_count(tmp_path: Path) -> None:
    assert keys_of(tmp_path, {"block_count": 4}).num_layers() == 4
    assert keys_of(tmp_path, {"block_count": 4, "nextn_predict_layers": 1}).num_layers() == 3


def test_a_value_that_quire_does_not_compute_is_named(tmp_path: Path) -> None:
    keys = keys_of(tmp_path, {"short": 2, "long": "x" * 99})
    assert str(keys.unsupported("short", "why")) == f"{tmp_path}/m.gguf: a.short is 2: why"
    assert str(keys.unsupported("long", "why")) == f"{tmp_path}/m.gguf: a.long is {'x' * 80}: why"


def test_an_array_with_the_same_number_for_each_layer_is_that_number(tmp_path: Path) -> None:
    given = {"one": [3], "same": [3, 3], "others": [3, 4], "most": [5] * 4096, "more": [5] * 4097, "text": ["3"]}
    keys = keys_of(tmp_path, given | {"none": []})
    assert [keys.get(name) for name in ("one", "same", "others", "most")] == [3, 3, [3, 4], 5]
    assert all(isinstance(keys.get(name), Array) for name in ("more", "text", "none"))


# The rotary embedding

FULL, SLIDING = "full_attention", "sliding_attention"
PLAIN = Architecture("A")
DEFAULT = {"partial_rotary_factor": 1.0, "rope_type": "default", "rope_theta": 10000.0}
YARN = DEFAULT | {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 64}
FACTORS = [1.0, 2.0, 4.0, 8.0]
TABLES = DEFAULT | {"rope_type": "longrope", "original_max_position_embeddings": 64, "attention_factor": 1.0}


def table(name: str, values: list[float]) -> Stored:
    return Stored(f"rope_{name}.weight", (len(values),), 0, struct.pack(f"<{len(values)}f", *values))


def rope(folder: Path, values: dict[str, Any], *tables: Stored, architecture: Architecture = PLAIN) -> dict[str, Any]:
    model = model_of(folder, {"context_length": 64} | values, *tables)
    return rope_parameters(Keys(model.metadata), model, architecture, 8)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, DEFAULT),
        ({"rope.freq_base": 5e5}, DEFAULT | {"rope_theta": 5e5}),
        ({"rope.dimension_count": 8}, DEFAULT),
        ({"rope.dimension_count": 4}, DEFAULT | {"partial_rotary_factor": 0.5}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, DEFAULT),
        ({"rope.scaling.type": "linear"}, DEFAULT),
        ({"rope.scaling.factor": 4.0}, DEFAULT | {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scale_linear": 2.0}, DEFAULT | {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.factor": 4.0, "rope.scale_linear": 2.0}, DEFAULT | {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.type": "yarn"}, YARN),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, YARN | {"factor": 4.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.original_context_length": 16},
            YARN | {"original_max_position_embeddings": 16},
        ),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
                "rope.scaling.yarn_attn_factor": 0.5,
                "rope.scaling.attn_factor": 1.0,
                "rope.scaling.yarn_ext_factor": 1.0,
                "rope.scaling.yarn_log_multiplier": 0.0,
            },
            YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 0.5},
        ),
    ],
    ids=range(13),
)
def test_what_a_header_says_of_the_rotary_embedding(
    values: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    assert rope(tmp_path, values) == expected


def test_an_architecture_may_say_more_of_a_stretched_embedding(tmp_path: Path) -> None:
    architecture = Architecture("A", rope={"truncate": False})
    assert rope(tmp_path, {"rope.scaling.type": "yarn"}, architecture=architecture) == YARN | {"truncate": False}
    assert rope(tmp_path, {}, architecture=architecture) == DEFAULT


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope.scaling.type": "longrope"}, "rope.scaling.type is longrope: supported are none, linear, yarn, and"),
        ({"rope.scaling.type": "dynamic"}, "rope.scaling.type is dynamic: supported"),
        ({"rope.scaling.attn_factor": 2.0}, "rope.scaling.attn_factor is 2.0: only 1 is supported"),
        ({"rope.scaling.yarn_ext_factor": 0.5}, "rope.scaling.yarn_ext_factor is 0.5: only 1 is supported"),
        ({"rope.scaling.yarn_log_multiplier": 0.5}, "rope.scaling.yarn_log_multiplier is 0.5: not supported"),
    ],
)
def test_scalings_that_are_refused(values: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=f"m.gguf: a.{message}"):
        rope(tmp_path, {"rope.scaling.type": "yarn"} | values)


def test_where_converters_reorder_rows_the_whole_head_is_rotated(tmp_path: Path) -> None:
    architecture = Architecture("A", pairs=("attn_q",))
    assert rope(tmp_path, {"rope.dimension_count": 8}, architecture=architecture) == DEFAULT
    with pytest.raises(UnsupportedModelError, match=r"a\.rope\.dimension_count is 4: must equal the head's size, 8"):
        rope(tmp_path, {"rope.dimension_count": 4}, architecture=architecture)


@pytest.mark.parametrize(
    ("base", "values", "expected"),
    [
        (None, {}, 10000.0),
        (None, {"rope.freq_base": 5e5}, 5e5),
        (300.0, {"rope.freq_base": 5e5}, 300.0),
        (300.0, {"rope.freq_base_swa": 7.0}, 7.0),
    ],
)
def test_layers_with_a_window_may_have_an_embedding_of_their_own(
    base: float | None, values: dict[str, Any], expected: float, tmp_path: Path
) -> None:
    architecture = Architecture("A", rotates_windows_apart=True, window_rope_base=base)
    found = rope(tmp_path, {"rope.scaling.factor": 4.0} | values, architecture=architecture)
    full = DEFAULT | {"rope_type": "linear", "factor": 4.0, "rope_theta": values.get("rope.freq_base", 10000.0)}
    assert found == {FULL: full, SLIDING: DEFAULT | {"rope_theta": expected}}


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"rope.scaling.type": "none"},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 1.0},
        {"rope.scaling.type": "longrope"},
        {"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0},
    ],
)
def test_a_table_divides_the_frequencies_for_every_length(values: dict[str, Any], tmp_path: Path) -> None:
    expected = TABLES | {"long_factor": FACTORS, "short_factor": FACTORS}
    assert rope(tmp_path, values, table("freqs", FACTORS)) == expected


def test_long_texts_may_have_a_table_of_their_own(tmp_path: Path) -> None:
    values = {"rope.scaling.original_context_length": 32, "rope.scaling.attn_factor": 1.25, "rope.dimension_count": 4}
    tables = table("factors_short", [1.0, 2.0]), table("factors_long", [3.0, 4.0])
    changed = {"original_max_position_embeddings": 32, "attention_factor": 1.25, "partial_rotary_factor": 0.5}
    expected = TABLES | changed | {"long_factor": [3.0, 4.0], "short_factor": [1.0, 2.0]}
    assert rope(tmp_path, values, *tables) == expected


@pytest.mark.parametrize(
    ("values", "stored", "error", "message"),
    [
        (
            {"rope.scaling.type": "yarn"},
            table("freqs", FACTORS),
            UnsupportedModelError,
            "a.rope.scaling.type is yarn: together with rope_freqs.weight this is not supported",
        ),
        (
            {"rope.scaling.factor": 2.0},
            table("freqs", FACTORS),
            UnsupportedModelError,
            "a.rope.scaling.type is None: together with rope_freqs.weight this",
        ),
        ({}, table("factors_long", FACTORS), CheckpointError, "has rope_factors_long.weight alone: the other table is"),
        ({}, table("factors_short", FACTORS), CheckpointError, "has rope_factors_short.weight alone: the other table"),
        (
            {},
            table("freqs", FACTORS[:3]),
            CheckpointError,
            r"m\.gguf: 'rope_freqs\.weight' must be float32 \[4\], not float32 \[3\]",
        ),
        (
            {},
            Stored("rope_freqs.weight", (4,), 1, bytes(8)),
            CheckpointError,
            r"m\.gguf: 'rope_freqs\.weight' must be float32 \[4\], not float16 \[4\]",
        ),
    ],
    ids=range(6),
)
def test_tables_that_do_not_fit_are_refused(
    values: dict[str, Any], stored: Stored, error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        rope(tmp_path, values, stored)
