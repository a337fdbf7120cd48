"""A tool: a Python function with a schema, checked arguments and a time limit; errors become text."""

import asyncio
import inspect
import json
import queue
import re
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from agilerl.arguments import Name, Positive, checked, nearest, shown
from agilerl.errors import ConfigError

ErrorKind = Literal["malformed", "unknown_tool", "bad_arguments", "raised", "timeout", "too_many"]
"""What went wrong with a call. ``too_many``: more calls in one turn than are allowed."""

MOST_STUCK = 4
CLEAN_UP = 1.0
"""Seconds after the timeout until a coroutine is cancelled, so that its thread ends."""


@dataclass(frozen=True)
class ToolResult:
    """What a call returned, as text for the model."""

    text: str
    error: ErrorKind | None = None


class Tool:
    """A function that a model may call, sync or async.

    Each call has its own thread and is abandoned after ``timeout`` seconds. A thread cannot be killed: a function that
    never returns keeps it, and while four calls hang the tool answers that it is busy. What may hang forever belongs in
    a process, as in the Python tool. Environments that share a tool may call it concurrently.
    """

    @checked
    def __init__(self, function: Callable[..., Any], *, name: Name | None = None, timeout: Positive = 10.0) -> None:
        """Read the function's signature and docstring.

        Args:
            function: the function to call; its schema is :func:`agilerl.envs.tools.tool_schema`.
            name: the tool's name for the model; by default the function's name.
            timeout: seconds, more than 0.

        Raises:
            ConfigError: a function without a schema, or a timeout that is not positive.
        """
        self.function, self.timeout = function, timeout
        self._arguments = Arguments(function, name)
        self.name = self._arguments.name
        self._stuck: list[threading.Thread] = []

    def __repr__(self) -> str:
        return f"Tool({self._arguments.signature})"

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema that chat templates take."""
        return self._arguments.schema

    @property
    def signature(self) -> str:
        """The tool in one line, for models whose chat template does not show tools."""
        return self._arguments.signature

    def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Check the arguments, call the function and return its result, or the error, as text.

        Text is returned unchanged, anything else as JSON.

        Raises:
            ConfigError: raised by the function itself to signal a mistake of the user, not of the model.
        """
        try:
            checked = self._arguments.check(arguments)
        except ConfigError as error:
            return ToolResult(f"Error: {error}", "bad_arguments")
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        if len(self._stuck) >= MOST_STUCK:
            return ToolResult(f"Error: {self.name} is busy: earlier calls have not returned yet", "timeout")
        outcome: queue.SimpleQueue[ToolResult | ConfigError] = queue.SimpleQueue()
        thread = threading.Thread(target=self._run, args=(checked, outcome), name=f"tool {self.name}", daemon=True)
        thread.start()
        try:
            found = outcome.get(timeout=self.timeout)
        except queue.Empty:
            self._stuck.append(thread)
            return ToolResult(f"Error: {self.name} took longer than {self.timeout:g} seconds", "timeout")
        if isinstance(found, ConfigError):
            raise found
        return found

    def _run(self, arguments: Mapping[str, Any], outcome: "queue.SimpleQueue[ToolResult | ConfigError]") -> None:
        try:
            result = self.function(**arguments)
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result, self.timeout + CLEAN_UP))
            outcome.put(ToolResult(_as_text(result)))
        except ConfigError as error:
            outcome.put(error)
        except BaseException as error:  # a tool that calls sys.exit() has failed as well
            outcome.put(ToolResult(f"Error: {self.name} raised {type(error).__name__}: {error}", "raised"))


async def _awaited(result: Awaitable[Any], limit: float) -> Any:
    return await asyncio.wait_for(result, limit)


def _as_text(result: Any) -> str:
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


# -- a function's arguments, from its signature and docstring: as a JSON schema and as a check ------------------------


# transformers.utils.get_json_schema makes only a schema. With pydantic, schema and check are one thing and cannot
# disagree about constraints, literals and nested models; tests compare with get_json_schema where both apply.

