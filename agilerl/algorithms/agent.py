"""LLMAlgorithm: an agent that is one adapter slot on a shared base, with get_action, learn and test."""

import copy
import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

import torch
from pydantic import Field
from torch import Tensor

from agilerl.algorithms.base import Algorithm, AlgorithmConfig, Hyperparameter
from agilerl.algorithms.codec import actor_folder, read_state, save_folder, write_state
from agilerl.algorithms.config import CosineLRScheduleConfig, LLMConfig
from agilerl.algorithms.custom_loss import LossFunction, check_loss, check_restored, tangent_loss
from agilerl.algorithms.forward import fixed_logprobs
from agilerl.algorithms.learner import KEPT, MEASURES, Experience, Learner
from agilerl.algorithms.state import (
    AgentState,
    PlainState,
    adopt,
    capture,
    check_algorithm,
    check_base,
    constructor_arguments,
    restore,
)
from agilerl.algorithms.texts import answers
from agilerl.algorithms.update import accumulate_batch, learn_together, optim_step
from agilerl.checks.arguments import Count, Hint, Location, Name, Positive, Whole, checked, described, nearest
from agilerl.checks.validation import set_values, validated
from agilerl.compat.agents import DocumentedSurface, translated
from agilerl.config.base_model import SharedOptions
from agilerl.data import RolloutBatch
from agilerl.data.batch import union
from agilerl.data.checks import check_context, check_vocabulary
from agilerl.errors import CheckpointError, ConfigError, warn_once
from agilerl.functional import MetricReducer
from agilerl.hpo.mutation import Mutation
from agilerl.hpo.parameters import (
    Gene,
    HyperparameterConfig,
    Value,
    check_present,
    check_values,
    moved_into_range,
    values_of,
)
from agilerl.hpo.spread import initial_hyperparameters
from agilerl.models import adapters
from agilerl.models.operators import resize
from agilerl.rollouts import SamplingSettings
from agilerl.rollouts.engine import Outcome
from agilerl.runs.strict_json import read_json
from agilerl.runtime import Runtime
from agilerl.text.padding import padding_id


