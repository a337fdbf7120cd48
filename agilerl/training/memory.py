"""What a run needs in memory, estimated before it starts, and whether the machine has it."""

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import torch

from agilerl.algorithms.agent import LLMAlgorithm
from agilerl.config.base_model import NetworkConfig, QuantizationConfig
from agilerl.config.run import RunConfig
from agilerl.config.vllm import VLLMConfig
from agilerl.data import RolloutBatch, cut, cut_for_training
from agilerl.data.tree import TokenTree
from agilerl.envs.core import Split
from agilerl.errors import ConfigError
from agilerl.models.memory import available_bytes, local_processes
from agilerl.models.slots import LinearShape
from agilerl.planning.footprint import cached_tokens, footprint, gib, is_too_much, peak, saved_bytes
from agilerl.planning.time import Widths, rows_at_once, tokens_at_once
from agilerl.population import Population
from agilerl.runtime import Runtime
from agilerl.sizes import UNIT_ROWS, VLLM_CPU_CACHE

_TOKEN_BYTES, _ROW_BYTES = 100, 2000
"""A sampled token and a completion as Python objects, and as tensors of a batch."""
_PANELS: tuple[Split, ...] = ("exam", "test")
_ROWS = 4096
"""Rows that are cut to see how large passes are; more would be cut alike."""
_CURES = {
    "base": "choose a smaller network.pretrained_model_name_or_path, network.quantization_config=nf4, or "
    "training.dtype=bfloat16",
    "adapters": "lower training.pop_size, network.lora_config.r or mutation.rank_range",
    "decode_cache": "lower training.max_rows_in_flight or algorithm.max_output_tokens",
    "training_activations": "lower training.max_tokens_in_flight and algorithm.micro_batch_size_per_gpu, or set "
    "network.gradient_checkpointing=true",
    "rollouts": "lower environment.data_batch_size_per_gpu, algorithm.group_size or training.pop_size",
    **dict.fromkeys(
        ("vllm", "vllm_awake", "vllm_alone"),
        "lower network.vllm_config.gpu_memory_utilization (on a CPU kv_cache_memory_bytes), or on a GPU set "
        "network.vllm_config.sleep_mode=true",
    ),
}


def adapter_numbers(rank: int, layers: Sequence[LinearShape]) -> int:
    """Return the numbers of an adapter of this rank."""
    return rank * sum(layer.in_features + layer.out_features for layer in layers)


def adapter_slots(network: NetworkConfig, algorithm: type[LLMAlgorithm]) -> int:
    """Return the slots of an agent, that of its reference policy included."""
    return algorithm.trained_slots + (network.adapter is not None)


def estimate(config: RunConfig, population: Population) -> dict[str, float]:
    """Return the bytes of each part that grows with the settings; the interpreter and its libraries come on top.

    Counted is what one process holds: all agents, and its share of their rows, each as long as the longest.
    Some parts take turns: see :func:`agilerl.planning.footprint.peak`. ``rollouts`` are in the host's memory.
    """
    runtime, options, agents = population.runtime, population.runtime.options, population.agents
    processes, limit = runtime.processes, population.examiner.context_length
    longest = max(
        population.examiner.lengths(split).row(population.examiner.eval_max_new_tokens or limit, limit)
        for split in _PANELS
    )
    rows = [population.prompts_per_step * agent.config.group_size for agent in agents]  # type: ignore[attr-defined]
    # Of the process that computes most: with whole agents the rows of some of them, else its part of all rows.
    divided = [[rows[k] for k in share] for share in processes.parts(range(len(rows)), whole=True)]
    mine, workers = (max(divided, key=sum), 1) if population.examiner.whole else (rows, processes.size)
    trained, examined = (
        rows_at_once(count / workers, len(mine), config.training.max_rows_in_flight)
        for count in (sum(mine), len(mine) * len(population.examiner.places("exam")) * population.examiner.eval_samples)
    )
    # The smallest group: its prompts' caches are shared by the fewest rows.
    group, prompt = (
        min(population.group_sizes),
        max(max(population.examiner.lengths(split).prompts) for split in _PANELS),
    )
    passes, common = training_passes(population, workers), min(common_tokens(population), prompt)
    prompts = max(math.ceil(trained / group), math.ceil(examined / population.examiner.eval_samples))
    widths = Widths.of(runtime.base)
    largest = max(passes, key=lambda p: p.tokens * saved_bytes(widths, checkpointing=p.recomputed))
    checkpointing = options.gradient_checkpointing or largest.recomputed
    tokens = tokens_at_once(largest.tokens, len(mine), runtime.max_tokens or runtime.pass_size.tokens)
    vllm = _vllm(runtime) if options.use_vllm else {}
    samples = not options.use_vllm or (options.vllm_config or VLLMConfig()).exams == "torch"
    parts: dict[str, float] = footprint(
        widths=widths,
        base=runtime.base.weight_bytes,
        adapter=adapter_numbers(config.largest_rank, runtime.store.layers),
        agents=len(agents),
        slots=adapter_slots(config.network, type(agents[0])),
        decoded=max(trained, examined) if samples else None,
        cached=cached_tokens(trained, group, examined, min(prompt, longest), longest, shared=runtime.base.flattens),
        longest=longest,
        prefilled=min(runtime.pass_size.unsaved, prompts * (prompt - common) + len(mine) * common),
        episodes=_kept(population, mine, len(population.examiner.places("exam"))),
        tokens=tokens,
        spoken=math.ceil(tokens * largest.answers),
        scored=max(p.scored for p in passes),
        checkpointing=checkpointing,
        offload=options.activation_offload and runtime.base.device.type == "cuda",
        chunk_rows=options.fused_logprobs_chunk_rows,
        vllm=vllm,
    )
    parts["rollouts"] = sum(rows) * (_ROW_BYTES + longest * _TOKEN_BYTES)
    return parts | ({"prompts": float(runtime.prompts.most)} if runtime.invocation else {})


