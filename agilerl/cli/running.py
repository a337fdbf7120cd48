"""A run on the command line: its settings and directory, opening it, and following it to its end."""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from agilerl.arguments import shown
from agilerl.cli.output import say, tell_line, write_error
from agilerl.cli.process_settings import is_debugging
from agilerl.config.manifest import is_set, load_manifest
from agilerl.config.run import RunConfig
from agilerl.errors import CheckpointError, ConfigError, WriteError

if TYPE_CHECKING:
    from agilerl.runs.directory import RunLayout
    from agilerl.runs.stopping import StopRequest
    from agilerl.training.events import Event
    from agilerl.training.resolved import Resolved
    from agilerl.training.saved import SavedRun
    from agilerl.training.setup import Session

_LONGEST_NAME = 255
"""Most bytes of a name on common file systems; otherwise its parent folders would be made before the error."""
_REMEDIES = {
    "nonfinite": "a loss or gradient that was not finite: lower algorithm.lr",
    "oom": "too little memory for a single row: lower network.max_context_length or algorithm.max_output_tokens",
    "reward_error": "no sample graded: fix the grader or the environment",
    "timeout": "a timeout in grading: raise the grader's timeout, or make it faster",
}


def configuration(arguments: Sequence[str], seed: int | None = None, replay: Path | None = None) -> RunConfig:
    """Return the configuration of a command line: a manifest, overrides ``section.key=value``, a seed, a schedule.

    An argument with ``=`` that is not a file is an override. Raises ConfigError for a second manifest, a second seed,
    and for errors in the first.
    """
    manifests = manifests_in(arguments)
    if len(manifests) > 1:
        raise ConfigError(f"expected one manifest, found {', '.join(map(shown, manifests))}")
    overrides = [a for a in arguments if a not in manifests]
    if seed is not None:
        if is_set("training.seed", overrides):
            raise ConfigError(
                f"expected one seed, found --seed {seed} and training.seed as well; leave one of them out"
            )
        overrides.append(f"training.seed={seed}")
    return load_manifest(Path(manifests[0]) if manifests else None, overrides, replay)


def manifest_name(arguments: Sequence[str]) -> str:
    """Return the name of a command line's manifest for messages."""
    manifests = manifests_in(arguments)
    with_yours = ", with your settings" if len(arguments) > len(manifests) else ""
    return f"{shown(manifests[0]) if manifests else 'the embedded default'}{with_yours}"


