"""Graders that misbehave when the completion asks for it; importable by the workers of IsolatedGrader."""

import os
import re
import signal
import time


def hostile(completion: str, answer: str) -> object:
    """Do what the completion says; a plain answer is compared."""
    return ACTS[completion]() if completion in ACTS else float(completion == answer)


def raises() -> float:
    raise ZeroDivisionError("no luck")


def hangs() -> float:
    while True:
        pass


def backtracks() -> float:
    return float(bool(re.match(r"(a+)+$", "a" * 60 + "!")))


def powers() -> float:
    return float(44**19**35)


def ignores_sigterm() -> float:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
    return 1.0


def forks() -> float:
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    time.sleep(600)
    return 1.0


def detaches() -> float:
    """Leave a process in a session of its own whose parent is gone, and which ends for SIGKILL only."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            with open(os.environ["DETACHED"], "a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(600)
        os._exit(0)
    os.wait()
    while not (os.path.exists(os.environ["DETACHED"]) and os.path.getsize(os.environ["DETACHED"])):
        time.sleep(0.01)
    return 0.0


def detaches_and_hangs() -> float:
    detaches()
    time.sleep(600)
    return 1.0


def detaches_and_leaves() -> float:
    detaches()
    os._exit(3)


def detaches_often() -> float:
    for _ in range(20):
        detaches()
    time.sleep(600)
    return 1.0


def allocates() -> float:
    return float(len(bytearray(10 * 2**30)))


def leaves() -> float:
    os._exit(0)


DETACHING = (detaches_and_hangs, detaches_and_leaves, detaches_often)
ACTS = {act.__name__: act for act in (raises, hangs, backtracks, powers, ignores_sigterm, forks, allocates, leaves)} | {
    "detaches": detaches,
    **{act.__name__: act for act in DETACHING},
    "none": lambda: None,
    "nan": lambda: float("nan"),
    "text": lambda: "0.5",
    "list": lambda: [1.0],
}


def batch(completions: list[str], answer: list[str]) -> list[float]:
    """Compare; take a while where it is asked for."""
    if "sleeps" in completions:
        time.sleep(0.3)
    return [float(text == right) for text, right in zip(completions, answer)]


def process(completion: str) -> float:
    """Return which process this is, and print something in passing."""
    print("a line that is no answer")
    return float(os.getpid())
