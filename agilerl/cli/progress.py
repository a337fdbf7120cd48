"""What a run shows on the terminal: its plan, its progress (a live table, or plain lines elsewhere) and its result."""

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from agilerl.checks.arguments import counted
from agilerl.cli.forecast import expected_seconds, schedule, seen_by_exam
from agilerl.cli.output import (
    columns,
    cut_columns,
    duration,
    facts,
    format_samples,
    genes_text,
    json_line,
    one_line,
    tell_apart,
)
from agilerl.cli.running import REMEDIES
from agilerl.envs.answer_format import AnswerFormat
from agilerl.envs.check import check_env
from agilerl.envs.curation import few_rows
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.graded import exam_grader
from agilerl.envs.scorers import shortcuts
from agilerl.hpo.fitness import Fitness, probability_better, ranking
from agilerl.hpo.mutation import LEARNING_RATES
from agilerl.planning.footprint import peak
from agilerl.population import Population
from agilerl.report.life import format_score
from agilerl.report.load import Gain, load_run, measure_gain, number, read_tests
from agilerl.runs import RunLayout, read_lines
from agilerl.runs.diagnosis import Observer, Symptom, advice, name_agents
from agilerl.runs.hacks import hacks_of_run
from agilerl.runs.stopping import AFTER_ITERATION, StopRequest
from agilerl.text.contract import readings
from agilerl.training.events import (
    Event,
    Evolved,
    ExamDone,
    IterationDone,
    PhaseStarted,
    PreflightDone,
    RunFinished,
    RunStarted,
)
from agilerl.training.memory import adapter_numbers, estimate, training_passes
from agilerl.training.preflight import MOST, QUESTIONS, is_due, why_none
from agilerl.training.probe import finite
from agilerl.training.records import metric_lines
from agilerl.training.setup import Session

_CLEAR = 0.8
"""Probability of being better from which an exam tells two agents apart."""
_MOST_ROWS = 40
"""Agents in the table at the end."""
SMALL_EXAM = 50
"""Questions below which the plan says what an exam cannot see."""


def plan_document(
    session: Session, out: Path, sampled: PreflightDone | None = None, *, timed: bool = False
) -> dict[str, Any]:
    """Return the plan as numbers, and as the ``lines`` that a person reads, each with a name.

    ``sampled`` is an answer to show. ``timed``: with the time of the run, for which the machine's rates are measured,
    and with what is wrong with an environment, which is played for that.
    """
    config, population, task, scale = session.config, session.population, session.task, session.scale
    agents = population.agents
    iterations = session.planned_iterations
    if scale.ends_by_tokens:
        # Counted with the longest completions: shorter ones leave tokens for more iterations.
        iterations = min(iterations, math.ceil(scale.lone_agent()[0] / len(agents)))
    completions = [population.prompts_per_step * group for group in population.group_sizes]
    limit, panels = (
        population.examiner.context_length,
        [population.examiner.lengths("exam"), population.examiner.lengths("test")],
    )
    prompts = [length for panel in panels for length in panel.prompts]
    room = limit - max(prompts)
    memory, samples = estimate(config, population), session.samples_per_iteration
    # An answer may be as long as the agent allows, or as the context leaves room for after the longest prompt.
    completion = min(max(getattr(agent.config, "max_output_tokens", None) or room for agent in agents), room)
    plan: dict[str, Any] = {
        "population": {str(a.index): dict(a.hyperparameters) for a in agents},
        "genes": {name: gene.span() for name, gene in agents[0].genes.items()},
        "batches": {
            "prompts": population.prompts_per_step,
            "group_size": _ends(population.group_sizes),
            "completions_per_agent": _ends(completions),
            "rows_per_optimizer_step": _ends([min(a.window_rows, rows) for a, rows in zip(agents, completions)]),
            "completions_per_iteration": samples,
            "prompt_tokens": _ends(prompts),
            "completion_tokens_at_most": completion,
            "tokens_per_iteration_at_most": samples * max(panel.row(completion, limit) for panel in panels),
        },
        "length": {
            "iterations": iterations,
            "ends_by_tokens": scale.ends_by_tokens,
            "iterations_per_generation": session.evo_steps,
            "iterations_of_first_generation": session.generation_steps,
            "exam_prompts": len(population.examiner.places("exam")),
            "test_prompts": len(population.examiner.places("test")),
            "smallest_population": min(config.smallest_population, len(agents)),
            "steps_of_selection": session.steps_of_selection(),
        },
        "expected_seconds": expected_seconds(session, completion) if timed else None,
        "exam": seen_by_exam(len(population.examiner.places("exam"))),
        "memory_megabytes": {name: round(size / 2**20, 1) for name, size in memory.items()},
        "peak_memory_megabytes": round(peak(memory) / 2**20, 1),
        "environment": [str(finding) for finding in check_env(partial(task.env_factory, **task.env_config))]
        if timed and isinstance(task, EpisodeTask)
        else [],
        "rows": dict(task.counts),
        "sample": None
        if sampled is None
        else finite({key: getattr(sampled, key) for key in ("prompt", "answer", "score")}),
        "results": str(out),
    }
    return {**plan, "lines": [{"name": name, "text": text} for name, text in _lines(plan, session, sampled)]}


