"""An agent as data, which clone, save, load and migration share. codec.py has its form outside memory."""

import copy
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, get_type_hints

import torch
from pydantic import AfterValidator, Field, create_model
from torch import Tensor

from agilerl.algorithms.config import CosineLRScheduleConfig
from agilerl.algorithms.custom_loss import loss_name
from agilerl.algorithms.learner import Learner
from agilerl.checks.arguments import shown
from agilerl.checks.validation import set_values
from agilerl.errors import CheckpointError, ConfigError
from agilerl.hpo.parameters import Gene
from agilerl.models import adapters
from agilerl.models.adapters import Factors
from agilerl.models.base import EMBEDDED, BaseModel, resolve_model
from agilerl.models.operators import Part, merged, rescale
from agilerl.models.slots import AdapterStore
from agilerl.runs.strict_json import LARGEST, SavedCount, SavedValues
from agilerl.runtime import Runtime

_COUNTERS = (
    *("index", "parent", "mut", "steps", "position", "updates", "rollouts", "skipped_steps", "bad_steps", "sick"),
    *("outcomes", "vitals", "reference_tracker", "tokens", "fitness", "scores", "kl_scale"),
)
"""Attributes that are counters of an agent; each algorithm has those that apply to it."""

MOMENTS = ("exp_avg", "exp_avg_sq")


def _of_gene(values: dict[str, Any]) -> dict[str, Any]:
    try:
        Gene(**values)
    except (TypeError, ConfigError) as error:
        raise ValueError(f"expected a gene: {error}") from None
    return values


class _Lora(SavedValues):
    r: Annotated[int, Field(ge=1, le=adapters.LARGEST_RANK)]
    lora_alpha: Annotated[float, Field(ge=adapters.LEAST_ALPHA, le=adapters.MOST_ALPHA)]
    use_rslora: bool
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    init_lora_weights: Literal["gaussian"] | None = None
    alora_invocation_tokens: list[Annotated[int, Field(ge=0)]] | None = None


class _Loaded(SavedValues):
    weights: str | None
    tokenizer: str | None
    config_overrides: dict[str, Any] | None
    stop_sequences: list[str] | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any]


class _Pad(SavedValues):
    pad_token: str | None
    pad_token_id: SavedCount | None


class _Schedule(SavedValues):
    num_epochs: Annotated[int, Field(ge=1, le=LARGEST)]
    warmup_proportion: Annotated[float, Field(ge=0, lt=1)]


@dataclass(frozen=True)
class SavedAs:
    """A mapping of a state: it stays a mapping and is checked as this type."""

    type: Any


@dataclass
class CriticState:
    """A critic: a separate adapter and the value head on top of it."""

    adapter: Factors
    head: Tensor
    """[H + 1] weights of the value head, the bias last."""
    moments: dict[str, Factors] = field(default_factory=dict)
    head_moments: dict[str, Tensor] = field(default_factory=dict)
    optimizer_steps: float = 0.0


@dataclass
class AgentState:
    """Everything that decides an agent's next update; tensors are copies.

    This is the one description of it: the annotations of the plain parts say what ``agent.json`` may hold.
    """

    algorithm: str
    """Name of the algorithm, a key of ``agilerl.algorithms.ALGORITHMS``."""
    base: str
    """Name of the base model."""
    config: dict[str, Any]
    """Hyperparameters that were set."""
    genes: Annotated[dict[str, Any], SavedAs(dict[str, Annotated[dict[str, Any], AfterValidator(_of_gene)]])]
    """Fields of each gene in force."""
    lora: Annotated[dict[str, Any], SavedAs(_Lora)]
    """Rank, alpha and use_rslora of the adapter, and its dropout if there is one."""
    pad: Annotated[dict[str, Any], SavedAs(_Pad)]
    """Pad token and its id."""
    schedule: Annotated[dict[str, Any] | None, SavedAs(_Schedule | None)]
    """Cosine schedule of the learning rate."""
    counters: dict[str, Any]
    """Index, parent, label of the last mutation, steps, position in the data, fitness, scores."""
    optimizer_steps: Annotated[float, Field(ge=0, le=2**53)]
    adapter: Factors
    moments: dict[str, Factors] = field(default_factory=dict)
    reference: Factors | None = None
    """Frozen reference adapter; None when the reference is the base model."""
    critic: CriticState | None = None
    """None for an algorithm without a critic."""
    own_loss: str | None = None
    """Name of the user's loss function; the function itself is not stored."""
    loaded: Annotated[dict[str, Any] | None, SavedAs(_Loaded | None)] = None
    """Fingerprints of the base and of its tokenizer, and what changed them when they were loaded; None: not known."""


