"""A population whose agents learn from each other: its teacher, and what each agent takes from whom."""

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agilerl.algorithms.agent import LLMAlgorithm
from agilerl.algorithms.exams import own_weights
from agilerl.algorithms.sharing import Lesson, borrowable, check_borrows, check_temperature, load_teacher
from agilerl.config.search import SharingConfig
from agilerl.data import collate
from agilerl.envs.core import Task
from agilerl.envs.episode_task import EpisodeTask
from agilerl.errors import ConfigError
from agilerl.rollouts.engine import Rollout
from agilerl.rollouts.teacher import TeacherEndpoint


class Teaching:
    """What agents of one population learn from each other, and the teacher that is none of them, if there is one."""

    def __init__(
        self, agents: Sequence[LLMAlgorithm], task: Task | EpisodeTask, tokenizer: Any, sharing: SharingConfig
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

    def lessons(self, agents: Sequence[LLMAlgorithm], rollout: Rollout, elite: int | None) -> list[Lesson]:
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
