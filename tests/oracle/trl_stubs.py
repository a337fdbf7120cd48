"""As much of a TRL trainer as its loss asks for: the method runs unbound on this, with tensors in place of a model."""

import sys
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


def module(name: str) -> Any:
    """Import a module of TRL without wandb, which takes seconds in every process that collects the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "wandb", None)
        return pytest.importorskip(f"trl.{name}", reason="TRL is not installed; make setup installs it")


def accelerator() -> SimpleNamespace:
    """One process: nothing to gather, nothing to reduce."""

    def same(value: Tensor, *_: Any, **__: Any) -> Tensor:
        return value

    return SimpleNamespace(
        device=torch.device("cpu"),
        num_processes=1,
        parallelism_config=None,
        gather=same,
        gather_for_metrics=same,
        reduce=same,
        pad_across_processes=same,
    )


def trainer(**settings: Any) -> SimpleNamespace:
    """What all trainers share; ``training=False`` leaves gradient accumulation out."""
    metrics: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    shared = {
        "accelerator": accelerator(),
        "model": SimpleNamespace(training=False),
        "aux_loss_enabled": False,
        "_metrics": metrics,
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return SimpleNamespace(**{**shared, **settings})


def grpo(logp: Tensor, entropy: Tensor, **changes: Any) -> SimpleNamespace:
    """A GRPO or RLOO trainer whose model gives these log-probs and entropies."""
    settings: dict[str, Any] = {
        "_get_per_token_logps_and_entropies": lambda *_, **__: (logp, entropy, None),
        "loss_type": "grpo",
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "max_completion_length": None,
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "use_vllm": False,
        "vllm_importance_sampling_correction": True,
        "current_gradient_accumulation_steps": 1,
        "_entropy_bonus_enabled": False,
        "use_adaptive_entropy": False,
        "entropy_coef": 0.0,
    }
    args = {"use_bias_correction_kl": True, "delta": None, "steps_per_generation": 1}  # the first is its default
    args |= {name: changes.pop(name) for name in args.keys() & changes.keys()}
    return trainer(**{**settings, **changes}, args=SimpleNamespace(**args))


def completions(mask: Tensor, **tensors: Tensor) -> dict[str, Tensor]:
    """A batch: prompts of one token, completions with this mask."""
    ones = torch.ones(len(mask), 1, dtype=torch.int64)
    return {
        "prompt_ids": ones,
        "prompt_mask": ones,
        "completion_ids": torch.zeros(mask.shape, dtype=torch.int64),
        "completion_mask": mask.long(),
        "num_items_in_batch": mask.sum(),
        **tensors,
    }


def language_model(logp: Tensor, entropy: Tensor, mask: Tensor, collision: Tensor | None = None) -> Any:
    """A model with a fused head that gives these values, 0 off the mask."""
    outputs = SimpleNamespace(
        log_probs=torch.where(mask, logp, 0.0),
        entropy=torch.where(mask, entropy, 0.0),
        mean_logits=torch.zeros(mask.shape),
        is_top1=torch.zeros(mask.shape, dtype=torch.bool),
        label_mask=mask,
        log_sum_sq_probs=None if collision is None else -collision,
    )
    return lambda *_, **__: outputs
