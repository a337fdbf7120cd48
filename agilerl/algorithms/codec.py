"""The one form of an agent's state outside memory: plain parts as JSON and tensors by name, in a folder or as bytes.

It contains no code, and a file may be hostile: it is checked completely before any of it is used.
"""

import copy
import errno
import json
import math
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import safetensors.torch
import torch
from torch import Tensor

from agilerl.algorithms.state import MOMENTS, PLAIN, AgentState, CriticState, PlainState, differences
from agilerl.checks.arguments import Having, Location, checked
from agilerl.errors import CheckpointError, EngineError, WriteError
from agilerl.models import adapters
from agilerl.models.adapters import Factors
from agilerl.models.base import BaseModel
from agilerl.models.slots import LinearShape
from agilerl.runs import strict_json
from agilerl.runs.atomic import commit_folder
from agilerl.runtime import Runtime

_HEAD_FILE = "value_head.safetensors"
_HEADER = 8
"""Bytes that say how long the JSON is; what follows it is safetensors."""


def plain(state: AgentState) -> dict[str, Any]:
    """Return the parts of a state that JSON holds; :func:`assembled` takes them back."""
    # What an older file does not know is not written either.
    return {name: value for name in PLAIN if (value := getattr(state, name)) is not None or name != "loaded"}


