"""Which linear layers of a base carry adapters."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

from agilerl.bounds import full_matches
from agilerl.errors import ConfigError
from agilerl.models.quantised import imported_peft
from agilerl.models.slots import LinearShape


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

    config = copy.deepcopy(lora_config)
    if config.target_modules is None:
        config.target_modules = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(
            model.config.model_type, "all-linear"
        )
    named = config.target_modules != "all-linear"
    config = _maybe_include_all_linear_layers(config, model)
    _without_patterns(config, [name for name, _ in model.named_modules()])
    tower = _body_path(model)
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
        if not hasattr(module, "in_features") or not hasattr(module, "out_features"):
            raise ConfigError(
                f"lora_config targets {name!r}, a {type(module).__name__}; only linear layers can carry an adapter"
            )
        shapes.append(LinearShape(name, int(module.in_features), int(module.out_features)))
    if not shapes:
        raise ConfigError(_nothing(model, lora_config, scope))
    return shapes


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


def _body_path(model: Any) -> str:
    """Return the prefix of the names of the text tower's modules."""
    body = model.get_decoder()
    path = next((name for name, module in model.named_modules() if module is body), "")
    return f"{path}." if path else ""


def _nothing(model: Any, lora_config: Any, scope: str | None) -> str:
    """Return the message for targets that match nothing, with a suggestion."""
    within = "" if scope is None else f" within lora_target_scope={scope!r}"
    text = f"lora_config.target_modules={lora_config.target_modules!r} matches no layer of the model{within}"
    targets = lora_config.target_modules
    fused = [name for name in _fused(model) if isinstance(targets, list | set) and name.rpartition(".")[2] in targets]
    if fused:
        return (
            f"{text}: {fused[0]} holds the experts of a mixture as one parameter, which cannot have an adapter; "
            "expected linear layers, for instance those of the attention (all-linear)"
        )
    if scope is not None:
        return f"{text}; expected a part of a module's path, for instance 'language_model'"
    return text


def _fused(model: nn.Module) -> Iterator[str]:
    """Yield the names of parameters that hold several matrices."""
    return (name for name, parameter in model.named_parameters() if parameter.dim() == 3)
