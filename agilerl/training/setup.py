"""From a checked configuration to the objects of a run: base, task, agents, operators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path

import torch

from agilerl.algorithms import ALGORITHMS, LLMAlgorithm
from agilerl.algorithms.base import AlgorithmConfig
from agilerl.bounds import compiled_pattern
from agilerl.config.named_files import digests
from agilerl.config.run import GeneConfig, RunConfig
from agilerl.distributed.islands import IslandPopulation, founders
from agilerl.distributed.topology import SOLITARY, Topology, local_share
from agilerl.envs.core import TRIED_ROWS, Task
from agilerl.envs.episode_task import EpisodeTask
from agilerl.errors import CheckpointError, ConfigError
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.parameters import Gene, RLParameter, declared_gene, gene_names, genes_from, values_of, with_changes
from agilerl.hpo.selection import NoSelection, SelectionStrategy
from agilerl.hpo.tournament import TournamentSelection
from agilerl.hpo.truncation import TruncationSelection
from agilerl.models.adapters import lora_scaling, read_adapter
from agilerl.models.base import check_device
from agilerl.population import Population
from agilerl.run_date import pinned
from agilerl.runtime import Runtime
from agilerl.training.base import load_runtime
from agilerl.training.memory import check_memory, estimate
from agilerl.training.resolved import algorithm_class, algorithm_classes, document, hyperparameters, shared_options
from agilerl.training.sampling import check_sampling, start_sampling
from agilerl.training.saved import SavedCheckpoint, received
from agilerl.training.tasks import task
from agilerl.validation import nearest, shown, validated

__all__ = [
    "Session",
    "algorithm_class",
    "algorithm_classes",
    "build",
    "check",
    "document",
    "first_generation",
    "genes",
    "hyperparameters",
    "shared_options",
    "task",
]


@dataclass
class Session:
    """Everything a run trains with."""

    config: RunConfig
    task: Task | EpisodeTask
    population: Population
    selection: SelectionStrategy
    mutations: Mutations
    saved: SavedCheckpoint | None = None
    """What a run goes on from; None at its beginning."""
    files: dict[str, dict[str, str]] = field(default_factory=dict)
    """sha256 of the files that the configuration names: ``data``, and ``code`` that was allowed to run."""
    topology: Topology = SOLITARY
    """The processes of the run, seen from this one."""
    date: datetime = field(default_factory=datetime.now)
    """What chat templates take for the present, local time."""


def genes(config: RunConfig) -> dict[str, Gene]:
    """Return the genes of ``mutation.rl_hp_selection``: the algorithm's declared ranges, as far as not overridden.

    Where ``algorithm.name`` is a choice, that is a gene too, and the others suit every algorithm. Raises ConfigError
    for a range that is empty, leaves what an algorithm accepts, or excludes the start.
    """
    classes = algorithm_classes(config)
    found: dict[str, Gene] = {}
    for algorithm in classes:
        # Those of the last are those of the first: a range that an algorithm does not declare itself is the first's.
        found = _genes_of(config, algorithm, found)
    if len(classes) > 1:
        names = tuple(algorithm.__name__ for algorithm in classes)
        found["algorithm"] = Gene("algorithm", "choice", scale="choice", choices=names)
    return found


def _genes_of(config: RunConfig, algorithm: type[LLMAlgorithm], known: Mapping[str, Gene]) -> dict[str, Gene]:
    """Return the genes of one algorithm, checked against it; a gene that is ``known`` keeps its range."""
    model, start = algorithm.Config, hyperparameters(config, algorithm)
    names = [*genes_from(model), *(name for name in gene_names(model) if "." in name)]
    found = {}
    for name, wanted in config.mutation.rl_hp_selection.items():
        where = f"mutation.rl_hp_selection.{name}"
        if name.partition(".")[0] not in model.model_fields:
            raise ConfigError(
                f"{where}: {algorithm.__name__} has no hyperparameter {shown(name)}; {nearest(name, names)}"
            )
        declared = declared_gene(model, name)
        if declared is None:
            raise ConfigError(f"{where}: this hyperparameter does not evolve; {nearest(name, names)}")
        found[name] = gene = known.get(name) or _gene(declared, wanted, where)
        if not gene.contains(value := values_of(start, [name])[name]):
            raise ConfigError(
                f"{where}: the range {gene.span()} excludes the start, algorithm.{name}={value!r}; widen the range or "
                "move the start"
            )
        _check_ends(gene, start, where)
    return found


def _check_ends(gene: Gene, start: AlgorithmConfig, where: str) -> None:
    """Raise ConfigError where a mutation could lead to a value that the algorithm refuses, beside the others' start."""
    for value in gene.choices or (gene.min, gene.max):
        number = int(value) if gene.dtype == "int" else value
        try:
            validated(type(start), with_changes(start.model_dump(exclude_unset=True), {gene.name: number}))
        except ConfigError as error:
            raise ConfigError(f"{where} allows {number!r}, which the algorithm does not: {error}") from None


