"""Calls by the model families' special tokens, on token ids: a tag typed as prose is not a call.

The formats are those of the families' chat templates: Hermes and Qwen 2.5/3 (also the XML form of Qwen3-Coder), Llama
3.1 and later, Mistral from its third tokenizer on.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from agilerl.arguments import Having, checked, nearest, shown
from agilerl.envs.prompts import end_token_ids
from agilerl.errors import ConfigError
from agilerl.padding import decoded

# -- calls, and their JSON form ---------------------------------------------------------------------------------------


CONTENT_SHOWN = 80
KEYS = ("arguments", "parameters")
SEPARATORS = ";, \n\t\r"


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


def json_call(text: str) -> ToolCall | MalformedCall:
    """Read one call ``{"name": ..., "arguments": {...}}``, or with ``parameters``."""
    try:
        return call_of(json.loads(text))
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        return MalformedCall(f"{_expected(KEYS)}, found {_excerpt(text)}, which is no JSON: {why}")


def call_of(value: Any, *, keys: Sequence[str] = KEYS) -> ToolCall | MalformedCall:
    """Read a call from parsed JSON; the arguments may be under any of ``keys``."""
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        given: Any = next((value[key] for key in keys if key in value), {})
        if isinstance(given, str):  # arguments that are JSON inside JSON
            given = _loaded(given)
        if isinstance(given, dict):
            call_id = value.get("id")
            return ToolCall(value["name"], given, call_id if isinstance(call_id, str) else None)
    return MalformedCall(f"{_expected(keys)}, found {shown(value)}")


def json_values(text: str) -> Iterator[Any]:
    """Yield the consecutive JSON values in a text.

    Raises:
        ValueError: something that is not JSON.
    """
    decoder = json.JSONDecoder()
    place = 0
    text = text.rstrip(SEPARATORS)
    while place < len(text):
        if text[place] in SEPARATORS:
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


# -- the parsers, on token ids: a tag typed as prose is not a call ----------------------------------------------------
#
# The formats are those of the families' chat templates: Hermes and Qwen 2.5/3 (also the XML form of Qwen3-Coder), Llama
# 3.1 and later, Mistral from its third tokenizer on.


Calls = list[ToolCall | MalformedCall]

OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG, END_OF_MESSAGE, END_OF_TURN = "<|python_tag|>", "<|eom_id|>", "<|eot_id|>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


Vocabulary = Annotated[Any, Having("a Hugging Face tokenizer", ("get_added_vocab",), "pass runtime.tokenizer")]


@checked
def parser_for(tokenizer: Vocabulary, family: str | None = None) -> ToolCallParser:
    """Return the parser of a tokenizer's model family, recognised by the special tokens in its vocabulary.

    Args:
        tokenizer: a Hugging Face tokenizer.
        family: ``hermes`` (Qwen 2.5 and 3 too), ``qwen_coder``, ``llama``, ``mistral``, or ``text``, which is never
            recognised automatically; None to recognise it.

    Raises:
        ConfigError: an unknown family, one whose tokens the tokenizer does not have, or no family that fits.
    """
    if family is not None:
        if family not in PARSERS:
            raise ConfigError(f"unknown family of tool calls {family!r}; {nearest(family, PARSERS)}")
        return PARSERS[family](tokenizer)
    for name, tokens in REQUIRED.items():
        if all(token in tokenizer.get_added_vocab() for token in tokens):
            written_in_xml = "<function=" in str(getattr(tokenizer, "chat_template", None))
            return PARSERS["qwen_coder" if name == "hermes" and written_in_xml else name](tokenizer)
    raise ConfigError(
        f"expected a tokenizer with the special tokens of a family that calls tools "
        f"({', '.join(tokens[0] for tokens in REQUIRED.values())}), found none of them in {type(tokenizer).__name__}; "
        "use a model that was trained to call tools, pass a custom ToolCallParser, or use the weaker "
        'family="text", which finds tags in the text'
    )


class HermesParser:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, with each tag one token; only after thinking."""

    family = "hermes"
    tags: tuple[str, ...] = (OPEN, CLOSE, "<tool_response>", "</tool_response>")
    instruction = f'To call a tool, write {OPEN}{{"name": "...", "arguments": {{...}}}}{CLOSE}'

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._open, self._close = _token_ids(tokenizer, REQUIRED["hermes"], self.family)
        self._think = _optional_ids(tokenizer, "<think>", "</think>")

    def parse(self, token_ids: Sequence[int], text: str) -> Calls:
        """Return the call between each pair of tag tokens."""
        ids = _after_thinking(token_ids, *self._think)
        found: Calls = []
        start: int | None = None
        for place, token in enumerate(ids):
            if token == self._open:
                if start is not None:
                    found.append(self._unclosed())
                start = place + 1
            elif token == self._close and start is not None:
                found.append(self.read(_decoded(self._tokenizer, ids[start:place])))
                start = None
        return found if start is None else [*found, self._unclosed()]

    def read(self, content: str) -> ToolCall | MalformedCall:
        """Return the call between two tags."""
        return json_call(content)

    @staticmethod
    def _unclosed() -> MalformedCall:
        return MalformedCall(f"expected {CLOSE} after the call that {OPEN} begins, found none")


