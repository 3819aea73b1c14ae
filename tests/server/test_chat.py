"""/v1/chat/completions: the protocol of the stream, tools, reasoning, and streams against whole answers."""

import json

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.common.errors import ConfigError, TokenizerError
from quire.common.params import StructuredOutputsParams
from quire.server.api.chat.protocol import Tool
from quire.server.api.tools import REASONING_FORMATS, TOOL_FORMATS, calls_or_content
from quire.server.config import ServerArgs
from tests.effort import examples
from tests.scripted_engine import recital
from tests.server.in_process import saying, tokenizer_of

PATH = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Bonn", "Ulm"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'


@pytest.mark.essential
def test_an_answer_has_openai_s_shape():
    answer = saying("Hello there.").post(PATH, HELLO)
    body = answer.json
    assert answer.status == 200
    assert body["id"] == "chatcmpl-" + answer.headers["x-request-id"]
    assert (body["object"], body["model"]) == ("chat.completion", "quire-tiny")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello there.", "refusal": None, "reasoning": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": None,
        }
    ]
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    assert body["timings"]["total_s"] >= 0


def test_a_stream_begins_with_the_role_and_ends_with_the_reason_and_the_usage():
    request = HELLO | {"stream": True, "stream_options": {"include_usage": True}}
    first, *middle, last, usage = saying("Hello there.").post(PATH, request).events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == "Hello there."
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in [first, *middle])
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] > 0
    assert usage["timings"]["decode_s"] >= 0
    assert {chunk["object"] for chunk in (first, last, usage)} == {"chat.completion.chunk"}


REPLIES = (
    "Hello there 😀.",
    "<think>\nWell, now.\n</think>\n\nHello!",
    CALL,
    "I will ask.\n" + CALL + "\n" + CALL.replace("Bonn", "Ulm"),
    "<think>Hm, " + CALL + "</think>" + CALL,
    "<tool_call>{broken}</tool_call>",
)


@pytest.mark.essential
@settings(max_examples=examples(80), deadline=None)
@given(
    reply=st.sampled_from(REPLIES),
    more=st.fixed_dictionaries(
        {"n": st.integers(1, 3), "max_tokens": st.integers(1, 60)},
        optional={
            "logprobs": st.just(True),
            "tools": st.just([WEATHER]),
            "tool_choice": st.sampled_from(["auto", "none"]),
            "parallel_tool_calls": st.booleans(),
            "include_reasoning": st.booleans(),
            "return_token_ids": st.booleans(),
            "prompt_logprobs": st.just(1),
            "stop": st.sampled_from(["lo", "city"]),
        },
    ),
)
def test_a_stream_adds_up_to_the_whole_answer(reply, more):
    server = saying(reply, tool_format=TOOL_FORMATS["hermes"], reasoning_format=REASONING_FORMATS["think"])
    more = {"temperature": 1} | more | ({"top_logprobs": 2} if "logprobs" in more else {})
    whole = server.post(PATH, HELLO | more).json
    options = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    chunks = server.post(PATH, HELLO | more | options).events
    usage = chunks.pop()["usage"]
    assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
    folded = added_up(chunks)
    for choice, expected in zip(folded, whole["choices"], strict=True):
        _same_ids(choice["message"], expected["message"])
    assert folded == whole["choices"]
    assert chunks[0].get("prompt_logprobs") == whole.get("prompt_logprobs")
    assert chunks[0].get("prompt_token_ids") == whole.get("prompt_token_ids")


def added_up(chunks):
    """Choices as a client puts them together."""
    choices = {}
    for chunk in chunks:
        (delta,) = chunk["choices"]
        message = {"role": "assistant", "content": "", "refusal": None, "reasoning": None}
        blank = {"index": delta["index"], "message": message, "logprobs": None, "finish_reason": None}
        is_first = delta["index"] not in choices
        choice = choices.setdefault(delta["index"], blank)
        assert choice["finish_reason"] is None
        assert ("role" in delta["delta"]) == is_first
        message = choice["message"]
        for key in ("content", "reasoning_content", "reasoning"):
            if key in delta["delta"]:
                message[key] = (message.get(key) or "") + delta["delta"][key]
        for call in delta["delta"].get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                function = {"name": call["function"]["name"], "arguments": ""}
                calls.append({"id": call["id"], "type": call["type"], "function": function})
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        if delta["logprobs"] is not None:
            choice["logprobs"] = choice["logprobs"] or {"content": [], "refusal": None}
            choice["logprobs"]["content"] += delta["logprobs"]["content"]
        if "token_ids" in delta:
            choice["token_ids"] = choice.get("token_ids", []) + delta["token_ids"]
        choice["finish_reason"] = delta["finish_reason"]
        choice["stop_reason"] = delta.get("stop_reason")
    for choice in choices.values():
        if not choice["message"]["content"] and "tool_calls" in choice["message"]:
            choice["message"]["content"] = None
    return [choices[index] for index in sorted(choices)]


