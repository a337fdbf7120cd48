"""What agents of a population learn from each other: the elite's policy, and completions that others have sampled.

Both change what an agent's own update is made of (:class:`Experience`), and nothing else: objective, optimizer and
schedule see more rows, or other advantages. Both are off by default.
"""

import math
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from agilerl.algorithms.codec import warn_of_another_base
from agilerl.algorithms.config import GroupConfig
from agilerl.algorithms.credit import shaped_rewards
from agilerl.algorithms.learner import Experience, Learner, behaviour_logprobs, own_weights, temperature_of
from agilerl.checks.arguments import shown
from agilerl.checks.validation import sentence
from agilerl.config.search import SharingConfig
from agilerl.data import RolloutBatch, Trajectory, collate
from agilerl.data.batch import concatenated, stacked
from agilerl.envs.core import Task
from agilerl.envs.episode_task import EpisodeTask
from agilerl.errors import ConfigError
from agilerl.functional import (
    borrowed_advantages,
    broadcast_rows,
    distillation_advantages,
    masked_mean,
    mismatch_weights,
    nonzero_advantage_rows,
)
from agilerl.models.adapters import lora_scaling, read_adapter
from agilerl.rollouts.engine import Rollout, teaches_nothing
from agilerl.rollouts.teacher import TeacherEndpoint
from agilerl.runtime import Runtime

Prompts = Literal["flat", "all"]


class Sharing(SharingConfig):
    """What agents learn from each other; raises ConfigError for settings that do not fit."""

    def __init__(self, **settings: Any) -> None:
        try:
            super().__init__(**settings)
        except ValidationError as error:
            raise ConfigError(sentence(error, type(self), "sharing")) from None


@dataclass(frozen=True)
class Lesson:
    """What one agent learns from others in one update."""

    borrowed: RolloutBatch | None = None
    """Completions that others have sampled for its own prompts, graded, in the groups of its own; with their
    samplers' log-probs."""
    cap: float = 2.0
    teacher: int | TeacherEndpoint | None = None
    """Slot of the elite, or of the adapter that teaches, or an endpoint."""
    weight: float = 0.0

    def applied(self, agent: Learner, batch: RolloutBatch, experience: Experience) -> Experience:
        """Return the experience with what others add; ``batch`` is the one that it was prepared from."""
        if self.teacher is not None and self.weight > 0 and len(experience):
            experience = with_teacher(agent, experience, self.teacher, self.weight)
        if self.borrowed is not None and len(self.borrowed):
            experience = with_borrowed(agent, experience, batch, self.borrowed, self.cap)
        return experience


# -- distillation: the KL to a teacher, as an advantage of the agent's own tokens ------------------------------------


def load_teacher(runtime: Runtime, folder: Path) -> int:
    """Read an adapter into a slot of its own and return the slot.

    Raises CheckpointError for a folder without a sound adapter of these layers, ConfigError if its rank is above those
    of the agents: a wider bank would change the last bits of all of them.
    """
    store, inner = runtime.store, folder / "actor"
    folder = inner if inner.is_dir() else folder
    factors, lora = read_adapter(folder, store.layers)
    warn_of_another_base(folder, runtime.base, runtime.loaded)
    if lora.r > store.max_rank:
        raise ConfigError(f"sharing.teacher={shown(str(folder))} has rank {lora.r}, agents at most {store.max_rank}")
    slot = store.allocate(lora.r, lora_scaling(lora))
    store.load_adapter(slot, factors)
    return slot


def check_temperature(agent: Learner, genes: Collection[str] = ()) -> None:
    """Raise ConfigError unless an agent samples at temperature 1, always: an endpoint's log-probs are of it."""
    if temperature_of(agent) != 1 or "temperature" in genes:
        setting = "the gene temperature" if "temperature" in genes else f"temperature={temperature_of(agent):g}"
        raise ConfigError(
            f"sharing.teacher_url: an endpoint's log-probs are those at temperature 1, found {setting}; set "
            "algorithm.temperature to 1, and let it be no gene"
        )


def with_teacher(agent: Learner, experience: Experience, teacher: int | TeacherEndpoint, weight: float) -> Experience:
    """Return the experience with ``-weight (log pi - log teacher)`` added to the advantage of each token.

    The log-probs of a teacher in a slot cost a forward, whose tokens count as trained on; those of an endpoint do not.
    """
    batch = experience.batch
    mask = batch.action_mask.cpu()
    ours = experience.old_logp
    if ours is None:
        ours = behaviour_logprobs(agent, batch)
    if isinstance(teacher, TeacherEndpoint):
        check_temperature(agent)
        theirs = teacher.logprobs(batch, agent.runtime.processes, agent.runtime.lockstep)
    else:
        theirs = agent.runtime.fixed_logprobs(teacher, batch, temperature_of(agent), agent.micro_batch).cpu()
        agent.tokens["trained"] += int(batch.lengths.sum())
    advantages = experience.advantages.cpu() + distillation_advantages(ours.cpu(), theirs, mask, weight)
    # A group whose rewards are equal is taught as well, so its rows are no longer idle.
    idle = None if experience.idle is None else ~nonzero_advantage_rows(advantages, mask)
    gap = float(masked_mean(ours.cpu() - theirs, mask))
    metrics = {**experience.metrics, "sharing/teacher_kl": gap}
    return replace(experience, advantages=advantages, idle=idle, metrics=metrics)


