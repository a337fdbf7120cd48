"""A chat-completions endpoint on loopback that answers by script."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.loopback import Handler, answering

Answer = tuple[int, str] | tuple[int, str, dict[str, str]]


@dataclass
class ChatServer:
    """What was asked, and how to answer: ``answer(body, number)`` gives a status, a text, and headers if any."""

    answer: Callable[[dict[str, Any], int], Answer]
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    most_at_once: int = 0
    url: str = ""
    _now: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, handler: BaseHTTPRequestHandler) -> Answer:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self._lock:
            number = len(self.requests)
            self.requests.append(body)
            self.headers.append(dict(handler.headers))
            self.paths.append(handler.path)
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
        try:
            return self.answer(body, number)
        finally:
            with self._lock:
                self._now -= 1


def chat(content: object) -> str:
    """Return the text of a chat completion."""
    return json.dumps({"choices": [{"message": {"role": "assistant", "content": content}}]})


@contextmanager
def serve(answer: Callable[[dict[str, Any], int], Answer]) -> Iterator[ChatServer]:
    state = ChatServer(answer)

    class Chat(Handler):
        def do_POST(self) -> None:
            status, text, *more = state.take(self)
            try:
                self.send_response(status)
                for key, value in (more[0] if more else {}).items():
                    self.send_header(key, value)
                self.send_header("Content-Length", str(len(text.encode())))
                self.end_headers()
                self.wfile.write(text.encode())
            except (BrokenPipeError, ConnectionResetError):  # the client gave up
                return

    with answering(Chat) as url:
        state.url = f"{url}/v1"
        yield state


def slowly(seconds: float, text: str) -> Answer:
    time.sleep(seconds)
    return 200, text
