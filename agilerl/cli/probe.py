"""``agilerl probe``: where would learning start? A table over tasks and settings, before anything is trained."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from agilerl.checks.arguments import counted
from agilerl.cli.options import AllowCode, Arguments, AsJson
from agilerl.cli.output import console as new_console
from agilerl.cli.output import one_line, tell_line
from agilerl.cli.process_settings import loading_done
from agilerl.cli.running import configuration, is_file, manifests_in, quieten_libraries
from agilerl.config.named_files import check_allowed
from agilerl.config.run import RunConfig
from agilerl.errors import AgileRLError

if TYPE_CHECKING:
    from agilerl.training.preflight import Bases
    from agilerl.training.probe import Probe

_WIDTH, _NAME = 80, 30
_COLUMNS = ("reward", "differ", "cut", "tokens")


@dataclass
class _Trial:
    """Settings to try, and what was measured of them, or the error."""

    task: str
    settings: str
    arguments: tuple[str, ...]
    probe: "Probe | None" = None
    advice: str = ""
    hints: Sequence[str] = ()
    error: AgileRLError | None = None

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.task, self.settings)))

    def document(self) -> dict[str, Any]:
        head = {"task": self.task, "settings": self.settings}
        if self.probe is None:
            return {**head, "reason": str(self.error)}
        return {**head, **self.probe.document(), **({"advice": self.advice} if self.advice else {})}

    def line(self, width: int) -> str:
        name, probe = one_line(self.name, width), self.probe
        if probe is None:
            return f"{name:<{width}}  {one_line(str(self.error), _WIDTH - width - 3)}"
        numbers = (f"{probe.reward:.3f}", f"{probe.differ:.0%}", f"{probe.cut:.0%}", f"{probe.length:.0f}")
        return f"{name:<{width}}{''.join(f'{number:>8}' for number in numbers)}  {probe.start}"


def run_probe(
    arguments: Arguments = None,
    *,
    task: Annotated[
        list[str] | None, Option(metavar="NAME", help="A task of reasoning_gym; several: a row each.")
    ] = None,
    every: Annotated[bool, Option("--all", help="Every task of reasoning_gym.")] = False,
    tries: Annotated[
        list[str] | None,
        Option("--try", metavar="'KEY.PATH=VALUE ...'", help="Settings of a row; several: a row each."),
    ] = None,
    questions: Annotated[int, Option(metavar="N", min=1, max=10_000, help="Training questions of a row.")] = 16,
    samples: Annotated[
        int | None, Option(metavar="N", min=2, max=10_000, help="Answers to each; default: algorithm.group_size.")
    ] = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Ask where learning would start: the base answers training questions as the agents of a run would.

    A group is the answers to one question. Where all of a group earn the same there is nothing to learn from it. With
    several tasks or settings each has a row of a table, and a task that cannot be made has its reason there.

    agilerl probe --task gcd --task chain_sum

    agilerl probe my.yaml --try environment.answer_format=tags --try 'environment.answer_format=after'

    Of a model (a folder, a .gguf file, a name), say what training can rely on, a line for each claim:

    agilerl probe meta-llama/Llama-3.2-1B-Instruct
    """
    if task and every:
        raise typer.BadParameter("expected --task or --all, found both; leave out one of them")
    if (model := _model_in(arguments or [])) is not None:
        if task or every or tries:
            raise typer.BadParameter("--task, --all and --try need a task to ask, found a model; leave out one of them")
        _tell_contract(model, [a for a in arguments or [] if a != model], as_json=as_json)
        return
    rows = _rows(arguments or [], task or [], tries or [], every=every)
    single = len(rows) == 1
    if single:
        _check(rows[0], allow_code=allow_code)  # a typo should not cost seconds
    count = f"{len(rows)} x " * (not single)
    console = new_console(quiet=as_json)
    console.print(f"{count}{counted(questions, 'question')}: loading the libraries and the model.")
    quieten_libraries()
    from agilerl.training.preflight import Bases, event_of

    width, bases = min(_NAME, max(len(row.name) for row in rows)), Bases()
    for number, row in enumerate(rows):
        try:
            _measure(row, bases, questions, samples, allow_code=allow_code)
        except AgileRLError as error:
            if single:
                raise
            row.error = error
        loading_done()
        if not number:
            console.print(f"{'':<{width}}{''.join(f'{name:>8}' for name in _COLUMNS)}  learning starts")
        if not as_json:
            tell_line(row.line(width))
    if as_json:
        print(json.dumps({"rows": [row.document() for row in rows]}, indent=1, allow_nan=False))
        return
    tell_line("differ: share of questions whose answers earn different rewards: those teach")
    for row in rows:
        if row.error is not None and row.line(width).endswith("..."):
            tell_line(f"{row.name}: {row.error}")
    if single and rows[0].probe is not None:
        from agilerl.cli.progress import sample_lines

        for line in sample_lines(event_of(rows[0].probe, rows[0].advice)):
            tell_line(line)
        sentences = [f"A run would stop here: {rows[0].advice}"] if rows[0].advice else rows[0].hints
        for line in sentences:
            tell_line(f"\n{line}")


