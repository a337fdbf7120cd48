"""The benchmark of many turns counts what it says: linear in the length where caches are kept, else quadratic."""

import pytest
import torch

from benchmarking.turns import Play, measured

pytestmark = pytest.mark.model


def test_tokens_grow_with_the_episodes_and_not_with_their_turns() -> None:
    torch.set_num_threads(1)
    play = Play("embedded", agents=2, episodes=8, observation=4, action=2)
    found = [measured(play, turns, rounds=1) for turns in (1, 2, 4)]
    # 16 episodes: 4 new tokens in the first turn, and one step; then the token that was drawn last as well, so that an
    # agent has 8 x 5 tokens, filled up to 48.
    kept = [16 * 4 + 16, 2 * 48 + 16]
    assert [one["computed"]["kept"] for one in found] == [kept[0], sum(kept), kept[0] + 3 * kept[1]]
    again = [16 * (6 * turn + 4) + 16 for turn in range(4)]
    assert [one["computed"]["from_the_start"] for one in found] == [again[0], sum(again[:2]), sum(again)]
    for one in found:
        ratio, low, high = one["ratio"]
        assert 0 < low <= ratio <= high
        assert ratio == pytest.approx(one["seconds"]["from_the_start"] / one["seconds"]["kept"])
