"""Custom losses: a function instead of an algorithm's objective, and PolicyLoss, which composes one of named parts."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from agilerl.algorithms.base import AlgorithmConfig
from agilerl.algorithms.learner import Learner
from agilerl.algorithms.metrics import record_tokens
from agilerl.algorithms.objective import PolicyParts, Surrogate, aggregated, policy_terms
from agilerl.checks.arguments import check_fields, described, nearest
from agilerl.data import LossInputs
from agilerl.errors import CheckpointError, ConfigError
from agilerl.functional import (
    Divergence,
    KLEstimator,
    LossNorm,
    MetricReducer,
    MismatchMode,
    PoolingLevel,
    Reduction,
    importance_ratio,
    kl_estimate,
    log_ratio,
    normaliser,
)
from agilerl.safety.custom_code import left, torch_restored

LossFunction = Callable[..., Tensor | tuple[Tensor, Mapping[str, Any]]]
"""``loss(inputs: LossInputs, **hyperparameters) -> scalar``, or ``-> (scalar, metrics)``.

The scalar is these rows' part of the loss of one optimizer step: sum over the rows, divided by ``inputs.denominator``,
so that micro-batches add up. Further parameters that are named like a hyperparameter of the agent (or a property, such
as ``clip_range``) get its present value, so they evolve. Metrics are tensors ``[b, L]`` (reduced over action tokens),
``[n]`` (over their entries), or numbers (averaged over rows); a name that ends in /min, /max, /std or /sum is reduced
so, any other by the mean.
"""

_RESERVED = (
    *("loss", "mean_loss", "mean_kl", "grad_norm", "learning_rate", "num_tokens", "skipped_steps"),
    "router_aux_loss",
    *("reward", "reward_std", "frac_reward_zero_std"),
)


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """A policy-gradient loss made of four parts, each by name or as a function; itself a loss function.

    | part | names | as a function |
    |---|---|---|
    | ratio | token, turn, trajectory: unit over which log-ratios are pooled | ``f(inputs) -> [b, L]`` |
    | surrogate | clipped, cispo, dppo, reinforce | ``f(ratio, advantages, logp) -> [b, L]`` |
    | kl | None, k1, k2, k3, k3+: estimate that joins the loss with weight beta | ``f(logp, ref_logp) -> [b, L]`` |
    | aggregation | a ``loss_norm``; None: the agent's | ``f(loss, mask, denominator) -> scalar`` |

    Numbers (``beta``, ``clip_coef``, ``entropy_coef``, ...) are the agent's own, so they evolve as they do without it.
    Raises ConfigError for an unknown name.
    """

    ratio: PoolingLevel | Callable[[LossInputs], Tensor] = "token"
    surrogate: Surrogate | Callable[[Tensor, Tensor, Tensor], Tensor] = "clipped"
    kl: KLEstimator | Callable[[Tensor, Tensor], Tensor] | None = None
    aggregation: LossNorm | Callable[[Tensor, Tensor, float], Tensor] | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def __call__(
        self,
        inputs: LossInputs,
        *,
        kl_coef: float = 0.0,
        kl_clamp_value: float | None = None,
        use_bias_correction_kl: bool = True,
        entropy_coef: float = 0.0,
        clip_range: tuple[float, float] = (0.8, 1.2),
        weight_range: tuple[float, float] = (0.0, 5.0),
        dual_clip: float | None = None,
        delta: float | None = None,
        pooling: Literal["mean", "sum"] = "mean",
        divergence: Divergence = "tv",
        divergence_limit: float = 0.2,
        weight_max: float = 20.0,
        loss_norm: LossNorm = "seq-mean-token-mean",
        vllm_importance_sampling_correction: bool = True,
        vllm_importance_sampling_mode: MismatchMode = "token_truncate",
        vllm_importance_sampling_cap: float = 2.0,
        vllm_importance_sampling_clip_min: float | None = None,
        off_policy_token_mask_bounds: tuple[float, float] | None = None,
        off_policy_sequence_mask_threshold: float | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the aggregated loss and its metrics; the keywords are the agent's hyperparameters."""
        if self.kl is not None and inputs.ref_logp is None:
            raise ConfigError(
                f"PolicyLoss(kl={self.kl!r}) needs the reference's log-probs, which an agent only computes with a beta "
                "above 0; give the agent a beta, or leave kl out"
            )
        parts = PolicyParts(
            ratio=self.ratio,
            pooling=pooling,
            surrogate=self.surrogate,
            bounds=weight_range if self.surrogate == "cispo" else clip_range,
            divergence=divergence,
            divergence_limit=divergence_limit,
            weight_max=weight_max,
            dual_clip=dual_clip,
            delta=delta,
            kl=self.kl,
            kl_weight=kl_coef,
            kl_clamp=kl_clamp_value,
            kl_corrected=use_bias_correction_kl,
            entropy_coef=entropy_coef,
            mismatch=vllm_importance_sampling_mode if vllm_importance_sampling_correction else None,
            mismatch_cap=vllm_importance_sampling_cap,
            mismatch_floor=vllm_importance_sampling_clip_min or 0.0,
            token_band=off_policy_token_mask_bounds,
            sequence_drift=off_policy_sequence_mask_threshold,
            aggregation=self.aggregation or loss_norm,
        )
        terms = policy_terms(inputs, parts)
        metrics = {"policy_loss": terms.policy.detach()}
        if terms.kl is not None:
            metrics["kl"] = terms.kl.detach()
        metrics |= {f"is_ratio/{name}": terms.ratio.detach() for name in ("mean", "min", "max")}
        if terms.regions is not None:
            below, above = terms.regions
            names = ("clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean")
            metrics |= dict(zip(names, (below, above, below | above)))
        return aggregated(terms.loss, inputs, parts), metrics


