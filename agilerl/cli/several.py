"""``agilerl train`` and ``agilerl resume`` in processes that a launcher has started: one of them speaks and writes."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from agilerl.cli.output import console as new_console
from agilerl.config.distributed import DistributedConfig
from agilerl.config.run import RunConfig
from agilerl.distributed.topology import Topology, connected
from agilerl.errors import AgileRLError, ConfigError, EngineError, WriteError
from agilerl.runs.directory import RunDirectory
from agilerl.runs.stopping import Interrupted, StopRequest, stop_on_signals
from agilerl.training.events import Event
from agilerl.training.resolved import given
from agilerl.training.setup import Session, build

__all__ = ["Wish", "events_of", "prepare", "run_together", "quietly"]


@dataclass(frozen=True)
class Wish:
    """What a user has asked for, on the command line of every process."""

    config: RunConfig | ConfigError | None
    """The settings, or what is wrong with them; None: those of a run that exists."""
    root: Path | None
    """Run directory; None: the default."""
    goes_on: bool
    """Go on with the run in the directory where there is one."""
    allow_code: bool = False
    allow_changes: bool = False
    dry_run: bool = False
    quiet: bool = False
    as_json: bool = False

    @property
    def on_cuda(self) -> bool:
        """Whether tensors on GPUs may travel; of a run that exists, nobody has read that yet."""
        if isinstance(self.config, RunConfig):
            return self.config.training.device.startswith("cuda")
        return torch.cuda.is_available()

    @property
    def distributed(self) -> DistributedConfig:
        """How the processes are divided."""
        return self.config.distributed if isinstance(self.config, RunConfig) else DistributedConfig()


@dataclass
class Prepared:
    """A session that is ready, and where it writes."""

    session: Session
    root: Path
    run: RunDirectory | None
    """The open directory of a run that goes on, in the process that writes."""


def run_together(wish: Wish) -> None:
    """Do what is wished with all processes; an error of any of them ends all, and is printed once."""
    topology: Topology | None = None
    try:
        with connected(wish.distributed, cuda=wish.on_cuda) as topology:
            _run(wish, topology)
    except AgileRLError as error:
        if not _is_said_elsewhere(error, topology):
            raise
        sys.exit(1 if isinstance(error, WriteError) else 2)


def _is_said_elsewhere(error: AgileRLError, topology: Topology | None) -> bool:
    """Return whether another process prints the error; without a topology, it kept the processes from being divided."""
    if topology is None:
        return error.everywhere and os.environ["RANK"] != "0"
    # What one process of an island meets in a run all of them meet, unless it is the loss of another one.
    met_by_all = error.everywhere or (topology.island.rank > 0 and not isinstance(error, EngineError))
    return not topology.is_writer and (topology.world.told or topology.peers.told or met_by_all)


def _run(wish: Wish, topology: Topology) -> None:
    from agilerl.cli.preview import plan_document, print_plan
    from agilerl.cli.running import follow, found_text, quieten_libraries

    quieten_libraries()
    silent = wish.quiet or wish.as_json or not topology.is_writer
    console = new_console(quiet=silent)
    with ExitStack() as opened:
        with topology.world.telling():
            prepared = prepare(wish, topology, opened)
        if prepared is None:
            return
        session, root = prepared.session, prepared.root
        if topology.is_writer:
            if session.saved is not None or prepared.run is not None:
                console.print(found_text(root, session))
            elif wish.as_json and wish.dry_run:
                _print_json(plan_document(session, root))
            else:
                print_plan(session, root, console)
        if wish.dry_run:
            console.print("Dry run: everything checked, nothing written.")
            return
        with topology.peers.telling():
            if topology.is_writer:
                follow(lambda stop: events_of(prepared, stop), session, root, console, as_json=wish.as_json)
            else:
                quietly(prepared)


def prepare(wish: Wish, topology: Topology, opened: ExitStack) -> Prepared | None:
    """Build this process's session; the run directory that the writer opens is closed with ``opened``.

    None where there is nothing left to do. Raises what any process finds wrong, in all of them.
    """
    if isinstance(wish.config, ConfigError):
        raise wish.config
    found: list[Any] = []

    def decide() -> dict[str, Any]:
        job = _decided(wish, found)
        if found:
            opened.callback(found[0].run.close)
        return job

    job = topology.world.first(decide)
    if job["done"]:
        return None
    config = RunConfig.from_dict(job["config"]).model_copy(update={"distributed": wish.distributed})
    config = config.dated(datetime.fromisoformat(job["date"])).typed_with(wish.config)
    checkpoint = found[0].checkpoint if found else None
    session = build(config, checkpoint, allow_code=wish.allow_code, topology=topology)
    topology.world.all(None)  # everybody is ready
    return Prepared(session, Path(job["root"]), found[0].run if found else None)


def _decided(wish: Wish, found: list[Any]) -> dict[str, Any]:
    """Decide, in the process that writes, what all of them do; a run that goes on is opened into ``found``."""
    from agilerl.cli.running import check_place, default_out, opened_run
    from agilerl.runs.directory import RunLayout

    assert not isinstance(wish.config, ConfigError)
    root = wish.root
    if root is None:
        assert wish.config is not None
        root = default_out(wish.config)
    if wish.config is None or (wish.goes_on and not wish.dry_run and RunLayout(root).run_json.exists()):
        saved = opened_run(root, wish.config, allow_changes=wish.allow_changes, as_json=wish.as_json, quiet=wish.quiet)
        if saved is None:
            return {"done": True}
        found.append(saved)
        config, date = saved.config, saved.config.date
    else:
        check_place(root)
        config, date = wish.config, wish.config.date
    # One date for all of them, whatever their clocks say.
    return {"done": False, "config": given(config), "date": (date or datetime.now()).isoformat(), "root": str(root)}


def events_of(prepared: Prepared, stop: StopRequest) -> Iterator[Event]:
    """Train, or go on: what happens, in every process."""
    from agilerl.training.loop import resume, train

    session, root = prepared.session, prepared.root
    if prepared.run is not None or session.saved is not None:
        return resume(session, prepared.run, root=root, stop=stop)
    return train(session, root, command=["agilerl", *sys.argv[1:]], stop=stop)


def quietly(prepared: Prepared) -> None:
    """Work along with the process that speaks."""
    with stop_on_signals(lambda _: None) as stop:
        try:
            for _ in events_of(prepared, stop):
                pass
        except Interrupted as interrupted:
            sys.exit(interrupted.code)
        except KeyboardInterrupt:
            sys.exit(130)


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=1))
