"""Counter-based random numbers: many streams at once give what each gives alone."""

import numpy as np
import pytest

from agilerl import streams

KEYS: dict[str, list[tuple[int, ...]]] = {
    "none": [],
    "no key": [()],
    "samples of two prompts": [(3, 0, prompt, sample) for prompt in range(2) for sample in range(5)],
    "lengths": [(1,), (1, 0), (0, 1, 2), (7, 6, 5, 4, 3, 2, 1), (1,)],
    "numbers of several words": [(2**32 - 1, 5), (2**32, 5), (2**70, 1)],
}


@pytest.mark.parametrize("keys", KEYS.values(), ids=KEYS)
@pytest.mark.parametrize("seed", [0, 42, 2**32 - 1, 2**40])
def test_rows_are_those_of_each_stream(keys: list[tuple[int, ...]], seed: int) -> None:
    found = streams.uniform_rows(seed, "rollout", keys, 11)
    assert found.shape == (len(keys), 11)
    for key, row in zip(keys, found):
        assert np.array_equal(row, streams.uniforms(seed, "rollout", key, 11))


def test_a_generator_is_made_once_and_not_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    one = streams.stream
    monkeypatch.setattr(streams, "stream", lambda *given: made.append(given) or one(*given))  # type: ignore[func-returns-value]
    streams.uniform_rows(1, "rollout", [(0, sample) for sample in range(100)], 3)
    assert len(made) == 1
