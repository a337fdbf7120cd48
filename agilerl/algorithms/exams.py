"""Exams of agents on one task: fixed panels of questions or episodes, the answers to them, and what these score."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Annotated, Any, Literal

from agilerl.algorithms.agent import LLMAlgorithm
from agilerl.algorithms.learner import own_weights
from agilerl.checks.arguments import Hint
from agilerl.data import Trajectory
from agilerl.envs.core import TRIED_ROWS, Lengths, Place, Row, Split, Task
from agilerl.envs.episode_task import EpisodeTask
from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness
from agilerl.rewards.grader import TrainerState
from agilerl.rollouts import SamplingSettings
from agilerl.rollouts.collect import Collected, collect
from agilerl.rollouts.engine import Ask, Failure, check_error_rate, lost_places

Panels = Literal["exam", "test", "second"]
AnyTask = Annotated[
    Task | EpisodeTask,
    Hint("pass a ReasoningGymTask, a DatasetTask or an EpisodeTask, e.g. ReasoningGymTask('spell_backward')"),
]


class Examiner:
    """Examines the agents of a population: what is asked, how it is answered, and what the answers score.

    ``agents`` is the population's own list, which changes with it.
    """

    def __init__(
        self,
        agents: list[LLMAlgorithm],
        task: Task | EpisodeTask,
        tokenizer: Any,
        *,
        eval_max_new_tokens: int | None,
        eval_temperature: float,
        eval_samples: int,
        test_prompts: int | None,
    ) -> None:
        """Raises ConfigError for settings that do not fit the task, and without a tokenizer."""
        self.agents = agents
        self.task = task
        self.runtime = agents[0].runtime
        self.tokenizer = self.runtime.tokenizer if tokenizer is None else self.runtime.reading(tokenizer)
        if self.tokenizer is None:
            raise ConfigError("a population needs a tokenizer; pass tokenizer=AutoTokenizer.from_pretrained(...)")
        self.test_prompts = test_prompts
        self.exam_prompts: int | None = None
        """Questions of the exam, and of the second panel; None: all that the task keeps for them."""
        # Fixed here once, because an exam must not change when a gene does.
        own_limit = getattr(self.agents[0].config, "max_output_tokens", None)
        self.eval_max_new_tokens = own_limit if eval_max_new_tokens is None else eval_max_new_tokens
        if eval_samples > 1 and (eval_temperature == 0 or task.multi_turn):
            raise ConfigError(
                f"eval_samples={eval_samples}: expected sampled answers to questions, found "
                f"{'episodes' if task.multi_turn else 'greedy ones, which would be equal'}; set it to 1"
                + ("" if task.multi_turn else ", or eval_temperature above 0")
            )
        self.eval_temperature, self.eval_samples = eval_temperature, eval_samples
        self.ungraded: dict[int, int] = {}
        """Number of each agent's answers in the latest exam without a grade and without a failure."""
        self.answered: list[Trajectory] = []
        """The answers of the latest exam or test."""
        self._panels: dict[tuple[str, int, int], list[Place]] = {}
        self._lengths: dict[tuple[str, int, int], Lengths] = {}
        """Cached panels and lengths, by split, size and context."""

    @property
    def whole(self) -> bool:
        """Whether processes divide the agents and not their rows: there are as many agents as processes, or more."""
        return len(self.agents) >= self.runtime.processes.size

    def collect(self, asks: Sequence[Ask]) -> Collected:
        """Return the graded trajectories of each ask, in order."""
        runtime = self.runtime
        shared = runtime.processes, runtime.lockstep, runtime.engine
        return collect(*shared, self.task, self.tokenizer, asks, whole=self.whole)

    def evaluate(self, split: Panels, agents: Sequence[LLMAlgorithm] | None) -> dict[int, Fitness]:
        """Examine agents, None: all of them; see ``Population.evaluate``."""
        strangers = [agent.index for agent in agents or () if agent.runtime is not self.runtime]
        if strangers or (agents is not None and not agents):
            raise ConfigError(
                f"Population.evaluate(agents=...): expected agents on the base of this population, found "
                f"{f'agents {strangers} of another one' if strangers else '[]'}; omit agents to examine all"
            )
        chosen = self.agents if agents is None else list(agents)
        fitness = self._examine(split, [(a.selected_slot, a) for a in chosen], all_agents=agents is None)
        results = dict(zip((agent.index for agent in chosen), fitness))
        if split == "exam":
            for agent in chosen:
                agent.fitness.append(float("nan") if agent.sick else results[agent.index].mean)
                rewards = [reward for reward in agent.vitals["reward"] if math.isfinite(reward)]
                # Rewards under weights of its own have another scale than other agents'.
                if rewards and not own_weights(agent):
                    results[agent.index] = replace(results[agent.index], training=math.fsum(rewards) / len(rewards))
        return results

    def evaluate_base(self, split: Panels) -> Fitness:
        """Examine the base model itself, adapters off."""
        return self._examine(split, [(None, None)], all_agents=True)[0]

    def panel(self, split: Panels) -> list[tuple[Row, list[int]]]:
        """Return the rows of a task's fixed panel with their rendered prompts."""
        if self.task.multi_turn:
            raise ConfigError(f"{self.task.name} is an environment, which has episodes, not a panel of questions")
        return [(question.row, list(question.prompt_ids)) for question in self.places(split)]

    def _examine(
        self, split: Panels, who: Sequence[tuple[int | None, LLMAlgorithm | None]], *, all_agents: bool
    ) -> list[Fitness]:
        size = len(self.places(split))
        groups, report = self.answers(split, who, samples=self.eval_samples, temperature=self.eval_temperature)
        self.answered = [answer for group in groups for answer in group]
        lost = self._check_exam(report.failures, len(who), size, all_agents=all_agents)
        results = []
        for k, (_, agent) in enumerate(who):
            answers = [group for number, group in enumerate(groups[k * size : (k + 1) * size]) if number not in lost]
            # Log-probs that are not finite are the agent's own fault: one such answer spoils its whole exam.
            failed = any(t.finish_reason == "error" for group in answers for t in group)
            # An episode may have several rows, each with the whole return.
            scores = [float("nan") if failed or not group else self._score(group) for group in answers]
            results.append(Fitness.from_scores(scores))
            if agent is not None and split == "exam":
                sound = [group for group in answers if group and all(t.finish_reason != "error" for t in group)]
                self.ungraded[agent.index] = sum(math.isnan(self._score(group)) for group in sound)
            if agent is not None and split != "test":
                agent.tokens["evaluated"] += sum(len(t.token_ids) for group in answers for t in group)
        return results

    def _score(self, group: Sequence[Trajectory]) -> float:
        """Return the score of one question: the mean over its samples that have a grade, NaN if none has."""
        if self.eval_samples == 1:
            return group[0].episode_return
        graded = [t.episode_return for t in group if not math.isnan(t.episode_return)]
        return fmean(graded) if graded else math.nan

    def answers(
        self,
        split: Panels,
        who: Sequence[tuple[int | None, LLMAlgorithm | None]],
        *,
        samples: int = 1,
        temperature: float = 0.0,
        first: int | None = None,
    ) -> Collected:
        """Return the trajectories of each one's answers to each question of a panel, and what failed.

        ``who`` are slots with their agents, ``(None, None)`` for the base. The groups are those of the first one for
        all questions (or the ``first`` few), then of the next; all of them draw by the same numbers.
        """
        of_task, start, _ = self._rows_of(split)

        def sampling(prompt_length: int) -> SamplingSettings:
            room = self.runtime.base.context_length - prompt_length
            longest = max(1, min(self.eval_max_new_tokens or room, room))
            return SamplingSettings(max_new_tokens=longest, temperature=temperature)

        asks = [
            Ask(
                slot,
                question,
                samples,
                sampling,
                self.context_length,
                number,
                of_task,
                # The row's number in its split: the same draws for all agents, in every exam.
                (start + number,),
                self.eval_max_new_tokens or 1,
                state=self.state_of(agent),
            )
            for slot, agent in who
            for number, question in enumerate(self.places(split)[:first])
        ]
        return self.collect(asks)

    def _check_exam(self, failures: Sequence[Failure], examined: int, size: int, *, all_agents: bool) -> set[int]:
        """Return the places of an exam that count for no agent; raises if it failed for all agents."""
        errors = [failure for failure in failures if failure.kind != "oom"]
        by_agent = [{f.request % size: f.message for f in errors if f.request // size == k} for k in range(examined)]
        if not all_agents:
            # As in lost_places: who fails in more than half of the exam is the cause and is excused nothing.
            return {question for places in by_agent if len(places) <= size / 2 for question in places}
        episodes = self.task.multi_turn
        if not episodes and len(errors) == examined * size * self.eval_samples:
            # This raises, because all answers failed.
            check_error_rate(len(errors), errors, 0.0, episodes=False)
        return lost_places(by_agent, size, episodes=episodes)

    def _rows_of(self, split: Split | Panels) -> tuple[Split, int, int]:
        """Return the task's split that a panel is part of, its first row there and the row after its last."""
        if split == "train":
            return "train", 0, TRIED_ROWS
        if split == "exam":
            size = self.task.panel_size("exam")
            return "exam", 0, min(size, self.exam_prompts or size)
        size = self.task.panel_size("test")
        first = min(size, self.test_prompts or size)
        if split == "test":
            return "test", 0, first
        # The second panel comes after the test's rows, so that choosing by it leaves the test unseen.
        return "test", first, min(size, first + (self.exam_prompts or size))

    def places(self, split: Split | Panels) -> list[Place]:
        """Return the places of a fixed panel; for training, those checked before it begins."""
        of_task, first, end = self._rows_of(split)
        key = (split, end - first, self.context_length)
        if key not in self._panels:
            self._panels[key] = [
                self.task.place_at(of_task, k, self.tokenizer, self.context_length) for k in range(first, end)
            ]
        return self._panels[key]

    def lengths(self, split: Split | Panels) -> Lengths:
        """Return the lengths of the rows at these places; raises EnvError if one does not fit."""
        places = self.places(split)
        key = (split, len(places), self.context_length)
        if key not in self._lengths:
            self._lengths[key] = self.task.lengths(places, self.tokenizer, self.context_length)
        return self._lengths[key]

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and completion together, for the agent with the least room."""
        return min(agent.context_length for agent in self.agents)

    def state_of(self, agent: LLMAlgorithm | None) -> TrainerState:
        """Return what graders may know of the training of an agent; None: of the base."""
        rows = self.task.train_size if isinstance(self.task, Task) else None
        rollouts, position = (0, 0) if agent is None else (agent.rollouts, agent.position)
        return TrainerState(rollouts, position / rows if rows else None)
