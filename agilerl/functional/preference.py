"""Preference losses of the DPO family, as functions of summed log-ratios."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from agilerl.functional.masks import masked_mean, masked_sum


@dataclass(frozen=True)
class PreferenceScores:
    """Log-probs of P pairs, each **summed** over the tokens of a completion, in nats."""

    policy_chosen: Tensor
    """[P] under the policy, with gradient."""
    policy_rejected: Tensor
    """[P] under the policy, with gradient."""
    ref_chosen: Tensor
    """[P] under the fixed reference."""
    ref_rejected: Tensor
    """[P] under the fixed reference."""
    chosen_tokens: Tensor
    """[P] completion tokens."""
    rejected_tokens: Tensor
    """[P] completion tokens."""
    chosen_sum: Tensor | None = None
    """[P] ``policy_chosen`` before ``ld_alpha`` weighted it; None: the same."""
    weights: Tensor | None = None
    """[P] factor of each pair's loss, without gradient; None: 1."""

    @property
    def chosen(self) -> Tensor:
        """[P] ``c = log pi - log ref`` of the chosen completion."""
        return self.policy_chosen - self.ref_chosen.detach()

    @property
    def rejected(self) -> Tensor:
        """[P] ``r = log pi - log ref`` of the rejected completion."""
        return self.policy_rejected - self.ref_rejected.detach()

    @property
    def delta(self) -> Tensor:
        """[P] ``Delta = c - r``."""
        return self.chosen - self.rejected

    @property
    def means(self) -> tuple[Tensor, Tensor]:
        """[P] each, log-prob per token of the chosen and of the rejected completion, without a reference."""
        chosen = self.policy_chosen / self.chosen_tokens.clamp(min=1)
        return chosen, self.policy_rejected / self.rejected_tokens.clamp(min=1)


