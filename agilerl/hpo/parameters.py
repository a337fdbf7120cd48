"""Which hyperparameters may evolve, and in which range: declared once, at the hyperparameter itself."""

import math
import types
import typing
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from agilerl.checks.arguments import Fraction, Hint, Positive, Share, check_fields, nearest, taken
from agilerl.errors import ConfigError

Value = float | int | str | bool
Scale = Literal["log", "linear", "choice"]
Way = Literal["up", "down"]


@dataclass(frozen=True, slots=True)
class Evolve:
    """Mark a field as evolvable: ``beta: Annotated[float, Field(ge=0), Evolve(1e-4, 1e-2)] = 0.001``.

    On a field that maps names to numbers it is the range of each entry, and the gene of one is called ``field.entry``.
    The range is inclusive. ``scale="log"`` needs ``min > 0`` and moves by factors, ``"linear"`` by differences and
    ``"choice"`` picks another of ``choices`` (read from the annotation for a bool or a ``Literal`` field).
    ``step`` is the scale of one mutation as a share of the range, ``resample`` the probability of a new draw from it.
    ``unless_named=False`` declares a range for those who name the gene; otherwise the field does not evolve.
    Raises ConfigError if the range is empty, not finite, or does not suit the scale.
    """

    min: float | None = None
    max: float | None = None
    scale: Scale = "log"
    choices: tuple[Value, ...] | None = None
    step: Fraction = 0.1
    resample: Share = 0.1
    unless_named: bool = True

    def __post_init__(self) -> None:
        check_fields(self)
        if self.choices is not None:
            # The dataclass is frozen.
            object.__setattr__(self, "scale", "choice")
        if self.scale == "choice" and (self.min is not None or self.max is not None):
            raise ConfigError("Evolve: a choice takes `choices`, not `min` and `max`; remove one of the two.")
        # Without choices they are those of the field (a bool, a Literal), which is not known here.
        if self.scale != "choice" or self.choices is not None:
            # For its checks, at the declaration and not at the first agent.
            self.gene("Evolve", "float", self.choices or ())

    def gene(self, name: str, dtype: Literal["float", "int"], choices: tuple[Value, ...]) -> "Gene":
        """Return the gene of this range, or of these choices if it has none."""
        if self.scale == "choice":
            return Gene(name, "choice", scale="choice", choices=choices, step=self.step, resample=self.resample)
        if self.min is None or self.max is None:
            raise ConfigError(f"{name}: a range needs min and max, found min={self.min}, max={self.max}.")
        return Gene(name, dtype, float(self.min), float(self.max), self.scale, step=self.step, resample=self.resample)


