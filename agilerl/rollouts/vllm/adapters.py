"""Versions of adapters on their way to vLLM: each under a name of its own, so that nothing stale can be used."""

import copy
import hashlib
import itertools
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agilerl.errors import CheckpointError, EngineError
from agilerl.models.adapters import write_adapter
from agilerl.models.slots import AdapterStore
from agilerl.rollouts.vllm.backend import StagedAdapter

_IN_MEMORY = Path("/dev/shm")
_NUMBERS = itertools.count(1)
"""One row of numbers for the whole process: runtimes may come and go before the same vLLM."""

Factors = list[tuple[Tensor, Tensor]]


class AdapterVersions:
    """Which version of which adapter a vLLM engine has.

    A version is known by the bytes of its factors, its rank and its scale, whatever changed them: training, a mutation,
    a clone, a load. vLLM's caches know an adapter by name, number and path; a version gets new ones, and they are
    never given away again.
    """

    def __init__(self, store: AdapterStore, lora_config: Any, base_name: str, folder: str | None) -> None:
        self.store, self.lora_config, self.base_name = store, lora_config, base_name
        self.folder = _staging_folder(folder)
        self._finalizer = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self._digests: dict[int, str] = {}
        self._staged: dict[str, StagedAdapter] = {}
        self._bank: Tensor | None = None
        self._written: tuple[int, int] = (-1, -1)

    def close(self) -> None:
        """Remove the staging folder."""
        self._finalizer()

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
        """Take the oldest versions out that no slot is known to have, all but ``keep``; their folders are removed."""
        alive = set(self._digests.values())
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
                digest.update(factor.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _write(self, slot: int, factors: Factors) -> StagedAdapter:
        number = next(_NUMBERS)
        # The staging folder's name is unique, so trainers that share a server do not collide.
        name, rank = f"{self.folder.name}-{number}", self.store.ranks[slot]
        config = copy.deepcopy(self.lora_config)
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
    """Make a folder of one's own: in the wanted one, in memory, or where temporary files go."""
    parent = Path(wanted).expanduser() if wanted is not None else _IN_MEMORY if _IN_MEMORY.is_dir() else None
    try:
        if parent is not None:
            parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="agilerl-", dir=parent))
    except OSError as error:
        if wanted is None and parent is not None:
            return Path(tempfile.mkdtemp(prefix="agilerl-"))
        raise EngineError(
            f"vllm_config.lora_staging_dir={wanted!r} cannot be used: {error.strerror or error}; name a folder that "
            "can be written to"
        ) from error
