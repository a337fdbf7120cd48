"""A Python file that no import finds, run as a module."""

import hashlib
import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

__all__ = ["run_file"]


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
