"""The model card of an elite: what its run says about it, as the README.md of its folder. It does not need torch."""

import json
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import ChainableUndefined, Environment, PackageLoader, Template

from agilerl.checks.arguments import counted
from agilerl.config.vllm import LORA_RANKS, adapter_options
from agilerl.envs.answer_format import PHRASE, AnswerFormat
from agilerl.errors import CheckpointError
from agilerl.hpo.schedule import hyperparameter_schedule
from agilerl.report.load import read_score
from agilerl.runs import RunLayout, read_lines, read_run
from agilerl.runs.directory import as_written
from agilerl.runs.strict_json import read_json
from agilerl.safety.bounds import check_file

EMBEDDED = "embedded"
CARD = "README.md"
_OF_EMBEDDED = "apache-2.0"
_CARD_BYTES = 2_000_000
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_MARKUP = re.compile(r"([\\`*_{}\[\]<>()#|!~$])")
_LONGEST = 300
_TESTS = {"base": "base model", "median_first_generation": "median agent of the first generation", "elite": "elite"}


def model_card(
    run: Path, summary: Mapping[str, Any] | None = None, *, name: str | None = None, licence: str | None = None
) -> str:
    """Return the model card of a run's elite: Markdown, with the header that the hub reads.

    ``summary`` is that of a run that is about to finish (None: its ``summary.json``), ``name`` the model's (None: base,
    task and algorithm), ``licence`` that of the base (None: as :func:`base_licence` finds it). Equal runs give equal
    cards. Texts of the run are escaped, and folders of this machine are not named. Raises CheckpointError for what is
    no run with an elite.
    """
    config = read_run(run)["config"]
    summary = finished_summary(run) if summary is None else summary
    with as_written(run):
        return _card(RunLayout(run), config, summary, name, licence)


def finished_summary(run: Path) -> dict[str, Any]:
    """Return the summary of a finished run with an elite; raises CheckpointError for any other."""
    layout = RunLayout(run)
    if not layout.is_finished:
        raise CheckpointError(f"expected a finished run, found that of {run} unfinished; resume it: agilerl resume")
    summary = read_json(layout.summary)
    if not isinstance(summary.get("elite"), dict):
        raise CheckpointError(f"the run in {run} has no elite: no agent of it was fit")
    return summary


def _card(
    layout: RunLayout, config: Mapping[str, Any], summary: Mapping[str, Any], name: str | None, licence: str | None
) -> str:
    from huggingface_hub import EvalResult, ModelCardData

    # What the run was about
    elite, base = summary["elite"], str(config["network"]["pretrained_model_name_or_path"])
    environment = config["environment"]
    data = [str(part["path"]) for part in environment.get("dataset") or []]  # names on the hub or of files
    task = ", ".join(map(public_name, [environment["env_id"]] if environment.get("env_id") else data))
    task = task or str(environment.get("task"))
    licence = licence or base_licence(base)
    name = name or f"{public_name(base)}-{task.rpartition(':')[2]}-{config['algorithm']['name']}"
    called = re.sub(r"[^\w.-]+", "-", name).strip("-.")
    tests = {who: read_score(summary["test"][who]) for who in _TESTS if who in summary["test"]}
    result = tests["elite"].mean
    schedule: Mapping[str, Any] = {"genes": {}}
    lines = [*read_lines(layout.lineage)]
    with suppress(CheckpointError):  # lines of agents may be missing, and the card says what there is
        schedule = hyperparameter_schedule(lines, elite["index"])
    # The header for the hub
    task_of_header = " ".join(re.sub(r"[^\w.,:/-]+", " ", task[:_LONGEST]).split())
    header = ModelCardData(
        library_name="peft",
        base_model=base if is_hub_name(base) else None,
        license=licence,
        pipeline_tag="text-generation",
        tags=["agilerl", "lora"],
        datasets=[path for path in data if is_hub_name(path)] or None,
        model_name=called,
        eval_results=[EvalResult("text-generation", "held-out", task_of_header, "reward", round(result, 4))]
        if math.isfinite(result)
        else None,
    )
    # The text of the card
    agent = layout.elite / "agent.json"  # the rank may have been mutated
    rank = int((read_json(agent)["lora"] if agent.is_file() else config["network"]["lora_config"])["r"])
    room = next((largest for largest in LORA_RANKS if largest >= rank), rank)
    return _template().render(
        header=header.to_yaml(),
        run={**config, **summary},
        called=called,
        base=public_name(base),
        commanded=base if is_hub_name(base) else "BASE",
        is_embedded=base == EMBEDDED,
        is_activated=bool((config["network"].get("lora_config") or {}).get("alora_invocation_tokens")),
        licence=licence,
        tests={_TESTS[who]: score for who, score in tests.items()},
        task=task,
        prompt=_prompt(environment),
        is_prefilled=(environment.get("conversation_template") or [{"role": "user"}])[-1]["role"] == "assistant",
        data=map(public_name, data),
        founders=counted(sum(line.get("event") == "birth" and line.get("parent") is None for line in lines), "agent"),
        rank=rank,
        total_tokens=schedule.get("total_tokens", 0),
        genes=list(schedule["genes"]),
        steps=_steps(schedule),
        vllm_options=" ".join(adapter_options({called: "FOLDER"}, room)),
    )


