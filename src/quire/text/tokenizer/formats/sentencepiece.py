"""SentencePiece vocabularies (Kudo and Richardson 2018): the file `tokenizer.model`, and those in GGUF headers.

The file is a message of protocol buffers:
https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto
"""

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from quire.common.errors import TokenizerError
from quire.config.hf_config import check_file
from quire.text.tokenizer.formats.backend import MAX_FILE_BYTES, Built, merges_by_rank
from quire.text.tokenizer.formats.protobuf import Message

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of tokens."""
_SPACE = "▁"
"""SentencePiece's letter for a space."""
_UNIGRAM, _BPE = 1, 2
_BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]
_ROLES = {"bos": (41, 1), "eos": (42, 2), "pad": (43, -1)}
"""For each role the field of TrainerSpec with the token's id, and the id if there is no such field."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The vocabulary: its tokens by id, and the score and the type of each."""

    tokens: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    unknown: str
    """The token of characters that no token has."""
    byte_fallback: bool
    """Whether such characters are spelt with tokens of their UTF-8 bytes instead."""

    def bpe(self) -> models.BPE:
        """SentencePiece's BPE: of two neighbours, those join whose token has the best score.

        Unused tokens are left out: the original uses them as steps to others, and takes them apart again.
        """
        ids = {token: i for i, token in enumerate(self.tokens) if self.types[i] != UNUSED and token}
        joinable = {token: -self.scores[i] for token, i in ids.items() if self.types[i] in (NORMAL, USER_DEFINED)}
        merges = merges_by_rank(ids, joinable)
        return models.BPE(ids, merges, unk_token=self.unknown, fuse_unk=True, byte_fallback=self.byte_fallback)

    def unigram(self) -> models.Unigram:
        """The segmentation with the best sum of scores (Kudo 2018)."""
        spelt = (f"<unused:{i}>" if kind == UNUSED else self.tokens[i] for i, kind in enumerate(self.types))
        scored = list(zip(spelt, self.scores, strict=True))
        return models.Unigram(scored, self.tokens.index(self.unknown), self.byte_fallback)


def added_tokens(tokens: Sequence[str], types: Sequence[int]) -> list[AddedToken]:
    """Return the tokens that are found in a text before it is cut. Control tokens are special."""
    return [
        # The letter for a space is in no text: only the normalizer puts it there.
        AddedToken(token, normalized=kind == USER_DEFINED and _SPACE in token, special=kind == CONTROL)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (CONTROL, USER_DEFINED)
    ]


