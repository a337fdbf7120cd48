"""How to lay a population out over N devices: every layout that fits is forecast, and the fastest is proposed."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil

from agilerl.checks.arguments import counted
from agilerl.errors import ConfigError
from agilerl.planning.footprint import SHARE, gib, memory, peak
from agilerl.planning.machines import GPUS, NETWORK, PER_MACHINE, VLLM_DECODE, Costs, Machine
from agilerl.planning.time import GENERATION, ITERATION, ModelShape, Split, Workload, seconds, work

_GAIN = 0.03
"""A larger batch must save this share of the time to be proposed, because it costs memory."""
_MOST_TOKENS, _MOST_ROWS = 2**17, 2**13
_LAST_RESORT = ["a smaller model, or fewer agents"]
_BY_TOKENS, _BY_ROWS = ("logprobs", "train"), ("prefill", "decode", "exam_prefill", "exam_decode")
"""The phases that a larger ``max_tokens_in_flight`` and ``max_rows_in_flight`` make faster."""
_SHORT = {"decode_cache": "decoding", "training_activations": "training", "vllm_alone": "vllm"}


@dataclass(frozen=True)
class Forecast:
    """Memory and time of one layout of a run."""

    split: Split
    load: Workload
    memory: Mapping[str, float]
    """Bytes of each part on the fullest device."""
    peak: float
    """The most bytes in use there at a time."""
    seconds: Mapping[str, float]
    """Predicted seconds of each phase: per iteration for those in ``ITERATION``, per generation for ``GENERATION``."""
    floors: Mapping[str, float]
    """The least seconds that the machine's rates allow for each phase."""

    @property
    def iteration(self) -> float:
        """Seconds of an iteration."""
        return sum(self.seconds[phase] for phase in ITERATION)

    @property
    def generation(self) -> float:
        """Seconds of a generation, its iterations included."""
        return self.load.iterations * self.iteration + sum(self.seconds[phase] for phase in GENERATION)


@dataclass(frozen=True)
class Capacity:
    """The proposed layout, and the alternatives."""

    best: Forecast
    others: tuple[Forecast, ...]
    """The other layouts that fit, the fastest first."""
    refused: tuple[str, ...]
    """The layouts that do not fit, a sentence each."""
    reasons: tuple[str, ...]
    """Why this layout, and why these batch sizes."""


def forecast(shape: ModelShape, load: Workload, machine: Machine, costs: Costs, split: Split | None = None) -> Forecast:
    """Return memory and time of one layout at given batch sizes."""
    split = split or Split()
    works, parts = work(shape, load, split), memory(shape, load, split)
    phases = costs.phases
    if split.processes > PER_MACHINE:
        machine = replace(machine, link=min(machine.link, NETWORK))
    if split.vllm:
        prefill = replace(phases["prefill"], call=VLLM_DECODE.call)
        costs = replace(costs, phases={**phases, "decode": VLLM_DECODE, "prefill": prefill})
    return Forecast(
        split=split,
        load=load,
        memory=_named(parts),
        peak=peak(parts),
        seconds={phase: seconds(phase, done, machine, costs) for phase, done in works.items()},
        floors={phase: done.floor(machine) for phase, done in works.items()},
    )


def _named(parts: Mapping[str, float]) -> dict[str, float]:
    """Return the parts under the short names that a plan shows; every layout has all of them."""
    nothing = dict.fromkeys(("base", "adapters", "decoding", "training", "vllm"), 0.0)
    return nothing | {_SHORT.get(name, name): size for name, size in parts.items()}


