"""How far a run has come, and resuming it: its settings, and its newest intact checkpoint."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, Self

import torch
from pydantic import ConfigDict, Field, model_validator

from agilerl.algorithms import ALGORITHMS, LLMAlgorithm
from agilerl.algorithms.codec import packed, read_state, tensors, unpacked, write_state
from agilerl.algorithms.state import AgentState, PlainState, lora_of
from agilerl.arguments import Location, checked, shown
from agilerl.config.named_files import check_unchanged, named_files
from agilerl.config.run import RunConfig
from agilerl.distributed.topology import Topology
from agilerl.errors import CheckpointError
from agilerl.hpo.fitness import Fitness
from agilerl.models.memory import MemoryLimits
from agilerl.models.slots import LinearShape
from agilerl.population import Population
from agilerl.runs import strict_json
from agilerl.runs.checkpoints import STATE, CheckpointStore, agent_files
from agilerl.runs.completions import lost_completions
from agilerl.runs.directory import RunDirectory, find_adapter
from agilerl.runs.journal import damaged_lines, missing_records, read_lines
from agilerl.runs.strict_json import Count, SavedValues, read_json
from agilerl.runtime import Runtime
from agilerl.training.resolved import recorded


@dataclass(frozen=True)
class Kept:
    """One of the best exams of a run, with the agent as it was."""

    agent: int
    iteration: int
    fitness: Fitness
    state: AgentState | None
    """None on processes that do not hold it."""

    def to_dict(self) -> dict[str, Any]:
        """Return all but the weights as plain data."""
        return {"agent": self.agent, "iteration": self.iteration, "fitness": self.fitness.state()}


@dataclass
class Progress:
    """Counters and results of a run."""

    iteration: int = 0
    """Rollouts and updates of every agent so far."""
    generation: int = 0
    step: int = 0
    """Iterations of the current generation."""
    samples: int = 0
    tokens: dict[str, int] = field(default_factory=lambda: {"generated": 0, "trained": 0, "evaluated": 0})
    best: float = float("-inf")
    """Best exam so far."""
    elite: AgentState | None = None
    """The agent that took it."""
    elite_iteration: int | None = None
    kept: list[Kept] = field(default_factory=list)
    """The best exams, best first, one agent each; empty if only the elite is kept."""
    pace: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Tokens and iterations of each agent in this generation; only kept if agents are compared at equal tokens."""
    teacher: int | None = None
    """Agent that the others learn from, by ``sharing.distillation``."""
    fitness: dict[int, Fitness] = field(default_factory=dict)
    """Last exam of every agent, living or dead."""
    exam: dict[int, Fitness] | None = None
    """The last exam, if no agent has learned or changed since."""
    base: Fitness | None = None
    """Test of the base model."""
    median: tuple[int, Fitness] | None = None
    """Index and test of the median agent of the first generation."""
    seconds_before: float = 0.0
    """Wall seconds of the processes that worked on this run earlier."""
    started: float = field(default_factory=perf_counter)

    @property
    def seconds(self) -> float:
        """Wall seconds spent on the run."""
        return self.seconds_before + perf_counter() - self.started

    def keep(self, exam: Kept, most: int) -> None:
        """Add an exam if it is among the ``most`` best ones; at equal fitness the later is better."""
        ordered = sorted([*self.kept, exam], key=lambda kept: (-kept.fitness.mean, -kept.iteration))
        self.kept = ordered[:most]

    def spent(self, config: RunConfig, seconds: float | None = None) -> float:
        """Return the largest share spent of any budget, by this clock or ``seconds`` of another."""
        t = config.training
        shares = [self.samples / t.max_steps]
        if t.max_tokens is not None:
            shares.append(sum(self.tokens.values()) / t.max_tokens)
        if t.max_seconds is not None:
            shares.append((self.seconds if seconds is None else seconds) / t.max_seconds)
        return max(shares)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the weights of the elite and of kept exams, and the clock, as plain data."""
        values = {name: getattr(self, name) for name in _AS_THEY_ARE}
        if self.kept:
            values["kept"] = [kept.to_dict() for kept in self.kept]
        if self.pace:
            values["pace"] = {str(index): list(of) for index, of in self.pace.items()}
        if self.teacher is not None:
            values["teacher"] = self.teacher
        return values | {
            "fitness": {str(index): f.state() for index, f in self.fitness.items()},
            "exam": None if self.exam is None else {str(index): f.state() for index, f in self.exam.items()},
            "base": None if self.base is None else self.base.state(),
            "median": None if self.median is None else {"index": self.median[0], "fitness": self.median[1].state()},
        }

    @classmethod
    def from_dict(
        cls,
        values: Mapping[str, Any],
        elite: AgentState | None,
        *,
        seconds: float,
        others: Sequence[AgentState | None] = (),
    ) -> "Progress":
        """Return the progress from :meth:`to_dict`'s values; the clock continues from ``seconds``.

        ``elite`` is the agent of the best exam, ``others`` those of the next ones.
        """
        exam, base, median = values["exam"], values["base"], values["median"]
        return cls(
            **{name: values[name] for name in _AS_THEY_ARE},
            elite=elite,
            kept=[
                Kept(**{**kept, "fitness": Fitness.from_state(kept["fitness"])}, state=state)
                for kept, state in zip(values.get("kept", []), [elite, *others], strict=False)
            ],
            teacher=values.get("teacher"),
            pace={int(index): (of[0], of[1]) for index, of in values.get("pace", {}).items()},
            fitness=_exams(values["fitness"]),
            exam=None if exam is None else _exams(exam),
            base=None if base is None else Fitness.from_state(base),
            median=None if median is None else (median["index"], Fitness.from_state(median["fitness"])),
            seconds_before=seconds,
        )


_AS_THEY_ARE = ("iteration", "generation", "step", "samples", "tokens", "best", "elite_iteration")
"""Parts of a progress that JSON holds as they are."""


def _exams(values: Mapping[str, Any]) -> dict[int, Fitness]:
    return {int(index): Fitness.from_state(fitness) for index, fitness in values.items()}


# -- resuming ---------------------------------------------------------------------------------------------------------


_ELITE = "elite"
CLOCK = "clock.json"
"""Wall time, and lengths of files that depend on it; they differ between repeated runs."""


# -- schemas of a checkpoint's two JSON files, which are checked completely before use ---------------------------------

_Index = Annotated[str, Field(pattern=r"^\d{1,18}$")]
_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Fitness(SavedValues):
    mean: float
    stderr: float
    n: Count
    scores: list[float]
    costs: Annotated[dict[str, "_Fitness"], Field(max_length=8)] = Field(default_factory=dict)
    training: float | None = None


class _Median(SavedValues):
    index: Count
    fitness: _Fitness


class _Kept(SavedValues):
    agent: Count
    iteration: Count
    fitness: _Fitness


class _Progress(SavedValues):
    model_config = ConfigDict(extra="ignore")

    iteration: Count
    generation: Count
    step: Count
    samples: Count
    tokens: dict[str, Count]
    best: float
    elite_iteration: Count | None
    fitness: dict[_Index, _Fitness]
    exam: dict[_Index, _Fitness] | None
    base: _Fitness | None
    median: _Median | None
    pace: dict[_Index, Annotated[list[Count], Field(min_length=2, max_length=2)]] = Field(default_factory=dict)
    kept: Annotated[list[_Kept], Field(max_length=16)] = Field(default_factory=list)
    teacher: Count | None = None


class _Memory(SavedValues):
    train_tokens: Annotated[int, Field(ge=1)] | None
    decode_rows: Annotated[int, Field(ge=1)] | None


class StateFile(SavedValues):
    """The schema of ``state.json``."""

    progress: _Progress
    memory: _Memory
    bank_rank: Annotated[int, Field(ge=1)]
    next_index: Count
    agents: Annotated[list[Count], Field(min_length=1)]
    not_finite: list[Count] = Field(default_factory=list)
    lineage_bytes: Count
    lineage_sha256: _Digest | None = None  # missing in old checkpoints

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if len(set(self.agents)) < len(self.agents) or max(self.agents) >= self.next_index:
            raise ValueError("expected different agents, all below next_index")
        return self


class ClockFile(SavedValues):
    """The schema of ``clock.json``."""

    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    metrics_bytes: Count
    metrics_sha256: _Digest | None = None
    journal_records: Count


@dataclass(frozen=True)
class SavedRun:
    """An unfinished run whose directory this process has locked."""

    run: RunDirectory
    config: RunConfig
    checkpoint: Path | None
    """Folder of the newest intact checkpoint; None if the run died before the first."""


@dataclass(frozen=True)
class Positions:
    """How much of the append-only files belongs to a checkpoint."""

    metrics_bytes: int
    lineage_bytes: int
    journal_records: int
    metrics_sha256: str | None = None
    """Of those bytes; None in old checkpoints."""
    lineage_sha256: str | None = None


@dataclass(frozen=True)
class SavedCheckpoint:
    """Everything that a resumed run continues from."""

    path: Path
    states: list[AgentState]
    """The agents, in the order of the population."""
    next_index: int
    progress: Progress
    positions: Positions
    memory: MemoryLimits
    """The memory limits found so far."""
    bank_rank: int
    """Largest rank that the adapter bank has had room for."""


@checked
def load(
    path: Location,
    device: str | torch.device = "cpu",
    *,
    runtime: Runtime | None = None,
    loss: Any = None,
) -> LLMAlgorithm:
    """Return the agent that a path stands for: the elite of a run, or the one in a folder that an agent was saved to.

    The folder is ``elite/``, an agent of a checkpoint, or what ``save_checkpoint`` wrote; it says which algorithm's
    ``load`` to use, and which base to load unless a ``runtime`` is given. Raises CheckpointError for anything else, and
    without the ``loss`` of an agent that had a custom one.
    """
    folder, _ = find_adapter(path)
    home = next((candidate for candidate in (folder, folder.parent) if (candidate / "agent.json").is_file()), None)
    if home is None:
        raise CheckpointError(
            f"{folder} is a PEFT adapter without an agent: agent.json is missing; load it with PEFT, or start agents "
            "from it with network.adapter"
        )
    name = read_json(home / "agent.json", PlainState)["algorithm"]
    if name not in ALGORITHMS:
        raise CheckpointError(f"{home} holds an agent of {shown(name)}; expected one of {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name].load(home, device, runtime=runtime, loss=loss)


def open_run(path: str | Path, *, report: Callable[[str], None], allow_changes: bool = False) -> SavedRun:
    """Lock the directory of an unfinished run and find its newest usable checkpoint.

    A checkpoint is usable if it is intact and its lines of metrics, lineage and journal are all there, as written.
    Newer ones are set aside, renamed ones get their names back, and ``report`` receives sentences about this and about
    lost work. Raises CheckpointError if there is no run, if it is finished or in use by another process, if all intact
    checkpoints lack lines, and, without ``allow_changes``, if files that the run reads have changed since it began or
    every checkpoint has changed lines; and ConfigError if its configuration is not valid.
    """
    run = RunDirectory.open(path)
    try:
        config = recorded(run.info)
        if not allow_changes:
            check_unchanged(named_files(config), run.info.get("files", {}), run.root)
        checkpoint = _newest_usable(run, report, allow_changes=allow_changes)
        if checkpoint is not None and config.training.log_completions:
            done = int(checkpoint.name)
            if lost := lost_completions(run.completions, read_lines(run.metrics), before=done + 1):
                report(lost)
        return SavedRun(run, config, checkpoint)
    except BaseException:
        run.close()
        raise


def _newest_usable(run: RunDirectory, report: Callable[[str], None], *, allow_changes: bool) -> Path | None:
    """Return the newest intact checkpoint whose lines are all there; report and return None if none is intact."""
    store = CheckpointStore(run.checkpoints, report=report)
    store.put_in_order(_number_in)
    checkpoint, short = store.latest(), dict[Path, str]()
    while checkpoint is not None and (lost := _lost_lines(run, checkpoint, allow_changes=allow_changes)):
        short[checkpoint] = lost
        checkpoint = store.latest(before=int(checkpoint.name))
    if checkpoint is None and short:
        newest = next(iter(short))
        raise CheckpointError(
            f"{short[newest]}, and no other checkpoint is usable without them; restore the file from a copy, or start "
            f"another run from an adapter of this one: network.adapter={newest}/agent_N/actor"
            f"{_as_they_are(run, newest)}"
        )
    for folder, lost in short.items():
        store.put_aside(folder, f"{lost}.")
    if checkpoint is not None and short:
        report(f"The run resumes after iteration {int(checkpoint.name)}; its later work is lost and is repeated.")
    elif checkpoint is None and store.damaged:
        report(f"No checkpoint of {run.root} is intact: the run restarts from its beginning, and its work is lost.")
    return checkpoint


def _lost_lines(run: RunDirectory, checkpoint: Path, *, allow_changes: bool) -> str:
    """Describe what the append-only files have lost since a checkpoint; "" if nothing.

    With ``allow_changes``, changed lines are accepted if there are as many bytes.
    """
    state, clock = _plain(checkpoint)
    metrics, lineage = clock.get("metrics_sha256"), state.get("lineage_sha256")
    return (
        damaged_lines(run.metrics, clock["metrics_bytes"], None if allow_changes else metrics)
        or damaged_lines(run.lineage, state["lineage_bytes"], None if allow_changes else lineage)
        or missing_records(run.journal, clock["journal_records"])
    )


def _as_they_are(run: RunDirectory, checkpoint: Path) -> str:
    """Return a hint for the case that the lines are valid, but not as written."""
    if _lost_lines(run, checkpoint, allow_changes=True):
        return ""
    return f"; or resume with the changed lines: agilerl resume {shlex.quote(str(run.root))} --allow-changes"


def _number_in(checkpoint: Path) -> int | None:
    """Return the iteration of a checkpoint, independent of its folder name."""
    try:
        return int(read_json(checkpoint / STATE, StateFile)["progress"]["iteration"])
    except CheckpointError:
        return None


def write_checkpoint(folder: Path, population: Population, progress: Progress, positions: Positions) -> None:
    """Write agents, elite and ``state.json`` into a folder being committed."""
    runtime, broken = population.runtime, list[int]()
    for state in population.states():
        index = state.counters["index"]
        _write_state(state, agent_files(folder, index).root, runtime)
        broken += [] if _is_finite(state) else [index]
    values = {
        "progress": progress.to_dict(),
        "next_index": population.next_index,
        "agents": [agent.index for agent in population.everyone],
        "not_finite": broken,
        "lineage_bytes": positions.lineage_bytes,
        "lineage_sha256": positions.lineage_sha256,
        "memory": asdict(runtime.limits),
        "bank_rank": runtime.store.max_rank,
    }
    if progress.elite is not None:
        _write_state(progress.elite, folder / _ELITE, runtime)
    for rank, kept in enumerate(progress.kept[1:], start=2):
        if kept.state is not None:
            _write_state(kept.state, folder / f"{_ELITE}_{rank}", runtime)
    clock = {
        "seconds": progress.seconds,
        "metrics_bytes": positions.metrics_bytes,
        "metrics_sha256": positions.metrics_sha256,
        "journal_records": positions.journal_records,
    }
    for name, content in ((STATE, values), (CLOCK, clock)):
        (folder / name).write_text(strict_json.dumps(content, indent=1) + "\n")


def _write_state(state: AgentState, folder: Path, runtime: Runtime) -> None:
    write_state(state, folder, runtime, lora_of(state, runtime))


def _plain(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what ``state.json`` and ``clock.json`` hold; raises CheckpointError naming what is wrong."""
    return read_json(checkpoint / STATE, StateFile), read_json(checkpoint / CLOCK, ClockFile)


