"""A population on several islands: each has one base and trains a share of the agents; selection is joint."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import Any

from agilerl.algorithms import LLMAlgorithm
from agilerl.algorithms.codec import packed, unpacked
from agilerl.algorithms.exams import Panels
from agilerl.algorithms.state import AgentState
from agilerl.distributed.topology import Exchange
from agilerl.envs.core import Task
from agilerl.envs.episode_task import EpisodeTask
from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.guard import Vitals
from agilerl.hpo.mutation import Mutation, Mutations, inherited
from agilerl.hpo.parameters import Gene, Value
from agilerl.hpo.selection import Plan
from agilerl.population import AgentFacts, Checkup, Known, Population
from agilerl.rollouts.engine import Failure, Rollout, check_error_rate


def facts_of(agent: LLMAlgorithm) -> dict[str, Any]:
    """Return the facts of an agent as plain data."""
    values = {f.name: getattr(agent, f.name) for f in fields(AgentFacts) if f.name != "group_size"}
    return asdict(AgentFacts(**values, group_size=agent.config.group_size))  # type: ignore[attr-defined]


class IslandPopulation(Population):
    """The agents of one island, with the facts about all others that a selection needs.

    Places in the population are assigned to the islands in order and do not change: an agent that a selection puts in
    another island's place moves there. Whatever compares agents (exams, error rates, selection, the collapse guard)
    sees all of them, so the run is the same on any number of islands, to the bit on a CPU. All islands make the same
    calls.
    """

    def __init__(
        self, agents: Sequence[LLMAlgorithm], task: Task | EpisodeTask, exchange: Exchange, **settings: Any
    ) -> None:
        super().__init__(agents, task, **settings)
        self.exchange = exchange
        self._examines_all = False
        """Whether an exam of all agents is in progress."""
        self._learn_of_all()
        self.next_index = max(agent.index for agent in self.everyone) + 1

    @property
    def everyone(self) -> Sequence[Known]:
        """All agents of the run, in the order of the population, as they were after the last exam or selection."""
        return self._known

    @property
    def group_sizes(self) -> list[int]:
        """Completions per prompt of each agent of the run."""
        return [facts.group_size for facts in self._known]

    def _learn_of_all(self) -> None:
        parts = self.exchange.all(([facts_of(agent) for agent in self.agents], self.runtime.store.max_rank))
        self._known = [
            AgentFacts(**{**facts, "genes": {name: Gene(**gene) for name, gene in facts["genes"].items()}})
            for part, _ in parts
            for facts in part
        ]
        # The bank's width affects the last bits of every agent, even of those with a smaller rank.
        widest = max(rank for _, rank in parts)
        if widest > self.runtime.store.max_rank:
            self.runtime.store.widen(widest)

    def _owners(self) -> dict[int, int]:
        """Return the island of each agent."""
        shares = self.exchange.processes.shares(len(self._known))
        return {self._known[number].index: island for island, share in enumerate(shares) for number in share}

    # -- what is compared -----------------------------------------------------------------------------------------

    def _check_rollout(self, rollout: Rollout) -> None:
        failed = [asdict(failure) for failures in rollout.failures.values() for failure in failures]
        parts = self.exchange.all((sum(rollout.samples.values()), failed))
        failures = [Failure(**failure) for _, part in parts for failure in part]
        samples = sum(count for count, _ in parts)
        check_error_rate(samples, failures, self.max_error_rate, episodes=self.task.multi_turn)

    def evaluate(self, split: Panels = "exam", *, agents: Sequence[LLMAlgorithm] | None = None) -> dict[int, Fitness]:
        """Examine every agent of the run on its island, or only ``agents`` on this one."""
        self._examines_all = agents is None
        try:
            mine = super().evaluate(split, agents=agents)
        finally:
            self._examines_all = False
        if agents is not None:
            return mine
        merged = self.exchange.merged({index: fitness.state() for index, fitness in mine.items()})
        self._learn_of_all()
        return {index: Fitness.from_state(values) for index, values in merged.items()}

    def evaluate_agent(self, index: int, split: Panels) -> Fitness:
        """Examine one agent on its island."""
        # Looked up here: super() does not work inside a lambda.
        examined = super().evaluate_agent
        return Fitness.from_state(self.exchange.by(self._owners()[index], lambda: examined(index, split).state()))

    def evaluate_base(self, split: Panels = "test") -> Fitness:
        """Examine the base model on the first island."""
        examined = super().evaluate_base
        return Fitness.from_state(self.exchange.first(lambda: examined(split).state()))

    def _check_exam(self, failures: Sequence[Failure], examined: int, size: int, *, all_agents: bool) -> set[int]:
        if not self._examines_all:
            return super()._check_exam(failures, examined, size, all_agents=all_agents)
        everything: list[Failure] = []
        before = 0
        for count, part in self.exchange.all((examined, [asdict(failure) for failure in failures])):
            # Numbered through all islands, as if one had examined all agents.
            everything += [Failure(**{**f, "request": f["request"] + before * size}) for f in part]
            before += count
        return super()._check_exam(everything, before, size, all_agents=True)

    def _checkups(self) -> dict[int, Checkup]:
        merged = self.exchange.merged({index: asdict(checkup) for index, checkup in super()._checkups().items()})
        return {index: Checkup(c["sick"], Vitals(**c["vitals"]), c["weights"]) for index, c in merged.items()}

    # -- selection ------------------------------------------------------------------------------------------------

    def _become(self, plan: Plan, best: AgentState | None) -> dict[int, dict[str, Value]]:
        """Send agents, or parents of children, to the islands that need them; then clone and remove as usual."""
        owners, rank = self._owners(), self.exchange.rank
        shares = self.exchange.processes.shares(len(plan.slots))
        if not all(shares):
            raise ConfigError(f"the selection leaves {len(plan.slots)} agents, fewer than the {len(shares)} islands")
        if any(birth.from_best for birth in plan.births):
            raise ConfigError("the selection brings the best exam back, which only a run on one island can")
        births = {birth.child: birth for birth in plan.births}
        roots = {index: births[index].parent if index in births else index for index in plan.slots}
        mates = {birth.child: birth.mate for birth in plan.births if birth.mate is not None}
        journeys = {
            (source, island): owners[source]
            for island, share in enumerate(shares)
            for child in (plan.slots[number] for number in share)
            for source in (roots[child], mates.get(child, roots[child]))
        }
        arrived: dict[int, AgentState] = {}
        # An error of another process is heard of here; a send or receive would only wait for that process.
        self.exchange.all(None)
        # In one order everywhere: a send waits for its receive, so two orders could block each other.
        for (index, island), owner in sorted(journeys.items()):
            if owner == island:
                continue
            if rank == owner:
                self.exchange.send(packed(self.agent(index).state()), island)
            elif rank == island:
                arrived[index] = unpacked(self.exchange.receive(owner))
        agents = []
        for index in (plan.slots[number] for number in shares[rank]):
            root = roots[index]
            agent = self.revived(arrived[root]) if root in arrived else self.agent(root)
            if index in births:
                if root in arrived:  # already a copy
                    agent.index, agent.parent = index, agent.index
                else:
                    agent = agent.clone(index)
                if index in mates:
                    mate = mates[index]
                    agent.cross(arrived[mate] if mate in arrived else self.agent(mate))
                if (donor := births[index].hyperparameters_from) is not None:
                    values = next(facts.hyperparameters for facts in self._known if facts.index == donor)
                    agent.apply_mutation(inherited(index, agent.hyperparameters, donor, values))
            agents.append(agent)
        self._replace(agents)
        self.next_index += len(plan.births)
        return self.exchange.merged({agent.index: dict(agent.hyperparameters) for agent in agents})

    def _mutate(self, plan: Plan, mutations: Mutations, generation: int, seed: int) -> list[Mutation]:
        # An agent's mutation does not depend on other agents, so each island plans its own.
        parts = self.exchange.all(
            [mutation.to_dict() for mutation in super()._mutate(plan, mutations, generation, seed)]
        )
        self._learn_of_all()
        return [Mutation.from_dict(mutation) for part in parts for mutation in part]

    # -- copies ---------------------------------------------------------------------------------------------------

    def state_of(self, index: int) -> AgentState | None:
        """Return a copy of an agent on the first island; None on the others."""
        owner, rank = self._owners()[index], self.exchange.rank
        if owner == 0:
            return super().state_of(index) if rank == 0 else None
        # For errors of other processes, as in _become.
        self.exchange.all(None)
        if rank == owner:
            self.exchange.send(packed(self.agent(index).state()), 0)
        return unpacked(self.exchange.receive(owner)) if rank == 0 else None

    def states(self) -> Iterator[AgentState]:
        """Yield all agents of the run one by one on the first island; the other islands only send theirs."""
        for index in self._owners():
            state = self.state_of(index)
            if state is not None:
                yield state
