"""A chat app in two files: this program, and the page in index.html. It needs no further package.

    quire serve                              # in another terminal
    python app.py [--port 8080] [--server http://127.0.0.1:8000]

The browser talks only to this program, which passes the conversation on to `quire serve`. So the server's address and
its API key (from the environment variable QUIRE_API_KEY) stay here, and this is the place for logins, limits or a
database of your own.
"""

import argparse
import json
import os
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PAGE = Path(__file__).parent / "index.html"
MAX_BODY = 100_000


class Handler(BaseHTTPRequestHandler):
    """Answers GET / with the page, and POST /chat with a stream of text."""

    upstream = "http://127.0.0.1:8000"

    def do_GET(self) -> None:
        if self.path != "/":
            self.send_error(404)
            return
        self._begin(200, "text/html; charset=utf-8")
        self.wfile.write(PAGE.read_bytes())

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length", 0))
        if self.path != "/chat" or length > MAX_BODY or self.headers.get("content-type") != "application/json":
            self.send_error(400)
            return
        body = {"messages": json.loads(self.rfile.read(length)), "stream": True, "max_tokens": 200}
        headers = {
            "content-type": "application/json",
            "authorization": f"Bearer {os.environ.get('QUIRE_API_KEY', 'none')}",
        }
        request = urllib.request.Request(
            f"{self.upstream}/v1/chat/completions", json.dumps(body).encode(), headers=headers
        )
        try:
            with urllib.request.urlopen(request) as answer:
                self._begin(200, "text/plain; charset=utf-8")
                for line in answer:
                    self._pass_on(line.decode())
        except urllib.error.HTTPError as error:
            self._begin(502, "text/plain; charset=utf-8")
            self.wfile.write(json.load(error)["error"]["message"].encode())
        except urllib.error.URLError as error:
            self._begin(502, "text/plain; charset=utf-8")
            self.wfile.write(f"the server {self.upstream} cannot be reached: {error.reason}".encode())

    def _pass_on(self, line: str) -> None:
        """Send the text of one event. If the browser is gone, this fails, the stream is closed, and Quire stops."""
        if line.startswith("data: {"):
            choices = json.loads(line.removeprefix("data: ")).get("choices", [])
            for choice in choices:
                self.wfile.write((choice["delta"].get("content") or "").encode())

    def _begin(self, status: int, content_type: str) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.end_headers()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--server", default=Handler.upstream)
    options = parser.parse_args()
    Handler.upstream = options.server
    with ThreadingHTTPServer(("127.0.0.1", options.port), Handler) as server:
        print(f"open http://127.0.0.1:{server.server_port}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
