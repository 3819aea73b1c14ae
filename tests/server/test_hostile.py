"""Clients that mean harm, or do not know better: a 4xx that says what is wrong or correct service, for them and for all
others."""

import asyncio
import gc
import json
import threading
from typing import Any

import msgspec
import pytest

from quire.server.api.chat.protocol import ChatCompletionRequest
from quire.server.api.completions.protocol import CompletionRequest
from quire.server.api.messages.protocol import CountTokensRequest, MessagesRequest
from quire.server.api.responses.protocol import ResponsesRequest
from quire.server.api.shared import generation
from quire.server.api.shared.generation import _merged
from quire.server.api.tokens.protocol import DetokenizeRequest, TokenizeRequest
from quire.server.http import bodies
from tests.server.in_process import Answer, Server, saying, serve

COMPLETIONS, CHAT, RESPONSES, MESSAGES = "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"
COUNT, TOKENIZE, DETOKENIZE = "/v1/messages/count_tokens", "/tokenize", "/detokenize"
USER = [{"role": "user", "content": "Hi"}]
BODIES: dict[str, tuple[type[msgspec.Struct], dict[str, Any]]] = {
    COMPLETIONS: (CompletionRequest, {"prompt": "Hi", "max_tokens": 3}),
    CHAT: (ChatCompletionRequest, {"messages": USER, "max_tokens": 3}),
    RESPONSES: (ResponsesRequest, {"input": "Hi", "max_output_tokens": 3}),
    MESSAGES: (MessagesRequest, {"messages": USER, "max_tokens": 3}),
    COUNT: (CountTokensRequest, {"messages": USER}),
    TOKENIZE: (TokenizeRequest, {"prompt": "Hi"}),
    DETOKENIZE: (DetokenizeRequest, {"tokens": [5]}),
}
NUL = "a\0b"
VALUES: list[Any] = [
    None, True, 0, -1, 2**31, 2**63 - 1, -(2**63), 2**64, 10**30, 1.5, 1e-320, 1e308, "", NUL, "\u202e\r\nx: y",
    "x" * 5000, [], [None], [-1], [2**63 - 1], [""], [NUL], [[]], [{}], {}, {"": ""}, {NUL: NUL}, {"2147483648": 1},
    {"type": "text"},
]  # fmt: skip
CANARY = {"prompt": "Once upon a time", "max_tokens": 40, "seed": 7, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module", autouse=True)
def _without_garbage():
    """Finalizers of what other tests have left fail where the stack is nearly full, and leave processes running."""
    gc.collect()


@pytest.fixture(scope="module")
def server(tiny_engine):
    made = serve(tiny_engine)
    yield made
    if made.state.responses is not None:
        made.state.responses.store.close()


def check(answer: Answer, *what: Any) -> None:
    assert answer.status in (200, 400, 404, 413), (answer.status, *what, answer.body)
    if answer.status != 200:
        assert answer.error["message"], what


def canary(server: Server) -> list[int]:
    return server.post(COMPLETIONS, CANARY).json["choices"][0]["token_ids"]


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("path", BODIES)
def test_anything_in_any_field(server, path):
    kind, base = BODIES[path]
    before = canary(server)

    async def ask(field: str, value: Any) -> None:
        raw = json.dumps(base | {field: value}).encode()
        check(await server.request("POST", path, raw), field, value)

    async def ask_all() -> None:
        stuck = asyncio.create_task(server.request("POST", COMPLETIONS, json.dumps(CANARY | {"n": 2}).encode()))
        for field in kind.__struct_encode_fields__:
            for value in VALUES:
                await ask(field, value)
        assert (await stuck).json["choices"][0]["token_ids"] == before

    asyncio.run(ask_all())
    assert canary(server) == before
    assert (server.state.num_in_flight, server.state.num_body_bytes) == (0, 0)
    assert server.engine.stats().num_used_blocks == 0


NESTED = {
    "kwargs": (CHAT, '"chat_template_kwargs": {}, "messages": [{"role": "user", "content": "a"}]'),
    "metadata": (CHAT, '"metadata": {}, "messages": [{"role": "user", "content": "a"}]'),
    "documents": (CHAT, '"documents": [{}], "messages": [{"role": "user", "content": "a"}]'),
    "tools": (CHAT, '"tools": [{"function": {"name": "f", "parameters": {}}}], "messages": [{"role": "user"}]'),
    "schema": (COMPLETIONS, '"guided_json": {}, "prompt": "a"'),
    "unknown": (COMPLETIONS, '"unknown": {}, "prompt": "a"'),
    "response tools": (RESPONSES, '"tools": [{"type": "function", "name": "f", "parameters": {}}], "input": "a"'),
    "message tools": (
        MESSAGES,
        '"tools": [{"name": "f", "input_schema": {}}], "messages": [{"role": "user", "content": "a"}]',
    ),
    "tool use": (
        COUNT,
        '"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "b", "input": {}}]},'
        '{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]',
    ),
}


@pytest.mark.parametrize("depth", [*range(60, 1000, 60), 20_000])
@pytest.mark.parametrize("place", NESTED)
def test_however_deep_it_is_nested(reciting, place, depth):
    """The limits of decoders, encoders and templates lie close to each other: one may take what the next does not."""
    path, body = NESTED[place]
    limit = '"max_output_tokens": 2, "store": false' if path == RESPONSES else '"max_tokens": 2'
    answer = reciting.post(path, ("{" + body.replace("{}", nested(depth), 1) + ", " + limit + "}").encode())
    check(answer, place, depth)
    assert answer.status == 200 or depth > 60 or place == "schema"
    if reciting.state.responses is not None:
        reciting.state.responses.store.close()
        reciting.state.responses = None


@pytest.mark.parametrize("depth", range(60, 1000, 120))
def test_arguments_of_calls_nested_in_their_text(reciting, depth):
    call = {"id": "a", "function": {"name": "f", "arguments": nested(depth)}}
    turns = [*USER, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "a", "content": "b"}]
    check(reciting.post(CHAT, {"messages": turns, "max_tokens": 2}), depth)


