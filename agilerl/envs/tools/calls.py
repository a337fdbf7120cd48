"""Tool calls in a completion: the parser protocol, and the JSON form of calls."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agilerl.arguments import shown

CONTENT_SHOWN = 80


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool, not yet checked."""

    name: str
    """The tool's name for the model."""
    arguments: Mapping[str, Any]
    """By name, as written by the model."""
    call_id: str | None = None
    """The model's id of the call, in families that write one."""


@dataclass(frozen=True)
class MalformedCall:
    """The start of a call that cannot be read."""

    problem: str
    """A sentence for the model: what was expected and what was found."""


class ToolCallParser(Protocol):
    """Finds the calls in a completion."""

    family: str
    """Name of the model family, or of the format."""
    tags: tuple[str, ...]
    """Special-token texts, which must not reach the model inside a tool's result."""
    instruction: str
    """How to write a call, for models whose chat template does not say."""

    def parse(self, token_ids: Sequence[int], text: str) -> list[ToolCall | MalformedCall]:
        """Return the calls in order, possibly none.

        Args:
            token_ids: the sampled completion, end token included.
            text: the same as text, without special tokens.
        """


def json_call(text: str, *, keys: Sequence[str] = ("arguments", "parameters")) -> ToolCall | MalformedCall:
    """Read one call ``{"name": ..., "arguments": {...}}``; the arguments may be under any of ``keys``."""
    try:
        return call_of(json.loads(text), keys=keys)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        return MalformedCall(f"{_expected(keys)}, found {_excerpt(text)}, which is no JSON: {why}")


def call_of(value: Any, *, keys: Sequence[str] = ("arguments", "parameters")) -> ToolCall | MalformedCall:
    """Read a call from parsed JSON."""
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        given: Any = next((value[key] for key in keys if key in value), {})
        if isinstance(given, str):  # arguments that are JSON inside JSON
            given = _loaded(given)
        if isinstance(given, dict):
            call_id = value.get("id")
            return ToolCall(value["name"], given, call_id if isinstance(call_id, str) else None)
    return MalformedCall(f"{_expected(keys)}, found {shown(value)}")


def json_values(text: str, separators: str = ";, \n\t\r") -> Iterator[Any]:
    """Yield the consecutive JSON values in a text.

    Raises:
        ValueError: something that is not JSON.
    """
    decoder = json.JSONDecoder()
    place = 0
    text = text.rstrip(separators)
    while place < len(text):
        if text[place] in separators:
            place += 1
            continue
        try:
            value, place = decoder.raw_decode(text, place)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
        yield value


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _expected(keys: Sequence[str]) -> str:
    return f'expected a call as {{"name": "...", "{keys[0]}": {{...}}}}'


def _excerpt(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= CONTENT_SHOWN else f"{text[:CONTENT_SHOWN]}...")
