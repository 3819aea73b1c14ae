"""Pooling requests: what is wanted of a prompt's hidden states, and the checks of prompts and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import msgspec

from quire.common.batch import Pooled, PooledRows, PoolSpec
from quire.common.errors import InvalidParamsError, InvalidPromptError, PromptTooLongError, RequestError
from quire.common.params import PoolerInfo, PoolingParams, PoolingTask, SamplingParams
from quire.text.tokenizer.tokenizer import kept

if TYPE_CHECKING:
    from quire.engine.requests.input_processor import InputProcessor, Prompt

CANNOT_POOL = (
    "this model generates text, and cannot pool: use generate, or make the engine with runner='pooling' if the model "
    "is an embedder or a classifier"
)
CANNOT_GENERATE = (
    "this model pools texts (runner='pooling') and cannot generate: use embed, classify, score or encode, as its tasks "
    "allow"
)
MAX_TOKEN_TYPE = 2**15


class PromptPooling:
    """What is to be made of a prompt's hidden states, and what was made of them."""

    __slots__ = ("is_whole", "max_cached_tokens", "num_tokens", "result", "spec", "token_type_ids")

    def __init__(
        self, spec: PoolSpec, num_tokens: int, *, is_whole: bool, token_type_ids: tuple[int, ...] | None = None
    ) -> None:
        self.spec = spec
        self.num_tokens = num_tokens
        self.is_whole = is_whole
        """Whether the hidden states of all tokens are needed, which are not cached: so the prompt runs in one step."""
        self.max_cached_tokens = 0 if is_whole else None
        """The most tokens that may come from the prefix cache; None for any number."""
        self.token_type_ids = token_type_ids
        """For each token, which text of a pair it belongs to; None for 0."""
        self.result: Pooled | None = None
        """None until the prompt has been computed."""

    def due(self, start: int, end: int) -> tuple[PooledRows | None, tuple[int, ...] | None]:
        """Return the rows to be pooled, if the tokens from position `start` to `end` are the prompt's last, and the
        token type ids of these tokens; None for 0."""
        types = None if self.token_type_ids is None else self.token_type_ids[start:end]
        if end < self.num_tokens:
            return None, types
        return PooledRows(0, end, self.spec) if self.is_whole else PooledRows(end - 1 - start, 1, self.spec), types


class CheckedPrompt(msgspec.Struct, frozen=True):
    """A prompt as token ids, which were cut and checked as the parameters of its request say."""

    params: PoolingParams
    spec: PoolSpec
    text: str | None
    token_ids: Sequence[int]
    cache_salt: str
    """Its own; the parameters may have one, too."""
    token_type_ids: tuple[int, ...] | None


