"""Which agent descends from which: the records of ``lineage.jsonl``, and queries on them."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from agilerl.checks.arguments import described
from agilerl.errors import CheckpointError
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.mutation import Mutation
from agilerl.hpo.parameters import Value

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Exam:
    """One evaluation of an agent."""

    generation: int
    step: int
    mean: float | None
    stderr: float | None
    tokens: Mapping[str, int]
    """Cumulative counts (generated, trained, evaluated); a clone continues its parent's counts."""


@dataclass(slots=True)
class Life:
    """One agent from birth to death, according to the records."""

    agent: int
    parent: int | None
    born: int
    """Generation after whose exam the agent was cloned; for a founder, the generation it started in."""
    step: int
    hyperparameters: dict[str, Value]
    """Values at birth, before the agent's first mutation."""
    mutations: list[Record] = field(default_factory=list)
    exams: list[Exam] = field(default_factory=list)
    elite_in: list[int] = field(default_factory=list)
    """Generations in which it was the elite."""
    verdicts: list[tuple[int, str]] = field(default_factory=list)
    """(generation, why it stayed), if a selection gave its numbers."""
    died: int | None = None
    reason: str = ""
    children: list[int] = field(default_factory=list)
    from_best: bool = False
    """Whether it began as its parent was at its best exam, not as it was at the last one."""
    untrained: bool = False
    """Whether it began as its parent was before any training."""

    def inherited_until(self, heir: "Life") -> Exam | None:
        """Return the exam at which the heir's weights were copied; None if it is not in the records."""
        known = [exam for exam in self.exams if exam.generation <= heir.born]
        if heir.from_best:
            # At equal means the later one, as when a run keeps its best exam.
            return max((exam for exam in known if exam.mean is not None), key=lambda e: (e.mean, e.step), default=None)
        return next((exam for exam in known if exam.generation == heir.born), None)

    def mutated_at_birth(self, record: Record) -> bool:
        """Whether a mutation changed a new clone; a founder's first mutation comes after it was trained."""
        return self.parent is not None and bool(record["generation"] <= self.born)

    def values(self, before: int | None = None) -> dict[str, Value]:
        """Return the gene values before the mutations of generation ``before`` (None: after all mutations).

        A mutation follows the cloning of its generation, so these are the values that a clone of that generation got.
        """
        values = dict(self.hyperparameters)
        for record in self.mutations:
            if before is None or record["generation"] < before:
                values.update({change["gene"]: change["new"] for change in record["changes"]})
        return values

    def first_values(self) -> dict[str, Value]:
        """Return the values that the agent was first trained with."""
        # A clone mutates in the generation of its birth, before it trains; a founder trains first.
        return self.values(before=self.born if self.parent is None else self.born + 1)


@dataclass(frozen=True, slots=True)
class Ancestor:
    """The part of one agent's life that the winner inherited."""

    agent: int
    parent: int | None
    from_generation: int
    to_generation: int | None
    """Generation after whose exam the next agent of the line was cloned; None for the last one."""
    from_step: int
    to_step: int | None
    hyperparameters: dict[str, Value]
    """Values at the start of this part, mutations at birth included."""
    final_hyperparameters: dict[str, Value]
    """Values at its end, after any mutation while it lived."""


def birth_record(
    agent: int,
    parent: int | None,
    generation: int,
    step: int,
    hyperparameters: Mapping[str, Value],
    *,
    from_best: bool = False,
    untrained: bool = False,
) -> dict[str, Any]:
    """Return the line for a founder (``parent`` None) or a clone, with the gene values it was born with.

    ``from_best``: it is a clone of the parent as it was at its best exam; ``untrained``: as it was before any training.
    """
    line = {"event": "birth", "agent": agent, "parent": parent, "generation": generation, "step": step}
    line |= {"hyperparameters": dict(hyperparameters)}
    return line | {name: True for name, holds in {"from_best": from_best, "untrained": untrained}.items() if holds}


def mutation_record(mutation: Mutation, generation: int, effect: str = "") -> dict[str, Any]:
    """Return the line for a mutation that was applied; ``effect`` says what one of the adapter came to."""
    line = {"event": "mutation", "generation": generation, **mutation.to_dict()}
    return line | ({"effect": effect} if mutation.kind == "rank" and effect else {})


