"""What the client of a vLLM server says when something is wrong there. ``tests/with_vllm`` has the real server."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from agilerl.config.vllm import VLLMConfig
from agilerl.errors import ConfigError, EngineError
from agilerl.models.base import BaseModel, load_tokenizer
from agilerl.rollouts.vllm.backend import Generated, SampleRequest, StagedAdapter
from agilerl.rollouts.vllm.server import VLLMServer
from tests.rollouts.test_vllm_requests import make_runtime

ADAPTER = StagedAdapter("agilerl-x-1", 1, Path("/nowhere"), 4)
ROW = SampleRequest([5, 6], {"max_tokens": 2, "temperature": 1.0, "seed": 7}, None)

Replies = dict[str, tuple[int, Any]]

GOOD: Replies = {
    "/health": (200, {}),
    "/version": (200, {"version": "0.32.0"}),
    "/v1/models": (200, {"data": [{"id": "tiny", "root": "/models/tiny", "max_model_len": 64, "parent": None}]}),
    "/v1/load_lora_adapter": (200, {}),
    "/v1/unload_lora_adapter": (200, {}),
    "/v1/completions": (
        200,
        {"choices": [{"token_ids": [7, 8], "logprobs": {"token_logprobs": [-0.5, -1]}, "finish_reason": "length"}]},
    ),
}


@contextmanager
def answering(replies: Replies, seen: list[tuple[str, Any]] | None = None) -> Iterator[str]:
    """Answer by path, on a port of its own; ``seen`` collects what was posted."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = replies.get(self.path, (404, {"detail": "Not Found"}))
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if seen is not None:
                seen.append((self.path, body))
            self.do_GET()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@cache
def _base() -> BaseModel:
    base = make_runtime(slots=0).base
    base.source = "/somewhere/tiny"
    return base


@contextmanager
def client(url: str, **settings: object) -> Iterator[VLLMServer]:
    base = _base()
    tokenizer = settings.pop("tokenizer", None)
    server = VLLMServer(base, VLLMConfig(base_url=url, **{"server_timeout": 0.2, **settings}), tokenizer)
    try:
        yield server
    finally:
        server.close()


def test_a_server_that_answers_is_used() -> None:
    seen: list[tuple[str, Any]] = []
    with answering(GOOD, seen) as url, client(url) as server:
        server.start(2, 4, None)
        assert server.context_length == 64
        server.load(ADAPTER)
        (answer, of_base) = server.complete([SampleRequest([5], {"seed": 1, "max_tokens": 2}, ADAPTER), ROW])
    assert answer == Generated([7, 8], [-0.5, -1.0], "length")
    assert of_base.token_ids == [7, 8]
    bodies = {body["model"]: body for path, body in seen if path == "/v1/completions"}
    assert bodies["agilerl-x-1"] == {
        "seed": 1,
        "max_tokens": 2,
        "model": "agilerl-x-1",
        "prompt": [5],
        "return_token_ids": True,
    }
    assert bodies["tiny"]["seed"] == 7
    assert seen[0] == ("/v1/load_lora_adapter", {"lora_name": "agilerl-x-1", "lora_path": "/nowhere"})
    assert seen[-1] == ("/v1/unload_lora_adapter", {"lora_name": "agilerl-x-1"})  # closing leaves nothing behind


def test_each_answer_is_reported_when_it_arrives() -> None:
    arrived = threading.Event()

    class Waiting(dict[str, Any]):
        """The second request is answered when somebody has heard of the answer to the first."""

        asked = 0

        def get(self, path: str, default: Any = None) -> Any:
            if path == "/v1/completions":
                self.asked += 1
                if self.asked == 2:
                    assert arrived.wait(10.0)
            return super().get(path, default)

    heard: dict[int, list[int]] = {}

    def answered(place: int, answer: Generated) -> None:
        heard[place] = answer.token_ids
        arrived.set()

    with answering(Waiting(GOOD)) as url, client(url) as server:
        server.start(2, 4, None)
        answers = server.complete([ROW, ROW], answered)
    assert heard == {0: [7, 8], 1: [7, 8]}
    assert [answer.token_ids for answer in answers] == [[7, 8], [7, 8]]


def test_nobody_there_is_a_sentence_with_the_command() -> None:
    with answering(GOOD) as url:
        pass
    with (
        client(url, server_timeout=1.2) as server,
        pytest.warns(UserWarning, match=r"no vLLM server .* 1\.2 s") as said,
        pytest.raises(EngineError, match=r"vllm serve MODEL --enable-lora"),
    ):
        server.start(2, 4, None)
    assert len(said) == 1  # though it has tried more than once


