"""Pydantic's findings as sentences: what was expected, what was found, what to do."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from agilerl.errors import ConfigError

__all__ = ["nearest", "sentence", "validated"]

Model = TypeVar("Model", bound=BaseModel)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for a misspelt name: the nearest known one, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def validated(model: type[Model], values: Mapping[str, Any], where: str = "") -> Model:
    """Build a pydantic model; raise ConfigError with one sentence a mistake. ``where`` prefixes the key."""
    try:
        return model(**values)
    except ValidationError as error:
        raise ConfigError(sentence(error, model, where)) from None


def sentence(error: ValidationError, model: type[BaseModel], where: str = "") -> str:
    """Turn a validation error into sentences that name the key and, for an unknown one, the nearest known key."""
    found = []
    for item in error.errors():
        path = [str(part) for part in item["loc"]]
        key = ".".join([where, *path] if where else path) or model.__name__
        if item["type"] == "extra_forbidden":
            owner = _model_at(model, path[:-1])
            found.append(f"unknown key {key!r}; {nearest(path[-1], owner.model_fields)}")
        elif item["type"] == "missing":
            found.append(f"{key} is required and has no value")
        elif item["type"] == "value_error":
            found.append(str(item["ctx"]["error"]) if not path else f"{key}: {item['ctx']['error']}")
        else:
            message = item["msg"][0].lower() + item["msg"][1:]
            found.append(f"{key}: {message}, found {item['input']!r}")
    return "; ".join(dict.fromkeys(found))


def _model_at(model: type[BaseModel], path: Iterable[str]) -> type[BaseModel]:
    """Follow field names down to the nested model whose keys were expected."""
    for name in path:
        field = model.model_fields.get(name)
        annotation = field.annotation if field is not None else None
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        nested = [c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)]
        if not nested:
            return model
        model = nested[0]
    return model
