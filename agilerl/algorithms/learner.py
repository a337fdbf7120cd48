"""What an update needs of an agent (:class:`Learner`), what it learns from, and the log-probs that it compares."""

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from agilerl.algorithms.config import LLMConfig, SurrogateConfig
from agilerl.data import LossInputs, MicroBatch, RolloutBatch
from agilerl.functional import MetricReducer, adaptive_kl_coefficient, kl_estimate, masked_sum
from agilerl.models.slots import AdamWSettings
from agilerl.rollouts.engine import Outcome
from agilerl.runtime import Runtime


@dataclass(frozen=True)
class Experience:
    """A whole batch of one agent, ready to be cut into optimizer windows."""

    batch: RolloutBatch
    advantages: Tensor
    """[B, L] advantage of each token, detached."""
    old_logp: Tensor | None = None
    """[B, L] log-probs of the sampling policy; None: the update is on-policy, so they are the current ones."""
    ref_logp: Tensor | None = None
    """[B, L] log-probs of the reference; None when no term needs them."""
    sampling_logp: Tensor | None = None
    """[B, L] log-probs reported by a foreign sampler."""
    old_values: Tensor | None = None
    """[B, L] the critic's values before the update; None without a critic."""
    returns: Tensor | None = None
    """[B, L] targets of the critic."""
    reference_point: Tensor | None = None
    """[B] KTO's reference point in nats, one number."""
    idle: Tensor | None = None
    """[B] bool, True for rows whose gradient is exactly zero: counted in every normaliser, never computed."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics that need the whole batch, reported with those of the update."""

    def __len__(self) -> int:
        return len(self.batch)

    def select(self, rows: Tensor | slice) -> "Experience":
        """Return the experience of some rows, cut to the shortest padded length that holds them."""
        batch = self.batch.select(rows)
        width = batch.action_mask.shape[1]
        picked: dict[str, Any] = {"batch": batch, "metrics": self.metrics}
        for name in (f.name for f in fields(self) if f.name not in picked):
            value = getattr(self, name)
            picked[name] = value if value is None else value[rows] if value.dim() == 1 else value[rows][:, :width]
        return Experience(**picked)


class Learner(Protocol):
    """An agent as its update sees it: slots of a shared runtime, counters, and the algorithm's part of learning."""

    index: int
    gradient_is_finite: bool
    """False once a loss since the last optimizer step was not finite: the next step will be skipped."""
    updates: int
    steps: int
    skipped_steps: int

    @property
    def slot(self) -> int:
        """Slot of the policy."""

    @property
    def critic_slot(self) -> int | None:
        """Slot of the critic; None without one."""

    @property
    def config(self) -> LLMConfig:
        """Hyperparameters."""

    @property
    def runtime(self) -> Runtime:
        """The base, the slots and the engine that the agent shares with others."""

    @property
    def loss(self) -> Callable[..., Any] | None:
        """The user's loss function, instead of the algorithm's objective."""

    @property
    def lora_config(self) -> Any:
        """The adapter's ``peft.LoraConfig``."""

    @property
    def tokens(self) -> dict[str, int]:
        """Tokens spent by kind."""

    @property
    def learns_again(self) -> bool:
        """Whether the present batch is the one that was learned from last."""

    @property
    def reference_slot(self) -> int | None:
        """Slot of the reference policy; None: the base model."""

    @property
    def reference_key(self) -> bytes:
        """Fingerprint of the reference policy."""

    @property
    def rows_per_unit(self) -> int:
        """Rows that stay in one optimizer step."""

    @property
    def window_rows(self) -> int:
        """Rows of one optimizer step."""

    @property
    def micro_batch(self) -> MicroBatch:
        """The most that one forward pass takes of the agent's rows."""

    def shuffle(self, rows: int, epoch: int) -> Tensor:
        """Return the order of the rows in one epoch."""

    def prepare(self, batch: RolloutBatch) -> Experience:
        """Return what the losses need of a whole batch."""

    def objective(self, inputs: LossInputs, metrics: MetricReducer) -> Tensor:
        """Return the scalar loss of one micro-batch."""

    def window_denominator(self, mask: Tensor) -> float:
        """Return the denominator of an optimizer window."""

    def optimizer_settings(self) -> dict[int, AdamWSettings]:
        """Return the settings of the next optimizer step for each trained slot, the actor's first."""

    def note_step(self, *, taken: bool) -> None:
        """Count an optimizer step that was taken, or skipped."""

    def note_update(self) -> dict[str, float]:
        """Count an update, and move the reference if it is time; returns metrics of that."""

    def note_outcome(self, outcome: Outcome, metrics: Mapping[str, float]) -> None:
        """Count an iteration."""


