"""The writer of a run: metrics, lineage, journal, completions and checkpoints."""

import hashlib
import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from agilerl.algorithms.agent import LLMAlgorithm
from agilerl.algorithms.codec import write_state, write_tokenizer
from agilerl.checks.redaction import without_keys
from agilerl.config.training import TrainingConfig
from agilerl.errors import CheckpointError
from agilerl.hpo import lineage
from agilerl.hpo.selection import RESTART
from agilerl.population import Population
from agilerl.rollouts.engine import Rollout
from agilerl.runs.atomic import MANIFEST, add_file, commit_folder, remove_folder
from agilerl.runs.checkpoints import CheckpointStore
from agilerl.runs.completions import discard_completions, write_completions
from agilerl.runs.diagnosis import count_failed_grades
from agilerl.runs.directory import RunDirectory
from agilerl.runs.journal import Journal, JsonLines, read_lines
from agilerl.runs.strict_json import dumps, read_json
from agilerl.training.base import check_elite
from agilerl.training.checkpoint import CLOCK, Positions, SavedCheckpoint, write_checkpoint
from agilerl.training.events import Event, Evolved, ExamDone, HeldOutTest, IterationDone, PreflightDone, RunStarted
from agilerl.training.progress import Progress


class RunWriter:
    """The open files of a run directory; the first to get each event of the run."""

    def __init__(self, run: RunDirectory, saved: SavedCheckpoint | None = None) -> None:
        """Open the files of a run, truncated to their state at its checkpoint (None: emptied)."""
        run.check_open()
        self.run = run
        at = Positions(0, 0, 0) if saved is None else saved.positions
        self.checkpoints = CheckpointStore(run.checkpoints)
        with ExitStack() as opened:
            self.metrics = opened.enter_context(JsonLines(run.metrics, keep=at.metrics_bytes))
            self.lineage = opened.enter_context(JsonLines(run.lineage, keep=at.lineage_bytes))
            self.journal = opened.enter_context(Journal(run.journal, keep=at.journal_records))
            discard_completions(run.completions, after=0 if saved is None else saved.progress.iteration)
            if saved is not None:
                # Its own record came after the number that it holds, and was cut off with all later ones.
                self._note_commit(saved.path)
            # All are open now; until here an error would close those before it.
            self._files = opened.pop_all()

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def write(self, event: Event) -> None:
        """Write an event; kinds not handled here are already in the files, or in the next checkpoint."""
        if isinstance(event, Evolved):
            plan, sick = event.plan.to_dict(), {str(index): reason for index, reason in sorted(event.sick.items())}
            self.journal.append({"kind": "evolution", **_when(event), "plan": plan, "sick": sick})
        for line in lineage_lines(event):
            self.lineage.write(line)
        for line in metric_lines(event):
            self.metrics.write(line)
        if isinstance(event, IterationDone) and event.completions:
            write_completions(self.run.completions, event.iteration, event.completions)

    def checkpoint(self, population: Population, progress: Progress, *, keep: int) -> None:
        """Commit the whole population after an iteration: every agent, and the shared state."""
        # Synced first, so that after a power failure no checkpoint refers beyond the end of a file.
        # The journal syncs each of its records itself.
        self.metrics.sync()
        self.lineage.sync()
        positions = Positions(
            self.metrics.position, self.lineage.position, len(self.journal), self.metrics.sha256, self.lineage.sha256
        )
        folder = self.checkpoints.commit(
            progress.iteration,
            lambda folder: write_checkpoint(folder, population, progress, positions),
            keep=self._kept(progress, keep),
        )
        self._note_commit(folder)

    def prune(self, progress: Progress, *, keep: int) -> None:
        """Delete the old checkpoints that a crash right after the newest commit left behind."""
        self.checkpoints.prune(self._kept(progress, keep))

    def _kept(self, progress: Progress, keep: int) -> set[int]:
        """Return the checkpoints before the current one to keep."""
        older = [number for number in self.checkpoints.numbers() if number < progress.iteration]
        best = progress.elite_iteration
        # keep is at least 2: with 1 the slice would be [-0:], all of them.
        return set(older[-(keep - 1) :]) | ({best} if best is not None else set())

    def _note_commit(self, folder: Path) -> None:
        # Without the clock, which differs between runs that are equal to the bit.
        files = {name: entry for name, entry in read_json(folder / MANIFEST).items() if name != CLOCK}
        digest = hashlib.sha256(dumps(files).encode()).hexdigest()
        self.journal.append({"kind": "commit", "checkpoint": folder.name, "sha256": digest})

    def elite(self, agent: LLMAlgorithm) -> None:
        """Write ``elite/``: a plain PEFT adapter, the tokenizer, and what else its algorithm's ``load`` needs."""
        self.run.check_open()
        runtime, state = agent.runtime, agent.state()

        def write(folder: Path) -> None:
            write_state(state, folder, runtime, agent.lora_config, save_optimizer=False, actor="")
            write_tokenizer(runtime.tokenizer, folder)

        if self.run.elite.exists():  # left by a process that died while finishing the run
            remove_folder(self.run.elite)
        commit_folder(self.run.elite, write)
        try:
            check_elite(self.run.elite, runtime, agent.slot)
        except CheckpointError as error:
            warnings.warn(str(error), stacklevel=2)  # the run ends as others do, and `agilerl export` refuses

    def finish(self, summary: dict[str, Any], elite: int | None) -> None:
        """Add the elite's lineage to the summary, and write the elite's model card, the summary and the report."""
        if elite is not None:
            line = lineage.winning_lineage(read_lines(self.run.lineage), elite)
            summary["lineage"] = [
                {"agent": a.agent, "from_generation": a.from_generation, "hyperparameters": a.hyperparameters}
                for a in line
            ]
            from agilerl.report.card import CARD, model_card

            add_file(self.run.elite, CARD, model_card(self.run.root, summary))
        summary["failed_grades"] = count_failed_grades(read_lines(self.run.metrics))
        summary["seconds"] = summary.pop("seconds")  # the last entry
        # From here on the run is finished; the report can be made again from its files.
        self.run.finish(summary)
        from agilerl.report import build_report

        build_report([self.run.root], self.run.report)