def print_plan(
    session: Session, out: Path, console: Console, sampled: PreflightDone | None = None, *, timed: bool = False
) -> None:
    """Print the plan as a table; for the arguments see :func:`plan_document`."""
    table = facts((line["name"], line["text"]) for line in plan_document(session, out, sampled, timed=timed)["lines"])
    table.title, table.title_justify = "Plan", "left"
    console.print(table)
    console.print()


def _lines(plan: Mapping[str, Any], session: Session, sampled: PreflightDone | None) -> Iterator[tuple[str, str]]:
    """Yield the lines of a plan: of the base and the task, of the agents, and of what the run takes and tells apart."""
    yield from _describe_base_and_task(session)
    for sentence in plan["environment"]:
        yield "", sentence
    yield from _describe_agents(plan, session)
    environment, batch, length = session.config.environment, plan["batches"], plan["length"]
    completions = f"{_span(batch['group_size'])} completions = {_span(batch['completions_per_agent'])} for each agent"
    per_step = f"{_span(batch['rows_per_optimizer_step'])} an optimizer step"
    yield "batch", f"{counted(batch['prompts'], 'prompt')} x {completions}, {per_step}"
    default = " (the default: raise algorithm.max_output_tokens for longer ones)" * session.resolved.bounds_completions
    yield "passes", _describe_passes(session.population)
    yield (
        "tokens",
        f"prompts {_span(batch['prompt_tokens'])}, completions up to {batch['completion_tokens_at_most']}{default}; "
        f"at most {batch['tokens_per_iteration_at_most']:,} an iteration for all agents",
    )
    t = session.config.training
    ends = ((t.max_tokens, "tokens"), (t.max_seconds, "s"))
    limits = " or ".join(f"{limit:,.15g} {unit}" for limit, unit in ends if limit)
    asked = f"exam {length['exam_prompts']} prompts, test {length['test_prompts']}"
    yield "length", f"{schedule(length, len(plan['population']), limits)}; {asked}"
    if session.config.selection_strategy.strategy != "none":
        small = environment.eval_prompts is not None and plan["exam"]["questions"] < SMALL_EXAM
        yield "exam", f"{'warning: ' * small}{plan['exam']['sentence']}{' (environment.eval_prompts)' * small}"
    if (seconds := plan["expected_seconds"]) is not None:
        yield "time", f"up to about {duration(seconds)} on this device, by rates measured just now; besides grading"
    several = session.processes.size > 1
    if several:
        divided = "agents" if session.population.examiner.whole else "rows of each agent"
        yield "processes", f"{session.processes.size}, which divide the {divided} among them"
    parts = ", ".join(f"{name.replace('_', ' ')} {size:,.0f}" for name, size in plan["memory_megabytes"].items())
    each = f"about {plan['peak_memory_megabytes']:,.0f} MiB{' in each process' * several}"
    turns = "less than the sum, as some parts are never in memory together"
    yield "memory", f"{each} on top of Python and torch; {turns}: {parts}"
    if t.trackers:
        yield "trackers", ", ".join(t.trackers)
    if sampled is not None:
        yield from describe_trial(sampled)
    if is_due(session):
        yield "preflight", f"before the first update agents answer {QUESTIONS} to {MOST} training questions"
    elif session.saved is None and (none := why_none(session.scale)):
        yield "preflight", none
    yield from (("no effect", sentence) for sentence in session.resolved.without_effect)
    yield from (("note", sentence) for sentence in session.notes)
    yield "results", plan["results"]


