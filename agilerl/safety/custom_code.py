"""Custom code (graders, environments, losses): found and loaded if the user allows it, and contained while it runs."""

import hashlib
import importlib
import importlib.util
import inspect
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, reduce
from importlib.machinery import PathFinder, SourceFileLoader
from pathlib import Path
from threading import Lock
from types import CodeType, ModuleType
from typing import Any, ClassVar

from agilerl.checks.arguments import shown
from agilerl.errors import AgileRLError, ConfigError


@contextmanager
def contained() -> Iterator[None]:
    """Run custom code: its changes to torch's settings are undone, and what ends a process becomes a RuntimeError.

    A grader that ends the process with status 0 would otherwise look like a finished run.
    """
    with torch_restored():
        try:
            yield
        except BaseException as error:
            raise left(error) from error


@contextmanager
def reported(what: str, kind: type[AgileRLError] = ConfigError) -> Iterator[None]:
    """Run a user's code; whatever it raises becomes an error of this kind that begins with ``what``."""
    try:
        with contained():
            yield
    except Exception as error:
        name = "" if isinstance(error, AgileRLError) else f"{type(error).__name__}: "
        raise kind(f"{what}: {name}{error}") from error


def left(error: BaseException) -> RuntimeError:
    """Return the error that reports a SystemExit, a GeneratorExit or the like; raises anything else, and Ctrl-C."""
    if isinstance(error, Exception | KeyboardInterrupt):
        raise error
    return RuntimeError(f"it tried to exit the process ({type(error).__name__}: {getattr(error, 'code', error)})")


@contextmanager
def torch_restored() -> Iterator[None]:
    """Restore torch's grad mode, default dtype and device, deterministic flags and number of threads.

    Learning and sampling depend on all of them. The state of its random generator is not restored: this package never
    draws from it, and custom code would get the same number every time. Grad mode and default device are per thread.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_default_device"):  # without the attribute, it is just being imported
        yield
        return
    settings: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
        (torch.is_grad_enabled, torch.set_grad_enabled),
        (torch.get_default_dtype, torch.set_default_dtype),
        # None, not "cpu": a named device stays active as a mode that every call passes through.
        (torch.get_default_device, lambda device: torch.set_default_device(None if device.type == "cpu" else device)),
        (
            lambda: (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            ),
            lambda flags: torch.use_deterministic_algorithms(flags[0], warn_only=flags[1]),
        ),
        (torch.get_num_threads, torch.set_num_threads),
    ]
    before = [read() for read, _ in settings]
    try:
        yield
    finally:
        for (read, put_back), value in zip(settings, before):
            if read() != value:
                put_back(value)


# -- what graders print -----------------------------------------------------------------------------------------------


PRINTED = 2**20
"""Characters that the graders of a process may print: one line for each completion of a long run fills a disk."""
_GRADING = ContextVar("grading", default=False)
_LOCK = Lock()


class _Prints:
    """How much this process still shows, and the streams that count it while graders run."""

    left = PRINTED
    graders = 0
    streams: ClassVar[list[Any]] = []


@contextmanager
def printing_bounded() -> Iterator[None]:
    """Run a grader: of what it and others print to standard output and error, this process shows ``PRINTED``."""
    with _LOCK:
        _Prints.graders += 1
        for stream in (sys.stdout, sys.stderr):
            # Unless it is counted already, or is no object that takes attributes.
            if "write" not in getattr(stream, "__dict__", {"write": None}):
                # On the stream itself: handlers of logging hold the object and would not see another in its place.
                vars(stream)["write"] = partial(_write, stream.write)
                _Prints.streams.append(stream)
    before = _GRADING.set(True)
    try:
        yield
    finally:
        _GRADING.reset(before)
        with _LOCK:
            _Prints.graders -= 1
            while _Prints.streams and not _Prints.graders:
                vars(_Prints.streams.pop()).pop("write", None)


def _write(write: Callable[[str], int], text: str) -> int:
    """Write a text, unless a grader writes more than is shown; other threads write as before."""
    if not _GRADING.get():
        return write(text)
    with _LOCK:
        room, _Prints.left = max(0, _Prints.left), _Prints.left - len(text)
    # Outside the lock: a stream may block, and other graders must not wait for it.
    if room:
        note = f"\n[graders have printed {PRINTED:,} characters; what else they print is not shown]\n"
        write(text[:room] + (note if len(text) >= room else ""))
    return len(text)


# -- files of code ----------------------------------------------------------------------------------------------------


def run_file(path: Path) -> ModuleType:
    """Run a file under a unique module name, once for each content; raises whatever the code raises, and OSError."""
    name = f"_agilerl_{hashlib.sha256(str(path).encode() + path.read_bytes()).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, loader=_SourceAlone(name, str(path)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module while it runs
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # half a module must not pass for a loaded one
        raise
    return module


class _SourceAlone(SourceFileLoader):
    """Reads only the source, not a compiled copy beside it, which could hold other code; writes no copy either."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the source."""
        return self.source_to_code(self.get_data(self.path), self.path)


# -- code that a manifest names: ``rewards.py:my_reward`` or ``module:Name`` ------------------------------------------


