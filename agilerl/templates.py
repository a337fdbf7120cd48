"""Templates from files (chat templates of models, prompts of judges), rendered with bounds on time and memory.

Jinja's sandbox keeps a template from reaching Python, but not from running for ever or from filling the memory: two
nested loops over ``range(100000)``, ``'a' * 3_000_000_000``, ``10 ** 10 ** 10``, a list that holds itself doubled forty
times. Here every loop, call, filter and operator goes through a guard that counts, and that checks the size of a result
*before* it is computed if a small input can give a large output. Anything that the guard does not know is refused.
Within the bounds nothing changes: the output is that of transformers, byte for byte.
"""

import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy, deepcopy
from datetime import datetime
from functools import lru_cache, partial, wraps
from pathlib import Path
from types import BuiltinMethodType, MethodType
from typing import Any

from jinja2 import Template, TemplateError, nodes, pass_context, pass_eval_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro, Undefined, markup_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from agilerl.bounds import check_file
from agilerl.errors import ConfigError

SECONDS = 5.0
"""Processor time of one rendering; the template of a real model needs less than a thousandth of it."""
STEPS = 5_000_000
"""Nodes of a template that one rendering may visit, counted in its loops, macros, calls and filters."""
SOURCE = 2**18
"""Characters of a template."""
CHARACTERS = 2**23
"""Characters of one text, or of all texts in one value."""
PARTS = 200_000
"""Values in a list or mapping, at any depth, counted as often as they would be written."""
DEPTH = 100
PRODUCED = 2**28
"""Characters of everything that one rendering produces, including what it discards."""
_STEPS_BETWEEN_LOOKS = 500
_BITS = 1024
_NUMBER = 100_000
_SMALL = 2**16


class TemplateBrokenError(TemplateError):
    """A template that fails on any input: it divides by zero, recurses without end, or tries to reach Python."""


class TemplateLimitError(TemplateBrokenError):
    """A template that needs more time or memory than any real one, or uses something that cannot be bounded."""


class _Spent(threading.local):
    """What the rendering in this thread has used so far."""

    running = False
    steps = 0
    produced = 0
    until: float | None = None
    check = 0

    def begin(self) -> None:
        # The clock, whose reading is a system call, starts with the first look at it: most prompts end before that.
        self.running, self.steps, self.produced, self.check, self.until = True, 0, 0, _STEPS_BETWEEN_LOOKS, None

    def step(self, count: int = 1) -> None:
        self.steps += count
        if self.running and self.steps > self.check:
            now = time.thread_time()
            self.until = now + SECONDS if self.until is None else self.until
            if self.steps > STEPS or now > self.until:
                raise TemplateLimitError(f"it takes more than {STEPS:,} steps or {SECONDS:g} s")
            self.check = self.steps + _STEPS_BETWEEN_LOOKS

    def make(self, characters: int) -> None:
        if characters > CHARACTERS:
            raise TemplateLimitError(f"it makes a text of more than {CHARACTERS:,} characters")
        self.produced += characters
        if self.running and self.produced > PRODUCED:
            raise TemplateLimitError(f"it makes texts of more than {PRODUCED:,} characters in total")


_SPENT = _Spent()


