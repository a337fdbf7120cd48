"""``agilerl serve``: adapters behind vLLM's own server, each under a model name of its own.

A run may come from a stranger. All of it that reaches vLLM's command line is a base (a folder of this machine, or a
name on the hub), folders with adapters in safetensors, and values that were checked; never ``--trust-remote-code``.
"""

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from agilerl.checks.arguments import shown
from agilerl.cli.adapter import Subject, subject
from agilerl.cli.options import AdapterPath
from agilerl.cli.output import say, tell_line
from agilerl.config.base_model import NetworkConfig
from agilerl.config.training import TrainingConfig
from agilerl.config.vllm import adapter_options, how_to_install_vllm, installed_vllm, lora_capacity
from agilerl.errors import CheckpointError, ConfigError
from agilerl.models.model_config import check_model_folder
from agilerl.models.tiny import tiny_model_path
from agilerl.report.card import EMBEDDED, is_hub_name
from agilerl.runs import RunLayout, newest_agents, read_run
from agilerl.runs.directory import ADAPTER_CONFIG
from agilerl.runs.strict_json import read_json

BASE = "base"
"""Name that clients ask the base by."""
_NO_STATISTICS = {"VLLM_NO_USAGE_STATS": "1"}
_ON_A_CPU = ("--enforce-eager", "--kv-cache-memory-bytes", "1G")
"""Without them a CPU build compiles for minutes, and takes nearly all of the machine's memory."""


def run_serve(
    path: AdapterPath,
    more: Annotated[list[str] | None, Argument(metavar="-- VLLM_OPTIONS", help="Options for vllm serve.")] = None,
    *,
    population: Annotated[
        bool, Option("--population", help="Serve all agents of the run's newest checkpoint as well.")
    ] = False,
    host: Annotated[str, Option(help="Address to listen on; 0.0.0.0: other machines can ask.")] = "127.0.0.1",
    port: Annotated[int, Option(help="Port to listen on.", metavar="PORT", min=1, max=65535)] = 8000,
    dry_run: Annotated[bool, Option("--dry-run", help="Print the command, and start nothing.")] = False,
) -> None:
    """Serve an adapter with vLLM, behind the API of OpenAI; with --population each agent under a name of its own.

    The names to ask for are base, elite, agent-0, agent-1 and so on. What stands after -- goes to vllm serve as it is.

    agilerl serve runs/mine

    agilerl serve runs/mine --population --port 9000 -- --max-model-len 4096
    """
    # The adapters to serve
    folders = _population(path) if population else {}
    adapter = subject(next(iter(folders.values())) if folders else path, examined=False, loaded=False)
    folders = folders or {_name(adapter.folder): adapter.folder}
    # The command for vLLM
    installed, program = installed_vllm(), ["vllm", "serve"]
    of_a_cpu = installed is not None and installed[0] != "vllm"
    if of_a_cpu:
        # `vllm serve` asks for the version of a distribution that this one is not.
        program = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
    of_run = _run_options(adapter.config.training, adapter.config.network, adapter.run)
    options = [
        *("--served-model-name", BASE, "--host", host, "--port", str(port), *of_run),
        *("--logprobs-mode", "processed_logprobs"),  # those of the distribution that is drawn from, as in training
        *_ON_A_CPU * of_a_cpu,
        *adapter_options({name: str(folder) for name, folder in folders.items()}, _room(folders.values())),
    ]
    command = [*program, servable_base(adapter.base), *options, *(more or ())]
    for sentence in _differences(adapter):
        say(f"note: {sentence}")
    if dry_run:
        print(_write_command(command))
        return
    # Beside this Python first: its environment need not be activated.
    folders_of_programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    if (file := shutil.which(command[0], path=folders_of_programs)) is None:
        raise ConfigError(
            f"serving needs vLLM, which is not installed: {how_to_install_vllm()}; or run what --dry-run prints where "
            "vLLM is"
        )
    tell_line(f"Starting vLLM: models {', '.join([BASE, *folders])} at http://{host}:{port}/v1")
    # In place of this process: signals reach vLLM, and its exit code is the command's. The user's own value of a
    # variable wins.
    os.execve(file, command, {**_NO_STATISTICS, **os.environ})


def _population(run: Path) -> dict[str, Path]:
    """Return the adapters of a run's elite and of all agents of its newest checkpoint, by the names to ask them by."""
    read_run(run)
    layout = RunLayout(run)
    agents = newest_agents(layout.checkpoints)
    # Before the run has finished, the elite is the one in the checkpoint.
    elite = layout.elite if (layout.elite / ADAPTER_CONFIG).is_file() else agents.pop("elite", None)
    others = {name.replace("_", "-"): folder for name, folder in agents.items() if name != "elite"}
    return ({} if elite is None else {"elite": elite}) | others


