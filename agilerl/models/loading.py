"""What loading a folder and converting a file have in common: silence, errors as sentences, complete weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agilerl.addresses import is_out_of_reach
from agilerl.arguments import reason
from agilerl.errors import AgileRLError, ConfigError, lacks_memory
from agilerl.models.model_config import auto_class, check_size


@contextmanager
def loading(what: str, name: str, expected: str, *, of_hub: bool = False) -> Iterator[None]:
    """Silence transformers' reports and progress bars, and turn any error it raises into a ConfigError."""
    from huggingface_hub import constants
    from transformers.utils import logging

    verbosity, bar, offline = logging.get_verbosity(), logging.is_progress_bar_enabled(), constants.HF_HUB_OFFLINE
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        # If the hub does not answer, a model of it comes from its cache alone: its client would retry for a minute.
        constants.HF_HUB_OFFLINE = offline or (of_hub and is_out_of_reach())
        yield
    except AgileRLError:
        raise
    except Exception as error:  # any of several libraries that read files: no list of their errors is complete
        if lacks_memory(error):
            raise
        raise ConfigError(f"cannot load {what} {name!r}: {reason(error)}; expected {expected}") from error
    finally:
        constants.HF_HUB_OFFLINE = offline
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


def load_whole(path: str | Path, name: str, config: Any, width: float, **options: Any) -> Any:
    """Return a causal language model with the weights of its files, of which none may be missing.

    ``name`` is that of messages, ``width`` the least bytes of a parameter, ``options`` are those of from_pretrained.
    Raises ConfigError for weights that do not fit the memory or the configuration.
    """
    check_size(config, name, width)
    model, report = auto_class(config).from_pretrained(
        path,
        config=config,
        use_safetensors=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # reported below, by name
        output_loading_info=True,
        **options,
    )
    _check_complete(name, report)
    return model


def _check_complete(name: str, report: Mapping[str, Any]) -> None:
    """Raise ConfigError for weights that transformers has left at random values; tied weights are not missing."""
    missing, mismatched = sorted(report["missing_keys"]), sorted(report["mismatched_keys"])
    if missing:
        more = f" and {len(missing) - 1} more are" if len(missing) > 1 else " is"
        raise ConfigError(
            f"the weights of {name!r} are incomplete: {missing[0]}{more} missing from its files; use a complete copy, "
            "or the config.json that belongs to these weights"
        )
    if mismatched:
        key, stored, expected = mismatched[0]
        raise ConfigError(
            f"the weights of {name!r} do not fit its config.json: {key} has shape {list(stored)}, expected "
            f"{list(expected)}; use the two files of the same model"
        )
