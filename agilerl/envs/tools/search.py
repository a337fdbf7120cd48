"""AgileRL's tool that asks a search server."""

import os
import re
import threading
import weakref
from functools import cached_property
from typing import Annotated

import httpx2
from pydantic import Field

from agilerl.checks.arguments import Count, Positive, checked, shown
from agilerl.errors import ConfigError, EnvError
from agilerl.safety.servers import Many, Reply, parsed, request

URL_VARIABLE = "SEARCH_URL"
QUERY = re.compile(r"<search>(.*?)</search>", re.DOTALL)
RECONNECTS = 2
OPENING = threading.Lock()
"""Two threads that search for the first time share one client; each with its own would have num_workers connections."""


class _Result(Reply):
    content: str | None = None


class _Results(Reply):
    results: Annotated[Many[_Result], Field(max_length=10_000)]


class SearchTool:
    """A search engine that answers ``GET search_url?q=...&format=json`` with ``{"results": [{"content": ...}]}``.

    This is the interface of SearXNG and of GEM's search server. Pass ``SearchTool(...).search`` to a ToolEnv; or use
    ``execute_action``, which reads ``<search>query</search>`` from a text and answers with
    ``<information>...</information>``, for environments that handle tools by text.
    """

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
        url = self.search_url or _checked_url(os.environ.get(URL_VARIABLE) or "")
        try:
            full = httpx2.URL(url).copy_merge_params({"q": query, "format": "json"})
            with OPENING:
                client = self._client
            # A wait for data may take `timeout`, the whole answer four times that.
            answer = request(client, "GET", full, seconds=4 * self.timeout).raise_for_status()
            results = parsed(answer.content, _Results).results
        except httpx2.HTTPStatusError as error:
            raise EnvError(f"the search server answered with status {error.response.status_code}") from error
        except httpx2.HTTPError as error:
            raise EnvError(f"the search server did not answer: {type(error).__name__} {error}".rstrip()) from error
        except ValueError as error:
            expected = 'expected {"results": [{"content": ...}]} from the search server'
            raise EnvError(f"{expected}, found something else: {error}") from error
        texts = [result.content or "" for result in results[: self.topk]]
        return "\n".join(f"{rank}. {text}" for rank, text in enumerate(texts, 1)) or "Nothing was found."

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
        # Where cached_property keeps it: to ask for self._client would open one.
        if "_client" in vars(self):
            vars(self).pop("_client").close()

    @cached_property
    def _client(self) -> httpx2.Client:
        client = httpx2.Client(
            # Waiting for one of num_workers connections is not a server failure.
            timeout=httpx2.Timeout(self.timeout, pool=None),
            # Only connections are tried again; a request is sent once.
            transport=httpx2.HTTPTransport(retries=RECONNECTS, limits=httpx2.Limits(max_connections=self.num_workers)),
            follow_redirects=True,
        )
        weakref.finalize(self, client.close)  # an environment does not close its tool functions
        return client


def _checked_url(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            f"expected the address of a search server (http:// or https://) as search_url or in the environment "
            f"variable {URL_VARIABLE}, found {shown(url)}"
        )
    return url
