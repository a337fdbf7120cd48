"""From a checked configuration to the objects of a run: resolved, loaded, assembled."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from agilerl.addresses import check_key, is_out_of_reach
from agilerl.algorithms import ALGORITHMS, LLMAlgorithm
from agilerl.algorithms.codec import warn_of_another_base
from agilerl.algorithms.state import differences
from agilerl.arguments import checked, shown
from agilerl.config.base_model import SharedOptions
from agilerl.config.named_files import digests
from agilerl.config.run import TEACHER_KEY, RunConfig, SelectionConfig
from agilerl.config.vllm import API_KEY, VLLMConfig, lora_capacity
from agilerl.custom_code import contained, load_code, names_code
from agilerl.distributed.islands import IslandPopulation
from agilerl.distributed.topology import SOLITARY, Topology
from agilerl.envs.core import TRIED_ROWS, Task
from agilerl.envs.episode_task import EpisodeTask
from agilerl.envs.prompts import generation_prompt, text_ids
from agilerl.errors import AgileRLError, CheckpointError, ConfigError, EnvError, lacks_memory
from agilerl.hpo.fitness import Fitness
from agilerl.hpo.knockout import KnockoutSelection, Pace, PulseSelection
from agilerl.hpo.selection import AT_THE_START, Plan, SelectionStrategy, Standing
from agilerl.hpo.spread import initial_hyperparameters
from agilerl.models.adapters import lora_layers, lora_scaling, read_adapter, read_config
from agilerl.models.base import check_device, is_of_hub, load_base, load_tokenizer, resolve_model, tokenizer_fingerprint
from agilerl.models.model_config import model_config
from agilerl.models.quantised import imported_peft
from agilerl.planning.footprint import bank_bytes
from agilerl.population import Population
from agilerl.rollouts.activated import invocations
from agilerl.rollouts.vllm.colocated import check_installed
from agilerl.rollouts.vllm.engine import VLLMEngine
from agilerl.runtime import Runtime
from agilerl.templates import at_date
from agilerl.training.generation import Scale
from agilerl.training.memory import adapter_numbers, adapter_slots, check_memory, check_weights, estimate
from agilerl.training.probe import Probe
from agilerl.training.resolved import USUAL, Resolved, resolve, usual_rate
from agilerl.training.saved import SavedCheckpoint, received
from agilerl.training.tasks import task
from agilerl.training.trackers import Tracker, check_trackers, load_trackers


@dataclass
class Session:
    """Everything a run trains with."""

    resolved: Resolved
    task: Task | EpisodeTask
    population: Population
    saved: SavedCheckpoint | None = None
    """What the run is resumed from; None for a new run."""
    files: dict[str, dict[str, str]] = field(default_factory=dict)
    """sha256 of the files that the configuration names: ``data``, and the allowed ``code``."""
    topology: Topology = SOLITARY
    """The processes of the run, seen from this one."""
    date: datetime = field(default_factory=datetime.now)
    """The date that chat templates use, local time."""
    trackers: Mapping[str, Callable[..., Tracker]] = field(default_factory=dict)
    """Classes of the user's own trackers, by their names in the configuration."""
    preflight: Probe | None = None
    """What its agents answered before the run; None before that, and if the run has no preflight."""
    begun: bool = False
    """Whether a run has begun with it: its agents have learned, so no other run can."""

    def check_new(self) -> None:
        """Raise ConfigError if a run has begun with this session."""
        if self.begun:
            raise ConfigError(
                "a run has begun with this session, and its agents have learned: build another one, from the "
                "configuration for a new run, or from what open_run() returns to resume one"
            )

    @property
    def config(self) -> RunConfig:
        """The configuration as given."""
        return self.resolved.config

    @property
    def evo_steps(self) -> int:
        """Iterations between selections."""
        steps = self.config.training.evo_steps
        assert steps is not None, "set while the run is assembled"
        return steps

    @property
    def scale(self) -> Scale:
        """The size of an agent's iterations and exams."""
        group: int = self.resolved.hyperparameters.group_size  # type: ignore[attr-defined]
        return Scale.of(self.config.training, self.population, group)

    @property
    def generation_steps(self) -> int:
        """Iterations of the present generation: ``evo_steps``, or fewer while a knockout has founders."""
        strategy, indices = self.selection, [agent.index for agent in self.population.everyone]
        founders = max(indices) < self.config.training.pop_size
        if not isinstance(strategy, KnockoutSelection) or not founders or len(indices) <= strategy.floor:
            return self.evo_steps
        return self.pace.founders_steps(len(indices))

    @cached_property
    def pace(self) -> Pace:
        """What the budget holds, as far as that is known before training."""
        t = self.config.training
        if t.max_seconds is not None:
            return Pace(self.evo_steps, 0, 0)
        iterations, exam = self.scale.lone_agent()
        given = "evo_steps" in t.model_fields_set
        return Pace(self.evo_steps, 1 / iterations, 0 if t.max_tokens is None else exam / iterations, given)

    @property
    def without_effect(self) -> list[str]:
        """Sentences about what was asked for and will not happen."""
        sentences = self.resolved.without_effect
        strategy, t = self.resolved.selection, self.config.training
        if t.max_seconds is not None or not isinstance(strategy, KnockoutSelection) or strategy.floor > 1:
            return sentences  # how much a second does is not known before
        later = strategy.later
        if not isinstance(later, PulseSelection) or not later.factors or not later.until:
            return sentences
        first = self.pace.first_pulse(t.pop_size, strategy.period, later.every)
        if first >= later.until:
            due = f"the first is due after {first:.0%} of so small a budget" if first < 1 else "the budget is too small"
            sentences.append(
                f"selection_strategy.pulses: no copy with a higher rate will be tried: {due}, and none is tried after "
                f"pulses.until={later.until:g} of it; raise the budget, or lower training.evo_steps"
                + " or training.pop_size"
                * (t.pop_size > 1)
            )
        return sentences

    @property
    def selection(self) -> SelectionStrategy:
        """The selection strategy."""
        assert self.resolved.selection is not None, "code is loaded with the base"
        return self.resolved.selection

    @property
    def usual_rate(self) -> float | None:
        """The learning rate that is usual for the base; None if the algorithm does not learn from rewards."""
        return usual_rate(self.population.runtime.base) if self.resolved.algorithm.env_type == "reasoning" else None


