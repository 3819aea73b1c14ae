"""tokenizer.model: equal to the sentencepiece library on models that it trains here; malformed files are refused."""

import functools
import io
import json
import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as pb

from quire.common.errors import TokenizerError
from quire.text.tokenizer.tokenizer import Tokenizer

from .texts import many_texts, texts

LICENSE = Path(__file__).parents[2] / "LICENSE"  # a text that does not change
LLAMA: dict[str, Any] = {
    "model_type": "bpe", "vocab_size": 700, "byte_fallback": True, "normalization_rule_name": "identity",
    "remove_extra_whitespaces": False, "character_coverage": 0.98, "allow_whitespace_only_pieces": True,
}  # fmt: skip
GEMMA = {"add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3}
KINDS: dict[str, dict[str, Any]] = {
    "as Llama": LLAMA,
    "as Gemma": LLAMA | GEMMA | {"user_defined_symbols": ["<turn>", "\n\n", "▁▁", "▁▁▁"]},
    "BPE without bytes": {"model_type": "bpe", "vocab_size": 450, "normalization_rule_name": "identity"},
    "BPE without a first space": LLAMA | {"add_dummy_prefix": False, "remove_extra_whitespaces": True},
    "Unigram": {"model_type": "unigram", "vocab_size": 450, "normalization_rule_name": "nmt_nfkc"},
    "Unigram with bytes": LLAMA | {"model_type": "unigram", "vocab_size": 650},
}


@functools.cache
def trained(kind: str) -> bytes:
    """A model of a few hundred tokens."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*texts(), *LICENSE.read_text().splitlines(), *["Hello hello world"] * 9]),
        model_writer=out,
        minloglevel=2,
        **KINDS[kind],
    )
    return out.getvalue()


def folder(path: Path, model: bytes, **config: Any) -> Path:
    (path / "tokenizer.model").write_bytes(model)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def pieces(tokenizer: Tokenizer, text: str) -> list[str | None]:
    return [tokenizer.token_of(i) for i in tokenizer.encode(text)]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_sentencepiece(tmp_path: Path, kind: str) -> None:
    theirs = sentencepiece.SentencePieceProcessor(model_proto=trained(kind))
    ours = Tokenizer.from_path(folder(tmp_path, trained(kind)))
    normalizes = KINDS[kind]["normalization_rule_name"] != "identity"
    # The tokenizers library applies compiled rules to a letter with all its marks, the original to the longest match.
    compared = [text for text in many_texts() if not (normalizes and any(0x300 <= ord(char) < 0x370 for char in text))]
    num_ties = 0
    for text in [*compared, "a<0x41>b", "<turn>a\n\n\nb<turn>  c", "▁a ▁", " ▁a", "▁ a", "a▁▁ ▁b"]:
        ids = theirs.encode(text)
        found = ours.encode(text, add_special_tokens=False)
        if KINDS[kind]["model_type"] == "unigram" and found != ids:  # two ways may have the same sum of scores
            assert sorted(found) == sorted(ids), text
            num_ties += 1
        else:
            assert found == ids, text
        if "▁" not in text:
            assert ours.decode(ids) == theirs.decode(ids).replace(" ⁇ ", ""), text
    assert num_ties < 20
    assert [ours.token_of(i) for i in range(ours.vocab_size)] == [theirs.id_to_piece(i) for i in range(len(theirs))]


@pytest.mark.parametrize("kind", ["as Llama", "as Gemma", "Unigram with bytes"])
def test_texts_come_back_whole_and_in_parts(tmp_path: Path, kind: str) -> None:
    tokenizer = Tokenizer.from_path(folder(tmp_path, trained(kind)))
    for text in many_texts(200):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        stream = tokenizer.stream()
        assert "".join(map(stream.push, ids)) + stream.pending() == text
    ids = [tokenizer.vocabulary[token] for token in ("<0xE4>", "<0xBD>", "<0x41>", "<0xFF>")]
    assert tokenizer.decode(ids) == "\ufffdA\ufffd"


@pytest.mark.parametrize(
    "config",
    [
        {"legacy": False},
        {"legacy": True},
        {"add_prefix_space": False, "add_bos_token": False},
        {"add_eos_token": True, "additional_special_tokens": ["▁world"]},
        {"added_tokens_decoder": {"700": {"content": "<tool>", "special": True}, "701": {"content": "[x]"}}},
    ],
    ids=str,
)
def test_the_config_is_read_as_transformers_does(tmp_path: Path, config: dict[str, Any]) -> None:
    import transformers

    values = {"add_bos_token": True, "tokenizer_class": "LlamaTokenizer", **config}
    theirs = transformers.LlamaTokenizer.from_pretrained(folder(tmp_path, trained("as Llama"), **values))
    ours = Tokenizer.from_path(tmp_path)
    compared = [text for text in many_texts(100) if not text.startswith(" ")]  # it does not put a space before these
    for text in [*compared, "a<s>b</s>c", "hello<tool>world [x]y<tool>", "<unk>"]:
        for special in (True, False):
            assert ours.encode(text, special) == theirs.encode(text, add_special_tokens=special), text
    assert (ours.bos_token_id, ours.eos_token_id, ours.vocab_size) == (1, 2, len(theirs))


def test_a_space_is_put_behind_special_tokens_only_in_legacy_mode(tmp_path: Path) -> None:
    text = "world</s>world"
    plain = Tokenizer.from_path(folder(tmp_path, trained("as Llama")))
    legacy = Tokenizer.from_path(folder(tmp_path, trained("as Llama"), legacy=True))
    assert pieces(plain, text) == ["<s>", "▁world", "</s>", "w", "or", "ld"]
    assert pieces(legacy, text) == ["<s>", "▁world", "</s>", "▁world"]


def test_special_tokens_are_those_of_the_model_unless_a_file_says_otherwise(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_path(folder(tmp_path, trained("as Gemma"), eos_token="<turn>"))
    expected = {"unk_token": "<unk>", "bos_token": "<s>", "pad_token": "<pad>", "eos_token": "<turn>"}
    assert tokenizer.special_tokens == expected
    assert tokenizer.encode("") == [2]
    (tmp_path / "special_tokens_map.json").write_text('{"pad_token": {"content": "</s>"}}')
    assert Tokenizer.from_path(tmp_path).pad_token_id == 1
    (tmp_path / "added_tokens.json").write_text('{"<new>": 700}')
    assert Tokenizer.from_path(tmp_path).encode("<new>", add_special_tokens=False) == [700]


def test_a_reserved_token_gets_the_name_that_the_config_gives_it(tmp_path: Path) -> None:
    config = {"added_tokens_decoder": {"4": {"content": "<im_end>", "special": True}}}
    tokenizer = Tokenizer.from_path(folder(tmp_path, trained("as Gemma"), **config))
    assert tokenizer.encode("<im_end>", add_special_tokens=False) == [4]
    assert tokenizer.decode([4]) == ""
    assert "<turn>" not in tokenizer.vocabulary


@pytest.mark.parametrize("swapped", [{"1": "</s>", "2": "<s>"}, {"0": "</s>"}])
def test_tokens_that_exchange_their_ids_are_refused(tmp_path: Path, swapped: dict[str, str]) -> None:
    listed = {i: {"content": token} for i, token in swapped.items()}
    with pytest.raises(TokenizerError, match="should have id"):
        Tokenizer.from_path(folder(tmp_path, trained("as Llama"), added_tokens_decoder=listed))


def changed(change: Callable[[Any], object], kind: str = "as Llama") -> bytes:
    """A trained model, changed with the original's own classes."""
    model = pb.ModelProto.FromString(trained(kind))
    change(model)
    return model.SerializeToString()


def with_piece(**values: Any) -> bytes:
    return changed(lambda model: model.pieces.add(**values))


def test_unused_tokens_are_not_found_in_texts(tmp_path: Path) -> None:
    for kind in ("as Llama", "Unigram"):
        model = pb.ModelProto.FromString(trained(kind))
        unused = next(piece for piece in model.pieces if piece.piece == "▁world")
        unused.type = 5
        theirs = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        ours = Tokenizer.from_path(folder(tmp_path, model.SerializeToString(), add_bos_token=False))
        assert ours.encode("Hello world") == theirs.encode("Hello world")


def of_fields(change: Callable[[Any], object], part: str) -> bytes:
    return changed(lambda model: change(getattr(model, part)))


GIB = b"\x80\x80\x80\x80\x04"
REFUSED: dict[str, tuple[Callable[[], bytes], str]] = {
    "empty": (lambda: b"", "0 unknown tokens"),
    "truncated": (lambda: trained("as Llama")[:-3], r"tokenizer\.model: field \d+ has \d+ bytes, but only"),
    "a length of 1 GiB": (lambda: b"\n" + GIB + b"abc", "field 1 has 1073741824 bytes, but only 3 are left"),
    "a token of 1 GiB": (lambda: b"\n\x07\n" + GIB + b"a", "token 0: field 1 has 1073741824 bytes, but only 1 are"),
    "an endless number": (lambda: b"\n" + b"\xff" * 30, "the number at byte 1 is truncated or too large"),
    "a number of 65 bits": (lambda: b"\n" + b"\xff" * 9 + b"\x02", "the number at byte 1 is truncated or too large"),
    "a group": (lambda: b"\n\0\x0b", "field 1 at byte 3 has the unknown kind 3"),
    "tokens that are numbers": (lambda: b"\n\0\x08\x05", "field 1 must be bytes"),
    "a type that is text": (lambda: b"\n\x06\n\x01a\x1a\x01b", "token 0: field 3 must be an integer"),
    "no UTF-8": (lambda: b"\n\x03\n\x01\xff", "token 0: field 1 is not valid UTF-8"),
    "a score of two bytes": (lambda: b"\n\x07\n\x01a\x12\x02bb", "token 0 is 'a' with score nan"),
    "a token without text": (lambda: with_piece(score=1.0), "token 700 is '' with score 1.0"),
    "a score that is no number": (lambda: with_piece(piece="zz", score=math.nan), "with score nan"),
    "an infinite score": (lambda: with_piece(piece="zz", score=-math.inf), "with score -inf"),
    "a token twice": (lambda: with_piece(piece="▁world"), "1 tokens appear twice"),
    "two unknown tokens": (lambda: with_piece(piece="zz", type=2), "2 unknown tokens"),
    "a byte too many": (lambda: with_piece(piece="<0x4>", type=6), "257 tokens of bytes"),
    "a byte too few": (lambda: changed(lambda model: model.pieces.__delitem__(9)), "255 tokens of bytes"),
    "bytes for nothing": (
        lambda: of_fields(lambda trainer: setattr(trainer, "byte_fallback", False), "trainer_spec"),
        "256 tokens of bytes: it must have one, and none, without byte_fallback",
    ),
    "a token of 2,000 letters": (lambda: with_piece(piece="z" * 2000), "has 2000 characters: at most 1024"),
    "an id out of range": (
        lambda: of_fields(lambda spec: setattr(spec, "eos_id", 700), "trainer_spec"),
        "eos_id is 700, but there are 700 tokens",
    ),
    "words": (lambda: of_fields(lambda spec: setattr(spec, "model_type", 3), "trainer_spec"), "model_type 3"),
    "spaces behind words": (
        lambda: of_fields(lambda spec: setattr(spec, "treat_whitespace_as_suffix", True), "trainer_spec"),
        "treat_whitespace_as_suffix True",
    ),
    "spaces that stay": (
        lambda: of_fields(lambda spec: setattr(spec, "escape_whitespaces", False), "normalizer_spec"),
        "escape_whitespaces False",
    ),
    "rules that are none": (
        lambda: of_fields(lambda spec: setattr(spec, "precompiled_charsmap", b"\x04\0\0\0ab"), "normalizer_spec"),
        "cannot be read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_malformed_models_are_refused(tmp_path: Path, case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(TokenizerError, match=message):
        Tokenizer.from_path(folder(tmp_path, make()))


@pytest.mark.parametrize("data", [b"\n" + GIB + b"abc", b"\n\x07\n" + GIB + b"a"])
def test_a_promised_length_takes_no_memory(tmp_path: Path, data: bytes) -> None:
    folder(tmp_path, data)
    tracemalloc.start()
    with pytest.raises(TokenizerError, match="1073741824 bytes"):
        Tokenizer.from_path(tmp_path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_the_number_of_tokens_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.text.tokenizer.formats.protobuf._MAX_FIELDS", 699)
    with pytest.raises(TokenizerError, match=r"tokenizer\.model: more than 699 fields"):
        Tokenizer.from_path(folder(tmp_path, trained("as Llama")))


def test_every_truncated_model_is_refused_or_whole(tmp_path: Path) -> None:
    """A message ends wherever a field does; what is left then lacks the bytes, or the flag that they are for."""
    model = trained("as Llama")
    for length in range(1, len(model), 97):
        (tmp_path / "tokenizer.model").write_bytes(model[:length])
        with pytest.raises(TokenizerError):
            Tokenizer.from_path(tmp_path)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.model").open("wb") as file:
        file.write(b"\n")
        file.truncate(2**30)
    with pytest.raises(TokenizerError, match=r"1,073,741,824 bytes: at most 67,108,864 are allowed"):
        Tokenizer.from_path(tmp_path)
