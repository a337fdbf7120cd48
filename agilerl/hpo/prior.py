"""Where a search begins when the user says nothing: a learning rate for the base, and how far around it to look."""

from dataclasses import replace

from agilerl.arguments import Count, checked
from agilerl.hpo.mutation import LEARNING_RATES
from agilerl.hpo.parameters import Gene, Value

EMBEDDED_RATE = 1e-3
"""Measured on the embedded model with GRPO: the best of six rates on four tasks, a third and four times it lose."""
_EXPONENTS = {"llama": 0.781, "qwen": 0.0775}
RATE_DOWN, RATE_UP = 10.0, 3.0
"""Founders start between a tenth of the learning rate and three times it: above is a cliff, below it is merely slow."""
OTHERS = 3.0
"""Other genes start within this factor of the user's value."""


@checked
def lora_rate(hidden_size: Count, family: str) -> float:
    """Return a learning rate for LoRA by the size of the base: 5e-5 * 10 * (2000 / hidden_size)^p.

    p is 0.781 for Llama and 0.0775 for Qwen (tinker-cookbook, ``hyperparam_utils``; fitted on models of 1 to 70 billion
    parameters); other families, by ``model_type``, take Qwen's, the more careful one. For small models the two differ
    much: 7 times at a hidden size of 160. Measure the rate there.
    """
    exponent = next((p for name, p in _EXPONENTS.items() if family.lower().startswith(name)), _EXPONENTS["qwen"])
    return float(5e-5 * 10 * (2000 / hidden_size) ** exponent)


def around(gene: Gene, value: Value) -> Gene:
    """Return the gene with the range in which founders start: around the user's value, within the gene's own range."""
    if gene.dtype == "choice" or not float(value) > 0:
        return gene
    down, up = (RATE_DOWN, RATE_UP) if gene.name in LEARNING_RATES else (OTHERS, OTHERS)
    low, high = max(gene.min, float(value) / down), min(gene.max, float(value) * up)
    if gene.dtype == "int":
        low, high = float(max(round(low), gene.min)), float(min(round(high), gene.max))
    return replace(gene, min=low, max=high) if low < high else gene
