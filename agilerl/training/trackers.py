"""Trackers: metrics and lineage of a run in Weights & Biases, TensorBoard, Trackio, MLflow or a class of the user's.

They follow the events of a run after its own writer and send what its files say, under the names of docs/trackers.md.
The trackers of accelerate talk to the libraries; a library is imported when a run that names it begins. A tracker
changes no result, and one that fails is switched off.
"""

import csv
import json
import math
import os
import uuid
import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import groupby
from pathlib import Path
from statistics import fmean, pstdev
from time import perf_counter, sleep, time
from typing import Annotated, Any, Protocol, runtime_checkable

from pydantic import Field

from agilerl.checks.arguments import Location, checked, nearest, shown
from agilerl.config.training import TRACKERS
from agilerl.errors import CheckpointError, ConfigError, WriteError, how_to_install
from agilerl.report.life import sentence
from agilerl.report.load import flat
from agilerl.runs.atomic import write_json
from agilerl.runs.directory import RunLayout
from agilerl.runs.journal import read_lines
from agilerl.runs.strict_json import Count, SavedValues, read_json
from agilerl.safety.custom_code import contained, load_code, names_code
from agilerl.training.events import Event
from agilerl.training.records import lineage_lines, metric_lines

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


# -- what is sent: the lines of the run's files, by stable names ------------------------------------------------------


_PLACES = ("", "start", "preflight", "base", "train", "eval", "median_first_generation", "evolution", "elite")
"""The order of what is sent at one iteration."""
_PLACE_OF_A_LINE = ("kind", "generation", "step", "agent", "outcome", "reward_error", "who")
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Point:
    """What is sent about one event."""

    step: int
    place: int
    """Index into ``_PLACES``."""
    values: dict[str, float | str]


def point_of(event: Event, last: int = 0) -> Point | None:
    """Return what trackers are sent about an event, None for nothing; ``last`` is the iteration of the one before."""
    return _point(list(metric_lines(event)), list(lineage_lines(event)), last)


def points_of(run: RunLayout) -> Iterator[Point]:
    """Yield what trackers were sent, or would have been, about the events in a run's files."""
    founders: list[Record] = []
    by_generation: defaultdict[int, list[Record]] = defaultdict(list)
    for line in read_lines(run.lineage):
        is_founder = line["event"] == "birth" and line["parent"] is None
        (founders if is_founder else by_generation[line["generation"]]).append(line)
    points, last = [_point([], founders, 0)], 0
    lines = read_lines(run.metrics)
    # The lines of one event stand together, and differ in the agent alone.
    for (kind, _, step), group in groupby(lines, lambda line: (line["kind"], line.get("who"), line.get("step"))):
        last = last if step is None else step
        metrics = list(group)
        points.append(_point(metrics, by_generation[metrics[0]["generation"]] if kind == "evolution" else [], last))
    yield from (point for point in points if point is not None)


def _point(metrics: Sequence[Record], lineage: Sequence[Record], last: int) -> Point | None:
    """Return what is sent about the lines of an event, those of metrics.jsonl and those of lineage.jsonl."""
    if not metrics:
        # Founders: the only event with lines in the lineage and none in the metrics.
        genes = {f"agent/{b['agent']}/hp/{gene}": v for b in lineage for gene, v in b["hyperparameters"].items()}
        return Point(0, _PLACES.index("start"), genes) if genes else None
    first = metrics[0]
    kind, values = first["kind"], _metrics(first)
    if kind == "test":
        kind = first["who"]
        values = {f"test/{kind}/{name.removeprefix('eval/')}": value for name, value in values.items()}
    elif kind == "evolution":
        values = _population(values) | _lineage(lineage)
    elif kind in ("train", "eval"):
        values = {f"agent/{line['agent']}/{n}": v for line in metrics for n, v in _metrics(line).items()}
        values |= _exam(metrics) if kind == "eval" else _training(metrics)
    values = {name: value for name, value in values.items() if isinstance(value, str) or math.isfinite(value)}
    return Point(first.get("step", last), _PLACES.index(kind), values)