def _describe_passes(population: Population) -> str:
    """Return how many tokens a forward pass of training has, and why."""
    step = max(training_passes(population, 1 if population.examiner.whole else population.runtime.processes.size))
    often = ", whose layers are computed again in the backward pass" * step.recomputed
    micro_batch, size = population.agents[0].micro_batch, population.runtime.pass_size
    if micro_batch.rows is not None:
        why = f"algorithm.micro_batch_size_per_gpu={micro_batch.rows // micro_batch.unit}"
    elif size.whole == size.tokens:
        why = f"{size.tokens:,} fit in memory"
    else:
        why = f"{size.tokens:,} fill the device; {size.whole:,} fit in memory, if a shared prompt is so computed once"
    return f"{step.passes:,} of up to {step.tokens:,} tokens for an optimizer step of an agent{often} ({why})"


def _describe_base_and_task(session: Session) -> Iterator[tuple[str, str]]:
    population, environment, task = session.population, session.config.environment, session.task
    base, tokenizer, agent = population.runtime.base, population.tokenizer, population.agents[0]
    end = "its end token " * (tokenizer.pad_token_id == tokenizer.eos_token_id)
    size = f"{base.parameters:,} frozen parameters, context {population.examiner.context_length}"
    yield "model", f"{base.name}: {size}, padded with {end}{tokenizer.pad_token!r}"
    template = bool(getattr(tokenizer, "chat_template", None))
    if not template:
        yield "", "no chat template: the contents of a conversation are joined by newlines, without roles"
    begin, end, ambiguous = readings(tokenizer)
    if ambiguous:
        yield "", f"{begin}; {end}"
    layers = population.runtime.store.layers
    numbers = adapter_numbers(agent.rank, layers)
    yield "adapters", f"LoRA rank {agent.rank} on {counted(len(layers), 'layer')}: {numbers:,} numbers each"
    # The name of a function in a file does not say which file.
    graders = (grader.name for grader in environment.graders or ())
    where = next((name for name in graders if name.rpartition(":")[2] == task.grader), task.grader)
    yield "task", f"{task.name}, reward {Path(where).name}"
    if (program := environment.agent) is not None:
        yield "agent", f"{program if isinstance(program, str) else shlex.join(program)} answers the questions"
    elif environment.env_type == "reasoning" and (answers := str(AnswerFormat.of(environment))):
        yield "answers", f"{answers} (environment.answer_format)"
        chats = template and base.name != "embedded"
        if chats and environment.answer_format == "whole" and environment.graders is None:
            yield "", "a chat model seldom writes the answer alone: answer_format=after asks for it"
    yield from (("", sentence) for sentence in shortcuts(environment))
    if (grader := exam_grader(task)) != task.grader:
        evolving = [name for name in agent.genes if name.startswith("reward_weights.")]
        fixed = f", whatever {' and '.join(evolving)} become{'s' * (len(evolving) == 1)}" if evolving else ""
        yield "fitness", f"exams and tests of all agents are graded by {grader}{fixed}"
    if population.examiner.eval_temperature:
        yield "exams", f"{_exam_sampling(population)}, by the same random numbers for all agents"
    if stops := population.runtime.options.stop_sequences:
        yield "stops", f"completions end with {', '.join(map(repr, stops))}"
    if rows := task.counts:
        yield "rows", ", ".join(f"{name.replace('_', ' ')} {count:,}" for name, count in rows.items() if count)
        if few := few_rows(rows):
            yield "", f"warning: {few}"
        if (asked := len(population.examiner.places("exam"))) < (available := rows["exam"]):
            rest = f"environment.eval_prompts={asked} leaves the others to training and the test"
            yield "", f"exams ask {asked} of the {available}, as more would take too much of the budget; {rest}"


