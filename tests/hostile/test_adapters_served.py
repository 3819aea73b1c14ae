"""Adapters over HTTP, beside a canary: what a caller with an admin key may not load, and what no stream notices."""

import contextlib
import http.client
import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import EngineArgs
from tests.clients.served import WAIT_S, quire_serve
from tests.hostile.target import COMPLETIONS, JSON, Target
from tests.hostile.test_adapters import HOSTILE
from tests.models.adapters import make_tensors, tiny_sizes, write_adapter

pytestmark = pytest.mark.slow
ADMIN = {"authorization": "Bearer the-key-of-the-operator"}
RUNNING = re.compile(rb'lora_requests_running\{[^}]*"brief"[^}]*\} [1-9]')
HARMLESS = "an exponential pattern"  # with tensors that are good
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of adapters: `good`, `high`, `other`, and one for each hostile case, by its number."""
    folder, sizes = tmp_path_factory.mktemp("lora") / "adapters", tiny_sizes(EngineArgs().resolve().model)
    write_adapter(folder / "good", make_tensors(sizes, 2), r=2)
    write_adapter(folder / "high", make_tensors(sizes, 17), r=17)
    write_adapter(folder / "other", make_tensors({"model.layers.0.mlp.up_proj": (8, 8)}, 2), r=2)
    write_adapter(folder.parent / "outside", make_tensors(sizes, 2, seed=1), r=2)
    (folder / "link").symlink_to(folder.parent / "outside")
    for place, (spoil, _) in enumerate(HOSTILE.values()):
        spoil(write_adapter(folder / str(place), make_tensors(dict(list(sizes.items())[:1]), 2), r=2))
    os.mkfifo(folder / "pipe")
    return folder


@pytest.fixture(scope="module")
def target(adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("served")
    (folder / "admin.keys").write_text(f"operator:{ADMIN['authorization'].removeprefix('Bearer ')}\n")
    more = [
        "--max-waiting",
        "64",
        "--enable-lora",
        "--lora-dir",
        str(adapters),
        "--admin-key-file",
        str(folder / "admin.keys"),
    ]
    with (
        quire_serve(folder, *more) as served,
        contextlib.closing(Target(served, folder / "serve.log")) as target,
    ):
        yield target
        target.check_whole_run()


PATHS: dict[str, tuple[int, str]] = {
    "..": (403, "not below"), "../outside": (403, "not below"), "good/../../outside": (403, "not below"),
    "link": (403, "not below"), "/etc": (403, "not below"), "/proc/self/fd": (403, "not below"), "~": (400, "has no"),
    "\0": (400, "is not a path"), "good\0/../..": (400, "is not a path"), "x" * 300: (400, "has no"),
    "a/" * 100_000: (400, "200,000 characters; at most 4,096"), "a/" * 1000: (400, ""),
    "pipe": (400, "has no"), "good/adapter_config.json": (400, "has no"), "https://example.org/a": (400, "has no"),
    "org/name": (400, "has no"), "": (403, "not below"), "high": (400, "more than max_lora_rank"),
    "other": (400, "another model"),
}  # fmt: skip


def test_what_cannot_be_loaded_is_refused_in_one_line(target: Target, adapters: Path) -> None:
    cases = PATHS | {str(place): (400, "") for place, name in enumerate(HOSTILE) if name != HARMLESS}
    with target.unharmed("adapters that cannot be loaded"):
        for path, (status, words) in cases.items():
            reply = target.post(LOAD, {"lora_name": "x", "lora_path": path}, ADMIN)
            assert reply.status == status, (path[:80], reply)
            assert words in reply.message
            assert "\n" not in reply.message
            assert len(reply.message) < 3000
            assert str(adapters) not in reply.message
        for name in ("", "a\n", "x" * 100_000, "quire-tiny", "a/b\0", 3, None, ["a"]):
            assert target.post(LOAD, {"lora_name": name, "lora_path": "good"}, ADMIN).status == 400, str(name)[:80]
        for body in (b"", b"[]", b'{"lora_name": "x"}', b'{"lora_name": "x", "lora_path": 1}', b"{" * 100_000):
            assert target.post(LOAD, body, ADMIN).status == 400
        assert target.post(LOAD, {"lora_name": "x", "lora_path": "good"}).status == 401, "not with a caller's own key"
        assert target.post(UNLOAD, {"lora_name": "x"}, ADMIN).status == 404
        assert not any((adapters / str(place) / "RAN").exists() for place in range(len(HOSTILE)))
    assert [card["id"] for card in target.get("/v1/models").json["data"]] == ["quire-tiny"]


def test_an_adapter_is_unloaded_again_and_again_while_32_streams_use_it(target: Target) -> None:
    body = {"model": "brief", "prompt": "def f(", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    found: list[tuple[int, bytes]] = []

    def ask() -> None:
        with contextlib.closing(http.client.HTTPConnection(target.address, timeout=WAIT_S)) as connection:
            connection.request("POST", COMPLETIONS, json.dumps(body), target.key | JSON)
            reply = connection.getresponse()
            found.append((reply.status, reply.read()))

    with target.unharmed("an adapter that is unloaded while streams use it"):
        num_rounds = 0
        while num_rounds < 5:
            assert target.post(LOAD, {"lora_name": "brief", "lora_path": "good"}, ADMIN).status == 200
            threads = [threading.Thread(target=ask) for _ in range(32)]
            for thread in threads:
                thread.start()
            deadline_s = time.monotonic() + WAIT_S
            while not (runs := RUNNING.search(target.get("/metrics").body)) and any(
                thread.is_alive() for thread in threads
            ):
                assert time.monotonic() < deadline_s
            num_rounds += runs is not None  # all streams have ended if this process was stalled
            assert target.post(UNLOAD, {"lora_name": "brief"}, ADMIN).status == 200
            assert target.post(COMPLETIONS, body).status == 404
            for thread in threads:
                thread.join()
    statuses = {status for status, _ in found}
    assert statuses <= {200, 404}, found
    texts = {json.loads(reply)["choices"][0]["text"] for status, reply in found if status == 200}
    assert len(texts) == 1, "a stream changed"
    assert sum(status == 200 for status, _ in found) >= 5 * 8