SURROGATE = "\ud800"
TEXTS = [
    (COMPLETIONS, {"prompt": "T"}),
    (COMPLETIONS, {"prompt": ["a", "T"]}),
    (COMPLETIONS, {"prompt": "a", "stop": ["T"]}),
    (COMPLETIONS, {"prompt": "a", "bad_words": ["T"]}),
    (COMPLETIONS, {"prompt": "a", "user": "T", "cache_salt": "T"}),
    (COMPLETIONS, {"prompt": "a", "guided_choice": ["T"]}),
    (CHAT, {"messages": [{"role": "T", "content": "T", "name": "T", "tool_call_id": "T", "reasoning_content": "T"}]}),
    (CHAT, {"messages": USER, "tools": [{"function": {"name": "f", "description": "T", "parameters": {"T": "T"}}}]}),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"T": "T"}}),
    (RESPONSES, {"input": "T", "instructions": "T", "metadata": {"T": "T"}, "store": False}),
    (RESPONSES, {"input": [{"role": "user", "content": "T", "id": "T", "status": "T"}]}),
    (MESSAGES, {"messages": USER, "system": "T", "stop_sequences": ["T"], "metadata": {"user_id": "T"}}),
]


@pytest.mark.parametrize(("path", "body"), TEXTS)
def test_nuls_and_lone_surrogates_in_texts(server, path, body):
    text = json.dumps(body | {"max_tokens": 2, "max_output_tokens": 2})
    check(server.post(path, text.replace('"T"', '"a\\u0000b"').encode()), body)
    assert server.post(path, text.replace('"T"', f'"{SURROGATE}"').encode("utf-8", "surrogatepass")).status == 400
    assert server.post(path, text.replace('"T"', '"\\ud800"').encode()).status == 400