def _describe_agents(plan: Mapping[str, Any], session: Session) -> Iterator[tuple[str, str]]:
    agents, first = len(plan["population"]), session.population.agents[0]
    yield "algorithm", f"{session.config.algorithm['name']}, {counted(agents, 'agent')}"
    rates = {name: rate for name in LEARNING_RATES if (rate := getattr(first, name, None))}
    for index, values in plan["population"].items():
        yield f"  agent {index}", genes_text(values) or f"{genes_text(rates)}, fixed".removeprefix(", ")
    if session.saved is None and agents < session.config.training.pop_size:
        only = f"{counted(agents, 'agent')} only"
        yield "", f"{only}, because an iteration of more would take over a tenth of the budget (training.pop_size)"
    if (usual := session.usual_rate) is not None:
        yield from (("rate", sentence) for sentence in session.resolved.unusual_rates(usual))
    yield "genes", ", ".join(f"{k} in {v}" for k, v in plan["genes"].items()) or "none: nothing evolves"


def sample_lines(event: PreflightDone) -> list[str]:
    """Return one prompt, as the model reads it, and an answer with its reward, a line each."""
    return [f"  {name:<8}{text}" for name, text in describe_sample(event)]


def describe_sample(event: PreflightDone) -> list[tuple[str, str]]:
    """Return the names and texts of a prompt and of an answer with its reward, for a table."""
    reward = f"reward {event.score:g}" if math.isfinite(event.score) else "no grade"
    answer = f"{one_line(event.answer) or '(empty)'}, {reward}"
    return [("prompt", one_line(event.prompt)), ("answer", answer)]


def describe_trial(event: PreflightDone) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of what a plan shows of the base."""
    yield from describe_sample(event)
    yield "base", event.shown
    if event.problem:
        yield "warning", event.problem


def _exam_sampling(population: Population) -> str:
    if not population.examiner.eval_temperature:
        return "greedy"
    count = population.examiner.eval_samples
    return f"{counted(count, 'sample')} a question at temperature {population.examiner.eval_temperature:g}"


def _ends(values: Sequence[int]) -> list[int]:
    return [min(values), max(values)]


def _span(ends: Sequence[int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]}-{ends[1]}"


# -- progress, and the result -----------------------------------------------------------------------------------------


_NARROW = 80
"""Characters of a terminal from which the table has room for each agent's parent."""
_STOPPING = {
    "base test": "will save a checkpoint and stop after the test of the base and one iteration",
    "train": AFTER_ITERATION,
    "exam": "will save a checkpoint and stop after this exam",
    "test": "this is the final test, after which the run ends by itself",
}
"""What a signal does, by phase."""


def watch(
    events: Iterator[Event], session: Session, console: Console, *, stop: StopRequest | None = None
) -> dict[str, Any]:
    """Show a run to its end; return its summary.

    With a request to ``stop``, a console that is lost asks for it: the run continues to a point from which it can be
    resumed.
    """
    view = View(session, console, stop)
    with view:
        summary = _follow(events, view.show, stop)
    console.print("All agents of the run; those that left come last")
    console.print(view.table(max(_MOST_ROWS, len(session.population.agents))))
    if summary.get("elite"):
        console.print(view.explain_mark(summary["elite"]), soft_wrap=not console.is_terminal)
    console.print()
    symptoms = _symptoms(view.observer, session, view.out)
    gain = _gain(summary, view.out)
    if gain is not None and gain.verdict == "better":  # something was learned: only alarms count
        symptoms = {index: [s for s in each if s.samples] for index, each in symptoms.items()}
    parts = {"About the run as a whole": advice(summary), "What may keep agents from learning": name_agents(symptoms)}
    for heading, sentences in parts.items():
        if not sentences:
            continue
        console.print(heading)
        for sentence, symptom in sentences.items():
            for line in [sentence, *format_samples(symptom.samples)]:
                console.print(f"  {line}", soft_wrap=not console.is_terminal)
        console.print()
    _print_result(summary, gain, view.out, console, _exam_sampling(session.population))
    return summary


