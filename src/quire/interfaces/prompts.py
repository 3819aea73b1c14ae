"""The forms in which callers of LLM give prompts, and outputs of prompts that were not run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict

from msgspec.structs import replace

from quire.common.errors import (
    InvalidParamsError,
    InvalidPromptError,
    QuireError,
    RequestError,
    RequestFailedError,
    failures_named,
)
from quire.common.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    RequestOutput,
    TokenScores,
)
from quire.common.params import BeamSearchParams, SamplingParams
from quire.common.params.checks import plain
from quire.engine.adapters import AnyAdapter
from quire.engine.requests.input_processor import Prompt
from quire.text.tokenizer.tokenizer import Tokenizer

PromptType = Prompt
"""vLLM's name."""


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids, and perhaps the text that they come from."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    token_type_ids: NotRequired[list[int]]
    cache_salt: NotRequired[str]


def check_number(number: int, what: str, num_prompts: int, allowed: str = "one for all, or one for each") -> None:
    """Raise InvalidParamsError unless there is one of these for each prompt."""
    if number != num_prompts:
        raise InvalidParamsError(f"{number} {what} for {num_prompts} prompts: give {allowed}")


def prioritized(params: list[SamplingParams], priority: int | Sequence[int] | None) -> list[SamplingParams]:
    """Return the parameters with these priorities. Raises InvalidParamsError if their number is another."""
    if priority is None:
        return params
    listed = list(priority) if isinstance(priority, Iterable) else [priority] * len(params)
    check_number(len(listed), "priorities", len(params))
    return [replace(each, priority=number) for each, number in zip(params, listed, strict=True)]


def made_prompts(
    given: Sequence[Any], make: Callable[[Any], Prompt]
) -> list[Prompt | RequestError | RequestFailedError]:
    """Return the prompts that `make` makes, and in the place of one that it cannot make the error."""
    prompts: list[Prompt | RequestError | RequestFailedError] = []
    for each in given:
        try:
            with failures_named(f"number {len(prompts)}", "when its prompt was made"):
                prompts.append(make(each))
        except (RequestError, RequestFailedError) as error:
            prompts.append(error)
    return prompts


def params_per_prompt(given: Any, num_prompts: int) -> list[SamplingParams]:
    """Return parameters for each prompt, given one for all or one for each, that ask for the final output only. Raises
    InvalidParamsError."""
    if isinstance(given, SamplingParams):
        return [replace(given, output_kind="final_only")] * num_prompts
    listed = list(given) if isinstance(given, Sequence) else [given]
    for params in listed:
        if not isinstance(params, SamplingParams):
            raise InvalidParamsError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
    check_number(len(listed), "sampling_params", num_prompts)
    return [replace(params, output_kind="final_only") for params in listed]


def adapters_of(lora_request: AnyAdapter | Sequence[AnyAdapter], num_prompts: int) -> list[AnyAdapter]:
    """Return the adapter of each prompt. Raises InvalidParamsError if a list has another length."""
    if lora_request is None or not isinstance(lora_request, Sequence):
        return [lora_request] * num_prompts
    check_number(len(lora_request), "lora_requests", num_prompts, "one for all, or one or None for each")
    return list(lora_request)


def listed_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """Return the prompts as a list, and whether a single prompt was given."""
    if hasattr(prompts, "tolist"):  # an array or a tensor
        prompts = prompts.tolist()
    if isinstance(prompts, str | Mapping):
        return [prompts], True
    if not isinstance(prompts, Sequence):
        raise InvalidPromptError(
            f"prompts must be a prompt (text, token ids or a dict) or a list of prompts, not {type(prompts).__name__}"
        )
    prompts = list(map(plain, prompts)) if prompts and getattr(prompts[0], "ndim", None) == 0 else prompts
    if prompts and isinstance(prompts[0], int) and all(isinstance(item, int) for item in prompts):
        return [prompts], True  # the token ids of one prompt
    return list(prompts), False


def token_scores(output: RequestOutput) -> TokenScores:
    """Return the scores of an output of a scoring request. Raises RequestError if it failed."""
    if output.error is not None:
        raise RequestError(output.error)
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
    scored = [(token_id, known) for token_id, known in pairs if known is not None]
    entries = [known[token_id] for token_id, known in scored]
    return TokenScores(
        token_ids=[token_id for token_id, _ in scored],
        logprobs=[entry.logprob for entry in entries],
        ranks=[entry.rank or 0 for entry in entries],
        num_cached_tokens=output.num_cached_tokens,
    )


def beam_search_output(output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer) -> BeamSearchOutput:
    """Return the output of a beam search with the prompt at the beginning of each sequence, as in vLLM."""
    found = [beam for beam in output.outputs if beam.finish_reason != "ignored"]
    sequences = [
        BeamSearchSequence(
            output.prompt_token_ids + beam.token_ids,
            beam.cumulative_logprob or 0.0,
            finish_reason=beam.finish_reason,
            stop_reason=beam.stop_reason,
        )
        for beam in found
    ]
    for sequence in sequences if params.detokenize else ():
        sequence.text = tokenizer.decode(sequence.tokens, params.skip_special_tokens)
    return BeamSearchOutput(sequences, output.error)


def is_conversation(messages: Any) -> bool:
    """Return whether these are the messages of one conversation, valid or not, rather than a list of conversations."""
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        return True
    return not messages or isinstance(messages[0], Mapping)


def rejected(request_id: str, prompt: Any, error: QuireError) -> RequestOutput:
    """Return the output of a request that was rejected."""
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return RequestOutput(
        request_id=request_id,
        prompt=text if isinstance(text, str) else None,
        prompt_token_ids=[],
        outputs=[CompletionOutput(index=0, text="", token_ids=[], finish_reason="ignored")],
        finished=True,
        error=str(error),
    )
