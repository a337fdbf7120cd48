"""The HTTP side of the endpoint: OpenAI's dialects, and tokens in, tokens out, on the loopback address."""

import asyncio
import json
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count
from queue import Empty, SimpleQueue
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, model_validator

from agilerl.checks.validation import validated
from agilerl.data import Completion
from agilerl.envs.programs import MODEL
from agilerl.envs.prompts import ChatFormat, decode_completions
from agilerl.envs.tools.parsers import TextTagParser, ToolCall, ToolCallParser, parser_for
from agilerl.errors import AgileRLError, ConfigError, how_to_install
from agilerl.rollouts.endpoint.session import Call, ProgramSession, RefusedError, Rendering
from agilerl.rollouts.engine import GenerationRequest, SamplingSettings
from agilerl.safety.bounds import valid_unicode
from agilerl.text.contract import plain_ids
from agilerl.text.padding import decoded

LARGEST_BODY = 8 * 2**20
"""Bytes of a request, whatever the context."""
_TOKEN_BYTES, _SPARE_BYTES = 64, 2**16
"""Bytes of a request for each token of the context, far more than text has, and for its other fields. Longer ones are
refused unread, because to render and tokenize one keeps the calls of all other episodes waiting."""
_REASONS = {"stop": "stop", "length": "length", "context": "length"}
_STARTED = 10.0
"""Seconds until the server must listen."""


