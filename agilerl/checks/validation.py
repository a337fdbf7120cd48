"""Pydantic's errors as sentences: what was expected, what was found, what to do."""

import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
)

from agilerl.checks.arguments import nearest, shown
from agilerl.errors import ConfigError
from agilerl.gone import instead

Model = TypeVar("Model", bound=BaseModel)
Built = TypeVar("Built")

LARGEST_FLOAT32 = 3.4e38
"""Most numbers end up in a float32 tensor, which rejects larger ones or makes them infinite."""
_MOST_FINDINGS = 20


def validated(model: type[Model], values: Mapping[str, Any], where: str = "") -> Model:
    """Build a pydantic model; raise ConfigError with one sentence per mistake. ``where`` prefixes the key.

    Pydantic's conversions are allowed (``"1e-5"`` is a number), except that true and false are not numbers.
    """
    try:
        return model(**values)
    except ValidationError as error:
        raise ConfigError(sentence(error, model, where)) from None
    except ConfigError as error:  # from a model whose constructor users may also call, which does not know ``where``
        if isinstance(error.__cause__, ValidationError):
            raise ConfigError(sentence(error.__cause__, model, where)) from None
        raise


def checked_numbers(given: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    """Convert as pydantic does, and refuse booleans that became numbers, and integers beyond 64 bits."""
    converted = handler(given)
    if wrong := list(_wrong_numbers(given, converted)):
        raise ValidationError.from_exception_data(
            "numbers",
            [{"type": "value_error", "loc": loc, "input": given, "ctx": {"error": reason}} for loc, reason in wrong],
        )
    return converted


class Settings(BaseModel):
    """Settings by name, of which it is known whether they were set: an unknown name, infinity and NaN are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    # Pydantic makes 1 of true, and takes integers of any size.
    _numbers = field_validator("*", mode="wrap")(checked_numbers)

    @classmethod
    def names(cls) -> list[str]:
        """Return the names that a manifest may give; a field that is excluded from dumps is for Python alone."""
        return [name for name, field in cls.model_fields.items() if not field.exclude]

    def is_set(self, *names: str) -> bool:
        """Return whether one of these was set, be it to its default."""
        return is_set(self, *names)

    def set_values(self, mode: Literal["python", "json"] = "python") -> dict[str, Any]:
        """Return what was set, without defaults: one that is written out could contradict another setting."""
        return set_values(self, mode)


def is_set(model: BaseModel, *names: str) -> bool:
    """Return whether one of these fields of a model was set."""
    return not model.model_fields_set.isdisjoint(names)


def set_values(model: BaseModel, mode: Literal["python", "json"] = "python") -> dict[str, Any]:
    """Return what was set of a model, without defaults."""
    return model.model_dump(mode=mode, exclude_unset=True)


class PythonSettings(Settings):
    """Settings that Python makes as well: arguments without a name are the fields in their order.

    Raises ConfigError for wrong values.
    """

    def __init__(self, *positional: Any, **settings: Any) -> None:
        try:
            super().__init__(**dict(zip(type(self).model_fields, positional)), **settings)
        except ValidationError as error:
            raise ConfigError(sentence(error, type(self))) from error


def _wrong_numbers(given: Any, converted: Any, *loc: str | int) -> Iterator[tuple[tuple[str | int, ...], ValueError]]:
    # Before the integers, because bool is a subclass of int.
    if isinstance(given, bool):
        if isinstance(converted, int | float) and not isinstance(converted, bool):
            yield loc, ValueError("input should be a number, found a boolean")
    elif isinstance(given, int):  # torch and numpy hold no larger ones
        if not -(2**63) <= given < 2**63:
            yield loc, ValueError("expected a number that fits into 64 bits")
    elif isinstance(given, Mapping) and isinstance(converted, Mapping):
        for key in given.keys() & converted.keys():
            yield from _wrong_numbers(given[key], converted[key], *loc, key)
    elif isinstance(given, list | tuple) and isinstance(converted, list | tuple):
        for index, (before, after) in enumerate(zip(given, converted)):
            yield from _wrong_numbers(before, after, *loc, index)


def rebuilt(kind: type[Built], data: Mapping[str, Any], what: str) -> Built:
    """Return a dataclass from plain data, nested ones included; raises ConfigError, with ``what`` it is, for others."""
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ConfigError(f"Expected {what}, found {shown(dict(data))} ({reason})") from None


def sentence(error: ValidationError, model: type[BaseModel], where: str = "") -> str:
    """Turn a validation error into sentences that name the key and, for an unknown key, the nearest known one."""
    by_key: dict[str, list[str]] = {}
    ranks: dict[str, tuple[bool, int]] = {}
    for item in error.errors()[:_MOST_FINDINGS]:
        path, owner = _follow(model, item["loc"])
        key = ".".join([where, *path] if where else path) or model.__name__
        if item["type"] == "extra_forbidden":
            names = owner.names() if issubclass(owner, Settings) else owner.model_fields
            text = unknown_key(key, _in_a_section(path[-1], owner) or nearest(path[-1], names))
        elif item["type"] == "missing":
            text = f"{key} is required and has no value"
        elif item["type"] in ("model_type", "dict_type"):
            text = f"{key}: expected a mapping of settings, found {shown(item['input'])}"
        elif item["type"] == "value_error":
            text = str(item["ctx"]["error"]) if not path else f"{key}: {item['ctx']['error']}"
        else:
            message = item["msg"][0].lower() + item["msg"][1:]
            text = f"{key}: {message}, found {shown(item['input'])}"
        # A union has an error for each of its types: one about the value says more than one about the type, and one
        # about an item more than one about the whole. Of types that fit equally little, all are named.
        rank = (not item["type"].endswith(("_type", "_parsing")), len(item["loc"]))
        if key not in by_key or rank > ranks[key]:
            by_key[key], ranks[key] = [text], rank
        elif rank == ranks[key] and text.startswith(f"{key}: input should be "):
            by_key[key].append(text.removeprefix(f"{key}: input should be "))
    sentences = dict.fromkeys(
        " or ".join([*(text.rpartition(", found ")[0] for text in texts[:-1]), texts[-1]]) for texts in by_key.values()
    )
    return "; ".join(sentences) + ("; and more" if error.error_count() > _MOST_FINDINGS else "")


def unknown_key(key: str, hint: str) -> str:
    """Return what is wrong with a key: it has gone, or there is none of this name, and ``hint`` says what was meant."""
    return instead(key) or f"unknown key {shown(key)}; {hint}"


def _in_a_section(key: str, model: type[BaseModel]) -> str:
    """Return a hint if a section of the model has the key, which was given without it."""
    homes = [
        f"'{name}.{key}'"
        for name, field in model.model_fields.items()
        if key in getattr(_plain(field.annotation), "model_fields", {})
    ]
    return f"did you mean {' or '.join(homes)}?" if homes else ""


def _follow(model: type[BaseModel], location: Iterable[str | int]) -> tuple[list[str], type[BaseModel]]:
    """Return the keys that the user wrote, without the names of a union's types, and the model of the last key."""
    path: list[str] = []
    owner, inside = model, typing.cast(Any, model)
    for part in location:
        if isinstance(inside, type) and issubclass(inside, BaseModel):
            owner = inside
            field = owner.model_fields.get(str(part))
            inside = None if field is None else _plain(field.annotation)
        elif typing.get_origin(inside) in (dict, list) and typing.get_args(inside):
            inside = _plain(typing.get_args(inside)[-1])
        elif isinstance(part, str):
            # Pydantic names the type of a union here, which the user did not write.
            break
        path.append(str(part))
    return path, owner


def _plain(annotation: Any) -> Any:
    """Strip ``Annotated`` and ``| None`` from an annotation."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _plain(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        parts = [part for part in typing.get_args(annotation) if part is not type(None)]
        return _plain(parts[0]) if len(parts) == 1 else annotation
    return annotation


# -- settings that change nothing, because of another one -------------------------------------------------------------


@dataclass(frozen=True)
class Needs:
    """Mark a setting that has an effect only with another: ``kl_horizon: Annotated[int, Needs("kl_target")] = 10_000``.

    ``setting`` is the path of the other one, from the same section or from the whole manifest. It must be one of
    ``values``; without these it must be on: neither 0, False, None nor empty. ``why`` is what to say if it is not; it
    may name parts of the manifest, as ``{whole.training.pop_size}``. A setting that is ``off`` asks for nothing.
    """

    setting: str
    values: tuple[Any, ...] = ()
    why: str = ""
    off: Any = None

    def unmet(self, section: BaseModel, where: str, whole: object) -> str:
        """Return why a setting of this section has no effect; empty if it has one."""
        scope = section if hasattr(section, self.setting.partition(".")[0]) else whole
        value = attrgetter(self.setting)(scope)
        listed = value if isinstance(value, list | tuple) else [value]
        if any(one in self.values for one in listed) if self.values else value:
            return ""
        if self.why:
            return self.why.format(whole=whole)
        name = self.setting if scope is whole else f"{where}.{self.setting}"
        state = "not set" if value is None else str(value).lower() if isinstance(value, bool) else value or 0
        if self.values:
            return f"only if {name} is {' or '.join(map(str, self.values))}, and it is {state}"
        return f"only with {name}, which is {state}"


def idle(section: BaseModel, where: str, whole: object, evolving: Collection[str] = ()) -> dict[str, str]:
    """Return why settings of a section, and of those in it, that differ from their defaults have no effect, by path.

    ``whole`` is the manifest. What is ``evolving`` may become anything.
    """
    reasons: dict[str, str] = {}
    for name, field in type(section).model_fields.items():
        value, path = getattr(section, name), f"{where}.{name}" if where else name
        if isinstance(value, BaseModel):
            reasons |= idle(value, path, whole, evolving=evolving)
        # validated_data: pydantic refuses to call a factory that takes the other fields without it.
        if value == field.get_default(call_default_factory=True, validated_data={}):
            continue
        needs = [one for one in field.metadata if isinstance(one, Needs) and one.setting not in evolving]
        if unmet := next(filter(None, (one.unmet(section, where, whole) for one in needs if value != one.off)), ""):
            reasons[path] = unmet
    return reasons


def grouped(reasons: Mapping[str, str]) -> list[str]:
    """Return a sentence for each reason, with the settings that it is about."""
    return [
        f"{', '.join(path for path, why in reasons.items() if why == reason)}: {reason}"
        for reason in dict.fromkeys(reasons.values())
    ]