# -- shared experience: completions of others, with truncated importance weights --------------------------------------


def check_borrows(algorithm: str, config: object) -> None:
    """Raise ConfigError unless an algorithm can learn from others' completions."""
    wrong = ""
    if not isinstance(config, GroupConfig):
        wrong = f"{algorithm} does not compare the completions of a prompt with each other"
    elif config.advantage_level == "turn":
        wrong = "advantages go by turn"
    elif config.whiten_advantages:
        wrong = "whiten_advantages=True mixes the advantages of all rows"
    elif getattr(config, "beta", 0.0) > 0:
        wrong = f"beta={config.beta:g} holds the KL on one's own completions"  # type: ignore[attr-defined]
    if wrong:
        raise ConfigError(
            f"sharing.experience lends completions to agents whose advantages are against the mean of their prompt, "
            f"without a KL; found that {wrong}; set it to 0, or use GRPO with beta=0"
        )


def with_borrowed(
    agent: Learner, experience: Experience, sampled: RolloutBatch, borrowed: RolloutBatch, cap: float
) -> Experience:
    """Return the experience with the borrowed rows added behind one's own, whose numbers stay what they are.

    The advantage of a borrowed row is against one's own completions of the prompt (``borrowed_advantages``), times
    ``min(pi(y) / mu(y), cap)``: pi is the agent's policy now, mu the one that sampled y, as it was recorded. From there
    on it is a row like any other: its ratio starts at 1 and is clipped as they are. Rows of weight or advantage 0 are
    left out. pi costs a forward over the borrowed rows, whose tokens count as trained on.
    """
    config: Any = agent.config
    check_borrows(type(config).__name__.removesuffix("Config"), config)
    graded = borrowed.graded
    if config.mask_truncated and borrowed.truncated is not None:
        graded = graded & ~borrowed.truncated
    borrowed = borrowed.select(graded)
    if not len(borrowed):
        return experience
    sampled = sampled.select(sampled.graded)
    # None: check_borrows has ruled out a KL.
    ours, theirs = (shaped_rewards(config, batch, None, 0.0).nansum(dim=1) for batch in (sampled, borrowed))
    by_row = borrowed_advantages(
        theirs, borrowed.groups, ours, sampled.groups, norm=config.adv_norm, adv_eps=config.adv_eps
    )
    telling = by_row != 0
    if not telling.any():
        return experience
    borrowed, by_row = borrowed.select(telling), by_row[telling]
    assert borrowed.sampling_logps is not None
    mask = borrowed.action_mask.cpu()
    now = agent.runtime.fixed_logprobs(agent.slot, borrowed, temperature_of(agent), agent.micro_batch).cpu()
    agent.tokens["trained"] += int(borrowed.lengths.sum())
    weights = mismatch_weights(now, borrowed.sampling_logps.cpu(), mask, "seq_truncate", cap)
    advantages = broadcast_rows(by_row.to(now.dtype), mask) * weights
    limit = getattr(config, "adv_clip_range", None)
    if limit is not None:
        advantages = advantages.clamp(-limit, limit)
    return _joined(agent, experience, replace(borrowed, sampling_logps=now), advantages, weights)


def _joined(
    agent: Learner, experience: Experience, borrowed: RolloutBatch, advantages: Tensor, weights: Tensor
) -> Experience:
    """Return own and borrowed rows in one; ``borrowed.sampling_logps`` are the agent's own by now."""
    count, now = len(borrowed), borrowed.sampling_logps
    assert now is not None
    sampled = experience.batch
    known = sampled.sampling_logps is not None
    # Borrowed rows can make several optimizer steps of one, and the later ones need old log-probs.
    several = agent.config.update_epochs > 1 or len(sampled) + count > agent.window_rows
    old = experience.old_logp
    if old is None and several:
        old = behaviour_logprobs(agent, sampled)
    # Borrowed rows count as sampled by the policy itself: their correction is in the advantages.
    reported, idle = experience.sampling_logp, experience.idle
    # A batch has sampling log-probs of all of its rows or of none.
    rows = borrowed if known else replace(borrowed, sampling_logps=None)
    batch = concatenated([replace(sampled, episodes=None), rows], pad_token_id=0)  # padding is never read
    return replace(
        experience,
        batch=batch,
        advantages=stacked([experience.advantages.cpu(), advantages]),
        old_logp=None if old is None else stacked([old.cpu(), now]),
        sampling_logp=None if reported is None else stacked([reported.cpu(), now]),
        idle=None if idle is None else torch.cat([idle.cpu(), torch.zeros(count, dtype=torch.bool)]),
        metrics={
            **experience.metrics,
            "sharing/rows": float(count),
            "sharing/weight": float(masked_mean(weights, borrowed.action_mask.cpu(), -1).mean()),
        },
    )


