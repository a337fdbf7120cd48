"""A Python interpreter for models: every program runs in a separate sandbox."""

from agilerl.arguments import Count, Name, Positive, checked
from agilerl.envs.tools.tool import Tool
from agilerl.rewards.sandbox import run_python

STARTING = 5.0
"""Seconds beyond the program's own timeout, for starting and cleaning up."""


class PythonTool(Tool):
    """The tool ``python(code)``: runs a program and returns what it printed, errors included.

    Nothing is kept from one call to the next. See :func:`agilerl.rewards.sandbox.run_python` for what a program can
    and cannot do.
    """

    @checked
    def __init__(self, *, name: Name = "python", timeout: Positive = 5.0, memory_bytes: Count = 512 * 2**20) -> None:
        """Set the limits of a program.

        Args:
            name: the tool's name for the model.
            timeout: seconds of wall time for a program, more than 0.
            memory_bytes: its address space.
        """
        self.program_timeout, self.memory_bytes = timeout, memory_bytes
        super().__init__(self.run, name=name, timeout=timeout + STARTING)

    def run(self, code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept between programs.

        Args:
            code: the program; print what you want to know.
        """
        done = run_python(code, timeout=self.program_timeout, memory_bytes=self.memory_bytes)
        parts = [done.stdout.rstrip(), done.stderr.rstrip()]
        if done.timed_out:
            parts.append(f"(stopped after {self.program_timeout:g} seconds)")
        elif not done.ok and not parts[1]:
            parts.append(f"(ended with status {done.returncode})")
        return "\n".join(filter(None, parts)) or "(nothing was printed)"
