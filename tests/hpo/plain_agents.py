"""Agents without a model: all of the agent protocol that evolution uses, and nothing else."""

import copy
from dataclasses import dataclass, field

from agilerl.hpo.mutation import Mutation
from agilerl.hpo.parameters import Gene, Value

LR = Gene("lr", "float", min=1e-7, max=1e-3)
GROUP = Gene("group_size", "int", min=2, max=16)
GENES = {"lr": LR, "group_size": GROUP}


@dataclass
class PlainAgent:
    index: int
    fitness: list[float] = field(default_factory=list)
    hyperparameters: dict[str, Value] = field(default_factory=lambda: {"lr": 1e-5, "group_size": 8})
    genes: dict[str, Gene] = field(default_factory=lambda: dict(GENES))
    rank: int = 8
    mut: str = "none"
    weights: list[float] = field(default_factory=lambda: [0.0])
    mutations: list[Mutation] = field(default_factory=list)

    def apply_mutation(self, mutation: Mutation) -> None:
        self.mut = mutation.kind
        self.mutations.append(mutation)
        for change in mutation.changes:
            if change.gene == "rank":
                self.rank = int(change.new)
            else:
                self.hyperparameters[change.gene] = change.new

    def clone(self, index: int) -> "PlainAgent":
        twin = copy.deepcopy(self)
        twin.index = index
        return twin


def population(*fitness: float) -> list[PlainAgent]:
    """One agent for each fitness, indices from 0, each with its own weights and learning rate."""
    return [
        PlainAgent(i, [value], {"lr": 1e-6 * (i + 1), "group_size": 8}, weights=[float(i)])
        for i, value in enumerate(fitness)
    ]
