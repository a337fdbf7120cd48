"""The base of a run: loaded, and checked against the machine and its tokenizer; or merged with an adapter."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from agilerl.algorithms.codec import warn_of_another_base
from agilerl.config.base_model import SharedOptions
from agilerl.config.run import RunConfig
from agilerl.envs.prompts import generation_prompt, text_ids
from agilerl.errors import AgileRLError, ConfigError, lacks_memory
from agilerl.models.adapters import for_peft, lora_layers, read_adapter, read_config
from agilerl.models.base import check_device, is_of_hub, load_base, load_tokenizer, resolve_model, tokenizer_fingerprint
from agilerl.models.model_config import model_config
from agilerl.models.quantised import imported_peft
from agilerl.planning.footprint import bank_bytes
from agilerl.runtime import Runtime
from agilerl.safety.addresses import is_out_of_reach
from agilerl.text.contract import contract_of, with_ends
from agilerl.training.memory import adapter_numbers, adapter_slots, check_memory, check_weights
from agilerl.training.resolved import Resolved, resolve

PartT = TypeVar("PartT")


def load_runtime(resolved: Resolved) -> Runtime:
    """Load the base with its tokenizer, and make the adapter bank; raises ConfigError if one does not fit."""
    config, options = resolved.config, resolved.options
    t, network, name = config.training, config.network, config.network.pretrained_model_name_or_path
    check_device(t.device, "training.device")
    # CPU kernels cut their sums by the number of threads, so the last bits depend on it.
    torch.set_num_threads(t.threads)
    path = resolve_model(name)
    # By the sizes of its files: a process that loads too much is killed without a word.
    check_weights(path, t.device, options.quantization_config)
    _spare_retries(name)
    tokenizer = _guarded(name, lambda: load_tokenizer(name, **network.of_tokenizer))
    base = _guarded(name, lambda: load_base(name, dtype=t.dtype, device=t.device, options=options))
    # Padding is looked up like any other token, wherever its id lies.
    if max(len(tokenizer), tokenizer.pad_token_id + 1) > base.model.get_input_embeddings().weight.shape[0]:
        raise ConfigError(
            f"the tokenizer of {name!r} has {len(tokenizer)} tokens, the model {base.vocabulary_size}; use the "
            "tokenizer that belongs to the model, or resize the model's embeddings"
        )
    tokens = network.lora_config.alora_invocation_tokens
    if isinstance(tokens, str):
        tokens = generation_prompt(tokenizer) if tokens == "generation_prompt" else text_ids(tokenizer, tokens)
    given = {**network.lora_config.model_dump(), "alora_invocation_tokens": tokens}
    settings = imported_peft().LoraConfig(**given, task_type="CAUSAL_LM")
    layers = lora_layers(base.model, settings, options.lora_target_scope)
    numbers, slots = adapter_numbers(config.largest_rank, layers), adapter_slots(network, resolved.algorithm)
    adapters = bank_bytes(numbers, t.pop_size, slots)
    check_memory({"base": base.weight_bytes, "adapters": adapters}, t.device)
    return Runtime(
        base,
        lora_config=settings,
        tokenizer=tokenizer,
        seed=t.seed,
        max_tokens=t.max_tokens_in_flight,
        max_rows=t.max_rows_in_flight,
        options=options,
    )


def _guarded(name: str, load: Callable[[], PartT]) -> PartT:
    """Load something; turn whatever a damaged file raises into a ConfigError with its reason."""
    try:
        return load()
    except AgileRLError:
        raise
    except Exception as error:
        # Too little memory is no fault of the files.
        if lacks_memory(error):
            raise
        raise ConfigError(f"cannot load the model {name!r}: {type(error).__name__}: {error}") from error


def _spare_retries(name: str) -> None:
    """Make the hub client offline if a name needs the hub and it is out of reach: else it would retry for a minute."""
    from huggingface_hub import constants

    if is_of_hub(name) and is_out_of_reach():
        constants.HF_HUB_OFFLINE = True


def merged_model(folder: Path, config: RunConfig, *, dtype: str = "auto") -> tuple[Any, Any]:
    """Return the base of a configuration with the adapter in a PEFT folder merged into it, and its tokenizer.

    W + scale B A is computed in fp32, whatever the run quantised, and rounded to ``dtype``; ``auto`` is the type of the
    base's files. Raises CheckpointError if the adapter does not fit the base, and ConfigError as :func:`load_base`.
    """
    network, options, peft = config.network, resolve(config).options, imported_peft()
    name = network.pretrained_model_name_or_path
    path = resolve_model(name)
    check_weights(path, "cpu", None)
    _spare_retries(name)
    # Without the run's overrides: the question is whether the files themselves are quantised.
    files = model_config(path, {})
    if getattr(files, "quantization_config", None) is not None:
        raise ConfigError(
            f"the files of {name!r} are quantised, and merging rounds the adapter away; name the base that they were "
            "made from: network.pretrained_model_name_or_path=..."
        )
    settings = read_config(folder)
    if settings.alora_invocation_tokens:
        raise ConfigError(
            f"the adapter in {str(folder)!r} is activated (alora_invocation_tokens): it does not act on prompts, so it "
            "cannot be merged into the weights; load it with PEFT, or use agilerl chat and agilerl eval"
        )
    # All that changes the function; the merged model's config.json has it.
    overrides = {key: value for key, value in (options.config_overrides or {}).items() if "dtype" not in key}
    changed = SharedOptions(config_overrides=overrides or None)
    base = _guarded(name, lambda: load_base(name, dtype="float32", options=changed))
    tokenizer = _guarded(name, lambda: load_tokenizer(name, **network.of_tokenizer))
    scope = options.lora_target_scope
    layers = lora_layers(base.model, settings, scope)
    read_adapter(folder, layers)  # every layer is there, and nothing else
    loaded = {"weights": base.fingerprint, "tokenizer": tokenizer_fingerprint(tokenizer), "config_overrides": overrides}
    warn_of_another_base(folder, base, loaded)
    ends = contract_of(with_ends(tokenizer, base.eos_token_ids)).ends
    if set(ends) != set(base.eos_token_ids):
        base.model.generation_config.eos_token_id = list(ends)  # or what was trained would not stop elsewhere
    kind = files.dtype or "float32" if dtype == "auto" else dtype
    # safe_merge: PEFT raises if a merged weight is not finite, rather than hand it on.
    adapted = peft.PeftModel.from_pretrained(base.model, str(folder), config=for_peft(settings, layers))
    merged = adapted.merge_and_unload(safe_merge=True)
    return merged.to(getattr(torch, str(kind).removeprefix("torch."))), tokenizer
