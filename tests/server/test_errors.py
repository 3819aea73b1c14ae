"""Error responses: status, type, field and message, in the format that the client's SDK expects."""

import json

import pytest

from quire.common.errors import (
    ConfigError,
    EngineDeadError,
    InvalidParamsError,
    InvalidPromptError,
    PromptTooLongError,
    RequestError,
    RequestFailedError,
    TokenizerError,
)
from quire.server.http.errors import MAX_MESSAGE_LEN, ApiError, api_error, invalid, status_error

OPENAI, ANTHROPIC = "/v1/chat/completions", "/v1/messages"


def body(error: ApiError, path: str = OPENAI) -> dict:
    return json.loads(error.to_json(path))


@pytest.mark.parametrize(
    ("status", "openai", "anthropic"),
    [
        (400, "invalid_request_error", "invalid_request_error"),
        (401, "authentication_error", "authentication_error"),
        (403, "permission_error", "permission_error"),
        (404, "not_found_error", "not_found_error"),
        (413, "invalid_request_error", "request_too_large"),
        (429, "rate_limit_error", "rate_limit_error"),
        (499, "invalid_request_error", "invalid_request_error"),
        (500, "server_error", "api_error"),
        (502, "server_error", "api_error"),
        (503, "service_unavailable_error", "overloaded_error"),
        (504, "timeout_error", "timeout_error"),
    ],
)
def test_the_type_follows_from_the_status(status, openai, anthropic):
    error = ApiError(status, "no")
    assert body(error) == {"error": {"message": "no", "type": openai, "param": None, "code": None}}
    assert body(error, ANTHROPIC) == {
        "type": "error", "error": {"type": anthropic, "message": "no"}, "request_id": None,
    }  # fmt: skip


def test_a_prompt_that_is_too_long_begins_as_anthropics_clients_expect_it():
    error = api_error(PromptTooLongError("it has 300 tokens"), "id", {})
    assert body(error, ANTHROPIC)["error"]["message"] == "prompt is too long: it has 300 tokens"
    assert body(error)["error"]["message"] == "it has 300 tokens"


def test_clients_of_ollama_find_the_text_alone():
    assert body(ApiError(404, "no", param="n", code="c"), "/api/chat") == {"error": "no"}
    assert body(ApiError(404, "no"), "/v1/api/chat")["error"]["message"] == "no"
    assert body(ApiError(400, "x" * (MAX_MESSAGE_LEN + 1)), "/api/chat") == {"error": "x" * MAX_MESSAGE_LEN + "..."}


def test_a_response_has_all_details_of_the_error():
    error = ApiError(429, "later", param="n", code="busy", headers={"retry-after": "5"})
    answer = error.to_response(OPENAI)
    assert (answer.status_code, answer.media_type, answer.headers["retry-after"]) == (429, "application/json", "5")
    assert json.loads(answer.body)["error"] == {
        "message": "later",
        "type": "rate_limit_error",
        "param": "n",
        "code": "busy",
    }
    assert str(error) == "later"
    assert ApiError(400, "no").headers == {}
    error.request_id = "id"
    assert body(error, f"{ANTHROPIC}/count_tokens")["request_id"] == "id"


def test_a_long_message_is_shortened_and_invalid_unicode_replaced():
    assert body(ApiError(400, "x" * MAX_MESSAGE_LEN))["error"]["message"] == "x" * MAX_MESSAGE_LEN
    assert body(ApiError(400, "x" * (MAX_MESSAGE_LEN + 1)))["error"]["message"] == "x" * MAX_MESSAGE_LEN + "..."
    assert body(ApiError(400, "a\ud800b"))["error"]["message"] == "a?b"


def test_an_invalid_request_is_a_400_that_names_the_field():
    error = invalid("n is wrong", "n", "bad")
    assert (error.status, error.message, error.param, error.code) == (400, "n is wrong", "n", "bad")
    assert (invalid("no").param, invalid("no").code) == (None, None)


