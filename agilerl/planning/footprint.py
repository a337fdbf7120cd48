"""The memory of one process of a run, from counts of the loaded population: see :mod:`agilerl.training.memory`."""

from collections.abc import Mapping
from math import ceil
from typing import NamedTuple

from agilerl.planning.time import ADAPTER_WIDTH, Widths
from agilerl.sizes import ADAPTER_COPIES, PASS_TOKENS, TILE_BYTES, padded_length

SHARE = 0.8
"""Share of a device's memory for what is counted here; the rest is for the system, libraries and fragmentation."""
_DRAW_BYTES = 28
"""For each token of the vocabulary and each decoded row: logits, and the sorted probabilities for sampling."""
_TURNS = ("decode_cache", "training_activations", "vllm_awake", "vllm_alone")
"""Parts that never exist together. While vLLM is ``alone``, the base is on the host."""
_RESERVED = ("vllm", "vllm_awake", "vllm_alone")
"""vLLM's part, by what shares the device with it: everything, all but training, neither training nor the base."""
_NORM_WIDTH = 4
"""Bytes of a number inside a norm, which computes in fp32 whatever the base's data type is."""
_TILES = 3
"""Tiles of logits that exist at a time: the product, its log-softmax, the gradient."""
_LEAST_PASS, _LARGEST_PASS = 512, 2**16
"""Tokens of a training forward that is chosen by memory: fewer would read the base's weights too often."""
_CACHED_BYTES = 256 * 2**20
"""Saved bytes of a training forward that has enough tokens for a CPU; of small ones ``PASS_TOKENS`` are."""
_GAPS = 1.15
"""Memory that saved tensors of different sizes take, by what they hold: measured on CPUs, with 135M parameters."""
_PASS_SHARE = 1 / 3
"""Share of all memory that the largest training forward takes."""
_REST_SHARE = 0.75
"""Share of what the base leaves to each of the processes on a machine that it may take."""


