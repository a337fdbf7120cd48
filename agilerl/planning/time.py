"""What a run has to compute and read: the operations and bytes of each phase, and the seconds that these take.

Symbols: P matmul parameters that a token uses (``linear`` in the layers, ``head`` for the vocabulary), D parameters of
one adapter, T tokens, w bytes of a weight, R rows in flight, s tokens of a row. The ``floor`` of a phase is the least
time that the machine's matmul rate F and copy rate BW allow (Williams et al. 2009, the roofline model).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import ceil, prod
from typing import Any

from agilerl.sizes import MAX_ROWS, PASS_TOKENS, UNIT_ROWS, stated

ITERATION = ("prefill", "decode", "logprobs", "train", "optimizer")
"""The phases of an iteration; all others happen once per generation."""
DRAWING_BYTES = 40
"""Bytes read and written per token and vocabulary entry: fp32 logits, softmax and its running sum in fp64."""
ADAPTER_WIDTH = 4
"""Bytes of an adapter's number: fp32, whatever the base's data type is."""


@dataclass(frozen=True, kw_only=True)
class Widths:
    """How many numbers represent a token at each stage of a decoder layer."""

    layers: int
    hidden: int
    query_width: int
    """Query heads times head size."""
    kv_width: int
    """Key-value heads times head size."""
    feed_forward: int
    """For a mixture of experts: inside the experts that one token passes through."""
    vocabulary: int
    width: float = 4.0
    """w: bytes of a weight, of an activation, and of a key or value."""

    @property
    def kv_bytes(self) -> float:
        """Kappa: bytes of keys and values of one token."""
        return 2 * self.layers * self.kv_width * self.width

    @classmethod
    def of(cls, base: Any, width: float | None = None) -> "Widths":
        """Return the widths of a :class:`agilerl.models.base.BaseModel`; ``width`` None: that of its data type."""
        config = base.model.config.get_text_config()
        heads = stated(config, "num_attention_heads") or 1
        size = stated(config, "head_dim") or base.hidden_size // heads
        # GPT-2 calls it n_inner, where None stands for four times the width.
        inner = stated(config, "intermediate_size", "n_inner") or 4 * base.hidden_size
        if chosen := stated(config, "num_experts_per_tok"):
            inner = chosen * (stated(config, "moe_intermediate_size") or inner)
        return cls(
            layers=base.num_layers,
            hidden=base.hidden_size,
            query_width=heads * size,
            kv_width=(stated(config, "num_key_value_heads") or heads) * size,
            feed_forward=inner,
            vocabulary=base.vocabulary_size,
            width=base.activation_dtype.itemsize if width is None else width,
        )


@dataclass(frozen=True, kw_only=True)
class ModelShape(Widths):
    """The sizes of a causal language model that decide time."""

    linear: int
    """P_lin: parameters of the layers' matrix products that one token passes through."""
    linear_bytes: float
    """Bytes of those matrices, all experts of a mixture included."""
    adapted: int
    """Input plus output features of all layers that carry an adapter; times the rank: D."""

    @property
    def head(self) -> int:
        """P_head."""
        return self.hidden * self.vocabulary

    @property
    def read_bytes(self) -> float:
        """Bytes of weights that a forward pass over many tokens reads: P w. The embedding is only a look-up."""
        return self.linear_bytes + self.head * self.width


