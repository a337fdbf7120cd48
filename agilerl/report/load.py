"""A run directory as plain records and a family tree, however far the run has come."""

import json
import math
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

from agilerl.checks.arguments import Location, counted, shown
from agilerl.checks.redaction import without_keys
from agilerl.errors import CheckpointError, ConfigError
from agilerl.hpo.fitness import Fitness, paired_difference
from agilerl.runs import RunLayout, read_lines, read_run
from agilerl.runs.diagnosis import Symptom, advice, name_agents, symptoms
from agilerl.runs.directory import as_written
from agilerl.runs.hacks import hacks_of_run
from agilerl.runs.strict_json import read_json

JsonLine = dict[str, Any]


@dataclass(frozen=True)
class ExamResult:
    """Fitness of one agent in one generation."""

    generation: int
    step: int
    score: Fitness


@dataclass
class AgentRecord:
    """What the run directory records about one agent."""

    index: int
    parent: int | None = None
    untrained: bool = False
    """Whether it began as its parent was before any training."""
    born: int | None = None
    """Generation of the birth event; None if there is no such event."""
    died: int | None = None
    reason: str = ""
    """Why it died."""
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    """Values at birth."""
    mutations: list[dict[str, Any]] = field(default_factory=list)
    verdicts: list[tuple[int, str]] = field(default_factory=list)
    """Generations in which a selection said something about the agent, and what."""
    exams: list[ExamResult] = field(default_factory=list)
    train: list[dict[str, Any]] = field(default_factory=list)
    """Train lines, by step."""
    tokens: dict[str, float] = field(default_factory=dict)
    symptoms: list[Symptom] = field(default_factory=list)
    """What its last iterations say about why it may not have learned."""

    @property
    def generations(self) -> list[int]:
        """Generations in which the agent was trained or evaluated."""
        trained = {int(line["generation"]) for line in self.train if "generation" in line}
        return sorted(trained | {exam.generation for exam in self.exams})

    def values(self, generation: float = math.inf) -> dict[str, Any]:
        """Return the hyperparameters after the selection of a generation, by name; by default the last ones."""
        values = dict(sorted(self.hyperparameters.items()))
        for mutation in self.mutations:
            if mutation["generation"] <= generation:
                changes = mutation.get("changes") or []
                values |= {change["gene"]: change.get("new") for change in changes if change.get("gene") in values}
        return values

    def first_values(self) -> dict[str, Any]:
        """Return the hyperparameters that it was first trained with: a child's after the mutation at its birth."""
        # A founder trains with its first values before any selection, which -1 stands for.
        return self.values(-1 if self.parent is None or self.born is None else self.born)

    @property
    def trouble(self) -> dict[str, list[int]]:
        """Steps at which the outcome was not ``ok``, by outcome."""
        steps: dict[str, list[int]] = defaultdict(list)
        for line in self.train:
            if (outcome := str(line.get("outcome", "ok"))) != "ok":
                steps[outcome].append(line["step"])
        return dict(steps)

    @property
    def best(self) -> ExamResult | None:
        """The exam with the highest finite mean."""
        finite = [exam for exam in self.exams if exam.score.is_finite]
        return max(finite, key=lambda exam: exam.score.mean, default=None)


