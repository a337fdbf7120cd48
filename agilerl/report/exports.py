"""An evaluation as files: its own, a task and results of lm-eval, and a log of Inspect. It does not need torch."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from agilerl.runs.atomic import commit_folder

_STOPS = {"stop": "stop", "length": "max_tokens"}
_UNKNOWN = "unknown"


def write_evaluation(folder: Path, evaluation: Mapping[str, Any]) -> None:
    """Write an evaluation's document (``Evaluation.document()``) as a new folder, as a whole or not at all.

    * ``results.json``: the document.
    * ``questions.jsonl``: the questions with their right answers, for another model.
    * ``lm_eval/``: NAME.yaml, a task of lm-eval on these questions, if all have a right answer; ``results_NAME.json``
      and ``samples_NAME.jsonl``, what lm-eval would have written about the adapter.
    * ``inspect/NAME.json``: a log of Inspect (version 2) of the adapter, which ``inspect view`` shows.

    Raises CheckpointError if the folder exists, and WriteError.
    """
    moment, name = datetime.now(UTC), re.sub(r"\W+", "_", str(evaluation["task"])).strip("_") or "task"
    rows = [{"id": n, "question": a["question"], "answer": a["answer"]} for n, a in enumerate(evaluation["answers"])]
    texts = {
        "results.json": _dumps(evaluation),
        "questions.jsonl": _lines(rows),
        f"lm_eval/results_{name}.json": _dumps(_lm_eval(name, evaluation, moment)),
        f"lm_eval/samples_{name}.jsonl": _lines(_lm_eval_samples(evaluation)),
        f"inspect/{name}.json": _dumps(_inspect(name, evaluation, moment.isoformat(timespec="seconds"))),
    }
    if all(row["answer"] is not None for row in rows):  # episodes have none
        texts[f"lm_eval/{name}.yaml"] = _task(name, folder, evaluation)

    def write(temporary: Path) -> None:
        for file, text in texts.items():
            (temporary / file).parent.mkdir(exist_ok=True)
            (temporary / file).write_text(text.rstrip("\n") + "\n", encoding="utf-8")

    commit_folder(folder, write, manifest=False)


def _dumps(document: Mapping[str, Any]) -> str:
    return json.dumps(document, indent=1, allow_nan=False)


def _lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows)


def _limit(evaluation: Mapping[str, Any]) -> int:
    return int(evaluation["settings"].get("max_new_tokens") or 1024)


# -- lm-eval: https://github.com/EleutherAI/lm-evaluation-harness -----------------------------------------------------


def _task(name: str, folder: Path, evaluation: Mapping[str, Any]) -> str:
    """Return a task that asks these questions and compares answers as texts, which is not every task's own reward."""
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder.absolute() / "questions.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": [], "do_sample": False, "max_gen_toks": _limit(evaluation)},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
        "metadata": {"version": 1.0},
    }
    model = f"--model hf --model_args {_model_args(evaluation)} --apply_chat_template"
    return (
        f"# lm_eval {model} --include_path {folder / 'lm_eval'} --tasks {name}\n{yaml.safe_dump(task, sort_keys=False)}"
    )


def _model_args(evaluation: Mapping[str, Any]) -> str:
    settings = evaluation["settings"]
    return f"pretrained={settings.get('base_path', _UNKNOWN)},peft={settings.get('adapter', _UNKNOWN)}"


def _lm_eval(name: str, evaluation: Mapping[str, Any], moment: datetime) -> dict[str, Any]:
    metrics: dict[str, Any] = {"alias": name}
    for metric, value in evaluation["adapter"].items():
        # lm-eval names a metric with the filter of the answers, which is called none here.
        known_as = "reward" if metric == "greedy" else metric
        metrics |= {f"{known_as},none": value["mean"], f"{known_as}_stderr,none": value["stderr"]}
    count = evaluation["questions"]
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
            "model_args": _model_args(evaluation),
            "gen_kwargs": {"do_sample": False, "max_gen_toks": _limit(evaluation)},
            "random_seed": evaluation["settings"].get("seed"),
        },
        "git_hash": None,
        "date": moment.timestamp(),
        "model_source": "agilerl",
        "model_name": str(evaluation["settings"].get("adapter", _UNKNOWN)),
    }


def _lm_eval_samples(evaluation: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for number, one in enumerate(evaluation["answers"]):
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


def _inspect(name: str, evaluation: Mapping[str, Any], moment: str) -> dict[str, Any]:
    """Return a log in which epoch 1 is the greedy answers, and the others are those that were drawn."""
    settings, model = evaluation["settings"], f"agilerl/{evaluation['settings'].get('adapter', _UNKNOWN)}"
    greedy, count = evaluation["adapter"]["greedy"], evaluation["questions"]
    epochs = 1 + max((len(one["adapter"]["samples"]) for one in evaluation["answers"]), default=0)
    identity = _sha256(f"{moment}{model}{name}")[:22]
    metrics = {name: {"name": name, "value": greedy[name]} for name in ("mean", "stderr") if greedy[name] is not None}
    samples = [
        _inspect_sample(number, epoch, one, answer, model)
        for number, one in enumerate(evaluation["answers"], start=1)
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
    number: int, epoch: int, one: Mapping[str, Any], answer: Mapping[str, Any], model: str
) -> dict[str, Any]:
    message = {"role": "assistant", "content": answer["text"], "source": "generate"}
    stop = _STOPS.get(answer["finish_reason"], _UNKNOWN)
    scored = {} if answer["score"] is None else {"reward": {"value": answer["score"], "answer": answer["text"]}}
    return {
        "id": number,
        "epoch": epoch,
        "input": one["question"],
        "target": str(one["answer"] or ""),
        "messages": [{"role": "user", "content": one["question"], "source": "input"}, message],
        "output": {"model": model, "choices": [{"message": message, "stop_reason": stop}]},
        "scores": scored,
        "metadata": {"greedy": epoch == 1, "tokens": answer["length"]},
        "store": {},
        "events": [],
        "model_usage": {},
        "attachments": {},
    }
