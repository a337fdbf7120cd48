"""What a run is about to do: model, population, batches, tokens, memory, place."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from agilerl.data.batch import padded_length
from agilerl.training.loop import planned_iterations, samples_per_iteration
from agilerl.training.setup import Session

__all__ = ["plan_document", "print_plan"]


def plan_document(session: Session, out: Path) -> dict[str, Any]:
    """Return the plan as plain data."""
    config, population, runtime = session.config, session.population, session.population.runtime
    agents, base, store = population.agents, runtime.base, runtime.store
    iterations = planned_iterations(session)
    prompts = [len(ids) for _, ids in population.panel("exam")]
    longest = max(prompts) + (population.eval_max_new_tokens or population.context_length - max(prompts))
    completion = min(getattr(agents[0].config, "max_output_tokens", None) or longest, longest)
    return {
        "model": {
            "name": base.name,
            "parameters": base.parameters,
            "megabytes": base.weight_bytes / 2**20,
            "context": population.context_length,
        },
        "adapter": {
            "rank": agents[0].rank,
            "layers": len(store.layers),
            "parameters": sum(agents[0].rank * (s.in_features + s.out_features) for s in store.layers),
        },
        "algorithm": config.algorithm["name"],
        "task": session.task.name,
        "population": {str(a.index): dict(a.hyperparameters) for a in agents},
        "genes": {name: gene.span() for name, gene in agents[0].genes.items()},
        "batches": {
            "prompts": population.prompts_per_step,
            "completions_per_agent": population.prompts_per_step * agents[0].config.group_size,  # type: ignore[attr-defined]
            "rows_per_optimizer_step": agents[0].window_rows,
            "completions_per_iteration": samples_per_iteration(session),
            "prompt_tokens": [min(prompts), max(prompts)],
            "completion_tokens_at_most": completion,
            "tokens_per_iteration_at_most": samples_per_iteration(session) * (max(prompts) + completion),
        },
        "length": {
            "iterations": iterations,
            "iterations_per_generation": config.training.evo_steps,
            "generations": -(-iterations // config.training.evo_steps),
            "exam_prompts": config.environment.eval_prompts,
            "test_prompts": config.environment.test_prompts,
        },
        "memory_megabytes": _memory(session, max(prompts) + completion),
        "results": str(out),
    }


def _memory(session: Session, row_tokens: int) -> dict[str, float]:
    """Estimate the parts that grow with the settings, in MiB; the interpreter and its libraries come on top."""
    runtime = session.population.runtime
    base, store = runtime.base, runtime.store
    config = base.model.config.get_text_config()
    width = base.model.get_input_embeddings().weight.element_size()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rows = min(session.config.training.max_rows_in_flight, samples_per_iteration(session))
    cache = rows * padded_length(row_tokens) * base.num_layers * 2 * heads * head_dim * width
    # Saved for backward per token and layer: about 12 vectors of the hidden and 4 of the feed-forward width.
    per_token = base.num_layers * (12 * config.hidden_size + 4 * config.intermediate_size) * width
    parts = {
        "base": base.weight_bytes,
        "adapters": len(session.population) * store.bytes_per_slot,
        "decode_cache": cache,
        "training_activations": runtime.max_tokens * per_token,
    }
    return {name: round(size / 2**20, 1) for name, size in parts.items()}


def print_plan(session: Session, out: Path, console: Console) -> None:
    """Print the plan for a person."""
    plan = plan_document(session, out)
    model, adapter, batch, length = plan["model"], plan["adapter"], plan["batches"], plan["length"]
    table = Table(title="Plan", show_header=False, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_row("model", f"{model['name']}: {model['parameters']:,} frozen parameters, context {model['context']}")
    table.add_row("adapters", f"LoRA rank {adapter['rank']} on {adapter['layers']} layers: {adapter['parameters']:,} each")
    table.add_row("task", f"{plan['task']}, reward {session.config.environment.reward}")
    table.add_row("algorithm", f"{plan['algorithm']}, {len(session.population)} agents")
    for index, values in plan["population"].items():
        shown = ", ".join(f"{k}={_number(v)}" for k, v in values.items()) or "fixed hyperparameters"
        table.add_row(f"  agent {index}", shown)
    table.add_row("genes", ", ".join(f"{k} in {v}" for k, v in plan["genes"].items()) or "none: nothing evolves")
    table.add_row(
        "batch",
        f"{batch['prompts']} prompts x group -> {batch['completions_per_agent']} completions an agent, "
        f"{batch['rows_per_optimizer_step']} an optimizer step",
    )
    low, high = batch["prompt_tokens"]
    table.add_row(
        "tokens",
        f"prompts {low}-{high}, completions up to {batch['completion_tokens_at_most']}; at most "
        f"{batch['tokens_per_iteration_at_most']:,} an iteration for all agents",
    )
    table.add_row(
        "length",
        f"{length['iterations']} iterations = {length['generations']} generations of {length['iterations_per_generation']}; "
        f"exam {length['exam_prompts']} prompts, test {length['test_prompts']}",
    )
    memory = plan["memory_megabytes"]
    parts = ", ".join(f"{name.replace('_', ' ')} {size:,.0f}" for name, size in memory.items())
    table.add_row("memory", f"about {sum(memory.values()):,.0f} MiB ({parts})")
    table.add_row("results", plan["results"])
    console.print(table)
    console.print()


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
