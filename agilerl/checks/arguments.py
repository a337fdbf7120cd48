"""Arguments of public functions and fields of public dataclasses, checked by pydantic against their annotations.

A public function or method is decorated with :func:`checked`, a public dataclass calls :func:`check_fields`: their
annotations are then the rules, ranges included (``Count``, ``Annotated[int, Field(ge=2)]``). Internal functions are not
checked.
"""

import collections.abc
import difflib
import inspect
import os
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache, reduce, wraps
from operator import or_
from typing import Annotated, Any, ParamSpec, TypeVar

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, GetPydanticSchema, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError, core_schema

from agilerl.checks.redaction import without_keys
from agilerl.errors import AgileRLError, ConfigError
from agilerl.gone import keyword_instead

P = ParamSpec("P")
R = TypeVar("R")
Check = Callable[[Any], Any]
_MOST_NAMES, _MOST_NEAR, _LONGEST, _LONGEST_REASON = 12, 2, 100, 300


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
class Having:
    """Attributes that an object of another library must have, as part of its annotation."""

    what: str
    """What it is, in words."""
    attributes: tuple[str, ...]
    """Names that every such object has."""
    hint: str = ""
    """What to do."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(self._checked)

    def _checked(self, value: Any) -> Any:
        if isinstance(value, type) or not all(hasattr(value, name) for name in self.attributes):
            raise PydanticCustomError("having", "{what}", {"what": self.what})
        return value


@dataclass(frozen=True)
class Hint:
    """What to do about a value that does not fit, as part of its annotation."""

    text: str


def _not_empty(value: Any) -> Any:
    text = os.fspath(value)
    # System calls do not accept a zero byte.
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise PydanticCustomError("empty", "text that is not empty")
    return value


Number = Annotated[float, Field(allow_inf_nan=True)]
"""A measured number, which may be NaN."""
Whole = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Share = Annotated[float, Field(ge=0, le=1)]
Fraction = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Name = Annotated[str, AfterValidator(_not_empty)]
Location = Annotated[str | os.PathLike[str], AfterValidator(_not_empty)]
"""A path in the file system."""
Tokenizer = Annotated[
    Any,
    Having(
        "a Hugging Face tokenizer",
        ("decode", "eos_token_id", "pad_token_id"),
        "pass AutoTokenizer.from_pretrained(...), or runtime.tokenizer",
    ),
]
Accelerator = Annotated[
    Any, Having("an accelerate.Accelerator", ("process_index", "num_processes"), "pass accelerate.Accelerator()")
]


def described(value: Any) -> str:
    """Describe a value that was found: numbers and strings as they are, tensors by shape, all else with its type."""
    if value is None or type(value) in (bool, int, float, str):
        return shown(value)
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if not isinstance(value, type) and isinstance(shape, tuple) and dtype is not None:
        return f"shape {tuple(shape)} of type {type(value).__name__}, {dtype}"
    return f"{shown(value)} of type {type(value).__name__}"


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check every argument of a public function or method against its annotation before the call.

    An argument is handed on as it is, but for numbers and arrays of numpy, which become Python's, and for lists that
    are to be tuples. True and False are not numbers, a float is not a whole number, and NaN and infinity are not
    accepted. Raises ConfigError with what was expected, what was found and, if that helps, what to do. Missing or
    unknown arguments raise Python's TypeError, as everywhere, with the nearest name of an unknown one.
    """
    code = function.__code__
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    takes_all = bool(code.co_flags & inspect.CO_VARKEYWORDS)
    hints: dict[str, Any] = {}
    checks: dict[str, Check] = {}

    def argument(args: tuple[Any, ...], name: str, value: Any) -> Any:
        if name not in checks:
            checks[name] = _check_of(hints.get(name, Any))
        try:
            return _taken(checks[name], value)
        except ValidationError as error:
            raise _refusal(error, hints[name], value, _called(function, args), name) from None

    @wraps(function)
    def door(*args: P.args, **kwargs: P.kwargs) -> R:
        # Read at the first call, because annotations may name things that are defined further down.
        if len(hints) < len(door.__annotations__):
            hints.update(_hints(door))
        for name in () if takes_all else kwargs.keys() - known:
            hint = keyword_instead(name) or nearest(name, [n for n in known if n != "self"])
            raise TypeError(f"{_called(function, args)} has no argument {name!r}; {hint}")
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
        return _taken(_check_of(annotation), value)
    except ValidationError as error:
        raise _refusal(error, annotation, value, owner, name) from None


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
    """Return an annotation without its rules: ``int`` of ``Count``."""
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


def _no_text(value: Any) -> Any:
    if isinstance(value, str | bytes):
        raise PydanticCustomError("list_type", "a list")
    return value


_CONTAINERS: dict[Any, tuple[Any, ...]] = {
    list: (Sequence, BeforeValidator(_no_text)),
    Sequence: (Sequence, BeforeValidator(_no_text)),
    tuple: (tuple, Field(strict=False)),
    collections.abc.Collection: (set, Field(strict=False)),
    dict: (Mapping,),
    Mapping: (Mapping,),
}
"""What is taken for a container, by its annotation."""
_AS_THEY_ARE = (Any, int, float, bool, str, type(None), object, collections.abc.Callable, Iterable)


@cache
def _check_of(hint: Any) -> Check:
    return TypeAdapter(_rule(hint), config=ConfigDict(strict=True, allow_inf_nan=False)).validator.validate_python