def _size(*values: Any) -> int:
    """Return roughly how many characters values would have as text; raises if they are beyond the bounds.

    A part that is contained twice counts twice, because rendering or comparing the value visits it twice.
    """
    parts, characters = 0, 0
    waiting = [(value, 0) for value in values]
    while waiting:
        value, depth = waiting.pop()
        parts += 1
        if isinstance(value, str | bytes):
            characters += len(value)
        elif isinstance(value, int):
            characters += value.bit_length() // 3
        elif isinstance(value, (Mapping, Namespace, *_HOLDERS)):
            value = value._Namespace__attrs if isinstance(value, Namespace) else value
            inside: Any = value.items() if isinstance(value, Mapping) else value
            if depth > DEPTH or len(inside) + len(waiting) > PARTS:
                raise TemplateLimitError(f"it makes a list or mapping of more than {PARTS:,} parts or {DEPTH} levels")
            waiting += [(part, depth + 1) for part in inside]
        if parts > PARTS or characters > CHARACTERS:
            raise TemplateLimitError(f"it makes a value of more than {PARTS:,} parts or {CHARACTERS:,} characters")
    _SPENT.step(parts // 8)
    return characters + 4 * parts


_HOLDERS: tuple[type, ...] = (list, tuple, set, frozenset, type({}.keys()), type({}.values()), type({}.items()))


def _made(value: Any) -> Any:
    """Return a new value after counting it."""
    if isinstance(value, str):
        _SPENT.make(len(value))
    elif isinstance(value, (Mapping, *_HOLDERS)):
        _SPENT.make(_size(value))
    elif isinstance(value, int) and value.bit_length() > _BITS:
        raise TemplateLimitError(f"it makes a number of more than {_BITS} bits")
    return value


# -- operators and outputs ---------------------------------------------------------------------------------------------


def _check_binary(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result is far larger than its operands."""
    if operator == "*":
        for many, what in ((left, right), (right, left)):
            if isinstance(many, int) and isinstance(what, str | bytes | list | tuple):
                _SPENT.make(_size(what) * max(int(many), 0))
        _numbers(operator, left, right)
    elif operator == "**":
        _numbers(operator, left, right)
    elif operator == "%" and isinstance(left, str | bytes):
        _check_format(left, right)


def _numbers(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > _BITS and left.bit_length() > 1:
            raise TemplateLimitError(f"it makes a number of more than {_BITS} bits")


def _check_format(text: Any, *values: Any) -> None:
    """Refuse a format that expands: ``'%9999999d'``, ``'{:>{width}}'``, or one long value inserted many times."""
    pattern = text if isinstance(text, str) else str(text)
    digits = longest = 0
    for character in pattern:
        digits = digits + 1 if character.isdigit() else 0
        longest = max(longest, digits)
    fields = pattern.count("%") + pattern.count("{")
    nested = any("{" in field.partition("}")[0] for field in pattern.replace("{{", "").split("{")[1:] if ":" in field)
    braces = pattern.replace("{{", "").replace("}}", "")
    level = 0
    for character in braces:
        level += (character == "{") - (character == "}")
        nested = nested or level > 1
    if longest > 4 or nested or ("*" in pattern and "%" in pattern):
        raise TemplateLimitError("it formats with a width of more than 9999, or with a computed width")
    _SPENT.make(len(pattern) + fields * (_size(*values) + 10_000 * (longest > 0)))


def _joined(pieces: Iterable[str]) -> str:
    """Do ``"".join`` with a bounded result."""
    found, length = [], 0
    for piece in pieces:
        length += len(piece)
        if length > CHARACTERS:
            raise TemplateLimitError(f"it makes a text of more than {CHARACTERS:,} characters")
        found.append(piece)
    _SPENT.make(length)
    return "".join(found)


def _output(value: Any) -> Any:
    if not isinstance(value, str | bool | float | Undefined) and value is not None:
        _size(value)
    return value


# -- methods and functions ---------------------------------------------------------------------------------------------


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_LINEAR = _words(
    "capitalize casefold count endswith find index isalnum isalpha isascii isdecimal isdigit isidentifier islower "
    "isnumeric isprintable isspace istitle isupper lower lstrip partition removeprefix removesuffix rfind rindex "
    "rpartition rsplit rstrip split splitlines startswith strip swapcase title upper"
)
"""String methods whose result is about as long as the string."""
_OF_HOLDERS = _words("keys values items get copy index count")
_WIDENING = _words("center ljust rjust zfill")


def _check_method(name: str, owner: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    given = [*arguments, *named.values()]
    if isinstance(owner, str):
        if name in _LINEAR:
            return
        if name == "replace" and len(arguments) >= 2:
            _check_replace(owner, *map(str, arguments[:2]))
            return
        if name == "join" and len(arguments) == 1:
            _check_join(owner, arguments[0])
            return
        if name in _WIDENING or name == "expandtabs":
            _check_numbers(given)
            tabs = owner.count("\t") if name == "expandtabs" else 1
            _SPENT.make(len(owner) + tabs * max([n for n in given if isinstance(n, int)], default=8))
            return
    elif isinstance(owner, Mapping | list | tuple) and name in _OF_HOLDERS:
        if name in ("index", "count"):
            _size(owner, *given)
        return
    raise TemplateLimitError(f"it calls .{name[:40]}() of a {type(owner).__name__}, which is not known to be harmless")


def _check_replace(text: str, old: str, new: str) -> None:
    places = text.count(old) if old else len(text) + 1
    _SPENT.make(len(text) + places * len(new))


def _check_join(separator: str, parts: Any) -> None:
    if isinstance(parts, str | list | tuple | Mapping):
        _SPENT.make(_size(parts) + len(parts) * len(separator))
    else:
        raise TemplateLimitError("it joins something that is not a list")


def _check_numbers(values: Iterable[Any], most: int = _NUMBER) -> None:
    for value in values:
        if isinstance(value, int | float) and not abs(value) <= most:
            raise TemplateLimitError(f"it uses the number {str(value)[:20]} where at most {most:,} makes sense")


# -- filters -----------------------------------------------------------------------------------------------------------

_SHALLOW = _words(
    "length count first last default d list reverse items map select selectattr reject rejectattr attr safe random "
    "abs float int string trim lower upper capitalize title e escape forceescape urlencode wordcount"
)
"""Filters whose result is about as large as their input, whatever their arguments."""
_COMPARING = _words("sort unique dictsort min max groupby tojson")
"""Filters that visit every part of a value."""
_COSTLY = _words("batch slice center indent truncate sum round pprint urlize wordwrap xmlattr striptags filesizeformat")
"""Filters whose output can be much larger than their input: allowed for small values and small numbers."""
_AS_TEXT = _words("string trim lower upper capitalize title e escape forceescape urlencode wordcount")


def _guarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter with its guard. Filters that need a context get it as their first argument."""
    passed = 1 if getattr(function, "jinja_pass_arg", None) is not None else 0

    @wraps(function)
    def guard(*arguments: Any, **named: Any) -> Any:
        _SPENT.step(4)
        value, more = arguments[passed], [*arguments[passed + 1 :], *named.values()]
        if name in _SHALLOW or name in _COMPARING:
            if not isinstance(value, str) and (name in _COMPARING or name in _AS_TEXT):
                _size(value)
            _check_numbers(more)
            if name == "tojson" and any(len(str(part)) > 40 or part in range(17, _NUMBER) for part in more):
                raise TemplateLimitError("it writes JSON with an indent of more than 16")
        elif name == "replace":
            _size(value)
            _check_replace(str(value), *map(str, (*more, "", "")[:2]))
        elif name == "join":
            value = value if isinstance(value, str | Mapping) else list(value)
            _check_join(str((*more, "")[0]), value)
            arguments = (*arguments[:passed], value, *arguments[passed + 1 :])
        elif name == "format":
            _check_format(str(value), *more)
        elif name in _COSTLY:
            _check_numbers(more, 100 if name == "round" else _NUMBER)
            wide = sum(abs(int(part)) for part in more if isinstance(part, int | float))
            value_size = _size(value) if isinstance(value, str | list | tuple | Mapping) else 1
            _SPENT.make(value_size * (1 + wide + _size(*more)))
            if value_size > _SMALL:
                raise TemplateLimitError(f"it applies the filter {name} to a value of more than {_SMALL:,} characters")
            _SPENT.step(value_size * (value_size if name == "sum" else 1) // 64)
        else:
            raise TemplateLimitError(f"it uses the filter {name[:40]}, which is not known to be harmless")
        return _made(function(*arguments, **named))

    return guard


@pass_context
def _tick(context: Context, cost: int) -> bool:
    _SPENT.step(cost)
    return True


@pass_eval_context
def _concatenated(context: nodes.EvalContext, values: Sequence[Any]) -> str:
    """The operation ``a ~ b``."""
    _size(*(value for value in values if not isinstance(value, str)))
    if context.autoescape:
        return markup_join(values)
    return _joined(map(str, values))


_INNER = {"agilerl tick": _tick, "agilerl made": _made, "agilerl concatenated": _concatenated}
"""Internal filters, under names that a template cannot contain."""


# -- the environment ---------------------------------------------------------------------------------------------------


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox with a bound on time, memory and size."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "**", "%"))
    concat = staticmethod(_joined)

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_output, **options)
        self.bound()

    def bound(self) -> None:
        """Guard every filter; call it again after adding one."""
        self.globals.pop("lipsum", None)
        inner = set(_INNER)
        self.filters = {name: f if name in inner else _unguarded(name, f) for name, f in self.filters.items()}
        self.filters |= _INNER

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        if len(source) > SOURCE:
            raise TemplateLimitError(f"it has {len(source):,} characters, more than {SOURCE:,}")
        tree = super()._parse(source, name, filename)
        _instrument(tree)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator after checking that its result is bounded."""
        _SPENT.step()
        _check_binary(operator, left, right)
        return _made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function or method that is known to have a bounded result."""
        _SPENT.step(4)
        wrapped = getattr(__obj, "__wrapped__", None)
        if isinstance(wrapped, BuiltinMethodType | MethodType) and wrapped.__name__ in ("format", "format_map"):
            _check_format(wrapped.__self__, args, kwargs)
        elif isinstance(__obj, BuiltinMethodType | MethodType) and isinstance(
            __obj.__self__, str | bytes | int | float | Mapping | list | tuple | set | range | type
        ):
            _check_method(__obj.__name__, __obj.__self__, args, kwargs)
        elif not isinstance(__obj, Macro):
            _size(*args, *kwargs.values())
        return _made(super().call(__context, __obj, *args, **kwargs))


def _unguarded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    return function if getattr(function, "agilerl_guard", False) else _marked(_guarded(name, function))


def _marked(function: Any) -> Any:
    function.agilerl_guard = True
    return function


def _instrument(tree: Any) -> None:
    """Add counters to loops and macros, and checks to values that are made without a call."""
    found = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block)))
    for node in found:
        cost = 1 + sum(1 for child in node.body for _ in child.find_all(nodes.Node))
        tick = _inner("tick", nodes.Const(cost).set_environment(tree.environment))
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        if isinstance(node, nodes.For) and node.test is not None:  # jinja evaluates it for all items in a separate loop
            node.test = nodes.And(tick, node.test).set_environment(tree.environment)
    _replace(tree)


