"""The base model and what all agents on it share: how it is loaded, computed and sampled from, and adapters' shape."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from agilerl.checks.validation import Needs, Settings
from agilerl.config import Section
from agilerl.config.vllm import VLLMConfig
from agilerl.errors import ConfigError


def _plain(value: Any) -> Any:
    """Turn a configuration object (``BitsAndBytesConfig``, ``VLLMConfig``) into what it was made of."""
    if isinstance(value, Settings):
        return value.set_values("json")
    to_dict = getattr(value, "to_dict", None)
    return to_dict() if callable(to_dict) else value


_Settings = Annotated[dict[str, Any] | None, BeforeValidator(_plain)]

AttentionKind = Literal["eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3"]

_SHORT: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True, "llm_int8_threshold": 0.0},
}
_BOOKKEEPING = ("quant_method", "_load_in_4bit", "_load_in_8bit")
"""What transformers adds to the settings of a BitsAndBytesConfig when it writes them down."""
_FIXED = {
    "bnb_4bit_quant_storage": "uint8",
    "llm_int8_enable_fp32_cpu_offload": False,
    "llm_int8_has_fp16_weight": False,
}
"""Settings of a BitsAndBytesConfig that have no other value here."""


def quantization_settings(value: Any) -> Any:
    """Accept ``nf4``, ``fp4``, ``int8``, a BitsAndBytesConfig and its settings; nothing loaded in few bits is None."""
    if isinstance(value, str):
        if value not in _SHORT:
            raise ValueError(f"expected nf4, fp4, int8 or the settings of a BitsAndBytesConfig, found {value!r}")
        return _SHORT[value]
    value = _plain(value)
    if not isinstance(value, Mapping):
        return value
    # A name that is not fixed is compared with the table itself, which no setting equals.
    return {name: s for name, s in value.items() if name not in _BOOKKEEPING and _FIXED.get(name, _FIXED) != s}


class _Options(Settings):
    model_config = ConfigDict(frozen=True)


class QuantizationConfig(_Options):
    """The settings of a ``transformers.BitsAndBytesConfig``, under its names."""

    load_in_4bit: bool = False
    """Keep the linear layers in 4 bits."""
    load_in_8bit: bool = False
    """Keep the linear layers in 8 bits."""
    bnb_4bit_quant_type: Literal["fp4", "nf4"] = "fp4"
    """The sixteen values of 4 bits: ``nf4`` suits weights that are normally distributed (arXiv 2305.14314)."""
    bnb_4bit_use_double_quant: bool = False
    """Quantise the scales too."""
    bnb_4bit_compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the products; None: that of the base's other weights."""
    llm_int8_threshold: Annotated[float, Field(ge=0)] = 6.0
    """Input columns with a larger number are computed in 16 bits; 0: none. Which these are depends on the whole
    batch, so other agents' rows change an agent's last bits; ``int8`` alone stands for 0."""
    llm_int8_skip_modules: list[str] | None = None
    """Modules that keep their type, besides the language-model head."""

    @model_validator(mode="after")
    def _one_of_two(self) -> Self:
        if self.load_in_4bit == self.load_in_8bit:
            raise ValueError("a quantization needs exactly one of load_in_4bit=True and load_in_8bit=True")
        return self


class SharedOptions(_Options):
    """Options that belong to the shared base and not to one agent; none of them is a gene."""

    quantization_config: Annotated[QuantizationConfig | None, BeforeValidator(quantization_settings)] = None
    """Load the base in 4 or 8 bits: ``nf4``, ``fp4``, ``int8``, a ``transformers.BitsAndBytesConfig`` or its settings.
    The language-model head and the embeddings keep their type."""
    config_overrides: _Settings = None
    """Settings of the model's own configuration to change while it is loaded by name (``dtype``,
    ``rope_scaling``, ...)."""
    attn_implementation: AttentionKind | None = None
    """How attention is computed; None: what transformers chooses, SDPA if the model has it."""
    lora_target_scope: str | None = None
    """Part of a module's path that adapted layers lie under, for instance ``language_model`` of a multimodal model."""
    gradient_checkpointing: bool = False
    """Keep the inputs of each layer instead of all activations, and compute the layer again in the backward pass."""
    activation_offload: bool = False
    """Keep what the backward pass needs in the memory of the host; without effect on a CPU."""
    torch_compiler: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] | None = None
    """Mode of ``torch.compile`` for the body of the base in training forwards; None: not compiled."""
    use_liger_kernel: bool = False
    """Liger's Triton kernels for RMSNorm, rotary embeddings and SwiGLU; they need a CUDA device."""
    use_sequence_packing: bool = False
    """Concatenate an agent's rows without padding, each attending to itself alone. SDPA needs none: it pads no rows."""
    cast_logprobs_to_fp32: bool = True
    """Reduce logits to log-probs in fp32; False does so in the type of the head, with its rounding."""
    fused_logprobs_chunk_rows: Annotated[int | None, Field(ge=16)] = None
    """Most rows of logits that exist at a time; None: 256 MB of fp32."""
    hf_generate_chunk_size: Annotated[int | None, Field(ge=1)] = None
    """Prompts decoded at once by the torch engine, all agents together; None: ``max_rows_in_flight`` alone decides."""
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)] | None = None
    """Texts that end a completion, besides end tokens: in training, in exams and in ``agent.generate``. The completion
    keeps the text."""
    use_vllm: bool = False
    """Sample with vLLM instead of the torch engine."""
    vllm_config: Annotated[VLLMConfig | None, BeforeValidator(_plain), Needs("use_vllm")] = None
    """A ``VLLMConfig``, or its settings."""
    use_memory_efficient_params: bool = True
    """Move the base to the host while a colocated vLLM engine samples; without effect otherwise."""


