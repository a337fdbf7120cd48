"""A population: N agents on one base that sample, learn, take exams and evolve together."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from time import perf_counter
from typing import Annotated, Any

from agilerl.algorithms import ALGORITHMS
from agilerl.algorithms.agent import LLMAlgorithm
from agilerl.algorithms.distillation import teacher_of
from agilerl.algorithms.exams import AnyTask, Examiner, Panels
from agilerl.algorithms.learner import own_weights
from agilerl.algorithms.metrics import record_batch
from agilerl.algorithms.state import AgentState
from agilerl.algorithms.update import learn_together
from agilerl.checks.arguments import Count, Hint, NotNegative, Seed, Share, Tokenizer, Whole, checked
from agilerl.config.search import TeacherConfig
from agilerl.data import Trajectory, collate
from agilerl.envs.core import Place, Task
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.examples import DataTask, examples_at
from agilerl.envs.graded import all_weights, check_evolving_weights
from agilerl.envs.programs import AgentTask
from agilerl.errors import ConfigError
from agilerl.functional import MetricReducer
from agilerl.hpo.fitness import Fitness, ranking
from agilerl.hpo.guard import Vitals, collapsed, lost, quarantined, replaced_by_elite, stuck
from agilerl.hpo.mutation import Member, Mutation, Mutations
from agilerl.hpo.parameters import Value
from agilerl.hpo.selection import AT_THE_START, Plan, SelectionStrategy, Standing, apply_plan, with_factors
from agilerl.rollouts.collect import grader_metrics
from agilerl.rollouts.engine import Ask, Rollout, teaches_nothing
from agilerl.rollouts.episodes import episode_metrics


@dataclass
class Evolution:
    """The result of one generation change."""

    plan: Plan
    mutations: list[Mutation]
    """One for each agent of the new population."""
    inherited: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    """Gene values of each child at birth, before its mutation."""
    sick: dict[int, str] = field(default_factory=dict)
    """Agents excluded as elite and parent, with the reason."""


@dataclass(frozen=True)
class Checkup:
    """The health of an agent."""

    sick: str
    """Why it may not be a parent; empty if it is healthy."""
    vitals: Vitals
    """Statistics of its samples since the last selection."""
    weights: Mapping[str, float]
    """Its weights for parts of the reward; rewards under other weights are not comparable."""


class Population:
    """Agents of one runtime on one task, which asks questions or plays episodes.

    ``prompts_per_step`` counts the prompts (or episode seeds) of one training batch of each agent. All agents read the
    same stream of them, each from its own position, so those that trained equally long saw the same ones.
    ``max_error_rate`` is the share of completions (or episodes) whose grading may fail before a rollout raises.
    ``test_prompts`` of the task's test questions are the test (None: all); those after them are the panel ``second``,
    for a choice among candidates. ``teacher`` is what agents are drawn to: the settings of the manifest's section.
    """

    @checked
    def __init__(
        self,
        agents: Annotated[Sequence[LLMAlgorithm], Hint("pass GRPO.population(4, ...), or a list of agents")],
        task: AnyTask,
        *,
        tokenizer: Tokenizer | None = None,
        prompts_per_step: Count = 8,
        eval_max_new_tokens: Count | None = None,
        eval_temperature: NotNegative = 0.0,
        eval_samples: Count = 1,
        max_error_rate: Share = 0.5,
        test_prompts: Count | None = None,
        teacher: TeacherConfig | Mapping[str, Any] | None = None,
    ) -> None:
        if not agents:
            raise ConfigError("a population needs at least 1 agent, found 0")
        if len({id(a.runtime) for a in agents}) > 1:
            raise ConfigError("all agents of a population share one runtime; build them on the same model object")
        for agent in agents:
            agent.check_open()
        number_apart(agents)
        check_source(agents, task)
        for agent in agents:
            all_weights(task, own_weights(agent))
            check_evolving_weights(task, agent.genes)
        self.agents, self.runtime = list(agents), agents[0].runtime
        self.examiner = Examiner(
            self.agents,
            task,
            tokenizer,
            eval_max_new_tokens=eval_max_new_tokens,
            eval_temperature=eval_temperature,
            eval_samples=eval_samples,
            test_prompts=test_prompts,
        )
        self.tokenizer = self.examiner.tokenizer
        self._mark = object()
        """Identifies its rollouts, so that those of another population are recognised."""
        self.prompts_per_step, self.max_error_rate = prompts_per_step, max_error_rate
        self.teacher = teacher_of(self.agents, self.tokenizer, teacher)
        self.waiting: frozenset[int] = frozenset()
        """Agents that neither sample nor learn for now, because they have spent more tokens than others."""
        self.next_index = max(a.index for a in agents) + 1
        # Room for one token of an answer.
        task.fit(self.tokenizer, self.examiner.context_length - 1)
        if isinstance(task, AgentTask):
            # A function, because a selection moves agents to other slots.
            task.models = self._models

    def __repr__(self) -> str:
        return f"Population({len(self.agents)} agents on {self.runtime.base.name!r}, next_index={self.next_index})"

    def __len__(self) -> int:
        return len(self.agents)

    @property
    def task(self) -> Task | EpisodeTask:
        """What the agents learn and are examined on."""
        return self.examiner.task

    def _models(self) -> dict[str, int | None]:
        """Return the slots of the models that programs may ask for by name."""
        examined = [a for a in self.agents if a.fitness and not math.isnan(a.fitness[-1])]
        best = max(examined, key=lambda a: a.fitness[-1], default=self.agents[0])
        return {"base": None, "elite": best.slot, **{f"agent-{a.index}": a.slot for a in self.agents}}

    @property
    def active(self) -> list[LLMAlgorithm]:
        """The agents that sample and learn: all that are not ``waiting``."""
        return [agent for agent in self.agents if agent.index not in self.waiting]

    @property
    def group_sizes(self) -> list[int]:
        """Completions per prompt (or rows per example) of each agent."""
        return [agent.config.group_size for agent in self.agents]  # type: ignore[attr-defined]

    # -- training -------------------------------------------------------------------------------------------------

    def rollout(self) -> Rollout:
        """Sample and grade one training batch of every agent, all rows in one decode batch.

        With dynamic sampling, groups whose completions all earned the same are replaced: as many further prompts of the
        agent's stream are sampled, in one more decode batch, until none is missing or the rounds are used up.

        Raises RewardError (EnvError for episodes) if more than ``max_error_rate`` of all samples failed.
        """
        agents = self.active
        rounds = {a.index: getattr(a.config, "sampling_rounds", 1) for a in agents}
        rollout = Rollout({a.index: [] for a in agents}, mark=self._mark)
        rollout.dropped = {index: set() for index, most in rounds.items() if most > 1}
        sampled = dict.fromkeys(rounds, 0)
        missing = dict.fromkeys(rounds, self.prompts_per_step)
        for number in range(max(rounds.values(), default=0)):
            asking = [a for a in agents if missing[a.index] and number < rounds[a.index]]
            asks = [ask for a in asking for ask in self._asks(a, sampled[a.index], missing[a.index])]
            if not asks:
                break
            groups, report = self.examiner.collect(asks)
            owners = [a.index for a in asking for _ in range(missing[a.index])]
            rollout.note(report, owners, asks)
            for agent in asking:
                answered, groups = groups[: missing[agent.index]], groups[missing[agent.index] :]
                rollout.trajectories[agent.index] += [t for group in answered for t in group]
                sampled[agent.index] += len(answered)
                if agent.index in rollout.dropped:
                    flat = {group[0].group for group in answered if group and teaches_nothing(group)}
                    rollout.dropped[agent.index] |= flat
                    missing[agent.index] = len(flat)
        rollout.check(self.max_error_rate, episodes=self.task.multi_turn)
        # Only now: a rollout that raised has moved no agent on, and can be repeated.
        for agent in agents:
            # Prompts of dropped groups count too: the stream has passed them.
            agent.position += sampled[agent.index]
            agent.rollouts += 1
            agent.tokens["generated"] += sum(len(t.token_ids) for t in rollout.trajectories[agent.index])
        return rollout

    def _asks(self, agent: LLMAlgorithm, first: int, count: int) -> list[Ask]:
        """Return requests for the next ``count`` prompts of an agent that has sampled ``first`` for this batch."""
        weights = all_weights(self.task, own_weights(agent))
        return [
            Ask(
                agent.slot,
                self.task.place_at("train", agent.position + number, self.tokenizer, agent.context_length),
                agent.config.group_size,  # type: ignore[attr-defined]
                agent.sampling,
                agent.context_length,
                group=number,
                # By index and count, not by slot or place in the batch: draws do not depend on the other agents.
                key=(agent.index, agent.rollouts, number),
                reserve=getattr(agent.config, "max_output_tokens", None) or 1,
                weights=weights,
                state=self.examiner.state_of(agent),
            )
            for number in range(first, first + count)
        ]

    def trial(self, first: int, count: int, samples: int | None = None) -> list[Ask]:
        """Return requests for training prompts from place ``first`` on, of the agents in turn; changes nothing."""
        asks = []
        for number in range(first, first + count):
            agent = self.agents[number % len(self.agents)]
            # _asks counts from the agent's own position, this loop from the beginning.
            (ask,) = self._asks(agent, number - agent.position, 1)
            key = (agent.index, number)
            asks.append(replace(ask, group=number, key=key, samples=samples or ask.samples, is_trial=True))
        return asks

    @property
    def learns_from_data(self) -> bool:
        """Whether batches are drawn from the task's answers instead of being sampled."""
        return self.agents[0].env_type != "reasoning"

    def draw(self) -> Rollout:
        """Draw a batch of examples for every agent: :meth:`rollout` for data; a pair is a group of two rows."""
        start, known = perf_counter(), dict[int, tuple[list[Trajectory], Place]]()
        rollout = Rollout({}, mark=self._mark)
        for agent in self.active:
            drawn = rollout.trajectories[agent.index] = []
            for number in range(self.prompts_per_step):
                position = agent.position + number
                # Agents at one position read the same examples, which are rendered once.
                if position not in known:
                    known[position] = examples_at(self.task, position, self.tokenizer, self.examiner.context_length)
                examples, place = known[position]
                # Copies, because for another agent the same examples may be another group.
                drawn += [replace(t, group=number) for t in examples]
                rollout.note_place(agent.index, place)
            agent.position += self.prompts_per_step
        rollout.times.rollout = perf_counter() - start
        return rollout

    @checked
    def examples(self, position: Whole) -> list[Trajectory]:
        """Return the examples of the task's training row at a position, or of its stand-in if it is too long."""
        return examples_at(self.task, position, self.tokenizer, self.examiner.context_length)[0]

    @checked
    def learn(self, rollout: Rollout) -> dict[int, dict[str, float]]:
        """Update every agent on its own trajectories; returns each agent's metrics by its index.

        The most useful: ``reward`` (mean of the graded completions), ``frac_reward_zero_std`` (share of groups that all
        earned the same), ``entropy``, ``mean_kl``, ``completions/mean_length`` and ``completions/clipped_ratio`` (share
        cut at the limit).

        An agent with no graded sample, or without enough memory, learns nothing, and its ``outcome`` says why. Rewards
        and lengths include dropped groups. Raises ConfigError for the rollout of another population, or of other
        agents.
        """
        agents = self.active
        known, foreign = [agent.index for agent in agents], rollout.mark not in (None, self._mark)
        if foreign or set(rollout.trajectories) != set(known):
            raise ConfigError(
                "Population.learn(rollout=...): expected the result of rollout() or draw() of this population for its "
                f"agents {known}, found a rollout of {'another population' if foreign else 'others'}, with the agents "
                f"{sorted(rollout.trajectories)}; agents learn from their own samples, before the next evolve()"
            )
        if not agents:
            return {}
        # One update of all agents
        pads = [agent.pad_token_id for agent in agents]
        batches = [collate(rollout.batch(a.index), pad) for a, pad in zip(agents, pads)]
        outcomes = [rollout.outcome(agent.index) for agent in agents]
        learned = learn_together(agents, batches, outcomes, self.teacher, whole=self.examiner.whole)
        metrics = dict(zip((a.index for a in agents), learned))
        for agent in agents:
            metrics[agent.index] = agent.report(metrics[agent.index])
            if agent.index in rollout.dropped:
                everything, dropped = rollout.trajectories[agent.index], len(rollout.dropped[agent.index])
                sampled = len({t.group for t in everything})
                observed = MetricReducer()
                # Learning has seen the kept groups alone, but rewards and lengths are reported of all.
                record_batch(collate(everything, agent.pad_token_id), observed)
                metrics[agent.index] |= observed.result() | {
                    "groups/kept": float(sampled - dropped),
                    "groups/resampled": float(sampled - self.prompts_per_step),
                    "groups/dropped": float(dropped),
                }
        # What the rows themselves say
        whole = f"rewards/{self.task.grader}"
        for index, rows in rollout.trajectories.items():
            values, parts = metrics[index], grader_metrics(rows)
            if skipped := rollout.skipped.get(index):
                values["prompts_skipped"] = float(skipped)
            if levels := rollout.levels.get(index):
                values["curriculum/level"] = fmean(levels)
            values |= parts
            if self.task.multi_turn:
                values |= episode_metrics(rows, rollout.samples.get(index, 0))
            # Without parts, the whole reward is the score of its only grader.
            if not parts and "reward" in values:
                values |= {f"{whole}/mean": values["reward"], f"{whole}/std": values["reward_std"]}
        return metrics

    # -- exams ----------------------------------------------------------------------------------------------------

    @checked
    def agent(self, index: int) -> LLMAlgorithm:
        """Return the living agent with this index."""
        for agent in self.agents:
            if agent.index == index:
                return agent
        raise ConfigError(f"no agent {index} in this population; found {[a.index for a in self.agents]}")

    @checked
    def evaluate(self, split: Panels = "exam", *, agents: Sequence[LLMAlgorithm] | None = None) -> dict[int, Fitness]:
        """Examine agents on a fixed panel: the same prompts for all, with the run's settings instead of genes.

        Greedy, or the mean score of ``eval_samples`` completions of each question at ``eval_temperature``, which all
        agents draw by the same random numbers in every exam. ``split`` is ``exam`` (selection), ``test`` (reported
        numbers) or ``second`` (the choice among candidates). A completion that could not be computed or graded scores
        NaN, which ranks its agent last. The mean of an exam is appended to ``agent.fitness`` (NaN for a sick agent).

        Raises RewardError (EnvError for episodes) if no completion could be graded, unless only some ``agents`` are
        examined, which may have caused it, and ConfigError for no agents, or agents of another runtime.
        """
        return self.examiner.evaluate(split, agents)

    @checked
    def evaluate_base(self, split: Panels = "test") -> Fitness:
        """Examine the base model itself, adapters off."""
        return self.examiner.evaluate_base(split)

    # -- evolution ------------------------------------------------------------------------------------------------

    @checked
    def evolve(
        self,
        fitness: Mapping[int, Fitness],
        selection: SelectionStrategy,
        mutations: Mutations,
        *,
        generation: Whole,
        seed: Seed,
        collapse_guard: bool = True,
        standing: Standing = AT_THE_START,
        best: AgentState | None = None,
    ) -> Evolution:
        """Select, clone and mutate: first a plan from numbers alone, then applying it.

        Children are copied from their parents as examined; the elite is not changed. A sick agent is neither elite nor
        parent, and a mutated clone of the elite takes its place; with ``collapse_guard`` a collapsed agent counts as
        sick. ``standing`` is what else the strategy knows, and ``best`` a copy of the agent of ``standing.best``, which
        a strategy may bring back.
        """
        known = [agent.index for agent in self.agents]
        if set(fitness) != set(known):
            raise ConfigError(
                f"Population.evolve(fitness=...): expected the fitness of each agent of this population, {known}, "
                f"found that of {sorted(fitness)}; pass the result of population.evaluate()"
            )
        sick = self.sick(fitness, collapse_guard=collapse_guard, untrained=standing.untrained)
        sound = quarantined(fitness, sick)
        standing = replace(standing, stuck=self.stuck() if collapse_guard else frozenset())
        plan = selection.plan(sound, generation, seed, self.next_index, standing)
        plan = replaced_by_elite(plan, list(fitness), sick)
        inherited = self._become(plan, best)
        planned = self._mutate(plan, mutations, generation, seed)
        return Evolution(plan, planned, {b.child: inherited[b.child] for b in plan.births}, sick)

    def _become(self, plan: Plan, best: AgentState | None) -> dict[int, dict[str, Value]]:
        """Clone and remove agents by a plan; returns all agents' gene values before any mutation."""

        def revive(child: int) -> LLMAlgorithm:
            agent = self.revived(best)
            # The state has the index of the agent that it is a copy of.
            agent.index, agent.parent = child, agent.index
            return agent

        _, agents = apply_plan(plan, self.agents, None if best is None else revive)
        self._replace(agents)
        self.next_index += len(plan.births)
        return {a.index: dict(a.hyperparameters) for a in agents}

    def keep_first(self, count: int) -> None:
        """Remove all agents but the first ones, before any of them has learned."""
        self._replace(self.agents[:count])

    def _replace(self, agents: list[LLMAlgorithm]) -> None:
        """Remove agents that are not among the new ones, and close the gaps."""
        alive = {id(agent) for agent in agents}
        for agent in self.agents:
            if id(agent) not in alive:
                agent.clean_up()
        # Children move into the slots of removed agents, so that the population stays contiguous in the bank.
        for agent in agents:
            free = self.runtime.store.lowest_free_slot()
            if free is not None and free < agent.slot:
                agent.move_to(free)
        self.agents[:] = agents

    def _mutate(self, plan: Plan, mutations: Mutations, generation: int, seed: int) -> list[Mutation]:
        members = [Member.of(agent) for agent in self.agents]
        planned = with_factors(plan, members, mutations.plan(members, plan.elite, generation, seed, plan.mutants))
        for agent, mutation in zip(self.agents, planned):
            agent.apply_mutation(mutation)
        return planned

    def sick(
        self, fitness: Mapping[int, Fitness], *, collapse_guard: bool, untrained: Fitness | None = None
    ) -> dict[int, str]:
        """Return the agents excluded as elite and parent at a selection by this fitness, with the reason.

        With ``untrained``, what they had before any training is all that there is to go back to; those that can learn
        no more and earn no more than that are sick, too.
        """
        checkups = self._checkups()
        sick = {index: checkup.sick for index, checkup in checkups.items() if checkup.sick}
        if untrained is not None:
            why = "collapsed: it earns no more than before training, and rewards differ within hardly any group"
            groups, reward = self.prompts_per_step, untrained.training
            sick = {index: why for index, one in checkups.items() if lost(one.vitals, groups, reward)} | sick
        elite = ranking(quarantined(fitness, sick))[0]
        if not collapse_guard or elite in sick:  # without a healthy elite there is nothing to compare with
            return sick
        # Rewards under other weights are not comparable with the elite's.
        weights = checkups[elite].weights
        vitals = {
            index: one.vitals if one.weights == weights else replace(one.vitals, reward=(), reward_before=())
            for index, one in checkups.items()
            if index not in sick
        }
        return sick | collapsed(vitals, elite)

    def stuck(self) -> frozenset[int]:
        """Return the agents that can learn no more."""
        checkups = self._checkups().items()
        return frozenset(index for index, one in checkups if stuck(one.vitals, self.prompts_per_step))

    def _checkups(self) -> dict[int, Checkup]:
        return {a.index: Checkup(a.sick, a.present_vitals(), own_weights(a)) for a in self.agents}

    # -- copies ---------------------------------------------------------------------------------------------------

    def revived(self, state: AgentState | None) -> LLMAlgorithm:
        """Return an agent with this state on this population's base."""
        assert state is not None
        return ALGORITHMS[state.algorithm].from_state(state, self.runtime, self.agents[0].loss)