def proposed(
    shape: ModelShape, load: Workload, machine: Machine, costs: Costs, devices: int, *, vllm: bool = False
) -> Capacity:
    """Return the layout that needs the least time for a generation on at most ``devices`` devices.

    Among those within 3 %, the one with the fewest devices, then the smallest islands. Raises ConfigError if no layout
    fits, with suggestions of what would.
    """
    splits = _splits(shape, load, devices, vllm=vllm)
    sized = {named(split): _sized(shape, load, machine, costs, split) for split in splits}
    refused = tuple(f"{name}: {result}" for name, result in sized.items() if isinstance(result, str))
    fitting = sorted((f for f in sized.values() if isinstance(f, Forecast)), key=lambda f: f.generation)
    # Only if nothing fits without it, because every layer is then computed once more.
    if not fitting and not load.checkpointing:
        again = proposed(shape, replace(load, checkpointing=True), machine, costs, devices, vllm=vllm)
        why = "gradient_checkpointing: without it nothing fits"
        return replace(again, refused=(*refused, *again.refused), reasons=(*again.reasons, why))
    if not fitting:
        raise ConfigError(_impossible(shape, load, machine, devices, vllm=vllm))
    near = [f for f in fitting if f.generation <= fitting[0].generation * (1 + _GAIN)]
    best = min(near, key=lambda f: (f.split.devices, f.split.sharded, f.split.processes, f.generation))
    others = tuple(f for f in fitting if f is not best)
    return Capacity(best, others, refused, tuple(_reasons(shape, machine, costs, best, others)))


def named(split: Split) -> str:
    """Describe a layout in words."""
    islands, processes = "islands" if split.islands > 1 else "island", "processes" if split.processes > 1 else "process"
    words = f"{split.islands} {islands} of {split.processes} {processes}"
    words += ", the base sharded over them" if split.sharded else ""
    return words + (f", vLLM over {split.tensor_parallel} devices" if split.tensor_parallel > 1 else "")


