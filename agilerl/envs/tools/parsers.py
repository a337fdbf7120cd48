"""Calls by the model families' special tokens, on token ids: a tag typed as prose is not a call.

The formats are those of the families' chat templates: Hermes and Qwen 2.5/3 (also the XML form of Qwen3-Coder), Llama
3.1 and later, Mistral from its third tokenizer on.
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Annotated, Any, Protocol

from agilerl.checks.arguments import Having, Name, checked, nearest, shown
from agilerl.envs.prompts import end_token_ids
from agilerl.envs.tools.tool import json_or_text
from agilerl.errors import ConfigError
from agilerl.text.padding import decoded

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
MARK = "\ufdd0"
"""Stands before a tag that is a token; Unicode has no such character, and text that a model writes is freed of it."""


class TextTagParser:
    """Hermes' form, found in the text. Weaker: a quoted or explained tag also counts as a call.

    For models without special tokens for calls, such as the embedded one. The tags may be any two strings.
    """

    family = "text"
    tags: tuple[str, ...] = ()
    _form = '{"name": "...", "arguments": {...}}'
    _mark = ""

    @checked
    def __init__(self, tokenizer: Any = None, *, begin: Name = OPEN, end: Name = CLOSE) -> None:
        self.instruction = f"To call a tool, write {begin}{self._form}{end}"
        self._begin, self._end = begin, end

    def parse(self, token_ids: Sequence[int], text: str) -> Calls:
        """Return the call between each pair of tags."""
        unclosed = MalformedCall(f"expected {self._end} after the call that {self._begin} begins, found none")
        # What stands before the first tag is for the user.
        parts = [part.partition(self._mark + self._end) for part in text.split(self._mark + self._begin)[1:]]
        return [self.read(content) if end else unclosed for content, end, _ in parts]

    def read(self, content: str) -> ToolCall | MalformedCall:
        """Return the call between two tags; override it for a format other than JSON."""
        return json_call(content)


class HermesParser(TextTagParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, with each tag one token; only after thinking."""

    family = "hermes"
    tags: tuple[str, ...] = (OPEN, CLOSE, "<tool_response>", "</tool_response>")
    _mark = MARK

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = _having(tokenizer, REQUIRED["hermes"], self.family)

    def parse(self, token_ids: Sequence[int], text: str) -> Calls:
        """Return the call between each pair of tag tokens."""
        marked = _marked(self._tokenizer, token_ids, OPEN, CLOSE, "<think>", "</think>")
        return super().parse(token_ids, _after_thinking(marked, "<think>", "</think>"))


class QwenCoderParser(HermesParser):
    """``<function=name><parameter=key>value</parameter></function>`` between Hermes' tags; values are text."""

    family = "qwen_coder"
    _form = "<function=...><parameter=...>value</parameter></function>"
    # Matched in full, so that the last closing tag ends the call: a value may hold others.
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
    _END = re.compile(MARK + r"<\|(?:eom|eot)_id\|>")

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = _having(tokenizer, REQUIRED["llama"], self.family)

    def parse(self, token_ids: Sequence[int], text: str) -> Calls:
        """Return the calls after the tag, else those of a bare completion."""
        marked = _marked(self._tokenizer, token_ids, PYTHON_TAG, END_OF_MESSAGE, END_OF_TURN)
        # An end token leaves one `rest`, even if nothing follows it: the turn has ended.
        whole, *rest = self._END.split(marked, maxsplit=1)
        # Text before the tag is for the user; each further tag begins more calls.
        bare, *parts = whole.split(MARK + PYTHON_TAG)
        if rest and not parts and self._BARE.match(bare):
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
        self._tokenizer = _having(tokenizer, REQUIRED["mistral"], self.family)
        self._ends = end_token_ids(tokenizer)

    def parse(self, token_ids: Sequence[int], text: str) -> Calls:
        """Return the calls of every segment after the token."""
        ids = list(takewhile(lambda token: token not in self._ends, token_ids))
        marked = _marked(self._tokenizer, ids, TOOL_CALLS, ARGS, CALL_ID, "[THINK]", "[/THINK]")
        parts = _after_thinking(marked, "[THINK]", "[/THINK]").split(MARK + TOOL_CALLS)[1:]
        return [call for part in parts for call in self._calls(part)]

    def _calls(self, part: str) -> Calls:
        head, named, content = part.partition(MARK + ARGS)
        values = json_or_text(content if named else head)
        # Without [ARGS] the names are in the JSON.
        if not named:
            # json_call() also says what is wrong with anything but a list.
            return [call_of(value) for value in values] if values and isinstance(values, list) else [json_call(head)]
        name, _, call_id = (piece.strip() for piece in head.partition(MARK + CALL_ID))
        if name and isinstance(values, dict):
            return [ToolCall(name, values, call_id or None)]
        misread = f"{name!r} and {shown(content.strip())}, which is no JSON object"
        return [MalformedCall(f"expected {TOOL_CALLS}name{ARGS}{{...}}, found {misread}")]


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
            # Qwen3-Coder has Hermes' tokens; only its template shows that it writes XML.
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


def _having(tokenizer: Any, tokens: Sequence[str], family: str) -> Any:
    """Return a tokenizer; raises ConfigError if it lacks special tokens."""
    if missing := [token for token in tokens if token not in tokenizer.get_added_vocab()]:
        raise ConfigError(
            f"expected the special tokens of {family}, found a tokenizer without {' and '.join(missing)}; "
            'name another family, or "text"'
        )
    return tokenizer


def _marked(tokenizer: Any, ids: Sequence[int], *tags: str) -> str:
    """Return the text of ids with a mark before tags that are tokens, and without other special tokens."""
    added = tokenizer.get_added_vocab()
    names = {added[tag]: MARK + tag for tag in tags if tag in added}
    parts = []
    # Other tokens are decoded run by run, because a character may take several of them.
    for is_tag, group in groupby(ids, names.__contains__):
        if is_tag:
            parts += [names[token] for token in group]
        else:
            parts.append(decoded(tokenizer, list(group), skip_special_tokens=True).replace(MARK, ""))
    return "".join(parts)


def _after_thinking(marked: str, begin: str, end: str) -> str:
    """Remove the thinking, also one that never ended: a call that is only considered does not count."""
    # After the last end, and before a beginning that has none.
    return marked.rpartition(MARK + end)[2].partition(MARK + begin)[0]


def _python_call(content: str) -> ToolCall | None:
    """Read ``name.call(key="value")``, the form of Llama's built-in tools; None for anything else."""
    if not re.match(r"\s*[A-Za-z_]\w*\.call\(", content):
        return None
    try:
        match ast.parse(content.strip(), mode="eval"):
            # Of ** and a dictionary the parser makes a keyword without a name.
            case ast.Expression(ast.Call(ast.Attribute(ast.Name(name), "call"), [], keywords)) if all(
                keyword.arg is not None for keyword in keywords
            ):
                return ToolCall(name, {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords})
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass
    return None
