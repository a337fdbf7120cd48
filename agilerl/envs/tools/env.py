"""A single-turn task solved with tools: call them for some turns, then answer."""

import inspect
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

import gymnasium
from pydantic import Field

from agilerl.checks.arguments import Positive, Whole, checked, described, nearest, shown
from agilerl.envs.adapters.base import AnyText
from agilerl.envs.core import Row, Split, Task, score_completions
from agilerl.envs.datasets import DatasetTask
from agilerl.envs.prompts import as_messages, render_text
from agilerl.envs.text_env import Begun, Observation, ResetOptions, StepResult, TextEnv
from agilerl.envs.tools.parsers import (
    MalformedCall,
    TemplateParser,
    TextTagParser,
    ToolCall,
    ToolCallParser,
    parser_for,
    parser_of,
)
from agilerl.envs.tools.tool import Tool, ToolResult
from agilerl.errors import ConfigError, EnvError, RewardError
from agilerl.rewards.combine import Graders, as_grader
from agilerl.rewards.grader import MESSAGES, select
from agilerl.text.contract import text_ids
from agilerl.text.padding import has_template

Announcement = Literal["auto", "system", "none"]
"""How tools are announced: ``auto``: from the chat template if it shows tools, else from the system message;
``system``: from the system message; ``none``: not at all, for models that already know them."""

SPLITS: tuple[Split, ...] = ("train", "exam", "test")
"""An episode's split is its seed modulo 3, as EpisodeTask numbers its seeds; the quotient is the row's index."""
MOST_CALLS = 4
"""Most calls in one turn; with the default timeouts a turn then stays below EpisodeTask's timeout."""
_PROBE = "agilerl:result-of-a-tool"
_ONE_THREAD = threading.Lock()
"""Tasks and graders are written for one thread, and environments run in several."""