def _rule(hint: Any) -> Any:
    """Return an annotation as pydantic shall read it: containers of any kind, objects as they are."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return Annotated[(_rule(parts[0]), *parts[1:])]
    if isinstance(hint, TypeVar):
        return _rule(hint.__bound__ or Any)
    if origin in (typing.Union, types.UnionType):
        return reduce(or_, map(_rule, parts))
    kind: Any = origin or hint
    if kind in _CONTAINERS:
        container, *rules = _CONTAINERS[kind]
        inner = tuple(part if part is ... else _rule(part) for part in parts)
        return Annotated[(container[inner] if inner else container, *rules, "")]
    if not isinstance(kind, type) or kind in _AS_THEY_ARE:
        return hint
    # isinstance() would need a runtime_checkable protocol, and could not say which member is missing.
    if getattr(kind, "_is_protocol", False):
        members = _members(kind)
        return Annotated[Any, Having(f"a {kind.__name__}, which has {', '.join(members)}", members)]
    # Pydantic would build a dataclass of a mapping.
    return Annotated[Any, GetPydanticSchema(lambda _source, _handler: core_schema.is_instance_schema(kind))]


def _members(protocol: type) -> tuple[str, ...]:
    """Return the names that a protocol requires."""
    names = [
        name
        for base in protocol.__mro__
        if getattr(base, "_is_protocol", False) and base is not typing.Protocol
        for name in [*vars(base), *vars(base).get("__annotations__", {})]
    ]
    return tuple(name for name in dict.fromkeys(names) if not name.startswith("_"))


def _taken(check: Check, value: Any) -> Any:
    try:
        new = check(value)
    except ValidationError as error:
        original, value = value, _plain(_listed(value))
        try:
            new = check(value)
        except ValidationError as again:
            raise (error if isinstance(original, list | tuple | Mapping) else again) from None
    # Objects, and the lists that hold them, stay the same ones.
    return new if isinstance(new, tuple) or _of_numpy(value) else value


def _listed(value: Any) -> Any:
    """Return what can be indexed as a list, as one: an array, a tensor, a dataset."""
    is_list = hasattr(value, "__len__") and hasattr(value, "__getitem__")
    if is_list and not isinstance(value, list | tuple | str | bytes | Mapping | type):
        with suppress(TypeError):  # a tensor without dimensions
            return list(value)
    return value


def _plain(value: Any) -> Any:
    """Return Python's own numbers for those of numpy, also in lists and mappings."""
    if isinstance(value, list | tuple):
        return [*map(_plain, value)]
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    return value.tolist() if _of_numpy(value) else value


def _of_numpy(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return any(kind.__module__ == "numpy" and hasattr(kind, "tolist") for kind in set(map(type, items)))


_WORDS = {
    "int_type": "a whole number",
    **dict.fromkeys(("float_type", "finite_number"), "a finite number"),
    "bool_type": "True or False",
    "string_type": "text",
    "none_required": "None",
    "callable_type": "a function (or another callable)",
    **dict.fromkeys(("tuple_type", "list_type", "set_type", "Sequence"), "a list"),
    "missing": "more values",
    "too_long": "{max_length} values",
    **dict.fromkeys(("dict_type", "mapping_type", "Mapping"), "a mapping"),
    "greater_than_equal": "a number of {ge:g} or more",
    "greater_than": "a number above {gt:g}",
    "less_than_equal": "a number of at most {le:g}",
    "less_than": "a number below {lt:g}",
    "literal_error": "one of {expected}",
    "is_instance_of": "a {class}",
    "PathLike": "a path",
}
"""What was expected, by the type of pydantic's error, or the class that it names."""


def _refusal(error: ValidationError, hint: Any, value: Any, owner: str, name: str) -> ConfigError:
    """Return an error of pydantic as one sentence."""
    misfits = [(_at(value, item["loc"]), item) for item in error.errors()]
    # What is wrong with an item says more than that the whole matches none of the types.
    depth = max(len(path) for path, _ in misfits)
    misfits = [misfit for misfit in misfits if len(misfit[0]) == depth]
    deepest, first = misfits[0]
    words = list(dict.fromkeys(_expected(item) for path, item in misfits if path == deepest))
    if not depth and type(None) in typing.get_args(hint):
        words.append("None")
    where = "".join(f"[{shown(part)}]" for part in deepest)
    return ConfigError(
        f"{owner}: expected {', or '.join(words)} for {name}{where}, found {described(first['input'])}"
        + "".join(f"; {text}" for text in [*_to_do(hint)][:1])
    )


def _at(value: Any, location: Iterable[str | int]) -> list[Any]:
    """Return where in a value an error is: pydantic names the members of a union in between."""
    path = []
    for part in location:
        with suppress(TypeError, LookupError):
            value = value[part]
            path.append(part)
    return path


def _expected(item: Any) -> str:
    """Return what one error of pydantic expected."""
    about = item.get("ctx", {})
    words = _WORDS.get(about.get("class", ""), _WORDS.get(item["type"], "{msg}"))
    return words.format(msg=item["msg"].removeprefix("Input should be "), **about)


def _to_do(hint: Any) -> Iterable[str]:
    """Return what an annotation says to do about a value that does not fit."""
    marks = getattr(hint, "__metadata__", ())
    yield from (mark.text for mark in marks if isinstance(mark, Hint))
    yield from (mark.hint for mark in marks if isinstance(mark, Having) and mark.hint)
    for part in typing.get_args(hint):
        yield from _to_do(part)
