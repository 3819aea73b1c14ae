"""Calls of tools beside a response_format: a grammar allows either, and holds both to their schemas."""

import json

import msgspec
import pytest

from quire.common.params import StructuredOutputsParams
from quire.server.api.chat.protocol import Tool
from quire.server.api.tools.choice import calls_or_content
from quire.server.api.tools.formats import TOOL_FORMATS
from tests.server.chats import CALL, HELLO, PATH, WEATHER, added_up, same_ids
from tests.server.in_process import saying

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
AS_CITY = {"type": "json_schema", "json_schema": {"name": "n", "schema": CITY | {"additionalProperties": False}}}
WRITTEN = [{"name": "weather", "arguments": {"city": city}} for city in ("Ulm", "Bonn")]
ARRAY = f"[TOOL_CALLS]{json.dumps(WRITTEN)}"
BARE = '{"name": "weather", "parameters": {"city": "Ulm"}}'


@pytest.mark.parametrize(
    ("format_name", "said", "content", "cities"),
    [
        ("hermes", CALL, None, ["Bonn"]),
        ("hermes", CALL + "\n" + CALL.replace("Bonn", "Ulm"), None, ["Bonn", "Ulm"]),
        ("hermes", '{"city": "Rome"}', '{"city": "Rome"}', []),
        ("hermes", '{\n  "city":\n  "Rome"}', '{\n  "city":\n  "Rome"}', []),
        ("hermes", json.dumps({"city": "<tool_call>" + BARE}), json.dumps({"city": "<tool_call>" + BARE}), []),
        ("mistral", ARRAY, None, ["Ulm", "Bonn"]),
        ("mistral", '{"city": "Rome"}', '{"city": "Rome"}', []),
        ("llama3_json", BARE, None, ["Ulm"]),
        ("llama3_json", f"{BARE}; {BARE}", None, ["Ulm", "Ulm"]),
        ("llama3_json", '{"city": "<|python_tag|>"}', '{"city": "<|python_tag|>"}', []),
    ],
)
@pytest.mark.parametrize("form", [AS_CITY, {"type": "json_object"}])
def test_with_a_format_the_model_may_still_call_tools(format_name, said, content, cities, form):
    server = saying(said, tool_format=TOOL_FORMATS[format_name])
    request = HELLO | {"tools": [WEATHER], "response_format": form, "temperature": 0}
    (choice,) = server.post(PATH, request).json["choices"]
    message = choice["message"]
    assert message["content"] == content
    calls = [json.loads(call["function"]["arguments"])["city"] for call in message.get("tool_calls", ())]
    assert calls == cities
    assert choice["finish_reason"] == ("tool_calls" if cities else "stop")
    (streamed,) = added_up(server.post(PATH, request | {"stream": True}).events)
    same_ids(streamed["message"], message)
    assert streamed == choice


FORBIDDEN = "stopped after"
"""What a request is told whose next token the grammar does not allow."""
BONN = '{"city": "Bonn"}'
DEEPSEEK = "<|tool_calls_begin|><|tool_call_begin|>{}<|tool_call_end|><|tool_calls_end|>"


def deepseek(call):
    """DeepSeek's marks around a call."""
    return DEEPSEEK.replace("{}", call).replace("|", "\uff5c").replace("_", "\u2581")


