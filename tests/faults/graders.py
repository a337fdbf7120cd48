"""Graders in a module that imports nothing, so that a process that runs one starts in a second instead of ten."""

import os
import signal
import sys
import time


def odd_letters(completion: str) -> float:
    return float(sum(map(ord, completion)) % 2)


def killed(completion: str) -> float:
    if completion == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    return 1.0


def sleepy(completion: str) -> float:
    time.sleep(60)
    return 1.0


def talkative(completion: str) -> float:
    """Print 64 KiB."""
    print("word " * 2**13, end="\n" * 2**13 + "." * 2**14)
    return 0.0


async def talkative_later(completion: str) -> float:
    """Print 64 KiB when it is awaited."""
    return talkative(completion)


def loud(completion: str) -> float:
    """Print 64 KiB to standard error."""
    sys.stderr.write("word " * 2**13 + "." * 2**14 + "\n" * 2**13)
    return 0.0


def begins_once(completion: str) -> float:
    """Pay for a text that begins with an opened thought, once."""
    return float(completion.startswith("<think>\n") and completion.count("<think>") == 1)