_SECTION = re.compile(r"^(Args|Arguments|Returns|Yields|Raises|Examples?|Notes?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^(\*{0,2}\w+)(?:\s*\([^)]*\))?:\s*(.*)$")


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return ``{"type": "function", "function": {"name", "description", "parameters"}}`` of a function.

    Types come from the annotations (all that pydantic reads: ``Literal``, ``list[float]``, ``Annotated[int,
    Field(ge=0)]``, models, ...), descriptions from a Google-style docstring, its first part and ``Args:``.

    Raises:
        ConfigError: not a plain function or method, no docstring, a parameter without annotation, ``*args``,
            ``**kwargs`` or a positional-only parameter, or an annotation without a JSON schema.
    """
    return Arguments(function).schema


class Arguments:
    """The arguments of one function: their schema, and the check of a model's values."""

    def __init__(self, function: Callable[..., Any], name: str | None = None) -> None:
        """Read signature and docstring; raises as :func:`tool_schema` does. The default name is the function's."""
        if not inspect.isfunction(function) and not inspect.ismethod(function):
            raise ConfigError(f"expected a Python function or method as a tool, found {shown(function)}")
        self.name = name or function.__name__
        description, told = _docstring(function)
        parameters = _parameters(function)
        if unknown := sorted(set(told) - set(parameters)):
            raise ConfigError(
                f"the docstring of the tool {self.name} describes {', '.join(unknown)}, which it does not take; "
                f"{nearest(unknown[0], parameters)}"
            )
        self._fields = {f"argument_{place}": name for place, name in enumerate(parameters)}
        self._model = self._create(parameters, told)
        self.parameters: dict[str, Any] = self._model.model_json_schema(schema_generator=_Untitled)
        self.parameters.pop("title", None)
        self.parameters.setdefault("properties", {})
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {"name": self.name, "description": description, "parameters": self.parameters},
        }

    def check(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as the types of the signature; omitted ones stay omitted.

        Harmless conversions are made ("5" for a number, JSON text for a list), because a model should not have to guess
        the spelling; true and false are not numbers.

        Raises:
            ConfigError: missing, unknown or wrongly typed arguments; the message says what the function takes.
        """
        names = self._names
        problems = [f"unknown argument {name!r}; {nearest(name, names)}" for name in given if name not in names]
        known = {name: self._plain(name, value) for name, value in given.items() if name in names}
        problems += [
            f"argument {name!r}: a number is expected, found {shown(value)}"
            for name, value in known.items()
            if isinstance(value, bool) and self._type(name) in ("integer", "number")
        ]
        if not problems:
            try:
                made = self._model(**known)
            except ValidationError as error:
                problems = [_problem(item) for item in error.errors()]
            else:
                return {self._fields[field]: getattr(made, field) for field in made.model_fields_set}
        raise ConfigError(f"expected {self.signature}; {'; '.join(problems)}")

    @property
    def signature(self) -> str:
        """The call as shown to a model, ``add(a: integer, b: integer, optional)``."""
        required = self.parameters.get("required", [])
        parts = [f"{name}: {self._said(name)}{'' if name in required else ', optional'}" for name in self._names]
        return f"{self.name}({'; '.join(parts)})"

    @property
    def _names(self) -> list[str]:
        return list(self._fields.values())

    def _create(self, parameters: Mapping[str, inspect.Parameter], told: Mapping[str, str]) -> type[BaseModel]:
        # Aliases, because a field name must not clash with an attribute of pydantic models (json, copy, schema).
        fields: dict[str, Any] = {}
        for field, name in self._fields.items():
            parameter = parameters[name]
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            fields[field] = (parameter.annotation, Field(default, alias=name, description=told.get(name)))
        try:
            model: type[BaseModel] = create_model(self.name, __config__=ConfigDict(extra="forbid"), **fields)
            model.model_json_schema()
        except (PydanticSchemaGenerationError, PydanticUserError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the tool {self.name} has an argument without a JSON schema; annotate it with a type that JSON has "
                f"(str, int, float, bool, list, dict, Literal, a pydantic model): {str(error).splitlines()[0]}"
            ) from error
        return model

    def _type(self, name: str) -> Any:
        return self.parameters["properties"][name].get("type")

    def _plain(self, name: str, value: Any) -> Any:
        """Parse text as JSON if a list or an object is expected; untyped call formats write them as text."""
        if isinstance(value, str) and self._type(name) in ("array", "object"):
            try:
                return json.loads(value)
            except (ValueError, RecursionError):
                return value
        return value

    def _said(self, name: str) -> str:
        schema = self.parameters["properties"][name]
        if "enum" in schema:
            return "one of " + ", ".join(repr(value) for value in schema["enum"])
        if "anyOf" in schema:
            return " or ".join(str(part.get("type", "value")) for part in schema["anyOf"])
        return str(schema.get("type", "value"))


class _Untitled(GenerateJsonSchema):
    """Omits titles, which repeat the names and cost tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _problem(item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] == "missing":
        return f"argument {path!r} is missing"
    return f"argument {path!r}: {item['msg'][0].lower()}{item['msg'][1:]}, found {shown(item['input'])}"


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    name = function.__name__
    try:
        parameters = dict(inspect.signature(function, eval_str=True).parameters)
    except (NameError, TypeError, ValueError) as error:
        raise ConfigError(f"the annotations of the tool {name} cannot be read: {error}") from error
    for key, parameter in parameters.items():
        if parameter.kind not in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"expected named parameters in the tool {name}, found {parameter}; a model passes arguments by name"
            )
        if parameter.annotation is inspect.Parameter.empty:
            raise ConfigError(f"expected an annotation of {key!r} in the tool {name}: the model is told the type")
    return parameters


def _docstring(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Return the description and that of each argument."""
    text = (inspect.getdoc(function) or "").strip()
    description, *sections = _SECTION.split(text)
    if not description.strip():
        raise ConfigError(f"expected a docstring in the tool {function.__name__}: the model is told what it does")
    told: dict[str, str] = {}
    for title, body in zip(sections[::2], sections[1::2]):
        if title in ("Args", "Arguments"):
            told |= _argument_lines(inspect.cleandoc(body))
    return " ".join(description.split()), told


def _argument_lines(body: str) -> dict[str, str]:
    told: dict[str, str] = {}
    name = ""
    for line in body.splitlines():
        found = None if line[:1].isspace() else _ARGUMENT.match(line)
        if found:
            name = found[1].lstrip("*")
            told[name] = found[2]
        elif name and line.strip():  # an indented line continues the argument above it
            told[name] = f"{told[name]} {line.strip()}"
    return told