XML = "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n</function>\n</tool_call>"
DSML = (
    '<|DSML|function_calls>\n<|DSML|invoke name="weather">\n<|DSML|parameter name="city" string="true">Bonn'
    "</|DSML|parameter>\n</|DSML|invoke>\n</|DSML|function_calls>"
).replace("|", "\uff5c")
WRITTEN_CALLS = {
    "apertus": f'<|tools_prefix|>[{{"weather": {BONN}}}]<|tools_suffix|>',
    "cohere_command3": f'<|START_ACTION|>\n[{{"tool_name": "weather", "parameters": {BONN}}}]\n<|END_ACTION|>',
    "cohere_command_r": f'Action: ```json\n[{{"tool_name": "weather", "parameters": {BONN}}}]\n```',
    "deepseek_v3": deepseek(f"function<|tool_sep|>weather\n```json\n{BONN}\n```"),
    "deepseek_v31": deepseek(f"weather<|tool_sep|>{BONN}"),
    "deepseek_v32": DSML,
    "deepseek_v4": DSML.replace("function_calls", "tool_calls"),
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n</tool_call>",
    "gpt_oss": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{BONN}",
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {BONN}}}]',
    "granite-20b-fc": f'<function_call>{{"name": "weather", "arguments": {BONN}}}',
    "hermes": CALL,
    "hunyuan_a13b": f'<tool_calls>[{{"name": "weather", "arguments": {BONN}}}]</tool_calls>',
    "llama3_json": f'{{"name": "weather", "parameters": {BONN}}}',
    "internlm": f'<|action_start|><|plugin|>{{"name": "weather", "parameters": {BONN}}}<|action_end|>',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    f"{BONN}<|tool_call_end|><|tool_calls_section_end|>",
    "minimax_m2": '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Bonn</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {BONN}}}]',
    "mistral_v11": f"[TOOL_CALLS]weather[ARGS]{BONN}",
    "olmo3": '<function_calls>weather(city="Bonn",)</function_calls>',
    "pythonic": '[weather(city="Bonn",)]',
    "phi4_mini_json": f'<|tool_call|>[{{"name": "weather", "arguments": {BONN}}}]<|/tool_call|>',
    "qwen3_coder": XML,
    "seed_oss": XML.replace("tool_call>", "seed:tool_call>"),
}
"""A call of each format, as a grammar writes it."""


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_each_format_s_calls_are_written_by_a_grammar_and_read_again(name):
    request = HELLO | {"tools": [WEATHER], "response_format": AS_CITY, "temperature": 0}
    server = saying(WRITTEN_CALLS[name], tool_format=TOOL_FORMATS[name])
    (choice,) = server.post(PATH, request).json["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Bonn"})
    assert choice["message"]["content"] is None
    wrong = saying(WRITTEN_CALLS[name].replace("Bonn", "Rome"), tool_format=TOOL_FORMATS[name])
    assert FORBIDDEN in wrong.post(PATH, request).error["message"]


BOOK = {
    "type": "function",
    "function": {
        "name": "book",
        "parameters": {
            "properties": {
                "title": {"type": "string"},
                "kind": {"type": "string", "enum": ["poem", "play", None]},
                "parts": {"$ref": "#/$defs/parts"},
                "note": {"const": "new"},
                "odd": True,
            },
            "required": ["title", "kind", "parts", "year"],
            "$defs": {
                "parts": {"type": "array", "items": {"type": "object", "properties": {"n": {"$ref": "#/$defs/n"}}}},
                "n": {"type": "integer"},
            },
        },
    },
}
TITLE = 'a "b"\n</param> {'


def xml(**arguments):
    """A call of `book` as Qwen3-Coder writes it."""
    made = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function=book>\n{made}</function>\n</tool_call>"


def glm(**arguments):
    """The same as GLM writes it."""
    made = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in arguments.items())
    return f"<tool_call>book\n{made}</tool_call>"


@pytest.mark.parametrize(("name", "write"), [("qwen3_coder", xml), ("glm45", glm)])
@pytest.mark.parametrize("more", [{}, {"note": "new"}, {"odd": '{"a": [1]}'}, {"note": "new", "odd": '"text"'}])
def test_tagged_arguments_fit_their_schemas(name, write, more):
    request = HELLO | {"tools": [BOOK], "response_format": AS_CITY, "temperature": 0}
    right = {"title": TITLE, "kind": "play", "parts": '[{"n": 1}]'}
    year = {"year": "1600"}
    server = saying(write(**right, **more, **year), tool_format=TOOL_FORMATS[name])
    (choice,) = server.post(PATH, request).json["choices"]
    (call,) = choice["message"]["tool_calls"]
    others = {"odd": json.loads(more["odd"])} if "odd" in more else {}
    expected = {"title": TITLE, "kind": "play", "parts": [{"n": 1}], **more, **others, "year": 1600}
    assert json.loads(call["function"]["arguments"]) == expected
    for wrong in ({"kind": "novel"}, {"parts": '[{"n": "1"}]'}, {"other": "1"}):
        server = saying(write(**right | wrong, **more, **year), tool_format=TOOL_FORMATS[name])
        assert FORBIDDEN in server.post(PATH, request).error["message"]
    server = saying(write(**right, **more), tool_format=TOOL_FORMATS[name])
    assert FORBIDDEN in server.post(PATH, request).error["message"]


