"""Bases in 4 or 8 bits by bitsandbytes: loading, counting, and the dense weights that they stand for."""

import logging
import warnings
from functools import cache
from typing import Any, cast

import torch
from torch import nn

from agilerl.config.base_model import QuantizationConfig, SharedOptions
from agilerl.deferred import deferred
from agilerl.errors import ConfigError, how_to_install

# It warns about kernels that are not installed, which only its developers need.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def quantisation_in(config: Any) -> QuantizationConfig | None:
    """Return how the weights that a model's configuration belongs to are quantised; None if they are not.

    Raises ConfigError for a method other than bitsandbytes.
    """
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return None
    settings = settings if isinstance(settings, dict) else settings.to_dict()
    # An enum in an object of transformers, a text in config.json.
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    if method != "bitsandbytes":
        raise ConfigError(
            f"the model is quantised by {method}; expected bitsandbytes in 4 or 8 bits, or weights that are not "
            "quantised"
        )
    return QuantizationConfig(**{name: settings[name] for name in QuantizationConfig.model_fields if name in settings})


def check_loaded(model: Any, options: SharedOptions | None) -> None:
    """Raise ConfigError for loading options that do not match a model that is already loaded."""
    if options is None:
        return
    if options.config_overrides is not None:
        raise ConfigError(
            "model_config only applies to a model that is loaded by name (model_name), found an already loaded model"
        )
    wanted, given = _kind(options.quantization_config), _kind(quantisation_in(model.config))
    if options.quantization_config is not None and wanted != given:
        raise ConfigError(
            f"quantization_config asks for {wanted}, but the given model has {given}; load it with "
            "from_pretrained(..., quantization_config=...), or give model_name instead"
        )


def _kind(config: QuantizationConfig | None) -> str:
    if config is None:
        return "weights that are not quantised"
    return config.bnb_4bit_quant_type if config.load_in_4bit else "int8"


def loading_arguments(config: QuantizationConfig | None, device: str, dtype: str) -> dict[str, Any]:
    """Return the arguments of ``from_pretrained`` that quantise a base; raises ConfigError without bitsandbytes.

    ``dtype`` is that of the other weights; products are computed in it unless the settings say otherwise.
    """
    if config is None:
        return {}
    _bitsandbytes()
    from transformers import BitsAndBytesConfig

    settings = config.model_dump()
    if settings["llm_int8_skip_modules"] is not None:  # it replaces transformers' own list, which includes the head
        settings["llm_int8_skip_modules"] = sorted({*settings["llm_int8_skip_modules"], "lm_head"})
    settings["bnb_4bit_compute_dtype"] = settings["bnb_4bit_compute_dtype"] or dtype
    # A quantised model must be created on its device: it cannot be moved afterwards.
    return {"quantization_config": BitsAndBytesConfig(**settings), "device_map": {"": device}}


@cache
def imported_peft() -> Any:
    """Return peft. It imports bitsandbytes, which takes a second: that waits until something of it is used."""
    with deferred("bitsandbytes", _bitsandbytes):
        import peft
    return peft


def _bitsandbytes() -> Any:
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(
            f"a base in 4 or 8 bits needs bitsandbytes, which is not installed: {how_to_install('quantization')}"
        ) from error
    return bitsandbytes


def prepare(model: nn.Module) -> None:
    """Keep 4-bit layers in the layout that a backward pass needs; warn about 8-bit ones that mix the agents' rows.

    On CPUs with AVX512-BF16, bitsandbytes rearranges the weights of a model in evaluation mode at the first forward
    without gradients. With the new layout it computes in bf16 and records nothing for autograd: every gradient below
    such a layer would silently be lost, and the rearrangement cannot be undone.
    """
    config = quantisation_in(model.config)
    if config is None:
        return
    if config.load_in_8bit and config.llm_int8_threshold > 0:
        warnings.warn(
            f"llm_int8_threshold={config.llm_int8_threshold:g} picks columns by the largest input of the whole batch, "
            "so the rows of other agents change an agent's results; with 0 ('int8') they do not",
            stacklevel=2,
        )
    four_bits = _bitsandbytes().nn.Linear4bit
    for module in model.modules():
        if isinstance(module, four_bits):
            if getattr(cast(Any, module.weight).quant_state, "packing_format_for_cpu", False):
                raise ConfigError(
                    "the given 4-bit model has already been used: bitsandbytes has rearranged its weights into a "
                    "layout without gradients; load it again, and create the agent before the model is used"
                )
            module.support_avx512bf16_for_cpu = False


def stored_size(parameter: nn.Parameter) -> tuple[int, int]:
    """Return how many numbers a parameter represents, two per byte of a 4-bit weight, and its bytes with its scales."""
    count = getattr(parameter, "ds_numel", parameter.numel())  # this process may hold only a part under DeepSpeed
    size, scales = count * parameter.element_size(), []
    if (of_8_bits := getattr(parameter, "SCB", None)) is not None:
        scales = [of_8_bits]
    if (state := getattr(parameter, "quant_state", None)) is not None:  # of 4 bits
        count = torch.Size(state.shape).numel()
        nested = [state.state2.absmax, state.state2.code] if getattr(state, "nested", False) else []
        scales = [state.absmax, state.code, *nested]
    return count, size + sum(scale.nbytes for scale in scales)


def stored_sizes(model: nn.Module) -> tuple[int, int]:
    """Return the sums of :func:`stored_size` over the parameters of a model."""
    numbers, sizes = zip(*map(stored_size, model.parameters()))
    return sum(numbers), sum(sizes)


@torch.no_grad()
def dequantise_(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Replace each quantised layer by a dense one with the same numbers; returns the model.

    An adapter that was trained on the quantised base can be merged into this one. Adapters must not be attached.
    """
    prepare(model)
    library, modules = _bitsandbytes(), list[tuple[str, Any]](model.named_modules())
    for name, module in modules:
        if isinstance(module, library.nn.Linear4bit):
            weight = library.functional.dequantize_4bit(module.weight.data, module.weight.quant_state)
        elif isinstance(module, library.nn.Linear8bitLt):
            codes = module.weight.data if module.state.CB is None else module.state.CB
            scales = module.weight.SCB if module.state.SCB is None else module.state.SCB
            weight = codes.to(torch.float32) * (scales.to(torch.float32)[:, None] / 127.0)  # scales: rows' largest
        else:
            continue
        dense = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None, dtype=dtype)
        dense.weight.copy_(weight)
        if module.bias is not None:
            dense.bias.copy_(module.bias)
        path, _, last = name.rpartition(".")
        setattr(model.get_submodule(path), last, dense.to(weight.device).requires_grad_(False))
    return model
