"""Python programs in processes of their own that need not import the libraries again.

A server, one for each process of pytest, has imported them and forks a child for each program. A start then takes a
fraction of a second instead of ten, and is otherwise like that of ``python``: arguments, folder, environment, streams,
exit code and signals are the program's own. A test about how Python starts (imports, time, locale, parent) or ends
needs :mod:`subprocess`: these children have their imports, and leave without taking Python down.
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import DupFd
from pathlib import Path
from types import ModuleType
from typing import Any, Self

_FORKED = multiprocessing.get_context("forkserver")
_FORKED.set_forkserver_preload(
    [
        "torch.distributed",
        "transformers.models.auto.auto_factory",
        "transformers.modeling_layers",
        "peft",
        "pandas",
        "pyarrow.dataset",
        "reasoning_gym.composite",
        "rich.live",
        "scipy.special",
        "agilerl.cli.app",
        "agilerl.cli.progress",
        "agilerl.report",
    ]
)


class Program:
    """``python ARGUMENTS`` as :class:`subprocess.Popen` would start it, with pipes for both outputs.

    Args:
        arguments: ``-m module``, ``-c code`` or a file, and what follows.
        cwd: the folder it works in.
        env: all of its environment; None: that of this process.
    """

    def __init__(self, *arguments: object, cwd: Path, env: Mapping[str, str] | None = None) -> None:
        output, errors = os.pipe(), os.pipe()
        self._process = _FORKED.Process(
            target=_become,
            args=([str(a) for a in arguments], str(cwd), dict(os.environ if env is None else env)),
            kwargs={"streams": (DupFd(output[1]), DupFd(errors[1]))},
        )
        self._process.start()
        for _, end in (output, errors):
            os.close(end)
        self.stdout, self.stderr = (os.fdopen(end, encoding="utf-8") for end, _ in (output, errors))
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int:
        code = self._process.exitcode
        assert code is not None, "it has not ended"
        return code

    def poll(self) -> int | None:
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Leave no process behind, whatever happened."""
        if self.poll() is None:
            self.kill()
        self.communicate()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what it has written when it has ended; TimeoutError, and it is killed, if that takes longer."""
        with ThreadPoolExecutor(2) as readers:
            said = [readers.submit(stream.read) for stream in (self.stdout, self.stderr) if not stream.closed]
            self._process.join(timeout)
            if late := self._process.exitcode is None:
                self.kill()
            texts = [reader.result() for reader in said]
        self.stdout.close()
        self.stderr.close()
        if late:
            raise TimeoutError(f"not done within {timeout:g} s; it wrote: {texts}")
        output, errors = texts or ("", "")
        return output, errors


def run(
    *arguments: object, cwd: Path, env: Mapping[str, str] | None = None, timeout: float | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run ``python ARGUMENTS`` to its end."""
    program = Program(*arguments, cwd=cwd, env=env)
    output, errors = program.communicate(timeout)
    return subprocess.CompletedProcess(list(arguments), program.returncode, output, errors)


def _become(arguments: Sequence[str], folder: str, environment: Mapping[str, str], *, streams: tuple[Any, Any]) -> None:
    for number, stream in enumerate(streams, start=1):
        os.dup2(inherited := stream.detach(), number)
        os.close(inherited)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", encoding="utf-8", closefd=False, buffering=1, errors="backslashreplace")
    # A shell starts what it runs in the background with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    kind, *rest = arguments
    paths = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    try:
        if kind == "-m":
            sys.path[:0] = [folder, *paths]
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.path[:0] = ["", *paths]
            sys.argv = ["-c", *rest[1:]]
            main = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(rest[0], "<string>", "exec"), main.__dict__)
        else:
            sys.path[:0] = [str(Path(kind).parent), *paths]
            sys.argv = [kind, *rest]
            runpy.run_path(kind, run_name="__main__")
    finally:
        atexit._run_exitfuncs()
