"""Tokenizers read from folders as checkpoints have them, compared with transformers; damaged ones are refused."""

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.common.errors import InvalidPromptError, TokenizerError
from quire.text.tokenizer.tokenizer import Tokenizer

from .made import EMBEDDED, write_byte_level_bpe

TEXTS = [
    "Hello world",
    " leading and trailing ",
    "naïve café 😀",
    "It's 2024 e\u0301t",
    "x</s>y",
    "",
    "line\n\n  indented\ttab",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded tokenizer, to change."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(EMBEDDED / name, tmp_path / name)
    return tmp_path


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values) if path.exists() else json.dumps(values))


def same_as_transformers(folder: Path, tokenizer_class: str = "AutoTokenizer") -> None:
    import transformers

    theirs = getattr(transformers, tokenizer_class).from_pretrained(folder)
    ours = Tokenizer.from_path(folder)
    for text in TEXTS:
        for special in (True, False):
            token_ids = ours.encode(text, add_special_tokens=special)
            assert token_ids == theirs.encode(text, add_special_tokens=special)
            assert ours.decode(token_ids, special) == theirs.decode(token_ids, skip_special_tokens=special)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert (ours.pad_token_id, ours.vocab_size) == (theirs.pad_token_id, len(theirs))


def test_tokenizer_json(folder: Path) -> None:
    same_as_transformers(folder)


@pytest.mark.parametrize("add_bos", [True, False])
def test_vocab_and_merges(tmp_path: Path, add_bos: bool) -> None:
    write_byte_level_bpe(tmp_path, add_bos_token=add_bos)
    same_as_transformers(tmp_path, "GPT2Tokenizer")
    tokenizer = Tokenizer.from_path(tmp_path)
    assert tokenizer.encode("Hi")[0] == tokenizer.bos_token_id or not add_bos
    assert tokenizer.decode(tokenizer.encode("Hi")) == "Hi"


SPECIAL = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>") | {"pad_token": "<pad>"}
ADDED = {"8192": {"content": "</s>", "special": True}, "8193": {"content": "<pad>", "special": True}}
ADDED |= {"8194": {"content": "  "}, "8195": {"content": "\t\t"}}


@pytest.mark.parametrize(
    ("tokenizer_class", "config"),
    [
        ("GPT2Tokenizer", {"add_prefix_space": True}),
        ("GPT2Tokenizer", SPECIAL | {"added_tokens_decoder": ADDED}),
        ("Qwen2Tokenizer", {"additional_special_tokens": ["</s>"]}),
    ],
)
def test_vocab_and_merges_of_other_families(tmp_path: Path, tokenizer_class: str, config: dict[str, Any]) -> None:
    """OPT; Phi-2, which has tokens for runs of spaces; Qwen 2."""
    write_byte_level_bpe(tmp_path, tokenizer_class=tokenizer_class, **config)
    same_as_transformers(tmp_path, tokenizer_class)


def test_tokenizer_json_outranks_add_bos_token(folder: Path) -> None:
    change(folder / "tokenizer_config.json", bos_token="<|endoftext|>", add_bos_token=True, add_eos_token=True)
    same_as_transformers(folder)


def test_truncation_and_padding_in_tokenizer_json_are_left_out(folder: Path) -> None:
    plain = Tokenizer.from_path(folder).encode("one two three")
    change(
        folder / "tokenizer.json",
        truncation={"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
        padding={
            "strategy": {"Fixed": 9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 0,
            "pad_type_id": 0,
            "pad_token": "<|endoftext|>",
        },
    )
    assert Tokenizer.from_path(folder).encode("one two three") == plain


def test_added_tokens_of_the_config_get_their_ids(folder: Path) -> None:
    change(
        folder / "tokenizer_config.json",
        added_tokens_decoder={"8192": {"content": "<tool>", "special": True}, "8193": {"content": "<note>"}},
    )
    tokenizer = Tokenizer.from_path(folder)
    assert tokenizer.encode("<tool><note>") == [8192, 8193]
    assert tokenizer.decode([8192, 8193]) == "<note>"
    assert tokenizer.vocab_size == 8194


def test_the_time_for_added_tokens_grows_with_their_number_alone(folder: Path) -> None:
    """A file of the allowed size may have more than 200,000."""
    listed = {str(8192 + i): {"content": f"<{i}>", "special": i % 2 == 0} for i in range(6000)}
    change(folder / "tokenizer_config.json", added_tokens_decoder=listed)
    begin_s = time.process_time()
    tokenizer = Tokenizer.from_path(folder)
    assert time.process_time() - begin_s < 5.0
    assert tokenizer.encode("<5999><0>") == [8192 + 5999, 8192]
    assert tokenizer.decode([8192 + 5999, 8192]) == "<5999>"


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        ({"9000": {"content": "<tool>"}}, "should have id 9000"),
        ({"5": {"content": "<|im_end|>"}}, "should have id 5"),
        ({"8192": {"content": 3}}, "has no text"),
    ],
)
def test_added_tokens_that_contradict_the_vocabulary_are_refused(folder: Path, listed: Any, message: str) -> None:
    change(folder / "tokenizer_config.json", added_tokens_decoder=listed)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_path(folder)


