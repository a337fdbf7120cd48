"""PEFT is the interface: adapters go out as plain PEFT folders and come in from them."""

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from agilerl.errors import CheckpointError, ConfigError, WriteError
from agilerl.models.slots import LinearShape

__all__ = [
    "WEIGHTS_FILE",
    "check_lora_config",
    "default_lora_config",
    "lora_scaling",
    "read_adapter",
    "read_config",
    "read_tensors",
    "write_adapter",
    "write_tensors",
]

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Factors = Sequence[tuple[Tensor, Tensor]]


def default_lora_config() -> Any:
    """Rank 16, alpha 32 on every linear layer."""
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def check_lora_config(config: Any) -> None:
    """Raise ConfigError for LoRA variants that the stacked layer does not compute."""
    if getattr(config, "peft_type", None) is None or str(config.peft_type).split(".")[-1] != "LORA":
        raise ConfigError(f"lora_config must be a peft.LoraConfig, found {type(config).__name__}")
    refused = {
        "use_dora": bool(config.use_dora),
        "bias": config.bias != "none",
        "modules_to_save": bool(config.modules_to_save),
        "rank_pattern": bool(config.rank_pattern),
        "alpha_pattern": bool(config.alpha_pattern),
        "lora_dropout": config.lora_dropout > 0,
        "init_lora_weights": config.init_lora_weights is not True,
        "target_parameters": bool(getattr(config, "target_parameters", None)),
    }
    for name, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"lora_config.{name}={getattr(config, name)!r} is not supported by the shared base; expected PEFT's "
                "default (dropout in particular would make the policy differ from its own rollouts)"
            )
    if config.r < 1:
        raise ConfigError(f"lora_config.r must be at least 1, found {config.r}")


def lora_scaling(config: Any, rank: int | None = None) -> float:
    """Return the factor of the delta: alpha / r, or alpha / sqrt(r) with ``use_rslora`` (arXiv 2312.03732)."""
    rank = config.r if rank is None else rank
    return float(config.lora_alpha / (rank**0.5 if config.use_rslora else rank))


def write_adapter(folder: Path, layers: Sequence[LinearShape], factors: Factors, config: Any, base_name: str) -> None:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json``; PeftModel.from_pretrained loads the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for layer, (a, b) in zip(layers, factors):
        tensors[f"base_model.model.{layer.name}.lora_A.weight"] = a
        tensors[f"base_model.model.{layer.name}.lora_B.weight"] = b
    write_tensors(folder / WEIGHTS_FILE, tensors)
    written = copy.deepcopy(config)
    # Full paths: what this model calls its layers, not what a pattern might match in another one.
    written.target_modules = [layer.name for layer in layers]
    written.base_model_name_or_path = base_name
    written.inference_mode = True
    written.save_pretrained(str(folder))


def read_config(folder: Path) -> Any:
    """Read the ``peft.LoraConfig`` of an adapter folder; raises CheckpointError when it is missing or damaged."""
    from peft import LoraConfig

    try:
        fields = json.loads((folder / CONFIG_FILE).read_text())
        known = {f.name for f in dataclasses.fields(LoraConfig)}
        return LoraConfig(**{name: value for name, value in fields.items() if name in known})
    except FileNotFoundError as error:
        raise CheckpointError(f"no PEFT adapter at {str(folder)!r}: {CONFIG_FILE} is missing") from error
    except (OSError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the adapter at {str(folder)!r} cannot be read: {CONFIG_FILE}: {error}") from error


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file; raises CheckpointError unless they are there and of floating point."""
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing") from error
    except (SafetensorError, OSError, TypeError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(f"{path}: expected floating-point numbers as {name[:100]!r}, found {tensor.dtype}")
    return tensors


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write a safetensors file; raises WriteError where the disk refuses."""
    try:
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, path, {"format": "pt"})
    except SafetensorError as error:  # how safetensors reports that the disk is full
        raise WriteError(f"{path} could not be written: {error}") from error


def read_adapter(
    folder: Path, layers: Sequence[LinearShape], *, finite: bool = True
) -> tuple[list[tuple[Tensor, Tensor]], Any]:
    """Read a PEFT adapter folder; returns its factors in the order of ``layers`` and its LoraConfig.

    Raises CheckpointError when files are missing or damaged, the adapter was made for other layers or, with ``finite``,
    holds NaN or infinity.
    """
    config = read_config(folder)
    tensors, factors = read_tensors(folder / WEIGHTS_FILE), []
    for layer in layers:
        pair = [tensors.pop(f"base_model.model.{layer.name}.lora_{x}.weight", None) for x in "AB"]
        a, b = pair
        shapes = [(config.r, layer.in_features), (layer.out_features, config.r)]
        if a is None or b is None or [a.shape, b.shape] != shapes:
            found = "nothing" if a is None or b is None else f"{tuple(a.shape)} and {tuple(b.shape)}"
            raise CheckpointError(
                f"the adapter at {str(folder)!r} does not fit: {layer.name} expects A [r, {layer.in_features}] and "
                f"B [{layer.out_features}, r] of rank r={config.r!r}, found {found}"
            )
        if finite and not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise CheckpointError(f"the adapter at {str(folder)!r} holds numbers that are not finite in {layer.name}")
        factors.append((a, b))
    if tensors:
        raise CheckpointError(
            f"the adapter at {str(folder)!r} has weights for {len(tensors)} layers that this agent does not adapt, for "
            f"instance {sorted(tensors)[0]!r}; create the agent with the adapter's own lora_config"
        )
    return factors, config