def _replace(node: nodes.Node) -> None:
    for field, value in list(node.iter_fields()):
        if isinstance(value, list):
            value[:] = [_replaced(item) if isinstance(item, nodes.Node) else item for item in value]
        elif isinstance(value, nodes.Node):
            setattr(node, field, _replaced(value))


def _replaced(node: nodes.Node) -> Any:
    _replace(node)
    if isinstance(node, nodes.Concat):
        return _inner("concatenated", nodes.List(node.nodes, lineno=node.lineno, environment=node.environment))
    is_slice = isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    stored = getattr(node, "ctx", "load") != "load"
    if not stored and (
        is_slice or (isinstance(node, nodes.List | nodes.Dict | nodes.Tuple) and not _is_constant(node))
    ):
        return _inner("made", node)
    return node


def _is_constant(node: nodes.Node) -> bool:
    return all(isinstance(part, nodes.Const | nodes.Pair | nodes.TemplateData) for part in node.find_all(nodes.Expr))


def _inner(name: str, node: Any) -> Any:
    made: Any = nodes.Filter(node, f"agilerl {name}", [], [], None, None)
    made.set_lineno(getattr(node, "lineno", None) or 1)
    return made.set_environment(node.environment)


def rendered(template: Template, /, **values: Any) -> str:
    """Render within the bounds.

    Raises:
        TemplateError: the template rejects the values, fails, or exceeds the bounds.
        ValueError, TypeError, LookupError: the values are not what it expects.
    """
    _SPENT.begin()
    try:
        return template.render(values)
    except SecurityError as error:
        raise TemplateBrokenError(str(error)) from error
    except (TemplateError, ValueError, TypeError, LookupError):
        raise
    except Exception as error:  # division by zero, recursion, ...: templates are programs
        raise TemplateBrokenError(f"{type(error).__name__}: {error}") from error
    finally:
        _SPENT.running = False


