"""What an update needs of an agent (:class:`Learner`), what it learns from, and the log-probs that it compares."""

import hashlib
import math
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from agilerl import streams
from agilerl.algorithms.base import Algorithm, while_open
from agilerl.algorithms.config import CosineLRScheduleConfig, LLMConfig, SurrogateConfig
from agilerl.algorithms.forward import fixed_logprobs
from agilerl.checks.arguments import Fraction, checked
from agilerl.data import LossInputs, MicroBatch, RolloutBatch
from agilerl.errors import EngineError
from agilerl.functional import MetricReducer, adaptive_kl_coefficient, kl_estimate, masked_sum
from agilerl.hpo.guard import Vitals
from agilerl.hpo.parameters import Gene, HyperparameterConfig, genes_in_force
from agilerl.models.operators import Part, merged
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


BAD_STEPS = 2
"""Optimizer steps skipped in a row, because a loss or a gradient was not finite, that make an agent sick."""

MEASURES = {
    "entropy": "entropy",
    "completions/mean_length": "length",
    "reward": "reward",
    "frac_reward_zero_std": "equal",
}
"""Metrics of an update that the guards read, with their names for them."""
KEPT = ("reward_before", "equal_first")
"""What the guards read of earlier generations."""


class Learner:
    """An agent as its update and its state see it: slots of a shared runtime, counters, and how it learns."""

    config: LLMConfig
    algorithm: Algorithm
    env_type: ClassVar[str] = "reasoning"
    """What it learns from: rewards of its own completions, or a task's demonstrations or pairs."""
    hp_config: HyperparameterConfig | Mapping[str, Gene] | None
    is_open: bool = True
    """False after ``clean_up``, which gives the agent's slots to other agents."""
    runtime: Runtime
    loss: Callable[..., Any] | None
    """The user's loss function, instead of the algorithm's objective."""
    lora_config: Any
    cosine_lr_schedule_config: CosineLRScheduleConfig | None
    pad_token: str | None
    pad_token_id: int
    index: int
    parent: int | None = None
    """Index of the agent that this one was cloned from; None for a founder."""
    mut: str = "None"
    """What the last mutation did, in a few words."""
    steps: int = 0
    """Trajectories trained on so far."""
    position: int = 0
    """Prompts of the training stream that this agent has consumed."""
    updates: int = 0
    """Calls of ``learn`` so far: the position of the learning-rate schedule and of the mini-batch shuffles."""
    rollouts: int = 0
    """Batches of prompts sampled so far; part of the key of every sampled token."""
    skipped_steps: int = 0
    """Optimizer steps skipped because the loss or the gradient was not finite."""
    schedule_factor: float = 1.0
    """Factor on the learning rates that the run's schedule sets before each iteration; not part of the state."""
    tokens: dict[str, int]
    metrics: dict[str, float]
    outcomes: dict[str, int]
    vitals: dict[str, list[float]]
    _lease: Callable[[], object]
    rows_per_unit: ClassVar[int] = 1
    """Rows that belong together and stay in one optimizer step; 2 if rows come in pairs."""
    trained_slots: ClassVar[int] = 1
    """Slots that an agent trains: the policy's, and a critic's if there is one."""
    slot: int = while_open()
    """Slot of the policy."""
    reference_slot: int | None = while_open()
    """Slot of the frozen reference policy; None: the base model with adapters off."""
    critic_slot: int | None = while_open()
    """Slot of the critic, for algorithms that have one."""
    learns_again: bool = False
    """True while ``learn`` trains on tensors that its last call trained on."""
    gradient_is_finite: bool = True
    """False once a loss since the last optimizer step was not finite: the next step will be skipped."""
    reference_key: bytes = b"base"
    """Fingerprint of the reference; agents with equal ones share its log-probs."""
    knows_base: bool = True
    """False if the agent comes from a checkpoint that does not say which weights its base had."""
    reference_tracker: int = 0
    """How often the reference has been told to move."""
    _reference_lease: Callable[[], object]
    _told_fixed: bool = False
    outcome: Outcome = "ok"
    """The result of the last iteration."""
    bad_steps: int = 0
    """Optimizer steps in a row, up to the last one, that were skipped because something was not finite."""
    sick: str = ""
    """Why the agent cannot be elite or parent and is replaced at the next selection; empty if it is healthy."""

    @property
    def genes(self) -> dict[str, Gene]:
        """The hyperparameters that may mutate; none without an ``hp_config``."""
        if self.hp_config is None:
            return {}
        if isinstance(self.hp_config, HyperparameterConfig):
            return genes_in_force(self.algorithm.Config, self.hp_config)
        return dict(self.hp_config)

    def check_open(self) -> None:
        """Raise EngineError once the agent has been cleaned up."""
        if not self.is_open:
            raise EngineError(
                f"agent {self.index} was cleaned up: another agent may use its slot, so it cannot act, learn or be "
                "saved any more; clone or save an agent before clean_up(), or make a new one"
            )

    # -- learning: what the algorithm says ------------------------------------------------------------------------

    def prepare(self, batch: RolloutBatch) -> Experience:
        """Return what the losses need of a whole batch: rows kept, advantages, old and reference log-probs."""
        raise NotImplementedError(f"{type(self).__name__} does not define prepare, which every algorithm needs")

    def objective(self, inputs: LossInputs, metrics: MetricReducer) -> Tensor:
        """Return the scalar loss of one micro-batch, already divided by ``inputs.denominator``."""
        raise NotImplementedError(f"{type(self).__name__} does not define objective, which every algorithm needs")

    def window_denominator(self, mask: Tensor) -> float:
        """Return the denominator of an optimizer window from its whole action mask ``[rows, L]``."""
        raise NotImplementedError(f"{type(self).__name__} lacks window_denominator, which every algorithm needs")

    @property
    def window_rows(self) -> int:
        """Trajectories of one optimizer step."""
        return self.config.mini_batch_size or self.config.batch_size

    @property
    def micro_batch(self) -> MicroBatch:
        """The most that one forward pass takes of the agent's rows: the user's number, or what suits the base."""
        given, unit = self.config.micro_batch_size_per_gpu, self.rows_per_unit
        if given is not None:
            return MicroBatch(given * unit, None, unit)
        size = self.runtime.pass_size
        if self.critic_slot is not None:  # it reads the tokens a second time, in the same pass
            halves = (max(size.tokens, tokens // 2) for tokens in (size.whole, size.recomputed))
            size = size._replace(**dict(zip(("whole", "recomputed"), halves)))
        return MicroBatch(None, unit=unit, **size._asdict())

    @property
    def current_lr(self) -> float:
        """Learning rate of the next step, the schedule applied."""
        return self.config.lr * self.lr_factor

    @property
    def lr_factor(self) -> float:
        """What the schedules of the agent and of the run multiply a learning rate by."""
        schedule = self.cosine_lr_schedule_config
        return self.schedule_factor * (1.0 if schedule is None else schedule.factor(self.updates))

    def optimizer_settings(self) -> dict[int, AdamWSettings]:
        """Return the settings of the next optimizer step for each slot that this agent trains, the actor's first."""
        return {self.slot: self.adamw(self.current_lr)}

    def adamw(self, lr: float) -> AdamWSettings:
        """Return the agent's AdamW settings with a learning rate."""
        c = self.config
        return AdamWSettings(
            lr=lr,
            beta1=c.adam_beta1,
            beta2=c.adam_beta2,
            eps=c.adam_eps,
            weight_decay=c.weight_decay,
            max_grad_norm=c.max_grad_norm,
        )

    def shuffle(self, rows: int, epoch: int) -> Tensor:
        """Return the order of the rows in one epoch: a function of seed, index, update and epoch alone."""
        rng = streams.stream(self.config.seed, "minibatch", self.index, self.updates, epoch)
        return torch.from_numpy(rng.permutation(rows))

    # -- slots ----------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Rank of the adapter."""
        return self.runtime.store.ranks[self.slot]

    def _lease_of(self, slot: int) -> Callable[[], object]:
        """Return a callback that frees a slot exactly once: when called, or when the agent is garbage-collected."""
        return weakref.finalize(self, self.runtime.store.release, slot)

    # -- reference policy -----------------------------------------------------------------------------------------

    @checked
    def set_reference_policy(self, reference_update_tracker: int) -> None:
        """Make the present policy the reference when the tracker advances past its stored value.

        With ``use_separate_reference_adapter=False`` the reference cannot move: it stays the base model, with a warning
        once per agent.
        """
        if reference_update_tracker <= self.reference_tracker:
            return
        self.reference_tracker = reference_update_tracker
        if getattr(self.config, "use_separate_reference_adapter", True):
            self.set_reference(self.runtime.store.adapter(self.slot))
        elif not self._told_fixed:
            self._told_fixed = True
            warnings.warn(
                "set_reference_policy leaves the reference as it is, the base model: use_separate_reference_adapter is "
                "False; set it to True to let the reference move",
                stacklevel=2,
            )

    def forget_reference(self) -> None:
        """Make the base model the reference, and free the slot of another one."""
        if self.reference_slot is not None:
            self._reference_lease()
        self.reference_slot, self.reference_key = None, b"base"

    def set_reference(self, factors: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Make these factors the frozen reference policy, in a separate slot; their rank may differ from ours."""
        store = self.runtime.store
        rank, scaling = len(factors[0][0]), float(store.scaling[self.slot])
        if self.reference_slot is None:
            self.reference_slot = store.allocate(rank, scaling)
            self._reference_lease = self._lease_of(self.reference_slot)
        # A slot that is used again may have held factors of another rank.
        store.set_rank(self.reference_slot, rank, scaling)
        store.load_adapter(self.reference_slot, factors)
        self.reference_key = fingerprint(factors, scaling)

    def note_update(self) -> dict[str, float]:
        """Count an update, and move the reference towards the policy after each ``ref_sync_steps`` of them.

        Returns ``reference/energy`` then: the share of the new reference's delta that its rank holds.
        """
        self.updates += 1
        every = getattr(self.config, "ref_sync_steps", None)
        if every is None or self.updates % every:
            return {}
        return {"reference/energy": self.mix_reference(self.config.ref_sync_alpha)}  # type: ignore[attr-defined]

    @checked
    def mix_reference(self, alpha: Fraction) -> float:
        """Make ``alpha policy + (1 - alpha) reference``, a mean of weights, the reference (arXiv 2404.09656).

        A delta of the mean may need the ranks of both; the new reference has the agent's rank and is the best
        approximation (Eckart-Young). Returns the share of the squared singular values that it keeps: 1 if the reference
        was the base model, or with ``alpha`` 1.
        """
        self.check_open()
        store, energy = self.runtime.store, 1.0
        factors, scaling = store.adapter(self.slot), float(store.scaling[self.slot])
        # With 1 it is the policy to the bit, which a decomposition would not give.
        if alpha < 1:
            parts = [Part(factors, scaling, alpha)]
            if self.reference_slot is not None:
                old, its_scaling = store.adapter(self.reference_slot), float(store.scaling[self.reference_slot])
                parts.append(Part(old, its_scaling, 1 - alpha))
            factors, energy = merged(parts, self.rank, scaling)
        self.set_reference(factors)
        return energy

    # -- health: results of iterations, and whether the agent may still be a parent -------------------------------

    def note_step(self, *, taken: bool) -> None:
        """Count an optimizer step that was taken, or skipped because something was not finite."""
        self.bad_steps = 0 if taken else self.bad_steps + 1
        if self.bad_steps >= BAD_STEPS:
            self.sick = f"loss, gradient or samples were not finite in {self.bad_steps} optimizer steps in a row"

    def note_outcome(self, outcome: Outcome, metrics: Mapping[str, float]) -> None:
        """Count an iteration, and keep what the collapse guard reads."""
        self.outcome, self.metrics = outcome, dict(metrics)
        self.outcomes[outcome] += 1
        for metric, name in MEASURES.items():
            self.vitals[name].append(metrics.get(metric, math.nan))
        self.vitals["equal_first"] = self.vitals["equal_first"] or self.vitals["equal"][:1]

    def after_selection(self) -> None:
        """Begin a generation: selection has acted on the findings so far, as far as it could."""
        self.sick = ""
        self.vitals = {name: [] for name in MEASURES.values()} | {
            "reward_before": self.vitals["reward"] or self.vitals["reward_before"],
            "equal_first": self.vitals["equal_first"],
        }

    def present_vitals(self) -> Vitals:
        """Return the numbers of this generation."""
        return Vitals(**{name: tuple(values) for name, values in self.vitals.items()})


class PolicyLearner(Learner):
    """A learner whose policy is held near a reference by a KL."""

    config: SurrogateConfig
    kl_scale: float = 1.0
    """Factor on ``beta`` that ``kl_target`` has found so far."""

    @property
    def kl_coef(self) -> float:
        """Weight of the KL: ``beta``, adapted to ``kl_target`` if there is one."""
        return self.config.beta * self.kl_scale


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
    return fixed_logprobs(agent.runtime, agent.slot, batch, temperature_of(agent), agent.micro_batch)


def reference_logprobs(agent: Learner, batch: RolloutBatch) -> Tensor:
    """Return the reference's log-probs ``[B, L]`` on the CPU: its slot's, or those of the base with adapters off.

    Equal completions of a prompt, of several agents or of one, are computed once.
    """
    known = ReferenceLogprobs.of(agent.runtime)
    return known.logprobs(batch, agent.reference_slot, agent.reference_key, agent.micro_batch, temperature_of(agent))


def sampled_logprobs(
    agent: PolicyLearner, batch: RolloutBatch
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Adapt the weight of the KL to a batch, and return what it is compared with, each ``[B, L]`` or None if unused.

    These are the log-probs of the policy at rollout, those that another engine reported, those of the reference, and
    the detached KL of each token.
    """
    c = agent.config
    # For a ratio that can differ from 1, or for a KL that is needed before the update.
    old = behaviour_logprobs(agent, batch) if is_off_policy(agent, batch) or c.kl_when_sampled else None
    # Our own engine samples from the policy that is trained: there is nothing to correct.
    reported = None if agent.runtime.engine.exact else batch.sampling_logps
    ref = reference_logprobs(agent, batch) if c.beta > 0 else None
    kl = None
    if c.kl_when_sampled and old is not None and ref is not None:
        kl = _sampled_kl(agent, old, ref, batch.action_mask)
    return old, reported, ref, kl


def temperature_of(agent: Learner) -> float:
    """Return the temperature that an agent's log-probs are of."""
    return float(getattr(agent.config, "temperature", 1.0))


def own_weights(agent: Learner) -> Mapping[str, float]:
    """Return an agent's weights for parts of the reward; empty if it learns from data."""
    weights: Mapping[str, float] = getattr(agent.config, "reward_weights", {})
    return weights


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

    def __init__(self, runtime: Runtime, max_tokens: int = 2**25) -> None:  # 128 MiB of log-probs
        # Weak, as the key that leads here is: the store must not keep its runtime alive.
        self._runtime, self.processes = weakref.ref(runtime), runtime.processes
        self.max_tokens = max_tokens
        self.rows_computed = 0
        """Rows that were not in the store and went through the base model."""
        self._known: OrderedDict[bytes, Tensor] = OrderedDict()
        self._tokens = 0

    @classmethod
    def of(cls, runtime: Runtime) -> "ReferenceLogprobs":
        """Return the store that all agents of a runtime share.

        Processes that compute missing rows together have to know the same rows, so they forget what each knows alone.
        """
        store = _STORES.get(runtime)
        if store is None or store.processes != runtime.processes:
            store = _STORES[runtime] = cls(runtime)
        return store

    def logprobs(
        self, batch: RolloutBatch, slot: int | None, policy: bytes, most: MicroBatch, temperature: float = 1.0
    ) -> Tensor:
        """Return log-probs ``[B, L]``, 0 off the action mask, on the CPU.

        ``slot`` holds the policy, None for the base model alone; ``policy`` is its fingerprint.
        """
        # As a float: 1 and 1.0 are the same temperature.
        of = policy + repr(float(temperature)).encode()
        keys = [_key(of, batch, row) for row in range(len(batch))]
        missing = list({key: row for row, key in enumerate(keys) if key not in self._known}.values())
        # Taken now, because the rows that are computed may push these out of the store.
        logprobs = {key: self._known[key] for key in keys if key in self._known}
        if missing:
            # Whole prompts alone are shared: with other common parts a row's bits would depend on its batch.
            part, runtime = batch.select(torch.tensor(missing)).with_prompts_once(), self._runtime()
            assert runtime is not None
            values = fixed_logprobs(runtime, slot, part, temperature, most).cpu()
            for index, row in enumerate(missing):
                logprobs[keys[row]] = values[index][part.action_mask[index].cpu()]
                self._keep(keys[row], logprobs[keys[row]])
            self.rows_computed += len(missing)
        mask = batch.action_mask.cpu()
        flat = torch.cat([logprobs[key] for key in keys]) if keys else torch.zeros(0)
        return torch.zeros(mask.shape).masked_scatter(mask, flat)

    def _keep(self, key: bytes, values: Tensor) -> None:
        self._known[key] = values
        self._tokens += len(values) + _ROW_TOKENS
        # The newest entry stays, even if it alone is over the limit.
        while self._tokens > self.max_tokens and len(self._known) > 1:
            self._tokens -= len(self._known.popitem(last=False)[1]) + _ROW_TOKENS


def fingerprint(factors: Sequence[tuple[Tensor, Tensor]], scaling: float) -> bytes:
    """Return a digest of an adapter; equal adapters are equal policies."""
    digest = hashlib.blake2b(repr(scaling).encode(), digest_size=16)
    for pair in factors:
        for factor in pair:
            # In fp32, because numpy has no bfloat16.
            digest.update(factor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.digest()


def _key(policy: bytes, batch: RolloutBatch, row: int) -> bytes:
    length = int(batch.lengths[row])
    # With its length: the end of a policy's name must not be taken for token ids.
    digest = hashlib.blake2b(len(policy).to_bytes(4) + policy, digest_size=16)
    digest.update(batch.ids[row, :length].cpu().numpy().tobytes())
    digest.update(batch.action_mask[row, : length - 1].cpu().numpy().tobytes())
    return digest.digest()
