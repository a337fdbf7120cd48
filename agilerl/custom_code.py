"""Custom code (graders, environments, losses): files run as modules; torch is as before, and the process goes on."""

import hashlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any


@contextmanager
def contained() -> Iterator[None]:
    """Run custom code: what it does to torch's settings is undone, and ``sys.exit()`` is a RuntimeError.

    A grader that ends the process with status 0 would otherwise look like a run that has finished.
    """
    with torch_restored():
        try:
            yield
        except SystemExit as error:
            raise left(error) from error


def left(error: SystemExit) -> RuntimeError:
    """Return what ``sys.exit()`` in custom code is reported as."""
    return RuntimeError(f"it wanted to leave the process (SystemExit: {error.code})")


@contextmanager
def torch_restored() -> Iterator[None]:
    """Put back torch's grad mode, default dtype and device, deterministic flags and number of threads.

    Learning and sampling rely on all of them. Its random generator is left alone: nothing of this package draws from
    it, and code that does would draw the same number every time. Grad mode and default device belong to a thread.
    """
    before = _settings()
    try:
        yield
    finally:
        if before is not None and (after := _settings()) != before:
            _restore(before, after or {})


def _settings() -> dict[str, Any] | None:
    """Return torch's settings; None if it has not been imported, so that custom code finds what it expects."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_device"):  # it is being imported right now
        return None
    return {
        "grad": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        "threads": torch.get_num_threads(),
    }


def _restore(before: dict[str, Any], after: dict[str, Any]) -> None:
    torch: Any = sys.modules["torch"]
    enabled, warn_only = before["deterministic"]
    setters: dict[str, Callable[[], object]] = {
        "grad": lambda: torch.set_grad_enabled(before["grad"]),
        "dtype": lambda: torch.set_default_dtype(before["dtype"]),
        # A CPU that is named would stay on as a mode that every call goes through.
        "device": lambda: torch.set_default_device(None if before["device"].type == "cpu" else before["device"]),
        "deterministic": lambda: torch.use_deterministic_algorithms(enabled, warn_only=warn_only),
        "threads": lambda: torch.set_num_threads(before["threads"]),
    }
    for name, restore in setters.items():
        if after.get(name) != before[name]:
            restore()


def run_file(path: Path) -> ModuleType:
    """Run a file under a module name of its own, once for each content; raises what the code raises, and OSError."""
    own = f"_agilerl_{hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:16]}"
    if own in sys.modules:
        return sys.modules[own]
    spec = importlib.util.spec_from_file_location(own, path, loader=_SourceAlone(own, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[own] = module  # dataclasses look their module up while it runs
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[own]
        raise
    return module


class _SourceAlone(SourceFileLoader):
    """Reads the source and no compiled copy beside it, which could hold something else, and writes none."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the source."""
        return self.source_to_code(self.get_data(self.path), self.path)
