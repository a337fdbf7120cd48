"""The base model of a run: found, loaded, and checked against the machine and its tokenizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from agilerl.addresses import is_out_of_reach
from agilerl.config.base_model import NetworkConfig
from agilerl.errors import AgileRLError, ConfigError
from agilerl.models.base import EMBEDDED, load_base, load_tokenizer, resolve_model
from agilerl.models.quantised import imported_peft
from agilerl.models.targets import lora_layers
from agilerl.runtime import Runtime
from agilerl.training.memory import adapter_bytes, check_memory, check_weights
from agilerl.training.resolved import Resolved

Loaded = TypeVar("Loaded")


def load_runtime(resolved: Resolved) -> Runtime:
    """Load the base with its tokenizer according to the options, and make the adapter bank.

    Raises ConfigError for a model that is missing, damaged, too large, or does not fit its tokenizer.
    """
    config, options = resolved.config, resolved.options
    t, network, name = config.training, config.network, config.network.pretrained_model_name_or_path
    path = resolve_model(name)
    check_weights(path, t.device, options.quantization_config)
    _spare_retries(name)
    tokenizer = _guarded(name, lambda: load_tokenizer(name, **network.padding))
    base = _guarded(name, lambda: load_base(name, dtype=t.dtype, device=t.device, options=options))
    if max(len(tokenizer), tokenizer.pad_token_id + 1) > base.model.get_input_embeddings().weight.shape[0]:
        raise ConfigError(
            f"the tokenizer of {name!r} has {len(tokenizer)} tokens, the model {base.vocabulary_size}; use the "
            "tokenizer that belongs to the model, or resize the model's embeddings"
        )
    settings = _lora(network)
    layers = lora_layers(base.model, settings, options.lora_target_scope)
    sizes = {
        "base": base.weight_bytes,
        "adapters": adapter_bytes(config, resolved.algorithm, layers),
    }
    check_memory(sizes, t.device)
    return Runtime(
        base,
        lora_config=settings,
        tokenizer=tokenizer,
        seed=t.seed,
        max_tokens=t.max_tokens_in_flight,
        max_rows=t.max_rows_in_flight,
        options=options,
    )


def _guarded(name: str, load: Callable[[], Loaded]) -> Loaded:
    """Load something; turn whatever a damaged file raises into a ConfigError with its reason."""
    try:
        return load()
    except AgileRLError:
        raise
    except Exception as error:
        raise ConfigError(f"cannot load the model {name!r}: {type(error).__name__}: {error}") from error


def _lora(config: NetworkConfig) -> Any:
    return imported_peft().LoraConfig(**config.lora_config.model_dump(), task_type="CAUSAL_LM")


def _spare_retries(name: str) -> None:
    """Put the hub client into offline mode if a model's name needs the hub and it does not answer.

    Otherwise it would retry for a minute; offline it uses its cache or fails at once.
    """
    from huggingface_hub import constants

    if name != EMBEDDED and not Path(name).expanduser().exists() and is_out_of_reach():
        constants.HF_HUB_OFFLINE = True
