"""What a run needs in memory, estimated before it starts, and whether the machine has it."""

import os
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path

import torch

from agilerl.algorithms import ALGORITHMS
from agilerl.algorithms.update import MICRO_TOKENS
from agilerl.data.batch import padded_length
from agilerl.envs.core import Split
from agilerl.errors import ConfigError
from agilerl.models.slots import LinearShape
from agilerl.population import Population
from agilerl.rollouts.vllm_colocated import CPU_CACHE
from agilerl.runtime import Runtime
from agilerl.shared_options import QuantizationConfig
from agilerl.training.activations import Widths, head_bytes, saved_bytes, working_bytes
from agilerl.training.config import RunConfig
from agilerl.training.footprint import bank_bytes, decoding_bytes
from agilerl.training.sampling import largest_rank
from agilerl.vllm_config import VLLMConfig

__all__ = [
    "adapter_bytes",
    "adapter_slots",
    "available_bytes",
    "check_memory",
    "check_weights",
    "estimate",
    "needed",
    "vllm_part",
]

_TOKEN_BYTES, _ROW_BYTES = 100, 2000
"""A sampled token and a completion as Python objects, and as tensors of a batch."""
_PANELS: tuple[Split, ...] = ("exam", "test")
_TURNS = ("decode_cache", "training_activations", "vllm_awake", "vllm_alone")
"""Parts that never exist together. While vLLM is ``alone``, the base is on the host."""
_RESERVED = ("vllm", "vllm_awake", "vllm_alone")
"""vLLM's part under the name of what else exists meanwhile: all, no training, neither training nor the base."""
_SHARE = 0.8
"""Of the memory, for a run: the rest is for the system, the libraries, and copies that last a moment."""
_CURES = {
    "base": "choose a smaller network.pretrained_model_name_or_path, network.quantization=nf4, or "
    "training.dtype=bfloat16",
    "adapters": "lower training.pop_size, network.lora_config.r or mutation.rank_range",
    "decode_cache": "lower training.max_rows_in_flight or algorithm.max_output_tokens",
    "training_activations": "lower training.max_tokens_in_flight, or set algorithm.gradient_checkpointing=true",
    "rollouts": "lower environment.data_batch_size_per_gpu, algorithm.group_size or training.pop_size",
    **dict.fromkeys(
        _RESERVED,
        "lower algorithm.vllm_config.gpu_memory_utilization (on a CPU kv_cache_memory_bytes), or on a GPU set "
        "vllm_config.sleep_mode=true",
    ),
}


def adapter_bytes(config: RunConfig, layers: Sequence[LinearShape], agents: int | None = None) -> int:
    """Return the bytes of the slots of ``agents`` and the elite, at the largest rank they may get.

    None: all agents of the configuration.
    """
    numbers = largest_rank(config) * sum(layer.in_features + layer.out_features for layer in layers)
    return bank_bytes(numbers, config.training.pop_size if agents is None else agents, adapter_slots(config))


def adapter_slots(config: RunConfig) -> int:
    """Return the slots of an agent: one, one more for a critic, one more for a reference policy of its own."""
    name = config.algorithm["name"]
    own = ALGORITHMS[name].trained_slots if name in ALGORITHMS else 1  # a choice is among algorithms without critic
    return own + (config.network.adapter is not None)


def estimate(config: RunConfig, population: Population) -> dict[str, int]:
    """Return the bytes of each part that grows with the settings; the interpreter and its libraries come on top.

    Counted is what this process holds: the agents of its island, and its share of their rows. Some parts take turns:
    see :func:`needed`.
    """
    runtime, options = population.runtime, population.runtime.options
    base, widths = runtime.base, Widths.of(runtime.base)
    limit, source = population.context_length, population.source
    row = max(source.row_length(split, population.eval_max_new_tokens or limit, limit) for split in _PANELS)
    rows, workers = population.prompts_per_step * sum(_own_groups(population)), runtime.processes.size
    decoded = ceil(max(rows, len(population) * config.environment.eval_prompts) / workers)
    length = padded_length(row)
    tokens = max(min(runtime.max_tokens, ceil(rows / workers) * length), _micro_tokens(population, length))
    offload = options.activation_offload and base.device.type == "cuda"
    saved = saved_bytes(widths, checkpointing=options.gradient_checkpointing, offload=offload)
    working = working_bytes(widths, again=options.gradient_checkpointing or offload)
    # The head has gone through its tiles before the layers' backward begins.
    at_work = max(tokens * working, head_bytes(widths, tokens, options.fused_logprobs_chunk_rows))
    return {
        "base": base.weight_bytes,
        "adapters": adapter_bytes(config, runtime.store.layers, len(population)),
        **_sampling(runtime, decoding_bytes(widths, min(config.training.max_rows_in_flight, decoded), row)),
        "training_activations": tokens * saved + at_work,
        "rollouts": rows * (_ROW_BYTES + row * _TOKEN_BYTES),
    }


def _own_groups(population: Population) -> list[int]:
    """Return the completions a prompt of each agent of this island."""
    return [agent.config.group_size for agent in population.agents]  # type: ignore[attr-defined]


