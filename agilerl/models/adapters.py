"""Adapters as PEFT knows them: which layers carry them, and their files."""

import copy
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from agilerl.checks.arguments import shown
from agilerl.config.base_model import with_layers_by_weight
from agilerl.errors import CheckpointError, ConfigError, WriteError
from agilerl.models.layers import body_of
from agilerl.models.quantised import imported_peft
from agilerl.models.slots import LinearShape
from agilerl.safety.bounds import check_file, check_links, full_matches, memory_bytes


def lora_layers(model: Any, lora_config: Any, scope: str | None = None) -> list[LinearShape]:
    """Return the linear layers that a ``peft.LoraConfig`` targets, in module order, as PEFT itself would choose.

    In a multimodal model only layers of the text tower qualify, because only those see tokens here. ``scope`` narrows
    them to modules whose path has these parts (``language_model``, ``layers.3``). ``all-linear`` leaves out the experts
    of a mixture, and the router if it is not a linear layer. Raises ConfigError for a target that cannot carry an
    adapter, and if nothing is left.
    """
    imported_peft()
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers, check_target_module_exists
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    from transformers.pytorch_utils import Conv1D

    # PEFT's functions write into it.
    config = copy.deepcopy(lora_config)
    if config.target_modules is None:
        config.target_modules = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(
            model.config.model_type, "all-linear"
        )
    named = config.target_modules != "all-linear"
    config = _maybe_include_all_linear_layers(config, model)
    _without_patterns(config, [name for name, _ in model.named_modules()])
    body = body_of(model)
    # In a multimodal model the prefix of the names in the text tower; empty if that is the whole model.
    tower = next((f"{name}." for name, module in model.named_modules() if module is body and name), "")
    shapes = []
    for name, module in model.named_modules():
        if not name or not check_target_module_exists(config, name):
            continue
        if scope is not None and f".{scope}." not in f".{name}.":
            continue
        if not name.startswith(tower) or "experts" in name.split(".")[:-1]:
            if named and (module is model.get_output_embeddings() or name.startswith(tower)):
                raise ConfigError(f"lora_config targets {name!r}, {_WHY_NOT[name.startswith(tower)]}")
            continue
        if not named and _does_more(module):
            continue
        if isinstance(module, Conv1D):
            shapes.append(LinearShape(name, module.nx, module.nf, fan_in_fan_out=True))
            continue
        if not hasattr(module, "in_features") or not hasattr(module, "out_features") or _does_more(module):
            raise ConfigError(
                f"lora_config targets {name!r}, a {type(module).__name__}; only linear layers can carry an adapter"
            )
        shapes.append(LinearShape(name, int(module.in_features), int(module.out_features)))
    if shapes := _loadable(shapes, model, named=named):
        return shapes
    targets, hint = lora_config.target_modules, ""
    # Parameters that hold several matrices: the experts of a mixture.
    fused = [name for name, parameter in model.named_parameters() if parameter.dim() == 3]
    fused = [name for name in fused if isinstance(targets, list | set) and name.rpartition(".")[2] in targets]
    if fused:
        hint = (
            f": {fused[0]} holds the experts of a mixture as one parameter, which cannot have an adapter; expected "
            "linear layers, for instance those of the attention (all-linear)"
        )
    elif scope is not None:
        hint = f" within lora_target_scope={scope!r}; expected a part of a module's path, for instance 'language_model'"
    raise ConfigError(f"lora_config.target_modules={targets!r} matches no layer of the model{hint}")


