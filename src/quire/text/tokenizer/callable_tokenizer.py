"""A tokenizer as users know it from transformers: callable, with the same methods and defaults."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.text.tokenizer.tokenizer import Tokenizer


class Encoding(dict[str, Any]):
    """Token ids and attention masks of one text or several. The values are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"an encoding has {', '.join(self)}, and no {name!r}") from None


class CallableTokenizer:
    """The methods of transformers' tokenizers that programs for vLLM call, over a Tokenizer."""

    is_fast = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.name_or_path = tokenizer.source
        self.special_tokens_map = dict(tokenizer.special_tokens)
        self.bos_token, self.eos_token, self.pad_token, self.unk_token = (
            tokenizer.special_tokens.get(role) for role in ("bos_token", "eos_token", "pad_token", "unk_token")
        )
        self.bos_token_id, self.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.pad_token_id = tokenizer.pad_token_id
        self.unk_token_id = None if self.unk_token is None else tokenizer.vocabulary.get(self.unk_token)
        self.chat_template = tokenizer.chat_templates.get("default")

    def __len__(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def vocab_size(self) -> int:
        """Number of tokens without added ones; `len` counts all."""
        return self.tokenizer.vocab_size - self.tokenizer.num_added_tokens

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens."""
        return list(self.tokenizer.special_token_texts)

    @property
    def all_special_tokens(self) -> list[str]:
        """All special tokens."""
        return list(self.tokenizer.special_token_texts.values())

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens, which are spelt as in tokenizer.json."""
        return dict(self.tokenizer.vocabulary)

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
    ) -> Encoding:
        """Encode one text, or each of several. `truncation` keeps the first `max_length` tokens."""
        texts = [text] if isinstance(text, str) else text
        ids = [self.encode(each, add_special_tokens, truncation=truncation, max_length=max_length) for each in texts]
        masks = [[1] * len(each) for each in ids]
        if isinstance(text, str):
            return Encoding(input_ids=ids[0], attention_mask=masks[0])
        return Encoding(input_ids=ids, attention_mask=masks)

    def encode(
        self, text: str, add_special_tokens: bool = True, *, truncation: bool = False, max_length: int | None = None
    ) -> list[int]:
        """Return the token ids of a text."""
        token_ids = self.tokenizer.encode(text, add_special_tokens)
        return token_ids[:max_length] if truncation else token_ids

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        """Return the text of token ids, by default with special tokens."""
        return self.tokenizer.decode([token_ids] if isinstance(token_ids, int) else token_ids, skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        """Return the text of each sequence of token ids."""
        return [self.decode(token_ids, skip_special_tokens) for token_ids in sequences]

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Return the tokens of a text, spelt as in tokenizer.json."""
        return [self.tokenizer.token_of(token_id) or "" for token_id in self.encode(text, add_special_tokens)]

    def convert_ids_to_tokens(
        self, ids: int | Sequence[int], skip_special_tokens: bool = False
    ) -> str | list[str | None] | None:
        """Return the token of an id, or those of several; None for an id that has none."""
        if isinstance(ids, int):
            return self.tokenizer.token_of(ids)
        special = self.tokenizer.special_token_texts if skip_special_tokens else ()
        return [self.tokenizer.token_of(token_id) for token_id in ids if token_id not in special]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        """Return the id of a token, or those of several; that of the unknown token, or None, for others."""
        find = self.tokenizer.vocabulary.get
        if isinstance(tokens, str):
            return find(tokens, self.unk_token_id)
        return [find(each, self.unk_token_id) for each in tokens]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **variables: Any,
    ) -> str | list[int] | Encoding:
        """Return a conversation's prompt: its text with `tokenize=False`, else its encoding, or with
        `return_dict=False` the token ids alone. Raises the errors of Tokenizer.apply_chat_template."""
        text = self.tokenizer.apply_chat_template(
            conversation,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **variables,
        )
        if not tokenize:
            return text
        encoding = self(text, add_special_tokens=False)
        return encoding if return_dict else list(encoding.input_ids)
