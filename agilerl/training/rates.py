"""How fast this machine multiplies matrices and copies memory, measured: the F and BW of the roofline."""

from collections.abc import Callable
from time import perf_counter

import torch

from agilerl.training.memory import available_bytes
from agilerl.training.roofline import Machine

__all__ = ["copy_rate", "matmul_rate", "measured_machine"]

_SECONDS = 0.3
"""Time that each rate is measured for."""


def measured_machine(
    device: str = "cpu", dtype: torch.dtype = torch.float32, clock: Callable[[], float] = perf_counter
) -> Machine:
    """Return a device with its measured rates, as the present number of threads reaches them; takes about a second."""
    bandwidth = copy_rate(device, clock)
    return Machine(
        name=device,
        flops=matmul_rate(device, dtype, clock),
        bandwidth=bandwidth,
        memory=available_bytes(device) or 0,
        # Processes of one machine hand bytes on through its memory: written by one, read by another.
        link=bandwidth / 2,
    )


def matmul_rate(
    device: str = "cpu", dtype: torch.dtype = torch.float32, clock: Callable[[], float] = perf_counter
) -> float:
    """Return floating point operations a second, by a clock, of the best of some products of square matrices."""
    size = 1024 if device == "cpu" else 8192
    left = torch.ones((size, size), dtype=dtype, device=device)
    out = torch.empty_like(left)
    return 2 * size**3 / _best(lambda: torch.mm(left, left, out=out), device, clock)


def copy_rate(device: str = "cpu", clock: Callable[[], float] = perf_counter) -> float:
    """Return bytes a second, read plus written, by a clock, of the best of some copies too large for any cache."""
    count = 2**26 if device == "cpu" else 2**29
    source = torch.ones(count, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * count / _best(lambda: target.copy_(source), device, clock)


def _best(call: Callable[[], object], device: str, clock: Callable[[], float]) -> float:
    call()
    best, end = float("inf"), clock() + _SECONDS
    while clock() < end:
        _wait(device)
        start = clock()
        call()
        _wait(device)
        best = min(best, clock() - start)
    return best


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)
