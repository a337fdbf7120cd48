"""From a checked configuration to the objects of a run: base, task, agents, operators."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from agilerl.algorithms import ALGORITHMS, LLMAlgorithm
from agilerl.envs.core import Task
from agilerl.errors import ConfigError
from agilerl.hpo.mutation import Mutations
from agilerl.hpo.parameters import Gene, RLParameter, check_values, genes_from
from agilerl.hpo.selection import NoSelection, SelectionStrategy
from agilerl.hpo.tournament import TournamentSelection
from agilerl.hpo.truncation import TruncationSelection
from agilerl.population import Population
from agilerl.runtime import Runtime
from agilerl.training.config import GeneConfig, NetworkConfig, RunConfig
from agilerl.validation import nearest, validated

__all__ = ["Session", "algorithm_class", "build", "check", "genes"]


@dataclass
class Session:
    """Everything a run trains with."""

    config: RunConfig
    task: Task
    population: Population
    selection: SelectionStrategy
    mutations: Mutations


def algorithm_class(config: RunConfig) -> type[LLMAlgorithm]:
    """Return the class that ``algorithm.name`` stands for."""
    name = config.algorithm["name"]
    if name not in ALGORITHMS:
        raise ConfigError(f"algorithm.name={name!r} is unknown; {nearest(str(name), ALGORITHMS)}")
    return ALGORITHMS[name]


def hyperparameters(config: RunConfig) -> dict[str, Any]:
    """Return the agents' hyperparameters; the run's seed and context limit are theirs unless they have their own."""
    values = {key: value for key, value in config.algorithm.items() if key != "name"}
    values.setdefault("seed", config.training.seed)
    if config.network.max_context_length is not None:
        values.setdefault("max_model_len", config.network.max_context_length)
    return values


def genes(config: RunConfig) -> dict[str, Gene]:
    """Return the genes of ``mutation.rl_hp_selection``: the algorithm's declared ranges, as far as not overridden."""
    model = algorithm_class(config).Config
    declared = genes_from(model)
    found = {}
    for name, wanted in config.mutation.rl_hp_selection.items():
        where = f"mutation.rl_hp_selection.{name}"
        if name not in model.model_fields:
            raise ConfigError(f"{where}: {config.algorithm['name']} has no such hyperparameter; {nearest(name, declared)}")
        if name not in declared:
            raise ConfigError(f"{where}: this hyperparameter does not evolve; {nearest(name, declared)}")
        found[name] = _gene(declared[name], wanted, where)
    return found


def _gene(declared: Gene, wanted: GeneConfig, where: str) -> Gene:
    if wanted.choices is not None:
        if wanted.min is not None or wanted.max is not None:
            raise ConfigError(f"{where}: give either choices or min and max, found both")
        return replace(declared, dtype="choice", choices=tuple(wanted.choices), scale="choice")
    low = declared.min if wanted.min is None else wanted.min
    high = declared.max if wanted.max is None else wanted.max
    if not low < high:
        raise ConfigError(f"{where}: min must be below max, found min={low:g} and max={high:g}")
    scale = wanted.scale or declared.scale
    if scale == "log" and low <= 0:
        raise ConfigError(f"{where}: a log scale needs min above 0, found {low:g}")
    gene = replace(declared, min=low, max=high, scale=scale)
    if wanted.shrink_factor is None and wanted.grow_factor is None:
        return gene
    factors = RLParameter(low, high, wanted.shrink_factor or 0.8, wanted.grow_factor or 1.2)
    return replace(gene, factors=(factors.shrink_factor, factors.grow_factor))


def check(config: RunConfig) -> None:
    """Check everything that needs no model: hyperparameters, genes and their start, operators.

    Raises ConfigError with a sentence.
    """
    declared = validated(algorithm_class(config).Config, hyperparameters(config), "algorithm")
    found = genes(config)
    try:
        check_values(found, {name: getattr(declared, name) for name in found})
    except ConfigError as error:
        raise ConfigError(f"mutation.rl_hp_selection excludes the start: {error}") from None
    mutations(config)
    selection(config)


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
        return TournamentSelection(s.tournament_size, s.elitism, size)
    return TruncationSelection() if s.name == "truncation" else NoSelection()


def task(config: RunConfig) -> Task:
    """Build the task; raises with a sentence for an unknown one."""
    from agilerl.envs.procedural import ReasoningGymTask

    e = config.environment
    family, _, name = e.task.partition(":")
    if family != "reasoning_gym" or not name:
        raise ConfigError(f"environment.task={e.task!r} is unknown; expected reasoning_gym:<dataset>")
    made = ReasoningGymTask(
        name,
        params=e.params,
        seed=config.training.seed,
        exam_prompts=e.eval_prompts,
        test_prompts=e.test_prompts,
        reward=e.reward,
    )
    made.prepare()
    return made


def lora(config: NetworkConfig) -> Any:
    """Build the ``peft.LoraConfig``."""
    from peft import LoraConfig

    return LoraConfig(**config.lora_config.model_dump(), task_type="CAUSAL_LM")


def build(config: RunConfig) -> Session:
    """Load the base, make the task and the population; nothing is written."""
    check(config)
    t = config.training
    torch.set_num_threads(t.threads)
    if t.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(f"training.device={t.device!r} needs a CUDA build of torch and a GPU, found neither; use cpu")
    made = task(config)
    runtime = Runtime.from_pretrained(
        config.network.pretrained_model_name_or_path,
        dtype=t.dtype,
        device=t.device,
        lora_config=lora(config.network),
        seed=t.seed,
        max_tokens=t.max_tokens_in_flight,
        max_rows=t.max_rows_in_flight,
    )
    agents = algorithm_class(config).population(
        t.pop_size, runtime=runtime, init=t.init, hp_config=genes(config) or None, **hyperparameters(config)
    )
    first = agents[0]
    population = Population(
        agents,
        made,
        prompts_per_step=config.environment.data_batch_size_per_gpu,
        eval_max_new_tokens=t.eval_max_new_tokens or getattr(first.config, "max_output_tokens", None),
    )
    # Rendered now, so that a prompt that does not fit stops the run before it starts.
    for split in ("exam", "test"):
        population.panel(split)
    return Session(config, made, population, selection(config), mutations(config))
