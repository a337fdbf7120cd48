"""Kahneman-Tversky Optimization (arXiv 2402.01306): learning from single answers that were found good or bad."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, Unpack

import torch
from pydantic import Field, model_validator
from torch import Tensor

from agilerl.algorithms.base import Algorithm
from agilerl.algorithms.config import ReferenceConfig
from agilerl.algorithms.keywords import KTOKeywords
from agilerl.algorithms.learner import Experience
from agilerl.algorithms.sft import DataAlgorithm, DataConfig
from agilerl.data import LossInputs, RolloutBatch, Trajectory, collate
from agilerl.errors import ConfigError
from agilerl.functional import MetricReducer, masked_sum, reference_point, unpaired_loss, unpaired_margins
from agilerl.functional.preference import UnpairedLoss
from agilerl.hpo.parameters import Evolve


class KTOConfig(ReferenceConfig, DataConfig):
    """Hyperparameters of KTO; batch sizes count completions."""

    lr: Annotated[float, Field(gt=0), Evolve(1e-6, 1e-2)] = 5e-6
    """Learning rate of AdamW."""
    beta: Annotated[float, Field(gt=0), Evolve(0.01, 1.0)] = 0.1
    """Factor between log-ratios and implicit rewards: the larger, the closer the policy stays to the reference."""
    loss_type: UnpairedLoss = "kto"
    """``kto`` measures log-ratios from a reference point, an estimate of KL(policy || reference);
    ``apo_zero_unpaired`` from 0 (arXiv 2408.06266)."""
    desirable_weight: Annotated[float, Field(ge=0), Evolve(0.1, 10.0)] = 1.0
    """Weight of the losses of good completions. In the paper, weight x number of the good ones is 1 to 4/3 times
    that of the bad."""
    undesirable_weight: Annotated[float, Field(ge=0), Evolve(0.1, 10.0)] = 1.0
    """Weight of the losses of bad completions."""

    @model_validator(mode="after")
    def _weighs_something(self) -> Self:
        if self.desirable_weight == self.undesirable_weight == 0:
            raise ValueError("desirable_weight=0 and undesirable_weight=0 leave nothing to learn; raise one of them")
        return self


class KTO(DataAlgorithm):
    """``w (1 - sigmoid(beta (r - z)))`` of a good completion, ``w (1 - sigmoid(beta (z - r)))`` of a bad one.

    r is the completion's log-ratio to the reference, summed over its tokens. The reference point z is the same for all
    completions of an update: 0, or the mean log-ratio of its prompts with completions of other prompts if that is
    above 0, both of the policy before the update and without a gradient. The reference is fixed, as in DPO.
    """

    algorithm = Algorithm("KTO", KTOConfig)
    config: KTOConfig
    env_type: ClassVar[str] = "unpaired"

    if TYPE_CHECKING:  # at run time the keywords are what ``KTOConfig`` declares

        def __init__(self, *given: Any, **keywords: Unpack[KTOKeywords]) -> None: ...

    def prepare(self, batch: RolloutBatch) -> Experience:
        """Return the batch with the reference's log-probs and the reference point, whose tokens count as trained on.

        Raises ConfigError unless its rows are labelled.
        """
        self._check_labelled(batch)
        point = self._reference_point(batch, count=True)
        return Experience(
            batch,
            torch.zeros(batch.action_mask.shape),
            ref_logp=self.reference_logprobs(batch),
            # One number, given to each row, so that micro-batches take it along.
            reference_point=point.expand(len(batch)),
            metrics={"reference_point": float(point)} if len(batch) else {},
        )

    def objective(self, inputs: LossInputs, metrics: MetricReducer) -> Tensor:
        """Sum of the completions' losses / completions of the optimizer step."""
        c, good = self.config, inputs.desirable
        assert good is not None
        assert inputs.ref_logp is not None
        assert inputs.reference_point is not None
        policy = masked_sum(inputs.logp, inputs.mask, -1)
        ratios = policy - masked_sum(inputs.ref_logp, inputs.mask, -1)
        margins = unpaired_margins(ratios, good, inputs.reference_point, c.loss_type)
        total = unpaired_loss(margins, good, c.beta, (c.desirable_weight, c.undesirable_weight)).sum()
        total = total / max(inputs.denominator, 1.0)
        for name, rows in (("chosen", good), ("rejected", ~good)):
            metrics.add(f"rewards/{name}", c.beta * ratios.detach(), rows)
            metrics.add(f"logps/{name}", policy.detach(), rows)
        metrics.add("rewards/accuracies", (margins > 0).double())
        if inputs.entropy is not None:
            metrics.add("entropy", inputs.entropy.detach(), inputs.mask)
        metrics.add("loss", total, reduction="sum")
        return total

    def window_denominator(self, mask: Tensor) -> float:
        """Return the number of completions."""
        return float(len(mask))

    def score(self, batch: RolloutBatch) -> Tensor:
        """Return 1 for each completion ``[B]`` on the side of the reference point that its label says, else 0."""
        self._check_labelled(batch)
        assert batch.desirable is not None
        mask = batch.action_mask.cpu()
        gain = torch.where(mask, self.logprobs(batch).cpu() - self.reference_logprobs(batch), 0.0).double().sum(-1)
        point = self._reference_point(batch)
        return (unpaired_margins(gain, batch.desirable.cpu(), point, self.config.loss_type) > 0).double()

    def _reference_point(self, batch: RolloutBatch, *, count: bool = False) -> Tensor:
        """Return the reference point of a batch, a scalar on the CPU."""
        if self.config.loss_type != "kto" or not len(batch):
            return torch.zeros(())
        others = mismatched(batch, self.pad_token_id, self.context_length)
        if not len(others):
            return torch.zeros(())
        if count:
            self.tokens["trained"] += int(others.lengths.sum())
        mask = others.action_mask.cpu()
        policy, reference = self.logprobs(others).cpu(), self.reference_logprobs(others)
        return reference_point(masked_sum(policy, mask, -1), masked_sum(reference, mask, -1))

    def _check_labelled(self, batch: RolloutBatch) -> None:
        if batch.desirable is None:
            raise ConfigError("KTO learns from labelled completions, found none with a label; use an UnpairedGym")
        if not bool(batch.action_mask.any(dim=1).all()):
            raise ConfigError("every row needs a completion, found one without a token; leave such rows out")


def mismatched(batch: RolloutBatch, pad_token_id: int, context_length: int) -> RolloutBatch:
    """Return each row's prompt with the completion of the next row that has another prompt, cut to the context.

    After the last row comes the first. Without two different prompts there are no rows.
    """
    ids, masks, lengths = batch.ids.tolist(), batch.action_mask.tolist(), batch.lengths.tolist()
    starts = [mask.index(True) + 1 for mask in masks]
    prompts = [row[:start] for row, start in zip(ids, starts)]
    rows = len(batch)
    # Twice around, because the search wraps past the last row; backwards, so that each step is one comparison.
    following: list[int | None] = [None] * (2 * rows)
    for i in reversed(range(2 * rows - 1)):
        following[i] = i + 1 if prompts[i % rows] != prompts[(i + 1) % rows] else following[i + 1]
    trajectories = []
    for prompt, after in zip(prompts, following):
        if after is None:
            continue
        j = after % rows
        tokens = ids[j][starts[j] : lengths[j]][: context_length - len(prompt)]
        mask = masks[j][starts[j] - 1 :][: len(tokens)]  # column t is about token t + 1
        trajectories.append(Trajectory(prompt, tokens, mask, None, [float("nan")]))
    return collate(trajectories, pad_token_id)