def _metrics(line: Record) -> dict[str, Any]:
    return {n: v for n, v in line.items() if n not in _PLACE_OF_A_LINE and isinstance(v, int | float | str)}


def _training(lines: Sequence[Record]) -> dict[str, Any]:
    failures = {f"agent/{line['agent']}/outcome": line["outcome"] for line in lines if line["outcome"] != "ok"}
    values = {"generation": lines[0]["generation"], "agents": len(lines), "failed": len(failures)}
    for name in ("reward", "loss"):
        if finite := [line[name] for line in lines if math.isfinite(line.get(name, math.nan))]:
            values[f"{name}/mean"] = fmean(finite)
    return failures | {f"population/{name}": value for name, value in values.items()}


def _exam(lines: Sequence[Record]) -> dict[str, Any]:
    means = [line["eval/reward_mean"] for line in lines if math.isfinite(line["eval/reward_mean"])]
    values = {"best": max(means), "mean": fmean(means), "std": pstdev(means)} if means else {}
    return {f"population/fitness/{name}": value for name, value in values.items()}


def _population(metrics: Record) -> dict[str, Any]:
    values: dict[str, Any] = {"population/time/evolve": metrics["time/evolve"]}
    for name, value in metrics.items():
        if name.startswith("evo/hp/"):
            gene, _, agent = name.removeprefix("evo/hp/").rpartition("/")
            values[f"agent/{agent}/hp/{gene}"] = value
        elif name.startswith("evo/") and not name.startswith(("evo/generation", "evo/fitness/")):  # sent before
            values[name.replace("evo/", "population/", 1)] = value
    return values


def _lineage(lines: Sequence[Record]) -> dict[str, Any]:
    """Return who was born of whom, who is the elite, how many were changed, and all of it in words."""
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


_UNDERWAY = {"trackio": 5.0}
"""Seconds for which a library may keep what it got in the process; after a crash that is sent again."""

_PLAIN = (bool, int, float, str)
"""What a library takes as a setting; others get there as JSON."""


class _Sent(SavedValues):
    """What a tracker has of a run; the last point is (step, place)."""

    id: Annotated[str, Field(max_length=300)] = ""
    """The name that the tracker's library knows the run by."""
    step: Count = 0
    place: Count = 0


class _SentFile(SavedValues):
    trackers: dict[str, _Sent]


