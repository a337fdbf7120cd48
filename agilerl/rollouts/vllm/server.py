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
from typing import Annotated, Any, Self

import torch
from pydantic import Field, model_validator

from agilerl.config.vllm import API_KEY, LORA_RANKS, SUPPORTED, VLLMConfig, lora_capacity
from agilerl.errors import ConfigError, EngineError
from agilerl.models.base import BaseModel
from agilerl.rollouts.vllm.backend import Generated, OnGenerated, SampleRequest, StagedAdapter
from agilerl.safety.servers import CONNECTING, Logprob, Many, Reply, RequestError, Server, Tokens

COMMAND = (
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True vllm serve MODEL --enable-lora --max-loras AGENTS --max-lora-rank RANK "
    "--logprobs-mode processed_logprobs"
)
"""The command that starts a suitable server."""

_RANKS = re.compile(r"LoRA rank (\d+) is greater than max_lora_rank (\d+)")
"""vLLM's message about an adapter that it has no room for."""
_CONNECTIONS = 64
_POLL, _SHOWN = 0.5, 10
SAMPLE = "What is 12 + 34? Résumé: naïve <b>HTML</b>\n\t1,234.5"
"""A text that different tokenizers cut differently."""

Text = Annotated[str, Field(max_length=1000)]


class _Version(Reply):
    version: Text


class _Model(Reply):
    id: Text
    root: Text | None = None
    parent: Text | None = None
    max_model_len: Annotated[int, Field(ge=1)] | None = None


class _Models(Reply):
    data: Annotated[Many[_Model], Field(max_length=1000)]


class Tokenized(Reply):
    """What ``/tokenize`` answers."""

    tokens: Tokens


class _Logprobs(Reply):
    token_logprobs: Many[Logprob]


class _Choice(Reply):
    token_ids: Tokens
    logprobs: _Logprobs
    finish_reason: str

    @model_validator(mode="after")
    def _of_each_token(self) -> Self:
        if len(self.token_ids) != len(self.logprobs.token_logprobs):
            raise ValueError(f"expected as many log-probs as tokens, found {len(self.logprobs.token_logprobs)}, in")
        return self


class _Completion(Reply):
    # Exactly one: each row is a request for one answer.
    choices: tuple[_Choice]


