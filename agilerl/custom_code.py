"""Custom code (graders, environments, losses): runs files as modules; keeps torch's settings and the process intact."""

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
    """Run custom code: its changes to torch's settings are undone, and ``sys.exit()`` becomes a RuntimeError.

    A grader that ends the process with status 0 would otherwise look like a finished run.
    """
    with torch_restored():
        try:
            yield
        except SystemExit as error:
            raise left(error) from error


def left(error: SystemExit) -> RuntimeError:
    """Return the error that reports a ``sys.exit()`` in custom code."""
    return RuntimeError(f"it tried to exit the process (SystemExit: {error.code})")


@contextmanager
def torch_restored() -> Iterator[None]:
    """Restore torch's grad mode, default dtype and device, deterministic flags and number of threads.

    Learning and sampling depend on all of them. The state of its random generator is not restored: this package never
    draws from it, and custom code would get the same number every time. Grad mode and default device are per thread.
    """
    before = _settings()
    try:
        yield
    finally:
        if before is not None and (after := _settings()) != before:
            _restore(before, after or {})


def _settings() -> dict[str, Any] | None:
    """Return torch's settings; None if torch has not been imported, and then there is nothing to restore."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_device"):  # without the attribute, it is just being imported
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
        # None, not "cpu": a named device stays active as a mode that every call passes through.
        "device": lambda: torch.set_default_device(None if before["device"].type == "cpu" else before["device"]),
        "deterministic": lambda: torch.use_deterministic_algorithms(enabled, warn_only=warn_only),
        "threads": lambda: torch.set_num_threads(before["threads"]),
    }
    for name, restore in setters.items():
        if after.get(name) != before[name]:
            restore()


def run_file(path: Path) -> ModuleType:
    """Run a file under a unique module name, once for each content; raises whatever the code raises, and OSError."""
    own = f"_agilerl_{hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:16]}"
    if own in sys.modules:
        return sys.modules[own]
    spec = importlib.util.spec_from_file_location(own, path, loader=_SourceAlone(own, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[own] = module  # dataclasses look up their module while it runs
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[own]
        raise
    return module


class _SourceAlone(SourceFileLoader):
    """Reads only the source, not a compiled copy beside it, which could hold other code; writes no copy either."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the source."""
        return self.source_to_code(self.get_data(self.path), self.path)
