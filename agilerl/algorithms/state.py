"""An agent as plain data: what clone, save, load and migration have in common, and its form on disk."""

import copy
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from agilerl.algorithms.schedules import CosineLRScheduleConfig
from agilerl.errors import CheckpointError
from agilerl.hpo.parameters import Gene
from agilerl.models import adapters
from agilerl.models.slots import LinearShape
from agilerl.runtime import Runtime

if TYPE_CHECKING:
    from agilerl.algorithms.llm import LLMAlgorithm

__all__ = [
    "AgentState",
    "base_name",
    "capture",
    "constructor_arguments",
    "load_weights",
    "read_state",
    "restore",
    "save_llm_checkpoint",
    "write_state",
]

_COUNTERS = (
    "index",
    "parent",
    "mut",
    "steps",
    "position",
    "updates",
    "rollouts",
    "skipped_steps",
    "reference_tracker",
    "tokens",
    "fitness",
    "scores",
)

_MOMENTS = ("exp_avg", "exp_avg_sq")
Factors = list[tuple[Tensor, Tensor]]


@dataclass
class AgentState:
    """Everything that decides an agent's next update; tensors are copies."""

    algorithm: str
    """Class name, a key of ``agilerl.algorithms.ALGORITHMS``."""
    base: str
    """Name of the base model."""
    config: dict[str, Any]
    """Hyperparameters that were set."""
    genes: dict[str, Any]
    """Fields of each gene in force."""
    lora: dict[str, Any]
    """Rank, alpha and use_rslora of the adapter."""
    pad: dict[str, Any]
    """Pad token and its id."""
    schedule: dict[str, Any] | None
    """Cosine schedule of the learning rate."""
    counters: dict[str, Any]
    """Index, parent, label of the last mutation, steps, position in the data, fitness, scores."""
    optimizer_steps: float
    adapter: Factors
    moments: dict[str, Factors] = field(default_factory=dict)
    reference: Factors | None = None
    """Frozen reference adapter; None when the reference is the base model."""


def capture(agent: "LLMAlgorithm") -> AgentState:
    """Copy an agent into a state."""
    store, lora, schedule = agent.runtime.store, agent.lora_config, agent.cosine_lr_schedule_config
    read = store.read(agent.slot)
    return AgentState(
        algorithm=type(agent).__name__,
        base=agent.runtime.base.name,
        config=agent.config.model_dump(mode="json", exclude_unset=True),
        genes={name: asdict(gene) for name, gene in agent.genes.items()},
        lora={"r": lora.r, "lora_alpha": lora.lora_alpha, "use_rslora": lora.use_rslora},
        pad={"pad_token": agent.pad_token, "pad_token_id": agent.pad_token_id},
        schedule=None if schedule is None else asdict(schedule),
        counters={name: copy.deepcopy(getattr(agent, name)) for name in _COUNTERS},
        optimizer_steps=float(store.steps[agent.slot]),
        adapter=read["theta"],
        moments={name: read[name] for name in _MOMENTS},
        reference=None if agent.reference_slot is None else store.adapter(agent.reference_slot),
    )


def constructor_arguments(state: AgentState, runtime: Runtime) -> dict[str, Any]:
    """Return the keywords that build an agent of this state, its weights and counters aside."""
    lora = copy.deepcopy(runtime.lora_config)
    for name, value in state.lora.items():
        setattr(lora, name, value)
    genes = {
        name: Gene(**{**gene, "choices": tuple(gene["choices"]), "factors": gene["factors"] and tuple(gene["factors"])})
        for name, gene in state.genes.items()
    }
    return {
        **state.pad,
        **state.config,
        "lora_config": lora,
        "cosine_lr_schedule_config": None if state.schedule is None else CosineLRScheduleConfig(**state.schedule),
        "hp_config": genes or None,
    }


def restore(agent: "LLMAlgorithm", state: AgentState, *, with_optimizer: bool) -> None:
    """Give an agent the counters and the weights of a state."""
    for name in _COUNTERS:
        setattr(agent, name, copy.deepcopy(state.counters[name]))
    load_weights(agent, state, with_optimizer=with_optimizer)


