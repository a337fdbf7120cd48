"""An agent as plain data: what clone, save, load and migration have in common, and its form on disk."""

import copy
import errno
import math
import os
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Protocol

import torch
from torch import Tensor

from agilerl.algorithms.agent_json import like, read_agent_json
from agilerl.algorithms.base import Algorithm, AlgorithmConfig
from agilerl.algorithms.custom_loss import LossFunction, loss_name
from agilerl.algorithms.schedules import CosineLRScheduleConfig
from agilerl.arguments import Having, Location, checked
from agilerl.errors import CheckpointError, WriteError
from agilerl.hpo.parameters import Gene
from agilerl.models import adapters
from agilerl.models.base import EMBEDDED, resolve_model
from agilerl.models.operators import rescale
from agilerl.models.slots import AdapterStore, LinearShape
from agilerl.runs import strict_json
from agilerl.runs.atomic import commit_folder
from agilerl.runtime import Runtime
from agilerl.validation import shown

__all__ = [
    "AgentState",
    "CriticState",
    "actor_folder",
    "adopt",
    "capture",
    "check_algorithm",
    "check_base",
    "constructor_arguments",
    "read_state",
    "restore",
    "save_folder",
    "save_llm_checkpoint",
    "write_state",
    "write_tokenizer",
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
    """Name of the algorithm, a key of ``agilerl.algorithms.ALGORITHMS``."""
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


class Stateful(Protocol):
    """An agent as its state sees it; the counters of ``_COUNTERS`` aside."""

    pad_token: str | None
    pad_token_id: int
    lora_config: Any
    cosine_lr_schedule_config: CosineLRScheduleConfig | None

    @property
    def slot(self) -> int:
        """Slot of the policy."""

    @property
    def reference_slot(self) -> int | None:
        """Slot of the reference policy; None: the base model."""

    @property
    def critic_slot(self) -> int | None:
        """Slot of the critic; None without one."""

    @property
    def runtime(self) -> Runtime:
        """The base and the slots."""

    @property
    def algorithm(self) -> Algorithm:
        """How the agent learns."""

    @property
    def config(self) -> AlgorithmConfig:
        """Hyperparameters."""

    @property
    def genes(self) -> dict[str, Gene]:
        """The hyperparameters that may mutate."""

    @property
    def loss(self) -> LossFunction | None:
        """The user's loss function."""

    @property
    def rank(self) -> int:
        """Rank of the adapter."""

    def forget_reference(self) -> None:
        """Make the base model the reference."""

    def set_reference(self, factors: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Make these factors the reference."""


def capture(agent: Stateful) -> AgentState:
    """Copy an agent into a state."""
    store, lora, schedule = agent.runtime.store, agent.lora_config, agent.cosine_lr_schedule_config
    read = store.read(agent.slot)
    return AgentState(
        algorithm=agent.algorithm.name,
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


def restore(agent: Stateful, state: AgentState, *, with_optimizer: bool) -> None:
    """Give an agent the counters and the weights of a state."""
    for name in _COUNTERS:
        if name in state.counters:
            value = like(state.counters[name], getattr(agent, name, None), name)
            setattr(agent, name, copy.deepcopy(value))
    load_weights(agent, state, with_optimizer=with_optimizer)


def adopt(
    agent: Stateful, state: AgentState, *, with_optimizer: bool, with_critic: bool, actor_as_reference: bool
) -> None:
    """Give an agent the policy of a state of equal rank, its scale and its reference included.

    Rank, alpha and rsLoRA make an adapter what it is: the agent takes alpha and rsLoRA over, and a warning says so if
    its own scale was another. Without ``with_critic`` the agent keeps the values of its critic.
    """
    store, lora = agent.runtime.store, agent.lora_config
    if with_critic and agent.critic_slot is not None and state.critic is not None:
        _check_head(store, state.critic)
    before = float(store.scaling[agent.slot])
    lora.lora_alpha, lora.use_rslora = state.lora["lora_alpha"], state.lora["use_rslora"]
    scaling = adapters.lora_scaling(lora)
    store.set_rank(agent.slot, agent.rank, scaling)
    if agent.critic_slot is not None:
        rescale(store, agent.critic_slot, scaling)
    agent.forget_reference()
    load_weights(agent, state, with_optimizer=with_optimizer, with_critic=with_critic)
    if actor_as_reference:
        agent.set_reference(state.adapter)
    if not math.isclose(before, scaling, rel_tol=1e-6):
        warnings.warn(
            f"the checkpoint's adapter has the scale {scaling:g} (lora_alpha={lora.lora_alpha:g}, use_rslora="
            f"{lora.use_rslora}), this agent had {before:g}: it has taken the checkpoint's over, so that the policy is "
            "the one that was saved",
            stacklevel=3,
        )


def load_weights(agent: Stateful, state: AgentState, *, with_optimizer: bool, with_critic: bool = True) -> None:
    """Give an agent the adapter (and the reference, where there is one) of a state of equal rank and scale.

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


def _check_head(store: AdapterStore, critic: CriticState) -> None:
    numbers = store.head_features + 1
    for found in (critic.head, *critic.head_moments.values()):
        if found.shape != (numbers,):
            raise CheckpointError(f"expected a value head of {numbers} numbers, found {found.numel()}")


def _load_critic(store: AdapterStore, slot: int, critic: CriticState, *, with_optimizer: bool) -> None:
    _check_head(store, critic)
    store.load_adapter(slot, critic.adapter)
    store.clear_moments(slot)
    head = torch.zeros_like(store.read_head(slot))
    head[0] = critic.head
    if with_optimizer and critic.moments:
        store.write(slot, critic.moments)
        store.steps[slot] = critic.optimizer_steps
        head[1:] = torch.stack([critic.head_moments[name] for name in _MOMENTS])
    store.write_head(slot, head)


def check_base(state: AgentState, runtime: Runtime) -> None:
    """Warn if a state was saved on a base model of another name: shapes that fit do not make it the same model."""
    found, present = state.base, runtime.base.name
    if found and present and _place(found) != _place(present):
        warnings.warn(
            f"the checkpoint was trained on the base model {found!r}, this agent is on {present!r}; unless they are "
            "the same model, its adapter means nothing here",
            stacklevel=3,
        )


def _place(name: str) -> str:
    path = Path(resolve_model(name) if name == EMBEDDED else name).expanduser()
    return str(path.resolve()) if path.exists() else name


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


def write_state(
    state: AgentState,
    folder: Path,
    runtime: Runtime,
    lora_config: Any,
    *,
    save_optimizer: bool = True,
    actor: str = "actor",
) -> None:
    """Write PEFT folders ``actor/`` and, where there are, ``reference/`` and ``critic/``; optimizer; ``agent.json``.

    ``actor`` "" puts the policy into the folder itself.
    """
    folder.mkdir(parents=True, exist_ok=True)
    layers, source = runtime.store.layers, runtime.base.source
    adapters.write_adapter(folder / actor, layers, state.adapter, lora_config, source)
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


def _check_name(path: Path) -> None:
    """Raise CheckpointError for a path that no file system takes: too long, or links in a circle."""
    try:
        path.stat()
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise CheckpointError(f"cannot use {str(path)[:100]!r}... as a folder: {error.strerror}") from error


def save_folder(path: str | os.PathLike[str], write: Callable[[Path], None], *, overwrite: bool) -> None:
    """Make a checkpoint folder of what ``write(folder)`` writes: there as a whole or not at all.

    One that exists is replaced as a whole with ``overwrite``. Raises CheckpointError without it, for a file, and for a
    folder that holds something else; WriteError where the disk refuses.
    """
    target = Path(path).resolve()
    _check_name(target)
    if target.exists() and not target.is_dir():
        raise CheckpointError(
            f"expected a folder for the checkpoint at {str(path)!r}, found a file; choose another path"
        )
    if target.is_dir() and any(target.iterdir()):
        if not (target / "agent.json").is_file():
            raise CheckpointError(
                f"the folder {str(path)!r} holds files but no checkpoint; choose a folder that is new or empty"
            )
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

    The folder is there as a whole or not at all; a checkpoint that is there already is replaced with ``overwrite``, and
    CheckpointError raised without it. Of several processes that train the agent the first writes.
    """
    runtime, state = agent.runtime, agent.state()

    def write(folder: Path) -> None:
        write_state(state, folder, runtime, agent.lora_config)
        adapters.write_adapter(folder, runtime.store.layers, state.adapter, agent.lora_config, runtime.base.source)
        if runtime.tokenizer is not None:
            write_tokenizer(runtime.tokenizer, folder)

    if runtime.processes.rank == 0:
        save_folder(path, write, overwrite=overwrite)


def write_tokenizer(tokenizer: Any, folder: Path) -> None:
    """Write a tokenizer's files into a folder; raises WriteError where the disk refuses."""
    try:
        tokenizer.save_pretrained(str(folder))
    except Exception as error:  # tokenizers has no other type for a full disk
        raise WriteError(f"the tokenizer could not be written to {folder}: {error}") from error


def read_state(folder: Path, layers: tuple[LinearShape, ...], *, finite: bool = True) -> AgentState:
    """Read what :func:`write_state` wrote; ``moments`` is empty when no optimizer was saved.

    Raises CheckpointError when a file is missing, damaged or made for other layers or, with ``finite``, holds NaN.
    """
    actor = actor_folder(folder)
    state = AgentState(**read_agent_json(folder / "agent.json"), adapter=[])
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
    if path.exists():
        _read_optimizer(path, layers, state, finite=finite)
    return state


def _check_scale(folder: Path, config: Any, state: AgentState) -> None:
    """Raise CheckpointError unless an adapter has the scale that agent.json gives to all adapters of the agent."""
    found, rank = adapters.lora_scaling(config), state.lora["r"]
    expected = state.lora["lora_alpha"] / (rank**0.5 if state.lora["use_rslora"] else rank)
    if not math.isclose(found, expected, rel_tol=1e-5):
        raise CheckpointError(
            f"the adapter at {str(folder)!r} has the scale {found:g}, agent.json beside it {expected:g}; take both "
            "from the same checkpoint"
        )


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