@dataclass(frozen=True)
class Workload:
    """One iteration and one generation of the whole population. Lengths are in tokens."""

    agents: int
    rank: int
    prompts: int
    """Prompts of one agent in one iteration."""
    group: int
    """Completions per prompt."""
    prompt: float
    """Mean length of a prompt."""
    common: int = field(default=0, kw_only=True)
    """Tokens with which all prompts begin: a forward pass computes them once."""
    completion: int
    """Length of a completion, which is the number of decoding steps."""
    window: int
    """Rows per optimizer step."""
    epochs: int = 1
    reference: bool = False
    """Whether a reference pass is needed (beta > 0)."""
    old_pass: bool = False
    """Whether the old policy's log-probs are recomputed, as they are if another engine sampled."""
    critic: bool = False
    samples: bool = True
    """False if the algorithm learns from a dataset: then only exams are decoded."""
    exam_prompts: int = 0
    slots: int = 1
    """Adapter slots of one agent: actor, critic, its own reference."""
    checkpointing: bool = False
    """Whether activations are recomputed in the backward pass."""
    micro_tokens: int = PASS_TOKENS
    """Tokens of one agent that are enough for one forward pass."""
    whole_tokens: int = PASS_TOKENS
    """The most where fewer would compute again what prompts begin with."""
    row_multiple: int = 1
    """Batches of decoded rows are padded to a multiple of this; 16 on a CPU."""
    max_tokens: int = PASS_TOKENS
    """``training.max_tokens_in_flight``."""
    max_rows: int = MAX_ROWS
    """``training.max_rows_in_flight``."""

    @property
    def rows(self) -> int:
        """Rows of one agent in one iteration."""
        return self.prompts * self.group

    @property
    def length(self) -> float:
        """Mean length of a row."""
        return self.prompt + self.completion

    def different_prompts(self, rows: float) -> float:
        """Return how many different prompts are expected in so many rows of one agent, drawn at random."""
        # Probability that none of a prompt's rows is drawn, without replacement (hypergeometric).
        none = prod(max(self.rows - rows - i, 0) / (self.rows - i) for i in range(self.group))
        return self.prompts * (1 - none)

    def tokens(self, rows: float) -> float:
        """Return the tokens that forward passes compute for so many rows of one agent: each prompt once."""
        apart = rows * self.completion + self.different_prompts(rows) * (self.prompt - self.common)
        # Each pass computes once more what all prompts begin with.
        passes = max(1, apart / max(1, self.whole_tokens - self.common))
        return apart + passes * self.common * bool(rows)


@dataclass(frozen=True)
class Machine:
    """The rates that large operations reach on a device."""

    flops: float
    """F: floating point operations per second of a large matrix product, in the base's data type."""
    bandwidth: float
    """BW: bytes per second, read plus written, of a large copy."""
    disk: float = 1e9
    """Bytes per second written and synchronised."""


