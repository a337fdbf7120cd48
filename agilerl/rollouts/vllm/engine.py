"""Sampling with vLLM: one engine for the whole population, every agent a LoRA adapter in the same batch."""

import copy
import hashlib
import itertools
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from agilerl.config.vllm import VLLMConfig
from agilerl.data import Completion
from agilerl.errors import CheckpointError, ConfigError, EngineError
from agilerl.models.adapters import Factors, write_adapter
from agilerl.models.base import BaseModel
from agilerl.models.slots import AdapterStore, Route
from agilerl.rollouts.engine import GenerationRequest, OnCompletion, RolloutEngine, SamplingSettings, of_part
from agilerl.rollouts.vllm.backend import (
    Generated,
    OnGenerated,
    SampleRequest,
    StagedAdapter,
    completion_of,
    request_seed,
    row_of,
)
from agilerl.rollouts.vllm.colocated import ColocatedVLLM, check_installed
from agilerl.rollouts.vllm.server import VLLMServer

_IN_MEMORY = Path("/dev/shm")
_NUMBERS = itertools.count(1)
"""Numbers count up for the whole process, because one vLLM may serve several runtimes one after another."""

_TRAINING = ("rollout", "trial")
"""What training samples for."""


class AdapterVersions:
    """Which version of which adapter a vLLM engine has.

    A version is identified by the bytes of its factors, its rank and its scale, whatever changed them: training, a
    mutation, a clone, a load. vLLM's caches identify an adapter by name, number and path, so every version gets new
    ones, which are never reused.
    """

    def __init__(self, store: AdapterStore, lora_config: Any, base_name: str, folder: str | None) -> None:
        self.store, self.lora_config, self.base_name = store, lora_config, base_name
        self.folder = _staging_folder(folder)
        self.close = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        """Remove the staging folder."""
        self._digests: dict[int, str] = {}
        self._staged: dict[str, StagedAdapter] = {}
        self._bank: Tensor | None = None
        self._written: tuple[int, int] = (-1, -1)

    def current(self, slots: Sequence[int]) -> dict[int, StagedAdapter]:
        """Return the present version of each slot, written to its folder if it is new; equal adapters share one."""
        if self._changed():
            self._digests.clear()
        for slot in slots:
            if slot not in self._digests:
                factors = [(a.cpu(), b.cpu()) for a, b in self.store.adapter(slot)]
                digest = self._digest(slot, factors)
                if digest not in self._staged:
                    self._staged[digest] = self._write(slot, factors)
                self._digests[slot] = digest
        return {slot: self._staged[self._digests[slot]] for slot in slots}

    def outdated(self, keep: int) -> list[StagedAdapter]:
        """Drop the oldest versions that no slot uses until ``keep`` are left in all, and remove their folders."""
        alive = set(self._digests.values())
        # A dict keeps the order of insertion: the oldest come first.
        idle = [digest for digest in self._staged if digest not in alive]
        gone = [self._staged.pop(digest) for digest in idle[: max(0, len(self._staged) - keep)]]
        for adapter in gone:
            shutil.rmtree(adapter.folder, ignore_errors=True)
        return gone

    def _changed(self) -> bool:
        """Return whether anything was written to the bank since the last call.

        torch counts the in-place writes to a tensor and all its views, so a bank at rest is not hashed again.
        """
        bank, written = self.store.theta, (self.store.theta._version, self.store.scaling._version)
        same = bank is self._bank and written == self._written
        self._bank, self._written = bank, written
        return not same

    def _digest(self, slot: int, factors: Factors) -> str:
        digest = hashlib.blake2b(f"{self.store.ranks[slot]} {float(self.store.scaling[slot])!r}".encode())
        for pair in factors:
            for factor in pair:
                # As bytes, because numpy has no bfloat16.
                digest.update(factor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _write(self, slot: int, factors: Factors) -> StagedAdapter:
        number = next(_NUMBERS)
        # The staging folder's name is unique, so trainers that share a server do not collide.
        name, rank = f"{self.folder.name}-{number}", self.store.ranks[slot]
        config = copy.deepcopy(self.lora_config)
        # The scale in force as alpha / r: with rslora vLLM would divide alpha by sqrt(r).
        config.r, config.use_rslora = rank, False
        config.lora_alpha = float(self.store.scaling[slot]) * rank
        path = self.folder / str(number)
        try:
            write_adapter(path, self.store.layers, factors, config, self.base_name)
        except (OSError, CheckpointError) as error:
            raise EngineError(
                f"an adapter could not be written for vLLM: {error}; make room in "
                f"{str(self.folder.parent)!r}, or name another folder as vllm_config.lora_staging_dir"
            ) from error
        return StagedAdapter(name, number, path, rank)


def _staging_folder(wanted: str | None) -> Path:
    """Make a staging folder: in the wanted place, in memory, or among the temporary files."""
    parent = Path(wanted).expanduser() if wanted is not None else _IN_MEMORY if _IN_MEMORY.is_dir() else None
    try:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="agilerl-", dir=parent))
    except OSError as error:
        # /dev/shm may be full, or closed to this process.
        if wanted is None and parent is not None:
            return Path(tempfile.mkdtemp(prefix="agilerl-"))
        raise EngineError(
            f"vllm_config.lora_staging_dir={wanted!r} cannot be used: {error.strerror or error}; name a folder that "
            "can be written to"
        ) from error


