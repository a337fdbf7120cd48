"""Calls by the model families' special tokens, on token ids: a tag typed as prose is not a call.

The formats are those of the families' chat templates: Hermes and Qwen 2.5/3 (also the XML form of Qwen3-Coder), Llama
3.1 and later, Mistral from its third tokenizer on.
"""

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile
from typing import Annotated, Any, Protocol

from agilerl.arguments import Having, checked, nearest, shown
from agilerl.envs.prompts import end_token_ids
from agilerl.envs.tools.tool import json_or_text
from agilerl.errors import ConfigError
from agilerl.padding import decoded

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


Calls = list[ToolCall | MalformedCall]


class ToolCallParser(Protocol):
    """Finds the calls in a completion."""

    family: str
    """Name of the model family, or of the format."""
    tags: tuple[str, ...]
    """Special-token texts, which must not reach the model inside a tool's result."""
    instruction: str
    """How to write a call, for models whose chat template does not say."""

    def parse(self, token_ids: Sequence[int], text: str) -> Calls:
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
        return _no_json(text, KEYS, error)


def call_of(value: Any, keys: Sequence[str] = KEYS) -> ToolCall | MalformedCall:
    """Read a call from parsed JSON; the arguments may be under any of ``keys``, also as JSON inside JSON."""
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        arguments = json_or_text(next((value[key] for key in keys if key in value), {}))
        if isinstance(arguments, dict):
            call_id = value.get("id")
            return ToolCall(value["name"], arguments, call_id if isinstance(call_id, str) else None)
    return _misread(keys, shown(value))


def json_values(text: str) -> Iterator[Any]:
    """Yield the consecutive JSON values in a text; raises ValueError or RecursionError for something else."""
    decoder = json.JSONDecoder()
    while text := text.strip(SEPARATORS):
        value, end = decoder.raw_decode(text)
        text = text[end:]
        yield value


def _no_json(text: str, keys: Sequence[str], error: Exception) -> MalformedCall:
    why = "it is nested too deeply" if isinstance(error, RecursionError) else error
    return _misread(keys, f"{shown(text.strip())}, which is no JSON: {why}")


def _misread(keys: Sequence[str], what: str) -> MalformedCall:
    return MalformedCall(f'expected a call as {{"name": "...", "{keys[0]}": {{...}}}}, found {what}')


OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG, END_OF_MESSAGE, END_OF_TURN = "<|python_tag|>", "<|eom_id|>", "<|eot_id|>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


class TextTagParser:
    """Hermes' form, found in the text. Weaker: a quoted or explained tag also counts as a call.

    For models without special tokens for calls, such as the embedded one. The tags may be any two strings.
    """

    family = "text"
    tags: tuple[str, ...] = ()
    _form = '{"name": "...", "arguments": {...}}'

    def __init__(self, tokenizer: Any = None, *, begin: str = OPEN, end: str = CLOSE) -> None:
        if not begin or not end:
            raise ConfigError(f"expected two tags that are not empty, found {begin!r} and {end!r}")
        self.instruction = f"To call a tool, write {begin}{self._form}{end}"
        self._begin, self._end = begin, end

    def parse(self, token_ids: Sequence[int], text: str) -> Calls:
        """Return the call between each pair of tags."""
        parts = [part.partition(self._end) for part in text.split(self._begin)[1:]]
        return [self._call(content, bool(end)) for content, end, _ in parts]

    def read(self, content: str) -> ToolCall | MalformedCall:
        """Return the call between two tags; override it for a format other than JSON."""
        return json_call(content)

    def _call(self, content: str, closed: bool) -> ToolCall | MalformedCall:
        if closed:
            return self.read(content)
        return MalformedCall(f"expected {self._end} after the call that {self._begin} begins, found none")