class Body(BaseModel):
    """What the dialects ask for, by OpenAI's names; other fields are ignored."""

    model: str = MODEL
    messages: Annotated[list[dict[str, Any]] | None, Field(min_length=1)] = None
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["auto", "none"] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    prompt: str | list[int] | None = None
    token_ids: list[int] | None = None
    n: Annotated[int, Field(ge=1, le=64)] = 1
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    max_completion_tokens: Annotated[int | None, Field(ge=1)] = None
    temperature: Annotated[float | None, Field(ge=0)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    stop: str | list[str] = []
    seed: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] = {}
    logprobs: bool | int | None = None
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, values: Any) -> Any:
        """Leave out what is null: the client means its default. Sampling parameters may stand apart."""
        apart = values.get("sampling_params")
        values = {**values, **(apart if isinstance(apart, dict) else {})}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def longest(self) -> int | None:
        """Most tokens of the completion."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def stops(self) -> list[str]:
        """Texts that end the completion."""
        return [text for text in ([self.stop] if isinstance(self.stop, str) else self.stop) if text]


@dataclass(eq=False)
class Pending:
    """A request that waits for the engine."""

    request: GenerationRequest
    answer: "Future[Completion]" = field(default_factory=Future)


class Endpoint:
    """A server of one collection: it lives while a rollout or an exam runs, in a thread of its own.

    Its requests wait in ``inbox`` for the thread that has the engine. Each episode has a path of its own, so a stock
    client needs a base URL and the key and nothing else.
    """

    def __init__(
        self,
        tokenizer: Any,
        sessions: Sequence[ProgramSession],
        models: Mapping[str, int | None],
        *,
        context_length: int,
        most_new_tokens: int,
    ) -> None:
        self.tokenizer, self.sessions, self.models = tokenizer, sessions, dict(models)
        self.context_length, self.most_new_tokens = context_length, most_new_tokens
        self._largest = min(LARGEST_BODY, _TOKEN_BYTES * context_length + _SPARE_BYTES)
        self._keys: dict[str, int] = {}
        """Episodes by key: a program reaches its own only."""
        self.inbox: SimpleQueue[Pending] = SimpleQueue()
        self._chats: dict[str, Rendering] = {}
        self._others: dict[tuple[int, str], ProgramSession] = {}
        """Who counts the calls of other models, by episode."""
        self._numbers = count()
        self._port = 0
        self._server: Any = None
        self._thread: threading.Thread | None = None

    # -- its life -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        try:
            import uvicorn
        except ImportError as error:
            raise ConfigError(
                "environment.agent: the endpoint needs the packages uvicorn and starlette, which are missing; "
                + how_to_install("agents")
            ) from error
        listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        # A free port, for programs of this machine only.
        listening.bind(("127.0.0.1", 0))
        self._port = listening.getsockname()[1]
        config = uvicorn.Config(self.app(), log_config=None, access_log=False, lifespan="off", ws="none")
        self._server = uvicorn.Server(config)

        def serve() -> None:
            with listening:
                asyncio.run(self._server.serve(sockets=[listening]))

        self._thread = threading.Thread(target=serve, name="agilerl-endpoint", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _STARTED
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise ConfigError("environment.agent: the endpoint did not start on 127.0.0.1")
            time.sleep(0.001)
        return self

    def __exit__(self, *_: object) -> None:
        for session in self.sessions:
            session.over = True
        # Without force_exit uvicorn waits for clients that keep their connection open.
        self._server.should_exit = self._server.force_exit = True
        for pending in self.waiting():  # for the engine: they are refused
            pending.answer.cancel()
        assert self._thread is not None
        self._thread.join(_STARTED)

    def waiting(self) -> Iterator[Pending]:
        """Take the requests that have arrived."""
        with suppress(Empty):
            while True:
                yield self.inbox.get_nowait()

    def url(self, number: int) -> str:
        """Return the base URL of an episode."""
        return f"http://127.0.0.1:{self._port}/e/{number}/v1"

    def new_key(self, number: int) -> str:
        """Return a further key of an episode."""
        key = secrets.token_urlsafe(24)
        self._keys[key] = number
        return key

    def app(self) -> Any:
        """Return the ASGI application."""
        from starlette.applications import Starlette
        from starlette.routing import Mount, Route

        routes = [
            Route("/v1/chat/completions", self._answering(self._chat), methods=["POST"]),
            Route("/v1/completions", self._answering(self._text), methods=["POST"]),
            Route("/inference/v1/generate", self._answering(self._tokens), methods=["POST"]),
            Route("/v1/models", self._answering(self._listed)),
        ]
        return Starlette(routes=[Mount("/e/{episode}", routes=routes), *routes])

    # -- requests -------------------------------------------------------------------------------------------------

    def _answering(self, answer: Callable[..., Any]) -> Callable[..., Any]:
        """Return what answers a request with the object, or the stream, that ``answer`` makes of its body."""
        from starlette.requests import ClientDisconnect
        from starlette.responses import JSONResponse, Response

        async def endpoint(request: Any) -> Any:
            try:
                number = self._admitted(request)
                body = await self._body(request) if request.method == "POST" else Body()
                return await answer(request, number, body)
            except ClientDisconnect:
                return Response(status_code=400)  # the client has gone
            except Exception as error:  # one bad request must end neither the server nor other episodes
                if isinstance(error, RefusedError):
                    refusal = error
                elif isinstance(error, AgileRLError):
                    refusal = RefusedError(str(error))
                else:
                    refusal = RefusedError(f"this request cannot be answered: {type(error).__name__}: {error}"[:500])
                details = {"message": str(refusal), "type": "invalid_request_error", "code": refusal.code}
                return JSONResponse({"error": details}, status_code=refusal.status)

        return endpoint

    def _admitted(self, request: Any) -> int:
        """Return the episode of the request's key; raises RefusedError for another's path."""
        # verifiers' client puts a key of its own into the usual header.
        headers = request.headers
        key = headers.get("x-api-key") or headers.get("authorization", "").removeprefix("Bearer ")
        if (number := self._keys.get(key)) is None:
            raise RefusedError("wrong or missing API key", status=401, code="invalid_api_key")
        if request.path_params.get("episode", str(number)) != str(number):
            raise RefusedError("this key is of another episode", status=403, code="wrong_episode")
        return number

    async def _body(self, request: Any) -> Body:
        data, size = bytearray(), 0
        async for part in request.stream():  # to its end, or the client sees a broken connection instead of the answer
            size += len(part)
            data += part if size <= self._largest else b""
        if size > self._largest:
            raise RefusedError(
                f"expected a body of at most {self._largest:,} bytes for a context of {self.context_length:,} tokens, "
                f"found {size:,}",
                status=413,
                code="too_large",
            )
        try:
            values = valid_unicode(json.loads(data))
        except (ValueError, RecursionError) as error:
            raise RefusedError(f"expected a JSON object, found none: {error}") from error
        if not isinstance(values, dict):
            raise RefusedError(f"expected a JSON object, found {str(values)[:80]}")
        return validated(Body, values)

    def _session(self, number: int, model: str) -> ProgramSession | None:
        """Return the episode if a request asks for its policy, or None for another model."""
        slots = {**self.models, MODEL: self.sessions[number].ask.slot}
        if model not in slots:
            names = ", ".join(slots)
            raise RefusedError(f"unknown model {model[:80]!r}; there are {names}", status=404, code="model_not_found")
        # By slot: an agent's own name, and `elite` if it is that, mean the episode's policy too.
        return self.sessions[number] if slots[model] == slots[MODEL] else None

    async def _listed(self, _request: Any, _number: int, _body: Body) -> Any:
        from starlette.responses import JSONResponse

        facts = {"object": "model", "created": 0, "owned_by": "agilerl", "max_model_len": self.context_length}
        return JSONResponse({"object": "list", "data": [{"id": name, **facts} for name in (MODEL, *self.models)]})

    # -- the dialects ---------------------------------------------------------------------------------------------

    async def _chat(self, request: Any, number: int, body: Body) -> Any:
        messages, tools = body.messages, body.tools if body.tool_choice != "none" else []
        if messages is None:
            raise RefusedError("messages: expected a list of messages, found none")

        def choice(completion: Completion, text: str) -> dict[str, Any]:
            message = self._message(completion, text, bool(tools))
            reason = "tool_calls" if "tool_calls" in message else _REASONS[completion.finish_reason]
            logprobs = {"content": self._logprobs(completion)} if body.logprobs else None
            return {"message": message, "finish_reason": reason, "logprobs": logprobs}

        call = partial(ProgramSession.of_messages, messages=messages, tools=tools, seed=body.seed)
        return await self._answered(request, number, body, call, choice, "chat.completion")

    async def _text(self, request: Any, number: int, body: Body) -> Any:
        ids = self._ids(
            plain_ids(self.tokenizer, body.prompt) if isinstance(body.prompt, str) else body.prompt, "prompt"
        )

        def choice(completion: Completion, text: str) -> dict[str, Any]:
            logprobs = None
            if body.logprobs is not None:
                parts = self._logprobs(completion)
                logprobs = {
                    "tokens": [part["token"] for part in parts],
                    "token_logprobs": [part["logprob"] for part in parts],
                }
            return {"text": text, "finish_reason": _REASONS[completion.finish_reason], "logprobs": logprobs}

        call = partial(ProgramSession.of_tokens, prompt_ids=ids, seed=body.seed)
        return await self._answered(request, number, body, call, choice, "text_completion")

    async def _tokens(self, request: Any, number: int, body: Body) -> Any:
        ids = self._ids(body.token_ids, "token_ids")

        def choice(completion: Completion, text: str) -> dict[str, Any]:
            pairs = zip(completion.token_ids, completion.logprobs or [])
            # The form in which verifiers' client reads tokens.
            parts = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
            reason = _REASONS[completion.finish_reason]
            return {"token_ids": completion.token_ids, "finish_reason": reason, "logprobs": {"content": parts}}

        call = partial(ProgramSession.of_tokens, prompt_ids=ids, seed=body.seed)
        return await self._answered(request, number, body, call, choice, "generate")

    def _ids(self, ids: list[int] | None, key: str) -> list[int]:
        size = len(self.tokenizer)
        if not ids or not all(0 <= i < size for i in ids):
            raise RefusedError(f"{key}: expected token ids from 0 to {size - 1}, found {str(ids)[:80]}")
        return ids

    # -- an answer ------------------------------------------------------------------------------------------------

    async def _answered(
        self,
        request: Any,
        number: int,
        body: Body,
        call: Callable[[ProgramSession], Call],
        choice: Callable[[Completion, str], dict[str, Any]],
        kind: str,
    ) -> Any:
        """Let the engine complete a call, ``n`` times, and put the answers in the form of a dialect."""
        from starlette.responses import JSONResponse, StreamingResponse

        session = self._session(number, body.model)
        at = session or self._other(number, body.model)
        calls, pending = list[Call](), list[Pending]()
        try:
            for _ in range(body.n):
                calls.append(asked := call(at))
                pending.append(Pending(at.request(asked, body.longest) if session else self._of_other(at, body, asked)))
            # Only once all are made: if one of them is refused, none is asked.
            for each in pending:
                self.inbox.put(each)
            completions = [await asyncio.wrap_future(p.answer) for p in pending]
        except AgileRLError:
            # Before any was asked: those of the n that were not refused do not count either.
            at.asked -= len(calls)
            raise
        except asyncio.CancelledError:
            # The answer was cancelled: the endpoint is closing, or the engine has failed.
            raise RefusedError("this episode is over", status=410, code="episode_over") from None
        finally:
            for asked, p in zip(calls, pending) if session is not None else ():
                done = p.answer.done() and not p.answer.cancelled()
                at.ended(asked, p.answer.result() if done else None)
        for completion in completions:
            if completion.finish_reason not in _REASONS:
                raise RefusedError(f"the model failed: {completion.finish_reason}", status=503, code="model_failed")
        completions = [_cut(self.tokenizer, completion, body.stops) for completion in completions]
        texts = decode_completions(self.tokenizer, [c.token_ids for c in completions])
        for stop in body.stops:
            # As OpenAI has it, without the stop text; the tokens that are trained on include it.
            texts = [text.partition(stop)[0] for text in texts]
        choices = [{"index": i, **choice(*answer)} for i, answer in enumerate(zip(completions, texts))]
        # A program that has gone would not know what it is rewarded for.
        if session is not None and not await request.is_disconnected():
            for asked, completion, text, entry in zip(calls, completions, texts, choices):
                session.answered(asked, completion, text, entry.get("message"))
        used = sum(len(completion.token_ids) for completion in completions)
        document = {
            "id": f"{kind}-{next(self._numbers)}",
            "object": kind,
            "created": int(time.time()),
            "model": body.model,
            "choices": choices,
            "usage": {
                "prompt_tokens": len(calls[0].prompt_ids),
                "completion_tokens": used,
                "total_tokens": len(calls[0].prompt_ids) + used,
            },
        }
        if body.return_token_ids:
            document["prompt_token_ids"] = calls[0].prompt_ids
            for entry, completion in zip(choices, completions):
                entry["token_ids"] = completion.token_ids
        if body.stream:
            events = _streamed(document, usage=bool(body.stream_options.get("include_usage")))
            return StreamingResponse(events, media_type="text/event-stream")
        return JSONResponse(document)

    def _other(self, number: int, model: str) -> ProgramSession:
        """Return the session of an episode's calls of another model, which are not trained on."""
        of = self.sessions[number]
        if of.over:
            raise RefusedError("this episode is over", status=410, code="episode_over")
        if (number, model) not in self._others:
            self._others[number, model] = ProgramSession(of.ask, of.sample, of.limits, self.chat_of, keeps=False)
        return self._others[number, model]

    def _of_other(self, session: ProgramSession, body: Body, call: Call) -> GenerationRequest:
        sampling = SamplingSettings(
            min(body.longest or self.most_new_tokens, self.most_new_tokens),
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=body.top_p or 1.0,
        )
        key = (*session.ask.key, *call.key)
        return GenerationRequest(self.models[body.model], call.prompt_ids, 1, sampling, "other", key)

    def chat_of(self, tools: str) -> Rendering:
        """Return how conversations with these tools are rendered: by the chat template, or with a system message."""
        if tools not in self._chats:
            schemas = json.loads(tools)
            try:
                self._chats[tools] = Rendering(ChatFormat(self.tokenizer, tools=schemas))
            except ConfigError:
                if not schemas:
                    raise
                lines = [json.dumps(schema.get("function", schema)) for schema in schemas]
                description = "\n".join([f"You may call these functions. {self._calls.instruction}.", *lines])
                self._chats[tools] = Rendering(ChatFormat(self.tokenizer), description)
        return self._chats[tools]

    @cached_property
    def _calls(self) -> ToolCallParser:
        """The parser of the model's tool calls: of its family, else of tags in the text."""
        try:
            return parser_for(self.tokenizer)
        except ConfigError:
            return TextTagParser()

    def _message(self, completion: Completion, text: str, with_tools: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if not with_tools:
            return message
        parser = self._calls
        parsed = parser.parse(completion.token_ids, text)
        calls = [call for call in parsed if isinstance(call, ToolCall)]
        if calls and len(calls) == len(parsed):  # a call that cannot be read stays text, and the program sees it
            tags = parser.tags or ("<tool_call>",)
            message["content"] = min((text.partition(tag)[0] for tag in tags), key=len).strip() or None
            message["tool_calls"] = [
                {
                    "id": call.call_id or f"call_{next(self._numbers)}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
                }
                for call in calls
            ]
        return message

    def _logprobs(self, completion: Completion) -> list[dict[str, Any]]:
        tokens = [decoded(self.tokenizer, [token]) for token in completion.token_ids]
        pairs = zip(tokens, completion.logprobs or [])
        return [{"token": t, "logprob": p, "bytes": list(t.encode()), "top_logprobs": []} for t, p in pairs]


def _cut(tokenizer: Any, completion: Completion, stops: Sequence[str]) -> Completion:
    """Return a completion up to the token that completes one of the texts."""
    if not stops:
        return completion
    for size in range(1, len(completion.token_ids) + 1):
        text = decoded(tokenizer, completion.token_ids[:size], skip_special_tokens=True)
        if any(stop in text for stop in stops):
            logprobs = None if completion.logprobs is None else completion.logprobs[:size]
            return Completion(completion.token_ids[:size], logprobs, "stop")
    return completion


async def _streamed(document: Mapping[str, Any], *, usage: bool) -> AsyncIterator[str]:
    """Yield an answer as server-sent events: what was said in one piece, then why it ended."""
    kind = {"chat.completion": "chat.completion.chunk"}.get(document["object"], document["object"])
    shared = {key: value for key, value in document.items() if key not in ("choices", "usage")} | {"object": kind}
    for choice in document["choices"]:
        if "message" in choice:
            message = dict(choice["message"])
            if "tool_calls" in message:
                message["tool_calls"] = [{"index": i, **call} for i, call in enumerate(message["tool_calls"])]
            parts = [{"delta": message, "finish_reason": None}, {"delta": {}, "finish_reason": choice["finish_reason"]}]
            parts[0]["logprobs"] = choice["logprobs"]
        else:
            parts = [choice]
        for part in parts:
            yield f"data: {json.dumps({**shared, 'choices': [{'index': choice['index'], **part}]})}\n\n"
    if usage:  # a client that did not ask for it reads the first choice of every event
        yield f"data: {json.dumps({**shared, 'choices': [], 'usage': document['usage']})}\n\n"
    yield "data: [DONE]\n\n"
