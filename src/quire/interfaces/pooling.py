"""Pooling requests as callers give them: prompts and pairs of texts, tokenized beside the steps, and their outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from quire.common.errors import (
    InvalidParamsError,
    InvalidPromptError,
    RequestError,
    RequestFailedError,
    failures_named,
)
from quire.common.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.common.params import PoolingParams, PoolingTask
from quire.common.params.checks import check_flag
from quire.engine.requests.input_processor import Prompt
from quire.engine.requests.pooling import CheckedPrompt, PoolingInputs
from quire.interfaces.prompts import check_number
from quire.text.tokenizer.tokenizer import Tokenizer

PIECE = 64
"""Number of texts that a thread tokenizes before it is asked for more."""
_EXPANSION = 18
"""The most characters that Unicode normalization makes of one (NFKC of U+FDFA)."""
_SPECIAL_TOKENS = 8
"""More than a tokenizer's template adds to a text or a pair."""
_ROWS = 256
"""Vectors of tokens that are multiplied at a time, so that little memory is needed."""
Numbers: TypeAlias = npt.NDArray[np.float32]
Pair: TypeAlias = tuple[str, str]
"""Two texts that are scored together."""
Tokenized: TypeAlias = CheckedPrompt | RequestError | RequestFailedError
"""A prompt with token ids, or the error that making it raised."""

VECTORS = PoolingRequestOutput[PoolingOutput], PoolingOutput
EMBEDDINGS = EmbeddingRequestOutput, EmbeddingOutput
CLASSES = ClassificationRequestOutput, ClassificationOutput
SCORES = ScoringRequestOutput, ScoringOutput
"""What callers know the outputs of requests as: the class of a request's output, and that of the vector in it."""

_Request = TypeVar("_Request", bound=PoolingRequestOutput[Any])
_Made = TypeVar("_Made")


def check_pooling_params(params: Any) -> PoolingParams:
    """Return the parameters. Raises InvalidParamsError if they are something else."""
    if not isinstance(params, PoolingParams):
        raise InvalidParamsError(f"pooling_params must be PoolingParams, not {type(params).__name__}")
    return params


def pooling_output(output: RequestOutput, kind: type[_Request], outputs: type[PoolingOutput]) -> _Request:
    """Return the output of a pooling request, which has ended, as one of the classes that callers know."""
    data = np.zeros(0, np.float32) if output.pooled is None else output.pooled
    return kind(
        output.request_id,
        outputs(data),
        output.prompt_token_ids,
        output.finished,
        output.num_cached_tokens,
        output.prompt,
        output.metrics,
        output.error if output.error or output.pooled is not None else "the request was aborted",
        output.lora_request,
    )


def tokenized(
    inputs: PoolingInputs, given: Sequence[Prompt | Pair], params: PoolingParams, add_special_tokens: bool = True
) -> list[Tokenized]:
    """Return prompts with token ids; those of texts and pairs of texts are cut as the parameters say. In the place of
    one that cannot be made is its error. This may run in any thread."""
    spec = inputs.check_params(params)
    made: list[Tokenized] = []  # an annotation costs nothing, list[Tokenized]() 2 µs
    prompt: Any
    for place, prompt in enumerate(given):
        try:
            try:
                if isinstance(prompt, tuple) and len(prompt) == 2 and all(isinstance(text, str) for text in prompt):
                    token_ids, types = inputs.encode_pair(prompt, params)
                    prompt = {"prompt_token_ids": token_ids, "token_type_ids": types}
                made.append(inputs.prompt(prompt, params, spec, add_special_tokens))
            except Exception:
                with failures_named(f"number {place}", "when it was tokenized"):
                    raise
        except (RequestError, RequestFailedError) as error:
            made.append(error)
    return made


def may_be_too_long(inputs: PoolingInputs, prompt: Any) -> bool:
    """Whether a prompt may have more tokens than the model takes, as far as can be said without tokenizing it."""
    if inputs.info is None:
        return True
    room = min(inputs.max_tokens, inputs.info.max_whole_tokens) - _SPECIAL_TOKENS
    if not isinstance(prompt, str) and isinstance(prompt, Mapping) and prompt.keys() <= {"prompt", "cache_salt"}:
        prompt = prompt.get("prompt")
    for text in prompt if isinstance(prompt, tuple) else (prompt,):
        if not isinstance(text, str):
            return True
        room -= len(text) if text.isascii() else _EXPANSION * len(text)
    return room < 0


