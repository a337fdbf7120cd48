"""What an algorithm is: a name, and hyperparameters that are declared once, as the fields of its Config."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from agilerl.checks.validation import LARGEST_FLOAT32, checked_numbers, sentence, set_values, validated
from agilerl.errors import ConfigError
from agilerl.hpo.parameters import with_changes


class AlgorithmConfig(BaseModel):
    """Hyperparameters of an algorithm: each declared once, with its bounds, default and evolution range."""

    model_config = ConfigDict(
        extra="forbid", validate_assignment=True, use_attribute_docstrings=True, allow_inf_nan=False
    )

    _numbers = field_validator("*", mode="wrap")(checked_numbers)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(sentence(error, type(self))) from error

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except ValidationError as error:
            raise ConfigError(sentence(error, type(self))) from error

    def changed(self, values: Mapping[str, Any], where: str = "") -> Self:
        """Return a checked copy with other values; ``field.entry`` is one entry of a mapping."""
        return validated(type(self), with_changes(set_values(self), values), where)

    @field_validator("*")
    @classmethod
    def _fits_tensors(cls, value: Any) -> Any:
        for number in value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and abs(number) > LARGEST_FLOAT32:
                raise ValueError(f"expected a number that float32 holds (up to 3.4e38), found {number:g}")
        return value


@dataclass(frozen=True)
class Algorithm:
    """How an agent learns: a name, and its hyperparameters."""

    name: str
    """Its name in states, journals and messages; a key of ``agilerl.algorithms.ALGORITHMS``."""
    Config: type[AlgorithmConfig]


class Hyperparameter:
    """``agent.lr`` reads and writes ``agent.config.lr``, so a change is checked and every consumer sees it."""

    def __init__(self, name: str, doc: str | None) -> None:
        self.name, self.__doc__ = name, doc

    def __get__(self, agent: Any, owner: type) -> Any:
        if agent is None:
            return self
        value = getattr(agent.config, self.name)
        # Read-only: an entry set in place would escape the checks, and a clone would not have it.
        return MappingProxyType(value) if isinstance(value, dict) else value

    def __set__(self, agent: Any, value: Any) -> None:
        agent.set_hyperparameters({self.name: value})


class _WhileOpen:
    """An attribute whose value belongs to another agent once its own is cleaned up: reading it then raises."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, agent: Any, owner: type) -> Any:
        if agent is None:
            return self
        agent.check_open()
        # Under the same name: a descriptor with __set__ is asked before the dictionary of the agent.
        return agent.__dict__.get(self.name)

    def __set__(self, agent: Any, value: Any) -> None:
        agent.__dict__[self.name] = value


def while_open() -> Any:
    """Return an attribute, None until it is set, that raises EngineError after ``clean_up``."""
    return _WhileOpen()
