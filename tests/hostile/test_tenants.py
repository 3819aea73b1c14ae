"""Who may call, what others may learn of a caller, and what a caller may write into logs and metrics."""

import json
import random
import re
from typing import Any

import pytest

from tests.hostile.conftest import OTHER_KEY
from tests.hostile.target import CHAT, COMPLETIONS, RESPONSES, Reply, Target

OTHER = {"authorization": f"Bearer {OTHER_KEY}"}
OPEN = {"/health", "/ready", "/metrics", "/ping"}
ADMIN = {
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/reset_prefix_cache",
    "/restart_engines",
    "/api/pull",
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
}
WRONG_KEYS = [
    {"authorization": ""}, {"authorization": "Bearer"}, {"authorization": "Bearer "}, {"authorization": "Bearer wrong"},
    {"authorization": "Bearer a-key-for-tests\0"}, {"authorization": "Bearer A-KEY-FOR-TESTS"},
    {"authorization": "Bearer a-key-for-test"}, {"authorization": "Bearer a-key-for-testsx"},
    {"authorization": "a-key-for-tests"}, {"authorization": "Basic YS1rZXktZm9yLXRlc3Rz"},
    {"authorization": "Bearer a-key-for-tests,the-key-of-another-tenant"}, {"authorization": "Bearer " + "a" * 60_000},
    {"authorization": "Bearer \xff\xfe"}, {"authorization": "", "x-api-key": "wrong"},
    {"authorization": "", "cookie": "authorization=a-key-for-tests"},
    {"authorization": "", "api-key": "a-key-for-tests"},
    {"authorization": "", "x-forwarded-for": "127.0.0.1"},
]  # fmt: skip
HOSTS = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "localhost@evil.example",
    "[", "]", "[::1]:x", ":", "", " ", "a b", "127.0.0.1:8000:8000", "127.1", "0x7f.0.0.1",
    "2130706433", "localhost/..", "localhost?", "localhost#", "\xff", "x" * 10_000, "%6c%6fcalhost", "0.0.0.0",
]  # fmt: skip


def routes(target: Target) -> list[tuple[str, str]]:
    """Of all that there is."""
    described = target.get("/openapi.json").json["paths"]
    paths = [(method.upper(), re.sub(r"{\w+}", "x", path)) for path, methods in described.items() for method in methods]
    return [*paths, ("GET", "/openapi.json")]


def is_page(path: str) -> bool:
    return path == "/" or path.startswith(("/page/", "/docs"))


def test_every_route_without_a_key(guarded: Target):
    known = routes(guarded)
    assert len(known) > 20
    for method, path in known:
        reply = guarded.ask(method, path, headers={"authorization": ""})
        expected = 403 if path in ADMIN else 200 if path in OPEN or is_page(path) else 401
        assert reply.status == expected, (method, path, reply)
        if expected == 401:
            assert "requires an API key" in reply.message
            assert reply.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("wrong", WRONG_KEYS, ids=range(len(WRONG_KEYS)))
def test_every_route_with_a_wrong_key(guarded: Target, wrong: dict[str, str]):
    for method, path in routes(guarded):
        if path not in OPEN and not is_page(path):
            reply = guarded.ask(method, path, headers=wrong)
            allowed = (400, 403) if path in ADMIN else (400, 401)
            assert reply.status in allowed, (method, path, wrong, reply)  # 400: no header can have it
            assert b"key-for-tests" not in reply.body


def test_every_route_with_a_strange_host(guarded: Target):
    """Where a key is needed, the host does not matter."""
    for host in HOSTS:
        for method, path in (("GET", "/v1/models"), ("GET", "/none"), ("POST", COMPLETIONS)):
            assert guarded.ask(method, path, b"{}", {"host": host}).status in (200, 400, 404), (host, path)