def footprint(
    *,
    widths: Widths,
    base: float,
    adapter: int,
    agents: int,
    slots: int,
    decoded: int | None,
    longest: float,
    tokens: int,
    spoken: int,
    scored: int,
    cached: float = 0,
    episodes: int = 0,
    prefilled: float = 0,
    checkpointing: bool = False,
    offload: bool = False,
    chunk_rows: int | None = None,
    vllm: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return the bytes of each part that one process holds on the device; some of them take turns (:func:`peak`).

    ``base`` are the bytes of the frozen base, ``adapter`` the numbers of one adapter (D), of which each agent has
    ``slots``. The torch engine decodes ``decoded`` rows at once (None: another engine does) of at most ``longest``
    tokens, and holds the keys and values of ``cached`` tokens (:func:`cached_tokens`) and of ``episodes`` whole
    episodes; prompts go through the base ``prefilled`` tokens at a time. A training forward has ``tokens``, of which
    ``spoken`` are actions, one without gradient has ``scored``. ``offload`` keeps activations in the host's memory;
    ``chunk_rows`` is ``fused_logprobs_chunk_rows``. ``vllm`` has vLLM's bytes: as ``vllm``, as ``vllm_awake`` if it
    sleeps during training, as ``vllm_alone`` if the base leaves the device too.
    """
    saved = _GAPS * saved_bytes(widths, checkpointing=checkpointing, offload=offload)
    working = working_bytes(widths, restored=checkpointing or offload)
    # The head is done with its tiles before the layers' backward begins, so only the larger of the two counts.
    training = tokens * saved + max(tokens * working, head_bytes(widths, spoken, chunk_rows))
    # Without gradients a forward holds one layer's tensors at a time. But it runs over an agent's whole batch, not over
    # the rows of one optimizer step, so it can be the larger of the two.
    scoring = scored * layer_bytes(widths) + head_bytes(widths, scored, chunk_rows)
    parts = {"base": base, "adapters": bank_bytes(adapter, agents, slots)}
    if decoded is not None:
        # Prompts are computed before anything is drawn.
        working = max(decoded * widths.vocabulary * _DRAW_BYTES, prefilled * layer_bytes(widths))
        parts["decode_cache"] = (cached + episodes * longest) * widths.kv_bytes + working
    return {**parts, **(vllm or {}), "training_activations": max(training, scoring)}


def bank_bytes(numbers: int, agents: int, slots: int) -> int:
    """Return the bytes of the adapters, ``numbers`` (D) each, of ``agents`` agents and the elite, ``slots`` each."""
    # One more than the agents: the elite.
    return (agents + 1) * slots * ADAPTER_COPIES * ADAPTER_WIDTH * numbers


def cached_tokens(
    rows: int, group: int, exam_rows: int, prompt: float, longest: float, *, shared: bool = True
) -> float:
    """Return the tokens whose keys and values exist at a time: of ``rows`` in training, or of ``exam_rows`` in an exam.

    Those of a prompt exist once for its ``group`` completions, unless the base cannot share them. In an exam each
    row has a prompt of its own. ``longest`` is the length of a row, its ``prompt`` included.
    """
    if not shared:
        return max(rows, exam_rows) * padded_length(longest)
    asked, answer = padded_length(prompt), padded_length(longest - prompt)
    return max(rows * answer + ceil(rows / group) * asked, exam_rows * (asked + answer))


def turns(parts: Mapping[str, float]) -> list[dict[str, float]]:
    """Return the parts that exist together, for each turn: decoding and training, and vLLM if it sleeps."""
    lasting = {name: size for name, size in parts.items() if name not in _TURNS}
    # While vLLM is alone, the base is in the host's memory.
    alone = {name: size for name, size in lasting.items() if name != "base"}
    in_turn = [(alone if name == "vllm_alone" else lasting) | {name: parts[name]} for name in _TURNS if name in parts]
    return in_turn or [lasting]


def peak(parts: Mapping[str, float]) -> float:
    """Return the most bytes that exist at a time."""
    return max(sum(sizes.values()) for sizes in turns(parts))


def is_too_much(parts: Mapping[str, float], there: float) -> bool:
    """Return whether any turn needs too much of ``there`` bytes. vLLM stays within its part, so it needs no margin."""
    reserved = [(sizes, sum(sizes.get(name, 0) for name in _RESERVED)) for sizes in turns(parts)]
    # vLLM's part is taken off both sides, since the margin is only for the rest.
    return any(sum(sizes.values()) - vllm > SHARE * (there - vllm) for sizes, vllm in reserved)


def gib(size: float) -> str:
    """Return a number of bytes as text, in GiB or MiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


# -- activations: what a training forward saves for its backward pass ------------------------------------------------


def layer_bytes(widths: Widths) -> float:
    """Return the bytes that one decoder layer saves for a token, counted on Llama's and Qwen's layers with SDPA.

    Hidden width: the inputs of two norms, and their outputs, which the adapters save.
    Query width: the rotated query and the attention's output, as the kernel computes it and back in the order of the
    tokens. Key-value width: key and value. Feed-forward width: gate, its activation, up, and their product.
    """
    base = 4 * widths.hidden + 3 * widths.query_width + 2 * widths.kv_width + 4 * widths.feed_forward
    return base * widths.width


def saved_bytes(widths: Widths, *, checkpointing: bool, offload: bool = False) -> float:
    """Return the bytes of a token that stay on the device from the forward to the backward pass."""
    if offload:
        return 0
    return widths.layers * (widths.hidden * widths.width if checkpointing else layer_bytes(widths))


class PassSize(NamedTuple):
    """Tokens of a forward pass if the user gives no size; an agent's micro-batch has no more."""

    tokens: int
    """Enough to fill the device."""
    whole: int
    """The most where a smaller pass would compute again what rows have in common."""
    recomputed: int
    """The same if each layer is computed again in the backward pass."""
    unsaved: int
    """The same without gradient."""
    copied: float
    """What a token of a common part costs each row that has it, in tokens: attention copies its keys and values."""


def pass_size(
    widths: Widths, *, base: float, memory: float, gpu: bool, checkpointing: bool, processes: int = 1
) -> PassSize:
    """Return how many tokens a forward pass has that suits the base and the device.

    It depends on the bytes of the ``base``, on the device's whole ``memory`` in bytes and on how many
    ``processes`` share it, never on what is free, so that a run cuts its batches alike whenever it is repeated.
    """
    left = max(SHARE * memory / processes - base, 0.0)
    room = min(_PASS_SHARE * memory, _REST_SHARE * left)

    def fitting(bytes_per_token: float, least: int) -> int:
        return int(min(max(room // bytes_per_token, least), _LARGEST_PASS))

    def trained(checkpointing: bool) -> float:
        return _GAPS * saved_bytes(widths, checkpointing=checkpointing) + working_bytes(widths, restored=checkpointing)

    token = saved_bytes(widths, checkpointing=checkpointing)
    enough = int(min(max(_CACHED_BYTES // token, _LEAST_PASS), PASS_TOKENS))
    whole = fitting(trained(checkpointing), enough)
    # A GPU is filled by as many as it holds.
    sizes = fitting(trained(True), whole), fitting(layer_bytes(widths), whole)
    return PassSize(whole if gpu else enough, whole, *sizes, 2 * widths.kv_width * widths.width / layer_bytes(widths))


def working_bytes(widths: Widths, *, restored: bool) -> float:
    """Return the bytes of a token that the backward pass of one layer needs besides.

    Those are the gradients at the widest stages, in fp32 because of the adapters; if the layer's saved tensors are
    ``restored`` (computed again, or fetched from the host), those as well.
    """
    gradients = 4 * (widths.feed_forward + widths.hidden) * max(_NORM_WIDTH, widths.width)
    return gradients + restored * layer_bytes(widths)


def head_bytes(widths: Widths, spoken: int, chunk_rows: int | None = None) -> float:
    """Return the bytes of the head for this many action tokens: tiles of logits, and a gradient for each token."""
    rows = spoken if chunk_rows is None else min(spoken, chunk_rows)
    tile = rows * widths.vocabulary * 4
    return _TILES * (tile if chunk_rows else min(tile, TILE_BYTES)) + 3 * spoken * widths.hidden * widths.width
