"""Moments at which a process can die: before each operation on a run directory, half-way through writes, around clones.

``arm`` wraps what the package calls to change files (of ``os``, ``open``, safetensors' writer) and what changes agents.
It is for processes that end soon after: nothing is put back.
"""

import builtins
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch

from agilerl.algorithms.agent import LLMAlgorithm

Visit = Callable[[str, str], None]
"""Told the operation that comes next and the path it is about."""

_BY_PATH = ("mkdir", "unlink", "remove", "rmdir", "rename", "replace", "truncate")
_BY_DESCRIPTOR = ("fsync", "ftruncate")


def arm(root: Path, visit: Visit) -> None:
    """Have ``visit`` called at every failpoint of this process below ``root`` from now on."""
    inside = _Inside(root.resolve())
    for name in _BY_PATH:
        setattr(os, name, _by_path(name, getattr(os, name), inside, visit))
    for name in _BY_DESCRIPTOR:
        setattr(os, name, _by_descriptor(name, getattr(os, name), inside, visit))
    os.write = _write(os.write, inside, visit)  # type: ignore[assignment]
    os.open = _open_descriptor(os.open, inside, visit)  # type: ignore[assignment]
    io.open = builtins.open = _open_file(io.open, inside, visit)  # type: ignore[assignment]
    safetensors.torch.serialize_file = _serialize(safetensors.torch.serialize_file, inside, visit)
    LLMAlgorithm.clone = _around("clone", LLMAlgorithm.clone, visit)  # type: ignore[method-assign]
    LLMAlgorithm.apply_mutation = _around("mutation", LLMAlgorithm.apply_mutation, visit)  # type: ignore[method-assign]


class _Inside:
    """Which paths and descriptors lie below a folder."""

    def __init__(self, root: Path) -> None:
        self.prefix = f"{root}{os.sep}"

    def path(self, path: Any, directory: int | None = None) -> str | None:
        if isinstance(path, int):
            return self.descriptor(path)
        base = os.getcwd() if directory is None else os.readlink(f"/proc/self/fd/{directory}")
        full = os.path.join(base, os.fspath(path))
        return full if full.startswith(self.prefix) else None

    def descriptor(self, descriptor: int) -> str | None:
        full = os.readlink(f"/proc/self/fd/{descriptor}")
        return full if full.startswith(self.prefix) else None


def _by_path(name: str, real: Any, inside: _Inside, visit: Visit) -> Any:
    def call(path: Any, *arguments: Any, **options: Any) -> Any:
        full = inside.path(path, options.get("dir_fd"))
        if full is not None:
            visit(name, full)
        return real(path, *arguments, **options)

    return call


def _by_descriptor(name: str, real: Any, inside: _Inside, visit: Visit) -> Any:
    def call(descriptor: int, *arguments: Any) -> Any:
        full = inside.descriptor(descriptor)
        if full is not None:
            visit(name, full)
        return real(descriptor, *arguments)

    return call


def _write(real: Any, inside: _Inside, visit: Visit) -> Any:
    def call(descriptor: int, data: Any) -> int:
        full = inside.descriptor(descriptor)
        if full is None:
            return int(real(descriptor, data))
        visit("write", full)
        written = int(real(descriptor, data[: len(data) // 2]))
        visit("half a write", full)
        return written + int(real(descriptor, data[written:]))

    return call


def _open_descriptor(real: Any, inside: _Inside, visit: Visit) -> Any:
    def call(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        full = inside.path(path, dir_fd) if flags & (os.O_CREAT | os.O_TRUNC) else None
        if full is not None:
            visit("open", full)
        return int(real(path, flags, mode, dir_fd=dir_fd))

    return call


def _open_file(real: Any, inside: _Inside, visit: Visit) -> Any:
    def call(file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        writing = any(letter in mode for letter in "wxa+")
        full = inside.path(file) if writing else None
        if full is None:
            return real(file, mode, *arguments, **options)
        visit("open", full)
        return _File(real(file, mode, *arguments, **options), full, visit)

    return call


class _File:
    """A file that hands everything to the system at once, and each write in two halves."""

    def __init__(self, file: Any, path: str, visit: Visit) -> None:
        self._file, self._path, self._visit = file, path, visit

    def write(self, data: Any) -> int:
        self._visit("write", self._path)
        self._file.write(data[: len(data) // 2])
        self._file.flush()
        self._visit("half a write", self._path)
        self._file.write(data[len(data) // 2 :])
        self._file.flush()
        return len(data)

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _serialize(real: Any, inside: _Inside, visit: Visit) -> Any:
    def call(tensors: Any, path: Any, *arguments: Any, **options: Any) -> None:
        full = inside.path(path)
        assert full is not None
        visit("write", full)
        real(tensors, path, *arguments, **options)
        data = Path(path).read_bytes()
        Path(path).write_bytes(data)  # in halves

    return call


def _around(name: str, real: Any, visit: Visit) -> Any:
    def call(agent: Any, *arguments: Any, **options: Any) -> Any:
        visit(f"before {name}", "")
        result = real(agent, *arguments, **options)
        visit(f"after {name}", "")
        return result

    return call
