"""A search in your own texts as a tool, and questions that only the texts answer. In a manifest, with --allow-code:

environment: {env_type: multiturn, env_id: "tutorials/tools/search.py:search_env"}
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from agilerl.envs import DatasetTask
from agilerl.envs.tools import ToolEnv
from agilerl.rewards import exact_match

TOWNS = {"Brimvale": ("Aule", 1204, "clocks"), "Stolmar": ("Fenn", 1311, "salt"), "Zeilth": ("Orre", 988, "lace")}


class Search:
    """Finds the texts that fit a query best, by BM25 (Robertson and Zaragoza, 2009)."""

    def __init__(self, texts: Sequence[str], count: int = 3) -> None:
        self.texts, self.count = list(texts), count
        self._words = [Counter(re.findall(r"\w+", text.lower())) for text in self.texts]
        self._length = sum(words.total() for words in self._words) / len(self._words)

    def search(self, query: str) -> str:
        """Search a collection of texts and return the passages that fit best.

        Args:
            query: a few words that the passage is likely to have.
        """
        words = re.findall(r"\w+", query.lower())
        scores = [self._score(words, passage) for passage in self._words]
        # sorted() keeps the order of equal passages.
        best = sorted(range(len(scores)), key=lambda number: -scores[number])[: self.count]
        fitting = [self.texts[number] for number in best if scores[number] > 0]
        return (
            "\n".join(f"{rank}. {text}" for rank, text in enumerate(fitting, 1)) or "No passage has any of these words."
        )

    def _score(self, words: Sequence[str], passage: Counter[str]) -> float:
        score = 0.0
        for word in words:
            having, often = sum(word in other for other in self._words), passage[word]
            rarity = math.log(1 + (len(self._words) - having + 0.5) / (having + 0.5))
            score += rarity * often * 2.5 / (often + 1.5 * (0.25 + 0.75 * passage.total() / self._length))
        return score


def search_env(**settings: Any) -> ToolEnv:
    """Return questions about towns that no model has heard of; the exam asks about another town than training."""
    texts, rows = [], []
    for town, (river, year, goods) in TOWNS.items():
        texts.append(f"{town} is a town on the river {river}. It was founded in {year} and is known for its {goods}.")
        questions = {"Which river does {} lie on?": river, "When was {} founded?": year, "What is {} known for?": goods}
        rows += [{"question": q.format(town), "answer": str(answer)} for q, answer in questions.items()]
    task = DatasetTask(rows[:3], rows[3:6], rows[6:], reward_fn=exact_match)
    about = "Answer with one word, between <answer> and </answer>. Search for it: you cannot know it."
    return ToolEnv(task, [Search(texts).search], **{"system_prompt": about, **settings})