def test_ids_in_paths_and_headers_are_only_looked_for(server):
    created = server.post(RESPONSES, {"input": "Hi", "max_output_tokens": 2}).json["id"]
    for given in ("' OR 1=1 --", created + "' --", created.upper(), "%00", "..", "resp_" + "0" * 32, "a" * 9000):
        assert server.get(f"{RESPONSES}/{given}").status == 404
    for query in ("order=sideways", "limit=0", "limit=101", "limit=1e9", "limit=", "after=", "limit=" + "9" * 30):
        answer = server.get(f"{RESPONSES}/{created}/input_items?{query}")
        assert (answer.status, answer.error["param"]) == (400, query.partition("=")[0])
    for query in ("stream=maybe", "stream=true&starting_after=-1", "stream=true&starting_after=x", "stream=true"):
        assert server.get(f"{RESPONSES}/{created}?{query}").status == 400
    assert server.get(f"{RESPONSES}/{created}?stream=false").json["id"] == created


def test_of_many_prompts_no_two_start_without_a_turn_for_others():
    """Each start takes as long as it takes to encode the prompt."""

    async def main() -> None:
        turn, turns_of_starts = 0, []

        async def stream():
            turns_of_starts.append(turn)
            yield None

        async def others() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        running = asyncio.create_task(others())
        assert len([item async for item in _merged([stream() for _ in range(100)])]) == 100
        running.cancel()
        assert len(set(turns_of_starts)) == 100

    asyncio.run(main())


def test_one_wrong_prompt_among_many_ends_them_all(reciting):
    body = {"prompt": ["Hi"] * 50 + [[10**9]] + ["Hi"] * 50, "max_tokens": 50}
    answer = reciting.post(COMPLETIONS, body)
    assert (answer.status, answer.error["param"]) == (400, "prompt")
    assert reciting.engine.stats().num_used_blocks == 0
    assert not reciting.engine.has_unfinished_requests()


def test_what_comes_with_many_prompts_is_bounded(reciting):
    body = {"max_tokens": 1, "guided_choice": [f"city number {i * 7919}" for i in range(10_000)]}
    answer = reciting.post(COMPLETIONS, body | {"prompt": ["Hi"] * 500})
    assert (answer.status, answer.error["param"]) == (400, "prompt")
    assert "at most 67,108,864 are allowed; send fewer prompts" in answer.error["message"]
    assert reciting.post(COMPLETIONS, {"prompt": ["Hi"] * 500, "max_tokens": 1}).status == 200


def test_the_log_probabilities_of_many_prompts_are_bounded(server, monkeypatch):
    monkeypatch.setattr(generation, "MAX_LOGPROBS", 50)
    asked = {"prompt": [[5] * 20] * 4, "max_tokens": 1}
    for more in ({"prompt_logprobs": 1}, {"logprobs": 1, "max_tokens": 20, "ignore_eos": True}):
        answer = server.post(COMPLETIONS, asked | more)
        assert (answer.status, answer.error["param"]) == (400, "prompt"), more
        assert "more than 50 log-probabilities, the limit for them all: send fewer" in answer.error["message"]
        assert not server.engine.has_unfinished_requests()
    assert server.post(COMPLETIONS, asked | {"prompt": [[5] * 20] * 2, "prompt_logprobs": 0}).status == 200
    assert server.post(COMPLETIONS, asked | {"prompt": [5] * 60, "prompt_logprobs": 1}).status == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_log_probabilities_of_prompts_are_written_beside_the_event_loop(server, path, monkeypatch):
    threads, encode = [], msgspec.json.encode

    def noting(body, *args, **kwargs):
        if getattr(body, "prompt_logprobs", None):
            threads.append(threading.current_thread())
        return encode(body, *args, **kwargs)

    monkeypatch.setattr(msgspec.json, "encode", noting)
    assert server.post(path, BODIES[path][1] | {"prompt_logprobs": 1}).status == 200
    assert threads
    assert threading.main_thread() not in threads