def log(
    events: Iterator[Event], session: Session, tell: Callable[[str], None], *, stop: StopRequest | None = None
) -> dict[str, Any]:
    """Show a run to its end as lines of JSON, which ``tell`` gets; return its summary. For ``stop`` see :func:`watch`.

    Lines of metrics are those of ``metrics.jsonl``.
    """
    observer = Observer(session.usual_rate)

    def show(event: Event) -> None:
        match event:
            case RunStarted():
                if session.saved is None:
                    tell(json_line("plan", **plan_document(session, event.out)))
                tell(json_line("start", out=event.out, iterations=event.iterations, generations=event.generations))
            case PhaseStarted():
                tell(json_line("phase", phase=event.name))
            case RunFinished():
                sentences = advice(event.summary) | name_agents(_symptoms(observer, session, event.out))
                for sentence, symptom in sentences.items():
                    tell(json_line("advice", text=sentence, samples=symptom.samples))
                tell(json_line("finish", out=event.out, **event.summary))
            case PreflightDone() if event.problem:
                tell(json_line("advice", text=event.problem))
            case IterationDone():
                observer.add(metric_lines(event))
        progress = {"progress": event.progress} if isinstance(event, IterationDone) else {}
        for values in metric_lines(event):
            # Arguments are evaluated from left to right: the kind is out of the values before they are unpacked.
            tell(json_line(values.pop("kind"), **progress, **values))

    return _follow(events, show, stop)


def _symptoms(observer: Observer, session: Session, out: Path) -> dict[int, list[Symptom]]:
    """Return what is known of the agents; first the alarms, by the completions in the run's directory."""
    alarms = {} if session.task.multi_turn else hacks_of_run(RunLayout(out).completions)
    symptoms = observer.symptoms(agent.index for agent in session.population.agents)
    return {index: [*alarms.get(index, ()), *each] for index, each in symptoms.items()}


def _follow(events: Iterator[Event], show: Callable[[Event], None], stop: StopRequest | None) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    shown = True
    for event in events:
        try:
            if isinstance(event, PhaseStarted) and stop is not None:
                stop.what = _STOPPING.get(event.name, AFTER_ITERATION)
            if shown:
                show(event)
        except OSError as error:
            if stop is None:
                raise
            # The run continues unseen, up to a point from which it can be resumed.
            shown = False
            stop.lose_output(error)
        if isinstance(event, RunFinished):
            summary = dict(event.summary)
    return summary


@dataclass
class _AgentRow:
    """What the table says of an agent of the run, living or not."""

    parent: int | None = None
    genes: Mapping[str, Any] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    """By iteration; losses, for an algorithm that learns from data."""
    fitness: Fitness | None = None
    failures: Counter[str] = field(default_factory=Counter)
    event: str = "-"
    """What happened to it last."""
    left: int | None = None
    """Generation after which it left."""