class PoolingInputs:
    """Checks pooling requests against what the model's pooler can make. Part of an InputProcessor."""

    def __init__(self, inputs: InputProcessor, info: PoolerInfo | None) -> None:
        """`info` is None for a model that generates, which refuses all pooling requests."""
        self._inputs = inputs
        self.info = info
        self.max_tokens = inputs.model.max_model_len

    @cached_property
    def _num_types(self) -> int:
        return self._inputs.model.hf_config.count("type_vocab_size", 2) or MAX_TOKEN_TYPE

    def check_params(self, params: PoolingParams) -> PoolSpec:
        """Return what these parameters ask of the pooler. Raises RequestError if this model cannot do that."""
        if self.info is None:
            raise RequestError(CANNOT_POOL)
        spec = _spec(self.info, params.task, params.dimensions, params.normalize, params.use_activation)
        keep = params.truncate_prompt_tokens
        if keep is not None and keep > self.max_tokens:
            raise InvalidParamsError(
                f"truncate_prompt_tokens={keep}: this model takes at most {self.max_tokens} tokens"
            )
        return spec

    def checked(self, prompt: Prompt, params: PoolingParams) -> CheckedPrompt:
        """Return the prompt for a request with these parameters, once both are checked. Raises RequestError."""
        if isinstance(prompt, CheckedPrompt) and prompt.params == params:
            return prompt
        return self.prompt(prompt, params, self.check_params(params))

    def prompt(
        self, prompt: Prompt, params: PoolingParams, spec: PoolSpec, add_special_tokens: bool = True
    ) -> CheckedPrompt:
        """As `checked`, where the parameters are checked already. Other threads run meanwhile."""
        types: Any = None
        if not isinstance(prompt, CheckedPrompt):
            if not isinstance(prompt, str) and isinstance(prompt, Mapping) and "token_type_ids" in prompt:
                types, prompt = prompt["token_type_ids"], {k: v for k, v in prompt.items() if k != "token_type_ids"}
            text, token_ids, salt = self._inputs.parse_prompt(prompt)
        else:  # for other parameters
            text, token_ids, salt, types = prompt.text, list(prompt.token_ids), prompt.cache_salt, prompt.token_type_ids
        if salt and params.cache_salt and salt != params.cache_salt:
            raise InvalidParamsError("cache_salt is given with the prompt and in the params, and they differ")
        if token_ids is None:
            assert text is not None
            token_ids = self.encode(text, params, add_special_tokens)
        elif (keep := self._num_kept(params)) is not None:
            types = None if types is None else _checked_types(types, len(token_ids), self._num_types)
            cuts_start = params.truncation_side != "right"
            token_ids = kept(token_ids, keep, cuts_start=cuts_start)
            types = None if types is None else kept(types, keep, cuts_start=cuts_start)
        self.check(token_ids, spec)
        types = None if types is None else _checked_types(types, len(token_ids), self._num_types)
        return CheckedPrompt(params, spec, text, token_ids, salt, types)

    def encode(self, text: str, params: PoolingParams, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text, cut as the parameters say. Other threads run meanwhile. Raises
        PromptTooLongError for a text that cannot fit."""
        keep, cuts_start = self._num_kept(params), self._cuts_start(params)
        readable = self._inputs.readable(text, keep is not None, keeps_start=not cuts_start)
        return self._inputs.tokenizer.encode_cut(readable, keep, add_special_tokens, cuts_start=cuts_start)

    def encode_pair(self, pair: tuple[str, str], params: PoolingParams) -> tuple[list[int], list[int]]:
        """As `encode`, for two texts: token ids and token type ids, which are 0 where the model reads none."""
        keep, cuts_start = self._num_kept(params), self._cuts_start(params)
        first, second = (self._inputs.readable(text, keep is not None, keeps_start=not cuts_start) for text in pair)
        tokenizer = self._inputs.tokenizer
        token_ids, types = tokenizer.encode_pair(first, second, keep, cuts_start=cuts_start)
        return token_ids, types if tokenizer.has_token_types and self._num_types > 1 else [0] * len(types)

    def _cuts_start(self, params: PoolingParams) -> bool:
        """Return whether a text that is too long loses its start."""
        if params.truncation_side is None:
            return self._inputs.tokenizer.cuts_start
        return params.truncation_side == "left"

    def _num_kept(self, params: PoolingParams) -> int | None:
        """Return how many tokens of longer texts are kept; None if they are refused."""
        return self.most_tokens(params.task) if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens

    def most_tokens(self, task: PoolingTask | None) -> int:
        """Return the most tokens that a text may have for this task, or for the model's first."""
        info = self.info
        assert info is not None, "the model pools"
        runs_whole = (task or info.tasks[0]) in info.whole_tasks
        return min(self.max_tokens, info.max_whole_tokens) if runs_whole else self.max_tokens

    def check(self, token_ids: list[int], spec: PoolSpec) -> None:
        """Raise RequestError if a text of these tokens cannot run."""
        num_tokens = len(token_ids)
        if num_tokens > self.max_tokens:
            raise PromptTooLongError(
                f"the text has {num_tokens} tokens, and the model takes {self.max_tokens}: shorten it, or cut it with "
                "truncate_prompt_tokens=-1"
            )
        info = self.info
        assert info is not None, "there is a spec"
        if num_tokens > info.max_whole_tokens and spec.task in info.whole_tasks:
            raise PromptTooLongError(
                f"the text has {num_tokens} tokens, and the task {spec.task!r} of this model needs them all in one "
                f"step of {info.max_whole_tokens}: raise max_num_batched_tokens, or cut it with truncate_prompt_tokens"
            )
        self._inputs.check_token_ids(token_ids)

    def wanted(self, spec: PoolSpec, num_tokens: int, token_type_ids: tuple[int, ...] | None) -> PromptPooling:
        """Return what is to be made of a prompt's hidden states."""
        assert self.info is not None, "there is a spec"
        is_whole = spec.task in self.info.whole_tasks
        return PromptPooling(spec, num_tokens, is_whole=is_whole, token_type_ids=token_type_ids)


def _checked_types(types: Any, num_tokens: int, num_types: int) -> tuple[int, ...] | None:
    """Return the token type ids as a tuple; None if they are all 0. Raises InvalidPromptError."""
    if not isinstance(types, list | tuple) or len(types) != num_tokens:
        raise InvalidPromptError(f"token_type_ids must be a list of {num_tokens} integers, one for each token")
    if not all(type(kind) is int and 0 <= kind < num_types for kind in types):
        given = next(kind for kind in types if type(kind) is not int or not 0 <= kind < num_types)
        raise InvalidPromptError(f"token_type_ids={given!r}: this model takes integers from 0 to {num_types - 1}")
    return tuple(types) if any(types) else None


@lru_cache(64)
def _spec(
    info: PoolerInfo,
    task: PoolingTask | None,
    dimensions: int | None,
    normalize: bool | None,
    use_activation: bool | None,
) -> PoolSpec:
    """Many requests have the same parameters."""
    task = task or info.tasks[0]
    if task not in info.tasks:
        raise InvalidParamsError(f"task={task!r}: this model has {', '.join(info.tasks)}")
    params = PoolingParams(task=task, dimensions=dimensions, normalize=normalize, use_activation=use_activation)
    info.check_parameters(params, task)
    if normalize is None and use_activation is None:
        use_activation = info.use_activation
    if task in ("embed", "token_embed"):
        return PoolSpec(task, dimensions, use_activation if normalize is None else normalize)
    return PoolSpec(task, activation=use_activation)


@lru_cache(256)
def as_sampling_params(priority: int, tenant: str) -> SamplingParams:
    """The parameters of a pooling request as the parts of the engine see them that know no pooling. Not to be changed:
    many requests have the same."""
    return SamplingParams(max_tokens=None, detokenize=False, output_kind="final_only", priority=priority, tenant=tenant)
