"""Tools from Python functions, and environments in which a model may call them."""

from agilerl.envs.tools.env import ToolEnv
from agilerl.envs.tools.format_reward import FormatRewardWrapper
from agilerl.envs.tools.parsers import MalformedCall, TextTagParser, ToolCall, ToolCallParser, parser_for
from agilerl.envs.tools.search import SearchTool
from agilerl.envs.tools.tool import Tool, ToolResult, tool_schema

__all__ = [
    "FormatRewardWrapper",
    "MalformedCall",
    "SearchTool",
    "TextTagParser",
    "Tool",
    "ToolCall",
    "ToolCallParser",
    "ToolEnv",
    "ToolResult",
    "parser_for",
    "tool_schema",
]