def load_weights(agent: "LLMAlgorithm", state: AgentState, *, with_optimizer: bool) -> None:
    """Give an agent the adapter (and the reference, where there is one) of a state of equal rank."""
    store = agent.runtime.store
    if with_optimizer and state.moments:
        store.write(agent.slot, {"theta": state.adapter, **state.moments})
        store.steps[agent.slot] = state.optimizer_steps
    else:
        store.load_adapter(agent.slot, state.adapter)
        store.clear_moments(agent.slot)
    if state.reference is not None:
        agent.set_reference(state.reference)


def base_name(folder: Path) -> str:
    """Return the name of the base model that a checkpoint belongs to; raises CheckpointError when there is none."""
    try:
        return str(json.loads((folder / "agent.json").read_text())["base"])
    except (OSError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise CheckpointError(f"no agent checkpoint at {str(folder)!r}: agent.json is missing or damaged") from error


def write_state(
    state: AgentState, folder: Path, runtime: Runtime, lora_config: Any, *, save_optimizer: bool = True
) -> None:
    """Write ``actor/`` (a PEFT folder), ``reference/`` where there is one, ``optimizer.safetensors``, ``agent.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    layers, source = runtime.store.layers, runtime.base.source
    adapters.write_adapter(folder / "actor", layers, state.adapter, lora_config, source)
    if state.reference is not None:
        adapters.write_adapter(folder / "reference", layers, state.reference, lora_config, source)
    if save_optimizer:
        tensors = {
            f"{moment}.{layer.name}.{side}": tensor.contiguous().cpu()
            for moment, factors in state.moments.items()
            for layer, pair in zip(layers, factors)
            for side, tensor in zip("AB", pair)
        }
        save_file(tensors, folder / "optimizer.safetensors")
    plain = {f.name: getattr(state, f.name) for f in fields(state)}
    for name in ("adapter", "moments", "reference"):
        del plain[name]
    (folder / "agent.json").write_text(json.dumps(plain, indent=1, sort_keys=True) + "\n")


def save_llm_checkpoint(agent: "LLMAlgorithm", path: str | Path) -> None:
    """Save an agent so that ``PeftModel.from_pretrained(base, path)`` and ``(base, path + "/actor")`` load its policy."""
    folder = Path(path)
    agent.save_checkpoint(folder)
    runtime = agent.runtime
    factors = runtime.store.adapter(agent.slot)
    adapters.write_adapter(folder, runtime.store.layers, factors, agent.lora_config, runtime.base.source)
    if runtime.tokenizer is not None:
        runtime.tokenizer.save_pretrained(str(folder))


def read_state(folder: Path, layers: tuple[LinearShape, ...]) -> AgentState:
    """Read what :func:`write_state` wrote; ``moments`` is empty when no optimizer was saved.

    Raises CheckpointError when a file is missing, damaged or made for other layers.
    """
    try:
        plain = json.loads((folder / "agent.json").read_text())
        state = AgentState(**plain, adapter=[])
    except FileNotFoundError as error:
        raise CheckpointError(f"no agent checkpoint at {str(folder)!r}: agent.json is missing") from error
    except (json.JSONDecodeError, TypeError, OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{folder / 'agent.json'} is damaged: {error}") from error
    state.adapter, _ = adapters.read_adapter(folder / "actor", layers)
    if (folder / "reference").is_dir():
        state.reference, _ = adapters.read_adapter(folder / "reference", layers)
    path = folder / "optimizer.safetensors"
    if path.exists():
        state.moments = _read_moments(path, layers)
    return state


def _read_moments(path: Path, layers: tuple[LinearShape, ...]) -> dict[str, Factors]:
    try:
        tensors = load_file(path)
        return {
            moment: [(tensors[f"{moment}.{layer.name}.A"], tensors[f"{moment}.{layer.name}.B"]) for layer in layers]
            for moment in _MOMENTS
        }
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    except KeyError as error:
        raise CheckpointError(f"{path} does not fit this agent: {error.args[0]} is missing") from error
