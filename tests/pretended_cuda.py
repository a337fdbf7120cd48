"""A CUDA device that does not exist: tensors say they are on ``cuda:0``, and are computed in ordinary memory.

What goes wrong on a GPU alone is mostly about places: tensors of two devices in one operation, an index on the wrong
one, a number that is read back for every token, a tensor handed to numpy. All of this happens here as well, with the
same errors, on a machine without a GPU; code that looks at ``device.type`` takes its CUDA branches. What this cannot
show is what kernels do: their rounding, their limits, their speed.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)
_aten = torch.ops.aten
_ACROSS = {_aten.copy_.default, _aten._to_copy.default}
"""What takes tensors of two devices."""
_INDEXING = {_aten.index.Tensor, _aten.index_put_.default, _aten.index_put.default, _aten._unsafe_index.Tensor}
"""What takes indices in the host's memory for a tensor on a device, but not the other way round."""
_READING = {
    *(_aten._local_scalar_dense.default, _aten.nonzero.default, _aten.masked_select.default, _aten.equal.default),
    *(_aten._unique2.default, _aten.unique_dim.default, _aten.bincount.default, _aten.repeat_interleave.Tensor),
}
"""What waits for the device, because the host has to know a number or a size."""
_TO_NUMPY = {Tensor.numpy, Tensor.__array__}


class OnCuda(Tensor):
    """A tensor of the device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return DEVICE

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        there, here = (
            [x for x in tensors if isinstance(x, OnCuda)],
            [x for x in tensors if not isinstance(x, OnCuda)],
        )
        if func in _INDEXING:
            if not isinstance(args[0], OnCuda):
                raise RuntimeError("indices should be either on cpu or on the same device as the indexed tensor (cpu)")
            here = [x for x in here if x is args[2]] if len(args) > 2 else []
            masks = [x for x in args[1] if isinstance(x, OnCuda) and x.dtype in (torch.bool, torch.uint8)]
            if masks:
                Device.reads["index by a mask"] += 1
        elif func in _ACROSS:
            if func is _aten.copy_.default and not isinstance(args[0], OnCuda):
                Device.reads["copy to the host"] += 1
            here = []
        if there and any(x.dim() for x in here):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found two, cuda:0 and cpu, in {func}"
            )
        if func in _READING:
            Device.reads[str(func)] += 1
        with torch._C._DisableTorchDispatch():
            found = func(*args, **kwargs)
        return tree_map(lambda x: _placed(x) if isinstance(x, Tensor) else x, found)


def _placed(tensor: Tensor) -> Tensor:
    return tensor if isinstance(tensor, OnCuda) else Tensor._make_subclass(OnCuda, tensor)


def _moved(tensor: Tensor, device: torch.device | None) -> Tensor:
    """Return a copy on another device, or the tensor if it is there."""
    if device is None or device.type == tensor.device.type:
        return tensor
    return _Copy.apply(tensor, device)  # type: ignore[no-any-return]


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device) -> Tensor:
        ctx.device = tensor.device
        if device.type == "cuda":
            return Tensor._make_subclass(OnCuda, tensor.detach().clone())
        Device.reads["copy to the host"] += 1
        with torch._C._DisableTorchDispatch():
            return tensor.detach().clone().as_subclass(Tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _moved(grad, ctx.device), None


class Device(TorchFunctionMode):
    """Inside, ``cuda`` is a device."""

    reads: ClassVar[Counter[str]] = Counter()
    """How often the host has waited for the device, by reason."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _TO_NUMPY and isinstance(args[0], OnCuda):
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first")
        if func in (Tensor.tolist,) and isinstance(args[0], OnCuda):
            self.reads["tolist"] += 1
            args = (_moved(args[0].detach(), torch.device("cpu")),)
        if func is Tensor.cpu:
            return _moved(args[0], torch.device("cpu"))
        if func is Tensor.cuda:
            return _moved(args[0], DEVICE)
        if func is Tensor.to:
            return _to(*args, **kwargs)
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if device is None:
            return func(*args, **kwargs)
        device = torch.device(device)
        if device.type != "cuda":
            return _moved(func(*args, **kwargs), device) if _is_of_tensor(args) else func(*args, **kwargs)
        gradient = kwargs.pop("requires_grad", False)
        kwargs["device"] = "cpu"
        if func in (torch.Generator,):
            raise RuntimeError("a generator on the device: no draw of ours may depend on it")
        if _is_of_tensor(args):  # it is there already, or will be: what is made of it has its place
            kwargs.pop("device")
        found = func(*args, **kwargs)
        return _placed(found).requires_grad_(gradient) if isinstance(found, Tensor) else found


def _is_of_tensor(args: Any) -> bool:
    return bool(args) and isinstance(args[0], OnCuda)


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    device, rest = kwargs.pop("device", None), []
    for value in args:
        if isinstance(value, Tensor):
            device = value.device
            kwargs["dtype"] = value.dtype
        elif isinstance(value, str | torch.device):
            device = torch.device(value)
        elif isinstance(value, torch.dtype):
            kwargs["dtype"] = value
        else:
            rest.append(value)
    found = _moved(tensor, None if device is None else torch.device(device))
    copy = kwargs.pop("copy", False) and found is tensor
    kwargs = {name: value for name, value in kwargs.items() if name == "dtype" and value is not None}
    found = Tensor.to(found, **kwargs) if kwargs else found
    return found.clone() if copy else found


def _inside(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that turns the mode on for itself: inside an operation, such as a backward pass, it is off."""

    def inside(*args: Any, **kwargs: Any) -> Any:
        with Device():
            return call(*args, **kwargs)

    return inside


@contextmanager
def pretended(patch: pytest.MonkeyPatch) -> Iterator[type[Device]]:
    """Inside, this machine has one CUDA device; yields what counts the times that the host waits for it."""
    properties = SimpleNamespace(total_memory=80 * 10**9, name="a device that does not exist", major=9, minor=0)
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: 1)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(torch.cuda, "get_device_properties", lambda device=None: properties)
    patch.setattr(torch.cuda, "get_device_name", lambda device=None: properties.name)
    patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    patch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    patch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: 0)
    patch.setattr(torch.cuda, "memory_allocated", lambda device=None: 0)
    patch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device=None: None)
    patch.setattr(torch.cuda, "get_rng_state", lambda device=None: torch.zeros(16, dtype=torch.uint8))
    patch.setattr(torch.cuda, "set_rng_state", lambda state, device=None: None)
    hooks = torch.autograd.graph.saved_tensors_hooks
    patch.setattr(torch.autograd.graph, "saved_tensors_hooks", lambda *both: hooks(*map(_inside, both)))
    patch.setattr(torch.autograd, "_engine_run_backward", _inside(torch.autograd._engine_run_backward))
    Device.reads.clear()
    # Else a module that moves would keep its parameters as objects, and with them their class.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    deterministic = torch.are_deterministic_algorithms_enabled()
    try:
        with Device():
            yield Device
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(False)
        torch.use_deterministic_algorithms(deterministic)
