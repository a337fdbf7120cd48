"""One episode of an agent program: the calls that it makes of the endpoint, and the training rows that come of them."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

from agilerl.config.environment import AgentLimitsConfig
from agilerl.data import Completion, EpisodeOutcome, Trajectory
from agilerl.envs.episode_task import TrainingRow
from agilerl.envs.prompts import ChatFormat
from agilerl.errors import AgileRLError
from agilerl.rollouts.engine import Ask, Conversation, GenerationRequest

ChatMessage = dict[str, Any]


class RefusedError(AgileRLError):
    """A call that cannot be answered, with the status and the code of OpenAI's API."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(eq=False)
class Call:
    """One completion that a program asked for."""

    prompt_ids: list[int]
    parent: "Call | None"
    """The call whose transcript the prompt continues token by token."""
    key: tuple[int, ...]
    """Of its draws, beside those of the episode: its depth, and what tells it from other calls of that depth."""
    conversation: Conversation | None = None
    messages: tuple[ChatMessage, ...] = ()
    """The prompt as messages, normalised; empty if it came as tokens or text."""
    tools: str = "[]"
    text: str = ""
    """The completion as text."""
    reply: ChatMessage | None = None
    completion: Completion | None = None
    """None until it has been answered."""
    promised: int = 0
    """Tokens that it may generate while it is being answered."""

    @property
    def ids(self) -> list[int]:
        """Prompt and completion."""
        return self.prompt_ids + (self.completion.token_ids if self.completion else [])

    @property
    def root(self) -> "Call":
        """The first call of its line."""
        return self if self.parent is None else self.parent.root


@dataclass(frozen=True)
class Rendering:
    """How conversations with some tools become tokens."""

    chat: ChatFormat
    description: str | None = None
    """The system message that describes the tools, for chat templates that do not; None: the template does."""

    def messages(self, plain: Sequence[ChatMessage], *, begins: bool) -> list[ChatMessage]:
        """Return messages in the form that the chat template takes; ``begins``: the first of them begin it."""
        if self.description is None:
            return [_for_template(message) for message in plain]
        written = [_as_text(message) for message in plain]
        if not begins:
            return written
        system = written.pop(0)["content"] if written[0]["role"] == "system" else ""
        return [{"role": "system", "content": f"{system}\n\n{self.description}".strip()}, *written]


