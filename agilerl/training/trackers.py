"""Trackers: metrics and lineage of a run in Weights & Biases, TensorBoard, Trackio, MLflow or a class of the user's.

They follow the events of a run after its own writer, under the names of docs/trackers.md. The trackers of accelerate
talk to the libraries; a library is imported when a run that names it begins. A tracker changes no result, and one that
fails is switched off. A resumed run continues in the library's run of that name or id.
"""

import json
import math
import os
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from statistics import fmean, pstdev
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict, Field

from agilerl.checks.arguments import checked, nearest, shown
from agilerl.config.training import TRACKERS
from agilerl.errors import CheckpointError, ConfigError, how_to_install
from agilerl.report.life import sentence
from agilerl.report.load import flatten
from agilerl.runs.atomic import write_json
from agilerl.runs.directory import RunLayout
from agilerl.runs.strict_json import read_json
from agilerl.safety.custom_code import contained, load_code, names_code
from agilerl.training.events import Event, Evolved, ExamDone, HeldOutTest, IterationDone, PreflightDone, RunStarted
from agilerl.training.records import lineage_lines

PROJECT = "agilerl"
"""The project, or experiment, of runs that name none."""


@runtime_checkable
class Tracker(Protocol):
    """A tracker of the user's own; accelerate's ``GeneralTracker`` is one as well.

    ``start()``, ``store_init_configuration(values)`` and ``finish()`` are called if the class has them: once at the
    beginning, then with the settings of the run by the names of the command line, and once at the end.
    """

    def log(self, values: dict[str, float | str], step: int) -> None:
        """Take values by name at an iteration; iterations never decrease, and may come several times."""


Wanted = Mapping[str, Mapping[str, Any] | Tracker] | Sequence[str | Tracker] | str
"""Trackers by name, each with the keywords of its library's start; or names, or one, and the user's own trackers."""


# -- before a run -----------------------------------------------------------------------------------------------------


@checked
def check_trackers(wanted: Wanted, own: Iterable[str] = ()) -> None:
    """Raise ConfigError for an unknown tracker, and one whose library is missing; imports none of them.

    ``own`` are the names of custom code among them.
    """
    for name in sorted({name for name, tracker in _named(wanted).items() if isinstance(tracker, Mapping)} - set(own)):
        from accelerate.utils import imports

        if name not in TRACKERS:
            raise ConfigError(
                f"expected one of the trackers {', '.join(TRACKERS)}, or an object with log(values, step), found "
                f"{shown(name)}; {nearest(name, TRACKERS)}"
            )
        if not getattr(imports, f"is_{name}_available")():
            raise ConfigError(f"the tracker {name} needs its library, which is not installed: {how_to_install(name)}")


def load_trackers(names: Mapping[str, Any], *, allow_code: bool) -> dict[str, Callable[..., Tracker]]:
    """Return the classes of the user's own trackers, by their names in ``training.trackers``, and check the others.

    Raises ConfigError if code is not allowed or cannot be loaded, and if a library is missing.
    """
    custom = [name for name in names if names_code(name)]
    check_trackers(names, custom)
    return {name: load_code("training.trackers", name, allowed=allow_code) for name in custom}


def _named(wanted: Wanted) -> dict[str, Any]:
    """Return the settings of trackers, or trackers that exist already, by name."""
    if isinstance(wanted, Mapping):
        return dict(wanted)
    named: dict[str, Any] = {}
    for one in [wanted] if isinstance(wanted, str) else wanted:
        name = one if isinstance(one, str) else type(one).__name__
        if name in named:
            raise ConfigError(f"expected each tracker once, found {shown(name)} twice; give one class to each")
        named[name] = {} if isinstance(one, str) else one
    return named


# -- what is sent about an event, by stable names ---------------------------------------------------------------------


