"""A run on the command line: its settings and directory, opening it, and following it to its end."""

import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from agilerl.checks.arguments import counted, shown
from agilerl.cli.output import say, write_error
from agilerl.cli.process_settings import is_debugging
from agilerl.config.manifest import is_set, load_manifest
from agilerl.config.run import RunConfig
from agilerl.errors import CheckpointError, ConfigError, WriteError

if TYPE_CHECKING:
    from agilerl.runs.stopping import StopRequest
    from agilerl.training.setup import Session

_LONGEST_NAME = 255
"""Most bytes of a name on common file systems; otherwise its parent folders would be made before the error."""
REMEDIES = {
    "nonfinite": "a loss or gradient that was not finite: lower algorithm.lr",
    "oom": "too little memory for a single row: lower algorithm.max_model_len or max_output_tokens",
    "reward_error": "no sample graded: fix the grader or the environment",
    "timeout": "a timeout in grading: raise the grader's timeout, or make it faster",
}
"""By the outcome of an update that failed: what was wrong, and what to do."""


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


def manifests_in(arguments: Sequence[str]) -> list[str]:
    """Return the arguments that are no overrides: an argument with ``=`` that is a file is none either."""
    return [a for a in arguments if "=" not in a or is_file(a)]


def is_file(name: str) -> bool:
    """Return whether an argument is the name of a file."""
    try:
        return Path(name).is_file()
    except OSError:  # a name too long for the file system
        return False


@contextmanager
def stoppable(root: Path, console: Console, *, speaks: bool = True) -> Iterator["StopRequest"]:
    """Inside, a signal or a lost console asks the run in ``root`` to stop; what then ends it becomes an exit code.

    Only the process that ``speaks`` prints how to resume.
    """
    from agilerl.runs.directory import RunLayout
    from agilerl.runs.stopping import Interrupted, stop_on_signals

    # A live table would overwrite a line on its own terminal, and says it itself.
    live = console.is_terminal and not console.quiet and os.isatty(2)
    with stop_on_signals(say_at_once if speaks and not live else lambda _: None) as stop:
        try:
            yield stop
        except Interrupted as interrupted:
            if stop.lost is not None and not isinstance(stop.lost, BrokenPipeError):
                raise WriteError(f"{write_error(stop.lost)}; {interrupted}") from stop.lost
            if speaks:
                say(str(interrupted))
            sys.exit(interrupted.code)
        except KeyboardInterrupt:
            if speaks:
                say(f"interrupted; resume from the last checkpoint with: agilerl resume {root}")
            # 128 + SIGINT, as shells report a process that Ctrl-C has ended.
            sys.exit(130)
        except WriteError as error:
            # Without run.json there is nothing to resume.
            if not speaks or not RunLayout(root).run_json.exists():
                raise
            reason = str(error).rstrip(".")
            raise WriteError(f"{reason}. Free space or fix the cause, then run: agilerl resume {root}") from error


def fail_without_elite(root: Path) -> None:
    """If a finished run has no elite, print why no agent was fit, and what to do, and exit with code 1."""
    from agilerl.runs.directory import RunLayout
    from agilerl.runs.journal import read_lines
    from agilerl.runs.strict_json import read_json

    layout = RunLayout(root)
    if read_json(layout.summary).get("elite") is not None:
        return
    outcomes = Counter(line["outcome"] for line in read_lines(layout.metrics) if line["kind"] == "train")
    failures = Counter({outcome: count for outcome, count in outcomes.items() if outcome != "ok"})
    if not outcomes:
        cause = (
            "training.max_seconds or max_tokens was used up before the first iteration (the base is tested first); "
            "raise it, or lower environment.test_prompts"
        )
    elif not failures:
        cause = (
            "every agent learned, but no exam gave a finite fitness: the grader returned None (no grade) for a part of "
            "each; return a number for every completion, 0.0 for a wrong one"
        )
    else:
        (outcome, count), total = failures.most_common(1)[0], outcomes.total()
        many = "every update of every agent" if count == total else f"{count} of {total} updates"
        cause = f"{many} ended with {REMEDIES.get(outcome, outcome)}"
    say(f"error: the run has no elite: {cause}")
    sys.exit(1)


def resume_text(root: Path, session: "Session") -> str:
    """Return a sentence about where a run is resumed."""
    if session.saved is None:
        damaged = next((root / "checkpoints").glob("*.corrupt"), None) is not None
        return f"Resuming {root}: no {'intact checkpoint' if damaged else 'checkpoint yet'}, so from the beginning."
    done, agents = session.saved.progress, len(session.population.agents)
    return (
        f"Resuming {root} after iteration {done.iteration} (checkpoint {session.saved.path.name}): generation "
        f"{done.generation}, {counted(agents, 'agent')}, {done.samples:,} of "
        f"{session.config.training.max_steps:,} samples."
    )


def check_same(info: Mapping[str, Any], wanted: Mapping[str, Any], set_now: Mapping[str, Any], root: Path) -> None:
    """Raise ConfigError, naming the setting, if a run was started with other settings.

    ``wanted`` are all settings now, ``set_now`` those that were set. A value that the base or the task supplied, as
    with the learning rate, is in ``config`` of ``run.json`` but was not asked for; so the request is compared with the
    request.
    """
    from agilerl.report.load import flatten
    from agilerl.training.resolved import document_of

    request = document_of(RunConfig.from_dict(info.get("given") or info["config"]))
    recorded, asked, now, was_set = (dict(flatten(part)) for part in (info["config"], request, wanted, set_now))
    different = [name for name in {**now, **asked} if now.get(name) not in (recorded.get(name), asked.get(name))]
    if different:
        # What was set comes before what follows from it, as the seed of the algorithm does.
        name = min(different, key=lambda name: name not in was_set)
        raise ConfigError(
            f"the run in {str(root)!r} was started with {name}={shown(recorded.get(name))}, now it is "
            f"{shown(now.get(name)) if name in was_set else 'left out'}; use the same settings, or another directory"
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


def check_new_folder(out: Path) -> None:
    """Raise ConfigError unless a folder can be made here; nothing is replaced."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{shown(str(out))} exists; choose another folder, or delete that one first")


@contextmanager
def whole_folder(out: Path) -> Iterator[None]:
    """Remove an empty folder, so that it can be made; report errors of the disk as WriteError."""
    try:
        if out.exists():
            out.rmdir()
        yield
    except OSError as error:
        raise WriteError(f"{shown(str(out))} could not be written: {error.strerror or error}") from error


def quieten_libraries() -> None:
    """Turn off the progress bars and advice of libraries, unless they are asked for with ``--debug``."""
    if is_debugging():
        return
    import transformers

    library: Any = transformers.utils.logging
    library.set_verbosity_error()
    library.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