@dataclass(eq=False)
class ProgramSession:
    """The calls of one episode. Only the server's thread changes it, until the episode is over."""

    ask: Ask
    sample: int
    limits: AgentLimitsConfig
    chat_of: Callable[[str], "Rendering"]
    """From tools, as JSON, to how conversations with them are rendered."""
    keeps: bool = True
    """Whether the engine may keep what it has computed of conversations."""
    calls: list[Call] = field(default_factory=list)
    """Answered and delivered, in the order in which they ended."""
    asked: int = 0
    """Calls so far, those included that are still being answered."""
    tokens: int = 0
    """Tokens that were generated, also by calls whose program has gone."""
    promised: int = 0
    """Tokens that calls which are being answered may generate."""
    truncated: str | None = None
    over: bool = False
    _prompts: dict[tuple[int, ...], int] = field(default_factory=dict)
    """How often each prompt was asked for."""
    _root: tuple[int, ...] | None = None
    """The first prompt of all, as a digest."""
    _lines: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)
    """The first prompt at each depth of each line."""

    # -- a call ---------------------------------------------------------------------------------------------------

    def of_messages(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], seed: int | None = None
    ) -> Call:
        """Return a call whose prompt is a conversation.

        The transcript of an earlier call that it continues is kept as it was sampled, never rendered again. A changed
        history, or one that the template changes, is rendered in full and starts another line.

        Raises RefusedError, ConfigError or EnvError for messages that cannot be rendered.
        """
        plain, described = [normalised(message) for message in messages], json.dumps(list(tools), sort_keys=True)
        rendering, best = self.chat_of(described), None
        for call in self.calls:
            history = [*call.messages, call.reply] if call.messages else []
            # Chained: the messages begin with its history, and something follows.
            if history and call.tools == described and history == plain[: len(history)] != plain:
                best = call if best is None or len(call.ids) > len(best.ids) else best
        before = [] if best is None else rendering.messages(best.messages, begins=True)
        # After its reply, whose tokens stay as they were sampled.
        new = [] if best is None else rendering.messages(plain[len(best.messages) + 1 :], begins=False)
        if best is None or not rendering.chat.appends(before, new):
            ids = rendering.chat.prompt(rendering.messages(plain, begins=True))
        else:
            assert best.completion is not None
            ids = best.ids + rendering.chat.between(before, best.completion.token_ids, new)
        call = self.of_tokens(ids, seed)
        call.messages, call.tools = tuple(plain), described
        return call

    def of_tokens(self, prompt_ids: Sequence[int], seed: int | None = None) -> Call:
        """Return a call whose prompt is given as tokens; raises RefusedError where the episode's limits end."""
        ids = list(prompt_ids)
        if self.over:
            raise RefusedError("this episode is over", status=410, code="episode_over")
        if self.asked >= self.limits.max_calls:
            self.truncated = "turns"
            raise RefusedError(f"an episode may make {self.limits.max_calls} calls", code="too_many_calls")
        # It counts as a limit of turns: EpisodeOutcome has no kind of its own for tokens.
        if self.limits.max_tokens is not None and self.tokens + self.promised >= self.limits.max_tokens:
            self.truncated = "turns"
            raise RefusedError(f"an episode may generate {self.limits.max_tokens} tokens", code="too_many_tokens")
        if len(ids) + 1 > self.ask.context_length:
            self.truncated = "context"
            raise RefusedError(
                f"a prompt of {len(ids)} tokens leaves no room in a context of {self.ask.context_length}",
                code="context_length_exceeded",
            )
        fits = [call for call in self.calls if len(call.ids) < len(ids) and call.ids == ids[: len(call.ids)]]
        # The longest: of the calls in a line each begins with those before it, and the last one counts.
        parent = max(fits, key=lambda call: len(call.ids), default=None)
        self.asked += 1
        return Call(ids, parent, self._key(ids, parent, seed), self._conversation(parent))

    def _key(self, ids: Sequence[int], parent: Call | None, seed: int | None) -> tuple[int, ...]:
        """Return what the draws of a call depend on: its prompt and its place in its line, never the time it came.

        A line of calls draws as the turns of an environment do. Other lines are told apart by their first prompt, other
        branches of a line by their own.
        """
        depth = 0 if parent is None else parent.key[0] + 1
        prompt, root = _digest(ids), _digest(ids if parent is None else parent.root.prompt_ids)
        if seed is not None:
            # A seed may be negative, a key of a stream may not.
            key = (depth, self.sample, *root, seed & 0xFFFFFFFF)
        else:
            self._root = self._root or root
            line = (depth, self.sample, *(root if root != self._root else ()))
            key = line if self._lines.setdefault(line, prompt) == prompt else (*line, *prompt)
        # The same call again, as a retry or one of n, has draws of its own.
        self._prompts[*key, *prompt] = again = self._prompts.get((*key, *prompt), -1) + 1
        return (*key, again) if again else key

    def _conversation(self, parent: Call | None) -> Conversation | None:
        if not self.keeps:
            return None
        known = None if parent is None else parent.conversation
        # A copy, because two calls may continue the same one.
        return Conversation() if known is None else replace(known)

    def request(self, call: Call, max_tokens: int | None) -> GenerationRequest:
        """Return what the engine is asked for; the run's settings decide how tokens are drawn."""
        request = self.ask.generation(
            call.prompt_ids,
            1,
            *call.key,
            conversation=call.conversation,
            first_prompt=len(call.root.prompt_ids),
        )
        most = min(request.sampling.max_new_tokens, max_tokens or request.sampling.max_new_tokens)
        if self.limits.max_tokens is not None:
            most = min(most, self.limits.max_tokens - self.tokens - self.promised)
        call.promised = most
        self.promised += most
        # SamplingSettings takes no least length above the most.
        least = min(request.sampling.min_new_tokens, most)
        return replace(request, sampling=replace(request.sampling, max_new_tokens=most, min_new_tokens=least))

    def ended(self, call: Call, completion: Completion | None) -> None:
        """Count what a requested call has generated; None for a call that was refused meanwhile."""
        self.promised -= call.promised
        self.tokens += len(completion.token_ids) if completion is not None else 0

    def answered(self, call: Call, completion: Completion, text: str, reply: Mapping[str, Any] | None = None) -> None:
        """Record a call whose completion has reached the program."""
        if self.over:
            return
        call.completion, call.text = completion, text
        call.reply = None if reply is None else normalised(reply)
        if completion.finish_reason == "context":
            self.truncated = "context"
        self.calls.append(call)

    # -- the episode ----------------------------------------------------------------------------------------------

    def rows(self) -> list[TrainingRow]:
        """Return the training rows: each sampled token is trained on in one of them.

        A call that continues the last transcript of a row extends it; others begin a row, whose prompt may hold what
        was sampled before. The order does not depend on when calls that ran side by side have ended.
        """
        rows: list[TrainingRow] = []
        tails: dict[int, TrainingRow] = {}
        turns = {id(call): turn for turn, call in enumerate(self.calls)}
        # A prompt is longer than those of the calls that it continues, so parents come first.
        for call in sorted(self.calls, key=lambda c: (len(c.prompt_ids), c.prompt_ids, c.key)):
            assert call.completion is not None
            # Popped: a second call that continues the same one begins a row.
            row = tails.pop(id(call.parent), None)
            if row is None:
                rows.append(row := TrainingRow(list(call.prompt_ids)))
            else:
                added = call.prompt_ids[len(row.ids) :]
                # What the program added was not sampled: no turn, and no loss.
                row.append(added, -1, [0.0] * len(added))
            row.append(call.completion.token_ids, turns[id(call)], call.completion.logprobs)
            tails[id(call)] = row
        return rows

    @property
    def breaks(self) -> int:
        """Calls that continue the messages of an earlier one with another reply than was sampled."""
        return sum(
            call.parent is None and any(_continues(call.messages, earlier) for earlier in self.calls[:number])
            for number, call in enumerate(self.calls)
        )

    def transcript(self) -> list[ChatMessage]:
        """Return the messages of the last conversation, the last reply included."""
        chats = [call for call in self.calls if call.reply is not None]
        return [dict(message) for message in (*chats[-1].messages, chats[-1].reply or {})] if chats else []

    def trajectories(
        self, reward: float | None, text: str, error: str | None = None, **graded: Any
    ) -> list[Trajectory]:
        """Return the training rows with the reward, which belongs to the last call; NaN without one."""
        turns = len(self.calls)
        rewards = [0.0] * max(turns - 1, 0) + [float("nan") if reward is None else reward]
        if reward is None:
            rewards = [float("nan")] * len(rewards)
        outcome = EpisodeOutcome(turns, truncated=self.truncated, error=error, breaks=self.breaks)  # type: ignore[arg-type]
        last = self.calls[-1].completion if self.calls else None
        finish: Any = "length" if self.truncated == "turns" else self.truncated
        broken = any(call.completion and call.completion.finish_reason == "error" for call in self.calls)
        return [
            part.trajectory(
                rewards=list(rewards),
                group=self.ask.group,
                finish_reason="error" if broken else finish or (last.finish_reason if last else "stop"),
                text=text,
                row=self.ask.place.row,
                episode=self.sample,
                outcome=outcome,
                **graded,
            )
            for part in self.rows()
        ]


