"""The forms in which callers of LLM give prompts, and outputs of prompts that were not run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from quire.common.errors import InvalidParamsError, InvalidPromptError, QuireError, RequestError
from quire.common.outputs import CompletionOutput, RequestOutput, TokenScores
from quire.common.params import SamplingParams
from quire.engine.adapters import AnyAdapter


def prioritized(params: list[SamplingParams], priority: int | Sequence[int] | None) -> list[SamplingParams]:
    """Return the parameters with these priorities. Raises InvalidParamsError if their number is another."""
    if priority is None:
        return params
    listed = [priority] * len(params) if isinstance(priority, int) else list(priority)
    if len(listed) != len(params):
        raise InvalidParamsError(
            f"{len(listed)} priorities for {len(params)} prompts: give one for all, or one for each"
        )
    return [replace(each, priority=number) for each, number in zip(params, listed, strict=True)]


def adapters_of(lora_request: AnyAdapter | Sequence[AnyAdapter], num_prompts: int) -> list[AnyAdapter]:
    """Return the adapter of each prompt. Raises InvalidParamsError if a list has another length."""
    if not isinstance(lora_request, Sequence):
        return [lora_request] * num_prompts
    if len(lora_request) != num_prompts:
        raise InvalidParamsError(
            f"{len(lora_request)} lora_requests for {num_prompts} prompts: give one for all, or one or None for each"
        )
    return list(lora_request)


def listed_prompts(prompts: Any) -> tuple[list[Any], bool]:
    """Return the prompts as a list, and whether a single prompt was given."""
    if isinstance(prompts, str | Mapping):
        return [prompts], True
    if not isinstance(prompts, Sequence):
        raise InvalidPromptError(
            f"prompts must be a prompt (text, token ids or a dict) or a list of prompts, not {type(prompts).__name__}"
        )
    if prompts and all(isinstance(item, int) for item in prompts):  # the token ids of one prompt
        return [prompts], True
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
