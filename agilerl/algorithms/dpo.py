"""Direct Preference Optimization (arXiv 2305.18290), with the losses that came after it."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, Unpack

import torch
from pydantic import Field, model_validator
from torch import Tensor

from agilerl.algorithms.base import Algorithm
from agilerl.algorithms.config import ReferenceConfig
from agilerl.algorithms.keywords import DPOKeywords
from agilerl.algorithms.learner import Experience
from agilerl.algorithms.sft import DataAlgorithm, DataConfig
from agilerl.checks.validation import Needs
from agilerl.data import LossInputs, MicroBatch, RolloutBatch
from agilerl.errors import ConfigError
from agilerl.functional import (
    MetricReducer,
    PreferenceOptions,
    PreferenceScores,
    preference_loss,
    preference_metrics,
    preference_scores,
)
from agilerl.hpo.parameters import Evolve

LossType = Literal[
    "sigmoid",
    "cdpo",
    "robust",
    "hinge",
    "ipo",
    "apo_zero",
    "apo_down",
    "sppo_hard",
    "nca_pair",
    "exo_pair",
    "bco_pair",
    "aot",
    "aot_pair",
    "discopop",
    "simpo",
    "cpo",
    "orpo",
    "sft",
]
_SMOOTHED = {"sigmoid", "cdpo", "robust", "exo_pair", "aot", "aot_pair", "simpo", "cpo"}
_OVER_PAIRS = {"bco_pair", "aot", "aot_pair"}
"""Losses in which the pairs of an optimizer step depend on each other, so that a step is never split."""
_PER_TOKEN = {"simpo", "orpo"}
"""Losses of log-probs per token."""
_WITHOUT_REFERENCE = {"simpo", "cpo", "orpo", "sft"}
_WITH_NLL = {"cpo", "orpo"}
"""Losses whose papers add the cross-entropy of the chosen completions."""


class DPOConfig(ReferenceConfig, DataConfig):
    """Hyperparameters of DPO; batch sizes count pairs."""

    group_size: ClassVar[int] = 2
    """Rows of a pair."""
    lr: Annotated[float, Field(gt=0), Evolve(1e-6, 1e-2)] = 5e-6
    """Learning rate of AdamW."""
    batch_size: Annotated[int, Field(ge=1), Evolve(8, 512)] = 16
    """Pairs of one optimizer step."""
    mini_batch_size: Annotated[int | None, Field(ge=1)] = None
    """Overrides ``batch_size`` as the number of pairs of one optimizer step."""
    micro_batch_size_per_gpu: Annotated[int | None, Field(ge=1)] = None
    """Pairs of one forward and backward pass; None takes as many as fill the device, on a CPU at most 2,048
    tokens; more where a shared prompt would be computed twice, if the machine's memory holds them."""
    beta: Annotated[float, Field(gt=0), Evolve(0.01, 1.0)] = 0.1
    """Factor between log-ratios and implicit rewards: the larger, the closer the policy stays to the reference."""
    loss_type: LossType | Annotated[tuple[LossType, ...], Field(min_length=1)] = "sigmoid"
    """A loss of the family by name, or several, which are added (``sft``: cross-entropy of the chosen completions)."""
    loss_weights: tuple[float, ...] | None = None
    """Weight of each of several losses; None: 1 each."""
    nll_alpha: Annotated[float, Field(ge=0), Evolve(0.01, 2.0)] = 0.0
    """Weight of the chosen completions' cross-entropy per token, added to the loss (arXiv 2404.19733). If it is not
    set, ``cpo`` and ``orpo`` take 1."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a label is wrong, for the losses that take it into account."""
    discopop_tau: Annotated[float, Field(gt=0), Needs("loss_type", ("discopop",))] = 0.05
    """Temperature of the modulation of the loss ``discopop``."""
    simpo_gamma: Annotated[float, Field(ge=0), Needs("loss_type", ("simpo",))] = 0.5
    """Margin of the loss ``simpo`` (arXiv 2405.14734), whose ``beta`` is 2 to 10 in its paper: it multiplies log-probs
    per token."""
    reference_free: bool = False
    """Leave the reference out of the losses. ``simpo``, ``cpo`` and ``orpo`` never have one."""
    ld_alpha: Annotated[float | None, Field(ge=0, le=1)] = None
    """LD-DPO (arXiv 2409.06411): weight of log-probs beyond the length of the pair's shorter completion; None: 1."""
    use_weighting: bool = False
    """WPO (arXiv 2406.11827): weight pairs by how likely the policy is to say them."""

    @model_validator(mode="before")
    @classmethod
    def _with_nll(cls, values: Any) -> Any:
        """Set ``nll_alpha`` where the loss prescribes it, so that it is written down with the other settings."""
        names = values.get("loss_type") if isinstance(values, dict) and "nll_alpha" not in values else ()
        listed = (names,) if isinstance(names, str) else names
        if isinstance(listed, list | tuple) and "sft" not in listed and any(name in listed for name in _WITH_NLL):
            return {**values, "nll_alpha": 1.0}
        return values

    @model_validator(mode="after")
    def _losses_agree(self) -> Self:
        names = (self.loss_type,) if isinstance(self.loss_type, str) else self.loss_type
        if self.loss_weights is not None and len(self.loss_weights) != len(names):
            raise ValueError(f"loss_weights: expected {len(names)} numbers, found {len(self.loss_weights)} for {names}")
        if len(set(names)) != len(names):
            raise ValueError(f"loss_type={names} names a loss twice; name it once and raise its weight")
        if set(names) == {"sft"}:
            raise ValueError("loss_type='sft' alone has no preference in it; add a preference loss, or use SFT")
        if "sft" in names and self.nll_alpha > 0:
            raise ValueError(f"loss_type={names} and nll_alpha={self.nll_alpha} both add a cross-entropy; drop one")
        if self.label_smoothing > 0 and not _SMOOTHED & set(names):
            raise ValueError(
                f"label_smoothing={self.label_smoothing} has no effect with loss_type={self.loss_type!r}; set it to 0, "
                f"or use one of {', '.join(sorted(_SMOOTHED))}"
            )
        if "cdpo" in names and self.label_smoothing == 0:
            raise ValueError("loss_type='cdpo' is the sigmoid loss unless label_smoothing is above 0; set it")
        if _OVER_PAIRS & set(names) and self.micro_batch_size_per_gpu is not None:
            raise ValueError(
                f"loss_type={self.loss_type!r} compares the pairs of an optimizer step with each other, so it cannot "
                f"be split; found micro_batch_size_per_gpu={self.micro_batch_size_per_gpu}, leave it out"
            )
        if self.ref_sync_steps is not None and not self.needs_reference:
            raise ValueError(
                f"ref_sync_steps={self.ref_sync_steps} moves the reference, which loss_type={self.loss_type!r} with "
                f"reference_free={self.reference_free} does not use; drop it"
            )
        if self.use_weighting and {"aot", "aot_pair"} & set(names):
            raise ValueError(f"use_weighting weighs pairs, loss_type={self.loss_type!r} sorts completions; drop one")
        if self.ld_alpha is not None and _PER_TOKEN & set(names):
            raise ValueError(f"ld_alpha={self.ld_alpha} weighs sums, loss_type={self.loss_type!r} has means; drop it")
        return self

    @property
    def losses(self) -> dict[str, float]:
        """The weighted losses, by name."""
        names = (self.loss_type,) if isinstance(self.loss_type, str) else self.loss_type
        weights: dict[str, float] = dict(zip(names, self.loss_weights or [1.0] * len(names)))
        return weights | ({"sft": self.nll_alpha} if self.nll_alpha > 0 else {})

    @property
    def needs_reference(self) -> bool:
        """Whether a loss compares the policy with the reference."""
        return not self.reference_free and not set(self.losses) <= _WITHOUT_REFERENCE

    @property
    def per_token(self) -> bool:
        """Whether implicit rewards are log-probs per token, not sums."""
        return set(self.losses) <= _PER_TOKEN | {"sft"}


