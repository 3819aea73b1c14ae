"""The parsers of what requests hold (bodies, chat templates, lines of batch files), as targets of reliability.fuzz."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec

from quire.common.errors import RequestError, TokenizerError
from quire.server.api.batch_file import BatchRun, read_lines
from quire.server.api.chat import prompt as chat_prompt
from quire.server.api.chat.protocol import ChatCompletionRequest
from quire.server.api.completions.protocol import CompletionRequest
from quire.server.api.messages import input as messages_input
from quire.server.api.messages.protocol import MessagesRequest
from quire.server.api.responses import input as responses_input
from quire.server.api.responses.protocol import ResponsesRequest
from quire.server.api.shared import sampling
from quire.server.api.shared.fields import SamplingFields
from quire.server.api.tokens.protocol import DetokenizeRequest, TokenizeRequest
from quire.server.http import bodies
from quire.server.http.errors import ApiError
from quire.text.chat_template.template import ChatTemplate, check_messages
from reliability.fuzz_target import JSON, Target, refusal, scratch, tried

# --- bodies of requests


_BODIES: list[type[msgspec.Struct]] = [
    CompletionRequest, ChatCompletionRequest, ResponsesRequest, MessagesRequest, TokenizeRequest, DetokenizeRequest
]  # fmt: skip


def body(data: bytes) -> str:
    """Check that a body gives a request or an error that can be sent."""
    if not data:
        return "too short"
    try:
        made, unknown = bodies.decode(data[1:], _BODIES[data[0] % len(_BODIES)])
    except ApiError as error:
        msgspec.json.decode(error.to_json("/v1/completions"))
        return refusal(error, error.status in (400, 413), "a status of the client's fault")
    assert bodies.warning(unknown).isascii()
    assert bodies.warning(unknown).isprintable()
    tried(lambda: msgspec.json.encode(made), RecursionError)
    try:
        _understand(made)
    except (ApiError, RequestError) as error:
        return refusal(error)
    return ""


def _understand(request: Any) -> None:
    """Convert a request as the endpoints do: every conversation to a chat, and a chat to messages for the template."""
    if isinstance(request, ResponsesRequest):
        responses_input.check_request(request)
        items = msgspec.json.decode(msgspec.json.encode(responses_input.own_items(request)))  # as the store keeps them
        request = msgspec.convert(responses_input.chat_request(request, items), ChatCompletionRequest)
    elif isinstance(request, MessagesRequest):
        request = msgspec.convert(messages_input.chat_request(request), ChatCompletionRequest)
    if isinstance(request, ChatCompletionRequest):
        plain = [chat_prompt._plain_message(message, "messages", keeps_text=False) for message in request.messages]
        check_messages(plain)
        calls = [call for message in plain for call in message.get("tool_calls", ())]
        assert all(isinstance(call["function"]["arguments"], dict) for call in calls)
    if isinstance(request, SamplingFields):
        sampling.structure(request)


def _body_corpus() -> list[bytes]:
    user = [{"role": "user", "content": [{"type": "text", "text": "é"}]}]
    tool: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    asked = [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}]
    items: list[dict[str, Any]] = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
    ]
    blocks: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": user[0]["content"]}]},
    ]
    given: list[tuple[int, dict[str, Any]]] = [
        (0, {"prompt": ["a", "b"], "max_tokens": 5, "logit_bias": {"5": 1.5}, "stop": ["a"], "stream": True, "n": 2}),
        (0, {"prompt": [[1, 2]], "guided_json": {"type": "object"}, "seed": -5, "logprobs": 3, "unknown": {"a": [1]}}),
        (1, {"messages": user, "tools": [tool], "tool_choice": "auto", "response_format": {"type": "json_object"}}),
        (2, {"input": [*items, *asked], "instructions": "i", "tools": [tool["function"] | {"type": "function"}]}),
        (3, {"messages": blocks, "max_tokens": 5, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}),
        (2, {"input": asked, "metadata": {"a": "b"}, "reasoning": {"effort": "low"}, "previous_response_id": "resp_x"}),
        (3, {"messages": user, "max_tokens": 5, "system": "s", "thinking": {"type": "enabled", "budget_tokens": 9}}),
        (4, {"messages": user, "add_generation_prompt": True}), (5, {"tokens": [1, 2, 3]}),
    ]  # fmt: skip
    return [bytes([kind]) + json.dumps(fields).encode() for kind, fields in given]


# --- chat templates


def template(data: bytes) -> str:
    """Check that any text is compiled and rendered, or rejected, in a bounded time."""
    given: list[dict[str, Any]] = [{"role": "user", "content": "Hi <x>"}, {"role": "assistant", "content": None}]
    try:
        ChatTemplate(data.decode("utf-8", "replace")).render(
            given, add_generation_prompt=True, continue_final_message=False, tools=[{"a": 1}], variables={"b": [1, 2]}
        )
    except (TokenizerError, RequestError) as error:
        return refusal(error)
    return ""


def _template_corpus() -> list[bytes]:
    texts = [
        "{% for m in messages %}{{ m.role ~ ': ' ~ m['content'] | trim }}\n{% endfor %}{{ tools | tojson(indent=2) }}",
        "{%- set ns = namespace(x=0) -%}{%- for i in range(3) -%}{%- set ns.x = ns.x + i * 2 ** 3 -%}{%- endfor -%}",
        "{% macro f(a, b=1) %}{{ '%s' % a }}{% endmacro %}{{ f('x'.join(['a', 'b'])) }}{{ messages[::-1] | length }}",
        "{% if b is defined and 1 in b %}{{ b | map('string') | join('-') }}{% elif messages[0].content %}x{% endif %}",
        "{{ '{:>5}'.format(3) }}{{ b | batch(2) | list }}{{ raise_exception('no') if not tools }}",
        "{{ strftime_now('%Y') }}",
        "{% generation %}{% set x %}a{% endset %}{{ x | replace('a', 'b') | upper }}{% endgeneration %}{# no #}",
    ]  # fmt: skip
    return [text.encode() for text in texts]


# --- lines of batch files


async def _answering(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": b"{}"})


def batch(data: bytes) -> str:
    """Check that each line of a batch file has a result that can be written as JSON."""
    path = scratch(data)
    run = BatchRun(
        app=_answering, paths={"/v1/completions"}, is_running=lambda: True, max_in_flight=1, max_body_bytes=4096
    )

    async def results() -> list[Any]:
        return [await run._result(line, False) for _, line in read_lines(path, run.max_body_bytes, len(data))]

    made = asyncio.run(results())
    for result in made:
        line = msgspec.json.encode(result)
        assert b"\n" not in line
        assert (result.response is None) != (result.error is None)
    return ", ".join({result.error.message if result.error else "" for result in made}) or ("" if made else "no line")


def _batch_corpus() -> list[bytes]:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "a", "stream": False}}
    made = [json.dumps(line).encode(), json.dumps(line | {"url": "/v1/models"}).encode(), b'{"custom_id": null}']
    return [*made, b"\n".join(made), b"\n" + made[0] + b"\r\n" * 3]


_JINJA = (
    b"{{ |}} |{% for i in range(9) %}|{% endfor %}|map(|**|[::-1]|'x' * 9|{% set x = |.format(|tojson| ~ | in | is "
)
TARGETS = {
    "body": Target(body, _body_corpus, (*JSON, *b"messages max_tokens content \xed\xa0\x80 input stream".split())),
    "template": Target(template, _template_corpus, tuple(_JINJA.split(b"|"))),
    "batch": Target(batch, _batch_corpus, (*JSON, b"\n", *b"custom_id body stream url".split())),
}
"""Targets by name."""
