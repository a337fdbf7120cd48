"""Adapters from other libraries' environments to TextEnv: one file per kind, which alone imports that library."""

from agilerl.envs.adapters.base import Adapter, AnyText
from agilerl.envs.adapters.kinds import as_text_env, make_env

__all__ = ["Adapter", "AnyText", "as_text_env", "make_env"]
