"""Every error that a user may cause or see, in one small hierarchy."""


class AgileRLError(Exception):
    """Base of all errors raised on purpose; its message says what was expected, what was found and what to do."""

    everywhere: bool = False
    """Whether every process that works on the same agents raises it, so that only one of them needs to report it."""


class ConfigError(AgileRLError, ValueError):
    """A setting is unknown, out of range, or contradicts another one."""


class EnvError(AgileRLError):
    """An environment or dataset breaks its protocol, or does not exist."""


class RewardError(AgileRLError):
    """A reward function raised, or returned something that is not a finite number."""


class RewardTimeoutError(RewardError):
    """A reward function did not answer in time."""


class CheckpointError(AgileRLError):
    """A checkpoint or run directory is missing, damaged, in use, or does not fit."""


class WriteError(CheckpointError):
    """Writing failed: the disk is full, broken or not writable."""


class EngineError(AgileRLError):
    """A rollout engine cannot do what was asked of it."""


class MemoryExhaustedError(EngineError):
    """Memory is too small even for the smallest batch."""


def how_to_install(extra: str) -> str:
    """Return the command that installs an optional dependency group, for instance ``math``, for a message.

    It installs from source, because the project of this name on PyPI is a different one.
    """
    return f"pip install -e '.[{extra}]' in the folder of agilerl's source"
