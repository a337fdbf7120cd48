"""Training that gets harder: reasoning_gym's curricula, with the level as a function of the training position."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agilerl.arguments import Count, check_fields, nearest
from agilerl.envs.upstream import curricula, curriculum_attributes, curriculum_params
from agilerl.errors import ConfigError


@dataclass(frozen=True)
class Curriculum:
    """Levels of ``prompts_per_level`` training positions each, counted from 0; the last one never ends.

    At level 2 every attribute of a dataset, such as the number of terms, is at level 2 of reasoning_gym's curriculum;
    an attribute with fewer levels stays at its last. Most attributes are ranges: they grow, and keep the easier values.
    Each dataset of a ``composite`` has its own curriculum; one without a curriculum keeps its parameters. Parameters
    set by the task (or by the ``config`` in a composite) are not changed by any level.
    """

    prompts_per_level: Count = 512
    """Training positions of one level, 1 or more. Every agent counts its own prompts."""
    max_level: Count | None = None
    """The last level, 1 or more; None is the highest that reasoning_gym has."""
    attributes: Sequence[str] | None = None
    """Names of the attributes that rise; the others keep the task's parameters. None means all."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a number out of range or invalid names."""
        check_fields(self)
        names = self.attributes
        if names is not None and (isinstance(names, str) or not names or not all(isinstance(n, str) for n in names)):
            raise ConfigError(f"expected a list of names for the curriculum's attributes, found {names!r}")

    def levels(self, name: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the parameters of a dataset at each level; ``params`` are the task's, already checked.

        Raises:
            ConfigError: a dataset without a curriculum, an attribute or level that it does not have, or task parameters
                that leave nothing to change.
        """
        members = {s["name"]: s["config"] for s in params["datasets"]} if name == "composite" else {name: params}
        known = {member: curriculum_attributes(member) for member in members}
        if not any(known.values()):
            found = ", ".join(members)
            raise ConfigError(
                f"expected a dataset that reasoning_gym has a curriculum for, found {found}"
                f"; {nearest(found, curricula())}; use one of those, or remove the curriculum"
            )
        every = {attribute for own in known.values() for attribute in own}
        for attribute in self.attributes or ():
            if attribute not in every:
                raise ConfigError(
                    f"the curriculum of {name} has no attribute {attribute!r}; {nearest(attribute, sorted(every))}"
                )
        rising = {m: [a for a in own if self.attributes is None or a in self.attributes] for m, own in known.items()}
        last = max(known[member][attribute] for member, names in rising.items() for attribute in names)
        if self.max_level is not None and self.max_level > last:
            raise ConfigError(
                f"expected max_level to be at most {last}, the last level for {name}, found {self.max_level}"
            )
        most = last if self.max_level is None else self.max_level
        levels = [_at_level(level, name, params, rising) for level in range(most + 1)]
        if all(level == levels[0] for level in levels):
            raise ConfigError(
                f"the curriculum of {name} changes nothing up to level {most}: what it raises "
                f"({', '.join(_fields(rising))}) is fixed by params or does not change; remove these from params, or "
                "choose other attributes or a higher max_level"
            )
        return levels


def _at_level(level: int, name: str, params: Mapping[str, Any], rising: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    if name != "composite":
        return {**curriculum_params(name, level, rising[name]), **params}
    specs = [
        {**spec, "config": {**curriculum_params(spec["name"], level, rising[spec["name"]]), **spec["config"]}}
        for spec in params["datasets"]
    ]
    return {**params, "datasets": specs}


def _fields(rising: Mapping[str, Sequence[str]]) -> list[str]:
    return sorted({field for member, names in rising.items() for field in curriculum_params(member, 0, names)})