def _loadable(shapes: Sequence[LinearShape], model: Any, *, named: bool) -> list[LinearShape]:
    """Return the layers whose adapters PEFT can load, each with the way in which PEFT has to be told of it.

    PEFT translates adapters of older versions of some models. It takes every ``up_proj`` of a mixture for one of the
    experts that have been fused since, also in dense layers and shared experts, and renames the tensors of others: such
    layers are left out, or refused if they are ``named``.
    """
    from peft.utils import transformers_weight_conversion as peft

    config = imported_peft().LoraConfig(target_modules=[shape.name for shape in shapes])
    peft.convert_peft_config_for_transformers(config, model, None)
    shapes = [dataclasses.replace(shape, by_weight=shape.name not in config.target_modules) for shape in shapes]
    keys = {key: torch.empty((1, 1), device="meta") for shape in shapes for key in shape.keys}
    kept = peft.convert_peft_adapter_state_dict_for_transformers(model, for_peft(config, shapes), dict(keys)).keys()
    lost = [shape.name for shape in shapes if not kept >= set(shape.keys)]
    if named and lost:
        raise ConfigError(
            f"lora_config targets {lost[0]!r}, whose adapter PEFT would load under another name; leave it out "
            "(all-linear does)"
        )
    return [shape for shape in shapes if shape.name not in lost]


def _does_more(module: Any) -> bool:
    """Return whether a model's own kind of linear layer returns more than a product, as routers of mixtures do."""
    if not isinstance(module, torch.nn.Linear) or not type(module).__module__.startswith("transformers.models."):
        return False
    x = torch.linspace(-1, 1, module.in_features, dtype=module.weight.dtype, device=module.weight.device)[None]
    try:
        y = module(x)
    except Exception:  # one that needs to be told more
        return True
    product = torch.nn.functional.linear(x, module.weight, module.bias)
    return not isinstance(y, Tensor) or y.shape != product.shape or not torch.allclose(y, product)


def _without_patterns(config: Any, names: Sequence[str]) -> None:
    """Replace regular expressions by the names that they match, under a time limit, which PEFT does not have."""
    for key in ("target_modules", "exclude_modules"):
        pattern = getattr(config, key, None)
        if isinstance(pattern, str):
            setattr(config, key, _Exactly(full_matches(pattern, names, f"lora_config.{key}")))
    others = [getattr(config, "layers_pattern", None) or [], getattr(config, "modules_to_save", None) or []]
    for part in (part for other in others for part in ([other] if isinstance(other, str) else other)):
        if not str(part).replace("_", "").replace(".", "").isalnum():
            raise ConfigError(f"lora_config: expected names of modules in layers_pattern, found {str(part)[:80]!r}")


class _Exactly(frozenset[str]):
    """Whole names of modules; PEFT would also match the entries of a list as endings of names."""

    def __iter__(self) -> Iterator[str]:
        return iter(())


_WHY_NOT = {
    True: "an expert of a mixture: its rows are tokens of all agents mixed, so it is unknown which adapter a row "
    "needs; leave the experts out (all-linear does)",
    False: "the language-model head, which cannot have an adapter here; leave it out (all-linear does)",
}


# -- on disk: adapters are written as plain PEFT folders, and read from such folders ----------------------------------


WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
_CONFIG_BYTES = 10_000_000

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

Factors = list[tuple[Tensor, Tensor]]


def default_lora_config() -> Any:
    """Rank 16, alpha 32 on every linear layer."""
    return imported_peft().LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


LARGEST_RANK = 1 << 20
LEAST_ALPHA, MOST_ALPHA = 1e-30, 1e30
"""The scale of a slot is an fp32 number."""

