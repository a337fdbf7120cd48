"""The configuration that a base model is loaded with: read, changed where the user wants it changed."""

from collections.abc import Mapping
from typing import Any

from agilerl.errors import ConfigError
from agilerl.validation import nearest

__all__ = ["auto_class", "model_config", "overridden_dtype"]


def overridden_dtype(dtype: str, overrides: dict[str, Any]) -> str:
    """Take the data type out of the overrides of a model's configuration, where AgileRL has it."""
    for name in ("dtype", "torch_dtype"):
        if name in overrides:
            wanted = str(overrides.pop(name)).removeprefix("torch.")
            if wanted not in ("auto", "float32", "bfloat16", "float16") or dtype not in ("auto", wanted):
                raise ConfigError(
                    f"the model's {name}={wanted!r} does not go with dtype={dtype!r}; expected auto, float32, bfloat16 "
                    "or float16, the same in both places"
                )
            dtype = wanted
    return dtype


def model_config(path: str, overrides: Mapping[str, Any]) -> Any:
    """Read a model's configuration and change settings that it has; raises ConfigError for one that it has not."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    text = config.get_text_config()
    for name, value in overrides.items():
        owner = text if hasattr(text, name) else config
        if name in ("auto_map", "quantization_config", "model_type") or not hasattr(owner, name):
            known = [key for key in text.to_dict() if not key.startswith("_")]
            raise ConfigError(
                f"a {config.model_type!r} model has no setting {name!r} to change; {nearest(name, known)}"
            )
        setattr(owner, name, value)
    return config


def auto_class(config: Any) -> Any:
    """Return transformers' class for causal language models, or the one for models that see as well."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    speaks = type(config) in AutoModelForCausalLM._model_mapping
    return AutoModelForCausalLM if speaks else AutoModelForImageTextToText