class PairCount(float):
    """Number of pairs of an optimizer step, which also knows how many tokens their chosen completions have."""

    chosen_tokens: float

    def __new__(cls, pairs: float, chosen_tokens: float) -> Self:
        """Make a number of pairs."""
        count = super().__new__(cls, pairs)
        # A loss has one denominator, and the cross-entropy of chosen completions needs a second one.
        count.chosen_tokens = chosen_tokens
        return count


class DPO(DataAlgorithm):
    """``-log sigmoid(beta ((pi_c - ref_c) - (pi_r - ref_r)))`` and its relatives, log-probs summed over completions.

    Rows come in pairs, the chosen completion first. The reference is fixed: the base model, or the agent's reference
    adapter if one was set. Losses without a reference (SimPO, CPO, ORPO, ``reference_free``) do not compute it.
    """

    algorithm = Algorithm("DPO", DPOConfig)
    config: DPOConfig
    env_type: ClassVar[str] = "preference"
    rows_per_unit: ClassVar[int] = 2

    if TYPE_CHECKING:  # at run time the keywords are what ``DPOConfig`` declares

        def __init__(self, *given: Any, **keywords: Unpack[DPOKeywords]) -> None: ...

    def prepare(self, batch: RolloutBatch) -> Experience:
        """Return the batch with the reference's log-probs, if needed; raises ConfigError unless its rows are pairs."""
        self._check_pairs(batch)
        reference = self.reference_logprobs(batch) if self.config.needs_reference else None
        # A preference loss reads no advantages.
        return Experience(batch, torch.zeros(batch.action_mask.shape), ref_logp=reference)

    def objective(self, inputs: LossInputs, metrics: MetricReducer) -> Tensor:
        """Sum of the pairs' losses / pairs of the optimizer step."""
        c, count = self.config, inputs.denominator
        if "sft" in c.losses and not isinstance(count, PairCount):
            raise ConfigError(
                f"the cross-entropy of chosen completions is per token, but the denominator {count!r} counts pairs "
                "only; give denominator=agent.window_denominator(mask) of the whole optimizer step"
            )
        scores = _pair_scores(inputs, c)
        total = preference_loss(
            scores,
            c.losses,
            c.beta,
            pairs=count,
            chosen_tokens=count.chosen_tokens if isinstance(count, PairCount) else None,
            options=PreferenceOptions(c.label_smoothing, c.discopop_tau, c.simpo_gamma),
        )
        for name, values in preference_metrics(scores, c.beta, per_token=c.per_token).items():
            metrics.add(name, values)
        if inputs.entropy is not None:
            metrics.add("entropy", inputs.entropy.detach(), inputs.mask)
        metrics.add("loss", total, reduction="sum")
        return total

    def window_denominator(self, mask: Tensor) -> float:
        """Return the number of pairs, and with it that of the chosen completions' tokens."""
        return PairCount(len(mask) / 2, float(mask[0::2].sum()))  # even rows are the chosen ones

    def score(self, batch: RolloutBatch) -> Tensor:
        """Return 1 for each pair ``[B / 2]`` whose chosen completion gained more on the reference than the other.

        Without a reference, whose log-prob is higher; per token if the losses are.
        """
        self._check_pairs(batch)
        mask, logprobs = batch.action_mask.cpu(), self.logprobs(batch).cpu()
        reference = self.reference_logprobs(batch) if self.config.needs_reference else 0.0
        gain = torch.where(mask, logprobs - reference, 0.0).double().sum(-1)
        if self.config.per_token:
            gain = gain / mask.sum(-1)  # no row is empty: _check_pairs
        return (gain[0::2] > gain[1::2]).double()

    @property
    def window_rows(self) -> int:
        """Rows of one optimizer step, two a pair."""
        return 2 * super().window_rows

    @property
    def micro_batch(self) -> MicroBatch:
        """The most that one forward pass takes: whole pairs, and the whole step if its pairs depend on each other."""
        if _OVER_PAIRS & set(self.config.losses):
            return MicroBatch(unit=self.window_rows)
        return super().micro_batch

    def _check_pairs(self, batch: RolloutBatch) -> None:
        groups = batch.groups
        if len(batch) % 2 or not torch.equal(groups[0::2], groups[1::2]):
            raise ConfigError(
                f"DPO learns from pairs of rows, chosen and rejected side by side, found {len(batch)} rows that are "
                "not pairs; use the batches of a PreferenceGym"
            )
        if not bool(batch.action_mask.any(dim=1).all()):
            alpha = f"; nll_alpha={self.config.nll_alpha} learns the chosen one" if self.config.nll_alpha > 0 else ""
            raise ConfigError(f"every pair needs two completions, found one without a token{alpha}; leave them out")


def _pair_scores(inputs: LossInputs, c: DPOConfig) -> PreferenceScores:
    reference = inputs.ref_logp if c.needs_reference else torch.zeros_like(inputs.logp)
    assert reference is not None
    policy, ref, mask = ((x[0::2], x[1::2]) for x in (inputs.logp, reference, inputs.mask))
    collision = None
    if c.use_weighting:
        assert inputs.collision is not None
        collision = inputs.collision[0::2], inputs.collision[1::2]
    return preference_scores(policy, ref, mask, ld_alpha=c.ld_alpha, collision=collision)
