"""The tensors of GGUF files as a Hugging Face checkpoint has them, whatever converters did to them."""

import struct
from pathlib import Path
from typing import Any

import pytest

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.gguf.weights import GGUFCheckpoint, open_gguf
from tests.config.gguf_file import TABLE, Stored, Typed, header_of, write_gguf

LAYER = "model.layers.0."
Q8_0 = 8


def floats(name: str, rows: list[float], *, width: int = 1) -> Stored:
    """A matrix with the same number in all columns of a row; a vector of these numbers if it has no width."""
    data = b"".join(struct.pack("<f", row) * max(width, 1) for row in rows)
    return Stored(name, (width, len(rows)) if width else (len(rows),), 0, data)


def opened(folder: Path, header: dict[str, Any], *tensors: Stored) -> GGUFCheckpoint:
    return open_gguf(write_gguf(folder / "m.gguf", header, [TABLE, *tensors]))


def read(checkpoint: GGUFCheckpoint, name: str, rows: tuple[int, int] | None = None) -> list[float]:
    with checkpoint.reading(name, rows) as data:
        return list(struct.unpack(f"<{len(data) // 4}f", data))


def paired(rows: list[float]) -> list[float]:
    """The rows of a head as converters put them for a rotation of neighbours."""
    half = len(rows) // 2
    return [row for pair in zip(rows[:half], rows[half:], strict=True) for row in pair]


Q, K, V = ([float(start + i) for i in range(number)] for start, number in ((100, 16), (200, 8), (300, 8)))


def test_one_tensor_of_queries_keys_and_values_is_three(tmp_path: Path) -> None:
    stored = [*paired(Q[:8]), *paired(Q[8:]), *paired(K), *V]
    checkpoint = opened(
        tmp_path,
        header_of("llama"),
        floats("blk.0.attn_qkv.weight", stored, width=3),
        floats("blk.0.attn_qkv.bias", stored, width=0),
    )
    for name, rows in (("q_proj", Q), ("k_proj", K), ("v_proj", V)):
        tensor = checkpoint.tensors[f"{LAYER}self_attn.{name}.weight"]
        assert (tensor.shape, tensor.num_bytes) == ((len(rows), 3), len(rows) * 12)
        assert read(checkpoint, f"{LAYER}self_attn.{name}.weight")[::3] == rows
        assert read(checkpoint, f"{LAYER}self_attn.{name}.bias") == rows
    assert read(checkpoint, f"{LAYER}self_attn.k_proj.bias", (2, 5)) == K[2:5]
    assert len(checkpoint.tensors) == 7


def test_rows_without_pairs_stay_where_they_are(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, header_of("qwen2"), floats("blk.0.attn_qkv.bias", Q + K + V, width=0))
    found = [read(checkpoint, f"{LAYER}self_attn.{name}_proj.bias") for name in "qkv"]
    assert found == [Q, K, V]


def test_rows_of_blocks_are_divided_too(tmp_path: Path) -> None:
    data = b"".join(bytes([row]) * 34 for row in range(32))
    checkpoint = opened(tmp_path, header_of("qwen2"), Stored("blk.0.attn_qkv.weight", (32, 32), Q8_0, data))
    for name, start, number in (("q_proj", 0, 16), ("k_proj", 16, 8), ("v_proj", 24, 8)):
        tensor = checkpoint.tensors[f"{LAYER}self_attn.{name}.weight"]
        assert (tensor.logical_shape, tensor.shape, tensor.block_type) == ((number, 32), (number, 34), "q8_0")
        with checkpoint.reading(f"{LAYER}self_attn.{name}.weight") as read_data:
            assert bytes(read_data) == data[34 * start : 34 * (start + number)]


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "order"),
    [
        (4, 2, [0, 1, 2, 3, 8, 9, 12, 13, 4, 5, 6, 7, 10, 11, 14, 15]),
        (2, 2, [0, 1, 4, 5, 8, 9, 2, 3, 6, 7, 10, 11]),
        (3, 1, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
    ],
)
def test_queries_keys_and_values_by_group_of_heads(
    num_heads: int, num_kv_heads: int, order: list[int], tmp_path: Path
) -> None:
    heads = {"attention__head_count": num_heads, "attention__head_count_kv": num_kv_heads}
    stored = floats("blk.0.attn_qkv.weight", [float(row) for row in range(len(order))])
    checkpoint = opened(tmp_path, header_of("falcon", **heads), stored)
    _, name = checkpoint.tensors
    assert read(checkpoint, name) == [float(row) for row in order]


