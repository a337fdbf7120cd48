"""The training loop: rollouts, updates, exams, selection, checkpoints, and an honest last test."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from agilerl.hpo.fitness import Fitness, ranking
from agilerl.hpo.guard import quarantined
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
from agilerl.training.progress import Progress
from agilerl.training.records import RunRecords, Where
from agilerl.training.saved import SavedCheckpoint
from agilerl.training.setup import Session, document
from agilerl.training.stopping import Interrupted, StopRequest

__all__ = ["planned_iterations", "resume", "samples_per_iteration", "train"]


def samples_per_iteration(session: Session) -> int:
    """Return the completions that one iteration samples, all agents together."""
    prompts = session.population.prompts_per_step
    return sum(prompts * agent.config.group_size for agent in session.population.agents)  # type: ignore[attr-defined]


def planned_iterations(session: Session) -> int:
    """Return the iterations that ``max_steps`` allows at the present batch sizes."""
    return max(1, -(-session.config.training.max_steps // samples_per_iteration(session)))


def train(
    session: Session, out: Path, *, command: list[str] | None = None, stop: StopRequest | None = None
) -> Iterator[Event]:
    """Run a session to its end inside a new run directory, telling what happens as it happens.

    Raises CheckpointError, having written nothing, when the directory is in use or holds a run; and Interrupted, after
    a checkpoint, where ``stop`` asks for it.
    """
    config = session.config
    seed = config.training.seed
    with RunDirectory.create(out, document(config), seed, command=command, files=session.files) as run:
        yield from _work(session, run, None, stop or StopRequest())


def resume(session: Session, run: RunDirectory, *, stop: StopRequest | None = None) -> Iterator[Event]:
    """Go on with a run whose session was built from its checkpoint; from its beginning where there was none.

    What the run wrote after that checkpoint is cut off and written again, the same to the bit on a CPU. Closes the run
    directory. Raises Interrupted as :func:`train` does.
    """
    with run:
        yield from _work(session, run, session.saved, stop or StopRequest())


def _work(session: Session, run: RunDirectory, saved: SavedCheckpoint | None, stop: StopRequest) -> Iterator[Event]:
    records = RunRecords(run, saved)
    try:
        if saved is not None:
            records.prune(saved.progress, keep=session.config.training.keep_checkpoints)
        yield from _run(session, run, records, Progress() if saved is None else saved.progress, stop)
    finally:
        records.close()
        session.task.close()


def _run(
    session: Session, run: RunDirectory, records: RunRecords, progress: Progress, stop: StopRequest
) -> Iterator[Event]:
    config, population = session.config, session.population
    t = config.training
    left = max(1, planned_iterations(session) - progress.iteration)
    yield RunStarted(run.root, progress.iteration + left, -(-(progress.iteration + left) // t.evo_steps))
    if progress.base is None:
        records.founders(population.agents)
        yield PhaseStarted("base test")
        progress.base = population.evaluate_base("test")
        records.test("base", None, progress.base)
    pace = _Pace(config)
    while progress.spent(config) < 1 or progress.step:
        yield PhaseStarted("train")
        while progress.step < t.evo_steps and progress.spent(config) < 1:
            yield _iterate(session, records, progress)
            progress.step += 1
            if t.evaluation_interval and progress.iteration % t.evaluation_interval == 0:
                yield PhaseStarted("exam")
                yield _exam(session, records, progress)
            if progress.step == t.evo_steps or progress.spent(config) >= 1:
                break  # the checkpoint comes with the generation
            if pace.is_due(progress) or stop.signal is not None:
                records.checkpoint(population, progress, keep=t.keep_checkpoints)
            if stop.signal is not None:
                raise Interrupted(stop.code, run.root)
        if progress.exam is None:
            yield PhaseStarted("exam")
            yield _exam(session, records, progress)
        assert progress.exam is not None
        if progress.median is None:
            ranked = ranking(progress.exam)
            middle = ranked[(len(ranked) - 1) // 2]
            agents = [a for a in population.agents if a.index == middle]
            progress.median = (middle, population.evaluate("test", agents=agents)[middle])
            records.test("median_first_generation", *progress.median)
        if progress.spent(config) < 1:
            yield _evolve(session, records, progress, progress.exam)
        progress.generation, progress.step, progress.exam = progress.generation + 1, 0, None
        records.checkpoint(population, progress, keep=t.keep_checkpoints)
        if stop.signal is not None:
            raise Interrupted(stop.code, run.root)
    yield PhaseStarted("test")
    yield _finish(session, run, records, progress)


class _Pace:
    """When a checkpoint is due inside a generation."""

    def __init__(self, config: RunConfig) -> None:
        self.steps, self.seconds = config.training.checkpoint_steps, config.training.checkpoint_seconds
        self._last = perf_counter()

    def is_due(self, progress: Progress) -> bool:
        """Return whether to save now."""
        by_steps = self.steps is not None and progress.iteration % self.steps == 0
        by_seconds = self.seconds is not None and perf_counter() - self._last >= self.seconds
        if by_steps or by_seconds:
            self._last = perf_counter()
        return by_steps or by_seconds


def _iterate(session: Session, records: RunRecords, progress: Progress) -> IterationDone:
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
    records.iteration(where, metrics, {agent.index: agent.outcome for agent in population.agents})
    if not population.learns_from_data:
        records.completions(where, rollout, config.training.log_completions, population.tokenizer)
    return IterationDone(progress.generation, progress.iteration, min(progress.spent(config), 1.0), metrics)


def _exam(session: Session, records: RunRecords, progress: Progress) -> ExamDone:
    population = session.population
    start, before = perf_counter(), sum(a.tokens["evaluated"] for a in population.agents)
    fitness = population.evaluate("exam")
    progress.tokens["evaluated"] += sum(a.tokens["evaluated"] for a in population.agents) - before
    where = Where(progress.generation, progress.iteration)
    records.exam(where, fitness, population.agents, perf_counter() - start)
    progress.fitness.update(fitness)
    # A sick agent is never the best; a collapsed one cannot be, for the best is what it is measured by.
    sound = quarantined(fitness, population.sick(fitness, collapse_guard=False))
    best = ranking(sound)[0]
    # At equal fitness the later one wins: it has been trained for longer.
    if sound[best].is_finite and sound[best].mean >= progress.best:
        progress.best = sound[best].mean
        progress.elite = next(a for a in population.agents if a.index == best).state()
        progress.elite_iteration = progress.iteration
    progress.exam = dict(fitness)
    return ExamDone(progress.generation, fitness)


def _evolve(session: Session, records: RunRecords, progress: Progress, exam: Mapping[int, Fitness]) -> Evolved:
    config, population = session.config, session.population
    start = perf_counter()
    seed = config.training.seed if config.mutation.rand_seed is None else config.mutation.rand_seed
    evolution = population.evolve(
        exam,
        session.selection,
        session.mutations,
        generation=progress.generation,
        seed=seed,
        collapse_guard=config.selection_strategy.collapse_guard,
    )
    where = Where(progress.generation, progress.iteration)
    records.evolution(where, evolution, exam, population, perf_counter() - start)
    labels = {agent.index: agent.mut for agent in population.agents}
    return Evolved(progress.generation, evolution.plan, labels)


def _finish(session: Session, run: RunDirectory, records: RunRecords, progress: Progress) -> RunFinished:
    """Save and test the best agent of the run, and write the summary and the report."""
    base, median = progress.base, progress.median
    assert base is not None
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
        first = population.agents[0]
        elite = type(first).from_state(progress.elite, population.runtime, first.loss)
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
