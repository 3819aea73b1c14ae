"""What clients get wrong: the status, and the name of the field."""

import asyncio
import json

import pytest

from quire.server.config import ServerArgs
from quire.server.http.errors import status_error
from tests.server.in_process import saying

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}

COMPLETION_CASES = [
    ({"max_tokens": "many"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2**70}, None),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": [1]}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": -5}, "top_k"),
    ({"n": 0}, "n"),
    ({"n": 10**9}, "n"),
    ({"n": 300}, "n"),
    ({"best_of": 1, "n": 2}, "best_of"),
    ({"best_of": 2, "temperature": 0}, "best_of"),
    ({"prompt": ["a"] * 500, "n": 3}, "n"),
    ({"prompt": ["a"] * 1025}, "prompt"),
    ({"seed": 2**64}, None),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": -2}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"99999999": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["a"] * 5000}, "stop"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"allowed_token_ids": []}, "allowed_token_ids"),
    ({"allowed_token_ids": [1] * 200_000}, "allowed_token_ids"),
    ({"bad_words": [""]}, "bad_words"),
    ({"user": "x" * 1000}, "user"),
    ({"cache_salt": "x" * 2000}, "cache_salt"),
    ({"priority": 2**40}, "priority"),
    ({"suffix": "end"}, "suffix"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": [[]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [10**9]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "structural_tag"}}, "response_format"),
    ({"response_format": {"type": "structural_tag", "format": {"type": "x"}}}, "response_format"),
    ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "response_format"),
    ({"structured_outputs": {"json": "{}", "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"jsn": "{}"}}, "structured_outputs"),
    ({"guided_choice": []}, "guided_choice"),
    ({"use_beam_search": True, "n": 2, "stop": "a"}, "stop"),
    ({"use_beam_search": True, "n": 2, "logprobs": 1}, "logprobs"),
    ({"use_beam_search": True, "n": 2, "length_penalty": 1e9}, "length_penalty"),
    ({"request_id": "two words"}, "request_id"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
]
CHAT_CASES = [
    ({"messages": []}, "messages"),
    ({"messages": "Hello"}, "messages"),
    ({"messages": [{"content": "Hello"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    (
        {"messages": [*USER, {"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[1].content[0]",
    ),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type"),
    ({"tools": [{"function": {"name": "no spaces"}}]}, "tools[0]"),
    ({"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]}, "tools[0]"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": "required", "guided_regex": "a"}, "tool_choice"),
    (
        {
            "tools": [TOOL],
            "tool_choice": "required",
            "structured_outputs": {"regex": "a"},
            "response_format": {"type": "text"},
        },
        "tool_choice",
    ),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 2}, "logprobs"),
    ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ({"chat_template": "{{ messages }}"}, "chat_template"),
    ({"chat_template_kwargs": {"chat_template": "{{ messages }}"}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"self": 1}}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("wrong", "param"), COMPLETION_CASES)
def test_a_wrong_completion_is_refused_with_the_field_s_name(reciting, wrong, param, stream):
    _refused(reciting.post(COMPLETIONS, {"prompt": "Hello", "stream": stream} | wrong), param)
    assert reciting.engine.stats().num_used_blocks == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("wrong", "param"), CHAT_CASES)
def test_a_wrong_chat_is_refused_with_the_field_s_name(reciting, wrong, param, stream):
    _refused(reciting.post(CHAT, {"messages": USER, "stream": stream} | wrong), param)


def _refused(answer, param):
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.json) == {"error"}
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == param
    assert answer.error["message"]


NOT_JSON = [
    b"",
    b"{",
    b"nonsense",
    b'{"prompt": "a"} x',
    b'\xef\xbb\xbf{"prompt": "a"}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\xed\xa0\x80"}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\\udc00\\ud800"}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": Infinity}',
    b'{"prompt": "a", "temperature": 1e400}',
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
    b'{"prompt": "a", "prompt": "b"}',
    b'{"prompt": "a", "structured_outputs": {"json": {"type": "string", "type": "object"}}}',
    b"[]",
    b"null",
    b'"text"',
    b"[" * 100_000,
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"prompt": "a", "guided_json": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
]


@pytest.mark.parametrize("body", NOT_JSON, ids=range(len(NOT_JSON)))
def test_what_is_not_the_right_json_is_a_400(reciting, body):
    answer = reciting.post(COMPLETIONS, body)
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.essential
def test_every_field_refuses_a_wrong_type(reciting):
    """An object of no meaning fits no field but those that take any object."""
    described = reciting.get("/openapi.json").json["components"]["schemas"]
    takes_objects = {"guided_json", "chat_template_kwargs", "metadata", "logit_bias", "structured_outputs"}
    for path, name, base in (
        (COMPLETIONS, "CompletionRequest", {"prompt": "a"}),
        (CHAT, "ChatCompletionRequest", {"messages": USER}),
    ):
        fields = described[name]["properties"]
        assert len(fields) > 40
        for field in fields:
            for value in ([{"x": [1]}], {"\x00": ["y"]}):
                if field in takes_objects and isinstance(value, dict):
                    continue
                if field == "stream_options" and isinstance(value, dict):
                    continue
                answer = reciting.post(path, base | {field: value})
                documents = field == "documents" and isinstance(value, list)
                assert answer.status == (200 if documents else 400), field
                assert documents or answer.error["param"].startswith(field)


def test_nuls_are_text(reciting):
    assert reciting.post(COMPLETIONS, {"prompt": "a\x00b"}).status == 200


def test_unknown_fields_are_named_in_a_header(reciting):
    body = {"prompt": "a", "max_token": 5, "stream_options": {"all": True}, "stream": True, "a\r\nb: c": 1}
    answer = reciting.post(COMPLETIONS, body)
    assert answer.status == 200
    assert answer.headers["x-quire-warning"] == "unknown fields ignored: max_token, stream_options.all, a??b??c"
    many = {f"field_{i}" * 50: 0 for i in range(1000)}
    warning = reciting.post(COMPLETIONS, {"prompt": "a"} | many).headers["x-quire-warning"]
    assert len(warning) < 1000
    assert warning.endswith("and 990 more")
    nested = {"messages": [*USER, {"role": "user", "content": "a", "mood": "good"}]}
    assert reciting.post(CHAT, nested).headers["x-quire-warning"] == "unknown fields ignored: messages[1].mood"


def test_a_prompt_beyond_the_context_names_both_numbers(reciting):
    for path, body in (
        (COMPLETIONS, {"prompt": [5] * 300}),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 300}]}),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 100_000}]}),
    ):
        error = reciting.post(path, body).error
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == ("prompt" if path == COMPLETIONS else "messages")
        assert "this model's maximum context length is 256 tokens" in error["message"], "by which clients know it"
    assert "300 tokens" in reciting.post(COMPLETIONS, {"prompt": [5] * 300}).error["message"]


