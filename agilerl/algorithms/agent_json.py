"""What ``agent.json`` may hold: checked whole before any of it is used, for the file may come from a stranger."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from agilerl.errors import CheckpointError
from agilerl.models import adapters
from agilerl.runs import strict_json
from agilerl.validation import sentence, shown

__all__ = ["Count", "SavedValues", "checked", "like", "read_agent_json"]

_LARGEST = 2**63 - 1

Count = Annotated[int, Field(ge=0, le=_LARGEST)]
"""A number of things, or the index of one."""


class SavedValues(BaseModel):
    """Values as they were written: no conversions, no unknown names."""

    model_config = ConfigDict(extra="forbid", strict=True)


_Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Gene(SavedValues):
    name: str
    dtype: Literal["float", "int", "choice"]
    min: Annotated[float, Field(allow_inf_nan=False)]
    max: Annotated[float, Field(allow_inf_nan=False)]
    scale: Literal["log", "linear", "choice"]
    choices: list[float | int | str | bool]
    step: Annotated[float, Field(gt=0, le=1)]
    resample: Annotated[float, Field(ge=0, le=1)]
    factors: Annotated[list[_Factor], Field(min_length=2, max_length=2)] | None

    @model_validator(mode="after")
    def _has_a_range(self) -> Self:
        if self.dtype == "choice":
            if not self.choices:
                raise ValueError("expected choices, found none")
        elif not self.min < self.max or (self.scale == "log" and self.min <= 0) or self.scale == "choice":
            raise ValueError(f"expected a range for the scale {self.scale}, found [{self.min:g}, {self.max:g}]")
        return self


class _Lora(SavedValues):
    r: Annotated[int, Field(ge=1, le=adapters.LARGEST_RANK)]
    lora_alpha: Annotated[float, Field(ge=adapters.LEAST_ALPHA, le=adapters.MOST_ALPHA)]
    use_rslora: bool


class _Pad(SavedValues):
    pad_token: str | None
    pad_token_id: Count | None


class _Schedule(SavedValues):
    num_epochs: Annotated[int, Field(ge=1, le=_LARGEST)]
    warmup_proportion: Annotated[float, Field(ge=0, lt=1)]


class _Agent(SavedValues):
    algorithm: str
    base: str
    config: dict[str, Any]
    genes: dict[str, _Gene]
    lora: _Lora
    pad: _Pad
    schedule: _Schedule | None
    counters: dict[str, Any]
    optimizer_steps: Annotated[float, Field(ge=0, le=2**53)]
    own_loss: str | None


def read_agent_json(path: Path) -> dict[str, Any]:
    """Return the checked content of an ``agent.json``.

    Raises CheckpointError that names what is missing, unknown or of another type.
    """
    values = strict_json.read_json(path)
    checked(_Agent, values, path)
    return values


def checked(model: type[BaseModel], values: dict[str, Any], path: Path) -> None:
    """Raise CheckpointError unless the values of a file are those of a model."""
    try:
        model.model_validate(values)
    except ValidationError as error:
        raise CheckpointError(
            f"{path} does not hold what this version writes: {sentence(error, model)}; it is damaged, or of another "
            "version of agilerl (run.json names it)"
        ) from None


def like(found: Any, example: Any, name: str) -> Any:
    """Return a counter that was saved; raises CheckpointError unless it is of the kind of a new agent's."""
    if not _is_like(found, example):
        raise CheckpointError(f"the saved counter {name} of an agent should be like {example!r}, found {shown(found)}")
    return found


def _is_like(found: Any, example: Any) -> bool:
    if isinstance(example, dict):
        same = isinstance(found, dict) and set(found) == set(example)
        return same and all(_is_like(found[key], example[key]) for key in example)
    if isinstance(example, list):
        return isinstance(found, list) and all(isinstance(item, str) or _is_like(item, 0.0) for item in found)
    if isinstance(example, bool | str):
        return type(found) is type(example)
    if isinstance(example, float) and isinstance(found, float):
        return True
    return (found is None and example is None) or (type(found) is int and 0 <= found <= _LARGEST)