class View:
    """The story of a run: a row for every agent that it had, a bar for the run and one for the phase."""

    def __init__(self, session: Session, console: Console, stop: StopRequest | None = None) -> None:
        self.session, self.console = session, console
        self.stop = stop or StopRequest()
        self.rows = defaultdict[int, _AgentRow](_AgentRow)
        self.best: int | None = None
        self.observer = Observer(session.usual_rate)
        self.shown_symptoms: set[tuple[int, str]] = set()
        self.notes: list[Text] = []
        self.iteration = 0
        self.out = Path()
        self.started = perf_counter()
        self.resumed_at = 0.0 if session.saved is None else session.saved.progress.spent(session.config.training)
        self.what = "reward" if session.resolved.algorithm.env_type == "reasoning" else "loss"
        # All of it fits 60 columns; the bars take what is left.
        share = TaskProgressColumn("{task.percentage:>3.0f}% of {task.fields[whole]:<10}")
        name, bar = TextColumn("{task.description:<9}"), BarColumn(None)
        clock = TimeElapsedColumn(), TextColumn("<"), TimeRemainingColumn()  # as tqdm writes them
        self.bars = Progress(name, bar, share, *clock, console=console)
        self.run = self.bars.add_task("run", total=1.0, whole="budget")
        self.phase = self.bars.add_task("start", total=None)
        self.shown = Group()
        # Transient: at the end, the table of all agents takes its place.
        live = partial(Live, console=console, refresh_per_second=4, transient=True)
        self.live = live(get_renderable=self._draw) if console.is_terminal else None
        self._look()

    def __enter__(self) -> "View":
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self.live is not None:
            with suppress(OSError):  # the terminal may be gone
                self.live.stop()

    def show(self, event: Event) -> None:
        """Show an event."""
        match event:
            case RunStarted():
                self.out = event.out
                if self.session.saved is not None:
                    self._recall()
            case PreflightDone():
                problem = f"  warning: nothing can be learned from these answers: {event.problem}"
                for line in [f"Preflight: {event.shown}", *sample_lines(event), *[problem] * bool(event.problem), ""]:
                    self._line(line)
            case PhaseStarted():
                total = self.session.generation_steps if event.name == "train" else None
                # A new task each time: for an existing one, rich reads total=None as "unchanged".
                self.bars.remove_task(self.phase)
                self.phase = self.bars.add_task(event.name, total=total, whole="generation")
            case IterationDone():
                self._show_iteration(event)
            case ExamDone():
                for index, fitness in event.fitness.items():
                    self.rows[index].fitness = fitness
                self.bars.update(self.phase, visible=False)  # what follows it has no phase
                first = ranking(event.fitness)[0]
                self.best = first if event.fitness[first].is_finite else None
                scores = ", ".join(f"{index}: {format_score(f)}" for index, f in event.fitness.items())
                self._log(f"generation {event.generation}: exam {scores}")
                self._note_symptoms()
            case Evolved():
                self._show_selection(event)
            case RunFinished():
                self.best = (event.summary["elite"] or {}).get("index")
        if self.live is not None:
            height = self.console.height - 6 - len(self.notes)  # without the header, the bars and what stops the run
            table = self.table(max(height, len(self.session.population.agents)))
            self.shown = Group(table, *self.notes, self.bars)
            self.live.refresh()

    def _draw(self) -> Group:
        """Return what the terminal shows; rich asks for it four times a second, so a signal is answered at once."""
        # An empty last line for the ^C of Ctrl-C: at the end of a full one it would begin another, and shift the table.
        return Group(self.shown, Text(self.stop.sentence, style="bold"))

    def _look(self) -> None:
        """Take down the agents that the population has."""
        for agent in self.session.population.agents:
            row = self.rows[agent.index]
            row.parent, row.genes = agent.parent, dict(agent.hyperparameters)

    def _recall(self) -> None:
        """Take down what a run that is resumed has written about its agents."""
        run = load_run(self.out)
        for index, agent in run.agents.items():
            row = self.rows[index]
            row.parent = agent.parent
            row.genes = agent.values()
            # NaN does not equal itself, and is left out.
            row.rewards = [value for line in agent.train if (value := number(line.get(self.what))) == value]
            if agent.exams:
                row.fitness = agent.exams[-1].score
            if agent.died is not None and index not in {a.index for a in self.session.population.agents}:
                row.left, row.event = agent.died, f"left in {agent.died}: {agent.reason.removeprefix('left: ')}"

    def _show_selection(self, event: Evolved) -> None:
        """Print what a selection did, and take it down."""
        generation, self.best = event.generation, event.elite
        self._look()
        born = {birth.child: birth.parent for birth in event.plan.births}
        changes = {index: change for index, change in event.mutations.items() if change != "None"}
        left = {index: why.removeprefix("left: ") for index, why in event.deaths.items()}
        for index, parent in born.items():
            self.rows[index].event = f"born {generation}: copy of {parent}"
        for index, change in changes.items():
            self.rows[index].event = f"born {generation}: {change}" if index in born else f"gen {generation}: {change}"
        for index, why in left.items():
            row = self.rows[index]
            row.left, row.event = generation, f"left in {generation}: {why}"
        story = ["no best agent, because none is fit"]
        if event.elite is not None:
            exam = event.fitness.get(event.elite)
            story = [f"best {event.elite}" + ("" if exam is None else f" ({exam.mean:.3f})")]
        story += [f"born {', '.join(f'{parent} -> {child}' for child, parent in born.items())}"] * bool(born)
        story += [f"mutated {', '.join(f'{index}: {change}' for index, change in changes.items())}"] * bool(changes)
        self._line(f"generation {generation}: {'; '.join(story)}")
        if left:
            reasons = ", ".join(f"{index} ({why})" for index, why in left.items())
            self._line(f"generation {generation}: left {reasons}")

    def _line(self, text: str) -> None:
        """Print a line of the log, above the table of a terminal, where it is broken between words."""
        self.console.print(text, soft_wrap=self.live is None)

    def _log(self, text: str) -> None:
        """Print a line of what a terminal's table shows as well, where there is no such table."""
        if self.live is None:
            self._line(text)

    def _show_iteration(self, event: IterationDone) -> None:
        """Take down and log an iteration, with the first failure of each kind and agent."""
        self.iteration = event.iteration
        self.observer.add(metric_lines(event))
        self.bars.update(self.run, completed=event.progress)
        self.bars.advance(self.phase)
        for index, metrics in event.metrics.items():
            self.rows[index].rewards += [metrics[self.what]] if self.what in metrics else []
        left = ""
        if (done := event.progress - self.resumed_at) > 0:  # at the speed of this process
            left = f", about {(perf_counter() - self.started) / done * (1 - event.progress):.0f} s left"
        values = ", ".join(f"{i}: {m[self.what]:.3f}" for i, m in event.metrics.items() if self.what in m)
        self._log(f"iteration {event.iteration} ({event.progress:.0%}{left}): {self.what} {values}")
        for index, outcome in event.failed.items():
            counts = self.rows[index].failures
            counts[outcome] += 1
            if counts[outcome] == 1:
                reason = f" ({REMEDIES[outcome]})" if outcome in REMEDIES else ""
                self._log(f"iteration {event.iteration}: agent {index} {outcome}{reason}")

    def _note_symptoms(self) -> None:
        """Print what may keep agents from learning, once for each agent."""
        symptoms = _symptoms(self.observer, self.session, self.out)
        shown = self.shown_symptoms
        new = {index: [s for s in each if (index, s.name) not in shown] for index, each in symptoms.items()}
        self.shown_symptoms |= {(index, symptom.name) for index, each in new.items() for symptom in each}
        self.notes = [Text(sentence) for sentence in name_agents(symptoms)]
        for sentence in name_agents(new):
            self._log(sentence)

    def explain_mark(self, elite: Mapping[str, Any]) -> str:
        """Return a sentence about the agent with the mark: why it is the elite, and not one that looks as good."""
        index, step, population = elite["index"], elite["step"], self.session.population
        soup = ", mixed with the other candidates" if elite.get("soup", {}).get("is_elite") else ""
        sentence = f"* elite: agent {index} as it was after iteration {step}{soup}"
        exams = {a.index: exam for a in population.agents if (exam := self.rows[a.index].fitness) is not None}
        if step != self.iteration:
            if self.session.config.candidates > 1 and population.examiner.places("second"):
                rival = "it was at the end" if exams and ranking(exams)[0] == index else "the best of the last exam"
                return f"{sentence}: by a second panel of questions it was better than {rival}"
            won, last = (number(elite["decided_by"][which]) for which in ("elite", "last"))
            return f"{sentence}: best exam of the run, {won:.3f} against {last:.3f} of the last"
        sentence += ", the best of the last exam"
        best = exams.pop(index, None)
        others = {i: f for i, f in exams.items() if f.is_finite}
        near = [] if best is None else sorted(i for i, f in others.items() if probability_better(best, f) < _CLEAR)
        if best is None or not near:
            return sentence
        rivals = f"agent{'s' * (len(near) > 1)} {', '.join(map(str, near))} (P < {_CLEAR:g} that it is better)"
        return f"{sentence}, whose {best.n} questions do not tell it apart from {rivals}"

    def table(self, height: int | None = None) -> Table:
        """Return a row for each agent: first those that live, then the last ones that left, dimmed."""
        living = [agent.index for agent in self.session.population.agents]
        gone = sorted(self.rows.keys() - set(living), key=lambda index: (-(self.rows[index].left or 0), index))
        agents = [(index, self.rows[index]) for index in [*living, *gone][:height]]
        rewards = [reward for _, row in agents for reward in row.rewards if math.isfinite(reward)]
        # One scale for all agents, so that their trends can be compared.
        ends = (min(rewards), max(rewards)) if rewards else (0.0, 0.0)
        cells = {
            "agent": [f"{index}{'*' if index == self.best else ' '}" for index, _ in agents],
            "parent": ["-" if row.parent is None else str(row.parent) for _, row in agents],
            "genes": [genes_text(row.genes, 2) or "-" for _, row in agents],
            self.what: [_cell(row.rewards[-1] if row.rewards else None, ".3f") for _, row in agents],
            "trend": [sparkline(row.rewards, *ends) for _, row in agents],
            "exam": ["-" if row.fitness is None else format_score(row.fitness) for _, row in agents],
            "failures": [", ".join(f"{n} {what}" for what, n in row.failures.items()) for _, row in agents],
            "event": [row.event for _, row in agents],
        }
        shown = {name: texts for name, texts in cells.items() if name not in ("failures", "trend") or any(texts)}
        if self.console.width < _NARROW:
            del shown["parent"]
        table = cut_columns(shown, left=("genes", "failures", "event"))
        for row in table.rows[len(living) :]:
            row.style = "dim"
        if height is not None and (hidden := len(self.rows) - height) > 0:
            table.caption = f"and {hidden} that left earlier: agilerl lineage {self.out}"
            table.caption_justify = "left"
        return table


