"""``agilerl train`` and ``agilerl resume``: in one process, in several that a launcher has started, or on Ray.

The commands make a :class:`Request`, whose methods follow in the order of their calls: ``launch`` checks what is cheap
to check, ``carry_out`` is what each process does, wherever it runs. What takes seconds to import is imported there,
after the settings are checked: a typo should not cost seconds.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from typer import Argument, Option

from agilerl.checks.arguments import shown
from agilerl.cli.options import AllowCode, Arguments, AsJson, LogFormat, OneRun, Quiet, as_path
from agilerl.cli.output import console as new_console
from agilerl.cli.output import console_of_lines, json_line, say, tell_line
from agilerl.cli.process_settings import loading_done
from agilerl.cli.running import (
    check_place,
    check_same,
    configuration,
    fail_without_elite,
    manifests_in,
    quieten_libraries,
    resume_text,
    stoppable,
)
from agilerl.config.distributed import DistributedConfig, asked_for
from agilerl.config.named_files import check_allowed
from agilerl.config.run import RunConfig, default_out, place_of_run
from agilerl.errors import AgileRLError, CheckpointError, ConfigError, WriteError
from agilerl.safety.addresses import check_cluster

if TYPE_CHECKING:
    from agilerl.processes import Processes
    from agilerl.runs.stopping import StopRequest
    from agilerl.training.events import Event
    from agilerl.training.saved import SavedRun
    from agilerl.training.setup import Session

Form = Literal["text", "nothing", "object", "lines"]
"""What is printed: text for people, errors alone, one JSON object at the end, or JSON objects, one a line."""


@dataclass(frozen=True)
class Job:
    """What a run does, as decided by the process that writes."""

    config: RunConfig
    root: Path
    saved: "SavedRun | None" = None
    """The open directory of a run that is resumed, in the process that writes."""


@dataclass(frozen=True)
class Terminal:
    """Where one process of a run prints."""

    form: Form
    console: Console
    """For sentences and tables; quiet where the form wants none."""

    @classmethod
    def of(cls, form: Form, *, speaks: bool = True) -> "Terminal":
        """Return that of a process; of several only one ``speaks``."""
        quiet = not speaks or form in ("nothing", "object")
        if form == "lines":
            # Wider than any message, so that each is one line of JSON.
            screen = console_of_lines(lambda line: tell_line(json_line("message", text=line)), 10_000, quiet=quiet)
        else:
            screen = new_console(quiet=quiet)
        return cls(form, screen)


@dataclass(frozen=True)
class Request:
    """What the user asks for; all processes of a run have it."""

    config: RunConfig | ConfigError | None
    """The settings, or the error in them; None: the settings of the run in ``root``."""
    root: Path
    """Run directory; of a new run it is set by :func:`launch`."""
    resumes: bool
    """Resume the run in ``root`` if there is one."""
    allow_code: bool = False
    allow_changes: bool = False
    dry_run: bool = False
    overwrite: bool = False
    """Delete the run in ``root`` if there is one."""
    form: Form = "text"

    @property
    def on_cuda(self) -> bool:
        """Whether processes may exchange tensors on GPUs; the settings of an existing run are not known yet."""
        if isinstance(self.config, RunConfig):
            return self.config.training.device.startswith("cuda")
        import torch

        return torch.cuda.is_available()

    @property
    def typed_addresses(self) -> tuple[str, ...]:
        """The addresses that the user typed."""
        return self.config.typed_addresses if isinstance(self.config, RunConfig) else ()

    @property
    def repeats(self) -> bool:
        """Whether ``root`` has a run that ended before it learned anything, in whose place a new one may begin."""
        if not (self.root / "run.json").exists():
            return False  # without the import, which takes time
        from agilerl.runs.directory import RunLayout

        layout = RunLayout(self.root)
        return not layout.has_learned and layout.status == "stopped"

    @property
    def begins(self) -> bool:
        """Whether this is a new run, rather than one that ``root`` has already."""
        is_there = self.resumes and not self.dry_run and (self.root / "run.json").exists() and not self.repeats
        return self.config is not None and not is_there

    @property
    def distributed(self) -> DistributedConfig:
        """How the processes are divided."""
        return self.config.distributed if isinstance(self.config, RunConfig) else DistributedConfig()

    # -- carried out --------------------------------------------------------------------------------------------------

    def launch(self, manifest: str = "", out: Path | None = None) -> None:
        """Start or resume the run, on as many processes as there are; exits with code 1 if it ends without an elite.

        Of a new run, ``manifest`` is the manifest's name in messages, and ``out`` the directory (None: the default).
        """
        request, config, on_ray = self, self.config, False
        if isinstance(config, RunConfig) and config.distributed.backend == "ray":
            check_cluster(config.distributed.address, config.typed_addresses)
            on_ray = not self.dry_run
        together = not on_ray and asked_for(self.distributed)
        if isinstance(config, ConfigError) and not together:
            raise config
        writes = not together or os.environ.get("RANK") == "0"
        with ExitStack() as opened:
            if isinstance(config, RunConfig):
                if writes and not request.dry_run:
                    root = opened.enter_context(place_of_run(config.environment, out))
                else:
                    # Other processes, and a dry run, make no directory.
                    root = out or default_out(config.environment)
                request = replace(request, root=root)
                if not together and (root / "run.json").exists():  # of several processes each would print the error
                    request._existing()
                if writes and request.begins:  # a resumed run is announced after it has been read
                    what = f"Starting a run of {manifest} in {shown(str(root))}"
                    what += ", where one ended before it learned anything" * request.repeats
                    what = f"Checking {manifest}" if request.dry_run else what
                    Terminal.of(request.form).console.print(f"{what}: loading the libraries and the model.")
                if not together:
                    from agilerl.envs.upstream import check_task

                    check_task(config.environment)
            if on_ray:
                request._on_ray()
                return
            request._on_this_machine(together=together)
        if writes and not request.dry_run:
            fail_without_elite(request.root)

    def _on_this_machine(self, *, together: bool) -> None:
        """Do the work of this process, alone or ``together`` with those that a launcher has started.

        An error in any of several processes ends all of them, and is printed once.
        """
        if not together:
            from agilerl.runs.directory import RunLayout

            terminal = Terminal.of(self.form)
            # Before the slow imports.
            if self._existing() is not None and not RunLayout(self.root).is_finished:
                terminal.console.print(f"Resuming {self.root}: loading the libraries and the model.")
            from agilerl.processes import ALONE

            self.carry_out(ALONE, terminal)
            return
        try:
            self.work()
        except AgileRLError as error:
            if not error.everywhere or os.environ["RANK"] == "0":
                raise
            # The exit code of the process that prints it.
            sys.exit(1 if isinstance(error, WriteError) else 2)

    def _on_ray(self) -> None:
        """Let Ray Train start the processes; what the first one prints comes with Ray's own lines."""
        from agilerl.cli.ray_train import launch as launch_on_ray

        root = self.root.absolute()
        if self.overwrite:  # now: whoever resumes after a lost process must not meet the old run
            from agilerl.runs.directory import delete_run

            check_place(root, overwrite=True)
            delete_run(root)
        # After a lost process there is a run to resume.
        launch_on_ray(self.distributed, root, Request.work, replace(self, root=root, overwrite=False, resumes=True))

    def work(self) -> None:
        """Do the part of one process that a launcher has started."""
        from agilerl.processes import joined

        with joined(cuda=self.on_cuda, timeout_seconds=self.distributed.timeout_seconds) as processes:
            self.carry_out(processes, Terminal.of(self.form, speaks=processes.rank == 0))

    def carry_out(self, processes: "Processes", terminal: Terminal) -> None:
        """Do this process's part: agree with the others on the run, build it, show its plan, and follow it to its end.

        Signals ask the run to stop. An error in any process is raised in all of them.
        """
        with ExitStack() as opened, processes.telling():
            job = self.agreed(processes, opened, terminal)
            if job is None:
                return
            from agilerl.cli.progress import log, watch

            session = self.prepared(job, processes)
            self._show_plan(job, session, terminal)
            if self.dry_run:
                return
            first = processes.rank == 0
            stop = opened.enter_context(stoppable(job.root, terminal.console, speaks=first))
            run = events(session, job, stop, overwrite=self.overwrite)
            if not first:
                # Nothing is shown, but the run only proceeds as its events are asked for.
                for _ in run:
                    pass
            elif terminal.form == "lines":
                log(run, session, tell_line, stop=stop)
            else:
                summary = watch(run, session, terminal.console, stop=stop)
                if terminal.form == "object":
                    tell_line(json.dumps(summary, indent=1))

    def agreed(self, processes: "Processes", opened: ExitStack, terminal: Terminal) -> Job | None:
        """Return what all processes do; one prints, and all return None, if the run is already finished.

        The directory of a resumed run is closed with ``opened``.
        """
        if isinstance(self.config, ConfigError):
            raise self.config
        job = self._decided(opened, terminal) if processes.rank == 0 else None
        decision: dict[str, Any] | None = None
        if job is not None and processes.size > 1:
            # One date for all processes, whatever their clocks show.
            date = job.config.date or datetime.now()
            texts = [config.set_values("json") for config in (job.config, job.config.given)]
            decision = {"settings": texts, "date": date.isoformat(), "root": str(job.root)}
        decision = processes.all(decision)[0]
        if processes.rank == 0 or decision is None:
            return job
        config, given = map(RunConfig.from_dict, decision["settings"])
        config = config.dated(datetime.fromisoformat(decision["date"])).typed_with(self.typed_addresses)
        return Job(config.made_of(given), Path(decision["root"]))

    def _existing(self) -> dict[str, Any] | None:
        """Return what the run to be resumed says of itself, None for a new run; it takes no time, and writes nothing.

        Raises CheckpointError for a directory that cannot be used.
        """
        from agilerl.runs.directory import check_not_in_use, read_run

        root = self.root
        if self.begins:
            check_place(root, overwrite=self.overwrite)
            return None
        try:
            info = read_run(root)
        except CheckpointError as error:
            if root.is_file() or (root / "run.json").exists():
                raise
            again = "If it was killed before it wrote anything, start it again with its train command."
            raise CheckpointError(f"{error} {again}") from None
        check_not_in_use(root)  # the lock decides later which process is first
        return info

    def _decided(self, opened: ExitStack, terminal: Terminal) -> Job | None:
        """Decide, in the process that writes, what the run does; print and return None if it is already finished."""
        info, expected, root = self._existing(), self.config, self.root
        assert not isinstance(expected, ConfigError)
        if info is None:
            assert expected is not None
            return Job(expected.dated(expected.date or datetime.now()), root)
        from agilerl.runs.directory import RunLayout
        from agilerl.training.resolved import resolve
        from agilerl.training.saved import open_run, recorded

        if expected is not None:
            recorded(info)
            wanted = resolve(expected)
            check_same(info, wanted.document(), wanted.given(), root)
        if RunLayout(root).is_finished:
            _show_finished(root, terminal)
            return None
        saved = open_run(root, report=say, allow_changes=self.allow_changes)
        opened.callback(saved.run.close)
        config = saved.config.typed_with(self.typed_addresses)
        return Job(config.model_copy(update={"distributed": self.distributed}), root, saved)

    def prepared(self, job: Job, processes: "Processes") -> "Session":
        """Return the session of this process when all processes have theirs."""
        quieten_libraries()
        from agilerl.training.setup import build

        checkpoint = None if job.saved is None else job.saved.checkpoint
        session = build(job.config, checkpoint, allow_code=self.allow_code, processes=processes)
        processes.all(None)  # all are ready
        loading_done()
        return session

    def _show_plan(self, job: Job, session: "Session", terminal: Terminal) -> None:
        """Print the plan, with a sampled answer if the run is not carried out, or where a run is resumed."""
        from agilerl.cli.progress import plan_document, print_plan
        from agilerl.training.preflight import tried

        # Every process samples, one prints.
        sampled, first = tried(session) if self.dry_run else None, session.processes.rank == 0
        if job.saved is not None:
            terminal.console.print(resume_text(job.root, session))
        elif first and self.dry_run and terminal.form in ("object", "lines"):
            document = plan_document(session, job.root, sampled, timed=True)
            is_line = terminal.form == "lines"
            tell_line(json_line("plan", **document) if is_line else json.dumps(document, indent=1))
        elif first and terminal.form != "lines":  # there the plan is the first event
            print_plan(session, job.root, terminal.console, sampled, timed=self.dry_run)
        if self.dry_run:
            terminal.console.print("Dry run: everything checked, nothing written.")


