"""What a run is about to do: model, population, batches, tokens, memory, place."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agilerl.cli.progress import genes_text
from agilerl.envs.core import Split
from agilerl.planning.footprint import peak
from agilerl.training.loop import planned_iterations, samples_per_iteration
from agilerl.training.memory import estimate
from agilerl.training.setup import Session

SPLITS: tuple[Split, ...] = ("exam", "test")


def plan_document(session: Session, out: Path) -> dict[str, Any]:
    """Return the plan as plain data."""
    config, population, runtime = session.config, session.population, session.population.runtime
    agents, base, store = population.agents, runtime.base, runtime.store
    iterations = planned_iterations(session)
    groups = population.group_sizes
    completions = [population.prompts_per_step * group for group in groups]
    limit, lengths = population.context_length, [population.lengths(split) for split in SPLITS]
    prompts = [length for panel in lengths for length in panel.prompts]
    room = limit - max(prompts)
    memory, topology = estimate(config, population), session.topology
    indices = [agent.index for agent in population.everyone]
    shares = topology.peers.processes.shares(len(indices))
    completion = min(max(getattr(agent.config, "max_output_tokens", None) or room for agent in agents), room)
    return {
        "model": {
            "name": base.name,
            "parameters": base.parameters,
            "megabytes": base.weight_bytes / 2**20,
            "context": population.context_length,
            "pad_token": population.tokenizer.pad_token,
        },
        "adapter": {
            "rank": agents[0].rank,
            "layers": len(store.layers),
            "parameters": sum(agents[0].rank * (s.in_features + s.out_features) for s in store.layers),
        },
        "algorithm": config.algorithm["name"],
        "task": session.task.name,
        "rows": dict(session.task.counts),
        "population": {str(a.index): dict(a.hyperparameters) for a in population.everyone},
        "genes": {name: gene.span() for name, gene in agents[0].genes.items()},
        "batches": {
            "prompts": population.prompts_per_step,
            "group_size": _ends(groups),
            "completions_per_agent": _ends(completions),
            "rows_per_optimizer_step": _ends([min(a.window_rows, rows) for a, rows in zip(agents, completions)]),
            "completions_per_iteration": samples_per_iteration(session),
            "prompt_tokens": [min(prompts), max(prompts)],
            "completion_tokens_at_most": completion,
            "tokens_per_iteration_at_most": samples_per_iteration(session)
            * max(panel.row(completion, limit) for panel in lengths),
        },
        "length": {
            "iterations": iterations,
            "iterations_per_generation": config.training.evo_steps,
            "generations": -(-iterations // config.training.evo_steps),
            "max_tokens": config.training.max_tokens,
            "max_seconds": config.training.max_seconds,
            "exam_prompts": session.task.panel_size("exam"),
            "test_prompts": session.task.panel_size("test"),
        },
        "islands": {
            "processes_per_island": topology.island.size,
            "agents": [[indices[place] for place in share] for share in shares],
        },
        "memory_megabytes": {name: round(size / 2**20, 1) for name, size in memory.items()},
        "peak_memory_megabytes": round(peak(memory) / 2**20, 1),
        "results": str(out),
    }


def print_plan(session: Session, out: Path, console: Console) -> None:
    """Print the plan for a person."""
    plan = plan_document(session, out)
    model, adapter, batch, length = plan["model"], plan["adapter"], plan["batches"], plan["length"]
    table = Table(title="Plan", show_header=False, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_row(
        "model",
        f"{model['name']}: {model['parameters']:,} frozen parameters, context {model['context']}, "
        f"padded with {model['pad_token']!r}",
    )
    table.add_row(
        "adapters", f"LoRA rank {adapter['rank']} on {adapter['layers']} layers: {adapter['parameters']:,} numbers each"
    )
    table.add_row("task", f"{plan['task']}, reward {session.task.grader}")
    if plan["rows"]:
        counts = (f"{name.replace('_', ' ')} {count:,}" for name, count in plan["rows"].items() if count)
        table.add_row("rows", ", ".join(counts))
    table.add_row("algorithm", f"{plan['algorithm']}, {len(session.population.everyone)} agents")
    for index, values in plan["population"].items():
        table.add_row(f"  agent {index}", genes_text(values) or "fixed hyperparameters")
    table.add_row("genes", ", ".join(f"{k} in {v}" for k, v in plan["genes"].items()) or "none: nothing evolves")
    table.add_row(
        "batch",
        f"{batch['prompts']} prompts x {_span(batch['group_size'])} completions = "
        f"{_span(batch['completions_per_agent'])} for each agent, "
        f"{_span(batch['rows_per_optimizer_step'])} an optimizer step",
    )
    low, high = batch["prompt_tokens"]
    table.add_row(
        "tokens",
        f"prompts {low}-{high}, completions up to {batch['completion_tokens_at_most']}; at most "
        f"{batch['tokens_per_iteration_at_most']:,} an iteration for all agents",
    )
    limits = [
        f"{length[key]:,} {unit}" for key, unit in (("max_tokens", "tokens"), ("max_seconds", "s")) if length[key]
    ]
    table.add_row(
        "length",
        f"{length['iterations']} iterations{', at most ' * bool(limits)}{' and '.join(limits)}, selection every "
        f"{length['iterations_per_generation']}; exam {length['exam_prompts']} prompts, test {length['test_prompts']}",
    )
    several = session.topology.world.size > 1
    if several:
        table.add_row("islands", _islands_text(**plan["islands"]))
    parts = ", ".join(f"{name.replace('_', ' ')} {size:,.0f}" for name, size in plan["memory_megabytes"].items())
    table.add_row(
        "memory",
        f"about {plan['peak_memory_megabytes']:,.0f} MiB{' in each process' * several} besides Python and torch, as "
        f"some parts take turns: {parts}",
    )
    table.add_row("results", plan["results"])
    console.print(table)
    console.print()


def _islands_text(processes_per_island: int, agents: Sequence[Sequence[int]]) -> str:
    processes = f"{processes_per_island} process{'es' * (processes_per_island > 1)}"
    return f"{len(agents)} of {processes}; agents {', '.join(_span([own[0], own[-1]]) for own in agents)}"


def _ends(values: Sequence[int]) -> list[int]:
    return [min(values), max(values)]


def _span(ends: Sequence[int]) -> str:
    return str(ends[0]) if ends[0] == ends[1] else f"{ends[0]}-{ends[1]}"
