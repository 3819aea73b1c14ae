"""GGUF tensors and values that no converter writes."""

from types import SimpleNamespace

import pytest

from quire.common.errors import CheckpointError, UnsupportedModelError
from quire.config.checkpoint.gguf import hf_values, weights
from quire.config.checkpoint.gguf.keys import Keys
from quire.config.checkpoint.gguf.table import architecture_of
from quire.config.hf_config import HFConfig


def test_a_pattern_of_windows_has_a_value_for_each_layer() -> None:
    metadata = {"general.architecture": "gemma3", "gemma3.block_count": 3}
    metadata["gemma3.attention.sliding_window_pattern"] = [True]
    with pytest.raises(CheckpointError, match="has 1 values"):
        hf_values._layer_types(Keys(HFConfig(metadata, "f")), 6, 3, has_window=True)


def test_norms_that_are_stored_with_an_offset_are_float32() -> None:
    metadata = HFConfig({"general.architecture": "gemma"}, "f")
    tensor = SimpleNamespace(dtype="bfloat16", path="f", shape=(8,))
    found = weights._Found({}, {}, {})
    with pytest.raises(UnsupportedModelError, match="must be float32"):
        weights._add(found, "blk.0.attn_norm.weight", tensor, architecture_of(metadata, {}), Keys(metadata))


def test_rows_are_those_of_all_heads() -> None:
    with pytest.raises(CheckpointError, match="not those of 2 heads"):
        weights._parts("attn_qkv", SimpleNamespace(shape=(7,), path="f"), 2, 1)


def test_the_parameters_of_xielu_are_arrays() -> None:
    metadata = HFConfig({"general.architecture": "apertus", "xielu.alpha_n": 3, "apertus.block_count": 1}, "f")
    model = SimpleNamespace(metadata=metadata)
    with pytest.raises(CheckpointError, match="must be an array"):
        weights._learned(model, architecture_of(metadata, {}), Keys(metadata))


def test_heads_are_no_more_than_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = HFConfig({"general.architecture": "llama", "llama.attention.head_count": 9}, "f")
    monkeypatch.setattr(hf_values, "_token_table", lambda model: (10, 8))
    with pytest.raises(CheckpointError, match="9 attention heads are more than the width 8"):
        hf_values.hf_values(SimpleNamespace(metadata=metadata, tensors={}))