# -- chat templates ----------------------------------------------------------------------------------------------------


class _Generation(Extension):
    """``{% generation %}``: marks the assistant's part for callers that need it; here only its content is rendered."""

    tags = {"generation"}  # noqa: RUF012  (jinja reads it under this name)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise TemplateError(message)


@lru_cache(64)
def _chat_template(source: str) -> Template:
    environment = BoundedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.bound()
    environment.globals |= {"raise_exception": _raise, "strftime_now": strftime_now}
    try:
        return environment.from_string(source)
    except TemplateError:
        raise
    except (RecursionError, SyntaxError, MemoryError, ValueError, OverflowError) as error:
        raise TemplateBrokenError(f"{type(error).__name__}: {error}") from error


_NAMES = "chat_template_kwargs"
"""Attribute of a tokenizer: values for its chat template."""
_SET = "chat_template_set"
"""Attribute of a tokenizer: the chat template that took the place of its own."""
_RESERVED = frozenset(
    "messages tools documents add_generation_prompt continue_final_message tokenize conversation chat_template "  # noqa: SIM905
    "raise_exception strftime_now".split()
)


def with_chat_template(
    tokenizer: Any,
    path: str | os.PathLike[str] | None = None,
    names: Mapping[str, Any] | None = None,
    *,
    source: str | None = None,
) -> Any:
    """Return a copy of a tokenizer with the chat template of a file, or with values that its template gets by name.

    ``source`` is the text of a template, in place of a file. :func:`settings_of` returns what was set.

    Raises:
        ConfigError: a file that is missing, too large, not UTF-8 or no template; no template for the values, one that
            does not read one of them, or values that are set for each conversation.
    """
    if path is not None:
        source = _template_of(Path(path))
    elif source is not None:
        _check_template(source, "chat_template")
    if source is None and not names:
        return tokenizer
    changed = copy(tokenizer)
    if source is not None:
        changed.chat_template = source
        setattr(changed, _SET, source)
    source = getattr(changed, "chat_template", None)
    for name in names or {}:
        key = f"chat_template_kwargs.{name}"
        if name in _RESERVED:
            raise ConfigError(f"{key} is set for each conversation, or is a part of it; remove it")
        if not source:
            raise ConfigError(f"{key}: the tokenizer has no chat template to read it; set chat_template_path")
        if not re.search(rf"\b{re.escape(name)}\b", str(source)):
            raise ConfigError(f"{key}: the chat template does not read {name}, so it would change nothing; remove it")
    if names:
        setattr(changed, _NAMES, {**getattr(tokenizer, _NAMES, {}), **names})
    return changed


