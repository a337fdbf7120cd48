"""Tensors on disk: safetensors only, with errors that say what is wrong. The one file here that needs torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from agilerl.bounds import check_file, memory_bytes
from agilerl.errors import CheckpointError
from agilerl.runs.atomic import write_bytes

__all__ = ["load_tensors", "save_tensors"]


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors to a safetensors file, atomically; equal tensors give equal bytes.

    Views, tensors on a device and tensors that share memory are fine: each is written as its own copy.
    """
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    # One metadata entry only: safetensors writes several in no fixed order, and bytes must repeat.
    write_bytes(path, safetensors.torch.save(copies, metadata={"format": "pt"}))


def load_tensors(
    path: Path, *, shapes: Mapping[str, Sequence[int]] | None = None, finite: bool = False
) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file, on the CPU.

    ``shapes`` gives the names and shapes that must be there, no more and no fewer; ``finite`` refuses NaN and
    infinity. Raises CheckpointError that names the file and the tensor.
    """
    try:
        check_file(path, memory_bytes(), error=CheckpointError)
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"expected tensors in {path}, but the file does not exist.") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path} should be a safetensors file, but it is not: {error}.") from error
    if shapes is not None:
        _check_shapes(path, tensors, shapes)
    if finite:
        for name, tensor in tensors.items():
            if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                raise CheckpointError(f"{path}: the tensor {name} holds NaN or infinity; it cannot be used.")
    return tensors


def _check_shapes(path: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, Sequence[int]]) -> None:
    missing, extra = sorted(set(shapes) - set(tensors)), sorted(set(tensors) - set(shapes))
    if missing or extra:
        found = [f"lacks {_some(missing)}"] * bool(missing) + [f"has unexpected {_some(extra)}"] * bool(extra)
        raise CheckpointError(f"{path} {' and '.join(found)}; it belongs to another model or configuration.")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != tuple(shape):
            raise CheckpointError(
                f"{path}: the tensor {name} should have shape {list(shape)}, found {list(tensors[name].shape)}; "
                "it belongs to another model or configuration."
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
