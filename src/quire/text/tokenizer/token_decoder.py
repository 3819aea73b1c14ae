"""Decodes token ids to text, all at once or one token at a time, without decoding a token twice.

With nearly all tokenizers of language models, each token stands for certain bytes, regardless of its neighbours. These
decode exactly, with a table of bytes and an incremental UTF-8 decoder. Other tokenizers (such as WordPiece) decode in
small windows of tokens.
"""

import codecs
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import tokenizers

from quire.text.tokenizer.files import library_errors
from quire.text.tokenizer.formats.byte_level import BYTES

_UTF8 = codecs.getincrementaldecoder("utf-8")
_MAX_UTF8_LEN = 4
_WINDOW_TOKENS = 4
"""Tokens of context that a token's text may depend on, for tokenizers without a byte table."""
_MAX_PENDING_TOKENS = 8
"""Largest number of tokens in one character; a longer run of invalid UTF-8 stays invalid."""


class TextStream(ABC):
    """The text of one sequence, token by token. `push` adds a token; `pending` changes nothing."""

    @abstractmethod
    def push(self, token_id: int) -> str:
        """Append a token and return the text that has become final."""

    @abstractmethod
    def pending(self) -> str:
        """Return the text that would follow if the sequence ended here: U+FFFD for an incomplete character."""

    @abstractmethod
    def fork(self) -> "TextStream":
        """Return an independent copy with the same history."""


@dataclass(frozen=True, slots=True)
class _ByteRule:
    """The bytes of a token, and its bytes as the first token of a text, where a leading space may be dropped."""

    token_bytes: Callable[[str], bytes]
    first_token_bytes: Callable[[str], bytes]


class TokenDecoder:
    """Decodes for one tokenizer. Ids without a token (a model's vocabulary may be padded) give no text."""

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._backend = backend
        self._special_ids = special_ids
        self._rule = _byte_rule(backend)
        self._table: dict[int, bytes] = {}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of `token_ids`."""
        if self._rule is None:
            with library_errors("the tokenizer failed to decode an output"):
                return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))
        stream = self.stream((), skip_special_tokens)
        text = "".join(map(stream.push, token_ids))
        return text + stream.pending()

    def stream(
        self, prompt_token_ids: Sequence[int], skip_special_tokens: bool, spaces_between_special_tokens: bool = True
    ) -> TextStream:
        """Return a stream of the text after a prompt. A byte table never puts spaces between special tokens."""
        if self._rule is None:
            return _WindowStream(self, prompt_token_ids, skip_special_tokens, spaces_between_special_tokens)
        return _ByteStream(self, prompt_token_ids, skip_special_tokens)

    def is_skipped(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Return whether this token is left out of the text."""
        return skip_special_tokens and token_id in self._special_ids

    def special_text(self, token_id: int) -> str | None:
        """Return the text of a special token; None for other tokens."""
        return self._backend.id_to_token(token_id) if token_id in self._special_ids else None

    def is_known(self, token_id: int) -> bool:
        """Return whether there is a token with this id."""
        return self._backend.id_to_token(token_id) is not None

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token; without a byte table, those of the text that it has alone."""
        known = self._table.get(token_id)
        if known is None:
            known = self._table[token_id] = self._apply(token_id, first=False)
        return known

    def first_token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token at the beginning of a text; without a byte table, those of `token_bytes`."""
        return self._apply(token_id, first=True)

    def _apply(self, token_id: int, first: bool) -> bytes:
        if self._rule is None:
            return self.decode([token_id], skip_special_tokens=False).encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        return (self._rule.first_token_bytes if first else self._rule.token_bytes)(token)


