"""Helpers of AgileRL's programs: populations from ``INIT_HP``, and steps of own loops."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch

from agilerl.algorithms import ALGORITHMS, LLMPPO, LLMREINFORCE, LLMAlgorithm
from agilerl.algorithms.codec import save_llm_checkpoint as save_llm_checkpoint
from agilerl.algorithms.config import CosineLRScheduleConfig
from agilerl.checks.arguments import (
    Accelerator,
    Count,
    Having,
    Hint,
    Location,
    Name,
    Tokenizer,
    checked,
    described,
    nearest,
    taken,
)
from agilerl.compat.agents import ALIASES, IMPLIED
from agilerl.config.base_model import SharedOptions
from agilerl.errors import ConfigError
from agilerl.hpo.mutation import Mutations
from agilerl.models.adapters import default_lora_config
from agilerl.models.quantised import imported_peft
from agilerl.population import number_apart

_NAMES: dict[str, type[LLMAlgorithm]] = {**ALGORITHMS, "LLMPPO": LLMPPO, "LLMREINFORCE": LLMREINFORCE}
_OF_LOOPS = {
    *("ALGO", "POP_SIZE", "POPULATION_SIZE", "TOURN_SIZE", "ELITISM", "EVAL_LOOP", "EVO_STEPS", "MAX_STEPS"),
    *("env_name", "ENV_NAME", "DATASET", "MODEL_PATH", "ZERO_STAGE", "MAX_REWARD", "DATA_BATCH_SIZE_PER_GPU"),
}
"""Keys of INIT_HP that are no agent's."""
_LORA = {
    "LORA_R": "r",
    "LORA_ALPHA": "lora_alpha",
    "LORA_DROPOUT": "lora_dropout",
    "LORA_BIAS": "bias",
    "LORA_TASK_TYPE": "task_type",
    "LORA_TARGET_MODULES": "target_modules",
    "TARGET_MODULES": "target_modules",
}


@checked
def create_population(
    algo: Name,
    net_config: Mapping[str, Any] | None = None,
    INIT_HP: Mapping[str, Any] | None = None,  # noqa: N803  (the documented name)
    *,
    population_size: Count = 1,
    hp_config: Any = None,
    model_name: str | None = None,
    actor_network: Any = None,
    tokenizer: Tokenizer | None = None,
    lora_config: Any = None,
    vllm_config: Any = None,
    accelerator: Accelerator | None = None,
    device: str | None = None,
    torch_compiler: str | None = None,
    algo_kwargs: Mapping[str, Any] | None = None,
    **unused: None,
) -> list[LLMAlgorithm]:
    """Return a population of an algorithm by name, its hyperparameters in capitals as in ``INIT_HP``.

    ``INIT_HP`` also holds what belongs to loops (``POP_SIZE``, ``TOURN_SIZE``), which is left out here; a key that is
    unknown is warned of. ``LR`` is also PPO's ``lr_actor``. ``algo_kwargs`` are the agents' own keywords, and win.
    ``net_config`` and spaces have no meaning for a language model. Raises ConfigError for an unknown algorithm.
    """
    # As written, too: MaxRL is not all capitals.
    cls = _NAMES.get(algo.upper().replace("-", "_"), _NAMES.get(algo))
    if cls is None:
        raise ConfigError(f"create_population: algo={algo!r} is unknown; {nearest(algo, _NAMES)}")
    if any(value is not None for value in (net_config, *unused.values())):
        given = "net_config" if net_config is not None else next(name for name in unused if unused[name] is not None)
        raise ConfigError(f"create_population: {given} is for other networks than language models; leave it out")
    values = _agent_keywords(cls, INIT_HP or {})
    arguments: dict[str, Any] = {
        "model_name": model_name,
        "actor_network": actor_network,
        "lora_config": lora_config,
        "vllm_config": vllm_config,
        "accelerator": accelerator,
        "device": device,
        "torch_compiler": torch_compiler,
        "pad_token_id": getattr(tokenizer, "pad_token_id", None),
        "pad_token": getattr(tokenizer, "pad_token", None),
    }
    # An agent takes exactly one of the two.
    if actor_network is not None:
        values.pop("model_name", None)
    values |= {name: value for name, value in arguments.items() if value is not None} | dict(algo_kwargs or {})
    agents = cls.population(population_size, hp_config=hp_config, **values)
    # The agents share one runtime, so this sets it for all.
    if tokenizer is not None and agents[0].runtime.tokenizer is None:
        agents[0].runtime.tokenizer = agents[0].runtime.reading(tokenizer)
    return list(agents)