@dataclass(frozen=True)
class Work:
    """The work of one process in a phase."""

    flops: float = 0.0
    bytes: float = 0.0
    """The least bytes read and written: weights, adapters, cache."""
    traffic: float = 0.0
    """Bytes of elementwise operations, which perfect fusion would save: not part of the floor."""
    layer_calls: float = 0.0
    """How often a layer is called: a call has a fixed cost, however small the batch."""
    disk: float = 0.0
    """Bytes written to disk."""

    def __add__(self, other: "Work") -> "Work":
        return Work(**{name: getattr(self, name) + getattr(other, name) for name in self.__dataclass_fields__})

    def times(self, count: float) -> "Work":
        """Return the work of doing this ``count`` times."""
        return Work(**{name: getattr(self, name) * count for name in self.__dataclass_fields__})

    def floor(self, machine: Machine) -> float:
        """Return the least seconds: the slowest of computing, reading and writing, all else hidden."""
        return max(self.flops / machine.flops, self.bytes / machine.bandwidth, self.disk / machine.disk)


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Return D: the numbers of one adapter."""
    return shape.adapted * rank


def work(shape: ModelShape, load: Workload) -> dict[str, Work]:
    """Return the work of each phase: an iteration's, and a generation's."""
    none = Work()
    return {
        "prefill": _prefill(shape, load, load.prompts, load.group) if load.samples else none,
        "decode": _decode(shape, load, load.rows, load.group) if load.samples else none,
        "logprobs": _logprobs(shape, load),
        "train": _train(shape, load),
        "optimizer": _optimizer(shape, load),
        "exam_prefill": _prefill(shape, load, load.exam_prompts, 1),
        "exam_decode": _decode(shape, load, load.exam_prompts, 1),
        # Read and written: parameter, gradient and two moments of each number.
        "evolve": Work(bytes=2 * 4 * ADAPTER_WIDTH * adapter_parameters(shape, load.rank) * load.agents),
        # The adapter and two moments; gradients are not saved.
        "checkpoint": Work(disk=3 * ADAPTER_WIDTH * adapter_parameters(shape, load.rank) * load.agents * load.slots),
    }


def _prefill(shape: ModelShape, load: Workload, prompts: int, group: int) -> Work:
    """Each prompt once: 2 (P_lin + D) T + 2 P_head and 2 L d_q s^2 per prompt (causal attention, half of 4).

    Its keys and values are then copied into the cache, and the first token of each row is drawn.
    """
    count = load.agents * prompts
    if not count:
        return Work()
    calls = max(1, ceil(count * group / rows_at_once(count * group, load.agents, load.max_rows)))
    # What all prompts begin with is computed once for each agent.
    tokens = count * (load.prompt - load.common) + min(load.agents, count) * load.common
    d, rows = adapter_parameters(shape, load.rank), count * group
    flops = tokens * 2 * (shape.linear + d) + count * (2 * shape.head + _attention(shape, load.prompt))
    drawn = 2 * tokens * shape.kv_bytes + rows * shape.vocabulary * DRAWING_BYTES
    read, traffic = calls * shape.read_bytes, _forward_traffic(shape, tokens) + drawn
    return Work(flops, read, traffic, calls * shape.layers)


def _decode(shape: ModelShape, load: Workload, rows_of_agent: int, group: int) -> Work:
    """One token per row and step: R (2 P + 2 D + 4 L d_q s) operations, P w + N D w + R s kappa bytes.

    The bytes of a prompt's keys and values are read once for all rows of its group.
    """
    rows, d = load.agents * rows_of_agent, adapter_parameters(shape, load.rank)
    if not rows:
        return Work()
    batches = max(1, ceil(rows / rows_at_once(rows, load.agents, load.max_rows)))
    # On average a token sees half of its completion besides the prompt.
    steps, half = batches * load.completion, load.completion / 2
    padding = load.row_multiple
    tokens = batches * (ceil(rows / batches / padding) * padding if padding > 1 else rows / batches) * load.completion
    flops = tokens * (2 * (shape.linear + shape.head + d) + 4 * shape.layers * shape.query_width * (load.prompt + half))
    cache = tokens * (load.prompt / group + half) * shape.kv_bytes
    read = steps * (shape.read_bytes + load.agents * d * ADAPTER_WIDTH) + cache
    traffic = _forward_traffic(shape, tokens) + tokens * shape.vocabulary * DRAWING_BYTES
    return Work(flops, read, traffic, steps * shape.layers)


def _logprobs(shape: ModelShape, load: Workload) -> Work:
    """Passes without gradient: 2 P_lin T + 2 P_head T_c; the old policy's pass adds its adapter."""
    rows, d = load.agents * load.rows, adapter_parameters(shape, load.rank)
    tokens, spoken = load.agents * load.tokens(load.rows), rows * load.completion
    calls = max(1, ceil(tokens / min(load.micro_tokens, load.max_tokens)))
    once = Work(
        tokens * 2 * shape.linear + spoken * 2 * shape.head + _attentions(shape, load, load.rows),
        calls * shape.read_bytes,
        _forward_traffic(shape, tokens) + spoken * shape.vocabulary * 16,
        calls * shape.layers,
    )
    adapted = once + Work(flops=2 * d * tokens)
    return once.times(float(load.reference)) + adapted.times(float(load.old_pass))


def _train(shape: ModelShape, load: Workload) -> Work:
    """4 P_lin T + 4 P_head T_c + 6 D T + 6 L d_q sum s^2: no gradient of the frozen weights is computed."""
    # Each optimizer step draws its rows of all prompts, and computes each prompt once.
    window, readers = min(load.window, load.rows), 2 if load.critic else 1
    steps, d = load.rows / window, adapter_parameters(shape, load.rank)
    tokens = load.agents * steps * load.tokens(window) * readers
    spoken = load.agents * load.rows * load.completion * readers
    calls = max(1, ceil(tokens / tokens_in_flight(load)))
    # Forward, and backward to the inputs; with checkpointing the forward twice.
    passes = 3 if load.checkpointing else 2
    # The base's weights get no gradient, those of adapters do: another 2 D a token.
    flops = 2 * passes * shape.linear * tokens + 4 * shape.head * spoken + (2 * passes + 2) * d * tokens
    # Both operands of attention need a gradient, so its backward is two forwards.
    once = Work(
        flops + (passes + 1) * steps * readers * _attentions(shape, load, window),
        calls * passes * shape.read_bytes,
        passes * 1.5 * _forward_traffic(shape, tokens) + spoken * shape.vocabulary * 32,
        calls * shape.layers * passes,
    )
    return once.times(load.epochs)


