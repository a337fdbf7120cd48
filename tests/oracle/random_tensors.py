"""Random tensors that an independent implementation and ours are both given."""

from dataclasses import dataclass

import torch
from torch import Tensor

from agilerl.algorithms import LLMAlgorithm
from agilerl.data import LossInputs
from agilerl.functional import MetricReducer

ROWS, LENGTH, MAX_LENGTH = 8, 11, 13


@dataclass
class Tensors:
    """A batch of completions; log-probs are 0 off the mask, as in LossInputs."""

    mask: Tensor
    logp: Tensor
    old: Tensor
    ref: Tensor
    sampled: Tensor
    entropy: Tensor
    advantages: Tensor
    """[B] one a row; both signs."""

    @property
    def leaf(self) -> Tensor:
        """A new copy of ``logp`` to differentiate by."""
        return self.logp.clone().requires_grad_()


def random_tensors(seed: int, drift: float = 0.4) -> Tensors:
    """Ratios spread so far around 1 that every bound cuts off some of them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(ROWS, LENGTH, generator=generator)

    lengths = torch.randint(1, LENGTH + 1, (ROWS, 1), generator=generator)
    mask = torch.arange(LENGTH) < lengths
    logp = -normal(1.5).abs() - 0.05
    tensors = {
        "logp": logp,
        "old": logp + normal(drift),
        "ref": logp + normal(0.5),
        "sampled": logp + normal(0.6),
        "entropy": normal(1.0).abs() + 0.1,
    }
    advantages = torch.randn(ROWS, generator=generator)
    return Tensors(mask=mask, advantages=advantages, **{k: torch.where(mask, v, 0.0) for k, v in tensors.items()})


def loss_inputs(x: Tensors, agent: LLMAlgorithm, logp: Tensor, *, sampled: bool = False) -> LossInputs:
    """What the agent's own objective is given for these tensors."""
    return LossInputs(
        logp=logp,
        mask=x.mask,
        old_logp=x.old,
        advantages=torch.where(x.mask, x.advantages[:, None], 0.0),
        denominator=agent.window_denominator(x.mask),
        ref_logp=x.ref if agent.config.beta else None,  # type: ignore[attr-defined]
        sampling_logp=x.sampled if sampled else None,
        entropy=x.entropy,
        turn_ids=torch.where(x.mask, 0, -1),
    )


def ours(agent: LLMAlgorithm, x: Tensors, *, sampled: bool = False) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Return the value of the agent's objective, its gradient by the log-probs, and its metrics."""
    leaf, metrics = x.leaf, MetricReducer()
    loss = agent.objective(loss_inputs(x, agent, leaf, sampled=sampled), metrics)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient, metrics.result()


def assert_equal(loss: Tensor, gradient: Tensor, other_loss: Tensor, leaf: Tensor, mask: Tensor) -> None:
    """Values and gradients agree to 1e-5; the gradient is not trivially zero."""
    (other,) = torch.autograd.grad(other_loss, leaf)
    other = torch.where(mask, other, 0.0)
    assert other.abs().max() > 1e-4
    torch.testing.assert_close(loss, other_loss.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-5)