def _agent_keywords(cls: type[LLMAlgorithm], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of an agent that ``INIT_HP`` means."""
    known = {*cls.Config.model_fields, *SharedOptions.model_fields, *IMPLIED, *ALIASES, "model_name"}
    keywords: dict[str, Any] = {}
    unknown = []
    for key, value in given.items():
        name = key.lower()
        if name == "lr" and "lr_actor" in known:
            keywords.setdefault("lr_actor", given.get("LR_ACTOR", value))
        elif name in known:
            keywords[name] = value
        elif name == "quantization":
            keywords["quantization_config"] = value
        elif name == "cosine_lr_scheduler" and value is not None:
            keywords["cosine_lr_schedule_config"] = CosineLRScheduleConfig(**value)
        elif key not in _OF_LOOPS and key not in _LORA:
            unknown.append(key)
    lora = {_LORA[key]: value for key, value in given.items() if key in _LORA and value not in (None, [], ())}
    if lora.get("target_modules"):
        keywords["lora_config"] = imported_peft().LoraConfig(**{"lora_alpha": 64, "r": 16, **lora})
    elif lora:
        keywords["lora_config"] = replace(default_lora_config(), **lora)
    if unknown:
        warnings.warn(
            f"INIT_HP: {', '.join(unknown)} {'is not a setting' if len(unknown) == 1 else 'are not settings'} of "
            f"{cls.__name__} and ignored",
            stacklevel=4,
        )
    return keywords


Strategy = Annotated[
    Any, Having("a selection strategy", ("plan", "select"), "pass a TournamentSelection, for instance")
]


@checked
def run_selection_and_mutation(
    selection_strategy: Strategy | None,
    population: Sequence[LLMAlgorithm],
    mutation: Annotated[Mutations, Hint("pass Mutations(...)")],
    env_name: str = "",
    algo: str | None = None,
    elite_path: Location | None = None,
    *,
    save_elite: bool = False,
    accelerator: Any = None,
    language_model: bool | None = True,
) -> list[LLMAlgorithm]:
    """Return the next population of a loop of your own: selected by the last ``fitness`` of each agent, then mutated.

    The elite is saved before anything mutates. ``env_name``, ``algo``, ``accelerator`` and ``language_model`` are
    accepted and not needed. Without a strategy the population is returned as it is.
    """
    if selection_strategy is None:
        return list(population)
    number_apart(population)
    elite, selected, nominated = selection_strategy.select(list(population))
    if save_elite:
        save_llm_checkpoint(elite, elite_path or Path("saved_checkpoints") / elite.algo, overwrite=True)
    return mutation.mutation(selected, nominated, elite=elite.index)


def tournament_selection_and_mutation(
    population: Sequence[LLMAlgorithm],
    tournament: Any,
    mutation: Mutations,
    env_name: str = "",
    algo: str | None = None,
    elite_path: Location | None = None,
    **options: Any,
) -> list[LLMAlgorithm]:
    """Call :func:`run_selection_and_mutation` by its older name."""
    return run_selection_and_mutation(tournament, population, mutation, env_name, algo, elite_path, **options)


def aggregate_metrics_across_gpus(accelerator: Any, metric_tensor: Any = None) -> float:
    """Return the mean of a metric over all processes of an accelerator (None: over the numbers alone)."""
    if metric_tensor is None:  # the accelerator may be left out
        accelerator, metric_tensor = None, accelerator
    taken(Accelerator | None, accelerator, "aggregate_metrics_across_gpus", "accelerator")
    try:
        values = torch.as_tensor(metric_tensor)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"metric_tensor: expected numbers, found {described(metric_tensor)}") from None
    values = values.detach().float().reshape(-1)
    if accelerator is not None and accelerator.num_processes > 1:
        # Each process counts once, however many numbers it has.
        values = accelerator.gather(values.mean().reshape(1).to(accelerator.device))
    return float(values.mean())
