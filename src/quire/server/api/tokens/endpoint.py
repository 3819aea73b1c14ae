"""/tokenize, /detokenize and /tokenizer_info."""

import asyncio

from starlette.requests import Request
from starlette.types import ASGIApp

from quire.server.api.chat.prompt import chat_prompt
from quire.server.api.tokens import protocol as api
from quire.server.http.bodies import read_struct
from quire.server.http.endpoint import Endpoint, json_response
from quire.server.http.errors import invalid
from quire.server.http.state import context_of
from quire.server.models.served_model import ServedModel
from quire.server.models.use import use_model


async def tokenize(request: Request) -> ASGIApp:
    """POST /tokenize"""
    body = await read_struct(request, api.TokenizeRequest)
    model = await use_model(request, body.model)
    if body.prompt is None and body.messages is not None:
        context_of(request).field_names["prompt"] = "messages"
    token_ids = await _token_ids(model, body)
    tokenizer = model.llm.tokenizer
    return json_response(
        api.TokenizeResponse(
            count=len(token_ids),
            max_model_len=model.llm.model_config.max_model_len,
            tokens=token_ids,
            token_strs=[tokenizer.decode_token(i) for i in token_ids] if body.return_token_strs else None,
        )
    )


async def _token_ids(model: ServedModel, body: api.TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("exactly one of prompt and messages is required", "prompt")
    if body.prompt is not None:
        return await model.llm.tokenize(body.prompt, body.add_special_tokens is not False)
    prompt = await chat_prompt(model, body, body.messages or [], body.tools, body.chat_template_kwargs or {})
    return prompt["prompt_token_ids"]


async def detokenize(request: Request) -> ASGIApp:
    """POST /detokenize"""
    body = await read_struct(request, api.DetokenizeRequest)
    model = await use_model(request, body.model)
    vocab_size = model.llm.model_config.vocab_size
    if body.tokens and (largest := max(body.tokens)) >= vocab_size:
        raise invalid(
            f"tokens contains {largest}, but the largest token id of this model is {vocab_size - 1}", "tokens"
        )
    text = await asyncio.to_thread(model.llm.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response(api.DetokenizeResponse(prompt=text))


async def tokenizer_info(request: Request) -> ASGIApp:
    """GET /tokenizer_info, with `?model=` if there are several models."""
    model = await use_model(request, request.query_params.get("model"))
    tokenizer, special = model.llm.tokenizer, model.llm.tokenizer.special_tokens
    return json_response(
        api.TokenizerInfo(
            tokenizer_class="PreTrainedTokenizerFast",
            vocab_size=tokenizer.vocab_size,
            model_max_length=model.llm.model_config.max_model_len,
            bos_token=special.get("bos_token"),
            eos_token=special.get("eos_token"),
            pad_token=special.get("pad_token"),
            unk_token=special.get("unk_token"),
            chat_template=tokenizer.chat_templates.get("default"),
        )
    )


ENDPOINTS = (
    Endpoint(
        "/tokenize", "POST", tokenize, "Tokenize a text or a conversation",
        request=api.TokenizeRequest, response=api.TokenizeResponse,
    ),
    Endpoint(
        "/detokenize", "POST", detokenize, "Convert tokens to text",
        request=api.DetokenizeRequest, response=api.DetokenizeResponse,
    ),
    Endpoint("/tokenizer_info", "GET", tokenizer_info, "Describe the tokenizer", response=api.TokenizerInfo),
)  # fmt: skip