_HARMLESS = {
    *("r", "lora_alpha", "use_rslora", "lora_dropout", "fan_in_fan_out", "alora_invocation_tokens"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("task_type", "peft_type", "peft_version", "auto_mapping", "inference_mode", "runtime_config"),
    *("base_model_name_or_path", "revision", "ensure_weight_tying", "megatron_core", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # settings of init_lora_weights
}
"""Options of a LoraConfig with which an adapter still is scale * B A, or which do nothing alone; all others, those of a
newer PEFT too, have to be unset."""
_STARTS = (True, False, "gaussian", "orthogonal", "eva")
"""Values of init_lora_weights that only initialise the factors; all others also change the weights of the base."""


def check_lora_config(config: Any) -> None:
    """Raise ConfigError, naming the option, for LoRA variants that the stacked layer does not compute."""
    # The text of PEFT's enum has the name of its class in front: PeftType.LORA.
    if getattr(config, "peft_type", None) is None or str(config.peft_type).split(".")[-1] != "LORA":
        raise ConfigError(f"lora_config must be a peft.LoraConfig, found {type(config).__name__}")
    for name in _options():
        value = getattr(config, name, None)
        if not _is_plain(name, value) or (name == "init_lora_weights" and value not in (True, "gaussian")):
            raise ConfigError(
                f"lora_config.{name}={shown(value)} is not supported: adapters are scale * B A alone, and start with B "
                "zero and A Kaiming-uniform or 'gaussian', from the agent's seed; leave it at PEFT's default"
            )
    rate = config.lora_dropout
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < 1:
        raise ConfigError(f"lora_config.lora_dropout must be a number from 0 to below 1, found {shown(rate)}")
    if wrong := _wrong_shape(config):
        raise ConfigError(f"lora_config.{wrong}")


def _options() -> list[str]:
    """Return the names of the options that the installed PEFT knows."""
    return [field.name for field in dataclasses.fields(imported_peft().LoraConfig)]


def _is_plain(name: str, value: Any, *, known: bool = True) -> bool:
    """Return whether an option leaves an adapter what plain LoRA is; ``known``: to the installed PEFT."""
    if name in ("bias", "init_lora_weights"):
        return value == "none" if name == "bias" else value in _STARTS
    # PEFT writes an unset option as None, False, an empty list or an empty mapping. A number or a text that it does not
    # know may be the default of a newer version.
    return name in _HARMLESS or not value or not (known or value is True or isinstance(value, dict | list))


def _wrong_shape(config: Any) -> str:
    """Return what is wrong with rank and scale, as ``r must be ..., found ...``; empty if nothing is."""
    if type(config.r) is not int or not 1 <= config.r <= LARGEST_RANK:
        return f"r must be an integer from 1 to {LARGEST_RANK}, found {shown(config.r)}"
    alpha = config.lora_alpha
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not LEAST_ALPHA <= alpha <= MOST_ALPHA:
        return f"lora_alpha must be a number from {LEAST_ALPHA:g} to {MOST_ALPHA:g}, found {shown(alpha)}"
    tokens = getattr(config, "alora_invocation_tokens", None)
    if tokens is not None and not (
        isinstance(tokens, list) and tokens and all(type(token) is int and token >= 0 for token in tokens)
    ):
        return f"alora_invocation_tokens must be a list of token ids, found {shown(tokens)}"
    if type(config.use_rslora) is not bool:
        return f"use_rslora must be true or false, found {shown(config.use_rslora)}"
    return ""


def lora_scaling(config: Any, rank: int | None = None) -> float:
    """Return the factor of the delta: alpha / r, or alpha / sqrt(r) with ``use_rslora`` (arXiv 2312.03732)."""
    rank = config.r if rank is None else rank
    return float(config.lora_alpha / (rank**0.5 if config.use_rslora else rank))


def write_adapter(folder: Path, layers: Sequence[LinearShape], factors: Factors, config: Any, base_name: str) -> None:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json``; PeftModel.from_pretrained loads the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = (zip(layer.keys, pair) for layer, pair in zip(layers, factors))
    write_tensors(folder / WEIGHTS_FILE, {key: factor for pair in pairs for key, factor in pair})
    written = for_peft(config, layers)
    written.base_model_name_or_path = base_name
    # As in what PEFT saves: whoever trains the adapter further asks for that.
    written.inference_mode = True
    written.save_pretrained(str(folder))


def for_peft(config: Any, layers: Sequence[LinearShape]) -> Any:
    """Return a copy of a ``peft.LoraConfig`` with which PEFT adapts these layers, and no others."""
    config = copy.deepcopy(config)
    # Full paths of this model's layers: a pattern might match other layers in another model.
    config.target_modules = [layer.name for layer in layers if not layer.by_weight] or None
    config.target_parameters = [f"{layer.name}.weight" for layer in layers if layer.by_weight] or None
    if config.target_parameters:
        config.lora_dropout = 0.0  # PEFT has none for parameters
    config.fan_in_fan_out = all(layer.fan_in_fan_out for layer in layers)  # PEFT warns if it differs from the layers
    return config


def read_config(folder: Path) -> Any:
    """Read the ``peft.LoraConfig`` of an adapter folder.

    Raises CheckpointError if it is missing or damaged, and for anything that PEFT would not compute as scale * B A:
    another method, a variant of LoRA, or a rank or scale that is not a number.
    """
    known = _options()
    check_links(folder, error=CheckpointError)
    try:
        check_file(folder / CONFIG_FILE, _CONFIG_BYTES, error=CheckpointError)
        fields = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        if (kind := fields.get("peft_type", "LORA")) != "LORA":
            raise CheckpointError(f"the adapter at {str(folder)!r} has peft_type {shown(kind)}; expected LORA")
        fields = with_layers_by_weight(fields)
        # Options that only matter during training (dropout, how the factors were initialised) are ignored.
        for name, value in fields.items():
            if not _is_plain(name, value, known=name in known):
                raise CheckpointError(
                    f"the adapter at {str(folder)!r} has {name}={shown(value)}, which is not supported: adapters are "
                    "scale * B A alone; merge it into the base with PEFT's merge_and_unload(), or train plain LoRA"
                )
        config = imported_peft().LoraConfig(**{name: value for name, value in fields.items() if name in known})
    except FileNotFoundError as error:
        raise CheckpointError(f"no PEFT adapter at {str(folder)!r}: {CONFIG_FILE} is missing") from error
    except (OSError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the adapter at {str(folder)!r} cannot be read: {CONFIG_FILE}: {error}") from error
    if wrong := _wrong_shape(config):
        raise CheckpointError(f"the adapter at {str(folder)!r} cannot be read: {CONFIG_FILE}: {wrong}")
    return config


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file; raises CheckpointError if it is missing, damaged or holds integers."""
    check_file(path, memory_bytes(), error=CheckpointError)
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
    """Write a safetensors file; raises WriteError if the disk is full or refuses."""
    try:
        save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, path, {"format": "pt"})
    except SafetensorError as error:  # how safetensors reports that the disk is full
        raise WriteError(f"{path} could not be written: {error}") from error


def read_adapter(
    folder: Path, layers: Sequence[LinearShape], *, finite: bool = True
) -> tuple[list[tuple[Tensor, Tensor]], Any]:
    """Read a PEFT adapter folder; returns its factors in the order of ``layers`` and its LoraConfig.

    Raises CheckpointError if files are missing or damaged, if the adapter was made for other layers or, with
    ``finite``, if it holds NaN or infinity.
    """
    config = read_config(folder)
    tensors, factors = read_tensors(folder / WEIGHTS_FILE), []
    for layer in layers:
        a, b = (tensors.pop(key, None) for key in layer.keys)
        shapes = [(config.r, layer.in_features), (layer.out_features, config.r)]
        if a is None or b is None or [a.shape, b.shape] != shapes:
            pair = "nothing" if a is None or b is None else f"{tuple(a.shape)} and {tuple(b.shape)}"
            raise CheckpointError(
                f"the adapter at {str(folder)!r} does not fit: {layer.name} expects A [r, {layer.in_features}] and "
                f"B [{layer.out_features}, r] of rank r={config.r!r}, found {pair}"
            )
        if finite and not (torch.isfinite(a).all() and torch.isfinite(b).all()):
            raise CheckpointError(f"the adapter at {str(folder)!r} has numbers that are not finite in {layer.name}")
        factors.append((a, b))
    if tensors:
        raise CheckpointError(
            f"the adapter at {str(folder)!r} has weights for {len(tensors)} layers that this agent does not adapt, for "
            f"instance {sorted(tensors)[0]!r}; create the agent with the adapter's own lora_config"
        )
    return factors, config