def _splits(shape: ModelShape, load: Workload, devices: int, *, vllm: bool) -> Iterator[Split]:
    """Yield the layouts: a power of two processes per island (or all of them), and no island without agents.

    Each process starts its own vLLM with the whole base, so vLLM rules out a sharded base; it decodes over several
    devices only if there is one process.
    """
    divisible = shape.linear_width >= shape.width and not vllm  # quantised layers cannot be divided
    sizes = sorted({p for p in (*(2**k for k in range(devices.bit_length())), devices) if p <= devices})
    for processes in sizes:
        islands = min(devices // processes, load.agents, load.most_islands or load.agents)
        for sharded in (False, True) if processes > 1 and divisible else (False,):
            yield Split(islands, processes, sharded, vllm=vllm)
    # Without 1: that layout is among those above.
    for parallel in sizes[1:] if vllm else ():
        if parallel & (parallel - 1) == 0:  # attention heads come in powers of two
            yield Split(tensor_parallel=parallel, vllm=True)


def _sized(shape: ModelShape, load: Workload, machine: Machine, costs: Costs, split: Split) -> Forecast | str:
    """Return the forecast at the batch sizes that pay off, or a sentence on what does not fit at the smallest ones."""
    room = SHARE * machine.memory
    # With one row in flight and a forward of one row: less is not possible.
    least = _with(load, split, ceil(load.prompt + load.longest), 1)
    smallest = forecast(shape, least, machine, costs, split)
    if smallest.peak > room:
        largest = max(smallest.memory, key=lambda name: smallest.memory[name])
        return (
            f"needs {gib(smallest.peak)} per device even with one row in flight, most of it for {largest} "
            f"({gib(smallest.memory[largest])}); {gib(room)} are available"
        )
    best = smallest

    def try_out(larger: Workload, phases: tuple[str, ...]) -> None:
        """Take the workload if it fits and saves enough time in the phases that its batch size is for."""
        nonlocal best
        other = forecast(shape, larger, machine, costs, split)
        before, after = (sum(f.seconds[phase] for phase in phases) for f in (best, other))
        if other.peak <= room and after < before * (1 - _GAIN):
            best = other

    # Doubled from the size of one row on. Tokens first: rows share what memory they leave.
    for tokens in (2**k for k in range(least.max_tokens.bit_length(), _MOST_TOKENS.bit_length())):
        try_out(_with(best.load, split, tokens, best.load.max_rows), _BY_TOKENS)
    for rows in (2**k for k in range(1, _MOST_ROWS.bit_length())):
        try_out(replace(best.load, max_rows=rows), _BY_ROWS)
    return best


def _with(load: Workload, split: Split, tokens: int, rows: int) -> Workload:
    """Return the workload with other batch sizes; few agents get larger micro-batches, to fill a forward."""
    per_agent = ceil(tokens / ceil(load.agents / split.islands))
    return replace(load, max_tokens=tokens, max_rows=rows, micro_tokens=max(per_agent, min(tokens, load.pass_tokens)))


def _reasons(
    shape: ModelShape, machine: Machine, costs: Costs, best: Forecast, others: tuple[Forecast, ...]
) -> Iterator[str]:
    split, load = best.split, best.load
    rival = next((o for o in others if o.split.devices >= split.devices), None)
    if rival is not None:
        yield (
            f"a generation takes {best.generation:,.3g} s with {named(split)}; with {named(rival.split)}: "
            f"{rival.generation:,.3g} s"
        )
    larger = {
        "max_tokens_in_flight": (load.max_tokens, _with(load, split, 2 * load.max_tokens, load.max_rows), "training"),
        "max_rows_in_flight": (load.max_rows, replace(load, max_rows=2 * load.max_rows), "decoding"),
    }
    for name, (size, doubled, part) in larger.items():
        part = "vllm" if split.vllm and part == "decoding" else part
        other = forecast(shape, doubled, machine, costs, split)
        why = (
            f"twice as much would need {gib(other.peak)} of {gib(SHARE * machine.memory)}"
            if other.peak > SHARE * machine.memory
            else f"twice as much would save less than {_GAIN:.0%}"
        )
        yield f"{name}={size:,} ({part} {gib(best.memory[part])}): {why}"


def _impossible(shape: ModelShape, load: Workload, machine: Machine, devices: int, *, vllm: bool) -> str:
    """Return a sentence on what does not fit, and what would."""
    counts = (2**k for k in range(1, 11) if 2**k > devices)
    enough = next((count for count in counts if _holds(shape, load, machine, count, vllm=vllm)), None)
    cures = [] if enough is None else [f"{enough} of these, the base sharded over them"]
    for name, sheet in sorted(GPUS.items(), key=lambda gpu: gpu[1].memory):
        larger = replace(machine, memory=sheet.memory)
        if sheet.memory > machine.memory and _holds(shape, load, larger, devices, vllm=vllm):
            cures.append(f"{devices} x {name} ({sheet.memory / 1e9:.0f} GB)")
            break
    # 4 bits, and a scale of 32 bits for every 64 weights: 4.5 bits.
    if shape.linear_width > 1 and _holds(replace(shape, linear_width=0.5625), load, machine, devices, vllm=vllm):
        cures.append("the base in 4 bits (network.quantization=nf4)")
    if vllm and _holds(shape, load, machine, devices, vllm=False):
        cures.append("the torch engine (algorithm.use_vllm=false), because vLLM keeps the whole base in every process")
    smallest = _with(load, Split(), ceil(load.prompt + load.longest), 1)
    parts = _named(memory(shape, smallest, Split(vllm=vllm)))
    sizes = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
    return (
        f"{shape.name} with {counted(load.agents, 'agent')} does not fit on {devices} x {machine.name} "
        f"({gib(SHARE * machine.memory)} of each are available), not even sharded over all of them with one row in "
        "flight and gradient checkpointing. "
        f"On one device it would take: {sizes}. What would fit: {'; or '.join(cures or _LAST_RESORT)}"
    )


def _holds(shape: ModelShape, load: Workload, machine: Machine, devices: int, *, vllm: bool) -> bool:
    length, room = ceil(load.prompt + load.longest), SHARE * machine.memory
    splits = _splits(shape, load, devices, vllm=vllm)
    return any(peak(memory(shape, _with(load, split, length, 1), split)) <= room for split in splits)
