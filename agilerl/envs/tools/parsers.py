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
from agilerl.text.contract import contract_of
from agilerl.text.padding import decoded, has_template

KEYS = ("arguments", "parameters")
_BESIDE = {"name", "id", "type", "index"}
"""What a call without arguments may state."""


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
        return call_of(json.loads(text, object_pairs_hook=_distinct))
    except (ValueError, RecursionError) as error:
        why = "it is nested too deeply" if isinstance(error, RecursionError) else error
        return _refuse(f"{shown(text.strip())}, which is no JSON: {why}")


def call_of(value: Any) -> ToolCall | MalformedCall:
    """Read a call from parsed JSON; the arguments may be under any one of ``KEYS``, also as JSON inside JSON."""
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        under = [key for key in KEYS if key in value] or sorted(value.keys() - _BESIDE)
        arguments = json_or_text(value.get(under[0]) if len(under) == 1 and under[0] in KEYS else under or {})
        if isinstance(arguments, dict):
            call_id = value.get("id")
            return ToolCall(value["name"], arguments, call_id if call_id and isinstance(call_id, str) else None)
    return _refuse(shown(value))


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs; raises ValueError for a key that is there twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError(f"an object has one of its keys {', '.join(map(shown, values))} twice")
    return values


def _refuse(what: str) -> MalformedCall:
    return MalformedCall(f'expected a call as {{"name": "...", "{KEYS[0]}": {{...}}}}, found {what}')


OPEN, CLOSE = "<tool_call>", "</tool_call>"
_TAGS = {OPEN, CLOSE}
_ENDS = 8
"""Closing tags that are tried as the end of a call."""
_THINKING = re.compile(r"\A(?:(?!<think>).)*?</think>|<think>.*?(?:</think>|\Z)", re.DOTALL)
"""Thinking, which may never have ended; or have begun in a prompt that is not known."""
MARK = "\ufdd0"
"""Breaks up a tag that is no token; Unicode has no such character, and text that a model writes is freed of it."""


class TextTagParser:
    """Hermes' form, found in the text. Weaker: a quoted or explained tag also counts as a call.

    For models without special tokens for calls, such as the embedded one. The tags may be any two strings.
    """

    family = "text"
    tags: tuple[str, ...] = ()
    _form = '{"name": "...", "arguments": {...}}'
    _sign, _bare = "{", re.compile(r"(?!)")
    """What calls have in them that end without having begun; how those look that have no tags at all."""

    @checked
    def __init__(self, tokenizer: Any = None, *, begin: Name = OPEN, end: Name = CLOSE) -> None:
        self.instruction = f"To call a tool, write {begin}{self._form}{end}"
        self._begin, self._end = begin, end

    def parse(self, token_ids: Sequence[int], text: str) -> Calls:
        """Return the calls between each pair of tags; what stands elsewhere is for the user, unless it is one too."""
        before, *parts = text.split(self._begin)
        calls = self._outside(before)
        for part in parts:
            pieces = part.split(self._end)
            if len(pieces) == 1:
                calls.append(
                    MalformedCall(f"expected {self._end} after the call that {self._begin} begins, found none")
                )
                continue
            read: Calls = []
            taken = 1
            for count in range(1, min(len(pieces), _ENDS + 1)):  # a value may have the closing tag in it
                within = self.read_all(self._end.join(pieces[:count]).replace(MARK, ""))
                if count == 1 or not any(isinstance(call, MalformedCall) for call in within):
                    read, taken = within, count
                if not any(isinstance(call, MalformedCall) for call in read):
                    break
            calls += read + self._outside(self._end.join(pieces[taken:]))
        return calls

    def _outside(self, text: str) -> Calls:
        """Return what looks like calls in a text that no tag begins."""
        *ended, last = text.split(self._end)
        bare = [part for part in ended if self._sign in part] + ([last] if self._bare.search(last) else [])
        texts = [shown(part.replace(MARK, "").strip()) for part in bare]
        return [MalformedCall(f"expected {self._begin} before a call, found {part}") for part in texts]

    def read_all(self, content: str) -> Calls:
        """Return the calls between two tags."""
        return [self.read(content)]

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
        written = _write_ids(self._tokenizer, token_ids, (OPEN, CLOSE, "<think>", "</think>"))
        return super().parse(token_ids, _THINKING.sub("", contract_of(self._tokenizer).opened + written))


