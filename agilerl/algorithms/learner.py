"""What an update needs of an agent (:class:`Learner`), and what it learns from (:class:`Experience`)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from torch import Tensor

from agilerl.algorithms.config import LLMConfig, SurrogateConfig
from agilerl.data import LossInputs, MicroBatch, RolloutBatch
from agilerl.functional import MetricReducer
from agilerl.models.optim import AdamWSettings
from agilerl.rollouts.failures import Outcome
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
    idle: Tensor | None = None
    """[B] bool, True for rows whose gradient is exactly zero: counted in every normaliser, never computed."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What only the whole batch can tell, reported with the metrics of the update."""

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
        """The user's loss function, in place of the algorithm's objective."""

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

    def note_outcome(self, outcome: Outcome, metrics: Mapping[str, float]) -> None:
        """Count an iteration."""


class PolicyLearner(Learner, Protocol):
    """A learner whose policy is held near a reference by a KL."""

    kl_scale: float
    """Factor on ``beta`` that ``kl_target`` has found so far."""

    @property
    def config(self) -> SurrogateConfig:
        """Hyperparameters."""
