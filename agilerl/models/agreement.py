"""What each process of a group found out by itself becomes what all of them know."""

import json
from collections.abc import Callable

from agilerl import errors
from agilerl.errors import AgileRLError
from agilerl.models.lockstep import Lockstep
from agilerl.processes import Processes

__all__ = ["agreed"]

_FINE, _FAILED = b"\0", b"\1"
_ERRORS: dict[str, type[AgileRLError]] = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, AgileRLError)
}


def agreed(processes: Processes, compute: Callable[[], bytes], lockstep: Lockstep | None = None) -> list[bytes]:
    """Return what ``compute`` gave in every process, in the order of their ranks.

    An error that is raised on purpose in one process is raised in all of them, so that all end with the same sentence.
    Raises EngineError where a process is lost.
    """
    failed: AgileRLError | None = None
    try:
        sent = _FINE + compute()
    except AgileRLError as error:
        failed = error
        sent = _FAILED + json.dumps([type(error).__name__, str(error)]).encode()
    if lockstep is not None:
        lockstep.catch_up()
    received = processes.gather(sent)
    for part in received:
        if failed is None and part[:1] == _FAILED:
            kind, message = json.loads(part[1:])
            failed = _ERRORS.get(kind, AgileRLError)(message)
    if failed is not None:
        failed.everywhere = True
        raise failed
    return [part[1:] for part in received]