PLAIN = tuple(f.name for f in fields(AgentState) if f.name not in ("adapter", "moments", "reference", "critic"))
"""The parts of a state that are not tensors."""


def _type_in_json(hint: Any) -> Any:
    return next((mark.type for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, SavedAs)), hint)


_HINTS: dict[str, Any] = get_type_hints(AgentState, include_extras=True)
PlainState = create_model(  # type: ignore[call-overload]
    "PlainState",
    __base__=SavedValues,
    # Older files do not know how the base was loaded.
    **{name: (_type_in_json(_HINTS[name]), None if name == "loaded" else ...) for name in PLAIN},
)
"""What ``agent.json`` may hold: a file that may come from a stranger is checked by it before any of it is used."""


def counters_of(agent: Learner) -> dict[str, Any]:
    """Return the counters of an agent by name."""
    return {name: getattr(agent, name) for name in _COUNTERS if hasattr(agent, name)}


def capture(agent: Learner) -> AgentState:
    """Copy an agent into a state."""
    store, lora, schedule = agent.runtime.store, agent.lora_config, agent.cosine_lr_schedule_config
    read = store.read(agent.slot)
    return AgentState(
        algorithm=agent.algorithm.name,
        base=agent.runtime.base.name,
        config=set_values(agent.config, "json"),
        genes={name: gene.state() for name, gene in agent.genes.items()},
        # An option at its default is left out, as it is in older states.
        lora={"r": lora.r, "lora_alpha": lora.lora_alpha, "use_rslora": lora.use_rslora}
        | ({"lora_dropout": lora.lora_dropout} if lora.lora_dropout else {})
        | ({"init_lora_weights": "gaussian"} if lora.init_lora_weights == "gaussian" else {})
        | ({"alora_invocation_tokens": list(agent.runtime.invocation)} if agent.runtime.invocation else {}),
        pad={"pad_token": agent.pad_token, "pad_token_id": agent.pad_token_id},
        schedule=None if schedule is None else asdict(schedule),
        counters=copy.deepcopy(counters_of(agent)),
        optimizer_steps=float(store.steps[agent.slot]),
        adapter=read["theta"],
        moments={name: read[name] for name in MOMENTS},
        reference=None if agent.reference_slot is None else store.adapter(agent.reference_slot),
        critic=None if agent.critic_slot is None else _capture_critic(store, agent.critic_slot),
        own_loss=None if agent.loss is None else loss_name(agent.loss),
        loaded=agent.runtime.loaded if agent.knows_base else None,
    )


def _capture_critic(store: AdapterStore, slot: int) -> CriticState:
    read, head = store.read(slot), store.read_head(slot)
    return CriticState(
        adapter=read["theta"],
        head=head[0],
        moments={name: read[name] for name in MOMENTS},
        head_moments=dict(zip(MOMENTS, head[1:])),
        optimizer_steps=float(store.steps[slot]),
    )


def constructor_arguments(state: AgentState, runtime: Runtime) -> dict[str, Any]:
    """Return the keywords that build an agent of this state, its weights and counters aside."""
    return {
        **state.pad,
        **state.config,
        "lora_config": lora_of(state, runtime),
        "cosine_lr_schedule_config": None if state.schedule is None else CosineLRScheduleConfig(**state.schedule),
        "hp_config": {name: Gene(**gene) for name, gene in state.genes.items()} or None,
    }


def lora_of(state: AgentState, runtime: Runtime) -> Any:
    """Return the LoraConfig of a state's adapter: the runtime's, with the rank, scale and dropout of the state."""
    lora = copy.deepcopy(runtime.lora_config)
    # A state leaves these two out at their defaults, from which the runtime's may differ.
    for name, value in ({"lora_dropout": 0.0, "init_lora_weights": True} | state.lora).items():
        setattr(lora, name, value)
    return lora