def tensors(state: AgentState, layers: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Return all tensors of a state by name, those of an adapter by the names (None: the numbers) of its layers.

    ``adapter.LAYER.A``, ``reference.LAYER.A``, ``exp_avg.LAYER.A``; of a critic the same behind ``critic.``, with
    ``critic.head``, ``critic.exp_avg.head`` and ``critic.steps``.
    """
    names = [str(number) for number in range(len(state.adapter))] if layers is None else list(layers)
    parts = {"adapter": state.adapter, "reference": state.reference or [], **state.moments}
    named: dict[str, Tensor] = {}
    critic = state.critic
    if critic is not None:
        parts |= {"critic.adapter": critic.adapter, **{f"critic.{name}": part for name, part in critic.moments.items()}}
        # The steps are a tensor because the plain parts say nothing of a critic.
        named |= {"critic.head": critic.head, "critic.steps": torch.tensor(critic.optimizer_steps, dtype=torch.float64)}
        named |= {f"critic.{name}.head": tensor for name, tensor in critic.head_moments.items()}
    for part, factors in parts.items():
        named |= {f"{part}.{name}.{side}": t for name, pair in zip(names, factors) for side, t in zip("AB", pair)}
    return named


def assembled(
    values: Mapping[str, Any], named: Mapping[str, Tensor], layers: Iterable[str] | None = None
) -> AgentState:
    """Return the state of these :func:`plain` parts and :func:`tensors`."""
    if layers is None:
        layers = map(str, range(sum(name.startswith("adapter.") and name.endswith(".A") for name in named)))
    names = list(layers)

    def factors(part: str) -> Factors:
        return [(named[f"{part}.{name}.A"], named[f"{part}.{name}.B"]) for name in names]

    def present(part: str) -> bool:
        return f"{part}.{names[0]}.A" in named

    def moments(prefix: str = "") -> dict[str, Factors]:
        return {name: factors(prefix + name) for name in MOMENTS if present(prefix + name)}

    state = AgentState(**values, adapter=factors("adapter"), moments=moments())
    state.reference = factors("reference") if present("reference") else None
    if "critic.head" in named:
        heads = {name: named[f"critic.{name}.head"] for name in MOMENTS if f"critic.{name}.head" in named}
        steps = float(named["critic.steps"])
        state.critic = CriticState(factors("critic.adapter"), named["critic.head"], moments("critic."), heads, steps)
    return state


def _of_optimizer(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in named.items() if name.removeprefix("critic.").startswith((*MOMENTS, "steps"))}


# -- between processes ------------------------------------------------------------------------------------------------


def packed(state: AgentState) -> bytes:
    """Return a state as bytes: the same state gives the same bytes, and :func:`unpacked` gives the same state."""
    text = json.dumps(plain(state)).encode()
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors(state).items()}
    weights: bytes = safetensors.torch.save(copies)
    return len(text).to_bytes(_HEADER, "big") + text + weights


def unpacked(data: bytes) -> AgentState:
    """Return the state that :func:`packed` made bytes of; its tensors are on the CPU.

    Raises EngineError for other bytes.
    """
    end = _HEADER + int.from_bytes(data[:_HEADER], "big")
    try:
        values = json.loads(data[_HEADER:end])
        PlainState.model_validate(values)
        return assembled(values, safetensors.torch.load(data[end:]))
    except (ValueError, KeyError, IndexError, safetensors.SafetensorError) as error:
        raise EngineError(f"another process sent no agent of this version of agilerl: {error}") from error


# -- in a folder ------------------------------------------------------------------------------------------------------


def actor_folder(folder: Path) -> Path:
    """Return the PEFT folder of a checkpoint's policy: ``actor/``, or the folder itself, as in the elite of a run.

    Raises CheckpointError if there is no checkpoint.
    """
    _check_name(folder)
    if not (folder / "agent.json").is_file():
        elite = folder / "elite"
        hint = f"; the best agent of this run is in {str(elite)!r}" if (elite / "agent.json").is_file() else ""
        raise CheckpointError(f"no agent checkpoint at {str(folder)!r}: agent.json is missing{hint}")
    return folder / "actor" if (folder / "actor").is_dir() else folder


def warn_of_another_base(folder: Path, base: BaseModel, loaded: Mapping[str, Any]) -> None:
    """Warn if the adapter in a PEFT folder was trained on another base or tokenizer, as far as its files say.

    ``loaded`` is ``Runtime.loaded``. An adapter of an agent has ``agent.json`` beside it, or one folder above.
    """
    name, saved = str(adapters.read_config(folder).base_model_name_or_path or ""), None
    for home in (folder, folder.parent):
        if (home / "agent.json").is_file():
            with suppress(CheckpointError):  # the adapter can be read, whatever is beside it
                agent = strict_json.read_json(home / "agent.json", PlainState)
                name, saved = agent["base"], agent.get("loaded")
            break
    # Adapter folders name what the base was loaded from, states what the user called it.
    for difference in differences(base.name if name == base.original else name, saved, base, loaded):
        warnings.warn(f"{folder}: {difference}", stacklevel=3)


def write_state(
    state: AgentState,
    folder: Path,
    runtime: Runtime,
    lora_config: Any,
    *,
    save_optimizer: bool = True,
    actor: str = "actor",
) -> None:
    """Write PEFT folders ``actor/`` and, if there are any, ``reference/`` and ``critic/``; optimizer; ``agent.json``.

    ``actor`` "" puts the policy into the folder itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    layers, source = runtime.store.layers, runtime.base.original
    adapters.write_adapter(folder / actor, layers, state.adapter, lora_config, source)
    if state.reference is not None:
        config = _of_rank(len(state.reference[0][0]), lora_config)
        adapters.write_adapter(folder / "reference", layers, state.reference, config, source)
    critic = state.critic
    if critic is not None:
        adapters.write_adapter(folder / "critic", layers, critic.adapter, lora_config, source)
        head = critic.head.cpu()
        # As a linear layer with one output: [1, H] and [1].
        adapters.write_tensors(folder / "critic" / _HEAD_FILE, {"weight": head[None, :-1], "bias": head[-1:]})
    if save_optimizer:
        named = tensors(state, [layer.name for layer in layers])
        adapters.write_tensors(folder / "optimizer.safetensors", _of_optimizer(named))
    (folder / "agent.json").write_text(strict_json.dumps(plain(state), indent=1) + "\n")


def _of_rank(rank: int, lora_config: Any) -> Any:
    """Return the configuration with this rank and the same scale: a rank mutation does not change the reference."""
    config, scaling = copy.deepcopy(lora_config), adapters.lora_scaling(lora_config)
    config.r, config.lora_alpha = rank, scaling * (rank**0.5 if config.use_rslora else rank)
    return config


def _check_name(path: Path) -> None:
    """Raise CheckpointError for a path that no file system accepts: too long, or a loop of links."""
    try:
        path.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise CheckpointError(f"cannot use {str(path)[:100]!r}... as a folder: {error.strerror}") from error


def save_folder(path: str | os.PathLike[str], write: Callable[[Path], None], *, overwrite: bool) -> None:
    """Make a checkpoint folder from what ``write(folder)`` writes, as a whole or not at all.

    With ``overwrite`` an existing checkpoint is replaced completely. Raises CheckpointError without it, for a file, and
    for a folder that holds something else, and WriteError if the disk refuses.
    """
    target = Path(path).resolve()
    _check_name(target)
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"expected a folder for the checkpoint at {str(path)!r}, found a file; choose another")
    if target.is_dir() and any(target.iterdir()):
        if not (target / "agent.json").is_file():
            raise CheckpointError(f"the folder {str(path)!r} holds files but no checkpoint; choose a new or empty one")
        if not overwrite:
            raise CheckpointError(
                f"{str(path)!r} holds a checkpoint already; pass overwrite=True to replace it, or choose another folder"
            )
    if Path(os.path.realpath(os.curdir)).is_relative_to(target):
        raise CheckpointError(f"{str(path)!r} is the folder that this process works in; choose one inside it")
    commit_folder(target, write, manifest=False, overwrite=True)


