"""The environment of a run: package versions and hardware, for ``run.json`` and bug reports."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

_PACKAGES = ("agilerl", "torch", "transformers", "peft", "reasoning-gym", "safetensors", "numpy", "datasets")


def collect_versions() -> dict[str, str | None]:
    """Return the versions of Python and of the packages that affect results, None for those not installed."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            version: str | None = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = None
        versions[package.replace("-", "_")] = version
    return versions


def collect_hardware() -> dict[str, Any]:
    """Return {platform, cpu, cores, memory_bytes, cuda}: ``cores`` are those that this process may use.

    Imports torch to list the CUDA devices; each is {name, memory_bytes, capability}.
    """
    return {
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "cuda": _cuda_devices(),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None


def _cuda_devices() -> list[dict[str, Any]]:
    try:
        import torch  # Slow to import, and only needed here.
    except ImportError:
        return []
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": d.name, "memory_bytes": d.total_memory, "capability": f"{d.major}.{d.minor}"} for d in found]