def _template_of(path: Path) -> str:
    path = path.expanduser()
    check_file(path, 4 * SOURCE)
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template_path={str(path)!r} cannot be read as UTF-8 text: {error}") from error
    _check_template(source, f"chat_template_path={str(path)!r}")
    return source


def _check_template(source: str, where: str) -> None:
    try:
        _chat_template(source)
    except TemplateError as error:
        raise ConfigError(f"{where} is not a chat template: {error}") from error


def settings_of(tokenizer: Any) -> dict[str, Any]:
    """Return what :func:`with_chat_template` has set: the text of the template (None: its own), and the values."""
    return {"chat_template": getattr(tokenizer, _SET, None), "chat_template_kwargs": getattr(tokenizer, _NAMES, {})}


_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


def apply_chat_template(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tokenize: bool = True,
    add_generation_prompt: bool = False,
    continue_final_message: bool = False,
    **names: Any,
) -> Any:
    """Do what ``tokenizer.apply_chat_template`` does, for text or ids, within bounds on time and memory.

    Raises:
        TemplateError: the template rejects the messages, fails, or exceeds the bounds.
        ValueError: there is no template, or its output does not contain the last message.
        ValueError, TypeError, LookupError: the messages are not what the template expects.
    """
    if not _uses_jinja(tokenizer):
        # Only what is asked for: a tokenizer of another kind may know nothing of the rest.
        asked = {"tools": tools, "continue_final_message": continue_final_message}
        asked = {name: value for name, value in asked.items() if value}
        names = {**getattr(tokenizer, _NAMES, {}), **names, **asked}
        return tokenizer.apply_chat_template(
            messages, tokenize=tokenize, add_generation_prompt=add_generation_prompt, **names
        )
    if not messages:
        raise ValueError("expected at least one message in a conversation, found none")
    render = partial(
        rendered,
        _chat_template(tokenizer.get_chat_template(None, tools)),
        tools=None if tools is None else list(tools),
        documents=None,
        add_generation_prompt=add_generation_prompt,
        **{**tokenizer.special_tokens_map, **getattr(tokenizer, _NAMES, {}), **names},
    )
    text = _continued(render, messages) if continue_final_message else render(messages=list(messages))
    return tokenizer(text, add_special_tokens=False)["input_ids"] if tokenize else text


