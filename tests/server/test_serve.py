"""`quire serve` as a process: from its first line to its exit status."""

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from quire.common.errors import ConfigError
from quire.common.faults import Fault, environment
from quire.server.config import ServerArgs
from quire.server.listening import listening, uvicorn_config

SMALL = ["--kv-cache-memory", "16MiB", "--max-num-seqs", "8"]
WAIT_S = 150
CHAT = {"messages": [{"role": "user", "content": "Count."}], "ignore_eos": True}
IN_TERMINAL = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY); os.execv(sys.argv[1], sys.argv[1:])"


class Server:
    """A `quire serve` process, and what it has printed. Faults are those of its engine process too; a terminal given
    controls it."""

    def __init__(self, *args: str | Path, faults: Sequence[Fault] = (), terminal: int | None = None) -> None:
        self.lines: list[str] = []
        self._changed = threading.Condition()
        in_terminal = [] if terminal is None else ["-c", IN_TERMINAL, sys.executable]
        self.process = subprocess.Popen(
            [sys.executable, *in_terminal, "-m", "quire", "serve", *map(str, args), *SMALL],
            stdin=terminal,
            start_new_session=terminal is not None,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"PYTHONFAULTHANDLER": "1"} | environment(*faults),
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stderr:
            with self._changed:
                self.lines.append(line.rstrip("\n"))
                self._changed.notify_all()

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line that has it. If none comes, the stacks of all threads are printed before the test fails."""

        def find() -> re.Match[str] | None:
            return next((found for line in self.lines if (found := re.search(pattern, line))), None)

        with self._changed:
            self._changed.wait_for(lambda: find() is not None, WAIT_S)
        found = find()
        if found is None:
            self._print_stacks()
        assert found is not None, pattern
        return found

    def _print_stacks(self) -> None:
        """Among the server's lines; this ends its processes."""
        tasks = Path(f"/proc/{self.process.pid}/task").glob("*/children")
        for pid in [*(int(pid) for path in tasks for pid in path.read_text().split()), self.process.pid]:
            os.kill(pid, signal.SIGABRT)
        self.process.wait()
        self._reader.join(5)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(WAIT_S)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stderr.close()


@contextlib.contextmanager
def serving(*args: str | Path, faults: Sequence[Fault] = (), terminal: int | None = None) -> Iterator[Server]:
    server = Server(*args, faults=faults, terminal=terminal)
    try:
        yield server
    finally:
        server.close()
        print(*server.lines, sep="\n")  # shown if the test fails


def ask(port: int, method: str, path: str, body=None, **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as connection:
        text = None if body is None else json.dumps(body)
        connection.request(method, path, text, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response, response.read()


@pytest.fixture
def config(tmp_path) -> Path:
    keys = tmp_path / "keys"
    keys.write_text("alice:sk-alice\nbob:sk-bob\n")
    path = tmp_path / "quire.yaml"
    path.write_text(
        f"port: 1\nserved_model_name: tiny\napi_key_file: {keys}\nrequests-per-minute: 2\nlog_format: json\n"
    )
    return path


def test_a_server_from_its_start_to_its_end(config):
    pause = Fault("output.make", "delay", seconds=4, after=25)  # within the stream that `drain` asks for
    with serving("--config", config, "--port", "0", faults=[pause]) as server:
        configuration = json.loads(server.wait_for("configuration:").string)["message"]
        assert "port: 0\n" in configuration
        assert "requests_per_minute: 2\n" in configuration
        assert "sk-alice" not in configuration
        port = int(server.wait_for(r"serves tiny at http://127\.0\.0\.1:(\d+) \(ready in [\d.]+ s\)")[1])
        key = {"authorization": "Bearer sk-alice"}

        assert ask(port, "GET", "/ready")[0].status == 200
        assert ask(port, "GET", "/health")[0].status == 200
        response, body = ask(port, "GET", "/v1/models")
        assert (response.status, response.headers["www-authenticate"]) == (401, "Bearer")
        assert json.loads(body)["error"]["code"] == "invalid_api_key"
        assert json.loads(ask(port, "POST", "/v1/messages", {})[1])["type"] == "error"
        assert ask(port, "GET", "/v1/models", **key)[0].status == 200
        assert ask(port, "GET", "/v1/none", x_api_key="sk-bob")[0].status == 404
        assert ask(port, "GET", "/v1/models", x_api_key="sk-bob", a="x" * 70_000)[0].status == 431

        response, body = ask(port, "POST", "/v1/chat/completions", CHAT | {"max_tokens": 5}, x_request_id="mine", **key)
        assert response.status == 200
        line = json.loads(server.wait_for('"request_id": "mine"').string)
        assert line | {"time": 0, "first_token_s": 0, "seconds": 0, "queue_s": 0} == {
            "time": 0, "level": "info", "message": "POST /v1/chat/completions 200", "method": "POST", "status": 200,
            "route": "/v1/chat/completions", "request_id": "mine", "tenant": "alice", "model": "tiny",
            "reason": "length",
            "prompt_tokens": json.loads(body)["usage"]["prompt_tokens"], "generated_tokens": 5, "queue_s": 0,
            "first_token_s": 0, "seconds": 0,
        }  # fmt: skip
        metrics = ask(port, "GET", "/metrics")[1].decode()
        assert 'vllm:request_success_total{engine="0",finished_reason="length",model_name="tiny"} 1.0' in metrics
        assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 5.0' in metrics
        assert re.search(r'quire:http_requests_total\{[^}]*route="/v1/models",status="401"\} 1\.0', metrics)

        statuses = [ask(port, "POST", "/v1/completions", {}, **key)[0] for _ in range(5)]
        assert [response.status for response in statuses] == [400, 429, 429, 429, 429]
        assert int(statuses[-1].headers["retry-after"]) <= 30
        drain(server, port, {"x-api-key": "sk-bob"})
        assert 'request_id": "mine"' in "".join(server.lines)
        written = [line for line in server.lines if not line.startswith("QUIRE_FAULTS is set")]
        messages = [json.loads(line)["message"] for line in written]
        assert any(
            re.match(
                r"loaded quire-tiny in .* with the kernels \w+( \(QUIRE_ISA says so\))? on \d+ threads?(;|,|$)", message
            )
            for message in messages
        ), "the engine process's too"


def drain(server: Server, port: int, key: dict[str, str]) -> None:
    """A stream that runs when the signal comes is finished; nothing else is begun."""
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)) as connection:
        body = json.dumps(CHAT | {"max_tokens": 60, "stream": True})
        connection.request("POST", "/v1/chat/completions", body, key)
        stream = connection.getresponse()
        assert stream.status == 200
        assert stream.readline().startswith(b"data: ")
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("requests that still run: 1; they have")
        assert ask(port, "GET", "/ready")[0].status == 503
        assert ask(port, "GET", "/v1/models", **key)[0].status == 200
        response, answer = ask(port, "POST", "/v1/completions", {}, **key)
        assert (response.status, json.loads(answer)["error"]["code"]) == (503, "shutting_down")
        assert int(response.headers["retry-after"]) == 30
        assert stream.read().endswith(b"data: [DONE]\n\n")
    assert server.process.wait(WAIT_S) == 0


