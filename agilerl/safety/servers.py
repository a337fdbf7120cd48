"""Servers that are asked over HTTP: one client, which limits the time and bytes of an answer and checks its values."""

import json
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypeVar

import httpx2
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    FailFast,
    Field,
    FiniteFloat,
    ValidationError,
    ValidationInfo,
)
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from agilerl.checks.arguments import shown

_ANSWER_BYTES, _TOKEN_BYTES = 4 * 2**20, 2**10
"""Bytes of an answer: those of any, and those that each token of the request adds."""
_ENCODINGS = ("", "identity", "gzip", "deflate")
"""Compression methods that expand a piece of an answer to at most a thousand times its size."""
_ERROR_LENGTH = 300
CONNECTING = 5.0
"""Seconds to wait for a connection, or for an answer that a server need not compute."""


class Reply(BaseModel):
    """What is read of an answer's JSON: no conversions, and other names are ignored."""

    model_config = ConfigDict(strict=True)


def _as_asked(tokens: list[int], info: ValidationInfo) -> list[int]:
    most, vocabulary = info.context or (sys.maxsize, sys.maxsize)
    if not 0 < len(tokens) <= most:
        raise ValueError(f"expected 1 to {most} tokens")
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise ValueError(f"expected tokens from 0 to {vocabulary - 1}, found {token}, in")
    return tokens


class FirstMistake(FailFast):
    """Keeps only the first mistake of a list or mapping: a million of them take a thousand times their text."""

    __hash__ = object.__hash__  # so that it may be part of a union


Item = TypeVar("Item")
Many = Annotated[list[Item], FirstMistake()]
Tokens = Annotated[Many[int], AfterValidator(_as_asked)]
"""Ids of tokens; as many as were asked for, and from the vocabulary, if ``ask`` is told how many and which."""
Logprob = Annotated[FiniteFloat, Field(le=1e-3)]
"""A log-probability; rounding may leave it slightly above 0."""
Shape = TypeVar("Shape", bound=Reply)


class RequestError(Exception):
    """No answer, or none of use: a sentence without the key.

    ``status`` is that of a refusal, ``text`` its message, or what was wrong with the connection, if ``is_lost``.
    """

    def __init__(self, sentence: str, *, status: int | None = None, text: str = "", cause: object = None) -> None:
        super().__init__(sentence)
        self.status, self.text = status, text
        self.is_lost, self.is_late = cause is not None, isinstance(cause, httpx2.TimeoutException)


@dataclass(frozen=True)
class Retries:
    """When a request is sent again; ``first_wait`` doubles up to ``longest_wait``, unless the server asks for more."""

    attempts: int = 4
    first_wait: float = 0.2
    longest_wait: float = 5.0
    statuses: tuple[int, ...] = (429, 502, 503, 504)
    timeouts: bool = False

    def passes(self, error: BaseException) -> bool:
        """Return whether a failed request is worth another attempt."""
        if isinstance(error, httpx2.HTTPStatusError):
            return error.response.status_code in self.statuses
        late = self.timeouts and isinstance(error, httpx2.TimeoutException)
        return late or isinstance(error, httpx2.NetworkError | httpx2.RemoteProtocolError)

    def wait(self, state: RetryCallState) -> float:
        """Return the seconds before the next attempt."""
        error = None if state.outcome is None else state.outcome.exception()
        wanted = error.response.headers.get("Retry-After", "") if isinstance(error, httpx2.HTTPStatusError) else ""
        # In seconds; the other form of the header, a date, is passed over.
        if wanted.isdecimal():
            return min(float(wanted), self.longest_wait)
        return wait_exponential(multiplier=self.first_wait, max=self.longest_wait)(state)


