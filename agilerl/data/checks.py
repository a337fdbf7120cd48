"""Checks of tensors that a user passes in: token ids, masks, rewards, whole batches.

None of this runs between a rollout of the package and its update: tensors that the package makes are not checked again.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agilerl.checks.arguments import described
from agilerl.errors import ConfigError

_IDS = "pass whole token ids, as a tokenizer returns them (int64)"


def token_rows(value: Any, where: str) -> Tensor:
    """Return token ids as a matrix ``[rows, T]`` of int64; one row may come without its first dimension.

    Raises ConfigError for anything but integers, one or two dimensions, and at least one row and token.
    """
    ids = _tensor(value, where, "token ids [rows, T]", _IDS)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ConfigError(f"{where}: expected token ids, which are integers, found {described(ids)}; {_IDS}")
    if ids.dim() not in (1, 2) or not ids.numel():
        raise ConfigError(f"{where}: expected token ids [rows, T], one token or more, found {described(ids)}; {_IDS}")
    return ids.long() if ids.dim() == 2 else ids.long()[None]


def one_row(value: Any, where: str) -> list[int]:
    """Return the token ids of one sequence, given as ``[T]`` or ``[1, T]``; raises ConfigError for anything else."""
    ids = token_rows(value, where)
    if len(ids) != 1:
        raise ConfigError(
            f"{where}: expected the token ids of one sequence, [1, T], found {described(ids)}, which is {len(ids)} "
            "sequences; pass each as a separate entry of the list"
        )
    tokens: list[int] = ids[0].tolist()
    return tokens


def mask_rows(value: Any, where: str) -> Tensor:
    """Return a mask as a matrix ``[rows, T]`` of bool; raises ConfigError for entries other than 0 and 1."""
    mask = _tensor(value, where, "a mask [rows, T] of 0 and 1", "pass True where the agent generated the next token")
    if mask.dim() not in (1, 2):
        raise ConfigError(f"{where}: expected a mask [rows, T] of 0 and 1, found {described(mask)}")
    if mask.dtype != torch.bool:
        odd = mask[(mask != 0) & (mask != 1)]
        if odd.numel():
            raise ConfigError(
                f"{where}: expected a mask of 0 and 1, found {odd.reshape(-1)[0].item():g} in it; pass True where the "
                "agent generated the next token and False elsewhere (weights belong in rewards or a loss)"
            )
    mask = mask.bool()
    return mask if mask.dim() == 2 else mask[None]


def number_rows(value: Any, where: str) -> Tensor:
    """Return numbers as a float32 tensor of any shape; raises ConfigError for anything else."""
    numbers = _tensor(value, where, "numbers", "")
    if numbers.is_complex():
        raise ConfigError(f"{where}: expected numbers, found {described(numbers)}")
    return numbers.to(torch.float32)


def check_vocabulary(ids: Tensor | Sequence[int], size: int, where: str) -> None:
    """Raise ConfigError unless all token ids are valid for a vocabulary of this size."""
    low, high = (int(ids.min()), int(ids.max())) if isinstance(ids, Tensor) else (min(ids), max(ids))
    if low < 0 or high >= size:
        raise ConfigError(
            f"{where}: expected token ids of the base's vocabulary, 0 to {size - 1}, found {low if low < 0 else high}; "
            "use the tokenizer that belongs to the base model"
        )


def check_context(lengths: Tensor, most: int, wanted: int | None, where: str) -> None:
    """Raise ConfigError if a row of a batch is longer than the context; ``wanted`` is ``max_model_len``."""
    longest = int(lengths.max()) if lengths.numel() else 0
    if longest > most:
        raise ConfigError(
            f"{where}: expected rows of at most {most} tokens, the context of this agent (max_model_len={wanted}, or "
            f"the base model's limit), found one of {longest}; shorten such rows, or raise max_model_len"
        )


def _tensor(value: Any, where: str, expected: str, hint: str) -> Tensor:
    if isinstance(value, Tensor):
        if value.is_meta:
            raise ConfigError(f"{where}: expected {expected}, found a tensor on the device 'meta', which has no values")
        return value.detach()
    cure = f"; {hint}" if hint else ""
    try:
        if value is None or isinstance(value, str | bytes):
            # Without a text: torch's own ("Could not infer dtype of NoneType") would not help.
            raise TypeError
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = f" ({error})" if str(error) else ""
        raise ConfigError(f"{where}: expected {expected}, found {described(value)}{reason}{cure}") from error
