"""The process that ``IsolatedGrader`` runs a grader in: a line of JSON in, a line of JSON out.

Started as ``python worker.py SETTINGS`` by path, so that it finds the modules that its owner finds before it imports
anything of the package; by ``sandbox_child.py contain``, which ends what it starts.
"""

import importlib
import json
import os
import resource
import signal
import sys
from pathlib import Path


def main() -> None:
    """Answer requests until the input ends."""
    settings = json.loads(sys.argv[1])
    # Before the grader is imported: whatever it prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    sys.path[:] = settings["path"]
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    memory = settings["memory_bytes"] if most == resource.RLIM_INFINITY else min(settings["memory_bytes"], most)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    module, _, name = settings["grader"].rpartition(":")
    if module.endswith(".py"):
        from agilerl.source_files import run_file

        grader = run_file(Path(module).absolute())
    else:
        grader = importlib.import_module(module)
    for part in name.split("."):
        grader = getattr(grader, part)
    from agilerl.rewards.grader import attempt_grader

    print("ready", file=answers, flush=True)
    own = os.getpid()
    for line in sys.stdin:
        request = json.loads(line)
        # The default action of the alarm ends this process even when its parent is gone and a loop in C holds the GIL.
        signal.setitimer(signal.ITIMER_REAL, settings["timeout"] + 1)
        (outcome,) = attempt_grader(grader, [request["completion"]], [request["row"]], [request["prompt"]])  # type: ignore[arg-type]
        signal.setitimer(signal.ITIMER_REAL, 0)
        if os.getpid() != own:  # the grader forked: only one of the two answers
            os._exit(0)
        answer = {"error": str(outcome)} if isinstance(outcome, Exception) else {"score": outcome}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
