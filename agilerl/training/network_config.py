"""The section ``network`` of a manifest."""

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from agilerl.shared_options import AttentionKind, QuantizationConfig, quantization_settings
from agilerl.training.environment_config import Section

__all__ = ["LoraSection", "NetworkConfig"]


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


class NetworkConfig(Section):
    """The base model."""

    pretrained_model_name_or_path: str = "embedded"
    """Local folder, hub name, or ``embedded``: the tiny model inside the package."""
    pad_token: str | None = None
    """Token of the tokenizer that fills rows up; None: its pad token or, if it has none, its end token."""
    pad_token_id: Annotated[int | None, Field(ge=0)] = None
    """The same by number."""
    max_context_length: Annotated[int | None, Field(ge=2)] = None
    """Most tokens of prompt and completion; None takes the model's own limit."""
    adapter: str | None = None
    """Folder of a PEFT adapter that every agent starts from and is compared with as its reference policy."""
    lora_config: LoraSection = Field(default_factory=LoraSection)
    """The adapters."""
    quantization: Annotated[QuantizationConfig | None, BeforeValidator(quantization_settings)] = None
    """``nf4``, ``fp4``, ``int8`` or the settings of a BitsAndBytesConfig: as ``algorithm.quantization_config``."""
    attn_implementation: AttentionKind | None = None
    """How attention is computed; the same as ``algorithm.attn_implementation``."""

    @property
    def padding(self) -> dict[str, Any]:
        """What was said of the pad token."""
        return {"pad_token": self.pad_token, "pad_token_id": self.pad_token_id}
