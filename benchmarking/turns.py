"""What episodes of many turns cost, if the engine keeps their keys and values from turn to turn, and if it does not.

    python benchmarking/turns.py [--model 1.25M] [--turns 1 2 4 8 16] [--agents 4] [--episodes 8] [--observation 24]
                                 [--action 8] [--rounds 5] [--out FILE]

Each turn an episode grows by an observation and an action of fixed lengths (the base has no end token). All episodes of
all agents advance in one batch, as ``Population`` plays them. ``seconds`` are those of the engine, CPU time in one
thread, medians over rounds; the arms take turns, and the one that begins changes with the round. ``ratio`` is the
median of (from the start / kept) within a round, with a bootstrap interval of 95 %. ``computed`` counts the tokens of
all episodes that went through the base. Prints a table and one JSON object.
"""

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from agilerl.models.base import from_model  # noqa: E402
from agilerl.rollouts import GenerationRequest, SamplingSettings  # noqa: E402
from agilerl.rollouts.engine import Conversation  # noqa: E402
from agilerl.runtime import Runtime  # noqa: E402
from benchmarking.rollout import interval  # noqa: E402
from benchmarking.roofline import SIZES, made_model, surroundings, written  # noqa: E402

ARMS = ("kept", "from_the_start")


class Play:
    """Agents that play episodes of random words."""

    def __init__(self, model: str, agents: int, episodes: int, observation: int, action: int) -> None:
        self.runtime = Runtime(from_model(made_model(model, "cpu"), "model"), seed=0)
        self.slots = [self.runtime.store.allocate(8, 2.0) for _ in range(agents)]
        for slot in self.slots:
            self.runtime.store.initialise(slot, slot)
        self.episodes, self.observation = episodes, observation
        self.settings = SamplingSettings(max_new_tokens=action, min_new_tokens=action)
        self.computed = 0
        self.runtime.base.body.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, body: Any, args: Any, kwargs: Any) -> None:
        self.computed += kwargs["input_ids"].numel()

    def run(self, turns: int, *, keep: bool) -> tuple[float, int]:
        """Return the seconds of the engine, and the tokens that it computed."""
        draw, before, seconds = np.random.default_rng(0), self.computed, 0.0
        keys = [(slot, number) for slot in self.slots for number in range(self.episodes)]
        texts: list[list[int]] = [[] for _ in keys]
        conversations = [Conversation() if keep else None for _ in keys]
        for turn in range(turns):
            for text in texts:
                text += draw.integers(5, self.runtime.base.vocabulary_size, self.observation).tolist()
            asked = [
                GenerationRequest(slot, text, 1, self.settings, key=(slot, number, turn), conversation=conversation)
                for (slot, number), text, conversation in zip(keys, texts, conversations)
            ]
            start = process_time()
            found = self.runtime.engine.generate(asked)
            seconds += process_time() - start
            for text, (completion,) in zip(texts, found):
                text += completion.token_ids
        return seconds, self.computed - before


def measured(play: Play, turns: int, rounds: int) -> dict[str, Any]:
    """Return both arms at one number of turns."""
    seconds: dict[str, list[float]] = {arm: [] for arm in ARMS}
    computed: dict[str, int] = {}
    for number in range(rounds + 1):
        for arm in sorted(ARMS, reverse=number % 2 == 1):
            spent, computed[arm] = play.run(turns, keep=arm == "kept")
            if number:  # the first round warms up
                seconds[arm].append(spent)
    return {
        "turns": turns,
        "computed": computed,
        "seconds": {arm: median(values) for arm, values in seconds.items()},
        "ratio": interval([b / a for a, b in zip(seconds["kept"], seconds["from_the_start"])]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="1.25M", choices=["embedded", *SIZES])
    parser.add_argument("--turns", nargs="+", type=int, default=[1, 2, 4, 8, 16])
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--episodes", type=int, default=8, help="of each agent")
    parser.add_argument("--observation", type=int, default=24, help="tokens that each turn begins with")
    parser.add_argument("--action", type=int, default=8, help="tokens of each completion")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="where the JSON goes as well")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    load = {name: getattr(arguments, name) for name in ("agents", "episodes", "observation", "action")}
    play = Play(arguments.model, **load)
    document: dict[str, Any] = {
        "benchmark": "turns",
        **surroundings(arguments.rounds),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "torch": torch.__version__,
        "clock": "cpu seconds, one thread",
        "model": arguments.model,
        **load,
        "results": [],
    }
    print("| turns | tokens computed, kept | from the start | seconds, kept | from the start | ratio |")
    print("|---|---|---|---|---|---|")
    for turns in arguments.turns:
        found = measured(play, turns, arguments.rounds)
        document["results"].append(found)
        tokens, seconds, (ratio, low, high) = found["computed"], found["seconds"], found["ratio"]
        print(
            f"| {turns} | {tokens['kept']:,} | {tokens['from_the_start']:,} | {seconds['kept']:.3f} | "
            f"{seconds['from_the_start']:.3f} | {ratio:.2f} [{low:.2f}-{high:.2f}] |",
            flush=True,
        )
    print(json.dumps(document))
    if arguments.out is not None:
        written(arguments.out, document)


if __name__ == "__main__":
    main()