def read_checkpoint(folder: Path, runtime: Runtime) -> SavedCheckpoint:
    """Read what :func:`write_checkpoint` wrote.

    Raises CheckpointError if something is missing, was made for other layers, or has another version.
    """
    layers = runtime.store.layers
    state, clock = _plain(folder)
    broken = state.get("not_finite", [])  # missing in old checkpoints
    states = [
        _agent(agent_files(folder, index).root, layers, index, finite=index not in broken) for index in state["agents"]
    ]
    elites = [read_state(folder / name, layers) for name in _elites(state)]
    return _checkpoint(folder, state, clock, states, elites)


def _elites(state: dict[str, Any]) -> list[str]:
    """Return the folders of the agents of the best exams, the elite's first."""
    if state["progress"]["elite_iteration"] is None:
        return []
    return [_ELITE, *(f"{_ELITE}_{rank}" for rank in range(2, len(state["progress"].get("kept", [])) + 1))]


def _checkpoint(
    path: Path, state: dict[str, Any], clock: dict[str, Any], states: list[AgentState], elites: list[AgentState]
) -> SavedCheckpoint:
    """Put a checkpoint together; ``elites`` is empty on processes that do not hold them."""
    kept = len(state["progress"].get("kept", []))
    others: list[AgentState | None] = list(elites[1:]) if elites else [None] * max(kept - 1, 0)
    both: dict[str, Any] = {**state, **clock}
    return SavedCheckpoint(
        path,
        states,
        state["next_index"],
        Progress.from_dict(
            state["progress"], elites[0] if elites else None, seconds=float(clock["seconds"]), others=others
        ),
        Positions(**{f.name: both[f.name] for f in fields(Positions) if f.name in both}),
        MemoryLimits(**state["memory"]),
        state["bank_rank"],
    )


