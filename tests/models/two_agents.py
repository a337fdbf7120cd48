"""Two agents with adapters that are not zero, and one training forward and backward over rows of both."""

from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig

from agilerl.algorithms.forward import AgentRows, forward
from agilerl.config.base_model import SharedOptions
from agilerl.data import RolloutBatch, Trajectory, collate
from agilerl.runtime import Runtime
from tests.tiny_models import PAD

LENGTHS = ((31, 9, 17, 12), (5, 26, 8))
"""Tokens of the rows of each agent."""


@dataclass
class Pass:
    loss: torch.Tensor
    logp: list[torch.Tensor]
    """[b, T-1] of each agent."""
    grad: torch.Tensor
    """[2, D] the bank's gradients."""

    def distance(self, other: "Pass") -> tuple[float, float]:
        """Relative distances of log-probs and gradients."""
        ours, theirs = torch.cat([x.flatten() for x in self.logp]), torch.cat([x.flatten() for x in other.logp])
        return (
            float((ours - theirs).double().norm() / theirs.double().norm()),
            float((self.grad - other.grad).double().norm() / other.grad.double().norm()),
        )

    def same_bits(self, other: "Pass") -> bool:
        return (
            torch.equal(self.loss, other.loss)
            and all(map(torch.equal, self.logp, other.logp))
            and torch.equal(self.grad, other.grad)
        )


def make_runtime(model: Any, targets: Any = "all-linear", **options: Any) -> Runtime:
    """Put two adapters on a model: of rank 4, with noise in B, the same on every model of these shapes."""
    lora = LoraConfig(r=4, lora_alpha=8, target_modules=targets, task_type="CAUSAL_LM")
    return with_adapters(Runtime.for_model(model, lora_config=lora, options=SharedOptions(**options)))


def with_adapters(runtime: Runtime) -> Runtime:
    store = runtime.store
    for seed in range(2):
        slot = store.allocate(4, 2.0)
        store.initialise(slot, seed)
        generator = torch.Generator().manual_seed(seed)
        factors = [(a, 0.05 * torch.randn(b.shape, generator=generator).to(b)) for a, b in store.adapter(slot)]
        store.load_adapter(slot, factors)
    return runtime


def rows(agent: int, vocabulary: int) -> RolloutBatch:
    generator = torch.Generator().manual_seed(agent + 10)
    drawn = [torch.randint(2, vocabulary, (n,), generator=generator).tolist() for n in LENGTHS[agent]]
    return collate(
        [Trajectory(ids[:3], ids[3:], [True] * (len(ids) - 3), [0.0] * (len(ids) - 3), [0.0]) for ids in drawn], PAD
    )


def parts(runtime: Runtime, agents: tuple[int, ...] = (0, 1)) -> list[AgentRows]:
    batches = [rows(agent, runtime.base.vocabulary_size) for agent in (0, 1)]
    width = max(b.ids.shape[1] for b in batches)
    return [AgentRows(agent, padded(batches[agent], width), 1.0 - 0.2 * agent) for agent in agents]


def padded(batch: RolloutBatch, width: int) -> RolloutBatch:
    missing = width - batch.ids.shape[1]
    assert missing >= 0
    if not missing:
        return batch
    spread = torch.nn.functional.pad
    return RolloutBatch(
        **{
            **vars(batch),
            "ids": spread(batch.ids, (0, missing), value=PAD),
            "action_mask": spread(batch.action_mask, (0, missing)),
            "turn_ids": spread(batch.turn_ids, (0, missing)),
        }
    )


def train_pass(runtime: Runtime, agents: tuple[int, ...] = (0, 1)) -> Pass:
    """Compute log-probs, a loss that weighs every token differently, and the gradients of the bank."""
    store = runtime.store
    store.grad.zero_()
    outputs = forward(runtime, parts(runtime, agents))
    loss = torch.zeros((), dtype=torch.float64)
    for output in outputs:
        assert output.logp is not None
        weights = torch.linspace(-1, 1, output.logp.numel()).view(output.logp.shape).to(output.logp.device)
        loss = loss + (output.logp * weights).double().sum().cpu()
    loss.backward()
    return Pass(loss.detach(), [o.logp.detach() for o in outputs if o.logp is not None], store.grad.clone())
