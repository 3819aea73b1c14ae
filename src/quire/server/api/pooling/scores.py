"""/score and /rerank: how well texts fit together."""

import asyncio
from collections.abc import Sequence
from functools import partial

import numpy as np
from msgspec import UNSET
from starlette.requests import Request
from starlette.types import ASGIApp

from quire.interfaces.pooling import Pair, ScoredPairs
from quire.server.api.chat.prompt import check_client_template, template_variables
from quire.server.api.pooling import protocol as api
from quire.server.api.pooling.answers import Output, rows_response, usage_of
from quire.server.api.pooling.run import begin, check_count, check_task, params_of, pool, tokenized
from quire.server.http import sse
from quire.server.http.bodies import read_struct
from quire.server.http.endpoint import Endpoint, json_response
from quire.server.http.errors import invalid
from quire.server.http.state import RequestContext, context_of
from quire.server.models.served_model import ServedModel

_FIRST, _SECOND = ("text_1", "queries", "data_1"), ("text_2", "documents", "data_2", "items")


async def create_scores(request: Request) -> ASGIApp:
    """POST /score"""
    context, body = context_of(request), await read_struct(request, api.ScoreRequest)
    (name, first), (other, second) = _given(body, _FIRST), _given(body, _SECOND)
    check_count(len(first), name)
    check_count(len(second), other)
    if len(first) not in (1, len(second)):
        message = f"{name} has {len(first)} texts and {other} {len(second)}: give one for all, or one for each"
        raise invalid(message, name)
    model = await begin(request, body, other)
    pairs = ScoredPairs(first, second)
    scores, outputs = await sse.unless_disconnected(request, _score(model, context, body, pairs, (name, other)))
    rows = [partial(api.ScoreData, index=i, score=score) for i, score in enumerate(scores)]
    return await rows_response(context, (api.ScoreResponse, "score"), outputs, rows, len(scores))


async def create_reranking(request: Request) -> ASGIApp:
    """POST /rerank, or /v2/rerank in Cohere's form"""
    context, body = context_of(request), await read_struct(request, api.RerankRequest)
    is_cohere = request.url.path.endswith("/v2/rerank")
    documents = [body.documents] if isinstance(body.documents, str) else body.documents
    check_count(len(documents), "documents")
    if body.top_n is not None and body.top_n < 0:
        raise invalid(f"top_n={body.top_n}: must be 1 or more, or 0 for all documents", "top_n")
    model = await begin(request, body, "documents")
    texts = [one if isinstance(one, str) else one.text for one in documents]
    asked = _score(model, context, body, ScoredPairs([body.query], texts), ("query", "documents"))
    scores, outputs = await sse.unless_disconnected(request, asked)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: body.top_n or None]
    shows = not is_cohere if body.return_documents is None else body.return_documents
    units = api.CohereMeta(api_version=api.ApiVersion(), billed_units=api.BilledUnits(search_units=1))
    answer = api.RerankResponse(
        id=f"rerank-{context.request_id}",
        model=context.model,
        usage=usage_of(outputs),
        results=[
            api.RerankResult(
                index=i, relevance_score=scores[i], document=api.Document(text=texts[i]) if shows else UNSET
            )
            for i in order
        ],
        meta=units if is_cohere else UNSET,
    )
    return json_response(answer)


async def _cut(model: ServedModel, name: str, limit: int | None, texts: list[str]) -> list[str]:
    """The texts, each cut to this number of tokens, which is that of the field `name`."""
    if limit is None:
        return texts
    if limit < 1:
        raise invalid(f"{name}={limit}: must be 1 or more", name)
    inputs = model.llm.inputs
    starts = [inputs.readable(text, True, keeps_start=True) for text in texts]  # no more than the model can take
    return await asyncio.to_thread(lambda: [inputs.tokenizer.cut(text, limit) for text in starts])


async def _score(
    model: ServedModel, context: RequestContext, body: api.PairFields, given: ScoredPairs, names: tuple[str, str]
) -> tuple[list[float], list[Output]]:
    """The score of each pair: that of a model for pairs, or how alike the vectors of its texts are. `names` are the
    fields of the first and the second texts. What is too long with the other text, after documents were cut to
    `max_tokens_per_doc`, is cut too."""
    pairs = ScoredPairs(
        await _cut(model, "max_tokens_per_query", body.max_tokens_per_query, given.firsts),
        await _cut(model, "max_tokens_per_doc", body.max_tokens_per_doc, given.seconds),
    )
    if body.max_tokens_per_doc is not None and body.truncate_prompt_tokens is None:
        body.truncate_prompt_tokens = -1
    task = check_task(model, context, "score", "embed", "token_embed")
    params = params_of(context, body, task)
    count = len(pairs.firsts)

    def name(place: int) -> str:
        """The field of a text that is embedded, or of a pair's second one."""
        if task != "score" and place < count:
            return f"{names[0]}[{place}]" if count > 1 else names[0]
        return f"{names[1]}[{place if task == 'score' else place - count}]"

    if task == "score":
        joined = await _joined(model, body, pairs)
        outputs = await pool(model, await tokenized(model, joined, params, name=name), params, context.request_id)
        return [float(output.outputs.data[0]) for output in outputs], outputs
    if body.chat_template is not None:
        message = "chat_template is for models that read both texts of a pair, and this one embeds: leave it out"
        raise invalid(message, "chat_template")
    prompts = await tokenized(model, [*pairs.firsts, *pairs.seconds], params, name=name)
    outputs = await pool(model, prompts, params, context.request_id)
    if task == "token_embed":
        return await asyncio.to_thread(pairs.likenesses, [output.outputs.data for output in outputs]), outputs
    vectors = np.stack([output.outputs.data for output in outputs])
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return (vectors[:count] * vectors[count:]).sum(axis=1).tolist(), outputs


async def _joined(model: ServedModel, body: api.PairFields, pairs: ScoredPairs) -> list[str | Pair]:
    """The pairs, or the texts that a template makes of them: the request's, or the one that the server was given."""
    check_client_template(model, body.chat_template)
    template = body.chat_template or model.args.chat_template_text()
    variables = template_variables(model, body.chat_template_kwargs or {})
    if body.instruction is not None:
        variables["instruction"] = body.instruction
    if template is None:
        return pairs.joined(model.llm.tokenizer, None)
    return await asyncio.to_thread(pairs.joined, model.llm.tokenizer, template, variables)


def _given(body: api.ScoreRequest, names: Sequence[str]) -> tuple[str, list[str]]:
    """The texts of one side of the pairs, and the name under which they were given."""
    found = [(name, texts) for name in names if (texts := getattr(body, name)) is not None]
    if len(found) != 1:
        raise invalid(f"exactly one of {', '.join(names[:-1])} and {names[-1]} is required", names[0])
    [(name, texts)] = found
    return name, [texts] if isinstance(texts, str) else texts


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
            path, "POST", create_reranking, "Put documents in the order of their relevance to a query",
            request=api.RerankRequest, response=api.RerankResponse, generates=True,
        )
        for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    ),
)  # fmt: skip
