"""``agilerl train``: the plan, the progress, the result."""

import json
import os
import sys
from collections.abc import Sequence
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import Any

from rich.console import Console

from agilerl.errors import CheckpointError, ConfigError
from agilerl.training.config import RunConfig, load_manifest
from agilerl.validation import shown

__all__ = ["run_train"]


def run_train(
    arguments: Sequence[str], *, out: Path | None, seed: int | None, dry_run: bool, quiet: bool, as_json: bool
) -> None:
    """Check, plan, train and show; see ``agilerl train --help``."""
    config = _config(arguments, seed)
    _quieten_libraries()
    # Imported once the manifest is known to be well formed: a typo should not cost seconds of imports.
    from agilerl.cli.plan import plan_document, print_plan
    from agilerl.cli.progress import watch
    from agilerl.training.loop import train
    from agilerl.training.setup import build

    root = out if out is not None else _default_out(config)
    _check_place(root)
    console = Console(quiet=quiet or as_json, markup=False, emoji=False, highlight=False)
    session = build(config)
    if as_json and dry_run:
        print(json.dumps(plan_document(session, root), indent=1))
        return
    print_plan(session, root, console)
    if dry_run:
        console.print("Dry run: everything checked, nothing written.")
        return
    try:
        summary = watch(train(session, root, command=["agilerl", *sys.argv[1:]]), session, console)
    except KeyboardInterrupt:
        print(f"interrupted; what was written lies in {root}", file=sys.stderr)
        sys.exit(130)
    if as_json:
        print(json.dumps(summary, indent=1))


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
    """Return ``runs/<task>-<time>``, numbered where another run took the name in the same second."""
    task = "".join(c if c.isalnum() or c in "_-" else "_" for c in config.environment.task.rpartition(":")[2])
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