def _kept(population: Population, rows: Sequence[int], exam: int) -> int:
    """Return the episodes whose caches are kept; agents with more than ``UNIT_ROWS`` of them keep none."""
    if not (population.task.multi_turn and population.runtime.base.flattens):
        return 0
    return max(sum(count for count in counts if count <= UNIT_ROWS) for counts in (rows, [exam] * len(rows)))


class TrainingPasses(NamedTuple):
    """The forward passes of an optimizer step of one agent, if all prompts and completions are as long as the longest.

    Tokens include what attention copies.
    """

    passes: int
    """With gradient."""
    tokens: int
    """Of the largest one."""
    answers: float
    """Share of completions in it."""
    recomputed: bool
    """Whether layers are computed again in the backward pass, so that it may be so large."""
    scored: int
    """Tokens of the largest pass without gradient, over all rows of an iteration."""


def training_passes(population: Population, workers: int = 1) -> list[TrainingPasses]:
    """Return the passes of each agent; ``workers`` processes divide its rows."""
    flat, limit, common = (
        population.runtime.base.flattens,
        population.examiner.context_length,
        common_tokens(population),
    )
    panels = [population.examiner.lengths(split) for split in _PANELS]
    longest = max(panel.row(population.examiner.eval_max_new_tokens or limit, limit) for panel in panels)
    prompt = min(max(max(panel.prompts) for panel in panels), longest - 1)
    common = min(common, prompt)
    passes = []
    for agent in population.agents:
        rows = population.prompts_per_step * agent.config.group_size  # type: ignore[attr-defined]
        window = -(-min(rows, agent.window_rows) // workers)
        most = agent.micro_batch
        shape = partial(_alike, prompts=population.prompts_per_step, prompt=prompt, common=common, length=longest)
        counts = [min(count, max(_ROWS, most.rows or 0)) for count in (window, rows)]
        batch = shape(counts[0])
        cuts, recomputed = cut_for_training(batch, torch.arange(len(batch)), most, flat=flat)
        batch = shape(counts[1])
        scored = cut(batch, torch.arange(len(batch)), most._replace(unit=1, whole=most.unsaved), flat=flat)
        size = max(range(len(cuts.sizes)), key=cuts.sizes.__getitem__)
        tokens = math.ceil(cuts.sizes[size])
        answers = len(cuts.parts[size]) * (longest - prompt) / tokens
        number = math.ceil(len(cuts.parts) * window / counts[0])
        # A critic reads the tokens a second time, in the same pass.
        tokens *= 1 if agent.critic_slot is None else 2
        passes.append(TrainingPasses(number, tokens, answers, recomputed, math.ceil(max(scored.sizes))))
    return passes


def _alike(rows: int, *, prompts: int, prompt: int, common: int, length: int) -> RolloutBatch:
    """Return rows of one length, evenly of some prompts, which have their first tokens in common."""
    group = -(-rows // prompts)
    groups, column = -(-rows // group), torch.zeros((), dtype=torch.int64)
    of = torch.arange(rows) // group
    tree = TokenTree(
        torch.cat([column[None], torch.arange(groups) * group]),
        torch.tensor([0] + [common] * groups),
        torch.tensor([common] + [prompt] * groups),
        torch.tensor([-1] + [0] * groups),
        of + 1,
    )
    mask = torch.zeros((), dtype=torch.bool).expand(rows, length - 1)
    # One number for all: a long context would fill the memory.
    batch = RolloutBatch(
        column.expand(rows, length), torch.full((rows,), length), mask, mask.long(), torch.zeros(rows, 1), of
    )
    return batch.with_tree(tree)


def common_tokens(population: Population) -> int:
    """Return with how many tokens all prompts of the exam begin."""
    prompts = [question.prompt_ids for question in population.examiner.places("exam")]
    return sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, zip(*prompts)))


def _vllm(runtime: Runtime) -> dict[str, float]:
    """Return what vLLM takes in this process; a server's memory does not count."""
    settings, base = runtime.options.vllm_config or VLLMConfig(), runtime.base
    if settings.base_url is not None:
        return {}
    dtype = getattr(torch, settings.dtype) if settings.dtype not in (None, "auto") else base.dtype
    # vLLM loads the files itself, so its weights are no smaller if the trainer's base is quantised.
    weights = base.weight_bytes if settings.quantization else base.parameters * dtype.itemsize
    on_gpu = base.device.type == "cuda"
    total = available_bytes(str(base.device)) if on_gpu else None
    return vllm_part(settings, weights, total, offload=on_gpu and runtime.options.use_memory_efficient_params)


def vllm_part(settings: VLLMConfig, weights: int, device_bytes: int | None, *, offload: bool) -> dict[str, float]:
    """Return what vLLM takes in this process, under a name that says what else is in memory at that time.

    ``weights`` are the bytes of its base, ``device_bytes`` those of the GPU, None on a CPU. With ``offload`` the
    trainer's base leaves the GPU while vLLM samples.
    """
    if device_bytes is None:
        # vLLM's own environment variable overrides the setting.
        gibibytes = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "")
        chosen = int(gibibytes) * 2**30 if gibibytes.isdecimal() else 0
        return {"vllm": weights + (chosen or settings.kv_cache_memory_bytes or VLLM_CPU_CACHE)}
    size = int(settings.gpu_memory_utilization * device_bytes)
    if settings.kv_cache_memory_bytes is not None:
        # vLLM ignores gpu_memory_utilization where its cache has a given size.
        size = weights // settings.tensor_parallel_size + settings.kv_cache_memory_bytes
    return {("vllm_alone" if offload else "vllm_awake") if settings.sleep_mode else "vllm": size}