class ToolEnv(TextEnv):
    """A task whose questions the model may answer with the help of tools.

    If a completion calls tools, it gets their results; one without a call is the final answer and is graded by the
    task. All turns but the last have reward 0. If the last allowed turn calls a tool, there is no answer: the episode
    is truncated with reward 0.

    Errors of a call (it cannot be read, an unknown tool, wrong arguments, an exception, a timeout) are returned to the
    model as the call's result. ``info`` counts over the episode: ``tool_calls``, ``tool_errors``, ``tool_truncated``
    and ``tool_errors/<kind>``; the last step adds ``success`` (the grade is 1 or more).

    The row is chosen by the seed alone: ``seed % 3`` is the split (train, exam, test) and ``seed // 3`` the row,
    modulo the size of exam and test. EpisodeTask numbers its seeds this way, so an exam asks the exam's questions. One
    thread at a time calls the task for questions and grades; tools are called from many.

    With an ``environment_factory``, as of TRL's ``GRPOTrainer``, the tools share the state of an object: its public
    methods are tools, ``reset(**row)`` begins an episode (a text that it returns is appended to the question), graders
    get it as ``environments``, and ``get_reward()``, if it has one, is added to the grade. Such an episode is graded
    even if its last turn calls a tool.
    """

    @checked
    def __init__(
        self,
        task: Task | Sequence[Row],
        tools: Sequence[Callable[..., Any] | Tool] = (),
        *,
        grader: Graders | None = None,
        environment_factory: Callable[[], Any] | None = None,
        parser: ToolCallParser | Mapping[str, Any] | str | None = None,
        max_turns: Annotated[int, Field(ge=2)] = 4,
        system_prompt: str | None = None,
        announce: Announcement = "auto",
        timeout: Positive = 10.0,
        max_result_chars: Annotated[int, Field(ge=20)] = 2000,
    ) -> None:
        """Check all settings that do not depend on the tokenizer.

        Args:
            task: a task, or rows with ``question`` and ``answer``, which then serve as all splits.
            tools: functions (see :func:`tool_schema`) or tools, with distinct names; at least one, methods included.
            grader: grader of the rows, as in ``DatasetTask``.
            environment_factory: makes the object with the state; called once, and again after a call that hangs.
            parser: a parser, a response template of transformers, or the name of a family (see :func:`parser_for`);
                None recognises the tokenizer's family.
            max_turns: most completions of one episode, answer included; 2 or more.
            system_prompt: put before the question as a system message.
            announce: how the model is told about the tools.
            timeout: seconds for one call of a tool passed as a function.
            max_result_chars: longer results are cut, with a note; 20 or more.

        Raises:
            ConfigError: no tools or equal names, a function without a schema, rows without a grader, or a prefill.
        """
        self._factory, self._plain_tools, self._timeout = environment_factory, tools, timeout
        self._make_tools()
        self.task = _make_task(task, grader, _reward_of(self._environment))
        self.max_turns, self.max_result_chars = max_turns, max_result_chars
        self.observation_space, self.action_space = ConversationSpace(), AnyText()
        self._announce, self._instructions = announce, system_prompt
        # The one parser that needs no tokenizer: it is ready before bind().
        if isinstance(parser, str) and parser_of(parser) is TextTagParser:
            parser = TextTagParser()
        self._wanted = parser
        self._parser: ToolCallParser | None = None if isinstance(parser, str | Mapping) else parser
        self._tokenizer: Any = None
        self._in_template = self._tool_role = False
        self._forbidden: re.Pattern[str] | None = None
        self._row: Row = {}
        self._conversation: list[dict[str, Any]] = []
        self._counts: Counter[str] = Counter()

    def __repr__(self) -> str:
        return f"ToolEnv({self.task.name!r}, tools={list(self._tools)}, max_turns={self.max_turns})"

    def close(self) -> None:
        """Release what the task's grading has opened, and the environment of the tools."""
        self.task.close()
        if callable(release := getattr(self._environment, "close", None)):
            release()

    def _make_tools(self) -> None:
        """Make the environment of the tools, if there is one, and the tools."""
        self._environment: Any = None if self._factory is None else self._factory()
        shared = self._environment
        if self._factory is not None and not callable(getattr(shared, "reset", None)):
            raise ConfigError(f"environment_factory: expected an object with reset(), found {described(shared)}")
        # The public methods are tools; they are looked up in the class, so that no property is read.
        names = [name for name, _ in inspect.getmembers(type(shared), inspect.isfunction) if not name.startswith("_")]
        methods = [getattr(shared, name) for name in names if name not in ("reset", "get_reward", "close")]
        tools = [t if isinstance(t, Tool) else Tool(t, timeout=self._timeout) for t in (*self._plain_tools, *methods)]
        self._tools = {tool.name: tool for tool in tools}
        if not tools or len(self._tools) < len(tools):
            tool_names = ", ".join(tool.name for tool in tools)
            raise ConfigError(f"expected at least one tool, with distinct names, found: {tool_names or 'none'}")

    def bind(self, tokenizer: Any) -> None:
        """Determine from the tokenizer how tools are called, announced and answered; raises as ``parser_for``."""
        if tokenizer is self._tokenizer:
            return
        if isinstance(self._wanted, Mapping):
            self._parser = TemplateParser(tokenizer, self._wanted)
        elif self._wanted is None or isinstance(self._wanted, str):
            self._parser = parser_for(tokenizer, self._wanted)
        self._tokenizer = tokenizer
        # What a template does is tried, not read: templates differ too much for a rule about their text.
        schemas = [tool.schema for tool in self._tools.values()]
        question = [{"role": "user", "content": "x"}]
        with_tools = _render(tokenizer, question, schemas)
        # Empty: the template refuses the tools. The same text: it ignores them.
        self._in_template = self._announce == "auto" and with_tools not in ("", _render(tokenizer, question))
        self.tools = schemas if self._in_template else ()
        results = [{"role": "tool", "name": "f", "content": _PROBE, "tool_call_id": f"call0000{n}"} for n in range(2)]
        turn = [*question, {"role": "assistant", "content": "y"}, *results]
        self._tool_role = _PROBE in _render(tokenizer, turn)
        special = [str(token) for token in getattr(tokenizer, "added_tokens_decoder", {}).values() if token.special]
        # Longest first, so that a spelling that begins with another one is found as a whole.
        spellings = sorted({*special, *(self._parser.tags if self._parser else ())}, key=len, reverse=True)
        self._forbidden = re.compile("|".join(map(re.escape, spellings))) if spellings else None

    @checked
    def reset(self, *, seed: Whole | None = None, options: ResetOptions = None) -> Begun:
        """Ask the question of ``seed``; by default the last seed plus one. Raises EnvError for a split without rows."""
        seed = self._begin_episode(seed)
        gymnasium.Env.reset(self, seed=seed)  # seeds gymnasium's generator, which episodes do not use
        index, split = seed // len(SPLITS), SPLITS[seed % len(SPLITS)]
        if split != "train":
            size = self.task.panel_size(split)
            if size == 0:
                raise EnvError(f"seed {seed} asks for a question of the {split} split, but {self.task.name} has none")
            index %= size
        with _ONE_THREAD:
            self._row = self.task.row(split, index)
        if self._factory is not None and self._counts["tool_errors/timeout"]:
            self._make_tools()  # the call that hangs still has the old one
        self._counts = Counter()
        self._conversation = as_messages(opening := self._opening())
        return opening, {"split": split, "index": index}

    def step(self, action: str) -> StepResult:
        """Take an action as text alone; its tags count as the tokens that the tokenizer makes of them."""
        return self.step_ids(action, [] if self._tokenizer is None else text_ids(self._tokenizer, action))

    def step_ids(self, action: str, token_ids: Sequence[int]) -> StepResult:
        """Make the completion's tool calls, or grade it as the answer.

        Raises EnvError if the episode is not running or no tokenizer is bound, RewardError if there is no grade.
        """
        if self._parser is None:
            raise EnvError("expected bind(tokenizer) before step(): calls are read from the tokenizer's special tokens")
        self._count_turn()
        calls = self._parser.parse(token_ids, action)
        if not calls:
            return self._grade(action)
        if self._turn >= self.max_turns:
            graded = self._grade(action)[1] if self._environment is not None else 0.0
            self._running = False
            return "", graded, False, True, {**self._info(), "success": graded >= 1.0}
        results = self._answer(calls)
        self._conversation += [{"role": "assistant", "content": action}, *as_messages(results)]
        return results, 0.0, False, False, self._info()

    # -- what the model sees --------------------------------------------------------------------------------------

    def _opening(self) -> Observation:
        messages = [dict(message) for message in self.task.messages(self._row)]
        messages[-1]["content"] += "" if self._environment is None else self._reset_environment()
        system = [self._instructions] if self._instructions else []
        if not self._in_template and self._announce != "none":
            lines = [f"{tool.signature} - {tool.schema['function']['description']}" for tool in self._tools.values()]
            how = f"{self._parser.instruction}. " if self._parser else ""
            system.append("\n".join([f"You may call these tools. {how}An answer without a call is final.", *lines]))
        if messages[0]["role"] == "system":
            system.append(messages.pop(0)["content"])
        # One message, since many templates allow only one of the system.
        if system:
            messages.insert(0, {"role": "system", "content": "\n\n".join(system)})
        return messages[0]["content"] if [m["role"] for m in messages] == ["user"] else messages

    def _reset_environment(self) -> str:
        """Reset the environment of the tools; return what it says."""
        name = f"{type(self._environment).__name__}.reset"
        try:
            names = select(name, self._environment.reset, self._row)
            text = self._environment.reset(**{key: self._row[key] for key in names})
        except RewardError as error:
            raise EnvError(str(error)) from error
        if text is not None and not isinstance(text, str):
            raise EnvError(f"expected {name} to return text or None, found {described(text)}")
        return text or ""

    def _answer(self, calls: Sequence[ToolCall | MalformedCall]) -> Observation:
        messages = [
            {
                "role": "tool",
                "name": getattr(call, "name", "unknown"),
                "content": self._call(call, number),
                # Mistral's templates want an id of nine characters for each result.
                "tool_call_id": getattr(call, "call_id", None) or f"call{number:05d}",
            }
            for number, call in enumerate(calls)
        ]
        if self._tool_role:
            return messages
        if len(messages) == 1:
            return str(messages[0]["content"])
        return "\n".join(f"{message['name']}: {message['content']}" for message in messages)

    # -- calls ----------------------------------------------------------------------------------------------------

    def _call(self, call: ToolCall | MalformedCall, number: int) -> str:
        result = self._result(call, number)
        self._counts["tool_calls"] += 1
        if result.error is not None:
            self._counts["tool_errors"] += 1
            self._counts[f"tool_errors/{result.error}"] += 1
        text = result.text
        if len(text) > self.max_result_chars:
            self._counts["tool_truncated"] += 1
            text = f"{text[: self.max_result_chars]}... [cut: {len(text) - self.max_result_chars} more characters]"
        # Otherwise a result could end the turn of the environment, or speak for the assistant.
        return self._forbidden.sub(_break_up, text) if self._forbidden else text

    def _result(self, call: ToolCall | MalformedCall, number: int) -> ToolResult:
        if number >= MOST_CALLS:
            return ToolResult(f"Error: at most {MOST_CALLS} calls are made in one turn; this one was not", "too_many")
        if isinstance(call, MalformedCall):
            return ToolResult(f"Error: {call.problem}", "malformed")
        if call.name not in self._tools:
            hint = nearest(call.name, self._tools)
            return ToolResult(f"Error: unknown tool {shown(call.name)}; {hint}", "unknown_tool")
        return self._tools[call.name].call(call.arguments)

    def _grade(self, action: str) -> StepResult:
        self._running = False
        row = {**self._row, MESSAGES: self._conversation}
        if self._environment is not None:
            row["environments"] = self._environment
        with _ONE_THREAD:
            grade = score_completions(self.task, [row], [action])[0]
        if grade is None:
            raise RewardError(f"{self.task.name} did not grade the answer {shown(action)}")
        return "", grade, True, False, {**self._info(), "success": grade >= 1.0}

    def _info(self) -> dict[str, Any]:
        return {"tool_calls": 0, "tool_errors": 0, "tool_truncated": 0, **self._counts}


