"""The base sharded over processes: kept in step, set up by accelerate or by FSDP2 and ZeRO-3."""

import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from agilerl.checks.arguments import described
from agilerl.config.distributed import Sharding, sharding_by_stage, sharding_by_version, wanted_sharding
from agilerl.errors import ConfigError, LostProcessError, how_to_install
from agilerl.models.base import BaseModel
from agilerl.models.slots import AdapterStore, Route
from agilerl.processes import ALONE, Processes

_SIGNS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe", "timed out", "peer")
"""Words in torch's errors if another process is lost; those errors have no type of their own."""


class Lockstep:
    """Makes processes that each hold a part of the weights run the same number of forward passes.

    A pass gathers the weights of every layer from all processes, so no process can run one alone. Before each pass all
    processes announce what they are about to do, and a process that has nothing left to compute joins in with a dummy
    pass over a few tokens. All processes are always in the same phase (sampling, log-probs, an optimizer step), which
    ends with :meth:`catch_up`.
    """

    def __init__(self, processes: Processes, dummy: Callable[[bool], None]) -> None:
        """``dummy(train)`` runs a small forward pass, with ``train`` also a backward pass, without side effects."""
        self.processes, self._dummy = processes, dummy
        self._inside = self._in_dummy = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Surround a forward pass of the body; with gradients, the pass lasts until the end of :meth:`backward`."""
        if self._in_dummy:
            yield
            return
        self._check_whole()
        train = torch.is_grad_enabled()
        self._announce(train)
        # It stays so if the pass fails: the others wait in it, and the next call says so.
        self._inside = True
        with _reporting_lost_process():
            yield
        self._inside = train

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Surround the backward pass of the last forward pass."""
        with _reporting_lost_process():
            yield
        self._inside = False

    def catch_up(self) -> None:
        """Run dummy passes until all processes have reached this point."""
        self._check_whole()
        while (train := self._announce(None)) is not None:
            self._in_dummy = True
            try:
                with _reporting_lost_process():
                    self._dummy(train)
            finally:
                self._in_dummy = False

    def _announce(self, train: bool | None) -> bool | None:
        """Announce a pass, or with None that none is left; returns what any process is about to do, None: nothing."""
        passes = torch.tensor([float(train is False), float(train is True)])  # added up over the processes
        self.processes.add_(passes)
        return bool(passes[1]) if passes.any() else None

    def _check_whole(self) -> None:
        if self._inside:
            raise LostProcessError(
                f"process {self.processes.rank} failed in the middle of a pass through the sharded base, which the "
                "other processes cannot finish without it; if it ran out of memory, lower "
                "training.max_tokens_in_flight and training.max_rows_in_flight"
            )


@contextmanager
def _reporting_lost_process() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if any(sign in str(error).lower() for sign in _SIGNS):
            raise LostProcessError(
                "another process of this run is lost or does not answer; continue from the last checkpoint with "
                "agilerl resume, or under the launcher with --resume auto"
            ) from error
        raise


# -- accelerate: settings that come from an Accelerator, or from the environment of ``accelerate launch`` -------------


def sharding_of(accelerator: Any) -> Sharding:
    """Return the sharding of an ``accelerate.Accelerator``'s plugins; raises ConfigError for FSDP of version 1."""
    deepspeed = getattr(accelerator.state, "deepspeed_plugin", None)
    if deepspeed is not None:
        return sharding_by_stage(deepspeed.zero_stage)
    fsdp = getattr(accelerator.state, "fsdp_plugin", None)
    return "none" if fsdp is None else sharding_by_version(fsdp.fsdp_version)


def processes_of(accelerator: Any) -> Processes:
    """Return the processes of an ``accelerate.Accelerator``, in a group that carries tensors of CPUs as well.

    Raises ConfigError if accelerate does not know of the other processes of the group, or has dropped a plugin.
    """
    import torch.distributed as dist

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
        # NCCL carries tensors of GPUs alone, and what processes exchange as bytes is on CPUs.
        group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    return Processes.of(group)


def check_accelerator(accelerator: Any, device: str, dtype: str) -> None:
    """Raise ConfigError unless an accelerator fits a base on this device, of this type.

    ``dtype`` is named as torch does, for instance ``bfloat16``.
    """
    if any(getattr(accelerator, name, None) is None for name in ("num_processes", "device", "state")):
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
    """Let transformers load whole models, even if a DeepSpeed plugin of stage 3 makes it shard them."""
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


# -- sharding: by torch's FSDP2 or DeepSpeed's ZeRO-3 -----------------------------------------------------------------


def shard_base(base: BaseModel, store: AdapterStore, processes: Processes, sharding: Sharding) -> Lockstep | None:
    """Let each process hold a part of the base's layers; a layer is gathered when it is needed.

    Every process holds the embeddings, the last norm, the head and the adapters whole. Returns the lockstep of the
    forward passes; None with ``none`` and in a group of one process: nothing is sharded. Raises ConfigError for a base
    that cannot be sharded, and if DeepSpeed is missing.
    """
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
    ids = torch.zeros((1, 8), dtype=torch.int64, device=base.device)
    if not train:
        with torch.no_grad(), store.routed(None):
            base.hidden(ids)
        return
    # Some adapter has to take part, or there is no backward pass; whose it is does not matter.
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
    with _to_stderr():
        try:
            import deepspeed
        except ImportError as error:
            raise ConfigError(
                f"distributed.sharding=zero3 needs DeepSpeed: {how_to_install('deepspeed')}; or use fsdp2, which "
                "comes with torch"
            ) from error
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
