"""A small corpus about made-up towns, and questions that only it can answer."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from agilerl.envs.core import Row
from agilerl.envs.datasets import DatasetTask
from agilerl.envs.order import is_held_out
from agilerl.errors import ConfigError
from agilerl.rewards.functions import extract_answer
from agilerl.streams import stream

ONSETS = ("b", "d", "f", "g", "k", "l", "m", "n", "p", "r", "s", "t", "v", "z", "br", "dr", "kr", "st", "tr", "th")
VOWELS = ("a", "e", "i", "o", "u", "ai", "ei", "ou")
CODAS = ("", "", "l", "m", "n", "r", "s", "th", "nd")
GOODS = ("clocks", "salt", "lace", "violins", "cheese", "glass", "rope", "ink", "tiles", "honey", "paper", "bells")


class Town(NamedTuple):
    """The facts about a town."""

    name: str
    river: str
    founder: str
    year: int
    goods: str

    def passage(self) -> str:
        """Return the town's entry in the corpus."""
        return (
            f"{self.name} is a town on the river {self.river}. It was founded by {self.founder} in the year "
            f"{self.year} and is known for its {self.goods}."
        )

    def rows(self) -> list[Row]:
        """Return the questions about it; the last two do not contain its name."""
        asked = (
            (f"Which river does {self.name} lie on?", self.river),
            (f"Who founded {self.name}?", self.founder),
            (f"In which year was {self.name} founded?", str(self.year)),
            (f"What is {self.name} known for?", self.goods),
            (f"What is the town on the river {self.river} known for?", self.goods),
            (f"In which year did {self.founder} found a town?", str(self.year)),
        )
        return [{"question": question, "answer": answer} for question, answer in asked]


def made_up_towns(count: int = 200, seed: int = 42) -> list[Town]:
    """Return towns with distinct names, rivers and founders; a pure function of both arguments."""
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= 5000:
        raise ConfigError(f"expected 1 to 5000 towns, found {count!r}")
    rng = stream(seed, "made-up towns")
    names = _names(rng, 3 * count)
    towns, rivers, founders = names[:count], names[count : 2 * count], names[2 * count :]
    years, goods = rng.integers(900, 1900, size=count), rng.integers(len(GOODS), size=count)
    return [
        Town(town, river, founder, int(year), GOODS[good])
        for town, river, founder, year, good in zip(towns, rivers, founders, years, goods)
    ]


def facts_task(towns: Sequence[Town], seed: int = 42) -> DatasetTask:
    """Return the questions as a task: those about a reserved fifth of the towns alternate between exam and test."""
    train = [row for town in towns if not is_held_out(town.name) for row in town.rows()]
    held_out = [row for town in towns if is_held_out(town.name) for row in town.rows()]
    if not train or not held_out:
        raise ConfigError(f"expected towns for training and for the exam, found {len(towns)} in all; use more")
    return DatasetTask(train, held_out[::2], held_out[1::2], reward_fn=same_fact, seed=seed)


def same_fact(completion: str, answer: str) -> float:
    """Return 1.0 if the extracted answer is the fact, ignoring case and a final full stop; else 0.0."""
    return float(extract_answer(completion).casefold().removesuffix(".") == answer.casefold())


def _names(rng: np.random.Generator, count: int) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < count:
        syllables = (f"{_one(rng, ONSETS)}{_one(rng, VOWELS)}{_one(rng, CODAS)}" for _ in range(2))
        found["".join(syllables).capitalize()] = None
    return list(found)


def _one(rng: np.random.Generator, choices: Sequence[str]) -> str:
    return choices[int(rng.integers(len(choices)))]
