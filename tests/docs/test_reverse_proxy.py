"""The configuration of nginx on docs/how-to/reverse-proxy.md, run by nginx in front of a server that streams."""

import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.ports import free_port

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "reverse-proxy.md"
NGINX = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
WAIT_S = 90


class Streaming(BaseHTTPRequestHandler):
    """Sends an event, and the next one only after the client has received it."""

    protocol_version = "HTTP/1.1"
    was_received = threading.Event()
    seen: dict[str, str]

    def do_GET(self) -> None:
        type(self).seen = {name.lower(): value for name, value in self.headers.items()}
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"9\r\ndata: 1\n\n\r\n")
        if self.was_received.wait(WAIT_S):
            self.wfile.write(b"9\r\ndata: 2\n\n\r\n0\r\n\r\n")

    def log_message(self, *_: object) -> None:
        """The log is not part of the test."""


def test_the_page_has_a_configuration_for_both_proxies() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert "```nginx" in text
    assert "```caddy" in text


@contextmanager
def nginx(folder: Path, upstream: int) -> Iterator[str]:
    """nginx with the page's configuration, without TLS and in front of the port `upstream`; its address."""
    found = re.search(r"```nginx\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found
    port = free_port()
    server = re.sub(r"^ *ssl_certificate.*\n", "", found[1], flags=re.MULTILINE)
    server = server.replace("listen 443 ssl", f"listen 127.0.0.1:{port}").replace(
        "127.0.0.1:8000", f"127.0.0.1:{upstream}"
    )
    temporary = "".join(
        f"{name}_temp_path {folder}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    head = f"daemon off; pid {folder}/pid; error_log {folder}/error.log;\nevents {{}}\n"
    config.write_text(f"{head}http {{ access_log off;\n{temporary}{server}}}\n")
    assert NGINX
    with subprocess.Popen([NGINX, "-p", folder, "-c", config, "-e", folder / "error.log"]) as process:
        try:
            deadline = time.monotonic() + WAIT_S
            while not _listens(port):
                assert process.poll() is None, (folder / "error.log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.02)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
@pytest.mark.skipif(NGINX is None and "CI" not in os.environ, reason="nginx is not installed")
def test_nginx_passes_a_stream_on_in_pieces_and_names_the_client(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Streaming) as upstream:
        threading.Thread(target=upstream.serve_forever, daemon=True).start()
        with nginx(tmp_path, upstream.server_port) as url:
            request = urllib.request.Request(url, headers={"Host": "llm.example.org", "Authorization": "Bearer key"})
            with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
                first = answer.read1()
                Streaming.was_received.set()  # so that the second event is sent
                rest = answer.read()
        upstream.shutdown()
    assert (first, rest) == (b"data: 1\n\n", b"data: 2\n\n")
    assert Streaming.seen["host"] == "llm.example.org"
    assert Streaming.seen["authorization"] == "Bearer key"
    assert Streaming.seen["x-forwarded-for"] == "127.0.0.1"
    assert Streaming.seen["x-forwarded-proto"] == "http"
