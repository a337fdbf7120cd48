"""Tools that search: over HTTP, with AgileRL's documented names and text protocol, and over a local corpus."""

import os
import re
import weakref
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from agilerl.addresses import request
from agilerl.arguments import Count, Positive, checked, nearest, shown
from agilerl.envs.sources import read_file
from agilerl.errors import ConfigError, EnvError, how_to_install

URL_VARIABLE = "SEARCH_URL"
QUERY = re.compile(r"<search>(.*?)</search>", re.DOTALL)
RECONNECTS = 2


class SearchTool:
    """A search engine that answers ``GET search_url?q=...&format=json`` with ``{"results": [{"content": ...}]}``.

    This is the interface of SearXNG and of GEM's search server. Pass ``SearchTool(...).search`` to a ToolEnv; or use
    ``execute_action``, which reads ``<search>query</search>`` from a text and answers with
    ``<information>...</information>``, for environments that handle tools by text.
    """

    tool_type = "search"

    @checked
    def __init__(
        self, num_workers: Count = 1, search_url: str | None = None, topk: Count = 3, timeout: Positive = 5.0
    ) -> None:
        """Set the address; nothing is requested yet.

        Args:
            num_workers: most requests at the same time, 1 or more.
            search_url: http or https; by default the environment variable SEARCH_URL, read at the first search.
            topk: most results of one search, 1 or more.
            timeout: seconds to connect, and between two chunks of a response.

        Raises:
            ConfigError: a setting out of range.
        """
        self.num_workers, self.search_url, self.topk, self.timeout = num_workers, search_url, topk, timeout
        if search_url is not None:
            _checked_url(search_url)

    @checked
    def search(self, query: str) -> str:
        """Search and return the texts that fit best.

        Args:
            query: a few words.
        """
        found = self._results(query)
        return "\n".join(f"{rank}. {text}" for rank, text in enumerate(found, 1)) or "Nothing was found."

    @checked
    def execute_action(self, action: str) -> tuple[bool, bool, str, str]:
        """Search for the text between the first ``<search>`` and ``</search>``.

        Returns:
            Whether there was a query; whether something went wrong (no query counts); the observation, empty without a
            query; and the text up to the end of the query.
        """
        query = QUERY.search(action)
        if query is None:
            return False, True, "", ""
        try:
            text, failed = self.search(query[1].strip()), False
        except EnvError as error:
            text, failed = f"[SearchTool Error: {error}]", True
        return True, failed, f"\n\n<information>{text}</information>\n\n", action[: query.end()]

    def instruction_string(self) -> str:
        """Return the instruction for the text protocol."""
        return (
            "A search engine is at hand. To look something up, write <search>your query</search>; what it finds comes "
            "back between <information> and </information>. Search as often as you need, think between searches if "
            "that helps, and finish with <answer>your answer</answer>."
        )

    def close(self) -> None:
        """Close the connections; the next search opens new ones."""
        client = self.__dict__.pop("_client", None)
        if client is not None:
            client.close()

    @cached_property
    def _client(self) -> httpx2.Client:
        client = httpx2.Client(
            # Waiting for one of num_workers connections is not a server failure.
            timeout=httpx2.Timeout(self.timeout, pool=None),
            transport=httpx2.HTTPTransport(retries=RECONNECTS, limits=httpx2.Limits(max_connections=self.num_workers)),
            follow_redirects=True,
        )
        weakref.finalize(self, client.close)  # an environment does not close its tool functions
        return client

    def _results(self, query: str) -> list[str]:
        """Query the server; raises EnvError if that fails."""
        url = self.search_url or _checked_url(os.environ.get(URL_VARIABLE) or "")
        try:
            asked = httpx2.URL(url).copy_merge_params({"q": query, "format": "json"})
            answer = request(self._client, "GET", asked, seconds=4 * self.timeout)
            answer.raise_for_status()
            found: Any = answer.json()
        except httpx2.HTTPStatusError as error:
            raise EnvError(f"the search server answered with status {error.response.status_code}") from error
        except httpx2.HTTPError as error:
            raise EnvError(f"the search server did not answer: {type(error).__name__} {error}".rstrip()) from error
        except (ValueError, RecursionError) as error:
            raise EnvError("expected JSON from the search server, found something else") from error
        if not isinstance(found, dict) or not isinstance(found.get("results"), list):
            raise EnvError(f'expected {{"results": [{{"content": ...}}]}} from the search server, found {shown(found)}')
        return [str(result.get("content", "")) for result in found["results"][: self.topk] if isinstance(result, dict)]


def _checked_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"expected the address of a search server (http:// or https://) as search_url or in the environment "
            f"variable {URL_VARIABLE}, found {url!r}"
        )
    return url


# -- a local corpus, by BM25 (Robertson and Zaragoza, The Probabilistic Relevance Framework, 2009) --------------------


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
