"""Graders in a module that imports nothing, so that a process that runs one starts in a second instead of ten."""

import os
import signal
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