@dataclass(frozen=True, slots=True)
class Gene:
    """A hyperparameter as evolution sees it: a name, a range (or choices) and how a mutation moves it."""

    name: str
    dtype: Literal["float", "int", "choice"]
    min: float = 0.0
    max: float = 1.0
    scale: Scale = "log"
    choices: tuple[Value, ...] = ()
    step: Fraction = 0.1
    resample: Share = 0.1
    factors: tuple[Positive, Positive] | None = None
    """(shrink, grow): the documented multiplicative kernel of RLParameter; None: the heavy-tailed one."""
    monotone: Way | None = None
    """The one way that mutations move the value; None: both."""

    def __post_init__(self) -> None:
        check_fields(self)
        low, high = self.min, self.max
        if self.dtype == "choice":
            if len(set(self.choices)) < max(2, len(self.choices)):
                raise ConfigError(f"{self.name}: a choice needs at least two different choices, found {self.choices!r}")
        elif not low < high:
            raise ConfigError(f"{self.name}: min must be below max, found min={low}, max={high}.")
        elif self.dtype == "int" and (low != round(low) or high != round(high)):
            raise ConfigError(f"{self.name}: an integer range needs integer bounds, found [{low}, {high}].")
        elif self.scale == "choice":
            raise ConfigError(f"{self.name}: scale='choice' is for dtype='choice'; use scale='linear' or 'log'")
        elif self.scale == "log" and low <= 0:
            raise ConfigError(f"{self.name}: a {self.scale} range needs min > 0, found {low}; or use scale='linear'")

    def state(self) -> dict[str, Any]:
        """Return the values as plain data; what is unset and newer than the first files is left out."""
        values = asdict(self)
        return values if self.monotone else {name: value for name, value in values.items() if name != "monotone"}

    def from_unit(self, position: float) -> Value:
        """Return the value at ``position`` in [0, 1] of the range; an integer covers half a unit on either side."""
        if self.dtype == "choice":
            # Position 1 belongs to the last choice.
            return self.choices[min(int(position * len(self.choices)), len(self.choices) - 1)]
        low, high = self._ends()
        at = low + position * (high - low)
        at = math.exp(at) if self.scale == "log" else at
        # exp(log(max)) may lie beyond max, and so may what rounds half a unit beyond an integer's end.
        return self._clip(round(at) if self.dtype == "int" else at)

    def to_unit(self, value: Value) -> float:
        """Return the position in [0, 1] of a value; the inverse of ``from_unit`` for floats."""
        if self.dtype == "choice":
            # The middle of the choice's share, which from_unit maps back to it.
            return (self.choices.index(value) + 0.5) / len(self.choices)
        low, high = self._ends()
        # A user may have assigned a value outside the range: it counts as the nearer end.
        number = float(self._clip(float(value)))
        return ((math.log(number) if self.scale == "log" else number) - low) / (high - low)

    def contains(self, value: Value) -> bool:
        """Return whether ``value`` is of the gene's type and lies in its range."""
        if self.dtype == "choice":
            # By type as well: in Python True == 1 and 1 == 1.0.
            return any(value == choice and type(value) is type(choice) for choice in self.choices)
        # A bool is an int to isinstance.
        if isinstance(value, bool | str) or not isinstance(value, int | float | np.integer | np.floating):
            return False
        if self.dtype == "int" and float(value) != round(float(value)):
            return False
        return self.min <= value <= self.max

    def span(self) -> str:
        """Return the range in words, for messages: ``[1e-06, 0.001]`` or ``one of 'a', 'b'``."""
        if self.dtype == "choice":
            return "one of " + ", ".join(repr(choice) for choice in self.choices)
        return f"[{self.min:g}, {self.max:g}]"

    def _clip(self, value: float) -> float | int:
        clipped = min(max(value, self.min), self.max)
        return int(clipped) if self.dtype == "int" else float(clipped)

    def _ends(self) -> tuple[float, float]:
        # So that the ends of an integer range are drawn as often as what is between them.
        margin = 0.5 if self.dtype == "int" else 0.0
        low, high = self.min - margin, self.max + margin
        return (math.log(low), math.log(high)) if self.scale == "log" else (low, high)


@dataclass(frozen=True, slots=True)
class RLParameter:
    """Range of one hyperparameter that is multiplied by ``shrink_factor`` or ``grow_factor``, each half of the time.

    ``dtype`` is ``float`` or ``int``, and always ``int`` for a hyperparameter that is one; an integer always moves by
    at least one. ``monotone="up"`` (or ``"down"``) lets mutations move the value only that way. Raises ConfigError for
    an empty range, factors that do not shrink and grow, or another dtype.
    """

    min: float
    max: float
    shrink_factor: Annotated[float, Field(gt=0, lt=1)] = 0.8
    grow_factor: Annotated[float, Field(gt=1)] = 1.2
    dtype: Any = float
    monotone: Way | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.dtype not in (int, float):
            raise ConfigError(f"RLParameter: dtype must be int or float, found {self.dtype!r}.")
        # For the checks of the range, at the declaration and not at the first agent.
        self.gene("RLParameter")

    def gene(self, name: str) -> Gene:
        """Return the gene of this range under ``name``; its start is spread in log space if the range allows it."""
        return Gene(
            name=name,
            dtype="int" if self.dtype is int else "float",
            min=self.min,
            max=self.max,
            scale="log" if self.min > 0 else "linear",
            factors=(self.shrink_factor, self.grow_factor),
            monotone=self.monotone,
        )


