"""How the processes of a run are started and divided; nothing here changes what the run computes."""

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from agilerl.checks.validation import Needs
from agilerl.config import Section
from agilerl.errors import ConfigError

_ADDRESS = ("MASTER_ADDR", "MASTER_PORT")
Sharding = Literal["none", "fsdp2", "zero3"]
"""How the processes hold the frozen base: each holds all of it, or torch or DeepSpeed shards it."""

_ON = ("1", "true", "yes")
_ZERO: tuple[Sharding, ...] = ("none", "none", "none", "zero3")
"""By stage: 1 and 2 shard gradients and optimizer states of trained weights, and a frozen base has neither."""


class DistributedConfig(Section):
    """Several processes, which all hold the agents and divide the work."""

    backend: Literal["auto", "none", "torch", "ray"] = "auto"
    """``auto``: the processes that torchrun or accelerate launch has started, else one; ``none``: one; ``torch``:
    only under such a launcher; ``ray``: Ray Train starts them."""
    sharding: Literal["auto", "none", "fsdp2", "zero3"] = "auto"
    """How the processes hold the frozen base: ``none``: each all of it; ``fsdp2`` (torch) or ``zero3`` (DeepSpeed):
    each a part of its layers; ``auto``: as accelerate launch is configured, else ``none``."""
    workers: Annotated[int, Field(ge=1), Needs("backend", ("ray",))] = 2
    """Processes that ``ray`` starts; elsewhere the launcher decides."""
    cpus_per_worker: Annotated[float, Field(gt=0), Needs("backend", ("ray",))] = 1.0
    """CPUs that ``ray`` reserves for each process."""
    gpus_per_worker: Annotated[float, Field(ge=0), Needs("backend", ("ray",))] = 0.0
    """GPUs that ``ray`` reserves for each process."""
    address: Annotated[str | None, Needs("backend", ("ray",))] = None
    """Ray cluster, for instance ``auto`` or ``ray://head:10001``; None starts one on this machine."""
    max_restarts: Annotated[int, Field(ge=0), Needs("backend", ("ray",))] = 3
    """Times that ``ray`` restarts from the last checkpoint after a process was lost."""
    timeout_seconds: Annotated[float, Field(gt=0)] = 1800.0
    """Longest time that one process waits for another before it counts as lost."""

    def base_sharding(self, environment: Mapping[str, str] = os.environ) -> Sharding:
        """Return how the base is held; raises ConfigError for settings of accelerate launch that are not supported."""
        return wanted_sharding(environment) if self.sharding == "auto" else self.sharding


def asked_for(config: DistributedConfig, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process works together with others that a launcher has started.

    Raises ConfigError if a launcher was asked for several processes and has started one, if its variables are not
    numbers or name no address, and for settings that need several processes if there is only one.
    """
    if config.backend == "ray":
        return False
    if config.backend != "none":
        check_launch(environment)
        if "RANK" in environment and "WORLD_SIZE" in environment:
            size, _ = (_number(name, environment[name]) for name in ("WORLD_SIZE", "RANK"))
            if size > 1:
                if lacking := " and ".join(name for name in _ADDRESS if not environment.get(name)):
                    # Each of them would train alone, and say nothing.
                    raise ConfigError(
                        f"expected {lacking}, where processes meet, beside RANK and WORLD_SIZE={size}, found none; "
                        "start them with torchrun, or set distributed.backend=none for one process"
                    )
                return True
        if config.backend == "torch" and "WORLD_SIZE" not in environment:
            raise ConfigError(
                "distributed.backend=torch needs a launcher that starts the processes, found none; use torchrun "
                "--nproc-per-node 2 -m agilerl train ..., or distributed.backend=auto"
            )
    if config.sharding in ("fsdp2", "zero3"):
        why = ", as distributed.backend=none says" if config.backend == "none" else ""
        raise ConfigError(
            f"distributed.sharding={config.sharding} needs several processes, found one{why}; start them with torchrun "
            "--nproc-per-node 2 -m agilerl train ..., or leave the setting out"
        )
    return False


def _number(name: str, value: str) -> int:
    """Return what a launcher has set; raises ConfigError for what no launcher sets."""
    # int() would also take signs, spaces, underscores and digits of other scripts.
    if not (value.isascii() and value.isdecimal()):
        raise ConfigError(f"expected a whole number in the variable {name}, found {value!r}; use torchrun, or unset it")
    return int(value)


def wanted_sharding(environment: Mapping[str, str] = os.environ) -> Sharding:
    """Return the sharding that ``accelerate launch`` is configured for; ``none`` if it was not used.

    Raises ConfigError for offloading, and FSDP of version 1, which cannot hold a frozen base beside adapters.
    """
    if environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() in _ON:
        _refuse_offload(environment.get("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none") not in ("none", ""))
        # accelerate assumes stage 2, and version 1 of FSDP, if it is told nothing.
        return sharding_by_stage(environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))
    if environment.get("ACCELERATE_USE_FSDP", "").lower() in _ON:
        _refuse_offload(environment.get("FSDP_OFFLOAD_PARAMS", "").lower() in _ON)
        return sharding_by_version(environment.get("FSDP_VERSION", "1"))
    return "none"


def _refuse_offload(asked: bool) -> None:
    if asked:
        raise ConfigError(
            "accelerate is configured to keep the base in the host's memory (offload_param_device, "
            "fsdp_offload_params), which is not supported; set it to none (false), or use more processes"
        )


def sharding_by_stage(stage: Any) -> Sharding:
    """Return what a stage of ZeRO divides of the base; raises ConfigError for any other."""
    if str(stage) not in ("0", "1", "2", "3"):
        raise ConfigError(f"expected the ZeRO stage 0, 1, 2 or 3 from accelerate, found {stage!r}")
    return _ZERO[int(stage)]


def sharding_by_version(version: Any) -> Sharding:
    """Return ``fsdp2``; raises ConfigError for any version of FSDP but 2."""
    if str(version) != "2":
        raise ConfigError(
            f"expected fsdp_version: 2 in the configuration of accelerate, found {version!r}: version 1 flattens "
            "weights, so adapters of several agents cannot be put on top of them"
        )
    return "fsdp2"


def check_launch(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if accelerate launch was asked for several processes but started only one."""
    # MASTER_PORT without WORLD_SIZE: prepared for several processes, started one.
    if "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_PORT" in environment and "WORLD_SIZE" not in environment:
        raise ConfigError(
            "accelerate launch was asked for several processes but started only one, as it does with --cpu; use "
            "torchrun --nproc-per-node 2 -m agilerl.cli train ..."
        )
