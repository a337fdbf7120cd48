"""The base of a run: loaded, and checked against the machine and its tokenizer; or merged with an adapter."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from agilerl.algorithms.codec import warn_of_another_base
from agilerl.config.base_model import SharedOptions
from agilerl.config.run import RunConfig
from agilerl.envs.prompts import generation_prompt
from agilerl.errors import AgileRLError, CheckpointError, ConfigError, lacks_memory
from agilerl.models.adapters import (
    WEIGHTS_FILE,
    for_peft,
    lora_layers,
    lora_scaling,
    read_adapter,
    read_config,
    read_tensors,
)
from agilerl.models.base import (
    BaseModel,
    check_device,
    is_of_hub,
    load_base,
    load_tokenizer,
    resolve_model,
    tokenizer_fingerprint,
)
from agilerl.models.lora import attach, detach
from agilerl.models.model_config import load_whole, loading, model_config
from agilerl.models.quantised import imported_peft
from agilerl.models.slots import AdapterStore, LinearShape, Route
from agilerl.planning.footprint import bank_bytes
from agilerl.runtime import Runtime
from agilerl.safety.addresses import is_out_of_reach
from agilerl.text.contract import contract_of, text_ids, with_ends
from agilerl.training.memory import adapter_numbers, adapter_slots, check_memory, check_weights
from agilerl.training.resolved import Resolved, resolve

PartT = TypeVar("PartT")


def load_runtime(resolved: Resolved, device: str | None = None) -> Runtime:
    """Load the base with its tokenizer, and make the adapter bank; raises ConfigError if one does not fit.

    ``device``: that of this process, None for ``training.device``.
    """
    config, options = resolved.config, resolved.options
    t, network, name = config.training, config.network, config.network.pretrained_model_name_or_path
    device = t.device if device is None else device
    check_device(device, "training.device")
    # CPU kernels cut their sums by the number of threads, so the last bits depend on it.
    torch.set_num_threads(t.threads)
    path = resolve_model(name)
    # By the sizes of its files: a process that loads too much is killed without a word.
    check_weights(path, device, options.quantization_config)
    _spare_retries(name)
    tokenizer = _guarded(name, lambda: load_tokenizer(name, **network.of_tokenizer))
    base = _guarded(name, lambda: load_base(name, dtype=t.dtype, device=device, options=options))
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
    check_memory({"base": base.weight_bytes, "adapters": adapters}, device)
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
    # What changes the function; the merged model's config.json has it.
    changed = _of_function(options)
    base = _guarded(name, lambda: load_base(name, dtype="float32", options=SharedOptions(**changed)))
    tokenizer = _guarded(name, lambda: load_tokenizer(name, **network.of_tokenizer))
    loaded = {
        "weights": base.fingerprint,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "config_overrides": {},
        **changed,
    }
    warn_of_another_base(folder, base, loaded)
    layers, expected = _trained(folder, base, options.lora_target_scope)
    ends = contract_of(with_ends(tokenizer, base.eos_token_ids)).ends
    if set(ends) != set(base.eos_token_ids):
        base.model.generation_config.eos_token_id = list(ends)  # or what was trained would not stop elsewhere
    kind = files.dtype or "float32" if dtype == "auto" else dtype
    # safe_merge: PEFT raises if a merged weight is not finite, rather than hand it on.
    adapted = peft.PeftModel.from_pretrained(base.model, str(folder), config=for_peft(settings, layers))
    merged = adapted.merge_and_unload(safe_merge=True)
    _check_same(_logits(merged), expected, f"PEFT merged {str(folder)!r} into something else than what was trained")
    return merged.to(getattr(torch, str(kind).removeprefix("torch."))), tokenizer


def _of_function(options: SharedOptions) -> dict[str, Any]:
    """Return the options that change what a base computes, and not how."""
    overrides = {key: value for key, value in (options.config_overrides or {}).items() if "dtype" not in key}
    return {"config_overrides": overrides} if overrides else {}


_PROMPT = torch.arange(1, 17)[None]
"""Tokens on which what leaves is compared with what was trained."""


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    head = model.get_output_embeddings().weight
    logits: Tensor = model(input_ids=_PROMPT.to(head.device) % head.shape[0], use_cache=False).logits
    return logits.float()


@torch.no_grad()
def _slot_logits(base: BaseModel, store: AdapterStore, slot: int) -> Tensor:
    with store.routed(Route((slot,), None)):
        return base.logits(base.hidden(_PROMPT.to(base.device) % base.vocabulary_size)[0])[None]


def _trained(folder: Path, base: BaseModel, scope: str | None) -> tuple[list[LinearShape], Tensor]:
    """Return the layers of the adapter in a PEFT folder, and the logits of the policy that was trained.

    Raises CheckpointError if a layer is missing there, or one too many.
    """
    settings = read_config(folder)
    layers = lora_layers(base.model, settings, scope)
    factors, _ = read_adapter(folder, layers)
    store = AdapterStore(layers, max_rank=settings.r)
    slot = store.allocate(settings.r, lora_scaling(settings))
    store.load_adapter(slot, factors)
    attach(base.model, store)
    try:
        return layers, _slot_logits(base, store, slot)
    finally:
        detach(base.model, store)


def _check_same(logits: Tensor, expected: Tensor, wrong: str) -> None:
    """Raise CheckpointError if logits are not those that are expected, up to rounding."""
    apart = float((logits - expected).abs().max() / expected.abs().max().clamp(min=1e-6))
    if not apart < _ROUNDING:  # not >=, which is False for NaN
        raise CheckpointError(f"{wrong}: the logits of {_PROMPT.shape[1]} tokens differ by {apart:.2g} of the largest")


_ROUNDING = 1e-3


def check_exported(folder: Path, name: str, options: SharedOptions) -> None:
    """Raise CheckpointError unless plain PEFT computes what was trained from an adapter folder, with all its tensors.

    ``name`` is that of the base, ``options`` are those of its run. Raises ConfigError if the base is not on this
    machine; nothing is downloaded.
    """
    from huggingface_hub import constants

    if read_config(folder).alora_invocation_tokens:
        return  # acts on a part of a prompt alone
    offline = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = True
    try:
        check_weights(resolve_model(name), "cpu", None)
        base = _guarded(name, lambda: load_base(name, options=SharedOptions(**_of_function(options))))
    finally:
        constants.HF_HUB_OFFLINE = offline
    _, expected = _trained(folder, base, options.lora_target_scope)
    _check_loaded(folder, base.model, expected)


def check_elite(folder: Path, runtime: Runtime, slot: int) -> None:
    """Raise CheckpointError as :func:`check_exported` does, for an adapter that was just written from a slot.

    Not for bases whose forwards agree only roughly, or that other processes hold a part of.
    """
    base, store = runtime.base, runtime.store
    if not base.decodes_exactly or runtime.processes.size > 1 or runtime.invocation:
        return
    expected = _slot_logits(base, store, slot)
    # The run's weights with modules of their own, which PEFT changes.
    shared = {id(part): part for part in (store, *base.model.parameters(), *base.model.buffers())}
    model = copy.deepcopy(base.model, shared)
    detach(model, store)
    _check_loaded(folder, model, expected)


def _check_loaded(folder: Path, model: Any, expected: Tensor) -> None:
    """Raise CheckpointError unless PEFT computes these logits from an adapter folder, with all its tensors."""
    peft, written = imported_peft(), set(read_tensors(folder / WEIGHTS_FILE))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it warns of is an error here
        model = peft.PeftModel.from_pretrained(model, str(folder)).eval()
    advice = "agilerl merge writes one model, which needs no PEFT"
    if unused := sorted(written - set(peft.get_peft_model_state_dict(model, save_embedding_layers=False))):
        raise CheckpointError(
            f"PEFT does not use {len(unused)} tensors of {str(folder)!r}, such as {unused[0]}; {advice}"
        )
    _check_same(
        _logits(model), expected, f"PEFT computes something else from {str(folder)!r} than was trained; {advice}"
    )


def check_merged(folder: Path, model: Any) -> None:
    """Raise CheckpointError unless plain transformers loads a merged model from its files as it was written."""
    with loading("the merged model", str(folder), "the files that were just written"):
        read = load_whole(folder, str(folder), model_config(str(folder), {}), 0.125, dtype=model.dtype)
    _check_same(_logits(read), _logits(model), f"transformers reads another model from {str(folder)!r} than was merged")
