"""Agent programs: a task whose questions a user's own program answers, by calls of the run's endpoint."""

import asyncio
import inspect
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, ClassVar

from agilerl.checks.arguments import checked
from agilerl.checks.redaction import names_a_secret
from agilerl.config.environment import AgentLimitsConfig
from agilerl.envs.core import Lengths, Place, Split, TaskArgument, TaskWrapper
from agilerl.envs.prompts import PromptTooLongError, render_prompt
from agilerl.errors import AgileRLError, ConfigError, EnvError, RewardError, how_to_install
from agilerl.rewards.grader import Columns
from agilerl.rewards.sandbox import Contained
from agilerl.safety.bounds import valid_unicode
from agilerl.safety.custom_code import contained, printing_bounded

Program = Callable[..., Any] | Sequence[str]
"""``agent(client, row)``, plain or ``async``, or a command line."""
MODEL = "policy"
"""The name under which a program asks for the policy of its episode."""
_ERROR_LINES = 20
_LONGEST_RESULT = 2**20


class AgentTask(TaskWrapper):
    """The questions and graders of another task, answered by a program.

    The program gets an OpenAI client of the run's endpoint and the row. It may call the model as often as its limits
    allow, with or without tools, and returns its result, which the graders read; None stands for the last answer of the
    model. Graders get the columns of the row, ``messages`` (the conversation) and ``result``.
    """

    multi_turn: ClassVar[bool] = True

    @checked
    def __init__(self, task: TaskArgument, program: Any, limits: AgentLimitsConfig | None = None) -> None:
        """Take the task whose rows and graders are used, and the program.

        Raises ConfigError for what is neither a function of two arguments nor a command line.
        """
        super().__init__(task)
        self.program, self.limits = _check_program(program), limits or AgentLimitsConfig()
        self.models: Callable[[], Mapping[str, int | None]] = dict
        """The adapter slots by the names of models that programs may ask for, beside that of their episode."""

    def place_at(self, split: Split, index: int, tokenizer: Any, context_length: int) -> Place:
        """Return the row at a place, without a prompt: the program writes that."""
        row = self.row(split, index)
        return Place(row, (), 0, self.level(index) if split == "train" else None)

    def lengths(self, places: Sequence[Place], tokenizer: Any, context_length: int) -> Lengths:
        """Return the lengths of the questions, by which the plan estimates; a program may ask anything."""
        lengths = []
        for place in places[:8]:
            try:
                lengths.append(len(render_prompt(tokenizer, self.messages(place.row), context_length - 1)))
            except PromptTooLongError:
                lengths.append(context_length - 1)
            except (KeyError, AgileRLError):
                lengths.append(1)
        return Lengths(lengths or [1], turns=self.limits.max_calls)

    def fit(self, tokenizer: Any, max_tokens: int | None) -> None:
        """Leave the rows as they are: the program decides what is a prompt."""


def _check_program(program: Any) -> Program:
    if isinstance(program, list | tuple) and program and all(isinstance(part, str) for part in program):
        return tuple(program)
    try:
        arguments = inspect.signature(program)
        arguments.bind(None, None)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"environment.agent: expected a function agent(client, row) or a command line as a list of texts, found "
            f"{program!r}: {error}"
        ) from error
    return program  # type: ignore[no-any-return]


def run_program(
    program: Program,
    row: Columns,
    base_url: str,
    api_key: str,
    timeout: float,
    variables: Sequence[str] = (),
) -> Any:
    """Run a program on a row until it returns its result; ``variables`` are the secrets that a command gets.

    Raises:
        EnvError: the program failed; the error ends with its own.
        TimeoutError: it took too long, and was ended.
    """
    if not callable(program):
        return _command(program, row, base_url, api_key, timeout, variables)
    try:
        with contained(), printing_bounded():
            # An object may have an async __call__ instead.
            if any(map(inspect.iscoroutinefunction, (program, getattr(program, "__call__", None)))):  # noqa: B004
                return _readable(asyncio.run(_await(program, row, base_url, api_key, timeout)))
            with client(base_url, api_key, timeout) as synchronous:
                # A copy, since graders read the row afterwards.
                result = program(synchronous, deepcopy(dict(row)))
            if inspect.iscoroutine(result):
                result.close()
                raise TypeError(
                    "it returned a coroutine; declare it with async def, and it gets an asynchronous client"
                )
            return _readable(result)
    except TimeoutError as error:  # asyncio's has no text
        raise TimeoutError(str(error) or f"no result within {timeout:g} seconds") from error
    except (Exception, KeyboardInterrupt) as error:  # Ctrl-C reaches the main thread, so this one was raised here
        raise EnvError(_describe(error)) from error


