"""Files of tiktoken and tekken.json: equal to the tiktoken library on the vocabulary of quire-tiny."""

import base64
import functools
import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
import tiktoken_ext.openai_public as published

from quire.common.errors import TokenizerError
from quire.text.tokenizer.formats.byte_level import BYTES, TEKKEN
from quire.text.tokenizer.tokenizer import Tokenizer

from .made import EMBEDDED
from .texts import many_texts

NUM_SPECIAL = 30
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]%s"
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
)
KIMI = [r"[\p{Han}]+", _CASED % ("*", "+"), _CASED % ("+", "*"), r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*"]
KIMI += [r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+"]
QWEN = [r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}", *KIMI[4:]]


@functools.cache
def ranks() -> dict[bytes, int]:
    """The bytes of quire-tiny's tokens, in their order, and a token that is found only as a whole word."""
    vocab = json.loads((EMBEDDED / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [token for token in sorted(vocab, key=lambda token: vocab[token]) if not token.startswith("<|")]
    return {bytes(BYTES[char] for char in token): rank for rank, token in enumerate(["qzqz", *tokens])}


def lines(given: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in given.items())


def tekken(**changes: Any) -> dict[str, Any]:
    """The contents of a tekken.json; two more tokens are listed than are used."""
    vocab = [
        {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": token.decode("utf-8", "replace")}
        for token, rank in ranks().items()
    ]
    config = {
        "pattern": TEKKEN,
        "num_vocab_tokens": len(vocab),
        "default_vocab_size": len(vocab) - 2 + NUM_SPECIAL,
        "default_num_special_tokens": NUM_SPECIAL,
        "version": "v3",
    }
    return {"config": config, "vocab": vocab} | changes


def written(folder: Path, name: str, content: Any, **config: Any) -> Path:
    (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def compare(ours: Tokenizer, pattern: str, first_id: int = 0, count: int | None = None, composes: bool = False) -> None:
    """Compare ids, texts and streams with the library's."""
    used = dict(list(ranks().items())[:count])
    theirs = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=used, special_tokens={})
    for text in (each.replace("<|", "<") for each in [*many_texts(), "qzqz aqzqz"]):  # without special tokens
        given = unicodedata.normalize("NFC", text) if composes else text
        ids = [first_id + i for i in theirs.encode_ordinary(given)]
        assert ours.encode(text, add_special_tokens=False) == ids, text
        assert ours.decode(ids) == given
        stream = ours.stream()
        assert "".join(map(stream.push, ids)) + stream.pending() == given
    broken = [first_id + used[byte] for byte in (b"\xe4", b"\xbd", b"A", b"\xff")]
    assert ours.decode(broken) == "\ufffdA\ufffd"


@pytest.mark.parametrize("name", ["cl100k_base", "o200k_base"])
def test_the_patterns_of_openai_are_the_published_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(published, "load_tiktoken_bpe", lambda *_, **__: {})  # which would download them
    encoding = getattr(published, name)()
    ours = Tokenizer.from_path(written(tmp_path, f"{name}.tiktoken", lines(ranks())))
    compare(ours, encoding["pat_str"])
    last = {"cl100k_base": 100_255, "o200k_base": 199_997}[name]
    expected = {token: i - last - 1 + len(ranks()) for token, i in encoding["special_tokens"].items()}
    assert {ours.token_of(i): i for i in ours.special_token_texts} == expected


def test_qwen(tmp_path: Path) -> None:
    ours = Tokenizer.from_path(written(tmp_path, "qwen.tiktoken", lines(ranks())))
    compare(ours, "|".join(QWEN), composes=True)
    assert ours.encode("<|endoftext|><|im_end|><|extra_204|>") == [len(ranks()) + i for i in (0, 2, 207)]


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer.model", "tokenizer.tiktoken"])
def test_kimi(tmp_path: Path, name: str) -> None:
    """Its special tokens are in the config, and leave ids out."""
    first = len(ranks())
    listed = {str(first): {"content": "[BOS]", "special": True}, str(first + 9): {"content": "<|im_end|>"}}
    config = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": listed, "bos_token": "[BOS]"}
    ours = Tokenizer.from_path(written(tmp_path, name, lines(ranks()), **config, add_bos_token=True))
    if name == "tiktoken.model":
        compare(ours, "|".join(KIMI))
    assert ours.encode("<|im_end|>") == [first, first + 9]
    assert ours.decode([first, first + 1, first + 9]) == "<|im_end|>"


def test_tekken(tmp_path: Path) -> None:
    ours = Tokenizer.from_path(written(tmp_path, "tekken.json", tekken()))
    compare(ours, TEKKEN, first_id=NUM_SPECIAL, count=len(ranks()) - 2)
    assert ours.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    assert ours.encode("[INST]a[/INST]") == [1, 3, NUM_SPECIAL + ranks()[b"a"], 4]
    assert (ours.token_of(20), ours.token_of(29)) == ("<SPECIAL_20>", "<SPECIAL_29>")
    assert ours.vocab_size == len(ranks()) - 2 + NUM_SPECIAL
    assert ours.decode([0, 1, 2, 29]) == ""


def test_tekken_with_its_own_special_tokens_is_as_in_transformers(tmp_path: Path) -> None:
    from transformers.integrations.mistral.tokenizer import MistralConverter

    special = [{"rank": i, "token_str": token, "is_control": True} for i, token in enumerate(["<unk>", "<s>", "<x>"])]
    path = written(tmp_path, "tekken.json", tekken(special_tokens=special[::-1]), add_bos_token=False)
    ours, theirs = Tokenizer.from_path(path), MistralConverter(str(path / "tekken.json")).converted()
    for text in [*many_texts(100), "a<x>b<SPECIAL_7> <s>"]:
        assert ours.encode(text) == theirs.encode(text).ids
    assert ours.vocabulary == theirs.get_vocab()
    assert ours.special_tokens == {"bos_token": "<s>", "unk_token": "<unk>"}


def without(token: bytes) -> dict[bytes, int]:
    return {each: rank for each, rank in ranks().items() if each != token}


def entry(**values: Any) -> dict[str, Any]:
    return tekken(vocab=[tekken()["vocab"][0] | values, *tekken()["vocab"][1:]])


def sizes(num_special: Any, size: Any) -> dict[str, Any]:
    config = {"default_num_special_tokens": num_special, "default_vocab_size": size}
    return tekken(config=tekken()["config"] | config)


def special(*entries: Any) -> dict[str, Any]:
    return tekken(special_tokens=list(entries))


TWICE = [{"rank": 0, "token_str": "<s>"}, {"rank": 1, "token_str": "<s>"}]
REFUSED: dict[str, tuple[str, Callable[[], Any], str]] = {
    "no family": ("my.tiktoken", lambda: lines(ranks()), "known for files named, .* cl100k_base, .*, not for 'None'"),
    "no rank": ("qwen.tiktoken", lambda: b"YQ==\n", r"line 1 is b'YQ==', but must be a token in base64 and its rank"),
    "a negative rank": ("qwen.tiktoken", lambda: b"YQ== -1\n", "line 1 is"),
    "a huge rank": ("qwen.tiktoken", lambda: b"YQ== " + b"9" * 5000, "line 1 is"),
    "no base64": ("qwen.tiktoken", lambda: b"Y!== 1\n", r"b'Y!==' is not a token in base64"),
    "no token": ("qwen.tiktoken", lambda: lines(ranks() | {b"": 9000}), "of rank 9000 is empty, or appears twice"),
    "a token twice": ("qwen.tiktoken", lambda: lines(ranks()) + b"YQ== 9000", "'a' of rank 9000 is empty, or appears"),
    "a rank twice": ("qwen.tiktoken", lambda: lines(ranks() | {b"zqzq": 5}), "two tokens of the same rank"),
    "a rank beyond ids": ("qwen.tiktoken", lambda: lines(ranks() | {b"zqzq": 2**33}), "cannot be read"),
    "a byte missing": ("qwen.tiktoken", lambda: lines(without(b"A")), "no token for the byte 65: it must have all 256"),
    "a long token": (
        "qwen.tiktoken",
        lambda: lines(ranks() | {b"z" * 1025: 9000}),
        "has 1025 characters: at most 1024",
    ),
    "no vocabulary": ("tekken.json", lambda: tekken(vocab=None), "the list 'vocab' must have the others"),
    "too few tokens": ("tekken.json", lambda: sizes(30, 10**6), "promises 30 special tokens and 999970 others"),
    "no token left": ("tekken.json", lambda: sizes(30, 30), "promises 30 special tokens and 0 others"),
    "endless special tokens": ("tekken.json", lambda: sizes(2**30, 2**30 + 300), "at most 65536 special ones"),
    "no config": ("tekken.json", lambda: tekken(config=None), "config has no 'default_num_special_tokens'"),
    "no pattern": ("tekken.json", lambda: sizes(30, 300) | {"config": {}}, "config has no"),
    "a wrong rank": (
        "tekken.json",
        lambda: entry(rank=7),
        "entry 0 of 'vocab' must have 'token_bytes' and the 'rank' 0",
    ),
    "bytes as numbers": ("tekken.json", lambda: entry(token_bytes=[1]), "entry 0 of 'vocab' must have 'token_bytes'"),
    "bytes that are not ASCII": ("tekken.json", lambda: entry(token_bytes="é"), "is not a token in base64"),
    "a special rank twice": ("tekken.json", lambda: special(TWICE[0], TWICE[0]), "a 'rank' of their own below 30"),
    "a special token twice": ("tekken.json", lambda: special(*TWICE), "a token appears twice in 'special_tokens'"),
    "a special rank too high": (
        "tekken.json",
        lambda: special({"rank": 30, "token_str": "x"}),
        "of their own below 30",
    ),
    "special tokens of a kind": ("tekken.json", lambda: tekken(special_tokens={"a": 1}), "must be a list of objects"),
    "a pattern that is none": (
        "tekken.json",
        lambda: tekken(config=tekken()["config"] | {"pattern": "("}),
        "cannot be read",
    ),
    "a JSON list": ("tekken.json", lambda: [], "holds a JSON list"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_malformed_files_are_refused(tmp_path: Path, case: str) -> None:
    name, make, message = REFUSED[case]
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_path(written(tmp_path, name, make()))


@pytest.mark.parametrize("name", ["qwen.tiktoken", "tekken.json"])
def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, name: str) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(TokenizerError, match=r"1,073,741,824 bytes: at most 67,108,864 are allowed"):
        Tokenizer.from_path(tmp_path)


def test_an_added_token_may_not_have_the_id_of_a_rank(tmp_path: Path) -> None:
    listed = {"5": {"content": "<x>"}}
    with pytest.raises(TokenizerError, match="'<x>' should have id 5"):
        Tokenizer.from_path(written(tmp_path, "qwen.tiktoken", lines(ranks()), added_tokens_decoder=listed))
