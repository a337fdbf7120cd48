"""vLLM inside the trainer's process: the one file that imports it."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from agilerl.checks.arguments import reason
from agilerl.config.vllm import SUPPORTED, VLLMConfig, how_to_install_vllm, installed_vllm, lora_capacity
from agilerl.errors import ConfigError, EngineError
from agilerl.models.base import BaseModel
from agilerl.rollouts.vllm.backend import Generated, OnGenerated, SampleRequest, StagedAdapter
from agilerl.sizes import VLLM_CPU_CACHE

_CPU_BATCH = 8192
_SAME_NAMES = (
    *("tensor_parallel_size", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens"),
    *("enable_prefix_caching", "kv_cache_memory_bytes", "kv_cache_dtype", "quantization"),
)
"""Settings that vLLM calls as we do."""

_ENVIRONMENT = {
    # The engine in this process: no second copy of what both need, and its errors are exceptions here.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",  # standard output may be read by a program
    # On a CPU vLLM would bind every thread of this process to a core of its own.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""What vLLM reads when it is imported, unless the user has set it."""


def check_installed(config: VLLMConfig, device: str) -> None:
    """Raise ConfigError if vLLM is missing or has another version, or if the settings need a GPU that is missing."""
    installed = installed_vllm()
    if installed is None:
        raise ConfigError(
            f"use_vllm needs vLLM, which is not installed: {how_to_install_vllm()}; or leave out use_vllm"
        )
    name, version = installed
    if not version.startswith(f"{SUPPORTED}."):
        raise ConfigError(f"{name} {version} is installed; expected {SUPPORTED}.x: pip install {name}=={SUPPORTED}.0")
    if device != "cuda" and (config.sleep_mode or config.tensor_parallel_size > 1):
        name = "sleep_mode" if config.sleep_mode else "tensor_parallel_size"
        raise ConfigError(f"vllm_config.{name} needs a GPU, found training on {device!r}; leave it out")