class Server:
    """A client of one address: every answer has been limited and checked, and every failure is a ``RequestError``."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        seconds: float,
        connections: int,
        wait: float | None = None,
        connect: float = CONNECTING,
        key: str | None = None,
        retries: Retries | None = None,
    ) -> None:
        """``seconds`` are for the whole answer, ``wait`` for each piece of it, ``connect`` for a connection."""
        self.where, self.url, self.seconds, self._key = f"{name} at {url}", url, seconds, key
        self._retries = retries or Retries()
        # It follows no redirects, as is the default: the key must not go where a server points.
        self._client = httpx2.Client(
            timeout=httpx2.Timeout(wait or seconds, connect=connect),
            limits=httpx2.Limits(max_connections=connections),
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )

    def ask(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        shape: type[Shape],
        tokens: int = 0,
        most: int | None = None,
        vocabulary: int = sys.maxsize,
    ) -> Shape:
        """Return the answer to a request, a POST if it has a body.

        ``tokens`` are those of the prompt and the answer together; the ``Tokens`` of the answer are at most ``most``,
        below ``vocabulary``.
        """
        content = self.send(path, body, tokens=tokens)
        try:
            return parsed(content, shape, None if most is None else (most, vocabulary))
        except ValueError as error:
            raise RequestError(
                f"{self.where} answered {path} with something else than what was asked for: {self.without_key(error)}"
            ) from None

    def send(
        self, path: str, body: Mapping[str, Any] | None = None, *, tokens: int = 0, seconds: float | None = None
    ) -> bytes:
        """Return the bytes of an answer, after retries; with ``seconds``, of an answer in this time or never."""
        method, arguments = "GET" if body is None else "POST", dict[str, Any]()
        if body is not None:
            arguments["json"] = dict(body)
        if seconds is not None:
            arguments["timeout"] = seconds
        most = _ANSWER_BYTES + tokens * _TOKEN_BYTES

        def attempt() -> httpx2.Response:
            whole = seconds or self.seconds
            answer = request(self._client, method, f"{self.url}{path}", seconds=whole, most=most, **arguments)
            return answer.raise_for_status()

        retrying = Retrying(
            stop=stop_after_attempt(self._retries.attempts if seconds is None else 1),
            wait=self._retries.wait,
            retry=retry_if_exception(self._retries.passes),
            reraise=True,
        )
        try:
            return retrying(attempt).content
        except httpx2.HTTPStatusError as error:
            status, text = error.response.status_code, " ".join(self.without_key(error.response.text).split())
            text = text[:_ERROR_LENGTH]
            raise RequestError(
                f"{self.where} answered {path} with status {status}: {text}", status=status, text=text
            ) from None
        except httpx2.HTTPError as error:
            what = f"{type(error).__name__} {self.without_key(error)}"
            raise RequestError(f"{self.where} did not answer {path}: {what}", text=what, cause=error) from None

    def without_key(self, text: object) -> str:
        """Return a text without the key, for a message."""
        return str(text).replace(self._key, "***") if self._key else str(text)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()


def parsed(content: bytes, shape: type[Shape], asked: tuple[int, int] | None = None) -> Shape:
    """Return the values of an answer's JSON; raises ValueError with a sentence about the first that is wrong.

    ``asked``: the most ``Tokens``, and their vocabulary. What is ignored never becomes objects of Python's.
    """
    try:
        return shape.model_validate_json(content, context=asked)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    where = "".join(f"{part}: " for part in [".".join(map(str, first["loc"]))] if part)
    what = first["msg"].removeprefix("Value error, ")
    raise ValueError(f"{where}{what[0].lower()}{what[1:]}, found {shown(first['input'])}")


class AnswerTooLargeError(httpx2.HTTPError):
    """An answer is longer than any that makes sense."""


def request(
    client: httpx2.Client, method: str, url: Any, *, seconds: float, most: int = _ANSWER_BYTES, **arguments: Any
) -> httpx2.Response:
    """Send a request and return the whole answer, of at most ``most`` bytes, decompressed.

    A client's timeouts limit each wait for data, and a server that sends a byte a minute never exceeds them, be it in
    headers, interim answers, or a compressed text of no length; ``seconds`` limits the whole answer. Raises
    AnswerTooLargeError, and whatever the client raises.
    """
    content = bytearray()
    # Not br or zstd, which may expand a piece far more than a thousand times.
    headers = {"Accept-Encoding": "gzip, deflate", **arguments.pop("headers", {})}
    if "json" in arguments:  # a model may sample half of a character, which UTF-8 does not have
        headers["Content-Type"] = "application/json"
        text = json.dumps(arguments.pop("json"), ensure_ascii=False, allow_nan=False)
        arguments["content"] = text.encode("utf-8", "replace")
    before = getattr(_DEADLINE, "of_thread", None)
    _DEADLINE.of_thread = time.monotonic() + seconds
    try:
        with client.stream(method, url, headers=headers, extensions={"trace": _bound_stream}, **arguments) as answer:
            if answer.headers.get("Content-Encoding", "").lower() not in _ENCODINGS:
                raise AnswerTooLargeError("the answer is compressed with a method that was not requested")
            for piece in answer.iter_bytes():
                content += piece
                if len(content) > most:
                    raise AnswerTooLargeError(f"the answer has more than {most:,} bytes")
                _seconds_left()
    finally:
        _DEADLINE.of_thread = before
    # What these headers say is no longer true of bytes that are complete and decompressed.
    kept = {name: value for name, value in answer.headers.items() if name.lower() not in _OF_TRANSFER}
    return httpx2.Response(answer.status_code, headers=kept, content=bytes(content), request=answer.request)


_DEADLINE = threading.local()
"""When the request of a thread has to be answered; a client without an event loop reads in the thread that asks."""


def _seconds_left() -> float:
    """Return the seconds left for the request of this thread; raises the client's timeout if there are none."""
    deadline = getattr(_DEADLINE, "of_thread", None)
    left = _NO_DEADLINE if deadline is None else deadline - time.monotonic()
    if left <= 0:
        raise httpx2.ReadTimeout("the answer was not complete in time")
    return float(left)


_NO_DEADLINE = 1e6  # a connection that is closed between requests


def _bound_stream(event: str, about: dict[str, Any]) -> None:
    """Let a new connection wait no longer than the request in progress has left; called with what the client does."""
    stream = about.get("return_value")
    # The client traces connect_tcp.complete and start_tls.complete, each of which returns a stream.
    if event.endswith(".complete") and hasattr(stream, "start_tls"):
        for name in ("read", "write"):
            setattr(stream, name, partial(_until_deadline, getattr(stream, name)))


def _until_deadline(act: Any, data: Any, timeout: float | None = None) -> Any:
    left = _seconds_left()
    return act(data, timeout=left if timeout is None else min(timeout, left))


_OF_TRANSFER = ("content-encoding", "content-length", "transfer-encoding")
