"""vLLM on a server: an external ``vllm serve`` that takes adapters over HTTP."""

import os
import re
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import PurePath
from typing import Any

import httpx2
import torch
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from agilerl.addresses import request
from agilerl.config.vllm import API_KEY, LORA_RANKS, SUPPORTED, VLLMConfig, lora_capacity
from agilerl.errors import ConfigError, EngineError
from agilerl.models.base import BaseModel
from agilerl.rollouts.vllm.backend import Answer, OnAnswer, Row, StagedAdapter

COMMAND = (
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-loras AGENTS --max-lora-rank RANK "
    "--logprobs-mode processed_logprobs"
)
"""The command that starts a suitable server."""

_RANKS = re.compile(r"LoRA rank (\d+) is greater than max_lora_rank (\d+)")
"""vLLM's message about an adapter that it has no room for."""
_ATTEMPTS = 4
_CONNECTIONS = 64
_POLL = 0.5
_PATIENCE = 5.0
"""Seconds to wait for an answer that the server need not compute."""
SAMPLE = "What is 12 + 34? Résumé: naïve <b>HTML</b>\n\t1,234.5"
"""A text that different tokenizers cut differently."""


class VLLMServer:
    """A client of ``vllm serve``. Rows are requests of their own, so that each has its own seed."""

    def __init__(self, base: BaseModel, config: VLLMConfig, tokenizer: Any = None) -> None:
        assert config.base_url is not None
        self.base, self.config, self.tokenizer, self.url = base, config, tokenizer, config.base_url
        self.context_length = min(base.context_length, config.max_model_len or base.context_length)
        # The server does not report its limit; it refuses an adapter that is too large when it is sent.
        self.max_lora_rank = LORA_RANKS[-1]
        self.model = ""
        self._names: set[str] = set()
        self._key = os.environ.get(API_KEY, "")
        self._client = httpx2.Client(
            timeout=httpx2.Timeout(config.request_timeout, connect=_PATIENCE),
            limits=httpx2.Limits(max_connections=_CONNECTIONS),
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
        )
        self._finalizer = weakref.finalize(self, _leave, self._client, self.url, self._names)

    @property
    def computes_in_float32(self) -> bool:
        """Whether neither side rounds to 16 bits; the server is taken to have the trainer's type."""
        return self.base.dtype == torch.float32

    @property
    def running(self) -> bool:
        """Whether a server has been found that serves the base."""
        return bool(self.model)

    def start(self, adapters: int, rank: int, context_length: int | None) -> None:
        """Wait until the server is up, and check what it serves; its size was set when it was started."""
        self._wait()
        found = str(self._get("/version").get("version", ""))
        if not found.startswith(f"{SUPPORTED}."):
            raise ConfigError(f"the server at {self.url} runs vLLM {found or 'of no version'}; expected {SUPPORTED}.x")
        model = self._chosen(self._get("/v1/models").get("data", []))
        self._check_tokenizer(str(model["id"]))
        self.context_length = min(self.context_length, int(model.get("max_model_len") or self.context_length))
        self.model = str(model["id"])

    def _wait(self) -> None:
        """Return once the server answers; raise EngineError after the timeout, or if something else answers."""
        deadline, said = time.monotonic() + self.config.server_timeout, False
        while True:
            try:
                response = request(self._client, "GET", f"{self.url}/health", seconds=_PATIENCE, timeout=_PATIENCE)
            except httpx2.TransportError as error:
                if time.monotonic() + _POLL > deadline:
                    raise EngineError(
                        f"no vLLM server at {self.url}: {type(error).__name__} {error} (waited "
                        f"{self.config.server_timeout:g} s, vllm_config.server_timeout); start one: {COMMAND}"
                    ) from None
                if not said:
                    warnings.warn(
                        f"no vLLM server answers at {self.url} yet; waiting up to {self.config.server_timeout:g} s "
                        "for one (vllm_config.server_timeout)",
                        stacklevel=2,
                    )
                    said = True
                time.sleep(_POLL)
                continue
            if response.status_code == 200:
                return
            if response.status_code != 503 or time.monotonic() + _POLL > deadline:
                raise EngineError(
                    f"{self.url} is not a vLLM server that is ready: it answers /health with status "
                    f"{response.status_code}; if another program has this port, start vLLM on a free one (--port) and "
                    "name that as vllm_config.base_url"
                )
            time.sleep(_POLL)

    def _chosen(self, models: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        """Find the base among the served models."""
        bases = [m for m in models if not m.get("parent")]
        wanted = self.config.vllm_model_name_or_path or self.base.source
        for model in bases:
            names = {str(model.get("id")), str(model.get("root"))}
            if wanted in names or PurePath(wanted).name in {PurePath(name).name for name in names}:
                return model
        served = ", ".join(repr(m.get("root") or m.get("id")) for m in bases) or "nothing"
        raise ConfigError(
            f"the server at {self.url} serves {served}, the trainer has {wanted!r}; serve that one, or, if they are "
            "the same model under two names, give the server's as vllm_config.vllm_model_name_or_path"
        )

    def _check_tokenizer(self, model: str) -> None:
        if self.tokenizer is None:
            return
        theirs = self._post("/tokenize", {"model": model, "prompt": SAMPLE, "add_special_tokens": False})
        own = self.tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]
        if theirs.get("tokens") != own:
            raise ConfigError(
                f"the server at {self.url} cuts a text into other tokens than the trainer does; serve the model with "
                "the trainer's tokenizer (vllm serve --tokenizer)"
            )

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Do nothing: a server has its GPU to itself."""
        yield

    def load(self, adapter: StagedAdapter) -> None:
        """Tell the server to load an adapter from its folder."""
        body = {"lora_name": adapter.name, "lora_path": str(adapter.folder.resolve())}
        self._post("/v1/load_lora_adapter", body)
        self._names.add(adapter.name)

    def drop(self, adapter: StagedAdapter) -> None:
        """Tell the server to drop an adapter."""
        self._post("/v1/unload_lora_adapter", {"lora_name": adapter.name})
        self._names.discard(adapter.name)

    def complete(self, rows: Sequence[Row], answered: OnAnswer | None = None) -> list[Answer]:
        """Answer rows, as many at once as the server accepts; ``answered`` gets each answer when it arrives."""
        with ThreadPoolExecutor(min(_CONNECTIONS, len(rows))) as pool:
            futures = {pool.submit(self._completed, row): k for k, row in enumerate(rows)}
            try:
                if answered is not None:
                    for future in as_completed(futures):
                        if future.exception() is not None:
                            break  # the first in order of the rows is raised
                        answered(futures[future], future.result())
                return [future.result() for future in futures]
            finally:
                for future in futures:
                    future.cancel()

    def _completed(self, row: Row) -> Answer:
        model = self.model if row.adapter is None else row.adapter.name
        found = self._post(
            "/v1/completions",
            {**row.sampling, "model": model, "prompt": row.prompt_ids, "return_token_ids": True},
        )
        try:
            (choice,) = found["choices"]
            tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            if len(tokens) != len(logprobs):
                raise ValueError(f"{len(tokens)} tokens and {len(logprobs)} log-probs")
            values = [float("nan") if logp is None else float(logp) for logp in logprobs]
            return Answer([int(token) for token in tokens], values, str(choice["finish_reason"]))
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(f"the server at {self.url} answered without tokens and log-probs: {error}") from None

    def close(self) -> None:
        """Remove our adapters from the server if it still answers; this also happens at the end of the process."""
        self._finalizer()

    # -- HTTP -----------------------------------------------------------------------------------------------------

    def _get(self, path: str) -> dict[str, Any]:
        return self._answered(path, lambda: self._sent("GET", path))

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._answered(path, lambda: self._sent("POST", path, json=dict(body)))

    def _sent(self, method: str, path: str, **body: Any) -> httpx2.Response:
        return request(self._client, method, f"{self.url}{path}", seconds=self.config.request_timeout, **body)

    def _answered(self, path: str, send: Any) -> dict[str, Any]:
        """Send until an answer is not a temporary failure; with a seed, a retry gives the same sample."""

        def attempt() -> httpx2.Response:
            response: httpx2.Response = send().raise_for_status()
            return response

        retrying = Retrying(
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_exponential(multiplier=0.2, max=5),
            retry=retry_if_exception(passes),
            reraise=True,
        )
        try:
            response = retrying(attempt)
        except httpx2.HTTPStatusError as error:
            raise self._refusal(path, error.response) from None
        except httpx2.HTTPError as error:
            raise EngineError(
                f"the vLLM server at {self.url} was lost: {path}: {type(error).__name__} {error}; start it again and "
                "resume"
            ) from None
        try:
            found = response.json()
        except (ValueError, RecursionError):
            found = None
        return found if isinstance(found, dict) else {}

    def _refusal(self, path: str, response: httpx2.Response) -> EngineError:
        status, text = response.status_code, " ".join(response.text.split())[:300]
        text = text.replace(self._key, "***") if self._key else text
        if status in (404, 405) and "lora_adapter" in path and "cannot be found" not in text:
            return EngineError(
                f"the server at {self.url} does not load adapters while it runs; start it with: {COMMAND}"
            )
        if status in (401, 403):
            return EngineError(f"the server at {self.url} needs its key; set the environment variable VLLM_API_KEY")
        if too_large := _RANKS.search(text):
            rank, room = too_large.groups()
            return EngineError(
                f"the server at {self.url} has room for adapters of rank {room} (--max-lora-rank), found rank {rank}; "
                f"start it with --max-lora-rank {lora_capacity(int(rank))}, or lower network.lora_config.r or "
                "mutation.rank_range"
            )
        hint = ""
        if "load_lora_adapter" in path:
            hint = (
                "; it reads adapters from vllm_config.lora_staging_dir, which it must see under the same path, and "
                "holds those of at most its --max-lora-rank"
            )
        return EngineError(f"the server at {self.url} answered {path} with status {status}: {text}{hint}")


def _leave(client: httpx2.Client, url: str, names: set[str]) -> None:
    for name in sorted(names):
        try:
            body = {"lora_name": name}
            request(client, "POST", f"{url}/v1/unload_lora_adapter", seconds=_PATIENCE, json=body, timeout=_PATIENCE)
        except httpx2.HTTPError:
            break
    client.close()


def passes(error: BaseException) -> bool:
    """Whether a failed request is worth another try."""
    if isinstance(error, httpx2.HTTPStatusError):
        return error.response.status_code in (429, 502, 503, 504)
    return isinstance(error, httpx2.NetworkError | httpx2.RemoteProtocolError)
