"""``agilerl train`` and ``agilerl resume``: in one process, in several that a launcher has started, or on Ray.

One process is one island. What takes seconds to import is imported after the settings are checked: a typo should not
cost seconds.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from agilerl.addresses import check_cluster
from agilerl.arguments import shown
from agilerl.cli.output import console as new_console
from agilerl.cli.output import console_of_lines, json_line, say, tell_line
from agilerl.cli.process_settings import loading_done
from agilerl.cli.running import (
    check_place,
    configuration,
    fail_without_elite,
    follow,
    found_text,
    manifest_name,
    opened_run,
    quieten_libraries,
    say_at_once,
    work_along,
)
from agilerl.config.distributed import DistributedConfig, asked_for
from agilerl.config.named_files import check_allowed
from agilerl.config.run import RunConfig, default_out, place_of_run
from agilerl.errors import AgileRLError, ConfigError, EngineError, WriteError

if TYPE_CHECKING:
    from agilerl.distributed.topology import Topology
    from agilerl.runs.stopping import StopRequest
    from agilerl.training.events import Event, PreflightDone
    from agilerl.training.saved import SavedRun
    from agilerl.training.setup import Session

Start = Callable[["StopRequest"], Iterator["Event"]]
Follow = Callable[[Start, "Session", Path], None]


@dataclass(frozen=True)
class Request:
    """What the user asks for; all processes of a run have it."""

    config: RunConfig | ConfigError | None
    """The settings, or the error in them; None: the settings of the run in ``root``."""
    root: Path | None
    """Run directory; None: the default."""
    resumes: bool
    """Resume the run in ``root`` if there is one."""
    allow_code: bool = False
    allow_changes: bool = False
    dry_run: bool = False
    overwrite: bool = False
    """Delete the run in ``root`` if there is one."""
    quiet: bool = False
    as_json: bool = False
    log_json: bool = False
    """Print plan, progress and result as lines of JSON."""

    @property
    def silent(self) -> bool:
        """Whether the terminal shows neither plan nor progress."""
        return self.quiet or self.as_json

    @property
    def on_cuda(self) -> bool:
        """Whether processes may exchange tensors on GPUs; the settings of an existing run are not known yet."""
        if isinstance(self.config, RunConfig):
            return self.config.training.device.startswith("cuda")
        import torch

        return torch.cuda.is_available()

    @property
    def distributed(self) -> DistributedConfig:
        """How the processes are divided."""
        return self.config.distributed if isinstance(self.config, RunConfig) else DistributedConfig()


@dataclass(frozen=True)
class Job:
    """What a run does, as decided by the process that writes."""

    config: RunConfig
    root: Path
    saved: "SavedRun | None" = None
    """The open directory of a run that is resumed, in the process that writes."""


def run_train(
    arguments: Sequence[str],
    *,
    out: Path | None,
    seed: int | None,
    resume: Literal["never", "auto"],
    replay: Path | None = None,
    force: bool = False,
    **options: bool,
) -> None:
    """Check, plan, train and show; see ``agilerl train --help``."""
    config: RunConfig | ConfigError
    try:
        config = configuration([*arguments, *["training.preflight=warn"] * force], seed, replay)
        if not options.get("allow_code"):
            check_allowed(config)  # before the libraries are loaded
    except ConfigError as error:
        config = error  # raised later, because several processes must print it only once
    if isinstance(config, RunConfig) and resume == "auto" and out is None:
        raise ConfigError("--resume auto resumes the run in --out, found no --out; pass the directory")
    if isinstance(config, RunConfig) and options.get("overwrite"):
        if out is None:
            raise ConfigError("--overwrite deletes the run in --out, found no --out; pass the directory")
        if resume == "auto":
            raise ConfigError("expected --resume auto or --overwrite, found both; leave out one of them")
    launch(Request(config, out, resume == "auto", **options), manifest_name(arguments))


def run_resume(root: Path, **options: bool) -> None:
    """Resume a run; see ``agilerl resume --help``."""
    launch(Request(None, root, True, **options))


def launch(request: Request, manifest: str = "") -> None:
    """Start or resume the run, on as many processes as there are; exits with code 1 if it ends without an elite.

    ``manifest`` is the name of a new run's manifest in messages.
    """
    config = request.config
    if isinstance(config, RunConfig) and config.distributed.backend == "ray":
        check_cluster(config.distributed.address, config.typed_addresses)
    on_ray = isinstance(config, RunConfig) and config.distributed.backend == "ray" and not request.dry_run
    together = not on_ray and asked_for(request.distributed)
    writes = not together or os.environ.get("RANK") == "0"
    with ExitStack() as opened:
        if isinstance(config, RunConfig):
            reserves = writes and not request.dry_run
            root = opened.enter_context(place_of_run(config, request.root)) if reserves else _root(request)
            request = replace(request, root=root)
            if not request.silent and writes:  # one of them speaks
                _announce(request, manifest)
            if not together:  # of several processes each would print the error
                from agilerl.envs.upstream import check_task

                check_task(config)
        if on_ray:
            assert isinstance(config, RunConfig)
            _on_ray(config, request)
            return
        finished = _together(request) if together else _alone(request)
        if finished is not None:
            fail_without_elite(finished)


def _announce(request: Request, manifest: str) -> None:
    """Say what is about to be loaded, because loading takes seconds."""
    assert request.root is not None
    if request.dry_run:
        what = f"Checking {manifest}"
    elif request.resumes and (request.root / "run.json").exists():
        return  # a resumed run is announced after it has been read
    else:
        what = f"Starting a run of {manifest} in {shown(str(request.root))}"
    _console(request).print(f"{what}: loading the libraries and the model.", soft_wrap=True)


def _console(request: Request, *, quiet: bool = False, tell: Callable[[str], None] = tell_line) -> Console:
    """Return the console for sentences: with ``log_json`` each is a line of JSON."""
    if not request.log_json:
        return new_console(quiet=quiet)
    return console_of_lines(lambda line: tell(json_line("message", text=line)), 10_000, quiet=quiet)


def _alone(request: Request) -> Path | None:
    """Run in this process; return the directory of the finished run, None after a dry run."""
    if isinstance(request.config, ConfigError):
        raise request.config
    console = _console(request, quiet=request.silent)
    with ExitStack() as opened:
        job = _decided(request, opened, console)
        if job is None:
            return request.root
        from agilerl.distributed.topology import SOLITARY

        shown = partial(follow, console=console, as_json=request.as_json, log_json=request.log_json)
        _work(request, job, SOLITARY, console, shown)
        return None if request.dry_run else job.root


def _together(request: Request) -> Path | None:
    """Run in the processes that a launcher has started; an error in any of them ends all, and is printed once.

    Return the directory of the finished run in the process that writes.
    """
    from agilerl.distributed.topology import connected

    topology: Topology | None = None
    try:
        with connected(request.distributed, cuda=request.on_cuda) as topology, ExitStack() as opened:
            writes = topology.is_writer
            console = _console(request, quiet=request.silent or not writes)
            job = agreed(request, topology, opened, console)
            if job is None:
                return request.root if writes else None
            shown = partial(follow, console=console, as_json=request.as_json, log_json=request.log_json)
            _work(request, job, topology, console, shown if writes else work_along)
            return job.root if writes and not request.dry_run else None
    except AgileRLError as error:
        if not _is_said_elsewhere(error, topology):
            raise
        sys.exit(1 if isinstance(error, WriteError) else 2)


def _is_said_elsewhere(error: AgileRLError, topology: "Topology | None") -> bool:
    """Return whether another process prints the error; ``topology`` None: it occurred before they were divided."""
    if topology is None:
        return error.everywhere and os.environ["RANK"] != "0"
    # All processes of an island raise the same error, unless it is the loss of another process.
    met_by_all = error.everywhere or (topology.island.rank > 0 and not isinstance(error, EngineError))
    return not topology.is_writer and (topology.world.told or topology.peers.told or met_by_all)


# -- what every process does ------------------------------------------------------------------------------------------


def _decided(request: Request, opened: ExitStack, console: Console, tell: Callable[[str], None] = print) -> Job | None:
    """Decide, in the process that writes, what the run does; print and return None if it is already finished.

    The directory of a resumed run is closed with ``opened``.
    """
    from agilerl.runs.directory import RunLayout

    expected = request.config
    assert not isinstance(expected, ConfigError)
    if expected is None or (request.resumes and not request.dry_run and RunLayout(_root(request)).run_json.exists()):
        root = _root(request)
        changes, as_json = request.allow_changes, request.as_json
        saved = opened_run(root, expected, console, tell, allow_changes=changes, as_json=as_json)
        if saved is None:
            return None
        opened.callback(saved.run.close)
        config = saved.config.typed_with(expected)
        return Job(config.model_copy(update={"distributed": request.distributed}), root, saved)
    root = _root(request)
    check_place(root, overwrite=request.overwrite)
    return Job(expected.dated(expected.date or datetime.now()), root)


def _root(request: Request) -> Path:
    if request.root is not None:
        return request.root
    assert isinstance(request.config, RunConfig)
    return default_out(request.config)


def agreed(
    request: Request, topology: "Topology", opened: ExitStack, console: Console, tell: Callable[[str], None] = print
) -> Job | None:
    """Return what all processes do; one prints, and all return None, if the run is already finished.

    An error in any process is raised in all of them.
    """
    from agilerl.training.resolved import resolve

    own: list[Job | None] = []

    def decide() -> dict[str, Any] | None:
        job = _decided(request, opened, console, tell)
        own.append(job)
        if job is None or topology.world.size == 1:
            return None
        # One date for all processes, whatever their clocks show.
        date = (job.config.date or datetime.now()).isoformat()
        return {"config": resolve(job.config).given(), "date": date, "root": str(job.root)}

    with topology.world.telling():
        if isinstance(request.config, ConfigError):
            raise request.config
        said = topology.world.first(decide)
        if own or said is None:
            return own[0] if own else None
        config = RunConfig.from_dict(said["config"]).model_copy(update={"distributed": request.distributed})
        return Job(config.dated(datetime.fromisoformat(said["date"])).typed_with(request.config), Path(said["root"]))


def _work(request: Request, job: Job, topology: "Topology", console: Console, follow: Follow) -> None:
    """Build this process's part of the run, show the plan, and ``follow`` the run to its end."""
    from agilerl.cli.progress import plan_document, print_plan

    session = prepared(request, job, topology)
    sampled = _tried(session) if request.dry_run else None
    if job.saved is not None:
        console.print(found_text(job.root, session))
    elif topology.is_writer and request.as_json and request.dry_run:
        print(json.dumps(plan_document(session, job.root, sampled), indent=1))
    elif topology.is_writer and request.log_json and request.dry_run and not request.silent:
        print(json_line("plan", **plan_document(session, job.root, sampled)))
    elif topology.is_writer and not request.log_json:
        print_plan(session, job.root, console, sampled)
    if request.dry_run:
        console.print("Dry run: everything checked, nothing written.")
        return
    with topology.peers.telling():
        follow(lambda stop: events(session, job, stop, overwrite=request.overwrite), session, job.root)