@dataclass
class _Followed:
    name: str
    tracker: Any
    sent: _Sent
    recent: deque[tuple[float, _Sent]] = field(default_factory=deque)
    """What it had, and since when, after each point that is not noted yet."""


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
        """Start the trackers, and send them what they lack of a run that is resumed.

        ``run`` is None for a loop without a run directory, which is not resumed; ``settings`` are those of the run,
        nested as in a manifest; ``own`` are the classes behind the names of custom code; ``resumed_at`` is the
        iteration that a run is resumed after, None for one that begins. Raises ConfigError if a tracker of a run that
        begins cannot be started; one of a resumed run is left out, with a warning.
        """
        self._finished = False
        self._run, self._last, self._followed = run, resumed_at or 0, list[_Followed]()
        self._known, self._resumed_at = {} if run is None else _read(run), resumed_at
        given = {name: value for name, value in flat(settings) if not (value is None or isinstance(value, Mapping))}
        values = {name: value if isinstance(value, _PLAIN) else json.dumps(value) for name, value in given.items()}
        values |= {} if run is None else {"run": str(run.root)}
        for name, tracker in _named(wanted).items():
            try:
                with contained():
                    self._start(name, tracker, (own or {}).get(name), values)
            except Exception as error:
                if resumed_at is not None:
                    _warn_of(name, error)
                    continue
                self.finish()
                raise ConfigError(
                    f"the tracker {shown(name)} cannot be started: {type(error).__name__}: {error}; fix that or "
                    "remove the tracker"
                ) from error
        if run is not None and resumed_at is not None and self._followed:
            try:
                for point in points_of(run):
                    self._send(point)
            except (KeyError, TypeError, CheckpointError) as error:  # lines that were changed by hand
                warnings.warn(f"trackers may lack a part of {run.root}: its files have changed ({error})", stacklevel=2)
        self._note()

    def __call__(self, event: Event) -> None:
        """Send what an event says."""
        if self._finished:
            raise ConfigError("these trackers were finished, and take nothing more; make new ones")
        point = point_of(event, self._last)
        if point is not None and self._followed:
            self._last = point.step
            self._send(point)
            self._note()

    def finish(self) -> None:
        """End all trackers; a resumed run continues where they ended. A second call does nothing."""
        if self._finished:
            return
        self._finished = True
        for one in list(self._followed):
            if callable(finish := getattr(one.tracker, "finish", None)):
                self._succeeds(one, finish)
        with suppress(WriteError):  # of the run's own files too, and that is what is raised
            self._note(finished=True)
        self._followed.clear()

    def _start(self, name: str, tracker: Any, own: Callable[..., Tracker] | None, values: dict[str, Any]) -> None:
        begins, sent = name not in self._known, self._known.get(name, _Sent()).model_copy()
        if name == "tensorboard":  # it can forget what comes after an iteration, and gets it again
            sent = _Sent(step=min(sent.step, self._resumed_at or 0))
        if isinstance(tracker, Mapping):
            if own is not None:
                tracker = own(**tracker)
            else:
                tracker, sent.id = _library(name, dict(tracker), self._run, sent, begins=begins)
        if not callable(getattr(tracker, "log", None)):
            raise ConfigError(f"expected a class with a method log(values, step), found {shown(tracker)}")
        if hasattr(tracker, "main_process_only"):
            _prepare_accelerate()
            tracker.main_process_only = False  # this process is the one that writes, whatever its rank
        if begin := getattr(tracker, "start", None):
            begin()
        if name == "wandb":
            tracker.tracker.define_metric("iteration")
            tracker.tracker.define_metric("*", step_metric="iteration")
            if tracker.tracker.offline:
                # A folder of its own: the whole run is in it, to be synced alone.
                begins, sent.step, sent.place = True, 0, 0
        elif name == "mlflow":
            sent.id = tracker.tracker.info.run_id
        self._followed.append(_Followed(name, tracker, sent))
        if begins and callable(store := getattr(tracker, "store_init_configuration", None)):
            store(values)
        self._known[name] = sent

    def _send(self, point: Point) -> None:
        for one in list(self._followed):
            if (point.step, point.place) <= (one.sent.step, one.sent.place):
                continue  # it had this before the process ended
            values, step = dict(point.values), point.step if one.name != "wandb" else None
            if one.name == "wandb":
                # It drops values of a step that it has passed; rows with the iteration as their axis come in any order.
                values["iteration"] = point.step
            elif one.name == "mlflow":  # its metrics are numbers
                values = {name: value for name, value in values.items() if not isinstance(value, str)}
            if self._succeeds(one, one.tracker.log, values, step):
                one.sent = one.sent.model_copy(update={"step": point.step, "place": point.place})
                one.recent.append((perf_counter(), one.sent))

    def _succeeds(self, one: _Followed, call: Callable[..., object], *arguments: Any) -> bool:
        """Call a tracker and return whether that worked; if not, it is switched off."""
        try:
            with contained():
                call(*arguments)
        except Exception as error:
            self._followed.remove(one)
            _warn_of(one.name, error)
            return False
        return True

    def _note(self, *, finished: bool = False) -> None:
        """Write how much each tracker has, so that a resumed run sends it the rest."""
        for one in self._followed:
            until = perf_counter() - (0 if finished else _UNDERWAY.get(one.name, 0))
            while one.recent and one.recent[0][0] <= until:
                _, self._known[one.name] = one.recent.popleft()
        if self._known and self._run is not None:
            write_json(self._run.trackers, _SentFile(trackers=self._known).model_dump())