class HyperparameterConfig(dict[str, RLParameter]):
    """The hyperparameters of an agent that evolve, as keywords: ``HyperparameterConfig(lr=RLParameter(1e-7, 1e-4))``.

    A mapping of names to ranges. Raises ConfigError for anything that is not an RLParameter, and for a name that it
    does not hold.
    """

    def __init__(self, **parameters: RLParameter) -> None:
        for name, parameter in parameters.items():
            taken(Annotated[RLParameter, Hint(f"write {_keyword(name)}")], parameter, "HyperparameterConfig", name)
        super().__init__(parameters)

    def names(self) -> list[str]:
        """Return the names in the order they were given."""
        return list(self)

    def genes(self) -> dict[str, Gene]:
        """Return the gene of each parameter."""
        return {name: parameter.gene(name) for name, parameter in self.items()}

    def __missing__(self, name: str) -> RLParameter:
        raise ConfigError(_unknown("HyperparameterConfig", name, self))

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={parameter!r}" for name, parameter in self.items())
        return f"HyperparameterConfig({inside})"


def genes_from(model_class: Any) -> dict[str, Gene]:
    """Return the genes declared with ``Evolve`` on the fields of a pydantic model class, in field order.

    Not included are entries of a mapping, since the class does not know their names (see ``declared_gene``), and fields
    that evolve only if they are named. Raises ConfigError if a declaration does not fit its field (a string without
    choices, an integer range with fractions).
    """
    fields = _fields(model_class)
    declared = {name: declared_gene(model_class, name) for name in fields}
    return {name: gene for name, gene in declared.items() if gene is not None and _marks(fields[name])[-1].unless_named}


@lru_cache(maxsize=1000)
def declared_gene(model_class: Any, name: str) -> Gene | None:
    """Return the gene declared for a field, or for one entry of a mapping (``field.entry``); None if there is none.

    Raises ConfigError as ``genes_from`` does.
    """
    field_name, dot, entry = name.partition(".")
    field = _fields(model_class).get(field_name)
    marks = [] if field is None else _marks(field)
    # Of a mapping only an entry is a gene, of other fields only the field; `field.` is neither.
    if field is None or not marks or _is_mapping(field) != bool(entry) or bool(dot) != bool(entry):
        return None
    annotation = typing.get_args(field.annotation)[1] if entry else field.annotation
    # The last declaration wins, as with pydantic's own metadata.
    return _declared(name, annotation, marks[-1])


def gene_names(model_class: Any) -> list[str]:
    """Return the names that may be genes, for messages: the fields, a mapping as ``field.<name>``."""
    return [f"{name}.<name>" if _is_mapping(field) else name for name, field in _fields(model_class).items()]


def genes_in_force(model_class: Any, hp_config: Mapping[str, RLParameter] | None = None) -> dict[str, Gene]:
    """Return the genes that evolve: all declared ones or, when ``hp_config`` is given, exactly the ones it lists.

    Raises ConfigError naming the nearest field when ``hp_config`` lists one that the model does not have.
    """
    if hp_config is None:
        return genes_from(model_class)
    known = gene_names(model_class)
    for name in hp_config:
        field_name, _, entry = name.partition(".")
        if (f"{field_name}.<name>" if entry else name) not in known:
            raise ConfigError(_unknown(getattr(model_class, "__name__", "model"), name, known))
    fields = _fields(model_class)
    return {
        # The field decides, since no fraction would fit it.
        name: (
            replace(given, dtype=int) if _is_whole(_plain_types(fields[name.partition(".")[0]].annotation)) else given
        ).gene(name)
        for name, given in hp_config.items()
    }


def values_of(model: Any, names: Iterable[str]) -> dict[str, Any]:
    """Return the values that a model has for some genes; an entry that its mapping lacks is left out."""
    values: dict[str, Any] = {}
    for name in names:
        field_name, dot, entry = name.partition(".")
        value = getattr(model, field_name)
        if not dot or entry in value:
            values[name] = value[entry] if dot else value
    return values


