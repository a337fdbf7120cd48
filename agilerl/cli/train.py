"""``agilerl train``: the plan, the progress, the result."""

import json
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from agilerl.errors import ConfigError
from agilerl.training.config import RunConfig, load_manifest

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
    from agilerl.runs.directory import check_vacant
    from agilerl.training.loop import train
    from agilerl.training.setup import build

    root = out if out is not None else _default_out(config)
    check_vacant(root)
    console = Console(quiet=quiet or as_json)
    session = build(config)
    if as_json and dry_run:
        print(json.dumps(plan_document(session, root), indent=1))
        return
    print_plan(session, root, console)
    if dry_run:
        console.print("Dry run: everything checked, nothing written.")
        return
    summary = watch(train(session, root, command=["agilerl", *sys.argv[1:]]), session, console)
    if as_json:
        print(json.dumps(summary, indent=1))


def _config(arguments: Sequence[str], seed: int | None) -> RunConfig:
    """Tell the manifest from the overrides: an argument with ``=`` that is no file is an override."""
    manifests = [a for a in arguments if "=" not in a or Path(a).is_file()]
    if len(manifests) > 1:
        raise ConfigError(f"expected one manifest, found {', '.join(map(repr, manifests))}")
    overrides = [a for a in arguments if a not in manifests]
    if seed is not None:
        overrides.append(f"training.seed={seed}")
    return load_manifest(Path(manifests[0]) if manifests else None, overrides)


def _default_out(config: RunConfig) -> Path:
    task = config.environment.task.rpartition(":")[2]
    return Path("runs") / f"{task}-{datetime.now():%Y%m%d-%H%M%S}"


def _quieten_libraries() -> None:
    """Keep progress bars and advice of the libraries out of ours."""
    import transformers

    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