@dataclass
class RunRecord:
    """The data of one run that the report shows."""

    path: Path
    info: dict[str, Any]
    """run.json"""
    status: str
    """As in ``RunLayout``."""
    summary: dict[str, Any]
    """summary.json; empty while the run is running."""
    agents: dict[int, AgentRecord]
    timed: list[JsonLine]
    """Lines of exams and selections, for their times; the scores are in ``agents``."""
    tests: dict[str, "HeldOutResult"]
    """Of "base", "elite" and "median_first_generation", as far as they are known."""
    elites: dict[int, int]
    """Elite of each generation."""
    seconds: float
    """Time that the run has taken so far; NaN if unknown."""
    notes: list[str] = field(default_factory=list)
    """Sentences about what is missing or wrong."""
    symptoms: dict[str, Symptom] = field(default_factory=dict)
    """What may keep the agents of the last generation from learning, by a sentence that names these."""

    @cached_property
    def family(self) -> "Family":
        """Who descends from whom, laid out in rows; the run need not be finished, nor its events complete."""
        spans, winner = _spans(self.agents), _winner(self)
        line: list[int] = []
        agent = winner
        # A damaged lineage may run in a circle.
        while agent is not None and agent not in line:
            line.insert(0, agent)
            agent = None if self.agents[agent].untrained else self.agents[agent].parent
        return Family(winner, line, spans, _rows(self.agents, spans, line))

    @property
    def is_finished(self) -> bool:
        """True if its results are there."""
        return self.status == "finished"

    @property
    def founders(self) -> int:
        """Agents that the run began with, which a small budget may have decided; 0 if unknown."""
        return sum(agent.parent is None and agent.born == 0 for agent in self.agents.values())


def check_different(runs: Sequence[Location]) -> None:
    """Raise ConfigError for run directories of which one is given twice."""
    seen: set[str] = set()
    for run in runs:
        if (path := os.path.realpath(run)) in seen:
            raise ConfigError(f"expected different run directories, found {shown(str(run))} twice; leave one out")
        seen.add(path)


def find_differences(runs: Sequence["RunRecord"]) -> dict[str, list[Any]]:
    """Return the settings that differ between runs, by name, None where one is not set; and digests of their files.

    What the budget may decide is what the runs had.
    """
    columns = []
    for run in runs:
        settings = _parts(run.info["config"])
        if settings.get("algorithm.seed") == settings.get("training.seed"):
            settings.pop("algorithm.seed", None)  # not a second difference: it is the run's seed unless it is set
        if settings.get("selection_strategy.name") != "tournament":
            settings.pop("selection_strategy.tournament_size", None)  # recorded for every strategy, used by one
        if all("genes" in run.info for run in runs):  # the ranges that applied say more than those that were given
            settings = {name: value for name, value in settings.items() if not _RANGE.fullmatch(name)}
            settings |= {f"{_GENES}.{name}": span for name, span in run.info["genes"].items()}
        questions = max((exam.score.n for agent in run.agents.values() for exam in agent.exams), default=0)
        settings |= {"training.pop_size": run.founders} if run.founders else {}
        if questions:  # where grading failed, fewer than were asked
            settings[_GRADED] = questions
            settings.pop("environment.eval_prompts", None)
        files = (run.info.get("files") or {}).values()
        columns.append(settings | {f"{_DIGEST}{Path(n).name}": sha[:12] for kind in files for n, sha in kind.items()})
    defaults = {name for run in runs for name in _parts(run.info["config"])} - _given(runs)
    # What only one run has without being given it is a default of what it was given, such as a dataset's weight.
    names = {n for c in columns for n in c if n not in defaults or all(n in column for column in columns)}
    rows = {name: [column.get(name) for column in columns] for name in sorted(names)}
    # As JSON, because a list cannot be the member of a set.
    return {name: values for name, values in rows.items() if len(set(map(json.dumps, values))) > 1}


def find_derived(runs: Sequence["RunRecord"], differ: Iterable[str]) -> list[str]:
    """Return those of the settings that differ which no run was given: they follow from others, or from the budget."""
    requested = _given(runs)
    sections = {section for run in runs for section in run.info["config"]}

    def was_given(name: str) -> bool:
        # An empty mapping of one run may be filled in another.
        return any(f"{a}.".startswith(f"{b}.") for other in requested for a, b in ((name, other), (other, name)))

    return [name for name in differ if name.partition(".")[0] in sections and not was_given(name)]