def _readable(result: Any) -> Any:
    """Return a result without lone surrogates; raises what ``str`` of it raises, before graders and records meet it."""
    str(result)
    return valid_unicode(result)


def client(base_url: str, api_key: str, timeout: float | None, *, asynchronous: bool = False) -> Any:
    """Return an OpenAI client of an endpoint; raises ConfigError if the package is missing."""
    try:
        import httpx
        import openai
    except ImportError as error:
        raise ConfigError(
            f"environment.agent: functions get a client of the package openai; {how_to_install('agents')}"
        ) from error
    # The address is this machine's: without certificates, a client takes a millisecond instead of thirty.
    http: Any = httpx.AsyncClient if asynchronous else httpx.Client
    kind: Any = openai.AsyncOpenAI if asynchronous else openai.OpenAI
    http_client = http(verify=False, timeout=timeout, trust_env=False)
    return kind(base_url=base_url, api_key=api_key, http_client=http_client, max_retries=0)


async def _await(program: Callable[..., Any], row: Columns, url: str, key: str, timeout: float) -> Any:
    async with client(url, key, timeout, asynchronous=True) as asynchronous, asyncio.timeout(timeout):
        return await program(asynchronous, deepcopy(dict(row)))


def _command(
    command: Sequence[str],
    row: Columns,
    base_url: str,
    api_key: str,
    timeout: float,
    variables: Sequence[str],
) -> str:
    """Run a command line with the row on its standard input; returns what it printed."""
    inherited = {n: value for n, value in os.environ.items() if n in variables or not names_a_secret(n)}
    environment = {**inherited, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_MODEL": MODEL}
    # The interpreter of this run, with its packages, whatever PATH has first.
    file = sys.executable if command[0] in ("python", "python3") else shutil.which(command[0])
    if file is None:
        raise EnvError(f"environment.agent: {command[0]} cannot be started: there is no such program")
    # Files, not pipes: what the command leaves running may hold a pipe open for ever.
    opened = partial(TemporaryFile, "w+", encoding="utf-8", errors="replace")
    with opened() as asked, opened() as out, opened() as errors:
        json.dump(dict(row), asked, default=str)
        asked.seek(0)
        try:
            process = Contained([file, *command[1:]], environment=environment, stdin=asked, stdout=out, stderr=errors)
        except RewardError as error:
            raise EnvError(f"environment.agent: {error}") from error
        try:
            process.process.wait(timeout)
            status = process.status()
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"no result within {timeout:g} seconds") from None
        finally:
            process.end()  # and all that it has started
        if status != 0:
            last = "\n".join(_read(errors).strip().splitlines()[-_ERROR_LINES:])
            raise EnvError(f"{Path(command[0]).name} ended with status {status}: {last}")
        return _read(out).rstrip("\n")


def _read(file: IO[str]) -> str:
    """Return the last part of what a command has written."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - _LONGEST_RESULT, 0))
    return file.read()


def _describe(error: BaseException) -> str:
    """Return an error of a program, with the line of the program that raised it."""
    # contained() reports an exit as an error of its own; the program's line is in the cause.
    raised = error.__cause__ if isinstance(error.__cause__, SystemExit) else error
    frames = traceback.extract_tb(raised.__traceback__)
    # The innermost frame that is neither in this package nor in a library.
    libraries = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")]
    foreign = [folder.resolve() for folder in (Path(__file__).parent.parent, *libraries)]
    files = [(Path(frame.filename).resolve(), frame.lineno) for frame in frames]
    theirs = [(file.name, line) for file, line in files if not any(map(file.is_relative_to, foreign))]
    where = "".join(f" ({name}:{line})" for name, line in theirs[-1:])
    return f"the agent program raised {type(error).__name__}: {error}{where}"
