"""``agilerl train ... distributed.backend=ray``: this process starts the islands on Ray, and says what they say."""

import json
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from rich.console import Console

from agilerl.config.run import RunConfig
from agilerl.errors import AgileRLError, ConfigError, EngineError, WriteError

if TYPE_CHECKING:
    from agilerl.cli.several import Wish
    from agilerl.runs.stopping import StopRequest

__all__ = ["run_on_ray", "serving", "work"]


def run_on_ray(
    config: RunConfig,
    root: Path,
    *,
    goes_on: bool,
    allow_code: bool,
    dry_run: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Train on a Ray cluster; see ``agilerl train --help``."""
    from agilerl.cli.output import say
    from agilerl.cli.running import say_at_once
    from agilerl.cli.several import Wish
    from agilerl.distributed.ray_launcher import launch
    from agilerl.runs.stopping import stop_on_signals

    d = config.distributed
    if d.islands > config.training.pop_size:
        raise ConfigError(
            f"there are more islands than agents: distributed.islands={d.islands}, "
            f"training.pop_size={config.training.pop_size}; lower the first, or raise the second"
        )
    wish = Wish(config, root.absolute(), goes_on, allow_code, False, dry_run, quiet, as_json)
    # What was lost has left a run to go on with, or nothing at all.
    width = shutil.get_terminal_size().columns
    works = [partial(work, w, os.getcwd(), width) for w in (wish, replace(wish, goes_on=True))]
    ended = launch(d, works, _out, lambda: stop_on_signals(say_at_once), serving(config))
    if ended.kind == "crashed":
        say(ended.text)
        raise EngineError("a process of the run ended with an error that is no user's mistake; it stands above")
    if ended.kind == "error":
        raise (WriteError if ended.code == 1 else AgileRLError)(ended.text)
    if ended.kind == "interrupted":
        say(ended.text)
        sys.exit(ended.code)


def work(
    wish: "Wish", folder: str, width: int, stop: "StopRequest", say: Callable[[str], None], url: str | None
) -> None:
    """Do the part of one process, and say what the user is to see; an actor calls this."""
    from agilerl.cli.preview import print_plan
    from agilerl.cli.progress import watch
    from agilerl.cli.running import found_text, quieten_libraries
    from agilerl.cli.several import events_of, prepare
    from agilerl.distributed.topology import connected

    if Path(folder).is_dir():
        os.chdir(folder)  # paths in a manifest may start there
    quieten_libraries()
    with connected(wish.distributed, cuda=wish.on_cuda, server=url) as topology, ExitStack() as opened:
        with topology.world.telling():
            prepared = prepare(wish, topology, opened)
        if prepared is None:
            if topology.is_writer and not wish.quiet:
                say(f"The run in {wish.root} is finished: nothing is left to do.")
            return
        silent = wish.quiet or wish.as_json or not topology.is_writer
        console = Console(
            file=cast(IO[str], _Lines(say)), width=width, quiet=silent, markup=False, emoji=False, highlight=False
        )
        session, root = prepared.session, prepared.root
        if prepared.run is not None:
            console.print(found_text(root, session))
        else:
            print_plan(session, root, console)
        with topology.peers.telling():
            summary = watch(events_of(prepared, stop), session, console)
        if wish.as_json and topology.is_writer:
            say(json.dumps(summary, indent=1))


def serving(config: RunConfig) -> list[str]:
    """Return the command that serves the base of a run with vLLM, its adapters loaded while it runs."""
    if not config.distributed.vllm_servers:
        return []
    from agilerl.config.vllm import lora_capacity
    from agilerl.models.base import resolve_model

    rank = config.network.lora_config.r
    if config.mutation.probabilities.arch_mut > 0:
        rank = max(rank, config.mutation.rank_range[1])
    model = str(resolve_model(config.network.pretrained_model_name_or_path))
    size = ["--max-loras", str(config.training.pop_size + 1), "--max-lora-rank", str(lora_capacity(rank))]
    return ["vllm", "serve", model, "--enable-lora", *size, "--logprobs-mode", "processed_logprobs"]


class _Lines:
    """A file for a console: each line that is written to it is said."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._begun = say, ""

    def write(self, text: str) -> int:
        """Say the lines that are whole."""
        *whole, self._begun = (self._begun + text).split("\n")
        for line in whole:
            self._say(line)
        return len(text)

    def flush(self) -> None:
        """A line is said when it is whole."""


def _out(line: str) -> None:
    print(line, flush=True)