def _name(folder: Path) -> str:
    """Return the name of a folder's adapter: ``elite``, ``agent-2``, or what the folder is called."""
    folder = folder.parent if folder.name == "actor" else folder
    # The names that clients use have hyphens: agent-2 for the folder agent_2.
    name = re.sub(r"[^\w.-]+|_", "-", folder.absolute().name).strip("-.")
    return name if name and name != BASE else "adapter"


def _room(folders: Iterable[Path]) -> int:
    """Return the value of --max-lora-rank that holds the adapters; raises CheckpointError for one that is damaged."""
    ranks = []
    for folder in folders:
        written = read_json(folder / ADAPTER_CONFIG)
        rank = written.get("r")
        if written.get("alora_invocation_tokens"):
            raise ConfigError(
                f"the adapter in {shown(str(folder))} is activated (alora_invocation_tokens): vLLM does not know that, "
                "and would let it act on prompts as well; use agilerl chat, or load it with PEFT"
            )
        if type(rank) is not int or rank < 1:
            raise CheckpointError(f"{folder / ADAPTER_CONFIG}: expected a rank r of 1 or more, found {shown(rank)}")
        if not (folder / "adapter_model.safetensors").is_file():  # vLLM would look for pickled weights
            raise CheckpointError(f"expected adapter_model.safetensors in {folder}, found none")
        ranks.append(rank)
    return lora_capacity(max(ranks))


def servable_base(name: str) -> str:
    """Return what vLLM loads: a folder, or a name on the hub; nothing that it would read as an option or an address."""
    folder = tiny_model_path() if name == EMBEDDED else Path(name).expanduser()
    if folder.is_dir():
        check_model_folder(folder)
        return str(folder.absolute())
    if folder.is_file():
        from agilerl.models.gguf import base_folder

        return str(base_folder(folder, "float32"))
    if not is_hub_name(name):
        raise ConfigError(f"expected a base in a folder of this machine or by its name on the hub, found {shown(name)}")
    return name


def _run_options(training: TrainingConfig, network: NetworkConfig, run: Path | None) -> list[str]:
    """Return the options that make vLLM compute as the run did: its data type, and its chat template."""
    options = []
    if training.dtype != "auto":
        options += ["--dtype", training.dtype]
    elif run is not None and training.device == "cpu":
        options += ["--dtype", "float32"]  # vLLM's own choice is 16 bits, for a base in 32 too
    if network.chat_template_path is not None and (template := _template(run)) is not None:
        options += ["--chat-template", str(template)]
    if network.chat_template_kwargs:
        options += ["--default-chat-template-kwargs", json.dumps(network.chat_template_kwargs)]
    return options


def _template(run: Path | None) -> Path | None:
    """Return the chat template that a run has written beside its elite."""
    file = None if run is None else RunLayout(run).elite / "chat_template.jinja"
    return file if file is not None and file.is_file() else None


def _differences(adapter: Subject) -> Iterator[str]:
    """Yield in words what the run did with prompts and answers that a server does not do by itself."""
    from agilerl.envs.answer_format import AnswerFormat

    environment, network = adapter.config.environment, adapter.config.network
    for message in environment.conversation_template or ():
        if message.get("role") == "system":
            text = shown(" ".join(message.get("content", "").split()))
            yield f"the run's prompts begin with a system message, which a client has to send: {text}"
    if instruction := AnswerFormat.of(environment).instruction:
        yield f"the run's questions end with an instruction, which a client has to send: {shown(instruction)}"
    if (folder := Path(servable_base(adapter.base))).is_dir():
        from agilerl.models.base import load_tokenizer
        from agilerl.text.contract import named_tokens, unstated_ends

        tokenizer = load_tokenizer(
            str(folder), **{**network.of_tokenizer, "chat_template_path": _template(adapter.run)}
        )
        if ends := unstated_ends(tokenizer):
            text = named_tokens(tokenizer, ends)
            yield f"the run's answers end with {text}, which the base's files do not state: send stop_token_ids={ends}"
    if not environment.apply_chat_template:
        yield "the run's prompts have no chat template: ask client.completions, not client.chat"
    if stops := network.stop_sequences or (network.vllm_config and network.vllm_config.stop_sequences):
        yield f"the run ended its answers at {shown(stops)}: send that as stop"
    if network.chat_template_path is not None and _template(adapter.run) is None:
        yield "the run has a chat template of its own, which will be in its elite/: name it after --, --chat-template"
    if overrides := network.config_overrides:
        yield f"the run changed the base's configuration: -- --hf-overrides {shlex.quote(json.dumps(overrides))}"


def _write_command(command: Sequence[str]) -> str:
    """Return a command for a shell, an option a line."""
    settings = [f"{name}={value} " for name, value in _NO_STATISTICS.items() if name not in os.environ]
    first, *rest = map(shlex.quote, command)
    words = (f" \\\n  {word}" if word.startswith("--") else f" {word}" for word in rest)
    return "".join([*settings, first, *words])
