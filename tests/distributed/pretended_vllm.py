"""A program with the command line of ``vllm serve`` that asks for a key; and the work of an island that has it."""

import os
import sys
import urllib.request
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from urllib.error import HTTPError

from agilerl.runs.stopping import StopRequest
from agilerl.safety.addresses import may_have_key


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        allowed = self.path == "/health" or self.headers.get("Authorization") == f"Bearer {os.environ['VLLM_API_KEY']}"
        body = " ".join(sys.argv).encode()
        self.send_response(200 if allowed else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


def ask(stop: StopRequest, say: Callable[[str], None], url: str | None) -> None:
    """Say where the server listens, what it answers with a key and without, and if it may have this one's."""
    key = os.environ["VLLM_API_KEY"]
    say(f"{url} {may_have_key('VLLM_API_KEY', str(url))} {key}")
    for headers in ({"Authorization": f"Bearer {key}"}, {}):
        try:
            with urllib.request.urlopen(urllib.request.Request(f"{url}/v1/models", headers=headers)) as answer:
                say(f"{answer.status} {answer.read().decode()}")
        except HTTPError as error:
            say(str(error.code))


if __name__ == "__main__":
    HTTPServer((sys.argv[sys.argv.index("--host") + 1], int(sys.argv[-1])), Handler).serve_forever()
