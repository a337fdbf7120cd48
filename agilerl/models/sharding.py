"""The frozen base sharded over the processes of a group, by torch's FSDP2 or DeepSpeed's ZeRO-3."""

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

_DUMMY_TOKENS = 8
"""Length of a dummy pass, which a process only runs so that the others can run theirs."""


def shard_base(base: BaseModel, store: AdapterStore, processes: Processes, sharding: Sharding) -> Lockstep | None:
    """Let each process hold a part of the base's layers; a layer is gathered when it is needed.

    Every process holds the embeddings, the last norm, the head and the adapters whole. Returns the lockstep of the
    forward passes; None with ``none`` and in a group of one, where nothing is sharded. Raises ConfigError for a base
    that cannot be sharded, and if DeepSpeed is missing.
    """
    if sharding not in get_args(Sharding):
        known = ", ".join(get_args(Sharding))
        raise ConfigError(f"expected one of {known} for the sharding of the base, found {sharding!r}")
    if sharding == "none" or processes.size == 1:
        return None
    quantised = next((name for name, p in base.model.named_parameters() if not p.is_floating_point()), None)
    if quantised is not None:
        raise ConfigError(
            f"distributed.sharding={sharding} needs floating-point weights, found {quantised} quantised; remove either "
            "the sharding or the quantisation"
        )
    lockstep = Lockstep(processes, partial(_dummy_pass, base, store))
    body = (_fsdp2 if sharding == "fsdp2" else _zero3)(base, processes)
    base.body = _InStep(body, lockstep)
    return lockstep


class _InStep(nn.Module):
    """The body of the base; all processes run its forward passes together."""

    def __init__(self, body: nn.Module, lockstep: Lockstep) -> None:
        super().__init__()
        self.body, self._lockstep = body, lockstep

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Map token ids to hidden states."""
        with self._lockstep.forward():
            return self.body(*args, **kwargs)


def _dummy_pass(base: BaseModel, store: AdapterStore, train: bool) -> None:
    """Run a dummy pass of :class:`Lockstep`; the gradient that it touches is restored."""
    ids = torch.zeros((1, _DUMMY_TOKENS), dtype=torch.int64, device=base.device)
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
    """Return the decoder layers of the base, which hold nearly all of its weights."""
    lists = [m for m in base.body.modules() if isinstance(m, nn.ModuleList)]
    longest = max(lists, key=len, default=None)
    if longest is None or len(longest) < base.num_layers:
        raise ConfigError(
            f"the layers of {type(base.model).__name__} are not in a ModuleList, so its weights cannot be sharded; "
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
    # The body itself has no sharded weights; as the root it lets FSDP gather a layer while the previous one computes.
    inside = {id(p) for p in layers.parameters()}
    fully_shard(base.body, mesh=mesh, ignored_params={p for p in base.body.parameters() if id(p) not in inside})
    return base.body


class _Layers(nn.Module):
    """A module that has only the layers as submodules, so that DeepSpeed shards nothing else; runs the whole body."""

    def __init__(self, body: nn.Module, layers: nn.ModuleList) -> None:
        super().__init__()
        self.layers = layers
        self._body = (body,)  # in a tuple, so that it is not a submodule

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
            f"DeepSpeed shards the base over all {dist.get_world_size()} processes, found islands of "
            f"{processes.size}; use distributed.sharding=fsdp2, or one island"
        )
    deepspeed.utils.logger.setLevel(logging.ERROR)
    # torch warns about a call that DeepSpeed makes in every forward pass.
    warnings.filterwarnings("ignore", message=".*all_gather_into_tensor.*", category=FutureWarning)
    os.environ.setdefault("LOCAL_RANK", "0")  # DeepSpeed insists on it, although the device is already chosen
    body = _Layers(base.body, _blocks(base))
    # A threshold of 0 shards small weights too: a layer is gathered as a whole anyway.
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    if base.dtype in _DTYPES:
        config[_DTYPES[base.dtype]] = {"enabled": True}
    try:
        with _to_stderr():
            deepspeed.initialize(model=body, config=config)
    except Exception as error:  # incompatible versions fail in many ways
        raise ConfigError(
            f"DeepSpeed {deepspeed.__version__} cannot shard the base with torch {torch.__version__}: "
            f"{type(error).__name__}: {error}; use DeepSpeed 0.19.8, which was tested, or distributed.sharding=fsdp2"
        ) from error
    return body


@contextmanager
def _to_stderr() -> Iterator[None]:
    """Send what DeepSpeed prints to standard error instead of a command's output, and silence its warnings."""
    logging.disable(logging.WARNING)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        logging.disable(logging.NOTSET)


_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