@checked
def build(
    config: RunConfig | Resolved,
    checkpoint: Path | None = None,
    *,
    allow_code: bool = False,
    topology: Topology = SOLITARY,
    all_rows: bool = False,
    runtime: Runtime | None = None,
) -> Session:
    """Load the base, make the task and the population, new or from a ``checkpoint`` folder; nothing is written.

    ``allow_code`` runs Python that the configuration names, such as ``rewards.py:my_reward``: never allow it for a file
    that you have not read. Each process makes its island's share of the agents; only the writer needs the
    ``checkpoint``, and sends the others theirs. Chat templates that ask for the date get ``config.date``. ``all_rows``
    puts every row of a dataset into the test, for an evaluation. ``runtime`` is the base if it is loaded already.

    Raises ConfigError or EnvError for problems that can be found before training, and CheckpointError for a checkpoint
    that does not fit.
    """
    resolved = check(config)
    config = resolved.config
    _check_islands(config, topology)
    trackers = load_trackers(config.training.trackers, allow_code=allow_code)
    if resolved.selection is None:
        resolved = replace(resolved, selection=selection_strategy(config.selection_strategy, allow_code=allow_code))
    # Without microseconds: run.json stores seconds, and a resumed run must see the same date.
    date = (config.date or datetime.now()).replace(microsecond=0)
    here = resolved.seen_from(topology)
    with at_date(date):
        source = task(here.config, allow_code=allow_code, all_rows=all_rows)
        try:
            runtime = load_runtime(here) if runtime is None else runtime
            runtime.share(topology.island, here.config.distributed.base_sharding())
            resolved = resolved.with_rate(usual_rate(runtime.base))
            resolved = resolved.with_usual_founder(usual_rate(runtime.base))
            saved = received(topology, checkpoint, runtime)
            population = _population(resolved, here.config, source, runtime, topology, saved)
            try_prompts(population)
            resolved = resolved.with_epochs(source.train_size if isinstance(source, Task) else None)
            group: int = resolved.hyperparameters.group_size  # type: ignore[attr-defined]
            scale, given = Scale.of(config.training, population, group), config.environment.eval_prompts is not None
            steps, population.exam_prompts = scale.generation(given=given)
            check_memory(estimate(here.config, population), here.config.training.device)
            start_sampling(population, here.config.training.pop_size, here.config.largest_rank)
        except BaseException:
            source.close()
            raise
    if config.training.evo_steps is None:
        resolved = resolved.derived(evo_steps=steps)
    return Session(resolved, source, population, saved, digests(here.config), topology, date, trackers)