class PolicyLearner(Learner, Protocol):
    """A learner whose policy is held near a reference by a KL."""

    kl_scale: float
    """Factor on ``beta`` that ``kl_target`` has found so far."""

    @property
    def config(self) -> SurrogateConfig:
        """Hyperparameters."""


# -- log-probs that a batch is compared with: of the policy at rollout, of a foreign engine, of the reference ---------


_ROW_TOKENS = 128
"""What a row costs besides its tokens (key, tensor object), counted in tokens."""

_STORES: "weakref.WeakKeyDictionary[Runtime, ReferenceLogprobs]" = weakref.WeakKeyDictionary()


def is_off_policy(agent: Learner, batch: RolloutBatch) -> bool:
    """Return whether the ratio can differ from 1: the batch takes several optimizer steps, or is learned from again."""
    several = agent.config.update_epochs > 1 or len(batch) > agent.window_rows
    return several or (agent.learns_again and sampled_as_trained(agent, batch))


def sampled_as_trained(agent: Learner, batch: RolloutBatch) -> bool:
    """Return whether the log-probs that came with a batch equal those of the trainer's own forward."""
    runtime = agent.runtime
    return batch.sampling_logps is not None and runtime.engine.exact and runtime.base.decodes_exactly


def behaviour_logprobs(agent: Learner, batch: RolloutBatch) -> Tensor:
    """Return old log-probs ``[B, L]``: those of the policy at rollout.

    Our own engine's log-probs are the policy's, so they need no second forward, unless the engine rounds differently
    from the trainer. Then, and if there are none, they are computed with the policy before the update.
    """
    if batch.sampling_logps is not None and sampled_as_trained(agent, batch):
        return batch.sampling_logps
    return agent.runtime.fixed_logprobs(agent.slot, batch, temperature_of(agent), agent.micro_batch)


def reported_logprobs(agent: Learner, batch: RolloutBatch) -> Tensor | None:
    """Return the log-probs ``[B, L]`` that another engine (vLLM) reported for its samples; None for our own engine."""
    return None if agent.runtime.engine.exact else batch.sampling_logps


def reference_logprobs(agent: Learner, batch: RolloutBatch) -> Tensor:
    """Return the reference's log-probs ``[B, L]`` on the CPU: its slot's, or those of the base with adapters off.

    Equal completions of a prompt, of several agents or of one, are computed once.
    """
    known = ReferenceLogprobs.of(agent.runtime)
    return known.logprobs(batch, agent.reference_slot, agent.reference_key, agent.micro_batch, temperature_of(agent))


class Sampled(NamedTuple):
    """The log-probs of a batch, each ``[B, L]``, that advantages and objective compare with the policy's."""

    old: Tensor | None
    """Of the policy at rollout; None if nothing needs them."""
    reported: Tensor | None
    """As another engine reported them; None for our own engine."""
    ref: Tensor | None
    """Of the reference; None without a KL."""
    kl: Tensor | None
    """Detached KL of each token, if it is needed before the update."""


def sampled_logprobs(agent: PolicyLearner, batch: RolloutBatch) -> Sampled:
    """Adapt the weight of the KL to a batch, and compute the log-probs that the batch is compared with."""
    c = agent.config
    old = behaviour_logprobs(agent, batch) if is_off_policy(agent, batch) or c.kl_when_sampled else None
    reported = reported_logprobs(agent, batch)
    ref = reference_logprobs(agent, batch) if c.beta > 0 else None
    kl = None
    if c.kl_when_sampled and old is not None and ref is not None:
        kl = _sampled_kl(agent, old, ref, batch.action_mask)
    return Sampled(old, reported, ref, kl)


def behaviour_entropy(agent: Learner, batch: RolloutBatch) -> Tensor:
    """Return the entropy ``[B, L]`` in nats of the distributions that the policy draws from, 0 off the action mask."""
    return agent.runtime.fixed_entropy(agent.slot, batch, temperature_of(agent), agent.micro_batch).cpu()


