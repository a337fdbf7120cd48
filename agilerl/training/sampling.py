"""The engine that samples: checks before anything is loaded, and its start."""

import os

from agilerl.config.base_model import SharedOptions
from agilerl.config.run import RunConfig
from agilerl.config.search import TEACHER_KEY
from agilerl.config.vllm import API_KEY, VLLMConfig, lora_capacity
from agilerl.errors import ConfigError
from agilerl.population import Population
from agilerl.rollouts.vllm.colocated import check_installed
from agilerl.rollouts.vllm.engine import VLLMEngine
from agilerl.safety.addresses import check_key


def check_sampling(config: RunConfig, options: SharedOptions, processes: int = 1) -> None:
    """Raise ConfigError for a missing or unsuitable vLLM, adapters that it cannot hold, or a leaked key."""
    settings = options.vllm_config or VLLMConfig()
    servers = {"teacher.url": (TEACHER_KEY, config.teacher.url)}
    if options.use_vllm:
        servers["network.vllm_config.base_url"] = (API_KEY, settings.base_url)
    for where, (key, url) in servers.items():
        if url is not None and os.environ.get(key):
            # Settings hold a server's address without /v1; whoever allows either means that server.
            check_key(where, key, f"{url}/v1", config.typed_addresses, without=f"unset {key}")
    if not options.use_vllm:
        return
    if settings.base_url is None:
        check_installed(settings, config.training.device.partition(":")[0])
    rank, most = config.largest_rank, settings.max_lora_rank
    if most is not None and rank > most:
        raise ConfigError(
            f"network.vllm_config.max_lora_rank={most} is less than the rank {rank} that adapters may reach "
            "(network.lora_config.r, mutation.rank_range); raise it, or narrow mutation.rank_range"
        )
    # Called for its error alone, beyond the largest rank that vLLM holds.
    lora_capacity(rank)
    if processes > 1 and settings.tensor_parallel_size > 1:
        raise ConfigError(
            f"network.vllm_config.tensor_parallel_size={settings.tensor_parallel_size} in {processes} processes: "
            "each of them starts its own vLLM on its own GPU, so none can use the others'; set it to 1, or start a "
            "server and name it as network.vllm_config.base_url"
        )


def start_sampling(population: Population, agents: int, rank: int) -> None:
    """Start vLLM if it samples, so that problems show before training."""
    engine = population.runtime.engine
    if not isinstance(engine, VLLMEngine):
        return
    if engine.config.max_model_len is not None:  # before starting vLLM
        check_room(population, engine.config, engine.config.max_model_len)
    longest = population.examiner.context_length + (population.examiner.eval_max_new_tokens or 0)
    # The bank of a resumed run may be wider than its settings ask for.
    rank = max(rank, population.runtime.store.max_rank)
    engine.start(max(len(population), agents), rank, longest)
    # Once more: a server may hold less than the settings say.
    check_room(population, engine.config, engine.backend.context_length)


def check_room(population: Population, settings: VLLMConfig, room: int) -> None:
    """Raise ConfigError if vLLM's context of ``room`` tokens would truncate allowed completions.

    This counts the longest prompt of the panels and of the first training rows; for episodes, the first prompt. Limits
    by the agents' ``max_model_len`` or the base do not concern vLLM.
    """
    limit, most = population.examiner.context_length, population.runtime.base.context_length
    asked = list[tuple[int, int]]()
    if not population.learns_from_data:  # the longest prompt, and the longest completion after it
        prompt = max(population.examiner.lengths("train").prompts)
        longest = max(agent.config.model_dump().get("max_output_tokens") or limit for agent in population.agents)
        asked.append((prompt, min(longest, limit - prompt)))
    if settings.exams == "vllm":
        exam = max(max(population.examiner.lengths(split).prompts) for split in ("exam", "test"))
        asked.append((exam, min(population.examiner.eval_max_new_tokens or limit - exam, most - exam)))
    prompt, completion = max(asked, key=sum, default=(0, 0))
    if prompt + completion > room:
        where = "network.vllm_config.max_model_len" if settings.base_url is None else "the server's --max-model-len"
        raise ConfigError(
            f"vLLM's context holds {room} tokens (max_model_len), but prompts have up to {prompt} and completions "
            f"up to {completion} tokens, together {prompt + completion}; raise {where} to that, or lower "
            "algorithm.max_output_tokens and training.eval_max_new_tokens"
        )
