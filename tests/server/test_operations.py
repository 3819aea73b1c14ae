"""All that stands around the endpoints, together: who gets through to them, and what is remembered of it."""

import asyncio
import re
from typing import Any

import pytest

from quire.common.outputs import EngineStats
from quire.kv.prefix_cache.stats import PrefixCacheStats
from quire.server.config import ServerArgs
from quire.server.http.auth import ApiKeys
from quire.server.operations.lifecycle import DrainGate
from quire.server.serve import build_app
from tests.scripted_engine import scripted_llm
from tests.server.in_process import InProcessLLM, Server, serve

KEY = {"authorization": "Bearer sk-1"}
PROMPT = {"prompt": "hello", "max_tokens": 2}


class ListenedLLM(InProcessLLM):
    """With what the operator's side of AsyncLLM has."""

    is_running, num_restarts, num_replayed = True, 2, 3

    def __init__(self, engine) -> None:
        super().__init__(engine)
        self.config = engine.plan.config
        self.listeners: list[Any] = []
        self.calls: list[str] = []
        self.is_busy = False
        self.params: list[Any] = []

    async def sleep(self) -> None:
        self.calls.append("sleep")

    async def wake_up(self) -> None:
        self.calls.append("wake_up")

    async def reset_prefix_cache(self) -> bool:
        return not self.is_busy

    async def restart_engines(self, drain_timeout_s: float) -> None:
        await asyncio.sleep(0.01)
        self.calls.append(f"restart within {drain_timeout_s:g} s")

    def add_listener(self, listener) -> None:
        self.listeners.append(listener)

    def stats(self) -> EngineStats:
        counts = dict.fromkeys(EngineStats.__dataclass_fields__, 0) | {"num_blocks": 1}
        return EngineStats(
            **counts
            | {
                "prefix_cache": PrefixCacheStats().to_dict(),
                "adapters": {},
                "drafts": {},
                "tenant_drafts": {},
                "drafting_errors": {},
            }
        )

    async def generate(self, prompt, params, request_id: str, *, lora_request=None, holds=False):
        self.params.append(params)
        for listener in self.listeners:
            listener.on_request_start(request_id, 7, params)
        async for output in super().generate(prompt, params, request_id=request_id):
            for listener in self.listeners:
                listener.on_tokens(request_id, 2, 0.0)
            yield output
        for listener in self.listeners:
            listener.on_request_end(request_id, output.metrics, output.num_cached_tokens, "length", 2)


@pytest.fixture
def operated():
    """A server with these arguments."""

    def make(**args: Any) -> Server:
        llm, _ = scripted_llm()
        server = serve(llm.engine, args=ServerArgs(**args))
        server.model.llm = ListenedLLM(llm.engine)
        gate = DrainGate(request_timeout_s=server.state.args.request_timeout_s, drain_timeout_s=1)
        server.app = build_app(
            server.state,
            gate,
            ApiKeys.load(server.state.args, {}),
            admin_keys=ApiKeys.load_admin(server.state.args, {}),
        )
        return server

    return make


@pytest.mark.parametrize(
    ("args", "path", "status"),
    [({}, "/health", 200), ({}, "/ready", 200), ({}, "/metrics", 200), ({}, "/v1/models", 401), ({}, "/version", 401),
     ({}, "/openapi.json", 401), ({}, "/load", 401), ({}, "/none", 404), ({"guard_metrics": True}, "/metrics", 401),
     ({"guard_metrics": True}, "/health", 200), ({"guard_health": True}, "/health", 401),
     ({"guard_health": True}, "/ready", 401), ({"guard_health": True}, "/metrics", 200)],
)  # fmt: skip
def test_what_is_open_without_a_key(operated, args, path, status):
    server = operated(api_key=("sk-1",), **args)
    assert server.get(path).status == status
    assert server.get(path, headers=KEY).status in (200, 404)


