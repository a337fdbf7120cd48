"""A population on several islands: each has one base and trains a share of the agents; selection is joint."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from agilerl.algorithms import ALGORITHMS, LLMAlgorithm
from agilerl.algorithms.codec import packed, unpacked
from agilerl.algorithms.state import AgentState
from agilerl.distributed.topology import Exchange
from agilerl.envs.core import Task
from agilerl.envs.episode_task import EpisodeTask
from agilerl.errors import ConfigError
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.guard import Vitals
from agilerl.hpo.mutation import Member, Mutation, inherited
from agilerl.hpo.parameters import Gene, Value
from agilerl.hpo.selection import Plan
from agilerl.population import Checkup, Known, Panels, Population
from agilerl.rollouts.engine import Failure, Rollout, check_error_rate


@dataclass(frozen=True)
class AgentFacts:
    """What every island knows about an agent."""

    index: int
    parent: int | None
    mut: str
    tokens: Mapping[str, int]
    genes: Mapping[str, Gene]
    hyperparameters: Mapping[str, Value]
    group_size: int

    @classmethod
    def of(cls, agent: LLMAlgorithm) -> "AgentFacts":
        """Return the facts of an agent."""
        own = {f.name: getattr(agent, f.name) for f in fields(cls) if f.name != "group_size"}
        return cls(**own, group_size=agent.config.group_size)  # type: ignore[attr-defined]

    @classmethod
    def from_state(cls, values: Mapping[str, Any]) -> "AgentFacts":
        """Return the facts from the values of ``dataclasses.asdict``."""
        return cls(**{**values, "genes": {name: Gene(**gene) for name, gene in values["genes"].items()}})


class IslandPopulation(Population):
    """The agents of one island, with the facts about all others that a selection needs.

    Places in the population are assigned to the islands in order and do not change: an agent that a selection puts in
    another island's place moves there. Whatever compares agents (exams, error rates, selection, the collapse guard)
    sees all of them, so the run is the same on any number of islands, to the bit on a CPU. All islands make the same
    calls.
    """

    def __init__(
        self,
        agents: Sequence[LLMAlgorithm],
        task: Task | EpisodeTask,
        exchange: Exchange,
        **settings: Any,
    ) -> None:
        super().__init__(agents, task, **settings)
        self.exchange = exchange
        self._all_sit_it = False
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
        own = [asdict(AgentFacts.of(agent)) for agent in self.agents], self.runtime.store.max_rank
        found = self.exchange.all(own)
        self._known = [AgentFacts.from_state(facts) for part, _ in found for facts in part]
        # The bank's width affects the last bits of every agent, even of those with a smaller rank.
        widest = max(rank for _, rank in found)
        if widest > self.runtime.store.max_rank:
            self.runtime.store.widen(widest)

    def _owners(self) -> dict[int, int]:
        """Return the island of each agent."""
        shares = self.exchange.processes.shares(len(self._known))
        return {self._known[place].index: island for island, share in enumerate(shares) for place in share}

    # -- what is compared -----------------------------------------------------------------------------------------

    def _check_rollout(self, rollout: Rollout) -> None:
        own = [asdict(failure) for failures in rollout.failures.values() for failure in failures]
        found = self.exchange.all((sum(rollout.samples.values()), own))
        failures = [Failure(**failure) for _, part in found for failure in part]
        samples = sum(count for count, _ in found)
        check_error_rate(samples, failures, self.max_error_rate, episodes=self.task.multi_turn)

    def evaluate(self, split: Panels = "exam", *, agents: Sequence[LLMAlgorithm] | None = None) -> dict[int, Fitness]:
        """Examine every agent of the run on its island, or only ``agents`` on this one."""
        self._all_sit_it = agents is None
        try:
            own = super().evaluate(split, agents=agents)
        finally:
            self._all_sit_it = False
        if agents is not None:
            return own
        found = self.exchange.merged({index: fitness.state() for index, fitness in own.items()})
        self._learn_of_all()
        return {index: Fitness.from_state(values) for index, values in found.items()}

    def evaluate_agent(self, index: int, split: Panels) -> Fitness:
        """Examine one agent on its island."""
        own = super().evaluate_agent
        return shared_fitness(self.exchange, self._owners()[index], lambda: own(index, split))

    def evaluate_base(self, split: Panels = "test") -> Fitness:
        """Examine the base model on the first island."""
        own = super().evaluate_base
        return shared_fitness(self.exchange, 0, lambda: own(split))

    def _check_exam(self, failures: Sequence[Failure], examined: int, size: int, *, all_agents: bool) -> set[int]:
        if not self._all_sit_it:
            return super()._check_exam(failures, examined, size, all_agents=all_agents)
        found = self.exchange.all((examined, [asdict(failure) for failure in failures]))
        everything: list[Failure] = []
        before = 0
        for count, part in found:
            everything += [Failure(**{**f, "request": f["request"] + before * size}) for f in part]
            before += count
        return super()._check_exam(everything, before, size, all_agents=True)

    def _checkups(self) -> dict[int, Checkup]:
        found = self.exchange.merged({index: asdict(checkup) for index, checkup in super()._checkups().items()})
        return {index: Checkup(c["sick"], Vitals(**c["vitals"]), c["weights"]) for index, c in found.items()}

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
            for child in (plan.slots[place] for place in share)
            for source in (roots[child], mates.get(child, roots[child]))
        }
        arrived: dict[int, AgentState] = {}
        self.exchange.all(None)
        for (index, island), owner in sorted(journeys.items()):
            if owner == island:
                continue
            if rank == owner:
                self.exchange.send(packed(self.agent(index).state()), island)
            elif rank == island:
                arrived[index] = unpacked(self.exchange.receive(owner))
        agents = []
        for index in (plan.slots[place] for place in shares[rank]):
            root = roots[index]
            agent = self._moved_in(arrived[root]) if root in arrived else self.agent(root)
            if index in births:
                agent = self._child(agent, births[index].child, arrived=root in arrived)
                if index in mates:
                    mate = mates[index]
                    agent.cross(arrived[mate] if mate in arrived else self.agent(mate))
                self._inherit(agent, births[index].hyperparameters_from)
            agents.append(agent)
        self._replace(agents)
        self.next_index += len(plan.births)
        return self.exchange.merged({agent.index: dict(agent.hyperparameters) for agent in agents})

    def _moved_in(self, state: AgentState) -> LLMAlgorithm:
        return ALGORITHMS[state.algorithm].from_state(state, self.runtime, self.agents[0].loss)

    @staticmethod
    def _child(agent: LLMAlgorithm, index: int, *, arrived: bool) -> LLMAlgorithm:
        if not arrived:
            return agent.clone(index)
        agent.index, agent.parent = index, agent.index  # already a copy
        return agent

    def _inherit(self, child: LLMAlgorithm, donor: int | None) -> None:
        if donor is not None:
            values = next(facts.hyperparameters for facts in self._known if facts.index == donor)
            child.apply_mutation(inherited(child.index, child.hyperparameters, donor, values))

    def _mutate(self, plan: Callable[[Sequence[Member]], list[Mutation]]) -> list[Mutation]:
        # An agent's mutation does not depend on other agents, so each island plans its own.
        own = super()._mutate(plan)
        found = self.exchange.all([mutation.to_dict() for mutation in own])
        self._learn_of_all()
        return [Mutation.from_dict(mutation) for part in found for mutation in part]

    # -- copies ---------------------------------------------------------------------------------------------------

    def state_of(self, index: int) -> AgentState | None:
        """Return a copy of an agent on the first island; None on the others."""
        owner, rank = self._owners()[index], self.exchange.rank
        if owner == 0:
            return super().state_of(index) if rank == 0 else None
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


def shared_fitness(exchange: Exchange, rank: int, work: Callable[[], Fitness]) -> Fitness:
    """Run an exam on one island, and return its result on all."""
    if exchange.size == 1:
        return work()
    return Fitness.from_state(exchange.by(rank, lambda: work().state()))