class ConversationSpace(AnyText):
    """Any text, and any list of messages ``{"role": ..., "content": ...}`` , not empty."""

    def contains(self, x: Any) -> bool:
        """Return whether ``x`` is text or a list of messages."""
        with suppress(ConfigError):
            return bool(as_messages(x))
        return False


def _reward_of(environment: Any) -> Callable[..., Any] | None:
    """Return the reward that an environment gives itself, as a grader with the name of its class."""
    if not callable(getattr(environment, "get_reward", None)):
        return None

    # Async, because get_reward() may be; its parameter is the column that step_ids() adds to the row.
    async def grader(environments: Sequence[Any]) -> list[Any]:
        rewards = [environment.get_reward() for environment in environments]
        return [await reward if inspect.isawaitable(reward) else reward for reward in rewards]

    grader.__name__ = type(environment).__name__
    return grader


def _make_task(task: Task | Sequence[Row], grader: Graders | None, of_environment: Callable[..., Any] | None) -> Task:
    if of_environment is not None:
        grader = of_environment if grader is None else [as_grader(grader), of_environment]
    if isinstance(task, Task):
        if grader is not None:
            raise ConfigError(f"expected a grader for rows only: the task {task.name} grades its own answers")
    elif grader is None:
        raise ConfigError("expected a grader for a list of rows, found none; pass grader=f(completion, answer)")
    else:
        task = DatasetTask(task, task, task, reward_fn=grader)
    with _ONE_THREAD:
        opening = task.messages(task.row("train", 0))
    if opening[-1]["role"] == "assistant":
        raise ConfigError(f"expected questions that end with the user's message, found a prefill in {task.name}")
    return task


def _break_up(tag: re.Match[str]) -> str:
    # Still readable, but no longer the text of the token.
    return f"{tag[0][0]} {tag[0][1:]}" if len(tag[0]) > 1 else " "


def _render(tokenizer: Any, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """Return a conversation as the chat template writes it; nothing without one, or if it refuses the messages."""
    try:
        return render_text(tokenizer, messages, tools=tools) if has_template(tokenizer) else ""
    except ConfigError:
        return ""