def _model_in(arguments: Sequence[str]) -> str | None:
    """Return the argument that names a model: one that is neither a setting nor a manifest."""
    names = [name for name in manifests_in(arguments) if Path(name).suffix not in (".yaml", ".yml")]
    models = [name for name in names if not is_file(name) or name.endswith(".gguf")]
    return models[0] if len(models) == 1 else None


def _tell_contract(model: str, settings: Sequence[str], *, as_json: bool) -> None:
    """Print what a base, its tokenizer and its template keep; exit with code 1 if something does not hold."""
    network = configuration([*settings, f"network.pretrained_model_name_or_path={model}"]).network
    new_console(quiet=as_json).print("Loading the libraries and the model.")
    quieten_libraries()
    from agilerl.runtime import Runtime
    from agilerl.training.contract import lines_of

    lines = lines_of(Runtime.from_pretrained(model, options=network.options, **network.of_tokenizer))
    loading_done()
    if as_json:
        rows = [{"name": line.name, "holds": line.holds, "text": line.text} for line in lines]
        print(json.dumps({"model": model, "contract": rows}, indent=1))
    else:
        for line in lines:
            tell_line(f"{line.name:<10}{'' if line.holds else 'NO: '}{line.text}")
    if not all(line.holds for line in lines):
        sys.exit(1)


def _rows(arguments: Sequence[str], tasks: Sequence[str], tries: Sequence[str], *, every: bool) -> list[_Trial]:
    from agilerl.envs.upstream import known_tasks

    names = [name for name in known_tasks() if name != "composite"] if every else list(tasks)
    rows = []
    for name in names or [""]:
        name = name.removeprefix("reasoning_gym:")
        chosen = [f"environment.task=reasoning_gym:{name}"] if name else []
        for settings in tries or [""]:
            changes = shlex.split(settings)
            # A setting by its last name: answer_format=tags.
            short = " ".join(change[change.rfind(".", 0, change.find("=")) + 1 :] for change in changes)
            rows.append(_Trial(name or ("" if settings else _about(arguments)), short, (*arguments, *chosen, *changes)))
    return rows


def _about(arguments: Sequence[str]) -> str:
    """Return what a configuration is about: its task, environment or file of rows."""
    e = configuration(arguments).environment
    return (e.env_id or (Path(e.dataset[0].path).stem if e.dataset else e.task) or "").rpartition(":")[2]


def _check(row: _Trial, *, allow_code: bool) -> RunConfig:
    from agilerl.envs.upstream import check_task

    config = configuration(row.arguments)
    if not allow_code:
        check_allowed(config)
    check_task(config.environment)
    return config


def _measure(row: _Trial, bases: "Bases", questions: int, samples: int | None, *, allow_code: bool) -> None:
    from agilerl.training.preflight import hints, problem, session_of_one
    from agilerl.training.probe import probe

    config = _check(row, allow_code=allow_code)
    session = session_of_one(config, bases, allow_code=allow_code)
    population = session.population
    try:
        row.probe = probe(population, questions, samples)
        row.hints = hints(population, row.probe)
        if not row.probe.has_signal:
            row.advice = problem(session, row.probe)
    finally:
        # The next row may be of the same base, which must not keep this adapter.
        population.agents[0].clean_up()
        population.task.close()