def certificate(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """A server's certificate and key in one file, and a client that trusts it."""
    authority, path = trustme.CA(), folder / "server.pem"
    authority.issue_cert("quire.test").private_key_and_cert_chain_pem.write_to_path(str(path))
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return path, context


def test_clients_with_certificates_behind_a_trusted_proxy_and_no_page(tmp_path):
    authority, pem, ca = trustme.CA(), tmp_path / "server.pem", tmp_path / "ca.pem"
    authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(pem))
    authority.cert_pem.write_to_path(str(ca))
    stranger, known = ssl.create_default_context(), ssl.create_default_context()
    for context in (stranger, known):
        authority.configure_trust(context)
    authority.issue_cert("client@quire.test").configure_cert(known)
    limits = ("--requests-per-minute", "1", "--trusted-proxies", "127.0.0.0/8", "--no-page")
    with serving("--port", "0", "--ssl-certfile", pem, "--ssl-ca-certs", ca, *limits) as server:
        port = int(server.wait_for(r"serves quire-tiny at https://127\.0\.0\.1:(\d+)")[1])

        def status(context: ssl.SSLContext, method: str = "GET", path: str = "/v1/models", **headers: str) -> int:
            client = http.client.HTTPSConnection("127.0.0.1", port, timeout=WAIT_S, context=context)
            with contextlib.closing(client) as connection:
                connection.request(method, path, "{}" if method == "POST" else None, headers)
                return connection.getresponse().status

        with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
            status(stranger)
        assert status(known) == 200
        assert status(known, path="/") == 404
        addresses = ("10.0.0.1", "10.0.0.1", "10.0.0.2")
        made = [status(known, "POST", "/v1/completions", **{"X-Forwarded-For": address}) for address in addresses]
        assert made == [400, 429, 400], "a limit for each address that the proxy names"
        assert server.stop() == 0
        assert not any("to finish" in line for line in server.lines), "nothing ran that could be waited for"


@pytest.mark.parametrize(
    ("trusted", "address"), [((), "127.0.0.1"), (("127.0.0.1",), "10.9.9.9"), (("*",), "10.9.9.9")]
)
def test_what_a_client_says_of_its_address_is_believed_only_of_proxies(trusted, address):
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["client"][0])

    scope = {
        "type": "http", "client": ("127.0.0.1", 5), "scheme": "http", "headers": [(b"x-forwarded-for", b"10.9.9.9")]
    }  # fmt: skip
    asyncio.run(uvicorn_config(app, ServerArgs(trusted_proxies=trusted)).loaded_app(scope, None, None))
    assert seen == [address]