def _gene(declared: Gene, wanted: GeneConfig, where: str) -> Gene:
    given = {name for name in wanted.model_fields_set if getattr(wanted, name) is not None}
    if wanted.choices is not None or declared.dtype == "choice":
        if len(given) > 1 or (given and wanted.choices is None):
            names = ", ".join(sorted(given - {"choices"}))
            raise ConfigError(f"{where}: a gene with choices has no {names}; leave it out")
        choices = declared.choices if wanted.choices is None else tuple(wanted.choices)
        if declared.dtype == "float":  # YAML's 1 is an integer, while the hyperparameter would become 1.0
            choices = tuple(float(choice) if type(choice) is int else choice for choice in choices)
        if len(set(choices)) < 2 or len(set(choices)) != len(choices):
            raise ConfigError(f"{where}.choices: expected at least two different values, found {shown(list(choices))}")
        return replace(declared, dtype="choice", choices=choices, scale="choice")
    low = declared.min if wanted.min is None else wanted.min
    high = declared.max if wanted.max is None else wanted.max
    if not low < high:
        raise ConfigError(f"{where}: min must be below max, found min={low:g} and max={high:g}")
    if declared.dtype == "int" and not (low.is_integer() and high.is_integer()):
        raise ConfigError(f"{where}: expected whole numbers, found min={low:g} and max={high:g}")
    scale = wanted.scale or declared.scale
    if scale == "log" and low <= 0:
        raise ConfigError(f"{where}: a log scale needs min above 0, found {low:g}; raise it, or give scale: linear")
    gene = replace(declared, min=low, max=high, scale=scale)
    if wanted.shrink_factor is None and wanted.grow_factor is None:
        return gene
    factors = RLParameter(low, high, wanted.shrink_factor or 0.8, wanted.grow_factor or 1.2)
    return replace(gene, factors=(factors.shrink_factor, factors.grow_factor))


def check(config: RunConfig) -> None:
    """Check everything that needs no model: hyperparameters, genes and their start, operators, adapters.

    Raises ConfigError with a sentence.
    """
    _check_source(config)
    check_sampling(config, shared_options(config))
    genes(config)
    mutations(config)
    selection(config)
    low, high = config.mutation.rank_range
    rank, pattern = config.network.lora_config.r, config.network.lora_config.target_modules
    if config.mutation.probabilities.arch_mut > 0 and not low <= rank <= high:
        raise ConfigError(
            f"mutation.rank_range=[{low}, {high}] excludes the start, network.lora_config.r={rank}; widen the range or "
            "move the start"
        )
    if isinstance(pattern, str):
        compiled_pattern(pattern, "network.lora_config.target_modules (all-linear, a list of names, or a pattern)")
    check_device(config.training.device, "training.device")


def _check_source(config: RunConfig) -> None:
    """Raise ConfigError unless the algorithm learns from what the environment offers."""
    algorithm, found = algorithm_class(config), config.environment.env_type
    wanted = [algorithm.env_type, *(["multiturn"] if algorithm.env_type == "reasoning" else [])]
    if found not in wanted:
        raise ConfigError(
            f"algorithm.name={algorithm.__name__!r} learns from environment.env_type={' or '.join(map(repr, wanted))}, "
            f"found {found!r}; change one of the two"
        )


def mutations(config: RunConfig) -> Mutations:
    """Build the mutation operator."""
    m = config.mutation
    return Mutations(
        no_mutation=m.probabilities.no_mut,
        architecture=m.probabilities.arch_mut,
        new_layer_prob=m.probabilities.new_layer,
        parameters=m.probabilities.params_mut,
        activation=m.probabilities.act_mut,
        rl_hp=m.probabilities.rl_hp_mut,
        mutation_sd=m.mutation_sd,
        mutate_elite=m.mutate_elite,
        genes_per_mutation=m.genes_per_mutation,
        rank_range=m.rank_range,
    )


def selection(config: RunConfig) -> SelectionStrategy:
    """Build the selection strategy."""
    s, size = config.selection_strategy, config.training.pop_size
    if s.name == "tournament":
        return TournamentSelection(config.tournament_size, s.elitism, size)
    return TruncationSelection() if s.name == "truncation" else NoSelection()


