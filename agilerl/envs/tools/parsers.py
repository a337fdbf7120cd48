"""Calls by the model families' special tokens, on token ids: a tag typed as prose is not a call.

Where there is a response template, transformers reads them. JSON between tags, or the XML of Qwen3-Coder, is read here:
few tokenizers have a template yet, and with one a single wrong call makes the whole completion unreadable.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Any, Protocol

from agilerl.checks.arguments import Having, Name, checked, nearest, shown
from agilerl.envs.prompts import render_text
from agilerl.envs.tools.tool import json_or_text
from agilerl.errors import ConfigError
from agilerl.gone import instead
from agilerl.text.padding import decoded, has_template

KEYS = ("arguments", "parameters")


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
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        return _misread(f"{shown(text.strip())}, which is no JSON: {why}")


def call_of(value: Any) -> ToolCall | MalformedCall:
    """Read a call from parsed JSON; the arguments may be under any of ``KEYS``, also as JSON inside JSON."""
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        arguments = json_or_text(next((value[key] for key in KEYS if key in value), {}))
        if isinstance(arguments, dict):
            call_id = value.get("id")
            return ToolCall(value["name"], arguments, call_id if call_id and isinstance(call_id, str) else None)
    return _misread(shown(value))


def _misread(what: str) -> MalformedCall:
    return MalformedCall(f'expected a call as {{"name": "...", "{KEYS[0]}": {{...}}}}, found {what}')


OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TAGS = {OPEN, CLOSE}
MARK = "\ufdd0"
"""Breaks up a tag that is no token; Unicode has no such character, and text that a model writes is freed of it."""


class TextTagParser:
    """Hermes' form, found in the text. Weaker: a quoted or explained tag also counts as a call.

    For models without special tokens for calls, such as the embedded one. The tags may be any two strings.
    """

    family = "text"
    tags: tuple[str, ...] = ()
    _form = '{"name": "...", "arguments": {...}}'

    @checked
    def __init__(self, tokenizer: Any = None, *, begin: Name = OPEN, end: Name = CLOSE) -> None:
        self.instruction = f"To call a tool, write {begin}{self._form}{end}"
        self._begin, self._end = begin, end

    def parse(self, token_ids: Sequence[int], text: str) -> Calls:
        """Return the call between each pair of tags."""
        unclosed = MalformedCall(f"expected {self._end} after the call that {self._begin} begins, found none")
        # What stands before the first tag is for the user.
        parts = [part.partition(self._end) for part in text.split(self._begin)[1:]]
        return [self.read(content.replace(MARK, "")) if end else unclosed for content, end, _ in parts]

    def read(self, content: str) -> ToolCall | MalformedCall:
        """Return the call between two tags; override it for a format other than JSON."""
        return json_call(content)


class HermesParser(TextTagParser):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, with each tag one token; only after thinking."""

    family = "hermes"
    tags: tuple[str, ...] = (OPEN, CLOSE, "<tool_response>", "</tool_response>")

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        if missing := sorted(_TAGS.difference(tokenizer.get_added_vocab())):
            raise ConfigError(
                f"expected the special tokens of {self.family}, found a tokenizer without {' and '.join(missing)}; "
                'name another family, or "text"'
            )

    def parse(self, token_ids: Sequence[int], text: str) -> Calls:
        """Return the call between each pair of tag tokens."""
        written = _written(self._tokenizer, token_ids, (OPEN, CLOSE, "<think>", "</think>"))
        # Not in the thinking, which the prompt may have begun and which may never have ended.
        return super().parse(token_ids, written.rpartition("</think>")[2].partition("<think>")[0])


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


