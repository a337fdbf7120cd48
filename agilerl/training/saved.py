"""What a run left behind: its agents, and what it is resumed with, its settings and its newest intact checkpoint."""

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from agilerl.algorithms import ALGORITHMS, LLMAlgorithm
from agilerl.algorithms.state import PlainState
from agilerl.checks.arguments import Location, checked, shown
from agilerl.config.named_files import check_unchanged, named_files
from agilerl.config.run import RunConfig
from agilerl.errors import CheckpointError
from agilerl.runs.checkpoints import STATE, CheckpointStore
from agilerl.runs.completions import lost_completions
from agilerl.runs.directory import RunDirectory, find_adapter, run_date
from agilerl.runs.journal import damaged_lines, missing_records, read_lines
from agilerl.runs.strict_json import read_json
from agilerl.runtime import Runtime
from agilerl.training.checkpoint import StateFile, plain_parts
from agilerl.training.resolved import document_of


@dataclass(frozen=True)
class SavedRun:
    """An unfinished run whose directory this process has locked."""

    run: RunDirectory
    config: RunConfig
    checkpoint: Path | None
    """Folder of the newest intact checkpoint; None if the run died before the first."""


@checked
def load(
    path: Location, device: str | torch.device = "cpu", *, runtime: Runtime | None = None, loss: Any = None
) -> LLMAlgorithm:
    """Return the agent that a path stands for: the elite of a run, or the one in a folder that an agent was saved to.

    The folder is ``elite/``, an agent of a checkpoint, or what ``save_checkpoint`` wrote; it says which algorithm's
    ``load`` to use, and which base to load unless a ``runtime`` is given. Raises CheckpointError for anything else, and
    without the ``loss`` of an agent that had a custom one.
    """
    folder, _ = find_adapter(path)
    # agent.json is beside the adapter's files in elite/, and beside actor/ in a checkpoint.
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


def recorded(info: Mapping[str, Any]) -> RunConfig:
    """Return a run's configuration from its ``run.json``, with its date and what was given.

    A default that has changed since keeps its recorded value. If a run did not record what was given, all of it counts
    as given. Raises ConfigError as :meth:`RunConfig.from_dict` does.
    """
    whole = info["config"]
    request = RunConfig.from_dict(info.get("given", whole))
    # Hyperparameters that are written out count as set, and agents record what was set.
    now = document_of(request)["algorithm"]
    missing = object()
    values = {n: v for n, v in whole["algorithm"].items() if n in request.algorithm or now.get(n, missing) != v}
    config = RunConfig.from_dict({**whole, "algorithm": values})
    return config.dated(run_date(info)).made_of(request)


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
    # The lock must not outlive a refusal: in a notebook the process continues.
    except BaseException:
        run.close()
        raise


def _newest_usable(run: RunDirectory, report: Callable[[str], None], *, allow_changes: bool) -> Path | None:
    """Return the newest intact checkpoint whose lines are all there; report and return None if none is intact."""
    store = CheckpointStore(run.checkpoints, report=report)
    # First, because folders are looked for by their numbers.
    store.put_in_order(_number_in)
    checkpoint, short = store.latest(), dict[Path, str]()
    while checkpoint is not None and (lost := _lost_lines(run, checkpoint, allow_changes=allow_changes)):
        short[checkpoint] = lost
        checkpoint = store.latest(before=int(checkpoint.name))
    if checkpoint is None and short:
        newest = next(iter(short))
        hint = f"; or resume with the changed lines: agilerl resume {shlex.quote(str(run.root))} --allow-changes"
        raise CheckpointError(
            f"{short[newest]}, and no other checkpoint is usable without them; restore the file from a copy, or start "
            f"another run from an adapter of this one: network.adapter={newest}/agent_N/actor"
            f"{'' if _lost_lines(run, newest, allow_changes=True) else hint}"
        )
    # Only once one is usable: without any, the directory stays as it is.
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
    state, clock = plain_parts(checkpoint)
    metrics, lineage = clock.get("metrics_sha256"), state.get("lineage_sha256")
    return (
        damaged_lines(run.metrics, clock["metrics_bytes"], None if allow_changes else metrics)
        or damaged_lines(run.lineage, state["lineage_bytes"], None if allow_changes else lineage)
        or missing_records(run.journal, clock["journal_records"])
    )


def _number_in(checkpoint: Path) -> int | None:
    """Return the iteration of a checkpoint, independent of its folder name."""
    try:
        return int(read_json(checkpoint / STATE, StateFile)["progress"]["iteration"])
    except CheckpointError:
        return None
