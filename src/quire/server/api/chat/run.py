"""Runs a chat: from the request to its events, and from the events to the whole response."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from msgspec import UNSET
from msgspec.structs import replace
from starlette.requests import Request

from quire.common.params import SamplingParams
from quire.server.api.chat import events as chat
from quire.server.api.chat import protocol as api
from quire.server.api.chat.output import ChatChoices, ChatPlan
from quire.server.api.chat.prompt import ChatPrompt, chat_prompt
from quire.server.api.shared.fields import Timings, TokenLogprob
from quire.server.api.shared.generation import TokenCounts, beside, generate
from quire.server.api.shared.sampling import check_request, make_params, name_fields
from quire.server.http.errors import invalid
from quire.server.http.state import context_of
from quire.server.models.served_model import ServedModel


async def run_chat(
    model: ServedModel,
    request: api.ChatCompletionRequest,
    request_id: str,
    http_request: Request,
    prompt: ChatPrompt | None = None,
) -> AsyncGenerator[chat.ChatEvent, None]:
    """Answer a conversation, whose prompt is made here unless it is given. Raises RequestError or ApiError; for an
    invalid request, before the first event.

    Closing the generator aborts the request. `request_id` need not be unique.
    """
    context = context_of(http_request)
    _name_fields(context.field_names, request)
    check_request(model, request)
    plan = ChatPlan(model, request)
    if plan.forced is not None:
        context.field_names["structured_outputs"] = "tools"
    prompt = prompt or await make_prompt(model, request, plan)
    params = make_params(
        model,
        context,
        request,
        max_tokens=_max_tokens(model, request),
        logprobs=_num_logprobs(request),
        structured_outputs=plan.structured_outputs,
    )
    if plan.shows_special_tokens and isinstance(params, SamplingParams):
        params = replace(params, skip_special_tokens=False)
    tokenizer = model.llm.tokenizer
    stream = partial(
        tokenizer.stream,
        prompt["prompt_token_ids"],
        skip_special_tokens=params.skip_special_tokens,
        spaces_between_special_tokens=request.spaces_between_special_tokens is not False,
    )
    counts, choices = TokenCounts(), ChatChoices(plan, request, prompt["prompt"], stream, tokenizer.token_bytes)
    timings: Timings | None = None
    async with aclosing(generate(model, [prompt], params, request_id)) as outputs:
        async for _, output in outputs:
            counts.add(0, output)
            timings = Timings.of(output.metrics) if output.finished else None
            if request.continuous_usage and not output.finished:
                yield chat.UsageEvent(counts.usage())
            for event in await beside(output, partial(choices.events, output, timings)):
                yield event
    yield chat.UsageEvent(counts.usage(), timings)


def _max_tokens(model: ServedModel, request: api.ChatCompletionRequest) -> int | None:
    config = model.llm.model_config
    given = request.max_completion_tokens, request.max_tokens, config.generation_config.get("max_new_tokens")
    return next((min(number, config.max_model_len) for number in given if number is not None), None)


async def make_prompt(model: ServedModel, request: api.ChatCompletionRequest, plan: ChatPlan) -> ChatPrompt:
    """Text and tokens of the prompt. Raises RequestError or ApiError."""
    return await chat_prompt(model, request, request.messages, plan.shown_tools, _variables(request))


async def fold(events: AsyncGenerator[chat.ChatEvent, None], *, id: str, model: str) -> api.ChatCompletion:
    """Fold the events into a whole response, and close them."""
    choices: dict[int, _Fold] = {}
    usage, prompt = chat.UsageEvent(TokenCounts().usage()), chat.PromptEvent(None, None)
    async with aclosing(events):
        async for event in events:
            match event:
                case chat.UsageEvent():
                    usage = event
                case chat.PromptEvent():
                    prompt = event
                case _:
                    choices.setdefault(event.index, _Fold()).add(event)
    return api.ChatCompletion(
        id=id,
        created=int(time.time()),
        model=model,
        choices=[choices[index].choice(index) for index in sorted(choices)],
        usage=usage.usage,
        timings=usage.timings or UNSET,
        prompt_token_ids=UNSET if prompt.token_ids is None else prompt.token_ids,
        prompt_logprobs=UNSET if prompt.logprobs is None else prompt.logprobs,
    )


class _Fold:
    """One choice of a whole response, built from its events."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, tuple[api.ToolCall, list[str]]] = {}
        self._logprobs: list[TokenLogprob] | None = None
        self._token_ids: list[int] | None = None
        self._end: chat.ChoiceFinished | None = None

    def add(self, event: chat.ChoiceEvent) -> None:
        """The next event of this choice."""
        match event:
            case chat.ContentDelta():
                self._content.append(event.text)
                if event.logprobs is not None:
                    self._logprobs = (self._logprobs or []) + event.logprobs
                if event.token_ids is not None:
                    self._token_ids = (self._token_ids or []) + event.token_ids
            case chat.ReasoningDelta():
                self._reasoning.append(event.text)
            case chat.ToolCallDelta():
                if event.tool_index not in self._calls:
                    call = api.ToolCall(id=event.id or "", function=api.FunctionCall(name=event.name or ""))
                    self._calls[event.tool_index] = call, []
                self._calls[event.tool_index][1].append(event.arguments)
            case chat.ChoiceFinished():
                self._end = event

    def choice(self, index: int) -> api.ChatChoice:
        """The whole choice."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        for call, arguments in self._calls.values():
            call.function.arguments = "".join(arguments)
        return api.ChatChoice(
            index=index,
            message=api.ResponseMessage(
                content=content or (None if self._calls else ""),
                reasoning_content=reasoning or UNSET,
                reasoning=reasoning or None,
                tool_calls=[call for call, _ in self._calls.values()] or UNSET,
            ),
            logprobs=None if self._logprobs is None else api.ChatLogprobs(self._logprobs),
            finish_reason=None if self._end is None else self._end.finish_reason,
            stop_reason=None if self._end is None else self._end.stop_reason,
            token_ids=UNSET if self._token_ids is None else self._token_ids,
        )


def _variables(request: api.ChatCompletionRequest) -> dict[str, Any]:
    """Variables of the chat template besides the messages."""
    named = {"reasoning_effort": request.reasoning_effort, "documents": request.documents}
    given = {name: value for name, value in named.items() if value is not None}
    return given | (request.chat_template_kwargs or {})


def _name_fields(names: dict[str, str], request: api.ChatCompletionRequest) -> None:
    """Add the names of fields as the client wrote them, in chat's terms or those of a protocol translated to chat."""
    name_fields(names, request)
    names.setdefault("prompt", "messages")
    if request.max_completion_tokens is not None:
        names.setdefault("max_tokens", "max_completion_tokens")
    if request.top_logprobs is not None:
        names.setdefault("logprobs", "top_logprobs")


def _num_logprobs(request: api.ChatCompletionRequest) -> int | None:
    if request.logprobs:
        return request.top_logprobs or 0
    if request.top_logprobs:
        raise invalid("top_logprobs requires logprobs=true", "top_logprobs")
    return None
