"""Proximal Policy Optimization (arXiv 1707.06347) with a critic that is a second adapter on the same base."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Unpack

import torch
from pydantic import Field, model_validator
from torch import Tensor

from agilerl.algorithms.agent import LLMAlgorithm
from agilerl.algorithms.base import Algorithm, AlgorithmConfig
from agilerl.algorithms.config import RolloutLLMConfig, SurrogateConfig
from agilerl.algorithms.credit import check_whole_episodes, per_turn_sums, shaped_advantages
from agilerl.algorithms.forward import fixed_values
from agilerl.algorithms.keywords import PPOKeywords
from agilerl.algorithms.learner import Experience, PolicyLearner, is_off_policy, sampled_logprobs
from agilerl.algorithms.objective import PolicyParts, policy_objective
from agilerl.data import LossInputs, RolloutBatch
from agilerl.errors import ConfigError
from agilerl.functional import (
    LossNorm,
    MetricReducer,
    broadcast_turns,
    explained_variance,
    gae,
    kl_estimate,
    masked_whiten,
    normaliser,
    place_rewards,
    pool_turn_values,
    value_clip_region,
    value_loss,
)
from agilerl.hpo.mutation import Mutation
from agilerl.hpo.parameters import Evolve, Gene, HyperparameterConfig, genes_in_force
from agilerl.models.operators import resize
from agilerl.models.slots import AdamWSettings


class PPOConfig(SurrogateConfig, RolloutLLMConfig):
    """Hyperparameters of PPO."""

    lr: ClassVar[float]  # type: ignore[misc]  # not a hyperparameter here: the two below take its place
    lr_actor: Annotated[float, Field(gt=0), Evolve(1e-6, 1e-2)] = 1e-5
    """Learning rate of the policy's adapter."""
    lr_critic: Annotated[float, Field(gt=0), Evolve(1e-6, 1e-2)] = 5e-5
    """Learning rate of the critic's adapter and value head."""
    group_size: Annotated[int, Field(ge=1), Evolve(1, 32)] = 1
    """Completions sampled for each prompt; the critic is the baseline, so one suffices."""
    vf_coef: Annotated[float, Field(gt=0)] = 0.5
    """Weight of the value loss. It shares no weight with the policy: what it moves is the critic's gradient norm."""
    critic_warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Updates at the start in which only the critic learns; the policy waits until its values mean something."""
    vf_clip_coef: Annotated[float | None, Field(gt=0), Evolve(0.05, 1.0)] = 0.2
    """How far a value may move in an update before its gradient stops; None: any distance."""
    gamma: Annotated[float, Field(ge=0, le=1), Evolve(0.9, 1.0, scale="linear")] = 1.0
    """Discount of one action token, or of one turn if credit goes to turns; environment tokens do not count."""
    gae_lambda: Annotated[float, Field(ge=0, le=1), Evolve(0.8, 1.0, scale="linear")] = 1.0
    """Lambda of generalised advantage estimation (arXiv 1506.02438): 1 trusts the rewards, 0 the critic."""
    turn_level_clip: bool = True
    """Clip the ratio of a whole turn, in batches with episodes of several turns; False: token by token."""
    turn_ratio_pooling: Literal["sum", "mean"] = "sum"
    """A turn's log-ratio: the sum over its tokens (the ratio of its probabilities) or their mean. With the sum,
    turns weigh by their length, and long ones reach the bounds sooner."""
    advantage_granularity: Literal["auto", "token", "turn"] = "auto"
    """What gets one value and one advantage; ``auto`` is ``turn`` where ratios are clipped by turn, else ``token``."""
    turn_value_reduction: Literal["final_value", "mean"] = "final_value"
    """A turn's value: that of its last action token, or the mean over its action tokens."""
    whiten_advantages: bool = True
    """Give the advantages of a batch mean 0 and variance 1, over its action tokens or its turns."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.turn_ratio_pooling == "mean" and not self.turn_level_clip:
            raise ValueError("turn_ratio_pooling='mean' contradicts turn_level_clip=False, without pooling; drop one")
        if self.turn_value_reduction == "mean" and self.advantage_level == "token":
            raise ValueError(
                "turn_value_reduction='mean' reduces the values of a turn, but advantages are those of tokens "
                f"(advantage_granularity={self.advantage_granularity!r}, turn_level_clip={self.turn_level_clip}); "
                "use advantage_granularity='turn' or leave the reduction out"
            )
        return self

    @property
    def pooling(self) -> Literal["sum", "mean"]:
        """What pooling takes of a unit's log-ratios."""
        return self.turn_ratio_pooling

    @property
    def loss_norm(self) -> LossNorm:
        """How token losses become one number: all tokens of the optimizer step weigh the same."""
        return "token-mean"

    @property
    def uses_turns(self) -> bool:
        """Whether the settings ask for turns; otherwise they are used if a batch has several."""
        return self.advantage_granularity == "turn"

    @property
    def advantage_level(self) -> Literal["token", "turn"]:
        """Unit that gets one advantage, if a batch has turns."""
        if self.advantage_granularity != "auto":
            return self.advantage_granularity
        return "turn" if self.turn_level_clip else "token"