def test_every_endpoint_that_makes_something_is_guarded(operated):
    server = operated(api_key=("sk-1",))
    described = server.get("/openapi.json", headers=KEY).json["paths"]
    posted = {path for path, methods in described.items() if "post" in methods} - {"/ping"}
    admins = {"/sleep", "/wake_up", "/reset_prefix_cache", "/restart_engines", "/api/pull"}
    admins |= {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
    assert posted > admins
    assert len(posted - admins) >= 4
    statuses = {path: server.post(path.replace("{", "").replace("}", ""), {}).status for path in posted}
    assert statuses == dict.fromkeys(posted, 401) | dict.fromkeys(admins, 403)


def test_administration_needs_its_own_key(operated):
    assert operated().get("/is_sleeping").error["code"] == "admin_disabled"
    server = operated(api_key=("sk-1",), admin_key=("sk-admin",))
    for headers in ({}, KEY, {"authorization": "Bearer sk-admi"}):
        refused = server.get("/is_sleeping", headers=headers)
        assert (refused.status, refused.error["code"]) == (401, "invalid_admin_key")
        assert refused.headers["www-authenticate"] == "Bearer"
    for headers in ({"authorization": "Bearer sk-admin"}, {"x-api-key": "sk-admin"}):
        assert server.get("/is_sleeping", headers=headers).json == {"is_sleeping": False}
    assert server.get("/v1/models", headers={"authorization": "Bearer sk-admin"}).status == 401


def test_an_administrator_replaces_the_engines(operated):
    server = operated(admin_key=("sk-admin",), drain_timeout_s=7.0)
    answer = server.post("/restart_engines", b"", headers={"authorization": "Bearer sk-admin"})
    assert answer.json == {"models": {"quire-tiny": "loaded"}}
    assert server.llm.calls == ["restart within 7 s"]


def test_administration_may_take_longer_than_a_request(operated):
    server = operated(admin_key=("sk-admin",), request_timeout_s=0.001)
    answer = server.post("/restart_engines", b"", headers={"authorization": "Bearer sk-admin"})
    assert (answer.status, len(server.llm.calls)) == (200, 1)


def test_an_administrator_lets_models_sleep_and_wakes_them_up(operated):
    admin = {"authorization": "Bearer sk-admin"}
    server = operated(admin_key=("sk-admin",))
    assert server.post("/sleep?level=2", b"", headers=admin).json == {"models": {"quire-tiny": "asleep"}}
    assert server.get("/is_sleeping", headers=admin).json == {"is_sleeping": True}
    assert server.get("/health").status == 200
    assert server.get("/ready").status == 503
    refused = server.post("/v1/completions", PROMPT)
    assert (refused.status, refused.error["code"]) == (503, "model_asleep")
    assert refused.headers["retry-after"]
    assert server.post("/wake_up", b"", headers=admin).json == {"models": {"quire-tiny": "loaded"}}
    assert server.post("/v1/completions", PROMPT).status == 200
    assert server.llm.calls == ["sleep", "wake_up"]
    assert server.post("/sleep?model=none", b"", headers=admin).status == 404


def test_an_administrator_lets_a_model_forget_its_cached_prefixes(operated):
    admin = {"authorization": "Bearer sk-admin"}
    server = operated(admin_key=("sk-admin",))
    assert server.post("/reset_prefix_cache", b"", headers=admin).status == 200
    server.llm.is_busy = True
    refused = server.post("/reset_prefix_cache", b"", headers=admin)
    assert (refused.status, refused.error["code"]) == (409, "requests_running")


@pytest.mark.parametrize(
    ("headers", "user", "tenant"),
    [(KEY, None, "key-1"), (KEY, "carol", "key-1/carol"), (KEY, "key-2/carol", "key-1/key-2/carol")],
)
def test_no_tenant_can_pose_as_another(operated, headers, user, tenant):
    server = operated(api_key=("sk-1", "sk-2"))
    body = PROMPT if user is None else PROMPT | {"user": user}
    assert server.post("/v1/completions", body, headers=headers).status == 200
    assert server.llm.params[0].tenant == tenant


def test_without_keys_the_user_is_the_tenant(operated):
    server = operated()
    assert server.post("/v1/completions", PROMPT | {"user": "carol"}).status == 200
    assert server.llm.params[0].tenant == "carol"


def test_other_sites_pages_may_call_only_if_they_are_named(operated):
    server = operated(api_key=("sk-1",), allowed_origins=("https://app.example",))
    origin = {"origin": "https://app.example"}
    refused = server.get("/v1/models", headers=origin)
    assert refused.status == 401
    assert refused.headers["access-control-allow-origin"] == "https://app.example"
    assert {"x-request-id", "request-id"} <= set(refused.headers["access-control-expose-headers"].split(", "))
    ask_first = origin | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert server.call("OPTIONS", "/v1/chat/completions", headers=ask_first).status == 200
    other = server.get("/v1/models", headers=KEY | {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers
    assert "access-control-allow-origin" not in operated().get("/v1/models", headers=origin).headers


def test_requests_for_other_hosts_are_refused_where_no_key_is_needed(operated):
    evil = {"host": "evil.example:8000"}
    assert operated().get("/v1/models", headers=evil).status == 403
    assert operated(allowed_hosts=("evil.example",)).get("/v1/models", headers=evil).status == 200
    assert operated(api_key=("sk-1",)).get("/v1/models", headers=KEY | evil).status == 200


def test_refusals_are_counted_and_routes_are_few(operated):
    server = operated(requests_per_minute=1)
    assert server.post("/v1/completions", PROMPT).status == 200
    refused = server.post("/v1/completions", PROMPT)
    assert (refused.status, refused.error["code"]) == (429, "requests_per_minute")
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert refused.headers["x-request-id"]
    assert server.get("/v1/models").status == 200, "only what generates is limited"
    for name in ("a", "b", "c\n"):
        server.get(f"/no/such/{name}")
    server.call("BREW", "/pot")
    answer = server.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    text = answer.body.decode()
    assert 'quire:requests_refused_total{engine="0",model_name="quire-tiny",reason="requests_per_minute"} 1.0' in text
    counted = dict(re.findall(r"quire:http_requests_total\{(?:[^}]*?)(method=[^}]*)\} ([\d.]+)", text))
    assert counted == {
        'method="POST",model_name="quire-tiny",route="/v1/completions",status="200"': "1.0",
        'method="POST",model_name="quire-tiny",route="/v1/completions",status="429"': "1.0",
        'method="GET",model_name="quire-tiny",route="/v1/models",status="200"': "1.0",
        'method="GET",model_name="quire-tiny",route="other",status="404"': "3.0",
        'method="other",model_name="quire-tiny",route="other",status="404"': "1.0",
    }


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_a_refusal_reads_no_body_and_has_the_shape_of_its_path(operated, path):
    server = operated(requests_per_minute=1)
    assert server.post("/v1/completions", PROMPT).status == 200
    refused = server.post(path, b"{ no JSON", headers={"x-request-id": "mine"})
    assert (refused.status, refused.error["type"]) == (429, "rate_limit_error")
    assert refused.headers["x-request-id"] == "mine"
    assert "try again in" in refused.error["message"]
    if path == "/v1/messages":
        assert (refused.json["type"], refused.json["request_id"], refused.headers["request-id"]) == (
            "error",
            "mine",
            "mine",
        )
    else:
        assert refused.json == {"error": refused.error | {"code": "requests_per_minute", "param": None}}


def test_a_wrong_method_is_answered_with_those_that_the_path_has(operated):
    answer = operated().post("/v1/responses/resp_1", {})
    assert (answer.status, answer.headers["allow"]) == (405, "DELETE, GET, HEAD")


def test_tokens_are_charged_to_the_key(operated):
    server = operated(api_key=("sk-1", "sk-2"), tokens_per_minute=5)
    assert server.post("/v1/completions", PROMPT, headers=KEY).status == 200
    refused = server.post("/v1/completions", PROMPT, headers=KEY)
    assert (refused.status, refused.error["code"]) == (429, "tokens_per_minute")
    assert server.post("/v1/completions", PROMPT, headers={"x-api-key": "sk-2"}).status == 200


def test_a_stream_is_measured_as_a_whole_answer_is(operated):
    server = operated()
    for stream in (False, True):
        assert server.post("/v1/completions", PROMPT | {"stream": stream}).status == 200
    text = server.get("/metrics").body.decode()
    assert 'vllm:request_prompt_tokens_sum{engine="0",model_name="quire-tiny"} 14.0' in text
    assert 'vllm:e2e_request_latency_seconds_count{engine="0",model_name="quire-tiny"} 2.0' in text
