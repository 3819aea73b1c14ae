"""What callers give, checked and resolved: prompts to token ids, params to draws."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import TypeAlias

from quire.batch import Draw
from quire.config.args import EngineConfig
from quire.engine.sequence import Sequence
from quire.errors import InvalidParamsError, InvalidPromptError, PromptTooLongError
from quire.kv.content_hash import ContentKey
from quire.params import SamplingParams
from quire.sampling.random import random_key, uniform_bits
from quire.tokenizer.detokenizer import IncrementalDetokenizer
from quire.tokenizer.tokenizer import Tokenizer

Prompt: TypeAlias = str | SequenceOf[int] | Mapping[str, object]
"""text, token ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`; in a dict also `cache_salt`"""

_MAX_SALT_LEN = 1024


class InputProcessor:
    """Makes sequences out of prompts and params, or raises a RequestError. Knows one model and its tokenizer."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer) -> None:
        self.config = config
        self.model = config.model
        self.tokenizer = tokenizer
        self._num_requests = 0

    def sequence(self, seq_id: int, token_ids: list[int], params: SamplingParams) -> Sequence:
        """A request's first sequence: it stands for all its samples until the prompt is computed."""
        seq = Sequence(seq_id, token_ids, self._draws(params), self._detokenizer(token_ids, params))
        self._num_requests += 1
        return seq

    def prompt(self, prompt: Prompt) -> tuple[str | None, list[int], ContentKey]:
        """(text if it was given, token ids, what else the cached content depends on)"""
        text, token_ids, cache_salt = self._parse_prompt(prompt)
        if token_ids is None:
            assert text is not None
            token_ids = self.tokenizer.encode(text)
        vocab_size, limit = self.model.vocab_size, self.model.max_model_len
        if not token_ids:
            raise InvalidPromptError("the prompt is empty: give at least one token")
        for token_id in token_ids:
            if type(token_id) is not int or not 0 <= token_id < vocab_size:
                raise InvalidPromptError(f"token id {token_id!r} is not one of this model's, 0 to {vocab_size - 1}")
        if len(token_ids) >= limit:
            raise PromptTooLongError(
                f"the prompt has {len(token_ids)} tokens, and the context holds {limit}, one of them for the output: "
                "shorten the prompt or raise max_model_len"
            )
        return text, token_ids, ContentKey(cache_salt=cache_salt)

    def _parse_prompt(self, prompt: Prompt) -> tuple[str | None, list[int] | None, str]:
        """(text, token ids, salt): one of the first two given by the caller, or both."""
        cache_salt: object = ""
        if isinstance(prompt, Mapping):
            unknown = prompt.keys() - {"prompt", "prompt_token_ids", "cache_salt"}
            if unknown or not prompt:
                raise InvalidPromptError(
                    "a prompt given as a dict has 'prompt' or 'prompt_token_ids', and 'cache_salt' if you like, "
                    f"not {sorted(map(str, prompt))}"
                )
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            cache_salt = prompt.get("cache_salt", "")
        else:
            text, token_ids = (prompt, None) if isinstance(prompt, str) else (None, prompt)
        if not isinstance(cache_salt, str) or len(cache_salt) > _MAX_SALT_LEN:
            raise InvalidPromptError(f"cache_salt must be a string of at most {_MAX_SALT_LEN} characters")
        if text is not None and not isinstance(text, str):
            raise InvalidPromptError(f"the prompt's text must be a string, not {type(text).__name__}")
        if token_ids is not None and (isinstance(token_ids, str | bytes) or not isinstance(token_ids, SequenceOf)):
            raise InvalidPromptError(
                f"the prompt's token ids must be a list of integers, not {type(token_ids).__name__}"
            )
        if text is None and token_ids is None:
            raise InvalidPromptError("the prompt has neither text nor token ids")
        return text, None if token_ids is None else list(token_ids), cache_salt

    def check_params(self, params: SamplingParams) -> None:
        """What only this model and this engine can refuse."""
        max_num_seqs = self.config.scheduler.max_num_seqs
        if params.n > max_num_seqs:
            raise InvalidParamsError(f"n={params.n}: this engine runs at most max_num_seqs={max_num_seqs} at once")
        for token_id in params.stop_token_ids or ():
            if token_id >= self.model.vocab_size:
                raise InvalidParamsError(
                    f"stop_token_ids has {token_id}: this model's token ids end at {self.model.vocab_size - 1}"
                )

    def _draws(self, params: SamplingParams) -> tuple[Draw, ...]:
        """One for each sample, with the request's own seed or one drawn from the engine's by order of arrival."""
        seed = params.seed
        if seed is None:
            seed = uniform_bits(random_key(self.config.seed, 0), self._num_requests)
        how = (params.temperature, max(0, params.top_k), params.top_p)
        return tuple(Draw(*how, random_key(seed, index), index) for index in range(params.n))

    def _detokenizer(self, token_ids: list[int], params: SamplingParams) -> IncrementalDetokenizer | None:
        if not params.detokenize:
            return None
        return IncrementalDetokenizer(
            self.tokenizer,
            token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )
