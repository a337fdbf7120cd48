"""One batch of what each process of a group has brought along."""

from dataclasses import fields, replace

import torch
from safetensors.torch import load, save
from torch import Tensor

from agilerl.data.batch import RolloutBatch
from agilerl.processes import Processes

__all__ = ["union"]


def union(processes: Processes, batch: RolloutBatch, pad_token_id: int) -> RolloutBatch:
    """Return the rows of all processes in the order of their ranks, as if one had collated them; alone, the batch.

    Groups and episodes of different processes stay different ones.
    """
    if processes.size == 1:
        return batch
    own = {f.name: getattr(batch, f.name) for f in fields(batch)}
    sent = save({name: value.cpu().contiguous() for name, value in own.items() if value is not None})
    parts = [RolloutBatch(**load(part)) for part in processes.gather(sent)]
    groups = rows = 0
    for place, part in enumerate(parts):
        # As collate does: an episode has the number of its first row.
        episodes = torch.arange(len(part)) if part.episodes is None else part.episodes
        parts[place] = replace(part, groups=part.groups + groups, episodes=episodes + rows)
        groups += int(part.groups.max()) + 1 if len(part) else 0
        rows += len(part)
    fill = {"ids": pad_token_id, "turn_ids": -1, "rewards": float("nan")}
    columns = {f.name: [getattr(part, f.name) for part in parts] for f in fields(batch)}
    known = {
        name: None if any(value is None for value in values) else _stacked(values, fill.get(name, 0))
        for name, values in columns.items()
    }
    whole = RolloutBatch(**known)  # type: ignore[arg-type]
    return whole if _has_long_episodes(whole) else replace(whole, episodes=None)


def _has_long_episodes(batch: RolloutBatch) -> bool:
    """Return whether some episode of the batch is several rows."""
    assert batch.episodes is not None
    return len(batch.episodes.unique()) < len(batch)  # type: ignore[no-untyped-call]


def _stacked(values: list[Tensor], fill: float) -> Tensor:
    """Put tensors behind each other, their rows made equally wide at the right."""
    width = max((value.shape[1] for value in values if value.dim() == 2), default=0)
    wide = [
        torch.nn.functional.pad(value, (0, width - value.shape[1]), value=fill) if value.dim() == 2 else value
        for value in values
    ]
    return torch.cat(wide)