def _population(
    resolved: Resolved,
    here: RunConfig,
    source: Task | EpisodeTask,
    runtime: Runtime,
    topology: Topology,
    saved: SavedCheckpoint | None,
) -> Population:
    """Assemble the population of this process, which has the settings ``here``, new or from a checkpoint."""
    most = max(here.network.lora_config.r, here.mutation.rank_range[1])
    agents = first_generation(resolved, runtime, topology) if saved is None else _survivors(most, saved, runtime)
    t, islands = here.training, topology.peers.size > 1
    population = (partial(IslandPopulation, exchange=topology.peers) if islands else Population)(
        agents,
        source,
        prompts_per_step=here.environment.data_batch_size_per_gpu,
        eval_max_new_tokens=t.eval_max_new_tokens or getattr(resolved.hyperparameters, "max_output_tokens", None),
        eval_temperature=t.eval_temperature,
        eval_samples=t.eval_samples,
        max_error_rate=t.max_error_rate,
        test_prompts=here.environment.test_prompts,
        objectives=here.selection_strategy.objectives or ("reward",),
        sharing=here.sharing,
    )
    if saved is not None:
        population.next_index = saved.next_index
        runtime.limits.train_tokens, runtime.limits.decode_rows = saved.memory.train_tokens, saved.memory.decode_rows
    return population


def _check_islands(config: RunConfig, topology: Topology) -> None:
    topology.check(config.training.pop_size)
    islands, left = topology.peers.size, config.smallest_population
    if islands > 1 and (config.sharing.distillation or config.sharing.experience):
        raise ConfigError(
            f"sharing is for agents of one island, found {islands} islands; set sharing.distillation and "
            "sharing.experience to 0, or run in one process"
        )
    if left < islands:
        name = config.selection_strategy.strategy
        remedy = f"set selection_strategy.floor={islands}, " if name != "pulses" else ""
        raise ConfigError(
            f"selection_strategy.name={name} leaves {left} of training.pop_size={config.training.pop_size} agents, "
            f"fewer than the {islands} islands, each of which needs one; {remedy}name a strategy that keeps all agents "
            "(tournament, truncation), or run in one process"
        )


def check(config: RunConfig | Resolved) -> Resolved:
    """Return what a configuration resolves to; raises ConfigError for all that needs no model, this machine too."""
    resolved = resolve(config)
    config = resolved.config
    trackers = config.training.trackers
    check_trackers(trackers, own=filter(names_code, trackers))
    check_sampling(config, resolved.options)
    check_device(config.training.device, "training.device")
    return resolved


def load_agent(config: RunConfig) -> LLMAlgorithm:
    """Load the base, and one agent with the adapter ``network.adapter``, without a task; raises as :func:`build`."""
    resolved = resolve(config)
    return first_generation(resolved, load_runtime(resolved), SOLITARY)[0]