@pytest.mark.parametrize(
    ("changed", "error", "found"),
    [
        (
            {"/health": (404, "<html>")},
            EngineError,
            r"vLLM server .* status 404; .*\(--port\)",
        ),
        ({"/health": (503, {})}, EngineError, "status 503"),
        ({"/version": (200, {"version": "0.9.1"})}, ConfigError, r"runs vLLM 0\.9\.1; expected 0\.32\.x"),
        ({"/version": (200, "no json")}, EngineError, "invalid JSON.*expected a vLLM 0"),
        ({"/version": (401, {})}, EngineError, "VLLM_API_KEY"),
        ({"/v1/models": (200, {"data": [{"id": "other"}]})}, ConfigError, r"serves 'other', .* '.*tiny'"),
        ({"/v1/models": (200, {"data": []})}, ConfigError, "serves nothing"),
    ],
)
def test_what_is_wrong_at_the_start_is_a_sentence(changed: Replies, error: type[Exception], found: str) -> None:
    with answering({**GOOD, **changed}) as url, client(url) as server, pytest.raises(error, match=found):
        server.start(2, 4, None)


def test_a_server_may_have_another_name_for_the_model() -> None:
    models = {"/v1/models": (200, {"data": [{"id": "prod", "root": "org/Other"}]})}
    with (
        answering({**GOOD, **models}) as url,
        client(url, vllm_model_name_or_path="org/Other") as server,
    ):
        server.start(2, 4, None)
        assert server.model == "prod"


def test_another_tokenizer_is_a_sentence() -> None:
    tokenizer = load_tokenizer("embedded")
    with (
        answering({**GOOD, "/tokenize": (200, {"tokens": [1, 2, 3]})}) as url,
        client(url, tokenizer=tokenizer) as server,
        pytest.raises(ConfigError, match="into other tokens"),
    ):
        server.start(2, 4, None)


@pytest.mark.parametrize(
    ("changed", "act", "found"),
    [
        (
            {"/v1/load_lora_adapter": (404, {"detail": "Not Found"})},
            lambda server: server.load(ADAPTER),
            "adapters .*VLLM_ALLOW_RUNTIME_LORA_UPDATING=True",
        ),
        (
            {"/v1/load_lora_adapter": (500, {"error": {"message": "LoRA rank 64 is greater than max_lora_rank 16"}})},
            lambda server: server.load(ADAPTER),
            r"rank 16 \(--max-lora-rank\), found rank 64; .* --max-lora-rank 64",
        ),
        (
            {"/v1/load_lora_adapter": (400, {"error": {"message": "no such folder"}})},
            lambda server: server.load(ADAPTER),
            "no such folder.*lora_staging_dir",
        ),
        ({"/v1/completions": (500, "broken")}, lambda server: server.complete([ROW]), "with status 500: broken"),
        (
            {"/v1/completions": (200, {"choices": []})},
            lambda server: server.complete([ROW]),
            "than what was asked for: choices",
        ),
        (
            {"/v1/completions": (200, {"choices": [{"text": "hi", "finish_reason": "stop"}]})},
            lambda server: server.complete([ROW]),
            "choices.0.token_ids: field required",
        ),
    ],
)
def test_what_goes_wrong_later_is_a_sentence(changed: Replies, act: Callable[[VLLMServer], object], found: str) -> None:
    with answering({**GOOD, **changed}) as url, client(url) as server:
        server.start(2, 4, None)
        with pytest.raises(EngineError, match=found) as error:
            act(server)
    assert "\n" not in str(error.value)


def test_a_passing_failure_is_tried_again() -> None:
    replies = dict(GOOD)
    with answering(replies) as url, client(url) as server:
        server.start(2, 4, None)
        replies["/v1/completions"] = (503, {})
        threading.Timer(0.1, lambda: replies.update(GOOD)).start()
        (answer,) = server.complete([ROW])
    assert answer.token_ids == [7, 8]


def test_a_server_that_is_lost_is_a_sentence() -> None:
    with answering(GOOD) as url, client(url) as server:
        server.start(2, 4, None)
    with client(url) as lost:
        lost.model = "tiny"
        with pytest.raises(EngineError, match=r"/v1/completions: .*resume"):
            lost.complete([ROW])


def test_the_key_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "hidden-key")
    replies = {**GOOD, "/v1/completions": (400, {"error": "who is hidden-key?"})}
    with answering(replies) as url, client(url) as server:
        server.start(2, 4, None)
        with pytest.raises(EngineError) as error:
            server.complete([ROW])
    assert "hidden-key" not in str(error.value)
