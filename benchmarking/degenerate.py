"""What answers that solve nothing earn on every reasoning_gym task with default parameters.

    python benchmarking/degenerate.py [--questions 100] [--tasks gcd coin_flip] [--write]

``chance`` is what the right answer of the next question earns. An answer pays if its mean reward exceeds chance by more
than 1 / sqrt(questions), two standard errors of a question with two answers: 0.1 for 100. Each task has the same
questions every time. Answers that take the scorer's process more than a second are given up. Prints a line of JSON for
each task; ``--write`` puts it into the results, and makes the table of what plans name.
"""

import argparse
import json
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS, NAMED = ROOT / "benchmarking/results/degenerate_answers.json", ROOT / "agilerl/envs/shortcuts.json"
sys.path.insert(0, str(ROOT))

from agilerl.envs.procedural import ReasoningGymTask  # noqa: E402
from agilerl.envs.upstream import known_tasks  # noqa: E402

CONSTANTS = (
    *("", "nan", "NaN", "nan + nani", "nanj", "inf", "-inf", "1e400", "0", "1", "-1", "2", "3", "100", "0.0", "1.0"),
    *(
        "True",
        "False",
        "Yes",
        "No",
        "None",
        "?",
        ".",
        "-",
        "{}",
        "[]",
        "()",
        "[[]]",
        "\\boxed{}",
        "1/0",
        "a",
        "x",
        "A",
        "B",
    ),
    *("17 or 18", "True or False", "Yes or No", "True False", "the answer", "I don't know", "infeasible", "{question}"),
    *(" ".join(map(str, range(100))), ", ".join(map(str, range(100))), "\n".join(map(str, range(40)))),
    *("2*7 + 3 + 7", "4*6*1*1", "UDLR" * 100, "A or B or C or D", "((((", "1 + 1"),
)
"""Texts that do not depend on the question."""
WITH_THE_ANSWER = ("the right answer amid nonsense", "the right answer after numbers")
"""Tries that contain the right answer, so they are no shortcut for a model that does not know it."""


def tries(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return answers to a question by what they are; ``rows`` are all questions, for what answers look like."""
    question, right = str(row["question"]), row["answer"]
    numbers = re.findall(r"-?\d+(?:\.\d+)?", question)
    formulas = re.findall(r"[\d.()]+(?:\s*[-+*/^]\s*[\d.()]+)+", question)
    found = {f"`{text if len(text) < 30 else text[:20] + '...'}`": text for text in CONSTANTS}
    found |= {
        "the question": question,
        "the question and =": f"{question} =",
        "the question's numbers": " ".join(numbers),
    }
    found |= {"the question's last line": question.strip().splitlines()[-1]}
    for name, parts in {"number": numbers, "formula": formulas}.items():
        if parts:
            found |= {f"the question's first {name}": parts[0], f"the question's last {name}": parts[-1]}
    common = [text for text, _ in Counter(r["answer"] for r in rows if r["answer"] is not None).most_common(5)]
    if common:
        found |= {f"`{common[0]}`" if len(common[0]) < 30 else "the commonest answer": common[0]}
        found |= {"the commonest two": " or ".join(common[:2]), "the commonest five": " ".join(common)}
    if right is not None:
        nonsense = (f'zzz "{right}" qqq zzz {right}x', f"{' '.join(map(str, range(30)))} {right} or maybe not {right}.")
        found |= dict(zip(WITH_THE_ANSWER, nonsense))
    return found


def measured(name: str, questions: int) -> dict[str, tuple[float, float]]:
    """Return the mean reward of each try on a task, exact and as the score, with that of ``chance``."""
    task = ReasoningGymTask(name, seed=5, exam_prompts=1, test_prompts=0, holdout="any", reward="score")
    rows = [task.row("train", place) for place in range(questions)]
    scores: dict[str, list[float]] = defaultdict(list)
    given_up = set()
    for row, other in zip(rows, [*rows[1:], rows[0]]):
        chance = {} if other["answer"] is None else {"chance": str(other["answer"])}
        for kind, text in (chance | tries(row, rows)).items():
            if kind not in given_up:
                start = perf_counter()
                scores[kind].append(task.reward(text, row) or 0.0)
                if perf_counter() - start > 1 and len(scores) > 2:  # the first one starts the process
                    given_up.add(kind)
    task.close()
    return {
        kind: (sum(score == 1.0 for score in found) / questions, sum(found) / questions)
        for kind, found in scores.items()
    }


def paying(means: Mapping[str, tuple[float, float]], questions: int) -> dict[str, tuple[str, float, float]]:
    """Return for both rewards the try that pays most, its mean and that of chance, if one pays; see the module.

    Tries that contain the right answer are named if no other pays, and for the exact reward only: part of a score is
    meant for them.
    """
    found = {}
    for place, reward in enumerate(("exact", "score")):
        chance = means.get("chance", (0.0, 0.0))[place]
        for known in (False, True) if reward == "exact" else (False,):
            rest = {
                kind: m[place] for kind, m in means.items() if kind != "chance" and (kind in WITH_THE_ANSWER) == known
            }
            best = max(rest, key=rest.__getitem__, default="")
            if best and rest[best] > chance + questions**-0.5 and reward not in found:
                found[reward] = (best, round(rest[best], 2), round(chance, 2))
    return found


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--tasks", nargs="*", default=[name for name in known_tasks() if name != "composite"])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    table = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in options.tasks:
        means = measured(name, options.questions)
        table[name] = {
            "pays": paying(means, options.questions),
            "means": {kind: mean for kind, mean in sorted(means.items()) if mean[1] > 0.05},
        }
        print(json.dumps({name: table[name]["pays"]}), flush=True)
    if options.write:
        named = {name: row["pays"] for name, row in table.items() if row["pays"]}
        for file, rows in ((RESULTS, table), (NAMED, named)):
            lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(rows.items()))
            file.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main()
