"""The sizes of a model from its config.json alone: the modules are made on the meta device, without weights."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from agilerl.envs.hub import is_out_of_reach
from agilerl.errors import AgileRLError, ConfigError
from agilerl.models.base import EMBEDDED, from_model, resolve_model
from agilerl.models.model_config import auto_class
from agilerl.models.targets import lora_layers
from agilerl.shared_options import quantization_settings
from agilerl.training.config import RunConfig
from agilerl.training.roofline import ModelShape

__all__ = ["model_shape", "shape_of"]


def model_shape(config: RunConfig, *, device: str) -> ModelShape:
    """Return the shape of the base of a run as it would lie on a device, ``cpu`` or ``cuda``.

    Raises ConfigError where there is no such model, and for an architecture that cannot be made from its config.json.
    """
    from peft import LoraConfig
    from transformers import AutoConfig

    name = config.network.pretrained_model_name_or_path
    path = resolve_model(name)
    try:
        offline = name != EMBEDDED and path == name and is_out_of_reach()
        found = AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=offline)
        with torch.device("meta"):
            model = auto_class(found).from_config(found, trust_remote_code=False)
        lora = LoraConfig(**config.network.lora_config.model_dump(), task_type="CAUSAL_LM")
        scope = config.algorithm.get("lora_target_scope")
        shape = shape_of(model, lora, name=name, width=_width(config, found, device), scope=scope)
        return replace(shape, linear_width=_quantised(config) or shape.width)
    except AgileRLError:
        raise
    except Exception as error:  # of any library that reads files: no list of their errors is complete
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"cannot read the shape of the model {name!r}: {type(error).__name__}: {reason}; expected a local folder "
            "with config.json, a name on the Hugging Face hub that is reachable, or 'embedded'"
        ) from error


def shape_of(model: Any, lora_config: Any, *, name: str, width: float, scope: str | None = None) -> ModelShape:
    """Return the shape of a causal language model, which may lie on the meta device; ``width`` is bytes a weight.

    ``scope`` is ``lora_target_scope``: the part of a module's path that adapted layers lie under.
    """
    base = from_model(model, name)
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or base.hidden_size // heads)
    layers = lora_layers(model, lora_config, scope)
    held, active = _matrices(model, config)
    return ModelShape(
        name=name,
        layers=base.num_layers,
        hidden=base.hidden_size,
        query_width=heads * size,
        kv_width=int(getattr(config, "num_key_value_heads", None) or heads) * size,
        feed_forward=_feed_forward(config, base.hidden_size),
        vocabulary=base.vocabulary_size,
        parameters=base.parameters,
        linear=active,
        linear_held=held,
        adapted=sum(layer.in_features + layer.out_features for layer in layers),
        adapted_layers=len(layers),
        context=base.context_length,
        width=width,
        linear_width=width,
    )


def _matrices(model: Any, config: Any) -> tuple[int, int]:
    """Return the parameters of the layers' matrix products: all that are held, and those that a token passes."""
    outside = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    share = _experts_used(config)
    held, active = 0, 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or id(parameter) in outside:
            continue
        held += parameter.numel()
        active += parameter.numel() * (share if ".experts." in f".{name}." else 1)
    return held, int(active)


def _experts_used(config: Any) -> float:
    """Return the share of a mixture's experts that one token passes; 1 in a dense model."""
    chosen = getattr(config, "num_experts_per_tok", None)
    counts = (getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    count = next((number for number in counts if number), None)
    return float(chosen) / float(count) if chosen and count else 1.0


def _feed_forward(config: Any, hidden: int) -> int:
    """Return the width inside the feed-forward part that one token uses."""
    expert, chosen = getattr(config, "moe_intermediate_size", None), getattr(config, "num_experts_per_tok", None)
    if expert and chosen:
        return int(expert) * int(chosen)
    return int(getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden) * int(
        chosen or 1
    )


def _width(config: RunConfig, found: Any, device: str) -> float:
    """Return the bytes of a weight: ``training.dtype``, of which ``auto`` is fp32 on a CPU and the model's own else."""
    name = config.training.dtype
    if name == "auto":
        own = getattr(found, "dtype", None) or getattr(found.get_text_config(), "dtype", None)
        name = "float32" if device == "cpu" else str(own or "bfloat16").removeprefix("torch.")  # type: ignore[assignment]
    return float(getattr(torch, name).itemsize)


def _quantised(config: RunConfig) -> float | None:
    """Return the bytes of a quantised weight with its scales; None where nothing is quantised."""
    found = config.network.quantization or quantization_settings(config.algorithm.get("quantization_config"))
    if not found:
        return None
    settings = found if isinstance(found, Mapping) else found.model_dump()
    if settings.get("load_in_8bit"):
        return 1.0
    # One fp32 scale for 64 weights; quantised themselves, one byte and a little.
    return 0.5 + (1.03 if settings.get("bnb_4bit_use_double_quant") else 4.0) / 64
