"""The configs that rank 0 sends to the others."""

import dataclasses
from pathlib import Path

import msgspec
import pytest

from quire import EngineArgs
from quire.config.kv_cache import LatentSpec, NoCacheSpec, attention_spec
from quire.config.kv_layout import kv_cache_config
from quire.runner.parallel.configs import from_bytes, to_bytes


def test_configs_arrive_as_they_were() -> None:
    args = EngineArgs(max_model_len=64, enable_lora=True, tenant_weights={"a": 2.0}, tensor_parallel_size=2)
    specs = [attention_spec(2, 64, "bfloat16"), attention_spec(2, 64, "int8", 128), LatentSpec(64, 16, "float32")]
    cache = kv_cache_config([*specs, NoCacheSpec()], 16, num_blocks=8, draft_specs=[specs[0]] * 2)
    config, arrived = from_bytes(to_bytes(args.resolve(), cache))
    expected = args.resolve()
    assert arrived == cache
    assert type(config.model.path) is type(expected.model.path)
    for field in dataclasses.fields(expected):
        assert getattr(config, field.name) == getattr(expected, field.name), field.name


def test_nothing_but_configs_is_made() -> None:
    for value in ([["system", "echo"]], [["EngineArgs"]], [["object"]]):
        with pytest.raises(ValueError, match="is no part of a config"):
            from_bytes(msgspec.msgpack.encode(["tuple", *value]))
    with pytest.raises(TypeError, match="a config has a object"):
        to_bytes(object())


def test_paths_stay_paths() -> None:
    assert from_bytes(to_bytes(Path("a/b"))) == (Path("a/b"),)