def test_some_classes_have_them_in_one_tensor(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, header_of("gpt2"), floats("blk.0.attn_qkv.bias", Q + K + V, width=0))
    _, name = checkpoint.tensors
    assert read(checkpoint, name) == Q + K + V


@pytest.mark.parametrize(
    ("heads", "num_rows", "message"),
    [
        ((2, 1), 33, "the 33 rows of 'blk.0.attn_qkv.bias' are not those of 2 heads of queries and 1 of keys and val"),
        ((3, 2), 14, "the 14 rows of 'blk.0.attn_qkv.bias' are not those of 3 heads of queries and 2 of keys and val"),
    ],
)
def test_rows_that_cannot_be_divided_are_refused(
    heads: tuple[int, int], num_rows: int, message: str, tmp_path: Path
) -> None:
    header = header_of("qwen2", attention__head_count=heads[0], attention__head_count_kv=heads[1])
    with pytest.raises(CheckpointError, match=rf"m\.gguf: {message}"):
        opened(tmp_path, header, floats("blk.0.attn_qkv.bias", [0.0] * num_rows, width=0))


def test_pairs_of_each_head_must_be_whole(tmp_path: Path) -> None:
    """Four rows are one pair of each of two heads; six are not."""
    checkpoint = opened(tmp_path, header_of("llama"), floats("blk.0.attn_q.bias", [1.0, 2.0, 3.0, 4.0], width=0))
    assert read(checkpoint, f"{LAYER}self_attn.q_proj.bias") == [1.0, 2.0, 3.0, 4.0]
    with pytest.raises(
        CheckpointError, match=r"m\.gguf: the 6 rows of 'blk\.0\.attn_q\.bias' are not those of 2 heads"
    ):
        opened(tmp_path, header_of("llama"), floats("blk.0.attn_q.bias", [0.0] * 6, width=0))


def test_weights_of_norms_lose_what_converters_added(tmp_path: Path) -> None:
    tensors = floats("blk.0.attn_norm.weight", [1.0, 1.5], width=0), floats("blk.0.attn_q.bias", [1.0, 1.5], width=0)
    checkpoint = opened(tmp_path, header_of("gemma"), *tensors)
    assert read(checkpoint, f"{LAYER}input_layernorm.weight") == [0.0, 0.5]
    assert read(checkpoint, f"{LAYER}self_attn.q_proj.bias") == [1.0, 1.5]
    checkpoint = opened(tmp_path, header_of("llama"), tensors[0])
    assert read(checkpoint, f"{LAYER}input_layernorm.weight") == [1.0, 1.5]
    half = Stored("blk.0.attn_norm.weight", (2,), 1, bytes(4))
    message = r"m\.gguf: the norm 'blk\.0\.attn_norm\.weight' is float16, but must be float32"
    with pytest.raises(UnsupportedModelError, match=message):
        opened(tmp_path, header_of("gemma"), half)
    opened(tmp_path, header_of("llama"), half)


