"""EvolvableAlgorithm: identity, checked hyperparameters, and the clone / mutate / checkpoint hooks of every agent."""

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from agilerl import hooks
from agilerl.arguments import Hint, Whole, checked, described, nearest
from agilerl.errors import ConfigError, EngineError
from agilerl.hpo.mutation import Mutation
from agilerl.hpo.parameters import (
    Gene,
    HyperparameterConfig,
    Value,
    check_present,
    check_values,
    genes_in_force,
    moved_into_range,
    values_of,
    with_changes,
)
from agilerl.validation import LARGEST_FLOAT32, checked_numbers, sentence, validated


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

    def __get__(self, agent: "EvolvableAlgorithm | None", owner: type) -> Any:
        if agent is None:
            return self
        value = getattr(agent.config, self.name)
        # Read-only: an entry set in place would escape the checks, and a clone would not have it.
        return MappingProxyType(value) if isinstance(value, dict) else value

    def __set__(self, agent: "EvolvableAlgorithm", value: Any) -> None:
        agent.set_hyperparameters({self.name: value})


class _WhileOpen:
    """An attribute whose value belongs to another agent once its own is cleaned up: reading it then raises."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, agent: "EvolvableAlgorithm | None", owner: type) -> Any:
        if agent is None:
            return self
        agent.check_open()
        return agent.__dict__.get(self.name)

    def __set__(self, agent: "EvolvableAlgorithm", value: Any) -> None:
        agent.__dict__[self.name] = value


def while_open() -> Any:
    """Return an attribute, None until it is set, that raises EngineError after ``clean_up``."""
    return _WhileOpen()


class EvolvableAlgorithm(ABC):
    """An agent that evolution can clone, mutate, save and restore.

    A subclass names its ``algorithm``, or only another ``Config`` for that of its parent; every field of the Config
    becomes a constructor keyword and a checked attribute. Keywords and ``config=`` mean the same and may be mixed,
    keywords winning.
    """

    algorithm: Algorithm = Algorithm("EvolvableAlgorithm", AlgorithmConfig)
    """How the agent learns. It may change, so ask for ``agent.algorithm.name``, not for the class."""
    Config: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    """Hyperparameters of the algorithm that a new agent of this class has."""
    Options: ClassVar[type[BaseModel]] = BaseModel
    """Keywords besides the hyperparameters: settings that agents share."""
    is_open: bool = True
    """False after ``clean_up``, which gives the agent's slots to other agents."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "algorithm" in cls.__dict__:
            cls.Config = cls.algorithm.Config
        else:
            cls.algorithm = replace(cls.algorithm, name=cls.__name__, Config=cls.Config)
        for name, field in cls.Config.model_fields.items():
            if not hasattr(cls, name):
                setattr(cls, name, Hyperparameter(name, field.description))
        cls.__signature__ = _signature(cls)  # type: ignore[attr-defined]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a new one with nearly the name of a hyperparameter is set as well, with a warning."""
        if not (name.startswith("_") or name in self.__dict__ or hasattr(type(self), name)):
            close = get_close_matches(name, self.Config.model_fields, n=1, cutoff=0.8)
            if hint := hooks.hint(name) or (f"did you mean {close[0]!r}?" if close else ""):
                warnings.warn(f"{name} is not a hyperparameter, so setting it changes nothing; {hint}", stacklevel=2)
        super().__setattr__(name, value)

    @checked
    def __init__(
        self,
        *,
        config: AlgorithmConfig | None = None,
        hp_config: Annotated[
            HyperparameterConfig | Mapping[str, Gene] | None,
            Hint("pass HyperparameterConfig(lr=RLParameter(min=1e-6, max=1e-3)), for instance"),
        ] = None,
        index: Whole = 0,
        **hyperparameters: Any,
    ) -> None:
        self.config = self._merge(config, hyperparameters)
        self.hp_config = hp_config
        self.index = index
        self.parent: int | None = None
        """Index of the agent that this one was cloned from; None for a founder."""
        self.mut: str = "None"
        """What the last mutation did, in a few words."""
        self.fitness: list[float] = []
        """Mean exam score of each evaluation."""
        self.scores: list[float] = []
        """Mean training reward of each learning step."""
        self.steps: int = 0
        """Trajectories trained on so far."""
        self._mutation_hooks: list[Callable[[], None]] = []
        if hp_config is not None:
            if moved := moved_into_range(self.genes, self.hyperparameters):
                self.set_hyperparameters(moved)
            check_values(self.genes, self.hyperparameters)

    @classmethod
    def _merge(cls, config: AlgorithmConfig | None, keywords: Mapping[str, Any]) -> AlgorithmConfig:
        for name in keywords:
            if name not in cls.Config.model_fields:
                known = dict.fromkeys([*cls.Config.model_fields, *inspect.signature(cls).parameters])
                hint = (hooks.hint(name) or nearest(name, known)).replace("algorithm.", "")
                raise ConfigError(f"{cls.__name__} has no argument {name!r}; {hint}")
        if config is not None and not isinstance(config, cls.Config):
            raise ConfigError(
                f"{cls.__name__}(config=...): expected a {cls.Config.__name__}, found {described(config)}; give the "
                "hyperparameters that you mean as keywords"
            )
        given = {} if config is None else config.model_dump(exclude_unset=True)
        return validated(cls.Config, {**given, **keywords})

    def __repr__(self) -> str:
        genes = ", ".join(f"{name}={_short(value)}" for name, value in self.hyperparameters.items())
        fitness = f", fitness={self.fitness[-1]:.3f}" if self.fitness else ""
        return f"{self.algorithm.name}(index={self.index}{', ' if genes else ''}{genes}{fitness}, steps={self.steps})"

    # -- hyperparameters ------------------------------------------------------------------------------------------

    @property
    def genes(self) -> dict[str, Gene]:
        """The hyperparameters that may mutate; none without an ``hp_config``."""
        if self.hp_config is None:
            return {}
        if isinstance(self.hp_config, HyperparameterConfig):
            return genes_in_force(self.algorithm.Config, self.hp_config)
        return dict(self.hp_config)

    @property
    def hyperparameters(self) -> dict[str, Value]:
        """Current value of each gene."""
        return values_of(self.config, self.genes)

    @checked
    def set_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Change some hyperparameters together; nothing changes when one of them, or their combination, is invalid.

        ``field.entry`` is one entry of a hyperparameter that is a mapping.
        """
        merged = with_changes(self.config.model_dump(exclude_unset=True), values)
        config = validated(type(self.config), merged)
        check_present(self.genes, values_of(config, self.genes))
        self.config = config

    def check_open(self) -> None:
        """Raise EngineError once the agent has been cleaned up."""
        if not self.is_open:
            raise EngineError(
                f"agent {self.index} was cleaned up: another agent may use its slot, so it cannot act, learn or be "
                "saved any more; clone or save an agent before clean_up(), or make a new one"
            )

    # -- mutation -------------------------------------------------------------------------------------------------

    @checked
    def apply_mutation(self, mutation: Mutation) -> None:
        """Carry out a planned mutation: new values for genes, or an operator on the adapter."""
        if mutation.kind == "hyperparameters":
            self.set_hyperparameters({change.gene: change.new for change in mutation.changes})
            self.mut = ", ".join(f"{c.gene} {_short(c.old)} -> {_short(c.new)}" for c in mutation.changes)
        elif mutation.kind == "none":
            self.mut = "None"
        else:
            self.mut = self._mutate_adapter(mutation)
        self.mutation_hook()

    def _mutate_adapter(self, mutation: Mutation) -> str:
        """Apply a mutation of kind ``parameters`` or ``rank``; returns its label."""
        raise ConfigError(f"{self.algorithm.name} has no adapter for a mutation of kind {mutation.kind!r}")

    @checked
    def register_mutation_hook(self, hook: Callable[[], None]) -> None:
        """Call ``hook()`` after every mutation of this agent."""
        self._mutation_hooks.append(hook)

    def mutation_hook(self) -> None:
        """Run the registered hooks."""
        for hook in self._mutation_hooks:
            hook()

    # -- copies ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def clone(self, index: int | None = None, wrap: bool = True) -> Self:
        """Return an independent copy; its next update is bit-identical to this agent's."""

    @abstractmethod
    def save_checkpoint(self, path: str | Path, lora_only: bool = True, save_optimizer: bool = True) -> None:
        """Write the agent into a folder."""

    @abstractmethod
    def load_checkpoint(self, path: str | Path, load_optimizer: bool = False) -> None:
        """Overwrite this agent's weights with those of a checkpoint folder."""


def _signature(cls: type[EvolvableAlgorithm]) -> inspect.Signature:
    """Return the constructor's signature with every hyperparameter spelled out."""
    parameters: dict[str, inspect.Parameter] = {}
    for base in cls.__mro__:  # the most derived first
        init = base.__dict__.get("__init__")
        if init is None or not issubclass(base, EvolvableAlgorithm):
            continue
        for name, parameter in inspect.signature(init).parameters.items():
            if name != "self" and parameter.kind is not inspect.Parameter.VAR_KEYWORD:
                parameters.setdefault(name, parameter)
    for name, field in (cls.Config.model_fields | cls.Options.model_fields).items():
        parameters[name] = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=field.get_default(call_default_factory=True)
        )
    return inspect.Signature(sorted(parameters.values(), key=lambda p: p.kind))


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