def fitness_record(
    agent: int, generation: int, step: int, fitness: Fitness, tokens: Mapping[str, int]
) -> dict[str, Any]:
    """Return the line for an evaluation; ``tokens`` holds cumulative generated, trained and evaluated counts."""
    line = {"event": "fitness", "agent": agent, "generation": generation, "step": step}
    return {**line, **fitness.to_dict(), "tokens": dict(tokens)}


def event_record(
    event: Literal["elite", "death", "verdict"], agent: int, generation: int, **more: str
) -> dict[str, Any]:
    """Return the line for the elite, an agent that left, or one that stays; the last two with the ``reason``."""
    return {"event": event, "agent": agent, "generation": generation, **more}


def family_tree(records: Iterable[Record]) -> dict[int, Life]:
    """Return every agent's life by index, in order of birth; founders are those whose ``parent`` is None.

    Raises CheckpointError for a record that is not one of the six events, or names an agent that was never born.
    """
    lives: dict[int, Life] = {}
    for record in records:
        if not isinstance(record, Mapping):
            raise CheckpointError(f"expected the lines of a lineage as mappings, found {described(record)}")
        try:
            _add(lives, record)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The lineage has an invalid line: {dict(record)!r} ({type(error).__name__}: {error}); "
                "the run directory is damaged or was written by another version."
            ) from error
    return lives


def winning_lineage(records: Iterable[Record], agent: int) -> list[Ancestor]:
    """Return the ancestors of ``agent`` from the founder to ``agent`` itself, each with the part that was inherited.

    Raises CheckpointError when the agent, or one of its ancestors, is not in the records.
    """
    lives = family_tree(records)
    line = [_life(lives, agent)]
    # Nothing of what an agent's parent learned is in one that has begun again.
    while (parent := line[-1].parent) is not None and not line[-1].untrained:
        line.append(_life(lives, parent))
        # Longer than there are agents: one of them is its own ancestor.
        if len(line) > len(lives):
            raise CheckpointError(f"The lineage of agent {agent} is circular; the run directory is damaged.")
    line.reverse()
    ancestors = []
    for life, heir in zip(line, [*line[1:], None], strict=True):
        exam = life.inherited_until(heir) if heir else None
        # An heir of the best exam was copied at an earlier one than that of its birth.
        end = exam.generation if exam else heir.born if heir else None
        ancestors.append(
            Ancestor(
                agent=life.agent,
                parent=life.parent,
                from_generation=life.born,
                to_generation=end,
                from_step=life.step,
                to_step=exam.step if exam else heir.step if heir else None,
                hyperparameters=life.first_values(),
                final_hyperparameters=life.values(before=end),
            )
        )
    return ancestors


def _add(lives: dict[int, Life], record: Record) -> None:
    event, agent = record["event"], record["agent"]
    if event == "birth":
        if agent in lives:
            raise ValueError(f"agent {agent} is born twice")
        parent = record["parent"]
        if parent is not None:
            # A parent that was never born is a KeyError, which family_tree reports.
            lives[parent].children.append(agent)
        life = Life(agent, parent, record["generation"], record["step"], dict(record["hyperparameters"]))
        life.from_best = bool(record.get("from_best", False))
        life.untrained = bool(record.get("untrained", False))
        lives[agent] = life
        return
    life = lives[agent]
    if event == "mutation":
        if record["kind"] != "none":
            life.mutations.append(
                {"generation": record["generation"], "kind": record["kind"], "changes": list(record["changes"])}
            )
    elif event == "fitness":
        result = (record["mean"], record["stderr"])
        life.exams.append(Exam(record["generation"], record["step"], *result, dict(record.get("tokens", {}))))
    elif event == "death":
        life.died, life.reason = record["generation"], str(record["reason"])
    elif event == "verdict":
        life.verdicts.append((record["generation"], str(record["reason"])))
    elif event == "elite":
        life.elite_in.append(record["generation"])
    else:
        raise ValueError(f"unknown event {event!r}")


def _life(lives: Mapping[int, Life], agent: int) -> Life:
    if agent not in lives:
        raise CheckpointError(f"The lineage has no agent {agent}; it has {sorted(lives) or 'none'}.")
    return lives[agent]
