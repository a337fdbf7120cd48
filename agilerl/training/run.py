"""A run: built from settings or from its directory, trained, examined, evolved and saved, and tested at its end."""

import hashlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from agilerl.checks.arguments import Location, checked
from agilerl.config.run import RunConfig, place_of_run
from agilerl.errors import ConfigError, RewardError
from agilerl.hpo.fitness import Fitness, ranking
from agilerl.hpo.guard import no_better, quarantined
from agilerl.hpo.mutation import Change, Mutation
from agilerl.hpo.parameters import values_of
from agilerl.hpo.selection import Best, Standing
from agilerl.models.memory import peak_memory
from agilerl.population import Population
from agilerl.runs.completions import CompletionRecord
from agilerl.runs.diagnosis import early_elite
from agilerl.runs.directory import RunDirectory, run_date
from agilerl.runs.stopping import Interrupted, StopRequest
from agilerl.text.templates import asks_for_date, at_date
from agilerl.training.events import (
    Event,
    Evolved,
    ExamDone,
    HeldOutTest,
    IterationDone,
    PhaseStarted,
    RunFinished,
    RunStarted,
)
from agilerl.training.finish import left_out, summary_of, tested_elite
from agilerl.training.given import rows_beside
from agilerl.training.loop import Loop, evolved
from agilerl.training.preflight import event_of, preflight, problem
from agilerl.training.progress import Kept, Median, Progress
from agilerl.training.records import Checkpoints, RunWriter, completion_rows
from agilerl.training.saved import open_run
from agilerl.training.setup import Session, build
from agilerl.training.trackers import Trackers, Wanted, check_trackers


@dataclass(frozen=True)
class Started:
    """A run that has begun, or is resumed."""

    session: Session
    root: Path
    """The run directory."""
    events: Generator[Event, None, None]
    """What happens in the run, which is carried out by iterating over it."""


@contextmanager
def start(
    config: RunConfig,
    out: Path | None,
    rows: Any = None,
    *,
    allow_code: bool = False,
    trackers: Mapping[str, Any] | None = None,
) -> Iterator[Started]:
    """Begin a run in ``out``, or in a directory of its own; ``trackers`` follow it besides those of its settings.

    ``rows`` are a dataset in memory, which takes the place of that of the settings. Raises as :func:`build` and
    :func:`train` do.
    """
    with place_of_run(config.environment, out) as root:
        wanted = {**config.training.trackers, **(trackers or {})}
        with rows_beside(root, rows) as file:
            session = build(config if file is None else _reading(config, file), allow_code=allow_code)
            # Also closes the run of a caller that stops following its events.
            with closing(train(session, root, trackers=wanted)) as events:
                yield Started(session, root, events)


@contextmanager
def reopen(
    path: Path, *, report: Callable[[str], None], allow_code: bool = False, trackers: Mapping[str, Any] | None = None
) -> Iterator[Started]:
    """Resume the unfinished run in a directory, from its newest intact checkpoint; see :func:`start`."""
    saved = open_run(path, report=report)
    with closing(saved.run):
        session = build(saved.config, saved.checkpoint, allow_code=allow_code)
        wanted = {**saved.config.training.trackers, **(trackers or {})}
        with closing(resume(session, saved.run, trackers=wanted)) as events:
            yield Started(session, saved.run.root, events)


def _reading(config: RunConfig, rows: str) -> RunConfig:
    """Return settings with another file of rows in place of their dataset."""
    e = config.environment
    parts = [part.model_copy(update={"path": rows}) for part in e.dataset or ()]
    return config.replaced(environment=e.model_copy(update={"dataset": parts}))