def check_memory(parts: Mapping[str, float], device: str) -> None:
    """Raise ConfigError when the parts need more than this process may use of the device (rollouts: the machine)."""
    groups = [list(parts)] if device == "cpu" else [[n for n in parts if n != "rollouts"], ["rollouts"]]
    for where, names in zip((device, "cpu"), groups):
        sizes = {name: parts[name] for name in names if name in parts}
        # Processes of a run share a machine.
        there, processes = available_bytes(where), local_processes() if where == "cpu" else 1
        if is_too_much(sizes, there / processes):
            largest = max(sizes, key=lambda name: sizes[name])
            several = f" for {processes} processes that each need that" if processes > 1 else ""
            fewer = ", or start fewer processes on a machine" if processes > 1 else ""
            raise ConfigError(
                f"this run needs about {gib(peak(sizes))} of memory, most of it for {largest.replace('_', ' ')} "
                f"({gib(sizes[largest])}), and {where} has {gib(there)}{several}; {_CURES[largest]}{fewer}"
            )


def check_weights(name: str, device: str, quantization: QuantizationConfig | None = None) -> None:
    """Raise ConfigError when the weights in a local folder alone, once loaded, are larger than the memory."""
    folder = Path(name).expanduser()
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
    if quantization is not None:  # the files hold 16 bits or more a number; the head and the embeddings keep theirs
        size //= 3 if quantization.load_in_4bit else 2
    check_memory({"base": size}, device)