def merged_model(folder: Path, config: RunConfig, *, dtype: str = "auto") -> tuple[Any, Any]:
    """Return the base of a configuration with the adapter in a PEFT folder merged into it, and its tokenizer.

    W + scale B A is computed in fp32, whatever the run quantised, and rounded to ``dtype``; ``auto`` is the type of the
    base's files. Raises CheckpointError if the adapter does not fit the base, and ConfigError as :func:`load_base`.
    """
    network, options, peft = config.network, resolve(config).options, imported_peft()
    name = network.pretrained_model_name_or_path
    path = resolve_model(name)
    check_weights(path, "cpu", None)
    _spare_retries(name)
    files = model_config(path, {})
    if getattr(files, "quantization_config", None) is not None:
        raise ConfigError(
            f"the files of {name!r} are quantised, and merging rounds the adapter away; name the base that they were "
            "made from: network.pretrained_model_name_or_path=..."
        )
    settings = read_config(folder)
    if settings.alora_invocation_tokens:
        raise ConfigError(
            f"the adapter in {str(folder)!r} is activated (alora_invocation_tokens): it does not act on prompts, so it "
            "cannot be merged into the weights; load it with PEFT, or use agilerl chat and agilerl eval"
        )
    # All that changes the function; the merged model's config.json has it.
    overrides = {key: value for key, value in (options.config_overrides or {}).items() if "dtype" not in key}
    changed = SharedOptions(config_overrides=overrides or None)
    base = _guarded(name, lambda: load_base(name, dtype="float32", options=changed))
    tokenizer = _guarded(name, lambda: load_tokenizer(name, **network.of_tokenizer))
    scope = options.lora_target_scope
    read_adapter(folder, lora_layers(base.model, settings, scope))  # every layer is there, and nothing else
    loaded = {"weights": base.fingerprint, "tokenizer": tokenizer_fingerprint(tokenizer), "config_overrides": overrides}
    warn_of_another_base(folder, base, loaded)
    kind = files.dtype or "float32" if dtype == "auto" else dtype
    merged = peft.PeftModel.from_pretrained(base.model, str(folder), config=settings).merge_and_unload(safe_merge=True)
    return merged.to(getattr(torch, str(kind).removeprefix("torch."))), tokenizer


def first_generation(resolved: Resolved, runtime: Runtime, topology: Topology) -> list[LLMAlgorithm]:
    """Return those of ``algorithm.population(pop_size, ...)`` that belong to this island, without making the others."""
    t, network, algorithm = resolved.config.training, resolved.config.network, resolved.algorithm
    places = topology.places(t.pop_size)
    # Only what was set, because a default that is passed on would count as set; and in the form of run.json, so that a
    # run restarted from it writes the same files.
    settings = resolved.hyperparameters.model_dump(mode="json", exclude_unset=True)
    first = algorithm(hp_config=dict(resolved.genes) or None, index=places.start, runtime=runtime, **settings)
    runtime.store.reserve(len(places) * algorithm.trained_slots)
    ranges = {name: gene for name, gene in resolved.founder_genes().items() if name in first.genes}
    starts = initial_hyperparameters(ranges, first.hyperparameters, t.pop_size, first.config.seed, t.init)
    if usual := resolved.usual_instead(usual_rate(runtime.base)):
        starts[USUAL] |= usual
    agents = [first, *(first.clone(index) for index in places[1:])]
    for agent in agents:
        agent.parent = None
        if agent.index:  # the first agent has the given values
            agent.set_hyperparameters(starts[agent.index])
    if network.adapter is not None:
        _start_from(Path(network.adapter).expanduser(), agents)
    if len(resolved.algorithms) > 1 and t.init == "spread":
        for number, agent in zip(places, agents):
            agent.set_hyperparameters({"algorithm": resolved.algorithms[number % len(resolved.algorithms)].__name__})
    return agents


def _survivors(most: int, saved: SavedCheckpoint, runtime: Runtime) -> list[LLMAlgorithm]:
    """Return the agents of a checkpoint; raises CheckpointError if their rank is above ``most``."""
    if saved.bank_rank > most:
        raise CheckpointError(
            f"{saved.path} was made with adapters of rank {saved.bank_rank}, but this run goes up to {most}; resume "
            "from an older checkpoint"
        )
    for state in saved.states:
        if state.loaded is not None and (why := differences(state.base, state.loaded, runtime.base, runtime.loaded)):
            raise CheckpointError(
                f"{saved.path} cannot be resumed with this base: {why[0]}; or start another run from its adapters: "
                "network.adapter=RUN/elite or an agent of a checkpoint"
            )
    # The bank's width affects the last bits of every agent, even of those with a smaller rank.
    if saved.bank_rank > runtime.store.max_rank:
        runtime.store.widen(saved.bank_rank)
    return [ALGORITHMS[state.algorithm].from_state(state, runtime) for state in saved.states]