def backend_of(
    model: models.Model, prefix: str, charsmap: bytes = b"", removes_extra_spaces: bool = False
) -> tokenizers.Tokenizer:
    """Return the tokenizer of a model. `prefix` says where a space is put before a text: `never`, `first` (where the
    text begins) or `always` (behind each added token, too). `charsmap` are the compiled rules of a normalization."""
    backend = tokenizers.Tokenizer(model)
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(charsmap)] if charsmap else []
    if removes_extra_spaces:
        outer = rf"[ {_SPACE}]+\z|\A +" if prefix == "never" else rf"[ {_SPACE}]+\z"
        steps += [normalizers.Replace(Regex(outer), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    else:
        steps.append(normalizers.Replace(" ", _SPACE))
    backend.normalizer = normalizers.Sequence(steps)
    # Metaspace puts its letter before a text that does not begin with it. If extra spaces are kept, there is no plain
    # space left, so that the first of these always does. The second turns spaces into the letter of all others.
    letters = [
        pre_tokenizers.Metaspace(" ", prefix, split=False),
        pre_tokenizers.Metaspace(_SPACE, "never", split=False),
    ]
    # Unigram would find the token of a byte, such as <0x41>, where a text spells its name.
    names = pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "merged_with_previous")
    backend.pre_tokenizer = pre_tokenizers.Sequence([*letters, names] if isinstance(model, models.Unigram) else letters)
    strip = [] if prefix == "never" else [decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def is_sentencepiece(path: Path) -> bool:
    """Whether this is a message of protocol buffers that begins with a token, and no text file of tiktoken."""
    with path.open("rb") as file:
        return file.read(1) in (b"\n", b"")


def read_sentencepiece(path: Path, config: Mapping[str, Any], added: Mapping[int, str]) -> Built:
    """Read `tokenizer.model`. `config` is tokenizer_config.json; `added` maps ids to the tokens that it names.

    Raises TokenizerError for a malformed file, and for what the tokenizers library cannot do: models other than Unigram
    and BPE, spaces that are no letters, or that are put behind words.
    """
    check_file(path, MAX_FILE_BYTES)
    whole = Message(path.read_bytes(), str(path))
    trainer = Message(b"".join(whole.all_octets(2)), f"{path}: trainer_spec")
    normalizer = Message(b"".join(whole.all_octets(3)), f"{path}: normalizer_spec")
    kind = trainer.integer(3, _UNIGRAM)
    if kind not in (_UNIGRAM, _BPE) or trainer.flag(24, False) or not normalizer.flag(5, True):
        raise TokenizerError(
            f"{path}: model_type {kind}, treat_whitespace_as_suffix {trainer.flag(24, False)} and escape_whitespaces "
            f"{normalizer.flag(5, True)} are not supported: allowed are 1 (Unigram) or 2 (BPE), False and True. Give a "
            "folder or hub id with a tokenizer.json as the argument `tokenizer`"
        )
    pieces = _pieces(path, whole.all_octets(1), trainer.flag(35, False), added)
    adds_space = config.get("add_prefix_space")
    if not isinstance(adds_space, bool):
        adds_space = normalizer.flag(3, True)
    backend = backend_of(
        pieces.bpe() if kind == _BPE else pieces.unigram(),
        ("always" if config.get("legacy") else "first") if adds_space else "never",
        normalizer.octets(2),
        normalizer.flag(4, True),
    )
    backend.add_tokens(added_tokens(pieces.tokens, pieces.types))
    roles = {"unk_token": pieces.unknown}
    for role, (number, default) in _ROLES.items():
        token_id = trainer.integer(number, default)
        if token_id >= len(pieces.tokens):
            raise TokenizerError(f"{path}: {role}_id is {token_id}, but there are {len(pieces.tokens)} tokens")
        if token_id >= 0 and pieces.types[token_id] != NORMAL:
            roles[f"{role}_token"] = pieces.tokens[token_id]
    return Built(backend, roles, adds_bos=True)


def _pieces(path: Path, entries: Sequence[bytes], byte_fallback: bool, added: Mapping[int, str]) -> Pieces:
    """Return the checked vocabulary, in which the tokens of `added` replace those that only reserve an id."""
    tokens, scores, types = list[str](), list[float](), list[int]()
    for i, entry in enumerate(entries):
        piece = Message(entry, f"{path}: token {i}")
        score = piece.octets(2, bytes(4))
        tokens.append(piece.text(1))
        scores.append(struct.unpack("<f", score)[0] if len(score) == 4 else math.nan)
        types.append(piece.integer(3, NORMAL))
        if not tokens[i] or not math.isfinite(scores[i]) or not NORMAL <= types[i] <= BYTE:
            raise TokenizerError(
                f"{path}: token {i} is {tokens[i][:40]!r} with score {scores[i]} and type {types[i]}; it must have a "
                "text, a finite score and a type from 1 to 6"
            )
    known = set(tokens)
    if len(known) != len(tokens):
        raise TokenizerError(f"{path}: {len(tokens) - len(known)} tokens appear twice")
    bytes_ = [token for token, kind in zip(tokens, types, strict=True) if kind == BYTE]
    if types.count(UNKNOWN) != 1 or sorted(bytes_) != (sorted(_BYTE_TOKENS) if byte_fallback else []):
        raise TokenizerError(
            f"{path} has {types.count(UNKNOWN)} unknown tokens and {len(bytes_)} tokens of bytes: it must have one, "
            f"and {'<0x00> to <0xFF>, for byte_fallback' if byte_fallback else 'none, without byte_fallback'}"
        )
    for i, token in added.items():
        if i < len(tokens) and token not in known:
            tokens[i], types[i] = token, USER_DEFINED
    return Pieces(tokens, scores, types, tokens[types.index(UNKNOWN)], byte_fallback)
