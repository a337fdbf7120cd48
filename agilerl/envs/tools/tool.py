"""A tool: a Python function with a schema, checked arguments and a time limit; errors become text."""

import asyncio
import inspect
import json
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic.json_schema import GenerateJsonSchema

from agilerl.checks.arguments import Name, Positive, checked, nearest, shown
from agilerl.errors import ConfigError

ErrorKind = Literal["malformed", "unknown_tool", "bad_arguments", "raised", "timeout", "too_many"]
"""What went wrong with a call. ``too_many``: more calls in one turn than are allowed."""

MOST_STUCK = 4
CLEAN_UP = 1.0
"""Seconds after the timeout until a coroutine is cancelled, so that its thread ends."""

_SECTION = re.compile(r"^(Args|Arguments|Returns|Yields|Raises|Examples?|Notes?):\s*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^\*{0,2}(\w+)(?:\s*\([^)]*\))?:(.*(?:\n(?:\s.*)?)*)", re.MULTILINE)
"""A name, and its description with the indented lines that continue it."""


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

    # transformers.utils.get_json_schema makes only a schema. With pydantic, schema and check are one thing and cannot
    # disagree about constraints, literals and nested models; tests compare with get_json_schema where both apply.

    @checked
    def __init__(self, function: Callable[..., Any], *, name: Name | None = None, timeout: Positive = 10.0) -> None:
        """Read the function's signature and docstring.

        Args:
            function: the function to call; its schema is :func:`agilerl.envs.tools.tool_schema`.
            name: the tool's name for the model; by default the function's name.
            timeout: seconds, more than 0.
        """
        if not inspect.isfunction(function) and not inspect.ismethod(function):
            raise ConfigError(f"expected a Python function or method as a tool, found {shown(function)}")
        self.function, self.timeout, self.name = function, timeout, name or function.__name__
        self._stuck: list[threading.Thread] = []
        parameters = _parameters(function)
        description, of_arguments = _docstring(function)
        if unknown := sorted(set(of_arguments) - set(parameters)):
            raise ConfigError(
                f"the docstring of the tool {self.name} describes {', '.join(unknown)}, which it does not take; "
                f"{nearest(unknown[0], parameters)}"
            )
        # Aliases, because a field name must not clash with an attribute of pydantic models (json, copy, schema).
        fields: dict[str, Any] = {}
        for position, (key, parameter) in enumerate(parameters.items()):
            default = ... if parameter.default is inspect.Parameter.empty else parameter.default
            about = Field(default, alias=key, description=of_arguments.get(key))
            fields[f"argument_{position}"] = (parameter.annotation, about)
        try:
            self._model: type[BaseModel] = create_model(self.name, __config__=ConfigDict(extra="forbid"), **fields)
            self.parameters: dict[str, Any] = self._model.model_json_schema(schema_generator=_Untitled)
        except (PydanticSchemaGenerationError, PydanticUserError, TypeError, ValueError) as error:
            raise ConfigError(
                f"the tool {self.name} has an argument without a JSON schema; annotate it with a type that JSON has "
                f"(str, int, float, bool, list, dict, Literal, a pydantic model): {str(error).splitlines()[0]}"
            ) from error
        # The generator omits the titles of fields; the model's remains.
        self.parameters.pop("title", None)
        self._properties: dict[str, Any] = self.parameters.setdefault("properties", {})
        about_function = {"name": self.name, "description": description, "parameters": self.parameters}
        self.schema: dict[str, Any] = {"type": "function", "function": about_function}
        """The JSON schema that chat templates take."""

    def __repr__(self) -> str:
        return f"Tool({self.signature})"

    @property
    def signature(self) -> str:
        """The call in one line, ``add(a: integer; b: integer, optional)``, for messages to the model."""
        required = self.parameters.get("required", [])
        parts = [
            f"{name}: {_kind(schema)}{'' if name in required else ', optional'}"
            for name, schema in self._properties.items()
        ]
        return f"{self.name}({'; '.join(parts)})"

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments as the types of the signature; omitted ones stay omitted.

        Harmless conversions are made ("5" for a number, JSON text for a list), because a model should not have to guess
        the spelling; true and false are not numbers. Raises ConfigError for arguments that do not fit.
        """
        problems, values = [], {}
        for name, value in arguments.items():
            kind = self._properties.get(name, {}).get("type")
            if name not in self._properties:
                problems.append(f"unknown argument {name!r}; {nearest(name, self._properties)}")
            elif isinstance(value, bool) and kind in ("integer", "number"):
                problems.append(f"argument {name!r}: a number is expected, found {shown(value)}")
            else:  # untyped call formats write lists and objects as text
                values[name] = json_or_text(value) if kind in ("array", "object") else value
        if not problems:
            try:
                model, about = self._model(**values), self._model.model_fields
                return {about[field].alias or field: getattr(model, field) for field in model.model_fields_set}
            except ValidationError as error:
                problems = [_problem(item) for item in error.errors()]
        raise ConfigError(f"expected {self.signature}; {'; '.join(problems)}")

    def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Check the arguments, call the function and return its result, or the error, as text.

        Text is returned unchanged, anything else as JSON. A ConfigError of the function is raised: it is a mistake of
        the user, not of the model.
        """
        try:
            arguments = self.check(arguments)
        except ConfigError as error:
            return ToolResult(f"Error: {error}", "bad_arguments")
        self._stuck = [thread for thread in self._stuck if thread.is_alive()]
        if len(self._stuck) >= MOST_STUCK:
            return ToolResult(f"Error: {self.name} is busy: earlier calls have not returned yet", "timeout")
        outcome: Future[ToolResult] = Future()
        # A daemon, so that a function that never returns does not keep the process alive.
        thread = threading.Thread(target=self._run, args=(arguments, outcome), name=f"tool {self.name}", daemon=True)
        thread.start()
        try:
            return outcome.result(self.timeout)
        except TimeoutError:
            self._stuck.append(thread)
            return ToolResult(f"Error: {self.name} took longer than {self.timeout:g} seconds", "timeout")

    def _run(self, arguments: Mapping[str, Any], outcome: Future[ToolResult]) -> None:
        try:
            result = self.function(**arguments)
            if inspect.isawaitable(result):
                result = asyncio.run(asyncio.wait_for(result, self.timeout + CLEAN_UP))
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
            outcome.set_result(ToolResult(text))
        except ConfigError as error:
            outcome.set_exception(error)
        except BaseException as error:  # a tool that calls sys.exit() has failed as well
            outcome.set_result(ToolResult(f"Error: {self.name} raised {type(error).__name__}: {error}", "raised"))


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return ``{"type": "function", "function": {"name", "description", "parameters"}}`` of a function.

    Types come from the annotations (all that pydantic reads: ``Literal``, ``list[float]``, ``Annotated[int,
    Field(ge=0)]``, models, ...), descriptions from a Google-style docstring, its first part and ``Args:``.

    Raises:
        ConfigError: not a plain function or method, no docstring, a parameter without annotation, ``*args``,
            ``**kwargs`` or a positional-only parameter, or an annotation without a JSON schema.
    """
    return Tool(function).schema


def json_or_text(value: Any) -> Any:
    """Return what a text says in JSON; other values, and text that is no JSON, as they are."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return value


class _Untitled(GenerateJsonSchema):
    """Omits titles, which repeat the names and cost tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _kind(schema: Mapping[str, Any]) -> str:
    """Return the type of an argument in words."""
    if "enum" in schema:
        return "one of " + ", ".join(repr(value) for value in schema["enum"])
    return " or ".join(str(part.get("type", "value")) for part in schema.get("anyOf", [schema]))


def _problem(item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] == "missing":
        return f"argument {path!r} is missing"
    return f"argument {path!r}: {item['msg'][0].lower()}{item['msg'][1:]}, found {shown(item['input'])}"


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    name = function.__name__
    try:
        # Annotations may be texts, as in modules with postponed annotations.
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
    description, *sections = _SECTION.split(inspect.getdoc(function) or "")
    if not description.strip():
        raise ConfigError(f"expected a docstring in the tool {function.__name__}: the model is told what it does")
    bodies = [body for title, body in zip(sections[::2], sections[1::2]) if title in ("Args", "Arguments")]
    lines = [match for body in bodies for match in _ARGUMENT.findall(inspect.cleandoc(body))]
    return " ".join(description.split()), {name: " ".join(text.split()) for name, text in lines}
