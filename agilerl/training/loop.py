"""The training loop: rollouts, updates, exams, selection, checkpoints, and an honest last test."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from agilerl.algorithms.state import AgentState
from agilerl.hpo.fitness import Fitness, ranking
from agilerl.hpo.lineage import winning_lineage
from agilerl.runs.directory import RunDirectory
from agilerl.runs.journal import read_lines
from agilerl.training.config import RunConfig
from agilerl.training.events import (
    Event,
    Evolved,
    ExamDone,
    IterationDone,
    PhaseStarted,
    RunFinished,
    RunStarted,
)
from agilerl.training.records import RunRecords, Where
from agilerl.training.setup import Session, document

__all__ = ["planned_iterations", "samples_per_iteration", "train"]


@dataclass
class _Progress:
    """Counters of a run."""

    iteration: int = 0
    generation: int = 0
    samples: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: {"generated": 0, "trained": 0, "evaluated": 0})
    best: float = float("-inf")
    elite: AgentState | None = None
    elite_iteration: int | None = None
    fitness: dict[int, Fitness] = field(default_factory=dict)
    """Last exam of every agent that ever lived."""
    exam: ExamDone | None = None
    """The last exam, as long as nobody has learned or changed since."""
    started: float = field(default_factory=perf_counter)

    @property
    def seconds(self) -> float:
        return perf_counter() - self.started

    def spent(self, config: RunConfig) -> float:
        """Return the largest share of any budget that is used up."""
        t = config.training
        shares = [self.samples / t.max_steps]
        if t.max_tokens is not None:
            shares.append(sum(self.tokens.values()) / t.max_tokens)
        if t.max_seconds is not None:
            shares.append(self.seconds / t.max_seconds)
        return max(shares)


def samples_per_iteration(session: Session) -> int:
    """Return the completions that one iteration samples, all agents together."""
    prompts = session.population.prompts_per_step
    return sum(prompts * agent.config.group_size for agent in session.population.agents)  # type: ignore[attr-defined]


def planned_iterations(session: Session) -> int:
    """Return the iterations that ``max_steps`` allows at the present batch sizes."""
    return max(1, -(-session.config.training.max_steps // samples_per_iteration(session)))


def train(session: Session, out: Path, *, command: list[str] | None = None) -> Iterator[Event]:
    """Run a session to its end inside a new run directory, telling what happens as it happens.

    Raises CheckpointError, having written nothing, when the directory is in use or holds a run.
    """
    config = session.config
    with RunDirectory.create(out, document(config), config.training.seed, command=command) as run:
        records = RunRecords(run)
        try:
            yield from _run(session, run, records)
        finally:
            records.close()


def _run(session: Session, run: RunDirectory, records: RunRecords) -> Iterator[Event]:
    config, population = session.config, session.population
    t = config.training
    progress = _Progress()
    iterations = planned_iterations(session)
    records.founders(population.agents)
    yield RunStarted(run.root, iterations, -(-iterations // t.evo_steps))
    yield PhaseStarted("base test")
    base = population.evaluate_base("test")
    records.test("base", None, base)
    median: tuple[int, Fitness] | None = None
    while True:
        yield PhaseStarted("train")
        for _ in range(t.evo_steps):
            yield _iterate(session, records, progress)
            if progress.spent(config) >= 1:
                break
            if t.evaluation_interval and progress.iteration % t.evaluation_interval == 0:
                yield PhaseStarted("exam")
                yield _exam(session, records, progress)
        exam = progress.exam
        if exam is None:
            yield PhaseStarted("exam")
            yield (exam := _exam(session, records, progress))
        if median is None:
            ranked = ranking(exam.fitness)
            middle = ranked[(len(ranked) - 1) // 2]
            agents = [a for a in population.agents if a.index == middle]
            median = (middle, population.evaluate("test", agents=agents)[middle])
            records.test("median_first_generation", middle, median[1])
        last = progress.spent(config) >= 1
        if not last:
            yield _evolve(session, records, progress, exam)
        where = Where(progress.generation, progress.iteration)
        records.checkpoint(where, population, best=progress.elite_iteration, keep=t.keep_checkpoints)
        progress.generation += 1
        if last:
            break
    yield PhaseStarted("test")
    yield _finish(session, run, records, progress, base, median)


def _iterate(session: Session, records: RunRecords, progress: _Progress) -> IterationDone:
    population, config = session.population, session.config
    start = perf_counter()
    before = {agent.index: dict(agent.tokens) for agent in population.agents}
    progress.exam = None
    rollout = population.draw() if population.learns_from_data else population.rollout()
    update_start = perf_counter()
    learned = population.learn(rollout)
    end = perf_counter()
    progress.iteration += 1
    progress.samples += sum(len(t) for t in rollout.trajectories.values())
    shared = {
        "time/rollout": rollout.times.rollout,
        "time/reward": rollout.times.reward,
        "time/update": end - update_start,
        "step_time": end - start,
        "memory/peak": _peak_memory(population.runtime.base.device),
    }
    metrics = {}
    for agent in population.agents:
        spent = {name: count - before[agent.index][name] for name, count in agent.tokens.items()}
        for name, count in spent.items():
            progress.tokens[name] += count
        agent.scores.append(learned[agent.index].get("reward", float("nan")))
        # Sampled and learned from; the time is that of all agents, who share every forward pass.
        rate = sum(spent.values()) / (end - start)
        metrics[agent.index] = {**learned[agent.index], **shared, "tokens_per_second": rate}
    where = Where(progress.generation, progress.iteration)
    records.iteration(where, metrics)
    if not population.learns_from_data:
        records.completions(where, rollout, config.training.log_completions, population.tokenizer)
    return IterationDone(progress.generation, progress.iteration, min(progress.spent(config), 1.0), metrics)


def _exam(session: Session, records: RunRecords, progress: _Progress) -> ExamDone:
    population = session.population
    start, before = perf_counter(), sum(a.tokens["evaluated"] for a in population.agents)
    fitness = population.evaluate("exam")
    progress.tokens["evaluated"] += sum(a.tokens["evaluated"] for a in population.agents) - before
    where = Where(progress.generation, progress.iteration)
    records.exam(where, fitness, population.agents, perf_counter() - start)
    progress.fitness.update(fitness)
    best = ranking(fitness)[0]
    # At equal fitness the later one wins: it has been trained for longer.
    if fitness[best].is_finite and fitness[best].mean >= progress.best:
        progress.best = fitness[best].mean
        progress.elite = next(a for a in population.agents if a.index == best).state()
        progress.elite_iteration = progress.iteration
    progress.exam = ExamDone(progress.generation, fitness)
    return progress.exam


def _evolve(session: Session, records: RunRecords, progress: _Progress, exam: ExamDone) -> Evolved:
    config, population = session.config, session.population
    start = perf_counter()
    seed = config.training.seed if config.mutation.rand_seed is None else config.mutation.rand_seed
    evolution = population.evolve(
        exam.fitness, session.selection, session.mutations, generation=progress.generation, seed=seed
    )
    where = Where(progress.generation, progress.iteration)
    records.evolution(where, evolution, exam.fitness, population, perf_counter() - start)
    labels = {agent.index: agent.mut for agent in population.agents}
    return Evolved(progress.generation, evolution.plan, labels)


def _finish(
    session: Session,
    run: RunDirectory,
    records: RunRecords,
    progress: _Progress,
    base: Fitness,
    median: tuple[int, Fitness] | None,
) -> RunFinished:
    """Save and test the best agent of the run, and write the summary and the report."""
    population = session.population
    summary: dict[str, Any] = {
        "generations": progress.generation,
        "iterations": progress.iteration,
        "agents": len(population),
        "tokens": progress.tokens,
        "test": {"base": base.to_dict()},
        "fitness": {str(index): f.to_dict() for index, f in sorted(progress.fitness.items())},
        "elite": None,
    }
    if median is not None:
        summary["test"]["median_first_generation"] = {"index": median[0], **median[1].to_dict()}
    if progress.elite is not None:
        elite = type(population.agents[0]).from_state(progress.elite, population.runtime)
        records.elite(elite)
        tested = population.evaluate("test", agents=[elite])[elite.index]
        records.test("elite", elite.index, tested)
        summary["test"]["elite"] = tested.to_dict()
        summary["elite"] = {
            "index": elite.index,
            "adapter": "elite",
            "exam": progress.best,
            "step": progress.elite_iteration,
            "hyperparameters": dict(elite.hyperparameters),
        }
        line = winning_lineage(read_lines(run.lineage), elite.index)
        summary["lineage"] = [
            {"agent": a.agent, "from_generation": a.from_generation, "hyperparameters": a.hyperparameters} for a in line
        ]
        elite.clean_up()
    summary["seconds"] = progress.seconds
    run.finish(summary)
    from agilerl.report import build_report

    build_report([run.root], run.report)
    return RunFinished(run.root, {"status": "finished", **summary})


def _peak_memory(device: torch.device) -> int:
    """Return the most bytes used so far: of the GPU where the run is on one, else of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