# -- probes: whether vLLM computes what the trainer computes, by a few tokens of every new adapter --------------------


_PROMPT = 32
"""Most tokens of a probe's prompt."""
_TEMPERATURE = 0.8
"""Not 1, so that a vLLM that reports log-probs from before the temperature is noticed too."""


@torch.no_grad()
def trainer_logprobs(
    base: BaseModel,
    store: AdapterStore,
    rows: Sequence[tuple[int | None, Sequence[int], Sequence[int]]],
    temperature: float = 1.0,
) -> list[list[float]]:
    """Return the trainer's log-probs of the tokens of rows (slot, prompt, tokens), from one forward pass."""
    order = sorted(range(len(rows)), key=lambda k: (rows[k][0] is None, k))  # rows without an adapter come last
    ids = pad_sequence([torch.tensor([*rows[k][1], *rows[k][2]]) for k in order], batch_first=True)
    slots = tuple(slot for k in order if (slot := rows[k][0]) is not None)
    with store.routed(Route(slots, (1,) * len(slots)) if slots else None):
        hidden = base.hidden(ids.to(base.device))
    logprobs: list[list[float]] = [[] for _ in rows]
    for states, k in zip(hidden, order):
        # The state before a token predicts it: those of the completion begin at the last token of the prompt.
        first, targets = len(rows[k][1]), torch.tensor(list(rows[k][2]), dtype=torch.int64, device=base.device)
        logprobs[k] = base.logprobs(states[first - 1 : first - 1 + len(targets)], targets, temperature)[0].tolist()
    return logprobs


def check_probes(
    base: BaseModel, store: AdapterStore, probes: Sequence[tuple[GenerationRequest, Generated, str]], limit: float
) -> Mapping[str, float]:
    """Return the mean difference in nats for each agent; raise EngineError for one that is above the limit.

    ``probes`` are what vLLM was asked, what it sampled, and the name of the agent.
    """
    rows = [(request.slot, request.prompt_ids, answer.token_ids) for request, answer, _ in probes]
    differences = {}
    for (request, answer, agent), ours in zip(probes, trainer_logprobs(base, store, rows, _TEMPERATURE)):
        gaps = [abs(mine - theirs) for mine, theirs in zip(ours, answer.logprobs, strict=True)]
        mean = differences[agent] = sum(gaps) / len(gaps) if gaps else float("nan")
        if not mean <= limit:  # NaN is above it
            of_base = request.slot is None
            what = agent if of_base else f"the adapter of {agent}"
            cause = (
                "the base that vLLM has loaded is not the trainer's (name the same folder as "
                "vllm_config.vllm_model_name_or_path, or serve it)"
                if of_base
                else "vLLM does not apply the adapter as the trainer does (a layer that it cannot adapt, or the "
                "weights of another agent); adapt fewer layers (lora_config.target_modules), or leave out use_vllm"
            )
            raise EngineError(
                f"vLLM and the trainer disagree about {what}: the log-probs of {len(gaps)} tokens differ by {mean:.3g} "
                f"nats on average, the limit is {limit:g}. Probably {cause}. If the two compute in different "
                "precision on purpose, raise vllm_config.probe_tolerance"
            )
    return differences


