"""/v1/embeddings, /pooling and /classify: what the model makes of each text alone."""

from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.types import ASGIApp

from quire.common.params import PoolingTask
from quire.server.api.pooling import protocol as api
from quire.server.api.pooling.answers import BYTES, Numbers, Output, num_numbers, rows_response, vectors_response
from quire.server.api.pooling.run import begin, check_task, params_of, pool, prompts_of
from quire.server.http import sse
from quire.server.http.bodies import read_struct
from quire.server.http.endpoint import Endpoint
from quire.server.http.state import context_of
from quire.server.models.served_model import ServedModel


async def create_embeddings(request: Request) -> ASGIApp:
    """POST /v1/embeddings"""
    context, body = context_of(request), await read_struct(request, api.EmbeddingRequest)
    model = await begin(request, body)
    outputs = await _outputs(request, model, body, check_task(model, context, "embed"))
    kind = api.EmbeddingResponse, "embd"
    return await vectors_response(
        context, kind, body, outputs, lambda i, vector: api.EmbeddingData(index=i, embedding=vector)
    )


async def create_pooling(request: Request) -> ASGIApp:
    """POST /pooling"""
    context, body = context_of(request), await read_struct(request, api.PoolingRequest)
    model = await begin(request, body)
    assert model.llm.pooler is not None
    outputs = await _outputs(request, model, body, check_task(model, context, body.task or model.llm.pooler.tasks[0]))
    kind = api.PoolingResponse, "pool"
    return await vectors_response(context, kind, body, outputs, lambda i, data: api.PoolingData(index=i, data=data))


async def create_classification(request: Request) -> ASGIApp:
    """POST /classify"""
    context, body = context_of(request), await read_struct(request, api.ClassificationRequest)
    model = await begin(request, body)
    outputs = await _outputs(request, model, body, check_task(model, context, "classify"))
    names = model.llm.model_config.hf_config.get("id2label")
    rows = [partial(_classes, i, output.outputs.data, names) for i, output in enumerate(outputs)]
    return await rows_response(context, (api.ClassificationResponse, "classify"), outputs, rows, num_numbers(outputs))


def _classes(index: int, probs: Numbers, names: Any) -> api.ClassificationData:
    label = _label(names, int(np.argmax(probs)))
    return api.ClassificationData(index=index, label=label, probs=probs.tolist(), num_classes=len(probs))


async def _outputs(request: Request, model: ServedModel, body: api.InputFields, task: PoolingTask) -> list[Output]:
    context = context_of(request)
    shape = {"dimensions": body.dimensions, "normalize": body.normalize} if isinstance(body, api.VectorFields) else {}
    params = params_of(context, body, task, **shape)

    async def run() -> list[Output]:
        return await pool(model, await prompts_of(model, body, params), params, context.request_id)

    return await sse.unless_disconnected(request, run())


def _label(names: Any, index: int) -> str:
    """The name that config.json has for a class, or else that of transformers."""
    found = names.get(str(index)) if isinstance(names, dict) else None
    return found if isinstance(found, str) else f"LABEL_{index}"


ENDPOINTS = (
    Endpoint(
        "/v1/embeddings", "POST", create_embeddings, "Embed texts",
        request=api.EmbeddingRequest, response=api.EmbeddingResponse, generates=True, binary=BYTES,
    ),
    Endpoint(
        "/pooling", "POST", create_pooling, "Pool texts for any task of the model",
        request=api.PoolingRequest, response=api.PoolingResponse, generates=True, binary=BYTES,
    ),
    Endpoint(
        "/classify", "POST", create_classification, "Classify texts",
        request=api.ClassificationRequest, response=api.ClassificationResponse, generates=True,
    ),
)  # fmt: skip