def received(topology: Topology, checkpoint: Path | None, runtime: Runtime) -> SavedCheckpoint | None:
    """Return what a process resumes from: its share of the agents, and the shared state; None at the start.

    The writing process reads and verifies the ``checkpoint`` and sends the agents one at a time, because machines need
    not share a file system; the argument is ignored on the others. The elite stays on the first island. Raises
    CheckpointError as :func:`read_checkpoint` does.
    """
    world = topology.world
    if world.size == 1:
        return None if checkpoint is None else read_checkpoint(checkpoint, runtime)
    whole = read_checkpoint(checkpoint, runtime) if checkpoint is not None and topology.is_writer else None
    common = world.first(lambda: None if whole is None else (str(whole.path), *_plain(whole.path)))
    if common is None:
        return None
    path, state, clock = common
    count, elites = len(state["agents"]), len(_elites(state))
    best = [] if whole is None else [whole.progress.elite, *(kept.state for kept in whole.progress.kept[1:])]
    sent = [] if whole is None else [*whole.states, *filter(None, best)]
    positions, arrived = topology.places(count), list[AgentState]()
    for position in range(count + elites):
        data = world.processes.broadcast(packed(sent[position]) if sent else None)
        if position in positions or (position >= count and topology.peers.rank == 0):
            arrived.append(unpacked(data))
    return _checkpoint(Path(path), state, clock, arrived[: len(positions)], arrived[len(positions) :])


def _is_finite(state: AgentState) -> bool:
    """Return whether an agent's weights and moments are finite; a sick agent keeps its own until it is replaced."""
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors(state).values())


def _agent(folder: Path, layers: tuple[LinearShape, ...], index: int, *, finite: bool) -> AgentState:
    """Read an agent to resume; it must have its optimizer and the index of its folder."""
    state = read_state(folder, layers, finite=finite)
    if state.counters.get("index") != index or state.algorithm not in ALGORITHMS or not state.moments:
        raise CheckpointError(
            f"expected agent {index} of one of the algorithms {', '.join(ALGORITHMS)} with its optimizer in {folder}, "
            f"found agent {shown(state.counters.get('index'))} of {shown(state.algorithm)}"
            f"{'' if state.moments else ' without one'}"
        )
    return state