# -- how an agent uses a loss function --------------------------------------------------------------------------------


def loss_name(loss: LossFunction) -> str:
    """Return what to call a loss function in messages and checkpoints."""
    if isinstance(loss, PolicyLoss):
        return repr(loss)
    inner = loss.func if isinstance(loss, partial) else loss
    return str(getattr(inner, "__qualname__", type(inner).__name__))


def check_loss(loss: LossFunction, agent: Learner) -> None:
    """Raise ConfigError unless ``loss`` can be called with LossInputs and hyperparameters of ``agent``."""
    if not callable(loss):
        raise ConfigError(f"loss must be a function of LossInputs that returns a scalar, found {described(loss)}")
    _arguments(loss, agent)
    if isinstance(loss, PolicyLoss) and loss.kl is not None and not getattr(agent.config, "beta", 0.0):
        raise ConfigError(f"loss=PolicyLoss(kl={loss.kl!r}) contradicts beta=0, which weighs it; change one of them")


def check_restored(name: str | None, loss: LossFunction | None) -> None:
    """Raise CheckpointError when an agent that had a custom loss is restored without one."""
    if name is not None and loss is None:
        raise CheckpointError(
            f"this agent was trained with the custom loss {name}, and a checkpoint cannot hold functions; pass it "
            "again as load(path, loss=...). For the algorithm's own objective, build an agent and load the checkpoint "
            "into it"
        )


def compute_loss(agent: Learner, override: LossFunction | None, inputs: LossInputs, metrics: MetricReducer) -> Tensor:
    """Return the scalar loss of a micro-batch: of ``override``, else the agent's, else its algorithm's."""
    loss = override if override is not None else agent.loss
    if loss is None:
        return agent.objective(inputs, metrics)
    # Looked up in every call: a mutation may have changed them.
    arguments = {name: getattr(owner, name) for name, owner in _arguments(loss, agent).items()}
    try:
        with torch_restored():
            result: Any = loss(inputs, **arguments)
    except BaseException as error:
        # left() raises an ordinary error as it is; what it returns tried to exit the process.
        raise ConfigError(f"the loss {loss_name(loss)} failed: {left(error)}; let it raise an error instead") from error
    pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    value, named = result if pair else (result, {})
    _check_scalar(value, loss_name(loss))
    assert isinstance(value, Tensor)
    # Its advantages are derivatives, of which the usual metrics would say nothing.
    if loss is not tangent_loss:
        _record(inputs, value, named, metrics)
    # The losses of all agents are stacked, whatever type and device a user computes in.
    return value.to(inputs.logp)


def loss_denominator(agent: Learner, override: LossFunction | None, mask: Tensor) -> float:
    """Return the denominator of a window from its mask ``[rows, L]``: that of PolicyLoss's aggregation, or the agent's.

    Raises ConfigError when ``fixed-length`` aggregation meets an agent without ``max_output_tokens``.
    """
    loss = override if override is not None else agent.loss
    if not isinstance(loss, PolicyLoss) or not isinstance(loss.aggregation, str):
        return agent.window_denominator(mask)
    longest: int | None = getattr(agent.config, "max_output_tokens", None)
    if loss.aggregation == "fixed-length" and longest is None:
        raise ConfigError("PolicyLoss(aggregation='fixed-length') divides by max_output_tokens, which is None; set it")
    return normaliser(mask, loss.aggregation, max_length=longest)


