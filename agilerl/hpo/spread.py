"""Where the population starts: at the user's configuration, and evenly spread over the ranges around it."""

from collections.abc import Mapping
from typing import Any, Literal

from agilerl.arguments import Seed, checked
from agilerl.errors import ConfigError
from agilerl.hpo.parameters import Gene, Value, check_values
from agilerl.streams import stream


@checked
def initial_hyperparameters(
    genes: Mapping[str, Gene],
    base_values: Mapping[str, Value],
    size: int,
    seed: Seed,
    init: Literal["spread", "same"] = "spread",
) -> list[dict[str, Value]]:
    """Return the gene values of each of ``size`` members; member 0 always has ``base_values``.

    ``"spread"``: the rest form a scrambled Sobol sequence over the ranges (in log space where declared), so that no
    region of the space is left out; a larger population keeps the points of a smaller one. ``"same"``: all are equal.
    Raises ConfigError for a size below one, an unknown ``init``, or a base value outside its range.
    """
    if size < 1:
        raise ConfigError(f"A population needs at least one member, found size={size}.")
    if init not in ("spread", "same"):
        raise ConfigError(f"init must be 'spread' or 'same', found {init!r}.")
    check_values(genes, base_values)
    base = {name: base_values[name] for name in genes}
    members = [dict(base) for _ in range(size)]
    if init == "same" or not genes or size == 1:
        return members
    for member, point in zip(members[1:], _sobol(len(genes), size - 1, seed), strict=True):
        member.update({gene.name: gene.from_unit(float(u)) for gene, u in zip(genes.values(), point, strict=True)})
    return members


def _sobol(dimensions: int, count: int, seed: int) -> Any:
    # Imported when used: scipy.stats takes most of a second, and only the start of a run needs it.
    from scipy.stats import qmc

    sampler = qmc.Sobol(dimensions, scramble=True, rng=stream(seed, "initial spread"))
    return sampler.random_base2(max(count - 1, 0).bit_length())[:count]