def values_of(event: Event) -> dict[str, float | str]:
    """Return what trackers are sent about an event, by name; empty for nothing."""
    values: dict[str, Any] = {}
    match event:
        case RunStarted():
            values = {f"agent/{i}/hp/{gene}": v for i, genes in event.founders.items() for gene, v in genes.items()}
        case PreflightDone():
            values = dict(event.metrics)
        case IterationDone():
            values = _of_agents({index: event.metrics[index] for index in event.outcomes}) | _training(event)
        case ExamDone():
            values = _of_agents(event.metrics) | _exam(event)
        case Evolved():
            values = _population(event.metrics) | _lineage(lineage_lines(event))
        case HeldOutTest():
            values = {f"test/{event.who}/{name.removeprefix('eval/')}": v for name, v in event.metrics.items()}
    return {n: v for n, v in values.items() if isinstance(v, str) or (isinstance(v, int | float) and math.isfinite(v))}


def _of_agents(metrics: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"agent/{index}/{name}": value for index, values in metrics.items() for name, value in values.items()}


def _training(event: IterationDone) -> dict[str, Any]:
    failures = {f"agent/{index}/outcome": outcome for index, outcome in event.outcomes.items() if outcome != "ok"}
    values: dict[str, float] = {"generation": event.generation, "agents": len(event.outcomes), "failed": len(failures)}
    for name in ("reward", "loss"):
        if finite := [m[name] for m in event.metrics.values() if math.isfinite(m.get(name, math.nan))]:
            values[f"{name}/mean"] = fmean(finite)
    return failures | {f"population/{name}": value for name, value in values.items()}


def _exam(event: ExamDone) -> dict[str, Any]:
    means = [fitness.mean for fitness in event.fitness.values() if math.isfinite(fitness.mean)]
    values = {"best": max(means), "mean": fmean(means), "std": pstdev(means)} if means else {}
    return {f"population/fitness/{name}": value for name, value in values.items()}


