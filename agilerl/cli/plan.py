"""``agilerl plan``: what a population needs on other machines, and its layout on them."""

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, replace
from math import ceil
from typing import Annotated, Any

from typer import Option

from agilerl.checks.arguments import counted
from agilerl.cli.options import AllowCode, Arguments, AsJson, Price
from agilerl.cli.output import columns, console, duration, facts, tell_line
from agilerl.cli.running import configuration
from agilerl.config.named_files import check_allowed
from agilerl.errors import ConfigError
from agilerl.planning.footprint import SHARE, gib, money, pass_tokens
from agilerl.planning.layout import Capacity, Forecast, named, proposed
from agilerl.planning.machines import PER_MACHINE, gpu
from agilerl.planning.time import ITERATION


def run_plan(
    arguments: Arguments = None,
    *,
    gpus: Annotated[int, Option(help="Number of devices.", metavar="N", min=1, max=4096)] = 1,
    kind: Annotated[
        str, Option("--gpu", help="b200, h200, h100, h100-pcie, a100-80, a100-40, l40s, a10, l4, or cpu.")
    ] = "cpu",
    prompt: Annotated[
        int | None, Option("--prompt-tokens", help="Mean length of a prompt; default: the exam's.", metavar="N", min=1)
    ] = None,
    completion: Annotated[
        int | None,
        Option("--completion-tokens", help="Mean length of a completion; default: the limit.", metavar="N", min=1),
    ] = None,
    price: Price = None,
    allow_code: AllowCode = False,
    as_json: AsJson = False,
) -> None:
    """Estimate what a population needs on other machines: memory, time of each phase, and a layout on N GPUs.

    Of the model only config.json is loaded. Times are estimates from the devices' data sheets; with --gpu cpu the
    rates of this machine are measured first. docs/plan.md lists the assumptions and the errors.

    agilerl plan mine.yaml training.pop_size=16 --gpus 8 --gpu h200
    """
    arguments = arguments or []
    config = configuration(arguments)
    if kind != "cpu":
        gpu(kind)  # refuses unknown names
    # Imported after the arguments are checked: a typo should not cost seconds.
    import torch

    from agilerl.cli.forecast import Planned, device, length_of, seen_by_exam, whole_run
    from agilerl.training.preflight import why_none
    from agilerl.training.resolved import resolve

    # The model and its rows
    torch.set_num_threads(config.training.threads)
    resolved = resolve(config)
    shape = Planned(resolved, allow_code).shape("cpu" if kind == "cpu" else "cuda")
    resolved = resolved.with_rate(shape.usual_rate).with_usual_founder(shape.usual_rate)
    planned = Planned(resolved, allow_code)
    rows = planned.lengths(shape, prompt, completion)
    checkpointing = resolved.options.gradient_checkpointing
    machine, costs = device(kind, config.training.dtype)
    usual = pass_tokens(shape, checkpointing=checkpointing, memory=None if kind == "cpu" else machine.memory)
    load = planned.workload(rows, usual, row_multiple=costs.row_multiple)
    # The layout and its command
    capacity = proposed(shape, load, machine, costs, gpus, vllm=resolved.options.use_vllm)
    try:
        config.check_islands(islands := min(gpus, load.agents))
    except ConfigError as error:
        capacity = replace(capacity, refused=(f"{islands} islands: {error}", *capacity.refused))
    best, seconds = capacity.best, whole_run(planned, rows, capacity.best)
    settings = overrides(
        best,
        resolved.algorithm.rows_per_unit,
        has_micro_batch=bool(config.algorithm.get("micro_batch_size_per_gpu")),
        has_checkpointing=checkpointing,
    )
    try:
        check_allowed(config)
        allow = []
    except ConfigError:
        allow = ["--allow-code"]
    questions = load.exam_prompts // config.training.eval_samples
    document: dict[str, Any] = {  # bytes, seconds, tokens
        "model": asdict(shape) | {"weight_bytes": shape.weight_bytes},
        "machine": asdict(machine) | {"costs": costs.origin},
        "workload": asdict(best.load),
        "assumed": list(rows.notes),
        "proposal": _facts(best) | {"overrides": settings, "command": _command(best, [*arguments, *settings, *allow])},
        "run": {"seconds": seconds, "agent_program": config.environment.agent},
        "unusual_rates": resolved.unusual_rates(shape.usual_rate),
        "length": length_of(planned, rows, load),
        "no_preflight": why_none(planned.scale(rows)),
        "exam": seen_by_exam(questions),
        "reasons": list(capacity.reasons),
        "others": [_facts(other) for other in capacity.others],
        "refused": list(capacity.refused),
    }
    price = config.training.price_per_hour if price is None else price
    if price is not None:
        document["cost"] = {"price_per_hour": price, "generation": price * best.generation / 3600}
        document["cost"]["run"] = price * seconds / 3600
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        _print(document, capacity)


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