class QwenCoderParser(HermesParser):
    """``<function=name><parameter=key>value</parameter></function>`` between Hermes' tags; values are text."""

    family = "qwen_coder"
    instruction = f"To call a tool, write {OPEN}<function=...><parameter=...>value</parameter></function>{CLOSE}"
    _FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
    _PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)

    def read(self, content: str) -> ToolCall | MalformedCall:
        """Return the call; the newlines next to a value's tags are not part of it."""
        found = self._FUNCTION.fullmatch(content)
        if found is None:
            return MalformedCall(
                f"expected <function=name><parameter=key>value</parameter></function>, found {content.strip()[:80]!r}"
            )
        return ToolCall(found[1], dict(self._PARAMETER.findall(found[2])))


class LlamaParser:
    """``<|python_tag|>`` and a call, or a completion that consists only of JSON calls and ends its turn.

    A call is ``{"name": ..., "parameters": {...}}``, or ``name.call(key="value")`` after the tag; several are separated
    by semicolons or newlines. The bare form has no special token, so it counts only if it is the whole completion and
    an end token (``<|eom_id|>``, ``<|eot_id|>``) closes it: JSON inside prose is not a call.
    """

    family = "llama"
    tags: tuple[str, ...] = (PYTHON_TAG,)
    instruction = 'To call a tool, write {"name": "...", "parameters": {...}} and nothing else'
    _BARE = re.compile(r'\s*\{\s*"name"\s*:.*"parameters"\s*:', re.DOTALL)

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        (self._tag,) = _token_ids(tokenizer, REQUIRED["llama"], self.family)
        self._ends = set(_optional_ids(tokenizer, END_OF_MESSAGE, END_OF_TURN)) - {None}

    def parse(self, token_ids: Sequence[int], text: str) -> Calls:
        """Return the calls after the tag, else those of a bare completion."""
        ids = list(token_ids)
        end = next((place for place, token in enumerate(ids) if token in self._ends), None)
        inside = ids[:end]
        if self._tag in inside:
            # Text before the tag is for the user; each further tag begins more calls.
            parts = list(_split(inside, self._tag))[1:]
            return [call for part in parts for call in self._calls(_decoded(self._tokenizer, part))]
        bare = _decoded(self._tokenizer, inside)
        if end is not None and self._BARE.match(bare):
            return self._calls(bare)
        return []

    def _calls(self, content: str) -> Calls:
        dotted = _python_call(content)
        if dotted is not None:
            return [dotted]
        try:
            return [call_of(value, keys=("parameters", "arguments")) for value in json_values(content)] or [
                MalformedCall(f"expected a call behind {PYTHON_TAG}, found nothing")
            ]
        except ValueError as error:
            found = content.strip()[:80]
            problem = f'expected {{"name": "...", "parameters": {{...}}}}, found {found!r}, which is no JSON: {error}'
            return [MalformedCall(problem)]


