"""/api/embed and /api/embeddings: embeddings in Ollama's form."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.server.api.ollama import protocol as api
from quire.server.api.ollama.input import keep_alive_s
from quire.server.api.pooling.answers import Output, made_response, num_numbers, usage_of
from quire.server.api.pooling.protocol import EmbeddingRequest
from quire.server.api.pooling.run import begin, check_count, check_task, params_of, pool, tokenized
from quire.server.http import sse
from quire.server.http.bodies import read_struct
from quire.server.http.endpoint import Endpoint, json_response
from quire.server.http.state import context_of, state_of


async def embed(request: Request) -> ASGIApp:
    """POST /api/embed"""
    body = await read_struct(request, api.EmbedRequest)
    texts = body.input if isinstance(body.input, list) else [body.input] if body.input else []
    if texts:
        check_count(len(texts), "input")
    start_ns = time.monotonic_ns()
    outputs, loaded_ns = await _embed(request, body, texts, body.dimensions, body.truncate is not False)
    name = context_of(request).model

    def make() -> Response:
        vectors: Any = [msgspec.Raw(msgspec.json.encode(output.outputs.data.tolist())) for output in outputs]
        return json_response(
            api.Embeddings(
                model=name,
                embeddings=vectors,
                total_duration=time.monotonic_ns() - start_ns,
                load_duration=loaded_ns - start_ns,
                prompt_eval_count=usage_of(outputs).prompt_tokens,
            )
        )

    return await made_response(make, num_numbers(outputs))


async def embed_one(request: Request) -> ASGIApp:
    """POST /api/embeddings"""
    body = await read_struct(request, api.EmbedOneRequest)
    outputs, _ = await _embed(request, body, [body.prompt] if body.prompt else [], None, True)
    return json_response(api.OneEmbedding(embedding=outputs[0].outputs.data.tolist() if outputs else []))


async def _embed(
    request: Request,
    body: api.EmbedRequest | api.EmbedOneRequest,
    texts: list[str],
    dimensions: int | None,
    truncates: bool,
) -> tuple[list[Output], int]:
    """The outputs, and when the model had been loaded, in nanoseconds. Long texts are cut, as Ollama does; without any
    text, the model is only loaded."""
    models, context = state_of(request).models, context_of(request)
    context.field_names["truncate_prompt_tokens=-1"] = "truncate=true"
    entry = models.find(body.model)
    fields = EmbeddingRequest(model=body.model, truncate_prompt_tokens=-1 if truncates else None)
    model = await begin(request, fields)
    loaded_ns = time.monotonic_ns()
    if body.keep_alive is not None:
        models.set_keep_alive(entry, keep_alive_s(body.keep_alive))
    params = params_of(context, fields, check_task(model, context, "embed"), dimensions=dimensions)

    async def run() -> list[Output]:
        return await pool(model, await tokenized(model, texts, params), params, context.request_id)

    return await sse.unless_disconnected(request, run()), loaded_ns


ENDPOINTS = (
    Endpoint(
        "/api/embed", "POST", embed, "Embed texts, in Ollama's form",
        request=api.EmbedRequest, response=api.Embeddings, generates=True,
    ),
    Endpoint(
        "/api/embeddings", "POST", embed_one, "Embed a text, in Ollama's older form",
        request=api.EmbedOneRequest, response=api.OneEmbedding, generates=True,
    ),
)  # fmt: skip
