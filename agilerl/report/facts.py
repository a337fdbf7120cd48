"""The text and tables of a report: verdict, run facts, lineage table, comparison of runs."""

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import yaml

from agilerl.report.figures import row_colour, short_value
from agilerl.report.load import AgentRecord, Family, RunRecord, Score, number

_WHO = {
    "base": "Base model, untrained",
    "median_first_generation": "Median agent of the first generation",
    "elite": "Elite, the resulting adapter",
}


def verdict(run: RunRecord, family: Family) -> dict[str, Any]:
    """Return {sentence, unit, bars}: what the run achieved on test problems that selection never used."""
    known = {who: run.tests[who] for who in _WHO if who in run.tests}
    accuracy = bool(known) and all(score.is_accuracy for _, score in known.values())
    top = max([1.0, *(score.mean for _, score in known.values() if math.isfinite(score.mean))])
    bars = []
    for who, (agent, score) in known.items():
        label = _WHO[who] + (f" (agent {agent})" if agent is not None else "")
        fraction = min(max(score.mean / top, 0.0), 1.0) if math.isfinite(score.mean) else 0.0
        error = score.stderr / top if math.isfinite(score.stderr) else 0.0
        bars.append(
            {
                "who": who,
                "label": label,
                "value": _value(score.mean, accuracy),
                "error": _value(score.stderr, accuracy),
                "n": score.n,
                "width": round(100 * fraction, 2),
                "low": round(100 * max(fraction - error, 0.0), 2),
                "span": round(100 * (min(fraction + error, 1.0) - max(fraction - error, 0.0)), 2),
            }
        )
    unit = "test accuracy" if accuracy else "mean test reward"
    return {"sentence": _sentence(run, family, accuracy), "unit": unit, "bars": bars}


def _sentence(run: RunRecord, family: Family, accuracy: bool) -> str:
    if "base" not in run.tests or "elite" not in run.tests:
        best = run.agents[family.winner].best if family.winner is not None else None
        so_far = f" So far agent {family.winner} leads with a fitness of {_plus(best.score)}." if best else ""
        return f"There are no test results for base and elite yet.{so_far}"
    base, (agent, elite) = run.tests["base"][1], run.tests["elite"]
    who = "The elite" + (f", agent {agent}," if agent is not None else "")
    gain = elite.mean - base.mean
    error = math.hypot(elite.stderr, base.stderr)
    if not math.isfinite(gain):
        return f"{who} or the base has no finite test result."
    if math.isfinite(error) and abs(gain) <= 2 * error:
        return f"{who} is not clearly different from the base: the gap is within two standard errors."
    better = "better" if gain > 0 else "worse"
    points = f"{100 * abs(gain):.1f} points" if accuracy else f"{abs(gain):.3f}"
    sized = f" ± {100 * error:.1f}" if accuracy else f" ± {error:.3f}"
    return f"{who} is {better} than the base by {points}{sized if math.isfinite(error) else ''}."


def facts(run: RunRecord) -> dict[str, str]:
    """Return the known facts about the run, by label."""
    config, summary, info = run.info["config"], run.summary, run.info
    tokens = summary.get("tokens") or _tokens(run)
    hardware = info.get("hardware") or {}
    devices = [str(device.get("name")) for device in hardware.get("cuda") or []]
    generations = sorted({g for agent in run.agents.values() for g in agent.generations})
    found = {
        "Status": "finished" if run.is_finished else str(summary.get("status", "not finished")),
        "Algorithm": _first(config, "algorithm.name"),
        "Population": str(summary.get("agents") or _first(config, "training.pop_size") or ""),
        "Generations": str(summary.get("generations") or len(generations) or ""),
        "Agents in total": str(len(run.agents) or ""),
        "Seed": str(info["seed"]),
        "Duration": _duration(summary.get("seconds")),
        **{f"Tokens {kind}": f"{int(count):,}" for kind, count in tokens.items() if math.isfinite(number(count))},
        "Peak memory": _peak_memory(run),
        "Started": info["started"][:16].replace("T", " ") + " UTC",
        "Task": _first(
            config,
            "environment.env_id",
            "environment.task",
            "environment.dataset.path",
            "environment.name",
            "environment.env_type",
        ),
        "Model": _first(config, "network.pretrained_model_name_or_path", "model.name"),
        "Hardware": ", ".join(devices) or _cpu(hardware),
        "Command": " ".join(map(str, info["command"])),
    }
    return {label: text for label, text in found.items() if text}