def test_a_dimension_of_1_that_converters_left_out_is_there_again(tmp_path: Path) -> None:
    header = header_of("qwen2moe", expert_count=2, expert_used_count=1, expert_feed_forward_length=8)
    flat, whole = (Stored("blk.0.ffn_gate_inp_shexp.weight", shape) for shape in ((4,), (4, 1)))
    others = Stored("blk.0.attn_q.bias", (4,)), Stored("blk.0.attn_k.bias", (4,))
    for stored in (flat, whole):
        shapes = [tensor.shape for tensor in opened(tmp_path, header, stored, *others).tensors.values()]
        assert shapes == [(8, 16), (1, 4), (4,), (4,)]


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    norms = [floats(f"blk.{layer}.attn_norm.weight", [0.0], width=0) for layer in range(4)]
    header = header_of("llama", block_count=4, nextn_predict_layers=2)
    names = list(opened(tmp_path, header, *norms, floats("rope_freqs.weight", [1.0], width=0)).tensors)
    assert names[1:] == [f"model.layers.{layer}.input_layernorm.weight" for layer in (0, 1)]


# xIELU

ALPHAS = {"xielu.alpha_n": [0.25, 0.5], "xielu.alpha_p": [0.75, 1.0]}


@pytest.mark.parametrize("constants", [{}, {"xielu.beta": 0.5, "xielu.eps": -1e-6}, {"xielu.beta": [0.50045, 0.50045]}])
def test_the_parameters_of_xielu_are_tensors(constants: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, header_of("apertus") | ALPHAS | constants)
    found = {name: read(checkpoint, name) for name in checkpoint.tensors if "alpha" in name}
    assert found == {
        "model.layers.0.mlp.act_fn.alpha_n": [0.25],
        "model.layers.1.mlp.act_fn.alpha_n": [0.5],
        "model.layers.0.mlp.act_fn.alpha_p": [0.75],
        "model.layers.1.mlp.act_fn.alpha_p": [1.0],
    }
    tensor = checkpoint.tensors["model.layers.1.mlp.act_fn.alpha_p"]
    assert (tensor.name, tensor.dtype, tensor.shape, tensor.num_bytes) == (
        "model.layers.1.mlp.act_fn.alpha_p",
        "float32",
        (1,),
        4,
    )


def test_parameters_that_are_not_there_are_missing(tmp_path: Path) -> None:
    header = header_of("apertus") | {"xielu.alpha_p": ALPHAS["xielu.alpha_p"]}
    assert len(opened(tmp_path, header).tensors) == 3


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"xielu.beta": 0.501}, UnsupportedModelError, r"xielu\.beta is 0\.50.*, supported is 0\.5$"),
        ({"xielu.beta": 0.499}, UnsupportedModelError, r"xielu\.beta is 0\.49.*, supported is 0\.5$"),
        ({"xielu.beta": "x" * 99}, UnsupportedModelError, f"xielu.beta is {'x' * 80}, supported"),
        ({"xielu.beta": [0.5, 0.25]}, UnsupportedModelError, r"xielu\.beta is \[0\.5, 0\.25\], supported is 0\.5$"),
        ({"xielu.eps": 1e-6}, UnsupportedModelError, "xielu.eps is .*, supported is -1e-06$"),
        ({"xielu.alpha_n": [0.5]}, CheckpointError, "'xielu.alpha_n' must be an array of a float32 for each layer$"),
        (
            {"xielu.alpha_p": [0.5] * 3},
            CheckpointError,
            "'xielu.alpha_p' must be an array of a float32 for each layer$",
        ),
        ({"xielu.alpha_p": [1, 2]}, CheckpointError, "'xielu.alpha_p' must be an array of a float32 for each layer$"),
        ({"xielu.alpha_p": 0.5}, CheckpointError, "'xielu.alpha_p' must be an array of a float32 for each layer$"),
        ({"xielu.alpha_p": [Typed(12, 0.5)] * 2}, CheckpointError, "'xielu.alpha_p' must be an array of a float32"),
    ],
    ids=range(10),
)
def test_parameters_that_are_refused(
    values: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=rf"m\.gguf: {message}"):
        opened(tmp_path, header_of("apertus") | ALPHAS | values)
