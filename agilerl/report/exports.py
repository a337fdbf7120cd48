"""An evaluation as files: its own, a task and results of lm-eval, and a log of Inspect. It does not need torch."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from agilerl.runs.atomic import commit_folder

_STOPS = {"stop": "stop", "length": "max_tokens"}
_UNKNOWN = "unknown"


def write_evaluation(folder: Path, found: Mapping[str, Any], *, made: datetime | None = None) -> None:
    """Write an evaluation's document (``Evaluation.document()``) as a new folder, as a whole or not at all.

    * ``results.json``: the document.
    * ``questions.jsonl``: the questions with their right answers, for another model.
    * ``lm_eval/``: NAME.yaml, a task of lm-eval on these questions, if all have a right answer; ``results_NAME.json``
      and ``samples_NAME.jsonl``, what lm-eval would have written about the adapter.
    * ``inspect/NAME.json``: a log of Inspect (version 2) of the adapter, which ``inspect view`` shows.

    ``made`` is the time that they name (None: now). Raises CheckpointError if the folder exists, and WriteError.
    """
    moment, name = made or datetime.now(UTC), re.sub(r"\W+", "_", str(found["task"])).strip("_") or "task"

    def write(place: Path) -> None:
        _write(place / "results.json", json.dumps(found, indent=1, allow_nan=False))
        rows = [{"id": n, "question": a["question"], "answer": a["answer"]} for n, a in enumerate(found["answers"])]
        has_answers = all(row["answer"] is not None for row in rows)  # episodes have none
        _write(place / "questions.jsonl", _lines(rows))
        (place / "lm_eval").mkdir()
        if has_answers:
            _write(place / "lm_eval" / f"{name}.yaml", _task(name, folder, found))
        results = _lm_eval(name, found, moment)
        _write(place / "lm_eval" / f"results_{name}.json", json.dumps(results, indent=1, allow_nan=False))
        _write(place / "lm_eval" / f"samples_{name}.jsonl", _lines(_lm_eval_samples(found)))
        (place / "inspect").mkdir()
        log = _inspect(name, found, moment.isoformat(timespec="seconds"))
        _write(place / "inspect" / f"{name}.json", json.dumps(log, indent=1, allow_nan=False))

    commit_folder(folder, write, manifest=False)


def _write(path: Path, text: str) -> None:
    path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)


def _limit(found: Mapping[str, Any]) -> int:
    return int(found["settings"].get("max_new_tokens") or 1024)


# -- lm-eval: https://github.com/EleutherAI/lm-evaluation-harness -----------------------------------------------------


def _task(name: str, folder: Path, found: Mapping[str, Any]) -> str:
    """Return a task that asks these questions and compares answers as texts, which is not every task's own reward."""
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder.absolute() / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": _limit(found)},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
    model = f"--model hf --model_args {_model_args(found)} --apply_chat_template"
    return (
        f"# lm_eval {model} --include_path {folder / 'lm_eval'} --tasks {name}\n{yaml.safe_dump(task, sort_keys=False)}"
    )


def _model_args(found: Mapping[str, Any]) -> str:
    settings = found["settings"]
    return f"pretrained={settings.get('base_path', _UNKNOWN)},peft={settings.get('adapter', _UNKNOWN)}"


def _lm_eval(name: str, found: Mapping[str, Any], moment: datetime) -> dict[str, Any]:
    metrics: dict[str, Any] = {"alias": name}
    for metric, value in found["adapter"].items():
        own = "reward" if metric == "greedy" else metric
        metrics |= {f"{own},none": value["mean"], f"{own}_stderr,none": value["stderr"]}
    count = found["questions"]
    return {
        "results": {name: metrics},
        "group_subtasks": {name: []},
        "configs": {name: {"task": name, "output_type": "generate_until", "num_fewshot": 0}},
        "versions": {name: 1.0},
        "n-shot": {name: 0},
        "higher_is_better": {
            name: {m.removesuffix(",none"): True for m in metrics if "stderr" not in m and m != "alias"}
        },
        "n-samples": {name: {"original": count, "effective": count}},
        "config": {
            "model": "agilerl",
            "model_args": _model_args(found),
            "gen_kwargs": {"do_sample": False, "max_gen_toks": _limit(found)},
            "random_seed": found["settings"].get("seed"),
        },
        "git_hash": None,
        "date": moment.timestamp(),
        "model_source": "agilerl",
        "model_name": str(found["settings"].get("adapter", _UNKNOWN)),
    }


