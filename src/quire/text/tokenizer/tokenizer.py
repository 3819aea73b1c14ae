"""Tokenizer: what the engine and the front doors need of a checkpoint's tokenizer."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from quire.common.errors import InvalidPromptError, TokenizerError
from quire.common.faults import fault_point
from quire.text.chat_template.template import ChatTemplate, compile_chat_template
from quire.text.tokenizer.files import TokenizerFiles, library_errors, read_tokenizer_files
from quire.text.tokenizer.token_decoder import TextStream, TokenDecoder


class Tokenizer:
    """Text to token ids and back, as the checkpoint's files say. Knows nothing of models and tensors."""

    def __init__(self, files: TokenizerFiles, source: str) -> None:
        self._backend = files.backend
        self._chat_templates = files.chat_templates
        self._token_texts: dict[int, str] = {}
        self.source = source
        """where it was read from, for messages"""
        self.special_tokens: Mapping[str, str] = files.special_tokens
        """role -> token, such as `eos_token` -> `</s>`"""
        self.eos_token_id = self._special_id("eos_token")
        self.bos_token_id = self._special_id("bos_token")
        self.pad_token_id = self._special_id("pad_token")

    @classmethod
    def from_path(cls, path: str | Path) -> "Tokenizer":
        """Read a tokenizer from a checkpoint's folder. Raises TokenizerError if there is none or it is damaged."""
        return cls(read_tokenizer_files(Path(path)), str(path))

    @cached_property
    def vocab_size(self) -> int:
        """Tokens, added ones included; a model's vocabulary may be padded to more."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def max_token_len(self) -> int:
        """Characters that a token stands for, at most."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @cached_property
    def special_token_texts(self) -> Mapping[int, str]:
        """Token id -> text of every token that stands for no text of a prompt's or an output's own."""
        added = self._backend.get_added_tokens_decoder()
        return {i: token.content for i, token in added.items() if token.special}

    @cached_property
    def _decoder(self) -> TokenDecoder:
        return TokenDecoder(self._backend, frozenset(self.special_token_texts))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with the special tokens the checkpoint puts around a text, such as a leading `<s>`.

        Text that spells a special token becomes that token. Raises InvalidPromptError for a string that is no Unicode
        text (a surrogate without its other half).
        """
        fault_point("tokenizer.encode")
        with library_errors(f"the tokenizer of {self.source} fails on a text"):
            try:
                return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)
            except TypeError as error:
                raise InvalidPromptError(f"the text is no Unicode string: {text[:40]!r}") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`. Bytes that are no UTF-8 show as U+FFFD; ids without a token show as nothing."""
        return self._decoder.decode(token_ids, skip_special_tokens)

    def decode_token(self, token_id: int) -> str:
        """One token's text alone, special or not; kept, since the likeliest tokens are mostly the same."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def stream(
        self,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> TextStream:
        """The text that tokens add to the prompt's, one token at a time."""
        return self._decoder.stream(prompt_token_ids, skip_special_tokens, spaces_between_special_tokens)

    def to_json(self) -> str:
        """The text of a tokenizer.json that says all of it but the chat templates."""
        return str(self._backend.to_str())

    @property
    def has_chat_template(self) -> bool:
        """Whether the checkpoint says how a chat is written down."""
        return bool(self._chat_templates)

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Name -> Jinja source of the checkpoint's chat templates; the usual one is `default`."""
        return self._chat_templates

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for a conversation: text that already spells its special tokens, so encode it without adding any.

        `chat_template` is a Jinja source or the name of one of the checkpoint's templates; None takes `tool_use` where
        there are tools and such a template, else `default`. Raises TokenizerError for a template that is missing or
        broken, InvalidPromptError for messages that it does not take.
        """
        template = self._template(chat_template, with_tools=tools is not None)
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            variables={**self.special_tokens, **variables},
        )

    def _template(self, chosen: str | None, with_tools: bool) -> ChatTemplate:
        known = self._chat_templates
        name = chosen or ("tool_use" if with_tools and "tool_use" in known else "default")
        if name in known:
            return compile_chat_template(known[name])
        if chosen is not None and "{" in chosen:
            return compile_chat_template(chosen)
        names = f"has only these chat templates: {', '.join(sorted(known))}" if known else "has no chat template"
        raise TokenizerError(
            f"{self.source} {names}; give a template's text with the argument `chat_template`, or write the prompt as "
            "plain text"
        )

    def _special_id(self, role: str) -> int | None:
        token = self.special_tokens.get(role)
        return None if token is None else self._backend.token_to_id(token)
