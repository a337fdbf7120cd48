"""A population: N agents on one base that roll out, learn, are examined and evolve together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agilerl.algorithms.llm import LLMAlgorithm
from agilerl.algorithms.update import learn_together
from agilerl.data import Trajectory, collate
from agilerl.envs.core import Row, Split, Task
from agilerl.envs.prompts import render_prompt
from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.mutation import Member, Mutation, Mutations
from agilerl.hpo.selection import Plan, SelectionStrategy, apply_plan
from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.rollouts.collect import CollectTimes, TaskRequest, collect

__all__ = ["Evolution", "Population", "Rollout"]

Panel = list[tuple[Row, list[int]]]


@dataclass
class Rollout:
    """One batch of trajectories of every agent."""

    trajectories: dict[int, list[Trajectory]]
    """By agent index, groups in prompt order."""
    times: CollectTimes


@dataclass
class Evolution:
    """What one generation change did."""

    plan: Plan
    mutations: list[Mutation]
    """One for each agent of the new population."""
    inherited: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Gene values each child was born with, before its own mutation."""


class Population:
    """Agents of one runtime on one task.

    ``prompts_per_step`` is the number of prompts of one training batch of each agent. Every agent reads the same
    stream of training prompts from its own position, so agents that trained equally long saw the same prompts.
    """

    def __init__(
        self,
        agents: Sequence[LLMAlgorithm],
        task: Task,
        *,
        tokenizer: Any = None,
        prompts_per_step: int = 8,
        eval_max_new_tokens: int | None = None,
    ) -> None:
        if not agents:
            raise ConfigError("a population needs at least 1 agent, found 0")
        if len({id(a.runtime) for a in agents}) > 1:
            raise ConfigError("all agents of a population share one runtime; build them on the same model object")
        self.agents = list(agents)
        self.task = task
        self.runtime = agents[0].runtime
        self.tokenizer = tokenizer if tokenizer is not None else self.runtime.tokenizer
        if self.tokenizer is None:
            raise ConfigError("a population needs a tokenizer; pass tokenizer=AutoTokenizer.from_pretrained(...)")
        self.prompts_per_step = prompts_per_step
        self.eval_max_new_tokens = eval_max_new_tokens
        self.next_index = max(a.index for a in agents) + 1
        self._panels: dict[tuple[str, int], Panel] = {}

    def __repr__(self) -> str:
        return f"Population({len(self.agents)} agents on {self.runtime.base.name!r}, next_index={self.next_index})"

    def __len__(self) -> int:
        return len(self.agents)

    # -- training -------------------------------------------------------------------------------------------------

    def rollout(self) -> Rollout:
        """Sample and grade one training batch of every agent, all rows in one decode batch."""
        requests, owners = [], []
        for agent in self.agents:
            for number in range(self.prompts_per_step):
                row = self.task.row("train", agent.position + number)
                prompt = self.render(row)
                generation = GenerationRequest(
                    agent.slot,
                    prompt,
                    agent.config.group_size,  # type: ignore[attr-defined]
                    agent.sampling(len(prompt)),
                    key=(agent.index, agent.rollouts, number),
                )
                requests.append(TaskRequest(row, generation, group=number))
                owners.append(agent.index)
        groups, times = collect(self.runtime.engine, self.task, self.tokenizer, requests)
        trajectories: dict[int, list[Trajectory]] = {agent.index: [] for agent in self.agents}
        for index, group in zip(owners, groups):
            trajectories[index] += group
        for agent in self.agents:
            agent.position += self.prompts_per_step
            agent.rollouts += 1
            agent.tokens["generated"] += sum(len(t.token_ids) for t in trajectories[agent.index])
        return Rollout(trajectories, times)

    def learn(self, rollout: Rollout) -> dict[int, dict[str, float]]:
        """Update every agent on its own trajectories; returns each agent's metrics."""
        pads = [agent.pad_token_id for agent in self.agents]
        batches = [collate(rollout.trajectories[a.index], pad) for a, pad in zip(self.agents, pads)]
        metrics = learn_together(self.agents, batches)
        return {agent.index: m for agent, m in zip(self.agents, metrics)}

    # -- exams ----------------------------------------------------------------------------------------------------

    def evaluate(self, split: Split = "exam", *, agents: Sequence[LLMAlgorithm] | None = None) -> dict[int, Fitness]:
        """Examine agents on a fixed panel: the same prompts for all, greedy, settings of the run and not of genes.

        ``split`` is ``exam`` (selection) or ``test`` (the numbers that are reported). An agent whose completion could
        not be computed or graded gets a NaN score there, hence a fitness that ranks last.
        """
        chosen = self.agents if agents is None else list(agents)
        scores = self._examine(split, [(a.slot, a) for a in chosen])
        return {agent.index: Fitness.from_scores(s) for agent, s in zip(chosen, scores)}

    def evaluate_base(self, split: Split = "test") -> Fitness:
        """Examine the base model itself, adapters off."""
        return Fitness.from_scores(self._examine(split, [(None, None)])[0])

    def _examine(self, split: Split, who: Sequence[tuple[int | None, LLMAlgorithm | None]]) -> list[list[float]]:
        panel = self.panel(split)
        requests = [
            TaskRequest(row, GenerationRequest(slot, prompt, 1, self._exam_sampling(prompt), split, (number,)), number)
            for slot, _ in who
            for number, (row, prompt) in enumerate(panel)
        ]
        groups, _ = collect(self.runtime.engine, self.task, self.tokenizer, requests)
        scores = []
        for k, (_, agent) in enumerate(who):
            own = [group[0] for group in groups[k * len(panel) : (k + 1) * len(panel)]]
            failed = any(t.finish_reason == "error" for t in own)
            scores.append([float("nan")] * len(own) if failed else [t.episode_return for t in own])
            if agent is not None and split == "exam":
                agent.tokens["evaluated"] += sum(len(t.token_ids) for t in own)
        return scores

    def _exam_sampling(self, prompt: Sequence[int]) -> SamplingSettings:
        room = self.runtime.base.context_length - len(prompt)
        return SamplingSettings(max_new_tokens=max(1, min(self.eval_max_new_tokens or room, room)), temperature=0.0)

    def panel(self, split: Split) -> Panel:
        """Return the rows of a fixed panel with their rendered prompts."""
        size = self.task.panel_size(split)
        key = (split, size)
        if key not in self._panels:
            rows = [self.task.row(split, i) for i in range(size)]
            self._panels[key] = [(row, self.render(row)) for row in rows]
        return self._panels[key]

    def render(self, row: Row) -> list[int]:
        """Return the prompt tokens of a row; raises when they leave no room for a completion."""
        return render_prompt(self.tokenizer, self.task.messages(row), max_tokens=self.context_length - 1)

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and completion together, for the agent with the least room."""
        return min(agent.context_length for agent in self.agents)

    # -- evolution ------------------------------------------------------------------------------------------------

    def evolve(
        self,
        fitness: Mapping[int, Fitness],
        selection: SelectionStrategy,
        mutations: Mutations,
        *,
        generation: int,
        seed: int,
    ) -> Evolution:
        """Select, clone and mutate: first a plan from numbers alone, then its application.

        Children are copied from their parents as they were examined; the elite is not touched.
        """
        plan = selection.plan(fitness, generation, seed, self.next_index)
        _, agents = apply_plan(plan, self.agents)
        alive = {id(agent) for agent in agents}
        for agent in self.agents:
            if id(agent) not in alive:
                agent.clean_up()
        self._settle(agents)
        self.agents = agents
        self.next_index += len(plan.births)
        inherited = {a.index: dict(a.hyperparameters) for a in agents}
        planned = mutations.plan([Member.of(a) for a in agents], plan.elite, generation, seed, plan.mutants)
        for agent, mutation in zip(agents, planned):
            agent.apply_mutation(mutation)
        return Evolution(plan, planned, {b.child: inherited[b.child] for b in plan.births})

    def _settle(self, agents: Sequence[LLMAlgorithm]) -> None:
        """Move children into the slots of the dead, so that the population stays side by side in the bank."""
        store = self.runtime.store
        for agent in agents:
            free = store.lowest_free_slot()
            if free is not None and free < agent.slot:
                agent.move_to(free)