@cache
def _template() -> Template:
    """Return the template of a card; the texts that it prints are escaped, but for those that it calls safe."""
    environment = Environment(
        loader=PackageLoader("agilerl.report", "."),
        finalize=lambda value: escape_markdown(value) if type(value) is str else value,
        undefined=ChainableUndefined,
        keep_trailing_newline=True,
    )
    environment.filters |= {"values": _values, "plain": escape_markdown}
    return environment.get_template("card.md.jinja")


def _prompt(environment: Mapping[str, Any]) -> str:
    """Return the messages by which the run asked a question, as JSON; empty if an environment or program wrote them."""
    if environment.get("env_id") or environment.get("agent"):
        return ""
    template = environment.get("conversation_template") or [{"role": "user", "content": "{question}"}]
    asks = AnswerFormat(environment.get("answer_format") or "whole", environment.get("answer_phrase") or PHRASE)
    return json.dumps(asks.ask(template), indent=1, ensure_ascii=False)


def base_licence(base: str) -> str | None:
    """Return the licence that the base's own card names; None if it names none, or is not on this machine.

    Looks into the base's folder, or into the cache of the hub's client; nothing is loaded.
    """
    from huggingface_hub import ModelCard, try_to_load_from_cache

    if base == EMBEDDED:
        return _OF_EMBEDDED
    path: Any = Path(base).expanduser() / CARD
    if is_hub_name(base) and not path.is_file():
        with suppress(Exception):  # the cache may be unreadable
            path = try_to_load_from_cache(base, CARD)
    with suppress(Exception):  # a card that cannot be read names no licence
        check_file(Path(path), _CARD_BYTES)
        licence = ModelCard.load(Path(path)).data.get("license")
        return licence if isinstance(licence, str) and re.fullmatch(r"[\w.+-]{1,60}", licence) else None
    return None


def is_hub_name(name: str) -> bool:
    """Return whether a base or dataset is named as on the hub, and not by a file or folder."""
    try:
        exists = Path(name).expanduser().exists()
    except (OSError, RuntimeError):
        # Too long for a path, or with the home of an unknown user: no name on the hub either.
        exists = True
    return name != EMBEDDED and not exists and _HUB_NAME.fullmatch(name) is not None


def public_name(name: str) -> str:
    """Return a name for others: of a file or folder of this machine only the last part."""
    return name if name == EMBEDDED or is_hub_name(name) else Path(name).name


def escape_markdown(text: Any) -> str:
    """Return a text as one line of Markdown that formats nothing, of at most 300 characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)).split())
    return _MARKUP.sub(r"\\\1", line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}...")


def _values(values: Mapping[str, Any]) -> str:
    # Sorted, since their order in the file is that of the process.
    return ", ".join(f"{name}={_digits(value)}" for name, value in sorted(values.items()))


def _steps(schedule: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """Return the schedule as rows: tokens trained on, and the values that change there."""
    rows: dict[int, dict[str, str]] = {}
    for gene, steps in schedule["genes"].items():
        for step in steps:
            rows.setdefault(step["tokens"], {})[gene] = _digits(step["value"])
    return [(f"{tokens:,}", [row.get(gene, "") for gene in schedule["genes"]]) for tokens, row in sorted(rows.items())]


def _digits(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
