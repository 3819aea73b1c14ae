"""What the endpoints of pooled vectors share: from a body to prompts and parameters, and from those to outputs."""

from collections.abc import Callable, Sequence
from typing import Any

from starlette.requests import Request

from quire.common.errors import RequestError, RequestFailedError
from quire.common.params import PoolingParams, PoolingTask
from quire.engine.requests.input_processor import Prompt
from quire.engine.requests.pooling import CheckedPrompt
from quire.interfaces.pooling import Pair
from quire.server.api.chat.prompt import chat_text
from quire.server.api.pooling.answers import Output
from quire.server.api.pooling.protocol import InputFields, PoolingFields
from quire.server.api.shared.prompts import listed_prompts
from quire.server.http.errors import invalid
from quire.server.http.state import RequestContext, context_of, engine_id
from quire.server.models.served_model import ServedModel
from quire.server.models.use import use_model

MAX_TEXTS = 2048
"""Texts in a request, as in OpenAI's API."""


async def begin(request: Request, body: PoolingFields, field: str = "input") -> ServedModel:
    """The model of a request that was read, whose texts are in `field`. Raises ApiError: 400 if it generates text."""
    context = context_of(request)
    context.adopt_id(body.request_id)
    context.field_names["prompt"] = "messages" if isinstance(body, InputFields) and body.messages else field
    model = await use_model(request, body.model)
    if model.llm.pooler is None:
        raise invalid(
            f"the model {context.model!r} generates text: it has no embeddings, scores or classes. A decoder that was "
            "trained for them can be served with --runner pooling",
            "model",
            "unsupported_task",
        )
    return model


def check_task(model: ServedModel, context: RequestContext, *tasks: PoolingTask) -> PoolingTask:
    """The first of these tasks that the model has. Raises ApiError (400) if it has none."""
    known: Sequence[str] = () if model.llm.pooler is None else model.llm.pooler.tasks
    found = next((task for task in tasks if task in known), None)
    if found is None:
        message = f"the model {context.model!r} has the tasks {', '.join(known)}, and this endpoint needs "
        raise invalid(f"{message}{' or '.join(tasks)}", "model", "unsupported_task")
    return found


def params_of(context: RequestContext, body: PoolingFields, task: PoolingTask, **more: Any) -> PoolingParams:
    """The parameters of a request, where `more` are those that only some endpoints have. Raises RequestError."""
    names = (body.use_activation, body.activation, body.softmax)
    activation = next((value for value in names if value is not None), None)
    params = PoolingParams(
        task=task,
        use_activation=activation,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncation_side=body.truncation_side,
        cache_salt=body.cache_salt or "",
        priority=body.priority or 0,
        tenant="/".join(filter(None, (context.tenant, body.user))),  # no client can act as another key's tenant
        **more,
    )
    context.params = params
    return params


async def prompts_of(model: ServedModel, body: InputFields, params: PoolingParams) -> list[CheckedPrompt]:
    """The texts of a request, tokenized, or its conversation. Raises ApiError or RequestError."""
    if (body.input is None) == (body.messages is None):
        raise invalid("exactly one of input and messages is required", "input")
    if body.messages is not None:
        body.add_generation_prompt = bool(body.add_generation_prompt)  # no answer follows
        variables = body.chat_template_kwargs or {}
        text = await chat_text(model, body, body.messages, None, variables)
        return await tokenized(model, [text], params, bool(body.add_special_tokens))
    assert body.input is not None
    listed = listed_prompts(body.input)
    check_count(len(listed), "input")
    return await tokenized(model, listed, params, body.add_special_tokens is not False)


async def tokenized(
    model: ServedModel,
    given: Sequence[Prompt | Pair],
    params: PoolingParams,
    add_special_tokens: bool = True,
    name: Callable[[int], str] = "input[{}]".format,
) -> list[CheckedPrompt]:
    """Prompts of texts, and of pairs of texts. Raises RequestError if one of them is wrong. If there are several, it
    has what `name` makes of the index."""
    prompts = list[CheckedPrompt]()
    found = await model.llm.pooling_prompts(given, params, add_special_tokens=add_special_tokens)
    for place, made in enumerate(found):
        if isinstance(made, RequestFailedError):
            raise made
        if isinstance(made, RequestError):
            if len(given) > 1:
                made.args = (f"{name(place)}: {made}",)
            raise made
        prompts.append(made)
    return prompts


def check_count(count: int, field: str) -> None:
    """Raise ApiError (400) for more texts than a request may have, or none."""
    if not count:
        raise invalid(f"{field} must not be empty", field)
    if count > MAX_TEXTS:
        message = f"{field} has {count:,} texts; at most {MAX_TEXTS:,} are allowed: send several requests"
        raise invalid(message, field, "too_many_texts")


async def pool(model: ServedModel, prompts: Sequence[Prompt], params: PoolingParams, answer_id: str) -> list[Output]:
    """What the model makes of each prompt, in their order. If one fails, the others are aborted and its error is
    raised: RequestError, ApiError or any other."""

    request_ids = [engine_id(answer_id, place) for place in range(len(prompts))]
    return await model.llm.encode_many(prompts, params, request_ids, lora_request=model.adapter)