def overrides(best: Forecast, unit: int, *, has_micro_batch: bool, has_checkpointing: bool) -> list[str]:
    """Return the settings of the manifest that the proposal asks for; ``unit``: rows that belong together."""
    load, split = best.load, best.split
    length = ceil(load.length)
    settings = [
        # 64 is the least that the setting takes.
        f"training.max_tokens_in_flight={max(load.max_tokens, 64)}",
        f"training.max_rows_in_flight={load.max_rows}",
    ]
    # The agents' default, or the user's choice, may be more than fits or less than is efficient.
    usual = min(load.pass_tokens, load.window * length)
    if not usual <= load.micro_tokens <= load.pass_tokens or has_micro_batch:
        settings.append(f"algorithm.micro_batch_size_per_gpu={max(1, load.micro_tokens // (length * unit))}")
    if load.checkpointing and not has_checkpointing:
        settings.append("algorithm.gradient_checkpointing=true")
    if split.processes > 1:
        settings.append(f"distributed.processes_per_island={split.processes}")
    if split.sharded:
        settings.append("distributed.sharding=fsdp2")
    if split.tensor_parallel > 1:
        settings.append(f"algorithm.vllm_config.tensor_parallel_size={split.tensor_parallel}")
    return settings


def _command(best: Forecast, arguments: Sequence[str]) -> str:
    processes = best.split.islands * best.split.processes
    machines = -(-processes // PER_MACHINE)
    nodes = f"--nnodes {machines} " if machines > 1 else ""
    torchrun = f"torchrun {nodes}--nproc-per-node {-(-processes // machines)} -m agilerl.cli"
    return f"{'agilerl' if processes == 1 else torchrun} train {shlex.join(arguments)}"


def _print(document: dict[str, Any], capacity: Capacity) -> None:
    """Print the plan for a person."""
    from agilerl.cli.forecast import schedule

    model, machine, best, load = document["model"], document["machine"], capacity.best, capacity.best.load
    program = document["run"]["agent_program"]
    rates = f"{machine['flops'] / 1e12:,.3g} TFLOP/s, {machine['bandwidth'] / 1e9:,.3g} GB/s"
    rows = [
        ("model", f"{model['name']}: {model['parameters']:,} parameters, {gib(model['weight_bytes'])}"),
        ("device", f"{machine['name']}: {rates}, {gib(machine['memory'])} ({machine['source']})"),
        ("costs", machine["costs"]),
        (
            "iteration",
            f"{counted(load.agents, 'agent')} x {counted(load.prompts, 'prompt')} x "
            f"{counted(load.group, 'completion')}, {counted(round(load.length), 'token')} each",
        ),
        *(("", sentence) for sentence in document["assumed"]),
        *([("agent", f"{program}; each answer counts as one call of it")] if program else []),
        *(("rate", sentence) for sentence in document["unusual_rates"]),
        ("length", schedule(document["length"], load.agents)),
        *([("preflight", document["no_preflight"])] if document["no_preflight"] else []),
        ("exam", document["exam"]["sentence"]),
        ("layout", f"{named(best.split)}: {best.split.devices} of the devices"),
        ("start with", document["proposal"]["command"]),
        *(("" if number else "because", reason) for number, reason in enumerate(document["reasons"])),
    ]
    screen = console()
    screen.print(facts(rows))
    tell_line(f"\nMemory of the fullest device: {gib(best.peak)} of {gib(SHARE * machine['memory'])} that may be used")
    table = columns("part", "size", left=("part",), gap=2)
    for name, size in best.memory.items():
        if size:
            table.add_row(name, gib(size))
    screen.print(table)
    costs = document.get("cost")
    whole, cost = (f", at a cost of {money(costs[part])}" if costs else "" for part in ("run", "generation"))
    tell_line(f"\nTime of the whole run, if started as above: about {duration(document['run']['seconds'])}{whole}")
    tell_line(f"Time of a generation of {counted(load.iterations, 'iteration')}: {duration(best.generation)}{cost}")
    table = columns("phase", "seconds", "least possible", "times", "share", left=("phase",), gap=2)
    for phase, spent in best.seconds.items():
        times = load.iterations if phase in ITERATION else 1
        if spent:
            share = f"{spent * times / best.generation:.0%}"
            table.add_row(phase.replace("_", " "), f"{spent:,.3g}", f"{best.floors[phase]:,.3g}", str(times), share)
    screen.print(table)
    tell_line("")
    for other in capacity.others[:4]:
        tell_line(f"also fits: {named(other.split)}: {duration(other.generation)}, {gib(other.peak)}")
    for sentence in capacity.refused[:4]:
        tell_line(f"ruled out: {sentence}")
    tell_line("Not counted: grading, environments, loading the model. What is assumed: docs/plan.md")
