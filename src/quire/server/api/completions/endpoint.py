"""/v1/completions: completes prompts. A whole response is folded from the chunks that a stream would send."""

import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial

import msgspec
from msgspec import UNSET
from msgspec.structs import replace
from starlette.requests import Request
from starlette.types import ASGIApp

from quire.common.outputs import CompletionOutput, Logprob, RequestOutput
from quire.common.params import BeamSearchParams, SamplingParams
from quire.common.params.sampling import ALL_LOGPROBS
from quire.engine.requests.input_processor import Prompt
from quire.server.api.completions.protocol import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from quire.server.api.shared.fields import Timings
from quire.server.api.shared.generation import TokenCounts, beside, finite, generate, prompt_logprobs, token_text
from quire.server.api.shared.prompts import listed_prompts
from quire.server.api.shared.sampling import check_request, make_params, name_fields, num_choices, structure
from quire.server.http import sse
from quire.server.http.bodies import read_struct
from quire.server.http.endpoint import Endpoint, choices_response
from quire.server.http.errors import invalid
from quire.server.http.state import RequestContext, context_of
from quire.server.models.served_model import ServedModel
from quire.server.models.use import use_model
from quire.text.tokenizer.token_decoder import TextStream

MAX_COPIED_BYTES = 64 * 1024**2
"""Limit on the size of a request's parameters times its number of prompts."""


async def create_completion(request: Request) -> ASGIApp:
    """POST /v1/completions"""
    context = context_of(request)
    body = await read_struct(request, CompletionRequest)
    context.adopt_id(body.request_id)
    answer_id = f"cmpl-{context.request_id}"
    model = await use_model(request, body.model)
    chunks = complete(model, context, body, answer_id)
    if body.stream:
        frames = sse.framed(chunks, lambda chunk: sse.frame(msgspec.json.encode(chunk)), end=sse.DONE)
        return await sse.event_stream(request, frames, error_event=sse.openai_error)
    return await choices_response(await sse.unless_disconnected(request, fold(chunks)))


async def complete(
    model: ServedModel, context: RequestContext, request: CompletionRequest, answer_id: str
) -> AsyncGenerator[Completion, None]:
    """The chunks of a response; the last one has usage and timings but no choices. Raises RequestError or ApiError."""
    prompts = listed_prompts(request.prompt)
    check_request(model, request, len(prompts))
    name_fields(context.field_names, request)
    params = _params(model, context, request)
    _check_copies(len(prompts), params)
    if request.add_special_tokens is False:
        prompts = [await _plainly_encoded(model, prompt) for prompt in prompts]
    choices = _Choices(model, request)
    counts, created = TokenCounts(), int(time.time())
    num_unfinished, timings = len(prompts), None
    async with aclosing(generate(model, prompts, params, answer_id)) as outputs:
        async for place, output in outputs:
            if request.max_tokens == 0:
                _forget_tokens(output)
            counts.add(place, output)
            num_unfinished -= output.finished
            made = await beside(output, partial(choices.of, place, output))
            timings = Timings.of(output.metrics) if not num_unfinished else None
            for choice in made:
                chunk = Completion(id=answer_id, created=created, model=context.model, choices=[choice])
                if request.includes_usage:
                    chunk.usage = counts.usage() if request.continuous_usage else None
                if timings is not None and choice is made[-1]:
                    chunk.timings = timings
                yield chunk
    if request.includes_usage or not request.stream:
        end = Completion(id=answer_id, created=created, model=context.model, choices=[], usage=counts.usage())
        end.timings = timings or UNSET
        yield end


async def fold(chunks: AsyncGenerator[Completion, None]) -> Completion:
    """The whole response, from the chunks of a request that is not a stream: each of them has a complete choice."""
    choices: list[CompletionChoice] = []
    async with aclosing(chunks):
        async for chunk in chunks:
            whole = chunk
            choices += chunk.choices
    whole.choices = sorted(choices, key=lambda choice: choice.index)
    return whole


def _check_copies(num_prompts: int, params: SamplingParams | BeamSearchParams) -> None:
    """Check the total size of the parameters, which the engine receives with each prompt. Raises ApiError (400)."""
    num_bytes = num_prompts * len(msgspec.json.encode(params)) if num_prompts > 1 else 0
    if num_bytes > MAX_COPIED_BYTES:
        message = (
            f"{num_prompts:,} prompts with these parameters have {num_bytes:,} bytes; at most {MAX_COPIED_BYTES:,} are"
        )
        raise invalid(f"{message} allowed; send fewer prompts per request", "prompt")


def _params(
    model: ServedModel, context: RequestContext, request: CompletionRequest
) -> SamplingParams | BeamSearchParams:
    if request.suffix:
        raise invalid("suffix is not supported; leave it out", "suffix")
    if request.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens=0 requires echo=true, which returns the scored prompt", "max_tokens")
    default = model.llm.default_sampling_params().max_tokens
    max_tokens = default if request.max_tokens is None else request.max_tokens or 1
    params = make_params(
        model, context, request, max_tokens=max_tokens, logprobs=request.logprobs, structured_outputs=structure(request)
    )
    if request.echo and request.logprobs is not None and isinstance(params, SamplingParams):
        wanted = {request.logprobs, request.prompt_logprobs or 0}
        params = replace(params, prompt_logprobs=ALL_LOGPROBS if ALL_LOGPROBS in wanted else max(wanted))
    return params


async def _plainly_encoded(model: ServedModel, prompt: Prompt) -> Prompt:
    """The prompt encoded without the special tokens that the engine's interface would add."""
    if not isinstance(prompt, str):
        return prompt
    return {"prompt": prompt, "prompt_token_ids": await model.llm.tokenize(prompt, add_special_tokens=False)}


