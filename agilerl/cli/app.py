"""The list of commands, with their arguments and help."""

from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(
    name="agilerl",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong input, 129, 130 or 143 stopped by SIGHUP, Ctrl-C or SIGTERM, 141 the "
    "reader of the output is gone.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _path(text: str) -> Path:
    """Return a path; pathlib would read an empty text (e.g. an unset variable) as the working directory."""
    if not text:
        raise typer.BadParameter("expected a path, found an empty text; '.' is the working directory")
    return Path(text)


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MANIFEST] [KEY.PATH=VALUE ...]",
        help="A YAML manifest (without one: the embedded default) and settings that override it.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for programs to read.")]


AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Run the Python code that the manifest names (rewards.py:my_reward, module:Name); read it first.",
    ),
]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Evolve a population of LoRA agents on one frozen base model."""
    if context.invoked_subcommand is None and not version:
        typer.echo(context.get_help())
    if version:
        from agilerl import __version__

        typer.echo(f"agilerl {__version__}")
        raise typer.Exit


@app.command(context_settings={"ignore_unknown_options": False})
def train(
    arguments: Arguments = None,
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", parser=_path, metavar="DIRECTORY", help="Run directory; default runs/<task>-<time>."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of the run (training.seed).", min=0)] = None,
    resume: Annotated[
        Literal["never", "auto"],
        typer.Option(
            "--resume", help="auto: resume the run in --out, if there is one; then the command can be repeated."
        ),
    ] = "never",
    replay: Annotated[
        Path | None,
        typer.Option(
            "--replay",
            parser=_path,
            metavar="FILE",
            help="Train one agent with the hyperparameters of this schedule, from agilerl schedule.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything and print the plan only.")] = False,
    allow_code: AllowCode = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Train a population, evolve it, and ship the best agent as a PEFT adapter.

    Without arguments a tiny model that comes with the package learns to find greatest common divisors, in about three
    minutes on two CPU cores. Examples:

    agilerl train environment.task=reasoning_gym:chain_sum

    agilerl train my.yaml training.pop_size=8 --out runs/mine --seed 1
    """
    from agilerl.cli.process_settings import apply

    apply()  # before the imports, which it makes faster
    from agilerl.cli.launch import run_train

    run_train(
        arguments or [],
        out=out,
        seed=seed,
        resume=resume,
        replay=replay,
        dry_run=dry_run,
        allow_code=allow_code,
        quiet=quiet,
        as_json=as_json,
    )


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False, parser=_path)],
    *,
    allow_code: AllowCode = False,
    allow_changes: Annotated[
        bool,
        typer.Option("--allow-changes", help="Resume even if files that the run reads (data or code) have changed."),
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Resume a run that was stopped or killed, from its newest intact checkpoint.

    On a CPU the result is the same, to the bit, as that of a run that was never interrupted.
    """
    from agilerl.cli.process_settings import apply

    apply()  # before the imports, which it makes faster
    from agilerl.cli.launch import run_resume

    run_resume(run, allow_code=allow_code, allow_changes=allow_changes, quiet=quiet, as_json=as_json)


@app.command()
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN ...", help="Run directories.", show_default=False, parser=_path),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            parser=_path,
            metavar="FILE",
            help="HTML file; default: report.html in the run; for several runs, report-NAME-NAME.html here.",
        ),
    ] = None,
) -> None:
    """Write one self-contained HTML file about a run, or several side by side, and print its path."""
    from agilerl.cli.commands import run_report

    run_report(runs, out)


@app.command()
def schedule(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False, parser=_path)],
    *,
    out: Annotated[
        Path | None, typer.Option("--out", parser=_path, metavar="FILE", help="YAML file; default: schedule.yaml here.")
    ] = None,
    extrapolate: Annotated[
        int | None,
        typer.Option("--extrapolate", metavar="TOKENS", help="Stretch it to an agent that trains on so many.", min=1),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export the hyperparameters that the elite of a run was trained with, followed through its ancestors.

    Values stand against the tokens trained on. The file can be edited, and one agent trains with it:

    agilerl schedule runs/mine --out mine.yaml

    agilerl train my.yaml --replay mine.yaml
    """
    from agilerl.cli.commands import run_schedule

    run_schedule(run, out=out, extrapolate=extrapolate, as_json=as_json)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False, parser=_path)],
    *,
    optuna: Annotated[
        str, typer.Option("--optuna", metavar="STORAGE", help="Address of an Optuna storage: sqlite:///runs.db.")
    ],
    name: Annotated[
        str | None, typer.Option("--name", metavar="STUDY", help="Name of the study; default: the run's folder.")
    ] = None,
) -> None:
    """Write a run to an Optuna storage, where its dashboard shows it: each agent a trial, its exams as curves.

    agilerl export runs/mine --optuna sqlite:///runs.db

    optuna-dashboard sqlite:///runs.db
    """
    from agilerl.report.study import export_study

    count = export_study(run, optuna, name)
    typer.echo(f"{count} trials written to {optuna}")


