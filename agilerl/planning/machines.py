"""Devices to plan for: a table of data-sheet numbers and, separately, how close each phase comes to its floor."""

from collections.abc import Mapping
from dataclasses import dataclass

from agilerl.checks.arguments import nearest
from agilerl.errors import ConfigError

_GB, _TB, _TERA = 1e9, 1e12, 1e12


@dataclass(frozen=True)
class Machine:
    """One device, with the rates that large operations reach on it."""

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


@dataclass(frozen=True)
class DataSheet:
    """What a vendor states for a device, without structured sparsity."""

    flops: float
    """Peak operations per second of dense bf16 matrix products with fp32 sums."""
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes per second."""
    link: float
    """Bytes per second to other devices of the machine, one direction: half of what data sheets state."""
    source: str


GPUS: dict[str, DataSheet] = {
    "b200": DataSheet(2250 * _TERA, 180 * _GB, 8.0 * _TB, 900 * _GB, "NVIDIA HGX B200 data sheet (4.5 PFLOPS sparse)"),
    "h200": DataSheet(989 * _TERA, 141 * _GB, 4.8 * _TB, 450 * _GB, "NVIDIA H200 SXM data sheet (1,979 sparse)"),
    "h100": DataSheet(989 * _TERA, 80 * _GB, 3.35 * _TB, 450 * _GB, "NVIDIA H100 SXM data sheet (1,979 sparse)"),
    "h100-pcie": DataSheet(756 * _TERA, 80 * _GB, 2.0 * _TB, 64 * _GB, "NVIDIA H100 PCIe data sheet (1,513 sparse)"),
    "a100-80": DataSheet(312 * _TERA, 80 * _GB, 2.039 * _TB, 300 * _GB, "NVIDIA A100 80GB SXM data sheet"),
    "a100-40": DataSheet(312 * _TERA, 40 * _GB, 1.555 * _TB, 300 * _GB, "NVIDIA A100 40GB SXM data sheet"),
    "l40s": DataSheet(362 * _TERA, 48 * _GB, 0.864 * _TB, 32 * _GB, "NVIDIA L40S data sheet (733 sparse), PCIe 4 x16"),
    "a10": DataSheet(125 * _TERA, 24 * _GB, 0.6 * _TB, 32 * _GB, "NVIDIA A10 data sheet, PCIe 4 x16"),
    "l4": DataSheet(121 * _TERA, 24 * _GB, 0.3 * _TB, 32 * _GB, "NVIDIA L4 data sheet (242 sparse), PCIe 4 x16"),
}

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
)
"""From ``benchmarking/roofline.py --calibrate``; docs/plan.md shows the errors on other models."""


def gpu(name: str) -> Machine:
    """Return a GPU with the rates that large operations are assumed to reach; raises ConfigError for unknown names."""
    if name not in GPUS:
        raise ConfigError(f"--gpu={name!r} is unknown; {nearest(name, [*GPUS, 'cpu'])}")
    sheet = GPUS[name]
    return Machine(
        name,
        flops=sheet.flops * MATMUL_SHARE,
        bandwidth=sheet.bandwidth * COPY_SHARE,
        memory=sheet.memory,
        link=sheet.link * LINK_SHARE,
    )
