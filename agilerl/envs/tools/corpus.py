"""Search over a local corpus by BM25 (Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009)."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agilerl.arguments import Count, checked, nearest, shown
from agilerl.envs.sources import read_file
from agilerl.errors import ConfigError, EnvError, how_to_install

WORD = re.compile(r"\w+")


class LocalSearch:
    """Finds the passages that match a query best; ``LocalSearch(...).search`` is the tool.

    The same query gives the same passages in the same order; passages of equal score are in the corpus's order. Words
    are compared in lower case, otherwise unchanged. Needs bm25s: ``pip install -e '.[search]'``.
    """

    @checked
    def __init__(self, corpus: Sequence[Any] | str | Path, *, topk: Count = 3, column: str = "text") -> None:
        """Read and index the corpus.

        Args:
            corpus: passages, or a file of them: JSON lines, JSON, CSV or Parquet.
            topk: most passages of one result, 1 or more.
            column: the file's column of passages.

        Raises:
            ConfigError: bm25s is not installed, or a setting is out of range.
            EnvError: a file that cannot be read or has no such column, no passages, or passages that are not text.
        """
        self.topk = topk
        self.passages = _column(Path(corpus), column) if isinstance(corpus, str | Path) else list(corpus)
        odd = next((place for place, text in enumerate(self.passages) if not isinstance(text, str)), None)
        if odd is not None:
            raise EnvError(f"expected text as passage {odd} of the corpus, found {shown(self.passages[odd])}")
        words = [_words(text) for text in self.passages]
        if not any(words):
            raise EnvError(f"expected a corpus with words in it, found {len(words)} passages without any")
        self._index = _indexed(words)

    def search(self, query: str) -> str:
        """Search a collection of texts and return the passages that fit best.

        Args:
            query: a few words that the passage is likely to have.
        """
        words = _words(query)
        scores = self._index.get_scores(words) if words else np.zeros(len(self.passages))
        best = np.argsort(-scores, kind="stable")[: self.topk]
        found = [self.passages[place] for place in best if scores[place] > 0]
        return (
            "\n".join(f"{rank}. {text}" for rank, text in enumerate(found, 1)) or "No passage has any of these words."
        )


def _indexed(words: Sequence[Sequence[str]]) -> Any:
    try:
        import bm25s  # optional
    except ImportError as error:
        raise ConfigError(f"search needs bm25s: {how_to_install('search')} ({error})") from error
    index = bm25s.BM25()
    index.index([list(passage) for passage in words], show_progress=False)
    return index


def _words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def _column(path: Path, column: str) -> list[Any]:
    table = read_file(path)
    if column not in table.columns:
        raise EnvError(f"{path.name} has no column {column!r}; {nearest(column, table.columns)}")
    return [row.get(column) for row in table.rows]