class QwenCoderParser(HermesParser):
    """``<function=name><parameter=key>value</parameter></function>`` between Hermes' tags; values are text."""

    family = "qwen_coder"
    _form = "<function=...><parameter=...>value</parameter></function>"
    _sign, _bare = "<function=", re.compile(r"<function=[^>\s]+>.*</function>", re.DOTALL)
    # A closing tag ends what the next opening tag, or nothing, follows: a value may hold others, but not both in turn.
    _BETWEEN = re.compile(r"</parameter>.*<parameter=", re.DOTALL)
    _FUNCTION = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*(?=<function=|\Z)", re.DOTALL)
    _PARAMETER = re.compile(r"\s*<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)

    def read_all(self, content: str) -> Calls:
        """Return the calls; the newlines next to a value's tags are not part of it."""
        functions, rest = _one_by_one(self._FUNCTION, content)
        calls: Calls = []
        for name, body in functions:
            parameters, left = _one_by_one(self._PARAMETER, body)
            arguments = dict(parameters)
            sound = (
                not left
                and len(arguments) == len(parameters)
                and not any(map(self._BETWEEN.search, arguments.values()))
            )
            calls.append(ToolCall(name, arguments) if sound else self._malformed(body))
        return calls if calls and not rest else [*calls, self._malformed(rest)]

    @staticmethod
    def _malformed(text: str) -> MalformedCall:
        form = "<function=name><parameter=key>value</parameter></function>, each key once"
        return MalformedCall(f"expected {form}, found {shown(text.strip())}")


def _one_by_one(pattern: re.Pattern[str], text: str) -> tuple[list[tuple[str, str]], str]:
    """Return the two groups of matches that follow one another, and the text that is left after them."""
    matches, at = [], 0
    while match := pattern.match(text, at):
        matches.append((match[1], match[2]))
        at = match.end()
    return matches, text[at:].strip()


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
        written = _write_ids(self._tokenizer, token_ids, self._spelled)
        try:
            parser = self._tokenizer.get_response_parser(self._template, prefix=self._prefix)
            events = parser.feed(written)
            message, last = parser.finalize()
            # A message has only the last of its texts, and a call that the template does not match is in any of them.
            texts = [e["value"] for e in (*events, *last) if e["type"] == "region_close" and e["field"] in self._texts]
            if any(tag in str(text) for tag in self._openings for text in texts):
                raise ValueError("its beginning does not match the response template")
            self._check_whole([*events, *last])
            read = json.loads(json.dumps(message.get("tool_calls"), ensure_ascii=False).replace(MARK, "")) or []
        except (LookupError, RecursionError, TypeError, ValueError) as error:
            completion, why = written.replace(MARK, "").strip(), str(error.__cause__ or error)
            return [MalformedCall(f"expected a call, found {shown(completion)}, which cannot be read: {shown(why)}")]
        # Each item is a call, or a list of calls where one tag begins several.
        calls = [call for item in read for call in (item if isinstance(item, list) else [item])]
        return [call_of(call.get("function", call) if isinstance(call, dict) else call) for call in calls]

    def _check_whole(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Raise ValueError if transformers skips a part of a call: what stands between its parts, or a key twice."""
        field = self._template["fields"]["tool_calls"]
        kind, settings = field.get("content", "text"), field.get("content_args") or {}
        chunks = [e["text"] if e["type"] == "region_chunk" else None for e in events if e["field"] == "tool_calls"]
        for is_text, group in groupby(chunks, lambda chunk: chunk is not None):
            body = "".join(map(str, group)) if is_text else ""
            keys: list[str] = []
            skipped: list[str] = []
            if kind == "xml-inline":
                pattern = re.compile(settings["tag_pattern"], re.DOTALL)
                keys, skipped = [match["key"] for match in pattern.finditer(body)], [pattern.sub("", body)]
            elif kind == "kv-lines":
                pairs = [
                    line.partition(settings.get("kv_sep", ":")) for line in body.split(settings.get("line_sep", "\n"))
                ]
                keys, skipped = (
                    [key.strip() for key, sign, _ in pairs if sign],
                    [key for key, sign, _ in pairs if not sign],
                )
            elif kind == "json" and body and not settings:
                json.loads(body, object_pairs_hook=_distinct)
            if any(text.strip() for text in skipped):
                raise ValueError(f"{shown(''.join(skipped).strip())} is no part of a call")
            if len(set(keys)) < len(keys) and not settings.get("merge_duplicates"):
                raise ValueError(f"one of the keys {', '.join(map(shown, dict.fromkeys(keys)))} is there twice")


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


def _write_ids(tokenizer: Any, ids: Sequence[int], tags: Sequence[str]) -> str:
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