def _same_ids(message, expected):
    """Ids of calls are drawn."""
    for one in (message, expected):
        for i, call in enumerate(one.get("tool_calls", ())):
            assert call["id"].startswith("call_")
            call["id"] = str(i)


def test_reasoning_and_calls_are_distinguished():
    reply = "<think>Ask.</think>\n" + CALL
    server = saying(reply, tool_format=TOOL_FORMATS["hermes"], reasoning_format=REASONING_FORMATS["think"])
    (choice,) = server.post(PATH, HELLO | {"tools": [WEATHER]}).json["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "Ask."
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("weather", {"city": "Bonn"})


def test_without_tools_or_with_none_chosen_calls_are_text():
    server = saying(CALL, tool_format=TOOL_FORMATS["hermes"])
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        message = server.post(PATH, HELLO | more).json["choices"][0]["message"]
        assert message["content"] == CALL
        assert "tool_calls" not in message


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_made_by_any_model(tiny, choice):
    request = HELLO | {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 100}
    whole = tiny.post(PATH, request | {"temperature": 0}).json["choices"][0]
    assert whole["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Bonn", "Ulm")
    (streamed,) = added_up(tiny.post(PATH, request | {"temperature": 0, "stream": True}).events)
    _same_ids(streamed["message"], whole["message"])
    assert streamed == whole


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize(
    "form", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1]}}}]
)
def test_a_forced_call_does_not_have_the_form_of_the_content(tiny, choice, form):
    request = HELLO | {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 100, "temperature": 0}
    (plain,) = tiny.post(PATH, request).json["choices"]
    (formed,) = tiny.post(PATH, request | {"response_format": form}).json["choices"]
    _same_ids(formed["message"], plain["message"])
    assert formed == plain
    assert formed["message"]["tool_calls"]


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
    _same_ids(streamed["message"], message)
    assert streamed == choice


FORBIDDEN = "stopped after"
"""What a request is told whose next token the grammar does not allow."""
BONN = '{"city": "Bonn"}'
DEEPSEEK = "<|tool_calls_begin|><|tool_call_begin|>{}<|tool_call_end|><|tool_calls_end|>"


def deepseek(call):
    """DeepSeek's marks around a call."""
    return DEEPSEEK.replace("{}", call).replace("|", "\uff5c").replace("_", "\u2581")


XML = "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n</function>\n</tool_call>"
WRITTEN_CALLS = {
    "cohere_command3": f'<|START_ACTION|>\n[{{"tool_name": "weather", "parameters": {BONN}}}]\n<|END_ACTION|>',
    "cohere_command_r": f'Action: ```json\n[{{"tool_name": "weather", "parameters": {BONN}}}]\n```',
    "deepseek_v3": deepseek(f"function<|tool_sep|>weather\n```json\n{BONN}\n```"),
    "deepseek_v31": deepseek(f"weather<|tool_sep|>{BONN}"),
    "glm45": "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n</tool_call>",
    "gpt_oss": f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{BONN}",
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {BONN}}}]',
    "granite-20b-fc": f'<function_call>{{"name": "weather", "arguments": {BONN}}}',
    "hermes": CALL,
    "hunyuan_a13b": f'<tool_calls>[{{"name": "weather", "arguments": {BONN}}}]</tool_calls>',
    "llama3_json": f'{{"name": "weather", "parameters": {BONN}}}',
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {BONN}}}]',
    "mistral_v11": f"[TOOL_CALLS]weather[ARGS]{BONN}",
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


def test_logprobs_in_the_shape_of_chats(tiny):
    request = HELLO | {"logprobs": True, "top_logprobs": 2, "temperature": 0, "max_tokens": 5}
    (choice,) = tiny.post(PATH, request).json["choices"]
    told = choice["logprobs"]["content"]
    assert len(told) == 5
    for token in told:
        assert len(token["top_logprobs"]) == 2
        assert token["top_logprobs"][0]["logprob"] == token["logprob"]  # greedy
        assert bytes(token["bytes"]).decode() == token["token"]
    assert "".join(token["token"] for token in told) == choice["message"]["content"]


def test_tokens_by_their_numbers(tiny):
    request = HELLO | {"logprobs": True, "temperature": 0, "max_tokens": 3}
    more = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    body = tiny.post(PATH, request | more).json
    (choice,) = body["choices"]
    assert [t["token"] for t in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert len(body["prompt_token_ids"]) == body["usage"]["prompt_tokens"]


def test_the_prompt_is_the_template_s(reciting):
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    tokenizer = tokenizer_of(reciting)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "Hel\nlo"}])
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False))
    body = reciting.post(PATH, {"messages": messages}).json
    assert body["usage"]["prompt_tokens"] == num_tokens
    assert body["choices"][0]["message"]["content"] == recital(num_tokens)