# -- the engine -------------------------------------------------------------------------------------------------------


_FLOAT32_LIMIT, _HALF_LIMIT = 1e-3, 0.1
"""Mean difference of log-probs, in nats, that rounding alone does not cause."""


class VLLMEngine:
    """Generates for all agents in one call of vLLM.

    Before each call it sends vLLM what has changed: every version of an adapter once, under a name and a number that no
    other version ever has. A probe goes with it: a few tokens whose log-probs are compared with the trainer's own. Rows
    of the base model are sampled in a separate call, because vLLM may apply an adapter to them in a mixed batch.

    Log-probs are those of the sampling distribution: of ``logits / temperature``, renormalised if top-k, top-p or min-p
    cut it. ``exact`` is False: the trainer computes its own log-probs as the old ones, and weights the tokens by the
    ratio of the two.

    Nothing starts before :meth:`start` or the first :meth:`generate`.
    """

    exact = False

    def __init__(
        self,
        base: BaseModel,
        store: AdapterStore,
        config: VLLMConfig,
        *,
        seed: int,
        lora_config: Any,
        tokenizer: Any = None,
        own: RolloutEngine,
        offload: bool = True,
        backend: ColocatedVLLM | VLLMServer | None = None,
    ) -> None:
        """Check what can be checked without starting anything.

        Exams are ``own``'s, of the torch engine, if the settings ask for it. With ``offload`` the trainer's base moves
        to the host while vLLM samples on the same GPU. ``backend`` replaces the vLLM that the settings describe.

        Raises ConfigError for a missing extra, an unsupported version, and settings that this machine does not support.
        """
        self.base, self.store, self.config, self.seed, self.own = base, store, config, seed, own
        self.probed: Mapping[str, float] = {}
        """Of the last probes: mean difference of the log-probs in nats, by agent."""
        if backend is None and config.base_url is None:
            check_installed(config, base.device.type)
        kind = ColocatedVLLM if config.base_url is None else VLLMServer
        self.backend = backend or kind(base, config, tokenizer)
        shares_a_gpu = base.device.type == "cuda" and isinstance(self.backend, ColocatedVLLM)
        self._offloaded = OffloadedBase(base.model) if offload and shares_a_gpu else None
        self.versions = AdapterVersions(store, lora_config, base.source, config.lora_staging_dir)
        self._loaded: set[int] = set()
        self._trusted: set[int | None] = set()
        """Versions, and None for the base, whose probe has been compared."""

    def start(self, adapters: int, rank: int, context_length: int | None = None) -> None:
        """Start vLLM, or reach the server, for a population of ``adapters`` agents whose ranks reach ``rank``.

        ``context_length`` is the most tokens of prompt and completion that they will ask for; None: the base's limit.

        Raises ConfigError or EngineError, before anything is trained.
        """
        self._start(adapters, rank, context_length)
        if rank > self.backend.max_lora_rank:
            raise ConfigError(
                f"adapters may reach rank {rank} (network.lora_config.r, mutation.rank_range), {self._room}"
            )

    def _start(self, adapters: int, rank: int, context_length: int | None) -> None:
        self._check_open()
        if not self.backend.running:
            with self._engine():  # so that vLLM finds the memory that it will have
                self.backend.start(adapters, rank, context_length)

    def close(self) -> None:
        """Stop vLLM, or remove our adapters from the server; any later call but ``close`` raises EngineError."""
        if self.versions.close.alive:
            self.versions.close()
            self.backend.close()

    def _check_open(self) -> None:
        if not self.versions.close.alive:
            raise EngineError("this vLLM engine was closed; make another one (a new Runtime with use_vllm=True)")

    def generate(
        self, requests: Sequence[GenerationRequest], on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        """Return the completions of each request, in order; a server hands each to ``on_completion`` when it arrives.

        Raises EngineError when a prompt leaves no room in the context, an adapter does not fit, vLLM fails, or what it
        computes is not what the trainer computes.
        """
        self._check_open()
        ours = [k for k, r in enumerate(requests) if r.purpose in _TRAINING or self.config.exams == "vllm"]
        others = sorted(set(range(len(requests))) - set(ours))
        results: dict[int, list[Completion]] = {}
        for part, sample in ((ours, self._sampled), (others, self.own.generate)):
            if part:
                results |= zip(part, sample([requests[k] for k in part], of_part(on_completion, part)))
        return [results[k] for k in range(len(requests))]

    def _sampled(
        self, requests: Sequence[GenerationRequest], on_completion: OnCompletion | None = None
    ) -> list[list[Completion]]:
        slots = sorted({r.slot for r in requests if r.slot is not None})
        ranks = [self.store.ranks[slot] for slot in slots]
        self._start(len(slots) or self.store.used, max([*ranks, self.store.max_rank]), None)
        self._check(requests)
        versions = self.versions.current(slots)
        asked = self._probes(requests, versions)
        samples = [(k, sample) for k, r in enumerate(requests) for sample in range(r.samples)]
        rows = [self._row(requests[k], versions, sample) for k, sample in samples]
        early: dict[int, Completion] = {}

        def answered(k: int, answer: Generated) -> None:
            if on_completion is not None and k < len(rows):  # the rest are probes
                early[k] = completion_of(answer, rows[k])
                on_completion(*samples[k], early[k])

        with self._engine():
            self._send(versions)
            try:
                answers = self._complete([*rows, *(self._row(r, versions, 0) for r in asked)], answered)
            except EngineError:
                self._loaded.clear()  # a restarted vLLM has none
                raise
        probes = [(r, answer, _whose(requests, r.slot)) for r, answer in zip(asked, answers[len(rows) :], strict=True)]
        if probes:
            rounding = _FLOAT32_LIMIT if self.backend.computes_in_float32 else _HALF_LIMIT
            self.probed = check_probes(self.base, self.store, probes, self.config.probe_tolerance or rounding)
        # After the comparison: a version that has failed it is probed again.
        self._trusted.update(None if r.slot is None else versions[r.slot].number for r in asked)
        done = iter([early.get(k) or completion_of(answer, row) for k, (answer, row) in enumerate(zip(answers, rows))])
        return [[next(done) for _ in range(r.samples)] for r in requests]

    def _send(self, versions: Mapping[int, StagedAdapter]) -> None:
        """Make room in vLLM and send it the versions that are new."""
        for adapter in self.versions.outdated(keep=len(versions)):
            if adapter.number in self._loaded:
                self.backend.drop(adapter)
                self._loaded.discard(adapter.number)
        for adapter in versions.values():
            if adapter.number not in self._loaded:
                self.backend.load(adapter)
                self._loaded.add(adapter.number)

    def _check(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            length, limit = len(request.prompt_ids), self._context_length
            if not 0 < length < limit:
                raise EngineError(
                    f"a prompt of {length} tokens cannot be continued: the context of vLLM holds {limit}, prompt and "
                    "completion together; shorten the prompt, or raise max_model_len (of vllm_config, or of the server)"
                )
            rank = 0 if request.slot is None else self.store.ranks[request.slot]
            if rank > self.backend.max_lora_rank:
                raise EngineError(f"{_whose(requests, request.slot)} has an adapter of rank {rank}, {self._room}")

    def _probes(
        self, requests: Sequence[GenerationRequest], versions: Mapping[int, StagedAdapter]
    ) -> list[GenerationRequest]:
        """Return the probes to sample: one for each version that has not been compared, and one for the base."""
        if not self.config.probe_tokens or not requests:
            return []
        asked, numbers = [], set(self._trusted)
        # Not greedy: a mix of likely and unlikely tokens tests more than the most likely ones.
        sampling = SamplingSettings(max_new_tokens=self.config.probe_tokens, temperature=_TEMPERATURE)
        for request in [*requests, GenerationRequest(None, requests[0].prompt_ids, 1, requests[0].sampling)]:
            number = None if request.slot is None else versions[request.slot].number
            if number not in numbers:  # equal adapters are one version
                numbers.add(number)
                prompt = request.prompt_ids[:_PROMPT]
                asked.append(GenerationRequest(request.slot, prompt, 1, sampling, "probe", request.key))
        return asked

    def _row(self, request: GenerationRequest, versions: Mapping[int, StagedAdapter], sample: int) -> SampleRequest:
        return row_of(
            request,
            request_seed(self.seed, request, sample),
            adapter=None if request.slot is None else versions[request.slot],
            room=self._context_length - len(request.prompt_ids),
            eos=self.base.eos_token_ids,
            config=self.config,
        )

    def _complete(self, rows: Sequence[SampleRequest], answered: OnGenerated) -> list[Generated]:
        """Answer all rows; those of the base model by themselves."""
        answers: dict[int, Generated] = {}
        for of_base in (False, True):
            part = [k for k, row in enumerate(rows) if (row.adapter is None) is of_base]
            if part:

                def report(k: int, answer: Generated, part: Sequence[int] = part) -> None:
                    answered(part[k], answer)

                answers |= zip(part, self.backend.complete([rows[k] for k in part], report), strict=True)
        return [answers[k] for k in range(len(rows))]

    @property
    def _room(self) -> str:
        return (
            f"and vLLM has room for rank {self.backend.max_lora_rank}; raise vllm_config.max_lora_rank, or "
            "--max-lora-rank of the server, or narrow mutation.rank_range"
        )

    @property
    def _context_length(self) -> int:
        return min(self.backend.context_length, self.base.context_length)

    @contextmanager
    def _engine(self) -> Iterator[None]:
        """Give vLLM the GPU: the trainer's base leaves first, and returns when vLLM has gone to sleep."""
        with self._offloaded.away() if self._offloaded else nullcontext(), self.backend.awake():
            yield


def _whose(requests: Sequence[GenerationRequest], slot: int | None) -> str:
    """Name an adapter as a user knows it: by its agent if a request says which, else by its slot."""
    if slot is None:
        return "the base model"
    agents = {r.key[0] for r in requests if r.slot == slot and r.purpose in (*_TRAINING, "act") and r.key}
    return f"agent {min(agents)}" if len(agents) == 1 else f"slot {slot}"


class OffloadedBase:
    """A frozen model that can be moved off its device and back.

    The weights never change, so the host keeps its copy from the first time on, and moving away costs no transfer.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._host: list[Tensor] | None = None

    @contextmanager
    def away(self) -> Iterator[None]:
        """Keep parameters and buffers on the host while the context is open; they come back bit for bit."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        devices = [tensor.device for tensor in tensors]
        if self._host is None:
            pinned = [torch.empty_like(t, device="cpu", pin_memory=t.device.type == "cuda") for t in tensors]
            self._host = [host.copy_(tensor.detach()) for host, tensor in zip(pinned, tensors)]
        for tensor, on_host in zip(tensors, self._host, strict=True):
            # Through .data the parameters stay the same objects, and tied ones stay tied.
            tensor.data = on_host
        # Otherwise torch keeps the freed memory to itself, and vLLM cannot have it.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
        try:
            yield
        finally:
            for tensor, device in zip(tensors, devices, strict=True):
                # A copy even if the device is the host: training must never use the copy that is kept.
                tensor.data = tensor.data.to(device, copy=True, non_blocking=True)
