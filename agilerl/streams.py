"""Counter-based random numbers: every draw is a pure function of a seed, a purpose and a key.

Nothing in the package uses a global generator, so the number of workers, the order of the agents and the layout of a
batch cannot change a draw, and resuming needs no generator state.
"""

import random
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np


def stream(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """Return the generator that belongs to ``(seed, purpose, key)``; equal arguments give equal draws.

    ``purpose`` names what the numbers are for ("rollout", "mutation", ...), so that two uses never share a stream.
    ``key`` holds non-negative integers, for instance agent index, step, prompt and sample.
    """
    # crc32 and not hash(), which differs between processes.
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *key])))


def uniforms(seed: int, purpose: str, key: tuple[int, ...], count: int) -> np.ndarray:
    """Return ``count`` float64 uniforms in [0, 1) of the stream ``(seed, purpose, key)``."""
    return stream(seed, purpose, *key).random(count)


def uniform_rows(seed: int, purpose: str, keys: Sequence[tuple[int, ...]], count: int) -> np.ndarray:
    """Return :func:`uniforms` of each key, ``[len(keys), count]``: the same numbers, in a fifth of the time.

    One generator takes the state of each stream in turn, where ``stream`` makes a seed sequence and a generator each.
    """
    table = np.empty((len(keys), count))
    generator = stream(seed, purpose)
    # Nothing drawn yet: counter 0, an empty buffer. Only the key differs between streams.
    start = generator.bit_generator.state
    by_length: dict[int, list[int]] = {}
    for row, key in enumerate(keys):
        if max(seed, *key, 0) > _WORD:  # such a number fills several words
            table[row] = uniforms(seed, purpose, key, count)
        else:
            by_length.setdefault(len(key), []).append(row)
    for rows in by_length.values():
        words = np.array([(seed, zlib.crc32(purpose.encode()), *keys[row]) for row in rows], dtype=np.uint32)
        for row, philox_key in zip(rows, _philox_keys(words)):
            start["state"]["key"] = philox_key
            generator.bit_generator.state = start
            generator.random(out=table[row])
    return table


_WORD = 0xFFFFFFFF
_POOL = 4
"""Words of the pool of a seed sequence."""


def _philox_keys(entropy: np.ndarray) -> np.ndarray:
    """Return the keys ``[rows, 2]`` that Philox takes from ``SeedSequence(row)``, for entropy ``[rows, words]``.

    The algorithm is M. E. O'Neill's, in numpy's constants (``numpy/random/bit_generator.pyx``), which numpy keeps
    stable. The multipliers do not depend on what is hashed, so all rows go through it together.
    """
    # INIT_A and, as default of step, MULT_A.
    multiplier = 0x43B0D7E5

    def folded(words: np.ndarray) -> np.ndarray:
        result: np.ndarray = words ^ words >> np.uint32(16)
        return result

    def hashed(words: np.ndarray, step: int = 0x931E8875) -> np.ndarray:
        nonlocal multiplier
        words = words ^ np.uint32(multiplier)
        multiplier = multiplier * step & _WORD
        return folded(words * np.uint32(multiplier))

    def mixed(into: np.ndarray, words: np.ndarray) -> np.ndarray:
        # MIX_MULT_L and MIX_MULT_R.
        return folded(into * np.uint32(0xCA01F9DD) - words * np.uint32(0x4973F715))

    columns = list(entropy.T)
    columns += [np.zeros(len(entropy), dtype=np.uint32)] * (_POOL - len(columns))
    pool = [hashed(words) for words in columns[:_POOL]]
    # Every word into every other, so that all bits of the entropy reach all of the pool.
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = mixed(pool[target], hashed(pool[source]))
    # Entropy beyond the pool.
    for words in columns[_POOL:]:
        for target in range(_POOL):
            pool[target] = mixed(pool[target], hashed(words))
    # generate_state, with INIT_B and MULT_B: four words of 32 bits make the two of 64 of a key.
    multiplier = 0x8B51F9DD
    state = [hashed(words, 0x58F38DED).astype(np.uint64) for words in pool]
    return np.stack([state[0] | state[1] << np.uint64(32), state[2] | state[3] << np.uint64(32)], axis=1)


def normal(seed: int, purpose: str, key: tuple[int, ...], count: int) -> np.ndarray:
    """Return ``count`` float64 standard normals of the stream ``(seed, purpose, key)``."""
    return stream(seed, purpose, *key).standard_normal(count)


# -- the global generators, from which some third-party code draws ----------------------------------------------------


PROCESS_WIDE = threading.RLock()
"""Held while changing what threads share, such as generators and output: of two locks, threads could hold one each."""


@contextmanager
def sealed(seed: int) -> Iterator[None]:
    """Run code that uses Python's or numpy's global generator: seeded inside, left as they were outside.

    Otherwise such code would not be reproducible, and would disturb the caller's random numbers. Only one thread at a
    time is inside.
    """
    with PROCESS_WIDE:
        python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
        try:
            random.seed(seed)
            # numpy's global generator takes 32 bits.
            np.random.seed(seed % 2**32)  # noqa: NPY002
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002
