"""``agilerl train`` and ``agilerl resume``: the plan, the progress, the result."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from agilerl.cli.output import console as new_console
from agilerl.cli.output import say
from agilerl.cli.running import (
    check_place,
    configuration,
    default_out,
    follow,
    found_text,
    opened_run,
    quieten_libraries,
)
from agilerl.config.distributed import DistributedConfig, asked_for
from agilerl.config.run import RunConfig
from agilerl.errors import ConfigError

__all__ = ["run_resume", "run_train"]

_REMEDIES = {
    "nonfinite": "a loss or gradient that was not finite: lower algorithm.lr",
    "oom": "too little memory for a single row: lower network.max_context_length or algorithm.max_output_tokens",
    "reward_error": "no sample that could be graded: mend the grader or the environment",
    "timeout": "grading out of time: give the grader more, or make it faster",
}


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
    try:
        config = configuration(arguments, seed)
    except ConfigError as error:
        if not asked_for(DistributedConfig()):
            raise
        _together(error, out, goes_on=resume == "auto", quiet=quiet)  # so that it is said once
        return
    if resume == "auto" and out is None:
        raise ConfigError("--resume auto goes on with the run in --out, found no --out; name the directory")
    options = {"allow_code": allow_code, "dry_run": dry_run, "quiet": quiet, "as_json": as_json}
    if asked_for(config.distributed):
        _together(config, out, goes_on=resume == "auto", **options)
        return
    if config.distributed.backend == "ray" and not dry_run:
        from agilerl.cli.on_ray import run_on_ray

        run_on_ray(config, out or default_out(config), goes_on=resume == "auto", **options)
        return
    from agilerl.runs.directory import RunLayout

    root = out if out is not None else default_out(config)
    if resume == "auto" and not dry_run and RunLayout(root).run_json.exists():
        run_resume(root, allow_code=allow_code, quiet=quiet, as_json=as_json, expected=config)
        return
    check_place(root)
    quieten_libraries()
    # Imported once manifest and place are known to be good: a typo, or a second process, should not cost seconds.
    from agilerl.cli.preview import plan_document, print_plan
    from agilerl.training.loop import train
    from agilerl.training.setup import build

    console = new_console(quiet=quiet or as_json)
    session = build(config, allow_code=allow_code)
    if as_json and dry_run:
        print(json.dumps(plan_document(session, root), indent=1))
        return
    print_plan(session, root, console)
    if dry_run:
        console.print("Dry run: everything checked, nothing written.")
        return
    command = ["agilerl", *sys.argv[1:]]
    follow(lambda stop: train(session, root, command=command, stop=stop), session, root, console, as_json=as_json)
    _fail_without_elite(root)


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
    if asked_for(expected.distributed if expected is not None else DistributedConfig()):
        options = {"allow_code": allow_code, "allow_changes": allow_changes, "quiet": quiet, "as_json": as_json}
        _together(expected, root, goes_on=True, **options)
        return
    saved = opened_run(root, expected, allow_changes=allow_changes, quiet=quiet, as_json=as_json)
    if saved is None:
        _fail_without_elite(root)
        return
    from agilerl.training.loop import resume
    from agilerl.training.setup import build

    console = new_console(quiet=quiet or as_json)
    try:
        session = build(saved.config.typed_with(expected), saved.checkpoint, allow_code=allow_code)
    except BaseException:
        saved.run.close()
        raise
    console.print(found_text(root, session))
    follow(lambda stop: resume(session, saved.run, stop=stop), session, root, console, as_json=as_json)
    _fail_without_elite(root)


def _fail_without_elite(root: Path) -> None:
    """Leave with exit code 1, and say the likely cause, where a finished run has no agent to give."""
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
    """Return in a sentence why no agent was fit, and what to do, from the outcomes of all iterations of all agents."""
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


def _together(config: RunConfig | ConfigError | None, root: Path | None, *, goes_on: bool, **options: bool) -> None:
    """Do it together with the processes that a launcher has started beside this one."""
    from agilerl.cli.several import Wish, run_together

    run_together(Wish(config, root, goes_on, **options))