def _continued(render: Callable[..., str], messages: Sequence[Mapping[str, Any]]) -> str:
    """Return a conversation up to the last character of its last message, which is found by a marker after it."""
    chat = deepcopy([dict(message) for message in messages])
    said = chat[-1]["content"]
    chat[-1]["content"] = said + _TAG
    text = render(messages=chat)
    if said.strip() not in text or _TAG.strip() not in text:
        raise ValueError("the last message does not appear in the template's rendering of the conversation")
    place = text.rindex(_TAG.strip())
    whole = text[place : place + len(_TAG)] == _TAG  # otherwise the template stripped spaces from the end
    return text[:place] if whole else text[:place].rstrip()


def _uses_jinja(tokenizer: Any) -> bool:
    from transformers import PreTrainedTokenizerBase

    method = getattr(type(tokenizer), "apply_chat_template", None)
    return method is PreTrainedTokenizerBase.apply_chat_template


# -- the date that chat templates see: one for a whole run, however long it takes and however often it is resumed -----
#
# Templates such as Llama's write today's date into every prompt (``strftime_now``). With the wall clock, a run that is
# resumed on another day, or that lasts past midnight, would silently sample different completions.


_LONGEST_FORMAT = 1000
_pinned: list[datetime] = []
"""The dates of the runs that this process works on, for all threads; the innermost run comes last."""


@contextmanager
def at_date(date: datetime) -> Iterator[None]:
    """Set the date that chat templates see while the context is open."""
    _pinned.append(date)
    try:
        yield
    finally:
        _pinned.reverse()  # two runs that take turns may end in either order
        _pinned.remove(date)
        _pinned.reverse()


def now() -> datetime:
    """Return the date of the run, local time; without a run, the current date."""
    return _pinned[-1] if _pinned else datetime.now()


def strftime_now(form: str) -> str:
    """Return the date in the format that a chat template asks for."""
    if len(form) > _LONGEST_FORMAT:
        raise ValueError(f"a chat template asks for the date in a format of {len(form)} characters")
    return now().strftime(form)


def asks_for_date(tokenizer: Any) -> bool:
    """Return whether the output of the chat template depends on the date."""
    return "strftime_now" in str(getattr(tokenizer, "chat_template", None))
