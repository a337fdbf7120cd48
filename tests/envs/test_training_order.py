"""The order of training: permutations, shares of a mixture, and no memory."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agilerl.envs.core import BLOCK, TrainingOrder, apportion
from agilerl.errors import ConfigError

WEIGHTS = st.lists(st.floats(0.05, 20), min_size=1, max_size=5)


@given(st.integers(1, 60), st.integers(0, 2**31), st.integers(0, 1000))
def test_every_epoch_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = TrainingOrder([size], [1.0], seed)
    assert sorted(order(epoch * size + i) for i in range(size)) == list(range(size))


@given(WEIGHTS, st.integers(0, 500))
def test_shares_add_up_and_are_near_their_weights(weights: list[float], total: int) -> None:
    shares = apportion(weights, total)
    assert sum(shares) == total
    assert all(abs(share - weight / sum(weights) * total) < 1 for share, weight in zip(shares, weights))


@given(st.data(), WEIGHTS, st.integers(0, 100))
def test_a_mixture_keeps_its_weights_in_every_block(data: st.DataObject, weights: list[float], seed: int) -> None:
    sizes = data.draw(st.lists(st.integers(1, 40), min_size=len(weights), max_size=len(weights)))
    block = data.draw(st.integers(0, 50))
    order = TrainingOrder(sizes, weights, seed)
    found = Counter(order.source(block * BLOCK + place)[0] for place in range(BLOCK))
    assert [found[number] for number in range(len(sizes))] == apportion(weights, BLOCK)


def test_sources_of_a_mixture_have_epochs_of_their_own() -> None:
    order = TrainingOrder([7, 30], [1, 1], 3)
    rows = [order(position) for position in range(3 * BLOCK)]
    for first, size in ((0, 7), (7, 30)):
        own = [row - first for row in rows if first <= row < first + size]
        epochs = [own[i : i + size] for i in range(0, len(own) - size, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) > 1
    sources = [row >= 7 for row in rows[:40]]
    assert 0 < sum(sources) < 40  # neither comes first


def test_a_position_is_all_that_counts() -> None:
    order = TrainingOrder([5, 9, 2], [3, 2, 0.5], 1)
    forward = [order(position) for position in range(2500)]
    again = TrainingOrder([5, 9, 2], [3, 2, 0.5], 1)
    assert [again(position) for position in reversed(range(2500))] == forward[::-1]
    assert [TrainingOrder([5, 9, 2], [3, 2, 0.5], 2)(position) for position in range(50)] != forward[:50]


def test_a_weight_too_small_for_any_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 of 1000 rows"):
        TrainingOrder([5, 5], [1, 1e-6], 1)
