"""Every number that makes the embedded base what it is; a change here changes the shipped weights."""

from dataclasses import dataclass

__all__ = ["Recipe"]


@dataclass(frozen=True)
class Recipe:
    """Size of the embedded base and course of its training on the careless demonstrator's answers."""

    seed: int = 0
    """Seed of every draw: initial weights, mixture of tasks, the demonstrator's mistakes."""
    hidden: int = 96
    """Width of the residual stream."""
    layers: int = 3
    """Number of transformer blocks."""
    heads: int = 3
    """Attention heads; the width of one is ``hidden / heads``, 32."""
    feed_forward: int = 192
    """Width of the gated feed-forward layer."""
    positions: int = 1024
    """Longest text, in tokens."""
    steps: int = 1800
    """Optimizer steps."""
    batch: int = 128
    """Demonstrations a step."""
    chunks: int = 8
    """Parts of a batch, sorted by length so that little of each is padding."""
    learning_rate: float = 3e-3
    """Peak of the cosine schedule, which ends at zero."""
    warmup: int = 20
    """Steps of linear warm-up."""
    betas: tuple[float, float] = (0.9, 0.98)
    """AdamW's decay rates of the two moments."""
    weight_decay: float = 0.01
    """AdamW's decoupled weight decay."""
    clip: float = 1.0
    """Largest norm of the gradient."""
    init_std: float = 0.05
    """Standard deviation of the initial matrices."""