def check_algorithm(state: AgentState, name: str, hyperparameters: Collection[str]) -> None:
    """Raise CheckpointError if the state is of another algorithm, or sets something that is not a hyperparameter."""
    if state.algorithm != name:
        raise CheckpointError(
            f"expected the checkpoint of a {name} agent, found {state.algorithm}'s; build it with "
            f"{state.algorithm}, or take its weights alone: {name}(...).load_checkpoint(path)"
        )
    unknown = sorted(set(state.config) - set(hyperparameters))
    if unknown:
        raise CheckpointError(f"the checkpoint sets {shown(unknown[0])}, which is not a hyperparameter of {name}")


def restore(agent: Learner, state: AgentState) -> None:
    """Give an agent the counters and the weights of a state."""
    agent.knows_base = state.loaded is not None
    for name in _COUNTERS:
        if name in state.counters:
            saved, example = state.counters[name], getattr(agent, name, None)
            if name == "vitals" and isinstance(saved, dict):  # an older agent lacks what was measured later
                saved = {**(example or {}), **saved}
            if not _is_like(saved, example):
                raise CheckpointError(f"expected a counter {name} of an agent like {example!r}, found {shown(saved)}")
            setattr(agent, name, copy.deepcopy(saved))
    load_weights(agent, state, with_optimizer=True)


def _is_like(saved: Any, example: Any) -> bool:
    """Return whether a saved counter has the type of a new agent's."""
    if isinstance(example, dict):
        same = isinstance(saved, dict) and set(saved) == set(example)
        return same and all(_is_like(saved[key], example[key]) for key in example)
    if isinstance(example, list):
        return isinstance(saved, list) and all(isinstance(item, str) or _is_like(item, 0.0) for item in saved)
    if isinstance(example, bool | str):
        return type(saved) is type(example)
    if isinstance(example, float) and isinstance(saved, float):
        return True
    # Not isinstance: a bool is an int, too.
    return (saved is None and example is None) or (type(saved) is int and 0 <= saved <= LARGEST)


def adopt(
    agent: Learner, state: AgentState, *, with_optimizer: bool, with_critic: bool, actor_as_reference: bool
) -> None:
    """Give an agent the policy of a state of equal rank, its scale and its reference included.

    An adapter only means the same with the same rank, alpha and rsLoRA: the agent takes alpha and rsLoRA over, with a
    warning if its own scale was different. Without ``with_critic`` the agent keeps the values of its critic.
    """
    store, lora = agent.runtime.store, agent.lora_config
    # First, so that an agent whose head does not fit is left as it was.
    if with_critic and agent.critic_slot is not None and state.critic is not None:
        _check_head(store, state.critic)
    before = float(store.scaling[agent.slot])
    lora.lora_alpha, lora.use_rslora = state.lora["lora_alpha"], state.lora["use_rslora"]
    scaling = adapters.lora_scaling(lora)
    store.set_rank(agent.slot, agent.rank, scaling)
    if agent.critic_slot is not None:
        # One lora_config, and so one scale, serves both adapters; the critic's delta stays what it is.
        rescale(store, agent.critic_slot, scaling)
    # A checkpoint without a reference has the base model as its reference.
    agent.forget_reference()
    load_weights(agent, state, with_optimizer=with_optimizer, with_critic=with_critic)
    if actor_as_reference:
        agent.set_reference(state.adapter)
    if not math.isclose(before, scaling, rel_tol=1e-6):
        warnings.warn(
            f"the checkpoint's adapter has the scale {scaling:g} (lora_alpha={lora.lora_alpha:g}, use_rslora="
            f"{lora.use_rslora}), this agent had {before:g}; it now has the checkpoint's, so that the policy is the "
            "one that was saved",
            stacklevel=3,
        )