def borrowable(
    sampled: Sequence[Trajectory], others: Sequence[Sequence[Trajectory]], count: int, prompts: Prompts
) -> list[Trajectory]:
    """Return completions of other agents for an agent's own prompts, at most ``count`` for each, in its own groups.

    Of each prompt every agent lends its first completion, then its second, and so on, whatever they earned: a choice
    by reward would bias what is learned from them. Only completions with a grade and known log-probs are lent. With
    ``prompts="flat"`` they are for groups of one's own that teach nothing, which does not depend on the others' either.
    """
    # By prompt, the completions of each lender.
    lent: dict[tuple[int, ...], list[list[Trajectory]]] = {}
    for rows in others:
        by_prompt: dict[tuple[int, ...], list[Trajectory]] = {}
        for row in rows:
            by_prompt.setdefault(tuple(row.prompt_ids), []).append(row)
        for prompt, group in by_prompt.items():
            lent.setdefault(prompt, []).append(group)
    # By group, the borrower's own.
    groups: dict[int, list[Trajectory]] = {}
    for row in sampled:
        groups.setdefault(row.group, []).append(row)
    borrowed = []
    for number, group in groups.items():
        if prompts == "flat" and not teaches_nothing(group):
            continue
        first = group[0]
        # Equal prompts may be of different rows of the task, with different answers.
        lenders = [rows for rows in lent.get(tuple(first.prompt_ids), []) if rows[0].row == first.row]
        ordered = [rows[k] for k in range(max(map(len, lenders), default=0)) for rows in lenders if k < len(rows)]
        sound = [
            row
            for row in ordered
            if row.logprobs is not None
            and row.finish_reason not in ("error", "oom")
            and math.isfinite(row.episode_return)
        ]
        borrowed += [replace(row, group=number) for row in sound[:count]]
    return borrowed


# -- a population: its teacher, and what each agent takes from whom ---------------------------------------------------


class Teaching:
    """What agents of one population learn from each other, and the teacher that is none of them, if there is one."""

    def __init__(
        self, agents: Sequence[Learner], task: Task | EpisodeTask, tokenizer: Any, sharing: SharingConfig
    ) -> None:
        """Raise ConfigError unless these agents can learn from each other on this task, and from the teacher."""
        if agents[0].env_type != "reasoning":
            raise ConfigError(
                f"sharing is for agents that sample their own completions, found {agents[0].algorithm.name}, which "
                "learns from data; leave it out"
            )
        if sharing.experience and task.multi_turn:
            raise ConfigError(
                f"sharing.experience lends completions of one turn, found {task.name}, which plays episodes; set it to "
                "0"
            )
        for agent in agents if sharing.experience else ():
            check_borrows(agent.algorithm.name, agent.config)
        self._sharing, store = sharing, agents[0].runtime.store
        self.teacher: int | TeacherEndpoint | None = None
        """Slot of the adapter that teaches, or an endpoint; None: an agent teaches."""
        if sharing.teacher is not None:
            self.teacher = load_teacher(agents[0].runtime, Path(sharing.teacher).expanduser())
            weakref.finalize(self, store.release, self.teacher)
        elif sharing.teacher_url is not None and sharing.teacher_model is not None:
            for agent in agents:
                check_temperature(agent, agent.genes)
            url, timeout = sharing.teacher_url, sharing.teacher_timeout
            self.teacher = TeacherEndpoint(url, sharing.teacher_model, sharing.teacher_api, timeout=timeout)
            weakref.finalize(self, self.teacher.close)
            self.teacher.check(tokenizer)

    def lessons(self, agents: Sequence[Learner], rollout: Rollout, elite: int | None) -> list[Lesson]:
        """Return what each agent learns from others in this update; without another teacher the slot ``elite`` is."""
        sharing, lessons = self._sharing, []
        teacher = elite if self.teacher is None else self.teacher
        for agent in agents:
            borrowed = None
            if sharing.experience:
                # Rewards under other weights are another scale.
                lenders = [b.index for b in agents if b is not agent and own_weights(b) == own_weights(agent)]
                rows = borrowable(
                    rollout.batch(agent.index),
                    [rollout.trajectories[index] for index in lenders],
                    sharing.experience,
                    sharing.experience_for,
                )
                borrowed = collate(rows, agent.pad_token_id) if rows else None
            taught = teacher if teacher != agent.slot else None  # the elite does not learn from itself
            lessons.append(Lesson(borrowed, sharing.experience_cap, taught, sharing.distillation))
        return lessons