def with_changes(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with some of them changed; ``field.entry`` changes one entry of a mapping."""
    changed = dict(values)
    for name, value in changes.items():
        field_name, dot, entry = name.partition(".")
        before = changed.get(field_name, {}) if dot else {}
        # A value that is not a mapping is kept as it is: the model built from these values reports that mistake.
        changed[field_name] = {**(before if isinstance(before, Mapping) else {}), entry: value} if dot else value
    return changed


def moved_into_range(genes: Mapping[str, Gene], values: Mapping[str, Value]) -> dict[str, Value]:
    """Return the nearer end of the range for each number that lies outside the range of its gene, with a warning."""
    moved: dict[str, Value] = {}
    for name, gene in genes.items():
        value = values.get(name)
        if gene.dtype == "choice" or isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if value < gene.min or value > gene.max:
            moved[name] = gene._clip(value)
            warnings.warn(
                f"{name}={value!r} lies outside the range it evolves in, {gene.span()}: it starts at {moved[name]!r}",
                stacklevel=3,
            )
    return moved


def check_values(genes: Mapping[str, Gene], values: Mapping[str, Value]) -> None:
    """Raise ConfigError unless every gene has a value in ``values`` that lies inside its range."""
    check_present(genes, values)
    for name, gene in genes.items():
        if not gene.contains(values[name]):
            raise ConfigError(
                f"{name} = {values[name]!r} lies outside the range it evolves in, {gene.span()}"
                f"{' (integers)' if gene.dtype == 'int' else ''}; change the value, or widen the range with "
                f"hp_config=HyperparameterConfig({_keyword(name)})."
            )


def check_present(genes: Iterable[str], values: Mapping[str, Value]) -> None:
    """Raise ConfigError unless every gene has a value in ``values``."""
    for name in genes:
        if name not in values:
            field_name, dot, entry = name.partition(".")
            hint = f"; give it one: {field_name}={{{entry!r}: ...}}" if dot else ""
            raise ConfigError(f"{name} evolves without a value, found {', '.join(values) or 'none'}{hint}")


def _marks(field: Any) -> list[Evolve]:
    return [mark for mark in field.metadata if isinstance(mark, Evolve)]


def _declared(name: str, annotation: Any, mark: Evolve) -> Gene:
    kinds = _plain_types(annotation)
    if mark.scale != "choice" and not kinds & {int, float, bool}:
        raise ConfigError(f"{name}: only numbers have a range, found a field {annotation}; use Evolve(choices=(...)).")
    # A bool is a choice, even if its declaration has a range.
    mark = replace(mark, min=None, max=None, scale="choice") if bool in kinds else mark
    return mark.gene(name, "int" if _is_whole(kinds) else "float", mark.choices or _known_choices(kinds))


def _is_whole(kinds: set[Any]) -> bool:
    return int in kinds and float not in kinds


def _plain_types(annotation: Any) -> set[Any]:
    """Return the members of a union (or the one type), without None and without Annotated."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return set().union(*(_plain_types(part) for part in typing.get_args(annotation))) - {type(None)}
    if origin is typing.Annotated:
        return _plain_types(typing.get_args(annotation)[0])
    return {annotation}


def _known_choices(kinds: set[Any]) -> tuple[Value, ...]:
    if bool in kinds:
        return (False, True)
    literals = (kind for kind in kinds if typing.get_origin(kind) is Literal)
    return tuple(choice for literal in literals for choice in typing.get_args(literal) if choice is not None)


def _is_mapping(field: Any) -> bool:
    return typing.get_origin(field.annotation) is dict


def _keyword(name: str) -> str:
    """Return how to write the range of a gene as an argument."""
    parameter = "RLParameter(min=..., max=...)"
    return f"**{{{name!r}: {parameter}}}" if "." in name else f"{name}={parameter}"


def _fields(model_class: Any) -> Mapping[str, Any]:
    fields = getattr(model_class, "model_fields", None)
    if not isinstance(fields, Mapping):
        raise ConfigError(f"Genes are read from a pydantic model class, found {model_class!r}.")
    return fields


def _unknown(where: str, name: str, known: Iterable[str]) -> str:
    return f"{where} has no hyperparameter {name!r}; {nearest(name, known)}"
