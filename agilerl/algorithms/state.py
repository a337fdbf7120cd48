"""An agent as plain data: what clone, save, load and migration have in common, and its form on disk."""

import copy
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agilerl.algorithms.agent_json import like, read_agent_json
from agilerl.algorithms.losses import loss_name
from agilerl.algorithms.schedules import CosineLRScheduleConfig
from agilerl.errors import CheckpointError
from agilerl.hpo.parameters import Gene
from agilerl.models import adapters
from agilerl.models.slots import AdapterStore, LinearShape
from agilerl.runs import strict_json
from agilerl.runtime import Runtime
from agilerl.validation import shown

if TYPE_CHECKING:
    from agilerl.algorithms.llm import LLMAlgorithm

__all__ = [
    "AgentState",
    "CriticState",
    "base_name",
    "capture",
    "check_algorithm",
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
    "bad_steps",
    "sick",
    "outcomes",
    "vitals",
    "reference_tracker",
    "tokens",
    "fitness",
    "scores",
    "kl_scale",
)
"""Attributes that are counters of an agent; an algorithm has those that mean something for it."""

_MOMENTS = ("exp_avg", "exp_avg_sq")
_HEAD_FILE = "value_head.safetensors"
Factors = list[tuple[Tensor, Tensor]]


@dataclass
class CriticState:
    """A critic: an adapter of its own and the value head on top of it."""

    adapter: Factors
    head: Tensor
    """[H + 1] weights of the value head, the bias last."""
    moments: dict[str, Factors] = field(default_factory=dict)
    head_moments: dict[str, Tensor] = field(default_factory=dict)
    optimizer_steps: float = 0.0


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
    critic: CriticState | None = None
    """None for an algorithm without a critic."""
    own_loss: str | None = None
    """What the user's loss function is called; the function itself is no data."""


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
        counters={name: copy.deepcopy(getattr(agent, name)) for name in _COUNTERS if hasattr(agent, name)},
        optimizer_steps=float(store.steps[agent.slot]),
        adapter=read["theta"],
        moments={name: read[name] for name in _MOMENTS},
        reference=None if agent.reference_slot is None else store.adapter(agent.reference_slot),
        critic=None if agent.critic_slot is None else _capture_critic(store, agent.critic_slot),
        own_loss=None if agent.loss is None else loss_name(agent.loss),
    )