def _population(metrics: Mapping[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = {"population/time/evolve": metrics["time/evolve"]}
    for name, value in metrics.items():
        if name.startswith("evo/hp/"):
            gene, _, agent = name.removeprefix("evo/hp/").rpartition("/")
            values[f"agent/{agent}/hp/{gene}"] = value
        elif name.startswith("evo/") and not name.startswith(("evo/generation", "evo/fitness/")):  # sent before
            values[name.replace("evo/", "population/", 1)] = value
    return values


def _lineage(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return who was born of whom, who is the elite, how many were changed, and all of it in words."""
    lines = list(records)
    values: dict[str, Any] = {"population/mutations": sum(line["event"] == "mutation" for line in lines)}
    words = []
    for line in lines:
        agent = line["agent"]
        if line["event"] == "birth":
            values[f"agent/{agent}/parent"] = line["parent"]
        if line["event"] == "elite":
            values["population/elite"] = agent
            words.append(f"elite {agent}")
        elif line["event"] != "fitness":
            words.append(f"agent {agent} {sentence(line)}")
    return values | ({"lineage": "; ".join(words)} if words else {})


# -- a run that is followed -------------------------------------------------------------------------------------------


_PLAIN = (bool, int, float, str)
"""What a library takes as a setting; others get there as JSON."""


class _Identity(BaseModel):
    """What a tracker's library knows the run by; runs of earlier versions noted more."""

    model_config = ConfigDict(extra="ignore", strict=True)
    id: Annotated[str, Field(max_length=300)] = ""


class _Identities(BaseModel):
    """The file trackers.json."""

    model_config = ConfigDict(extra="forbid", strict=True)
    trackers: dict[str, _Identity]


class Trackers:
    """The trackers of a run that has begun; call it with each event, and ``finish`` at the end."""

    @checked
    def __init__(
        self,
        wanted: Wanted,
        run: RunLayout | None,
        settings: Mapping[str, Any],
        *,
        own: Mapping[str, Callable[..., Tracker]] | None = None,
        resumed_at: int | None = None,
    ) -> None:
        """Start the trackers, those of a resumed run where they were.

        ``run`` is None for a loop without a run directory, which is not resumed; ``settings`` are those of the run,
        nested as in a manifest; ``own`` are the classes behind the names of custom code; ``resumed_at`` is the
        iteration that a run is resumed after, None for one that begins. Raises ConfigError if a tracker of a run that
        begins cannot be started; one of a resumed run is left out, with a warning.
        """
        self._finished, self._run, self._resumed_at, self._last = False, run, resumed_at, resumed_at or 0
        self._trackers: dict[str, Any] = {}
        self._identities = {} if run is None else _read(run)
        flattened = {name: v for name, v in flatten(settings) if not (v is None or isinstance(v, Mapping))}
        values = {name: value if isinstance(value, _PLAIN) else json.dumps(value) for name, value in flattened.items()}
        values |= {} if run is None else {"run": str(run.root)}
        for name, tracker in _named(wanted).items():
            try:
                with contained():
                    self._start(name, tracker, (own or {}).get(name), values)
            except Exception as error:
                if resumed_at is not None:
                    self._trackers.pop(name, None)
                    _warn_of(name, error)
                    continue
                self.finish()
                raise ConfigError(
                    f"the tracker {shown(name)} cannot be started: {type(error).__name__}: {error}; fix that or "
                    "remove the tracker"
                ) from error
        if self._identities and run is not None:
            identities = _Identities(trackers=self._identities)
            write_json(run.trackers, identities.model_dump())

    def __call__(self, event: Event) -> None:
        """Send what an event says."""
        if self._finished:
            raise ConfigError("these trackers were finished, and take nothing more; make new ones")
        self._last = getattr(event, "iteration", self._last)
        if values := values_of(event):
            for name, tracker in list(self._trackers.items()):
                self._succeeds(name, tracker.log, *_as_taken(name, values, self._last))

    def finish(self) -> None:
        """End all trackers. A second call does nothing."""
        if self._finished:
            return
        self._finished = True
        for name, tracker in list(self._trackers.items()):
            if callable(finish := getattr(tracker, "finish", None)):
                self._succeeds(name, finish)
        self._trackers.clear()

    def _start(self, name: str, tracker: Any, own: Callable[..., Tracker] | None, values: dict[str, Any]) -> None:
        begins, identity = name not in self._identities, self._identities.get(name, _Identity()).id
        if isinstance(tracker, Mapping):
            if own is not None:
                tracker = own(**tracker)
            else:
                tracker, identity = _library(name, dict(tracker), self._run, identity, self._resumed_at)
        if not callable(getattr(tracker, "log", None)):
            raise ConfigError(f"expected a class with a method log(values, step), found {shown(tracker)}")
        if hasattr(tracker, "main_process_only"):
            _prepare_accelerate()
            tracker.main_process_only = False  # this process is the one that writes, whatever its rank
        if begin := getattr(tracker, "start", None):
            begin()
        if name == "wandb":
            # It drops values of a step that it has passed; rows with the iteration as their axis come in any order.
            tracker.tracker.define_metric("iteration")
            tracker.tracker.define_metric("*", step_metric="iteration")
        elif name == "mlflow":
            identity = tracker.tracker.info.run_id
        self._trackers[name] = tracker
        if begins and callable(store := getattr(tracker, "store_init_configuration", None)):
            store(values)
        self._identities[name] = _Identity(id=identity)

    def _succeeds(self, name: str, call: Callable[..., object], *arguments: Any) -> None:
        """Call a tracker, which is switched off if that fails."""
        try:
            with contained():
                call(*arguments)
        except Exception as error:
            del self._trackers[name]
            _warn_of(name, error)


def _as_taken(name: str, values: dict[str, float | str], step: int) -> tuple[dict[str, float | str], int | None]:
    """Return values and step as a library takes them."""
    if name == "wandb":
        return {**values, "iteration": step}, None
    if name == "mlflow":  # its metrics are numbers
        return {n: value for n, value in values.items() if not isinstance(value, str)}, step
    return dict(values), step


def _warn_of(name: str, error: Exception) -> None:
    warnings.warn(
        f"the tracker {shown(name)} failed and is switched off; the run continues without it "
        f"({type(error).__name__}: {error})",
        stacklevel=2,
    )


def _read(run: RunLayout) -> dict[str, _Identity]:
    if not run.trackers.exists():
        return {}
    try:
        return _Identities.model_validate(read_json(run.trackers, _Identities)).trackers
    except CheckpointError as error:
        warnings.warn(f"trackers begin new runs, because {run.trackers} is damaged: {error}", stacklevel=2)
        return {}


# -- accelerate's trackers --------------------------------------------------------------------------------------------


def _prepare_accelerate() -> None:
    """Create accelerate's state, without which its trackers raise; not as one of several processes, for one writes."""
    from accelerate import PartialState

    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    # With these, PartialState would start torch.distributed and wait for processes that do not call it.
    kept = {name: os.environ.pop(name) for name in launched if name in os.environ}
    try:
        PartialState()
    finally:
        os.environ.update(kept)


def _library(
    name: str, settings: dict[str, Any], run: RunLayout | None, identity: str, at: int | None
) -> tuple[Any, str]:
    """Return the tracker of accelerate, and what its library knows the run by; ``settings`` may change.

    ``identity`` is that of a run to be continued, "" for a new one; ``at`` is the iteration to continue after.
    """
    from accelerate import tracking

    root = None if run is None else run.root.absolute()
    if name == "tensorboard":
        folder = settings.pop("logging_dir", None)
        title = f"{datetime.now():%Y%m%d-%H%M%S}" if root is None else root.name
        if folder is None:
            folder, title = ("tensorboard_logs", title) if root is None else (root, "tensorboard")
        # What a crashed process sent after the checkpoint comes again, before the first iteration all of it.
        purge = {} if at is None else {"purge_step": at + 1 if at else 0}
        return tracking.TensorBoardTracker(title, folder, **{**purge, **settings}), ""
    if name == "wandb":
        return _wandb(settings, root, identity)
    project = settings.pop("project", PROJECT)
    if name == "mlflow":
        title = settings.pop("name", None if root is None else root.name)
        resumed = {"run_id": identity} if identity else {}
        return tracking.MLflowTracker(project, **{"run_name": title, **resumed, **settings}), identity
    # With resume=allow a name is the run's identity: a second folder of this name must not continue the first run.
    unique = f"{'run' if root is None else root.name}-{uuid.uuid4().hex[:6]}"
    title = identity or settings.get("name") or "".join(c if c.isalnum() or c in "._-" else "_" for c in unique)
    return tracking.TrackioTracker(project, **{"resume": "allow", **settings, "name": title}), title


def _wandb(settings: dict[str, Any], root: Path | None, identity: str) -> tuple[Any, str]:
    from accelerate.tracking import WandBTracker

    values = {"id": settings.get("id") or uuid.uuid4().hex[:12]}
    if root is not None:
        if (root / "wandb" / "settings").exists():
            raise ConfigError(
                f"{root / 'wandb' / 'settings'} may choose the server that your key is sent to, and W&B reads it "
                "in its folder; remove it"
            )
        values |= {"dir": str(root), "name": os.environ.get("WANDB_NAME", root.name)}
    values |= settings | ({"id": identity, "resume": "allow"} if identity else {})
    project = values.pop("project", os.environ.get("WANDB_PROJECT", PROJECT))
    given = values.pop("settings", {})
    # Its own record of the terminal would consist of the live table.
    values["settings"] = {"console": "off", **given} if isinstance(given, Mapping) else given
    return WandBTracker(project, **values), values["id"]