@pytest.mark.parametrize("contents", [["word " * 3_400_000], ["word " * 100] * 31_900], ids=["long", "many"])
def test_what_exceeds_the_template_s_limits_since_the_messages_are_too_long_is_not_the_template_s_fault(
    reciting, contents
):
    error = reciting.post(CHAT, {"messages": [{"role": "user", "content": content} for content in contents]}).error
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "characters" in error["message"]
    assert "this model's maximum context length is 256 tokens" in error["message"]


def test_unknown_models_paths_and_methods(reciting):
    answer = reciting.post(COMPLETIONS, {"prompt": "a", "model": "gpt-9"})
    assert answer.status == 404
    assert answer.error == {
        "message": "the model 'gpt-9' is not served here; available: quire-tiny, alias",
        "type": "not_found_error",
        "param": "model",
        "code": "model_not_found",
    }
    assert reciting.get("/v1/models/gpt-9").status == 404
    for path in ("/v1/nothing", "/v1/completions/"):
        assert reciting.post(path, {}).error["code"] == "not_found"
    answer = reciting.get(COMPLETIONS)
    assert (answer.status, answer.headers["allow"]) == (405, "POST")
    assert answer.error["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "headers", [{"content-type": "text/plain"}, {"content-type": "multipart/form-data"}, {"content-encoding": "gzip"}]
)
def test_bodies_of_other_kinds(reciting, headers):
    assert reciting.post(COMPLETIONS, {"prompt": "a"}, headers=headers).status == 415


