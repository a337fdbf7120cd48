"""The frozen base divided among the processes of a group: by FSDP2 of torch, or by ZeRO-3 of DeepSpeed."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn

from agilerl.config.distributed import Sharding
from agilerl.errors import ConfigError, how_to_install
from agilerl.models.base import BaseModel
from agilerl.models.lockstep import Lockstep
from agilerl.models.slots import AdapterStore, Route
from agilerl.processes import Processes

__all__ = ["shard_base"]

_COMPANY_TOKENS = 8
"""Length of the pass that a process makes for the others' sake."""


def shard_base(base: BaseModel, store: AdapterStore, processes: Processes, sharding: Sharding) -> Lockstep | None:
    """Let each process keep a part of the base's layers, which they gather when they need it.

    The embeddings, the last norm and the head stay whole everywhere, and so do the adapters. Returns what keeps the
    forward passes in step; None with ``none`` and in a group of one, where every process keeps all of the base. Raises
    ConfigError for a base that cannot be divided, and where DeepSpeed is missing.
    """
    if sharding not in get_args(Sharding):
        known = ", ".join(get_args(Sharding))
        raise ConfigError(f"expected one of {known} for the sharding of the base, found {sharding!r}")
    if sharding == "none" or processes.size == 1:
        return None
    quantised = next((name for name, p in base.model.named_parameters() if not p.is_floating_point()), None)
    if quantised is not None:
        raise ConfigError(
            f"distributed.sharding={sharding} divides weights of floating-point types, found {quantised} quantised; "
            "leave one of the two out"
        )
    lockstep = Lockstep(processes, partial(_company, base, store))
    body = (_fsdp2 if sharding == "fsdp2" else _zero3)(base, processes)
    base.body = _InStep(body, lockstep)
    return lockstep


class _InStep(nn.Module):
    """The body of the base, whose forward passes all processes make together."""

    def __init__(self, body: nn.Module, lockstep: Lockstep) -> None:
        super().__init__()
        self.body, self._lockstep = body, lockstep

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Map token ids to hidden states."""
        with self._lockstep.forward():
            return self.body(*args, **kwargs)


def _company(base: BaseModel, store: AdapterStore, train: bool) -> None:
    """Make the small pass of :class:`Lockstep`: what it adds to a gradient is taken back."""
    ids = torch.zeros((1, _COMPANY_TOKENS), dtype=torch.int64, device=base.device)
    if not train:
        with torch.no_grad(), store.routed(None):
            base.hidden(ids)
        return
    before = store.grad[0].clone()
    with torch.enable_grad(), store.routed(Route((0,), (1,))):
        hidden = base.hidden(ids)
    hidden.backward(torch.zeros_like(hidden))  # type: ignore[no-untyped-call]
    store.grad[0] = before


def _blocks(base: BaseModel) -> nn.ModuleList:
    """Return the layers of the base, nearly all of its weights."""
    lists = [m for m in base.body.modules() if isinstance(m, nn.ModuleList)]
    longest = max(lists, key=len, default=None)
    if longest is None or len(longest) < base.num_layers:
        raise ConfigError(
            f"the layers of {type(base.model).__name__} stand in no list, so its weights cannot be divided; "
            "use distributed.sharding=none"
        )
    return longest


def _fsdp2(base: BaseModel, processes: Processes) -> nn.Module:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    mesh = DeviceMesh.from_group(processes.group, base.device.type)
    layers = _blocks(base)
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    # The body itself holds no weights: as the root it lets a layer be gathered while the one before computes.
    inside = {id(p) for p in layers.parameters()}
    fully_shard(base.body, mesh=mesh, ignored_params={p for p in base.body.parameters() if id(p) not in inside})
    return base.body


class _Layers(nn.Module):
    """The layers as a model of their own, so that DeepSpeed divides them and nothing else; computes the whole body."""

    def __init__(self, body: nn.Module, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        self._body = (body,)  # in a tuple: no submodule

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Map token ids to hidden states."""
        return self._body[0](*args, **kwargs)  # type: ignore[no-any-return]


def _zero3(base: BaseModel, processes: Processes) -> nn.Module:
    import torch.distributed as dist

    with _to_stderr():
        try:
            import deepspeed
        except ImportError as error:
            raise ConfigError(
                f"distributed.sharding=zero3 needs DeepSpeed: {how_to_install('deepspeed')}; or use fsdp2, which "
                "comes with torch"
            ) from error
    if processes.size != dist.get_world_size():
        raise ConfigError(
            f"DeepSpeed divides the base among all {dist.get_world_size()} processes, found islands of "
            f"{processes.size}; use distributed.sharding=fsdp2, or one island"
        )
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # Said by torch of a call that DeepSpeed makes in every forward pass.
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*", category=FutureWarning)
    os.environ.setdefault("LOCAL_RANK", "0")  # only asked for; the device is chosen already
    body = _Layers(base.body, _blocks(base))
    # Small weights too: nothing but the layers is here, and a layer is gathered as a whole anyway.
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    if base.dtype in _DTYPES:
        config[_DTYPES[base.dtype]] = {"enabled": True}
    try:
        with _to_stderr():
            deepspeed.initialize(model=body, config=config)
    except Exception as error:  # of any kind: versions that do not go together fail in many ways
        raise ConfigError(
            f"DeepSpeed {deepspeed.__version__} cannot divide the base with torch {torch.__version__}: "
            f"{type(error).__name__}: {error}; it was tried with DeepSpeed 0.19.8, and fsdp2 does the same without it"
        ) from error
    return body


@contextmanager
def _to_stderr() -> Iterator[None]:
    """Keep what DeepSpeed prints out of a command's output, and its warnings of the machine to itself."""
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(logging.NOTSET)


_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