class MistralParser:
    """``[TOOL_CALLS]`` and a JSON list (v3 to v7), or ``[TOOL_CALLS]name[ARGS]{...}`` for each call (v11 and later)."""

    family = "mistral"
    tags: tuple[str, ...] = (TOOL_CALLS, "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
    instruction = f'To call tools, write {TOOL_CALLS}[{{"name": "...", "arguments": {{...}}}}]'

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        (self._calls,) = _token_ids(tokenizer, REQUIRED["mistral"], self.family)
        self._args, self._call_id = _optional_ids(tokenizer, ARGS, CALL_ID)
        self._think = _optional_ids(tokenizer, "[THINK]", "[/THINK]")
        self._ends = end_token_ids(tokenizer)

    def parse(self, token_ids: Sequence[int], text: str) -> Calls:
        """Return the calls of every segment after the token."""
        ids = _after_thinking(token_ids, *self._think)
        end = next((place for place, token in enumerate(ids) if token in self._ends), None)
        return [call for part in list(_split(ids[:end], self._calls))[1:] for call in self._segment(part)]

    def _segment(self, ids: list[int]) -> Calls:
        if self._args in ids:
            place = ids.index(self._args)
            named = list(_split(ids[:place], self._call_id))
            name = _decoded(self._tokenizer, named[0]).strip()
            call_id = _decoded(self._tokenizer, named[1]).strip() if len(named) > 1 else None
            return [self._named(name, _decoded(self._tokenizer, ids[place + 1 :]), call_id)]
        content = _decoded(self._tokenizer, ids)
        try:
            values = json.loads(content)
        except (ValueError, RecursionError):
            return [json_call(content)]
        return [call_of(value) for value in (values if isinstance(values, list) and values else [values])]

    @staticmethod
    def _named(name: str, content: str, call_id: str | None) -> ToolCall | MalformedCall:
        try:
            arguments = json.loads(content)
        except (ValueError, RecursionError) as error:
            return MalformedCall(f"expected the arguments of {name!r} as a JSON object, found no JSON: {error}")
        if not name or not isinstance(arguments, dict):
            return MalformedCall(f"expected {TOOL_CALLS}name{ARGS}{{...}}, found {name!r} and {content.strip()[:80]!r}")
        return ToolCall(name, arguments, call_id)


class TextTagParser:
    """Hermes' form, found in the text. Weaker: a quoted or explained tag also counts as a call.

    For models without special tokens for calls, such as the embedded one. The tags may be any two strings.
    """

    family = "text"
    tags: tuple[str, ...] = ()

    def __init__(self, tokenizer: Any = None, *, begin: str = OPEN, end: str = CLOSE) -> None:
        if not begin or not end:
            raise ConfigError(f"expected two tags that are not empty, found {begin!r} and {end!r}")
        self.instruction = f'To call a tool, write {begin}{{"name": "...", "arguments": {{...}}}}{end}'
        self._begin, self._end = begin, end

    def parse(self, token_ids: Sequence[int], text: str) -> Calls:
        """Return the call between each pair of tags."""
        found: Calls = []
        for part in text.split(self._begin)[1:]:
            content, closed, _ = part.partition(self._end)
            problem = MalformedCall(f"expected {self._end} after the call that {self._begin} begins, found none")
            found.append(self.read(content) if closed else problem)
        return found

    def read(self, content: str) -> ToolCall | MalformedCall:
        """Return the call between two tags; override it for a format other than JSON."""
        return json_call(content)


REQUIRED = {"hermes": (OPEN, CLOSE), "mistral": (TOOL_CALLS,), "llama": (PYTHON_TAG,)}
"""The tokens that identify a family, tried in this order because Hermes models on Llama also have Llama's tokens."""
PARSERS: dict[str, Callable[[Any], ToolCallParser]] = {
    "hermes": HermesParser,
    "qwen_coder": QwenCoderParser,
    "llama": LlamaParser,
    "mistral": MistralParser,
    "text": TextTagParser,
}


def _token_ids(tokenizer: Any, tokens: Sequence[str], family: str) -> list[int]:
    added = tokenizer.get_added_vocab()
    missing = [token for token in tokens if token not in added]
    if missing:
        raise ConfigError(
            f"expected the special tokens of {family}, found a tokenizer without {' and '.join(missing)}; "
            'name another family, or "text"'
        )
    return [int(added[token]) for token in tokens]


def _optional_ids(tokenizer: Any, *tokens: str) -> tuple[int | None, ...]:
    added = tokenizer.get_added_vocab()
    return tuple(added.get(token) for token in tokens)


def _after_thinking(ids: Sequence[int], begin: int | None, end: int | None) -> list[int]:
    """Remove the thinking: a call that is only considered does not count."""
    ids = list(ids)
    if end in ids:
        ids = ids[len(ids) - ids[::-1].index(end) :]
    return ids[: ids.index(begin)] if begin in ids else ids  # thinking that never ended


def _split(ids: Sequence[int], token: int | None) -> Iterator[list[int]]:
    part: list[int] = []
    for found in ids:
        if found == token:
            yield part
            part = []
        else:
            part.append(found)
    yield part


def _decoded(tokenizer: Any, ids: Sequence[int]) -> str:
    # Special tokens are dropped, because an end token after the call is not part of it.
    return decoded(tokenizer, list(ids), skip_special_tokens=True)


def _python_call(content: str) -> ToolCall | None:
    """Read ``name.call(key="value")``, the form of Llama's built-in tools; None for anything else."""
    if not re.match(r"\s*[A-Za-z_]\w*\.call\(", content):
        return None
    try:
        match ast.parse(content.strip(), mode="eval"):
            case ast.Expression(ast.Call(ast.Attribute(ast.Name(name), "call"), [], keywords)):
                return ToolCall(name, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords})
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    return None
