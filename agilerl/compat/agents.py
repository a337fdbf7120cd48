"""Attributes and methods that AgileRL documents for its agents; they mean little for one that is an adapter slot."""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from agilerl.algorithms.config import CosineLRScheduleConfig, lr_factor
from agilerl.checks.arguments import Having, Location, checked, shown, taken
from agilerl.errors import CheckpointError, ConfigError
from agilerl.models import adapters

if TYPE_CHECKING:
    from agilerl.algorithms.agent import LLMAlgorithm
else:
    LLMAlgorithm = object  # the members are given to it, so it need not be imported

# Accepted with exactly these values, because that is how the shared base works already.
IMPLIED: dict[str, tuple[Any, ...]] = {
    "wrap": (True, False),
    "clone": (False, True),
    "calc_position_embeddings": (True,),
    "reduce_memory_peak": (True, False, None),
    "use_liger_loss": (True, False),
}
# Pydantic keeps the name model_config for itself.
ALIASES = {"model_config": "config_overrides", "fused_loss_chunk_rows": "fused_logprobs_chunk_rows"}


class _Sampling:
    """A setting of sampling: that of the agent, read and written as its hyperparameter."""

    def __init__(self, name: str, without: Any) -> None:
        self.name, self.without = name, without

    def __get__(self, view: "GenerationView | None", owner: type) -> Any:
        return self if view is None else getattr(view.agent.config, self.name, self.without)

    def __set__(self, view: "GenerationView", value: Any) -> None:
        view.agent.set_hyperparameters({self.name: value})


class GenerationView:
    """``agent.generation_config``: how the agent samples while it trains, under transformers' names."""

    temperature = _Sampling("temperature", 1.0)
    top_p = _Sampling("top_p", 1.0)
    top_k = _Sampling("top_k", 0)
    min_p = _Sampling("min_p", 0.0)
    repetition_penalty = _Sampling("repetition_penalty", 1.0)
    max_new_tokens = _Sampling("max_output_tokens", None)
    min_new_tokens = _Sampling("min_output_tokens", None)
    do_sample = True

    def __init__(self, agent: Any) -> None:
        self.agent = agent

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "agent" and not isinstance(getattr(type(self), name, None), _Sampling):
            known = ", ".join(key for key, value in vars(type(self)).items() if isinstance(value, _Sampling))
            warnings.warn(f"generation_config.{name} has no effect here; it has {known}", stacklevel=2)
            return
        super().__setattr__(name, value)

    @property
    def pad_token_id(self) -> int:
        """The token used for padding."""
        return self.agent.pad_token_id  # type: ignore[no-any-return]

    @property
    def eos_token_id(self) -> list[int]:
        """The tokens that end a completion."""
        return sorted(self.agent.runtime.base.eos_token_ids)


class OptimizerView:
    """``agent.optimizer``: AdamW's settings of the next step, a group for each trained slot; to read only."""

    def __init__(self, agent: Any) -> None:
        self.agent = agent
        self.param_groups: list[dict[str, Any]] = [
            {
                "name": name,
                "lr": s.lr,
                "betas": (s.beta1, s.beta2),
                "eps": s.eps,
                "weight_decay": s.weight_decay,
                "max_grad_norm": s.max_grad_norm,
            }
            # The settings come by slot, the actor's first.
            for name, s in zip(("actor", "critic"), agent.optimizer_settings().values())
        ]

    @property
    def optimizer(self) -> "OptimizerView":
        """The view itself: there is no other optimizer inside."""
        return self


class ActorView:
    """``agent.actor``: the base model with the agent's selected adapter on, for calls that are made of a PEFT model."""

    def __init__(self, agent: Any) -> None:
        self._agent, self.base_model = agent, agent.runtime.base.model
        self.config, self.dtype = self.base_model.config, self.base_model.dtype
        self.device, self.name_or_path = agent.runtime.base.device, agent.pretrained_model_name_or_path

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model."""
        with self._routed():
            return self.base_model(*args, **kwargs)

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model's ``generate``; ``agent.get_action`` is faster, for all completions of a batch at once."""
        with self._routed():
            return self.base_model.generate(*args, **kwargs)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Read from the base model alone inside, as ``agent.select_adapter`` reads from an adapter."""
        with self._agent.reading("base"):
            yield

    @checked
    def save_pretrained(self, path: Location) -> None:
        """Write the actor's adapter as PEFT does, whichever is selected; CheckpointError if there can be no folder."""
        agent = self._agent
        store, folder = agent.runtime.store, Path(path)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"folder {shown(str(folder))} cannot be made: {error.strerror or error}") from error
        factors = store.adapter(agent.slot)
        adapters.write_adapter(folder, store.layers, factors, agent.lora_config, agent.runtime.base.original)

    def eval(self) -> "ActorView":
        """Do nothing: a frozen base without dropout computes the same in both modes."""
        return self

    def train(self, mode: bool = True) -> "ActorView":
        """Do nothing: see :meth:`eval`."""
        return self

    def _routed(self) -> AbstractContextManager[None]:
        return self._agent.runtime.store.routed(self._agent.selected_route)  # type: ignore[no-any-return]