def tangent_loss(inputs: LossInputs) -> Tensor:
    """Return the loss whose gradient with respect to the log-probs is the tensor passed as advantages."""
    return (inputs.logp * torch.where(inputs.mask, inputs.advantages.to(inputs.logp), 0.0)).sum()


def _arguments(loss: LossFunction, agent: Learner) -> dict[str, object]:
    """Return a loss function's parameters besides its inputs, each with the object that holds its value."""
    name = loss_name(loss)
    try:
        first, *others = inspect.signature(loss).parameters.values()
    except (TypeError, ValueError):
        raise ConfigError(f"the loss {name} must take one argument, the LossInputs; it takes none") from None
    if first.kind is inspect.Parameter.KEYWORD_ONLY:
        raise ConfigError(f"the loss {name} must take the LossInputs as its first argument, by position")
    # What functools.partial has fixed stays fixed.
    fixed = loss.keywords if isinstance(loss, partial) else {}
    owners: dict[str, object] = {}
    for parameter in others:
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue
        if parameter.name in fixed:
            continue
        owner = next((o for o in (agent.config, agent) if _has(o, parameter.name)), None)
        if owner is not None:
            owners[parameter.name] = owner
        elif parameter.default is inspect.Parameter.empty:
            raise ConfigError(
                f"the loss {name} asks for {parameter.name!r}, which is not a hyperparameter of this agent; "
                f"{nearest(parameter.name, type(agent.config).model_fields)}"
            )
    return owners


def _has(owner: object, name: str) -> bool:
    """Return whether an object has a hyperparameter or a property of this name, without computing its value."""
    fields = type(owner).model_fields if isinstance(owner, AlgorithmConfig) else ()
    return name in fields or isinstance(inspect.getattr_static(type(owner), name, None), property)


def _check_scalar(value: Any, name: str) -> None:
    expected = f"the loss {name} must return a scalar tensor, or (scalar tensor, metrics)"
    if not isinstance(value, Tensor):
        raise ConfigError(f"{expected}, found {value!r} of type {type(value).__name__}; do not call .item()")
    if value.dim() != 0:
        raise ConfigError(
            f"{expected}, found shape {tuple(value.shape)}; reduce it, for instance with "
            "agilerl.functional.aggregate(loss, inputs.mask, 'token-mean', inputs.denominator)"
        )
    if not value.requires_grad:
        raise ConfigError(f"{expected}, found one without gradient; compute it from inputs.logp, without .detach()")


@torch.no_grad()
def _record(inputs: LossInputs, loss: Tensor, named: Mapping[str, Any], metrics: MetricReducer) -> None:
    """Add the metrics of every loss, and this loss's own, which win if both have the same name."""
    usual = MetricReducer()
    record_tokens(inputs, importance_ratio(log_ratio(inputs.logp, inputs.old_logp, inputs.mask)), usual)
    if inputs.ref_logp is not None:
        usual.add("kl", kl_estimate(inputs.logp, inputs.ref_logp, "k3"), inputs.mask)
    for name in named:
        if name in _RESERVED or name.startswith("completions/"):
            raise ConfigError(f"the loss returned a metric named {name!r}, which the update reports; rename it")
        usual.statistics.pop(name, None)
        usual.reductions.pop(name, None)
    metrics.merge(usual)
    metrics.add("loss", loss, reduction="sum")
    for name, values in named.items():
        _record_own(inputs, name, values, metrics)


def _record_own(inputs: LossInputs, name: str, values: Any, metrics: MetricReducer) -> None:
    ending = name.rpartition("/")[2]
    reduction: Reduction = ending if ending in ("min", "max", "std", "sum") else "mean"  # type: ignore[assignment]
    try:
        tensor = torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"the loss's metric {name!r} must be a number or a tensor, found {values!r}") from None
    if tensor.shape == inputs.mask.shape:
        metrics.add(name, tensor, inputs.mask, reduction=reduction)
    elif tensor.dim() == 0 and reduction == "mean":
        # Once for each row, so that the mean does not depend on micro-batches.
        metrics.add_ratio(name, float(tensor) * len(inputs.mask), len(inputs.mask))
    elif tensor.dim() < 2:
        metrics.add(name, tensor, reduction=reduction)
    else:
        raise ConfigError(
            f"the metric {name!r} of the custom loss must be a number or have shape {tuple(inputs.mask.shape)} or [n], "
            f"found {tuple(tensor.shape)}"
        )
