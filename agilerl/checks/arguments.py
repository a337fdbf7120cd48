"""Arguments of public functions and fields of public dataclasses, checked against their annotations.

A public function or method is decorated with :func:`checked`, a public dataclass calls :func:`check_fields`: their
annotations are then the rules, ranges included (``Count``, ``Share``, ``Within``). Internal functions are not checked.
"""

import collections.abc
import difflib
import inspect
import math
import numbers
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache, wraps
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

from agilerl.checks.redaction import without_keys
from agilerl.errors import AgileRLError, ConfigError

P = ParamSpec("P")
R = TypeVar("R")
_LONGEST = 100
_MOST_NAMES, _MOST_NEAR = 12, 2
_LONGEST_REASON = 300


def shown(value: Any) -> str:
    """Return ``repr(value)``, shortened if it would dominate the message."""
    try:
        text = repr(value)
    except Exception as error:  # for instance of a half-initialised object
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    text = without_keys(text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def counted(number: int, noun: str) -> str:
    """Return a number with what it counts: ``1 row``, ``1,200 rows``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def reason(error: BaseException) -> str:
    """Return the beginning of an error's message as one line, its kind in front where that says more."""
    lines = [line.strip() for line in without_keys(str(error)).splitlines() if line.strip()]
    # A line that ends in a colon only announces the next ones.
    count = next((i for i, line in enumerate(lines, 1) if line[-1] not in ":,"), len(lines))
    text = " ".join(lines[:count]).rstrip(".")[:_LONGEST_REASON]
    if not text or isinstance(error, OSError | ValueError | AgileRLError):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for a misspelt name: the nearest known ones, or some of them."""
    names = list(known)
    by_lower = {known_name.lower(): known_name for known_name in names}
    wanted = name[:_LONGEST].lower()
    # A whole word of a name says more than similar letters: "sum" is meant for "chain_sum", not for "tsumego".
    close = (
        [known_name for known_name in by_lower if wanted in known_name.split("_")]
        or difflib.get_close_matches(wanted, by_lower, n=1, cutoff=0.8)
        or [n for n in by_lower if difflib.get_close_matches(wanted, n.split("_"), cutoff=0.8)]
        or difflib.get_close_matches(wanted, by_lower, n=1, cutoff=0.6)
    )
    if close:
        return f"did you mean {' or '.join(repr(by_lower[known_name]) for known_name in close[:_MOST_NEAR])}?"
    if not names:
        return "there are none"
    return f"known: {', '.join(names[:_MOST_NAMES])}{', ...' if len(names) > _MOST_NAMES else ''}"


@dataclass(frozen=True)
class Within:
    """Bounds of a number, as part of its annotation: ``Annotated[int, Within(least=1)]``."""

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def holds(self, value: Any) -> bool:
        """Return whether a number lies within the bounds."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )

    def words(self) -> str:
        """Return the bounds in words that can follow "a number"."""
        low = "" if self.least is None else f" of {self.least:g} or more"
        low += "" if self.above is None else f" above {self.above:g}"
        high = "" if self.most is None else f"at most {self.most:g}"
        high += "" if self.below is None else f"below {self.below:g}"
        return f"{low}{' and ' if low and high else ' of ' if high else ''}{high}"


@dataclass(frozen=True)
class Having:
    """Attributes that an object of another library must have, as part of its annotation."""

    what: str
    """What it is, in words."""
    attributes: tuple[str, ...]
    """Names that every such object has."""
    hint: str = ""
    """What to do."""


@dataclass(frozen=True)
class Hint:
    """What to do about a value that does not fit, as part of its annotation."""

    text: str


_NOT_EMPTY = "not empty, without a zero byte, which system calls do not accept"
_ALSO_NOT_FINITE = "NaN and infinity too"

Number = Annotated[float, _ALSO_NOT_FINITE]
"""A measured number, which may be NaN."""
Whole = Annotated[int, Within(least=0)]
Count = Annotated[int, Within(least=1)]
Seed = Annotated[int, Within(least=0, most=2**63 - 1)]
Share = Annotated[float, Within(least=0, most=1)]
Positive = Annotated[float, Within(above=0)]
NotNegative = Annotated[float, Within(least=0)]
Name = Annotated[str, _NOT_EMPTY]
Location = Annotated[str | os.PathLike[str], _NOT_EMPTY]
"""A path in the file system."""
Tokenizer = Annotated[
    Any,
    Having(
        "a Hugging Face tokenizer",
        ("decode", "eos_token_id", "pad_token_id"),
        "pass AutoTokenizer.from_pretrained(...), or runtime.tokenizer",
    ),
]


class _Misfit(Exception):  # noqa: N818  (never leaves this file)
    """A value does not match an annotation: what was expected, what was found and where in it, what to do."""

    def __init__(self, expected: str, found: Any, hint: str = "", place: str = "") -> None:
        super().__init__(expected)
        self.expected, self.found, self.hint, self.place = expected, found, hint, place

    def refusal(self, owner: str, name: str) -> ConfigError:
        hint = f"; {self.hint}" if self.hint else ""
        found = described(self.found)
        return ConfigError(f"{owner}: expected {self.expected} for {name}{self.place}, found {found}{hint}")

    def inside(self, place: Any) -> "_Misfit":
        """Return the misfit of what has this value at a place."""
        return _Misfit(self.expected, self.found, self.hint, f"[{place}]{self.place}")


def described(value: Any) -> str:
    """Describe a value that was found: numbers and strings as they are, tensors by shape, all else with its type."""
    if value is None or type(value) in (bool, int, float, str):
        return shown(value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if not isinstance(value, type) and isinstance(shape, tuple) and dtype is not None:
        return f"shape {tuple(shape)} of type {type(value).__name__}, {dtype}"
    return f"{shown(value)} of type {type(value).__name__}"


_SIMPLE = (str, int, bool)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check every argument of a public function or method against its annotation before the call.

    Numbers of numpy become Python's. True and False are not numbers, a float is not a whole number, and NaN and
    infinity are not accepted. Raises ConfigError with what was expected, what was found and, if that helps, what to do.
    Missing or unknown arguments raise Python's TypeError, as everywhere, with the nearest name of an unknown one.
    """
    code = function.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    takes_all = bool(code.co_flags & inspect.CO_VARKEYWORDS)
    hints: dict[str, Any] = {}
    exact: list[Any] = []
    """The types of positional arguments that are right as they are, of most calls: some come by the row."""

    def argument(args: tuple[Any, ...], name: str, value: Any) -> Any:
        try:
            return _taken(hints[name], value) if name in hints else value
        except _Misfit as misfit:
            raise misfit.refusal(_called(function, args), name) from None

    @wraps(function)
    def door(*args: P.args, **kwargs: P.kwargs) -> R:
        # Read at the first call, because annotations may name things that are defined further down.
        if len(hints) < len(door.__annotations__):
            hints.update(_hints(door))
            wanted = (hints.get(name, Any) for name in known)
            # No value is of type _Misfit: such an argument always takes the slow way.
            exact.extend(hint if hint is Any or hint in _SIMPLE else _Misfit for hint in wanted)
        if not kwargs and all(kind is Any or type(value) is kind for value, kind in zip(args, exact)):
            return function(*args)  # type: ignore[call-arg]
        for name in () if takes_all else kwargs.keys() - known:
            of = _called(function, args)
            raise TypeError(f"{of} has no argument {name!r}; {nearest(name, [n for n in known if n != 'self'])}")
        named = [argument(args, name, value) for name, value in zip(known[: code.co_argcount], args)]
        rest = args[len(named) :]
        return function(*named, *rest, **{name: argument(args, name, value) for name, value in kwargs.items()})  # type: ignore[arg-type]

    # help() shows those of the innermost function; ``door`` keeps the whole ones, which are the rules.
    bare = {name: _bare(annotation) for name, annotation in function.__annotations__.items()}
    inspect.unwrap(function).__annotations__ = bare
    return door


def check_fields(instance: Any) -> None:
    """Check the fields of a dataclass against their annotations; for its ``__post_init__``.

    Raises ConfigError as :func:`checked` does.
    """
    kind: type = type(instance)
    hints = _field_hints(kind)
    for field in fields(instance):
        if field.init and not field.name.startswith("_"):
            value = getattr(instance, field.name)
            given = taken(hints[field.name], value, type(instance).__name__, field.name)
            # The dataclass may be frozen.
            if given is not value:
                object.__setattr__(instance, field.name, given)


@cache
def _field_hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def taken(annotation: Any, value: Any, owner: str, name: str) -> Any:
    """Return a value, converted as an annotation asks.

    ``owner`` (what was called) and ``name`` (of the argument) begin the ConfigError for a value that does not fit.
    """
    try:
        return _taken(annotation, value)
    except _Misfit as misfit:
        raise misfit.refusal(owner, name) from None


def _called(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return what the user called, in words."""
    owner, _, name = function.__qualname__.rpartition(".")
    if owner and "<locals>" not in owner:
        # The class that the user called, which may have inherited the method.
        holder = args[0] if args and isinstance(args[0], type) else type(args[0]) if args else object
        owner = holder.__name__ if owner in (base.__qualname__ for base in holder.__mro__) else owner
        name = owner if name == "__init__" else f"{owner}.{name}"
    return name


def _bare(annotation: Any) -> Any:
    """Return an annotation without its rules: ``int`` of ``Annotated[int, Within(least=1)]``."""
    if annotation is None or isinstance(annotation, type | str):
        return annotation
    with suppress(NameError):  # a name that is defined further down
        return typing.get_type_hints(types.SimpleNamespace(__annotations__={"": annotation}), {})[""]
    return annotation


def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the annotations of a function; names that only type checkers know are not checked."""
    space = getattr(function, "__globals__", {})
    hints: dict[str, Any] = {}
    for name, annotation in function.__annotations__.items():
        # One at a time: a name that is unknown in one annotation must not leave the others unchecked.
        one = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            hints |= typing.get_type_hints(one, space, include_extras=True)
        except NameError:
            hints[name] = Any
    return hints


def _taken(wanted: Any, value: Any) -> Any:
    if wanted is Any or (type(value) is wanted and wanted in _SIMPLE):
        return value
    origin, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if isinstance(wanted, TypeVar):
        return value if wanted.__bound__ is None else _taken(wanted.__bound__, value)
    if origin is Annotated:
        return _marked(parts[0], parts[1:], value)
    if origin in (typing.Union, types.UnionType):
        return _any_of(parts, value)
    if origin is typing.Literal:
        # By type too, because True == 1 == 1.0.
        if not any(value is part or (type(value) is type(part) and value == part) for part in parts):
            near = nearest(value, [str(part) for part in parts]) if isinstance(value, str) and len(parts) > 3 else ""
            raise _Misfit("one of " + ", ".join(map(repr, parts)), value, near)
        return value
    plain = origin or wanted
    if plain in _PLAIN:
        return _PLAIN[plain](value)
    if plain is collections.abc.Callable:
        if not callable(value):
            raise _Misfit("a function (or another callable)", value)
        return value
    if not isinstance(plain, type) or plain is object:
        return value
    if plain in (dict, Mapping, collections.abc.MutableMapping):
        return _mapping(parts, value)
    if plain in (list, tuple, collections.abc.Sequence, collections.abc.Collection, collections.abc.Iterable):
        return _sequence(plain, parts, value)
    return _instance(plain, value)


def _marked(wanted: Any, marks: tuple[Any, ...], value: Any) -> Any:
    within = next((mark for mark in marks if isinstance(mark, Within)), None)
    hint = next((mark.text for mark in marks if isinstance(mark, Hint)), "")
    try:
        is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        if not (is_number and _ALSO_NOT_FINITE in marks):
            value = _taken(wanted, value)
        for mark in marks:
            _check_mark(wanted, mark, value)
    except _Misfit as misfit:
        bounds = within.words() if within is not None and not misfit.place and misfit.found is value else ""
        expected = misfit.expected if misfit.expected.endswith(bounds) else misfit.expected + bounds
        raise _Misfit(expected, misfit.found, hint or misfit.hint, misfit.place) from None
    return value


def _check_mark(wanted: Any, mark: Any, value: Any) -> None:
    if isinstance(mark, Within) and not mark.holds(value):
        raise _Misfit(_WORDS.get(wanted, "a number"), value)
    if isinstance(mark, Having):
        is_class = isinstance(value, type)
        if is_class or not all(hasattr(value, name) for name in mark.attributes):
            raise _Misfit(mark.what, value, mark.hint)
    if mark == _NOT_EMPTY:
        text = os.fspath(value)
        if not isinstance(text, str) or not text.strip() or "\0" in text:
            raise _Misfit("text that is not empty", value)


def _any_of(parts: tuple[Any, ...], value: Any) -> Any:
    optional = type(None) in parts
    if value is None and optional:
        return None
    misfits: list[_Misfit] = []
    for part in (part for part in parts if part is not type(None)):
        try:
            return _taken(part, value)
        except _Misfit as misfit:
            misfits.append(misfit)
    # What is wrong with an item says more than that the whole matches none of the types.
    inside = next((misfit for misfit in misfits if misfit.place), None)
    if inside is not None:
        raise inside
    words = list(dict.fromkeys(misfit.expected for misfit in misfits)) + (["None"] if optional else [])
    raise _Misfit(", or ".join(words), value, next((misfit.hint for misfit in misfits if misfit.hint), ""))


def _sequence(wanted: Any, parts: tuple[Any, ...], value: Any) -> Any:
    any_order = wanted in (collections.abc.Collection, collections.abc.Iterable)
    needed = ("__iter__",) if any_order else ("__iter__", "__len__", "__getitem__")
    if isinstance(value, str | bytes | Mapping) or not all(hasattr(value, name) for name in needed):
        raise _Misfit(f"a list{_of(parts)}", value)
    if not parts or wanted is collections.abc.Iterable:
        return value
    fixed = wanted is tuple and parts[-1] is not Ellipsis
    if parts[0] is Any and not fixed and isinstance(value, collections.abc.Sequence):
        return value
    try:
        given = list(value)
    except TypeError:  # a tensor or array without dimensions
        raise _Misfit(f"a list{_of(parts)}", value) from None
    if fixed and len(given) != len(parts):
        raise _Misfit(f"{len(parts)} values", value)
    # Scores and tokens come in long lists of one plain type, which are tested as a whole.
    items = given if not fixed and _all_plain(parts[0], given) else _each(parts if fixed else parts[:1], given)
    if wanted is tuple:
        return tuple(items)
    # A list that fits stays the same object; a tensor or an array becomes a list of its rows.
    same = isinstance(value, collections.abc.Sequence) and all(a is b for a, b in zip(given, items))
    return value if same else items


def _each(parts: tuple[Any, ...], given: list[Any]) -> list[Any]:
    """Return items as the annotation of each asks, or as a single one asks of all."""
    items = []
    for index, item in enumerate(given):
        try:
            items.append(_taken(parts[index if len(parts) > 1 else 0], item))
        except _Misfit as misfit:
            raise misfit.inside(index) from None
    return items


def _all_plain(wanted: Any, items: list[Any]) -> bool:
    """Return True if all items match an annotation as they are; False only means that it takes a closer look."""
    if wanted not in (int, str, float, Number):
        return False
    kinds = set(map(type, items))
    if wanted in (int, str):
        return kinds <= {wanted}
    # numpy's float64 is a subclass of float, and stays as it is.
    return all(issubclass(kind, float) for kind in kinds) and (wanted == Number or all(map(math.isfinite, items)))


def _mapping(parts: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise _Misfit("a mapping", value)
    if not parts or parts[1] is Any:  # rows and settings, whose keys are checked when they are read
        return value
    items = {}
    for key, item in value.items():
        try:
            items[_taken(parts[0], key)] = _taken(parts[1], item)
        except _Misfit as misfit:
            raise misfit.inside(shown(key)) from None
    same = all(before is after for before, after in zip(value.values(), items.values()))
    return value if same else items


def _of(parts: tuple[Any, ...]) -> str:
    """Return in words what a list contains, if its annotation says so."""
    words: dict[Any, str] = {int: " of whole numbers", float: " of numbers", str: " of texts"}
    first = parts[0] if parts else None
    named = isinstance(first, type) and first is not object and typing.get_origin(first) is None
    return words.get(first, f" of {first.__name__}" if named and isinstance(first, type) else "")


def _instance(wanted: type, value: Any) -> Any:
    # isinstance() would need a runtime_checkable protocol, and could not say which member is missing.
    if getattr(wanted, "_is_protocol", False):
        missing = [name for name in _members(wanted) if not hasattr(value, name)]
        if missing or isinstance(value, type):
            raise _Misfit(f"a {wanted.__name__}, which has {', '.join(_members(wanted))}", value)
    elif not isinstance(value, wanted):
        raise _Misfit(f"a {wanted.__name__}", value)
    return value


def _members(protocol: type) -> list[str]:
    """Return the names that a protocol requires."""
    names = [
        name
        for base in protocol.__mro__
        if getattr(base, "_is_protocol", False) and base is not typing.Protocol
        for name in [*vars(base), *vars(base).get("__annotations__", {})]
    ]
    return [name for name in dict.fromkeys(names) if not name.startswith("_")]


def _whole(value: Any) -> Any:
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)  # converts numpy's integers; an int stays the same object
    raise _Misfit(_WORDS[int], value)


def _number(value: Any) -> Any:
    with suppress(OverflowError):  # an integer beyond the range of floats
        if isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value):
            return value if isinstance(value, int | float) else float(value)
    raise _Misfit(_WORDS[float], value)


def _flag(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    # By name, because numpy need not be imported for this.
    if type(value).__name__ == "bool" and type(value).__module__ == "numpy":
        return bool(value)
    raise _Misfit(_WORDS[bool], value)


def _of_kind(kind: type, words: str, hint: str = "") -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not isinstance(value, kind):
            raise _Misfit(words, value, hint)
        return value

    return check


_WORDS: dict[Any, str] = {int: "a whole number", float: "a finite number", bool: "True or False", str: "text"}
_PLAIN: dict[Any, Callable[[Any], Any]] = {
    int: _whole,
    float: _number,
    bool: _flag,
    str: _of_kind(str, _WORDS[str]),
    type(None): _of_kind(type(None), "None"),
    os.PathLike: _of_kind(os.PathLike, "a path", "pass a string or a pathlib.Path"),
    Path: _of_kind(os.PathLike, "a path", "pass a string or a pathlib.Path"),
}