def test_continuing_the_final_message_and_echoing_it():
    server = saying(" there.")
    messages = [{"role": "user", "content": "Greet"}, {"role": "assistant", "content": "Hello"}]
    request = {"messages": messages, "continue_final_message": True}
    contents = [
        server.post(PATH, request | more).json["choices"][0]["message"]["content"] for more in ({}, {"echo": True})
    ]
    assert contents == [" there.", "Hello there."]


def test_variables_of_the_template():
    server = saying("ok", args=ServerArgs(allow_client_chat_template=True))
    template = "{{ reasoning_effort }} {{ tone }} {% for m in messages %}{{ m.content }}{% endfor %}"
    request = HELLO | {
        "chat_template": template,
        "chat_template_kwargs": {"tone": "soft"},
        "reasoning_effort": "low",
        "return_token_ids": True,
    }
    body = server.post(PATH, request).json
    assert tokenizer_of(server).decode(body["prompt_token_ids"]) == "low soft Hello"


def test_a_conversation_with_calls_goes_into_the_template():
    template = (
        "{% for m in messages %}[{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}({{ c.function.arguments.city }}){% endfor %}]{% endfor %}"
    )
    server = saying("ok", args=ServerArgs(allow_client_chat_template=True))
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    request = {"messages": messages, "chat_template": template, "return_token_ids": True}
    body = server.post(PATH, request).json
    assert tokenizer_of(server).decode(body["prompt_token_ids"]) == "[user:?][assistant:weather(Ulm)][tool:rain]"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking", "tool_plan"])
def test_a_template_finds_reasoning_under_its_own_name(field, name):
    template = f"{{% for m in messages %}}[{{{{ m.{name} or '-' }}}}]{{% endfor %}}"
    server = saying("ok", args=ServerArgs(allow_client_chat_template=True))
    call = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
    said = [{"content": "Yes."}, {"tool_calls": [call]}, {"content": "Wait.", "tool_calls": [call]}]
    messages = [*HELLO["messages"], *({"role": "assistant", field: "Hm.", **more} for more in said)]
    request = {"messages": messages, "chat_template": template, "return_token_ids": True, "max_tokens": 1}
    body = server.post(PATH, request).json
    # gpt-oss's template refuses a message with content, calls and `thinking`
    last = "Hm." if name == field else "-"
    assert tokenizer_of(server).decode(body["prompt_token_ids"]) == f"[-][Hm.][Hm.][{last}]"


@pytest.mark.parametrize("broken", ['{"name": "abc', "[1]", "none"])
@pytest.mark.parametrize(
    ("show", "expected"),
    [
        ("{{ c.function.arguments }}", "{}"),
        ("{% for name, value in c.function.arguments.items() %}{{ name }}={{ value }}{% endfor %}", "invalid_json={}"),
    ],
)
def test_a_malformed_call_in_the_history_is_rendered_as_text(broken, show, expected):
    template = f"{{% for m in messages %}}{{% for c in m.tool_calls or [] %}}{show}{{% endfor %}}{{% endfor %}}"
    server = saying("ok", args=ServerArgs(allow_client_chat_template=True))
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": broken}}
    messages = [*HELLO["messages"], {"role": "assistant", "tool_calls": [call]}]
    request = {"messages": messages, "chat_template": template, "return_token_ids": True, "max_tokens": 1}
    answer = server.post(PATH, request)
    assert answer.status == 200
    assert tokenizer_of(server).decode(answer.json["prompt_token_ids"]) == expected.format(broken)


def test_max_completion_tokens_outranks_max_tokens():
    usage = saying("one two three four").post(PATH, HELLO | {"max_tokens": 1, "max_completion_tokens": 3}).json["usage"]
    assert usage["completion_tokens"] == 3


def test_the_default_length_is_what_the_context_holds(tiny):
    (choice,) = tiny.post(PATH, HELLO | {"ignore_eos": True}).json["choices"]
    assert choice["finish_reason"] == "length"


def test_the_operators_template_and_its_variables(tmp_path):
    template = "{{ tone }}:{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "template.jinja").write_text(template)
    for value in (template, str(tmp_path / "template.jinja")):
        server = saying("ok", args=ServerArgs(chat_template=value, default_chat_template_kwargs={"tone": "kind"}))
        for more, tone in (({}, "kind"), ({"chat_template_kwargs": {"tone": "dry"}}, "dry")):
            body = server.post(PATH, HELLO | more | {"return_token_ids": True}).json
            assert tokenizer_of(server).decode(body["prompt_token_ids"]) == f"{tone}:Hello"


def test_an_operators_template_that_is_wrong_stops_the_server(tmp_path):
    with pytest.raises(ConfigError, match=r"chat_template='/.*missing.jinja' cannot be read"):
        ServerArgs(chat_template=str(tmp_path / "missing.jinja"))
    with pytest.raises(ConfigError, match="chat_template='/dev/zero' cannot be read: /dev/zero is not a regular file"):
        ServerArgs(chat_template="/dev/zero")
    with pytest.raises(TokenizerError, match="chat template is invalid"):
        saying("ok", args=ServerArgs(chat_template="{% for %}"))
