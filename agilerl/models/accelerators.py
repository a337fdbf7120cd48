"""Settings of a run that come from an ``accelerate.Accelerator`` or from the environment of ``accelerate launch``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from agilerl.arguments import described
from agilerl.config.distributed import Sharding, sharding_by_stage, sharding_by_version, wanted_sharding
from agilerl.errors import ConfigError

if TYPE_CHECKING:
    from agilerl.processes import Processes


def sharding_of(accelerator: Any) -> Sharding:
    """Return the sharding of an ``accelerate.Accelerator``'s plugins; raises ConfigError for FSDP of version 1."""
    deepspeed = getattr(accelerator.state, "deepspeed_plugin", None)
    if deepspeed is not None:
        return sharding_by_stage(deepspeed.zero_stage)
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    return "none" if fsdp is None else sharding_by_version(fsdp.fsdp_version)


def processes_of(accelerator: Any) -> "Processes":
    """Return the processes of an ``accelerate.Accelerator``, in a group that carries tensors of CPUs as well.

    Raises ConfigError if accelerate does not know of the other processes of the group, or has dropped a plugin.
    """
    import torch.distributed as dist

    from agilerl.processes import ALONE, Processes

    world = dist.get_world_size() if dist.is_initialized() else 1
    if world != accelerator.num_processes:
        raise ConfigError(
            f"torch.distributed has {world} processes, but the accelerator was made for "
            f"{accelerator.num_processes}; on CPUs make it as accelerate.Accelerator(cpu=True, kwargs_handlers="
            '[accelerate.InitProcessGroupKwargs(backend="gloo")])'
        )
    if (wanted := wanted_sharding()) != "none" and sharding_of(accelerator) == "none":
        raise ConfigError(
            f"accelerate launch is configured for {wanted}, which the accelerator has dropped, as it does on CPUs; "
            "give it a plugin without cpu=True, or use agilerl train with distributed.sharding"
        )
    if world == 1:
        return ALONE
    group: Any = dist.group.WORLD
    if "cpu:gloo" not in dist.get_backend_config(group):
        group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    return Processes.of(group)


def check_accelerator(accelerator: Any, device: str, dtype: str) -> None:
    """Raise ConfigError unless an accelerator fits a base on this device, of this type.

    ``dtype`` is named as torch does, for instance ``bfloat16``.
    """
    kinds = [getattr(accelerator, name, None) for name in ("num_processes", "device", "state")]
    if any(kind is None for kind in kinds):
        raise ConfigError(f"accelerator must be an accelerate.Accelerator, found {described(accelerator)}")
    if str(accelerator.device).partition(":")[0] != device.partition(":")[0]:
        raise ConfigError(
            f"the accelerator uses {accelerator.device}, but the base model is on {device}; give the agent the same "
            f"device, or make the accelerator with cpu={device == 'cpu'}"
        )
    if accelerator.gradient_accumulation_steps > 1:
        raise ConfigError(
            f"gradient_accumulation_steps={accelerator.gradient_accumulation_steps} of the accelerator has no effect "
            "here: batch_size rows make an optimizer step, in forwards of micro_batch_size_per_gpu rows; leave it at 1"
        )
    wanted = {"bf16": "bfloat16", "fp16": "float16"}.get(accelerator.mixed_precision, dtype)
    if wanted != dtype:
        raise ConfigError(
            f"the accelerator's mixed_precision={accelerator.mixed_precision!r} expects a base in {wanted}, found "
            f"{dtype}; load the model with dtype={wanted} (adapters stay in float32), or use mixed_precision='no'"
        )


@contextmanager
def loading_whole(accelerator: Any) -> Iterator[None]:
    """Let transformers load whole models, even if a DeepSpeed plugin of stage 3 has told it to shard them."""
    plugin = getattr(getattr(accelerator, "state", None), "deepspeed_plugin", None)
    if plugin is None:
        yield
        return
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
    try:
        yield
    finally:
        plugin.set_deepspeed_weakref()


def check_whole(model: Any) -> None:
    """Raise ConfigError for a model that transformers has sharded while loading it."""
    if any(hasattr(parameter, "ds_id") for parameter in getattr(model, "parameters", tuple)()):
        raise ConfigError(
            "actor_network was sharded by transformers when it was loaded, because of a DeepSpeed plugin; load it "
            "before the accelerator is made, or give model_name instead: agilerl shards the base itself"
        )