def _start_from(folder: Path, agents: Sequence[LLMAlgorithm]) -> None:
    """Start every agent, and its reference policy, from a PEFT adapter; raises ConfigError if its shape differs."""
    runtime, wanted = agents[0].runtime, agents[0].lora_config
    store = runtime.store
    factors, given = read_adapter(folder, store.layers)
    warn_of_another_base(folder, runtime.base, runtime.loaded)
    if given.alora_invocation_tokens != wanted.alora_invocation_tokens:
        raise ConfigError(
            f"network.adapter={shown(str(folder))} has alora_invocation_tokens={given.alora_invocation_tokens}, this "
            f"run {wanted.alora_invocation_tokens}; set network.lora_config.alora_invocation_tokens to the same"
        )
    if (given.r, lora_scaling(given)) != (wanted.r, lora_scaling(wanted)):
        raise ConfigError(
            f"network.adapter={shown(str(folder))} has rank {given.r} and scale {lora_scaling(given):g}, "
            f"network.lora_config rank {wanted.r} and scale {lora_scaling(wanted):g}; set lora_config r={given.r}, "
            f"lora_alpha={given.lora_alpha}, use_rslora={str(given.use_rslora).lower()}"
        )
    store.reserve(store.used + len(agents))
    for agent in agents:
        store.load_adapter(agent.slot, factors)
        agent.set_reference(factors)


def try_prompts(population: Population) -> None:
    """Render the panels and the first training prompts, so that one that is too long stops the run early."""
    for split in ("exam", "test"):
        population.lengths(split)
    if population.learns_from_data:
        for position in range(TRIED_ROWS):
            population.examples(position)
    else:
        population.places("train")
    if (tokens := population.runtime.invocation) and isinstance(population.task, Task):
        text = population.runtime.tokenizer.decode
        for ids in (place.prompt_ids for split in ("exam", "test") for place in population.places(split)):
            try:
                invocations(torch.tensor([ids]), torch.tensor([len(ids)]), tokens)
            except EnvError as error:
                raise ConfigError(
                    f"network.lora_config.alora_invocation_tokens: expected {text(list(tokens))!r} in every prompt "
                    f"(the tokens {list(tokens)}), found one that ends with {text(ids[-12:])!r}; name a text or tokens "
                    "with which the chat template begins an answer"
                ) from error


# -- the base model: found, loaded, and checked against the machine and its tokenizer ---------------------------------


PartT = TypeVar("PartT")


def load_runtime(resolved: Resolved) -> Runtime:
    """Load the base with its tokenizer, and make the adapter bank; raises ConfigError if one does not fit."""
    config, options = resolved.config, resolved.options
    t, network, name = config.training, config.network, config.network.pretrained_model_name_or_path
    check_device(t.device, "training.device")
    torch.set_num_threads(t.threads)
    path = resolve_model(name)
    check_weights(path, t.device, options.quantization_config)
    _spare_retries(name)
    tokenizer = _guarded(name, lambda: load_tokenizer(name, **network.of_tokenizer))
    base = _guarded(name, lambda: load_base(name, dtype=t.dtype, device=t.device, options=options))
    if max(len(tokenizer), tokenizer.pad_token_id + 1) > base.model.get_input_embeddings().weight.shape[0]:
        raise ConfigError(
            f"the tokenizer of {name!r} has {len(tokenizer)} tokens, the model {base.vocabulary_size}; use the "
            "tokenizer that belongs to the model, or resize the model's embeddings"
        )
    tokens = network.lora_config.alora_invocation_tokens
    if isinstance(tokens, str):
        tokens = generation_prompt(tokenizer) if tokens == "generation_prompt" else text_ids(tokenizer, tokens)
    given = {**network.lora_config.model_dump(), "alora_invocation_tokens": tokens}
    settings = imported_peft().LoraConfig(**given, task_type="CAUSAL_LM")
    layers = lora_layers(base.model, settings, options.lora_target_scope)
    numbers, slots = adapter_numbers(config.largest_rank, layers), adapter_slots(network, resolved.algorithm)
    adapters = bank_bytes(numbers, t.pop_size, slots)
    check_memory({"base": base.weight_bytes, "adapters": adapters}, t.device)
    return Runtime(
        base,
        lora_config=settings,
        tokenizer=tokenizer,
        seed=t.seed,
        max_tokens=t.max_tokens_in_flight,
        max_rows=t.max_rows_in_flight,
        options=options,
    )