def _continues(messages: Sequence[ChatMessage], earlier: Call) -> bool:
    """Return whether messages are those of an earlier call, a reply of the assistant that was not its, and more."""
    count = len(earlier.messages)
    same = bool(count) and len(messages) > count and tuple(messages[:count]) == earlier.messages
    return same and messages[count]["role"] == "assistant" and messages[count] != earlier.reply


def normalised(message: Mapping[str, Any]) -> ChatMessage:
    """Return what counts of a message: role, text, tool calls with their arguments read, and the id of a tool's call.

    Raises RefusedError for anything but text.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RefusedError(f"a message is an object with role and content, found {str(message)[:80]!r}")
    content = message.get("content")
    if isinstance(content, list):
        kinds = {str(part.get("type")) if isinstance(part, Mapping) else None for part in content}
        if not kinds <= {"text", "input_text"}:
            raise RefusedError(f"this model reads text only, found content of type {kinds - {'text'}}")
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str | None):
        raise RefusedError(f"the content of a message is text, found {str(content)[:80]!r}")
    # OpenAI's newer name of system, and its older one of tool.
    role = {"developer": "system", "function": "tool"}.get(message["role"], message["role"])
    plain: ChatMessage = {"role": role, "content": content or ""}
    calls = []
    asked = message.get("tool_calls") or []
    if not isinstance(asked, list):
        raise RefusedError(f"tool_calls is a list of objects, found {str(asked)[:80]!r}")
    for call in asked:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise RefusedError(f"a tool call is an object with id and function, found {str(call)[:80]!r}")
        calls.append(
            {"id": call.get("id"), "name": function.get("name"), "arguments": _read(function.get("arguments"))}
        )
    if calls:
        plain["tool_calls"] = calls
    for key in ("tool_call_id", "name"):
        if message.get(key) and role != "assistant":
            plain[key] = message[key]
    return plain


def _read(arguments: Any) -> Any:
    """Return the arguments of a call, which are JSON in a string, as chat templates take them."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _for_template(message: ChatMessage) -> ChatMessage:
    """Return a message in the form that chat templates know."""
    if "tool_calls" not in message:
        return message
    calls = [
        {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
        for c in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _as_text(message: ChatMessage) -> ChatMessage:
    """Return a message for a chat template without tools: calls as the text of the family ``text``, results as said."""
    if message["role"] == "tool":
        return {"role": "user", "content": message["content"]}
    calls = [
        f"<tool_call>{json.dumps({'name': c['name'], 'arguments': c['arguments']})}</tool_call>"
        for c in message.get("tool_calls", ())
    ]
    return {"role": message["role"], "content": message["content"] + "".join(calls)}


def _digest(ids: Sequence[int]) -> tuple[int, ...]:
    """Return two words that stand for token ids."""
    # In words of 32 bits, for which streams draw many rows at once.
    packed = blake2b(b"".join(token.to_bytes(4, "little") for token in ids), digest_size=8).digest()
    return int.from_bytes(packed[:4], "little"), int.from_bytes(packed[4:], "little")
