"""DPPO: a token stops where its probability has moved too far, whatever its ratio."""

from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch

from agilerl.algorithms import DPPO, GRPO, PolicyLoss
from agilerl.data import LossInputs
from agilerl.errors import ConfigError
from agilerl.functional import MetricReducer
from agilerl.runtime import Runtime
from tests.algorithms.test_grpo_golden import batch
from tests.tiny_models import PAD, random_model

pytestmark = pytest.mark.model

OLD, NEW, ADVANTAGES = [0.5, 0.01, 0.9, 0.6], [0.8, 0.1, 0.6, 0.3], [1.0, 1.0, -1.0, 1.0]
"""Up by 0.3 and wanted up; up tenfold, by 0.09; down by 0.3 and wanted down; down by 0.3, but wanted up."""


@pytest.fixture(scope="module")
def runtime() -> Runtime:
    return Runtime.for_model(random_model())


def agent(runtime: Runtime, cls: type[GRPO] = DPPO, **settings: Any) -> GRPO:
    return cls(runtime=runtime, pad_token_id=PAD, **{"beta": 0.0, "max_output_tokens": 8, **settings})


def moved() -> LossInputs:
    return LossInputs(
        logp=torch.tensor([NEW]).log().requires_grad_(),
        mask=torch.ones(1, 4, dtype=torch.bool),
        old_logp=torch.tensor([OLD]).log(),
        advantages=torch.tensor([ADVANTAGES]),
        denominator=1.0,
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # Total variation 0.3, 0.09, 0.3, 0.3: the first and the third stop, the last is on its way back. Weights are
        # 0.1 / 0.01 = 10 and 0.3 / 0.6 = 0.5.
        ({}, (-10 * log(0.1) - 0.5 * log(0.3)) / 4),
        ({"weight_max": 4.0}, (-4 * log(0.1) - 0.5 * log(0.3)) / 4),
        # 0.05 stops the second as well.
        ({"divergence_limit": 0.05}, -0.5 * log(0.3) / 4),
        # KL of "this token" against "any other", in nats: 0.223, 0.071, 0.226.
        ({"divergence": "kl"}, (-10 * log(0.1) - 0.5 * log(0.3)) / 4),
        (
            {"divergence": "kl", "divergence_limit": 0.3},
            (-1.6 * log(0.8) - 10 * log(0.1) + 0.6 / 0.9 * log(0.6) - 0.5 * log(0.3)) / 4,
        ),
    ],
)
def test_objective_is_golden(runtime: Runtime, settings: dict, expected: float) -> None:
    assert agent(runtime, **settings).objective(moved(), MetricReducer()).item() == pytest.approx(expected, rel=1e-6)


def test_gradient_and_metrics_are_golden(runtime: Runtime) -> None:
    x, metrics = moved(), MetricReducer()
    agent(runtime).objective(x, metrics).backward()
    # -weight * A / 4 tokens
    assert torch.allclose(x.logp.grad, torch.tensor([[0.0, -2.5, 0.0, -0.125]]), atol=1e-6)
    found = metrics.result()
    regions = [found[f"clip_ratio/{name}_mean"] for name in ("low", "high", "region")]
    assert regions == [0.25, 0.25, 0.5]


def test_ratio_bounds_would_do_the_opposite(runtime: Runtime) -> None:
    """GRPO stops the rare token that rose tenfold; DPPO lets it rise on."""
    gradients = []
    for cls in (DPPO, GRPO):
        x = moved()
        agent(runtime, cls).objective(x, MetricReducer()).backward()
        gradients.append(x.logp.grad[0, 1].item())
    assert gradients[0] < 0 == gradients[1]


def test_the_first_step_is_reinforce(runtime: Runtime) -> None:
    x = replace(moved(), old_logp=torch.tensor([NEW]).log())
    agent(runtime).objective(x, MetricReducer()).backward()
    assert torch.allclose(x.logp.grad, -torch.tensor([ADVANTAGES]) / 4)


def test_credit_is_that_of_grpo(runtime: Runtime) -> None:
    assert torch.equal(agent(runtime).credit(batch()), agent(runtime, GRPO).credit(batch()))


def test_a_custom_loss_may_name_it(runtime: Runtime) -> None:
    own = PolicyLoss(surrogate="dppo")
    loss, metrics = own(moved(), divergence_limit=0.05)
    assert loss.item() == pytest.approx(-0.5 * log(0.3) / 4)
    assert metrics["clip_ratio/region_mean"].tolist() == [[True, True, True, False]]
    for cls in (DPPO, GRPO):
        agent(runtime, cls, loss=own)


@pytest.mark.parametrize("name", ["clip_coef", "dual_clip", "delta", "importance_sampling_level"])
def test_what_it_fixes_is_no_setting(runtime: Runtime, name: str) -> None:
    with pytest.raises(ConfigError, match=f"DPPO .* {name}"):
        agent(runtime, **{name: 0.2})


@pytest.mark.parametrize("wrong", [{"divergence_limit": 0.0}, {"weight_max": 0.5}, {"divergence": "js"}])
def test_what_it_has_is_checked(runtime: Runtime, wrong: dict) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        agent(runtime, **wrong)