def number_apart(agents: Sequence[LLMAlgorithm]) -> None:
    """Give agents the indices 0, 1, ... and say so, if two of them have the same."""
    indices = [agent.index for agent in agents]
    if len(set(indices)) == len(indices):
        return
    if len({id(agent) for agent in agents}) < len(agents):
        raise ConfigError(f"agents: expected different agents, found one of them twice (indices {indices}); clone() it")
    warnings.warn(
        f"agents of a population need different indices, found {indices}: they are 0 to {len(agents) - 1} now; pass "
        "index= to each",
        # Up to the caller of Population(), above __init__ and the wrapper of @checked.
        stacklevel=4,
    )
    for index, agent in enumerate(agents):
        agent.index = index


def check_source(agents: Sequence[LLMAlgorithm], task: Task | EpisodeTask) -> None:
    """Raise ConfigError unless the agents learn from one kind of source, and the task is of that kind."""
    wanted = {agent.env_type for agent in agents}
    if len(wanted) > 1:
        raise ConfigError(f"all agents of a population learn from the same source, found {', '.join(sorted(wanted))}")
    (kind,) = wanted
    if kind != "reasoning" and (not isinstance(task, DataTask) or task.kind != kind):
        name = {"sft": "SFTTask", "preference": "PreferenceTask", "unpaired": "UnpairedTask"}[kind]
        raise ConfigError(
            f"{agents[0].algorithm.name} learns from data, found the task {task.name!r} ({type(task).__name__}); wrap "
            f"it: {name}(task)"
        )
