"""What the getters of a checkpoint's config accept, and that their errors name file, key, value and what is allowed."""

import sys
from pathlib import Path
from typing import Any

import pytest

from quire.common.errors import CheckpointError
from quire.config.hf_config import HFConfig, check_file, read_json_list, read_json_object

SIZE = "an integer from 1 to 2147483647"
NUMBER = "a finite number greater than 0"


def config(value: Any) -> HFConfig:
    return HFConfig({"key": value}, "config.json")


@pytest.mark.parametrize("value", [1, 2**31 - 1])
def test_sizes_are_integers_from_1(value: int) -> None:
    assert config(value).size("key") == value


@pytest.mark.parametrize("value", [1, 0.5, sys.float_info.max])
def test_numbers_are_finite_and_greater_than_0(value: float) -> None:
    assert config(value).number("key") == value
    assert config([value, 2]).numbers("key", 2) == [value, 2]


@pytest.mark.parametrize(
    ("getter", "value", "expected"),
    [
        *(("size", value, SIZE) for value in (0, 2**31, 1.0, True, "1", [1])),
        *(("number", value, NUMBER) for value in (0, -1.0, float("inf"), float("nan"), True, "1")),
        *(("flag", value, "true or false") for value in (0, 1, "true", [])),
        *(("text", value, "a string") for value in (0, True, ["a"])),
        *(("section", value, "an object") for value in (0, "a", [], [{}])),
        *(("token_ids", value, "a token id or a list of token ids") for value in (-1, "2", True, 2.0, [1, -1], [True])),
    ],
)
def test_errors_name_the_file_the_key_the_value_and_what_is_allowed(getter: str, value: Any, expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        getattr(config(value), getter)("key")
    assert str(caught.value) == f"config.json: 'key' is {value!r}, but must be {expected}"


@pytest.mark.parametrize(
    ("values", "wrong", "expected"),
    [
        ([1], [1], "a list of 2 numbers"),
        ([1, 2, 3], [1, 2, 3], "a list of 2 numbers"),
        (1, 1, "a list of 2 numbers"),
        ([1, 0], 0, NUMBER),
        ([True, 1], True, NUMBER),
    ],
)
def test_lists_have_the_length_that_is_asked_for(values: Any, wrong: Any, expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        config(values).numbers("key", 2)
    assert str(caught.value) == f"config.json: 'key' is {wrong!r}, but must be {expected}"


@pytest.mark.parametrize("values", [{}, {"key": None}])
def test_what_is_absent_or_null_has_the_default_or_is_missed(values: dict[str, Any]) -> None:
    hf = HFConfig(values, "config.json")
    for getter, default in (("size", 3), ("number", 0.5), ("flag", False), ("text", "")):
        assert getattr(hf, getter)("key", default) == default
    assert (hf.section("key"), hf.token_ids("key")) == (None, None)
    for getter, arguments in (("size", ()), ("number", ()), ("flag", ()), ("text", ()), ("numbers", (2,))):
        with pytest.raises(CheckpointError, match=r"config\.json has no 'key': this checkpoint is incomplete"):
            getattr(hf, getter)("key", *arguments)


def test_errors_show_the_beginning_of_a_long_value() -> None:
    with pytest.raises(CheckpointError) as caught:
        config("a" * 100).flag("key")
    assert str(caught.value) == f"config.json: 'key' is '{'a' * 79}, but must be true or false"


def test_errors_in_a_section_name_it_too() -> None:
    section = config({"inner": 0}).section("key")
    assert section is not None
    with pytest.raises(CheckpointError, match=r"^config\.json: key: 'inner' is 0, but must be an integer"):
        section.size("inner")


@pytest.mark.parametrize(("value", "expected"), [(0, {0}), ([2, 0, 2], {0, 2}), ([], set())])
def test_token_ids_are_one_or_several(value: Any, expected: set[int]) -> None:
    assert config(value).token_ids("key") == expected


def test_a_config_is_read_from_a_file_that_its_errors_name(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"a": 1, "b": null}')
    hf = HFConfig.read(path)
    assert (dict(hf), len(hf), hf.source) == ({"a": 1, "b": None}, 2, str(path))
    with pytest.raises(CheckpointError) as caught:
        hf.text("a")
    assert str(caught.value) == f"{path}: 'a' is 1, but must be a string"


@pytest.mark.parametrize(("text", "kind"), [("[1]", "list"), ('"a"', "str"), ("1", "int"), ("null", "NoneType")])
def test_a_config_is_an_object(tmp_path: Path, text: str, kind: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_json_object(path)
    assert str(caught.value) == f"{path} holds a JSON {kind}, but must hold an object"


def test_a_file_may_be_as_large_as_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10))
    check_file(path, 10)
    with pytest.raises(CheckpointError, match="has 10 bytes: at most 9 are allowed"):
        check_file(path, 9)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        check_file(tmp_path, 10)
    with pytest.raises(FileNotFoundError):
        check_file(tmp_path / "other", 10)


def test_replaced_values_are_mentioned_in_errors_and_no_values_change_nothing():
    config = HFConfig({"a": 1, "b": "x"}, "config.json")
    assert config.replaced({}) is config
    changed = config.replaced({"b": 2, "c": 3})
    assert (dict(changed), dict(config)) == ({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": "x"})
    with pytest.raises(CheckpointError, match=r"^config\.json with overrides: 'b' is 2"):
        changed.text("b")


def test_counts_may_be_0() -> None:
    assert [config(value).count("key") for value in (0, 1, 5)] == [0, 1, 5]
    assert (config(None).count("key", 0), config(None).count("key", 3), config(4).count("key", 0)) == (0, 3, 4)
    for value in (0.0, False, -1, "0"):
        with pytest.raises(CheckpointError, match=f"^config.json: 'key' is {value!r}, but must be {SIZE}$"):
            config(value).count("key")
    with pytest.raises(CheckpointError, match="'key'"):
        config(None).count("key")


def test_a_list_is_read_from_a_file_that_its_errors_name(tmp_path: Path) -> None:
    path = tmp_path / "modules.json"
    path.write_text('[{"a": 1}, 2]')
    assert read_json_list(path) == [{"a": 1}, 2]
    path.write_text("{}")
    with pytest.raises(CheckpointError) as refused:
        read_json_list(path)
    assert str(refused.value) == f"{path} holds a JSON dict, but must hold a list"
    with path.open("wb") as file:
        file.truncate(2**24 + 1)
    with pytest.raises(CheckpointError, match=r"modules\.json has 16,777,217 bytes: at most 16,777,216"):
        read_json_list(path)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{tmp_path} has no modules.json"):
        read_json_list(path)
