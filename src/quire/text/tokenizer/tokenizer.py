"""Tokenizer: a checkpoint's tokenizer, as the engine and its interfaces use it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import tokenizers

from quire.common.errors import InvalidPromptError, TokenizerError
from quire.common.faults import fault_point
from quire.config.checkpoint.gguf.files import is_gguf
from quire.text.tokenizer.files import TokenizerFiles, library_errors, read_tokenizer_files
from quire.text.tokenizer.gguf import read_gguf_tokenizer
from quire.text.tokenizer.token_decoder import TextStream, TokenDecoder

if TYPE_CHECKING:
    from quire.text.chat_template.template import ChatTemplate

_Ids = TypeVar("_Ids", list[int], tuple[int, ...])


class Tokenizer:
    """Converts text to token ids and back, as the checkpoint's files say. Knows nothing of models and tensors."""

    def __init__(self, files: TokenizerFiles, source: str) -> None:
        self._backend = files.backend
        self._token_texts: dict[int, str] = {}
        self.source = source
        """Path from which it was read, for error messages."""
        self.special_tokens: Mapping[str, str] = files.special_tokens
        """Maps roles to tokens, such as `eos_token` to `</s>`."""
        self.chat_templates: Mapping[str, str] = files.chat_templates
        """Maps the names of the checkpoint's chat templates to Jinja sources; the usual name is `default`."""
        self.has_token_types = files.has_token_types
        """Whether the model reads which text of a pair a token is of."""
        self.cuts_start = files.cuts_start
        """Whether a text that is too long for a model that pools loses its start, not its end."""
        self.eos_token_id = self._special_id("eos_token")
        self.bos_token_id = self._special_id("bos_token")
        self.pad_token_id = self._special_id("pad_token")

    @classmethod
    def from_path(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer of a checkpoint's folder or GGUF file. Raises TokenizerError if it is missing or damaged,
        and CheckpointError for a malformed GGUF file."""
        folder = Path(path)
        files = read_gguf_tokenizer(folder) if is_gguf(folder) else read_tokenizer_files(folder)
        return cls(files, str(path))

    @classmethod
    def of(cls, given: Any) -> Tokenizer:
        """Return a tokenizer that callers have: ours, one of transformers (of the fast kind), or the folder of one.

        Raises TokenizerError for anything else.
        """
        if isinstance(given, str | Path):
            return cls.from_path(given)
        if isinstance(given, cls):
            return given
        inner = getattr(given, "tokenizer", None)
        if isinstance(inner, cls):
            return inner
        backend = getattr(given, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise TokenizerError(
                f"a tokenizer must be a folder, one of Quire, or a fast one of transformers, not {type(given).__name__}"
            )
        backend = tokenizers.Tokenizer.from_str(backend.to_str())
        backend.no_truncation()
        backend.no_padding()
        special = {role: str(token) for role, token in given.special_tokens_map.items() if isinstance(token, str)}
        found = given.chat_template
        templates = found if isinstance(found, dict) else {} if found is None else {"default": found}
        has_token_types = "token_type_ids" in given.model_input_names
        files = TokenizerFiles(backend, special, templates, has_token_types, given.truncation_side == "left")
        return cls(files, str(given.name_or_path))

    @cached_property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones; a model's vocabulary may be padded to more."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_token_len(self) -> int:
        """Largest number of characters in a token."""
        return max(map(len, self.vocabulary), default=1)

    @cached_property
    def vocabulary(self) -> Mapping[str, int]:
        """Maps the tokens, as tokenizer.json spells them, to their ids."""
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocabulary

    @cached_property
    def num_added_tokens(self) -> int:
        """Number of tokens that were added to those that the tokenizer was trained with."""
        return self.vocab_size - int(self._backend.get_vocab_size(with_added_tokens=False))

    def token_of(self, token_id: int) -> str | None:
        """Return the token of an id as tokenizer.json spells it; None if there is none."""
        return self._backend.id_to_token(token_id)

    @cached_property
    def special_token_texts(self) -> Mapping[int, str]:
        """Maps the ids of special tokens to their texts."""
        added = self._backend.get_added_tokens_decoder()
        return {i: token.content for i, token in added.items() if token.special}

    @cached_property
    def _decoder(self) -> TokenDecoder:
        return TokenDecoder(self._backend, frozenset(self.special_token_texts))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of `text`, by default with the checkpoint's special tokens, such as a leading `<s>`.

        Text that spells a special token becomes that token. Raises InvalidPromptError for a string that is not valid
        Unicode (it contains a lone surrogate).
        """
        fault_point("tokenizer.encode")
        with library_errors(f"the tokenizer of {self.source} failed to encode a text"):
            try:
                return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
            except TypeError as error:
                raise InvalidPromptError(f"the text is not valid Unicode: {text[:40]!r}") from error

    def encode_cut(
        self, text: str, max_tokens: int | None, add_special_tokens: bool = True, *, cuts_start: bool = False
    ) -> list[int]:
        """As `encode`, while other threads run. Of a longer text the first tokens are kept, or the last if it
        `cuts_start`: `max_tokens` with the special ones, which stay. None keeps all."""
        if max_tokens is None or not add_special_tokens:
            return kept(list(self._encoded(text, add_special_tokens).ids), max_tokens, cuts_start=cuts_start)
        found, side = self._encoded(text, False), "left" if cuts_start else "right"
        found.truncate(max(0, max_tokens - self._backend.num_special_tokens_to_add(False)), direction=side)
        token_ids: list[int] = self._backend.post_process(found).ids
        return token_ids[:max_tokens]

    def cut(self, text: str, max_tokens: int) -> str:
        """Return the beginning of a text that has its first `max_tokens` tokens, and no part of a character. Other
        threads run meanwhile."""
        found = self._encoded(text, False, with_offsets=True).offsets
        return text if len(found) <= max_tokens else text[: min(found[max_tokens - 1][1], found[max_tokens][0])]

    def encode_pair(
        self, first: str, second: str, max_tokens: int | None, *, cuts_start: bool = False
    ) -> tuple[list[int], list[int]]:
        """Return token ids and token type ids of two texts, joined by the checkpoint's template of pairs, such as
        `[CLS] a [SEP] b [SEP]`. If they have more than `max_tokens`, tokens are removed from the end of the longer text
        (from its start if this `cuts_start`), and of both once they are as long as each other."""
        if max_tokens is None:
            found = self._encoded((first, second), True)
            return list(found.ids), list(found.type_ids)
        parts = self._encoded(first, False).ids, self._encoded(second, False).ids
        room = max(0, max_tokens - self._backend.num_special_tokens_to_add(True))
        nums = _nums_kept(len(parts[0]), len(parts[1]), room)
        texts = [kept(part, num, cuts_start=cuts_start) for part, num in zip(parts, nums, strict=True)]
        token_ids, types = list[int](), list[int]()
        for place, token_id, kind in self._pair_template:
            part = [token_id] if place is None else texts[place]
            token_ids += part
            types += [kind] * len(part)
        return token_ids[:max_tokens], types[:max_tokens]

    @cached_property
    def _pair_template(self) -> list[tuple[int | None, int, int]]:
        """The places of both texts, and the special tokens around them with their ids; of each its token type. The
        library itself would join all pieces of a text that it cuts with all pieces of the other."""
        found, template = self._encoded(("a 1 .", "a 1 ."), True), list[tuple[int | None, int, int]]()
        for place, token_id, kind in zip(found.sequence_ids, found.ids, found.type_ids, strict=True):
            if place is None or not template or template[-1][0] != place:
                template.append((place, token_id, kind))
        return template

    def _encoded(
        self, text: str | tuple[str, str], add_special_tokens: bool, *, with_offsets: bool = False
    ) -> tokenizers.Encoding:
        """A batch of one: that lets other threads run, and unlike a longer one takes a single core."""
        fault_point("tokenizer.encode")
        try:
            encode = self._backend.encode_batch if with_offsets else self._backend.encode_batch_fast
            return encode([text], add_special_tokens=add_special_tokens)[0]
        except TypeError as error:
            raise InvalidPromptError(f"the text is not valid Unicode: {str(text)[:40]!r}") from error
        except BaseException:
            with library_errors(f"the tokenizer of {self.source} failed to encode a text"):
                raise

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `token_ids`. Invalid UTF-8 becomes U+FFFD; ids without a token give no text."""
        return self._decoder.decode(token_ids, skip_special_tokens)

    def decode_token(self, token_id: int) -> str:
        """Return the text of one token, special or not; cached, since the likeliest tokens are mostly the same."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 that a token, special or not, adds to a text: of a token that is a part of a character that
        part, and of one that begins a word also the space before it. Joined, they are the text after a prompt, except
        with tokenizers whose tokens depend on their neighbours (WordPiece): there it is the text of the token alone."""
        return self._decoder.token_bytes(token_id)

    def stream(
        self,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> TextStream:
        """Return a stream of the text that tokens add after a prompt, one token at a time."""
        return self._decoder.stream(prompt_token_ids, skip_special_tokens, spaces_between_special_tokens)

    def to_json(self) -> str:
        """Return the tokenizer, without its chat templates, as the text of a tokenizer.json."""
        return str(self._backend.to_str())

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        content_format: str = "auto",
        **variables: Any,
    ) -> str:
        """Return the prompt of a conversation. It contains its special tokens, so encode it without adding any.

        `chat_template` is a Jinja source or the name of one of the checkpoint's templates. The default is `tool_use` if
        there are tools and such a template, else `default`. `content_format` is `string`, `openai` (a list of parts)
        or `auto` (as the template reads it). A message of the role `developer` has the role `system` if the template
        does not know it. Raises TokenizerError if the template is missing or invalid, InvalidPromptError if it rejects
        the messages.
        """
        template = self._template(chat_template, with_tools=tools is not None)
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            content_format=content_format,
            variables={**self.special_tokens, **variables},
        )

    def _template(self, chosen: str | None, with_tools: bool) -> ChatTemplate:
        from quire.text.chat_template.template import compile_chat_template  # late, as embedders need no Jinja

        known = self.chat_templates
        name = chosen or ("tool_use" if with_tools and "tool_use" in known else "default")
        if name in known:
            return compile_chat_template(known[name])
        if chosen is not None and "{" in chosen:
            return compile_chat_template(chosen)
        names = f"has only these chat templates: {', '.join(sorted(known))}" if known else "has no chat template"
        raise TokenizerError(
            f"this tokenizer {names}: give a template with the argument `chat_template`, or send plain text instead"
        )

    def _special_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self._backend.token_to_id(token)


def kept(token_ids: _Ids, num: int | None, *, cuts_start: bool) -> _Ids:
    """The first tokens, or the last if this `cuts_start`: at most `num`, or all for None."""
    if num is None:
        return token_ids
    return token_ids[max(0, len(token_ids) - num) :] if cuts_start else token_ids[:num]


def _nums_kept(num_first: int, num_second: int, room: int) -> tuple[int, int]:
    """Return how many tokens are kept of each of two texts, which may have `room` in all."""
    if num_first + num_second <= room:
        return num_first, num_second
    shorter = min(num_first, num_second, room // 2)
    return (shorter, room - shorter) if num_first <= num_second else (room - shorter, shorter)
