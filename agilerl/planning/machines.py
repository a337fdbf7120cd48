"""Devices to plan for: a table of data-sheet numbers and, separately, how close each phase comes to its floor."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from agilerl.checks.arguments import nearest
from agilerl.errors import ConfigError
from agilerl.sizes import CPU_ROWS


@dataclass(frozen=True)
class Machine:
    """One device, with the rates that large operations reach on it; in ``GPUS`` with those that its vendor states."""

    name: str
    flops: float
    """F: floating point operations per second of a large matrix product, in the base's data type."""
    bandwidth: float
    """BW: bytes per second, read plus written, of a large copy."""
    memory: float
    """Bytes."""
    link: float
    """Bytes per second to another device, one direction."""
    disk: float = 1e9
    """Bytes per second written and synchronised."""
    source: str = ""
    """Where the rates come from."""


def _sheet(name: str, teraflops: float, terabytes: float, gigabytes: float, link: float, source: str) -> Machine:
    """Return a GPU by its data sheet: dense bf16 products, bandwidth, memory, half of the link's rate in GB/s."""
    return Machine(name, teraflops * 1e12, terabytes * 1e12, gigabytes * 1e9, link * 1e9, source=f"NVIDIA {source}")


GPUS = {
    sheet.name: sheet
    for sheet in (
        _sheet("b200", 2250, 8.0, 180, 900, "HGX B200 data sheet (4.5 PFLOPS sparse)"),
        _sheet("h200", 989, 4.8, 141, 450, "H200 SXM data sheet (1,979 sparse)"),
        _sheet("h100", 989, 3.35, 80, 450, "H100 SXM data sheet (1,979 sparse)"),
        _sheet("h100-pcie", 756, 2.0, 80, 64, "H100 PCIe data sheet (1,513 sparse)"),
        _sheet("a100-80", 312, 2.039, 80, 300, "A100 80GB SXM data sheet"),
        _sheet("a100-40", 312, 1.555, 40, 300, "A100 40GB SXM data sheet"),
        _sheet("l40s", 362, 0.864, 48, 32, "L40S data sheet (733 sparse), PCIe 4 x16"),
        _sheet("a10", 125, 0.6, 24, 32, "A10 data sheet, PCIe 4 x16"),
        _sheet("l4", 121, 0.3, 24, 32, "L4 data sheet (242 sparse), PCIe 4 x16"),
    )
}
"""What the vendor states, without structured sparsity; rates of links in one direction, half of what sheets state."""

PER_MACHINE = 8
"""GPUs per machine; a larger island sends over the network."""
NETWORK = 50e9
"""Assumed: bytes per second and GPU between machines, with one 400 Gbit/s port per GPU."""
MATMUL_SHARE, COPY_SHARE, LINK_SHARE = 0.85, 0.85, 0.7
"""The share of a data sheet's peak that large products and copies reach (0.86 on an H200), and transfers (assumed)."""


@dataclass(frozen=True)
class PhaseCost:
    """How a phase's time follows from its work."""

    floor: float
    """Times the floor."""
    traffic: float
    """Share of the elementwise traffic that costs time at the copy rate."""
    call: float
    """Seconds of each call of a layer, however little it computes: launches, the interpreter."""


@dataclass(frozen=True)
class Costs:
    """The costs of all phases on one kind of device, and where they come from."""

    phases: Mapping[str, PhaseCost]
    origin: str
    row_multiple: int = 1
    """Batches of decoded rows are padded to a multiple of this."""


GPU_COSTS = Costs(
    {
        "prefill": PhaseCost(3.4, 0.0, 3.5e-3),
        "decode": PhaseCost(1.0, 0.0, 3.5e-3),
        "logprobs": PhaseCost(1.0, 1.3, 1.6e-3),
        "train": PhaseCost(1.0, 3.0, 3.5e-3),
        "optimizer": PhaseCost(14.0, 0.0, 1.3e-3),
        "evolve": PhaseCost(400.0, 0.0, 0.0),
        "checkpoint": PhaseCost(2.0, 0.0, 0.0),
    },
    "measured on one H200, with models of 0.14 to 1.5 billion parameters in bf16",
)
"""From the steps of benchmarking/results/gpu-h200.json, by roofline.calibrated. What a layer's call costs depends on
the host: it starts some 85 kernels for a layer of a decoding step, and the GPU waits for it."""
VLLM_DECODE = PhaseCost(1.6, 1.0, 40e-6)
"""Assumed: vLLM replays CUDA graphs."""

CPU_COSTS = Costs(
    {
        "prefill": PhaseCost(1.0, 7.0, 1.3e-3),
        "decode": PhaseCost(2.5, 17.0, 1.4e-3),
        "logprobs": PhaseCost(1.07, 4.5, 1.4e-3),
        "train": PhaseCost(1.0, 8.2, 1.4e-3),
        "optimizer": PhaseCost(11.0, 0.0, 2.0e-3),
        "evolve": PhaseCost(26.0, 0.0, 0.0),
        "checkpoint": PhaseCost(1.6, 0.0, 0.0),
    },
    "measured on one CPU thread, on five models of 0.2 to 12 million parameters",
    row_multiple=CPU_ROWS,
)
"""From ``benchmarking/roofline.py --calibrate``; docs/plan.md shows the errors on other models."""


def gpu(name: str) -> Machine:
    """Return a GPU with the rates that large operations are assumed to reach; raises ConfigError for unknown names."""
    if name not in GPUS:
        raise ConfigError(f"--gpu={name!r} is unknown; {nearest(name, [*GPUS, 'cpu'])}")
    sheet = GPUS[name]
    return replace(
        sheet,
        flops=sheet.flops * MATMUL_SHARE,
        bandwidth=sheet.bandwidth * COPY_SHARE,
        link=sheet.link * LINK_SHARE,
        source=f"{sheet.source}; {MATMUL_SHARE:.0%} of its matmul and {COPY_SHARE:.0%} of its copy rate, as an H200 "
        "reached",
    )
