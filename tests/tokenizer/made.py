"""Small tokenizers of every kind, made on the spot."""

import json
from pathlib import Path

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers

from quire.text.tokenizer.files import TokenizerFiles
from quire.text.tokenizer.tokenizer import Tokenizer

EMBEDDED = Path(__file__).parents[2] / "src/quire/models/embedded/quire-tiny"
_SPECIAL = ["<unk>", "<s>", "</s>"]
_PIECES = ["▁", "▁▁", "▁Hello", "▁a", "a", "b", "c", "Hello", "é", "▁é", ".", "x▁y"]


def byte_fallback(strip: bool = True) -> Tokenizer:
    """As Llama 2 (with Strip) and Gemma (without)."""
    tokens = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES]
    backend = Backend(models.BPE(_ids(tokens), [], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    return wrap(backend)


def metaspace(prepend_scheme: str = "always") -> Tokenizer:
    """As T5 and other Unigram models."""
    backend = Backend(models.Unigram([(token, 0.0) for token in [*_SPECIAL, *_PIECES]], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    return wrap(backend)


def word_piece() -> Tokenizer:
    """As BERT: no table of bytes can hold its decoder."""
    tokens = [*_SPECIAL, "un", "##believ", "##able", "cat", "s", "##s", ".", "'", "é"]
    backend = Backend(models.WordPiece(_ids(tokens), unk_token="<unk>"))
    backend.decoder = decoders.WordPiece()
    return wrap(backend)


def end_of_word() -> Tokenizer:
    """As GPT-1: the last token of a text decodes without the space the others end with."""
    tokens = [*_SPECIAL, "a</w>", "b</w>", "a", "b", "lo", "w</w>"]
    backend = Backend(models.BPE(_ids(tokens), [], end_of_word_suffix="</w>", unk_token="<unk>"))
    backend.decoder = decoders.BPEDecoder("</w>")
    return wrap(backend)


def wrap(backend: Backend) -> Tokenizer:
    """With the special tokens marked as such."""
    backend.add_special_tokens(_SPECIAL)
    return Tokenizer(TokenizerFiles(backend, {"bos_token": "<s>", "eos_token": "</s>"}, {}), "made for a test")


def write_byte_level_bpe(folder: Path, **config: object) -> None:
    """vocab.json and merges.txt as OPT has them, of the embedded tokenizer's own vocabulary."""
    model = json.loads((EMBEDDED / "tokenizer.json").read_text())["model"]
    vocab = dict(model["vocab"])
    for token in ("</s>", "<pad>"):
        vocab.setdefault(token, len(vocab))
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]]
    (folder / "vocab.json").write_text(json.dumps(vocab))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]))
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>") | {"pad_token": "<pad>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(special))
    settings = {"add_prefix_space": False, "tokenizer_class": "GPT2Tokenizer", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _ids(tokens: list[str]) -> dict[str, int]:
    return dict(zip(tokens, range(len(tokens)), strict=True))
