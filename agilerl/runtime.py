"""What a population shares: one base model, one adapter bank, one rollout engine. Built once, borrowed by agents."""

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agilerl.data import RolloutBatch
from agilerl.errors import ConfigError
from agilerl.models import adapters
from agilerl.models.base import BaseModel, from_model, load_base, load_tokenizer, lora_layers
from agilerl.models.lora import attach, detach
from agilerl.models.slots import AdapterStore, Route
from agilerl.rollouts.engine import RolloutEngine
from agilerl.rollouts.torch_engine import TorchEngine

__all__ = ["AgentRows", "Runtime"]

_RUNTIMES: "weakref.WeakValueDictionary[int, Runtime]" = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class AgentRows:
    """Rows of one agent in a shared forward pass."""

    slot: int | None
    """Adapter slot, or None for the base model alone."""
    batch: RolloutBatch
    temperature: float
    """Log-probs are those of ``logits / temperature``."""


class Runtime:
    """One frozen base, N adapter slots, one engine.

    Every agent built on the same model object borrows the same runtime, so a population never holds a second copy
    of the base. ``max_tokens`` bounds the tokens of one training forward (rows of several agents are packed up to it).
    """

    def __init__(
        self,
        base: BaseModel,
        *,
        lora_config: Any = None,
        tokenizer: Any = None,
        seed: int = 42,
        max_tokens: int = 4096,
        max_rows: int = 1024,
    ) -> None:
        self.base, self.tokenizer, self.seed, self.max_tokens = base, tokenizer, seed, max_tokens
        self.lora_config = copy.deepcopy(lora_config) if lora_config is not None else adapters.default_lora_config()
        adapters.check_lora_config(self.lora_config)
        self.store = AdapterStore(
            lora_layers(base.model, self.lora_config), max_rank=self.lora_config.r, device=str(base.device)
        )
        attach(base.model, self.store)
        self.engine: RolloutEngine = TorchEngine(base, self.store, seed=seed, max_rows=max_rows)
        _RUNTIMES[id(base.model)] = self
        self._finalizer = weakref.finalize(self, detach, base.model, self.store)

    @classmethod
    def from_pretrained(
        cls, name: str, *, dtype: str = "auto", device: str = "cpu", tokenizer: Any = None, **options: Any
    ) -> "Runtime":
        """Load a base (local folder, hub name or ``embedded``) with its tokenizer; options as in the constructor."""
        tokenizer = load_tokenizer(name) if tokenizer is None else tokenizer
        return cls(load_base(name, dtype=dtype, device=device), tokenizer=tokenizer, **options)

    @classmethod
    def for_model(cls, model: Any, **options: Any) -> "Runtime":
        """Return the runtime around a model that the user has loaded, making it the first time.

        Raises ConfigError when the model already carries adapters on other layers or of another rank scale.
        """
        known = _RUNTIMES.get(id(model))
        if known is None:
            base = from_model(model)
            base.check_head()
            return cls(base, **options)
        wanted = options.get("lora_config")
        if wanted is not None and wanted.target_modules != known.lora_config.target_modules:
            raise ConfigError(
                f"this model already carries a population whose adapters target {known.lora_config.target_modules!r}; "
                f"found lora_config.target_modules={wanted.target_modules!r}. All agents on one base adapt the same layers"
            )
        return known

    def __repr__(self) -> str:
        return f"Runtime(base={self.base.name!r}, parameters={self.base.parameters:,}, {self.store!r})"

    def token_logprobs(
        self, parts: Sequence[AgentRows], *, entropy: bool = False
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Return each agent's log-probs ``[b, T-1]`` (and entropies) from one forward pass over all parts.

        All parts have the same padded length T and their slots ascend, parts without a slot last. Positions outside
        an agent's action mask are 0 and carry no gradient; the head runs on action tokens only.
        """
        batches = [p.batch for p in parts]
        ids = torch.cat([b.ids for b in batches]).to(self.base.device)
        routed = [(p.slot, len(p.batch)) for p in parts if p.slot is not None]
        route = Route(tuple(s for s, _ in routed), tuple(n for _, n in routed)) if routed else None
        with self.store.routed(route):
            hidden = self.base.hidden(ids)
        mask = torch.cat([b.action_mask for b in batches]).to(self.base.device)
        counts = mask.sum(dim=1)
        rows = torch.tensor([len(b) for b in batches])
        temperature = torch.repeat_interleave(torch.tensor([p.temperature for p in parts]), rows)
        per_token = torch.repeat_interleave(temperature.to(self.base.device), counts)
        logps, entropies = self.base.logprobs(hidden[:, :-1][mask], ids[:, 1:][mask], per_token, entropy=entropy)
        results: list[tuple[Tensor, Tensor | None]] = []
        start = 0
        for batch in batches:
            own = batch.action_mask.to(self.base.device)
            piece = slice(start, start + int(own.sum()))
            start = piece.stop
            empty = torch.zeros(own.shape, dtype=logps.dtype, device=own.device)
            filled = empty.masked_scatter(own, logps[piece])
            results.append((filled, None if entropies is None else empty.masked_scatter(own, entropies[piece])))
        return results

    @torch.no_grad()
    def fixed_logprobs(self, slot: int | None, batch: RolloutBatch, temperature: float, micro_rows: int) -> Tensor:
        """Return log-probs ``[B, T-1]`` without gradient: old policy (a slot) or reference (None: adapters off)."""
        result = torch.zeros(batch.action_mask.shape, dtype=torch.float32, device=self.base.device)
        for start in range(0, len(batch), micro_rows):
            part = batch.select(slice(start, start + micro_rows))
            logps, _ = self.token_logprobs([AgentRows(slot, part, temperature)])[0]
            result[start : start + micro_rows, : logps.shape[1]] = logps.float()
        return result
