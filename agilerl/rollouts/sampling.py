"""Drawing the next token of every row by inverse CDF, each row with its own settings and its own uniform."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agilerl.rollouts.engine import SamplingSettings


@dataclass
class RowSettings:
    """Sampling settings as one value a row."""

    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    min_p: Tensor
    repetition_penalty: Tensor
    min_new_tokens: Tensor
    full_support: bool
    greedy: bool

    @classmethod
    def of(cls, rows: Sequence[SamplingSettings], device: torch.device) -> "RowSettings":
        """Collect the settings of each row."""

        def column(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.tensor([getattr(s, name) for s in rows], dtype=dtype, device=device)

        return cls(
            temperature=column("temperature", torch.float32),
            top_p=column("top_p"),
            top_k=column("top_k", torch.int64),
            min_p=column("min_p"),
            repetition_penalty=column("repetition_penalty", torch.float32),
            min_new_tokens=column("min_new_tokens", torch.int64),
            full_support=all(s.full_support for s in rows),
            greedy=any(s.temperature == 0 for s in rows),
        )

    def select(self, rows: Tensor) -> "RowSettings":
        """Return the settings of some rows."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "min_new_tokens")
        return RowSettings(
            **{n: getattr(self, n)[rows] for n in names}, full_support=self.full_support, greedy=self.greedy
        )


def draw(
    logits: Tensor,
    uniforms: Tensor,
    settings: RowSettings,
    *,
    position: int = 0,
    eos: Tensor | None = None,
    seen: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw one token a row; returns tokens ``[R]`` and their log-probs ``[R]`` in fp32.

    ``logits`` [R, V] fp32; ``uniforms`` [R] fp64 in [0, 1); ``seen`` [R, V] bool marks tokens in the row so far (for
    the repetition penalty). The cumulative distribution is built in fp64, so the drawn token is the same in every
    batch layout. Log-probs are those of ``logits / temperature`` over the whole vocabulary (of the plain logits where
    the temperature is 0). A row of NaN yields some token and a NaN log-prob, and disturbs no other row.
    """
    greedy = settings.temperature == 0
    divisor = torch.where(greedy, 1.0, settings.temperature)[:, None]
    scaled = logits / divisor
    filtered = scaled if settings.full_support else _truncate(logits, divisor, settings, position, eos, seen)
    weights = torch.softmax(filtered.double(), dim=-1)
    cdf = torch.cumsum(weights, dim=-1)
    # Scaling by the last entry keeps a draw of 0.999... inside the support when rounding leaves it below 1.
    tokens = torch.searchsorted(cdf, (uniforms * cdf[:, -1])[:, None], right=True)[:, 0]
    tokens = tokens.clamp_(max=logits.shape[1] - 1)
    if settings.greedy:
        tokens = torch.where(greedy, filtered.argmax(dim=-1), tokens)
    logps = scaled.gather(1, tokens[:, None])[:, 0] - torch.logsumexp(scaled, dim=-1)
    return tokens, logps


def _truncate(
    logits: Tensor, divisor: Tensor, settings: RowSettings, position: int, eos: Tensor | None, seen: Tensor | None
) -> Tensor:
    """Apply repetition penalty, minimum length, temperature, top-k, top-p and min-p, in the order of transformers."""
    if seen is not None:
        penalty = settings.repetition_penalty[:, None]
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    if eos is not None and eos.numel():
        too_early = settings.min_new_tokens > position
        blocked = torch.zeros_like(logits, dtype=torch.bool)
        blocked[:, eos] = too_early[:, None]
        logits = torch.where(blocked, float("-inf"), logits)
    scaled = logits / divisor
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    probabilities = torch.softmax(ordered.double(), dim=-1)
    rank = torch.arange(logits.shape[1], device=logits.device)[None]
    limit = torch.where(settings.top_k > 0, settings.top_k, logits.shape[1])[:, None]
    dropped = rank >= limit
    before = torch.where(dropped, 0.0, probabilities)
    before = before / before.sum(dim=-1, keepdim=True)
    # A token stays while the mass before it is below top_p, so the most likely one always stays.
    dropped = dropped | (before.cumsum(dim=-1) - before >= settings.top_p[:, None])
    dropped = dropped | (before < settings.min_p[:, None] * before[:, :1])
    kept = torch.where(dropped, float("-inf"), ordered)
    return torch.empty_like(scaled).scatter_(1, order, kept)