def _sampling(runtime: Runtime, own: int) -> dict[str, int]:
    """Return what sampling needs: ``own`` bytes where the torch engine samples, vLLM's where that does."""
    options, base = runtime.options, runtime.base
    if not options.use_vllm:
        return {"decode_cache": own}
    settings = options.vllm_config or VLLMConfig()
    found = {"decode_cache": own} if settings.exams == "torch" else {}
    if settings.base_url is not None:  # what a server takes is its own affair
        return found
    dtype = getattr(torch, settings.dtype) if settings.dtype not in (None, "auto") else base.dtype
    # It loads the files itself: that the trainer's base is quantised does not make its weights smaller.
    weights = base.weight_bytes if settings.quantization else base.parameters * dtype.itemsize
    on_gpu = base.device.type == "cuda"
    total = available_bytes(str(base.device)) if on_gpu else None
    return found | vllm_part(settings, weights, total, offload=on_gpu and options.use_memory_efficient_params)


def vllm_part(settings: VLLMConfig, weights: int, device_bytes: int | None, *, offload: bool) -> dict[str, int]:
    """Return what vLLM takes in this process, under the name of what else exists meanwhile.

    ``weights`` are the bytes of its base, ``device_bytes`` those of the GPU, None on a CPU. With ``offload`` the
    trainer's base leaves the GPU while vLLM samples.
    """
    if device_bytes is None:
        return {"vllm": weights + _cpu_cache(settings)}
    size = int(settings.gpu_memory_utilization * device_bytes)
    if settings.kv_cache_memory_bytes is not None:
        size = weights // settings.tensor_parallel_size + settings.kv_cache_memory_bytes
    return {("vllm_alone" if offload else "vllm_awake") if settings.sleep_mode else "vllm": size}


def _cpu_cache(settings: VLLMConfig) -> int:
    """Return the bytes of vLLM's cache on a CPU, of which its own variable has the last word."""
    gibibytes = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
    if gibibytes.isdecimal() and int(gibibytes):
        return int(gibibytes) * 2**30
    return settings.kv_cache_memory_bytes or CPU_CACHE


def _micro_tokens(population: Population, length: int) -> int:
    """Return the padded tokens of the largest micro-batch of one agent, which is never divided."""
    sizes = (a.config.micro_batch_size_per_gpu or max(1, MICRO_TOKENS // length) for a in population.agents)
    most = population.prompts_per_step * max(_own_groups(population))
    return min(max(sizes, default=1), most) * length


def needed(parts: Mapping[str, int]) -> int:
    """Return the most bytes that exist at a time: decoding and training take turns, and vLLM where it sleeps."""
    return max(sum(sizes.values()) for sizes in _turns(parts))


def _turns(parts: Mapping[str, int]) -> list[dict[str, int]]:
    """Return the parts that exist together, for each turn."""
    lasting = {name: size for name, size in parts.items() if name not in _TURNS}
    turns = [lasting | {name: parts[name]} for name in _TURNS if name in parts]
    for sizes in turns:
        if "vllm_alone" in sizes:
            sizes.pop("base", None)
    return turns or [lasting]


def check_memory(parts: Mapping[str, int], device: str) -> None:
    """Raise ConfigError when the parts together need more than the device, or for rollouts the machine, has.

    Of the machine's memory each of the processes that a launcher has started on it may use an equal part.
    """
    groups = [list(parts)] if device == "cpu" else [[n for n in parts if n != "rollouts"], ["rollouts"]]
    for place, names in zip((device, "cpu"), groups):
        sizes = {name: parts[name] for name in names if name in parts}
        there, processes = available_bytes(place), _processes_here() if place == "cpu" else 1
        if there is not None and any(_is_too_much(turn, there / processes) for turn in _turns(sizes)):
            largest = max(sizes, key=lambda name: sizes[name])
            several = f" for {processes} processes of which each needs that" if processes > 1 else ""
            fewer = ", or start fewer processes on a machine" if processes > 1 else ""
            raise ConfigError(
                f"this run needs about {_gib(needed(sizes))} of memory, most of it for {largest.replace('_', ' ')} "
                f"({_gib(sizes[largest])}), and {place} has {_gib(there)}{several}; {_CURES[largest]}{fewer}"
            )


def _is_too_much(parts: Mapping[str, int], there: float) -> bool:
    """Tell whether parts that exist together leave too little over. vLLM keeps to its part: no margin is for it."""
    reserved = sum(parts.get(name, 0) for name in _RESERVED)
    return sum(parts.values()) - reserved > _SHARE * (there - reserved)


def _processes_here() -> int:
    """Return how many processes of a run share this machine, as torchrun and accelerate tell each of them."""
    count = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(count), 1) if count.isdecimal() else 1


def check_weights(name: str, device: str, quantization: QuantizationConfig | None = None) -> None:
    """Raise ConfigError when the weights in a local folder alone are larger than the memory, as they will lie there."""
    folder = Path(name).expanduser()
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
    if quantization is not None:  # the files hold 16 bits or more a number; the head and the embeddings keep theirs
        size //= 3 if quantization.load_in_4bit else 2
    check_memory({"base": size}, device)


def available_bytes(device: str) -> int | None:
    """Return the memory of a device, for the CPU what the machine or its container allows; None where unknown."""
    if device != "cpu":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [_container_limit()]
    try:
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (ValueError, OSError):
        limits.append(None)
    return min((limit for limit in limits if limit), default=None)


def _container_limit() -> int | None:
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            return int(Path(file).read_text())
        except (OSError, ValueError):
            continue
    return None


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
