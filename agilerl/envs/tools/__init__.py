"""Tools from Python functions, and environments in which a model may call them."""

from agilerl.envs.tools.calculator import calculator
from agilerl.envs.tools.calls import MalformedCall, ToolCall, ToolCallParser
from agilerl.envs.tools.corpus import LocalSearch
from agilerl.envs.tools.env import ToolEnv
from agilerl.envs.tools.environments import calculator_env, python_env, search_env
from agilerl.envs.tools.format_reward import FormatRewardWrapper
from agilerl.envs.tools.parsers import TextTagParser, parser_for
from agilerl.envs.tools.python import PythonTool
from agilerl.envs.tools.schema import tool_schema
from agilerl.envs.tools.search import SearchTool
from agilerl.envs.tools.tool import Tool, ToolResult

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
