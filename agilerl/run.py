"""A run as an object: ``agilerl.train(...)`` starts one and shows it, ``agilerl.Run(path)`` opens one.

In a notebook the progress is a table that updates in place, in a terminal what ``agilerl train`` shows. The run
directory, the settings and their checks are those of the command line, so either continues what the other began.
"""

import html
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from io import StringIO
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from rich import get_console

from agilerl.checks.arguments import Count, Location, Name, NotNegative, Seed, Whole, checked, described, nearest, shown
from agilerl.errors import CheckpointError, ConfigError, plain_warnings
from agilerl.gone import keyword_instead

if TYPE_CHECKING:
    from agilerl.algorithms import LLMAlgorithm
    from agilerl.hpo.fitness import Fitness
    from agilerl.runs.directory import RunLayout
    from agilerl.training.events import Event
    from agilerl.training.run import Started
    from agilerl.training.setup import Session

_SETTINGS = {
    "model": "network.pretrained_model_name_or_path",
    "population": "training.pop_size",
    "max_tokens": "training.max_tokens",
    "max_output_tokens": "algorithm.max_output_tokens",
    "seed": "training.seed",
}
"""Arguments of ``train`` that are settings with a short name."""
SECTIONS = ("environment", "training", "network", "mutation", "selection_strategy", "teacher", "distributed")


@checked
@plain_warnings()
def train(
    *,
    model: Name | None = None,
    task: Name | None = None,
    dataset: Any = None,
    reward: Any = None,
    algorithm: Name | Mapping[str, Any] | None = None,
    population: Count | None = None,
    evolve: Sequence[str] | Mapping[str, Mapping[str, Any]] | None = None,
    max_tokens: Count | None = None,
    max_output_tokens: Count | None = None,
    seed: Seed | None = None,
    manifest: Location | None = None,
    out: Location | None = None,
    display: bool = True,
    allow_code: bool = False,
    **sections: Mapping[str, Any],
) -> "Run":
    """Train a population to the end of its budget, show the progress, and return the run.

    Without arguments it is the embedded default of ``agilerl train``; ``manifest`` is another start.

    Args:
        model: ``embedded``, a local folder, or a name on the Hugging Face hub.
        task: a task of reasoning_gym (``reasoning_gym:gcd``) or a text environment (``agilerl/GuessTheNumber-v0``).
        dataset: rows of your own in place of a task: a file, a name on the hub, a list of dicts, a Hugging Face
            ``Dataset``, a pandas ``DataFrame``; or as in a manifest, ``{"path": ..., "columns": {"question": ...}}``.
            Rows in memory are written to ``OUT.rows.jsonl``, so that the run can be resumed.
        reward: a function ``f(completion, answer, question) -> float`` or any other grader, the name of one
            (``accuracy``), or a list of these, whose scores are added.
        algorithm: a name, or a section with ``name`` and hyperparameters.
        population: number of agents.
        evolve: names of the hyperparameters that evolve, or their ranges ``{"lr": {"min": 1e-5, "max": 1e-3}}``;
            an empty list: none does, and nothing is selected.
        max_tokens: budget of all agents together: tokens sampled, trained on and spent in exams.
        max_output_tokens: longest completion, in training and in exams.
        seed: seed of the run.
        manifest: a YAML file whose settings all others here override.
        out: the run directory; by default ``runs/<task>-<time>``.
        display: show the plan, the progress and the result.
        allow_code: run Python that the manifest names. Objects that are passed here need no permission.
        sections: any other setting, by section: ``training={"evo_steps": 4}``.

    Raises ConfigError or EnvError for every wrong setting before training begins. If it is interrupted, the run can be
    resumed: ``Run(out).resume()``.
    """
    # tqdm warns about bars that this package does not show.
    if display and get_console().is_jupyter:
        warnings.filterwarnings("ignore", message="IProgress not found")
    from agilerl.config.manifest import load_manifest
    from agilerl.training.given import in_manifest

    settings: dict[str, Any] = {}
    for section, values in sections.items():
        if section not in SECTIONS:
            hint = keyword_instead(section) or _meant(section, values)
            raise ConfigError(f"train() has no argument {section!r}; {hint}")
        if not isinstance(values, Mapping):
            raise ConfigError(f"{section}: expected a mapping of settings, found {described(values)}")
        for name, value in values.items():
            settings[f"{section}.{name}"] = str(value) if isinstance(value, Path) else value
    # An id of gymnasium has its namespace before a slash.
    if task is not None and "/" in task and not task.startswith("reasoning_gym:"):
        settings |= {"environment.env_type": "multiturn", "environment.env_id": task}
    elif task is not None:
        settings["environment.task"] = task
    hyperparameters = {"name": algorithm} if isinstance(algorithm, str) else algorithm or {}
    settings |= {f"algorithm.{name}": value for name, value in hyperparameters.items()}
    given = {"model": model, "population": population, "max_tokens": max_tokens, "seed": seed}
    given["max_output_tokens"] = max_output_tokens
    settings |= {_SETTINGS[name]: value for name, value in given.items() if value is not None}
    if evolve is not None:
        genes = evolve if isinstance(evolve, Mapping) else {name: {} for name in evolve}
        settings["mutation.rl_hp_selection"] = dict(genes)
        if not evolve:
            settings["selection_strategy.name"] = "none"
    if max_tokens is not None:  # a sample has at least one token, so these end no run before
        settings.setdefault("training.max_steps", max_tokens)
    environment, rows = in_manifest(dataset, reward, sections.get("environment"))
    settings |= {f"environment.{name}": value for name, value in environment.items()}

    config = load_manifest(None if manifest is None else Path(manifest), list(settings.items()))
    from agilerl.training.run import start

    with start(config, None if out is None else Path(out), rows, allow_code=allow_code) as run:
        _follow(run, display)
    return Run(run.root)