class HermesParser(TextTagParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, with each tag one token; only after thinking."""

    family = "hermes"
    tags: tuple[str, ...] = (OPEN, CLOSE, "<tool_response>", "</tool_response>")

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._open, self._close = _token_ids(tokenizer, REQUIRED["hermes"], self.family)
        self._think = _optional_ids(tokenizer, "<think>", "</think>")

    def parse(self, token_ids: Sequence[int], text: str) -> Calls:
        """Return the call between each pair of tag tokens."""
        begun = list(_split(_after_thinking(token_ids, *self._think), self._open))[1:]
        parts = [list(_split(ids, self._close)) for ids in begun]
        return [self._call(_decoded(self._tokenizer, part[0]), len(part) > 1) for part in parts]


class QwenCoderParser(HermesParser):
    """``<function=name><parameter=key>value</parameter></function>`` between Hermes' tags; values are text."""

    family = "qwen_coder"
    _form = "<function=...><parameter=...>value</parameter></function>"
    _FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*)</function>\s*", re.DOTALL)
    _PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)

    def read(self, content: str) -> ToolCall | MalformedCall:
        """Return the call; the newlines next to a value's tags are not part of it."""
        if match := self._FUNCTION.fullmatch(content):
            return ToolCall(match[1], dict(self._PARAMETER.findall(match[2])))
        form = "<function=name><parameter=key>value</parameter></function>"
        return MalformedCall(f"expected {form}, found {shown(content.strip())}")


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
        ids = _until(token_ids, self._ends)
        # Text before the tag is for the user; each further tag begins more calls.
        bare, *parts = [_decoded(self._tokenizer, part) for part in _split(ids, self._tag)]
        if not parts and len(ids) < len(token_ids) and self._BARE.match(bare):
            parts = [bare]
        return [call for part in parts for call in self._calls(part)]

    def _calls(self, content: str) -> Calls:
        if (dotted := _python_call(content)) is not None:
            return [dotted]
        keys = ("parameters", "arguments")
        try:
            calls = [call_of(value, keys) for value in json_values(content)]
        except (ValueError, RecursionError) as error:
            return [_no_json(content, keys, error)]
        return calls or [MalformedCall(f"expected a call behind {PYTHON_TAG}, found nothing")]


class MistralParser:
    """``[TOOL_CALLS]`` and a JSON list (v3 to v7), or ``[TOOL_CALLS]name[ARGS]{...}`` for each call (v11 and later)."""

    family = "mistral"
    tags: tuple[str, ...] = (TOOL_CALLS, "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
    instruction = f'To call tools, write {TOOL_CALLS}[{{"name": "...", "arguments": {{...}}}}]'

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        (self._begin,) = _token_ids(tokenizer, REQUIRED["mistral"], self.family)
        self._args, self._call_id = _optional_ids(tokenizer, ARGS, CALL_ID)
        self._think = _optional_ids(tokenizer, "[THINK]", "[/THINK]")
        self._ends = end_token_ids(tokenizer)

    def parse(self, token_ids: Sequence[int], text: str) -> Calls:
        """Return the calls of every segment after the token."""
        ids = _until(_after_thinking(token_ids, *self._think), self._ends)
        return [call for part in list(_split(ids, self._begin))[1:] for call in self._calls(part)]

    def _calls(self, ids: list[int]) -> Calls:
        if self._args in ids:
            begin = ids.index(self._args)
            name, *call_ids = [_decoded(self._tokenizer, part).strip() for part in _split(ids[:begin], self._call_id)]
            content = _decoded(self._tokenizer, ids[begin + 1 :])
            arguments = json_or_text(content)
            if name and isinstance(arguments, dict):
                return [ToolCall(name, arguments, call_ids[0] if call_ids else None)]
            misread = f"{name!r} and {shown(content.strip())}, which is no JSON object"
            return [MalformedCall(f"expected {TOOL_CALLS}name{ARGS}{{...}}, found {misread}")]
        content = _decoded(self._tokenizer, ids)
        values = json_or_text(content)
        return [call_of(value) for value in values] if values and isinstance(values, list) else [json_call(content)]


REQUIRED = {"hermes": (OPEN, CLOSE), "mistral": (TOOL_CALLS,), "llama": (PYTHON_TAG,)}
"""The tokens that identify a family, tried in this order because Hermes models on Llama also have Llama's tokens."""
PARSERS: dict[str, Callable[[Any], ToolCallParser]] = {
    "hermes": HermesParser,
    "qwen_coder": QwenCoderParser,
    "llama": LlamaParser,
    "mistral": MistralParser,
    "text": TextTagParser,
}
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
        return parser_of(family)(tokenizer)
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


def parser_of(family: str) -> Callable[[Any], ToolCallParser]:
    """Return the class of a family's parser; raises ConfigError for an unknown one."""
    if family not in PARSERS:
        raise ConfigError(f"unknown family of tool calls {family!r}; {nearest(family, PARSERS)}")
    return PARSERS[family]


def _token_ids(tokenizer: Any, tokens: Sequence[str], family: str) -> list[int]:
    added = tokenizer.get_added_vocab()
    if missing := [token for token in tokens if token not in added]:
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


def _until(ids: Sequence[int], ends: Collection[int | None]) -> list[int]:
    """Return the ids before the first that is one of ``ends``."""
    return list(takewhile(lambda token: token not in ends, ids))


def _split(ids: Sequence[int], token: int | None) -> Iterator[list[int]]:
    """Return the parts between the places of a token, as ``str.split`` does."""
    cuts = [-1, *(place for place, other in enumerate(ids) if other == token), len(ids)]
    return (list(ids[before + 1 : after]) for before, after in pairwise(cuts))


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