def _guarded(name: str, load: Callable[[], PartT]) -> PartT:
    """Load something; turn whatever a damaged file raises into a ConfigError with its reason."""
    try:
        return load()
    except AgileRLError:
        raise
    except Exception as error:
        if lacks_memory(error):
            raise
        raise ConfigError(f"cannot load the model {name!r}: {type(error).__name__}: {error}") from error


def _spare_retries(name: str) -> None:
    """Make the hub client offline if a name needs the hub and it is out of reach: else it would retry for a minute."""
    from huggingface_hub import constants

    if is_of_hub(name) and is_out_of_reach():
        constants.HF_HUB_OFFLINE = True


# -- the engine that samples: checks before anything is loaded, and its start -----------------------------------------


def check_sampling(config: RunConfig, options: SharedOptions) -> None:
    """Raise ConfigError for a missing or unsuitable vLLM, adapters that it cannot hold, or a leaked key."""
    settings = options.vllm_config or VLLMConfig()
    servers = {"sharing.teacher_url": (TEACHER_KEY, config.sharing.teacher_url)}
    if options.use_vllm:
        servers["algorithm.vllm_config.base_url"] = (API_KEY, settings.base_url)
    for where, (key, url) in servers.items():
        if url is not None and os.environ.get(key):
            check_key(where, key, url, config.typed_addresses, without=f"unset {key}")
    if not options.use_vllm:
        return
    if settings.base_url is None:
        check_installed(settings, config.training.device.partition(":")[0])
    rank, most = config.largest_rank, settings.max_lora_rank
    if most is not None and rank > most:
        raise ConfigError(
            f"algorithm.vllm_config.max_lora_rank={most} is less than the rank {rank} that adapters may reach "
            "(network.lora_config.r, mutation.rank_range); raise it, or narrow mutation.rank_range"
        )
    lora_capacity(rank)
    processes = config.distributed.processes_per_island or 1
    if processes > 1 and settings.tensor_parallel_size > 1:
        raise ConfigError(
            f"algorithm.vllm_config.tensor_parallel_size={settings.tensor_parallel_size} with "
            f"distributed.processes_per_island={processes}: each process starts its own vLLM on its own GPU, so "
            "none can use the others'; remove one of the two, or start a server and name it as "
            "algorithm.vllm_config.base_url"
        )


def start_sampling(population: Population, agents: int, rank: int) -> None:
    """Start vLLM if it samples, so that problems show before training."""
    engine = population.runtime.engine
    if not isinstance(engine, VLLMEngine):
        return
    if engine.config.max_model_len is not None:  # before starting vLLM
        check_room(population, engine.config, engine.config.max_model_len)
    longest = population.context_length + (population.eval_max_new_tokens or 0)
    rank = max(rank, population.runtime.store.max_rank)
    engine.start(max(len(population), agents), rank, longest)
    check_room(population, engine.config, engine.backend.context_length)