def load_weights(agent: Learner, state: AgentState, *, with_optimizer: bool, with_critic: bool = True) -> None:
    """Give an agent the adapter (and the reference, if there is one) of a state of equal rank and scale.

    With ``with_critic`` an agent that has a critic takes the state's; if the state has none, its critic starts from the
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
    for part in (critic.head, *critic.head_moments.values()):
        if part.shape != (numbers,):
            raise CheckpointError(f"expected a value head of {numbers} numbers, found {part.numel()}")


def _load_critic(store: AdapterStore, slot: int, critic: CriticState, *, with_optimizer: bool) -> None:
    _check_head(store, critic)
    store.load_adapter(slot, critic.adapter)
    store.clear_moments(slot)
    head = torch.zeros_like(store.read_head(slot))  # weights and the two moments of Adam
    head[0] = critic.head
    if with_optimizer and critic.moments:
        store.write(slot, critic.moments)
        store.steps[slot] = critic.optimizer_steps
        head[1:] = torch.stack([critic.head_moments[name] for name in MOMENTS])
    store.write_head(slot, head)


def soup(states: Sequence[AgentState], weights: Sequence[float]) -> AgentState:
    """Return the first state with the weighted sum of all deltas as its adapter, at its own rank and scale.

    It is meant to be examined and handed over: it has no moments, and of a critic the first state's.
    """
    first = states[0]
    parts = [Part(state.adapter, _scaling(state), weight) for state, weight in zip(states, weights, strict=True)]
    adapter, _ = merged(parts, len(first.adapter[0][0]), _scaling(first))
    return replace(first, adapter=adapter, moments={})


def _scaling(state: AgentState) -> float:
    return adapters.lora_scaling(SimpleNamespace(**state.lora))


def check_base(state: AgentState, runtime: Runtime) -> None:
    """Warn if a state was saved on another base or tokenizer: matching shapes do not make it the same model.

    Raises CheckpointError for an adapter that acts on other tokens of a prompt than those of this runtime.
    """
    saved, here = tuple(state.lora.get("alora_invocation_tokens") or ()), runtime.invocation
    if saved != here:
        raise CheckpointError(
            f"the checkpoint's adapter has alora_invocation_tokens={list(saved) or None}, this runtime's adapters "
            f"{list(here) or None}; give the runtime a lora_config with the same"
        )
    for difference in differences(state.base, state.loaded, runtime.base, runtime.loaded):
        warnings.warn(difference, stacklevel=3)


def differences(name: str, saved: Mapping[str, Any] | None, base: BaseModel, loaded: Mapping[str, Any]) -> list[str]:
    """Return in words how a base and tokenizer differ from those that an adapter was trained on.

    ``name`` and ``saved`` are a state's ``base`` and ``loaded``; ``loaded`` is that of the present runtime.
    """
    sentences, known = [], saved or {}
    weights, here = known.get("weights"), loaded["weights"]
    # Only weights of the same types can be compared: rounded to another type, all numbers differ.
    if weights is not None and here is not None and weights.partition(":")[0] == here.partition(":")[0]:
        if weights != here:
            sentences.append(
                f"the checkpoint was trained on the base model {name!r}, and the weights of this one, {base.name!r}, "
                "are others: its adapter does not fit; load the base that it was trained on"
            )
    # Without digests that can be compared the names have to do.
    elif name and base.name and _place(name) != _place(base.name):
        sentences.append(
            f"the checkpoint was trained on the base model {name!r}, this agent is on {base.name!r}; unless they are "
            "the same model, its adapter does not fit"
        )
    if saved is not None and _decisive(saved["config_overrides"]) != _decisive(loaded["config_overrides"]):
        sentences.append(
            f"the checkpoint was trained with config_overrides={saved['config_overrides']!r}, this base has "
            f"{loaded['config_overrides']!r}: it computes something else; load it with those of the checkpoint"
        )
    tokens = known.get("tokenizer"), loaded["tokenizer"]
    if None not in tokens and tokens[0] != tokens[1]:
        sentences.append(
            "the checkpoint was trained with another tokenizer or chat template than this base has: its prompts were "
            "other tokens; load it with those of the checkpoint"
        )
    return sentences


def _decisive(overrides: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the overrides that change the function; number formats and kernels only round."""
    return {key: value for key, value in (overrides or {}).items() if "dtype" not in key and "attn" not in key}


def _place(name: str) -> str:
    path = Path(resolve_model(name) if name == EMBEDDED else name).expanduser()
    return str(path.resolve()) if path.exists() else name
