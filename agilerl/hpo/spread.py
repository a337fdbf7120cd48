"""Where a search begins: a learning rate for the base, how far around it to look, and founders spread over that."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from agilerl.checks.arguments import Count, Seed, checked
from agilerl.hpo.mutation import LEARNING_RATES
from agilerl.hpo.parameters import Gene, Value, check_values
from agilerl.streams import stream

EMBEDDED_RATE = 1e-3
"""Measured on the embedded model with GRPO: the best of six rates on four tasks, a third and four times it lose."""
_EXPONENTS = {"llama": 0.781, "qwen": 0.0775}
RATE_DOWN, RATE_UP = 10.0, 3.0
"""Founders start between a tenth of the learning rate and three times it: above is a cliff, below it is merely slow."""
USUAL_WITHIN = 2.0
"""Rates within this factor of the usual one learn about as well as it does on the bases that were measured (0.3M and
135M parameters); three times more or less costs accuracy or the run (``benchmarking/results/evidence*.json``)."""
OTHERS = 3.0
"""Other genes start within this factor of the user's value."""


@checked
def lora_rate(hidden_size: Count, family: str) -> float:
    """Return a learning rate for LoRA by the size of the base: 5e-5 * 10 * (2000 / hidden_size)^p, at most 5e-4.

    p is 0.781 for Llama and 0.0775 for Qwen (tinker-cookbook, ``hyperparam_utils``; fitted on models of 1 to 70 billion
    parameters); other families, by ``model_type``, take Qwen's, the more careful one. Below a hidden size of 2000 the
    formula is not extrapolated: for SmolLM2-135M (Llama, 576) it would give 1.3e-3, near the rates at
    which it collapses.
    """
    exponent = next((p for name, p in _EXPONENTS.items() if family.lower().startswith(name)), _EXPONENTS["qwen"])
    return float(5e-5 * 10 * (2000 / max(hidden_size, 2000)) ** exponent)


def around(gene: Gene, value: Value) -> Gene:
    """Return the gene with the range in which founders start: around the user's value, within the gene's own range."""
    # There is no factor around 0.
    if gene.dtype == "choice" or not float(value) > 0:
        return gene
    # Asymmetric for learning rates: one that is too low costs points, one that is too high the run.
    down, up = (RATE_DOWN, RATE_UP) if gene.name in LEARNING_RATES else (OTHERS, OTHERS)
    low, high = max(gene.min, float(value) / down), min(gene.max, float(value) * up)
    if gene.dtype == "int":
        low, high = float(max(round(low), gene.min)), float(min(round(high), gene.max))
    return replace(gene, min=low, max=high) if low < high else gene


# -- founders: the user's configuration, and the others evenly spread over the ranges around it -----------------------


@checked
def initial_hyperparameters(
    genes: Mapping[str, Gene],
    base_values: Mapping[str, Value],
    size: Count,
    seed: Seed,
    init: Literal["spread", "same"] = "spread",
) -> list[dict[str, Value]]:
    """Return the gene values of each of ``size`` members; member 0 always has ``base_values``.

    ``"spread"``: the rest form a scrambled Sobol sequence over the ranges (in log space where declared), so that no
    region of the space is left out; a larger population keeps the points of a smaller one. ``"same"``: all are equal.
    Raises ConfigError for a size below one, an unknown ``init``, or a base value outside its range.
    """
    check_values(genes, base_values)
    base = {name: base_values[name] for name in genes}
    members = [dict(base) for _ in range(size)]
    if init == "same" or not genes or size == 1:
        return members
    # Imported when used: scipy.stats takes most of a second, and only the start of a run needs it.
    from scipy.stats import qmc

    sampler = qmc.Sobol(len(genes), scramble=True, rng=stream(seed, "initial spread"))
    # Sobol points are balanced in powers of two only, so the next power is drawn and cut.
    points = sampler.random_base2((size - 2).bit_length())
    for member, point in zip(members[1:], points):
        member.update({gene.name: gene.from_unit(float(u)) for gene, u in zip(genes.values(), point, strict=True)})
    return members
