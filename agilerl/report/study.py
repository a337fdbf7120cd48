"""A run as an Optuna study, for its dashboard and its plots: each agent a trial."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agilerl.checks.arguments import Location, Name, checked, shown
from agilerl.errors import ConfigError, how_to_install
from agilerl.hpo.lineage import family_tree
from agilerl.report.load import task_of
from agilerl.runs import RunLayout, read_lines, read_run
from agilerl.runs.directory import as_written
from agilerl.runs.strict_json import read_json


@checked
def export_study(run: Location, storage: Name, name: Name | None = None) -> int:
    """Write a run to an Optuna storage (``sqlite:///runs.db``) as a new study; returns the number of trials.

    A trial is an agent: its hyperparameters as they were last, its exams as intermediate values by the tokens that it
    had trained on, the last exam as its value. An agent that left before the end is pruned, one without a finite exam
    failed. User attributes are ``agent``, ``parent``, ``generation``, ``reason`` (why it left), and for the elite
    ``elite`` and ``test``. ``name`` is the study's (None: the folder's). Raises ConfigError if optuna is missing, the
    storage cannot be used, or has a study of that name; and CheckpointError for what is not a run.
    """
    try:
        import optuna
    except ImportError as error:
        raise ConfigError(f"the export needs optuna, which is not installed; {how_to_install('optuna')}") from error
    run = Path(run)
    config = read_run(run)["config"]
    with as_written(run):
        trials = _trials(RunLayout(run))
    name = run.resolve().name if name is None else name
    try:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        study = optuna.create_study(study_name=name, storage=storage, direction="maximize")
    except optuna.exceptions.DuplicatedStudyError as error:
        raise ConfigError(f"{shown(storage)} has a study {shown(name)}; give another name with --name") from error
    except Exception as error:  # what a storage raises depends on its database
        raise ConfigError(
            f"expected the address of an Optuna storage, such as sqlite:///runs.db, found {shown(storage)}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    study.set_user_attr("task", task_of(config))
    study.set_user_attr("algorithm", config["algorithm"]["name"])
    study.add_trials(trials)
    return len(trials)


def _trials(layout: RunLayout) -> list[Any]:
    """Return a trial for each agent of a run."""
    from optuna.trial import TrialState, create_trial

    lives = family_tree(read_lines(layout.lineage))
    summary = read_json(layout.summary) if layout.summary.exists() else {}
    elite = (summary.get("elite") or {}).get("index")
    columns: dict[str, list[Any]] = defaultdict(list)
    for life in lives.values():
        for gene, value in life.values().items():
            columns[gene].append(value)
    spans = {gene: _span(values) for gene, values in columns.items()}
    trials = []
    for life in lives.values():
        # An exam after the same tokens replaces the one before: Optuna takes one value for each step.
        exams = {int(e.tokens.get("trained", e.step)): e.mean for e in life.exams if e.mean is not None}
        attributes: dict[str, Any] = {"agent": life.agent, "parent": life.parent, "generation": life.born}
        attributes |= {"reason": life.reason} if life.died is not None else {}
        if life.agent == elite:
            attributes |= {"elite": True, "test": summary["test"]["elite"]["mean"]}
        state = TrialState.PRUNED if life.died is not None else TrialState.COMPLETE
        trials.append(
            create_trial(
                state=state if exams else TrialState.FAIL,
                value=list(exams.values())[-1] if exams else None,
                params=life.values(),
                distributions={gene: spans[gene] for gene in life.values()},
                user_attrs=attributes,
                intermediate_values=exams,
            )
        )
    return trials


def _span(values: Sequence[Any]) -> Any:
    """Return a distribution that contains all values of a gene: from the least number to the largest, or choices."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if any(isinstance(value, (str, bool)) for value in values):
        # Sorted as texts, because a name and a boolean cannot be compared.
        return CategoricalDistribution(sorted(set(values), key=str))
    low, high = min(values), max(values)
    if all(isinstance(value, int) for value in values):
        return IntDistribution(low, high)
    return FloatDistribution(low, high, log=low > 0 and high > low)