LOADING = ("quantization_config", "config_overrides", "attn_implementation", "lora_target_scope")
"""Options that have to be known when the base is loaded, or its adapters' bank is made."""


def contradiction(name: str, present: Any, given: Any) -> ConfigError:
    """Return the error of an agent that asks for what its base does not have."""
    return ConfigError(
        f"{name}={given!r} contradicts the base that this agent shares, which has {name}={present!r}: all agents on "
        "one base have the same; give it to the first of them (or to Runtime(options=...)), or load a separate base"
    )


class LoraSection(Section):
    """The adapters' shape."""

    r: Annotated[int, Field(ge=1)] = 16
    """Rank."""
    lora_alpha: Annotated[float, Field(gt=0, le=1e6)] = 32.0
    """The delta is scaled by alpha / r."""
    target_modules: str | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Layers that carry an adapter: ``all-linear``, a list of name endings, or one regular expression."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(r) instead."""
    init_lora_weights: Literal[True, "gaussian"] = True
    """How A starts, while B starts at 0: Kaiming-uniform, or normal with a standard deviation of 1 / r."""
    alora_invocation_tokens: (
        Annotated[str, Field(min_length=1)] | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)] | None
    ) = None
    """Activated adapters (arXiv 2504.12397): they act from the last of these tokens on; what precedes is computed
    once for all agents. Token ids, or a text; ``generation_prompt``: what the chat template puts before an answer.
    None: they act on the whole prompt."""
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that training leaves out at random."""


def with_layers_by_weight(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of a PEFT folder with layers that it names by their weights among ``target_modules``.

    Anything else in ``target_parameters`` stays there.
    """
    modules, weights = fields.get("target_modules") or [], fields.get("target_parameters") or []
    if not isinstance(modules, list) or not all(isinstance(w, str) and w.endswith(".weight") for w in weights):
        return fields
    named = [*modules, *(weight.removesuffix(".weight") for weight in weights)]
    return {**fields, "target_modules": named, "target_parameters": None}


class BaseSection(Section):
    """Which base model, with which tokenizer and adapters."""

    # vllm serve gets the name as an argument, and would take a leading hyphen for an option of its own.
    pretrained_model_name_or_path: Annotated[str, Field(pattern="^[^-]")] = "embedded"
    """Local folder, ``.gguf`` file, hub name, or ``embedded``: the tiny model inside the package."""
    pad_token: str | None = None
    """Token of the tokenizer that fills rows up; None: its pad token or, if it has none, its end token."""
    pad_token_id: Annotated[int | None, Field(ge=0)] = None
    """The same by number."""
    chat_template_path: Annotated[str | None, Field(min_length=1)] = None
    """File with a chat template instead of the tokenizer's own, in the folder of the manifest or below."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Values that the chat template reads by name: ``{enable_thinking: false}``."""
    adapter: str | None = None
    """Folder of a PEFT adapter that every agent starts from and is compared with as its reference policy."""
    lora_config: LoraSection = Field(default_factory=LoraSection)
    """The adapters."""

    @property
    def of_tokenizer(self) -> dict[str, Any]:
        """What was said of the pad token and of the chat template."""
        return {
            "pad_token": self.pad_token,
            "pad_token_id": self.pad_token_id,
            "chat_template_path": self.chat_template_path,
            "chat_template_kwargs": self.chat_template_kwargs,
        }


class NetworkConfig(SharedOptions, BaseSection):
    """The base model and its adapters, how it is loaded and computed, and what samples from it."""

    @property
    def options(self) -> SharedOptions:
        """How the base is loaded, computed and sampled from, as far as it was set."""
        names = [name for name in SharedOptions.model_fields if self.is_set(name)]
        return SharedOptions(**{name: getattr(self, name) for name in names})