@checked
def train(
    session: Session,
    out: Location,
    *,
    command: list[str] | None = None,
    stop: StopRequest | None = None,
    trackers: Wanted | None = None,
    overwrite: bool = False,
) -> Generator[Event, None, None]:
    """Run a session to its end in a new run directory; yields each event once it is in the run's files.

    Closing the iterator closes the run, which can be resumed. With several processes, the first writes; the others do
    their part and yield the same events. ``trackers`` follow the run in place of those of its configuration: names,
    objects with ``log(values, step)``, or names with the keywords of their libraries' start (docs/trackers.md). With
    ``overwrite`` a run in the directory is deleted first, unless it is in use, or other things lie beside it.
    Raises ConfigError for a tracker that is not installed or does not start; having written nothing, ConfigError if no
    answer to training questions differs in its reward (``training.preflight``), and CheckpointError if the directory is
    in use or holds a run; and Interrupted, after a checkpoint, if ``stop`` requests it in any process.
    """
    out = Path(out)
    session.check_new()
    preflight(session)
    if session.processes.rank > 0:
        yield from _carried_out(session, out, None, stop)
        return
    check_trackers(trackers or (), list(session.trackers))
    run = RunDirectory.create(
        out,
        session.resolved.document(),
        session.config.training.seed,
        given=session.resolved.given(),
        command=command,
        files=session.files,
        date=session.date,
        overwrite=overwrite,
        usual_rate=session.usual_rate,
        genes={name: gene.span() for name, gene in session.population.agents[0].genes.items()},
    )
    with run:
        yield from _carried_out(session, out, run, stop, trackers)


@checked
def resume(
    session: Session,
    run: RunDirectory | None,
    *,
    root: Path | None = None,
    stop: StopRequest | None = None,
    trackers: Wanted | None = None,
) -> Generator[Event, None, None]:
    """Resume a run whose session was built from its checkpoint, or restart it if there was none.

    What the run wrote after that checkpoint is discarded and written again, the same to the bit on a CPU. Closes the
    run directory. Non-writing processes pass no ``run``, and at most its ``root``. ``trackers`` are those of
    :func:`train`, and continue where they ended. Raises ConfigError if prompts would show another date than before, and
    Interrupted as :func:`train` does.
    """
    if run is None:
        session.check_new()
        yield from _carried_out(session, root or Path(), None, stop, resumes=True)
        return
    with run:
        session.check_new()
        date = run_date(run.info)
        if asks_for_date(session.population.runtime.tokenizer) and session.date != date:
            raise ConfigError(
                f"the chat template of this run shows the date, which was {date} and is {session.date} in this "
                "session; build the session from the configuration that open_run returns"
            )
        check_trackers(trackers or (), list(session.trackers))
        yield from _carried_out(session, run.root, run, stop, trackers, resumes=True)


def _carried_out(
    session: Session,
    root: Path,
    run: RunDirectory | None,
    stop: StopRequest | None,
    trackers: Wanted | None = None,
    *,
    resumes: bool = False,
) -> Iterator[Event]:
    """Yield the events of a run, each once the process that writes has recorded it."""
    writer: RunWriter | None = None
    tracked: Trackers | None = None
    saved = session.saved if resumes else None
    progress = Progress() if saved is None else saved.progress
    wanted = session.config.training.trackers if trackers is None else trackers
    with ExitStack() as opened, at_date(session.date):
        opened.callback(session.task.close)
        if run is not None:
            writer = RunWriter(run, saved)
            opened.callback(writer.close)
            if saved is not None:  # a crash right after the newest commit may have left old ones behind
                writer.prune(progress, keep=session.config.training.keep_checkpoints)
            if wanted:
                at = progress.iteration if resumes else None
                tracked = Trackers(wanted, run, session.resolved.document(), own=session.trackers, resumed_at=at)
                opened.callback(tracked.finish)
        # Not earlier: after a tracker that does not start, another run can begin with the session.
        session.begun = True
        newest = None if saved is None else saved.progress.iteration
        checkpoints = Checkpoints(session.config.training, session.population, writer, newest)
        training = Training(session, root, writer, checkpoints, progress, stop or StopRequest())
        for event in training.events():
            # Before any consumer sees it, so that a failing consumer cannot lose it.
            session.processes.first(partial(_record, event, writer, tracked))
            yield event


def _record(event: Event, writer: RunWriter | None, tracked: Trackers | None) -> None:
    if writer is not None:
        writer.write(event)
    if tracked is not None:
        tracked(event)