@pytest.mark.thorough
def test_every_route_with_a_strange_host_and_no_key(open_to_all: Target):
    """Only this machine's own names are served."""
    for host in HOSTS:
        for method, path in (("GET", "/v1/models"), ("GET", "/none"), ("POST", COMPLETIONS)):
            assert open_to_all.ask(method, path, b"{}", {"host": host}).status in (400, 403), (host, path)
    for method, path in routes(open_to_all):
        assert open_to_all.ask(method, path, headers={"host": "evil.example"}).status == 403, (method, path)
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000"):
        assert open_to_all.get("/v1/models", {"host": host}).status == 200, host


def test_random_methods_and_paths_make_no_metrics(guarded: Target):
    def series() -> int:
        pattern = r"^(?!vllm:spec_decode)[a-z]+:[^ #]+"  # a machine so slow that drafts pay makes those of its drafters
        return len(re.findall(pattern, guarded.get("/metrics").body.decode(), re.MULTILINE))

    rng = random.Random(5)
    methods = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "PROPFIND", "M-SEARCH", "PURGE"]

    def ask_some() -> None:
        for _ in range(150):
            name = "".join(rng.choices("abcdefgh/%?.", k=rng.randrange(1, 30)))
            start = rng.choice(["", "/v1/responses", "/v1/models", "/page", "/v1/chat/completions"])
            path = f"{start}/{name}{rng.randrange(10**9)}"
            model = {"model": f"m{rng.randrange(10**9)}", "user": f"u{rng.randrange(10**9)}"}
            assert guarded.ask(rng.choice(methods), path, json.dumps(model).encode()).status < 500
            guarded.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1} | model)

    ask_some()
    before = series()
    ask_some()
    ask_some()
    assert series() <= before + 12  # a status or method that did not come before


REQUEST_IDS = [
    "", " ", "same", "x" * 128, "x" * 129, "x" * 60_000, "a b", "a\tb", "a,b", "é", "\x7f", "../../etc/passwd",
    "%0d%0a", "' OR 1=1 --", "{{ 7 * 7 }}", "null", "\x1b[31m", "cmpl-x", "\xff",
]  # fmt: skip


def test_request_ids_that_are_duplicate_empty_huge_and_of_control_characters(guarded: Target):
    body = {"prompt": "a", "max_tokens": 2}
    for given in REQUEST_IDS:
        for _ in range(2):
            reply = guarded.post(COMPLETIONS, body, {"x-request-id": given})
            if reply.status == 400 and any(char < " " or char == "\x7f" for char in given):
                continue  # no header can have it
            assert reply.status == 200, given
            told = reply.headers["x-request-id"]
            is_sane = 0 < len(given) <= 128 and all("!" <= char <= "~" for char in given)
            assert (told == given) is is_sane, (given, told)
            assert re.fullmatch("[!-~]{1,128}", told)
            reply = guarded.post(COMPLETIONS, body | {"request_id": given})
            assert reply.status == (200 if is_sane else 400), given
            assert is_sane or "request_id" in reply.message
    for wrong in ("a\r\nb", "a\0b", "\u202e", 5, ["a"]):
        assert guarded.post(COMPLETIONS, body | {"request_id": wrong}).status == 400


FORGED = 'x\r\n2026-01-01 00:00:00,000 ERROR forged\n{"level": "error"}\x1b[2J\u2028\u202e\x9b\0'


@pytest.mark.parametrize("which", ["guarded", pytest.param("open_to_all", marks=pytest.mark.thorough)])
def test_no_client_writes_a_line_of_the_log(which: str, request: pytest.FixtureRequest):
    """The fixture reads the log afterwards: each line must be the server's."""
    target: Target = request.getfixturevalue(which)
    for field in ("model", "user", "prompt", "cache_salt", "stop", "suffix", "guided_regex", FORGED):
        assert target.post(COMPLETIONS, {"prompt": "a", "max_tokens": 1} | {field: FORGED}).status in (200, 400, 404)
    target.post(CHAT, {"messages": [{"role": FORGED, "content": FORGED, "name": FORGED}], "max_tokens": 1})
    target.post(RESPONSES, {"input": FORGED, "metadata": {FORGED: FORGED}, "max_output_tokens": 1, "store": False})
    for path in ("/%0d%0aforged", "/%00%1b%5b2J", "/v1/models/%e2%80%ae%c2%9b", "/?a=%0d%0aforged"):
        target.ask("GET", path, headers={"user-agent": "forged\x9b\x85", "referer": "\x1b[2J", "x-request-id": "\x9b"})
    target.say(b"GET /\x1b[2J\r\nforged HTTP/1.1\r\n\r\n")
    assert not re.search(r"(?m)^(x\b|forged|\{\"level\")", target.log.read_text())