def _capture_critic(store: AdapterStore, slot: int) -> CriticState:
    read, head = store.read(slot), store.read_head(slot)
    return CriticState(
        adapter=read["theta"],
        head=head[0],
        moments={name: read[name] for name in _MOMENTS},
        head_moments=dict(zip(_MOMENTS, head[1:])),
        optimizer_steps=float(store.steps[slot]),
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


def check_algorithm(state: AgentState, name: str, hyperparameters: Collection[str]) -> None:
    """Raise CheckpointError where the state is of another algorithm, or sets what is none of its hyperparameters."""
    if state.algorithm != name:
        raise CheckpointError(
            f"expected the checkpoint of a {name} agent, found {state.algorithm}'s; build it with "
            f"{state.algorithm}, or take its weights alone: {name}(...).load_checkpoint(path)"
        )
    unknown = sorted(set(state.config) - set(hyperparameters))
    if unknown:
        raise CheckpointError(f"the checkpoint of a {name} agent sets {shown(unknown[0])}, no hyperparameter of {name}")


def restore(agent: "LLMAlgorithm", state: AgentState, *, with_optimizer: bool) -> None:
    """Give an agent the counters and the weights of a state."""
    for name in _COUNTERS:
        if name in state.counters:
            value = like(state.counters[name], getattr(agent, name, None), name)
            setattr(agent, name, copy.deepcopy(value))
    load_weights(agent, state, with_optimizer=with_optimizer)


def load_weights(agent: "LLMAlgorithm", state: AgentState, *, with_optimizer: bool, with_critic: bool = True) -> None:
    """Give an agent the adapter (and the reference, where there is one) of a state of equal rank.

    With ``with_critic`` an agent that has a critic takes the state's; without one there, its critic starts from the
    actor's adapter and a head of zeros.
    """
    store = agent.runtime.store
    if with_optimizer and state.moments:
        store.write(agent.slot, {"theta": state.adapter, **state.moments})
        store.steps[agent.slot] = state.optimizer_steps
    else:
        store.load_adapter(agent.slot, state.adapter)
        store.clear_moments(agent.slot)
    if state.reference is not None:
        agent.set_reference(state.reference)
    if with_critic and agent.critic_slot is not None:
        critic = state.critic or CriticState(state.adapter, torch.zeros(store.head_features + 1))
        _load_critic(store, agent.critic_slot, critic, with_optimizer=with_optimizer)


def _load_critic(store: AdapterStore, slot: int, critic: CriticState, *, with_optimizer: bool) -> None:
    store.load_adapter(slot, critic.adapter)
    store.clear_moments(slot)
    head = torch.zeros_like(store.read_head(slot))
    for found in (critic.head, *critic.head_moments.values()):
        if found.shape != head[0].shape:
            raise CheckpointError(f"expected a value head of {head.shape[1]} numbers, found {found.numel()}")
    head[0] = critic.head
    if with_optimizer and critic.moments:
        store.write(slot, critic.moments)
        store.steps[slot] = critic.optimizer_steps
        head[1:] = torch.stack([critic.head_moments[name] for name in _MOMENTS])
    store.write_head(slot, head)


def base_name(folder: Path) -> str:
    """Return the name of the base model that a checkpoint belongs to; raises CheckpointError when there is none."""
    return str(read_agent_json(folder / "agent.json")["base"])


def write_state(
    state: AgentState, folder: Path, runtime: Runtime, lora_config: Any, *, save_optimizer: bool = True
) -> None:
    """Write PEFT folders ``actor/`` and, where there are, ``reference/`` and ``critic/``; optimizer; ``agent.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    layers, source = runtime.store.layers, runtime.base.source
    adapters.write_adapter(folder / "actor", layers, state.adapter, lora_config, source)
    if state.reference is not None:
        config = _of_rank(len(state.reference[0][0]), lora_config)
        adapters.write_adapter(folder / "reference", layers, state.reference, config, source)
    critic = state.critic
    if critic is not None:
        adapters.write_adapter(folder / "critic", layers, critic.adapter, lora_config, source)
        head = critic.head.cpu()
        adapters.write_tensors(folder / "critic" / _HEAD_FILE, {"weight": head[None, :-1], "bias": head[-1:]})
    if save_optimizer:
        tensors = _flat_moments(state.moments, layers)
        if critic is not None:
            own = {**_flat_moments(critic.moments, layers), **{f"{n}.head": t for n, t in critic.head_moments.items()}}
            own["steps"] = torch.tensor(critic.optimizer_steps, dtype=torch.float64)
            tensors |= {f"critic.{name}": tensor for name, tensor in own.items()}
        adapters.write_tensors(folder / "optimizer.safetensors", tensors)
    plain = {f.name: getattr(state, f.name) for f in fields(state)}
    for name in ("adapter", "moments", "reference", "critic"):
        del plain[name]
    (folder / "agent.json").write_text(strict_json.dumps(plain, indent=1) + "\n")


def _of_rank(rank: int, lora_config: Any) -> Any:
    """Return the configuration with this rank and the same scale: a mutation of ours leaves the reference's rank."""
    config, scaling = copy.deepcopy(lora_config), adapters.lora_scaling(lora_config)
    config.r, config.lora_alpha = rank, scaling * (rank**0.5 if config.use_rslora else rank)
    return config


def _flat_moments(moments: dict[str, Factors], layers: tuple[LinearShape, ...]) -> dict[str, Tensor]:
    return {
        f"{moment}.{layer.name}.{side}": tensor
        for moment, factors in moments.items()
        for layer, pair in zip(layers, factors)
        for side, tensor in zip("AB", pair)
    }


def save_llm_checkpoint(agent: "LLMAlgorithm", path: str | Path) -> None:
    """Save an agent so that ``PeftModel.from_pretrained(base, folder)`` loads its policy from path and path/actor."""
    folder = Path(path)
    agent.save_checkpoint(folder)
    runtime = agent.runtime
    factors = runtime.store.adapter(agent.slot)
    adapters.write_adapter(folder, runtime.store.layers, factors, agent.lora_config, runtime.base.source)
    if runtime.tokenizer is not None:
        runtime.tokenizer.save_pretrained(str(folder))


def read_state(folder: Path, layers: tuple[LinearShape, ...], *, finite: bool = True) -> AgentState:
    """Read what :func:`write_state` wrote; ``moments`` is empty when no optimizer was saved.

    Raises CheckpointError when a file is missing, damaged or made for other layers or, with ``finite``, holds NaN.
    """
    if not (folder / "agent.json").exists():
        raise CheckpointError(f"no agent checkpoint at {str(folder)!r}: agent.json is missing")
    state = AgentState(**read_agent_json(folder / "agent.json"), adapter=[])
    state.adapter, lora = adapters.read_adapter(folder / "actor", layers, finite=finite)
    if state.lora["r"] != lora.r:
        raise CheckpointError(f"{folder}: agent.json has rank {state.lora['r']}, the adapter rank {lora.r}")
    if (folder / "reference").is_dir():
        state.reference, _ = adapters.read_adapter(folder / "reference", layers, finite=finite)
    if (folder / "critic").is_dir():
        adapter, _ = adapters.read_adapter(folder / "critic", layers, finite=finite)
        state.critic = CriticState(adapter, _read_head(folder / "critic" / _HEAD_FILE, finite=finite))
    path = folder / "optimizer.safetensors"
    if path.exists():
        _read_optimizer(path, layers, state, finite=finite)
    return state


def _read_head(path: Path, *, finite: bool) -> Tensor:
    tensors = adapters.read_tensors(path)
    try:
        head = torch.cat([tensors["weight"].reshape(-1), tensors["bias"].reshape(-1)])
    except KeyError as error:
        raise CheckpointError(f"{path} is no value head: {error.args[0]} is missing") from error
    if finite and not torch.isfinite(head).all():
        raise CheckpointError(f"{path} holds numbers that are not finite")
    return head


def _read_optimizer(path: Path, layers: tuple[LinearShape, ...], state: AgentState, *, finite: bool) -> None:
    tensors = adapters.read_tensors(path)

    def tensor(name: str, shape: Sequence[int]) -> Tensor:
        found = tensors.get(name)
        if found is None or found.shape != shape:
            wrong = "is missing" if found is None else f"has shape {tuple(found.shape)}, not {tuple(shape)}"
            raise CheckpointError(f"{path} does not fit this agent: {name} {wrong}")
        if finite and torch.isnan(found).any():
            raise CheckpointError(f"{path}: {name} holds NaN")
        return found

    def moments(adapter: Factors, prefix: str = "") -> dict[str, Factors]:
        named = [(layer.name, *pair) for layer, pair in zip(layers, adapter)]
        return {
            m: [(tensor(f"{prefix}{m}.{n}.A", a.shape), tensor(f"{prefix}{m}.{n}.B", b.shape)) for n, a, b in named]
            for m in _MOMENTS
        }

    state.moments = moments(state.adapter)
    if state.critic is not None:
        state.critic.moments = moments(state.critic.adapter, "critic.")
        state.critic.head_moments = {m: tensors.get(f"critic.{m}.head", torch.zeros(0)) for m in _MOMENTS}
        state.critic.optimizer_steps = float(tensor("critic.steps", ()))