@dataclass(frozen=True)
class PreferenceOptions:
    """Settings that only some of the losses read."""

    label_smoothing: float = 0.0
    """Probability that a label is wrong, in [0, 0.5): sigmoid, cdpo, robust, exo_pair, aot, aot_pair, simpo, cpo."""
    discopop_tau: float = 0.05
    """Temperature of discopop's modulation."""
    simpo_gamma: float = 0.5
    """Margin of simpo, in units of ``beta`` times a log-prob per token."""
    reward_baseline: float | None = None
    """bco_pair: mean of ``beta c`` and ``beta r``, usually a running mean. None: the mean of these pairs, which makes
    the loss depend on the micro-batch."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing < 0.5:
            raise ValueError(f"label_smoothing must be in [0, 0.5), found {self.label_smoothing}")
        if self.discopop_tau <= 0:
            raise ValueError(f"discopop_tau must be greater than 0, found {self.discopop_tau}")


PreferenceLoss = Callable[[PreferenceScores, float, PreferenceOptions], Tensor]


def preference_scores(
    policy: tuple[Tensor, Tensor],
    reference: tuple[Tensor, Tensor],
    masks: tuple[Tensor, Tensor],
    *,
    ld_alpha: float | None = None,
    collision: tuple[Tensor, Tensor] | None = None,
) -> PreferenceScores:
    """Sum token log-probs ``[P, L]``, each pair of arguments being (chosen, rejected), over their masks ``[P, L]``.

    With ``ld_alpha`` the tokens beyond the length of the pair's shorter completion count that much, in [0, 1]
    (LD-DPO, arXiv 2409.06411). With ``collision``, the policy's collision entropies, pairs are weighted by how likely
    the policy is to say both completions (WPO, arXiv 2406.11827, with its "sampled alignment"): by the product of
    ``exp(mean_t(log pi_t - log sum_v pi_t(v)^2))`` of the two.
    """
    (pc, pr), (rc, rr), (mc, mr) = policy, reference, masks
    whole = weights = None
    if collision is not None:
        aligned = [masked_mean(p.detach() + h.detach(), m, -1) for p, h, m in zip(policy, collision, masks)]
        weights = torch.exp(aligned[0] + aligned[1])
    if ld_alpha is not None:
        whole, common = masked_sum(pc, mc, -1), torch.minimum(mc.sum(-1), mr.sum(-1))[..., None]
        # By number within a completion, not by column: a completion begins where its prompt ends.
        by_token = [torch.where(m.cumsum(-1) > common, ld_alpha, 1.0).to(pc.dtype) for m in masks]
        (pc, pr), (rc, rr) = ([x * w for x, w in zip(pair, by_token)] for pair in (policy, reference))
    return PreferenceScores(
        policy_chosen=masked_sum(pc, mc, -1),
        policy_rejected=masked_sum(pr, mr, -1),
        ref_chosen=masked_sum(rc.detach(), mc, -1),
        ref_rejected=masked_sum(rr.detach(), mr, -1),
        chosen_tokens=mc.sum(-1),
        rejected_tokens=mr.sum(-1),
        chosen_sum=whole,
        weights=weights,
    )


def preference_loss(
    scores: PreferenceScores,
    losses: Mapping[str, float],
    beta: float,
    *,
    pairs: float,
    chosen_tokens: float | None = None,
    options: PreferenceOptions | None = None,
) -> Tensor:
    """Return the weighted mixture of ``losses`` (name to weight), summed over these pairs / the window's count.

    ``pairs`` and ``chosen_tokens`` count the whole optimizer window. Besides the names in ``PREFERENCE_LOSSES`` there
    is ``sft``, the cross-entropy of the chosen completions per token (``nll_alpha`` is its weight), which needs
    ``chosen_tokens``. A mixture of sigmoid, bco_pair and sft is MPO, arXiv 2411.10442. Raises ValueError for an unknown
    name, a beta that is not positive, or ``sft`` without ``chosen_tokens``.
    """
    if beta <= 0:
        raise ValueError(f"beta must be greater than 0, found {beta}")
    total = scores.policy_chosen.new_zeros(())
    for name, weight in losses.items():
        if name == "sft":
            if chosen_tokens is None:
                raise ValueError("the sft term needs chosen_tokens, the number of chosen tokens in the whole window")
            # ld_alpha weighs preferences; the cross-entropy is that of the whole completion.
            whole = scores.policy_chosen if scores.chosen_sum is None else scores.chosen_sum
            term = -whole.sum() / max(chosen_tokens, 1.0)
        elif name in PREFERENCE_LOSSES:
            by_pair = PREFERENCE_LOSSES[name](scores, beta, options or PreferenceOptions())
            if scores.weights is not None:
                by_pair = by_pair * scores.weights
            term = by_pair.sum() / max(pairs, 1.0)
        else:
            raise ValueError(f"unknown preference loss {name!r}; expected one of {', '.join(PREFERENCE_LOSSES)} or sft")
        total = total + weight * term
    return total


def preference_metrics(scores: PreferenceScores, beta: float, *, per_token: bool = False) -> dict[str, Tensor]:
    """Return per-pair values ``[P]``, for a reducer: implicit rewards, their margin and accuracy, and log-probs.

    Rewards are ``beta c`` and ``beta r``; with ``per_token`` beta times the policy's log-prob per token, as simpo and
    orpo see it.
    """
    gains = scores.means if per_token else (scores.chosen, scores.rejected)
    chosen, rejected = (beta * gain.detach() for gain in gains)
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).to(chosen.dtype),
        "logps/chosen": scores.policy_chosen.detach(),
        "logps/rejected": scores.policy_rejected.detach(),
    }


# -- single completions that are labelled good or bad -----------------------------------------------------------------


UnpairedLoss = Literal["kto", "apo_zero_unpaired"]


def unpaired_margins(
    log_ratios: Tensor, desirable: Tensor, reference_point: Tensor | float, loss_type: UnpairedLoss = "kto"
) -> Tensor:
    """Return by how much each completion ``[b]`` is on the side of its label, in nats.

    ``r - z`` for a desirable completion and ``z - r`` for another, r being its log-ratio (summed over its tokens) and z
    the reference point, which is 0 for ``apo_zero_unpaired``. ``desirable`` is bool ``[b]``.
    """
    gain = log_ratios if loss_type == "apo_zero_unpaired" else log_ratios - reference_point
    return torch.where(desirable, gain, -gain)


def unpaired_loss(margins: Tensor, desirable: Tensor, beta: float, weights: tuple[float, float] = (1.0, 1.0)) -> Tensor:
    """Return KTO's loss of each completion ``[b]``: ``w (1 - s(beta m))``, m from :func:`unpaired_margins`.

    ``weights`` are those of desirable and of undesirable completions. Source: arXiv 2402.01306, eq. 8; with a reference
    point of 0 it is the unpaired APO-zero of arXiv 2408.06266.
    """
    by_row = torch.where(desirable, weights[0], weights[1]).to(margins.dtype)
    return by_row * torch.sigmoid(-beta * margins)


def reference_point(policy: Tensor, reference: Tensor) -> Tensor:
    """Return KTO's z, ``max(0, mean(log pi - log ref))`` over completions ``[n]`` to prompts that are not theirs.

    It estimates KL(policy || reference), has no gradient, and is 0 without completions.
    """
    return (policy - reference).detach().sum().div(max(len(policy), 1)).clamp(min=0)


# -- pairs ------------------------------------------------------------------------------------------------------------


def sigmoid(scores: PreferenceScores, beta: float, options: PreferenceOptions) -> Tensor:
    """DPO: ``-(1 - e) log s(beta Delta) - e log s(-beta Delta)``, e = label_smoothing. Source: arXiv 2305.18290."""
    return _smoothed(beta * scores.delta, options.label_smoothing)


def cdpo(scores: PreferenceScores, beta: float, options: PreferenceOptions) -> Tensor:
    """Conservative DPO: ``sigmoid`` with e > 0. Source: Mitchell, "A note on DPO with noisy preferences" (2023)."""
    if options.label_smoothing == 0:
        raise ValueError("cdpo needs label_smoothing > 0, the share of wrong labels; with 0 it is the sigmoid loss")
    return sigmoid(scores, beta, options)


def robust(scores: PreferenceScores, beta: float, options: PreferenceOptions) -> Tensor:
    """Unbiased under noise e: ``((e - 1) log s(z) + e log s(-z)) / (1 - 2e)``, z = beta Delta; arXiv 2403.00409."""
    e, z = options.label_smoothing, beta * scores.delta
    return (-(1 - e) * F.logsigmoid(z) + e * F.logsigmoid(-z)) / (1 - 2 * e)


def hinge(scores: PreferenceScores, beta: float, _: PreferenceOptions) -> Tensor:
    """SLiC and RSO: ``max(0, 1 - beta Delta)``. Source: arXiv 2309.06657."""
    return F.relu(1 - beta * scores.delta)


def ipo(scores: PreferenceScores, beta: float, _: PreferenceOptions) -> Tensor:
    """IPO on log-ratios per token: ``(c / |c| - r / |r| - 1 / (2 beta))^2``. Source: arXiv 2310.12036."""
    chosen = scores.chosen / scores.chosen_tokens.clamp(min=1)
    rejected = scores.rejected / scores.rejected_tokens.clamp(min=1)
    return (chosen - rejected - 1 / (2 * beta)).square()


def apo_zero(scores: PreferenceScores, beta: float, _: PreferenceOptions) -> Tensor:
    """Chosen up, rejected down: ``1 - s(beta c) + s(beta r)``. Source: arXiv 2408.06266."""
    return 1 - torch.sigmoid(beta * scores.chosen) + torch.sigmoid(beta * scores.rejected)


def apo_down(scores: PreferenceScores, beta: float, _: PreferenceOptions) -> Tensor:
    """Both down, rejected further: ``s(beta c) + 1 - s(beta (c - r))``. Source: arXiv 2408.06266."""
    return torch.sigmoid(beta * scores.chosen) + 1 - torch.sigmoid(beta * scores.delta)


def sppo_hard(scores: PreferenceScores, beta: float, _: PreferenceOptions) -> Tensor:
    """SPPO with hard labels: ``(c - 1/(2 beta))^2 + (r + 1/(2 beta))^2``. Source: arXiv 2405.00675."""
    return (scores.chosen - 0.5 / beta).square() + (scores.rejected + 0.5 / beta).square()


def nca_pair(scores: PreferenceScores, beta: float, _: PreferenceOptions) -> Tensor:
    """NCA: ``-log s(beta c) - 0.5 log s(-beta c) - 0.5 log s(-beta r)``. Source: arXiv 2402.05369."""
    chosen, rejected = beta * scores.chosen, beta * scores.rejected
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def exo_pair(scores: PreferenceScores, beta: float, options: PreferenceOptions) -> Tensor:
    """EXO, reverse KL to labels smoothed by e (0 counts as 1e-3). Source: arXiv 2402.00856, eq. 16.

    ``s(z) (log s(z) - log(1 - e)) + s(-z) (log s(-z) - log e)`` with ``z = beta Delta``.
    """
    z = beta * scores.delta
    e = z.new_tensor(options.label_smoothing or 1e-3)  # log 0 is infinite
    kept = torch.sigmoid(z) * (F.logsigmoid(z) - torch.log1p(-e))
    return kept + torch.sigmoid(-z) * (F.logsigmoid(-z) - torch.log(e))


def bco_pair(scores: PreferenceScores, beta: float, options: PreferenceOptions) -> Tensor:
    """Binary classifier: ``-log s(beta c - d) - log s(-(beta r - d))``, d = baseline. Source: arXiv 2404.04656."""
    chosen, rejected = beta * scores.chosen, beta * scores.rejected
    baseline: float | Tensor | None = options.reward_baseline
    if baseline is None:
        baseline = torch.cat([chosen, rejected]).mean().detach()
    return -F.logsigmoid(chosen - baseline) - F.logsigmoid(baseline - rejected)


def aot(scores: PreferenceScores, beta: float, options: PreferenceOptions) -> Tensor:
    """Sigmoid loss between the sorted margins of policy and reference. Source: arXiv 2406.05882.

    Sorting makes the pairs depend on each other: the loss is that of the batch it is given.
    """
    policy = (scores.policy_chosen - scores.policy_rejected).sort().values
    reference = (scores.ref_chosen - scores.ref_rejected).detach().sort().values
    return _smoothed(beta * (policy - reference), options.label_smoothing)


def aot_pair(scores: PreferenceScores, beta: float, options: PreferenceOptions) -> Tensor:
    """As ``aot``, between sorted chosen and sorted rejected log-ratios: completions need not be paired."""
    return _smoothed(beta * (scores.chosen.sort().values - scores.rejected.sort().values), options.label_smoothing)


def discopop(scores: PreferenceScores, beta: float, options: PreferenceOptions) -> Tensor:
    """``(1 - m) (-log s(z)) + m exp(-z)``, ``z = beta Delta``, ``m = s(z / tau)``. Source: arXiv 2406.08414.

    Not monotone: with the published tau of 0.05 it rises around z = 0, where training starts.
    """
    z = beta * scores.delta
    modulation = torch.sigmoid(z / options.discopop_tau)
    return -F.logsigmoid(z) * (1 - modulation) + torch.exp(-z) * modulation


def simpo(scores: PreferenceScores, beta: float, options: PreferenceOptions) -> Tensor:
    """SimPO, ``-log s(beta (mc - mr) - gamma)`` with mc, mr the log-probs per token; no reference. arXiv 2405.14734."""
    chosen, rejected = scores.means
    return _smoothed(beta * (chosen - rejected) - options.simpo_gamma, options.label_smoothing)


def cpo(scores: PreferenceScores, beta: float, options: PreferenceOptions) -> Tensor:
    """CPO's preference term, ``-log s(beta (log pi_c - log pi_r))``; no reference. Source: arXiv 2401.08417, eq. 3."""
    return _smoothed(beta * (scores.policy_chosen - scores.policy_rejected), options.label_smoothing)


