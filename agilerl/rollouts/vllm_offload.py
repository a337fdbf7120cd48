"""The trainer's base out of the way while something else needs the GPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

__all__ = ["OffloadedBase"]


class OffloadedBase:
    """A frozen model that can leave its device and come back.

    The weights never change, so the host keeps a copy from the first time on, and leaving costs no transfer.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._host: list[Tensor] | None = None

    @contextmanager
    def away(self) -> Iterator[None]:
        """Keep parameters and buffers on the host while the context is open; they come back bit for bit."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        devices = [tensor.device for tensor in tensors]
        if self._host is None:
            self._host = [_host_copy(tensor) for tensor in tensors]
        for tensor, copy in zip(tensors, self._host, strict=True):
            tensor.data = copy
        _free()
        try:
            yield
        finally:
            for tensor, device in zip(tensors, devices, strict=True):
                # A copy also where the device is the host's: what is trained with is never the copy that is kept.
                tensor.data = tensor.data.to(device, copy=True, non_blocking=True)


def _host_copy(tensor: Tensor) -> Tensor:
    copy = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return copy.copy_(tensor.detach())


def _free() -> None:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
