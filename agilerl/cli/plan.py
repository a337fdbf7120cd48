"""``agilerl plan``: what a population needs on other machines, and its layout on them."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from math import ceil
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from agilerl.cli.output import console
from agilerl.cli.running import configuration
from agilerl.planning.footprint import SHARE, gib, money, pass_tokens
from agilerl.planning.layout import Capacity, Forecast, named, proposed
from agilerl.planning.machines import (
    COPY_SHARE,
    CPU_COSTS,
    GPU_COSTS,
    GPUS,
    MATMUL_SHARE,
    PER_MACHINE,
    Costs,
    Machine,
    gpu,
)
from agilerl.planning.time import ITERATION, ModelShape
from agilerl.sizes import CPU_ROWS

if TYPE_CHECKING:
    from agilerl.cli.forecast import Lengths
    from agilerl.training.resolved import Resolved


def run_plan(
    arguments: Sequence[str],
    *,
    devices: int,
    kind: str,
    prompt: int | None,
    completion: int | None,
    price: float | None,
    allow_code: bool,
    as_json: bool,
) -> None:
    """Compute and print; see ``agilerl plan --help``."""
    config = configuration(arguments)
    known = gpu(kind) if kind != "cpu" else None
    # Imported after the arguments are checked: a typo should not cost seconds.
    import torch

    from agilerl.cli.forecast import lengths, measured_machine, model_shape, workload
    from agilerl.training.resolved import resolve

    torch.set_num_threads(config.training.threads)
    resolved = resolve(config)
    shape = model_shape(resolved, device="cpu" if known is None else "cuda")
    products = torch.bfloat16 if config.training.dtype == "bfloat16" else torch.float32
    machine = measured_machine(dtype=products) if known is None else known
    costs = CPU_COSTS if known is None else GPU_COSTS
    found = lengths(resolved, shape, prompt, completion, allow_code=allow_code)
    usual = pass_tokens(
        shape, checkpointing=resolved.options.gradient_checkpointing, memory=None if known is None else known.memory
    )
    load = workload(resolved, found, usual, row_multiple=CPU_ROWS if known is None else 1)
    capacity = proposed(shape, load, machine, costs, devices, vllm=resolved.options.use_vllm)
    document = _document(resolved, arguments, capacity, shape=shape, machine=machine, costs=costs, found=found)
    price = config.training.price_per_hour if price is None else price
    if price is not None:
        document["cost"] = {"price_per_hour": price, "generation": price * capacity.best.generation / 3600}
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        _print(document, capacity, console())


def _document(
    resolved: "Resolved",
    arguments: Sequence[str],
    capacity: Capacity,
    *,
    shape: ModelShape,
    machine: Machine,
    costs: Costs,
    found: "Lengths",
) -> dict[str, Any]:
    """Return everything that is printed as plain data: bytes, seconds, tokens."""
    best = capacity.best
    sheet = GPUS.get(machine.name)
    source = (
        "measured on this machine just now"
        if sheet is None
        else (f"{sheet.source}; {MATMUL_SHARE:.0%} of its matmul and {COPY_SHARE:.0%} of its copy rate are assumed")
    )
    return {
        "model": asdict(shape) | {"weight_bytes": shape.weight_bytes},
        "machine": asdict(machine) | {"source": source, "costs": costs.origin},
        "workload": asdict(best.load),
        "assumed": list(found.said),
        "proposal": _facts(best)
        | {"overrides": overrides(resolved, best), "command": command(resolved, best, arguments)},
        "reasons": list(capacity.reasons),
        "others": [_facts(other) for other in capacity.others],
        "refused": list(capacity.refused),
    }


def _facts(forecast: Forecast) -> dict[str, Any]:
    return {
        "layout": named(forecast.split),
        **asdict(forecast.split),
        "devices": forecast.split.devices,
        "max_tokens_in_flight": forecast.load.max_tokens,
        "max_rows_in_flight": forecast.load.max_rows,
        "memory_bytes": dict(forecast.memory) | {"peak": forecast.peak},
        "seconds": dict(forecast.seconds) | {"iteration": forecast.iteration, "generation": forecast.generation},
        "floor_seconds": dict(forecast.floors),
    }


def overrides(resolved: "Resolved", best: Forecast) -> list[str]:
    """Return the settings of the manifest that the proposal asks for."""
    load, split = best.load, best.split
    length, unit = ceil(load.length), resolved.algorithm.rows_per_unit
    found = [
        f"training.max_tokens_in_flight={max(load.max_tokens, 64)}",
        f"training.max_rows_in_flight={load.max_rows}",
    ]
    # The agents' default, or the user's choice, may be more than fits or less than is efficient.
    usual = min(load.pass_tokens, load.window * length)
    if not usual <= load.micro_tokens <= load.pass_tokens or resolved.config.algorithm.get("micro_batch_size_per_gpu"):
        found.append(f"algorithm.micro_batch_size_per_gpu={max(1, load.micro_tokens // (length * unit))}")
    if load.checkpointing and not resolved.options.gradient_checkpointing:
        found.append("algorithm.gradient_checkpointing=true")
    if split.processes > 1:
        found.append(f"distributed.processes_per_island={split.processes}")
    if split.sharded:
        found.append("distributed.sharding=fsdp2")
    if split.tensor_parallel > 1:
        found.append(f"algorithm.vllm_config.tensor_parallel_size={split.tensor_parallel}")
    return found


def command(resolved: "Resolved", best: Forecast, arguments: Sequence[str]) -> str:
    """Return the command that starts the proposal."""
    processes = best.split.islands * best.split.processes
    given = [*arguments, *overrides(resolved, best)]
    quoted = " ".join(f"'{a}'" if set(a) & set(" {}[]*?;&|<>()$") else a for a in given)
    if processes == 1:
        return f"agilerl train {quoted}"
    machines = -(-processes // PER_MACHINE)
    nodes = f"--nnodes {machines} " if machines > 1 else ""
    return f"torchrun {nodes}--nproc-per-node {-(-processes // machines)} -m agilerl.cli train {quoted}"


def _print(document: dict[str, Any], capacity: Capacity, console: Console) -> None:
    """Print the plan for a person."""
    model, machine, best = document["model"], document["machine"], capacity.best
    table = _table(headers=False)
    table.add_row("model", f"{model['name']}: {model['parameters']:,} parameters, {gib(model['weight_bytes'])}")
    table.add_row(
        "device",
        f"{machine['name']}: {machine['flops'] / 1e12:,.3g} TFLOP/s, {machine['bandwidth'] / 1e9:,.3g} GB/s, "
        f"{gib(machine['memory'])} ({machine['source']})",
    )
    table.add_row("costs", machine["costs"])
    load = best.load
    table.add_row(
        "iteration",
        f"{load.agents} agents x {load.prompts} prompts x {load.group} completions, {load.length:,.0f} tokens each",
    )
    for sentence in document["assumed"]:
        table.add_row("", sentence)
    table.add_row("layout", f"{named(best.split)}: {best.split.devices} of the devices")
    table.add_row("start with", document["proposal"]["command"])
    for number, reason in enumerate(document["reasons"]):
        table.add_row("because" if not number else "", reason)
    console.print(table)
    console.print(
        f"\nMemory of the fullest device: {gib(best.peak)} of {gib(SHARE * machine['memory'])} that may be used"
    )
    table = _table()
    table.add_column("part")
    table.add_column("size", justify="right")
    for name, size in best.memory.items():
        if size:
            table.add_row(name, gib(size))
    console.print(table)
    cost = f", which cost {money(document['cost']['generation'])}" if "cost" in document else ""
    console.print(f"\nTime of a generation of {load.iterations} iterations: {_time(best.generation)}{cost}")
    table = _table()
    for name in ("phase", "seconds", "least possible", "times", "share"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    for phase, spent in best.seconds.items():
        times = load.iterations if phase in ITERATION else 1
        if spent:
            share = f"{spent * times / best.generation:.0%}"
            table.add_row(phase.replace("_", " "), f"{spent:,.3g}", f"{best.floors[phase]:,.3g}", str(times), share)
    console.print(table)
    console.print()
    for other in capacity.others[:4]:
        console.print(f"also fits: {named(other.split)}: {_time(other.generation)}, {gib(other.peak)}")
    for sentence in capacity.refused[:4]:
        console.print(f"does not fit: {sentence}")
    console.print("Not counted: grading, environments, loading the model. What is assumed: docs/plan.md")


def _table(*, headers: bool = True) -> Table:
    return Table(show_header=headers, box=None, padding=(0, 2, 0, 0))


def _time(spent: float) -> str:
    for size, unit in ((86400, "days"), (3600, "h"), (60, "min")):
        if spent >= size:
            return f"{spent / size:,.1f} {unit}"
    return f"{spent:,.3g} s"
