"""A teacher behind an OpenAI-compatible endpoint: the log-probs that its model gives to tokens that others sampled."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from agilerl.checks.arguments import Name, Positive, checked
from agilerl.config.search import TEACHER_KEY
from agilerl.config.vllm import server_url
from agilerl.data import RolloutBatch
from agilerl.errors import ConfigError, EngineError
from agilerl.models.sharding import Lockstep
from agilerl.processes import Processes
from agilerl.rollouts.vllm.server import SAMPLE, Tokenized
from agilerl.safety.servers import FirstMistake, Logprob, Many, Reply, RequestError, Server

TeacherAPI = Literal["prompt_logprobs", "echo"]
"""How an endpoint is asked for log-probs of given tokens: vLLM's ``prompt_logprobs``, or ``echo`` with ``logprobs``."""

_CONNECTIONS = 32
_APIS = "; vLLM has log-probs of a prompt as prompt_logprobs, other servers with teacher.api: echo"


class _Known(Reply):
    logprob: Logprob
    decoded_token: str | None = None


class _Echo(Reply):
    token_logprobs: Many[Logprob | None]
    tokens: Many[str] = Field(default_factory=list)


class _Choice(Reply):
    prompt_logprobs: Many[Annotated[dict[str, _Known], FirstMistake()] | None] | None = None
    logprobs: _Echo | None = None


class _Completion(Reply):
    choices: tuple[_Choice]


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
            raise ConfigError(f"teacher.url: {error}") from None
        self.model, self.api, self.timeout, self._closed = model, api, timeout, False
        self._server = Server(
            "the teacher", self.url, seconds=timeout, connections=_CONNECTIONS, key=os.environ.get(TEACHER_KEY)
        )

    def __repr__(self) -> str:
        return f"TeacherEndpoint({self.url!r}, {self.model!r}, {self.api!r})"

    def check(self, tokenizer: Any) -> None:
        """Raise ConfigError unless the endpoint cuts text into the tokens of this tokenizer, its special ones included.

        It is asked to (``/tokenize``); if it has no such path, the texts that it gives to the tokens of a sample are
        compared. Raises EngineError if it does not answer.
        """
        text = SAMPLE + "".join(tokenizer.all_special_tokens)
        ours = [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        theirs = self._ask("/tokenize", body, shape=Tokenized, optional=True)
        if theirs is None:
            plain = [int(t) for t in tokenizer("What is 12 + 34? It is 46.", add_special_tokens=False)["input_ids"]]
            texts = "".join(self._prompt(plain)[1])
            same = texts.split() == tokenizer.decode(plain[1:], clean_up_tokenization_spaces=False).split()
        else:
            same = theirs.tokens == ours
        if not same:
            raise ConfigError(
                f"teacher.url: the model {self.model!r} at {self.url} has other tokens than the base, and "
                "distillation compares tokens one by one; serve a model with the tokenizer of the base"
            )
        # Asked as training will ask, so that an endpoint without log-probs is found at the start.
        self._prompt(ours)

    def logprobs(self, batch: RolloutBatch, processes: Processes, lockstep: Lockstep | None) -> Tensor:
        """Return the log-probs of the action tokens ``[B, T-1]``, 0 off the action mask, on the CPU.

        Equal rows are asked about once. If several processes share the batch, the first one asks. Raises EngineError if
        the endpoint fails after several attempts.
        """

        def compute() -> bytes:
            return self._of_rows(batch).numpy().tobytes() if processes.rank == 0 else b""

        values = processes.agreed(compute, lockstep)[0]
        # A copy that can be written: torch warns of buffers that cannot, such as bytes.
        return torch.frombuffer(bytearray(values), dtype=torch.float32).view(batch.action_mask.shape)

    def _of_rows(self, batch: RolloutBatch) -> Tensor:
        mask = batch.action_mask.cpu()
        rows = [tuple(ids[:length]) for ids, length in zip(batch.ids.tolist(), batch.lengths.tolist())]
        different = list(dict.fromkeys(rows))
        with ThreadPoolExecutor(max(1, min(_CONNECTIONS, len(different)))) as pool:
            # A failure cancels the requests that have not begun.
            known = dict(zip(different, pool.map(lambda row: self._prompt(row)[0], different)))
        logprobs = torch.zeros(mask.shape, dtype=torch.float32)
        for values, row in zip(logprobs, rows):
            # The first token has no log-prob, so a token's is one place before it.
            values[: len(row) - 1] = torch.tensor(known[row])
        return torch.where(mask, logprobs, 0.0)

    def _prompt(self, ids: Sequence[int]) -> tuple[list[float], list[str]]:
        """Return the log-prob of each token but the first, and the texts that the endpoint has for them."""
        asked = {"prompt_logprobs": 1} if self.api == "prompt_logprobs" else {"echo": True, "logprobs": 1}
        # vLLM generates one token at least; nobody reads it.
        body = {"model": self.model, "prompt": list(ids), "max_tokens": 1, "temperature": 0, **asked}
        (choice,) = self._ask("/v1/completions", body, shape=_Completion, tokens=len(ids)).choices
        if self.api == "echo":
            echo = choice.logprobs or _Echo(token_logprobs=[])
            values, texts = echo.token_logprobs[1 : len(ids)], echo.tokens[1 : len(ids)]
        else:
            entries = zip((choice.prompt_logprobs or [])[1:], ids[1:])
            # An entry may hold likelier tokens beside the prompt's own; JSON has token ids as text.
            known = [entry[str(token)] for entry, token in entries if entry and str(token) in entry]
            values, texts = [one.logprob for one in known], [one.decoded_token or "" for one in known]
        logprobs = [value for value in values if value is not None]
        if len(logprobs) != len(ids) - 1:
            raise EngineError(
                f"the teacher at {self.url} answered without the log-probs of the prompt's tokens (expected "
                f"{len(ids) - 1}, found {len(logprobs)}){_APIS}"
            )
        return logprobs, texts

    def _ask(self, path: str, body: Mapping[str, Any], *, optional: bool = False, **asked: Any) -> Any:
        """Return the answer; None if it is ``optional`` and there is no such path."""
        if self._closed:
            raise EngineError(f"this client of the teacher at {self.url} was closed; make another one")
        try:
            return self._server.ask(path, body, **asked)
        except RequestError as error:
            if optional and error.status in (404, 405, 501):
                return None
            hint = "; start it and resume" if error.is_lost else "" if error.status is not None else _APIS
            if error.status in (401, 403):
                hint = f"; set the environment variable {TEACHER_KEY}"
            raise EngineError(f"{error}{hint}") from None

    def close(self) -> None:
        """Close the connections; later requests raise EngineError."""
        self._closed = True
        self._server.close()
