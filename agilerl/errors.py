"""Every error that a user can cause or meet, in one small tree."""


class AgileRLError(Exception):
    """Base of all errors raised on purpose; its message says what was expected, what was found and what to do."""

    everywhere: bool = False
    """Whether every process that works on the same agents raises it, so that one of them is enough to say it."""


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
    """The disk refused: it is full, broken, or may not be written to."""


class EngineError(AgileRLError):
    """A rollout engine cannot do what was asked of it."""


class MemoryExhaustedError(EngineError):
    """Memory does not hold the least that can be computed at once."""


def how_to_install(extra: str) -> str:
    """Return the command that installs an optional part, ``math`` say, for the end of a message.

    The one place that knows it: PyPI has another project by the name of this one, so the source is installed.
    """
    return f"pip install -e '.[{extra}]' in the folder of agilerl's source"
