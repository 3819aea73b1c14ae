"""Makes a tokenizer of a GGUF header: its tokens, scores and merges, special tokens and chat templates.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A header names the pre-tokenizer (how a text is cut
before merges are applied) and does not describe it; PRE_TOKENIZERS has those that Quire's architectures use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from quire.common.errors import TokenizerError
from quire.config.checkpoint.gguf.files import read_gguf
from quire.config.checkpoint.gguf.header import Array
from quire.config.hf_config import HFConfig
from quire.text.tokenizer.files import MAX_TEMPLATE_BYTES, TokenizerFiles, frame_with_special_tokens, library_errors
from quire.text.tokenizer.formats.byte_level import byte_level_bpe
from quire.text.tokenizer.formats.sentencepiece import BYTE, NORMAL, UNUSED, Pieces, added_tokens, backend_of
from quire.text.tokenizer.pre_tokenizers import PRE_TOKENIZERS

_KEY = "tokenizer.ggml"
_TEMPLATE = "tokenizer.chat_template"
_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "seperator": "sep", "padding": "pad", "mask": "mask"}
"""The header's name of a special token -> ours. (The format spells `seperator` so.)"""


def read_gguf_tokenizer(path: Path) -> TokenizerFiles:
    """Read the tokenizer of a GGUF file. Raises TokenizerError if it has none, or one that Quire cannot rebuild."""
    header = read_gguf(path).metadata
    kind = header.get(f"{_KEY}.model")
    if kind not in _MODELS:
        raise TokenizerError(
            f"{header.source}: {_KEY}.model is {str(kind)[:80]!r}; supported are gpt2 (BPE) and llama (SentencePiece). "
            "Give a folder or hub id with a tokenizer.json as the argument `tokenizer`"
        )
    vocabulary = _Vocabulary.read(header)
    with library_errors(f"the tokenizer of {header.source} cannot be built"):
        backend, adds_bos = _MODELS[kind](header, vocabulary)
        special_tokens = _special_tokens(header, vocabulary)
        backend.add_tokens(added_tokens(vocabulary.tokens, vocabulary.types))
        frame = {
            "add_bos_token": header.flag(f"{_KEY}.add_bos_token", adds_bos),
            "add_eos_token": header.flag(f"{_KEY}.add_eos_token", False),
        }
        frame_with_special_tokens(backend, frame, special_tokens)
        return TokenizerFiles(backend, special_tokens, _chat_templates(header))


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The tokens by id, and the type of each."""

    tokens: Sequence[str]
    types: Sequence[int]

    @classmethod
    def read(cls, header: HFConfig) -> "_Vocabulary":
        tokens = _array(header, "tokens").strings()
        types = [NORMAL] * len(tokens)
        if f"{_KEY}.token_type" in header:
            types = _array(header, "token_type").numbers()
        if len(types) != len(tokens):
            raise TokenizerError(f"{header.source}: {len(tokens)} tokens, but {len(types)} types of tokens")
        if len(set(tokens)) != len(tokens):
            raise TokenizerError(f"{header.source}: a token appears twice in {_KEY}.tokens")
        return cls(tokens, types)

    def ids(self) -> dict[str, int]:
        """The ids of all tokens, without the fillers that converters put where a model has no token."""
        pairs = zip(self.tokens, self.types, strict=True)
        return {token: i for i, (token, kind) in enumerate(pairs) if kind != UNUSED and token}


def _bpe(header: HFConfig, vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """Byte-level BPE (Radford et al. 2019)."""
    name = header.text(f"{_KEY}.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"{header.source}: {_KEY}.pre is {name[:80]!r}, a pre-tokenizer that Quire does not know (known: "
            f"{', '.join(PRE_TOKENIZERS)}). Give a folder or hub id with a tokenizer.json as the argument `tokenizer`"
        )
    pre, ids = PRE_TOKENIZERS[name], vocabulary.ids()
    merges = []
    for i, merge in enumerate(_array(header, "merges").strings()):
        left, _, right = merge.partition(" ")
        if left not in ids or right not in ids or left + right not in ids:
            raise TokenizerError(f"{header.source}: merge {i}, {merge[:80]!r}, is not of two tokens that make a third")
        merges.append((left, right))
    return byte_level_bpe(ids, merges, pre), pre.adds_bos


def _sentencepiece(header: HFConfig, vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece's BPE (Kudo and Richardson 2018)."""
    scores = _array(header, "scores").numbers()
    if len(scores) != len(vocabulary.tokens) or not all(score == score for score in scores):
        raise TokenizerError(f"{header.source}: {len(vocabulary.tokens)} tokens need a score each, and none may be NaN")
    (unknown,) = header.token_ids(f"{_KEY}.unknown_token_id") or (0,)
    unknown_token = _token(header, vocabulary, unknown, "unknown")
    pieces = Pieces(vocabulary.tokens, scores, vocabulary.types, unknown_token, BYTE in vocabulary.types)
    adds_space = header.flag(f"{_KEY}.add_space_prefix", True)
    return backend_of(pieces.bpe(), "always" if adds_space else "never"), True


_MODELS = {"gpt2": _bpe, "llama": _sentencepiece}


def _array(header: HFConfig, name: str) -> Array:
    value = header.get(f"{_KEY}.{name}")
    if not isinstance(value, Array):
        raise TokenizerError(f"{header.source} has no array {_KEY}.{name}: its tokenizer is incomplete")
    return value


def _token(header: HFConfig, vocabulary: _Vocabulary, token_id: int, role: str) -> str:
    if not 0 <= token_id < len(vocabulary.tokens):
        raise TokenizerError(
            f"{header.source}: the {role} token has the id {token_id}, but there are {len(vocabulary.tokens)} tokens"
        )
    return vocabulary.tokens[token_id]


def _special_tokens(header: HFConfig, vocabulary: _Vocabulary) -> dict[str, str]:
    """Maps roles to tokens."""
    found = {}
    for theirs, ours in _ROLES.items():
        for token_id in header.token_ids(f"{_KEY}.{theirs}_token_id") or ():
            found[f"{ours}_token"] = _token(header, vocabulary, token_id, theirs)
    return found


def _chat_templates(header: HFConfig) -> Mapping[str, str]:
    """Maps names to templates: tokenizer.chat_template, and those with a name behind it."""
    found: dict[str, Any] = {}
    for key in header:
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}."):
            template = header.text(key)
            if len(template.encode()) > MAX_TEMPLATE_BYTES:
                raise TokenizerError(f"{header.source}: {key} has more than {MAX_TEMPLATE_BYTES:,} bytes")
            found[key.removeprefix(_TEMPLATE).removeprefix(".") or "default"] = template
    return found