def _tried(session: "Session") -> "PreflightDone | None":
    """Return the answer that a plan shows, in each process."""
    from agilerl.training.preflight import tried

    with session.topology.peers.telling():
        return tried(session)


def prepared(request: Request, job: Job, topology: "Topology") -> "Session":
    """Return the session of this process when all processes have theirs; raises the error of any of them."""
    quieten_libraries()
    from agilerl.training.setup import build

    checkpoint = None if job.saved is None else job.saved.checkpoint
    with topology.world.telling():
        session = build(job.config, checkpoint, allow_code=request.allow_code, topology=topology)
        topology.world.all(None)  # all are ready
    loading_done()
    return session


def events(session: "Session", job: Job, stop: "StopRequest", *, overwrite: bool = False) -> Iterator["Event"]:
    """Train or resume, and return the events, in each process."""
    from agilerl.training.loop import resume, train

    if job.saved is not None or session.saved is not None:
        run = None if job.saved is None else job.saved.run
        return resume(session, run, root=job.root, stop=stop)
    command = ["agilerl", *sys.argv[1:]]
    return train(session, job.root, command=command, stop=stop, overwrite=overwrite)


# -- on Ray -----------------------------------------------------------------------------------------------------------


def _on_ray(config: RunConfig, request: Request) -> None:
    """Start the islands on Ray, and print their output."""
    from agilerl.distributed.ray_launcher import launch, serving
    from agilerl.runs.stopping import stop_on_signals

    d = config.distributed
    if d.islands > config.training.pop_size:
        raise ConfigError(
            f"there are more islands than agents: distributed.islands={d.islands}, "
            f"training.pop_size={config.training.pop_size}; lower the first, or raise the second"
        )
    root = _root(request).absolute()
    if request.overwrite:  # now: whoever goes on after a lost process must not meet the old run
        from agilerl.runs.directory import delete_run

        check_place(root, overwrite=True)
        delete_run(root)
    first = replace(request, root=root, overwrite=False)
    # After a lost process there is a run to resume, or nothing at all.
    width = shutil.get_terminal_size().columns
    works = [partial(work_on_ray, r, os.getcwd(), width) for r in (first, replace(first, resumes=True))]
    ended = launch(d, works, tell_line, lambda: stop_on_signals(say_at_once), serving(config))
    if ended.kind == "crashed":
        say(ended.text)
        raise EngineError("a worker crashed; its traceback is above")
    if ended.kind == "error":
        raise (WriteError if ended.code == 1 else AgileRLError)(ended.text)
    if ended.kind == "interrupted":
        say(ended.text)
        sys.exit(ended.code)


def work_on_ray(
    request: Request, folder: str, width: int, stop: "StopRequest", say: Callable[[str], None], url: str | None
) -> None:
    """Run one process, called by an actor; ``say`` prints for the user."""
    from agilerl.cli.progress import log, watch
    from agilerl.distributed.topology import connected

    if Path(folder).is_dir():
        os.chdir(folder)  # paths in a manifest may be relative to it
    with connected(request.distributed, cuda=request.on_cuda, server=url) as topology, ExitStack() as opened:
        quiet = request.silent or not topology.is_writer
        console = console_of_lines(say, width, quiet=quiet)
        if request.log_json:
            console = _console(request, quiet=quiet, tell=say)

        def follow(start: Start, session: "Session", root: Path) -> None:
            if request.log_json:
                summary = log(start(stop), session, (lambda _: None) if quiet else say)
            else:
                summary = watch(start(stop), session, console)
            if request.as_json and topology.is_writer:
                say(json.dumps(summary, indent=1))

        job = agreed(request, topology, opened, console, say)
        if job is not None:
            _work(request, job, topology, console, follow)