def manifests_in(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that are no overrides: an argument with ``=`` that is a file is none either."""
    return [a for a in arguments if "=" not in a or _is_file(a)]


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # a name too long for the file system
        return False


def opened_run(
    root: Path,
    expected: RunConfig | None,
    console: Console,
    tell: Callable[[str], None],
    *,
    allow_changes: bool,
    as_json: bool,
) -> "SavedRun | None":
    """Open an unfinished run, of the ``expected`` configuration if given; print and return None if it is finished.

    With ``as_json``, ``tell`` prints the summary of a finished run.
    """
    from agilerl.runs.directory import RunLayout, check_not_in_use, read_run

    info, layout = read_run(root), RunLayout(root)
    check_not_in_use(root)  # before slow imports; the lock below decides which process is first
    from agilerl.runs.strict_json import read_json
    from agilerl.training.resolved import recorded, resolve
    from agilerl.training.saved import open_run

    if expected is not None:
        recorded(info)
        _check_same(info, resolve(expected), root)
    if not layout.is_finished:
        return open_run(root, report=say, allow_changes=allow_changes)
    _complete(layout)
    console.print(f"The run in {root} is finished; there is nothing left to do. Results: {layout.summary}")
    if as_json:
        tell(json.dumps(read_json(layout.summary), indent=1))
    return None


def _complete(layout: "RunLayout") -> None:
    """Write the report of a finished run if its process died after the summary."""
    if layout.report.exists():
        return
    from agilerl.report import build_report
    from agilerl.runs.atomic import remove_leftovers
    from agilerl.runs.directory import check_not_in_use

    check_not_in_use(layout.root)  # another process may be writing it
    remove_leftovers(layout.root)
    build_report([layout.root], layout.report)


def follow(
    start: "Callable[[StopRequest], Iterator[Event]]",
    session: "Session",
    root: Path,
    console: Console,
    *,
    as_json: bool,
    log_json: bool = False,
) -> None:
    """Show a run until it ends, a signal stops it, or a write fails; with ``log_json`` as lines of JSON."""
    from agilerl.cli.progress import log, watch
    from agilerl.runs.directory import RunLayout
    from agilerl.runs.stopping import Interrupted, stop_on_signals

    # A live table would overwrite a line on its own terminal, and says it itself.
    live = console.is_terminal and not console.quiet and os.isatty(2)
    with stop_on_signals((lambda _: None) if live else say_at_once) as stop:
        try:
            if log_json and not console.quiet:
                summary = log(start(stop), session, tell_line, stop=stop)
            else:
                summary = watch(start(stop), session, console, stop=stop)
        except Interrupted as interrupted:
            if stop.lost is not None and not isinstance(stop.lost, BrokenPipeError):
                raise WriteError(f"{write_error(stop.lost)}; {interrupted}") from stop.lost
            say(str(interrupted))
            sys.exit(interrupted.code)
        except KeyboardInterrupt:
            say(f"interrupted; resume from the last checkpoint with: agilerl resume {root}")
            sys.exit(130)
        except WriteError as error:
            if not RunLayout(root).run_json.exists():
                raise
            told = str(error).rstrip(".")
            raise WriteError(f"{told}. Free space or fix the cause, then run: agilerl resume {root}") from error
    if as_json:
        print(json.dumps(summary, indent=1))


def work_along(start: "Callable[[StopRequest], Iterator[Event]]", session: "Session", root: Path) -> None:
    """Run a process that does not write or print, until the run ends or a signal stops it."""
    from agilerl.runs.stopping import Interrupted, stop_on_signals

    with stop_on_signals(lambda _: None) as stop:
        try:
            for _ in start(stop):
                pass
        except Interrupted as interrupted:
            sys.exit(interrupted.code)
        except KeyboardInterrupt:
            sys.exit(130)


def fail_without_elite(root: Path) -> None:
    """If a finished run has no elite, print the likely cause and exit with code 1."""
    from agilerl.runs.directory import RunLayout
    from agilerl.runs.journal import read_lines
    from agilerl.runs.strict_json import read_json

    layout = RunLayout(root)
    if read_json(layout.summary).get("elite") is not None:
        return
    outcomes = Counter(line["outcome"] for line in read_lines(layout.metrics) if line["kind"] == "train")
    say(f"error: the run has no elite: {_likely_cause(outcomes)}")
    sys.exit(1)


def _likely_cause(outcomes: Counter[str]) -> str:
    """Return a sentence: why no agent was fit, judged by the outcomes of all iterations, and what to do."""
    if not outcomes:
        return (
            "training.max_seconds or max_tokens was used up before the first iteration (the base is tested first); "
            "raise it, or lower environment.test_prompts"
        )
    failures = Counter({outcome: count for outcome, count in outcomes.items() if outcome != "ok"})
    if not failures:
        return (
            "every agent learned, but no exam gave a finite fitness: the grader returned None (no grade) for a part of "
            "each; return a number for every completion, 0.0 for a wrong one"
        )
    (outcome, count), total = failures.most_common(1)[0], outcomes.total()
    many = "every update of every agent" if count == total else f"{count} of {total} updates"
    return f"{many} ended with {_REMEDIES.get(outcome, outcome)}"


def found_text(root: Path, session: "Session") -> str:
    """Return a sentence about where a run is resumed."""
    if session.saved is None:
        damaged = next((root / "checkpoints").glob("*.corrupt"), None) is not None
        return f"Resuming {root}: no {'intact checkpoint' if damaged else 'checkpoint yet'}, so from the beginning."
    done, agents = session.saved.progress, len(session.population.everyone)
    return (
        f"Resuming {root} after iteration {done.iteration} (checkpoint {session.saved.path.name}): generation "
        f"{done.generation}, {agents} agent{'s' * (agents != 1)}, {done.samples:,} of "
        f"{session.config.training.max_steps:,} samples."
    )


def _check_same(info: Mapping[str, Any], expected: "Resolved", root: Path) -> None:
    """Raise ConfigError, naming the setting, if a run was started with other settings.

    A value that the base or the task supplied, such as the learning rate, is in ``config`` of ``run.json`` but was not
    asked for; so the request is compared with the request.
    """
    from agilerl.training.resolved import document_of

    asked = document_of(RunConfig.from_dict(info.get("given") or info["config"]))
    wanted, given = expected.document(), expected.given()
    different = [
        (section, name)
        for section, settings in wanted.items()
        for name in {**settings, **asked.get(section, {})}
        if settings.get(name) not in (info["config"].get(section, {}).get(name), asked.get(section, {}).get(name))
    ]
    # What was set comes before what follows from it, as the seed of the algorithm does.
    for section, name in sorted(different, key=lambda setting: setting[1] not in given.get(setting[0], {})):
        before, now, path = info["config"].get(section, {}).get(name), wanted[section].get(name), f"{section}.{name}"
        while isinstance(before, Mapping) and isinstance(now, Mapping):
            keys = [key for key in {**now, **before} if before.get(key) != now.get(key)]
            if not keys:
                break
            before, now, path = before.get(keys[0]), now.get(keys[0]), f"{path}.{keys[0]}"
        raise ConfigError(
            f"the run in {str(root)!r} was started with {path}={shown(before)}, now it is "
            f"{shown(now) if name in given.get(section, {}) else 'left out'}; use the same settings, or another "
            "directory"
        )


def say_at_once(sentence: str) -> None:
    """Print from a signal handler, where Python's streams refuse a second writer."""
    with suppress(OSError):  # standard error may be closed
        os.write(2, f"{sentence}\n".encode(errors="backslashreplace"))


def check_place(root: Path, *, overwrite: bool = False) -> None:
    """Raise CheckpointError if a run cannot be written here; fast, and writes nothing."""
    from agilerl.runs.directory import check_vacant

    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in root.parts):
        raise CheckpointError(f"the directory {shown(str(root))} cannot be used: File name too long")
    try:
        str(root).encode()
    except UnicodeEncodeError:  # the tokenizer's library would refuse the name at the end of the run
        raise CheckpointError(
            f"the run directory {shown(str(root))} has a name that this locale cannot encode; choose another name, or "
            "set LC_ALL=C.UTF-8"
        ) from None
    for path in (root, *root.absolute().parents):
        if path.is_symlink() and not path.exists():
            raise CheckpointError(
                f"the run directory {shown(str(root))} cannot be made: {shown(str(path))} is a broken link"
            )
    try:
        check_vacant(root, overwrite=overwrite)
        above = next(path for path in (root, *root.absolute().parents) if path.exists())
    except OSError as error:
        raise CheckpointError(f"the directory {shown(str(root))} cannot be used: {error.strerror or error}") from error
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        problem = "is not a directory" if not above.is_dir() else "cannot be written to"
        raise CheckpointError(f"the run directory {shown(str(root))} cannot be made: {shown(str(above))} {problem}")


def quieten_libraries() -> None:
    """Turn off the progress bars and advice of libraries, unless they are asked for with ``--debug``."""
    if is_debugging():
        return
    import transformers

    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
