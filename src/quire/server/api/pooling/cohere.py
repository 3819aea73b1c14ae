"""/v1/embed and /v2/embed: embeddings as Cohere's clients ask for them."""

from __future__ import annotations

import base64
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from quire.config.checkpoint.sentence_transformers import read_sentence_config
from quire.server.api.pooling import protocol as api
from quire.server.api.pooling.answers import Output, made_response, num_numbers, packed, signs, usage_of
from quire.server.api.pooling.run import begin, check_count, check_task, params_of, pool, tokenized
from quire.server.http import sse
from quire.server.http.bodies import read_struct
from quire.server.http.endpoint import Endpoint, json_response
from quire.server.http.errors import invalid
from quire.server.http.state import context_of

_INPUT_TYPES = ("search_document", "search_query", "classification", "clustering", "image")
"""Cohere's own, for which a model need not have a prompt."""


async def create_cohere_embeddings(request: Request) -> ASGIApp:
    """POST /v1/embed or /v2/embed"""
    context, body = context_of(request), await read_struct(request, api.CohereEmbedRequest)
    is_v1 = request.url.path.endswith("/v1/embed")
    context.field_names |= {"dimensions": "output_dimension", "truncate_prompt_tokens=-1": "truncate=END"}
    check_count(len(body.texts), "texts")
    model = await begin(request, body, "texts")
    task = check_task(model, context, "embed")
    most = model.llm.inputs.pooling.most_tokens(task)
    limit = most if body.max_tokens is None else body.max_tokens
    if limit < 1:
        raise invalid(f"max_tokens={limit}: must be 1 or more", "max_tokens")
    if body.truncate_prompt_tokens is None and body.truncate != "NONE":
        body.truncate_prompt_tokens = min(limit, most)
        body.truncation_side = "left" if body.truncate == "START" else "right"
    params = params_of(context, body, task, dimensions=body.output_dimension)
    prompt = _prompt(model.llm.model_config.path, body.input_type)

    async def embed() -> list[Output]:
        prompts = await tokenized(model, [prompt + text for text in body.texts], params, name="texts[{}]".format)
        for place, made in enumerate(prompts):
            if len(made.token_ids) > limit:
                message = f"texts[{place}] has {len(made.token_ids)} tokens, and max_tokens is {limit}: shorten it, or "
                raise invalid(f"{message}let it be cut with truncate=END", f"texts[{place}]")
        return await pool(model, prompts, params, context.request_id)

    outputs = await sse.unless_disconnected(request, embed())
    forms = body.embedding_types or ["float"]
    units = api.BilledUnits(input_tokens=usage_of(outputs).prompt_tokens)

    def make() -> Response:
        made = _embeddings(outputs, forms)
        is_bare = is_v1 and not body.embedding_types
        embeddings: Any = made.numbers if is_bare else made
        answer = api.CohereEmbedResponse(
            id=context.request_id,
            response_type="embeddings_floats" if is_bare else "embeddings_by_type",
            embeddings=embeddings,
            texts=body.texts,
            meta=api.CohereMeta(api_version=api.ApiVersion(version="1" if is_v1 else "2"), billed_units=units),
        )
        return json_response(answer)

    return await made_response(make, num_numbers(outputs) * len(forms))


def _embeddings(outputs: list[Output], forms: list[Any]) -> api.CohereEmbeddings:
    """The vectors in these forms. Raises ApiError for vectors whose signs do not fill bytes."""
    made, vectors = api.CohereEmbeddings(), [output.outputs.data for output in outputs]
    if "float" in forms:
        listed: Any = [msgspec.Raw(msgspec.json.encode(each.tolist())) for each in vectors]
        made.numbers = listed
    if "base64" in forms:
        made.base64 = [base64.b64encode(packed(each)).decode() for each in vectors]
    if "ubinary" in forms or "binary" in forms:
        if len(vectors[0]) % 8:
            size = f"an embedding has {len(vectors[0])} elements, not a multiple of 8"
            raise invalid(f"embedding_types: signs fill bytes, and {size}", "embedding_types")
        packs = [signs(each) for each in vectors]
        if "ubinary" in forms:
            made.ubinary = [each.tolist() for each in packs]
        if "binary" in forms:
            made.binary = [(each - 128).tolist() for each in packs]
    return made


@lru_cache(64)
def _prompt(folder: Path, input_type: str | None) -> str:
    """What the model's folder says is put before texts of this kind, whose name may begin with `search_`. Raises
    ApiError for a name that neither the folder nor Cohere has."""
    prompts, kind = read_sentence_config(folder).prompts, input_type or ""
    for name in (kind, kind.removeprefix("search_")):
        if name in prompts:
            return prompts[name]
    if kind and kind not in _INPUT_TYPES:
        allowed = ", ".join(dict.fromkeys([*_INPUT_TYPES, *prompts]))
        raise invalid(f"input_type={kind[:80]!r}: must be one of {allowed}", "input_type")
    return ""


ENDPOINTS = tuple(
    Endpoint(
        path, "POST", create_cohere_embeddings, "Embed texts, for Cohere's clients",
        request=api.CohereEmbedRequest, response=api.CohereEmbedResponse, generates=True,
    )
    for path in ("/v2/embed", "/v1/embed")
)  # fmt: skip
