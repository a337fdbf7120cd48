"""The training loop: rollouts, updates, exams, selection, checkpoints, and an honest last test."""

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from agilerl.config.run import RunConfig
from agilerl.errors import ConfigError, RewardError
from agilerl.hpo.fitness import Fitness, ranking
from agilerl.hpo.guard import quarantined
from agilerl.run_date import asks_for_date, pinned
from agilerl.runs.completions import CompletionRecord
from agilerl.runs.directory import RunDirectory, run_date
from agilerl.runs.stopping import Interrupted, StopRequest
from agilerl.training.events import (
    Event,
    Evolved,
    ExamDone,
    IterationDone,
    LearningFailed,
    PhaseStarted,
    RunFinished,
    RunStarted,
)
from agilerl.training.followers import FollowersRecords
from agilerl.training.progress import Progress
from agilerl.training.records import RunRecords, Where, completion_records, elite_of
from agilerl.training.resolved import document, given
from agilerl.training.saved import SavedCheckpoint
from agilerl.training.setup import Session

__all__ = ["planned_iterations", "resume", "samples_per_iteration", "train"]


Records = RunRecords | FollowersRecords


@dataclass(frozen=True)
class Tested:
    """The best agent of a run and what it did in the test."""

    index: int
    hyperparameters: dict[str, Any]
    result: Fitness


def samples_per_iteration(session: Session) -> int:
    """Return the completions that one iteration samples, all agents together."""
    return session.population.prompts_per_step * sum(session.population.group_sizes)