def temperature_of(agent: Learner) -> float:
    """Return the temperature that an agent's log-probs are of."""
    return float(getattr(agent.config, "temperature", 1.0))


def _sampled_kl(agent: PolicyLearner, old: Tensor, ref: Tensor, mask: Tensor) -> Tensor:
    """Return the detached KL ``[B, L]`` of the samples, on the CPU, after adapting its weight to them."""
    c, before, base, mask = agent.config, old.cpu(), ref.cpu(), mask.cpu()
    sums = masked_sum(before - base, mask, -1)
    if c.kl_target is not None and len(sums):
        samples = min(len(sums), c.kl_horizon)  # more could make the weight negative
        mean = float(sums.double().mean())
        agent.kl_scale = adaptive_kl_coefficient(
            agent.kl_scale, mean, c.kl_target, horizon=float(c.kl_horizon), samples=samples
        )
    return kl_estimate(before, base, c.kl_estimator, c.kl_clamp_value, mask=mask)


# -- log-probs of the reference, computed once for all agents that share it -------------------------------------------


class ReferenceLogprobs:
    """Log-probs of completion tokens by (policy, row), the oldest forgotten beyond ``max_tokens``.

    A fixed policy gives a row the same bits for every agent and in every batch, so agents may share them.
    """

    def __init__(self, runtime: Runtime, max_tokens: int = 2**25) -> None:
        self._runtime = weakref.ref(runtime)
        self.max_tokens = max_tokens
        self.rows_computed = 0
        """Rows that were not in the store and went through the base model."""
        self._known: OrderedDict[bytes, Tensor] = OrderedDict()
        self._tokens = 0

    @classmethod
    def of(cls, runtime: Runtime) -> "ReferenceLogprobs":
        """Return the store that all agents of a runtime share."""
        if runtime not in _STORES:
            _STORES[runtime] = cls(runtime)
        return _STORES[runtime]

    def logprobs(
        self, batch: RolloutBatch, slot: int | None, policy: bytes, most: MicroBatch, temperature: float = 1.0
    ) -> Tensor:
        """Return log-probs ``[B, L]``, 0 off the action mask, on the CPU.

        ``slot`` holds the policy, None for the base model alone; ``policy`` is its fingerprint.
        """
        of = policy + repr(float(temperature)).encode()
        keys = [_key(of, batch, row) for row in range(len(batch))]
        missing = list({key: row for row, key in enumerate(keys) if key not in self._known}.values())
        found = {key: self._known[key] for key in keys if key in self._known}
        if missing:
            part, runtime = batch.select(torch.tensor(missing)).with_prompts_once(), self._runtime()
            assert runtime is not None
            values = runtime.fixed_logprobs(slot, part, temperature, most).cpu()
            for place, row in enumerate(missing):
                found[keys[row]] = values[place][part.action_mask[place].cpu()].clone()
                self._keep(keys[row], found[keys[row]])
            self.rows_computed += len(missing)
        mask = batch.action_mask.cpu()
        flat = torch.cat([found[key] for key in keys]) if keys else torch.zeros(0)
        return torch.zeros(mask.shape).masked_scatter(mask, flat)

    def _keep(self, key: bytes, values: Tensor) -> None:
        self._known[key] = values
        self._tokens += len(values) + _ROW_TOKENS
        while self._tokens > self.max_tokens and len(self._known) > 1:
            self._tokens -= len(self._known.popitem(last=False)[1]) + _ROW_TOKENS


def fingerprint(factors: Sequence[tuple[Tensor, Tensor]], scaling: float) -> bytes:
    """Return a digest of an adapter; equal adapters are equal policies."""
    digest = hashlib.blake2b(repr(scaling).encode(), digest_size=16)
    for pair in factors:
        for factor in pair:
            digest.update(factor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.digest()


def _key(policy: bytes, batch: RolloutBatch, row: int) -> bytes:
    length = int(batch.lengths[row])
    digest = hashlib.blake2b(len(policy).to_bytes(4) + policy, digest_size=16)
    digest.update(batch.ids[row, :length].cpu().numpy().tobytes())
    digest.update(batch.action_mask[row, : length - 1].cpu().numpy().tobytes())
    return digest.digest()