def _lm_eval_samples(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for number, one in enumerate(found["answers"]):
        doc = {"id": number, "question": one["question"], "answer": one["answer"]}
        text, target = one["adapter"]["greedy"]["text"], str(one["answer"])
        rows.append(
            {
                "doc_id": number,
                "doc": doc,
                "target": target,
                "arguments": {"gen_args_0": {"arg_0": one["question"], "arg_1": {"do_sample": False}}},
                "resps": [[text]],
                "filtered_resps": [text],
                "filter": "none",
                "metrics": ["reward"],
                "doc_hash": _sha256(json.dumps(doc, sort_keys=True)),
                "prompt_hash": _sha256(one["question"]),
                "target_hash": _sha256(target),
                "reward": one["adapter"]["greedy"]["score"],
            }
        )
    return rows


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


# -- Inspect: https://inspect.aisi.org.uk -----------------------------------------------------------------------------


def _inspect(name: str, found: Mapping[str, Any], moment: str) -> dict[str, Any]:
    """Return a log in which epoch 1 is the greedy answers, and the others are those that were drawn."""
    settings, model = found["settings"], f"agilerl/{found['settings'].get('adapter', _UNKNOWN)}"
    greedy, count = found["adapter"]["greedy"], found["questions"]
    epochs = 1 + max((len(one["adapter"]["samples"]) for one in found["answers"]), default=0)
    identity = _sha256(f"{moment}{model}{name}")[:22]
    metrics = {
        metric: {"name": metric, "value": math.nan if value is None else value}
        for metric, value in (("mean", greedy["mean"]), ("stderr", greedy["stderr"]))
        if value is not None
    }
    samples = [
        _inspect_sample(number, epoch, one["question"], str(one["answer"] or ""), answer, model)
        for number, one in enumerate(found["answers"], start=1)
        for epoch, answer in enumerate([one["adapter"]["greedy"], *one["adapter"]["samples"]], start=1)
    ]
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "eval_id": identity,
            "run_id": identity,
            "created": moment,
            "task": name,
            "task_id": identity,
            "task_version": 0,
            "task_attribs": {},
            "task_args": {},
            "dataset": {"name": name, "samples": count, "sample_ids": list(range(1, count + 1)), "shuffled": False},
            "model": model,
            "model_args": {},
            "config": {"epochs": epochs},
            "packages": {},
            "metadata": {key: value for key, value in settings.items() if value is not None},
        },
        "plan": {"name": "plan", "steps": [], "config": {}},
        "results": {
            "total_samples": count * epochs,
            "completed_samples": len(samples),
            "scores": [{"name": "reward", "scorer": "reward", "params": {}, "metrics": metrics}],
        },
        "stats": {"started_at": moment, "completed_at": moment, "model_usage": {}},
        "samples": samples,
    }


def _inspect_sample(
    number: int, epoch: int, question: str, target: str, answer: Mapping[str, Any], model: str
) -> dict[str, Any]:
    said = {"role": "assistant", "content": answer["text"], "source": "generate"}
    stop = _STOPS.get(answer["finish_reason"], _UNKNOWN)
    scored = {} if answer["score"] is None else {"reward": {"value": answer["score"], "answer": answer["text"]}}
    return {
        "id": number,
        "epoch": epoch,
        "input": question,
        "target": target,
        "messages": [{"role": "user", "content": question, "source": "input"}, said],
        "output": {"model": model, "choices": [{"message": said, "stop_reason": stop}]},
        "scores": scored,
        "metadata": {"greedy": epoch == 1, "tokens": answer["length"]},
        "store": {},
        "events": [],
        "model_usage": {},
        "attachments": {},
    }