class DocumentedSurface(LLMAlgorithm):
    """Methods and attributes of the documented interface whose job the shared base has taken over.

    :func:`extend` gives them to the class of agents, which does not inherit from this one.
    """

    @property
    def device(self) -> torch.device:
        """Where the base is."""
        return self.runtime.base.device

    @property
    def algo(self) -> str:
        """Name of the algorithm."""
        return self.algorithm.name

    @property
    def actor(self) -> ActorView:
        """The base model with this agent's adapter on."""
        return ActorView(self)

    @property
    def generation_config(self) -> GenerationView:
        """How the agent samples: its hyperparameters under transformers' names, to read and to write."""
        return GenerationView(self)

    @property
    def optimizer(self) -> OptimizerView:
        """The settings of AdamW for the next step, to read."""
        return OptimizerView(self)

    @property
    def lr_scheduler(self) -> SimpleNamespace | None:
        """The course of the learning rate, to read: ``get_last_lr()`` returns the next step's of each trained slot.

        None without ``cosine_lr_schedule_config``.
        """
        if self.cosine_lr_schedule_config is None:
            return None
        return SimpleNamespace(get_last_lr=lambda: [s.lr for s in self.optimizer_settings().values()])

    @property
    def accelerator(self) -> Any:
        """The ``accelerate.Accelerator`` that the agents of this base were given; None without one."""
        return self.runtime.accelerator

    @property
    def use_vllm(self) -> bool:
        """Whether vLLM samples."""
        return self.runtime.options.use_vllm

    @property
    def pretrained_model_name_or_path(self) -> str:
        """Name or folder of the base model."""
        return self.runtime.base.source

    @property
    def batch_size_per_process(self) -> int:
        """Rows of an optimizer step in each process."""
        return int(self.config.batch_size) // self.runtime.processes.size

    @property
    def registry(self) -> SimpleNamespace:
        """What evolution knows of the agent: ``hp_config``, ``hooks``, and ``groups``, the names of what it trains."""
        groups = ["actor", "critic"][: self.trained_slots]
        return SimpleNamespace(hp_config=self.hp_config, hooks=list(self._mutation_hooks), groups=groups)

    def load_weights(self, path: Location) -> None:
        """Load the adapter of a checkpoint folder: ``load_checkpoint`` by another name."""
        self.load_checkpoint(path)

    def get_lr_names(self) -> list[str]:
        """Return the names of the learning rates."""
        return [name for name in ("lr", "lr_actor", "lr_critic") if name in self.Config.model_fields]

    def get_policy(self) -> Any:
        """Return the base model; an agent's own adapter is active inside its calls only."""
        return self.runtime.base.model

    def evolvable_attributes(self, networks_only: bool = False) -> dict[str, Any]:
        """Return what evolution acts on: the trained slots and, unless ``networks_only``, the genes' values."""
        genes: dict[str, Any] = {} if networks_only else self.hyperparameters
        return {**dict(zip(("actor", "critic"), self.optimizer_settings())), **genes}

    @staticmethod
    def inspect_attributes(agent: Any, input_args_only: bool = False) -> dict[str, Any]:
        """Return the hyperparameters and, unless ``input_args_only``, the counters."""
        names = () if input_args_only else ("index", "mut", "steps", "scores", "fitness", "position", "updates")
        return {**agent.config.model_dump(), **{name: getattr(agent, name) for name in names}}

    @staticmethod
    def copy_attributes(agent: Any, clone: Any) -> Any:
        """Copy hyperparameters and counters to a clone."""
        clone.config = agent.config.model_copy(deep=True)
        for name in ("mut", "steps", "position", "updates"):
            setattr(clone, name, getattr(agent, name))
        clone.scores, clone.fitness = list(agent.scores), list(agent.fitness)
        return clone

    def reinit_optimizers(self, optimizer: Any = None) -> None:
        """Forget Adam's moments and step counter of each trained slot."""
        for slot in self.optimizer_settings():
            self.runtime.store.clear_moments(slot)

    @staticmethod
    @checked
    def update_lr(
        optimizer: Annotated[Any, Having("an optimizer", ("param_groups",), "pass agent.optimizer")],
        lr: float | tuple[float, float],
        accelerator: Any = None,
        scheduler_config: CosineLRScheduleConfig | None = None,
    ) -> tuple[Any, LambdaLR | None]:
        """Set the rates of an optimizer's groups, with a schedule if one is given; returns accelerator, schedule.

        An agent needs no such call: its rate is its hyperparameter, and assigning that takes effect at the next step.
        With ``agent.optimizer`` it is assigned here, and a schedule takes the place of the agent's.
        """
        if isinstance(optimizer, OptimizerView):
            agent = optimizer.agent
            names = agent.get_lr_names()
            agent.set_hyperparameters(dict(zip(names, lr if isinstance(lr, tuple) else (lr,) * len(names))))
            agent.cosine_lr_schedule_config = scheduler_config or agent.cosine_lr_schedule_config
            return accelerator, agent.lr_scheduler
        rates = lr if isinstance(lr, tuple) else (lr,) * len(optimizer.param_groups)
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
        if scheduler_config is None:
            return accelerator, None
        return accelerator, LambdaLR(optimizer, lambda update: lr_factor(scheduler_config, update))

    def recompile(self) -> None:
        """Do nothing: ``torch_compiler`` compiles the layers of the base, which no mutation changes."""

    def set_training_mode(self, training: bool) -> None:
        """Do nothing: a frozen base without dropout computes the same in both modes."""

    def to_device(self, *experiences: Tensor) -> tuple[Tensor, ...]:
        """Return tensors on the device of the base."""
        return tuple(
            taken(Tensor, tensor, "to_device", f"argument {number}").to(self.runtime.base.device)
            for number, tensor in enumerate(experiences)
        )

    def wrap_models(self) -> None:
        """Do nothing: the base is wrapped once, by its runtime."""

    def unwrap_models(self) -> None:
        """Do nothing: see :meth:`wrap_models`."""

    def preprocess_observation(self, observation: Any) -> Any:
        """Return the observation as it is."""
        return observation

    def register_network_group(self, group: Any) -> None:
        """Do nothing: an agent has one network, its adapter."""

    @staticmethod
    def get_state_dim(observation_space: Any) -> tuple[int, ...]:
        """Return the shape of a gymnasium space (empty for text)."""
        return tuple(getattr(observation_space, "shape", None) or ())

    @staticmethod
    def get_action_dim(action_space: Any) -> tuple[int, ...]:
        """Return the shape of a gymnasium space (empty for text), or its size if it is discrete."""
        size = getattr(action_space, "n", None)
        return (
            (int(np.asarray(size).item()),) if size is not None else tuple(getattr(action_space, "shape", None) or ())
        )


def translated(keywords: dict[str, Any]) -> dict[str, Any]:
    """Return keywords of an agent under this package's names, without those that say how it works anyway.

    Raises ConfigError for one that would need an action. A name of this package wins over AgileRL's.
    """
    for name, accepted in IMPLIED.items():
        if name in keywords and not any((value := keywords[name]) is a or value == a for a in accepted):
            expected = " or ".join(map(repr, accepted))
            raise ConfigError(f"{name}={keywords[name]!r} is not available; expected {expected}")
    renamed = {ALIASES[name]: value for name, value in keywords.items() if name in ALIASES}
    return renamed | {name: value for name, value in keywords.items() if name not in (*IMPLIED, *ALIASES)}


def extend(agent_class: "type[LLMAlgorithm]") -> None:
    """Give agents the members of :class:`DocumentedSurface`."""
    for name, member in vars(DocumentedSurface).items():
        # __doc__, __module__ and the like are those of the class of agents.
        if not name.startswith("__"):
            setattr(agent_class, name, member)
