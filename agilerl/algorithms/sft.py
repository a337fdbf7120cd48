"""Supervised fine-tuning, and what all algorithms have in common that learn from data instead of their own samples."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Unpack

import torch
from pydantic import Field
from torch import Tensor

from agilerl.algorithms.agent import LLMAlgorithm
from agilerl.algorithms.base import Algorithm, AlgorithmConfig
from agilerl.algorithms.config import LLMConfig
from agilerl.algorithms.keywords import SFTKeywords
from agilerl.algorithms.learner import Experience, reference_logprobs
from agilerl.data import LossInputs, RolloutBatch
from agilerl.errors import ConfigError
from agilerl.functional import MetricReducer, aggregate, dft, masked_mean, normaliser, sft
from agilerl.hpo.parameters import Evolve
from agilerl.models.slots import Route
from agilerl.rollouts import SamplingSettings
from agilerl.sizes import PASS_TOKENS


class DataConfig(LLMConfig):
    """Hyperparameters of algorithms that learn from data."""

    group_size: ClassVar[int] = 1
    """Rows that one row of the data set becomes."""
    max_output_tokens: Annotated[int | None, Field(ge=1)] = None
    """Most tokens of a completion in exams; None leaves what ``max_model_len`` leaves, or 128 if that is not set
    either."""

    def sampling(self, room: int, *, greedy: bool = False) -> SamplingSettings:
        """Return the sampling settings if the context has room for this many tokens: temperature 1, or greedy."""
        limit = min(self.max_output_tokens or room, room)
        return SamplingSettings(max_new_tokens=limit, temperature=0.0 if greedy else 1.0)


class DataAlgorithm(LLMAlgorithm):
    """An agent that learns from examples: the batches of a data set's environment, or of a task that has answers."""

    Config: ClassVar[type[AlgorithmConfig]] = DataConfig
    config: DataConfig

    def report(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an update in the algorithm's own terms; there is no KL."""
        return {name: value for name, value in metrics.items() if name != "mean_kl"}

    def reference_logprobs(self, batch: RolloutBatch) -> Tensor:
        """Return the reference's log-probs ``[B, L]``, computed once for all agents with an equal reference."""
        return reference_logprobs(self, batch)

    def score(self, batch: RolloutBatch) -> Tensor:
        """Return how well the agent does on each example of a held-out batch; higher is better."""
        raise NotImplementedError(f"{type(self).__name__} does not define score, which test needs")


# -- SFT: the likelihood of demonstrations ----------------------------------------------------------------------------


class SFTConfig(DataConfig):
    """Hyperparameters of SFT."""

    lr: Annotated[float, Field(gt=0), Evolve(1e-6, 1e-2)] = 1e-4
    """Learning rate of AdamW."""
    loss_type: Annotated[Literal["nll", "dft"], Evolve(scale="choice")] = "nll"
    """``nll``: the cross-entropy -log p of each token; ``dft``: -sg(p) log p, which spends no gradient on tokens that
    the model finds impossible (arXiv 2508.05629)."""
    packing: bool = True
    """Let rows of similar length share a forward pass, to save padding; each attends to itself alone, and the
    gradient of an optimizer step is the same. False: rows in random order."""


class SFT(DataAlgorithm):
    """Cross-entropy of the tokens that an example marks, averaged over those of the whole optimizer step."""

    algorithm = Algorithm("SFT", SFTConfig)
    config: SFTConfig
    env_type: ClassVar[str] = "sft"
    _lengths: Tensor | None = None
    """Of the rows of the batch being learned, for ``packing``."""

    if TYPE_CHECKING:  # at run time the keywords are what ``SFTConfig`` declares

        def __init__(self, *given: Any, **keywords: Unpack[SFTKeywords]) -> None: ...

    def prepare(self, batch: RolloutBatch) -> Experience:
        """Return the batch with the share of its tokens that the present policy would choose."""
        if not bool(batch.action_mask.any(dim=1).all()):
            raise ConfigError("every example needs a token to learn, found a row without one; leave such rows out")
        # For shuffle, which is told the number of rows alone.
        self._lengths = batch.lengths
        metrics = {"mean_token_accuracy": self._token_accuracy(batch)} if len(batch) else {}
        return Experience(batch, torch.zeros(batch.action_mask.shape), metrics=metrics)

    def objective(self, inputs: LossInputs, metrics: MetricReducer) -> Tensor:
        """Sum of the token losses / tokens of the optimizer step."""
        # Without a mask: log-probs are 0 where it is False.
        loss = dft(inputs.logp) if self.config.loss_type == "dft" else sft(inputs.logp)
        metrics.add("nll", -inputs.logp.detach(), inputs.mask)
        if inputs.entropy is not None:
            metrics.add("entropy", inputs.entropy.detach(), inputs.mask)
        total = aggregate(loss, inputs.mask, "token-mean", inputs.denominator)
        metrics.add("loss", total, reduction="sum")
        return total

    def window_denominator(self, mask: Tensor) -> float:
        """Return the number of tokens that are learned."""
        return float(normaliser(mask, "token-mean"))

    def report(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an update with the perplexity, exp of the mean cross-entropy of all its tokens."""
        values = super().report(metrics)
        if "nll" in values:
            values["perplexity"] = math.exp(min(values["nll"], 700.0))  # beyond it a float overflows
        return values

    def score(self, batch: RolloutBatch) -> Tensor:
        """Return each row's mean log-prob ``[B]`` of its learned tokens, in nats."""
        return masked_mean(self.logprobs(batch), batch.action_mask.to(self.runtime.base.device), -1)

    def shuffle(self, rows: int, epoch: int) -> Tensor:
        """Return the order of the rows in one epoch; with ``packing`` sorted by length within an optimizer step."""
        order, lengths = super().shuffle(rows, epoch), self._lengths
        if not self.config.packing or lengths is None or len(lengths) != rows:
            return order
        # Within a window, so that it stays random which rows make an optimizer step.
        windows = torch.split(order, self.window_rows)
        return torch.cat([window[lengths[window].argsort(stable=True)] for window in windows])

    @torch.no_grad()
    def _token_accuracy(self, batch: RolloutBatch) -> float:
        """Return the share of learned tokens that are the policy's most likely ones, in a micro-batch's worth of rows.

        The loss never holds the logits of all tokens, so they are computed again, for few enough rows to stay cheap.
        """
        part = batch.select(slice(0, max(1, PASS_TOKENS // batch.ids.shape[1])))
        base = self.runtime.base
        ids, mask = part.ids.to(base.device), part.action_mask.to(base.device)
        with self.runtime.store.routed(Route((self.slot,), (len(part),))):
            hidden = base.hidden(ids)[:, :-1][mask]
        targets = ids[:, 1:][mask]
        right = [base.logits(h).argmax(-1) == t for h, t in zip(torch.split(hidden, 256), torch.split(targets, 256))]
        return float(torch.cat(right).double().mean())
