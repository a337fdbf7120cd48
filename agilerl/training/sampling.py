"""The engine that samples in a run: checks before anything is loaded, and its start."""

import os

from agilerl.addresses import check_key
from agilerl.config.base_model import SharedOptions
from agilerl.config.run import RunConfig
from agilerl.config.vllm import API_KEY, VLLMConfig, lora_capacity
from agilerl.envs.core import Split
from agilerl.errors import ConfigError
from agilerl.population import Population
from agilerl.rollouts.vllm.colocated import check_installed
from agilerl.rollouts.vllm.engine import VLLMEngine

_PANELS: tuple[Split, ...] = ("exam", "test")


def check_sampling(config: RunConfig, options: SharedOptions) -> None:
    """Raise ConfigError for a missing or unsuitable vLLM, adapters that it cannot hold, or a leaked key."""
    if not options.use_vllm:
        return
    settings = options.vllm_config or VLLMConfig()
    if settings.base_url is not None and os.environ.get(API_KEY):
        where, typed = "algorithm.vllm_config.base_url", config.typed_addresses
        check_key(where, API_KEY, settings.base_url, typed, without=f"unset {API_KEY}")
    if settings.base_url is None:
        check_installed(settings, config.training.device.partition(":")[0])
    rank, most = largest_rank(config), settings.max_lora_rank
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


def largest_rank(config: RunConfig) -> int:
    """Return the largest rank that an adapter of the run may have."""
    start = config.network.lora_config.r
    return max(start, config.mutation.rank_range[1]) if config.mutation.probabilities.arch_mut > 0 else start


def start_sampling(config: RunConfig, population: Population) -> None:
    """Start vLLM if it samples, so that problems show before training."""
    engine = population.runtime.engine
    if isinstance(engine, VLLMEngine):
        if engine.config.max_model_len is not None:  # before starting vLLM
            check_room(population, engine.config, engine.config.max_model_len)
        longest = population.context_length + (population.eval_max_new_tokens or 0)
        rank = max(largest_rank(config), population.runtime.store.max_rank)
        engine.start(max(len(population), config.training.pop_size), rank, longest)
        check_room(population, engine.config, engine.backend.context_length)


def check_room(population: Population, settings: VLLMConfig, room: int) -> None:
    """Raise ConfigError if vLLM's context of ``room`` tokens would truncate allowed completions.

    This counts the longest prompt of the panels and of the first training rows; for episodes, the first prompt. Limits
    by the agents' ``max_model_len`` or the base do not concern vLLM.
    """
    limit, most = population.context_length, population.runtime.base.context_length
    asked = [] if population.learns_from_data else [_training_row(population, limit)]
    if settings.exams == "vllm":
        exam = max(max(population.lengths(split).prompts) for split in _PANELS)
        asked.append((exam, min(population.eval_max_new_tokens or limit - exam, most - exam)))
    prompt, completion = max(asked, key=sum, default=(0, 0))
    if prompt + completion > room:
        where = "algorithm.vllm_config.max_model_len" if settings.base_url is None else "the server's --max-model-len"
        raise ConfigError(
            f"vLLM's context holds {room} tokens (max_model_len), but prompts have up to {prompt} and completions "
            f"up to {completion} tokens, together {prompt + completion}; raise {where} to that, or lower "
            "algorithm.max_output_tokens and training.eval_max_new_tokens"
        )


def _training_row(population: Population, limit: int) -> tuple[int, int]:
    """Return the tokens of the longest prompt of the first training rows, and of the longest completion after it."""
    prompt = max(population.lengths("train").prompts)
    longest = (agent.config.model_dump().get("max_output_tokens") or limit for agent in population.agents)
    return prompt, min(max(longest), limit - prompt)