@pytest.mark.parametrize(
    ("error", "status", "param", "code"),
    [
        (ApiError(418, "tea", param="pot", code="short"), 418, "pot", "short"),
        (PromptTooLongError("300 tokens"), 400, "prompt", "context_length_exceeded"),
        (InvalidPromptError("it is empty"), 400, "prompt", None),
        (InvalidPromptError("messages[2]: no role"), 400, "messages[2]", None),
        (InvalidPromptError("input[0]: it is empty"), 400, "input[0]", None),
        (InvalidParamsError("temperature=-1: must be more"), 400, "temperature", None),
        (InvalidParamsError("beam_width=0: must be more"), 400, "n", None),
        (InvalidParamsError("tenant='x': too long"), 400, "user", None),
        (InvalidParamsError("regex='(': no"), 400, "structured_outputs", None),
        (InvalidParamsError("structured_outputs: give one"), 400, "structured_outputs", None),
        (InvalidParamsError("tool_choice='x': no"), 400, "tool_choice", None),
        (InvalidParamsError("tools[3]: no name"), 400, "tools[3]", None),
        (InvalidParamsError("tools: none"), 400, "tools", None),
        (RequestError("something else"), 400, None, None),
        (RequestError(""), 400, None, None),
        (TokenizerError("there is no chat template"), 400, "prompt", None),
        (RecursionError("maximum recursion depth"), 400, None, "invalid_json"),
        (EngineDeadError("it was killed", 7), 503, None, "engine_unavailable"),
        (ConfigError("insides"), 503, None, "engine_unavailable"),
        (RequestFailedError("insides"), 500, None, "internal_error"),
        (KeyError("insides"), 500, None, "internal_error"),
    ],
)
def test_each_exception_has_a_response(error, status, param, code):
    found = api_error(error, "the id", {})
    assert (found.status, found.param, found.code, found.request_id) == (status, param, code, "the id")
    if status == 400 and not isinstance(error, RecursionError):
        named = str(error).replace("beam_width=", "n=").replace("tenant=", "user=")
        assert found.message == named, "an error of the client is described in full, in the body's names of fields"
    if isinstance(error, RecursionError):
        assert found.message == "the request is nested too deeply"
    if status >= 500:
        assert "insides" not in found.message
        assert "killed" not in found.message


def test_retry_after_is_sent_where_it_is_known():
    assert api_error(EngineDeadError("killed", 7), "id", {}).headers == {"retry-after": "7"}
    assert api_error(EngineDeadError("killed", 0), "id", {}).headers == {"retry-after": "0"}
    assert api_error(EngineDeadError("killed"), "id", {}).headers == {}
    assert "the id" in api_error(KeyError("x"), "the id", {}).message


@pytest.mark.parametrize(
    ("message", "param", "expected"),
    [
        ("max_tokens=0: must be at least 1", "max_output_tokens", "max_output_tokens=0: must be at least 1"),
        ("max_tokens is wrong", "max_output_tokens", "max_output_tokens is wrong"),
        ("max_tokens: wrong, max_tokens", "max_output_tokens", "max_output_tokens: wrong, max_tokens"),
        ("n=0: no", "n", "n=0: no"),
        ("json is rejected: no", "text", "text: json is rejected: no"),
        ("structured_outputs: no", "text", "text: no"),
        ("tools[0].function.name='.function': no", "tools[0]", "tools[0].name='.function': no"),
    ],
)
def test_a_field_is_named_as_the_client_named_it(message, param, expected):
    names = {"max_tokens": "max_output_tokens", "structured_outputs": "text", ".function": ""}
    found = api_error(InvalidParamsError(message), "id", names)
    assert (found.param, found.message) == (param, expected)


def test_an_item_of_a_list_is_named_by_the_name_of_the_list():
    found = api_error(InvalidPromptError("messages[2]: no role"), "id", {"messages": "input"})
    assert (found.param, found.message) == ("input", "input: messages[2]: no role")


def test_an_error_is_put_into_the_clients_words_once():
    error, names = InvalidParamsError("tools[0].function.name='.function': no"), {".function": ""}
    found = api_error(error, "id", names)
    assert api_error(found, "id", names).message == "tools[0].name='.function': no"


def test_only_a_whole_name_is_replaced_in_a_message():
    error = invalid("max_tokens_more: no", "max_tokens")
    assert api_error(error, "id", {"max_tokens": "limit"}).message == "max_tokens_more: no"


@pytest.mark.parametrize(
    ("status", "code", "text"),
    [
        (404, "not_found", "unknown path '/v1/x'; /openapi.json lists all endpoints"),
        (405, "method_not_allowed", "'/v1/x' does not support the method PUT"),
        (426, None, "Upgrade Required"),
    ],
)
def test_refusals_of_the_router(status, code, text):
    error = status_error(status, "PUT", "/v1/x", {"allow": "GET"})
    assert (error.status, error.code) == (status, code)
    assert error.message == text
    assert error.headers == ({} if status == 404 else {"allow": "GET"})


def test_long_paths_and_methods_are_shortened():
    assert "'/" + "x" * 199 + "';" in status_error(404, "GET", "/" + "x" * 500).message
    message = status_error(405, "M" * 50, "/" + "x" * 500).message
    assert message == "'/" + "x" * 199 + "' does not support the method " + "M" * 20
