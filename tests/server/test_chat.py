"""/v1/chat/completions: the protocol of the stream, tools, reasoning, and streams against whole answers."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.common.errors import ConfigError, TokenizerError
from quire.server.api.tools.formats import REASONING_FORMATS, TOOL_FORMATS
from quire.server.config import ServerArgs
from tests.effort import examples
from tests.scripted_engine import recital, scripted_llm
from tests.server.chats import CALL, HELLO, PATH, WEATHER, added_up, same_ids
from tests.server.in_process import saying, serve, tokenizer_of


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
        same_ids(choice["message"], expected["message"])
    assert folded == whole["choices"]
    assert chunks[0].get("prompt_logprobs") == whole.get("prompt_logprobs")
    assert chunks[0].get("prompt_token_ids") == whole.get("prompt_token_ids")


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


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_only_the_allowed_tools_are_shown_and_called(tiny, mode):
    other = {"type": "function", "function": {"name": "other"}}
    request = HELLO | {"max_tokens": 60, "temperature": 0, "return_token_ids": True}
    name = {"type": "function", "function": {"name": "weather"}}
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [name]}}
    some = tiny.post(PATH, request | {"tools": [other, WEATHER], "tool_choice": choice}).json
    alone = tiny.post(PATH, request | {"tools": [WEATHER], "tool_choice": mode}).json
    assert some["prompt_token_ids"] == alone["prompt_token_ids"]
    same_ids(some["choices"][0]["message"], alone["choices"][0]["message"])
    assert some["choices"] == alone["choices"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_made_by_any_model(tiny, choice):
    request = HELLO | {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 100}
    whole = tiny.post(PATH, request | {"temperature": 0}).json["choices"][0]
    assert whole["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
    (call,) = whole["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"])["city"] in ("Bonn", "Ulm")
    (streamed,) = added_up(tiny.post(PATH, request | {"temperature": 0, "stream": True}).events)
    same_ids(streamed["message"], whole["message"])
    assert streamed == whole


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
@pytest.mark.parametrize(
    "form", [{"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": [1]}}}]
)
def test_a_forced_call_does_not_have_the_form_of_the_content(tiny, choice, form):
    request = HELLO | {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 100, "temperature": 0}
    (plain,) = tiny.post(PATH, request).json["choices"]
    (formed,) = tiny.post(PATH, request | {"response_format": form}).json["choices"]
    same_ids(formed["message"], plain["message"])
    assert formed == plain
    assert formed["message"]["tool_calls"]


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


@pytest.mark.parametrize("as_ids", [False, True])
def test_the_bytes_of_all_tokens_are_those_of_the_text(as_ids):
    server = saying("🎉é日 ok")
    request = HELLO | {"logprobs": True, "return_tokens_as_token_ids": as_ids}
    *told, end = server.post(PATH, request).json["choices"][0]["logprobs"]["content"]
    assert [token["bytes"] for token in told[:4]] == [[byte] for byte in "🎉".encode()]
    assert b"".join(bytes(token["bytes"]) for token in told).decode() == "🎉é日 ok"
    assert bytes(end["bytes"]) == b"<|im_end|>"


def test_the_likeliest_tokens_have_their_own_bytes():
    llm, executor = scripted_llm(max_logprobs=-1)
    server = serve(llm.engine, executor)
    first_byte, *_ = tokenizer_of(server).encode("🎉")
    request = HELLO | {"logprobs": True, "top_logprobs": first_byte + 1, "return_tokens_as_token_ids": True}
    first, *_ = server.post(PATH, request).json["choices"][0]["logprobs"]["content"]
    bytes_of = {entry["token"]: entry["bytes"] for entry in first["top_logprobs"]}
    assert bytes_of[f"token_id:{first_byte}"] == [0xF0]
    assert bytes_of["token_id:0"] == list(b"<|endoftext|>")


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


@pytest.mark.parametrize(("more", "role"), [("", "system"), ("{# developer #}", "developer")])
@pytest.mark.parametrize("is_own", [False, True])
def test_a_developer_has_the_role_of_the_system_where_the_template_has_no_other(more, role, is_own):
    template = "{% for m in messages %}[{{ m.role }}: {{ m.content }}]{% endfor %}" + more
    given = {"allow_client_chat_template": True} if is_own else {"chat_template": template}
    server = saying("ok", args=ServerArgs(**given))
    request = {"messages": [{"role": "developer", "content": "Be short."}, *HELLO["messages"]]}
    request |= {"return_token_ids": True, "max_tokens": 1} | ({"chat_template": template} if is_own else {})
    body = server.post(PATH, request).json
    assert tokenizer_of(server).decode(body["prompt_token_ids"]) == f"[{role}: Be short.][user: Hello]"


@pytest.mark.parametrize("calls", [[], None])
def test_a_message_with_an_empty_list_of_calls_has_none(calls):
    template = "{% for m in messages %}[{{ 'calls' if 'tool_calls' in m else m.content }}]{% endfor %}"
    server = saying("ok", args=ServerArgs(chat_template=template))
    messages = [*HELLO["messages"], {"role": "assistant", "content": "Hi", "tool_calls": calls}]
    body = server.post(PATH, {"messages": messages, "return_token_ids": True, "max_tokens": 1}).json
    assert tokenizer_of(server).decode(body["prompt_token_ids"]) == "[Hello][Hi]"


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


def test_a_refusal_in_the_history_is_text():
    server, user = saying("Well."), {"role": "user", "content": "Why?"}

    def tokens(**said: object) -> list[int]:
        return server.post("/tokenize", {"messages": [user, {"role": "assistant", **said}, user]}).json["tokens"]

    expected = tokens(content="No.")
    assert tokens(content=[{"type": "refusal", "refusal": "No."}]) == expected
    assert tokens(content=None, refusal="No.") == expected
    assert tokens(content="No.", refusal="Not this.") == expected