class Training(Loop):
    """The training of a run, in one of its processes."""

    def __init__(
        self,
        session: Session,
        root: Path,
        writer: RunWriter | None,
        checkpoints: Checkpoints,
        progress: Progress,
        stop: StopRequest,
    ) -> None:
        self.session, self.config, self.population, self.processes = (
            session,
            session.config,
            session.population,
            session.processes,
        )
        self.root, self.writer, self.checkpoints, self.progress, self.stop = root, writer, checkpoints, progress, stop
        self.evaluation_interval = self.config.training.evaluation_interval

    def events(self) -> Iterator[Event]:
        """Test the base, train the generations, and test the elite."""
        session, population, progress = self.session, self.population, self.progress
        total = max(progress.iteration + 1, session.planned_iterations)
        # Every checkpoint is later than the base's test, and by then the lineage has the founders.
        founders = {} if progress.base is not None else {a.index: dict(a.hyperparameters) for a in population.agents}
        yield RunStarted(self.root, total, -(-total // session.evo_steps), founders)
        if progress.base is None:
            if (probed := session.preflight) is not None:
                yield event_of(probed, "" if probed.has_signal else problem(session, probed))
            yield PhaseStarted("base test")
            progress.base = population.evaluate_base("test")
            yield _tested(population, "base", None, progress.base)
            if self.config.restarts:
                first = population.agents[0].index
                progress.begin(first, population.agent(first).state())
        yield from self.generations()
        yield PhaseStarted("test")
        summary = summary_of(session, progress)
        tested = tested_elite(session, self.writer, progress)
        if tested is not None:
            elite, fitness, answers = tested
            yield _tested(population, "elite", elite["index"], fitness)
            summary["test"]["elite"] = fitness.to_dict()
            exams = [progress.fitness[agent.index] for agent in population.agents if agent.index in progress.fitness]
            lost = left_out(population, {"test": [progress.base, fitness], "exam": exams})
            # Indices are never given twice: without an agent 0 the founder with the user's rate has left.
            gone = min(agent.index for agent in population.agents) > 0
            rates = session.resolved.rates_to_set(session.usual_rate, gone=gone)
            advice = [*early_elite(elite, progress.iteration), *rates, *lost]
            summary |= {"elite": elite, "answers": answers, "advice": advice}
        summary["seconds"] = progress.seconds
        elite_index = None if tested is None else tested[0]["index"]
        summary = self.processes.first(lambda: self._finished(summary, elite_index))
        yield RunFinished(self.root, {"status": "finished", **summary})

    def _finished(self, summary: dict[str, Any], elite: int | None) -> dict[str, Any]:
        if self.writer is not None:
            self.writer.finish(summary, elite)
        return summary

    @property
    def generation_steps(self) -> int:
        """Iterations of the present generation."""
        return self.session.generation_steps

    def spent(self) -> float:
        """Return the largest share spent of any budget; time is measured by the writer's clock."""
        limited = self.config.training.max_seconds is not None
        # Asked only where it can matter: each call is an exchange between all processes.
        seconds = self.processes.first(lambda: self.progress.seconds) if limited else None
        return self.progress.spent(self.config.training, seconds)

    def iterate(self) -> IterationDone:
        """Let every agent that is not waiting sample and learn."""
        population, progress = self.population, self.progress
        start = perf_counter()
        before = {agent.index: dict(agent.tokens) for agent in population.agents}
        progress.exam = None  # its scores are out of date once the agents learn
        factor = self.config.lr_schedule.factor(min(self.spent(), 1.0))
        for agent in population.agents:
            agent.schedule_factor = factor
        changes = self._replay()
        population.waiting = self._waiting()
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
            "time/elapsed": progress.seconds,
            "memory/peak": peak_memory(population.runtime.base.device),
        }
        results: dict[int, dict[str, Any]] = {}
        for agent in population.active:
            spent = {name: count - before[agent.index][name] for name, count in agent.tokens.items()}
            agent.scores.append(learned[agent.index].get("reward", float("nan")))
            # Both sampled and learned tokens; the time is that of all agents, since they share every forward pass.
            rate = sum(spent.values()) / (end - start)
            values = {**learned[agent.index], **shared, "tokens_per_second": rate}
            samples = len(rollout.trajectories[agent.index])
            results[agent.index] = {"metrics": values, "outcome": agent.outcome, "tokens": spent, "samples": samples}
        if progress.iteration == 1:
            progress.note_untrained([done["metrics"].get("reward", math.nan) for done in results.values()])
        for index, done in results.items():
            progress.samples += done["samples"]
            if self.config.equal_tokens:
                tokens, iterations = progress.pace.get(index, (0, 0))
                progress.pace[index] = (tokens + sum(done["tokens"].values()), iterations + 1)
            for name, count in done["tokens"].items():
                progress.tokens[name] += count
        completions: list[CompletionRecord] = []
        if not population.learns_from_data:
            rows = completion_rows(population, progress, rollout, self.config.training.log_completions)
            completions = [CompletionRecord(**row) for row in rows]
        return IterationDone(
            generation=progress.generation,
            iteration=progress.iteration,
            progress=min(self.spent(), 1.0),
            metrics={index: done["metrics"] for index, done in results.items()},
            outcomes={index: done["outcome"] for index, done in results.items()},
            completions=completions,
            changes=changes,
        )

    def _replay(self) -> list[Mutation]:
        """Give the agent the values that a replayed schedule has where it stands, and return what changed."""
        schedule = self.config.training.replay
        if schedule is None:
            return []
        changes = []
        for agent in self.population.agents:
            due = schedule.at(agent.tokens["trained"])
            now = values_of(agent.config, due)
            moved = tuple(Change(name, now[name], value) for name, value in due.items() if now[name] != value)
            if moved:
                agent.set_hyperparameters({change.gene: change.new for change in moved})
                changes.append(Mutation(agent.index, "hyperparameters", moved, {"reason": "replayed schedule"}))
        return changes

    def _waiting(self) -> frozenset[int]:
        """Return the agents that another iteration would put ahead of the cheapest agent by more than half of its cost.

        The agent whose iterations cost least never waits. So at an exam all agents have spent what it has, to within
        half an iteration of theirs, if the generation is long enough to make up for the first one, whose cost is
        unknown.
        """
        if not self.config.equal_tokens:
            return frozenset()
        everyone = [agent.index for agent in self.population.agents]
        spent = {index: tokens for index, (tokens, _) in self.progress.pace.items() if index in everyone}
        # What an agent's iteration costs is unknown until it has had one in this generation.
        if len(spent) < len(everyone):
            return frozenset()
        cost = {index: tokens / self.progress.pace[index][1] for index, tokens in spent.items()}
        # By index as well, for a tie.
        pace = min(cost, key=lambda index: (cost[index], index))
        target = spent[pace] + cost[pace]
        return frozenset(index for index in spent if index != pace and spent[index] + cost[index] / 2 > target)

    def examine(self) -> ExamDone:
        """Examine every agent, and keep the best of the run."""
        population, progress = self.population, self.progress
        start, before = perf_counter(), sum(a.tokens["evaluated"] for a in population.agents)
        fitness = population.evaluate("exam")
        # Once one exam was finite, the graders are known to give grades.
        if progress.best == -math.inf:
            self._check_graded(fitness)
        progress.tokens["evaluated"] += sum(a.tokens["evaluated"] for a in population.agents) - before
        seconds = perf_counter() - start
        tokens = {agent.index: dict(agent.tokens) for agent in population.agents}
        progress.fitness.update(fitness)
        # A sick agent is never the best; a collapsed one cannot be, since collapse is measured against the best.
        # At the end nothing begins again, and a low exam is better than none.
        untrained = progress.untrained if self.spent() < 1 else None
        sound = quarantined(fitness, population.sick(fitness, collapse_guard=False, untrained=untrained))
        best = ranking(sound)[0]
        if untrained is not None and no_better(sound[best], untrained.training):
            sound = quarantined(sound, sound)
        # At equal fitness the later agent wins, because it has been trained for longer.
        if sound[best].is_finite and sound[best].mean >= progress.best:
            progress.best = sound[best].mean
            progress.elite = population.agent(best).state()
            progress.elite_iteration = progress.iteration
        most, exam = self.config.kept_exams, sound[best]
        # A copy takes an adapter with its moments, so an exam that would not be kept gets none.
        full = len(progress.kept) >= most
        if exam.is_finite and most and not (full and exam.mean < progress.kept[-1].fitness.mean):
            is_elite = progress.elite_iteration == progress.iteration
            # One copy serves as elite and as kept exam.
            state = progress.elite if is_elite else population.agent(best).state()
            progress.keep(Kept(agent=best, iteration=progress.iteration, fitness=exam, state=state), most)
        progress.exam = dict(fitness)
        return ExamDone(progress.generation, fitness, progress.iteration, tokens, seconds, progress.seconds)

    def _check_graded(self, fitness: Mapping[int, Fitness]) -> None:
        """Raise RewardError if no agent has had a grade yet, in training or exam, and nothing failed."""
        population = self.population
        if any(math.isfinite(score) for f in fitness.values() for score in f.scores):
            return
        if all(population.examiner.ungraded[a.index] and all(map(math.isnan, a.scores)) for a in population.agents):
            size = len(population.examiner.places("exam"))
            raise RewardError(
                f"expected {self.session.task.grader} to return a number for completions, found None (no grade) for "
                f"all training completions of every agent so far, and for all {size} of its exam: nothing can be "
                "learned; return 0.0 for a wrong answer, and None only for rows that the grader does not apply to"
            )

    def test_generation(self) -> Iterator[Event]:
        """Test the median agent of the first generation."""
        population, progress = self.population, self.progress
        assert progress.exam is not None
        if progress.median is None:
            ranked = ranking(progress.exam)
            middle = ranked[(len(ranked) - 1) // 2]  # the better of the two in the middle
            progress.median = Median(
                index=middle, fitness=population.evaluate("test", agents=[population.agent(middle)])[middle]
            )
            yield _tested(population, "median_first_generation", middle, progress.median.fitness)

    def evolve(self) -> Evolved:
        """Select by the last exam, and mutate."""
        config, progress = self.config, self.progress
        best = progress.kept[0] if progress.kept else None
        return evolved(
            self.population,
            progress.exam or {},
            self.session.selection,
            self.session.resolved.mutations,
            iteration=progress.iteration,
            generation=progress.generation,
            seed=config.training.seed if config.mutation.rand_seed is None else config.mutation.rand_seed,
            collapse_guard=config.selection_strategy.collapse_guard,
            standing=Standing(min(self.spent(), 1.0), Best(best.agent, best.fitness) if best else None),
            best=best.state if best else None,
        )

    def save_iteration(self, *, ends: bool) -> None:
        """Save a checkpoint if one is due, or the run is asked to stop; the end of a generation saves its own."""
        if ends:
            return
        # One clock decides for all: by clocks of their own, some would save, and wait forever for the others.
        if self.processes.first(lambda: self.checkpoints.is_due(self.progress)) or self._is_asked():
            self._save()
        self._stop_if_asked()

    def save_generation(self) -> None:
        """Save a checkpoint of the agents that begin the next generation."""
        self.progress.exam = None
        self.progress.pace.clear()
        self._save()
        self._stop_if_asked()

    def _save(self) -> None:
        # The others wait, so that they hear of it if the disk is full.
        self.processes.first(lambda: self.checkpoints.save(self.progress))

    def _stop_if_asked(self) -> None:
        if self._is_asked():
            raise Interrupted(self.stop.code, self.root)

    def _is_asked(self) -> bool:
        """Return whether any process was signalled to stop; then all stop for the same signal."""
        signals = [number for number in self.processes.all(self.stop.signal) if number is not None]
        self.stop.signal = signals[0] if signals else self.stop.signal
        return bool(signals)


def _tested(population: Population, who: str, agent: int | None, fitness: Fitness) -> HeldOutTest:
    """Return the event of a test, with a digest of its questions if all of them count."""
    rows = [dict(question.row) for question in population.examiner.places("test")]
    counts = len(fitness.scores) == len(rows)
    return HeldOutTest(who, agent, fitness, hashlib.sha256(repr(rows).encode()).hexdigest() if counts else "")