def run_train(
    arguments: Arguments = None,
    *,
    out: Annotated[
        Path | None, Option(parser=as_path, metavar="DIRECTORY", help="Run directory; default runs/<task>-<time>.")
    ] = None,
    seed: Annotated[int | None, Option(help="Seed of the run (training.seed).", metavar="N", min=0)] = None,
    resume: Annotated[
        Literal["never", "auto"],
        Option("--resume", help="auto: resume the run in --out, if there is one; then the command can be repeated."),
    ] = "never",
    replay: Annotated[
        Path | None,
        Option(
            parser=as_path,
            metavar="FILE",
            help="Train one agent with the hyperparameters of this schedule, from agilerl schedule.",
        ),
    ] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="Check everything and print the plan only.")] = False,
    force: Annotated[
        bool, Option("--force", help="Start even if nothing can be learned from the first answers.")
    ] = False,
    overwrite: Annotated[
        bool, Option("--overwrite", help="Delete the run in --out, if no process uses it, and start a new one.")
    ] = False,
    allow_code: AllowCode = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    log_format: LogFormat = "text",
) -> None:
    """Train a population, evolve it, and ship the best agent as a PEFT adapter.

    Without arguments a tiny model that comes with the package learns to find greatest common divisors, in about three
    minutes on two CPU cores. Examples:

    agilerl train environment.task=reasoning_gym:chain_sum

    agilerl train my.yaml training.pop_size=8 --out runs/mine --seed 1
    """
    arguments = arguments or []
    config: RunConfig | ConfigError
    try:
        config = configuration([*arguments, *["training.preflight=warn"] * force], seed, replay)
        if not allow_code:
            check_allowed(config)  # before the libraries are loaded
        if out is None and (resume == "auto" or overwrite):
            option = "--resume auto resumes" if resume == "auto" else "--overwrite deletes"
            raise ConfigError(f"{option} the run in --out, found no --out; pass the directory")
        if resume == "auto" and overwrite:
            raise ConfigError("expected --resume auto or --overwrite, found both; leave out one of them")
    except ConfigError as error:
        config = error  # raised later, because several processes must print it only once
    form = _form(quiet, as_json, log_format)
    request = Request(config, Path(), resume == "auto", allow_code, dry_run=dry_run, overwrite=overwrite, form=form)
    manifests = manifests_in(arguments)
    with_yours = ", with your settings" * (len(arguments) > len(manifests))
    request.launch(f"{shown(manifests[0]) if manifests else 'the embedded default'}{with_yours}", out)


