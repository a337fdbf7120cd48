"""Servers on the loopback interface."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeVar


class Handler(BaseHTTPRequestHandler):
    """Answers requests, and logs none."""

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


Server = TypeVar("Server", bound=ThreadingHTTPServer)


@contextmanager
def running(server: Server) -> Iterator[Server]:
    """Let a server answer while the block runs."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def answering(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Let a server answer with a handler, and yield its address."""
    with running(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as server:
        yield f"http://127.0.0.1:{server.server_port}"