@pytest.mark.parametrize(("origin", "status"), [({}, 200), ({"origin": "http://127.0.0.1"}, 415)])
def test_curls_own_media_type_is_accepted_at_ollamas_paths_but_no_form_of_a_page(reciting, origin, status) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"} | origin
    assert reciting.post("/api/show", {"model": "quire-tiny"}, headers=headers).status == status


@pytest.mark.essential
def test_a_body_beyond_the_limit_is_not_read(reciting):
    limit = reciting.state.args.max_body
    answer = reciting.post(COMPLETIONS, b"", headers={"content-length": str(limit + 1)})
    assert answer.status == 413
    assert reciting.post(COMPLETIONS, b" " * (limit + 1)).status == 413


def _receiving(server, receive):
    """The server, whose client sends what `receive` says."""
    app = server.app

    async def with_receive(scope, _, send):
        await app(scope, receive, send)

    server.app = with_receive
    return server


def test_a_body_that_does_not_come_is_not_waited_for():
    server = _receiving(saying(args=ServerArgs(body_timeout_s=0.01)), asyncio.Event().wait)
    answer = server.post(COMPLETIONS, {"prompt": "a"})
    assert (answer.status, answer.headers["connection"]) == (408, "close")
    assert answer.error["message"] == "the body was not received within 0.01 s"
    assert server.state.num_body_bytes == 0


def test_half_a_body_of_a_client_that_has_gone_starts_nothing():
    pieces = [{"type": "http.request", "body": b'{"prompt": "a"', "more_body": True}, {"type": "http.disconnect"}]

    async def receive():
        return pieces.pop(0)

    server = _receiving(saying(), receive)
    answer = server.post(COMPLETIONS, b"")
    assert answer.status == 400
    assert "disconnected" in answer.error["message"]
    assert server.engine.stats().num_waiting == server.state.num_body_bytes == 0


def test_what_else_the_router_refuses_has_the_shape_of_an_error():
    answer = status_error(426, "GET", "/v1/models", {"upgrade": "h2c"}).to_response("/v1/models")
    assert (answer.status_code, answer.headers["upgrade"]) == (426, "h2c")
    assert json.loads(answer.body)["error"]["message"] == "Upgrade Required"


@pytest.mark.parametrize("many", ["[5],", "5,", '{"a":5},', '":",'])
def test_a_body_of_more_values_than_anybody_needs_is_refused(reciting, many):
    answer = reciting.post(COMPLETIONS, f'{{"prompt": [{many * 1_000_001}5]}}'.encode())
    assert answer.status == 413
    assert answer.error["code"] == "request_too_large"


def test_a_missing_field_is_named(reciting):
    assert reciting.post(COMPLETIONS, {}).error["param"] == "prompt"
    assert reciting.post(CHAT, {}).error["param"] == "messages"


def test_request_ids_come_back_if_they_are_sane(reciting):
    for given, is_sane in (("abc-123", True), ("x" * 129, False), ("two words", False), ("\u00e9", False)):
        answer = reciting.post(COMPLETIONS, {"prompt": "a"}, headers={"x-request-id": given})
        assert (answer.headers["x-request-id"] == given) == is_sane
        assert answer.json["id"] == "cmpl-" + answer.headers["x-request-id"]
    answer = reciting.post(COMPLETIONS, {"prompt": "a", "request_id": "from-the-body"})
    assert answer.headers["x-request-id"] == "from-the-body"
    assert "x-request-id" in reciting.get("/v1/nothing").headers


def test_the_same_request_id_twice_at_once(reciting):
    async def both():
        body = json.dumps({"prompt": "a"}).encode()
        headers = {"x-request-id": "same"}
        return await asyncio.gather(*(reciting.request("POST", COMPLETIONS, body, headers) for _ in range(2)))

    assert [answer.status for answer in asyncio.run(both())] == [200, 200]


def test_a_model_without_a_chat_template_says_so():
    server = saying()
    server.llm.tokenizer.chat_templates = {}
    answer = server.post(CHAT, {"messages": USER})
    assert answer.status == 400
    assert "has no chat template" in answer.error["message"]
