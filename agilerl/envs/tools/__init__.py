"""Tools from Python functions, and environments in which a model may call them."""

from agilerl.envs.tools.builtin import (
    FormatRewardWrapper,
    LocalSearch,
    PythonTool,
    SearchTool,
    calculator,
    calculator_env,
    python_env,
    search_env,
)
from agilerl.envs.tools.env import ToolEnv
from agilerl.envs.tools.parsers import MalformedCall, TextTagParser, ToolCall, ToolCallParser, parser_for
from agilerl.envs.tools.tool import Tool, ToolResult, tool_schema

__all__ = [
    "FormatRewardWrapper",
    "LocalSearch",
    "MalformedCall",
    "PythonTool",
    "SearchTool",
    "TextTagParser",
    "Tool",
    "ToolCall",
    "ToolCallParser",
    "ToolEnv",
    "ToolResult",
    "calculator",
    "calculator_env",
    "parser_for",
    "python_env",
    "search_env",
    "tool_schema",
]
