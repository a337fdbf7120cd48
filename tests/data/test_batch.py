"""Trajectories become one right-padded batch."""

import pytest
import torch

from agilerl.data import Trajectory, collate
from agilerl.errors import ConfigError
from agilerl.sizes import LENGTH_MULTIPLE

NAN = float("nan")


def rows() -> list[Trajectory]:
    return [
        Trajectory([5, 6], [7, 8, 9], [True] * 3, [-0.5, -1.5, -2.5], [1.0], group=0, finish_reason="stop"),
        Trajectory([5], [7, 8, 9], [True, False, True], [-1.0, 0.0, -3.0], [0.5, 0.25], group=1, turn_ids=[0, -1, 1]),
        Trajectory([4, 4, 4], [], [], [], [], group=1, finish_reason="length"),
    ]


def test_every_column_of_a_batch() -> None:
    batch = collate(rows(), 3)
    assert batch.ids.shape == (3, LENGTH_MULTIPLE)
    assert batch.ids[:, :6].tolist() == [[5, 6, 7, 8, 9, 3], [5, 7, 8, 9, 3, 3], [4, 4, 4, 3, 3, 3]]
    assert batch.lengths.tolist() == [5, 4, 3]
    assert batch.action_mask.nonzero().tolist() == [[0, 1], [0, 2], [0, 3], [1, 0], [1, 2]]
    assert batch.turn_ids[:, :5].tolist() == [[-1, 0, 0, 0, -1], [0, -1, 1, -1, -1], [-1] * 5]
    assert batch.sampling_logps is not None
    assert batch.sampling_logps[:, :5].tolist() == [[0, -0.5, -1.5, -2.5, 0], [-1, 0, -3, 0, 0], [0] * 5]
    assert str(batch.rewards.tolist()) == str([[1.0, NAN], [0.5, 0.25], [NAN, NAN]])
    assert batch.groups.tolist() == [0, 1, 1]
    assert batch.truncated is not None
    assert batch.truncated.tolist() == [False, False, True]
    assert not batch.ids[:, 6:].ne(3).any()
    dtypes = [t.dtype for t in (batch.ids, batch.action_mask, batch.turn_ids, batch.sampling_logps, batch.rewards)]
    assert dtypes == [torch.int64, torch.bool, torch.int64, torch.float32, torch.float32]


def test_log_probs_are_known_if_all_rows_have_them() -> None:
    some = rows()
    some[1].logprobs = None
    assert collate(some, 3).sampling_logps is None


def test_no_rows() -> None:
    batch = collate([], 3)
    assert batch.ids.shape == (0, LENGTH_MULTIPLE)
    assert batch.rewards.shape == (0, 1)


@pytest.mark.parametrize("name", ["action_mask", "logprobs", "turn_ids"])
def test_lists_of_different_length_are_refused(name: str) -> None:
    """Even where the total is right: the values of one row must not slide into the next."""
    some = rows()[:2]
    if name == "turn_ids":
        some[0].turn_ids = [0, 0, 0]
    moved = getattr(some[1], name).pop()
    getattr(some[0], name).append(moved)
    with pytest.raises(ConfigError):
        collate(some, 3)


def test_the_number_of_tensors_does_not_grow_with_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    tensor = torch.tensor
    monkeypatch.setattr(torch, "tensor", lambda *given, **options: made.append(1) or tensor(*given, **options))  # type: ignore[func-returns-value]
    collate(rows(), 3)
    few = len(made)
    collate(rows() * 20, 3)
    assert len(made) == 2 * few