def _forget_tokens(output: RequestOutput) -> None:
    """Remove the one token that the engine always generates, but that the request did not ask for."""
    for choice in output.outputs:
        choice.text, choice.token_ids, choice.logprobs = "", [], choice.logprobs and []
        choice.finish_reason, choice.stop_reason = "length", None


class _TextOffsets:
    """Where each token begins in a text, in characters: all parts of a character begin where it does."""

    def __init__(self, stream: TextStream, start: int, special: Mapping[int, str], text: str = "") -> None:
        """`start` is the first token's offset. Of the `special` tokens that the stream skips, those count that `text`
        spells."""
        self._stream, self._end = stream, start
        self._special, self._text = special, text

    def take(self, token_id: int) -> int:
        """Return the offset of the next token."""
        start, spelt = self._end, self._special.get(token_id, "")
        self._end += len(self._stream.push(token_id)) or len(spelt) * self._text.startswith(spelt, start)
        return start


class _Choices:
    """Converts a request's outputs to choices, each beginning with the prompt if `echo` is set."""

    def __init__(self, model: ServedModel, request: CompletionRequest) -> None:
        self._tokenizer = model.llm.tokenizer
        self._request = request
        self._num_choices = num_choices(request)
        self._skips_special = request.skip_special_tokens is not False
        self._offsets: dict[int, _TextOffsets] = {}
        self._prompt_logprobs: dict[int, list[dict[int, Logprob] | None]] = {}

    def of(self, place: int, output: RequestOutput) -> list[CompletionChoice]:
        """The new parts of the choices of this prompt."""
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[place] = output.prompt_logprobs
        made = (self._choice(place, output, choice) for choice in output.outputs)
        return [choice for choice in made if choice is not None]

    def _choice(self, place: int, output: RequestOutput, delta: CompletionOutput) -> CompletionChoice | None:
        request, index = self._request, place * self._num_choices + delta.index
        is_first = index not in self._offsets
        echoed = self._prompt_text(output) if is_first and request.echo else ""
        choice = CompletionChoice(
            index=index, text=echoed + delta.text, finish_reason=delta.finish_reason, stop_reason=delta.stop_reason
        )
        logprobs = choice.logprobs = CompletionLogprobs([], [], [], []) if request.logprobs is not None else None
        if is_first:
            self._offsets[index] = self._output_offsets(output, len(echoed))
            if request.echo and logprobs is not None:
                offsets = self._prompt_offsets(output, echoed)
                self._append(logprobs, output.prompt_token_ids, self._prompt_logprobs[place], offsets)
        if logprobs is not None and delta.logprobs is not None:
            self._append(logprobs, delta.token_ids, delta.logprobs, self._offsets[index])
        if request.return_token_ids:
            choice.token_ids = delta.token_ids
        if is_first:
            self._add_prompt(choice, place, output)
        has_content = choice.text or choice.finish_reason or (logprobs and logprobs.tokens) or choice.token_ids
        return choice if has_content or is_first else None

    def _add_prompt(self, choice: CompletionChoice, place: int, output: RequestOutput) -> None:
        if self._request.return_token_ids:
            choice.prompt_token_ids = output.prompt_token_ids
        if self._request.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(self._prompt_logprobs[place]) or UNSET

    def _prompt_text(self, output: RequestOutput) -> str:
        if output.prompt is not None and self._request.truncate_prompt_tokens is None:
            return output.prompt
        return self._tokenizer.decode(output.prompt_token_ids, skip_special_tokens=self._skips_special)

    def _prompt_offsets(self, output: RequestOutput, text: str) -> _TextOffsets:
        """Those of the prompt's tokens in its text. A text that a client gave lacks the special tokens that were added
        to it."""
        skips_special = self._skips_special or text == output.prompt
        stream = self._tokenizer.stream(skip_special_tokens=skips_special)
        return _TextOffsets(stream, 0, self._tokenizer.special_token_texts, text)

    def _output_offsets(self, output: RequestOutput, start: int) -> _TextOffsets:
        stream = self._tokenizer.stream(
            output.prompt_token_ids,
            skip_special_tokens=self._skips_special,
            spaces_between_special_tokens=self._request.spaces_between_special_tokens is not False,
        )
        return _TextOffsets(stream, start, self._tokenizer.special_token_texts)

    def _append(
        self,
        logprobs: CompletionLogprobs,
        token_ids: list[int],
        rows: list[dict[int, Logprob] | None] | list[dict[int, Logprob]],
        offsets: _TextOffsets,
    ) -> None:
        """Append tokens to `logprobs`; `offsets` are those of the text that they belong to."""
        as_ids, num_top = bool(self._request.return_tokens_as_token_ids), self._request.logprobs or 0
        for token_id, row in zip(token_ids, rows, strict=True):
            logprobs.text_offset.append(offsets.take(token_id))
            if row is None:
                text = self._tokenizer.decode_token(token_id)
                logprobs.tokens.append(f"token_id:{token_id}" if as_ids else text)
                logprobs.token_logprobs.append(None)
                logprobs.top_logprobs.append(None)
                continue
            logprobs.tokens.append(token_text(token_id, row[token_id], as_ids))
            logprobs.token_logprobs.append(finite(row[token_id].logprob))
            shown = list(row.items())[: len(row) if num_top == ALL_LOGPROBS else num_top + 1]
            top = {token_text(i, lp, as_ids): finite(lp.logprob) for i, lp in reversed(shown)}  # its own text wins
            logprobs.top_logprobs.append(top)


ENDPOINTS = (
    Endpoint(
        "/v1/completions", "POST", create_completion, "Complete prompts",
        request=CompletionRequest, response=Completion, chunk=Completion, generates=True,
    ),
)  # fmt: skip
