"""The one frozen base model: loading it, checking it, and its two halves, body and head."""

import hashlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from agilerl.checks.arguments import described, reason, shown
from agilerl.config.base_model import AttentionKind, QuantizationConfig, SharedOptions
from agilerl.data.tree import token_tree
from agilerl.errors import ConfigError, EngineError, lacks_memory
from agilerl.functional import linear_collision_entropy, linear_logprobs
from agilerl.models.flat import (
    FlatRows,
    Packed,
    PaddedRows,
    PromptLine,
    flatten,
    pack,
)
from agilerl.models.gguf import base_folder
from agilerl.models.layers import (
    EXPERTS,
    apply_liger_kernels,
    asking,
    body_of,
    choose_attention,
    configure_layers,
    configure_norms,
    decoder_layers,
    offloaded,
    recorded_options,
    register_experts,
    round_products,
    using_attention,
)
from agilerl.models.lora import RoundedLinear
from agilerl.models.model_config import (
    check_attention,
    check_config,
    check_model_folder,
    check_tokenizer_parts,
    load_whole,
    loading,
    model_config,
    overridden_dtype,
)
from agilerl.models.quantised import loading_arguments, prepare, quantisation_in, stored_sizes
from agilerl.models.reach import (
    EVERYTHING,
    Reach,
    Reaches,
    limits_in,
    longest_row,
    masks_of,
    narrowed,
    readings,
)
from agilerl.models.slots import AdapterStore
from agilerl.models.tiny import tiny_model_path
from agilerl.sizes import stated
from agilerl.text.contract import stated_ends
from agilerl.text.padding import with_padding
from agilerl.text.templates import settings_of, with_chat_template

EMBEDDED = "embedded"
"""The name of the tiny model that is shipped with the package."""

RouteOf = Callable[[Packed], AbstractContextManager[None]]