def why_not_comparable(differ: Iterable[str]) -> str:
    """Return a sentence if scores of runs with these differences do not mean the same; an empty text if they may."""
    # Each key of an environment once, whatever the parts in which it differs.
    parts = dict.fromkeys(match[0] for name in differ if (match := _SCORED.match(name)))
    names = [shown(part.removeprefix(_DIGEST)) if part.startswith(_DIGEST) else part for part in parts]
    reason = "they were asked or graded differently, so their scores cannot be compared."
    return f"The runs differ in {', '.join(names)}: {reason}" if names else ""


def other_questions(runs: Sequence["RunRecord"], differ: Iterable[str]) -> list[str]:
    """Return the differences by which runs of one task were tested on different questions."""
    settings, names = dict(flatten(runs[0].info["config"])), ["environment.test_prompts"]
    # Rows for the test are set aside first, whatever the seed and the exam.
    if not settings.get("environment.dataset"):
        names.append("training.seed")
        # Generated questions go to the exam first.
        names += [_GRADED, "environment.holdout"] * (not settings.get("environment.env_id"))
    return ["the size of the exam" if name == _GRADED else name for name in differ if name in names]


_DIGEST, _GRADED, _GENES = "sha256 of ", "exam questions graded", "mutation.rl_hp_selection"
_RANGE = re.compile(rf"{re.escape(_GENES)}(\..*\.(min|max|choices))?")

_SCORED = re.compile(
    rf"{_DIGEST}.*|environment\.(task|params|env_id|columns|curriculum|reward|graders|fitness_grader"
    r"|dataset(_test)?(?!\.\d+\.weight$))(?=\.|$)"
)
"""What decides which questions are asked, and how answers are graded; weights of datasets count in training only."""


def load_run(path: Path) -> RunRecord:
    """Read a run directory; raises CheckpointError if it is missing, damaged, or not a run directory."""
    with as_written(path):
        info = without_keys(read_run(path))  # a run of another version may name addresses with keys
        layout = RunLayout(path)
        summary = read_json(layout.summary) if layout.summary.exists() else {}
        kinds: dict[str, list[JsonLine]] = defaultdict(list)
        elapsed = []
        for line in read_lines(layout.metrics):
            kinds[str(line.get("kind"))].append(line)
            elapsed += [seconds] if math.isfinite(seconds := number(line.get("time/elapsed"))) else []
        agents: dict[int, AgentRecord] = {}
        elites = _read_lineage(layout, agents)
        unassigned = _read_train(kinds["train"], agents)
        _read_exams(kinds["eval"], agents)
        environment = info["config"].get("environment") or {}
        run = RunRecord(
            path=path,
            info=info,
            status=layout.status,
            summary=summary,
            agents=dict(sorted(agents.items())),
            timed=[*kinds["eval"], *kinds["evolution"]],
            tests=read_tests(kinds["test"], summary),
            elites=elites,
            seconds=number_or(summary.get("seconds"), max(elapsed, default=math.nan)),
        )
        run.notes = list(_notes(run, any(kinds.values()), unassigned))
        rate = number(info.get("usual_rate"))
        alarms = {} if environment.get("env_type") == "multiturn" else hacks_of_run(layout.completions)
        for agent in run.agents.values():
            usual_rate = rate if math.isfinite(rate) else None
            agent.symptoms = [*alarms.get(agent.index, ()), *symptoms(agent.train, usual_rate)]
        living = {agent.index: agent.symptoms for agent in run.agents.values() if agent.died is None}
        run.symptoms = advice(summary) | name_agents(living)
        return run


def number(value: Any) -> float:
    """Return a metric as a float: NaN if it is missing or not a number, infinite if it is beyond floats."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def number_or(value: Any, default: float) -> float:
    """Return a finite number, or ``default``."""
    metric = number(value)
    return metric if math.isfinite(metric) else default


def _given(runs: Iterable["RunRecord"]) -> set[str]:
    return {name for run in runs for name in _parts(run.info.get("given") or run.info["config"])}


def _parts(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by name, those of each grader and each dataset as well: ``environment.graders.0.weight``."""
    settings = dict(flatten(config))
    for name in [name for name, value in settings.items() if isinstance(value, list)]:
        if all(isinstance(entry, Mapping) for entry in settings[name]):
            settings |= flatten({str(i): entry for i, entry in enumerate(settings.pop(name))}, f"{name}.")
    return settings


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield nested settings by the names of the command line: ``training.pop_size``."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def task_of(config: Mapping[str, Any]) -> str:
    """Return what a run trains on: an environment, a task, or the first of its datasets."""
    environment = config.get("environment") or {}
    rows = [part["path"] for part in environment.get("dataset") or []]
    names = (environment.get("env_id"), environment.get("task"), *rows, environment.get("env_type"))
    return str(next(filter(None, names), ""))


