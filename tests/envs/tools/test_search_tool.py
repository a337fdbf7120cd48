"""Search over HTTP against a real server on the loopback interface."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from agilerl.envs.tools import SearchTool, Tool
from agilerl.errors import ConfigError, EnvError
from tests.loopback import Handler, running

NETWORK = ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy")


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Search)
        self.queries: list[dict[str, list[str]]] = []
        self.status, self.body = 200, b""
        self.delay = 0.0
        self.busy = self.busiest = 0
        self.lock = threading.Lock()
        self.found({"content": "one"}, {"title": "no content"}, {"content": "three"}, {"content": "four"})

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/search"

    def found(self, *results: Any) -> None:
        self.body = json.dumps({"results": list(results)}).encode()


class Search(Handler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        with self.server.lock:
            self.server.busy += 1
            self.server.busiest = max(self.server.busiest, self.server.busy)
            self.server.queries.append(parse_qs(urlsplit(self.path).query))
        time.sleep(self.server.delay)
        with self.server.lock:
            self.server.busy -= 1
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in NETWORK:
        monkeypatch.delenv(name, raising=False)
    with running(Server()) as server:
        yield server


def test_results_of_a_query(server: Server) -> None:
    tool = SearchTool(search_url=f"{server.url}?lang=en")
    assert tool.search("otters & herons") == "1. one\n2. \n3. three"
    assert server.queries == [{"lang": ["en"], "q": ["otters & herons"], "format": ["json"]}]
    assert SearchTool(search_url=server.url, topk=1).search("x") == "1. one"
    server.found()
    assert tool.search("x") == "Nothing was found."
    tool.close()


def test_the_documented_text_protocol(server: Server) -> None:
    tool = SearchTool(1, server.url, 1, 5)
    action = "<think>hm</think><search> otters </search> and more"
    assert tool.execute_action(action) == (
        True,
        False,
        "\n\n<information>1. one</information>\n\n",
        "<think>hm</think><search> otters </search>",
    )
    assert server.queries[0]["q"] == ["otters"]
    assert tool.execute_action("no query") == (False, True, "", "")
    server.status = 500
    valid, failed, observation, _ = tool.execute_action(action)
    assert (valid, failed) == (True, True)
    assert "[SearchTool Error: the search server answered with status 500]" in observation
    for tag in ("<search>", "<information>", "<answer>"):
        assert tag in tool.instruction_string()


def test_the_address_may_come_from_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = SearchTool(topk=1)
    monkeypatch.setenv("SEARCH_URL", server.url)
    assert tool.search("x") == "1. one"
    monkeypatch.delenv("SEARCH_URL")
    with pytest.raises(ConfigError, match="SEARCH_URL, found ''"):
        tool.search("x")
    with pytest.raises(ConfigError, match="http://"):
        SearchTool(search_url="localhost:8888")
    with pytest.raises(ConfigError, match="SEARCH_URL"):
        Tool(tool.search).call({"query": "x"})


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>", "invalid JSON"),
        (b"[1]", "expected {"),
        (b'{"results": 3}', "expected {"),
        (b"[" * 100_000, "invalid JSON"),
        (b"\xff\xfe", "invalid JSON"),
    ],
)
def test_answers_that_are_no_results(server: Server, body: bytes, said: str) -> None:
    server.body = body
    with pytest.raises(EnvError, match=said):
        SearchTool(search_url=server.url).search("x")
    result = Tool(SearchTool(search_url=server.url).search).call({"query": "x"})
    assert (result.error, "search raised EnvError" in result.text) == ("raised", True)


def test_a_server_that_does_not_answer(server: Server) -> None:
    server.delay = 0.5
    with pytest.raises(EnvError, match="did not answer: ReadTimeout"):
        SearchTool(search_url=server.url, timeout=0.1).search("x")
    free = Server()
    free.server_close()
    with pytest.raises(EnvError, match="did not answer: ConnectError"):
        SearchTool(search_url=f"http://127.0.0.1:{free.server_port}/").search("x")


@pytest.mark.parametrize("workers", [1, 3])
def test_workers_are_the_most_requests_at_a_time(server: Server, workers: int) -> None:
    server.delay = 0.05
    # The timeout is of the server: waiting for a worker does not count.
    tool = SearchTool(num_workers=workers, search_url=server.url, topk=1, timeout=0.2)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(tool.search, "abcdefgh")) == ["1. one"] * 8
    assert server.busiest == workers
    tool.close()