@dataclass
class BaseModel:
    """A frozen causal language model split at its head, so that the logits of a whole batch are never stored."""

    model: Any
    """The Hugging Face model; LoRA layers are attached inside it."""
    body: nn.Module
    """Maps token ids ``[B, T]`` to hidden states ``[B, T, H]``."""
    name: str
    """The name that the user gave: a folder, a hub name or ``embedded``."""
    source: str = ""
    """Where transformers finds it; empty means ``name``."""
    original: str = ""
    """What exported adapters name: the file that ``source`` was made from; empty means ``source``."""
    store: AdapterStore | None = None
    """The bank whose layers are attached; None if none is attached yet."""
    options: SharedOptions = field(default_factory=SharedOptions)
    """Options of the computation; :meth:`configure` changes them."""
    ends_of_text: tuple[int, ...] = ()
    """The end tokens of the tokenizer in use and of its chat template."""

    def __post_init__(self) -> None:
        self.source = self.source or self.name
        self.original = self.original or self.source
        prepare(self.model)
        self.model.requires_grad_(False)
        self.model.eval()  # dropout in the base would make the trained policy differ from the one that sampled
        head = self.model.get_output_embeddings()
        if head is None:
            raise EngineError(f"{type(self.model).__name__} has no language-model head; expected a causal LM")
        if not head.weight.dtype.is_floating_point:
            raise ConfigError(
                "the language-model head is quantised, but log-probs need it unquantised; load the model with "
                "llm_int8_skip_modules=['lm_head']"
            )
        self._head = head
        rounded = any(isinstance(module, RoundedLinear) for module in self.model.modules())
        self.activation_dtype = torch.float32 if rounded else self.dtype
        """Data type of hidden states, keys and values."""
        exact = (torch.float32, torch.float64)
        self._wide = self.quantisation is None and all(p.dtype in exact for p in self.model.parameters())
        config = self.model.config.get_text_config()
        self._softcap = getattr(config, "final_logit_softcapping", None)
        # Cohere multiplies its logits by logit_scale, Granite divides them by logits_scaling.
        factor, divisor = (float(getattr(config, name, None) or 1) for name in ("logit_scale", "logits_scaling"))
        self._scale = factor / divisor
        self._longest = longest_row(config)
        self.context_length = self._longest
        """The most tokens of a row, prompt and completion."""
        self.reaches: Reaches = EVERYTHING
        """Which earlier tokens the layers attend to; :meth:`configure` finds out."""
        self._reading = 0
        self._suits_sdpa: bool | None = None
        """Whether SDPA computes this model's attention; None: not tried yet."""
        self._decodes_by: AttentionKind = "sdpa"
        """The kernel that computes the attention of a step; an eager model stays so."""
        self.vocabulary_size = int(head.weight.shape[0])
        self.num_layers = stated(config, "num_hidden_layers") or 0
        self._routers: list[Tensor] | None = None
        recorded = getattr(self.body, "_can_record_outputs", None) or {}
        balanced = "router_logits" in recorded and getattr(config, "router_aux_loss_coef", None) is not None
        self.experts_per_token = stated(config, "num_experts_per_tok") if balanced else None
        """Experts that a token chooses, of a mixture for which transformers has a load-balancing loss; else None."""
        self.eos_token_ids  # noqa: B018  (raises if it is not a token id)
        self.hidden_size = int(head.weight.shape[1])
        self.fingerprint = None if self.quantisation is not None else fingerprint(self.model)
        """Type and digest of the weights as they were loaded; None of a quantised base."""
        self.flattens = False

    @property
    def flattens(self) -> bool:
        """Whether rows can be computed in one line, without padding; :meth:`configure` finds out."""
        return self._flattens and self.model.config._attn_implementation == "sdpa"

    @flattens.setter
    def flattens(self, value: bool) -> None:
        self._flattens = value

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return cast(torch.device, self._head.weight.device)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the weights."""
        return cast(torch.dtype, self._head.weight.dtype)

    @property
    def parameters(self) -> int:
        """Number of parameters, all of them frozen."""
        return stored_sizes(self.model)[0]

    @property
    def weight_bytes(self) -> int:
        """Bytes of the frozen parameters, as they are stored."""
        return stored_sizes(self.model)[1]

    @property
    def quantisation(self) -> QuantizationConfig | None:
        """How the linear layers are quantised; None if they are not."""
        return quantisation_in(self.model.config)

    @property
    def decodes_exactly(self) -> bool:
        """Whether decoding and training forwards agree up to the rounding of fp32.

        They do not in 16 bits (or with matrix products in TF32), because the two round in a different order, nor if
        layers are quantised, or compiled for training: a log-prob then differs by about a hundredth of a nat, which is
        more than GSPO's bounds.
        """
        if not self._wide or self.options.torch_compiler is not None:
            return False
        try:
            return torch.get_float32_matmul_precision() == "highest"
        except RuntimeError:  # it was set through both of torch's interfaces, and at least once not to the default
            return False

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion: those of the model's configurations, of its tokenizer and its chat template.

        Models that were tuned to a chat format often have its end token in the tokenizer or the template alone.
        """
        config = self.model.config
        parts = (getattr(self.model, "generation_config", None), config, config.get_text_config())
        ids = stated_ends(*(getattr(part, "eos_token_id", None) for part in parts))
        if not all(type(token) is int for token in ids):
            raise ConfigError(
                f"the model {self.name!r}: expected integers as eos_token_id, found {shown(ids)}; write the id of the "
                "token into its config.json and generation_config.json"
            )
        return tuple(dict.fromkeys((*ids, *self.ends_of_text)))

    def configure(self, options: SharedOptions) -> None:
        """Apply options to all later computations.

        Raises ConfigError for options that this model or machine does not support; nothing is changed then.
        """
        self._choose_attention(options.attn_implementation)
        if options.use_liger_kernel and not self.options.use_liger_kernel:
            apply_liger_kernels(self.model, self.device)
        if options.activation_offload and not self.options.activation_offload and self.device.type != "cuda":
            warnings.warn(f"activation_offload=True has no effect on {self.device.type!r}: it needs CUDA", stacklevel=2)
        configure_layers(self.body, options, self.store)
        configure_norms(self.body, enabled=options.torch_compiler is None and not options.use_liger_kernel)
        before, self.options = self.options, options
        self._use_own_experts()
        self._find_reaches()
        self.flattens = self._can_flatten()
        if options.use_sequence_packing and not before.use_sequence_packing and not self.flattens:
            try:
                self._check_packing()
            except ConfigError:
                self.options = before
                configure_layers(self.body, before, self.store)
                self.flattens = self._can_flatten()
                raise

    def _choose_attention(self, kind: AttentionKind | None) -> None:
        choose_attention(self.model, kind, self.device)
        if self.model.config._attn_implementation != "sdpa":
            return
        if self._suits_sdpa is None:
            self._suits_sdpa = self._is_computed_by_sdpa()
        if not self._suits_sdpa:
            if kind == "sdpa":
                raise ConfigError(
                    f"attn_implementation='sdpa' leaves out a part of the attention of {type(self.model).__name__} (a "
                    "soft cap, or sinks); leave it out, or use 'eager'"
                )
            self._decodes_by = "eager"
            choose_attention(self.model, "eager", self.device)

    @property
    def recomputes(self) -> bool:
        """Whether :meth:`recomputing` is possible, and changes anything."""
        options = self.options
        if options.gradient_checkpointing or options.torch_compiler is not None or options.activation_offload:
            return False
        return bool(decoder_layers(self.body))

    @contextmanager
    def recomputing(self, wanted: bool) -> Iterator[None]:
        """Compute the layers of the forwards in this block again in their backward pass, if ``wanted``."""
        if wanted:
            changed = self.options.model_copy(update={"gradient_checkpointing": True})
            configure_layers(self.body, changed, self.store)
        try:
            yield
        finally:
            if wanted:
                configure_layers(self.body, self.options, self.store)

    def hidden(self, ids: Tensor, **kwargs: Any) -> Tensor:
        """Return the last hidden states ``[B, T, H]`` of right-padded ids ``[B, T]``.

        No padding mask is needed: attention is causal and the padding lies to the right of every real token.
        """
        if self._routers is not None:
            kwargs["output_router_logits"] = True
        if self.store is not None:
            self.store.batch_rows = ids.shape[0]
        if kwargs.get("past_key_values") is not None:
            config = self.model.config.get_text_config()
            # The other kernels do not take our mask.
            with using_attention(config, "eager" if config._attn_implementation == "eager" else self._decodes_by):
                return cast(Tensor, self.body(input_ids=ids, use_cache=True, **kwargs)[0])
        offload = self.options.activation_offload and self.device.type == "cuda" and torch.is_grad_enabled()
        with offloaded(self.model, pin=True) if offload else nullcontext():
            output = self.body(input_ids=ids, use_cache=False, **kwargs)
        if self._routers is not None:
            self._routers += output.router_logits
        return cast(Tensor, output[0])

    @contextmanager
    def recorded_routers(self) -> Iterator[list[Tensor]]:
        """Yield a list that gets each router's logits ``[N, E]``, a row for each of :meth:`hidden`'s N states."""
        self._routers = logits = list[Tensor]()
        try:
            yield logits
        finally:
            self._routers = None

    def packed(self, ids: Tensor, lengths: Tensor, parts: Sequence[int], route: RouteOf) -> Tensor:
        """Return the result of :meth:`hidden`, computed without the padding; ``lengths [B]`` are the rows' tokens.

        ``parts`` counts the rows of each agent, which never share a packed row; ``route`` selects the adapters, given
        the packed batch. The values at padding positions are meaningless.
        """
        batch = pack(ids, lengths, parts, whole=self.options.attn_implementation == "flex_attention")
        with route(batch):
            hidden = batch.unpack(self.hidden(batch.ids, position_ids=batch.positions))
        if self._routers is not None:
            self._routers[:] = [logits[batch.source.flatten()] for logits in self._routers]
        return hidden

    def flat(self, rows: FlatRows, **kwargs: Any) -> Tensor:
        """Return the last hidden states ``[N, H]`` of rows in one line; the route counts their tokens as rows.

        A :class:`PromptLine` may be their cache, ``past_key_values``.
        """
        asked, cache = [], kwargs.get("past_key_values")

        def attend(
            query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, *, reach: Reach
        ) -> Tensor:
            asked.append(1)
            if cache is not None and not (key is cache.computed[-1][0] and value is cache.computed[-1][1]):
                raise EngineError("a layer attends to other keys or values than those of its cache")
            return rows.attend(query, key, value, scale, reach)

        def mask_of(reach: Reach) -> Tensor:
            there = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=self.device)
            return asking(there, partial(attend, reach=reach))

        mask = masks_of(self.reaches, mask_of)
        # Each token is a row of length 1: only attention, which asks for it, sees other tokens.
        hidden = self.hidden(rows.ids[:, None], position_ids=rows.positions[:, None], attention_mask=mask, **kwargs)
        if len(asked) < self.num_layers:  # each token would have attended to itself alone
            raise EngineError(
                f"the attention of {type(self.model).__name__} was changed after its adapters were attached; set it "
                "with attn_implementation (network.attn_implementation) instead, or load the model again"
            )
        return hidden[:, 0]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[M, V]`` in fp32 of hidden states ``[M, H]``."""
        logits = self._head(hidden).float() * self._scale
        return cast(Tensor, logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap))

    def logprobs(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor | float, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probs ``[M]`` of targets (and the entropy) from hidden ``[M, H]`` without storing ``[M, V]``."""
        return linear_logprobs(
            hidden, self._head.weight, targets, temperature=temperature, entropy=entropy, **self._head_settings
        )

    def collision_entropy(self, hidden: Tensor, temperature: Tensor) -> Tensor:
        """Return ``-log sum_v p(v)^2`` ``[M]`` in nats from hidden ``[M, H]`` and temperatures ``[M]``; no gradient."""
        return linear_collision_entropy(hidden, self._head.weight, temperature, **self._head_settings)

    @property
    def _head_settings(self) -> dict[str, Any]:
        return {
            "bias": getattr(self._head, "bias", None),
            "softcap": self._softcap,
            "scale": self._scale,
            "chunk_rows": self.options.fused_logprobs_chunk_rows,
            "wide": self.options.cast_logprobs_to_fp32,
        }

    def check_routers(self, coefficient: float) -> None:
        """Raise ConfigError unless the load-balancing loss is available, or its coefficient is 0."""
        if not coefficient:
            return
        wrong = None
        if self.experts_per_token is None:
            wrong = f"{type(self.model).__name__} is not a mixture of experts whose load-balancing loss is known"
        elif self.options.torch_compiler is not None:
            wrong = f"torch_compiler={self.options.torch_compiler!r} compiles the routers"
        if wrong:
            raise ConfigError(f"router_aux_loss_coef={coefficient:g} reads a model's routers, but {wrong}; set it to 0")

    def check_head(self) -> None:
        """Compare body + head with the model's own logits on a few tokens.

        Raises EngineError for an architecture whose head computes something else: training would use wrong numbers.
        """
        ids, name = torch.arange(1, 9, device=self.device)[None] % self.vocabulary_size, type(self.model).__name__
        try:
            with torch.no_grad():
                hidden, full = self.hidden(ids), self.model(input_ids=ids, use_cache=False).logits[0].float()
                split, beginning = self.logits(hidden[0]), self.hidden(ids[:, :4])
        except Exception as error:  # of many types: from inside the model's code
            if lacks_memory(error):
                raise
            raise EngineError(
                f"{name} is not made of a body and a head as supported ones are: {reason(error)}; use another model"
            ) from error
        if not bool(torch.isfinite(full).all()):
            bad = next((n for n, p in self.model.named_parameters() if not bool(torch.isfinite(p).all())), None)
            raise EngineError(
                f"the model {self.name!r} computes logits that are not finite: "
                + (f"its weights {bad} contain NaN or infinity; use an undamaged copy" if bad else _OVERFLOW)
            )
        if not torch.allclose(split, full, atol=1e-3, rtol=1e-3):
            raise EngineError(
                f"{name} computes its logits in a way that is not supported "
                f"(largest difference {float((split - full).abs().max()):.3g}); it cannot be trained correctly"
            )
        apart = _apart(hidden[:, :4], beginning, torch.ones((1, 4), dtype=torch.bool))
        if not apart < max(0.05, _SAME[self.dtype]):
            raise EngineError(
                f"{name} lets tokens see those that follow (relative difference {apart:.2g}), so it cannot write a "
                "text token by token; set is_decoder to true in its config.json if it was trained so, or use another"
            )

    @torch.no_grad()
    def _use_own_experts(self) -> None:
        """On a CPU, let experts compute a token with the same bits whatever other tokens they get, if we know how."""
        config = self.model.config.get_text_config()
        before = getattr(config, "_experts_implementation", None)
        if self.device.type != "cpu" or before in (None, EXPERTS):
            return
        register_experts()
        ids = torch.arange(1, 25).reshape(2, 12) % self.vocabulary_size
        try:
            usual = self.hidden(ids)
            config._experts_implementation = EXPERTS
            same = _apart(self.hidden(ids), usual, torch.ones(ids.shape, dtype=torch.bool)) < _SAME[self.dtype]
        except Exception:  # experts that are made of other parts than most
            same = False
        if not same:
            config._experts_implementation = before

    @contextmanager
    def narrowed(self) -> Iterator[None]:
        """Let windows and chunks be of 4 tokens, so that a short row shows what lies on both sides of their edges."""
        config, before = self.model.config.get_text_config(), self.reaches
        with narrowed(self.model, limits_in(config, self._longest) if before != EVERYTHING else {}):
            # The number of the reading is the same with other numbers in it.
            self.reaches = readings(config)[self._reading] if before != EVERYTHING else before
            try:
                yield
            finally:
                self.reaches = before

    @torch.no_grad()
    def _find_reaches(self) -> None:
        """Find out which tokens each layer attends to; where that cannot be told, rows are as short as the window."""
        config = self.model.config.get_text_config()
        self.reaches, self.context_length = EVERYTHING, self._longest
        limits = limits_in(config, self._longest)
        if not limits:
            return
        ids = (torch.arange(1, 25).reshape(2, 12) % self.vocabulary_size).to(self.device)
        usual = self.hidden(ids)
        with narrowed(self.model, limits):
            narrow = self.hidden(ids)
            beginning = self.hidden(ids[:, :6])
            with using_attention(config, "eager"):
                eager = self.hidden(ids)
            fitting = [i for i, reading in enumerate(readings(config)) if self._is_read(ids, narrow, reading)]
        everywhere = torch.ones(ids.shape, dtype=torch.bool)
        wrong = max(_apart(narrow, eager, everywhere), _apart(narrow[:, :6], beginning, everywhere[:, :6]))
        if not wrong < max(10 * _SAME[self.dtype], 1e-3):
            raise ConfigError(
                f"{type(self.model).__name__} computes rows of more than {min(limits.values())} tokens "
                f"({', '.join(limits)}) in a way that depends on later tokens, or on the kernel; it cannot "
                "be trained correctly: use another model"
            )
        shows = not _apart(narrow, usual, everywhere) < _SAME[self.dtype]
        unlimited = set(getattr(config, "layer_types", None) or ()) == {"full_attention"}
        if fitting and (shows or unlimited):
            self._reading = fitting[0]
            self.reaches = readings(config)[self._reading]
        else:
            self.context_length = min(limits.values())

    def _is_read(self, ids: Tensor, expected: Tensor, reaches: Reaches) -> bool:
        """Return whether the layers attend as ``reaches`` says: masks made from it change nothing."""
        at = torch.arange(ids.shape[1], device=self.device)

        def mask_of(reach: Reach) -> Tensor:
            seen = reach.visible(at[:, None], at)
            mask = torch.zeros(seen.shape, dtype=self.activation_dtype, device=self.device)
            return mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)[None, None]

        try:
            states = self.hidden(ids, attention_mask=masks_of(reaches, mask_of))
        except Exception:  # a model that takes one mask, or one that takes several
            return False
        return _apart(states, expected, torch.ones(ids.shape, dtype=torch.bool)) < _SAME[self.dtype]

    @torch.no_grad()
    def _is_computed_by_sdpa(self) -> bool:
        """Return whether SDPA computes this model's attention: it knows no soft caps and no sinks."""
        config = self.model.config.get_text_config()
        ids = torch.arange(1, 9, device=self.device)[None] % self.vocabulary_size
        with recorded_options() as unknown:
            states = self.hidden(ids)
        with using_attention(config, "eager"):
            eager = self.hidden(ids)
        everywhere = torch.ones(ids.shape, dtype=torch.bool)
        return not unknown and _apart(states, eager, everywhere) < max(10 * _SAME[self.dtype], 1e-3)

    @torch.no_grad()
    def _can_flatten(self) -> bool:
        """Return whether rows in one line have the hidden states of padded ones: nothing but attention mixes tokens.

        It is tried out, since a layer of another kind (a convolution, a state) would mix neighbours of the line.
        """
        config = self.model.config.get_text_config()
        if getattr(config, "num_kv_shared_layers", None):
            return False  # decoding looks up each layer's own keys and values
        if self.model.config._attn_implementation != "sdpa" or self.options.torch_compiler is not None:
            return False
        with self.narrowed():
            return self._computes_flat()

    def _computes_flat(self) -> bool:
        ids = torch.arange(1, 37).reshape(3, 12) % self.vocabulary_size
        ids[1, :9] = ids[0, :9]  # two rows with one beginning, and one without
        lengths = torch.tensor([12, 11, 7])
        rows = flatten([PaddedRows(ids, lengths, token_tree(ids, lengths))], self.activation_dtype, exact=True)
        rows = rows.to(self.device)
        try:
            flat = self.flat(rows)[rows.sources[0].to(self.device)]
            self.flat(rows, past_key_values=PromptLine(self.num_layers))
        except Exception:  # models fail in many ways if they do not know our mask, or have a cache of their own kind
            return False
        usual, keep = self.hidden(ids.to(self.device)), torch.arange(12) < lengths[:, None]
        return _apart(flat, usual, keep.to(self.device)) < _SAME[self.dtype]

    @torch.no_grad()
    def _check_packing(self) -> None:
        """Raise ConfigError unless packed rows have the same hidden states as rows on their own."""
        ids = (torch.arange(1, 19, device=self.device).reshape(2, 9) % self.vocabulary_size).repeat(2, 1)
        lengths = torch.tensor([9, 4, 9, 4], device=self.device)  # the two short ones share a packed row
        together, alone = self.packed(ids, lengths, (4,), lambda rows: nullcontext()), self.hidden(ids)
        keep = torch.arange(9, device=self.device)[None] < lengths[:, None]
        apart = _apart(together, alone, keep)
        # Not >=, which is False for NaN.
        if not apart < _SAME[self.dtype]:
            raise ConfigError(
                f"use_sequence_packing=True: {type(self.model).__name__} with attn_implementation="
                f"{self.model.config._attn_implementation!r} lets packed rows attend to each other (relative "
                f"difference {apart:.2g}); leave it out, or use attn_implementation='sdpa'"
            )


