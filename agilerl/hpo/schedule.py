"""The hyperparameter schedule that a search found: each gene's value against tokens, followed through the ancestors."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agilerl.checks.arguments import Count, Whole, checked, described, taken
from agilerl.errors import CheckpointError, ConfigError
from agilerl.hpo.lineage import Life, Record, family_tree, winning_lineage
from agilerl.hpo.parameters import Value

SCHEMA_VERSION = 1


@checked
def hyperparameter_schedule(records: Iterable[Record], agent: Whole) -> dict[str, Any]:
    """Return the schedule of ``agent`` as plain data, ready for YAML.

    ``genes`` maps each name to steps ``{"tokens": int, "value": value}``, the first at 0: the value holds from that
    many trained tokens on. ``total_tokens`` is where the agent's last exam was, ``ancestors`` its line.
    ``not_replayed`` lists what a schedule cannot express (changes of rank).
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
        for record in life.mutations:
            # A mutation follows the cloning of its generation, so the heir did not get the mutation of `end`.
            if end is not None and record["generation"] >= end:
                continue
            tokens = start if life.mutated_at_birth(record) else _tokens_at(life, record["generation"], start)
            if record["kind"] == "hyperparameters":
                _append(genes, tokens, {change["gene"]: change["new"] for change in record["changes"]})
            else:
                not_replayed.append({"tokens": tokens, "kind": record["kind"], "agent": life.agent})
        # The heir counts on from where this agent stood when it was copied.
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


@checked
def stretched(schedule: Mapping[str, Any], tokens: Count) -> dict[str, Any]:
    """Return a schedule for an agent that trains on this many tokens: every position in proportion.

    Raises ConfigError for what is not a schedule, and for one without an exam after its start, which has no length.
    """
    courses, total = _genes_of(schedule), taken(Whole, schedule.get("total_tokens"), "the schedule", "total_tokens")
    if total < 1:
        raise ConfigError("The schedule has no length: its agent had trained on no token at its last exam.")
    genes: dict[str, list[dict[str, Any]]] = {}
    for name, steps in courses.items():
        for step in steps:
            _append(genes, round(step["tokens"] * tokens / total), {name: step["value"]})
    moved = [{**one, "tokens": round(one["tokens"] * tokens / total)} for one in schedule.get("not_replayed", [])]
    return {**schedule, "total_tokens": tokens, "genes": genes, "not_replayed": moved}


def _genes_of(schedule: Mapping[str, Any]) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    genes = taken(Mapping[str, Sequence[Mapping[str, Any]]], schedule.get("genes"), "the schedule", "genes")
    for name, steps in genes.items():
        places = [taken(Whole, step.get("tokens"), "the schedule", f"the tokens of {name}") for step in steps]
        if places[:1] != [0] or not all("value" in step for step in steps):
            raise ConfigError(
                f"the schedule: expected steps of {name} with tokens (from 0) and value, found {described(steps)}"
            )
    return genes  # type: ignore[no-any-return]


def _append(genes: dict[str, list[dict[str, Any]]], tokens: int, values: Mapping[str, Value]) -> None:
    """Add a step to each gene whose value changed; a value that held for no token leaves no step."""
    for name, value in values.items():
        steps = genes.setdefault(name, [])
        # Positions that were rounded together, or changes before the first token: the last one counts.
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
