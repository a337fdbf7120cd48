"""Custom losses, three ways: a function, a loss made of parts, and tangents. About 20 seconds on one core.

The example replaces GRPO's clipping by a gate that closes smoothly: the further a token's probability has moved since
it was sampled, the less it is pushed on.
"""

import torch

from agilerl import GRPO, Population, ReasoningGymTask, Runtime
from agilerl.algorithms import PolicyLoss
from agilerl.data import LossInputs, collate

torch.set_num_threads(1)


# 1. A function: tensors in, a scalar out. `beta` is requested by name, so it is the agent's value, and may evolve.
def smooth_loss(inputs: LossInputs, beta: float) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    ratio = torch.exp(inputs.logp - inputs.old_logp)
    gate = torch.sigmoid(4 * (ratio - 1))
    gap = inputs.ref_logp - inputs.logp
    per_token = -gate * inputs.advantages + beta * ratio * (gap.exp() - gap - 1)
    lengths = inputs.mask.sum(dim=1).clamp(min=1)
    per_row = (per_token * inputs.mask).sum(dim=1) / lengths
    return per_row.sum() / inputs.denominator, {"gate": gate}


# 2. The same loss made of parts: each is a name or a function.
def smooth_surrogate(ratio: torch.Tensor, advantages: torch.Tensor, logp: torch.Tensor) -> torch.Tensor:
    return -torch.sigmoid(4 * (ratio - 1)) * advantages


parts = PolicyLoss(surrogate=smooth_surrogate, kl="k3", aggregation="seq-mean-token-mean")

runtime = Runtime.from_pretrained("embedded")
task = ReasoningGymTask("spell_backward", {"min_word_len": 3, "max_word_len": 6}, exam_prompts=64, test_prompts=200)
settings = {"lr": 2e-3, "beta": 0.01, "group_size": 8, "batch_size": 128, "max_output_tokens": 10}
agent = GRPO(runtime=runtime, loss=smooth_loss, **settings)
population = Population([agent], task, prompts_per_step=16, eval_max_new_tokens=10)
population.learn(population.rollout())  # one step, so that the policy is no longer the reference

# 3. Tangents: d loss / d log-prob of each token, however it was computed. Here by autograd, on the log-probs only.
batch = collate(population.rollout().trajectories[agent.index], agent.pad_token_id)
experience = agent.prepare(batch)
logp = agent.logprobs(batch).requires_grad_()
inputs = LossInputs(
    logp=logp,
    mask=batch.action_mask,
    old_logp=logp.detach(),
    advantages=experience.advantages,
    denominator=len(batch),
    ref_logp=experience.ref_logp,
)
loss, _ = smooth_loss(inputs, agent.beta)
(tangents,) = torch.autograd.grad(loss, logp)

# ... or by hand: the ratio is 1 on policy, sigmoid'(0) = 1/4, and the weighted KL has the gradient of the KL.
lengths = batch.action_mask.sum(dim=1, keepdim=True).clamp(min=1)
slope = -experience.advantages + agent.beta * (logp.detach() - experience.ref_logp)
pencil = torch.where(batch.action_mask, slope / lengths / len(batch), 0.0)


def in_halves(clone: GRPO) -> None:
    for rows in torch.arange(len(batch)).chunk(2):
        half = batch.select(rows)  # rows that are all short lose padding
        clone.accumulate_tangents(half, tangents[rows, : half.action_mask.shape[1]])


ways = {
    "function": lambda clone: clone.accumulate(batch, smooth_loss),
    "parts": lambda clone: clone.accumulate(batch, parts),
    "tangents": lambda clone: clone.accumulate_tangents(batch, tangents),
    "pencil": lambda clone: clone.accumulate_tangents(batch, pencil),
    "halves": in_halves,
}
print("one loss, five ways to say it")
norms = {}
for name, accumulate in ways.items():
    clone = agent.clone(index=1)
    accumulate(clone)  # gradients add up until a step spends them
    norms[name] = clone.optim_step()["grad_norm"]
    clone.clean_up()
    print(f"  {name:10} gradient norm {norms[name]:.6f}")
assert max(norms.values()) - min(norms.values()) < 1e-5 * max(norms.values())

# Training with it works as usual.
before = population.evaluate("test")[agent.index]
for _ in range(10):
    metrics = population.learn(population.rollout())[agent.index]
after = population.evaluate("test")[agent.index]
print(f"gate {metrics['gate']:.3f}, KL {metrics['kl']:.4f}")
print(
    f"test: {before.mean:.2f} -> {after.mean:.2f} (standard error {after.stderr:.2f}, n {after.n}); expect 0.6 -> 0.9"
)
assert after.mean > before.mean
