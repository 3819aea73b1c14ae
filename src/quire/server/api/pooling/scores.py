"""/score and /rerank: how well texts fit together."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import numpy as np
from msgspec import UNSET
from starlette.requests import Request
from starlette.types import ASGIApp

from quire.server.api.pooling import protocol as api
from quire.server.api.pooling.run import (
    Output,
    begin,
    check_count,
    check_task,
    numbers_response,
    params_of,
    pool,
    tokenized,
    usage_of,
)
from quire.server.http import sse
from quire.server.http.bodies import read_struct
from quire.server.http.endpoint import Endpoint
from quire.server.http.errors import invalid
from quire.server.http.state import RequestContext, context_of
from quire.server.models.served_model import ServedModel


async def create_scores(request: Request) -> ASGIApp:
    """POST /score"""
    context, body = context_of(request), await read_struct(request, api.ScoreRequest)
    first, second = _given(body.text_1, body.queries, "text_1"), _given(body.text_2, body.documents, "text_2")
    check_count(len(first), "text_1")
    check_count(len(second), "text_2")
    if len(first) not in (1, len(second)):
        message = f"text_1 has {len(first)} texts and text_2 {len(second)}: give one for all, or one for each"
        raise invalid(message, "text_1")
    model = await begin(request, body)
    scores, outputs = await sse.unless_disconnected(request, _score(model, context, body, first, second))
    return await numbers_response(
        api.ScoreResponse(
            id=f"score-{context.request_id}",
            created=int(time.time()),
            model=context.model,
            data=[api.ScoreData(index=i, score=score) for i, score in enumerate(scores)],
            usage=usage_of(outputs),
        ),
        len(scores),
    )


def _rerank(*, is_cohere_v2: bool) -> Callable[[Request], Coroutine[Any, Any, ASGIApp]]:
    async def create_reranking(request: Request) -> ASGIApp:
        """POST /rerank"""
        context, body = context_of(request), await read_struct(request, api.RerankRequest)
        check_count(len(body.documents), "documents")
        if body.top_n is not None and body.top_n < 0:
            raise invalid(f"top_n={body.top_n}: must be 1 or more, or 0 for all documents", "top_n")
        if body.truncate_prompt_tokens is None:
            body.truncate_prompt_tokens = body.max_tokens_per_doc
        model = await begin(request, body)
        texts = [one if isinstance(one, str) else one.text for one in body.documents]
        scores, outputs = await sse.unless_disconnected(request, _score(model, context, body, [body.query], texts))
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: body.top_n or None]
        shows = not is_cohere_v2 if body.return_documents is None else body.return_documents
        return await numbers_response(
            api.RerankResponse(
                id=f"rerank-{context.request_id}",
                model=context.model,
                usage=usage_of(outputs),
                results=[
                    api.RerankResult(
                        index=i,
                        relevance_score=scores[i],
                        document=api.Document(text=texts[i]) if shows else UNSET,
                    )
                    for i in order
                ],
                meta=api.CohereMeta(api_version=api.ApiVersion(), billed_units=api.BilledUnits(search_units=1))
                if is_cohere_v2
                else UNSET,
            ),
            len(order),
        )

    return create_reranking


async def _score(
    model: ServedModel, context: RequestContext, body: api.PoolingFields, first: Sequence[str], second: Sequence[str]
) -> tuple[list[float], list[Output]]:
    """The score of each text of `second` with its text of `first`, of which there may be one for all: that of a model
    for pairs, or the cosine of two embeddings."""
    task = check_task(model, context, "score", "embed")
    params = params_of(context, body, task)
    if task == "score":
        pairs = [(first[i if len(first) > 1 else 0], text) for i, text in enumerate(second)]
        outputs = await pool(model, await tokenized(model, pairs, params), params, context.request_id)
        return [float(output.outputs.data[0]) for output in outputs], outputs
    prompts = await tokenized(model, [*first, *second], params)
    outputs = await pool(model, prompts, params, context.request_id)
    vectors = np.stack([output.outputs.data for output in outputs])
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return (vectors[: len(first)] * vectors[len(first) :]).sum(axis=1).tolist(), outputs


def _given(text: api.Texts | None, other: api.Texts | None, field: str) -> list[str]:
    if (text is None) == (other is None):
        raise invalid(
            f"exactly one of {field} and {'queries' if field == 'text_1' else 'documents'} is required", field
        )
    found = other if text is None else text
    return [found] if isinstance(found, str) else list(found or ())


_RERANK, _RERANK_V2 = _rerank(is_cohere_v2=False), _rerank(is_cohere_v2=True)

ENDPOINTS = (
    *(
        Endpoint(
            path, "POST", create_scores, "Score pairs of texts",
            request=api.ScoreRequest, response=api.ScoreResponse, generates=True,
        )
        for path in ("/score", "/v1/score")
    ),
    *(
        Endpoint(
            path, "POST", handler, "Put documents in the order of their relevance to a query",
            request=api.RerankRequest, response=api.RerankResponse, generates=True,
        )
        for path, handler in (("/rerank", _RERANK), ("/v1/rerank", _RERANK), ("/v2/rerank", _RERANK_V2))
    ),
)  # fmt: skip