def build(
    config: RunConfig, checkpoint: Path | None = None, *, allow_code: bool = False, topology: Topology = SOLITARY
) -> Session:
    """Load the base, make the task and the population, or that of a ``checkpoint`` folder; nothing is written.

    ``allow_code`` runs Python that the configuration names, ``rewards.py:my_reward``: never say so of a file that you
    have not read. Of several processes each makes its island's share of the agents; only the one that writes needs the
    ``checkpoint``, the others receive theirs from it. Chat templates that ask for the date get ``config.date``.

    Raises ConfigError or EnvError with a sentence for all that can be found out before training, and CheckpointError
    for a checkpoint that does not fit.
    """
    topology.check(config.training.pop_size)
    check(config)
    # Without what a clock does not show: run.json holds seconds, and what is resumed has no more.
    date = (config.date or datetime.now()).replace(microsecond=0)
    with pinned(date):
        return _built(config, checkpoint, date, topology, allow_code=allow_code)


def _built(
    config: RunConfig, checkpoint: Path | None, date: datetime, topology: Topology, *, allow_code: bool
) -> Session:
    config, whole = local_share(config, topology), config
    check_device(config.training.device, "training.device")
    t = config.training
    torch.set_num_threads(t.threads)
    made = task(config, allow_code=allow_code)
    runtime = load_runtime(config, shared_options(config))
    runtime.share(topology.island, config.distributed.base_sharding())
    saved = received(topology, checkpoint, runtime)
    agents = first_generation(whole, runtime, topology) if saved is None else _survivors(config, saved, runtime)
    islands = topology.peers.size > 1
    population = (partial(IslandPopulation, exchange=topology.peers) if islands else Population)(
        agents,
        made,
        prompts_per_step=config.environment.data_batch_size_per_gpu,
        eval_max_new_tokens=t.eval_max_new_tokens or hyperparameters(config).model_dump().get("max_output_tokens"),
        max_error_rate=t.max_error_rate,
    )
    if saved is not None:
        population.next_index = saved.next_index
        runtime.limits.train_tokens, runtime.limits.decode_rows = saved.memory.train_tokens, saved.memory.decode_rows
    try_prompts(population)
    check_memory(estimate(config, population), t.device)
    start_sampling(config, population)
    return Session(whole, made, population, selection(whole), mutations(config), saved, digests(config), topology, date)


def first_generation(config: RunConfig, runtime: Runtime, topology: Topology) -> list[LLMAlgorithm]:
    """Return the first generation, as far as it lives on this island."""
    t, classes = config.training, algorithm_classes(config)
    # What was set and no more, for a default that is handed on would count as set; and as run.json has it, so that a
    # run that begins again from that writes the same files.
    start = hyperparameters(config).model_dump(mode="json", exclude_unset=True)
    places = topology.places(t.pop_size)
    agents = founders(
        classes[0], places, t.pop_size, runtime=runtime, init=t.init, hp_config=genes(config) or None, **start
    )
    if config.network.adapter is not None:
        _start_from(Path(config.network.adapter).expanduser(), agents)
    if len(classes) > 1 and t.init == "spread":
        for place, agent in zip(places, agents):
            agent.set_hyperparameters({"algorithm": classes[place % len(classes)].__name__})
    return agents


def _survivors(config: RunConfig, saved: SavedCheckpoint, runtime: Runtime) -> list[LLMAlgorithm]:
    """Return the agents of a checkpoint; raises CheckpointError where they are larger than the run allows."""
    most = max(config.network.lora_config.r, config.mutation.rank_range[1])
    if saved.bank_rank > most:
        raise CheckpointError(
            f"{saved.path} was made with adapters of rank {saved.bank_rank}, but this run goes up to {most}; go on "
            "from an older checkpoint"
        )
    # How wide the bank has become decides the last bits of every agent, also of those with a smaller rank.
    if saved.bank_rank > runtime.store.max_rank:
        runtime.store.widen(saved.bank_rank)
    return [ALGORITHMS[state.algorithm].from_state(state, runtime) for state in saved.states]


def _start_from(folder: Path, agents: Sequence[LLMAlgorithm]) -> None:
    """Give every agent a PEFT adapter to start from, as its reference policy too; raises ConfigError if it differs."""
    store, wanted = agents[0].runtime.store, agents[0].lora_config
    factors, found = read_adapter(folder, store.layers)
    if (found.r, lora_scaling(found)) != (wanted.r, lora_scaling(wanted)):
        raise ConfigError(
            f"network.adapter={shown(str(folder))} has rank {found.r} and scale {lora_scaling(found):g}, "
            f"network.lora_config rank {wanted.r} and scale {lora_scaling(wanted):g}; give lora_config r={found.r}, "
            f"lora_alpha={found.lora_alpha}, use_rslora={str(found.use_rslora).lower()}"
        )
    store.reserve(store.used + len(agents))
    for agent in agents:
        store.load_adapter(agent.slot, factors)
        agent.set_reference(factors)


def try_prompts(population: Population) -> None:
    """Render the panels and what training begins with: a prompt that does not fit stops the run before it starts."""
    for split in ("exam", "test"):
        population.lengths(split)
    if population.learns_from_data:
        for position in range(TRIED_ROWS):
            population.examples(position)
    else:
        population.places("train")
