"""Schemas from signatures and docstrings; arguments that do not fit are refused in words."""

from functools import partial
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field
from transformers.utils import get_json_schema

from agilerl.envs.tools import Tool, tool_schema
from agilerl.errors import ConfigError
from tutorials.tools.calculator import calculator


def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", at: list[float] | None = None) -> str:
    """Tell the weather,
    as it will be.

    It may be wrong.

    Args:
        city: where; with the
            country after a comma
        days (int): how far ahead
        unit: of the temperature
        at: hours of the day: 0 to 24

    Returns:
        days: a sentence
    """
    return f"{city} {days} {unit} {at}"


def test_golden_schema() -> None:
    assert tool_schema(weather) == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the weather, as it will be. It may be wrong.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "where; with the country after a comma"},
                    "days": {"type": "integer", "default": 1, "description": "how far ahead"},
                    "unit": {"type": "string", "enum": ["C", "F"], "default": "C", "description": "of the temperature"},
                    "at": {
                        "anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}],
                        "default": None,
                        "description": "hours of the day: 0 to 24",
                    },
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }


def simple(a: int, b: float, c: str, d: bool, e: list[str], f: Literal["x", "y"], g: int = 3) -> None:
    """Do something.

    Args:
        a: first
        b: second
        c: third
        d: fourth
        e: fifth
        f: sixth
        g: seventh
    """


@pytest.mark.parametrize("function", [simple, calculator])
def test_agrees_with_transformers_where_both_apply(function: Any) -> None:
    ours, theirs = tool_schema(function)["function"], get_json_schema(function)["function"]
    assert (ours["name"], ours["description"]) == (theirs["name"], theirs["description"])
    parameters = dict(ours["parameters"])
    assert parameters.pop("additionalProperties") is False
    for schema in parameters["properties"].values():
        schema.pop("default", None)
    assert parameters == theirs["parameters"]


class Place(BaseModel):
    x: int
    y: int


def odd(json: str, copy: Annotated[int, Field(ge=0)] = 0, model_config: Place | None = None) -> None:
    """Take arguments with the names of pydantic's own attributes."""


def test_names_constraints_and_models() -> None:
    arguments = Tool(odd)
    assert arguments.parameters["properties"]["copy"]["minimum"] == 0
    assert arguments.check({"json": "a", "copy": 3}) == {"json": "a", "copy": 3}
    assert arguments.check({"json": "a", "model_config": {"x": 1, "y": 2}})["model_config"] == Place(x=1, y=2)
    with pytest.raises(ConfigError, match=r"'copy': .* 0, found -1"):
        arguments.check({"json": "a", "copy": -1})
    with pytest.raises(ConfigError, match=r"'model_config\.y' is missing"):
        arguments.check({"json": "a", "model_config": {"x": 1}})


class Bag:
    def take(self, count: int) -> int:
        """Take something."""
        return count


def no_arguments() -> None:
    """Do it."""


def test_methods_and_functions_without_arguments() -> None:
    assert list(tool_schema(Bag().take)["function"]["parameters"]["properties"]) == ["count"]
    assert tool_schema(no_arguments)["function"]["parameters"]["properties"] == {}
    assert Tool(no_arguments).check({}) == {}


@pytest.mark.parametrize(
    ("given", "checked"),
    [
        ({"city": "Ulm"}, {"city": "Ulm"}),
        ({"city": "Ulm", "days": "5"}, {"city": "Ulm", "days": 5}),
        ({"city": "Ulm", "days": 2.0, "at": [1, "2.5"]}, {"city": "Ulm", "days": 2, "at": [1.0, 2.5]}),
    ],
)
def test_arguments_that_fit(given: dict[str, Any], checked: dict[str, Any]) -> None:
    assert Tool(weather).check(given) == checked


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "argument 'city' is missing"),
        ({"city": 3}, "argument 'city': input should be a valid string, found 3"),
        ({"city": "Ulm", "days": "soon"}, "'days': input should be a valid integer"),
        ({"city": "Ulm", "days": True}, "'days': a number is expected, found True"),
        ({"city": "Ulm", "unit": "K"}, "'unit': input should be 'C' or 'F', found 'K'"),
        ({"city": "Ulm", "dais": 3}, "unknown argument 'dais'; did you mean 'days'?"),
        ({"citi": "Ulm"}, "did you mean 'city'?"),
    ],
)
def test_arguments_that_do_not_fit(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Tool(weather).check(given)
    assert said in str(caught.value)
    assert "expected weather(city: string; days: integer, optional; unit: one of 'C', 'F', optional" in str(
        caught.value
    )


def lists(items: list[int], settings: dict[str, int]) -> None:
    """Take lists."""


def test_lists_and_objects_may_come_as_json_text() -> None:
    assert Tool(lists).check({"items": "[1, 2]", "settings": '{"a": 1}'}) == {
        "items": [1, 2],
        "settings": {"a": 1},
    }
    with pytest.raises(ConfigError, match=r"'items': .*, found '\[1'"):
        Tool(lists).check({"items": "[1", "settings": {}})


def without_annotation(a) -> None:
    """Take something."""


def without_docstring(a: int) -> None: ...


def many(*args: int) -> None:
    """Take many."""


def other_argument(count: int) -> None:
    """Take some.

    Args:
        count: how many
        cuont: the same
    """


def no_schema(a: Bag) -> None:
    """Take a bag."""


def unreadable(a: "Missing") -> None:  # type: ignore[name-defined]  # noqa: F821
    """Take something."""


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (without_annotation, "annotation of 'a'"),
        (without_docstring, "expected a docstring"),
        (many, r"found \*args"),
        (other_argument, "describes cuont, which it does not take; did you mean 'count'"),
        (no_schema, "without a JSON schema"),
        (unreadable, r"read: .*'Missing'"),
        (partial(weather, "Ulm"), "Python function or method"),
    ],
)
def test_functions_that_are_no_tools(function: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tool_schema(function)