@app.command()
def check(
    arguments: Annotated[
        list[str],
        typer.Argument(
            metavar="ENV_OR_MANIFEST [KEY=VALUE ...]",
            help="An environment (path.py:Class, module:Class, an id such as agilerl/GuessTheNumber-v0, gem:ID, "
            "textarena:ID, openenv:URL) and keyword arguments for it; or a YAML manifest and settings that override "
            "it.",
            show_default=False,
        ),
    ],
    tokenizer: Annotated[
        str | None,
        typer.Option("--tokenizer", metavar="MODEL", help="Also check that this model's chat template works with it."),
    ] = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Check an environment or a manifest, and explain in sentences what is wrong.

    An environment is made and played for a few episodes. path.py:Class runs the file, module:Class imports the module
    (the current folder is searched first), so their code runs: check only what you would run. A manifest is checked as
    by `agilerl train --dry-run`.
    Exit code 0: no errors, maybe warnings; 1: the environment has errors; 2: it or the manifest cannot be read.

    agilerl check my_module:MyEnv size=5 --tokenizer embedded
    """
    from agilerl.cli.commands import run_check

    run_check(arguments, tokenizer=tokenizer, allow_code=allow_code, as_json=as_json)


@app.command()
def plan(
    arguments: Arguments = None,
    *,
    gpus: Annotated[int, typer.Option("--gpus", help="Number of devices.", min=1, max=4096)] = 1,
    gpu: Annotated[
        str, typer.Option("--gpu", help="b200, h200, h100, h100-pcie, a100-80, a100-40, l40s, a10, l4, or cpu.")
    ] = "cpu",
    prompt_tokens: Annotated[
        int | None, typer.Option("--prompt-tokens", help="Mean length of a prompt; default: the exam's.", min=1)
    ] = None,
    completion_tokens: Annotated[
        int | None, typer.Option("--completion-tokens", help="Mean length of a completion; default: the limit.", min=1)
    ] = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Estimate what a population needs on other machines: memory, time of each phase, and a layout on N GPUs.

    Of the model only config.json is loaded. Times are estimates from the devices' data sheets; with --gpu cpu the
    rates of this machine are measured first. docs/plan.md lists the assumptions and the errors.

    agilerl plan mine.yaml training.pop_size=16 --gpus 8 --gpu h200
    """
    from agilerl.cli.plan import run_plan

    run_plan(
        arguments or [],
        devices=gpus,
        kind=gpu,
        prompt=prompt_tokens,
        completion=completion_tokens,
        allow_code=allow_code,
        as_json=as_json,
    )


@app.command()
def env(as_json: AsJson = False) -> None:
    """Print versions and hardware, for bug reports."""
    from agilerl.cli.commands import run_env

    run_env(as_json=as_json)
