"""What the pages show for starting, resuming and finishing a run, as a reader types it: killed, typed again, finished.

Their commands set no learning rate, and neither does the main job: what the base or the task supplies is resumed, too.
"""

import shlex
import time
from pathlib import Path

import pytest

from tests import programs
from tests.test_readme import PAGES, commands, words, workplace
from tests.training.small_runs import environment

pytestmark = [pytest.mark.model, pytest.mark.processes]

__all__ = ["workplace"]
AUTO, RESUME = "--resume auto", "agilerl resume runs/mine"
QUICK = "environment.data_batch_size_per_gpu=8 environment.eval_prompts=16 environment.test_prompts=16"
"""For a run that would take minutes."""
NO_ALGORITHM = "environment: {task: 'reasoning_gym:gcd', params: {max_value: 60}}\n"
NAMED = {
    "default": f"agilerl train --out runs/mine {AUTO}",
    "no algorithm": f"agilerl train bare.yaml --out runs/mine {AUTO}",
    "what init writes": f"agilerl train my.yaml --allow-code --out runs/mine {AUTO}",
    "passes over rows": f"agilerl train my.yaml --allow-code training.num_epochs=2 --out runs/mine {AUTO}",
    "several processes": (f"torchrun --standalone --nproc-per-node 2 -m agilerl train --out runs/mine {AUTO}"),
    "one agent on two": (
        f"torchrun --nproc-per-node 2 -m agilerl.cli train bare.yaml --out runs/mine training.pop_size=1 {AUTO}"
    ),
}
"""The README's command in the states in which readers meet it."""


def shown_on_pages() -> dict[str, str]:
    """Return the commands of pages that name a run's directory and need one machine without a hub or vLLM."""
    found = {}
    for page in PAGES:
        for command in commands(page):
            program, *rest = words(command)
            options = shlex.join(rest)
            if program == "agilerl" and rest[:1] == ["train"] and "--out" in rest and "--replay" not in rest:
                found[options] = command
    return found


SHOWN = shown_on_pages()


def arguments_of(command: str) -> list[str]:
    """Return how Python starts a program of this environment."""
    program, *rest = words(command)
    return ["-m", {"agilerl": "agilerl", "torchrun": "torch.distributed.run"}[program], *rest]


def root_of(command: str) -> Path:
    arguments = words(command)
    return Path(arguments[arguments.index("--out") + 1])


def killed_at_its_first_checkpoint(command: str) -> None:
    """Start it; SIGKILL to it as soon as there is a checkpoint, or fail if it ends before.

    What it started ends soon, too, because its output ends; the workers of a launcher say once how to continue.
    """
    checkpoints = root_of(command) / "checkpoints"
    with programs.Program(*arguments_of(command), cwd=Path.cwd(), env=environment()) as program:
        begun = time.monotonic()
        while not list(checkpoints.glob("[0-9]*")):
            assert program.poll() is None, program.communicate()
            assert time.monotonic() - begun < 200
            time.sleep(0.02)
        program.kill()
        killed = time.monotonic()
        output, errors = program.communicate()
    assert time.monotonic() - killed < 60
    assert "Traceback" not in errors
    assert errors.count("agilerl resume") == command.startswith("torchrun"), errors
    assert not (root_of(command) / "summary.json").exists(), output


def typed_again_until_finished(command: str) -> None:
    """Resume it; and once more, but for launchers, as their processes import everything and do the same."""
    again = command if AUTO in command else f"agilerl resume {root_of(command)}"
    sentences = (f"Resuming {root_of(command)}", "nothing left to do")
    for sentence in sentences[:1] if command.startswith("torchrun") else sentences:
        done = programs.run(*arguments_of(again), cwd=Path.cwd(), env=environment(), timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        assert sentence in done.stdout


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.nightly] * (name == "one agent on two")) for name in NAMED]
)
def test_the_resume_command(name: str, workplace: Path) -> None:
    (workplace / "bare.yaml").write_text(NO_ALGORITHM)
    if "my.yaml" in NAMED[name]:
        assert programs.run("-m", "agilerl", "init", cwd=workplace, env=environment()).returncode == 0
        rows = (workplace / "my_rows.jsonl").read_text().splitlines(keepends=True)
        (workplace / "my_rows.jsonl").write_text("".join(rows[:48]))
    command = f"{NAMED[name]} {QUICK} {'' if 'num_epochs' in NAMED[name] else 'training.max_steps=768'}"
    killed_at_its_first_checkpoint(command)
    typed_again_until_finished(command)


LONG = ("runs/sweep", "runs/other")
"""Commands that take most of a minute, or differ in a rate only; the others start, die and finish in the same ways."""
SHORTER = {
    "mine.yaml": " training.max_steps=2048",
    "spell.yaml": " training.max_steps=768 environment.test_prompts=50",
    # The embedded model stands in for SmolLM2, and has no answer to its task.
    "smollm2.yaml": " training.preflight=off training.threads=1 training.max_steps=2048",
}
"""What is added to a command, by a word of it."""


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=[pytest.mark.nightly] * any(name in c for name in LONG), id=i) for i, c in SHOWN.items()],
)
def test_commands_of_pages(command: str, workplace: Path) -> None:
    command += "".join(more for word, more in SHORTER.items() if word in command)
    killed_at_its_first_checkpoint(command)
    typed_again_until_finished(command)