def planned_iterations(session: Session) -> int:
    """Return the iterations that ``max_steps`` allows at the present batch sizes."""
    return max(1, -(-session.config.training.max_steps // samples_per_iteration(session)))


def train(
    session: Session, out: Path, *, command: list[str] | None = None, stop: StopRequest | None = None
) -> Iterator[Event]:
    """Run a session to its end inside a new run directory, telling what happens as it happens.

    Of several processes one does the writing; the others do their part and tell the same. Raises CheckpointError,
    having written nothing, when the directory is in use or holds a run; and Interrupted, after a checkpoint, where
    ``stop`` asks for it, in whichever process.
    """
    if not session.topology.is_writer:
        yield from _work(session, out, None, None, stop or StopRequest())
        return
    config = session.config
    run = RunDirectory.create(
        out,
        document(config),
        config.training.seed,
        given=given(config),
        command=command,
        files=session.files,
        date=session.date,
    )
    with run:
        yield from _work(session, out, run, None, stop or StopRequest())


def resume(
    session: Session, run: RunDirectory | None, *, root: Path | None = None, stop: StopRequest | None = None
) -> Iterator[Event]:
    """Go on with a run whose session was built from its checkpoint; from its beginning where there was none.

    What the run wrote after that checkpoint is cut off and written again, the same to the bit on a CPU. Closes the run
    directory. A process that does not write gives no ``run``, and at most its ``root``. Raises Interrupted as
    :func:`train` does.
    """
    if run is None:
        yield from _work(session, root or Path(), None, session.saved, stop or StopRequest())
        return
    with run:
        _check_date(session, run)
        yield from _work(session, run.root, run, session.saved, stop or StopRequest())


def _check_date(session: Session, run: RunDirectory) -> None:
    """Raise ConfigError where prompts that show the date show another one than before; warn where nobody knows it."""
    date = run_date(run.info)
    if not asks_for_date(session.population.runtime.tokenizer):
        return
    if session.date != date:
        raise ConfigError(
            f"the chat template of this run shows the date, which was {date} and is {session.date} in this session; "
            "build it from the configuration that open_run returns"
        )
    if "date" not in run.info:
        warnings.warn(
            f"the chat template of this run shows the date, which its run.json does not have: prompts are rendered "
            f"with {date}, when the run was started",
            stacklevel=2,
        )


def _work(
    session: Session, root: Path, run: RunDirectory | None, saved: SavedCheckpoint | None, stop: StopRequest
) -> Iterator[Event]:
    # Those of the writer's column send it what it writes; others of their islands hold the same.
    sends = session.topology.island.rank == 0
    records = FollowersRecords(saved, sends=sends) if run is None else RunRecords(run, saved)
    try:
        if saved is not None:
            records.prune(saved.progress, keep=session.config.training.keep_checkpoints)
        with pinned(session.date):
            yield from _run(session, root, records, Progress() if saved is None else saved.progress, stop)
    finally:
        records.close()
        session.task.close()


def _run(session: Session, root: Path, records: Records, progress: Progress, stop: StopRequest) -> Iterator[Event]:
    config, population = session.config, session.population
    t = config.training
    left = max(1, planned_iterations(session) - progress.iteration)
    yield RunStarted(root, progress.iteration + left, -(-(progress.iteration + left) // t.evo_steps))
    if progress.base is None:
        records.founders(population.everyone)
        yield PhaseStarted("base test")
        progress.base = population.evaluate_base("test")
        records.test("base", None, progress.base)
    pace = _Pace(config)
    while _spent(session, progress) < 1 or progress.step:
        yield PhaseStarted("train")
        while progress.step < t.evo_steps and _spent(session, progress) < 1:
            yield from _iterate(session, records, progress)
            progress.step += 1
            if t.evaluation_interval and progress.iteration % t.evaluation_interval == 0:
                yield PhaseStarted("exam")
                yield _exam(session, records, progress)
            if progress.step == t.evo_steps or _spent(session, progress) >= 1:
                break  # the checkpoint comes with the generation
            if session.topology.world.first(lambda: pace.is_due(progress)) or _asked(session, stop):
                records.checkpoint(population, progress, keep=t.keep_checkpoints)
            if _asked(session, stop):
                raise Interrupted(stop.code, root)
        if progress.exam is None:
            yield PhaseStarted("exam")
            yield _exam(session, records, progress)
        assert progress.exam is not None
        if progress.median is None:
            ranked = ranking(progress.exam)
            middle = ranked[(len(ranked) - 1) // 2]
            progress.median = (middle, population.evaluate_agent(middle, "test"))
            records.test("median_first_generation", *progress.median)
        if _spent(session, progress) < 1:
            yield _evolve(session, records, progress, progress.exam)
        progress.generation, progress.step, progress.exam = progress.generation + 1, 0, None
        records.checkpoint(population, progress, keep=t.keep_checkpoints)
        if _asked(session, stop):
            raise Interrupted(stop.code, root)
    yield PhaseStarted("test")
    tested = _test_elite(session, records, progress)
    summary = session.topology.peers.first(lambda: _finish(session, records, progress, tested))
    yield RunFinished(root, {"status": "finished", **summary})


def _spent(session: Session, progress: Progress) -> float:
    """Return the largest share of any budget that is used up; where the clock decides, it is the writer's."""
    limited = session.config.training.max_seconds is not None
    seconds = session.topology.world.first(lambda: progress.seconds) if limited else None
    return progress.spent(session.config, seconds)


def _asked(session: Session, stop: StopRequest) -> bool:
    """Return whether a signal has asked any process to stop; then all of them stop for the same one."""
    found = [number for number in session.topology.world.all(stop.signal) if number is not None]
    stop.signal = found[0] if found else stop.signal
    return bool(found)


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


def _iterate(session: Session, records: Records, progress: Progress) -> Iterator[Event]:
    population, config = session.population, session.config
    start = perf_counter()
    before = {agent.index: dict(agent.tokens) for agent in population.agents}
    progress.exam = None
    rollout = population.draw() if population.learns_from_data else population.rollout()
    update_start = perf_counter()
    learned = population.learn(rollout)
    end = perf_counter()
    progress.iteration += 1
    shared = {
        "time/rollout": rollout.times.rollout,
        "time/reward": rollout.times.reward,
        "time/update": end - update_start,
        "step_time": end - start,
        "memory/peak": _peak_memory(population.runtime.base.device),
    }
    own: dict[int, dict[str, Any]] = {}
    for agent in population.agents:
        spent = {name: count - before[agent.index][name] for name, count in agent.tokens.items()}
        agent.scores.append(learned[agent.index].get("reward", float("nan")))
        # Sampled and learned from; the time is that of all agents of a base, who share every forward pass.
        rate = sum(spent.values()) / (end - start)
        values = {**learned[agent.index], **shared, "tokens_per_second": rate}
        samples = len(rollout.trajectories[agent.index])
        own[agent.index] = {"metrics": values, "outcome": agent.outcome, "tokens": spent, "samples": samples}
    everybody = session.topology.peers.merged(own)
    for done in everybody.values():
        progress.samples += done["samples"]
        for name, count in done["tokens"].items():
            progress.tokens[name] += count
    metrics = {index: done["metrics"] for index, done in everybody.items()}
    where = Where(progress.generation, progress.iteration)
    outcomes = {index: done["outcome"] for index, done in everybody.items()}
    records.iteration(where, metrics, outcomes)
    if not population.learns_from_data:
        rows = completion_records(where, rollout, config.training.log_completions, population.tokenizer)
        records.completions(where, _of_all(session, rows))
    yield IterationDone(progress.generation, progress.iteration, min(_spent(session, progress), 1.0), metrics)
    failed = {index: outcome for index, outcome in outcomes.items() if outcome != "ok"}
    if failed:
        yield LearningFailed(progress.iteration, failed)


def _of_all(session: Session, rows: list[CompletionRecord]) -> list[CompletionRecord]:
    """Return the rows of all islands, in the order of the population."""
    peers = session.topology.peers
    if peers.size == 1:
        return rows
    return [CompletionRecord(**row) for part in peers.all([asdict(row) for row in rows]) for row in part]


def _exam(session: Session, records: Records, progress: Progress) -> ExamDone:
    population = session.population
    start, before = perf_counter(), sum(a.tokens["evaluated"] for a in population.everyone)
    fitness = population.evaluate("exam")
    if progress.elite_iteration is None:
        _check_graded(session, fitness)
    progress.tokens["evaluated"] += sum(a.tokens["evaluated"] for a in population.everyone) - before
    where = Where(progress.generation, progress.iteration)
    records.exam(where, fitness, population.everyone, perf_counter() - start)
    progress.fitness.update(fitness)
    # A sick agent is never the best; a collapsed one cannot be, for the best is what it is measured by.
    sound = quarantined(fitness, population.sick(fitness, collapse_guard=False))
    best = ranking(sound)[0]
    # At equal fitness the later one wins: it has been trained for longer.
    if sound[best].is_finite and sound[best].mean >= progress.best:
        progress.best = sound[best].mean
        progress.elite = population.state_of(best)
        progress.elite_iteration = progress.iteration
    progress.exam = dict(fitness)
    return ExamDone(progress.generation, fitness)


def _check_graded(session: Session, fitness: Mapping[int, Fitness]) -> None:
    """Raise RewardError where no agent has been given a grade yet, in training or in its exam, and nothing failed."""
    population = session.population
    if any(math.isfinite(score) for f in fitness.values() for score in f.scores):
        return
    own = all(population.ungraded[a.index] and all(map(math.isnan, a.scores)) for a in population.agents)
    if all(session.topology.peers.all(own)):
        size = session.task.panel_size("exam")
        error = RewardError(
            f"expected {session.task.grader} to return a number for completions, found None (no grade) for all that "
            f"every agent was trained on so far, and for all {size} of its exam: nothing can be learned from that; "
            "return 0.0 for a wrong answer, and None only for a row that the grader is not about"
        )
        error.everywhere = True
        raise error


def _evolve(session: Session, records: Records, progress: Progress, exam: Mapping[int, Fitness]) -> Evolved:
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
    labels = {agent.index: agent.mut for agent in population.everyone}
    return Evolved(progress.generation, evolution.plan, labels, elite_of(evolution, exam))


def _test_elite(session: Session, records: Records, progress: Progress) -> Tested | None:
    """Save and test the best agent of the run, on the first island."""
    peers, population = session.topology.peers, session.population
    if progress.elite_iteration is None or peers.rank > 0:
        return None
    assert progress.elite is not None
    first = population.agents[0]
    elite = type(first).from_state(progress.elite, population.runtime, first.loss)
    records.elite(elite)
    tested = population.evaluate("test", agents=[elite])[elite.index]
    records.test("elite", elite.index, tested)
    found = Tested(elite.index, dict(elite.hyperparameters), tested)
    elite.clean_up()
    return found


def _finish(session: Session, records: Records, progress: Progress, tested: Tested | None) -> dict[str, Any]:
    """Write the summary and the report; returns the summary."""
    base, median = progress.base, progress.median
    assert base is not None
    summary: dict[str, Any] = {
        "generations": progress.generation,
        "iterations": progress.iteration,
        "agents": len(session.population.everyone),
        "tokens": progress.tokens,
        "test": {"base": base.to_dict()},
        "fitness": {str(index): f.to_dict() for index, f in sorted(progress.fitness.items())},
        "elite": None,
    }
    if median is not None:
        summary["test"]["median_first_generation"] = {"index": median[0], **median[1].to_dict()}
    if tested is not None:
        summary["test"]["elite"] = tested.result.to_dict()
        summary["elite"] = {
            "index": tested.index,
            "adapter": "elite",
            "exam": progress.best,
            "step": progress.elite_iteration,
            "hyperparameters": tested.hyperparameters,
        }
    summary["seconds"] = progress.seconds
    records.finish(summary, None if tested is None else tested.index)
    return summary


def _peak_memory(device: torch.device) -> int:
    """Return the most bytes used so far: of the GPU where the run is on one, else of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
