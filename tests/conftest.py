"""What holds for every test: no network, one thread, the same examples each time."""

import os

# Set before the libraries read them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

from hypothesis import settings

# A check that fails now and then is of no use to whoever did not cause it.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")
