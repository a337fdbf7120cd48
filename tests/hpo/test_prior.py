"""Where a search begins: the learning rate by the size of the base, and the ranges of the founders."""

import pytest

from agilerl.hpo.parameters import Gene
from agilerl.hpo.spread import around, lora_rate


@pytest.mark.parametrize(
    ("hidden", "family", "rate"),
    # 5e-4 (2000 / 4000)^p: 2^-0.781 = 0.58197, 2^-0.0775 = 0.94769. Small models: 576 is SmolLM2-135M.
    [
        *((2000, "llama", 5e-4), (4000, "llama", 2.910e-4), (4000, "qwen2", 4.738e-4), (4000, "gemma", 4.738e-4)),
        *((576, "llama", 5e-4), (160, "qwen3", 5e-4)),
    ],
)
def test_the_formula(hidden: int, family: str, rate: float) -> None:
    assert lora_rate(hidden, family) == pytest.approx(rate, rel=1e-3)


def test_founders_start_around_the_users_value() -> None:
    lr = Gene("lr", "float", min=1e-6, max=1e-2)
    assert (around(lr, 1e-3).min, around(lr, 1e-3).max) == pytest.approx((1e-4, 3e-3))
    assert around(lr, 8e-3).max == 1e-2
    group = Gene("group_size", "int", min=2, max=32)
    assert (around(group, 8).min, around(group, 8).max) == (3, 24)
    assert (around(group, 4).min, around(group, 4).max) == (2, 12)
    temperature = Gene("temperature", "float", min=0.5, max=1.5, scale="linear")
    assert (around(temperature, 1.0).min, around(temperature, 1.0).max) == (0.5, 1.5)
    # Nothing is a third of nothing, or of a choice.
    decay = Gene("weight_decay", "float", min=0.0, max=0.1, scale="linear")
    choice = Gene("loss_type", "choice", scale="choice", choices=("a", "b"))
    assert around(decay, 0.0) is decay
    assert around(choice, "a") is choice