_NAMES = tuple(name for name in inspect.signature(train).parameters if name != "sections")


def _meant(name: str, value: Any) -> str:
    """Return a hint for an argument that ``train`` does not have: what to write in its place."""
    from agilerl.config.run import addresses_of

    if name == "loss":
        return "a custom loss is for agents in a loop of your own: docs/losses.md"
    if name in ("grader", "graders"):
        return "a grader, or a list of them, is reward=[...]"
    arguments = {address: argument for argument, address in _SETTINGS.items()}
    written = [
        f"{arguments[address]}={shown(value)}" if address in arguments else f"{section}={{{name!r}: {shown(value)}}}"
        for address in addresses_of(name)
        for section in [address.partition(".")[0]]
    ]
    return f"give {' or '.join(written)}" if written else nearest(name, [*_NAMES, *SECTIONS])


class Run:
    """A run directory, finished or not: its results, its records, its elite.

    What it shows is read from the files when it is asked for, so a run that another process is training can be
    followed. Raises CheckpointError if there is no run.
    """

    @checked
    def __init__(self, path: Location) -> None:
        from agilerl.runs.directory import RunLayout, read_run

        self.path = Path(path)
        self._files = RunLayout(self.path)
        self._answering: LLMAlgorithm | None = None
        self.config: dict[str, Any] = read_run(self.path)["config"]
        """All settings, section by section."""

    @property
    def _layout(self) -> "RunLayout":
        """The places of the run's files; raises CheckpointError if the run was deleted meanwhile."""
        if not self._files.run_json.is_file():
            raise CheckpointError(f"the run in {shown(str(self.path))} no longer exists: run.json is missing")
        return self._files

    @property
    def is_finished(self) -> bool:
        """Whether it has a result. Raises CheckpointError if parts of the result are missing."""
        return self._layout.is_finished

    @property
    def summary(self) -> dict[str, Any]:
        """The content of ``summary.json``; empty until the run is finished."""
        from agilerl.runs.strict_json import read_json

        return read_json(self._layout.summary) if self._layout.summary.exists() else {}

    @property
    def test(self) -> "dict[str, Fitness]":
        """Results on questions that neither training nor selection used.

        ``base``, ``median_first_generation`` and ``elite``, as far as they are known, each with ``mean``, ``stderr``
        (its standard error) and ``n``.
        """
        from agilerl.report.load import load_run

        tests = load_run(self.path).tests
        return {who: tests[who].score for who in ("base", "median_first_generation", "elite") if who in tests}

    @property
    def adapter(self) -> Path:
        """The folder of the elite: a PEFT adapter with its tokenizer and a model card."""
        if not self._layout.elite.is_dir():
            why = "it has no elite" if self.is_finished else "it is not finished; resume() it"
            raise CheckpointError(f"the run {shown(str(self.path))} has no adapter to give: {why}")
        return self._layout.elite

    @property
    def elite(self) -> "LLMAlgorithm":
        """The best agent, newly loaded with its base: ``run.elite.generate("2 + 2")``."""
        from agilerl.training.saved import load

        return load(self.adapter)

    @checked
    def generate(
        self,
        prompts: str | Sequence[Any],
        *,
        max_new_tokens: Count | None = None,
        temperature: NotNegative = 0.0,
        seed: Whole = 0,
    ) -> str | list[str]:
        """Return the elite's answer to a text or conversation, or its answers to a list: ``LLMAlgorithm.generate``.

        The elite is loaded at the first call. Raises CheckpointError if the run has none, or none yet.
        """
        if self._answering is None:
            self._answering = self.elite
        return self._answering.generate(prompts, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)

    @property
    def lineage(self) -> list[dict[str, Any]]:
        """The lines of ``lineage.jsonl``: births, mutations, exams, deaths and the reasons for them."""
        from agilerl.runs.journal import read_lines

        return list(read_lines(self._layout.lineage))

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The lines of ``metrics.jsonl``: ``pandas.DataFrame(run.metrics)`` makes a table of them."""
        from agilerl.runs.journal import read_lines

        return list(read_lines(self._layout.metrics))

    def schedule(self) -> dict[str, Any]:
        """Return the hyperparameters that the elite was trained with, against tokens: ``agilerl schedule``."""
        from agilerl.hpo.schedule import hyperparameter_schedule

        elite = self.summary.get("elite")
        if elite is None:
            raise CheckpointError(f"the run {shown(str(self.path))} has no elite to take a schedule from")
        return hyperparameter_schedule(self.lineage, elite["index"])

    @checked
    def report(self, out: Location | None = None) -> Path:
        """Write the report to ``out``, by default ``report.html`` in the run directory, and return its path."""
        from agilerl.report import build_report

        return build_report([self.path], self._layout.report if out is None else out)

    @checked
    @plain_warnings()
    def resume(self, *, reward: Any = None, display: bool = True, allow_code: bool = False) -> "Run":
        """Train on from the newest intact checkpoint, to the same bits on a CPU; a finished run is returned as it is.

        ``reward``: the functions that ``train`` was given, if the run began in another process.
        """
        if self.is_finished:
            return self
        from agilerl.safety.custom_code import give
        from agilerl.training.given import listed
        from agilerl.training.run import reopen

        if reward is not None:
            graders = self.config.get("environment", {}).get("graders") or []
            give([grader["name"] for grader in graders], listed(reward))
        with reopen(self.path, report=print if display else lambda _: None, allow_code=allow_code) as run:
            _follow(run, display)
        return self

    def __repr__(self) -> str:
        """Return one line: where, what, and how it ended."""
        results = ", ".join(f"{who} {score.mean:.3f} ± {score.stderr:.3f}" for who, score in self.test.items())
        return f"Run({str(self.path)!r}: {results or 'not finished'})"

    def _repr_html_(self) -> str:
        """Return the results as a table, for notebooks."""
        rows = [[who, f"{score.mean:.3f}", f"{score.stderr:.3f}", str(score.n)] for who, score in self.test.items()]
        return _html_table(["test", "mean", "stderr", "n"], rows) + f"<code>{html.escape(str(self.path))}</code>"


# -- following a run ----------------------------------------------------------------------------------------------


def _follow(run: "Started", display: bool) -> None:
    """Carry out a run, showing it where a person is looking."""
    from agilerl.safety.custom_code import contained

    try:
        # Closed even if a display fails or is interrupted: the run's lock and trackers are released at once.
        with closing(run.events), contained():
            if not display:
                for _ in run.events:
                    pass
            elif get_console().is_jupyter:
                _show_in_notebook(run.events, run.session)
            else:
                from agilerl.cli.output import console
                from agilerl.cli.progress import print_plan, watch

                print_plan(run.session, run.root, console())
                watch(run.events, run.session, console())
    except KeyboardInterrupt:
        print(f"interrupted; continue with agilerl.Run({str(run.root)!r}).resume()")
        raise


def _show_in_notebook(events: "Iterator[Event]", session: "Session") -> None:
    """Show a table that is updated in place, at most four times a second."""
    import IPython.display
    from rich.console import Console, Group

    from agilerl.cli.progress import View

    page: Any = IPython.display.HTML
    display: Any = IPython.display.display

    def drawn() -> Any:
        screen = Console(file=StringIO(), record=True, width=120, force_jupyter=False)
        screen.print(Group(view.table(), *view.notes, view.bars))
        return page(screen.export_html(inline_styles=True, code_format="<pre>{code}</pre>"))

    view, shown_at = View(session, Console(quiet=True)), 0.0
    handle: Any = display(page("<pre>start</pre>"), display_id=True)
    for event in events:
        view.show(event)
        if monotonic() - shown_at > 0.25:
            handle.update(drawn())
            shown_at = monotonic()
    handle.update(drawn())


def _html_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return an HTML table; what a run says is escaped."""
    cells = [f"<tr>{''.join(f'<th>{html.escape(name)}</th>' for name in head)}</tr>"]
    cells += [f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows]
    return f"<table>{''.join(cells)}</table>"
