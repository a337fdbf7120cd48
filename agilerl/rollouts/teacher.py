"""A teacher behind an OpenAI-compatible endpoint: the log-probs that its model gives to tokens that others sampled."""

import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx2
import torch
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential
from torch import Tensor

from agilerl.addresses import request
from agilerl.arguments import Name, Positive, checked
from agilerl.config.run import TEACHER_KEY
from agilerl.config.vllm import server_url
from agilerl.data import RolloutBatch
from agilerl.errors import ConfigError, EngineError
from agilerl.models.sharding import Lockstep, agreed
from agilerl.processes import Processes
from agilerl.rollouts.vllm.server import SAMPLE, passes

TeacherAPI = Literal["prompt_logprobs", "echo"]
"""How an endpoint is asked for log-probs of given tokens: vLLM's ``prompt_logprobs``, or ``echo`` with ``logprobs``."""

_ATTEMPTS, _CONNECTIONS = 4, 32
_PATIENCE = 5.0
"""Seconds to wait for a connection."""


class TeacherEndpoint:
    """A client of an endpoint with ``/v1/completions`` that takes token ids and returns log-probs of the prompt.

    Its model must have the tokenizer of the base, because tokens are compared one by one: :meth:`check` compares them.
    Log-probs are those at temperature 1. The key, if there is one, is read from the environment variable
    ``TEACHER_API_KEY``, sent in the header ``Authorization``, and never shown.
    """

    @checked
    def __init__(
        self, url: Name, model: Name, api: TeacherAPI = "prompt_logprobs", *, timeout: Positive = 120.0
    ) -> None:
        """Take the address, without ``/v1``, the model's name there, and the seconds for one answer."""
        try:
            self.url = str(server_url(url))
        except ValueError as error:
            raise ConfigError(f"sharing.teacher_url: {error}") from None
        self.model, self.api, self.timeout = model, api, timeout
        self._key, self._closed = os.environ.get(TEACHER_KEY, ""), False
        self._client = httpx2.Client(
            timeout=httpx2.Timeout(timeout, connect=_PATIENCE),
            limits=httpx2.Limits(max_connections=_CONNECTIONS),
            headers={"Authorization": f"Bearer {self._key}"} if self._key else {},
        )

    def __repr__(self) -> str:
        return f"TeacherEndpoint({self.url!r}, {self.model!r}, {self.api!r})"

    def check(self, tokenizer: Any) -> None:
        """Raise ConfigError unless the endpoint cuts text into the tokens of this tokenizer, its special ones included.

        It is asked to (``/tokenize``); if it has no such path, the texts that it gives to the tokens of a sample are
        compared. Raises EngineError if it does not answer.
        """
        text = SAMPLE + "".join(tokenizer.all_special_tokens)
        own = [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
        found = self._post(
            "/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": False}, optional=True
        )
        if found is None:
            plain = [int(t) for t in tokenizer("What is 12 + 34? It is 46.", add_special_tokens=False)["input_ids"]]
            said = "".join(self._texts(self._completed(plain), plain)[1:])
            same = said.split() == tokenizer.decode(plain[1:], clean_up_tokenization_spaces=False).split()
        else:
            same = found.get("tokens") == own
        if not same:
            raise ConfigError(
                f"sharing.teacher_url: the model {self.model!r} at {self.url} has other tokens than the base, and "
                "distillation compares tokens one by one; serve a model with the tokenizer of the base"
            )
        self._logprobs(own)

    def logprobs(self, batch: RolloutBatch, processes: Processes, lockstep: Lockstep | None) -> Tensor:
        """Return the log-probs of the action tokens ``[B, T-1]``, 0 off the action mask, on the CPU.

        Equal rows are asked about once. If several processes share the batch, the first one asks. Raises EngineError if
        the endpoint fails after several attempts.
        """

        def compute() -> bytes:
            return self._of_rows(batch).numpy().tobytes() if processes.rank == 0 else b""

        found = agreed(processes, compute, lockstep)[0]
        mask = batch.action_mask.cpu()
        return torch.frombuffer(bytearray(found), dtype=torch.float32).view(mask.shape)

    def _of_rows(self, batch: RolloutBatch) -> Tensor:
        mask = batch.action_mask.cpu()
        rows = [tuple(ids[:length]) for ids, length in zip(batch.ids.tolist(), batch.lengths.tolist())]
        different = list(dict.fromkeys(rows))
        with ThreadPoolExecutor(max(1, min(_CONNECTIONS, len(different)))) as pool:
            futures = [pool.submit(self._logprobs, row) for row in different]
            try:
                known = dict(zip(different, [future.result() for future in futures]))
            finally:
                for future in futures:
                    future.cancel()
        found = torch.zeros(mask.shape)
        for place, row in enumerate(rows):
            found[place, : len(row) - 1] = torch.tensor(known[row])
        return torch.where(mask, found, 0.0)

    def _logprobs(self, ids: Sequence[int]) -> list[float]:
        """Return the log-prob of each token but the first."""
        choice = self._completed(ids)
        try:
            if self.api == "echo":
                values = choice["logprobs"]["token_logprobs"][1 : len(ids)]
            else:
                values = [known[str(token)]["logprob"] for known, token in zip(choice["prompt_logprobs"][1:], ids[1:])]
            found = [float(value) for value in values]
            if len(found) != len(ids) - 1 or not all(math.isfinite(value) and value <= 1e-3 for value in found):
                raise ValueError(f"{len(found)} numbers for {len(ids) - 1} tokens, or some that are no log-probs")
        except (LookupError, TypeError, ValueError) as error:
            raise EngineError(
                f"the teacher at {self.url} answered without the log-probs of the prompt's tokens ({error}); vLLM has "
                "them as prompt_logprobs, other servers with sharing.teacher_api: echo"
            ) from None
        return found

    def _texts(self, choice: Mapping[str, Any], ids: Sequence[int]) -> list[str]:
        """Return the texts that the endpoint gives to the tokens of a prompt; that of the first is empty."""
        try:
            if self.api == "echo":
                return ["", *map(str, choice["logprobs"]["tokens"][1 : len(ids)])]
            known = zip(choice["prompt_logprobs"][1:], ids[1:])
            return ["", *(str(entry[str(token)]["decoded_token"]) for entry, token in known)]
        except (LookupError, TypeError):
            return []

    def _completed(self, ids: Sequence[int]) -> dict[str, Any]:
        asked = {"prompt_logprobs": 1} if self.api == "prompt_logprobs" else {"echo": True, "logprobs": 1}
        body = {"model": self.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0, **asked}
        found = self._post("/v1/completions", body) or {}
        try:
            return dict(found["choices"][0])
        except (LookupError, TypeError, ValueError):
            raise EngineError(f"expected a completion from the teacher at {self.url}, found none") from None

    def _post(self, path: str, body: Mapping[str, Any], *, optional: bool = False) -> dict[str, Any] | None:
        """Send until an answer is not a temporary failure; None if it is ``optional`` and there is no such path."""
        if self._closed:
            raise EngineError(f"this client of the teacher at {self.url} was closed; make another one")

        def attempt() -> httpx2.Response:
            sent = request(self._client, "POST", f"{self.url}{path}", seconds=self.timeout, json=dict(body))
            return sent.raise_for_status()

        retrying = Retrying(
            stop=stop_after_attempt(_ATTEMPTS),
            wait=wait_exponential(multiplier=0.2, max=5),
            retry=retry_if_exception(passes),
            reraise=True,
        )
        try:
            found = retrying(attempt).json()
        except httpx2.HTTPStatusError as error:
            status, text = error.response.status_code, " ".join(error.response.text.split())[:300]
            if optional and status in (404, 405, 501):
                return None
            text = text.replace(self._key, "***") if self._key else text
            hint = f"; set the environment variable {TEACHER_KEY}" if status in (401, 403) else ""
            raise EngineError(f"the teacher at {self.url} answered {path} with status {status}: {text}{hint}") from None
        except httpx2.HTTPError as error:
            raise EngineError(
                f"the teacher at {self.url} was lost: {path}: {type(error).__name__} {error}; start it and resume"
            ) from None
        except (ValueError, RecursionError):
            found = None
        return found if isinstance(found, dict) else {}

    def close(self) -> None:
        """Close the connections; later requests raise EngineError."""
        self._closed = True
        self._client.close()
