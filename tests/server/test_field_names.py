"""Errors name the wrong field as the protocol of the request calls it, not as chat or the engine does."""

from typing import Any

import pytest

from tests.server.in_process import Answer, Server, saying

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
OLLAMA, GENERATE = "/api/chat", "/api/generate"
USER = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER},
    MESSAGES: {"messages": USER, "max_tokens": 5},
    RESPONSES: {"input": "Hi"},
    OLLAMA: {"model": "quire-tiny", "messages": USER},
    GENERATE: {"model": "quire-tiny", "prompt": "Hi"},
}
WRONG = {"type": "object", "properties": {"a": {"type": "nothing"}}}
"""A schema that no grammar can be made of."""


def tool(name: str = "f", **fields: Any) -> dict[str, Any]:
    """A tool as /v1/responses has it."""
    return {"type": "function", "name": name, **fields}


def own(name: str = "f", schema: dict[str, Any] | None = None) -> dict[str, Any]:
    """A tool as /v1/messages has it."""
    return {"name": name, "input_schema": schema or {}}


@pytest.fixture(scope="module")
def hello() -> Server:
    return saying()


def refused(server: Server, path: str, fields: dict[str, Any], stream: bool) -> Answer:
    answer = server.post(path, BODIES[path] | fields | {"stream": stream})
    assert answer.status == 400, answer.body
    return answer


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "said"),
    [
        (MESSAGES, {"tools": [own("a b")]}, "tools[0].name='a b': must be"),
        (MESSAGES, {"tools": [own(), own()]}, "tools[1].name: 'f' is already the name of tools[0]"),
        (MESSAGES, {"tools": [own(".function a")]}, "tools[0].name='.function a': must be"),
        (MESSAGES, {"tools": [own(schema={"type": "array"})]}, "tools[0].input_schema.type='array': must be"),
        (MESSAGES, {"tools": [own(schema={"type": "a.function"})]}, "tools[0].input_schema.type='a.function': must"),
        (MESSAGES, {"tools": [own()], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name='g' is not"),
        (MESSAGES, {"tool_choice": {"type": "any"}}, "tool_choice.type='any', but tools is empty"),
        (MESSAGES, {"metadata": {"user_id": "x" * 300}}, "metadata.user_id='xxx"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": WRONG}}}, "output_config: json is"),
        (MESSAGES, {"structured_outputs": {"json": WRONG}}, "json is rejected"),
        (MESSAGES, {"tools": [own(schema=WRONG)], "tool_choice": {"type": "any"}}, "tools: json is rejected"),
        (OLLAMA, {"format": WRONG}, "format: json is rejected"),
        (GENERATE, {"format": WRONG}, "format: json is rejected"),
        (GENERATE, {"context": [-1]}, "token id -1 of context is not"),
    ],
)  # fmt: skip
def test_protocols_whose_errors_are_text_alone(
    hello: Server, path: str, fields: dict[str, Any], said: str, stream: bool
) -> None:
    error = refused(hello, path, fields, stream).json["error"]
    assert (error["message"] if path == MESSAGES else error).startswith(said)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "param", "said"),
    [
        (RESPONSES, {"tools": [tool("a b")]}, "tools[0]", "tools[0].name='a b': must be"),
        (RESPONSES, {"tools": [tool(), tool()]}, "tools[1]", "tools[1].name: 'f' is already"),
        (RESPONSES, {"tools": [tool(parameters={"type": "array"})]}, "tools[0]", "tools[0].parameters.type='array'"),
        (RESPONSES, {"tools": [tool()], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice",
         "tool_choice.name='g' is not"),
        (RESPONSES, {"tools": [tool()], "tool_choice": {"type": "function", "name": "my.function"}}, "tool_choice",
         "tool_choice.name='my.function' is not"),
        (RESPONSES, {"tools": [tool()], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [tool("g")]}},
         "tool_choice", "tool_choice.tools='g' is not"),
        (RESPONSES, {"prompt": {"id": "p"}}, "prompt", "prompt: not supported"),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "name": "x", "schema": WRONG}}}, "text",
         "text: json is rejected"),
        (RESPONSES, {"structured_outputs": {"json": WRONG}}, "structured_outputs", "json is rejected"),
        (RESPONSES, {"structured_outputs": {"json": {}}, "text": {"format": {"type": "json_object"}}}, "text",
         "text and structured_outputs each constrain"),
        (RESPONSES, {"tools": [tool(parameters=WRONG)], "tool_choice": "required"}, "tools", "tools: json is rejected"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": WRONG}}},
         "response_format", "response_format: json is rejected"),
        (CHAT, {"guided_json": WRONG}, "guided_json", "guided_json: json is rejected"),
        (CHAT, {"best_of": 2**31}, "best_of", "1 prompts times best_of=2,147,483,648 are"),
        (CHAT, {"n": 2**31}, "n", "1 prompts times n=2,147,483,648 are"),
        (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message",
         "continue_final_message continues"),
    ],
)  # fmt: skip
def test_protocols_whose_errors_have_a_field(
    hello: Server, path: str, fields: dict[str, Any], param: str, said: str, stream: bool
) -> None:
    error = refused(hello, path, fields, stream).error
    assert error["param"] == param
    assert error["message"].startswith(said)