def _optimizer(shape: ModelShape, load: Workload) -> Work:
    """30 N D bytes per step."""
    numbers = load.agents * adapter_parameters(shape, load.rank) * (2 if load.critic else 1)
    steps = load.epochs * max(1, ceil(load.rows / load.window))
    # A step has one fixed cost, like the call of a layer.
    return Work(bytes=30 * numbers, layer_calls=1).times(steps)


def _attention(shape: ModelShape, length: float, seen: float = 0) -> float:
    """Forward operations of causal attention over one row, all of which sees so many tokens before it."""
    return 2 * shape.layers * shape.query_width * (length**2 + 2 * length * seen)


def _attentions(shape: ModelShape, load: Workload, rows: float) -> float:
    """Forward operations of attention over so many rows of each agent, their prompts once."""
    completions = rows * _attention(shape, load.completion, load.prompt)
    return load.agents * (completions + load.different_prompts(rows) * _attention(shape, load.prompt))


def _forward_traffic(shape: ModelShape, tokens: float) -> float:
    """Bytes that norms, rotations, activations, sums and adapters read and write in a forward pass."""
    return tokens * shape.layers * shape.width * (30 * shape.hidden + 10 * shape.feed_forward)


def rows_at_once(rows: float, agents: int, limit: int) -> int:
    """Return how many rows the torch engine decodes at once, at most ``UNIT_ROWS`` per agent."""
    return min(max(1, min(limit, agents * UNIT_ROWS)), ceil(rows))


def tokens_at_once(micro: int, agents: int, limit: int) -> int:
    """Return the most tokens of a training forward: a micro-batch of each agent, none of which is divided."""
    return max(micro, min(limit, agents * micro))


def tokens_in_flight(load: Workload) -> int:
    """Return the most tokens of one training forward; a critic runs over the rows once more."""
    micro = max(ceil(load.length), min(load.micro_tokens, ceil(load.tokens(min(load.window, load.rows)))))
    return tokens_at_once(micro * (2 if load.critic else 1), load.agents, load.max_tokens)


# -- what the work costs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PhaseCost:
    """How a phase's time follows from its work."""

    floor: float
    """Times the floor."""
    traffic: float
    """Share of the elementwise traffic that costs time at the copy rate."""
    call: float
    """Seconds of each call of a layer, however little it computes: launches, the interpreter."""


GPU_COSTS = {
    "prefill": PhaseCost(3.4, 0.0, 3.5e-3),
    "decode": PhaseCost(1.0, 0.0, 3.5e-3),
    "logprobs": PhaseCost(1.0, 1.3, 1.6e-3),
    "train": PhaseCost(1.0, 3.0, 3.5e-3),
    "optimizer": PhaseCost(14.0, 0.0, 1.3e-3),
    "evolve": PhaseCost(400.0, 0.0, 0.0),
    "checkpoint": PhaseCost(2.0, 0.0, 0.0),
}
"""Measured on one H200 with models of 0.14 to 1.5 billion parameters in bf16: fitted to gpu-h200.json in
benchmarking/results by roofline.calibrated. What a layer's call costs depends on the host: it starts some 85 kernels
for a layer of a decoding step, and the GPU waits for it."""
CPU_COSTS = {
    "prefill": PhaseCost(1.0, 7.0, 1.3e-3),
    "decode": PhaseCost(2.5, 17.0, 1.4e-3),
    "logprobs": PhaseCost(1.07, 4.5, 1.4e-3),
    "train": PhaseCost(1.0, 8.2, 1.4e-3),
    "optimizer": PhaseCost(11.0, 0.0, 2.0e-3),
    "evolve": PhaseCost(26.0, 0.0, 0.0),
    "checkpoint": PhaseCost(1.6, 0.0, 0.0),
}
"""Measured on one CPU thread with five models of 0.2 to 12 million parameters: benchmarking/roofline.py."""


def seconds(shape: ModelShape, load: Workload, machine: Machine, costs: Mapping[str, PhaseCost]) -> dict[str, float]:
    """Return the predicted seconds of each phase: of an iteration's, and of a generation's."""
    spent = {}
    for phase, done in work(shape, load).items():
        # An exam's phases cost what those of a rollout do.
        cost = costs[phase.removeprefix("exam_")]
        traffic = cost.traffic * done.traffic / machine.bandwidth
        spent[phase] = cost.floor * done.floor(machine) + traffic + cost.call * done.layer_calls
    return spent
