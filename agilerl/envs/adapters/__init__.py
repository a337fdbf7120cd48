"""Environments written for something else, as TextEnvs: each kind in one file, its package imported only there."""

from agilerl.envs.adapters.base import Adapter, AnyText
from agilerl.envs.adapters.kinds import as_text_env, make_env

__all__ = ["Adapter", "AnyText", "as_text_env", "make_env"]