def check_room(population: Population, settings: VLLMConfig, room: int) -> None:
    """Raise ConfigError if vLLM's context of ``room`` tokens would truncate allowed completions.

    This counts the longest prompt of the panels and of the first training rows; for episodes, the first prompt. Limits
    by the agents' ``max_model_len`` or the base do not concern vLLM.
    """
    limit, most = population.context_length, population.runtime.base.context_length
    asked = list[tuple[int, int]]()
    if not population.learns_from_data:  # the longest prompt, and the longest completion after it
        prompt = max(population.lengths("train").prompts)
        longest = max(agent.config.model_dump().get("max_output_tokens") or limit for agent in population.agents)
        asked.append((prompt, min(longest, limit - prompt)))
    if settings.exams == "vllm":
        exam = max(max(population.lengths(split).prompts) for split in ("exam", "test"))
        asked.append((exam, min(population.eval_max_new_tokens or limit - exam, most - exam)))
    prompt, completion = max(asked, key=sum, default=(0, 0))
    if prompt + completion > room:
        where = "algorithm.vllm_config.max_model_len" if settings.base_url is None else "the server's --max-model-len"
        raise ConfigError(
            f"vLLM's context holds {room} tokens (max_model_len), but prompts have up to {prompt} and completions "
            f"up to {completion} tokens, together {prompt + completion}; raise {where} to that, or lower "
            "algorithm.max_output_tokens and training.eval_max_new_tokens"
        )


# -- custom selection strategies: ``selection_strategy.name: strategy.py:MySelection`` --------------------------------


_WHERE = "selection_strategy.name"


@contextmanager
def _reported(what: str) -> Iterator[None]:
    """Run a user's code; whatever it raises becomes a ConfigError that begins with ``what``."""
    try:
        with contained():
            yield
    except Exception as error:
        kind = "" if isinstance(error, AgileRLError) else f"{type(error).__name__}: "
        raise ConfigError(f"{what}: {kind}{error}") from error


class CustomSelection:
    """Calls a custom strategy, and checks that it returns a plan for these agents."""

    def __init__(self, name: str, inner: Any) -> None:
        self.name, self.inner = f"{_WHERE}={shown(name)}", inner

    def plan(
        self,
        fitness: Mapping[int, Fitness],
        generation: int,
        seed: int,
        next_index: int,
        standing: Standing = AT_THE_START,
    ) -> Plan:
        """Return its plan; raises ConfigError for what it raises, and for a plan that does not fit the agents."""
        with _reported(f"{self.name} failed in plan()"):
            plan = self.inner.plan(dict(fitness), generation, seed, next_index, standing)
        if not isinstance(plan, Plan):
            raise ConfigError(
                f"{self.name}: expected plan() to return an agilerl.hpo.selection.Plan, found {type(plan).__name__}"
            )
        children, known = [birth.child for birth in plan.births], list(fitness)
        parents = [birth.parent for birth in plan.births if not birth.from_best]
        donors = {index for birth in plan.births for index in (birth.hyperparameters_from, birth.mate)}
        wrong = ""
        if children != list(range(next_index, next_index + len(children))):
            wrong = f"children get the indices from next_index={next_index} on, found {children}"
        elif not plan.slots or (set(plan.slots) - set(children)) | set(plan.deaths) != set(known):
            wrong = (
                f"each of the agents {known} is in slots or in deaths and at least one in slots, found slots "
                f"{list(plan.slots)} and deaths {list(plan.deaths)}"
            )
        elif plan.elite not in known:
            wrong = f"the elite is one of the agents {known}, found {plan.elite}"
        elif not set(parents) <= set(known):
            wrong = f"parents are among the agents {known}, found {parents}"
        elif donors - {None, *known}:
            wrong = f"hyperparameters_from and mate are one of the agents {known} or None"
        elif standing.best is None and len(parents) < len(children):
            wrong = "from_best needs standing.best, which is None"
        if wrong:
            raise ConfigError(f"{self.name}: in a plan, {wrong}")
        return plan


def selection_strategy(section: SelectionConfig, *, allow_code: bool) -> SelectionStrategy:
    """Return the custom strategy that a configuration names, made with ``selection_strategy.params``."""
    name, params = section.strategy, section.params or {}
    strategy = load_code(_WHERE, name, allowed=allow_code)
    with _reported(f"{_WHERE}={shown(name)} cannot be made with selection_strategy.params={shown(params)}"):
        inner = strategy(**params)
    if not callable(getattr(inner, "plan", None)):
        raise ConfigError(
            f"{_WHERE}={shown(name)}: expected a class with a method plan(fitness, generation, seed, next_index, "
            f"standing), found {shown(inner)}"
        )
    return CustomSelection(name, inner)
