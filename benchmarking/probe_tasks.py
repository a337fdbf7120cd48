"""Where would learning start? Every task of reasoning_gym on one base, sampled as a run would sample it.

    python -m benchmarking.probe_tasks --model FOLDER --out benchmarking/results/probe_NAME.json
                                       [--questions 16] [--samples 4] [--tokens 32] [--longest 400]
                                       [--only TASK ...] [--page docs/probe.md]

The file gets a row for each task and format as soon as it is done; what it has is not asked again. ``after`` puts "The
answer is" before each answer, as a prefill. A row has the results of both rewards, from the same answers: ``score`` is
the task's own, ``exact`` is 1 for a full score and 0 otherwise. Tasks with longer prompts than ``--longest`` tokens on
average have the reason in place of results. ``--page`` writes the table to the end of a page.
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from time import process_time
from typing import Any

from agilerl.config.manifest import load_manifest
from agilerl.config.run import RunConfig
from agilerl.envs.upstream import known_tasks
from agilerl.errors import AgileRLError
from agilerl.training.preflight import Bases, session_of_one
from agilerl.training.probe import OFTEN, Probe, probe

PREFILL = [{"role": "user", "content": "{question}"}, {"role": "assistant", "content": "The answer is"}]
FEW = (
    "basic_arithmetic",
    "chain_sum",
    "gcd",
    "leg_counting",
    "letter_counting",
    "products",
    "spell_backward",
    "syllogism",
)
"""Tasks that are asked in every format."""


def settings(model: str, task: str, answer_format: str, tokens: int) -> RunConfig:
    """Return the settings of one row."""
    overrides = [
        f"network.pretrained_model_name_or_path={json.dumps(model)}",
        f"environment.task=reasoning_gym:{task}",
        "environment.reward=score",
        f"environment.answer_format={answer_format}",
        f"algorithm.max_output_tokens={tokens}",
    ]
    if answer_format == "after":
        overrides.append(f"environment.conversation_template={json.dumps(PREFILL)}")
    return load_manifest(None, overrides)


def exact(found: Probe) -> Probe:
    """Return the same answers, graded 1 for a full score and 0 otherwise."""
    groups = []
    for group in found.groups:
        answers = [replace(a, score=float(a.score >= 1 - 1e-9)) for a in group.answers]
        groups.append(replace(group, answers=answers))
    return replace(found, groups=groups)


def row(config: RunConfig, bases: Bases, questions: int, samples: int, longest: int) -> dict[str, Any]:
    """Return the results of one row, or the reason why it has none."""
    start = process_time()
    try:
        population = session_of_one(config, bases).population
    except AgileRLError as error:
        return {"reason": str(error)}
    try:
        asks = population.trial(0, questions, samples)
        prompt = fmean(len(ask.place.prompt_ids) for ask in asks)
        if prompt > longest:
            return {"prompt_tokens": round(prompt), "reason": f"prompts of {prompt:.0f} tokens"}
        found = probe(population, questions, samples)
    except AgileRLError as error:
        return {"reason": str(error)}
    finally:
        population.agents[0].clean_up()
        population.task.close()
    full, sample = exact(found), found.document()
    return {
        "prompt_tokens": round(prompt),
        **{name: {"reward": one.reward, "differ": one.differ} for name, one in (("exact", full), ("score", found))},
        "cut": found.cut,
        "no_answer": found.empty,
        "tokens": found.length,
        "prompt": sample["prompt"],
        "expected": sample["expected"],
        "answer": sample["answer"]["text"],
        "cpu_seconds": round(process_time() - start, 1),
    }


def table(document: dict[str, Any]) -> str:
    """Return a table of the tasks where learning starts at once; the other tasks and the formats in short."""
    asked = {name: one for name, one in document["rows"].items() if "reason" not in one}
    main = {name.partition(" ")[0]: one for name, one in asked.items() if name.endswith(" after")}

    def order(name: str) -> tuple[float, float, str]:
        return -main[name]["exact"]["differ"], -main[name]["score"]["differ"], name

    def names(found: Iterable[str]) -> str:
        return ", ".join(f"`{name}`" for name in sorted(found))

    def reached(level: float, *kinds: str) -> set[str]:
        return {name for name, one in main.items() if any(one[kind]["differ"] >= level for kind in kinds)}

    at_once, by_score, at_all = reached(OFTEN, "exact"), reached(OFTEN, "score"), reached(1e-9, "exact", "score")
    lines = [
        f"Of {len(main)} tasks that were asked, learning would start at once on {len(at_once)} with `exact` and on "
        f"{len(by_score)} with `score`.",
        "",
        "| task | exact | differ | score | differ | cut |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in sorted(at_once, key=order):
        one = main[name]
        both = " | ".join(f"{one[kind]['reward']:.3f} | {one[kind]['differ']:.0%}" for kind in ("exact", "score"))
        lines.append(f"| `{name}` | {both} | {one['cut']:.0%} |")
    lines += ["", f"At once with `score` only: {names(by_score - at_once)}."]
    lines += ["", f"Slowly: {names(at_all - by_score - at_once)}."]
    lines += ["", f"No signal with either: {names(main.keys() - at_all)}."]
    others = [name.partition(" ")[0] for name in document["rows"] if name.endswith(" after") and name not in asked]
    if others:
        lines += ["", f"Not asked, because their prompts are too long: {names(others)}."]
    formats = sorted({name.partition(" ")[2] for name in asked} - {"after"})
    if formats:
        lines += ["", f"In other formats, the mean of {len(FEW)} tasks:", ""]
        lines += ["| format | exact | differ | no answer | cut |", "| --- | ---: | ---: | ---: | ---: |"]
    for kind in formats:
        rows = [asked[name] for name in asked if name.partition(" ")[2] == kind]
        reward, differ = (fmean(one["exact"][key] for one in rows) for key in ("reward", "differ"))
        silent, cut = (fmean(one[key] for one in rows) for key in ("no_answer", "cut"))
        lines.append(f"| `{kind}` | {reward:.3f} | {differ:.0%} | {silent:.0%} | {cut:.0%} |")
    return "\n".join(lines) + "\n"


MARK = "<!-- probe_smollm2 -->\n"


def main() -> None:
    """Measure what the file does not have yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    for name, value in (("questions", 16), ("samples", 4), ("tokens", 32), ("longest", 400)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--only", nargs="+", help="these tasks alone")
    parser.add_argument("--page", type=Path, help="a page that ends with the table")
    given = parser.parse_args()
    asked = {name: getattr(given, name) for name in ("questions", "samples", "tokens", "longest")}
    document = {"model": Path(given.model).name, **asked, "rows": {}}
    if given.out.exists():
        document = json.loads(given.out.read_text())
        assert {name: document[name] for name in asked} == asked, "the file has rows of other settings"
    # The first answers of many tasks are more telling than those of few in all formats.
    tasks = given.only or [name for name in known_tasks() if name != "composite"]
    wanted = [(task, "after") for task in tasks] + [
        (task, f) for f in ("tags", "whole") for task in FEW if task in tasks
    ]
    bases = Bases()
    for task, answer_format in wanted:
        name = f"{task} {answer_format}"
        if name in document["rows"]:
            continue
        config = settings(given.model, task, answer_format, given.tokens)
        document["rows"][name] = found = row(config, bases, given.questions, given.samples, given.longest)
        given.out.write_text(json.dumps(document, indent=1) + "\n")
        print(name, found.get("reason") or f"{found['exact']} {found['score']} {found['cpu_seconds']} s", flush=True)
    if given.page is not None:
        text = given.page.read_text(encoding="utf-8").partition(MARK)[0]
        given.page.write_text(f"{text}{MARK}\n{table(document)}", encoding="utf-8")


if __name__ == "__main__":
    main()
