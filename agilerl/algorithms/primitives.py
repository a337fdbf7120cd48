"""The operations that train an agent: gradients are accumulated, then an optimizer step spends them."""

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from agilerl.algorithms.custom_loss import LossFunction, tangent_loss
from agilerl.algorithms.experiences import check_fits, to_batch
from agilerl.algorithms.learner import Experience
from agilerl.algorithms.update import accumulate_batch, learn_together, optim_step
from agilerl.arguments import Positive, checked
from agilerl.data import RolloutBatch
from agilerl.data.union import union
from agilerl.errors import ConfigError
from agilerl.functional import MetricReducer

if TYPE_CHECKING:
    from agilerl.algorithms.llm import LLMAlgorithm

__all__ = ["TrainingPrimitives"]


class TrainingPrimitives:
    """``accumulate`` (or ``accumulate_tangents``) and ``optim_step``; ``learn`` is a sequence of them.

    Gradients add up over any number of calls until ``optim_step`` spends them. They are no part of an agent's state: a
    clone or a checkpoint has none, and ``learn`` forgets what was pending.
    """

    loss: LossFunction | None
    """The user's loss function, in place of the algorithm's objective; None: the algorithm's own."""
    gradient_is_finite: bool = True
    """False once a loss since the last optimizer step was not finite: the next step will be skipped."""
    learns_again: bool = False
    """True while ``learn`` trains on tensors that its last call trained on."""
    _learned: "weakref.ref[Tensor] | None" = None
    """Token ids of the last batch that ``learn`` trained on."""

    def learn(
        self, experiences: Any, turn_ids: Any = None, sampling_logps: Sequence[Tensor | None] | None = None
    ) -> dict[str, float]:
        """Update the adapter from ``(completion_ids, action_masks, rewards)``, or from a :class:`RolloutBatch`.

        ``rewards`` is one number a row, in row order (any shape), or ``[rows, turns]`` together with ``turn_ids``
        ``[rows, T-1]``. Stacked ``completion_ids`` [rows, T] hold groups of ``group_size`` consecutive rows. Returns
        the metrics of the update, ``mean_loss`` and ``mean_kl`` among them. Where several processes train the agent,
        each gives what it has sampled, and the update is that of all rows together. Raises ConfigError where the parts
        do not fit each other, or something goes by turn and there are no ``turn_ids``.

        ``sampling_logps``, one tensor a row, are the log-probs of the sampled tokens. They are the old ones of the
        importance ratio in an update of several optimizer steps (``update_epochs``, or more rows than ``batch_size``),
        and where the same tensors are learned from a second time in a row. The only step of a first update takes the
        current policy as the one that sampled, whatever they are: the ratio is 1. So does the first step of any update
        without them, or where sampling is not exact (a base in 16 bits, quantised or compiled; vLLM), and for further
        steps it computes the old ones itself. Several calls of ``accumulate`` do not count as learning again.
        """
        agent = cast("LLMAlgorithm", self)
        if isinstance(experiences, RolloutBatch):
            check_fits(agent, experiences)
            with self._noting(experiences.ids):
                return learn_together([agent], [self._whole(experiences)])[0]
        if turn_ids is None and getattr(agent.config, "uses_turns", False):
            raise ConfigError(
                "importance_sampling_level or advantage_granularity is 'turn', but no turn_ids were given; call "
                "learn(experiences, turn_ids=...) with turn_ids [rows, T-1], or use another level"
            )
        group_size = getattr(agent.config, "group_size", 1)
        batch = to_batch(experiences, agent.pad_token_id, turn_ids, sampling_logps, group_size=group_size)
        check_fits(agent, batch)
        ids = experiences[0] if isinstance(experiences[0], Tensor) else next(iter(experiences[0]), batch.ids)
        with self._noting(ids):
            return learn_together([agent], [self._whole(batch)])[0]

    @checked
    def accumulate(
        self,
        batch: RolloutBatch | Experience,
        loss_fn: LossFunction | None = None,
        *,
        denominator: Positive | None = None,
    ) -> dict[str, float]:
        """Add the gradient of a loss on a batch to what is pending; returns the metrics of this batch.

        ``loss_fn`` is a function of LossInputs, by default the agent's own loss. A :class:`RolloutBatch` is prepared
        first (advantages, old and reference log-probs); to split one optimizer step over several calls, prepare the
        whole of it and pass the parts together with the denominator of the whole::

            experience = agent.prepare(batch)
            whole = agent.window_denominator(experience.batch.action_mask)
            for rows in torch.arange(len(experience)).split(16):
                agent.accumulate(experience.select(rows), my_loss, denominator=whole)
            agent.optim_step()

        Without ``denominator`` the batch is the whole step. Raises ConfigError for what is no loss function, and
        MemoryExhaustedError, nothing having been added, where memory does not hold the least part of the batch.
        """
        agent = cast("LLMAlgorithm", self)
        check_fits(agent, batch if isinstance(batch, RolloutBatch) else batch.batch)
        experience = batch if isinstance(batch, Experience) else agent.prepare(batch)
        metrics = accumulate_batch(agent, experience, loss_fn, denominator)
        self._count(experience.batch)
        return metrics.result()

    @checked
    def accumulate_tangents(self, batch: RolloutBatch | Experience, dloss_dlogp: Tensor) -> None:
        """Add the gradient of a loss that is known by its derivative with respect to each log-prob, ``[B, L]``.

        Row b, position t belongs to the log-prob of token t + 1, as in :meth:`logprobs`; what stands off the action
        mask is ignored. Nothing is divided: denominators are the caller's. A number that is not finite makes the next
        ``optim_step`` skip. Raises ConfigError for another shape.
        """
        agent = cast("LLMAlgorithm", self)
        rows = batch.batch if isinstance(batch, Experience) else batch
        check_fits(agent, rows)
        expected = tuple(rows.action_mask.shape)
        if not isinstance(dloss_dlogp, Tensor) or tuple(dloss_dlogp.shape) != expected:
            found = (
                f"shape {tuple(dloss_dlogp.shape)}" if isinstance(dloss_dlogp, Tensor) else type(dloss_dlogp).__name__
            )
            raise ConfigError(
                f"expected d loss / d log-prob as a tensor of shape {expected}, one number for each entry of "
                f"agent.logprobs(batch), found {found}"
            )
        accumulate_batch(agent, Experience(rows, dloss_dlogp.detach()), tangent_loss, 1.0)
        self._count(rows)

    def optim_step(self) -> dict[str, float]:
        """Clip the pending gradient, take one AdamW step and clear it; returns gradient norm and learning rate.

        The step is skipped, and counted in ``skipped_steps``, when a loss or the gradient was not finite.
        """
        agent, metrics = cast("LLMAlgorithm", self), MetricReducer()
        optim_step([agent], [metrics])
        agent.updates += 1
        values = metrics.result()
        values["skipped_steps"] = float(agent.skipped_steps)
        values["num_tokens"] = float(agent.tokens["trained"])
        return values

    @checked
    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """Return the policy's log-probs ``[B, L]`` at the agent's temperature, without gradient, 0 off the mask."""
        agent = cast("LLMAlgorithm", self)
        check_fits(agent, batch)
        temperature = getattr(agent.config, "temperature", 1.0)
        return agent.runtime.fixed_logprobs(agent.slot, batch, temperature, agent.micro_rows(batch))

    @contextmanager
    def _noting(self, ids: Any) -> Iterator[None]:
        """Remember what is learned from, so that the next call can tell whether it is the same again."""
        self.learns_again = self._learned is not None and self._learned() is ids
        self._learned = weakref.ref(ids) if isinstance(ids, Tensor) else None
        try:
            yield
        finally:
            self.learns_again = False

    def _whole(self, batch: RolloutBatch) -> RolloutBatch:
        """Return what all processes that train this agent have brought along."""
        agent = cast("LLMAlgorithm", self)
        return union(agent.runtime.processes, batch, agent.pad_token_id)

    def _count(self, batch: RolloutBatch) -> None:
        agent = cast("LLMAlgorithm", self)
        agent.tokens["trained"] += int(batch.lengths.sum())
        agent.steps += len(batch)