@dataclass(frozen=True, slots=True)
class ScoredPairs:
    """The pairs of a call of `LLM.score`: one text with each of several, or each of several with its own."""

    firsts: list[str]
    """One, or as many as `seconds`."""
    seconds: list[str]

    @classmethod
    def of(cls, data_1: Any, data_2: Any) -> ScoredPairs:
        """Check what the caller gave. Raises InvalidPromptError."""
        firsts, seconds = (_listed_texts(name, data) for name, data in (("data_1", data_1), ("data_2", data_2)))
        if len(firsts) not in (1, len(seconds)):
            raise InvalidPromptError(
                f"data_1 has {len(firsts)} texts and data_2 has {len(seconds)}: give one for all, or one for each"
            )
        return cls(firsts, seconds)

    def __iter__(self) -> Iterator[Pair]:
        return self._paired([*self.firsts, *self.seconds])

    def joined(
        self, tokenizer: Tokenizer, chat_template: str | None, variables: Mapping[str, Any] | None = None
    ) -> list[str | Pair]:
        """Return the pairs, or with a template the texts that it makes of them. Raises TokenizerError for a template
        that is wrong."""
        if chat_template is None:
            return list(self)
        made = [[{"role": "query", "content": a}, {"role": "document", "content": b}] for a, b in self]
        given = {**(variables or {}), "chat_template": chat_template, "add_generation_prompt": False}
        return [tokenizer.apply_chat_template(messages, **given) for messages in made]

    def by_likeness(self, outputs: Sequence[PoolingRequestOutput[Any]]) -> list[ScoringRequestOutput]:
        """Return the scores of the pairs from the vectors of `firsts` and then `seconds`: how alike they are."""
        return [_likeness_output(first, second) for first, second in self._paired(outputs)]

    def likenesses(self, vectors: Sequence[Numbers]) -> list[float]:
        """As `by_likeness`, of the vectors alone."""
        return [likeness(first, second) for first, second in self._paired(vectors)]

    def _paired(self, made: Sequence[_Made]) -> Iterator[tuple[_Made, _Made]]:
        firsts, seconds = list(made[: len(self.firsts)]), made[len(self.firsts) :]
        return zip(firsts * (len(seconds) if len(firsts) == 1 else 1), seconds, strict=True)


def likeness(first: Numbers, second: Numbers) -> float:
    """How alike two texts are: the cosine of their embeddings. Of vectors of tokens, the sum over those of the first
    text of the largest product with one of the second (MaxSim, Khattab and Zaharia 2020)."""
    if first.ndim == 2:
        pieces = [first[start : start + _ROWS] for start in range(0, len(first), _ROWS)]
        return float(sum([(rows @ second.T).max(axis=1).sum(dtype=np.float64) for rows in pieces]))
    a, b = first.astype(np.float64), second.astype(np.float64)
    norm = np.sqrt(a @ a) * np.sqrt(b @ b)
    return float(a @ b / norm) if norm else 0.0


def _listed_texts(name: str, data: Any) -> list[str]:
    listed = [data] if isinstance(data, str) else list(data) if isinstance(data, Sequence) else None
    if not listed or not all(isinstance(text, str) for text in listed):
        raise InvalidPromptError(f"{name} must be a text or a list of texts with at least one, not {str(data)[:60]!r}")
    return listed


def _likeness_output(first: PoolingRequestOutput[Any], second: PoolingRequestOutput[Any]) -> ScoringRequestOutput:
    error = first.error or second.error
    scores = [] if error else [likeness(first.outputs.data, second.outputs.data)]
    return ScoringRequestOutput(
        second.request_id,
        ScoringOutput(np.array(scores, np.float32)),
        first.prompt_token_ids + second.prompt_token_ids,
        num_cached_tokens=first.num_cached_tokens + second.num_cached_tokens,
        prompt=second.prompt,
        metrics=second.metrics,
        error=error,
        lora_request=second.lora_request,
    )


@cache
def _params_of(task: PoolingTask | None) -> PoolingParams:
    """What most calls ask for, checked once."""
    return PoolingParams(task=task)


def tokenization(given: Any, truncate_prompt_tokens: int | None) -> tuple[dict[str, Any], bool]:
    """Return what vLLM's `tokenization_kwargs` and the `truncate_prompt_tokens` of a call ask for: values for its
    PoolingParams, and whether special tokens are added. Raises InvalidParamsError."""
    values: dict[str, Any] = {"truncate_prompt_tokens": truncate_prompt_tokens}
    if given is None:
        return values, True
    if not isinstance(given, Mapping):
        raise InvalidParamsError(f"tokenization_kwargs must be a dict, not {type(given).__name__}")
    rest = dict(given)
    adds_special_tokens = rest.pop("add_special_tokens", True)
    check_flag("add_special_tokens", adds_special_tokens)
    if rest.get("truncation") in (True, "longest_first"):
        del rest["truncation"]
        max_length = rest.pop("max_length", None)
        values["truncate_prompt_tokens"] = -1 if max_length is None else max_length
    values |= {name: rest.pop(name) for name in ("truncate_prompt_tokens", "truncation_side") if name in rest}
    nothing = (None, False, "do_not_pad", "do_not_truncate")
    if more := [str(name) for name, value in rest.items() if value not in nothing]:
        raise InvalidParamsError(
            f"tokenization_kwargs: {', '.join(more)[:80]} is not supported (allowed: add_special_tokens, "
            "truncate_prompt_tokens, truncation_side, and max_length with truncation)"
        )
    return values, adds_special_tokens


def pooling_params(
    given: Any, task: PoolingTask | None, values: Mapping[str, Any], num_prompts: int
) -> list[PoolingParams]:
    """Return the parameters of each prompt, with the task and the `values` where they are not None. Raises
    InvalidParamsError if their number is another, or their task."""
    replaced = {name: value for name, value in {"task": task, **values}.items() if value is not None}
    if given is None:
        params = PoolingParams(**replaced) if replaced.keys() - {"task"} else _params_of(task)
        return [params] * num_prompts
    listed = given if isinstance(given, Sequence) else [given]
    for params in listed:
        if check_pooling_params(params).task not in (None, task) and task is not None:
            raise InvalidParamsError(f"task={params.task!r}: this call is for {task!r}; leave it out, or use encode")
    made = [replace(params, **replaced) for params in listed]
    if not isinstance(given, Sequence):
        return made * num_prompts
    check_number(len(made), "pooling_params", num_prompts)
    return made