def test_a_long_body_is_decoded_beside_the_event_loop(reciting, monkeypatch):
    threads, decode = [], bodies.decode

    def noting(*args):
        threads.append(threading.current_thread())
        return decode(*args)

    monkeypatch.setattr(bodies, "decode", noting)
    assert reciting.post(COMPLETIONS, {"prompt": "a", "x": "y" * 100_000}).status == 200
    assert reciting.post(COMPLETIONS, {"prompt": 5, "x": "y" * 100_000}).error["param"] == "prompt"
    assert reciting.post(COMPLETIONS, {"prompt": "a"}).status == 200
    assert [thread is threading.main_thread() for thread in threads] == [False, False, True]


def test_of_long_bodies_only_some_are_held_at_once(reciting):
    state = reciting.state
    state.num_body_bytes = held = bodies.MAX_BODIES * state.args.max_body
    answer = reciting.post(COMPLETIONS, {"prompt": "a" * 2**20})
    assert (answer.status, answer.headers["retry-after"]) == (429, "5")
    assert reciting.post(COMPLETIONS, {"prompt": "a"}).status == 200
    assert state.num_body_bytes == held


def test_of_bodies_with_many_values_only_some_are_served_at_once(reciting, monkeypatch):
    """A value takes a hundred times its bytes, and a request keeps its own until it ends."""
    state, convert, held = reciting.state, msgspec.convert, []

    def noting(*args, **kwargs):
        held.append(state.num_values)
        return convert(*args, **kwargs)

    monkeypatch.setattr(msgspec, "convert", noting)
    many = {"prompt": [[5] * 10] * 3000, "max_tokens": 1}
    assert reciting.post(COMPLETIONS, many).error["message"].startswith("prompt contains 3,000 prompts")
    assert (held[0], state.num_values) == (3000 * 11 + 2, 0)
    state.num_values = bodies.MAX_VALUES - 3000 * 11
    answer = reciting.post(COMPLETIONS, many)
    assert (answer.status, answer.headers["retry-after"]) == (429, "5")
    assert answer.error["message"].startswith("the bodies of the running requests have too many values; try")
    assert reciting.post(COMPLETIONS, {"prompt": "a" * 100_000, "max_tokens": 1}).status == 400
    assert reciting.post(COMPLETIONS, {"prompt": "a"}).status == 200
    assert state.num_values == bodies.MAX_VALUES - 3000 * 11


def test_numbers_beyond_64_bits_are_found_anywhere(reciting):
    for number, status in (("9223372036854775807", 200), ("9223372036854775808", 400), ("-1" + "0" * 30, 400)):
        body = f'{{"prompt": "a", "max_tokens": 2, "metadata": {{"a": ["1", {number}]}}}}'
        assert reciting.post(COMPLETIONS, body.encode()).status == status
    assert reciting.post(COMPLETIONS, {"prompt": "a", "max_tokens": 2, "user": "1" * 30}).status == 200


def test_roles_that_the_template_refuses_are_a_400():
    server = saying()
    server.llm.tokenizer.chat_templates = {"default": "{{ raise_exception('roles must alternate') }}"}
    answer = server.post(CHAT, {"messages": USER * 2})
    assert (answer.status, answer.error["param"]) == (400, "messages")
    assert "roles must alternate" in answer.error["message"]


LONG = "a " * 20_000
LONG_TURNS = [
    [{"role": "user", "content": LONG}],
    [{"role": "user", "content": [{"type": "text", "text": LONG}]}],
    [{"role": "assistant", "content": "a", "reasoning_content": LONG}, *USER],
    [*USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": json.dumps({"a": LONG})}}]}],
    USER * 50,
]


@pytest.mark.parametrize("turns", LONG_TURNS, ids=range(len(LONG_TURNS)))
def test_a_long_conversation_is_written_down_beside_the_event_loop(reciting, turns):
    threads, tokenizer = [], reciting.llm.tokenizer
    apply = tokenizer.apply_chat_template

    def noting(*args, **kwargs):
        threads.append(threading.current_thread())
        return apply(*args, **kwargs)

    tokenizer.apply_chat_template = noting
    check(reciting.post(CHAT, {"messages": turns, "max_tokens": 2}))
    assert reciting.post(CHAT, {"messages": USER, "max_tokens": 2}).status == 200
    assert [thread is threading.main_thread() for thread in threads] == [False, True]
