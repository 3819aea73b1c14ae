"""Makes a tokenizer of a GGUF header: its tokens, scores and merges, special tokens and chat templates.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. A header names the pre-tokenizer (how a text is cut
before merges are applied) and does not describe it; PRE_TOKENIZERS has those that Quire's architectures use.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from quire.common.errors import TokenizerError
from quire.config.checkpoint.gguf.files import read_gguf
from quire.config.checkpoint.gguf.header import Array
from quire.config.hf_config import HFConfig
from quire.text.tokenizer.files import MAX_TEMPLATE_BYTES, TokenizerFiles, frame_with_special_tokens, library_errors

_KEY = "tokenizer.ggml"
_TEMPLATE = "tokenizer.chat_template"
_ROLES = {"bos": "bos", "eos": "eos", "unknown": "unk", "seperator": "sep", "padding": "pad", "mask": "mask"}
"""The header's name of a special token -> ours. (The format spells `seperator` so.)"""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Types of tokens."""
_SPACE = "▁"
"""SentencePiece's letter for a space."""

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""The pattern of Llama 3 and Qwen 2, which differ in how many digits stay together."""
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s|"
    r"%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern of Tekken and GPT-4o, where a word ends before a capital letter."""
_CJK = "[一-龥぀-ゟ゠-ヿ]+"  # noqa: RUF001
_CJK_OF_2023 = "[一-龥ࠀ-一가-퟿]+"
_ASCII_MARKS = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"""


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is cut into words, and what else a tokenizer of that name does."""

    patterns: tuple[str, ...]
    """Regular expressions, each applied to the pieces that the one before left: matches, and what is between them."""
    whole_words: bool = False
    """Whether a word that is a token is not built by merges."""
    adds_bos: bool = False
    """Whether a text begins with the BOS token, if the header does not say."""
    composes: bool = False
    """Whether the text is normalized to Unicode's form NFC."""


_LLAMA3 = PreTokenizer((_WORDS % r"\p{N}{1,3}",), whole_words=True, adds_bos=True)
_QWEN2 = PreTokenizer((_WORDS % r"\p{N}",), composes=True)
PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "mpt": PreTokenizer((_GPT2,)),
    "olmo": PreTokenizer((_GPT2,)),
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    "starcoder": PreTokenizer((r"\p{N}", _GPT2)),
    "refact": PreTokenizer((r"\p{N}", _GPT2)),
    "command-r": PreTokenizer((r"\p{N}", _GPT2)),
    "codeshell": PreTokenizer((r"\p{N}", _GPT2)),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "pixtral": _LLAMA3,
    "smaug-bpe": PreTokenizer((_WORDS % r"\p{N}{1,3}",)),
    "dbrx": PreTokenizer((_WORDS % r"\p{N}{1,3}",)),
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "stablelm2": PreTokenizer((_WORDS % r"\p{N}",)),
    "tekken": PreTokenizer((_CASED % ("", "", r"\p{N}"),), whole_words=True, adds_bos=True),
    "gpt-4o": PreTokenizer((_CASED % (f"{_CONTRACTION}?", f"{_CONTRACTION}?", r"\p{N}{1,3}"),)),
    "llama4": PreTokenizer((_CASED % (f"{_CONTRACTION}?", f"{_CONTRACTION}?", r"\p{N}{1,3}"),)),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_OF_2023, r"\p{N}")),
    "deepseek-v3": PreTokenizer(
        (
            r"\p{N}{1,3}",
            _CJK,
            _ASCII_MARKS + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|"
            r"\s+(?!\S)|\s+",
        )
    ),
}
"""By `tokenizer.ggml.pre`. Patterns: those of the tokenizer.json files that the names stand for."""


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
        backend.add_tokens(
            [
                AddedToken(token, normalized=False, special=kind == _CONTROL)
                for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
                if kind in (_CONTROL, _USER_DEFINED)
            ]
        )
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
        types = [_NORMAL] * len(tokens)
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
        return {token: i for i, (token, kind) in enumerate(pairs) if kind != _UNUSED and token}


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
    backend = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=pre.whole_words))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    if pre.composes:
        backend.normalizer = normalizers.NFC()
    return backend, pre.adds_bos


def _sentencepiece(header: HFConfig, vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """SentencePiece's BPE (Kudo and Richardson 2018): of two neighbours, those join whose token has the best score."""
    ids = vocabulary.ids()
    scores = _array(header, "scores").numbers()
    if len(scores) != len(vocabulary.tokens) or not all(score == score for score in scores):
        raise TokenizerError(f"{header.source}: {len(vocabulary.tokens)} tokens need a score each, and none may be NaN")
    joinable = {token: i for token, i in ids.items() if vocabulary.types[i] in (_NORMAL, _USER_DEFINED, _UNUSED)}
    merges = []
    for token, token_id in joinable.items():
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        found = [pair for pair in splits if pair[0] in joinable and pair[1] in joinable]
        found.sort(key=lambda pair: (joinable[pair[0]], joinable[pair[1]]))
        merges += [(scores[token_id], pair) for pair in found]
    merges.sort(key=lambda scored: -scored[0])
    has_bytes = _BYTE in vocabulary.types
    (unknown,) = header.token_ids(f"{_KEY}.unknown_token_id") or (0,)
    backend = tokenizers.Tokenizer(
        models.BPE(
            ids,
            [pair for _, pair in merges],
            unk_token=_token(header, vocabulary, unknown, "unknown"),
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    adds_space = header.flag(f"{_KEY}.add_space_prefix", True)
    steps = [normalizers.Prepend(_SPACE)] if adds_space else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if adds_space else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend, True


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