PACKAGES = ("gem", "textarena", "openenv")
"""Prefixes of environments of other packages; any other one means code."""


def names_code(name: str) -> bool:
    """Return whether what stands for a grader or an environment is the name of Python code."""
    prefix, colon, _ = name.partition(":")
    return name.endswith(".py") or (bool(colon) and prefix not in PACKAGES)


def code_name(name: str) -> str:
    """Return what a function or class is called; other names are returned as they are."""
    return name.rpartition(":")[2] if names_code(name) else name


_GIVEN = "python"
"""Stands for the module of objects that Python handed over: ``python:my_reward``."""
_given: dict[str, Any] = {}


def given_name(code: Any) -> str:
    """Return a name under which ``load_code`` finds a function, class or grader: its module's, if that can be imported.

    Others (of a notebook, a script, a closure) are found by this process alone, as ``python:NAME``.
    """
    qualname = getattr(code, "__qualname__", type(code).__name__)
    module = getattr(code, "__module__", None)
    if module not in (None, "__main__") and all(part.isidentifier() for part in qualname.split(".")):
        name = f"{module}:{qualname}"
        # Only where the name leads back to this very object: a decorator or a second definition may have taken it.
        if file_of(name) is not None and _attribute(sys.modules.get(module), qualname) is code:
            _given[name] = code
            return name
    base = "".join(c if c.isalnum() else "_" for c in qualname.rpartition(".")[2]).strip("_") or "grader"
    names = (f"{_GIVEN}:{base}{number or ''}" for number in itertools.count())
    name = next(name for name in names if _given.get(name, code) is code)
    _given[name] = code
    return name


def _attribute(module: Any, qualname: str) -> Any:
    for part in qualname.split("."):
        module = getattr(module, part, None)
    return module


def given_source(name: str) -> str | None:
    """Return the source of an object that Python handed over under this name; None if it is none, or not known."""
    if not name.startswith(f"{_GIVEN}:") or name not in _given:
        return None
    try:
        return inspect.getsource(_given[name])
    except (OSError, TypeError):  # typed into a console, or an object without a definition of its own
        return None


def give(names: Sequence[str], codes: Sequence[Any]) -> None:
    """Replace the objects of an earlier process by these; raises ConfigError unless there is one for each name."""
    wanted = [name for name in names if name.startswith(f"{_GIVEN}:")]
    if len(wanted) != len(codes):
        raise ConfigError(
            f"reward: expected {len(wanted)} functions, for {', '.join(wanted) or 'nothing'}, found {len(codes)}"
        )
    _given.update(zip(wanted, codes))


def file_of(name: str) -> Path | None:
    """Return the file that code is in, without running any; None if there is none, or if it is a part of Python."""
    module = name.rpartition(":")[0]
    if module == _GIVEN:
        return None
    if module.endswith(".py"):
        return Path(module).expanduser().absolute()
    parts, path = module.split("."), [os.getcwd(), *sys.path]
    for depth in range(1, len(parts) + 1):
        # Part by part: find_spec of a dotted name would import the packages above it, and so run code.
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def not_allowed(where: str, name: str) -> ConfigError:
    """Return the error about code that a setting names and the user has not allowed."""
    return ConfigError(
        f"{where}={shown(name)} names code, and a manifest does not run code unless you allow it: read it, then "
        "give --allow-code (in Python: build(config, allow_code=True))"
    )


def load_code(where: str, name: str, *, allowed: bool) -> Any:
    """Return the function or class that a setting names, after running the file or module that it is in.

    Objects that Python handed over need no permission. A file runs under a unique module name, so ``import`` does not
    find it; it can import other modules as usual. A module is searched in the working directory first.

    Raises ConfigError if code is not allowed, cannot be found or raises, or has nothing of that name.
    """
    if name in _given:
        return _given[name]
    module, _, attribute = name.rpartition(":")
    if module == _GIVEN:
        raise ConfigError(
            f"{where}={shown(name)} was an object of the Python process that began the run; resume it from Python, "
            "with the same object: agilerl.Run(path).resume(reward=...)"
        )
    if not allowed:
        raise not_allowed(where, name)
    if not module or not all(part.isidentifier() for part in attribute.split(".")):
        raise ConfigError(f"{where}: expected path.py:name or module:name, found {shown(name)}")
    try:
        with torch_restored():
            loaded: Any = run_file(Path(module).expanduser().absolute()) if module.endswith(".py") else _import(module)
            # Not vars(): packages such as TRL import their parts when they are asked for.
            code = reduce(lambda owner, part: getattr(owner, part, None), attribute.split("."), loaded)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # custom code may raise anything; report its reason
        raise ConfigError(f"{where}={shown(name)} cannot be loaded: {type(error).__name__}: {error}") from error
    if code is None:
        names = [key for key, value in vars(loaded).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"{where}: expected {attribute} in {module}, found {', '.join(names[:12]) or 'nothing'}")
    if not callable(code):
        raise ConfigError(f"{where}: expected {shown(name)} to be a function or a class, found {shown(code)}")
    return code


def _import(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)