def orpo(scores: PreferenceScores, beta: float, _: PreferenceOptions) -> Tensor:
    """ORPO's odds-ratio term, ``-beta log s(o(mc) - o(mr))`` with ``o(m) = m - log(1 - e^m)``; no reference.

    mc and mr are the log-probs per token. Source: arXiv 2403.07691, eq. 4 to 7; beta is the paper's lambda.
    """
    chosen, rejected = (_log_odds(mean) for mean in scores.means)
    return -beta * F.logsigmoid(chosen - rejected)


def _log_odds(logp: Tensor) -> Tensor:
    """Return ``log(p / (1 - p))``; p just below 1 at most, where it would be infinite."""
    below = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    return logp - torch.log(-torch.expm1(below))


def _smoothed(z: Tensor, label_smoothing: float) -> Tensor:
    return -(1 - label_smoothing) * F.logsigmoid(z) - label_smoothing * F.logsigmoid(-z)


_PAIRED = (
    *(sigmoid, cdpo, robust, hinge, ipo, apo_zero, apo_down, sppo_hard, nca_pair, exo_pair, bco_pair),
    *(aot, aot_pair, discopop, simpo, cpo, orpo),
)
PREFERENCE_LOSSES: Mapping[str, PreferenceLoss] = {loss.__name__: loss for loss in _PAIRED}
"""Every loss by name: ``f(scores, beta, options) -> [P]``."""