def run_resume(
    run: OneRun,
    settings: Annotated[list[str] | None, Argument(hidden=True, metavar="")] = None,
    *,
    allow_code: AllowCode = False,
    allow_changes: Annotated[
        bool, Option("--allow-changes", help="Resume even if files that the run reads (data or code) have changed.")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    log_format: LogFormat = "text",
) -> None:
    """Resume a run that was stopped or killed, from its newest intact checkpoint.

    On a CPU the result is the same, to the bit, as that of a run that was never interrupted.
    """
    if settings:
        raise ConfigError(
            f"expected no settings, as a run is resumed with those that it began with, found {settings[0]!r}; begin a "
            f"new one, from its adapter if you like: agilerl train MANIFEST network.adapter={run}/elite {settings[0]}"
        )
    Request(None, run, True, allow_code, allow_changes, form=_form(quiet, as_json, log_format)).launch()


def _form(quiet: bool, as_json: bool, log_format: str) -> Form:
    if as_json and log_format == "json":
        raise typer.BadParameter("expected --json (one object at the end) or --log-format json (lines), found both")
    return "object" if as_json else "nothing" if quiet else "lines" if log_format == "json" else "text"


def events(session: "Session", job: Job, stop: "StopRequest", *, overwrite: bool = False) -> Iterator["Event"]:
    """Train or resume, and return the events, in each process."""
    from agilerl.training.run import resume, train

    if job.saved is not None or session.saved is not None:
        run = None if job.saved is None else job.saved.run
        return resume(session, run, root=job.root, stop=stop)
    command = ["agilerl", *sys.argv[1:]]
    return train(session, job.root, command=command, stop=stop, overwrite=overwrite)


def _show_finished(root: Path, terminal: Terminal) -> None:
    """Print that a run is finished; write its report if its process died after the summary."""
    from agilerl.runs.directory import RunLayout, check_not_in_use
    from agilerl.runs.strict_json import read_json

    layout = RunLayout(root)
    if not layout.report.exists():
        from agilerl.report import build_report
        from agilerl.runs.atomic import remove_leftovers

        check_not_in_use(root)  # another process may be writing it
        remove_leftovers(root)
        build_report([root], layout.report)
    terminal.console.print(f"The run in {root} is finished; there is nothing left to do. Results: {layout.summary}")
    if terminal.form == "object":
        tell_line(json.dumps(read_json(layout.summary), indent=1))