class LLMAlgorithm(Learner, DocumentedSurface):
    """One agent of a population: hyperparameters and a slot of a shared :class:`Runtime`.

    Give exactly one of ``runtime`` (a base that is loaded already), ``actor_network`` (a plain pretrained model; agents
    built on the same object share it) and ``model_name`` (a local folder, a hub name or ``embedded``).
    ``device`` None leaves a loaded model where it is and puts a named one on the CPU.
    ``accelerator`` is an ``accelerate.Accelerator``: its processes train the agent together, each on what it samples.
    ``lora_config`` is a ``peft.LoraConfig``, by default rank 16, alpha 32 on all linear layers.
    ``loss`` is a function of LossInputs, or a PolicyLoss, that replaces the algorithm's objective.
    A subclass names its ``algorithm``, or only another ``Config`` for that of its parent; every field of the Config
    becomes a constructor keyword and a checked attribute. Keywords and ``config=`` mean the same and may be mixed,
    keywords winning.
    """

    algorithm: Algorithm = Algorithm("LLMAlgorithm", LLMConfig)
    """How the agent learns. It may change, so ask for ``agent.algorithm.name``, not for the class."""
    Config: ClassVar[type[AlgorithmConfig]] = LLMConfig
    """Hyperparameters of the algorithm that a new agent of this class has."""
    attributes_of: ClassVar[tuple[type[AlgorithmConfig], ...]] = ()
    """Hyperparameters of further algorithms that an agent may take."""
    config: LLMConfig
    _learned: "weakref.ref[Tensor] | None" = None
    """Token ids of the last batch that ``learn`` trained on."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "algorithm" in vars(cls):
            cls.Config = cls.algorithm.Config
        else:
            cls.algorithm = replace(cls.algorithm, name=cls.__name__, Config=cls.Config)
        for config in (cls.Config, *cls.attributes_of):
            for name, field in config.model_fields.items():
                if not hasattr(cls, name):
                    setattr(cls, name, Hyperparameter(name, field.description))

    @checked
    def __init__(
        self,
        pad_token_id: Whole | None = None,
        pad_token: str | None = None,
        model_name: Name | None = None,
        actor_network: Any = None,
        *,
        runtime: Runtime | None = None,
        lora_config: Any = None,
        device: str | torch.device | None = None,
        accelerator: Any = None,
        cosine_lr_schedule_config: CosineLRScheduleConfig | None = None,
        loss: Annotated[LossFunction | None, Hint("pass a function of LossInputs, or a PolicyLoss")] = None,
        config: AlgorithmConfig | None = None,
        hp_config: Annotated[
            HyperparameterConfig | Mapping[str, Gene] | None,
            Hint("pass HyperparameterConfig(lr=RLParameter(min=1e-6, max=1e-3)), for instance"),
        ] = None,
        index: Whole = 0,
        **arguments: Any,
    ) -> None:
        # Settings: the agent's own, and those of the base that it shares.
        keywords = translated(arguments)
        options = validated(SharedOptions, {n: keywords.pop(n) for n in SharedOptions.model_fields if n in keywords})
        self.config = self._merge(config, keywords)  # type: ignore[assignment]
        self.hp_config = hp_config
        # Where it comes from, and how it has done so far.
        self.index = index
        self.fitness: list[float] = []
        """Mean exam score of each evaluation."""
        self.scores: list[float] = []
        """Mean training reward of each learning step."""
        self._mutation_hooks: list[Callable[[], None]] = []
        if hp_config is not None:
            if moved := moved_into_range(self.genes, self.hyperparameters):
                self.set_hyperparameters(moved)
            check_values(self.genes, self.hyperparameters)
        if loss is not None:
            check_loss(loss, self)
        self.loss = loss
        # The base, which may be there already.
        self.runtime = Runtime.resolve(
            runtime,
            model_name,
            actor_network,
            lora_config=lora_config,
            device=device,
            accelerator=accelerator,
            seed=self.config.seed,
            options=options,
            pad_token=pad_token,
            pad_token_id=pad_token_id,
        )
        self.runtime.base.check_routers(self.config.router_aux_loss_coef)
        self.pad_token_id, self.pad_token = self._padding(pad_token_id, pad_token), pad_token
        self.cosine_lr_schedule_config = cosine_lr_schedule_config
        # Counters; those that are plain numbers begin in the class.
        self.tokens = {"generated": 0, "trained": 0, "evaluated": 0}
        """Tokens spent by this agent and its ancestors."""
        self.metrics: dict[str, float] = {}
        """Metrics of the last update."""
        self.outcomes: dict[str, int] = dict.fromkeys(get_args(Outcome), 0)
        """Iterations by outcome, ancestors' included."""
        self.vitals: dict[str, list[float]] = {name: [] for name in (*MEASURES.values(), *KEPT)}
        """Entropy, length and reward of each iteration since the last selection, and the rewards before that."""
        longest = getattr(self.config, "max_output_tokens", None)
        if longest is not None and longest > self.context_length:
            warn_once(
                f"max_output_tokens={longest} is above the context of {self.context_length} tokens (max_model_len, or "
                "what the base model holds), prompt included: completions end where the context is full; lower it"
            )
        # A copy of its own, because a mutation of the rank writes r and alpha into it.
        self.lora_config = copy.deepcopy(lora_config if lora_config is not None else self.runtime.lora_config)
        adapters.check_lora_config(self.lora_config)
        self._take_slots()

    @classmethod
    def _merge(cls, config: AlgorithmConfig | None, keywords: Mapping[str, Any]) -> AlgorithmConfig:
        for name in keywords:
            if name not in cls.Config.model_fields:
                raise ConfigError(f"{cls.__name__} has no argument {name!r}; {nearest(name, cls.defaults())}")
        if config is not None and not isinstance(config, cls.Config):
            raise ConfigError(
                f"{cls.__name__}(config=...): expected a {cls.Config.__name__}, found {described(config)}; give the "
                "hyperparameters that you mean as keywords"
            )
        given = {} if config is None else set_values(config)
        return validated(cls.Config, {**given, **keywords})

    @classmethod
    def defaults(cls) -> dict[str, Any]:
        """Return the arguments of the constructor with their defaults: hyperparameters, its own, the base's options."""
        parameters = list(inspect.signature(LLMAlgorithm.__init__).parameters.values())[1:-1]  # self ... **arguments
        fields = cls.Config.model_fields | SharedOptions.model_fields
        values = {name: field.get_default(call_default_factory=True) for name, field in fields.items()}
        return values | {parameter.name: parameter.default for parameter in parameters}

    def __repr__(self) -> str:
        genes = ", ".join(f"{name}={_short(value)}" for name, value in self.hyperparameters.items())
        fitness = f", fitness={self.fitness[-1]:.3f}" if self.fitness else ""
        return f"{self.algorithm.name}(index={self.index}{', ' if genes else ''}{genes}{fitness}, steps={self.steps})"

    def _padding(self, pad_token_id: int | None, pad_token: str | None) -> int:
        """Return the padding id: as given by number or name, else the tokenizer's."""
        tokenizer, vocabulary = self.runtime.tokenizer, self.runtime.base.vocabulary_size
        if pad_token is not None and tokenizer is not None:
            return padding_id(tokenizer, pad_token, pad_token_id)
        if pad_token_id is None:
            pad_token_id = None if tokenizer is None else tokenizer.pad_token_id
        if pad_token_id is None:
            raise ConfigError(
                "pad_token_id is required: the runtime has no tokenizer with a pad token to take it from; give, for "
                "instance, pad_token_id=tokenizer.eos_token_id"
            )
        if pad_token_id >= vocabulary:
            raise ConfigError(f"expected pad_token_id of the model, 0 to {vocabulary - 1}, found {pad_token_id}")
        return pad_token_id

    # -- hyperparameters ------------------------------------------------------------------------------------------

    @property
    def hyperparameters(self) -> dict[str, Value]:
        """Current value of each gene."""
        return values_of(self.config, self.genes)

    @checked
    def set_hyperparameters(self, values: Mapping[str, Any]) -> None:
        """Change some hyperparameters together; nothing changes when one of them, or their combination, is invalid.

        ``field.entry`` is one entry of a hyperparameter that is a mapping.
        """
        config = self.config.changed(values)
        check_present(self.genes, values_of(config, self.genes))
        self.config = config

    # -- resources ------------------------------------------------------------------------------------------------

    def _take_slots(self) -> None:
        self.slot = self._new_slot()
        self._lease = self._lease_of(self.slot)

    def _new_slot(self) -> int:
        store = self.runtime.store
        slot = store.allocate(self.lora_config.r, adapters.lora_scaling(self.lora_config))
        store.initialise(slot, self.config.seed, gaussian=self.lora_config.init_lora_weights == "gaussian")
        return slot

    def clean_up(self) -> None:
        """Free the agent's slots for other agents; calls that need a slot raise EngineError from now on.

        Hyperparameters, fitness and counters can still be read. A second call does nothing.
        """
        if not self.is_open:
            return
        self.forget_reference()
        store = self.runtime.store
        if store.route is not None and self.slot in store.route.slots:  # of use_adapter
            store.route = None
        self._lease()
        # Last, because slots cannot be read from here on.
        self.is_open = False

    def move_to(self, slot: int) -> None:
        """Move the adapter into another slot that is free."""
        store = self.runtime.store
        store.move(self.slot, slot)
        self._lease()
        self.slot, self._lease = slot, self._lease_of(slot)

    # -- acting ---------------------------------------------------------------------------------------------------

    def sampling(self, prompt_length: int, *, greedy: bool = False) -> SamplingSettings:
        """Return the sampling settings for a prompt of this length."""
        room = self.context_length - prompt_length
        if room < 1:
            raise ConfigError(
                f"a prompt of {prompt_length} tokens leaves no room for a completion: the context holds "
                f"{self.context_length} tokens; shorten the prompt or raise max_model_len={self.config.max_model_len}"
            )
        return self.config.sampling(room, greedy=greedy)  # type: ignore[attr-defined,no-any-return]

    def report(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Return the metrics of an update in the algorithm's own terms."""
        return dict(metrics)

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and completion together."""
        return min(self.config.max_model_len or self.runtime.base.context_length, self.runtime.base.context_length)

    @checked
    def generate(
        self,
        prompts: str | Sequence[Any],
        *,
        max_new_tokens: Count | None = None,
        temperature: Annotated[float, Field(ge=0)] = 0.0,
        seed: Whole = 0,
    ) -> str | list[str]:
        """Return the agent's answer to a text or conversation, or its answers to a list of them.

        A text is one message of the user, a conversation a list of ``{"role", "content"}``; either is rendered by the
        chat template, and a final assistant message is continued. Answers are texts without special tokens, greedy
        unless ``temperature`` is above 0; then each ``seed`` gives different ones. Training is not affected.
        ``max_new_tokens`` None takes ``max_output_tokens``, or what the context leaves.

        Raises ConfigError without a tokenizer, and for prompts of another form; EnvError for one that is too long.
        """
        limit = max_new_tokens or getattr(self.config, "max_output_tokens", None)
        return answers(
            self.runtime,
            self.selected_slot,
            prompts,
            self.context_length,
            max_new_tokens=limit,
            temperature=temperature,
            seed=seed,
        )

    # -- learning: gradients are accumulated, then an optimizer step spends them ----------------------------------

    def learn_batch(self, batch: RolloutBatch, identity: Tensor | None = None) -> dict[str, float]:
        """Update the adapter from a batch; returns the metrics of the update, ``mean_loss`` and ``mean_kl`` among them.

        If several processes train the agent, each passes what it has sampled, and the update is that of all rows
        together. ``identity`` is the tensor by which a batch that is learned from twice in a row is recognised.
        """
        self._check_fits(batch)
        ids = batch.ids if identity is None else identity
        self.learns_again = self._learned is not None and self._learned() is ids
        # Weak, so that the batch does not stay in memory; an id() could be that of a later tensor.
        self._learned = weakref.ref(ids)
        try:
            return learn_together([self], [union(self.runtime.processes, batch, self.pad_token_id)])[0]
        finally:
            self.learns_again = False

    @checked
    def accumulate(
        self,
        batch: RolloutBatch | Experience,
        loss_fn: LossFunction | None = None,
        *,
        denominator: Positive | None = None,
    ) -> dict[str, float]:
        """Add the gradient of a loss on a batch to what is pending; returns the metrics of this batch.

        ``loss_fn`` is a function of LossInputs, by default the agent's own loss. A :class:`RolloutBatch` is prepared
        first (advantages, old and reference log-probs); to split one optimizer step over several calls, prepare the
        whole of it and pass the parts together with the denominator of the whole::

            experience = agent.prepare(batch)
            whole = agent.window_denominator(experience.batch.action_mask)
            for rows in torch.arange(len(experience)).split(16):
                agent.accumulate(experience.select(rows), my_loss, denominator=whole)
            agent.optim_step()

        Without ``denominator`` the batch is the whole step. Raises ConfigError for anything but a loss function, and
        MemoryExhaustedError, with nothing added, if memory does not even hold the smallest part of the batch.
        """
        self._check_fits(batch if isinstance(batch, RolloutBatch) else batch.batch)
        experience = batch if isinstance(batch, Experience) else self.prepare(batch)
        metrics = accumulate_batch(self, experience, loss_fn, denominator)
        self._count(experience.batch)
        return metrics.result()

    @checked
    def accumulate_tangents(self, batch: RolloutBatch | Experience, dloss_dlogp: Tensor) -> None:
        """Add the gradient of a loss that is known by its derivative with respect to each log-prob, ``[B, L]``.

        Row b, position t belongs to the log-prob of token t + 1, as in :meth:`logprobs`; positions off the action mask
        are ignored. Nothing is divided: the caller applies denominators. A number that is not finite makes the next
        ``optim_step`` skip. Raises ConfigError for another shape.
        """
        rows = batch.batch if isinstance(batch, Experience) else batch
        self._check_fits(rows)
        expected = tuple(rows.action_mask.shape)
        if not isinstance(dloss_dlogp, Tensor) or tuple(dloss_dlogp.shape) != expected:
            given = (
                f"shape {tuple(dloss_dlogp.shape)}" if isinstance(dloss_dlogp, Tensor) else type(dloss_dlogp).__name__
            )
            raise ConfigError(
                f"expected d loss / d log-prob as a tensor of shape {expected}, one number for each entry of "
                f"agent.logprobs(batch), found {given}"
            )
        # In place of the advantages: tangent_loss multiplies them by the log-probs.
        accumulate_batch(self, Experience(rows, dloss_dlogp.detach()), tangent_loss, 1.0)
        self._count(rows)

    def optim_step(self) -> dict[str, float]:
        """Clip the pending gradient, take one AdamW step and clear it; returns gradient norm and learning rate.

        The step is skipped, and counted in ``skipped_steps``, when a loss or the gradient was not finite.
        """
        metrics = MetricReducer()
        optim_step([self], [metrics])
        values = metrics.result() | self.note_update()
        values["skipped_steps"] = float(self.skipped_steps)
        values["num_tokens"] = float(self.tokens["trained"])
        return values

    @checked
    def logprobs(self, batch: RolloutBatch) -> Tensor:
        """Return the policy's log-probs ``[B, L]`` at the agent's temperature, without gradient, 0 off the mask.

        They are the reference's while that is selected: see :meth:`use_adapter`.
        """
        self._check_fits(batch)
        temperature = getattr(self.config, "temperature", 1.0)
        return fixed_logprobs(self.runtime, self.selected_slot, batch, temperature, self.micro_batch)

    def _count(self, batch: RolloutBatch) -> None:
        self.tokens["trained"] += int(batch.lengths.sum())
        self.steps += len(batch)

    def _check_fits(self, batch: RolloutBatch) -> None:
        """Raise ConfigError if a user's batch has token ids, or rows, that the base cannot take."""
        if len(batch):
            check_vocabulary(batch.ids, self.runtime.base.vocabulary_size, "completion_ids")
            check_context(batch.lengths, self.context_length, self.config.max_model_len, "completion_ids")

    # -- mutation -------------------------------------------------------------------------------------------------

    @checked
    def apply_mutation(self, mutation: Mutation) -> None:
        """Carry out a planned mutation: new values for genes, or an operator on the adapter.

        Every selection ends with it, even if it changes nothing.
        """
        self.check_open()
        if mutation.kind == "hyperparameters":
            self.set_hyperparameters({change.gene: change.new for change in mutation.changes})
            self.mut = ", ".join(f"{c.gene} {_short(c.old)} -> {_short(c.new)}" for c in mutation.changes)
        else:
            self.mut = "None" if mutation.kind == "none" else self._mutate_adapter(mutation)
        self.mutation_hook()
        self.after_selection()

    def _mutate_adapter(self, mutation: Mutation) -> str:
        new = int(mutation.changes[0].new)
        # alpha / r stays what it is: a rank change must not rescale what the adapter already does.
        scaling = float(self.runtime.store.scaling[self.slot])
        old = self.rank
        energy = resize(self.runtime.store, self.slot, new, self.config.seed)
        self.lora_config.r = new
        self.lora_config.lora_alpha = scaling * (new**0.5 if self.lora_config.use_rslora else new)
        return f"rank {old} -> {new}" + (f" (energy {energy:.3f})" if new < old else "")

    @checked
    def register_mutation_hook(self, hook: Callable[[], None]) -> None:
        """Call ``hook()`` after every mutation of this agent."""
        self._mutation_hooks.append(hook)

    def mutation_hook(self) -> None:
        """Run the registered hooks."""
        for hook in self._mutation_hooks:
            hook()

    # -- state ----------------------------------------------------------------------------------------------------

    def state(self) -> AgentState:
        """Return a copy of everything that decides the agent's next update."""
        return capture(self)

    @classmethod
    @checked
    def from_state(cls, state: AgentState, runtime: Runtime, loss: LossFunction | None = None) -> Self:
        """Build an agent from a state on a runtime; the inverse of :meth:`state`, which cannot hold a custom loss."""
        check_algorithm(state, cls.__name__, cls.Config.model_fields)
        check_restored(state.own_loss, loss)
        with runtime.store.undrawn():  # the weights of the state take the place of the first ones
            agent = cls(runtime=runtime, loss=loss, **constructor_arguments(state, runtime))
        restore(agent, state)
        return agent

    @checked
    def clone(self, index: Whole | None = None, wrap: bool = True) -> Self:
        """Return an independent copy in another slot, which continues bit for bit as this agent would.

        With a new ``index`` it draws other samples and another order of the rows of an update from now on.
        """
        clone = self.from_state(self.state(), self.runtime, self.loss)
        # The state has genes only; whoever gave a HyperparameterConfig finds it in the clone again.
        clone.hp_config = self.hp_config
        clone._mutation_hooks = list(self._mutation_hooks)
        if index is not None:
            clone.index, clone.parent = index, self.index
        return clone

    @checked
    def save_checkpoint(
        self,
        path: Location,
        lora_only: bool = True,
        save_optimizer: bool = True,
        *,
        overwrite: bool = False,
        **kwargs: Any,
    ) -> None:
        """Write ``actor/`` (PEFT), ``reference/`` if there is one, the optimizer and the agent's settings.

        The folder is written as a whole or not at all. With ``overwrite`` an existing checkpoint is replaced
        completely; without it CheckpointError is raised, as it is for a file and for a folder that holds something
        else. If several processes train the agent, the first one writes.
        """
        if not lora_only:
            raise ConfigError(
                "lora_only=False is refused: the base model is frozen, so a checkpoint never holds it; load it from "
                "its source, or merge the adapter with PEFT's merge_and_unload()"
            )
        state = self.state()
        if self.runtime.processes.rank > 0:
            return
        save_folder(
            path,
            lambda folder: write_state(state, folder, self.runtime, self.lora_config, save_optimizer=save_optimizer),
            overwrite=overwrite,
        )

    @checked
    def load_checkpoint(
        self,
        path: Location,
        load_optimizer: bool = False,
        overwrite_reference_adapter: bool = False,
        overwrite_critic_adapter: bool = True,
    ) -> None:
        """Load the adapter of a checkpoint folder into this agent; hyperparameters stay this agent's own.

        The policy is the one that was saved: if its ``lora_alpha`` or ``use_rslora`` differ, the agent takes them over
        with a warning. A checkpoint of another algorithm is the stage before this one (SFT -> DPO -> GRPO): its actor
        becomes the reference policy as well. A checkpoint of the same algorithm restores the reference that it was
        saved with (or the base model), unless ``overwrite_reference_adapter`` makes its actor the reference. With
        ``overwrite_critic_adapter`` an agent with a critic takes the checkpoint's, or starts its critic from the actor
        if there is none. Raises CheckpointError when the ranks differ; the agent is then unchanged.
        """
        self.check_open()
        # All that may be refused comes before adopt, which changes the agent.
        state = read_state(Path(path), self.runtime.store.layers)
        if state.lora["r"] != self.rank:
            raise CheckpointError(
                f"the checkpoint at {str(path)!r} has rank {state.lora['r']}, this agent rank {self.rank}; create the "
                f"agent with lora_config of r={state.lora['r']}"
            )
        if load_optimizer and not state.moments:
            raise CheckpointError(f"{str(path)!r} was saved without its optimizer; load it with load_optimizer=False")
        check_base(state, self.runtime)
        separate = getattr(self.config, "use_separate_reference_adapter", False)
        if state.algorithm != self.algorithm.name:
            state.reference = None  # that of the stage before
        if overwrite_critic_adapter and self.critic_slot is not None and state.critic is None:
            warnings.warn(
                f"the checkpoint at {str(path)!r} is of {state.algorithm} and has no critic: this agent's critic "
                "starts from the actor's adapter and values of 0; overwrite_critic_adapter=False keeps its critic",
                stacklevel=3,
            )
        adopt(
            self,
            state,
            with_optimizer=load_optimizer,
            with_critic=overwrite_critic_adapter,
            actor_as_reference=overwrite_reference_adapter or (separate and state.algorithm != self.algorithm.name),
        )

    @classmethod
    @checked
    def load(
        cls,
        path: Location,
        device: str | torch.device = "cpu",
        accelerator: Any = None,
        *,
        runtime: Runtime | None = None,
        loss: LossFunction | None = None,
    ) -> Self:
        """Build an agent from a checkpoint folder, loading its base model unless a ``runtime`` is given.

        The folder was written by ``save_checkpoint`` or ``save_llm_checkpoint``, or is the ``elite/`` of a run. The
        base is loaded with the chat template, config_overrides and stop_sequences that the agent was trained with. An
        agent that was trained with a custom loss needs it again as ``loss``; else CheckpointError is raised.
        """
        folder = Path(path)
        lora = adapters.read_config(actor_folder(folder))
        if runtime is None:
            saved = read_json(folder / "agent.json", PlainState)
            if not saved["base"]:
                raise CheckpointError(
                    f"{folder} holds an agent on a model that had neither a name nor a folder; load that model, and "
                    "pass runtime=Runtime.for_model(model)"
                )
            runtime = Runtime.of_state(
                saved["base"], saved.get("loaded") or {}, saved["pad"], device=device, lora_config=lora
            )
        state = read_state(folder, runtime.store.layers)
        check_base(state, runtime)
        runtime.accelerate(accelerator)
        return cls.from_state(state, runtime, loss)

    # -- populations ----------------------------------------------------------------------------------------------

    @classmethod
    @checked
    def population(
        cls,
        size: Count,
        observation_space: Any = None,
        action_space: Any = None,
        *,
        init: Literal["spread", "same"] = "spread",
        hp_config: Any = None,
        **arguments: Any,
    ) -> list[Self]:
        """Return ``size`` agents on one base; arguments as for one agent.

        With an ``hp_config``, member 0 has the given hyperparameters and the others spread evenly over the ranges of
        the genes (``init="spread"``); with ``init="same"`` all members start equal.
        """
        first = cls(hp_config=hp_config, index=0, **arguments)
        return first.founders(size, first.genes, init)

    def founders(self, size: int, ranges: Mapping[str, Gene], init: Literal["spread", "same"]) -> list[Self]:
        """Return a first generation of ``size`` agents, of which this one is the first, with the given values.

        ``ranges`` are those that the others are spread over.
        """
        self.runtime.store.reserve(size * self.trained_slots)
        starts = initial_hyperparameters(ranges, self.hyperparameters, size, self.config.seed, init)
        agents = [self, *(self.clone(index) for index in range(1, size))]
        for agent in agents:
            # They are copied as clones are, but founders have no parent.
            agent.parent = None
            if agent.index:
                agent.set_hyperparameters(starts[agent.index])
        return agents


def _short(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