_BARS = "▁▂▃▄▅▆▇█"
_TREND = 8
"""Characters of a sparkline, at most."""


def sparkline(values: Sequence[float], low: float, high: float) -> str:
    """Return the course of values from ``low`` to ``high`` in at most 8 characters, each a mean over neighbours."""
    finite = [value for value in values if math.isfinite(value)]
    size = min(_TREND, len(finite))
    parts = [finite[k * len(finite) // size : (k + 1) * len(finite) // size] for k in range(size)]
    height = (high - low) or 1.0
    return "".join(_BARS[round((fmean(part) - low) / height * (len(_BARS) - 1))] for part in parts)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def _gain(summary: Mapping[str, Any], out: Path) -> Gain | None:
    """Return the gain over the base; None if there is none, or if not the same questions got a grade."""
    tests = (line for line in read_lines(RunLayout(out).metrics) if line.get("kind") == "test")
    gain = measure_gain(read_tests(tests, summary))
    return gain if gain is not None and math.isfinite(gain.mean) and gain.n[0] == gain.n[1] else None


def _print_result(summary: Mapping[str, Any], gain: Gain | None, out: Path, console: Console, sampling: str) -> None:
    table, elite = columns("", "mean", "stderr", "n"), summary["elite"]
    rows = {"base": "base model", "median_first_generation": "median agent of generation 0", "elite": "elite"}
    for key, label in rows.items():
        if (result := summary["test"].get(key)) is not None:
            if key == "elite":
                label += f" (agent {elite['index']} after iteration {elite['step']})"
            elif result.get("index") is not None:
                label += f" (agent {result['index']})"
            table.add_row(label, _cell(result["mean"], ".3f"), _cell(result["stderr"], ".3f"), str(result["n"]))
    console.print(f"Held-out test ({sampling})")
    console.print(table)
    if gain is not None:
        console.print(
            f"The elite is {gain.verdict or 'not clearly better'} than the base: {gain.mean:+.3f}{gain.error_text()}"
        )
    elif len({result["n"] for result in summary["test"].values()}) > 1:
        console.print("These means are not comparable, because not the same questions got a grade (n)")
    if elite is None:
        console.print("\nNo agent is fit (a finite fitness, and not sick), so there is no elite.")
    else:
        values = ((a["agent"], genes_text(a["hyperparameters"])) for a in summary["lineage"])
        line = " -> ".join(f"{agent} ({genes})" if genes else str(agent) for agent, genes in values)
        console.print(f"\nWinning lineage  {line}")
        console.print(f"Elite adapter    {out / 'elite'}", soft_wrap=True)
    _print_answers(summary.get("answers", ()), console)
    console.print(f"Report           {out / 'report.html'}", soft_wrap=True)
    console.print(f"Who left, why    agilerl lineage {out}", soft_wrap=True)
    tokens, generations = sum(summary["tokens"].values()), summary["generations"]
    console.print(f"{counted(generations, 'generation')}, {tokens:,} tokens, {summary['seconds']:.0f} s")


def _print_answers(answers: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the first test questions with the greedy answers of the base and of the elite."""
    if not answers:
        return

    def scored(answer: Mapping[str, Any]) -> str:
        score = "no grade" if answer["score"] is None else f"{answer['score']:.3g}"
        return f"{one_line(answer['text'], width) or '(empty)'} ({score})"

    width = max(12, (console.width - 20) // 4)
    texts = {
        "right": [one_line(answer["answer"] or "-", width) for answer in answers],
        **{who: [scored(answer[who]) for answer in answers] for who in ("base", "elite")},
    }
    # Questions get the room that the answers leave.
    room = max(width, console.width - sum(max(map(len, [name, *cells])) + 2 for name, cells in texts.items()))
    texts = {"question": tell_apart([answer["question"] for answer in answers], room), **texts}
    console.print(f"\nThe first {len(answers)} test questions, with answers and scores")
    console.print(cut_columns(texts, left=texts))
    console.print()
