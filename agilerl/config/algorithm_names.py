"""The names that a manifest uses of an algorithm, checked without the algorithms: importing those takes seconds."""

import re
from collections.abc import Collection, Iterable

from agilerl.arguments import nearest, shown
from agilerl.config.base_model import SharedOptions, split_options
from agilerl.config.declared import ALGORITHMS, FAMILY
from agilerl.config.run import RunConfig
from agilerl.errors import ConfigError

_CHOICE = re.compile(r"choice\[(.*)\]")


def check_names(config: RunConfig) -> None:
    """Raise ConfigError for an unknown algorithm, one that does not fit the environment, or a hyperparameter unknown.

    The sentences are those of :func:`agilerl.training.resolved.resolve`, which checks all of it again, with the values.
    """
    names = chosen(config.algorithm["name"], ALGORITHMS, FAMILY)
    check_source(names[0], ALGORITHMS[names[0]].env_type, config.environment.env_type)
    declared = [ALGORITHMS[name] for name in names]
    for found in declared:
        check_hyperparameters(config, found.hyperparameters, ALGORITHMS["GRPO"].hyperparameters)
    for name, found in zip(names, declared):
        for gene in config.mutation.rl_hp_selection:
            check_gene(gene, name, found.hyperparameters, found.genes)


def chosen(written: str, known: Collection[str], family: Collection[str]) -> list[str]:
    """Return the algorithm that ``algorithm.name`` names, or those of ``choice[GRPO, CISPO]``, which is a gene.

    Raises ConfigError for an unknown name, and for a choice among algorithms that cannot turn into each other.
    """
    choice = _CHOICE.fullmatch(written.strip())
    names = [written] if choice is None else [name.strip() for name in choice[1].split(",")]
    for name in names:
        if name not in known:
            raise ConfigError(f"algorithm.name={shown(name)} is unknown; {nearest(name, known)}")
        if choice is not None and name not in family:
            raise ConfigError(
                f"algorithm.name={shown(written)}: an agent cannot switch to or from {name}; choose among "
                f"{', '.join(family)}"
            )
    if choice is not None and (len(names) < 2 or len(set(names)) < len(names)):
        raise ConfigError(f"algorithm.name={shown(written)}: a choice needs at least two different algorithms")
    return names


def check_source(algorithm: str, learns_from: str, env_type: str) -> None:
    """Raise ConfigError unless an algorithm learns from what the environment offers."""
    wanted = [learns_from, *(["multiturn"] if learns_from == "reasoning" else [])]
    if env_type not in wanted:
        raise ConfigError(
            f"algorithm.name={algorithm!r} learns from environment.env_type={' or '.join(map(repr, wanted))}, "
            f"found {env_type!r}; change one of the two"
        )


def check_hyperparameters(config: RunConfig, declared: Collection[str], of_grpo: Collection[str]) -> None:
    """Raise ConfigError for a key under ``algorithm`` that is no hyperparameter.

    Those of GRPO pass: an algorithm's own Config says why it has not one of them.
    """
    for key in split_options(config.algorithm)[0]:
        if key != "name" and key not in declared and key not in of_grpo:
            known = [*declared, *SharedOptions.model_fields]
            raise ConfigError(f"unknown key {shown(f'algorithm.{key}')}; {nearest(key, known)}")


def check_gene(gene: str, algorithm: str, declared: Collection[str], genes: Iterable[str]) -> None:
    """Raise ConfigError for a gene that is no hyperparameter of an algorithm."""
    if gene.partition(".")[0] not in declared:
        raise ConfigError(
            f"mutation.rl_hp_selection.{gene}: {algorithm} has no hyperparameter {shown(gene)}; {nearest(gene, genes)}"
        )
