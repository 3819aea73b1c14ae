"""SIGHUP to `quire serve`: keys and certificates are read again, and nothing else changes."""

import contextlib
import http.client
import os
import re
import signal
import ssl
from pathlib import Path

import trustme

from tests.server.test_serve import WAIT_S, Server, ask, serving

READY = r"serves quire-tiny at https?://127\.0\.0\.1:(\d+)"


def hang_up(server: Server, outcome: str) -> None:
    """Send SIGHUP, and wait for the line about its outcome."""
    del server.lines[:]
    server.process.send_signal(signal.SIGHUP)
    server.wait_for(outcome)


def status(port: int, key: str, path: str = "/v1/models") -> int:
    return ask(port, "GET", path, x_api_key=key)[0].status


def test_keys_are_read_again_and_bad_files_keep_the_old_ones(tmp_path):
    keys, admin_keys = tmp_path / "keys", tmp_path / "admin"
    keys.write_text("alice:sk-alice\n")
    admin_keys.write_text("root:sk-root\n")
    with serving("--port", "0", "--api-key-file", keys, "--admin-key-file", admin_keys) as server:
        port = int(server.wait_for(READY)[1])
        blocks = "/debug/cache/blocks?ids=1"
        assert [status(port, key) for key in ("sk-alice", "sk-bob")] == [200, 401]
        assert status(port, "sk-alice", blocks) == 200

        keys.write_text("bob:sk-bob\ncarol:sk-carol\n")
        admin_keys.write_text("root:sk-root2\n")
        hang_up(server, "SIGHUP: API keys, admin keys and certificates were read again")
        assert [status(port, key) for key in ("sk-alice", "sk-bob", "sk-carol")] == [401, 200, 200]
        assert [status(port, key, "/is_sleeping") for key in ("sk-root", "sk-root2")] == [401, 200]
        assert status(port, "sk-bob", blocks) == 403, "there are two tenants now"
        keys.write_text("bob:sk-bob\n")
        hang_up(server, "were read again")
        assert status(port, "sk-bob", blocks) == 403, "of what alice and carol wrote, something may be in the cache"

        admin_keys.write_text("root:sk-root3\n")
        for text, reason in (
            ("", "has no keys"),
            ("# alice:sk-alice", "has no keys"),
            ("sk-alice", "must be name:key"),
            ("alice:sk-root3", "an admin key is also an API key"),
        ):
            keys.write_text(text)
            hang_up(server, f"SIGHUP: keys and certificates stay as they were: .*{reason}")
            assert [status(port, key) for key in ("", "sk-alice", "sk-bob")] == [401, 401, 200]
        keys.unlink()
        hang_up(server, "stay as they were: api_key_file=.* cannot be read")
        assert [status(port, key) for key in ("", "sk-alice", "sk-bob")] == [401, 401, 200]
        assert [status(port, key, "/is_sleeping") for key in ("sk-root2", "sk-root3")] == [200, 401], "all or nothing"
        assert server.stop() == 0


class Party:
    """An authority and what it has issued."""

    def __init__(self) -> None:
        self.authority = trustme.CA()

    def serve_from(self, pem: Path, ca: Path) -> None:
        """Write a server's certificate, and the authority of its clients."""
        self.authority.issue_cert("127.0.0.1").private_key_and_cert_chain_pem.write_to_path(str(pem))
        self.authority.cert_pem.write_to_path(str(ca))

    def get(self, port: int, server: "Party") -> int:
        """The status of a request of a client of this party to a server of another."""
        context = ssl.create_default_context()
        server.authority.configure_trust(context)
        self.authority.issue_cert("client@quire.test").configure_cert(context)
        client = http.client.HTTPSConnection("127.0.0.1", port, timeout=WAIT_S, context=context)
        with contextlib.closing(client):
            client.request("GET", "/v1/models")
            return client.getresponse().status

    def is_refused(self, port: int, server: "Party") -> bool:
        try:
            self.get(port, server)
        except (ssl.SSLError, ConnectionError, http.client.RemoteDisconnected):
            return True
        return False


def test_certificates_are_read_again_and_open_connections_stay(tmp_path):
    old, new, pem, ca = Party(), Party(), tmp_path / "server.pem", tmp_path / "ca.pem"
    old.serve_from(pem, ca)
    with serving("--port", "0", "--ssl-certfile", pem, "--ssl-ca-certs", ca) as server:
        port = int(server.wait_for(READY)[1])
        assert old.get(port, old) == 200
        assert new.is_refused(port, old)
        context = ssl.create_default_context()
        old.authority.configure_trust(context)
        old.authority.issue_cert("client@quire.test").configure_cert(context)
        client = http.client.HTTPSConnection("127.0.0.1", port, timeout=WAIT_S, context=context)
        with contextlib.closing(client):
            client.connect()
            for _ in range(2):  # also a second time
                new.serve_from(pem, ca)
                hang_up(server, "were read again")
                assert new.get(port, new) == 200
                assert old.is_refused(port, old)
                assert old.is_refused(port, new)
                pem.write_text("half a certif")
                hang_up(server, "stay as they were: ssl_certfile=")
                assert new.get(port, new) == 200
                client.request("GET", "/v1/models")
                response = client.getresponse()
                assert (response.status, bool(response.read())) == (200, True)
        assert server.stop() == 0


def test_a_hangup_that_is_ignored_stays_ignored():
    with contextlib.ExitStack() as stack:
        handler = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does; the server inherits it
        try:
            server = stack.enter_context(serving("--port", "0"))
        finally:
            signal.signal(signal.SIGHUP, handler)
        server.wait_for(READY)
        ignored = re.search(r"SigIgn:\t(\w+)", Path(f"/proc/{server.process.pid}/status").read_text())
        assert int(ignored[1], 16) & 1 << signal.SIGHUP - 1
        assert server.stop() == 0


def test_a_terminal_that_closes_stops_the_server():
    terminal, end = os.openpty()
    with serving("--port", "0", terminal=end) as server:
        os.close(end)
        server.wait_for(READY)
        hang_up(server, "were read again")
        os.close(terminal)
        assert server.process.wait(WAIT_S) == 0
        server.wait_for("stopping")
