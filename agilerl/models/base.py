"""The one frozen base model: loading it, checking it, and its two halves, body and head."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
        if not bool(torch.isfinite(full).all()):
            bad = next((n for n, p in self.model.named_parameters() if not bool(torch.isfinite(p).all())), None)
            raise EngineError(
                f"the model {self.name!r} computes logits that are not finite: "
                + (f"its weights {bad} hold NaN or infinity; take a sound copy" if bad else _OVERFLOW)
            )
        if not torch.allclose(own, full, atol=1e-3, rtol=1e-3):
            raise EngineError(
                f"{type(self.model).__name__} computes its logits in a way this package does not know "
                f"(largest difference {float((own - full).abs().max()):.3g}); it cannot be trained correctly"
            )


_OVERFLOW = "its numbers overflow in this data type; use a wider one (training.dtype, or dtype=)"


def _logit_scale(config: Any) -> float:
    """Cohere multiplies its logits by ``logit_scale``, Granite divides them by ``logits_scaling``."""
    return float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)


def load_base(name: str, *, dtype: str = "auto", device: str = "cpu") -> BaseModel:
    """Load a base model from a local folder, a hub name or ``embedded``.

    Raises ConfigError when there is no such folder and the hub does not answer, or the files are damaged or incomplete,
    EngineError where the model computes no finite logits. Weights come from safetensors only, and no code of the
    model's repository is run.
    """
    from transformers import AutoModelForCausalLM

    path = resolve_model(name)
    # Half precision on a CPU is slow and loses what the tiny adapters learn: "auto" means fp32 there.
    chosen = ("float32" if torch.device(device).type == "cpu" else "auto") if dtype == "auto" else dtype
    with _loading("the model", name, "a local folder with config.json and *.safetensors"):
        model, found = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=chosen,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # refused below, with their names
            output_loading_info=True,
        )
        model = model.to(device)
    _check_complete(name, found)
    base = from_model(model, name)
    base.source = path
    base.check_head()
    return base


def _check_complete(name: str, found: Mapping[str, Any]) -> None:
    """Raise ConfigError for weights that transformers would have left at random numbers; tied ones are not missing."""
    missing, mismatched = sorted(found["missing_keys"]), sorted(found["mismatched_keys"])
    if missing:
        raise ConfigError(
            f"the weights of {name!r} are incomplete: {_some(missing)} missing from its *.safetensors; take a complete "
            "copy, or the config.json that belongs to these weights"
        )
    if mismatched:
        key, there, expected = mismatched[0]
        raise ConfigError(
            f"the weights of {name!r} do not fit its config.json: {key} has shape {list(there)}, expected "
            f"{list(expected)}; take both from the same model"
        )


def _some(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - 1} more are" if len(keys) > 1 else " is"
    return f"{keys[0]}{more}"


@contextmanager
def _loading(what: str, name: str, expected: str) -> Iterator[None]:
    """Keep transformers' reports and bars to itself; whatever a damaged file makes it raise becomes one sentence."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    except Exception as error:  # of any library that reads files: no list of their errors is complete
        raise ConfigError(
            f"cannot load {what} {name!r}: {_reason(error)}; expected {expected}, a name on the Hugging Face hub "
            "that is reachable, or 'embedded'"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def _reason(error: Exception) -> str:
    """Return the beginning of an error's message as one line, its kind in front where that says more."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    # A line that ends in a colon only announces the next ones.
    count = next((i for i, line in enumerate(lines, 1) if line[-1] not in ":,"), len(lines))
    text = " ".join(lines[: max(count, 1)]).rstrip(".")
    return f"{type(error).__name__}: {text}" if not isinstance(error, OSError | ValueError) else text


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


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer that belongs to a base model.

    Raises ConfigError when it is missing or has no pad token (padding with a token that means something would
    silently change what the model is trained on).
    """
    from transformers import AutoTokenizer

    path = resolve_model(name)
    with _loading("a tokenizer from", name, "a local folder with tokenizer.json and tokenizer_config.json"):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
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
