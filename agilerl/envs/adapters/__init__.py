"""Adapters from other libraries' environments to TextEnv: each other library is imported in one file."""

from agilerl.envs.adapters.base import Adapter, AnyText
from agilerl.envs.adapters.packages import as_text_env, make_env

__all__ = ["Adapter", "AnyText", "as_text_env", "make_env"]
