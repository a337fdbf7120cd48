"""A tool: a Python function with a schema, checked arguments and a time limit; errors become text."""

import asyncio
import inspect
import json
import queue
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from agilerl.arguments import Name, Positive, checked
from agilerl.envs.tools.schema import Arguments
from agilerl.errors import ConfigError

ErrorKind = Literal["malformed", "unknown_tool", "bad_arguments", "raised", "timeout", "too_many"]
"""What went wrong with a call. ``too_many``: more calls in one turn than are allowed."""

MOST_STUCK = 4
CLEAN_UP = 1.0
"""Seconds after the timeout until a coroutine is cancelled, so that its thread ends."""


@dataclass(frozen=True)
class ToolResult:
    """What a call returned, as text for the model."""

    text: str
    error: ErrorKind | None = None


class Tool:
    """A function that a model may call, sync or async.

    Each call has its own thread and is abandoned after ``timeout`` seconds. A thread cannot be killed: a function that
    never returns keeps it, and while four calls hang the tool answers that it is busy. What may hang forever belongs in
    a process, as in the Python tool. Environments that share a tool may call it concurrently.
    """

    @checked
    def __init__(self, function: Callable[..., Any], *, name: Name | None = None, timeout: Positive = 10.0) -> None:
        """Read the function's signature and docstring.

        Args:
            function: the function to call; its schema is :func:`agilerl.envs.tools.tool_schema`.
            name: the tool's name for the model; by default the function's name.
            timeout: seconds, more than 0.

        Raises:
            ConfigError: a function without a schema, or a timeout that is not positive.
        """
        self.function, self.timeout = function, timeout
        self._arguments = Arguments(function, name)
        self.name = self._arguments.name
        self._stuck: list[threading.Thread] = []

    def __repr__(self) -> str:
        return f"Tool({self._arguments.signature})"

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema that chat templates take."""
        return self._arguments.schema

    @property
    def signature(self) -> str:
        """The tool in one line, for models whose chat template does not show tools."""
        return self._arguments.signature

    def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Check the arguments, call the function and return its result, or the error, as text.

        Text is returned unchanged, anything else as JSON.

        Raises:
            ConfigError: raised by the function itself to signal a mistake of the user, not of the model.
        """
        try:
            checked = self._arguments.check(arguments)
        except ConfigError as error:
            return ToolResult(f"Error: {error}", "bad_arguments")
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        if len(self._stuck) >= MOST_STUCK:
            return ToolResult(f"Error: {self.name} is busy: earlier calls have not returned yet", "timeout")
        outcome: queue.SimpleQueue[ToolResult | ConfigError] = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, args=(checked, outcome), name=f"tool {self.name}", daemon=True)
        thread.start()
        try:
            found = outcome.get(timeout=self.timeout)
        except queue.Empty:
            self._stuck.append(thread)
            return ToolResult(f"Error: {self.name} took longer than {self.timeout:g} seconds", "timeout")
        if isinstance(found, ConfigError):
            raise found
        return found

    def _run(self, arguments: Mapping[str, Any], outcome: "queue.SimpleQueue[ToolResult | ConfigError]") -> None:
        try:
            result = self.function(**arguments)
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result, self.timeout + CLEAN_UP))
            outcome.put(ToolResult(_as_text(result)))
        except ConfigError as error:
            outcome.put(error)
        except BaseException as error:  # a tool that calls sys.exit() has failed as well
            outcome.put(ToolResult(f"Error: {self.name} raised {type(error).__name__}: {error}", "raised"))


async def _awaited(result: Awaitable[Any], limit: float) -> Any:
    return await asyncio.wait_for(result, limit)


def _as_text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
