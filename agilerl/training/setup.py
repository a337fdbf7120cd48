"""From a checked configuration to the objects of a run: resolved, loaded, assembled."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path

import torch

from agilerl.algorithms import ALGORITHMS, LLMAlgorithm
from agilerl.arguments import shown
from agilerl.config.named_files import digests
from agilerl.config.run import RunConfig
from agilerl.distributed.islands import IslandPopulation
from agilerl.distributed.topology import SOLITARY, Topology
from agilerl.envs.core import TRIED_ROWS, Task
from agilerl.envs.episode_task import EpisodeTask
from agilerl.errors import CheckpointError, ConfigError
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.selection import SelectionStrategy
from agilerl.hpo.spread import initial_hyperparameters
from agilerl.models.adapters import lora_scaling, read_adapter
from agilerl.models.base import check_device
from agilerl.population import Population
from agilerl.runtime import Runtime
from agilerl.templates import at_date
from agilerl.training.base import load_runtime
from agilerl.training.memory import check_memory, estimate
from agilerl.training.resolved import Resolved, resolve
from agilerl.training.sampling import check_sampling, start_sampling
from agilerl.training.saved import SavedCheckpoint, received
from agilerl.training.strategies import selection_strategy
from agilerl.training.tasks import task

GENERATIONS = 32
"""Generations that one agent alone would have in the whole budget, in searches that go by the budget."""
_COMPLETION = 64


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
    def selection(self) -> SelectionStrategy:
        """The selection strategy."""
        assert self.resolved.selection is not None, "code is loaded with the base"
        return self.resolved.selection

    @property
    def mutations(self) -> Mutations:
        """The mutation operators."""
        return self.resolved.mutations


@dataclass(frozen=True)
class Loaded:
    """What agents need: the base with its engine, and a task."""

    resolved: Resolved
    here: Resolved
    """The settings as seen by this process."""
    task: Task | EpisodeTask
    runtime: Runtime
    topology: Topology


def build(
    config: RunConfig, checkpoint: Path | None = None, *, allow_code: bool = False, topology: Topology = SOLITARY
) -> Session:
    """Load the base, make the task and the population, new or from a ``checkpoint`` folder; nothing is written.

    ``allow_code`` runs Python that the configuration names, such as ``rewards.py:my_reward``: never allow it for a file
    that you have not read. Each process makes its island's share of the agents; only the writer needs the
    ``checkpoint``, and sends the others theirs. Chat templates that ask for the date get ``config.date``.

    Raises ConfigError or EnvError for problems that can be found before training, and CheckpointError for a checkpoint
    that does not fit.
    """
    topology.check(config.training.pop_size)
    _check_islands(config, topology)
    resolved = resolve(config)
    # Without microseconds: run.json stores seconds, and a resumed run must see the same date.
    date = (config.date or datetime.now()).replace(microsecond=0)
    with at_date(date):
        return assemble(load(resolved, topology, allow_code=allow_code), checkpoint, date)


def _check_islands(config: RunConfig, topology: Topology) -> None:
    islands, left = topology.peers.size, config.smallest_population
    if left < islands:
        name = config.selection_strategy.strategy
        remedy = f"set selection_strategy.floor={islands}, " if name != "pulses" else ""
        raise ConfigError(
            f"selection_strategy.name={name} leaves {left} of training.pop_size={config.training.pop_size} agents, "
            f"fewer than the {islands} islands, each of which needs one; {remedy}name a strategy that keeps all agents "
            "(tournament, truncation), or run in one process"
        )


def check(config: RunConfig) -> None:
    """Check what needs no model: hyperparameters, genes and their start, operators, adapters, this machine.

    Raises ConfigError.
    """
    _check_loadable(resolve(config))


def _check_loadable(resolved: Resolved) -> None:
    check_sampling(resolved.config, resolved.options)
    check_device(resolved.config.training.device, "training.device")


def load(resolved: Resolved, topology: Topology = SOLITARY, *, allow_code: bool = False) -> Loaded:
    """Make the task and load the base, on the device of this process."""
    _check_loadable(resolved)
    if resolved.selection is None:
        resolved = replace(resolved, selection=selection_strategy(resolved.config, allow_code=allow_code))
    here = resolved.seen_from(topology)
    check_device(here.config.training.device, "training.device")
    torch.set_num_threads(here.config.training.threads)
    made = task(here.config, allow_code=allow_code)
    runtime = load_runtime(here)
    base = runtime.base
    family = str(base.model.config.get_text_config().model_type)
    resolved, here = (one.with_rate(base.name, base.hidden_size, family) for one in (resolved, here))
    runtime.share(topology.island, here.config.distributed.base_sharding())
    return Loaded(resolved, here, made, runtime, topology)


def assemble(loaded: Loaded, checkpoint: Path | None, date: datetime) -> Session:
    """Assemble the population, new or from a checkpoint, and try the first prompts."""
    resolved, runtime, topology = loaded.resolved, loaded.runtime, loaded.topology
    config, t = loaded.here.config, loaded.here.config.training
    saved = received(topology, checkpoint, runtime)
    agents = first_generation(resolved, runtime, topology) if saved is None else _survivors(config, saved, runtime)
    islands = topology.peers.size > 1
    population = (partial(IslandPopulation, exchange=topology.peers) if islands else Population)(
        agents,
        loaded.task,
        prompts_per_step=config.environment.data_batch_size_per_gpu,
        eval_max_new_tokens=t.eval_max_new_tokens or getattr(resolved.hyperparameters, "max_output_tokens", None),
        max_error_rate=t.max_error_rate,
        test_prompts=config.environment.test_prompts,
    )
    if saved is not None:
        population.next_index = saved.next_index
        runtime.limits.train_tokens, runtime.limits.decode_rows = saved.memory.train_tokens, saved.memory.decode_rows
    try_prompts(population)
    if config.training.evo_steps is None:
        resolved = resolved.with_evo_steps(_evo_steps(config, population))
    check_memory(estimate(config, population), t.device)
    start_sampling(config, population)
    return Session(resolved, loaded.task, population, saved, digests(config), topology, date)


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
    agents = [first, *(first.clone(index) for index in places[1:])]
    for agent in agents:
        agent.parent = None
        if agent.index:  # the first agent has the given values
            agent.set_hyperparameters(starts[agent.index])
    if network.adapter is not None:
        _start_from(Path(network.adapter).expanduser(), agents)
    if len(resolved.algorithms) > 1 and t.init == "spread":
        for place, agent in zip(places, agents):
            agent.set_hyperparameters({"algorithm": resolved.algorithms[place % len(resolved.algorithms)].__name__})
    return agents


def _survivors(config: RunConfig, saved: SavedCheckpoint, runtime: Runtime) -> list[LLMAlgorithm]:
    """Return the agents of a checkpoint; raises CheckpointError if they are larger than the run allows."""
    most = max(config.network.lora_config.r, config.mutation.rank_range[1])
    if saved.bank_rank > most:
        raise CheckpointError(
            f"{saved.path} was made with adapters of rank {saved.bank_rank}, but this run goes up to {most}; resume "
            "from an older checkpoint"
        )
    # The bank's width affects the last bits of every agent, even of those with a smaller rank.
    if saved.bank_rank > runtime.store.max_rank:
        runtime.store.widen(saved.bank_rank)
    return [ALGORITHMS[state.algorithm].from_state(state, runtime) for state in saved.states]


def _start_from(folder: Path, agents: Sequence[LLMAlgorithm]) -> None:
    """Start every agent, and its reference policy, from a PEFT adapter; raises ConfigError if its shape differs."""
    store, wanted = agents[0].runtime.store, agents[0].lora_config
    factors, found = read_adapter(folder, store.layers)
    if (found.r, lora_scaling(found)) != (wanted.r, lora_scaling(wanted)):
        raise ConfigError(
            f"network.adapter={shown(str(folder))} has rank {found.r} and scale {lora_scaling(found):g}, "
            f"network.lora_config rank {wanted.r} and scale {lora_scaling(wanted):g}; set lora_config r={found.r}, "
            f"lora_alpha={found.lora_alpha}, use_rslora={str(found.use_rslora).lower()}"
        )
    store.reserve(store.used + len(agents))
    for agent in agents:
        store.load_adapter(agent.slot, factors)
        agent.set_reference(factors)


def _evo_steps(config: RunConfig, population: Population) -> int:
    """Return the iterations of a generation in which one agent spends a 32nd of the budget, by what is known before.

    A completion counts as ``max_output_tokens``, or 64 tokens where that is not set: real ones are at most as long, so
    budgets in tokens give more generations, not fewer.
    """
    rows = population.prompts_per_step * population.group_sizes[0]
    t = config.training
    iterations = t.max_steps / rows
    if t.max_tokens is not None:
        lengths = population.lengths("exam")
        completion = lengths.turns * min(population.eval_max_new_tokens or _COMPLETION, _COMPLETION)
        prompt = sum(lengths.prompts) / max(len(lengths.prompts), 1)
        row = prompt + completion + (0 if population.learns_from_data else completion)  # sampled, then trained on
        iterations = min(iterations, t.max_tokens / (rows * row))
    return max(1, round(iterations / GENERATIONS))


def try_prompts(population: Population) -> None:
    """Render the panels and the first training prompts, so that one that is too long stops the run early."""
    for split in ("exam", "test"):
        population.lengths(split)
    if population.learns_from_data:
        for position in range(TRIED_ROWS):
            population.examples(position)
    else:
        population.places("train")