@pytest.mark.parametrize("said", [CALL.replace("Bonn", "Rome"), CALL.replace("weather", "other"), "Hello", "[1]"])
def test_calls_beside_a_format_fit_their_schema(said):
    server = saying(said, tool_format=TOOL_FORMATS["hermes"])
    answer = server.post(PATH, HELLO | {"tools": [WEATHER], "response_format": AS_CITY, "temperature": 0})
    assert FORBIDDEN in answer.error["message"]


@pytest.mark.parametrize(
    "more", [{"tool_choice": "none"}, {"tools": []}, {"guided_json": CITY, "response_format": None}]
)
def test_without_a_choice_the_format_is_all_there_is(more):
    request = HELLO | {"tools": [WEATHER], "response_format": AS_CITY, "temperature": 0} | more
    server = saying('{"city": "Rome"}', tool_format=TOOL_FORMATS["hermes"])
    assert server.post(PATH, request).json["choices"][0]["message"]["content"] == '{"city": "Rome"}'
    server = saying(CALL, tool_format=TOOL_FORMATS["hermes"])
    assert FORBIDDEN in server.post(PATH, request).error["message"]


@pytest.mark.parametrize(
    "parameters",
    [
        {"properties": []},
        {"required": 3},
        {"required": [3]},
        {"properties": {"a": {"type": "string", "enum": 3}}},
        {"properties": {"a": {"enum": "a", "anyOf": 3}}},
        {"properties": {"a": {"type": 3}}},
        {"properties": {"a": {"type": [["string"]]}}},
        {"properties": {"a": 3}},
    ],
)
def test_schemas_that_are_none_are_no_error_of_the_server(parameters):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **parameters}}}
    said = "<function=f>\n<parameter=a>\nb\n</parameter>\n</function>"
    server = saying(said, tool_format=TOOL_FORMATS["qwen3_coder"])
    (call,) = server.post(PATH, HELLO | {"tools": [tool]}).json["choices"][0]["message"]["tool_calls"]
    assert call["function"]["arguments"] == '{"a": "b"}'
    server = saying('{"city": "Rome"}', tool_format=TOOL_FORMATS["qwen3_coder"])
    answer = server.post(PATH, HELLO | {"tools": [tool], "response_format": AS_CITY, "temperature": 0})
    assert answer.status == 200 or (answer.status == 400 and "schema" in answer.error["message"])


def test_schemas_that_refer_to_large_ones_are_refused():
    """Each parameter between tags has a schema of its own, with what it refers to in it."""
    large = {"enum": ["x" * 8000]}
    properties = {f"p{i}": {"$ref": "#/$defs/large"} for i in range(40)}
    parameters = {"type": "object", "properties": properties, "$defs": {"large": large}}
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    request = HELLO | {"tools": [tool], "response_format": AS_CITY}
    answer = saying("", tool_format=TOOL_FORMATS["qwen3_coder"]).post(PATH, request)
    assert answer.status == 400
    assert "parameters with references need 3" in answer.error["message"]


def test_tags_that_are_special_tokens_stay_special():
    """The grammar of calls has the token itself, as the model writes it, and not its letters."""
    tools = msgspec.convert([WEATHER], list[Tool])
    form = StructuredOutputsParams(json_object=True)
    ids = {"<tool_call>": 7, "</tool_call>": 8}
    tag = calls_or_content(tools, form, TOOL_FORMATS["hermes"], ids, parallel=False).structural_tag
    calls = tag["format"]["elements"][1]["elements"][1]
    first, _, last = calls["tags"][0]["content"]["elements"]
    assert first["elements"] == [{"type": "token", "token": 7}, {"type": "const_string", "value": "\n"}]
    assert last["elements"] == [{"type": "const_string", "value": "\n"}, {"type": "token", "token": 8}]
    assert calls["stop_after_first"]
    tools = msgspec.convert([BOOK], list[Tool])
    tag = calls_or_content(tools, form, TOOL_FORMATS["glm45"], {"</arg_value>": 9}, parallel=True).structural_tag
    calls = tag["format"]["elements"][1]["elements"][1]
    title = calls["tags"][0]["content"]["elements"][1]
    assert title["elements"][1]["end"] == {"type": "token", "token": 9}
    assert not calls["stop_after_first"]