def test_over_tls_on_a_unix_socket_until_the_second_signal(tmp_path):
    path, (pem, context) = tmp_path / "quire.sock", certificate(tmp_path)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as stale:
        stale.bind(str(path))  # what a server that was killed leaves behind
    hang = Fault("output.make", "delay", seconds=600, after=20)
    with serving("--uds", path, "--ssl-certfile", pem, "--drain-timeout-s", "600", faults=[hang]) as server:
        server.wait_for(f"serves quire-tiny at unix:{re.escape(str(path))}")
        with contextlib.closing(http.client.HTTPConnection("quire.test", timeout=WAIT_S)) as connection:
            plain = socket.socket(socket.AF_UNIX)
            plain.settimeout(WAIT_S)
            plain.connect(str(path))
            connection.sock = context.wrap_socket(plain, server_hostname="quire.test")
            body = json.dumps(CHAT | {"max_tokens": 1200, "stream": True, "n": 8})
            connection.request("POST", "/v1/chat/completions", body)
            stream = connection.getresponse()
            assert stream.status == 200
            assert stream.readline().startswith(b"data: ")
            server.process.send_signal(signal.SIGINT)
            server.wait_for("requests that still run: 1; they have")
            assert server.stop(signal.SIGINT) == 128 + signal.SIGINT
        assert not path.exists()


def test_a_signal_while_the_model_loads_ends_it_well():
    with serving("--port", "0", faults=[Fault("weights.load", "delay", seconds=600)]) as server:
        server.wait_for("configuration:")
        server.wait_for("loading")
        server.process.send_signal(signal.SIGTERM)  # once more changes nothing: there is nothing to wait for
        assert server.stop() == 0


def test_a_wrong_model_is_reported_in_one_line():
    with serving("/nowhere/at/all", "--port", "0") as server:
        assert server.process.wait(WAIT_S) == 2
        server.wait_for("quire: .*/nowhere/at/all")


def test_a_file_other_than_a_response_store_is_reported_in_one_line(tmp_path):
    (tmp_path / "notes.txt").write_text("not a database " * 100)
    with serving("--port", "0", "--response-store", str(tmp_path / "notes.txt")) as server:
        assert server.process.wait(WAIT_S) == 2
        server.wait_for("quire: response store .*notes.txt")
        assert not any("loaded" in line for line in server.lines), "that may take minutes"
    assert (tmp_path / "notes.txt").read_text() == "not a database " * 100


def test_a_port_or_socket_that_is_taken_is_refused(tmp_path):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is in use"), listening(ServerArgs(port=port)):
            pass
    path = tmp_path / "s"
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as other:
        other.bind(str(path))
        other.listen()
        with pytest.raises(ConfigError, match="in use by another server"), listening(ServerArgs(uds=str(path))):
            pass
    (tmp_path / "file").write_text("mine")
    for wrong in (tmp_path / "file", tmp_path / "no" / "folder"):
        with pytest.raises(ConfigError, match="cannot be created"), listening(ServerArgs(uds=str(wrong))):
            pass
    assert (tmp_path / "file").read_text() == "mine"
    elsewhere = ServerArgs(host="192.0.2.1", port=0, allow_unauthenticated=True)
    with pytest.raises(ConfigError, match="unavailable"), listening(elsewhere):
        pass
    for host in ("x" * 64, "a..b", "no-such-host.invalid"):
        args = ServerArgs(host=host, port=0, allow_unauthenticated=True)
        with pytest.raises(ConfigError, match="is not an address of this machine"), listening(args):
            pass


def test_the_socket_of_a_server_that_took_over_the_path_stays(tmp_path):
    path = tmp_path / "s"
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as successor:
        with listening(ServerArgs(uds=str(path))):
            path.unlink()
            successor.bind(str(path))
        assert path.is_socket()
    with listening(ServerArgs(uds=str(path))):
        path.unlink()
    assert not path.exists()


def test_invalid_certificates_are_refused(tmp_path):
    for text in (None, "not a certificate"):
        path = tmp_path / "cert.pem"
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match=r"cert\.pem"):
            uvicorn_config(None, ServerArgs(ssl_certfile=str(path)))


def test_an_invalid_certificate_is_named(tmp_path):
    pem, _ = certificate(tmp_path)
    (tmp_path / "ca.pem").write_text("not a certificate")
    with pytest.raises(ConfigError, match=r"^ssl_ca_certs='.*/ca\.pem' cannot be used"):
        uvicorn_config(None, ServerArgs(ssl_certfile=str(pem), ssl_ca_certs=str(tmp_path / "ca.pem")))
    other = tmp_path / "key.pem"
    trustme.CA().issue_cert("quire.test").private_key_pem.write_to_path(str(other))
    with pytest.raises(ConfigError, match=r"ssl_keyfile='.*/key\.pem' cannot be used"):
        uvicorn_config(None, ServerArgs(ssl_certfile=str(pem), ssl_keyfile=str(other)))


def test_a_key_with_a_passphrase_is_refused_without_asking_for_it(tmp_path):
    pem, _ = certificate(tmp_path)
    plain = load_pem_private_key(pem.read_bytes(), None)
    locked = plain.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
    (tmp_path / "key.pem").write_bytes(locked)
    with pytest.raises(ConfigError, match="the key must belong to the certificate and have no passphrase"):
        uvicorn_config(None, ServerArgs(ssl_certfile=str(pem), ssl_keyfile=str(tmp_path / "key.pem")))