@checked
def save_llm_checkpoint(
    agent: Annotated[Any, Having("an agent", ("save_checkpoint", "slot"))], path: Location, *, overwrite: bool = False
) -> None:
    """Save an agent so that ``PeftModel.from_pretrained(base, folder)`` loads its policy from path and path/actor.

    The folder is written as a whole or not at all. An existing checkpoint is replaced with ``overwrite``; without it
    CheckpointError is raised. If several processes train the agent, the first one writes.
    """
    runtime, state = agent.runtime, agent.state()

    def write(folder: Path) -> None:
        write_state(state, folder, runtime, agent.lora_config)
        adapters.write_adapter(folder, runtime.store.layers, state.adapter, agent.lora_config, runtime.base.original)
        if runtime.tokenizer is not None:
            write_tokenizer(runtime.tokenizer, folder)

    if runtime.processes.rank == 0:
        save_folder(path, write, overwrite=overwrite)


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer's files into a folder; raises WriteError if the disk refuses."""
    try:
        tokenizer.save_pretrained(str(folder))
    except Exception as error:  # tokenizers has no other type for a full disk
        raise WriteError(f"the tokenizer could not be written to {folder}: {error}") from error


def read_state(folder: Path, layers: tuple[LinearShape, ...], *, finite: bool = True) -> AgentState:
    """Read what :func:`write_state` wrote; ``moments`` is empty when no optimizer was saved.

    Raises CheckpointError when a file is missing, damaged or made for other layers or, with ``finite``, holds NaN.
    """
    actor = actor_folder(folder)
    state = AgentState(**strict_json.read_json(folder / "agent.json", PlainState), adapter=[])
    state.adapter, lora = adapters.read_adapter(actor, layers, finite=finite)
    if state.lora["r"] != lora.r:
        raise CheckpointError(f"{folder}: agent.json has rank {state.lora['r']}, the adapter rank {lora.r}")
    _check_scale(actor, lora, state)
    if (folder / "reference").is_dir():
        state.reference, config = adapters.read_adapter(folder / "reference", layers, finite=finite)
        _check_scale(folder / "reference", config, state)
    if (folder / "critic").is_dir():
        adapter, config = adapters.read_adapter(folder / "critic", layers, finite=finite)
        _check_scale(folder / "critic", config, state)
        if config.r != lora.r:
            raise CheckpointError(f"{folder}: the critic has rank {config.r}, the policy rank {lora.r}")
        state.critic = CriticState(adapter, _read_head(folder / "critic" / _HEAD_FILE, finite=finite))
    path = folder / "optimizer.safetensors"
    return _with_optimizer(path, layers, state, finite=finite) if path.exists() else state


def _check_scale(folder: Path, config: Any, state: AgentState) -> None:
    """Raise CheckpointError unless an adapter has the scale that agent.json gives to all adapters of the agent."""
    scale, rank = adapters.lora_scaling(config), state.lora["r"]
    expected = state.lora["lora_alpha"] / (rank**0.5 if state.lora["use_rslora"] else rank)
    if not math.isclose(scale, expected, rel_tol=1e-5):
        raise CheckpointError(f"the adapter at {str(folder)!r} has the scale {scale:g}, its agent.json {expected:g}")


def _read_head(path: Path, *, finite: bool) -> Tensor:
    saved = adapters.read_tensors(path)
    try:
        head = torch.cat([saved["weight"].reshape(-1), saved["bias"].reshape(-1)])
    except KeyError as error:
        raise CheckpointError(f"{path} is not a value head: {error.args[0]} is missing") from error
    if finite and not torch.isfinite(head).all():
        raise CheckpointError(f"{path} holds numbers that are not finite")
    return head


def _with_optimizer(path: Path, layers: tuple[LinearShape, ...], state: AgentState, *, finite: bool) -> AgentState:
    """Return a state with the moments in a file, each of the shape of its weight."""
    # A moment has the shape of its weight, so a state with weights in place of moments says what the file must have.
    names, critic = [layer.name for layer in layers], state.critic
    if critic is not None:
        critic = replace(critic, moments=dict.fromkeys(MOMENTS, critic.adapter))
    like_weights = replace(state, moments=dict.fromkeys(MOMENTS, state.adapter), critic=critic)
    expected = _of_optimizer(tensors(like_weights, names))
    saved = adapters.read_tensors(path)
    for name, like in expected.items():
        tensor = saved.get(name)
        if tensor is None or tensor.shape != like.shape:
            wrong = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}, not {tuple(like.shape)}"
            raise CheckpointError(f"{path} does not fit this agent: {name} {wrong}")
        if finite and torch.isnan(tensor).any():
            raise CheckpointError(f"{path}: {name} holds NaN")
    moments = {name: saved[name] for name in expected}
    if critic is not None:  # its agent knows how wide the head has to be
        heads = [f"critic.{moment}.head" for moment in MOMENTS]
        moments |= {name: saved.get(name, torch.zeros(0)) for name in heads}
    return assembled(plain(state), {**tensors(state, names), **moments}, names)