def read_score(line: Mapping[str, Any], prefix: str = "", mean: str = "mean", scores: Iterable[Any] = ()) -> Fitness:
    """Return the score in a line of a file: ``mean``, ``stderr`` and ``n``, with a prefix."""
    value, stderr = (number(line.get(f"{prefix}{name}")) for name in (mean, "stderr"))
    n = max(_whole(line.get(f"{prefix}n")) or 0, 0)
    return Fitness(value, stderr if stderr >= 0 else math.nan, n, tuple(map(number, scores)))


def _whole(value: Any) -> int | None:
    """Return a whole number of a file, None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _read_lineage(layout: RunLayout, agents: dict[int, AgentRecord]) -> dict[int, int]:
    """Fill ``agents`` from lineage.jsonl and return the elite of each generation."""
    # Unlike hpo.lineage.family_tree, which computes with a whole lineage, it shows what there is of a damaged one.
    elites: dict[int, int] = {}
    exams: dict[int, dict[int, ExamResult]] = defaultdict(dict)
    for line in read_lines(layout.lineage):
        index, generation = line.get("agent"), line.get("generation")
        if not isinstance(index, int) or not isinstance(generation, int):
            continue
        agent, reason = agents.setdefault(index, AgentRecord(index)), str(line.get("reason", ""))
        match line.get("event"):
            case "birth":
                parent = _whole(line.get("parent"))
                # A damaged line may name the agent itself.
                agent.parent = None if parent == index else parent
                agent.born, agent.hyperparameters = generation, dict(line.get("hyperparameters") or {})
                agent.untrained = bool(line.get("untrained"))
            case "mutation":
                agent.mutations.append(line)
            case "verdict":
                agent.verdicts.append((generation, reason))
            case "death":
                agent.died, agent.reason = generation, reason
            case "elite":
                elites[generation] = index
            case "fitness":
                step = int(number_or(line.get("step"), generation))
                # Of an exam written twice, the last line counts.
                exams[index][generation] = ExamResult(generation, step, read_score(line))
                agent.tokens = {k: number(v) for k, v in (line.get("tokens") or {}).items()}
    for agent in agents.values():
        agent.exams = sorted(exams[agent.index].values(), key=lambda exam: exam.step)
        # The line of its parent's birth may be lost.
        agent.parent = agent.parent if agent.parent in agents else None
    return elites


def _read_train(lines: Iterable[JsonLine], agents: dict[int, AgentRecord]) -> int:
    """Fill in the train lines; return how many could not be assigned. Of a step written twice, the last line counts."""
    steps: dict[int, dict[int, JsonLine]] = defaultdict(dict)
    unassigned = 0
    for line in lines:
        if _whole(line.get("agent")) is None or _whole(line.get("step")) is None:
            unassigned += 1
        else:
            steps[line["agent"]][line["step"]] = line
    for index, of_agent in steps.items():
        agents.setdefault(index, AgentRecord(index)).train = [of_agent[step] for step in sorted(of_agent)]
    return unassigned


def _read_exams(lines: Iterable[JsonLine], agents: dict[int, AgentRecord]) -> None:
    """Fill in exams that are missing from the lineage, from the eval lines."""
    for line in lines:
        index, generation, step = (_whole(line.get(key)) for key in ("agent", "generation", "step"))
        if index is None or generation is None or step is None:
            continue
        agent = agents.setdefault(index, AgentRecord(index))
        if generation not in {exam.generation for exam in agent.exams}:
            agent.exams.append(ExamResult(generation, step, read_score(line, "eval/", "reward_mean")))
    for agent in agents.values():
        agent.exams.sort(key=lambda exam: exam.step)


@dataclass(frozen=True)
class HeldOutResult:
    """What an agent or the base scored in the held-out test."""

    agent: int | None
    score: Fitness
    """With the score of each question, but for runs of earlier versions."""
    questions: str = ""
    """A digest of the questions that these scores belong to."""


def read_tests(lines: Iterable[JsonLine], summary: Mapping[str, Any]) -> dict[str, HeldOutResult]:
    """Return the results of the test by who took it, from the metrics and, where these lack one, from the summary."""
    elite = (summary.get("elite") or {}).get("index")
    results = {
        who: HeldOutResult(_whole(entry.get("agent", elite if who == "elite" else None)), read_score(entry))
        for who, entry in (summary.get("test") or {}).items()
    }
    for line in lines:
        who, each = str(line.get("who")), line.get("by_question") or {"scores": (), "sha256": ""}
        score = read_score(line, "eval/", "reward_mean", each["scores"])
        results[who] = HeldOutResult(_whole(line.get("agent")), score, str(each["sha256"]))
    return results


class Gain(NamedTuple):
    """By how much the elite was better in the test than the base."""

    mean: float
    error: float
    """One standard error; NaN if unknown."""
    paired: bool
    """Whether that is of the differences question by question."""
    n: tuple[int, int]
    """Questions of the base and of the elite that got a grade."""

    @property
    def verdict(self) -> str:
        """``better`` or ``worse``, each with a probability of 0.95; else an empty text."""
        if not abs(self.mean) > NormalDist().inv_cdf(0.95) * self.error:
            return ""
        return "better" if self.mean > 0 else "worse"

    def error_text(self, factor: float = 1.0, form: str = ".3f") -> str:
        """Return what stands behind the mean; an empty text without an error."""
        pairs = ", paired by question" * self.paired
        return f" ± {factor * self.error:{form}} (one standard error{pairs})" if 0 < self.error < math.inf else ""


def measure_gain(results: Mapping[str, HeldOutResult]) -> Gain | None:
    """Return the gain of the elite; None before both have been tested."""
    if "base" not in results or "elite" not in results:
        return None
    base, elite = results["base"], results["elite"]
    error, questions = math.hypot(base.score.stderr, elite.score.stderr), {base.questions, elite.questions}
    paired = 0.0
    if len(questions) == 1 and base.questions:
        # 0 where every question differs by the same is no certainty.
        paired = paired_difference(elite.score, base.score).stderr
    mean, n = elite.score.mean - base.score.mean, (base.score.n, elite.score.n)
    return Gain(mean, paired or error, bool(paired), n)


def explain_unfinished(run: RunRecord) -> str:
    """Return that a run has not finished, and how to continue it if it was stopped; "" for a finished one."""
    if run.status == "running":
        return "This run is still running."
    if run.status == "stopped":
        command = shlex.join(["agilerl", "resume", str(run.path)])
        return f"This run has not finished: it was stopped. To continue: {command}"
    return "" if run.is_finished else f"This run did not finish; its status is “{run.status}”."


def _notes(run: RunRecord, has_metrics: bool, unassigned: int) -> Iterator[str]:
    if note := explain_unfinished(run):
        yield note
    if not has_metrics and any(agent.exams for agent in run.agents.values()):
        yield "metrics.jsonl is missing or empty, although there were exams: it was deleted, and there are no curves."
    elif not has_metrics:
        yield "There are no metrics yet."
    if not run.agents:
        yield "There are no agents yet."
    if unassigned:
        yield f"{unassigned} train line(s) without agent or step were left out."
    for agent in run.agents.values():
        if notes := "; ".join(_agent_notes(agent)):
            yield f"Agent {agent.index}: {notes}."


def _agent_notes(agent: AgentRecord) -> Iterator[str]:
    broken = [
        (key, line["step"])
        for line in agent.train
        for key, value in line.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    if broken:
        steps = sorted({step for _, step in broken})
        first = ", ".join(map(str, steps[:6])) + (f" and {len(steps) - 6} more" if len(steps) > 6 else "")
        yield f"{', '.join(sorted({key for key, _ in broken}))} not finite at iteration {first}"
    lost = [str(exam.generation) for exam in agent.exams if not exam.score.is_finite]
    if lost:
        yield f"fitness not finite in generation {', '.join(lost)}, so it ranked last"
    for outcome, steps in agent.trouble.items():
        yield f"outcome {outcome} in {counted(len(steps), 'iteration')}, first at iteration {steps[0]}"
    skipped = int(max((number_or(line.get("skipped_steps"), 0) for line in agent.train), default=0))
    if skipped > 0:
        yield f"{counted(skipped, 'optimizer step')} skipped"


# -- which agent descends from which, and its row in the family tree --------------------------------------------------


@dataclass(frozen=True)
class Family:
    """Ancestry of a run's agents, laid out in rows."""

    winner: int | None
    """The elite of the run, or the best agent so far."""
    line: list[int]
    """The winner's ancestors from the founder down, the winner last."""
    spans: dict[int, list[int]]
    """Generations in which each agent is shown; never empty."""
    rows: dict[int, int]
    """Row of each agent; no two agents of one generation share one."""

    @property
    def height(self) -> int:
        """Number of rows."""
        return max(self.rows.values(), default=-1) + 1

    def line_nodes(self) -> list[tuple[int, int]]:
        """Return (agent, generation) along the winning lineage: an ancestor up to the birth of its child."""
        ends = [*(self.spans[child][0] for child in self.line[1:]), math.inf]
        return [
            (agent, generation)
            for agent, end in zip(self.line, ends)
            for generation in self.spans[agent]
            if generation < end
        ]


