"""The hyperparameter schedule that a search found: each gene's value against tokens, followed through the ancestors."""

from collections.abc import Iterable, Mapping
from typing import Any

from agilerl.arguments import Count, checked
from agilerl.errors import CheckpointError, ConfigError
from agilerl.hpo.lineage import Life, Record, family_tree, winning_lineage
from agilerl.hpo.parameters import Value

SCHEMA_VERSION = 1


def hyperparameter_schedule(records: Iterable[Record], agent: int) -> dict[str, Any]:
    """Return the schedule of ``agent`` as plain data, ready for YAML.

    ``genes`` maps each name to steps ``{"tokens": int, "value": value}``, the first at 0: the value holds from that
    many trained tokens on. ``total_tokens`` is where the agent's last exam was, ``ancestors`` its line.
    ``not_replayed`` lists what a schedule cannot express (noise, rank changes and crossover happen to weights).
    Token counts are cumulative along the line: a clone continues its parent's count.
    Raises CheckpointError when the agent is unknown, or an exam that a change refers to is missing.
    """
    records = list(records)
    lives = family_tree(records)
    line = winning_lineage(records, agent)
    genes: dict[str, list[dict[str, Any]]] = {}
    not_replayed: list[dict[str, Any]] = []
    start = 0
    for ancestor in line:
        life, end = lives[ancestor.agent], ancestor.to_generation
        _append(genes, start, life.hyperparameters)
        if life.mate is not None:
            not_replayed.append({"tokens": start, "kind": "crossover", "agent": life.agent})
        for record in life.mutations:
            # A mutation follows the cloning of its generation, so the heir did not get the mutation of `end`.
            if end is not None and record["generation"] >= end:
                continue
            tokens = start if life.mutated_at_birth(record) else _tokens_at(life, record["generation"], start)
            if record["kind"] == "hyperparameters":
                _append(genes, tokens, {change["gene"]: change["new"] for change in record["changes"]})
            else:
                not_replayed.append({"tokens": tokens, "kind": record["kind"], "agent": life.agent})
        start = start if end is None else _tokens_at(life, end, start)
    last = lives[agent]
    total = _tokens_at(last, last.exams[-1].generation, start) if last.exams else start
    return {
        "schema_version": SCHEMA_VERSION,
        "agent": agent,
        "ancestors": [ancestor.agent for ancestor in line],
        "unit": "trained tokens",
        "total_tokens": total,
        "genes": genes,
        "not_replayed": not_replayed,
    }


def value_at(schedule: Mapping[str, Any], gene: str, tokens: int) -> Value:
    """Return the value of ``gene`` once ``tokens`` tokens were trained on; the last value holds beyond the end.

    Raises ConfigError when the schedule does not have the gene, or ``tokens`` is negative.
    """
    steps = schedule["genes"].get(gene)
    if not steps:
        raise ConfigError(f"The schedule has no gene {gene!r}; it has {', '.join(schedule['genes']) or 'none'}.")
    if tokens < 0:
        raise ConfigError(f"Tokens are counted from 0, found {tokens}.")
    value: Value = [step["value"] for step in steps if step["tokens"] <= tokens][-1]
    return value


@checked
def stretched(schedule: Mapping[str, Any], tokens: Count) -> dict[str, Any]:
    """Return a schedule for an agent that trains on this many tokens: every position in proportion.

    Raises ConfigError for a schedule without an exam after its start, which has no length.
    """
    total = schedule["total_tokens"]
    if total < 1:
        raise ConfigError("The schedule has no length: its agent had trained on no token at its last exam.")
    genes: dict[str, list[dict[str, Any]]] = {}
    for name, steps in schedule["genes"].items():
        for step in steps:
            _append(genes, round(step["tokens"] * tokens / total), {name: step["value"]})
    moved = [{**one, "tokens": round(one["tokens"] * tokens / total)} for one in schedule["not_replayed"]]
    return {**schedule, "total_tokens": tokens, "genes": genes, "not_replayed": moved}


def _append(genes: dict[str, list[dict[str, Any]]], tokens: int, values: Mapping[str, Value]) -> None:
    """Add a step to each gene whose value changed; a value that held for no token leaves no step."""
    for name, value in values.items():
        steps = genes.setdefault(name, [])
        while steps and steps[-1]["tokens"] >= tokens:
            steps.pop()
        if not steps or steps[-1]["value"] != value:
            steps.append({"tokens": tokens if steps else 0, "value": value})


def _tokens_at(life: Life, generation: int, at_least: int) -> int:
    """Return the trained tokens at the exam of ``generation``; ``at_least`` is the count at the birth."""
    for exam in life.exams:
        if exam.generation == generation and "trained" in exam.tokens:
            tokens = int(exam.tokens["trained"])
            if tokens < at_least:
                raise CheckpointError(
                    f"Agent {life.agent}'s count of trained tokens falls from {at_least} to {tokens} in generation "
                    f"{generation}; a clone must continue its parent's count."
                )
            return tokens
    raise CheckpointError(
        f"The lineage has no exam of agent {life.agent} in generation {generation} with its token counts; "
        "the schedule needs the complete run directory."
    )
