"""What a population shares: one base model, one adapter bank, one rollout engine. Built once, borrowed by agents."""

import copy
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import torch

from agilerl.checks.arguments import Count, Hint, Name, Seed, Tokenizer, Whole, checked, described
from agilerl.checks.validation import validated
from agilerl.config.base_model import LOADING, SharedOptions, contradiction
from agilerl.config.distributed import Sharding
from agilerl.config.vllm import VLLMConfig
from agilerl.data import Completion
from agilerl.errors import ConfigError, EngineError
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
from agilerl.models.lora import attach, detach
from agilerl.models.memory import MemoryLimits, available_bytes, local_processes
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
from agilerl.models.slots import AdapterStore
from agilerl.planning.footprint import PassSize, pass_size
from agilerl.planning.time import Widths
from agilerl.processes import ALONE, Processes
from agilerl.rollouts.activated import PromptCache
from agilerl.rollouts.collect import generate_beside
from agilerl.rollouts.engine import CustomEngine, GenerationRequest, RolloutEngine, custom_engine
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
        self._fixed = frozenset(self.options.set_values())
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
        given = {name: getattr(options, name) for name in sorted(options.set_values())}
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

    def complete(self, requests: Sequence[GenerationRequest]) -> list[list[Completion]]:
        """Return the completions of each request of this process, in order; all processes generate at the same time."""
        return generate_beside(self.processes, self.lockstep, self.engine, requests)


def _give_back(base: BaseModel, store: AdapterStore, before: AdapterStore | None) -> None:
    """Leave a base as it was before a runtime took it; another runtime may have had it, and have it again."""
    detach(base.model, store)
    if base.store is store:
        base.store = before
