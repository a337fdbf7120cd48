"""The program and its commands, each imported when it is needed."""

import copy
import inspect
import platform
import re
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from agilerl.cli.process_settings import apply, debug, loading_done
from agilerl.errors import ConfigError
from agilerl.gone import instead

_NAMES = "init train resume report lineage schedule eval chat merge export serve push compare probe fetch"
_LOADING = ("train", "resume", "eval", "chat", "merge", "probe")
"""Commands that load a model."""


def _module(command: str) -> ModuleType:
    """Return the module of a command, which is its function ``run_NAME``."""
    module: ModuleType
    if command in ("train", "resume"):
        from agilerl.cli import launch as module
    elif command in ("eval", "chat", "merge", "export", "push", "compare"):
        from agilerl.cli import after as module
    elif command == "serve":
        from agilerl.cli import serve as module
    else:
        from agilerl.cli import commands, fetch, init, probe

        module = {"fetch": fetch, "init": init, "probe": probe}.get(command, commands)
    return module


class _Commands(TyperGroup):
    """The commands; each has the option ``--debug`` as the program itself does."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: dict[str, Any] = dict.fromkeys(_NAMES.split())  # in the order of the help

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by its name."""
        if cmd_name in self.commands and self.commands[cmd_name] is None:
            # An application of one command each: only the module of the command that was asked for is imported.
            alone = typer.Typer(add_completion=False)
            alone.command(cmd_name)(getattr(_module(cmd_name), f"run_{cmd_name}"))
            command: Any = typer.main.get_command(alone)
            # Typer keeps the breaks of a docstring's lines.
            command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.cleandoc(command.help))
            # --debug after the command's name, too. Its callback does everything: the function does not get the value.
            option = copy.copy(next(option for option in self.params if option.name == "debug"))
            option.expose_value = False
            command.params.append(option)
            self.commands[cmd_name] = command
        if sentence := instead(f"agilerl {cmd_name}"):
            raise ConfigError(sentence)
        return self.commands.get(cmd_name)


app = typer.Typer(
    name="agilerl",
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 failed, 2 wrong input, 129, 130 or 143 stopped by SIGHUP, Ctrl-C or SIGTERM, 141 the "
    "reader of the output is gone.",
    pretty_exceptions_enable=False,
)


def _debug(value: bool) -> bool:
    if value:
        debug(True)
    return value


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, Option("--version", help="Print all versions that matter, and exit.")] = False,
    debug: Annotated[
        bool, Option("--debug", callback=_debug, help="Show the traceback of an error, and what libraries print.")
    ] = False,
) -> None:
    """Evolve a population of LoRA agents on one frozen base model."""
    if version:
        from agilerl import __version__
        from agilerl.cli.output import console, facts
        from agilerl.errors import DISTRIBUTION, mixed_installation
        from agilerl.runs import collect_versions

        typer.echo(f"agilerl {__version__}")
        origin = mixed_installation() or f"{DISTRIBUTION} in {Path(__file__).resolve().parents[1]}"
        versions = ((name, version or "not installed") for name, version in collect_versions().items())
        console().print(facts([("installation", origin), ("platform", platform.platform()), *versions]))
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    if context.invoked_subcommand in _LOADING:
        apply()  # before the slow imports, which it makes faster
        context.call_on_close(loading_done)  # in case the command ends while it is loading
