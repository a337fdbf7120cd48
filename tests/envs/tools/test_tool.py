"""A tool always answers in time, with a result or with an error in words."""

import asyncio
import sys
import threading
import time

import pytest

from agilerl.envs.tools import Tool, ToolResult
from agilerl.errors import ConfigError


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def add_later(a: int, b: int) -> int:
    """Add two numbers."""
    await asyncio.sleep(0.01)
    return a + b


def echo(text: str) -> str:
    """Say it again."""
    return text


def record(name: str) -> dict[str, object]:
    """Look something up."""
    return {"name": name, "size": [1, 2], "é": None}


def broken(text: str) -> str:
    """Fail."""
    raise KeyError(text)


def leave() -> None:
    """Leave."""
    sys.exit(3)


def misconfigured() -> None:
    """Fail for a reason that the model cannot mend."""
    raise ConfigError("expected an address")


@pytest.mark.parametrize("function", [add, add_later])
def test_sync_and_async_functions(function: object) -> None:
    tool = Tool(function)
    assert tool.call({"a": 2, "b": "3"}) == ToolResult("5")
    assert tool.call({"a": 2}).error == "bad_arguments"
    assert "expected add" in tool.call({"a": 2, "c": 3}).text


def test_results_become_text() -> None:
    assert Tool(echo).call({"text": "plain"}) == ToolResult("plain")
    assert Tool(record).call({"name": "x"}) == ToolResult('{"name": "x", "size": [1, 2], "é": null}')


def test_what_a_tool_raises_is_text() -> None:
    assert Tool(broken).call({"text": "k"}) == ToolResult("Error: broken raised KeyError: 'k'", "raised")
    assert Tool(leave).call({}) == ToolResult("Error: leave raised SystemExit: 3", "raised")


def test_a_mistake_of_the_user_is_raised() -> None:
    with pytest.raises(ConfigError, match="expected an address"):
        Tool(misconfigured).call({})


def test_a_tool_that_hangs_is_given_up_on_and_then_refused() -> None:
    release = threading.Event()

    def hang() -> str:
        """Wait."""
        release.wait(30)
        return "late"

    tool = Tool(hang, timeout=0.05)
    start = time.monotonic()
    assert [tool.call({}).text for _ in range(4)] == ["Error: hang took longer than 0.05 seconds"] * 4
    refused = tool.call({})
    assert (refused.error, time.monotonic() - start < 5) == ("timeout", True)
    assert "busy" in refused.text
    release.set()
    for thread in tool._stuck:
        thread.join(5)
    assert tool.call({}) == ToolResult("late")


def test_a_coroutine_that_hangs_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agilerl.envs.tools.tool.CLEAN_UP", 0.1)
    cancelled = threading.Event()

    async def hang() -> None:
        """Wait."""
        try:
            await asyncio.sleep(30)
        finally:
            cancelled.set()

    assert Tool(hang, timeout=0.05).call({}).error == "timeout"
    assert cancelled.wait(5)


def test_names() -> None:
    tool = Tool(add, name="plus")
    assert tool.schema["function"]["name"] == tool.name == "plus"
    assert repr(tool) == "Tool(plus(a: integer; b: integer))"
