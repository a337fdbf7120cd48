"""The one frozen base model: loading it, checking it, and its two halves, body and head."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from agilerl.errors import ConfigError, EngineError
from agilerl.functional import linear_logprobs
from agilerl.models.slots import LinearShape

__all__ = ["EMBEDDED", "BaseModel", "load_base", "load_tokenizer", "lora_layers"]

EMBEDDED = "embedded"
"""The name that stands for the tiny model shipped inside the package."""


@dataclass
class BaseModel:
    """A frozen causal language model split at its head, so that logits need never exist for a whole batch."""

    model: Any
    """The Hugging Face model; LoRA layers are attached inside it."""
    body: nn.Module
    """Maps token ids ``[B, T]`` to hidden states ``[B, T, H]``."""
    name: str
    """The name it was asked for by: a folder, a hub name or ``embedded``."""
    source: str = ""
    """Where transformers finds it, as written into exported adapters; empty means ``name``."""

    def __post_init__(self) -> None:
        self.source = self.source or self.name
        self.model.requires_grad_(False)
        self.model.eval()  # dropout in a frozen base would make the policy differ from its own rollouts
        head = self.model.get_output_embeddings()
        if head is None:
            raise EngineError(f"{type(self.model).__name__} has no language-model head; expected a causal LM")
        self._head = head
        config = self.model.config.get_text_config()
        self._softcap = getattr(config, "final_logit_softcapping", None)
        self._scale = _logit_scale(config)
        sliding = getattr(config, "sliding_window", None)
        if sliding and "sliding_attention" in (getattr(config, "layer_types", None) or []):
            self.context_length = int(sliding)
        else:
            self.context_length = int(getattr(config, "max_position_embeddings", 1 << 20))
        self.vocabulary_size = int(head.weight.shape[0])
        self.num_layers = int(config.num_hidden_layers)
        self.hidden_size = int(head.weight.shape[1])

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
        """Number of frozen parameters."""
        return sum(p.numel() for p in self.model.parameters())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the frozen parameters."""
        return sum(p.numel() * p.element_size() for p in self.model.parameters())

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a completion, from the generation configuration."""
        generation = getattr(self.model, "generation_config", None)
        eos = generation.eos_token_id if generation is not None and generation.eos_token_id is not None else None
        eos = self.model.config.get_text_config().eos_token_id if eos is None else eos
        if eos is None:
            return ()
        return tuple(eos) if isinstance(eos, Sequence) else (int(eos),)

    def hidden(self, ids: Tensor, **kwargs: Any) -> Tensor:
        """Return the last hidden states ``[B, T, H]`` of right-padded ids ``[B, T]``.

        No padding mask is needed: attention is causal and the padding lies to the right of every real token.
        """
        return cast(Tensor, self.body(input_ids=ids, use_cache=kwargs.get("past_key_values") is not None, **kwargs)[0])

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits ``[M, V]`` in fp32 of hidden states ``[M, H]``."""
        logits = self._head(hidden).float() * self._scale
        return cast(Tensor, logits if self._softcap is None else self._softcap * torch.tanh(logits / self._softcap))

    def logprobs(
        self, hidden: Tensor, targets: Tensor, temperature: Tensor | float, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probs ``[M]`` of targets (and the entropy) from hidden ``[M, H]`` without storing ``[M, V]``."""
        return linear_logprobs(
            hidden,
            self._head.weight,
            targets,
            bias=getattr(self._head, "bias", None),
            temperature=temperature,
            softcap=self._softcap,
            scale=self._scale,
            entropy=entropy,
        )

    def check_head(self) -> None:
        """Compare body + head with the model's own logits on a few tokens.

        Raises EngineError for an architecture whose head does something else, rather than training on wrong numbers.
        """
        ids = torch.arange(1, 9, device=self.device)[None] % self.vocabulary_size
        with torch.no_grad():
            own, full = self.logits(self.hidden(ids)[0]), self.model(input_ids=ids).logits[0].float()
        if not torch.allclose(own, full, atol=1e-3, rtol=1e-3):
            raise EngineError(
                f"{type(self.model).__name__} computes its logits in a way this package does not know "
                f"(largest difference {float((own - full).abs().max()):.3g}); it cannot be trained correctly"
            )


def _logit_scale(config: Any) -> float:
    """Cohere multiplies its logits by ``logit_scale``, Granite divides them by ``logits_scaling``."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)


def load_base(name: str, *, dtype: str = "auto", device: str = "cpu") -> BaseModel:
    """Load a base model from a local folder, a hub name or ``embedded``.

    Raises ConfigError when there is no such folder and the hub does not answer. Weights come from safetensors only,
    and no code of the model's repository is run.
    """
    from transformers import AutoModelForCausalLM

    path = resolve_model(name)
    # Half precision on a CPU is slow and loses what the tiny adapters learn: "auto" means fp32 there.
    chosen = ("float32" if torch.device(device).type == "cpu" else "auto") if dtype == "auto" else dtype
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=chosen, use_safetensors=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(_missing(name, error)) from error
    base = from_model(model.to(device), name)
    base.source = path
    base.check_head()
    return base


def from_model(model: Any, name: str | None = None) -> BaseModel:
    """Wrap a plain pretrained model that the user has loaded."""
    if hasattr(model, "peft_config"):
        raise ConfigError(
            "actor_network must be a plain pretrained model, found a PeftModel; pass the model it was built on "
            "(model.get_base_model() after unload()) and give the adapter's settings as lora_config"
        )
    if not hasattr(model, "get_output_embeddings"):
        raise ConfigError(f"actor_network must be a Hugging Face causal language model, found {type(model).__name__}")
    body = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    return BaseModel(model, body, name or str(getattr(model, "name_or_path", "") or ""))


def resolve_model(name: str) -> str:
    """Turn ``embedded`` into the shipped folder; check that what looks like a folder is one that holds a model."""
    if name == EMBEDDED:
        from agilerl.models.tiny import tiny_model_path

        return str(tiny_model_path())
    path = Path(name).expanduser()
    looks_local = name.startswith((".", "/", "~")) or path.exists() or name.count("/") > 1
    if looks_local:
        if not path.is_dir():
            raise ConfigError(
                f"no model folder at {name!r}; expected a folder with config.json and *.safetensors "
                "(network.pretrained_model_name_or_path), a hub name, or 'embedded'"
            )
        if not (path / "config.json").is_file():
            raise ConfigError(f"the folder {name!r} holds no config.json, so it is no Hugging Face model")
    return str(path) if looks_local else name


def _missing(name: str, error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"cannot load the model {name!r}: {first} Expected a local folder with config.json and *.safetensors, "
        "a name on the Hugging Face hub that is reachable, or 'embedded'"
    )


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer that belongs to a base model.

    Raises ConfigError when it is missing or has no pad token (padding with a token that means something would
    silently change what the model is trained on).
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve_model(name), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot load a tokenizer from {name!r}: {str(error).splitlines()[0]}") from error
    if tokenizer.pad_token_id is None:
        raise ConfigError(
            f"the tokenizer of {name!r} has no pad token; set one and save it again, for instance "
            "tokenizer.pad_token = tokenizer.eos_token; tokenizer.save_pretrained(folder)"
        )
    return tokenizer


def lora_layers(model: Any, lora_config: Any) -> list[LinearShape]:
    """Return the linear layers that a ``peft.LoraConfig`` targets, in module order, as PEFT itself would choose."""
    from peft.tuners.tuners_utils import _maybe_include_all_linear_layers, check_target_module_exists
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING

    config = copy.deepcopy(lora_config)
    if config.target_modules is None:
        config.target_modules = TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(
            model.config.model_type, "all-linear"
        )
    config = _maybe_include_all_linear_layers(config, model)
    shapes = []
    for name, module in model.named_modules():
        if not name or not check_target_module_exists(config, name):
            continue
        if not hasattr(module, "in_features") or not hasattr(module, "out_features"):
            raise ConfigError(
                f"lora_config targets {name!r}, a {type(module).__name__}; only linear layers can carry an adapter"
            )
        shapes.append(LinearShape(name, int(module.in_features), int(module.out_features)))
    if not shapes:
        raise ConfigError(f"lora_config.target_modules={lora_config.target_modules!r} matches no layer of the model")
    return shapes
