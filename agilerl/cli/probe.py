"""``agilerl probe``: where would learning start? A table over tasks and settings, before anything is trained."""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agilerl.cli.output import console as new_console
from agilerl.cli.output import one_line, tell_line
from agilerl.cli.process_settings import loading_done
from agilerl.cli.running import configuration, quieten_libraries
from agilerl.config.named_files import check_allowed
from agilerl.config.run import RunConfig
from agilerl.errors import AgileRLError

if TYPE_CHECKING:
    from agilerl.training.preflight import Bases
    from agilerl.training.probe import Probe

_WIDTH, _NAME = 80, 30
_COLUMNS = ("reward", "differ", "cut", "tokens")


@dataclass(frozen=True)
class _Row:
    """Settings to try."""

    task: str
    settings: str
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.task, self.settings)))


@dataclass(frozen=True)
class _Result:
    """What was measured of a row, or the error."""

    row: _Row
    found: "Probe | None" = None
    advice: str = ""
    error: AgileRLError | None = None

    def document(self) -> dict[str, Any]:
        head = {"task": self.row.task, "settings": self.row.settings}
        if self.found is None:
            return {**head, "reason": str(self.error)}
        return {**head, **self.found.document(), **({"advice": self.advice} if self.advice else {})}


def run_probe(
    arguments: Sequence[str],
    *,
    tasks: Sequence[str],
    every: bool,
    tries: Sequence[str],
    questions: int,
    samples: int | None,
    allow_code: bool,
    as_json: bool,
) -> None:
    """Sample and show; see ``agilerl probe --help``."""
    rows = _rows(arguments, tasks, tries, every=every)
    single = len(rows) == 1
    if single:
        _checked(rows[0], allow_code=allow_code)  # a typo should not cost seconds
    console = new_console(quiet=as_json)
    console.print(f"{len(rows)} x {questions} questions: loading the libraries and the model.".removeprefix("1 x "))
    quieten_libraries()
    results = []
    for number, result in enumerate(_results(rows, questions, samples, allow_code=allow_code)):
        if single and result.error is not None:
            raise result.error
        results.append(result)
        if not as_json:
            width = min(_NAME, max(len(row.name) for row in rows))
            if not number:
                tell_line(f"{'':<{width}}{''.join(f'{name:>8}' for name in _COLUMNS)}  learning starts")
            tell_line(_line(result, width))
    if as_json:
        print(json.dumps({"rows": [result.document() for result in results]}, indent=1, allow_nan=False))
        return
    tell_line("differ: share of questions whose answers earn different rewards: those teach")
    for result in results:
        if result.error is not None and _line(result, width).endswith("..."):
            tell_line(f"{result.row.name}: {result.error}")
    if single:
        _show(results[0])


def _rows(arguments: Sequence[str], tasks: Sequence[str], tries: Sequence[str], *, every: bool) -> list[_Row]:
    from agilerl.envs.upstream import known_tasks

    names = [name for name in known_tasks() if name != "composite"] if every else list(tasks)
    rows = []
    for name in names or [""]:
        own = [f"environment.task=reasoning_gym:{name.removeprefix('reasoning_gym:')}"] if name else []
        for settings in tries or [""]:
            task = name.removeprefix("reasoning_gym:") or ("" if settings else _about(arguments))
            given = shlex.split(settings)
            short = " ".join(one[one.rfind(".", 0, one.find("=")) + 1 :] for one in given)
            rows.append(_Row(task, short, (*arguments, *own, *given)))
    return rows


def _about(arguments: Sequence[str]) -> str:
    """Return what a configuration is about: its task, environment or file of rows."""
    e = configuration(arguments).environment
    return (e.env_id or (Path(e.dataset[0].path).stem if e.dataset else e.task) or "").rpartition(":")[2]


def _checked(row: _Row, *, allow_code: bool) -> RunConfig:
    from agilerl.envs.upstream import check_task

    config = configuration(row.arguments)
    if not allow_code:
        check_allowed(config)
    check_task(config)
    return config


def _results(rows: Sequence[_Row], questions: int, samples: int | None, *, allow_code: bool) -> Iterator[_Result]:
    from agilerl.training.preflight import Bases

    bases = Bases()
    for row in rows:
        try:
            yield _measured(row, bases, questions, samples, allow_code=allow_code)
        except AgileRLError as error:
            yield _Result(row, error=error)
        loading_done()


def _measured(row: _Row, bases: "Bases", questions: int, samples: int | None, *, allow_code: bool) -> _Result:
    from agilerl.training.preflight import population_of_one, problem
    from agilerl.training.probe import probe

    config = _checked(row, allow_code=allow_code)
    population = population_of_one(config, bases, allow_code=allow_code)
    try:
        found = probe(population, questions, samples)
        advice = "" if found.has_signal else problem(config, population, found)
    finally:
        population.agents[0].clean_up()
        population.task.close()
    return _Result(row, found, advice)


def _line(result: _Result, width: int) -> str:
    name = one_line(result.row.name, width)
    if result.found is None:
        return f"{name:<{width}}  {one_line(str(result.error), _WIDTH - width - 3)}"
    found = result.found
    numbers = (f"{found.reward:.3f}", f"{found.differ:.0%}", f"{found.cut:.0%}", f"{found.length:.0f}")
    return f"{name:<{width}}{''.join(f'{number:>8}' for number in numbers)}  {found.start}"


def _show(result: _Result) -> None:
    from agilerl.cli.progress import sample_lines
    from agilerl.training.preflight import event_of

    assert result.found is not None
    for line in sample_lines(event_of(result.found, result.advice)):
        tell_line(line)
    if result.advice:
        tell_line(f"\nA run would stop here: {result.advice}")
