"""/v2/embed: embeddings as Cohere's clients ask for them."""

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
from quire.server.api.pooling.answers import Output, made_response, num_numbers, packed, usage_of
from quire.server.api.pooling.run import begin, check_count, check_task, params_of, pool, tokenized
from quire.server.http import sse
from quire.server.http.bodies import read_struct
from quire.server.http.endpoint import Endpoint, json_response
from quire.server.http.errors import invalid
from quire.server.http.state import context_of


async def create_cohere_embeddings(request: Request) -> ASGIApp:
    """POST /v2/embed"""
    context, body = context_of(request), await read_struct(request, api.CohereEmbedRequest)
    context.field_names |= {"dimensions": "output_dimension", "truncate_prompt_tokens=-1": "truncate=END"}
    check_count(len(body.texts), "texts")
    model = await begin(request, body, "texts")
    limit = model.llm.model_config.max_model_len if body.max_tokens is None else body.max_tokens
    if limit < 1:
        raise invalid(f"max_tokens={limit}: must be 1 or more", "max_tokens")
    if body.truncate_prompt_tokens is None and body.truncate != "NONE":
        body.truncate_prompt_tokens = min(limit, model.llm.model_config.max_model_len)
    params = params_of(context, body, check_task(model, context, "embed"), dimensions=body.output_dimension)
    prompt = _prompt(model.llm.model_config.path, body.input_type)

    async def embed() -> list[Output]:
        prompts = await tokenized(model, [prompt + text for text in body.texts], params, name="texts[{}]".format)
        for place, made in enumerate(prompts):
            if len(made.token_ids) > limit:
                message = f"texts[{place}] has {len(made.token_ids)} tokens, and max_tokens is {limit}: shorten it, or "
                raise invalid(f"{message}let it be cut with truncate=END", f"texts[{place}]")
        return await pool(model, prompts, params, context.request_id)

    outputs = await sse.unless_disconnected(request, embed())
    vectors, forms = [output.outputs.data for output in outputs], body.embedding_types or ["float"]
    units = api.BilledUnits(input_tokens=usage_of(outputs).prompt_tokens)

    def make() -> Response:
        made = api.CohereEmbeddings()
        if "float" in forms:
            listed: Any = [msgspec.Raw(msgspec.json.encode(each.tolist())) for each in vectors]
            made.numbers = listed
        if "base64" in forms:
            made.base64 = [base64.b64encode(packed(each)).decode() for each in vectors]
        meta = api.CohereMeta(api_version=api.ApiVersion(), billed_units=units)
        return json_response(
            api.CohereEmbedResponse(id=context.request_id, embeddings=made, texts=body.texts, meta=meta)
        )

    return await made_response(make, num_numbers(outputs) * len(forms))


@lru_cache(64)
def _prompt(folder: Path, input_type: str | None) -> str:
    """What the model's folder says is put before texts of this kind, whose name may begin with `search_`."""
    prompts, kind = read_sentence_config(folder).prompts, input_type or ""
    return prompts.get(kind, prompts.get(kind.removeprefix("search_"), ""))


ENDPOINTS = (
    Endpoint(
        "/v2/embed", "POST", create_cohere_embeddings, "Embed texts, for Cohere's clients",
        request=api.CohereEmbedRequest, response=api.CohereEmbedResponse, generates=True,
    ),
)  # fmt: skip