def test_special_tokens_of_the_map_are_skipped_in_text(tmp_path: Path) -> None:
    write_byte_level_bpe(tmp_path)
    tokenizer = Tokenizer.from_path(tmp_path)
    ids = [*tokenizer.encode("yes"), tokenizer.eos_token_id or -1, tokenizer.pad_token_id or -1]
    assert tokenizer.decode(ids) == "yes"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "yes</s><pad>"


def test_ids_without_a_token_stand_for_nothing() -> None:
    tokenizer = Tokenizer.from_path(EMBEDDED)
    ids = tokenizer.encode("padded")
    assert tokenizer.decode([*ids, tokenizer.vocab_size, tokenizer.vocab_size + 50]) == "padded"


def test_text_that_is_not_unicode_is_an_invalid_request() -> None:
    with pytest.raises(InvalidPromptError, match="not valid Unicode"):
        Tokenizer.from_path(EMBEDDED).encode("half a pair: \ud83d")


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def remove(name: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("tokenizer.json"), r"has no tokenizer: neither tokenizer\.json, nor tekken\.json"),
        (write("tokenizer.json", '{"version": "1.0", "mod'), r"tokenizer\.json cannot be read \(is it incomplete\?\)"),
        (write("tokenizer_config.json", "[]"), r"tokenizer_config\.json holds a JSON list"),
        (write("tokenizer_config.json", '{"a'), r"tokenizer_config\.json is not valid JSON"),
        (write("tokenizer_config.json", '{"chat_template": 5}'), "'chat_template' in .* must be a string"),
        (write("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}'), "'chat_template' in"),
        (lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff"), r"chat_template\.jinja cannot be read"),
    ],
)
def test_damaged_files_are_named(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_path(folder)


@pytest.mark.parametrize(
    "config",
    [
        {"added_tokens_decoder": {"9" * 5000: {"content": "x"}}},
        {"added_tokens_decoder": {"8192": {"content": "\ud800"}}},
        {"eos_token": "\ud800"},
        {"additional_special_tokens": ["\ud800"]},
    ],
    ids=range(4),
)
def test_what_the_library_cannot_take_is_refused(folder: Path, config: dict[str, Any]) -> None:
    change(folder / "tokenizer_config.json", **config)
    with pytest.raises(TokenizerError, match="the tokenizer of"):
        Tokenizer.from_path(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_devices_are_no_files_of_a_tokenizer(folder: Path, name: str) -> None:
    (folder / name).unlink()
    (folder / name).symlink_to("/dev/zero")
    with pytest.raises(TokenizerError, match=f"{name} is not a regular file"):
        Tokenizer.from_path(folder)


def test_a_tokenizer_that_fails_on_a_text_says_so(folder: Path) -> None:
    """The first of these raises an Exception, the second panics."""
    whole = json.loads((folder / "tokenizer.json").read_text())
    no_unknown = {"type": "WordLevel", "vocab": {"hello": 0}, "unk_token": "?"}
    frame = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "a", "type_id": 0}}], "pair": []}
    for part in ({"model": no_unknown}, {"post_processor": frame | {"special_tokens": {}}}):
        (folder / "tokenizer.json").write_text(json.dumps(whole | {"added_tokens": []} | part))
        with pytest.raises(TokenizerError, match="failed to encode a text"):
            Tokenizer.from_path(folder).encode("unheard of")


def test_a_special_token_outside_the_vocabulary_cannot_be_added_to_texts(tmp_path: Path) -> None:
    write_byte_level_bpe(tmp_path, add_bos_token=True, bos_token="<none>")
    with pytest.raises(TokenizerError, match="'<none>' must be added"):
        Tokenizer.from_path(tmp_path)


def test_broken_merges_are_refused(tmp_path: Path) -> None:
    write_byte_level_bpe(tmp_path)
    (tmp_path / "merges.txt").write_text("#version: 0.2\nonly-one-part\n")
    with pytest.raises(TokenizerError, match="is it incomplete"):
        Tokenizer.from_path(tmp_path)
