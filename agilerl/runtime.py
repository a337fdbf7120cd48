"""What a population shares: one base model, one adapter bank, one rollout engine. Built once, borrowed by agents."""

import copy
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from agilerl.checks.arguments import Count, Hint, Name, NotNegative, Seed, Tokenizer, Whole, checked, described
from agilerl.checks.validation import validated
from agilerl.config.base_model import LOADING, SharedOptions, contradiction
from agilerl.config.distributed import Sharding
from agilerl.config.vllm import VLLMConfig
from agilerl.data import Completion, MicroBatch, RolloutBatch, Trajectory, cut
from agilerl.envs.core import Task
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.examples import render_completion, render_conversation, trajectories
from agilerl.envs.prompts import as_messages, decode_completions, render_prompt
from agilerl.errors import ConfigError, EngineError, MemoryExhaustedError
from agilerl.functional import router_balance_loss
from agilerl.models import adapters
from agilerl.models.adapters import lora_layers
from agilerl.models.base import (
    BaseModel,
    check_device,
    check_network,
    from_model,
    load_base,
    load_tokenizer,
    tokenizer_fingerprint,
)
from agilerl.models.flat import Packed, PaddedRows, flatten
from agilerl.models.lora import attach, detach, token_keys, token_values
from agilerl.models.memory import MemoryLimits, attempt, available_bytes, local_processes
from agilerl.models.quantised import check_loaded
from agilerl.models.sharding import (
    Lockstep,
    check_accelerator,
    check_whole,
    loading_whole,
    processes_of,
    shard_base,
    sharding_of,
)
from agilerl.models.slots import AdapterStore, Dropout, Route
from agilerl.planning.footprint import PassSize, pass_size
from agilerl.planning.time import Widths
from agilerl.processes import ALONE, Processes
from agilerl.rollouts.activated import Beginnings, PromptCache, invocations
from agilerl.rollouts.collect import Collected, collect, generate_beside
from agilerl.rollouts.engine import Ask, CustomEngine, GenerationRequest, RolloutEngine, SamplingSettings, custom_engine
from agilerl.rollouts.torch_engine import Stops, TorchEngine
from agilerl.rollouts.vllm.engine import VLLMEngine
from agilerl.sizes import MAX_ROWS
from agilerl.text.contract import contract_of, with_ends
from agilerl.text.padding import padded, with_padding
from agilerl.text.templates import settings_of, with_chat_template

# By id, which nothing else can have meanwhile: a runtime holds its model.
_RUNTIMES: "weakref.WeakValueDictionary[int, Runtime]" = weakref.WeakValueDictionary()


_OF_STATE = ("config_overrides", "stop_sequences")
"""Options that a state keeps: they change what is computed, or where completions end, and not how."""


@dataclass(frozen=True)
class AgentRows:
    """Rows of one agent in a shared forward pass."""

    slot: int | None
    """Adapter slot, or None for the base model alone."""
    batch: RolloutBatch
    temperature: float
    """Log-probs are those of ``logits / temperature``."""
    values: bool = False
    """Ask the slot's value head instead of the language-model head."""
    dropout: float = 0.0
    """Share of the adapter's inputs that is left out while gradients are computed; needs ``draws``."""
    draws: Tensor | None = None
    """[B] int32 number of each row, which decides what is left out."""
    collision: bool = False
    """Ask for the collision entropies too, which cost the head a second time."""
    routers: bool = False
    """Ask for the load-balancing loss of a mixture's routers too."""


@dataclass(frozen=True)
class TokenOutputs:
    """What a forward pass says about the tokens of one part, ``[b, T-1]`` each; 0 off the action mask."""

    logp: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    """Value of the state before each action token, for parts that asked for values."""
    collision: Tensor | None = None
    """Collision entropy ``-log sum_v p(v)^2``, for parts that asked for it."""
    router_loss: Tensor | None = None
    """[b] load-balancing loss of each row's tokens, with gradient, for parts that asked for it."""


