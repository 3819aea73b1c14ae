"""/v1/embeddings, /pooling and /classify: what the model makes of each text alone."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.types import ASGIApp

from quire.common.params import PoolingTask
from quire.server.api.pooling import protocol as api
from quire.server.api.pooling.run import (
    Output,
    begin,
    check_task,
    numbers,
    numbers_response,
    params_of,
    pool,
    prompts_of,
    usage_of,
)
from quire.server.http import sse
from quire.server.http.bodies import read_struct
from quire.server.http.endpoint import Endpoint
from quire.server.http.state import RequestContext, context_of
from quire.server.models.served_model import ServedModel


async def create_embeddings(request: Request) -> ASGIApp:
    """POST /v1/embeddings"""
    context, body = context_of(request), await read_struct(request, api.EmbeddingRequest)
    model = await begin(request, body)
    task = check_task(model, context, "embed")
    outputs = await sse.unless_disconnected(request, _vectors(model, context, body, task))
    return await numbers_response(
        api.EmbeddingResponse(
            id=f"embd-{context.request_id}",
            created=int(time.time()),
            model=context.model,
            data=[
                api.EmbeddingData(index=i, embedding=numbers(output.outputs.data, body.encoding_format))
                for i, output in enumerate(outputs)
            ],
            usage=usage_of(outputs),
        ),
        _num_numbers(outputs),
    )


async def create_pooling(request: Request) -> ASGIApp:
    """POST /pooling"""
    context, body = context_of(request), await read_struct(request, api.PoolingRequest)
    model = await begin(request, body)
    assert model.llm.pooler is not None
    task = check_task(model, context, body.task or model.llm.pooler.tasks[0])
    outputs = await sse.unless_disconnected(request, _vectors(model, context, body, task))
    return await numbers_response(
        api.PoolingResponse(
            id=f"pool-{context.request_id}",
            created=int(time.time()),
            model=context.model,
            data=[
                api.PoolingData(index=i, data=numbers(output.outputs.data, body.encoding_format))
                for i, output in enumerate(outputs)
            ],
            usage=usage_of(outputs),
        ),
        _num_numbers(outputs),
    )


async def create_classification(request: Request) -> ASGIApp:
    """POST /classify"""
    context, body = context_of(request), await read_struct(request, api.ClassificationRequest)
    model = await begin(request, body)
    params = params_of(context, body, check_task(model, context, "classify"))

    async def classify() -> list[Output]:
        return await pool(model, await prompts_of(model, body, params), params, context.request_id)

    outputs = await sse.unless_disconnected(request, classify())
    names = model.llm.model_config.hf_config.get("id2label")
    return await numbers_response(
        api.ClassificationResponse(
            id=f"classify-{context.request_id}",
            created=int(time.time()),
            model=context.model,
            data=[
                api.ClassificationData(
                    index=i,
                    label=_label(names, int(np.argmax(output.outputs.data))),
                    probs=output.outputs.data.tolist(),
                    num_classes=len(output.outputs.data),
                )
                for i, output in enumerate(outputs)
            ],
            usage=usage_of(outputs),
        ),
        _num_numbers(outputs),
    )


async def _vectors(
    model: ServedModel, context: RequestContext, body: api.VectorFields, task: PoolingTask
) -> list[Output]:
    params = params_of(context, body, task, dimensions=body.dimensions, normalize=body.normalize)
    return await pool(model, await prompts_of(model, body, params), params, context.request_id)


def _label(names: Any, index: int) -> str | None:
    """The name that config.json has for a class; None if it has none."""
    found = names.get(str(index)) if isinstance(names, dict) else None
    return found if isinstance(found, str) else None


def _num_numbers(outputs: list[Output]) -> int:
    return sum([output.outputs.data.size for output in outputs])


ENDPOINTS = (
    Endpoint(
        "/v1/embeddings", "POST", create_embeddings, "Embed texts",
        request=api.EmbeddingRequest, response=api.EmbeddingResponse, generates=True,
    ),
    Endpoint(
        "/pooling", "POST", create_pooling, "Pool texts for any task of the model",
        request=api.PoolingRequest, response=api.PoolingResponse, generates=True,
    ),
    Endpoint(
        "/classify", "POST", create_classification, "Classify texts",
        request=api.ClassificationRequest, response=api.ClassificationResponse, generates=True,
    ),
)  # fmt: skip
