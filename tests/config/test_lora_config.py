from pathlib import Path

import pytest

from quire import EngineArgs, InvalidParamsError, LoRARequest
from quire.common.errors import ConfigError
from quire.config.lora import LoRAConfig


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ((0, 16), "max_loras=0: must be from 1 to 4096"),
        ((4097, 16), "max_loras=4097"),
        ((1, 0), "max_lora_rank=0: must be from 1 to 512"),
        ((1, 513), "max_lora_rank=513"),
        ((1, 1, 0), "lora_memory=0"),
    ],
)
def test_what_is_out_of_range_is_refused(fields: tuple[int, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LoRAConfig(*fields)


def test_bounds_are_inclusive() -> None:
    assert LoRAConfig(4096, 512, 1) != LoRAConfig(1, 1)


@pytest.mark.parametrize(
    "modules",
    [
        ["sql=/a", "json=/b"],
        ("sql=/a", "json=/b"),
        {"sql": "/a", "json": "/b"},
        [{"name": "sql", "path": "/a"}, '{"name": "json", "path": "/b"}'],
    ],
)
def test_adapters_are_listed_in_each_of_these_forms(modules) -> None:
    args = EngineArgs(enable_lora=True, lora_modules=modules)
    assert args.lora_requests() == (LoRARequest("sql", 1, "/a"), LoRARequest("json", 2, "/b"))


def test_an_adapter_may_name_its_base_model() -> None:
    args = EngineArgs(enable_lora=True, lora_modules=['{"name": "a", "path": "/a", "base_model_name": "b"}'])
    assert args.lora_requests() == (LoRARequest("a", 1, "/a", base_model_name="b"),)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"lora_modules": ["sql"]}, "lora_modules='sql': must be NAME=FOLDER or .*lora_path=''"),
        ({"lora_modules": ["=/a"]}, "lora_name=''"),
        ({"lora_modules": ["{"]}, "must be NAME=FOLDER or"),
        ({"lora_modules": ['{"name": "a"}']}, "lora_path=''"),
        ({"lora_modules": ['{"name": "a", "path": "/a", "rank": 3}']}, "rank"),
        ({"lora_modules": ["a=/a", "a=/b"]}, "two adapters have the name 'a'"),
        ({"lora_modules": ["a=/a"], "enable_lora": False}, "lora_modules require enable_lora"),
        ({"lora_memory": "lots"}, "lora_memory='lots'"),
        ({"max_loras": 0}, "max_loras=0"),
    ],
)
def test_wrong_arguments_are_refused(given, reason) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineArgs(**{"enable_lora": True} | given).resolve()


def test_arguments_become_a_configuration() -> None:
    args = EngineArgs(enable_lora=True, max_loras=3, max_lora_rank=64, lora_memory="1MiB")
    assert args.resolve().lora == LoRAConfig(3, 64, 2**20)
    assert EngineArgs().resolve().lora is None


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"lora_name": ""}, "lora_name=''"),
        ({"lora_name": "a\nb"}, "printable"),
        ({"lora_name": "a" * 201}, "at most 200 characters"),
        ({"lora_int_id": 0}, "lora_int_id=0: must be an integer from 1"),
        ({"lora_path": ""}, "lora_path='': must be the folder"),
        ({"lora_path": 3}, "lora_path=3"),
        ({"lora_path": "a/" * 2049}, "lora_path has 4,098 characters; at most 4,096 are allowed"),
        ({"base_model_name": ""}, "base_model_name=''"),
        ({"tensorizer_config_dict": {"a": 1}}, "tensorizer_config_dict is not supported"),
        ({"load_inplace": 1}, "load_inplace=1"),
    ],
)
def test_wrong_requests_are_refused(given, reason) -> None:
    with pytest.raises(InvalidParamsError, match=reason):
        LoRARequest(**{"lora_name": "a", "lora_int_id": 1, "lora_path": "/a"} | given)


def test_a_request_has_vllms_properties_and_a_path_may_be_a_path() -> None:
    request = LoRARequest("a", 2, Path("b"))
    assert (request.name, request.adapter_id, request.path) == ("a", 2, "b")
