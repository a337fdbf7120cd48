"""What a population shares: one base model, one adapter bank, one rollout engine. Built once, borrowed by agents."""

import copy
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from agilerl.data import RolloutBatch
from agilerl.errors import ConfigError, MemoryExhaustedError
from agilerl.models import adapters
from agilerl.models.base import BaseModel, from_model, load_base, load_tokenizer, lora_layers
from agilerl.models.heads import token_values
from agilerl.models.lora import attach, detach
from agilerl.models.memory import MemoryLimits, attempt
from agilerl.models.slots import AdapterStore, Route
from agilerl.rollouts.engine import RolloutEngine
from agilerl.rollouts.torch_engine import TorchEngine

__all__ = ["AgentRows", "Runtime", "TokenOutputs"]

_RUNTIMES: "weakref.WeakValueDictionary[int, Runtime]" = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class AgentRows:
    """Rows of one agent in a shared forward pass."""

    slot: int | None
    """Adapter slot, or None for the base model alone."""
    batch: RolloutBatch
    temperature: float
    """Log-probs are those of ``logits / temperature``."""
    values: bool = False
    """Ask the slot's value head instead of the language-model head."""


@dataclass(frozen=True)
class TokenOutputs:
    """What a forward pass says about the tokens of one part, ``[b, T-1]`` each; 0 off the action mask."""

    logp: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None
    """Value of the state before each action token, for parts that asked for values."""


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
            lora_layers(base.model, self.lora_config),
            max_rank=self.lora_config.r,
            head_features=base.hidden_size,
            device=str(base.device),
        )
        attach(base.model, self.store)
        self.limits = MemoryLimits()
        """What memory has turned out to hold; the sizes that a user gave bound what is tried first."""
        self.engine: RolloutEngine = TorchEngine(base, self.store, seed=seed, max_rows=max_rows, limits=self.limits)
        _RUNTIMES[id(base.model)] = self
        self._finalizer = weakref.finalize(self, detach, base.model, self.store)

    @classmethod
    def from_pretrained(
        cls, name: str, *, dtype: str = "auto", device: str | None = None, tokenizer: Any = None, **options: Any
    ) -> "Runtime":
        """Load a base (local folder, hub name or ``embedded``) with its tokenizer; options as in the constructor."""
        tokenizer = load_tokenizer(name) if tokenizer is None else tokenizer
        return cls(load_base(name, dtype=dtype, device=device or "cpu"), tokenizer=tokenizer, **options)

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
                f"found lora_config.target_modules={wanted.target_modules!r}. Agents on one base adapt the same layers"
            )
        return known

    @classmethod
    def resolve(
        cls, runtime: "Runtime | None", name: str | None, model: Any, *, device: str | None = None, **options: Any
    ) -> "Runtime":
        """Return the runtime that a user means by exactly one of a runtime, a model's name and a loaded model."""
        given = [n for n, v in (("runtime", runtime), ("model_name", name), ("actor_network", model)) if v is not None]
        if len(given) != 1:
            raise ConfigError(
                "an agent needs exactly one of runtime, model_name and actor_network, found "
                f"{' and '.join(given) or 'none'}"
            )
        if runtime is not None:
            return runtime
        if name is not None:
            return cls.from_pretrained(name, device=device, **options)
        return cls.for_model(model if device is None else model.to(device), **options)

    def __repr__(self) -> str:
        return f"Runtime(base={self.base.name!r}, parameters={self.base.parameters:,}, {self.store!r})"

    def forward(self, parts: Sequence[AgentRows], *, entropy: bool = False) -> list[TokenOutputs]:
        """Return the outputs of each part from one forward pass over all of them.

        All parts have the same padded length T; parts without a slot come last. The language-model head runs on the
        action tokens of the parts that need it only. Positions off an action mask carry no gradient.
        """
        device = self.base.device
        ids = torch.cat([p.batch.ids for p in parts]).to(device)
        masks = [p.batch.action_mask.to(device) for p in parts]
        with self.store.routed(_route(parts)):
            hidden = self.base.hidden(ids)[:, :-1]
        speaking = torch.cat([m & (not p.values) for p, m in zip(parts, masks)])
        rows = torch.tensor([len(p.batch) for p in parts])
        temperature = torch.repeat_interleave(torch.tensor([p.temperature for p in parts]), rows).to(device)
        per_token = torch.repeat_interleave(temperature, speaking.sum(dim=1))
        logps, entropies = self.base.logprobs(hidden[speaking], ids[:, 1:][speaking], per_token, entropy=entropy)
        outputs: list[TokenOutputs] = []
        row = token = 0
        for part, mask in zip(parts, masks):
            own = hidden[row : row + len(mask)]
            row += len(mask)
            if part.values:
                assert part.slot is not None
                values = token_values(own, self.store, part.slot)
                outputs.append(TokenOutputs(values=torch.where(mask, values, 0.0)))
                continue
            piece = slice(token, token + int(mask.sum()))
            token = piece.stop
            outputs.append(
                TokenOutputs(
                    _scatter(mask, logps[piece]), None if entropies is None else _scatter(mask, entropies[piece])
                )
            )
        return outputs

    def fixed_logprobs(self, slot: int | None, batch: RolloutBatch, temperature: float, micro_rows: int) -> Tensor:
        """Return log-probs ``[B, T-1]`` without gradient: old policy (a slot) or reference (None: adapters off).

        Where memory runs out, the rows of a forward are halved; raises MemoryExhaustedError where it does not hold one.
        """
        return self._fixed(AgentRows(slot, batch, temperature), micro_rows)

    def fixed_values(self, slot: int, batch: RolloutBatch, micro_rows: int) -> Tensor:
        """Return the values ``[B, T-1]`` that a critic's slot gives, without gradient."""
        return self._fixed(AgentRows(slot, batch, 1.0, values=True), micro_rows)

    def fixed_entropy(self, slot: int | None, batch: RolloutBatch, temperature: float, micro_rows: int) -> Tensor:
        """Return the entropy ``[B, T-1]`` in nats of the distribution of each action token, without gradient."""
        return self._fixed(AgentRows(slot, batch, temperature), micro_rows, entropy=True)

    @torch.no_grad()
    def _fixed(self, rows: AgentRows, micro_rows: int, *, entropy: bool = False) -> Tensor:
        (count, length), before = rows.batch.ids.shape, self.limits.train_tokens
        result = torch.zeros(rows.batch.action_mask.shape, dtype=torch.float32, device=self.base.device)
        start = 0
        while start < count:
            end = min(start + self.limits.rows(micro_rows, length), count)
            part = replace(rows, batch=rows.batch.select(slice(start, end)))
            outputs = attempt(partial(self.forward, [part], entropy=entropy))
            if outputs is None:
                if end - start == 1:
                    self.limits.train_tokens = before
                    raise MemoryExhaustedError(f"memory does not hold a forward pass over one row of {length} tokens")
                self.limits.train_tokens = (end - start) * length // 2
                continue
            found = outputs[0].values if rows.values else outputs[0].entropy if entropy else outputs[0].logp
            assert found is not None
            result[start:end, : found.shape[1]] = found.float()
            start = end
        return result


def _route(parts: Sequence[AgentRows]) -> Route | None:
    pairs = [(p.slot, len(p.batch)) for p in parts if p.slot is not None]
    return Route(tuple(s for s, _ in pairs), tuple(n for _, n in pairs)) if pairs else None


def _scatter(mask: Tensor, values: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=values.dtype, device=mask.device).masked_scatter(mask, values)