def _apart(states: Tensor, usual: Tensor, keep: Tensor) -> float:
    """Return the largest difference relative to the largest value."""
    return float((states - usual)[keep].abs().max() / usual[keep].abs().max().clamp(min=1e-6))


_SAME = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.02}
"""Largest relative difference between two ways to compute the same hidden states."""
_ELSEWHERE = "a .gguf file, a name on the Hugging Face hub that is reachable, or 'embedded'"
_OVERFLOW = "its numbers overflow in this data type; use a wider one (training.dtype, or dtype=)"


def _repeat_bits() -> None:
    """Let the same command compute the same bits on a GPU, so that a resumed run is the run that was not stopped.

    The backward pass of memory-efficient attention adds in any order unless torch is told so, without ``warn_only``.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
    # Else every torch.empty would be filled as well, by a kernel of its own.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def load_base(
    name: str, *, dtype: str = "auto", device: str | torch.device = "cpu", options: SharedOptions | None = None
) -> BaseModel:
    """Load a base model from a local folder, a hub name or ``embedded``, with the given options applied.

    Only the text part of a multimodal model is used. Weights are read from safetensors only, and no code of the model's
    repository is run. On a CUDA device torch is told to use deterministic algorithms, in the whole process;
    ``torch.use_deterministic_algorithms(False)`` afterwards takes that back. Raises ConfigError if there is no such
    folder and the hub does not answer, or if the files are damaged or incomplete; EngineError if the model's logits are
    not finite.
    """
    check_device(device)
    where = torch.device(device)
    if where.type == "cuda":
        _repeat_bits()
        if where.index is not None:
            # FSDP2 and Triton's kernels work on the current device, whichever one the weights are on.
            torch.cuda.set_device(where)
    path, file = resolve_model(name), Path(name).expanduser()
    options = options or SharedOptions()
    overrides = dict(options.config_overrides or {})
    dtype = overridden_dtype(dtype, overrides)
    attention = options.attn_implementation or overrides.pop("attn_implementation", None)
    check_attention("attn_implementation", attention)
    # On a CPU "auto" means fp32: many CPUs have no bf16, and learning has not been compared over seeds.
    chosen = ("float32" if where.type == "cpu" else "auto") if dtype == "auto" else dtype
    expected = f"a local folder with config.json and *.safetensors, {_ELSEWHERE}"
    with loading("the model", name, expected, of_hub=is_of_hub(name)):
        config = model_config(path, overrides)
        quantisation_in(config)  # transformers would ask for the method's package first
        stored = str(config.dtype or "float32").removeprefix("torch.") if chosen == "auto" else chosen
        quantised = loading_arguments(options.quantization_config, str(device), stored)
        if file.is_file():
            path = str(base_folder(file, stored))
        on_host = where.type == "cpu" and not quantised
        width = getattr(torch, chosen).itemsize if on_host else 0.125  # a bit: no format stores less of a parameter
        model = load_whole(path, name, config, width, dtype=chosen, **quantised)
        if not quantised:
            model = model.to(device)
            if model.dtype == torch.bfloat16 and where.type == "cpu":
                round_products(model)
    base = from_model(model, name)
    base.source, base.original = path, name if file.is_file() else path
    choose_attention(model, attention, base.device)
    base.check_head()
    return base


_SAMPLE = 64
"""Numbers of each tensor that a fingerprint reads: enough to notice further training, and cheap for a large base."""


def fingerprint(model: nn.Module) -> str:
    """Return the type of a model's weights and a digest of some numbers of each: equal for equal models."""
    digest = hashlib.blake2b(digest_size=16)
    types = set()
    # Without the wrapper of an adapter, if another runtime has attached one.
    weights = {name.replace(".base_layer.", "."): weight for name, weight in model.named_parameters()}
    for name, weight in sorted(weights.items()):
        types.add(str(weight.dtype).removeprefix("torch."))
        digest.update(f"{name} {tuple(weight.shape)}".encode())
        if weight.device.type != "meta":
            flat = weight.detach().reshape(-1)
            # As bytes: numpy has no bfloat16.
            digest.update(flat[:: max(1, len(flat) // _SAMPLE)].cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return f"{'+'.join(sorted(types))}:{digest.hexdigest()}"


def tokenizer_fingerprint(tokenizer: Any) -> str | None:
    """Return a digest of a tokenizer's vocabulary, special tokens and chat template; None without a tokenizer."""
    if tokenizer is None:
        return None
    parts = [
        sorted(tokenizer.get_vocab().items()),
        tokenizer.all_special_ids,
        getattr(tokenizer, "chat_template", None),
        sorted(settings_of(tokenizer)["chat_template_kwargs"].items()),
    ]
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def check_network(model: Any) -> None:
    """Raise ConfigError unless an object is a causal language model of Hugging Face."""
    if not isinstance(model, nn.Module) or not hasattr(model, "get_output_embeddings") or not hasattr(model, "config"):
        raise ConfigError(
            f"actor_network must be a Hugging Face causal language model, found {described(model)}; pass "
            "AutoModelForCausalLM.from_pretrained(...), or give its name as model_name"
        )


def from_model(model: Any, name: str | None = None) -> BaseModel:
    """Wrap a plain pretrained model that the user has loaded."""
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "actor_network must be a plain pretrained model, found a PeftModel; pass the model it was built on "
            "(model.get_base_model() after unload()) and give the adapter's settings as lora_config"
        )
    check_network(model)
    return BaseModel(model, body_of(model), name or str(getattr(model, "name_or_path", "") or ""))


def is_of_hub(name: str) -> bool:
    """Return whether a base is named as on the hub, and not embedded or at a path."""
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or Path(name).expanduser().exists()
    return name != EMBEDDED and not is_path


def resolve_model(name: str) -> str:
    """Return where transformers finds the configuration and tokenizer of a base: a folder, or its name on the hub.

    A GGUF file leads to its folder in the cache, which has no weights (:func:`load_base` has them written). Raises
    ConfigError for a name that looks like a path and is not a model's.
    """
    if sys.flags.optimize > 1:
        raise ConfigError(
            "Python runs without docstrings, which transformers reads; unset PYTHONOPTIMIZE, and leave out -OO"
        )
    if name == EMBEDDED:
        return str(tiny_model_path())
    if is_of_hub(name):
        return name
    path = Path(name).expanduser()
    if path.is_file():
        path = base_folder(path)
    if not path.is_dir():
        raise ConfigError(
            f"no model folder at {name!r}; expected a folder with config.json and *.safetensors or a .gguf file "
            "(network.pretrained_model_name_or_path), a hub name, or 'embedded'"
        )
    config = path / "config.json"
    if not config.exists() or config.is_dir():
        raise ConfigError(f"the folder {name!r} has no config.json, so it is not a Hugging Face model")
    check_model_folder(path)
    return str(path)


def load_tokenizer(
    name: str,
    *,
    pad_token: str | None = None,
    pad_token_id: int | None = None,
    chat_template_path: str | os.PathLike[str] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Load the tokenizer of a base model, with a pad token (``with_padding``) and a template (``with_chat_template``).

    Raises ConfigError if it is missing or damaged, for a pad token that it does not have, and for a wrong template.
    """
    from transformers import AutoTokenizer

    path = resolve_model(name)
    expected = f"a local folder with tokenizer.json and tokenizer_config.json, {_ELSEWHERE}"
    with loading("a tokenizer from", name, expected, of_hub=is_of_hub(name)):
        check_config(path)
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        check_tokenizer_parts(tokenizer, name)
    padded = with_padding(tokenizer, name, pad_token=pad_token, pad_token_id=pad_token_id)
    return with_chat_template(padded, chat_template_path, chat_template_kwargs)


def check_device(device: Any, name: str = "device") -> None:
    """Raise ConfigError for anything but a torch device, and for a GPU that this machine or torch build lacks."""
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        raise ConfigError(f"expected {name} as cpu, cuda or cuda:1, found {shown(device)}") from None
    if wanted.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (wanted.index or 0) >= count:
            raise ConfigError(
                f"{name}={shown(device)} needs a CUDA build of torch and that GPU, found {count} GPUs; use cpu"
            )
    elif wanted.type != "cpu":
        try:
            torch.zeros(1, device=wanted).item()
        except Exception as error:  # the type depends on the backend of that device
            raise ConfigError(f"{name}={shown(device)} cannot be used: {reason(error)}; use cpu or cuda") from None