def _warn_of(name: str, error: Exception) -> None:
    warnings.warn(
        f"the tracker {shown(name)} failed and is switched off; the run continues, and resuming it sends what is "
        f"missing ({type(error).__name__}: {error})",
        stacklevel=2,
    )


def _read(run: RunLayout) -> dict[str, _Sent]:
    if not run.trackers.exists():
        return {}
    try:
        return _SentFile.model_validate(read_json(run.trackers, _SentFile)).trackers
    except CheckpointError as error:
        warnings.warn(f"trackers begin new runs, because {run.trackers} is damaged: {error}", stacklevel=2)
        return {}


class CSVFile:
    """The tracker behind ``csv=True``: a file in ``folder``, named after its time, with a row for each value."""

    @checked
    def __init__(self, folder: Location) -> None:
        self.path = Path(folder) / f"{datetime.now():%Y%m%d-%H%M%S}.csv"

    def start(self) -> None:
        """Begin the file with its header; a second run of the same second continues it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.path.exists():
            self._write([("step", "name", "value")])

    def log(self, values: Mapping[str, float | str], step: int) -> None:
        """Append a row for each value."""
        self._write([(step, name, value) for name, value in values.items()])

    def _write(self, rows: Iterable[Sequence[Any]]) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)


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
    name: str, settings: dict[str, Any], run: RunLayout | None, sent: _Sent, *, begins: bool
) -> tuple[Any, str]:
    """Return the tracker of accelerate, and the name that its library knows the run by; ``settings`` may change."""
    from accelerate import tracking

    root = None if run is None else run.root.absolute()
    if name == "tensorboard":
        folder = settings.pop("logging_dir", None)
        title = f"{datetime.now():%Y%m%d-%H%M%S}" if root is None else root.name
        if folder is None:
            folder, title = ("tensorboard_logs", title) if root is None else (root, "tensorboard")
        # Files are read in the order of their names, which begin with the second; one more within it may come first.
        seconds = [path.name.split(".")[3] for path in Path(folder, title).glob("events.out.tfevents.*")]
        while seconds and 0 <= int(max(seconds)) - int(time()) <= 1:
            sleep(0.05)
        purge = {} if begins else {"purge_step": sent.step}
        return tracking.TensorBoardTracker(title, folder, **{**purge, **settings}), ""
    if name == "wandb":
        return _wandb(settings, root, sent.id)
    project = settings.pop("project", PROJECT)
    if name == "mlflow":
        title = settings.pop("name", None if root is None else root.name)
        resumed = {"run_id": sent.id} if sent.id else {}
        return tracking.MLflowTracker(project, **{"run_name": title, **resumed, **settings}), sent.id
    # With resume=allow a name is the run's identity: a second folder of this name must not continue the first run.
    unique = f"{'run' if root is None else root.name}-{uuid.uuid4().hex[:6]}"
    title = sent.id or settings.get("name") or "".join(c if c.isalnum() or c in "._-" else "_" for c in unique)
    return tracking.TrackioTracker(project, **{"resume": "allow", **settings, "name": title}), title


def _wandb(settings: dict[str, Any], root: Path | None, known: str) -> tuple[Any, str]:
    from accelerate.tracking import WandBTracker

    values = {"id": settings.get("id") or uuid.uuid4().hex[:12]}
    if root is not None:
        if (root / "wandb" / "settings").exists():
            raise ConfigError(
                f"{root / 'wandb' / 'settings'} may choose the server that your key is sent to, and W&B reads it "
                "in its folder; remove it"
            )
        values |= {"dir": str(root), "name": os.environ.get("WANDB_NAME", root.name)}
    values |= settings | ({"id": known, "resume": "allow"} if known else {})
    project = values.pop("project", os.environ.get("WANDB_PROJECT", PROJECT))
    given = values.pop("settings", {})
    # Its own record of the terminal would consist of the live table.
    values["settings"] = {"console": "off", **given} if isinstance(given, Mapping) else given
    return WandBTracker(project, **values), values["id"]