def both_rates(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords, or genes, with ``lr`` as ``lr_actor`` and ``lr_critic`` where these are not given."""
    rates = dict(values)
    if "lr" in rates:
        rate = rates.pop("lr")
        rates = {"lr_actor": rate, "lr_critic": rate, **rates}
    return rates


class PPO(PolicyLearner, LLMAlgorithm):
    """Clipped policy gradient whose baseline is a learned value of every token (or turn)."""

    algorithm = Algorithm("PPO", PPOConfig)
    config: PPOConfig
    trained_slots: ClassVar[int] = 2
    critic_slot: int
    _critic_lease: Callable[[], object]

    if TYPE_CHECKING:  # at run time the keywords are what ``PPOConfig`` declares

        def __init__(self, *given: Any, **keywords: Unpack[PPOKeywords]) -> None: ...

    @classmethod
    def _merge(cls, config: AlgorithmConfig | None, keywords: Mapping[str, Any]) -> AlgorithmConfig:
        return super()._merge(config, both_rates(keywords))

    @property
    def genes(self) -> dict[str, Gene]:
        """The hyperparameters that may mutate; a gene ``lr`` is both learning rates."""
        given = self.hp_config
        if isinstance(given, HyperparameterConfig) and "lr" in given:
            return genes_in_force(self.algorithm.Config, both_rates(given))
        return super().genes

    # -- credit and objective -------------------------------------------------------------------------------------

    def prepare(self, batch: RolloutBatch) -> Experience:
        """Return advantages, the critic's targets, and the log-probs and values that the objective compares with."""
        c = self.config
        check_whole_episodes("PPO", batch)
        batch = batch.select(batch.graded)  # a row without a grade teaches nothing
        # From here on every turn has a column of rewards.
        batch = replace(batch, rewards=_turn_rewards(batch))
        old, reported, ref, kl = sampled_logprobs(self, batch)
        values = fixed_values(self.runtime, self.critic_slot, batch, self.micro_batch).to(batch.ids.device)
        advantages, values, returns = self.credit(batch, values, kl)
        metrics = {"explained_variance": float(explained_variance(values, returns, batch.action_mask))}
        metrics |= {} if c.kl_target is None else {"kl_coef": self.kl_coef}
        if not self.has_turns(batch):  # -1 tells the objective that tokens are the only units of this batch
            batch = replace(batch, turn_ids=torch.full_like(batch.turn_ids, -1))
        old = old if is_off_policy(self, batch) else None
        return Experience(batch, advantages, old, ref, reported, values, returns, metrics=metrics)

    def credit(self, batch: RolloutBatch, values: Tensor, kl: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Return advantages, values and returns ``[B, L]``, 0 off the action mask; of turns, on each of its tokens.

        ``values`` ``[B, L]`` are the critic's, ``kl`` ``[B, L]`` the detached KL of each token. Environment tokens are
        skipped: neither discounted nor bootstrapped from.
        """
        c, mask, turn_ids = self.config, batch.action_mask, batch.turn_ids
        by_turn = c.advantage_level == "turn" and self.has_turns(batch)
        penalty = torch.zeros_like(values)
        if kl is not None and c.kl_placement == "reward":
            penalty = self.kl_coef * kl.to(values.device)
        # Rewards, values and mask of the units that get one advantage.
        if by_turn:
            turns = batch.rewards.shape[1]
            rewards = batch.rewards - per_turn_sums(penalty, turn_ids, turns)
            values = pool_turn_values(values, turn_ids, turns, c.turn_value_reduction)
            # (rows, tokens, turns) -> (rows, turns): which turns a row has played.
            mask = (turn_ids.unsqueeze(-1) == torch.arange(turns, device=turn_ids.device)).any(dim=1)
        else:
            rewards = place_rewards(batch.rewards, turn_ids) - penalty
        advantages, returns = gae(rewards, values, mask, c.gamma, c.gae_lambda)
        # Before a turn's advantage is spread over its tokens: each turn counts once.
        if c.whiten_advantages:
            advantages = masked_whiten(advantages, mask)
        if by_turn:
            advantages, values, returns = (broadcast_turns(x, turn_ids) for x in (advantages, values, returns))
        return shaped_advantages(c, advantages, batch.action_mask, kl, self.kl_coef), values, returns

    def has_turns(self, batch: RolloutBatch) -> bool:
        """Return whether credit goes by turn in this batch: an episode has two or more, or the user asks for turns."""
        several = batch.turn_ids.numel() > 0 and int(batch.turn_ids.max()) > 0
        return several or self.config.advantage_granularity == "turn"

    def objective(self, inputs: LossInputs, metrics: MetricReducer) -> Tensor:
        """Clipped surrogate, plus beta times the KL, plus ``vf_coef`` times the value loss: the mean over tokens."""
        c = self.config
        # All are -1 if prepare has found no turns in the whole batch.
        turns = inputs.turn_ids if inputs.turn_ids is not None and bool((inputs.turn_ids >= 0).any()) else None
        parts = PolicyParts.of(
            c,
            self.kl_coef,
            ratio="turn" if c.turn_level_clip and turns is not None else "token",
            pooling=c.turn_ratio_pooling,
            surrogate="clipped",
            bounds=c.clip_range,
            aggregation=c.loss_norm,
        )
        # KL(old || new): the tokens are the old policy's.
        metrics.add("approx_kl", kl_estimate(inputs.old_logp, inputs.logp), inputs.mask)
        return policy_objective(inputs, parts, metrics, c.vf_coef * self._value_error(inputs, turns, metrics))

    def _value_error(self, inputs: LossInputs, turns: Tensor | None, metrics: MetricReducer) -> Tensor:
        """Return half the clipped squared error of each token's value ``[b, L]``; a turn's is on each of its tokens."""
        c, mask, values = self.config, inputs.mask, inputs.values
        assert values is not None
        assert inputs.old_values is not None
        assert inputs.returns is not None
        if c.advantage_level == "turn" and turns is not None:
            values = broadcast_turns(
                pool_turn_values(values, turns, int(turns.max()) + 1, c.turn_value_reduction), turns
            )
        error = value_loss(values, inputs.old_values, inputs.returns, c.vf_clip_coef, mask=mask)
        metrics.add("value_loss", error, mask)
        if c.vf_clip_coef is not None:
            clipped = value_clip_region(values.detach(), inputs.old_values, inputs.returns, c.vf_clip_coef)
            metrics.add("vf_clipfrac", clipped, mask)
        return error

    def window_denominator(self, mask: Tensor) -> float:
        """Return the number of action tokens."""
        return float(normaliser(mask, self.config.loss_norm))

    # -- two learning rates ---------------------------------------------------------------------------------------

    @property
    def current_lr(self) -> float:
        """Learning rate of the actor's next step, the schedule applied."""
        return self.config.lr_actor * self.lr_factor

    def optimizer_settings(self) -> dict[int, AdamWSettings]:
        """Return the settings of the next optimizer step of the actor and of the critic; each is clipped by itself."""
        critic = self.config.lr_critic * self.lr_factor
        # A rate of 0 keeps the policy, weight decay included, while its moments form.
        policy = 0.0 if self.updates < self.config.critic_warmup_steps else self.current_lr
        return {self.slot: self.adamw(policy), self.critic_slot: self.adamw(critic)}

    # -- two slots ------------------------------------------------------------------------------------------------

    def _take_slots(self) -> None:
        super()._take_slots()
        self.critic_slot = self._new_slot()
        self._critic_lease = self._lease_of(self.critic_slot)

    def clean_up(self) -> None:
        """Free the agent's slots; calls that need one raise EngineError from now on."""
        if self.is_open:
            self._critic_lease()
        super().clean_up()

    def move_to(self, slot: int) -> None:
        """Move the policy's adapter into a free slot, and the critic's into the lowest free one below its own."""
        super().move_to(slot)
        store = self.runtime.store
        free = store.lowest_free_slot()
        if free is not None and free < self.critic_slot:
            store.move(self.critic_slot, free)
            self._critic_lease()
            self.critic_slot, self._critic_lease = free, self._lease_of(free)

    def _mutate_adapter(self, mutation: Mutation) -> str:
        """Change the rank of both adapters alike."""
        label = super()._mutate_adapter(mutation)
        resize(self.runtime.store, self.critic_slot, self.rank, self.config.seed)
        return label


def _turn_rewards(batch: RolloutBatch) -> Tensor:
    """Return rewards ``[B, K]`` of each turn, 0 if it has none; an episode's only reward goes to its last turn."""
    rewards = batch.rewards.nan_to_num(nan=0.0)
    turns = int(batch.turn_ids.max()) + 1 if batch.turn_ids.numel() else 1
    if turns <= rewards.shape[1]:
        return rewards
    if rewards.shape[1] > 1:
        raise ConfigError(f"turn_ids name {turns} turns, the rewards have {rewards.shape[1]} columns; give one a turn")
    last = batch.turn_ids.amax(dim=1, keepdim=True).clamp(min=0)  # -1: a row without an action
    return torch.zeros((len(batch), turns), dtype=rewards.dtype, device=rewards.device).scatter(1, last, rewards)
