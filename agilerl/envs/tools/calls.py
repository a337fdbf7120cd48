"""What a completion calls: the protocol of parsers, and the JSON in which calls are written."""

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
    """What the model calls the tool."""
    arguments: Mapping[str, Any]
    """By name, as the model wrote them."""
    call_id: str | None = None
    """The model's own id of the call, in families that write one."""


@dataclass(frozen=True)
class MalformedCall:
    """The start of a call that cannot be read."""

    problem: str
    """One sentence for the model: what was expected, what was found."""


class ToolCallParser(Protocol):
    """Finds the calls in a completion."""

    family: str
    """Name of the model family, or of the format."""
    tags: tuple[str, ...]
    """Texts with a meaning of their own, which must not reach the model inside a tool's result."""
    instruction: str
    """How a call is written, for a model whose chat template does not say."""

    def parse(self, token_ids: Sequence[int], text: str) -> list[ToolCall | MalformedCall]:
        """Return the calls in their order; an empty list for a completion without any.

        Args:
            token_ids: the completion as it was sampled, end token included.
            text: the same without special tokens.
        """


def json_call(text: str, *, keys: Sequence[str] = ("arguments", "parameters")) -> ToolCall | MalformedCall:
    """Read one call ``{"name": ..., "arguments": {...}}``; the arguments may stand under any of ``keys``."""
    try:
        return call_of(json.loads(text), keys=keys)
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        return MalformedCall(f"{_expected(keys)}, found {_excerpt(text)}, which is no JSON: {why}")


def call_of(value: Any, *, keys: Sequence[str] = ("arguments", "parameters")) -> ToolCall | MalformedCall:
    """Read a call that is JSON already."""
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        given: Any = next((value[key] for key in keys if key in value), {})
        if isinstance(given, str):  # arguments that are JSON inside JSON
            given = _loaded(given)
        if isinstance(given, dict):
            call_id = value.get("id")
            return ToolCall(value["name"], given, call_id if isinstance(call_id, str) else None)
    return MalformedCall(f"{_expected(keys)}, found {shown(value)}")


def json_values(text: str, separators: str = ";, \n\t\r") -> Iterator[Any]:
    """Yield the JSON values that stand one after the other in a text.

    Raises:
        ValueError: something that is no JSON.
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