class TemplateParser:
    """Calls as transformers reads them with a response template, in its field ``tool_calls``.

    It reads all calls of a completion or none: one that cannot be read makes the whole completion a malformed call.
    """

    family = "template"
    instruction = "To call a tool, write a call as you were trained to"

    @checked
    def __init__(self, tokenizer: Any, template: Mapping[str, Any] | None = None) -> None:
        """Check the template; by default that of the tokenizer. Raises ConfigError for one without ``tool_calls``."""
        template = template or getattr(tokenizer, "response_template", None) or {}
        self._tokenizer, self._template = tokenizer, dict(template)
        try:
            tokenizer.get_response_parser(self._template, prefix="")
            fields = template["fields"]
            calls = fields["tool_calls"]
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ConfigError(
                f"expected a response template of transformers with the field tool_calls, found {shown(template)}: "
                f"{type(error).__name__}: {error}"
            ) from error
        self._spelled = _tokens_in(template, tokenizer)
        self.tags = _tokens_in(calls, tokenizer)
        self._openings = _tokens_in([calls.get("open"), calls.get("open_pattern")], tokenizer)
        self._texts = {name for name, field in fields.items() if not {"open", "open_pattern"} & set(field)}
        question = [{"role": "user", "content": "x"}]
        # It may begin the model's message, for example open its thinking.
        self._prefix = render_text(tokenizer, question) if has_template(tokenizer) else ""

    def parse(self, token_ids: Sequence[int], text: str) -> Calls:
        """Return the calls of the completion, or what prevents them from being read."""
        written = _written(self._tokenizer, token_ids, self._spelled)
        try:
            parser = self._tokenizer.get_response_parser(self._template, prefix=self._prefix)
            events = parser.feed(written)
            message, last = parser.finalize()
            # A message has only the last of its texts, and a call that the template does not match is in any of them.
            texts = [e["value"] for e in (*events, *last) if e["type"] == "region_close" and e["field"] in self._texts]
            if any(tag in str(text) for tag in self._openings for text in texts):
                raise ValueError("its beginning does not match the response template")
            read = json.loads(json.dumps(message.get("tool_calls"), ensure_ascii=False).replace(MARK, "")) or []
        except (LookupError, RecursionError, TypeError, ValueError) as error:
            completion, why = written.replace(MARK, "").strip(), str(error.__cause__ or error)
            return [MalformedCall(f"expected a call, found {shown(completion)}, which cannot be read: {shown(why)}")]
        # Each item is a call, or a list of calls where one tag begins several.
        calls = [call for item in read for call in (item if isinstance(item, list) else [item])]
        return [call_of(call.get("function", call) if isinstance(call, dict) else call) for call in calls]


PARSERS: dict[str, Callable[[Any], ToolCallParser]] = {
    "template": TemplateParser,
    "hermes": HermesParser,
    "qwen_coder": QwenCoderParser,
    "text": TextTagParser,
}
Vocabulary = Annotated[Any, Having("a Hugging Face tokenizer", ("get_added_vocab",), "pass runtime.tokenizer")]


@checked
def parser_for(tokenizer: Vocabulary, family: str | None = None) -> ToolCallParser:
    """Return the parser of a tokenizer: of its response template, else of the tags that it has tokens for.

    Args:
        tokenizer: a Hugging Face tokenizer.
        family: ``template``, ``hermes`` (Qwen 2.5 and 3 too), ``qwen_coder``, or ``text``, which is never recognised
            automatically; None to recognise it.

    Raises:
        ConfigError: an unknown family, one whose tokens the tokenizer does not have, or no family that fits.
    """
    if family is not None:
        return parser_of(family)(tokenizer)
    if "tool_calls" in (getattr(tokenizer, "response_template", None) or {}).get("fields", ()):
        return TemplateParser(tokenizer)
    if _TAGS.issubset(tokenizer.get_added_vocab()):
        # Qwen3-Coder has Hermes' tokens; only its template shows that it writes XML.
        written_in_xml = "<function=" in str(getattr(tokenizer, "chat_template", None))
        return QwenCoderParser(tokenizer) if written_in_xml else HermesParser(tokenizer)
    raise ConfigError(
        f"expected a tokenizer with a response template or with the tokens {OPEN} and {CLOSE}, found neither in "
        f"{type(tokenizer).__name__}; use a model that was trained to call tools, pass a response template of "
        'transformers or a custom ToolCallParser, or use the weaker parser="text", which finds tags in the text'
    )


def parser_of(family: str) -> Callable[[Any], ToolCallParser]:
    """Return what makes a family's parser; raises ConfigError for an unknown one."""
    if family not in PARSERS:
        hint = f"unknown family of tool calls {family!r}; {nearest(family, PARSERS)}"
        raise ConfigError(instead(f"parser={family}") or hint)
    return PARSERS[family]


def _tokens_in(template: Any, tokenizer: Any) -> tuple[str, ...]:
    """Return the tokens that a part of a template names; the longest first."""
    # Patterns escape characters.
    text = json.dumps(template, ensure_ascii=False).replace("\\", "")
    return tuple(sorted((tag for tag in tokenizer.get_added_vocab() if tag.strip() and tag in text), key=len)[::-1])


def _written(tokenizer: Any, ids: Sequence[int], tags: Sequence[str]) -> str:
    """Return the text of ids, special tokens included, in which a tag that other tokens spell has a mark in it."""
    names = {token: tag for tag, token in tokenizer.get_added_vocab().items()}
    spelled = re.compile("|".join(map(re.escape, tags)) or r"(?!)")
    parts = []
    # Other tokens are decoded run by run, because a character may take several of them.
    for is_added, group in groupby(ids, names.__contains__):
        if is_added:
            parts += [names[token] for token in group]
        else:
            text = decoded(tokenizer, list(group)).replace(MARK, "")
            parts.append(spelled.sub(lambda tag: tag[0][0] + MARK + tag[0][1:], text))
    return "".join(parts)
