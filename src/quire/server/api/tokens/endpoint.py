"""/tokenize, /detokenize and /tokenizer_info."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.types import ASGIApp

from quire.server.api.chat.prompt import chat_prompt
from quire.server.api.tokens import protocol as api
from quire.server.http.bodies import read_struct
from quire.server.http.endpoint import Endpoint, json_response
from quire.server.http.errors import invalid
from quire.server.http.state import ServerState, context_of, state_of


async def tokenize(request: Request) -> ASGIApp:
    """POST /tokenize"""
    state = state_of(request)
    body = await read_struct(request, api.TokenizeRequest)
    state.check_model(body.model)
    if body.prompt is None and body.messages is not None:
        context_of(request).field_names["prompt"] = "messages"
    token_ids = await _token_ids(state, body)
    tokenizer = state.llm.tokenizer
    return json_response(
        api.TokenizeResponse(
            count=len(token_ids),
            max_model_len=state.llm.model_config.max_model_len,
            tokens=token_ids,
            token_strs=[tokenizer.decode_token(i) for i in token_ids] if body.return_token_strs else None,
        )
    )


async def _token_ids(state: ServerState, body: api.TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("exactly one of prompt and messages is required", "prompt")
    if body.prompt is not None:
        return await state.llm.encode(body.prompt, body.add_special_tokens is not False)
    prompt = await chat_prompt(state, body, body.messages or [], body.tools, body.chat_template_kwargs or {})
    return prompt["prompt_token_ids"]


async def detokenize(request: Request) -> ASGIApp:
    """POST /detokenize"""
    state = state_of(request)
    body = await read_struct(request, api.DetokenizeRequest)
    state.check_model(body.model)
    vocab_size = state.llm.model_config.vocab_size
    if body.tokens and (largest := max(body.tokens)) >= vocab_size:
        raise invalid(
            f"tokens contains {largest}, but the largest token id of this model is {vocab_size - 1}", "tokens"
        )
    text = await asyncio.to_thread(state.llm.tokenizer.decode, body.tokens, skip_special_tokens=False)
    return json_response(api.DetokenizeResponse(prompt=text))


async def tokenizer_info(request: Request) -> ASGIApp:
    """GET /tokenizer_info"""
    state = state_of(request)
    tokenizer, special = state.llm.tokenizer, state.llm.tokenizer.special_tokens
    return json_response(
        api.TokenizerInfo(
            tokenizer_class="PreTrainedTokenizerFast",
            vocab_size=tokenizer.vocab_size,
            model_max_length=state.llm.model_config.max_model_len,
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