class ColocatedVLLM:
    """vLLM's own copy of the base, in this process."""

    def __init__(self, base: BaseModel, config: VLLMConfig, tokenizer: Any = None) -> None:
        self.base, self.config, self.tokenizer = base, config, tokenizer
        self.context_length = min(base.context_length, config.max_model_len or base.context_length)
        self.max_lora_rank = 0
        self.dtype = str(base.dtype).removeprefix("torch.") if config.dtype in (None, "auto") else config.dtype
        plain = config.quantization is None and config.kv_cache_dtype in (None, "auto")
        self.computes_in_float32 = plain and self.dtype == "float32" and base.dtype == torch.float32
        self._llm: Any = None
        self.running = self._asleep = False

    def start(self, adapters: int, rank: int, context_length: int | None) -> None:
        """Load the base, with room for ``adapters`` adapters in a batch, of at most ``rank``, or as settings say."""
        c, source = self.config, self.config.vllm_model_name_or_path or self.base.source
        if not source:
            raise ConfigError(
                "vLLM loads the base itself, but this one has no name or folder; load it with from_pretrained, or save "
                "it and name the folder as vllm_config.vllm_model_name_or_path"
            )
        if c.max_model_len is None and context_length is not None:
            self.context_length = min(self.base.context_length, context_length)
        self.max_lora_rank = c.max_lora_rank or lora_capacity(max(rank, 1))
        self._llm = self._launched(self.options(source, adapters))
        self.running = True
        if c.stop_sequences and self.tokenizer is not None:
            self._check_tokenizer(source)

    def options(self, source: str, adapters: int) -> dict[str, Any]:
        """Return the keywords of ``vllm.LLM`` for a copy of the base that is at ``source``."""
        c, on_cpu = self.config, self.base.device.type == "cpu"
        options = {
            "model": source,
            "dtype": self.dtype,
            "max_model_len": self.context_length,
            "enforce_eager": on_cpu if c.enforce_eager is None else c.enforce_eager,
            "enable_sleep_mode": c.sleep_mode,
            "enable_lora": True,
            "max_loras": c.max_loras or max(adapters, 1),
            "max_lora_rank": lora_capacity(self.max_lora_rank),
            "logprobs_mode": "processed_logprobs",
            # Tokens go in and out; only texts that end a completion have to be read.
            "skip_tokenizer_init": not c.stop_sequences,
            "trust_remote_code": False,
            "use_tqdm_on_load": False,
            **{name: getattr(c, name) for name in _SAME_NAMES},
            "language_model_only": c.strip_multimodal_towers or None,
        }
        given = {name: value for name, value in options.items() if value is not None}
        # vLLM 0.32 rewinds a row's generator when it computes a prompt in parts, which generators of a CPU cannot do.
        of_cpu = {
            "kv_cache_memory_bytes": VLLM_CPU_CACHE,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(_CPU_BATCH, self.context_length),
        }
        # The user's keywords replace those for a CPU, but none of ours.
        return {**(of_cpu if on_cpu else {}), **c.engine_kwargs, **given}

    def _launched(self, options: dict[str, Any]) -> Any:
        for name, value in _ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        threads = torch.get_num_threads()
        try:
            # vLLM warns about its own use of torch while it is imported.
            with self._stance(), warnings.catch_warnings(action="ignore"):
                from vllm import LLM

                return LLM(**options)
        except Exception as error:  # of whatever part of vLLM: no list of its errors is complete
            raise EngineError(
                f"vLLM could not start: {reason(error)}. Where memory is short, lower vllm_config.max_model_len, "
                "max_num_seqs, max_loras or gpu_memory_utilization; on a machine without a GPU, vllm-cpu is needed in "
                "place of vllm"
            ) from error
        finally:
            # vLLM may have changed it, and training computes in this process as well.
            torch.set_num_threads(threads)

    def _check_tokenizer(self, source: str) -> None:
        theirs, ours = self._llm.get_tokenizer().get_vocab(), self.tokenizer.get_vocab()
        if theirs != ours:
            raise ConfigError(
                f"vLLM's tokenizer, of {source!r}, is not the trainer's: {len(theirs)} and {len(ours)} tokens, "
                f"{len(theirs.items() ^ ours.items())} differ; name a folder with the trainer's tokenizer as "
                "vllm_config.vllm_model_name_or_path"
            )

    def _stance(self) -> AbstractContextManager[Any]:
        """On a CPU, let nothing of vLLM's be compiled: it takes half a minute, for functions of a few operations."""
        return torch.compiler.set_stance("force_eager") if self.base.device.type == "cpu" else nullcontext()

    @contextmanager
    def awake(self) -> Iterator[None]:
        """With ``sleep_mode``, hold the GPU's memory only while the context is open."""
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False
        try:
            yield
        finally:
            if self.config.sleep_mode and self._llm is not None:
                self._llm.sleep(level=1)
                self._asleep = True

    def load(self, adapter: StagedAdapter) -> None:
        """Take an adapter in; raises EngineError for one that vLLM refuses, before any row needs it."""
        try:
            with self._stance():
                self._llm.llm_engine.add_lora(_lora_request(adapter))
        except Exception as error:
            raise EngineError(
                f"vLLM does not take the adapter: {reason(error)}; adapt other layers (lora_config.target_modules), "
                "or leave out use_vllm"
            ) from error

    def drop(self, adapter: StagedAdapter) -> None:
        """Forget an adapter."""
        self._llm.llm_engine.remove_lora(adapter.number)

    def complete(self, rows: Sequence[SampleRequest], answered: OnGenerated | None = None) -> list[Generated]:
        """Answer rows, all or none of which have an adapter, in one call, which returns all answers together."""
        from vllm import SamplingParams

        try:
            # Without texts to look for, tokens need not become text.
            sampling = [SamplingParams(**row.sampling, detokenize="stop" in row.sampling) for row in rows]
        except ValueError as error:
            raise EngineError(f"vLLM cannot sample like this: {reason(error)}; change the agent's setting") from error
        prompts: list[Any] = [{"prompt_token_ids": row.prompt_ids} for row in rows]
        adapters = [_lora_request(row.adapter) for row in rows if row.adapter is not None] or None
        try:
            with self._stance():
                outputs = self._llm.generate(prompts, sampling, lora_request=adapters, use_tqdm=False)
        except Exception as error:
            # Its scheduler still holds the rows that failed, and would wait for them forever.
            self.close()
            raise EngineError(f"vLLM failed while sampling: {reason(error)}; it will be restarted") from error
        return [_answer(output.outputs[0]) for output in outputs]

    def close(self) -> None:
        """Stop the engine; the next rows start another one."""
        llm, self._llm, self._asleep, self.running = self._llm, None, False, False
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()


def _lora_request(adapter: StagedAdapter) -> Any:
    from vllm.lora.request import LoRARequest

    return LoRARequest(adapter.name, adapter.number, str(adapter.folder))


def _answer(output: Any) -> Generated:
    tokens = list(output.token_ids)
    logprobs = [step[token].logprob for step, token in zip(output.logprobs, tokens)]
    return Generated(tokens, logprobs, output.finish_reason)
