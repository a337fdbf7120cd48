"""Batch sizes that are halved if memory runs out, and stay halved for the rest of the run."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from agilerl.safety.bounds import memory_bytes

Result = TypeVar("Result")

_SIGNS = ("out of memory", "not enough memory", "CUBLAS_STATUS_ALLOC_FAILED")
"""Words in out-of-memory errors of torch and the drivers that have no type of their own."""


@dataclass
class MemoryLimits:
    """Limits learned from running out of memory; None: it never did."""

    train_tokens: int | None = None
    """Tokens of one training forward."""
    decode_rows: int | None = None
    """Completions decoded at once."""

    def tokens(self, wanted: int) -> int:
        """Return how many tokens one training forward may have, at most ``wanted``."""
        return wanted if self.train_tokens is None else min(wanted, self.train_tokens)

    def decoding(self, wanted: int) -> int:
        """Return how many completions may be decoded at once, at most ``wanted``."""
        return wanted if self.decode_rows is None else min(wanted, self.decode_rows)


def attempt(call: Callable[[], Result]) -> Result | None:
    """Return the result of a call; None if memory ran out in it, on a GPU or on the CPU."""
    try:
        return call()
    except (MemoryError, RuntimeError) as error:
        known = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not known and not any(sign in str(error) for sign in _SIGNS):
            raise
    # The cache is emptied outside the handler: inside it, the error's frames still hold the tensors of the call.
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
    return None


def available_bytes(device: str) -> int:
    """Return the memory of a device, for the CPU what the machine or its container allows."""
    return memory_bytes() if device == "cpu" else int(torch.cuda.get_device_properties(device).total_memory)


def local_processes() -> int:
    """Return how many processes of this run share the machine; torchrun and accelerate tell each of them."""
    launched = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(launched), 1) if launched.isdecimal() else 1


def peak_memory(device: torch.device) -> int:
    """Return the peak memory in bytes so far: of the GPU if the run uses one, else of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    try:
        import resource
    except ImportError:  # Windows, which keeps the peak itself
        import psutil

        memory = psutil.Process().memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