def words(rng: random.Random, num: int) -> str:
    return " ".join("".join(rng.choices("abcdefghijklmnop", k=5)) for _ in range(num))


def ask(target: Target, prompt: str, salt: str, headers: dict[str, str] | None = None) -> Reply:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
    reply = target.post(COMPLETIONS, body | ({"cache_salt": salt} if salt else {}), headers)
    assert reply.status == 200, reply
    return reply


def hit_tokens(target: Target) -> int:
    """Prompt tokens that were found in the prefix cache since the server started."""
    found = re.search(r"(?m)^vllm:prefix_cache_hits_total\{.*\} (\S+)$", target.get("/metrics").body.decode())
    assert found
    return int(float(found[1]))


def ask_about(target: Target, secret: str, other: str) -> dict[str, Reply]:
    """The answers after one tenant has sent a secret prompt. Another tenant sends the same prompt ("theirs"), and then
    a new one ("nobody's"); at last the first tenant sends its own again ("mine")."""
    assert ask(target, secret, "mine").cached_tokens < 8
    return {
        "theirs": ask(target, secret, "theirs", OTHER),
        "nobody's": ask(target, other, "theirs", OTHER),
        "mine": ask(target, secret, "mine"),
    }


def test_tenants_cannot_probe_each_other_s_prefixes(guarded_server: Target):
    """Neither by counts nor by the reasons in the metrics, and what is not counted as found is computed again."""
    target, rng = guarded_server, random.Random(3)
    reasons = 'quire:prefix_cache_missed_tokens_total{engine="0",model_name="quire-tiny",reason="other_key"} 0.0'
    with target.unharmed("probing prefixes", is_heard=False):
        for _ in range(3):
            secret, before = words(rng, 300), hit_tokens(target)
            replies = ask_about(target, secret, words(rng, 300))
            assert max(replies[whose].cached_tokens for whose in ("theirs", "nobody's")) < 8  # of their own prompts
            assert replies["mine"].cached_tokens > 600
            assert hit_tokens(target) - before < replies["mine"].cached_tokens + 3 * 8
            assert max(ask(target, secret, salt).cached_tokens for salt in ("", "Mine")) < 8
        assert reasons in target.get("/metrics").body.decode()


@pytest.mark.thorough
def test_tenants_cannot_time_each_other_s_prefixes(guarded_server: Target):
    """By the shortest of many times, which others at work on the machine lengthen least. Without a canary."""
    target, rng, times = guarded_server, random.Random(4), {"mine": [], "theirs": [], "nobody's": []}
    with target.unharmed("timing prefixes", is_heard=False):
        for _ in range(25):
            for whose, reply in ask_about(target, words(rng, 300), words(rng, 300)).items():
                times[whose].append(reply.seconds)
    mine, theirs, nobodys = (min(times[whose]) for whose in ("mine", "theirs", "nobody's"))
    assert theirs > mine + 0.6 * (nobodys - mine), "a prompt is answered sooner that another tenant has sent"


def test_tenants_do_not_see_each_other_s_responses(guarded: Target):
    created = guarded.post(RESPONSES, {"input": "a secret", "max_output_tokens": 2}).json["id"]
    for method, rest in (("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")):
        assert guarded.ask(method, f"{RESPONSES}/{created}{rest}", headers=OTHER).status == 404
    reply = guarded.post(RESPONSES, {"input": "go on", "previous_response_id": created, "max_output_tokens": 2}, OTHER)
    assert reply.status == 404
    assert guarded.get(f"{RESPONSES}/{created}").status == 200
    assert guarded.ask("DELETE", f"{RESPONSES}/{created}").status == 200
