"""What a run writes while it goes on: metrics, lineage, completions, checkpoints."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from agilerl.algorithms.agent import LLMAlgorithm
from agilerl.algorithms.state import write_state, write_tokenizer
from agilerl.hpo import lineage
from agilerl.hpo.fitness import Fitness
from agilerl.members import Known
from agilerl.population import Evolution, Population, Rollout
from agilerl.rollouts.failures import Outcome
from agilerl.runs.atomic import MANIFEST, commit_folder, remove_folder
from agilerl.runs.checkpoints import CheckpointStore
from agilerl.runs.completions import CompletionRecord, discard_completions, write_completions
from agilerl.runs.directory import RunDirectory
from agilerl.runs.journal import Journal, JsonLines, read_lines
from agilerl.runs.strict_json import dumps, read_json
from agilerl.training.progress import Progress
from agilerl.training.saved import CLOCK, Positions, SavedCheckpoint, write_checkpoint

__all__ = ["RunRecords", "Where", "completion_records", "elite_of"]


@dataclass(frozen=True)
class Where:
    """A point in a run."""

    generation: int
    iteration: int


class RunRecords:
    """The open files of a run directory."""

    def __init__(self, run: RunDirectory, saved: SavedCheckpoint | None = None) -> None:
        """Open the files of a run, cut back to where they were at its checkpoint (None: emptied)."""
        self.run = run
        at = Positions(0, 0, 0) if saved is None else saved.positions
        self.checkpoints = CheckpointStore(run.checkpoints)
        self._saved = None if saved is None else saved.progress.iteration
        with ExitStack() as opened:
            self.metrics = opened.enter_context(JsonLines(run.metrics, keep=at.metrics_bytes))
            self.lineage = opened.enter_context(JsonLines(run.lineage, keep=at.lineage_bytes))
            self.journal = opened.enter_context(Journal(run.journal, keep=at.journal_records))
            discard_completions(run.completions, after=0 if saved is None else saved.progress.iteration)
            if saved is not None:
                self._note_commit(saved.path)
            self._files = opened.pop_all()

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def founders(self, agents: Iterable[Known]) -> None:
        """Write the birth of the first generation."""
        for agent in agents:
            self.lineage.write(lineage.birth_record(agent.index, None, 0, 0, agent.hyperparameters))

    def iteration(
        self, where: Where, metrics: Mapping[int, Mapping[str, float]], outcomes: Mapping[int, Outcome]
    ) -> None:
        """Write one metrics line an agent."""
        for index, values in metrics.items():
            place = {"kind": "train", "generation": where.generation, "step": where.iteration, "agent": index}
            self.metrics.write({**values, **place, "outcome": outcomes[index]})

    def completions(self, where: Where, rows: Sequence[CompletionRecord]) -> None:
        """Write what was sampled in an iteration."""
        if rows:
            write_completions(self.run.completions, where.iteration, rows)

    def exam(self, where: Where, fitness: Mapping[int, Fitness], agents: Iterable[Known], seconds: float) -> None:
        """Write the result of each agent."""
        by_index = {agent.index: agent for agent in agents}
        for index, result in fitness.items():
            self.metrics.write(
                {
                    "kind": "eval",
                    "generation": where.generation,
                    "step": where.iteration,
                    "agent": index,
                    "eval/reward_mean": result.mean,
                    "eval/stderr": result.stderr,
                    "eval/n": result.n,
                    "time/eval": seconds,
                }
            )
            record = lineage.fitness_record(index, where.generation, where.iteration, result, by_index[index].tokens)
            self.lineage.write(record)

    def evolution(
        self, where: Where, evolution: Evolution, fitness: Mapping[int, Fitness], population: Population, seconds: float
    ) -> None:
        """Write births, deaths, mutations and the elite of a generation change."""
        plan, g, step = evolution.plan, where.generation, where.iteration
        sick = {str(index): reason for index, reason in sorted(evolution.sick.items())}
        self.journal.append({"kind": "evolution", "generation": g, "step": step, "plan": asdict(plan), "sick": sick})
        elite = elite_of(evolution, fitness)
        if elite is not None:
            self.lineage.write(lineage.elite_record(elite, g))
        for birth in plan.births:
            values = evolution.inherited[birth.child]
            self.lineage.write(lineage.birth_record(birth.child, birth.parent, g, step, values))
        for index in plan.deaths:
            reason = evolution.sick.get(index) or plan.reason or "won no tournament"
            self.lineage.write(lineage.death_record(index, g, reason))
        for mutation in evolution.mutations:
            if mutation.kind != "none":
                self.lineage.write(lineage.mutation_record(mutation, g))
        means = [f.mean for f in fitness.values() if f.is_finite]
        genes = {
            f"evo/hp/{name}/{agent.index}": value
            for agent in population.everyone
            for name, value in agent.hyperparameters.items()
        }
        self.metrics.write(
            {
                "kind": "evolution",
                "generation": g,
                "step": step,
                "evo/generation": g,
                "evo/fitness/best": max(means, default=float("nan")),
                "evo/fitness/mean": float(np.mean(means)) if means else float("nan"),
                "evo/fitness/std": float(np.std(means)) if means else float("nan"),
                "evo/replacements": len(plan.births),
                "evo/diversity": diversity(population.everyone),
                "time/evolve": seconds,
                **genes,
            }
        )

    def test(self, who: str, agent: int | None, result: Fitness) -> None:
        """Write a result on the test set."""
        line = {"eval/reward_mean": result.mean, "eval/stderr": result.stderr, "eval/n": result.n}
        self.metrics.write({"kind": "test", "who": who, "agent": agent, **line})

    def checkpoint(self, population: Population, progress: Progress, *, keep: int) -> None:
        """Commit the whole population after an iteration: every agent, and the state around them.

        Where that has been done already, time ran out before another iteration, and there is nothing new to keep.
        """
        if progress.iteration == self._saved:
            return
        # First, so that no checkpoint points behind the end of a file that a power cut has shortened.
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
        self._saved = progress.iteration
        self._note_commit(folder)

    def prune(self, progress: Progress, *, keep: int) -> None:
        """Delete the checkpoints that would be gone, had the process not died between the newest and that."""
        self.checkpoints.prune(self._kept(progress, keep))

    def _kept(self, progress: Progress, keep: int) -> set[int]:
        """Return the checkpoints before the present one that stay."""
        older = [number for number in self.checkpoints.numbers() if number < progress.iteration]
        best = progress.elite_iteration
        return set(older[-(keep - 1) :]) | ({best} if best is not None else set())

    def _note_commit(self, folder: Path) -> None:
        files = {name: entry for name, entry in read_json(folder / MANIFEST).items() if name != CLOCK}
        digest = hashlib.sha256(dumps(files).encode()).hexdigest()
        self.journal.append({"kind": "commit", "checkpoint": folder.name, "sha256": digest})

    def elite(self, agent: LLMAlgorithm) -> None:
        """Write ``elite/``: a plain PEFT adapter, the tokenizer, and what ``load`` of its algorithm needs besides."""
        runtime, state = agent.runtime, agent.state()

        def write(folder: Path) -> None:
            write_state(state, folder, runtime, agent.lora_config, save_optimizer=False, actor="")
            write_tokenizer(runtime.tokenizer, folder)

        if self.run.elite.exists():  # of a process that died while the run was being finished
            remove_folder(self.run.elite)
        commit_folder(self.run.elite, write)

    def finish(self, summary: dict[str, Any], elite: int | None) -> None:
        """Add the lineage of the elite to the summary, and write it with the report."""
        if elite is not None:
            line = lineage.winning_lineage(read_lines(self.run.lineage), elite)
            summary["lineage"] = [
                {"agent": a.agent, "from_generation": a.from_generation, "hyperparameters": a.hyperparameters}
                for a in line
            ]
        summary["seconds"] = summary.pop("seconds")  # the last entry
        self.run.finish(summary)
        from agilerl.report import build_report

        build_report([self.run.root], self.run.report)


def elite_of(evolution: Evolution, fitness: Mapping[int, Fitness]) -> int | None:
    """Return the elite of a selection; None where nobody was fit to be it."""
    elite = evolution.plan.elite
    return elite if fitness[elite].is_finite and elite not in evolution.sick else None


def completion_records(where: Where, rollout: Rollout, limit: int, tokenizer: Any) -> list[CompletionRecord]:
    """Return the first completions of each agent's batch, whole groups from the start."""
    rows = []
    for index, trajectories in rollout.trajectories.items():
        for number, t in enumerate(trajectories[:limit]):
            reward = t.episode_return
            rows.append(
                CompletionRecord(
                    generation=where.generation,
                    step=where.iteration,
                    agent=index,
                    group=t.group,
                    sample=sum(1 for other in trajectories[:number] if other.group == t.group),
                    prompt=str(t.row.get("question", tokenizer.decode(t.prompt_ids))),
                    completion=t.text,
                    answer=str(t.row.get("answer", "")),
                    reward=reward if np.isfinite(reward) else None,
                    length=len(t.token_ids),
                    finish_reason=t.finish_reason,
                )
            )
    return rows


def diversity(agents: Iterable[Known]) -> float:
    """Return how far apart the population is: mean over genes of the spread of unit positions, 0 when all are alike."""
    members = list(agents)
    spreads = [
        float(np.std([a.genes[name].to_unit(a.hyperparameters[name]) for a in members])) for name in members[0].genes
    ]
    return float(np.mean(spreads)) if spreads else 0.0
