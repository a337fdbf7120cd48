"""Counter-based random numbers: every draw is a pure function of a seed, a purpose and a key.

Nothing in the package uses a global generator, so the number of workers, the order of the agents and the layout of a
batch cannot change a draw, and resuming needs no generator state.
"""

import zlib

import numpy as np


def stream(seed: int, purpose: str, *key: int) -> np.random.Generator:
    """Return the generator that belongs to ``(seed, purpose, key)``; equal arguments give equal draws.

    ``purpose`` names what the numbers are for ("rollout", "mutation", ...), so that two uses never share a stream.
    ``key`` holds non-negative integers, for instance agent index, step, prompt and sample.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), *key])))


def uniforms(seed: int, purpose: str, key: tuple[int, ...], count: int) -> np.ndarray:
    """Return ``count`` float64 uniforms in [0, 1) of the stream ``(seed, purpose, key)``."""
    return stream(seed, purpose, *key).random(count)


def normal(seed: int, purpose: str, key: tuple[int, ...], count: int) -> np.ndarray:
    """Return ``count`` float64 standard normals of the stream ``(seed, purpose, key)``."""
    return stream(seed, purpose, *key).standard_normal(count)
