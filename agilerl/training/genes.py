"""The genes of a run: those that the settings name, in their ranges or those that the algorithm declares."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agilerl.algorithms import LLMAlgorithm
from agilerl.algorithms.base import AlgorithmConfig
from agilerl.checks.arguments import nearest, shown
from agilerl.config.search import GeneConfig
from agilerl.errors import ConfigError
from agilerl.hpo.parameters import (
    Gene,
    declared_gene,
    gene_names,
    genes_from,
    moved_into_range,
    values_of,
)


def genes_of(
    wanted: Mapping[str, GeneConfig],
    written: Mapping[str, Any],
    algorithm: type[LLMAlgorithm],
    start: AlgorithmConfig,
    known: Mapping[str, Gene],
) -> tuple[AlgorithmConfig, dict[str, Gene]]:
    """Return the start within the genes, and the genes, checked against it; a ``known`` gene keeps its range.

    ``written`` is the section ``algorithm``.
    """
    model = algorithm.Config
    names = [*genes_from(model), *(name for name in gene_names(model) if "." in name)]
    genes = {}
    for name, section in wanted.items():
        where = f"mutation.rl_hp_selection.{name}"
        declared = declared_gene(model, name)
        if declared is None:
            known_field = name.partition(".")[0] in model.model_fields
            wrong = "this" if known_field else f"{algorithm.__name__} has no"
            wrong += " hyperparameter does not evolve" if known_field else f" hyperparameter {shown(name)}"
            raise ConfigError(f"{where}: {wrong}; {nearest(name, names)}")
        try:
            genes[name] = gene = known.get(name) or _gene(declared, section)
        except ConfigError as error:  # it begins with the name of the gene
            raise ConfigError(f"mutation.rl_hp_selection.{error}") from None
        # A mutation must not reach a value that the algorithm refuses, given the other starts.
        for end in gene.choices or (gene.min, gene.max):
            number = int(end) if gene.dtype == "int" else end
            try:
                start.changed({name: number})
            except ConfigError as error:
                raise ConfigError(f"{where} allows {number!r}, which the algorithm does not: {error}") from None
        # A range that was given outweighs the start, and any range outweighs a default.
        given = (section.min, section.max) != (None, None) or name.partition(".")[0] not in written
        if given and (moved := moved_into_range({name: gene}, values_of(start, [name]))):
            start = start.changed(moved, where)
        if not gene.contains(value := values_of(start, [name])[name]):
            raise ConfigError(
                f"{where}: the range {gene.span()}{', the default,' * (not given)} excludes the start, "
                f"algorithm.{name}={value!r}{'' if name in written else ', which is the default'}; widen the range "
                f"({where}={{min: ..., max: ...}}), or move the start{' or leave it out' * (name in written)}"
            )
    return start, genes


def _gene(declared: Gene, wanted: GeneConfig) -> Gene:
    given = {name for name, value in wanted if value is not None}
    if wanted.choices is not None or declared.dtype == "choice":
        if len(given) > 1 or (given and wanted.choices is None):
            names = ", ".join(sorted(given - {"choices"}))
            raise ConfigError(f"{declared.name}: a gene with choices has no {names}; remove it")
        choices = declared.choices if wanted.choices is None else tuple(wanted.choices)
        if declared.dtype == "float":  # YAML's 1 is an integer, while the hyperparameter would become 1.0
            choices = tuple(float(choice) if type(choice) is int else choice for choice in choices)
        return replace(declared, dtype="choice", choices=choices, scale="choice")
    low = declared.min if wanted.min is None else wanted.min
    high = declared.max if wanted.max is None else wanted.max
    # A log scale that was declared, not asked for, gives way to a range that begins at 0 or below.
    scale = wanted.scale or (declared.scale if low > 0 else "linear")
    factors = declared.factors
    if wanted.shrink_factor is not None or wanted.grow_factor is not None:
        # One factor is enough; the other is RLParameter's default.
        factors = (wanted.shrink_factor or 0.8, wanted.grow_factor or 1.2)
    return replace(declared, min=low, max=high, scale=scale, monotone=wanted.monotone, factors=factors)