class Runtime:
    """One frozen base, N adapter slots, one engine, which all agents built on the same model object share.

    ``max_tokens`` bounds the tokens of one training forward (rows of several agents are packed up to it); None:
    ``pass_tokens``. ``options`` are those of the base; what is set there, no agent can change. ``engine`` samples in
    place of the torch engine: a ``RolloutEngine``, or a function of this runtime that makes one.
    """

    @checked
    def __init__(
        self,
        base: Annotated[BaseModel, Hint("pass load_base(name), or use Runtime.from_pretrained(name)")],
        *,
        lora_config: Any = None,
        tokenizer: Any = None,
        seed: Seed = 42,
        max_tokens: Count | None = None,
        max_rows: Count = MAX_ROWS,
        options: SharedOptions | None = None,
        engine: Any = None,
    ) -> None:
        self.base, self.tokenizer, self.seed, self.max_tokens = base, tokenizer, seed, max_tokens
        self.lora_config = copy.deepcopy(lora_config) if lora_config is not None else adapters.default_lora_config()
        adapters.check_lora_config(self.lora_config)
        self.store = AdapterStore(
            lora_layers(base.model, self.lora_config, None if options is None else options.lora_target_scope),
            max_rank=self.lora_config.r,
            head_features=base.hidden_size,
            device=str(base.device),
        )
        # With what base.store is before the next lines: the store of the runtime that had the base before.
        self._finalizer = weakref.finalize(self, _give_back, base, self.store, base.store)
        attach(base.model, self.store)
        base.store = self.store
        base.ends_of_text = ()
        if tokenizer is not None:
            self.tokenizer = self.reading(tokenizer)
        self._fingerprinted: tuple[Any, str | None] | None = None
        self.limits = MemoryLimits()
        """What memory has turned out to hold; the sizes that a user gave bound what is tried first."""
        self.invocation = tuple(getattr(self.lora_config, "alora_invocation_tokens", None) or ())
        """Tokens of a prompt from which on adapters act (activated adapters); none: they act on all of it."""
        self.prompts = PromptCache(base, self.store)
        """What the base has computed of prompts, for activated adapters."""
        self.engine: RolloutEngine = TorchEngine(base, self.store, seed=seed, max_rows=max_rows, limits=self.limits)
        self.engine.invocation, self.engine.prompts = self.invocation, self.prompts
        if engine is not None:
            self.engine = custom_engine(engine, self)
        self.processes: Processes = ALONE
        """The processes that work on these agents together; each of them holds all of the agents, always equal."""
        self.accelerator: Any = None
        """The ``accelerate.Accelerator`` that the agents were given."""
        self.lockstep: Lockstep | None = None
        """Keeps forward passes in step if each process holds a part of the base; None: each holds all of it."""
        # By the object and not by its name: two copies of one model are two bases.
        _RUNTIMES[id(base.model)] = self
        self.options = SharedOptions() if options is None else options
        self._fixed = frozenset(self.options.model_fields_set)
        self._apply(self.options)

    def reading(self, tokenizer: Any) -> Any:
        """Return a tokenizer that knows the base's end tokens; from now on its own end completions too."""
        self.base.ends_of_text = ()
        tokenizer = with_ends(padded(tokenizer), self.base.eos_token_ids)
        self.base.ends_of_text = contract_of(tokenizer).ends
        return tokenizer

    @classmethod
    @checked
    def from_pretrained(
        cls,
        name: Name | os.PathLike[str],
        *,
        dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = "auto",
        device: str | torch.device | None = None,
        tokenizer: Tokenizer | None = None,
        pad_token: str | None = None,
        pad_token_id: Whole | None = None,
        chat_template_path: str | os.PathLike[str] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> "Runtime":
        """Load a base (local folder, hub name or ``embedded``) with its tokenizer; options as in the constructor.

        The pad token is the one given, else the tokenizer's own, else its end token. ``chat_template_path`` is a file
        with a chat template in place of the tokenizer's, ``chat_template_kwargs`` what the template reads by name
        (``{"enable_thinking": False}``). Raises ConfigError for a device that this machine lacks, for a pad token
        that the tokenizer does not know, for a file that holds no template, or names that the template does not read.
        """
        check_device("cpu" if device is None else device)
        name = os.fspath(name)
        padding: dict[str, Any] = {"pad_token": pad_token, "pad_token_id": pad_token_id}
        tokenizer = load_tokenizer(name, **padding) if tokenizer is None else with_padding(tokenizer, name, **padding)
        tokenizer = with_chat_template(tokenizer, chat_template_path, chat_template_kwargs)
        base = load_base(name, dtype=dtype, device=device or "cpu", options=options.get("options"))
        return cls(base, tokenizer=tokenizer, **options)

    @classmethod
    def of_state(
        cls,
        name: str,
        loaded: Mapping[str, Any],
        pad: Mapping[str, Any],
        *,
        device: str | torch.device,
        lora_config: Any,
    ) -> "Runtime":
        """Load the base that an agent was saved on with what changed it then: ``loaded`` is :attr:`loaded`, or empty.

        The number format is that of the device, and a quantised base is loaded whole: both only round.
        """
        values = {key: loaded[key] for key in _OF_STATE if loaded.get(key) is not None}
        options, tokenizer = validated(SharedOptions, values), None
        template, names = loaded.get("chat_template"), loaded.get("chat_template_kwargs")
        if template is not None or names:
            tokenizer = with_chat_template(load_tokenizer(name, **pad), source=template, names=names)
        return cls.from_pretrained(
            name, device=device, lora_config=lora_config, tokenizer=tokenizer, options=options, **pad
        )

    @classmethod
    def for_model(cls, model: Any, **options: Any) -> "Runtime":
        """Return the runtime around a loaded model, made once; raises ConfigError for other adapters than its own."""
        known = _RUNTIMES.get(id(model))
        if known is None:
            check_network(model)
            check_loaded(model, options.get("options"))
            base = from_model(model)
            base.check_head()
            return cls(base, **options)
        wanted = options.get("lora_config")
        for name in ("target_modules", "alora_invocation_tokens") if wanted is not None else ():
            before, now = getattr(known.lora_config, name), getattr(wanted, name)
            # No tokens may be None or an empty list.
            if (now or None) != (before or None):
                raise ConfigError(
                    f"this model already carries a population with {name}={before!r}, found lora_config.{name}="
                    f"{now!r}; agents on one base adapt the same layers and are activated by the same tokens"
                )
        known.configure(options.get("options") or SharedOptions())
        return known

    @classmethod
    def resolve(
        cls,
        runtime: "Runtime | None",
        name: str | None,
        model: Any,
        *,
        device: str | torch.device | None = None,
        accelerator: Any = None,
        pad_token: str | None = None,
        pad_token_id: int | None = None,
        **options: Any,
    ) -> "Runtime":
        """Return the runtime that a user means by exactly one of a runtime, a model's name and a loaded model."""
        sources = {"runtime": runtime, "model_name": name, "actor_network": model}
        given = [argument for argument, value in sources.items() if value is not None]
        if len(given) != 1:
            raise ConfigError(
                f"an agent needs exactly one of {', '.join(sources)}, found {' and '.join(given) or 'none'}"
            )
        if accelerator is not None and not hasattr(accelerator, "num_processes"):
            raise ConfigError(f"accelerator: expected an accelerate.Accelerator, found {described(accelerator)}")
        if device is None and accelerator is not None:
            device = str(getattr(accelerator, "device", None) or "cpu")
        if device is not None:
            check_device(device)
        if runtime is not None:
            runtime.configure(options.get("options") or SharedOptions())
        elif name is not None:
            with loading_whole(accelerator):
                runtime = cls.from_pretrained(
                    name, device=device, pad_token=pad_token, pad_token_id=pad_token_id, **options
                )
        else:
            check_network(model)
            check_whole(model)
            runtime = cls.for_model(model if device is None else model.to(device), **options)
        runtime.accelerate(accelerator)
        return runtime

    def configure(self, options: SharedOptions) -> None:
        """Take the options that an agent was given; those that it was not given stay what they are.

        The first agent decides. Raises ConfigError where another one, or the runtime's own ``options``, have it
        differently, and for what this base or machine cannot do.
        """
        given = {name: getattr(options, name) for name in sorted(options.model_fields_set)}
        for name, value in given.items():
            present = getattr(self.options, name)
            if value != present and (self.store.used or name in self._fixed or name in LOADING):
                raise contradiction(name, present, value)
        changed = self.options.model_copy(update=given)
        if changed != self.options:
            self._apply(changed)

    def _apply(self, options: SharedOptions) -> None:
        """Make the base and the engine work as the options say; if one is not available, nothing changes."""
        # Stop texts that can be found
        if options.stop_sequences and self.tokenizer is None:
            raise ConfigError(
                f"stop_sequences={options.stop_sequences!r} are texts, and this base has no tokenizer to read them; "
                "pass tokenizer= to Runtime, or load the base by its name"
            )
        special = zip(getattr(self.tokenizer, "all_special_tokens", ()), getattr(self.tokenizer, "all_special_ids", ()))
        # Those that end completions anyway do no harm.
        silent = [token for token, number in special if number not in self.base.eos_token_ids]
        for text in options.stop_sequences or ():
            if any(token in text for token in silent):
                raise ConfigError(
                    f"stop_sequences: expected texts, found {text!r}, which has a special token in it: these are not "
                    "part of a completion's text; make it an end token of the model's generation configuration"
                )
        # Settings that contradict each other
        if isinstance(self.engine, CustomEngine) and (options.use_vllm or options.stop_sequences):
            name = "use_vllm" if options.use_vllm else "stop_sequences"
            raise ConfigError(f"{name} is for the package's engines, found Runtime(engine=...); leave out one of them")
        given = options.vllm_config and options.vllm_config.stop_sequences
        if options.stop_sequences and given and given != options.stop_sequences:
            raise ConfigError(
                f"stop_sequences={options.stop_sequences!r} and vllm_config.stop_sequences={given!r} contradict each "
                "other; remove the second, which is the same for vLLM alone"
            )
        # The engine, kept or made. Before the base is changed: vLLM may be missing, and some changes last.
        torch_engine = engine = self.engine.own if isinstance(self.engine, VLLMEngine) else self.engine
        if options.use_vllm:
            config = options.vllm_config or VLLMConfig()
            if options.stop_sequences:
                config = config.model_copy(update={"stop_sequences": options.stop_sequences})
            engine = VLLMEngine(
                self.base,
                self.store,
                config,
                seed=self.seed,
                lora_config=self.lora_config,
                tokenizer=self.tokenizer,
                own=torch_engine,
                offload=options.use_memory_efficient_params,
            )
        before = self.base.options
        self.base.configure(options)
        # Checked after the options are in force, because whether rows are padded depends on them.
        unaware = (
            (options.use_vllm, "use_vllm=True"),
            (isinstance(self.engine, CustomEngine), "Runtime(engine=...)"),
            (self.base.experts_per_token is not None, "a mixture of experts"),
            (not self.base.flattens, f"a base whose rows are padded ({type(self.base.model).__name__}, these options)"),
        )
        if self.invocation and (reason := next((name for applies, name in unaware if applies), None)):
            self.base.configure(before)
            raise ConfigError(
                f"activated adapters (lora_config.alora_invocation_tokens) do not work with {reason}; leave one out"
            )
        if isinstance(torch_engine, TorchEngine):
            torch_engine.prompts_at_once = options.hf_generate_chunk_size
            torch_engine.stops = Stops(self.tokenizer, options.stop_sequences) if options.stop_sequences else None
        self.engine, self.options = engine, options
        if isinstance(torch_engine, TorchEngine) and self.base.flattens:
            torch_engine.prefill_tokens = self.pass_size.unsaved
        if isinstance(engine, TorchEngine):
            engine.check()

    @property
    def loaded(self) -> dict[str, Any]:
        """What an agent's state says of its base and tokenizer: fingerprints, and what they were loaded with."""
        known = self._fingerprinted
        if known is None or known[0] is not self.tokenizer:
            known = self._fingerprinted = self.tokenizer, tokenizer_fingerprint(self.tokenizer)
        chosen = self.options.model_dump(mode="json", include=set(_OF_STATE))
        return {"weights": self.base.fingerprint, "tokenizer": known[1], **chosen, **settings_of(self.tokenizer)}

    @property
    def pass_size(self) -> PassSize:
        """Tokens of a forward pass that suit the base and the device; ``max_tokens`` lowers what may be above that."""
        device, options = self.base.device, self.options
        gpu = device.type == "cuda"
        size = pass_size(
            Widths.of(self.base),
            base=self.base.weight_bytes,
            memory=available_bytes(str(device)),
            gpu=gpu,
            checkpointing=options.gradient_checkpointing,
            processes=1 if gpu else local_processes(),
        )
        possible = self.base.recomputes and not self.invocation  # cached prompts are not computed again
        size = size if possible else size._replace(recomputed=size.whole)
        if self.max_tokens is None:
            return size
        largest = max(size.tokens, self.max_tokens)
        return size._replace(**{n: min(largest, getattr(size, n)) for n in ("whole", "recomputed", "unsaved")})

    def __repr__(self) -> str:
        return f"Runtime(base={self.base.name!r}, parameters={self.base.parameters:,}, {self.store!r})"

    def forward(self, parts: Sequence[AgentRows], *, entropy: bool = False) -> list[TokenOutputs]:
        """Return the outputs of each part from one forward pass over all of them.

        Parts without a slot come last. If the base does not compute rows in one line (``base.flattens``), all parts
        have the same padded length. The language-model head runs on the action tokens of the parts that need it only.
        Positions off an action mask carry no gradient.
        """
        device = self.base.device
        routing = any(part.routers for part in parts)
        none: AbstractContextManager[list[Tensor]] = nullcontext([])
        with self.base.recorded_routers() if routing else none as routers:
            hidden, sources = self._hidden(parts)
        masks = [p.batch.action_mask.cpu() for p in parts]
        # What foretells token t + 1 is the state at token t.
        places = [source[:, :-1][mask].to(device) for source, mask in zip(sources, masks)]
        by_part = self._action_logprobs(parts, hidden, places, masks, entropy=entropy)
        outputs: list[TokenOutputs] = []
        for i, (part, mask) in enumerate(zip(parts, masks)):
            spread = partial(_scatter, mask.to(device))
            if part.values:
                assert part.slot is not None
                values = token_values(hidden.index_select(0, places[i]), self.store, part.slot)
                outputs.append(TokenOutputs(values=spread(values)))
            else:
                logp, entropies = by_part[i]
                collision = None
                if part.collision:
                    temperatures = torch.full((len(places[i]),), part.temperature)
                    collision = spread(self.base.collision_entropy(hidden.index_select(0, places[i]), temperatures))
                balance = self._router_loss(part.batch, sources[i], routers) if part.routers else None
                spreads = None if entropies is None else spread(entropies)
                outputs.append(TokenOutputs(spread(logp), spreads, collision=collision, router_loss=balance))
        return outputs

    def _router_loss(self, batch: RolloutBatch, source: Tensor, routers: Sequence[Tensor]) -> Tensor:
        """Return the load-balancing loss of each row ``[b]``; ``source`` ``[b, T]`` are the places of its tokens."""
        assert self.base.experts_per_token is not None
        real = torch.arange(source.shape[1]) < batch.lengths.cpu()[:, None]
        # Each place once, though rows share prompts: the gradient of a repeated index would add up in any order.
        places, token = source[real].unique(return_inverse=True)  # type: ignore[no-untyped-call]
        wide = torch.promote_types(torch.float32, routers[0].dtype)
        members = torch.zeros((len(batch), len(places)), dtype=wide)
        members[torch.nonzero(real)[:, 0], token] = 1.0
        chosen = [logits.index_select(0, places.to(logits.device)) for logits in routers]
        return router_balance_loss(chosen, members.to(self.base.device), self.base.experts_per_token)

    def _action_logprobs(
        self,
        parts: Sequence[AgentRows],
        hidden: Tensor,
        places: Sequence[Tensor],
        masks: Sequence[Tensor],
        *,
        entropy: bool,
    ) -> dict[int, tuple[Tensor, Tensor | None]]:
        """Return log-probs and entropies of the action tokens of each part that does not ask for values."""
        device, speaking = self.base.device, [i for i, part in enumerate(parts) if not part.values]
        if not speaking:
            return {}
        targets = torch.cat([parts[i].batch.ids.cpu()[:, 1:][masks[i]] for i in speaking]).to(device)
        counts = [len(places[i]) for i in speaking]
        temperatures = torch.tensor([parts[i].temperature for i in speaking]).repeat_interleave(torch.tensor(counts))
        states = hidden.index_select(0, torch.cat([places[i] for i in speaking]))
        logps, entropies = self.base.logprobs(states, targets, temperatures.to(device), entropy=entropy)
        split = [None] * len(speaking) if entropies is None else torch.split(entropies, counts)
        return dict(zip(speaking, zip(torch.split(logps, counts), split)))

    def _hidden(self, parts: Sequence[AgentRows]) -> tuple[Tensor, list[Tensor]]:
        """Return hidden states ``[N, H]``, each row by its own adapter, and where each part's tokens are ``[B, T]``."""
        device, counts = self.base.device, [len(p.batch) for p in parts]
        # In one line, without padding
        if self.base.flattens:
            batches = [p.batch.to("cpu") for p in parts]
            lines, cache = [PaddedRows(batch.ids, batch.lengths, batch.tree) for batch in batches], None
            adapted = [i for i, part in enumerate(parts) if part.slot is not None]
            # What precedes an invocation is the base's alone: computed once, and left out of the line.
            if self.invocation and adapted:
                starts = [invocations(batches[i].ids, batches[i].prompt_lengths, self.invocation) for i in adapted]
                begun = [Beginnings(batches[i].ids, s, batches[i].tree) for i, s in zip(adapted, starts)]
                cache, places = self.prompts.computed(begun)
                for i, known, at in zip(adapted, starts, places):
                    lines[i] = PaddedRows(batches[i].ids, batches[i].lengths, batches[i].tree.after(known), known, at)
            rows = flatten(lines, self.base.activation_dtype, exact=device.type == "cpu").to(device)
            dropout = _dropout(parts, rows.origins, device)
            with self.store.routed(_route(parts, rows.parts, dropout)):
                return self.base.flat(rows, **({} if cache is None else {"past_key_values": cache})), list(rows.sources)
        # Padded to one length; for training packed, if the options say so.
        ids = torch.cat([p.batch.ids for p in parts]).to(device)
        sources = torch.split(torch.arange(ids.numel()).view(ids.shape), counts)
        if self.options.use_sequence_packing and torch.is_grad_enabled():
            lengths = torch.cat([p.batch.lengths for p in parts]).to(device)

            def route(packed: Packed) -> AbstractContextManager[None]:
                return self.store.routed(_route(parts, packed.rows, _dropout(parts, packed.origins, device)))

            return self.base.packed(ids, lengths, counts, route).flatten(0, 1), list(sources)
        with self.store.routed(_route(parts, counts, _dropout(parts, torch.arange(ids.numel()), device))):
            return self.base.hidden(ids).flatten(0, 1), list(sources)

    def fixed_logprobs(self, slot: int | None, batch: RolloutBatch, temperature: float, most: MicroBatch) -> Tensor:
        """Return log-probs ``[B, T-1]`` without gradient: old policy (a slot) or reference (None: adapters off).

        If memory runs out, the rows of a forward are halved; raises MemoryExhaustedError if not even one row fits.
        """
        return self._without_gradient(AgentRows(slot, batch, temperature), most, partial(self._output, "logp"))

    def fixed_values(self, slot: int, batch: RolloutBatch, most: MicroBatch) -> Tensor:
        """Return the values ``[B, T-1]`` that a critic's slot gives, without gradient."""
        return self._without_gradient(AgentRows(slot, batch, 1.0, values=True), most, partial(self._output, "values"))

    def fixed_entropy(self, slot: int | None, batch: RolloutBatch, temperature: float, most: MicroBatch) -> Tensor:
        """Return the entropy ``[B, T-1]`` in nats of the distribution of each action token, without gradient."""
        return self._without_gradient(AgentRows(slot, batch, temperature), most, partial(self._output, "entropy"))

    def _output(self, name: str, rows: AgentRows) -> Tensor:
        values: Tensor = getattr(self.forward([rows], entropy=name == "entropy")[0], name)
        return values

    def share(self, processes: Processes, sharding: Sharding = "none") -> None:
        """Train the agents together with other processes, which hold the same base, in whole or each a part of it.

        From here on all of them make the same calls, and each has all results. Raises ConfigError for a base that
        cannot be divided.
        """
        if self.lockstep is not None:
            raise EngineError("the base is divided among processes already; make a new runtime to divide it again")
        reasons = (
            (self.options.torch_compiler, "torch_compiler compiles layers whose weights come and go"),
            (self.options.use_vllm, "use_vllm compares vLLM with the whole base"),
            (self.invocation, "activated adapters (alora_invocation_tokens) compute prompts in each process alone"),
        )
        if sharding != "none" and (why := next((text for present, text in reasons if present), None)):
            raise ConfigError(f"sharding={sharding!r} leaves each process a part of the base, but {why}; leave out one")
        self.lockstep = shard_base(self.base, self.store, processes, sharding)
        self.processes = processes

    def accelerate(self, accelerator: Any) -> None:
        """Work with the processes of an ``accelerate.Accelerator``, if any; raises ConfigError if it does not fit."""
        if accelerator is None or accelerator is self.accelerator:
            return
        if self.accelerator is not None or self.processes.size > 1:
            raise ConfigError(
                "the base that this agent shares works with other processes already; give all agents on one base the "
                "same accelerator"
            )
        check_accelerator(accelerator, str(self.base.device), str(self.base.dtype).removeprefix("torch."))
        self.share(processes_of(accelerator), sharding_of(accelerator))
        self.accelerator = accelerator

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Compute in this process what the others do not compute; on a divided base in step with what they do."""
        together, self.processes = self.processes, ALONE
        try:
            yield
        finally:
            self.processes = together

    def collect(
        self, task: Task | EpisodeTask, tokenizer: Any, asks: Sequence[Ask], *, whole: bool = False
    ) -> Collected:
        """Return the graded trajectories of each ask, in order; the processes share the asks, or ``whole`` slots."""
        return collect(self.processes, self.lockstep, self.engine, task, tokenizer, asks, whole=whole)

    def complete(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Return the completions of each request of this process, in order; all processes generate at the same time."""
        return generate_beside(self.processes, self.lockstep, self.engine, requests)

    @checked
    def generate(
        self,
        prompts: str | Sequence[Any],
        *,
        max_new_tokens: Count | None = None,
        temperature: NotNegative = 0.0,
        seed: Whole = 0,
    ) -> str | list[str]:
        """Return the base's answer to a text or conversation, without adapters; arguments as of ``agent.generate``."""
        most = self.base.context_length
        return self.answers(None, prompts, most, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed)

    def answers(
        self,
        slot: int | None,
        prompts: str | Sequence[Any],
        context_length: int,
        *,
        max_new_tokens: int | None,
        temperature: float,
        seed: int,
    ) -> str | list[str]:
        """Return the answer of a slot (None: the base) to a text or conversation, or its answers to a list of them."""
        conversational = not isinstance(prompts, str) and bool(prompts) and isinstance(prompts[0], Mapping)
        several = not isinstance(prompts, str) and not conversational
        tokenizer = self._reads_text("generate")
        asked = [as_messages(one) for one in (prompts if several else [prompts])]
        # Room for at least one token of an answer.
        ids = [render_prompt(tokenizer, messages, context_length - 1) for messages in asked]
        limits = [min(max_new_tokens or context_length, context_length - len(prompt)) for prompt in ids]
        settings = [SamplingSettings(limit, temperature=temperature) for limit in limits]
        requests = [
            # Numbered over all processes: an answer does not depend on which of them gives it.
            GenerationRequest(slot, prompt, 1, sampling, purpose="generate", key=(seed, number))
            for number, (prompt, sampling) in enumerate(zip(ids, settings), self.first_number(len(ids)))
        ]
        completions = [completion for (completion,) in self.complete(requests)]
        texts: list[str] = decode_completions(tokenizer, [completion.token_ids for completion in completions])
        return texts if several else texts[0]

    @checked
    def tokenize(self, conversation: str | Sequence[Any]) -> Trajectory:
        """Return a text or conversation as tokens, rendered as for training; it has no reward and no log-probs.

        If its last message is the assistant's, the mask has the tokens of all the assistant's messages, which
        ``agent.logprobs`` and ``agent.accumulate`` see once ``collate([...], pad_token_id)`` has made a batch; else it
        is only a prompt.

        Raises ConfigError without a tokenizer, for a conversation of another form, and for several answers with a chat
        template that rewrites earlier ones; EnvError for an empty prompt, or none.
        """
        tokenizer, messages = self._reads_text("tokenize"), as_messages(conversation)
        *before, last = (message["role"] == "assistant" for message in messages)
        if not last:
            return Trajectory(render_prompt(tokenizer, messages), [], [], None, [float("nan")])
        if any(before) or not before:
            example = render_conversation(tokenizer, messages)
        else:
            example = render_completion(tokenizer, messages[:-1], messages[-1]["content"])
        return trajectories([example], 0, {})[0]

    def _reads_text(self, what: str) -> Any:
        if self.tokenizer is None:
            raise ConfigError(
                f"{what} reads and writes text, and this base has no tokenizer; load the base by its name, or use "
                "token ids: agent.get_action"
            )
        return self.tokenizer

    def first_number(self, count: int) -> int:
        """Return the number of this process's first thing, if those of all processes are counted one after another."""
        counts = [int.from_bytes(part) for part in self.processes.gather(count.to_bytes(8))]
        return sum(counts[: self.processes.rank])

    @torch.no_grad()
    def _without_gradient(self, rows: AgentRows, most: MicroBatch, measure: Callable[[AgentRows], Tensor]) -> Tensor:
        """Measure a batch in parts that ``most`` allows, of which each process takes some."""
        count, before = len(rows.batch), self.limits.train_tokens
        result = torch.zeros(rows.batch.action_mask.shape, dtype=torch.float32, device=self.base.device)
        if self.processes.size == 1:
            self._fill(result, range(count), rows, most, measure)
            return result
        mine, shares = self.processes.share(count), self.processes.shares(count)

        def compute() -> bytes:
            self._fill(result, mine, rows, most, measure)
            # 0 stands for no limit.
            limit = self.limits.train_tokens or 0
            return limit.to_bytes(8) + result[mine.start : mine.stop].cpu().numpy().tobytes()

        try:
            received = self.processes.agreed(compute, self.lockstep)
        except MemoryExhaustedError:
            # Some may have lowered theirs and still failed: all return to what they had in common.
            self.limits.train_tokens = before
            raise
        for share, part in zip(shares, received):
            # frombuffer refuses an empty buffer.
            values = torch.frombuffer(bytearray(part[8:]), dtype=result.dtype) if len(share) else result[:0]
            result[share.start : share.stop] = values.view(len(share), *result.shape[1:]).to(result.device)
        # What one of them has learned of memory, all keep to: they have to cut the same rows in the same way.
        self.limits.train_tokens = min((n for part in received if (n := int.from_bytes(part[:8]))), default=None)
        return result

    def _fill(
        self, result: Tensor, which: range, rows: AgentRows, most: MicroBatch, measure: Callable[[AgentRows], Tensor]
    ) -> None:
        """Measure some rows of a batch into ``result``; halves the tokens of a forward if memory runs out."""
        before, waiting = self.limits.train_tokens, [torch.arange(which.start, which.stop)]
        # Rows are measured one by one, so a forward may end anywhere.
        flat, alone = self.base.flattens, most._replace(unit=1, whole=most.unsaved)
        while waiting:
            left = waiting.pop()
            if not len(left):
                continue
            first, *others = cut(rows.batch, left, alone.at_most(self.limits.train_tokens), flat=flat).parts
            # Reversed, because the stack gives back its last entry first.
            waiting += others[::-1]
            part = replace(rows, batch=rows.batch.select(first))
            values = attempt(partial(measure, part))
            if values is None:
                if len(first) == 1:
                    self.limits.train_tokens = before
                    raise MemoryExhaustedError(
                        f"memory does not hold a forward pass over one row of {int(part.batch.lengths)} tokens"
                    )
                waiting.append(first)
                # Half of what this forward had, which may have been less than the limit.
                self.limits.train_tokens = max(1, (part.batch.distinct_tokens if flat else part.batch.ids.numel()) // 2)
                continue
            # select() may have cut the padding that these rows do not need.
            result[first, : values.shape[1]] = values.float()


def _give_back(base: BaseModel, store: AdapterStore, before: AdapterStore | None) -> None:
    """Leave a base as it was before a runtime took it; another runtime may have had it, and have it again."""
    detach(base.model, store)
    if base.store is store:
        base.store = before


def _route(parts: Sequence[AgentRows], rows: Sequence[int], dropout: Dropout | None = None) -> Route | None:
    """Return the route of a batch in which each part has so many rows."""
    pairs = [(p.slot, count) for p, count in zip(parts, rows) if p.slot is not None]
    return Route(tuple(s for s, _ in pairs), tuple(n for _, n in pairs), dropout) if pairs else None


def _dropout(parts: Sequence[AgentRows], origins: Tensor, device: torch.device) -> Dropout | None:
    """Return what the parts' adapters leave out of a line of tokens; None: nothing, or no gradient is wanted.

    ``origins [N]`` say which token of all parts' rows, side by side, each one of the line is.
    """
    if not (torch.is_grad_enabled() and any(part.dropout for part in parts)):
        return None
    keys = [
        # Parts without dropout have keys that nothing reads, so that the places stay those of all rows.
        token_keys(part.draws, part.batch.ids.shape[1]).flatten()
        if part.dropout and part.draws is not None
        else torch.zeros(part.batch.ids.numel(), dtype=torch.int32)
        for part in parts
    ]
    rates = tuple(part.dropout for part in parts if part.slot is not None)
    return Dropout(rates, torch.cat(keys)[origins].to(device))


def _scatter(mask: Tensor, values: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=values.dtype, device=mask.device).masked_scatter(mask, values)
