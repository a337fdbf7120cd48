"""The one place that touches the global random generators, for third-party code that draws from them."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

_LOCK = threading.RLock()


@contextmanager
def sealed(seed: int) -> Iterator[None]:
    """Run code that uses Python's or numpy's global generator: seeded inside, left as they were outside.

    Otherwise such code would not be reproducible, and would disturb the caller's random numbers. Only one thread at a
    time is inside.
    """
    with _LOCK:
        python, legacy = random.getstate(), np.random.get_state()  # noqa: NPY002
        try:
            random.seed(seed)
            np.random.seed(seed % 2**32)  # noqa: NPY002
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002
