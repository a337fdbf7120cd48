"""``agilerl train`` and ``agilerl resume``: the plan, the progress, the result."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from agilerl.errors import CheckpointError, ConfigError
from agilerl.training.config import RunConfig, load_manifest
from agilerl.validation import shown

if TYPE_CHECKING:
    from agilerl.runs.directory import RunLayout
    from agilerl.training.events import Event
    from agilerl.training.setup import Session
    from agilerl.training.stopping import StopRequest

__all__ = ["run_resume", "run_train"]


def run_train(
    arguments: Sequence[str],
    *,
    out: Path | None,
    seed: int | None,
    resume: Literal["never", "auto"],
    dry_run: bool,
    allow_code: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Check, plan, train and show; see ``agilerl train --help``."""
    config = _config(arguments, seed)
    if resume == "auto" and out is None:
        raise ConfigError("--resume auto goes on with the run in --out, found no --out; name the directory")
    from agilerl.runs.directory import RunLayout

    root = out if out is not None else _default_out(config)
    if resume == "auto" and not dry_run and RunLayout(root).run_json.exists():
        run_resume(root, allow_code=allow_code, quiet=quiet, as_json=as_json, expected=config)
        return
    _check_place(root)
    _quieten_libraries()
    # Imported once manifest and place are known to be good: a typo, or a second process, should not cost seconds.
    from agilerl.cli.plan import plan_document, print_plan
    from agilerl.training.loop import train
    from agilerl.training.setup import build

    console = Console(quiet=quiet or as_json, markup=False, emoji=False, highlight=False)
    session = build(config, allow_code=allow_code)
    if as_json and dry_run:
        print(json.dumps(plan_document(session, root), indent=1))
        return
    print_plan(session, root, console)
    if dry_run:
        console.print("Dry run: everything checked, nothing written.")
        return
    command = ["agilerl", *sys.argv[1:]]
    _follow(lambda stop: train(session, root, command=command, stop=stop), session, console, as_json=as_json)


def run_resume(
    root: Path,
    *,
    allow_code: bool = False,
    allow_changes: bool = False,
    quiet: bool,
    as_json: bool,
    expected: RunConfig | None = None,
) -> None:
    """Go on with a run; see ``agilerl resume --help``. It must be one of the ``expected`` configuration, if given."""
    from agilerl.runs.directory import RunLayout, check_not_in_use, read_run

    info, layout = read_run(root), RunLayout(root)
    check_not_in_use(root)  # before the seconds of imports; who is first is decided by the lock below
    _quieten_libraries()
    from agilerl.runs.strict_json import read_json
    from agilerl.training.loop import resume
    from agilerl.training.saved import open_run
    from agilerl.training.setup import build, document

    console = Console(quiet=quiet or as_json, markup=False, emoji=False, highlight=False)
    if expected is not None:
        RunConfig.from_dict(info["config"])
        _check_same(info["config"], document(expected), root)
    if layout.is_finished:
        _complete(layout)
        console.print(f"The run in {root} is finished: nothing is left to do. Results: {layout.summary}")
        if as_json:
            print(json.dumps(read_json(layout.summary), indent=1))
        return
    saved = open_run(root, report=_say, allow_changes=allow_changes)
    try:
        session = build(saved.config, saved.checkpoint, allow_code=allow_code)
    except BaseException:
        saved.run.close()
        raise
    console.print(_found(root, session))
    _follow(lambda stop: resume(session, saved.run, stop=stop), session, console, as_json=as_json)


def _complete(layout: "RunLayout") -> None:
    """Write the report of a finished run whose process died between the summary and that."""
    if layout.report.exists():
        return
    from agilerl.report import build_report
    from agilerl.runs.atomic import remove_leftovers
    from agilerl.runs.directory import check_not_in_use

    check_not_in_use(layout.root)  # a process may be writing it just now
    remove_leftovers(layout.root)
    build_report([layout.root], layout.report)


def _follow(
    start: "Callable[[StopRequest], Iterator[Event]]", session: "Session", console: Console, *, as_json: bool
) -> None:
    """Show a run to its end, or to where a signal lets it stop."""
    from agilerl.cli.progress import watch
    from agilerl.training.stopping import Interrupted, stop_on_signals

    with stop_on_signals(_say_at_once) as stop:
        try:
            summary = watch(start(stop), session, console)
        except Interrupted as interrupted:
            _say(str(interrupted))
            sys.exit(interrupted.code)
        except KeyboardInterrupt:
            _say("interrupted; go on from the last checkpoint with: agilerl resume RUN")
            sys.exit(130)
    if as_json:
        print(json.dumps(summary, indent=1))


def _found(root: Path, session: "Session") -> str:
    if session.saved is None:
        return f"Resuming {root}: no checkpoint yet, so from the beginning."
    done = session.saved.progress
    return (
        f"Resuming {root} after iteration {done.iteration} (checkpoint {session.saved.path.name}): generation "
        f"{done.generation}, {len(session.population)} agents, {done.samples:,} of "
        f"{session.config.training.max_steps:,} samples."
    )


def _check_same(found: Mapping[str, Any], wanted: Mapping[str, Any], root: Path) -> None:
    """Raise ConfigError that names the first setting in which a run differs from what is asked for."""
    for section, settings in wanted.items():
        for name in {**settings, **found.get(section, {})}:
            there, value = found.get(section, {}).get(name), settings.get(name)
            if there != value:
                raise ConfigError(
                    f"the run in {str(root)!r} was started with {section}.{name}={shown(there)}, now it is "
                    f"{shown(value)}; use the same settings, or another directory"
                )


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def _say_at_once(sentence: str) -> None:
    """Say something from within a signal handler, where a stream that is being written to refuses a second writer."""
    with suppress(OSError):  # nobody may be listening any more
        os.write(2, f"{sentence}\n".encode())


def _config(arguments: Sequence[str], seed: int | None) -> RunConfig:
    """Tell the manifest from the overrides: an argument with ``=`` that is no file is an override."""
    manifests = [a for a in arguments if "=" not in a or _is_file(a)]
    if len(manifests) > 1:
        raise ConfigError(f"expected one manifest, found {', '.join(map(shown, manifests))}")
    overrides = [a for a in arguments if a not in manifests]
    if seed is not None:
        overrides.append(f"training.seed={seed}")
    return load_manifest(Path(manifests[0]) if manifests else None, overrides)


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # a name too long for the file system
        return False


def _default_out(config: RunConfig) -> Path:
    """Return ``runs/<what is learned>-<time>``, numbered where another run took the name in the same second."""
    e = config.environment
    what = e.env_id or (Path(e.dataset[0].path).stem if e.dataset else e.task or "")
    task = "".join(c if c.isalnum() or c in "_-" else "_" for c in what.rpartition(":")[2])
    name = f"{task[:60]}-{datetime.now():%Y%m%d-%H%M%S}"
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(path for path in map(Path("runs").joinpath, names) if not path.exists())


def _check_place(root: Path) -> None:
    """Raise CheckpointError where no run can be written, before anything slow is done; writes nothing."""
    from agilerl.runs.directory import check_vacant

    try:
        check_vacant(root)
        above = next(path for path in (root, *root.absolute().parents) if path.exists())
    except OSError as error:
        raise CheckpointError(f"the directory {shown(str(root))} cannot be used: {error.strerror or error}") from error
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        problem = "is no directory" if not above.is_dir() else "cannot be written to"
        raise CheckpointError(f"the run directory {shown(str(root))} cannot be made: {shown(str(above))} {problem}")


def _quieten_libraries() -> None:
    """Keep progress bars and advice of the libraries out of ours."""
    import transformers

    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
