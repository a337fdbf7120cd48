"""The class by which AgileRL's programs load a model for PPO."""

from pathlib import Path
from typing import Any


class AutoModelForCausalLMWithValueHead:
    """Loads the plain model: PPO's critic is an adapter with a value head of its own, on the same base."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """Return the language model, which ``PPO(actor_network=...)`` takes; options of a value head are left out."""
        from transformers import AutoModelForCausalLM

        if not isinstance(pretrained_model_name_or_path, str | Path):
            return pretrained_model_name_or_path
        head = ("summary_dropout_prob", "v_head_initializer_range", "v_head_init_strategy")
        options = {name: value for name, value in kwargs.items() if name not in head}
        return AutoModelForCausalLM.from_pretrained(pretrained_model_name_or_path, **options)