def configuration(run: RunRecord) -> dict[str, str]:
    """Return the foldable texts at the end of a report: configuration, versions, hardware."""
    texts = {"Configuration": run.info["config"], "Versions": run.info["versions"]}
    if run.info.get("hardware"):
        texts["Hardware"] = run.info["hardware"]
    if run.summary:
        texts["Summary"] = run.summary
    return {
        title: yaml.safe_dump(value, sort_keys=True, allow_unicode=True, width=100) for title, value in texts.items()
    }


def lineage_table(run: RunRecord, family: Family) -> list[dict[str, Any]]:
    """Return one row per agent, in the order of birth."""
    return [
        {
            "agent": index,
            "colour": row_colour(family.rows[index]),
            "winning": index in family.line,
            "parent": "founder" if agent.parent is None else agent.parent,
            "lived": f"{family.spans[index][0]} to {family.spans[index][-1]}",
            "died": "" if agent.died is None else f"{agent.died}: {agent.reason}" if agent.reason else str(agent.died),
            "changes": _changes(agent),
            "fitness": _plus(agent.best.score) if agent.best else "none" if not agent.exams else "not finite",
            "steps": ", ".join([str(len(agent.train)), *(f"{len(at)} {what}" for what, at in agent.trouble.items())]),
            "trained": f"{int(agent.tokens['trained']):,}"
            if math.isfinite(agent.tokens.get("trained", math.nan))
            else "",
            "hyperparameters": ", ".join(f"{k} {short_value(v)}" for k, v in sorted(agent.hyperparameters.items())),
        }
        for index, agent in run.agents.items()
    ]


def comparison(runs: Sequence[RunRecord], names: Sequence[str]) -> dict[str, Any]:
    """Return {names, rows} of a table that compares several runs, with the settings that differ."""
    rows: list[tuple[str, list[str]]] = []
    for who, label in _WHO.items():
        cells = [_plus(run.tests[who][1]) if who in run.tests else "" for run in runs]
        if any(cells):
            rows.append((f"Test: {label}", cells))
    all_facts = [facts(run) for run in runs]
    for label in ("Status", "Population", "Generations", "Seed", "Duration", "Tokens generated", "Tokens trained"):
        rows.append((label, [found.get(label, "") for found in all_facts]))
    flat = [_flatten(run.info["config"]) for run in runs]
    for key in sorted({key for found in flat for key in found}):
        cells = [str(found.get(key, "not set")) for found in flat]
        if len(set(cells)) > 1:
            rows.append((key, cells))
    return {"names": list(names), "rows": rows}


def _changes(agent: AgentRecord) -> str:
    words = []
    for mutation in agent.mutations:
        changes = [
            f"{change.get('gene')} {short_value(change.get('old'))} → {short_value(change.get('new'))}"
            for change in mutation.get("changes") or []
        ]
        words.append(", ".join(changes) or str(mutation.get("kind")))
    return "; ".join(words)


def _value(value: float, accuracy: bool) -> str:
    if not math.isfinite(value):
        return "unknown" if math.isnan(value) else str(value)
    return f"{100 * value:.1f} %" if accuracy else f"{value:.3f}"


def _plus(score: Score) -> str:
    if not math.isfinite(score.mean):
        return "not finite"
    return f"{score.mean:.3f}" + (f" ± {score.stderr:.3f}" if math.isfinite(score.stderr) else "")


def _first(config: Mapping[str, Any], *paths: str) -> str:
    for path in paths:
        value: Any = config
        for key in path.split("."):
            if isinstance(value, list):  # the first of several datasets
                value = value[0] if value else None
            value = value.get(key) if isinstance(value, Mapping) else None
        if value is not None:
            return str(value)
    return ""


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        return {k: v for key in value for k, v in _flatten(value[key], f"{prefix}.{key}".lstrip(".")).items()}
    return {prefix: value}


def _tokens(run: RunRecord) -> dict[str, float]:
    kinds = ("generated", "trained", "evaluated")
    sums = {kind: sum(number(a.tokens.get(kind)) for a in run.agents.values() if kind in a.tokens) for kind in kinds}
    return {kind: count for kind, count in sums.items() if count}


def _duration(seconds: Any) -> str:
    value = number(seconds)
    if not math.isfinite(value):
        return ""
    longest = timedelta.max.total_seconds()
    return str(timedelta(seconds=round(value))) if abs(value) < longest else f"{value:.3g} s"


def _peak_memory(run: RunRecord) -> str:
    peaks = [number(line.get("memory/peak")) for agent in run.agents.values() for line in agent.train]
    peak = max((p for p in peaks if math.isfinite(p)), default=0.0)
    return f"{peak / 2**30:.2f} GiB" if peak else ""


def _cpu(hardware: Mapping[str, Any]) -> str:
    if not hardware.get("cpu"):
        return ""
    return f"{hardware['cpu']}, {hardware.get('cores')} cores"