@dataclass
class Checkpoints:
    """When the population is saved."""

    training: TrainingConfig
    population: Population
    writer: RunWriter | None
    """That of the first process; None in the others."""
    saved: int | None
    """Iteration of the newest checkpoint."""
    time: float = field(default_factory=perf_counter)

    def is_due(self, progress: Progress) -> bool:
        """Return whether to save now, within a generation."""
        steps, seconds = self.training.checkpoint_steps, self.training.checkpoint_seconds
        due = steps is not None and progress.iteration % steps == 0
        due = due or (seconds is not None and perf_counter() - self.time >= seconds)
        if due:
            self.time = perf_counter()
        return due

    def save(self, progress: Progress) -> None:
        """Commit a checkpoint."""
        if progress.iteration == self.saved:
            return  # time ran out before another iteration, so there is nothing new to save
        if self.writer is not None:
            self.writer.checkpoint(self.population, progress, keep=self.training.keep_checkpoints)
        self.saved = progress.iteration


def completion_rows(population: Population, progress: Progress, rollout: Rollout, most: int) -> list[dict[str, Any]]:
    """Return the first ``most`` completions of each agent, as rows of ``completions/``."""
    return [
        {
            "generation": progress.generation,
            "step": progress.iteration,
            "agent": index,
            "group": t.group,
            "sample": sum(1 for other in trajectories[:number] if other.group == t.group),
            "prompt": str(t.row.get("question", population.tokenizer.decode(t.prompt_ids))),
            "completion": t.text,
            "answer": "" if t.row.get("answer") is None else str(t.row["answer"]),
            "reward": t.episode_return if math.isfinite(t.episode_return) else None,
            "length": len(t.token_ids),
            "finish_reason": t.finish_reason,
            "failure": next((without_keys(f.message) for f in rollout.failures.get(index, ()) if f.kind != "oom"), ""),
        }
        for index, trajectories in rollout.trajectories.items()
        for number, t in enumerate(trajectories[:most])
    ]


# -- the lines of an event, for the files and for trackers -------------------------------------------------------------


def metric_lines(event: Event) -> Iterator[dict[str, Any]]:
    """Yield what ``metrics.jsonl`` says about an event: a line for each agent, for the population, or for a result."""
    match event:
        case IterationDone():
            errors = {record.agent: {"reward_error": record.failure} for record in event.completions if record.failure}
            for index, outcome in event.outcomes.items():
                line = {**event.metrics[index], "kind": "train", **_when(event), "agent": index, "outcome": outcome}
                yield line | errors.get(index, {})
        case ExamDone():
            for index, values in event.metrics.items():
                yield {"kind": "eval", **_when(event), "agent": index, **values}
        case Evolved():
            yield {"kind": "evolution", **_when(event), **event.metrics}
        case PreflightDone():
            yield {"kind": "preflight", **event.metrics}
        case HeldOutTest():
            scores = {"sha256": event.questions, "scores": event.fitness.scores}
            each = {"by_question": scores} if event.questions else {}
            yield {"kind": "test", "who": event.who, "agent": event.agent, **event.metrics, **each}


def _when(event: IterationDone | ExamDone | Evolved) -> dict[str, int]:
    return {"generation": event.generation, "step": event.iteration}


def lineage_lines(event: Event) -> Iterator[lineage.Record]:
    """Yield what ``lineage.jsonl`` says about an event: who was born, examined, changed, kept, removed, the elite."""
    match event:
        case RunStarted():
            for index, values in event.founders.items():
                yield lineage.birth_record(index, None, 0, 0, values)
        case IterationDone():  # what a replayed schedule changed
            for mutation in event.changes:
                yield lineage.mutation_record(mutation, event.generation)
        case ExamDone():
            g, step = event.generation, event.iteration
            for index, fitness in event.fitness.items():
                yield lineage.fitness_record(index, g, step, fitness, event.tokens[index])
        case Evolved():
            plan, g, step = event.plan, event.generation, event.iteration
            if event.elite is not None:
                yield lineage.event_record("elite", event.elite, g)
            for b in plan.births:
                values = event.inherited[b.child]
                origin = {"untrained": b.from_best} if plan.reason == RESTART else {"from_best": b.from_best}
                yield lineage.birth_record(b.child, b.parent, g, step, values, **origin)
            for index, reason in event.deaths.items():
                yield lineage.event_record("death", index, g, reason=reason)
            for index, reason in plan.verdicts.items():
                # The line of a death has its reason already.
                if index not in plan.deaths:
                    yield lineage.event_record("verdict", index, g, reason=reason)
            for mutation in event.changes:
                if mutation.kind != "none":
                    yield lineage.mutation_record(mutation, g, event.mutations[mutation.agent])
