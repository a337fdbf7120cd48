"""Attributes and methods that AgileRL documents for its agents: tuples of tensors, exams, views of the shared base."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from agilerl.checks.arguments import Count, Having, Location, checked, shown, taken
from agilerl.compat.experiences import (
    ActionResult,
    Environment,
    action_result,
    examine,
    of_all,
    prompt_ids,
    to_batch,
)
from agilerl.data import RolloutBatch
from agilerl.errors import CheckpointError, ConfigError
from agilerl.models import adapters
from agilerl.models.slots import AdamWSettings, Route
from agilerl.rollouts import GenerationRequest, SamplingSettings
from agilerl.runtime import Runtime

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
        with self._agent.selecting("base"):
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
        return self._agent.runtime.store.routed(_route(self._agent.selected_slot))  # type: ignore[no-any-return]


def _route(slot: int | None) -> Route | None:
    return None if slot is None else Route((slot,), None)


Schedule = Annotated[Any, Having("a CosineLRScheduleConfig", ("factor",), "pass CosineLRScheduleConfig(num_epochs)")]


class DocumentedSurface:
    """What AgileRL documents of agents and the core does not need: every agent inherits it.

    The attributes without a value, and the methods that raise NotImplementedError, are those of the core that it uses.
    """

    runtime: Runtime
    algorithm: Any
    config: Any
    hp_config: Any
    Config: ClassVar[Any]
    env_type: ClassVar[str]
    trained_slots: ClassVar[int]
    slot: int
    reference_slot: int | None
    critic_slot: int | None
    index: int
    rollouts: int
    pad_token_id: int
    sick: str
    fitness: list[float]
    tokens: dict[str, int]
    lora_config: Any
    cosine_lr_schedule_config: Any
    _mutation_hooks: list[Callable[[], None]]
    _selected: str = "actor"
    """The adapter that the agent's answers and log-probs are of; ``base`` is the base model alone."""

    # -- acting, learning and exams on tuples of tensors ----------------------------------------------------------

    @checked
    def get_action(
        self, obs: Any, training: bool = True, repeat_prompts: bool = True, *args: Any, **kwargs: Any
    ) -> ActionResult:
        """Sample completions: ``group_size`` a prompt when training, one greedy completion a prompt otherwise.

        ``obs`` is a list of prompt dicts with ``input_ids`` [1, P] (or one such dict); tokens that an
        ``attention_mask`` [1, P] leaves out are not part of a prompt. ``repeat_prompts=False`` samples once a prompt,
        for batches that are expanded already; so does an agent that learns from data. Raises ConfigError for anything
        else, and for ids beyond the vocabulary.
        """
        ids = prompt_ids(obs, self.runtime.base.vocabulary_size)
        samples = self.config.group_size if training and repeat_prompts and self.env_type == "reasoning" else 1
        first = self.runtime.processes.first_number(len(ids))
        requests = [
            GenerationRequest(
                self.selected_slot,
                prompt,
                samples,
                self.sampling(len(prompt), greedy=not training),
                purpose="rollout" if training else "act",
                key=(self.index, self.rollouts, number),
            )
            for number, prompt in enumerate(ids, first)
        ]
        self.rollouts += 1
        groups = self.runtime.complete(requests)
        self.tokens["generated"] += sum(len(c.token_ids) for group in groups for c in group)
        return action_result(ids, groups, self.pad_token_id)

    def learn(
        self, experiences: Any, turn_ids: Any = None, sampling_logps: Sequence[Tensor | None] | None = None
    ) -> dict[str, float]:
        """Update the adapter from ``(completion_ids, action_masks, rewards)``, or from a :class:`RolloutBatch`.

        ``rewards`` is one number a row, in row order (any shape), or ``[rows, turns]`` together with ``turn_ids``
        ``[rows, T-1]``. Stacked ``completion_ids`` [rows, T] hold groups of ``group_size`` consecutive rows. Returns
        the metrics of the update, ``mean_loss`` and ``mean_kl`` among them. If several processes train the agent,
        each passes what it has sampled, and the update is that of all rows together. Raises ConfigError if the parts
        do not fit each other, or if a setting works by turn and there are no ``turn_ids``; an agent that learns from
        data takes the batches of its environment only.

        ``sampling_logps``, one tensor a row, are the log-probs of the sampled tokens. They are the old log-probs of the
        importance ratio in an update of several optimizer steps (``update_epochs``, or more rows than ``batch_size``),
        and if the same tensors are learned from a second time in a row. The only step of a first update takes the
        current policy as the sampling one, whatever they are: the ratio is 1. So does the first step of any update
        without them, or if sampling is not exact (a base in 16 bits, quantised or compiled; vLLM); for further steps
        the old log-probs are then computed. Several calls of ``accumulate`` do not count as learning again.
        """
        whole = isinstance(experiences, RolloutBatch)
        if self.env_type != "reasoning" and not (whole and turn_ids is None and sampling_logps is None):
            raise ConfigError(
                f"{self.algo} learns from the batches of its environment, found {type(experiences).__name__}; call "
                "learn(env.reset()), with a gym from agilerl.llm_envs"
            )
        if isinstance(experiences, RolloutBatch):
            return self.report(self.learn_batch(experiences))
        if turn_ids is None and getattr(self.config, "uses_turns", False):
            raise ConfigError(
                "importance_sampling_level or advantage_granularity is 'turn', but no turn_ids were given; call "
                "learn(experiences, turn_ids=...) with turn_ids [rows, T-1], or use another level"
            )
        group_size = getattr(self.config, "group_size", 1)
        batch = to_batch(experiences, self.pad_token_id, turn_ids, sampling_logps, group_size=group_size)
        # The user's own tensor: to_batch makes another one in every call.
        ids = experiences[0] if isinstance(experiences[0], Tensor) else next(iter(experiences[0]), batch.ids)
        return self.report(self.learn_batch(batch, ids))

    @checked
    def test(self, env: Environment, loop: Count = 1, *args: Any, **kwargs: Any) -> np.ndarray:
        """Return the rewards of greedy completions on the environment's test set; their mean joins ``fitness``.

        If the agent is ``sick``, NaN joins instead, whatever its rewards: selection then replaces it.

        For a multi-turn environment they are the returns of ``loop`` episodes (times its batch) with seeds that
        training never reaches. An environment with ``examine(agent, loop)`` gives an exam of its own.
        """
        scores = of_all(self.runtime.processes, examine(self, env, loop))
        self.fitness.append(float("nan") if self.sick else float(scores.mean()))
        return scores

    # -- which adapter is read ------------------------------------------------------------------------------------

    @checked
    def use_adapter(self, adapter_name: str) -> None:
        """Read from this agent's ``actor`` or ``reference`` adapter from here on (``critic`` too, if it has one).

        ``logprobs``, ``get_action``, ``generate``, ``test``, ``actor(...)``, a population's ``evaluate`` and direct
        calls of the base model read from the selected adapter. ``learn``, a population's ``rollout`` and everything
        that is saved are always of the actor. A reference without a slot is the base model alone.
        """
        if adapter_name not in self._adapters:
            names = " or ".join(f"'{name}'" for name in self._adapters)
            raise ConfigError(f"expected the adapter {names}, found {adapter_name!r}")
        self._select(adapter_name, _route(self._adapters[adapter_name]))

    def select_adapter(self, adapter_name: str) -> AbstractContextManager[object]:
        """Read from an adapter as :meth:`use_adapter` does; as a context (``with``), only while it is open."""
        # It acts at once, and undoes it only if the caller enters it as a context.
        after = self.selecting(self._selected)
        self.use_adapter(adapter_name)
        return after

    def selecting(self, name: str) -> ExitStack:
        """Select an adapter, or ``base``; what was selected before is selected again where the context ends."""
        store, after = self.runtime.store, ExitStack()
        after.callback(self._select, self._selected, store.route)
        self._select(name, None if name == "base" else store.route)
        return after

    def _select(self, adapter_name: str, route: Route | None) -> None:
        self._selected, self.runtime.store.route = adapter_name, route

    @property
    def selected_slot(self) -> int | None:
        """Slot of the selected adapter; None: the base model alone."""
        return self._adapters.get(self._selected)

    @property
    def _adapters(self) -> dict[str, int | None]:
        """The slots that can be selected, by name."""
        slots = {"actor": self.slot, "reference": self.reference_slot}
        return slots if self.critic_slot is None else {**slots, "critic": self.critic_slot}

    # -- what the shared base has taken over ----------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Where the base is."""
        return self.runtime.base.device

    @property
    def algo(self) -> str:
        """Name of the algorithm."""
        name: str = self.algorithm.name
        return name

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
        genes: dict[str, Any] = {} if networks_only else dict(self.hyperparameters)
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
        scheduler_config: Schedule | None = None,
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
        return accelerator, LambdaLR(optimizer, scheduler_config.factor)

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

    # -- of the core ----------------------------------------------------------------------------------------------

    @property
    def hyperparameters(self) -> Mapping[str, Any]:
        """Current value of each gene."""
        raise NotImplementedError

    def sampling(self, prompt_length: int, *, greedy: bool = False) -> SamplingSettings:
        """Return the sampling settings for a prompt of this length."""
        raise NotImplementedError

    def learn_batch(self, batch: RolloutBatch, identity: Tensor | None = None) -> dict[str, float]:
        """Update the adapter from a batch."""
        raise NotImplementedError

    def report(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an update in the algorithm's own terms."""
        raise NotImplementedError

    def optimizer_settings(self) -> dict[int, AdamWSettings]:
        """Return the settings of the next optimizer step for each slot that is trained."""
        raise NotImplementedError

    def load_checkpoint(self, path: Location) -> None:
        """Load the adapter of a checkpoint folder."""
        raise NotImplementedError


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
