"""Log-probs under a reference policy: computed once for all agents that share it."""

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from agilerl.data import RolloutBatch
from agilerl.runtime import Runtime

__all__ = ["ReferenceLogprobs", "fingerprint"]

_ROW_TOKENS = 128
"""What a row costs beside its tokens (key, tensor object), in tokens."""

_STORES: "weakref.WeakKeyDictionary[Runtime, ReferenceLogprobs]" = weakref.WeakKeyDictionary()


class ReferenceLogprobs:
    """Log-probs of completion tokens by (policy, row), the oldest forgotten beyond ``max_tokens``.

    A fixed policy gives a row the same bits whoever asks and whatever else is in the batch, so agents may share them.
    """

    def __init__(self, runtime: Runtime, max_tokens: int = 2**25) -> None:
        self._runtime = weakref.ref(runtime)
        self.max_tokens = max_tokens
        self.rows_computed = 0
        """Rows that were not known and had to go through the base model."""
        self._known: OrderedDict[bytes, Tensor] = OrderedDict()
        self._tokens = 0

    @classmethod
    def of(cls, runtime: Runtime) -> "ReferenceLogprobs":
        """Return the store that all agents of a runtime share."""
        if runtime not in _STORES:
            _STORES[runtime] = cls(runtime)
        return _STORES[runtime]

    def logprobs(
        self, batch: RolloutBatch, slot: int | None, policy: bytes, micro_rows: int, temperature: float = 1.0
    ) -> Tensor:
        """Return log-probs ``[B, L]``, 0 off the action mask, on the CPU.

        ``slot`` holds the policy, None for the base model alone; ``policy`` is its fingerprint.
        """
        of = policy + repr(float(temperature)).encode()
        keys = [_key(of, batch, row) for row in range(len(batch))]
        missing = list({key: row for row, key in enumerate(keys) if key not in self._known}.values())
        found = {key: self._known[key] for key in keys if key in self._known}
        if missing:
            part, runtime = batch.select(torch.tensor(missing)), self._runtime()
            assert runtime is not None
            values = runtime.fixed_logprobs(slot, part, temperature, micro_rows).cpu()
            for place, row in enumerate(missing):
                found[keys[row]] = values[place][part.action_mask[place].cpu()].clone()
                self._keep(keys[row], found[keys[row]])
            self.rows_computed += len(missing)
        mask = batch.action_mask.cpu()
        flat = torch.cat([found[key] for key in keys]) if keys else torch.zeros(0)
        return torch.zeros(mask.shape).masked_scatter(mask, flat)

    def _keep(self, key: bytes, values: Tensor) -> None:
        self._known[key] = values
        self._tokens += len(values) + _ROW_TOKENS
        while self._tokens > self.max_tokens and len(self._known) > 1:
            self._tokens -= len(self._known.popitem(last=False)[1]) + _ROW_TOKENS


def fingerprint(factors: Sequence[tuple[Tensor, Tensor]], scaling: float) -> bytes:
    """Return a digest of an adapter; equal adapters are equal policies."""
    digest = hashlib.blake2b(repr(scaling).encode(), digest_size=16)
    for pair in factors:
        for factor in pair:
            digest.update(factor.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.digest()


def _key(policy: bytes, batch: RolloutBatch, row: int) -> bytes:
    length = int(batch.lengths[row])
    digest = hashlib.blake2b(len(policy).to_bytes(4) + policy, digest_size=16)
    digest.update(batch.ids[row, :length].cpu().numpy().tobytes())
    digest.update(batch.action_mask[row, : length - 1].cpu().numpy().tobytes())
    return digest.digest()