def _spans(agents: dict[int, AgentRecord]) -> dict[int, list[int]]:
    spans: dict[int, list[int]] = {}
    # Parents have smaller indices, so the span of a parent is known when its untrained child needs it.
    for index, agent in agents.items():
        after = [spans[agent.parent][-1] + 1] if agent.parent in spans else []
        spans[index] = agent.generations or [max([agent.born or 0, *after])]
    return spans


def _winner(run: RunRecord) -> int | None:
    index = (run.summary.get("elite") or {}).get("index")
    if index in run.agents:
        return int(index)
    if run.elites and (elite := run.elites[max(run.elites)]) in run.agents:
        return elite
    best = [(agent.best.score.mean, index) for index, agent in run.agents.items() if agent.best is not None]
    return max(best)[1] if best else None


_MOST_AT_ONCE = 4096


def _rows(agents: dict[int, AgentRecord], spans: dict[int, list[int]], line: list[int]) -> dict[int, int]:
    """Give each agent a row for its whole life: near its parent's, the winning lineage placed first."""
    rows: dict[int, int] = {}
    ends: list[float] = []
    # Of those that begin together the winning lineage is placed first, so that it gets the straightest rows.
    for index in sorted(spans, key=lambda index: (spans[index][0], index not in line, index)):
        start, end = spans[index][0], spans[index][-1]
        parent = agents[index].parent
        wanted = len(ends) if parent is None else rows.get(parent, len(ends))
        # A row is free again in the generation after its agent's last.
        free = [row for row, last in enumerate(ends) if last < start]
        row = min(free, key=lambda row: (abs(row - wanted), row), default=len(ends))
        if row == len(ends):
            # For each agent all rows are looked at: a stranger's file could make that take hours.
            if row == _MOST_AT_ONCE:
                raise CheckpointError(f"expected at most {_MOST_AT_ONCE:,} agents at once in lineage.jsonl, found more")
            ends.append(-math.inf)
        rows[index], ends[row] = row, end
    return rows
