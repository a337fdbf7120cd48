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

    At level 2 every attribute of a dataset, such as the number of terms, stands at its own level 2 in reasoning_gym's
    curriculum; one that ends earlier stays at its last. Most attributes are ranges: they grow, and keep the easier
    values. Each dataset of a ``composite`` has its own curriculum; one without any keeps its parameters. What the
    task's own parameters (or the ``config`` in a composite) set, no level changes.
    """

    prompts_per_level: Count = 512
    """Training positions of one level, 1 or more. Every agent counts its own prompts."""
    max_level: Count | None = None
    """The last level, 1 or more; None: the highest that reasoning_gym has."""
    attributes: Sequence[str] | None = None
    """Names of the attributes that rise; the others keep the parameters of the task. None: all of them."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a number out of range or names that are none."""
        check_fields(self)
        names = self.attributes
        if names is not None and (isinstance(names, str) or not names or not all(isinstance(n, str) for n in names)):
            raise ConfigError(f"expected a list of names for the curriculum's attributes, found {names!r}")

    def levels(self, name: str, params: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the parameters of a dataset at each level; ``params`` are those of the task, checked.

        Raises:
            ConfigError: a dataset without curriculum, an attribute or a level that it does not have, or parameters of
                the task that leave nothing to change.
        """
        members = {s["name"]: s["config"] for s in params["datasets"]} if name == "composite" else {name: params}
        known = {member: curriculum_attributes(member) for member in members}
        if not any(known.values()):
            found = ", ".join(members)
            raise ConfigError(
                f"expected a dataset that reasoning_gym has a curriculum for, found {found}"
                f"; {nearest(found, curricula())}; take one of those, or leave the curriculum out"
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
                f"expected a max_level of at most {last}, where the curriculum of {name} ends, found {self.max_level}"
            )
        most = last if self.max_level is None else self.max_level
        levels = [_at_level(level, name, params, rising) for level in range(most + 1)]
        if all(level == levels[0] for level in levels):
            raise ConfigError(
                f"the curriculum of {name} changes nothing up to level {most}: params, which win, fix what it raises "
                f"({', '.join(_fields(rising))}), or those stay as they are; take them out of params, or choose other "
                "attributes or a higher max_level"
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