class VLLMServer:
    """A client of ``vllm serve``. Rows are requests of their own, so that each has its own seed."""

    def __init__(self, base: BaseModel, config: VLLMConfig, tokenizer: Any = None) -> None:
        assert config.base_url is not None
        self.base, self.config, self.tokenizer, self.url = base, config, tokenizer, config.base_url
        self.context_length = min(base.context_length, config.max_model_len or base.context_length)
        # The server does not report its limit; it refuses an adapter that is too large when it is sent.
        self.max_lora_rank = LORA_RANKS[-1]
        self.computes_in_float32 = base.dtype == torch.float32  # the server is taken to have the trainer's type
        self.running, self.model = False, ""
        self._names: set[str] = set()
        self._server = Server(
            "the vLLM server",
            self.url,
            seconds=config.request_timeout,
            connections=_CONNECTIONS,
            key=os.environ.get(API_KEY),
        )
        # Knows nothing of self, which it would keep alive otherwise.
        self._finalizer = weakref.finalize(self, _leave, self._server, self._names)

    def start(self, adapters: int, rank: int, context_length: int | None) -> None:
        """Wait until the server is up, and check what it serves; its size was set when it was started."""
        self._wait()
        version = self._ask("/version", shape=_Version).version
        if not version.startswith(f"{SUPPORTED}."):
            raise ConfigError(f"the server at {self.url} runs vLLM {version}; expected {SUPPORTED}.x")
        model = self._chosen(self._ask("/v1/models", shape=_Models).data)
        self._check_tokenizer(model.id)
        self.context_length = min(self.context_length, model.max_model_len or self.context_length)
        self.running, self.model = True, model.id

    def _wait(self) -> None:
        """Return once the server answers; raise EngineError after the timeout, or if something else answers."""
        patience = f"{self.config.server_timeout:g} s (vllm_config.server_timeout)"
        deadline, warned = time.monotonic() + self.config.server_timeout, False
        while True:
            try:
                self._server.send("/health", seconds=CONNECTING)
                return
            except RequestError as error:
                status, text = error.status, error.text
            # No time is left for another try.
            late = time.monotonic() + _POLL > deadline
            if status is not None and (late or status != 503):
                raise EngineError(
                    f"{self.url} is not a vLLM server that is ready: it answers /health with status {status}; if "
                    "another program has this port, start vLLM on a free one (--port) and name that as "
                    "vllm_config.base_url"
                )
            if late:
                raise EngineError(f"no vLLM server at {self.url}: {text} (waited {patience}); start one: {COMMAND}")
            if status is None and not warned:
                warnings.warn(
                    f"no vLLM server answers at {self.url} yet; waiting up to {patience} for one", stacklevel=2
                )
                warned = True
            time.sleep(_POLL)

    def _chosen(self, models: Sequence[_Model]) -> _Model:
        """Find the base among the served models."""
        bases = [model for model in models if not model.parent]
        wanted = self.config.vllm_model_name_or_path or self.base.source
        for model in bases:
            names = {model.id, str(model.root)}
            # By its last part too: on another machine the folder may lie elsewhere.
            if wanted in names or PurePath(wanted).name in {PurePath(name).name for name in names}:
                return model
        served = ", ".join(repr(model.root or model.id) for model in bases[:_SHOWN]) or "nothing"
        raise ConfigError(
            f"the server at {self.url} serves {served}, the trainer has {wanted!r}; serve that one, or, if they are "
            "the same model under two names, give the server's as vllm_config.vllm_model_name_or_path"
        )

    def _check_tokenizer(self, model: str) -> None:
        if self.tokenizer is None:
            return
        body = {"model": model, "prompt": SAMPLE, "add_special_tokens": False}
        theirs = self._ask("/tokenize", body, shape=Tokenized).tokens
        if theirs != self.tokenizer(SAMPLE, add_special_tokens=False)["input_ids"]:
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
        self._send("/v1/load_lora_adapter", body)
        self._names.add(adapter.name)

    def drop(self, adapter: StagedAdapter) -> None:
        """Tell the server to drop an adapter."""
        self._send("/v1/unload_lora_adapter", {"lora_name": adapter.name})
        self._names.discard(adapter.name)

    def complete(self, rows: Sequence[SampleRequest], answered: OnGenerated | None = None) -> list[Generated]:
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
                # After a failure, rows that have not been sent are not sent any more.
                pool.shutdown(cancel_futures=True)

    def _completed(self, row: SampleRequest) -> Generated:
        # To vLLM's API an adapter is one more model.
        model = self.model if row.adapter is None else row.adapter.name
        most = row.sampling["max_tokens"]
        (choice,) = self._ask(
            "/v1/completions",
            {**row.sampling, "model": model, "prompt": row.prompt_ids, "return_token_ids": True},
            shape=_Completion,
            # With return_token_ids the answer repeats the ids of the prompt.
            tokens=len(row.prompt_ids) + most,
            most=most,
            vocabulary=self.base.vocabulary_size,
        ).choices
        return Generated(choice.token_ids, choice.logprobs.token_logprobs, choice.finish_reason)

    def close(self) -> None:
        """Remove our adapters from the server if it still answers; this also happens at the end of the process."""
        self._finalizer()

    def _ask(self, path: str, *arguments: Any, **limits: Any) -> Any:
        try:
            return self._server.ask(path, *arguments, **limits)
        except RequestError as error:
            raise self._refusal(path, error) from None

    def _send(self, path: str, body: Mapping[str, Any]) -> None:
        try:
            self._server.send(path, body)
        except RequestError as error:
            raise self._refusal(path, error) from None

    def _refusal(self, path: str, error: RequestError) -> EngineError:
        status, text = error.status, error.text
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
        if "load_lora_adapter" in path and status is not None:
            hint = (
                "; it reads adapters from vllm_config.lora_staging_dir, which it must see under the same path, and "
                "holds those of at most its --max-lora-rank"
            )
        elif status is None:
            hint = "; start it again and resume" if error.is_lost else f"; expected a vLLM {SUPPORTED}.x"
        return EngineError(f"{error}{hint}")


def _leave(server: Server, names: set[str]) -> None:
    for name in sorted(names):
        try:
            server.send("/v1/unload_lora_adapter", {"lora_name": name}, seconds=CONNECTING)
        except RequestError as error:
            # No answer: with the server its adapters have gone as well.
            if error.status is None:
                break
    server.close()