class _ByteStream(TextStream):
    """The stream of tokenizers with a byte table: exact, in linear time."""

    def __init__(self, decoder: TokenDecoder, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._utf8 = _UTF8("replace")
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if len(tail) >= _MAX_UTF8_LEN:
                break
            if not decoder.is_skipped(token_id, skip_special_tokens):
                tail = decoder.token_bytes(token_id) + tail
        self._at_start = not tail
        self._utf8.decode(tail)  # keeps the bytes of a character that the prompt left incomplete

    def push(self, token_id: int) -> str:
        if self._decoder.is_skipped(token_id, self._skip):
            return ""
        if self._at_start and self._decoder.token_bytes(token_id):
            self._at_start = False
            return self._utf8.decode(self._decoder.first_token_bytes(token_id))
        return self._utf8.decode(self._decoder.token_bytes(token_id))

    def pending(self) -> str:
        return self._utf8.getstate()[0].decode("utf-8", "replace")

    def fork(self) -> TextStream:
        other = copy(self)
        other._utf8 = _UTF8("replace")
        other._utf8.setstate(self._utf8.getstate())
        return other


class _WindowStream(TextStream):
    """The stream of all other tokenizers: a new token is decoded with the last few, whose text is then removed.

    It is exact if a token's text depends only on the token before it and on whether it is the first.
    """

    def __init__(
        self, decoder: TokenDecoder, prompt_token_ids: Sequence[int], skip_special_tokens: bool, spaces: bool
    ) -> None:
        self._decoder = decoder
        self._skip = skip_special_tokens
        self._spaces = spaces
        with_text = (token_id for token_id in reversed(prompt_token_ids) if self._has_text(token_id))
        self._window = list(itertools.islice(with_text, _WINDOW_TOKENS))[::-1]
        self._num_pending = 0
        self._settle()

    def push(self, token_id: int) -> str:
        if not self._has_text(token_id):
            return ""
        self._window.append(token_id)
        self._num_pending += 1
        text = self._added()
        if not self._spaces and len(self._window) > 1 and self._decoder.special_text(self._window[-2]) is not None:
            text = self._decoder.special_text(token_id) or text
        if text.endswith("\ufffd") and self._num_pending < _MAX_PENDING_TOKENS:
            return ""
        self._settle()
        return text

    def _has_text(self, token_id: int) -> bool:
        return self._decoder.is_known(token_id) and not self._decoder.is_skipped(token_id, self._skip)

    def pending(self) -> str:
        return self._added() if self._num_pending else ""

    def fork(self) -> TextStream:
        other = copy(self)
        other._window = list(self._window)
        return other

    def _added(self) -> str:
        return self._decoder.decode(self._window, False)[len(self._known) :]

    def _settle(self) -> None:
        self._window = self._window[-max(_WINDOW_TOKENS, self._num_pending) :]
        self._num_pending = 0
        self._known = self._decoder.decode(self._window, False)


def _byte_rule(backend: tokenizers.Tokenizer) -> _ByteRule | None:
    """Return how the tokenizer's decoder turns a token into bytes; None if a table cannot express it."""
    if backend.decoder is None:
        return None
    match json.loads(backend.decoder.__getstate__()):
        case {"type": "ByteLevel"} | {"type": "Sequence", "decoders": [{"type": "ByteLevel"}]}:
            return _ByteRule(_byte_level_bytes, _byte_level_bytes)
        case {"type": "Metaspace", "replacement": str(mark), "prepend_scheme": scheme}:
            return _ByteRule(_replacing(mark, " "), _replacing(mark, " " if scheme == "never" else ""))
        case {"type": "Sequence", "decoders": list(steps)}:
            return _byte_fallback_rule(steps)
    return None


def _byte_fallback_rule(steps: list[dict[str, Any]]) -> _ByteRule | None:
    """Return the rule of SentencePiece models with byte tokens: Replace, ByteFallback, Fuse and optionally Strip."""
    match steps:
        case [
            {"type": "Replace", "pattern": {"String": str(mark)}, "content": str(content)},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            *rest,
        ]:
            token_bytes = _with_byte_tokens(_replacing(mark, content))
            if not rest:
                return _ByteRule(token_bytes, token_bytes)
            if rest == [{"type": "Strip", "content": " ", "start": 1, "stop": 0}]:
                return _ByteRule(token_bytes, lambda token: token_bytes(token).removeprefix(b" "))
    return None


def _replacing(mark: str, content: str) -> Callable[[str], bytes]:
    return lambda token: token.replace(mark, content).encode()


def _with_byte_tokens(others: Callable[[str], bytes]) -> Callable[[str], bytes]:
    """Decode tokens such as `<0xE2>` to their byte. Each byte that is not valid UTF-8 gives its own U+FFFD."""

    def token_bytes(token: str) -> bytes:
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            try:
                return bytes.fromhex(token[3:5])
            except ValueError:
                pass
        return others(token)

    return token_bytes


def _byte_level_bytes(token: str) -> bytes:
    """Decode a byte-level token; an added token with other characters, such as a space, gives its own text."""
    try:
        return bytes(BYTES[char] for char in token)
    except KeyError:
        return token.encode()
