"""Byte-level BPE (Radford et al. 2019): its alphabet, and how a text is cut into words before merges are applied."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""The pattern of Llama 3 and Qwen 2, which differ in how many digits stay together."""
CL100K = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+\z|\s*[\r\n]|\s+(?!\S)|\s"
)
"""GPT-4's pattern."""
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[%s]*[%s]+%s|[^\r\n\p{L}\p{N}]?[%s]+[%s]*%s|"
    r"%s| ?[^\s\p{L}\p{N}]+[\r\n%s]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""A pattern where a word ends before a capital letter."""
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def cased(contraction: str, digits: str, slash: str, but: str = "") -> str:
    """The pattern of words whose letters are not of the class `but`, with a contraction or none at the end."""
    upper, lower = _UPPER + but, _LOWER + but
    return _CASED % (upper, lower, contraction, upper, lower, contraction, digits, slash)


TEKKEN = cased("", r"\p{N}", "/")
O200K = cased(f"{CONTRACTION}?", r"\p{N}{1,3}", "/")
"""GPT-4o's pattern."""
KIMI = r"\p{Han}+|" + cased(f"{CONTRACTION}?", r"\p{N}{1,3}", "", r"&&[^\p{Han}]")


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a text is cut into words, and what else a tokenizer of that name does."""

    patterns: tuple[str, ...]
    """Regular expressions, each applied to the pieces that the one before left: matches, and what is between them. If
    there are none, a text is cut with GPT-2's."""
    whole_words: bool = False
    """Whether a word that is a token is not built by merges."""
    adds_bos: bool = False
    """Whether a text begins with the BOS token, if the files do not say."""
    composes: bool = False
    """Whether the text is normalized to Unicode's form NFC."""


def byte_level_bpe(
    ids: Mapping[str, int], merges: Sequence[tuple[str, str]], pre: PreTokenizer, add_prefix_space: bool = False
) -> tokenizers.Tokenizer:
    """Return the tokenizer of a vocabulary whose tokens are spelt with the characters of BYTES. `add_prefix_space` puts
    a space before each text, if there are no patterns."""
    backend = tokenizers.Tokenizer(models.BPE(dict(ids), list(merges), ignore_merges=pre.whole_words))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space and not splits, use_regex=not splits)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    if pre.composes:
        backend.normalizer = normalizers.NFC()
    return backend


def _alphabet() -> dict[str, int]:
    """Return GPT-2's printable character for each byte: itself, or one from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTES: Mapping[str, int] = _alphabet()
"""The byte that each character of the alphabet stands for."""
_SPELLING = {byte: ord(char) for char, byte in BYTES.items()}


def spelt(token: bytes) -> str:
    """Return the token of these bytes, in the alphabet's characters."""
    return token.decode("latin-1").translate(_SPELLING)
