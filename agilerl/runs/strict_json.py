"""JSON that every parser reads: sorted keys, ASCII, and no bare NaN.

JSON has no NaN and no infinity, but a diverged agent's loss may be either. Null would not say which of the three it
was, so they are written as the strings "NaN", "Infinity" and "-Infinity" (which ``float()`` and JavaScript's
``Number()`` both understand), and ``loads`` turns these three strings back into floats.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agilerl.checks.validation import sentence
from agilerl.errors import CheckpointError
from agilerl.safety.bounds import check_file

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_FILE_BYTES = 100_000_000
LARGEST = 2**63 - 1

SavedCount = Annotated[int, Field(ge=0, le=LARGEST)]
"""A number of things, or the index of one."""


class SavedValues(BaseModel):
    """Values of a file as written: no conversions, no unknown names."""

    model_config = ConfigDict(extra="forbid", strict=True)


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Return ``value`` as strict JSON with sorted keys; equal values give equal text.

    Accepts dicts, lists, tuples, strings, numbers (numpy's too), paths and None; raises TypeError for anything else.
    """
    separators = (",", ":") if indent is None else (",", ": ")
    return json.dumps(_encode(value), sort_keys=True, allow_nan=False, indent=indent, separators=separators)


def loads(text: str | bytes) -> Any:
    """Return the value that ``dumps`` wrote; raises ValueError for other text."""
    try:
        # Python's parser accepts a bare NaN otherwise.
        return _decode(json.loads(text, parse_constant=_refuse))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_json(path: Path, model: type[BaseModel] | None = None) -> dict[str, Any]:
    """Return the JSON object in a file of at most 100 MB, unchanged, after checking it against a ``model`` if given.

    Raises CheckpointError naming the file and what in it is missing, unknown, of a wrong type or damaged.
    """
    try:
        check_file(path, _FILE_BYTES, error=CheckpointError)
        value = loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"expected the file {path}, but it does not exist.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} should be JSON, but it is not: {error}. The file is damaged.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} should be a JSON object, found a {type(value).__name__}.")
    if model is None:
        return value
    try:
        model.model_validate(value)
    except ValidationError as error:
        raise CheckpointError(
            f"{path} does not hold what this version writes: {sentence(error, model)}; it is damaged, or of another "
            "version of agilerl (run.json names it)"
        ) from None
    return value


def _encode(value: Any) -> Any:
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    if isinstance(value, str | Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    raise TypeError(f"expected a value that JSON can represent, found a {type(value).__name__}: {value!r}")


def _decode(value: Any) -> Any:
    if isinstance(value, str):
        return _NON_FINITE.get(value, value)
    if isinstance(value, dict):
        return {key: _decode(item) for key, item in value.items()}
    return [_decode(item) for item in value] if isinstance(value, list) else value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
