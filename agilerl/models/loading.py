"""What loading a folder and converting a file have in common: silence, errors as sentences, complete weights."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from agilerl.addresses import is_out_of_reach
from agilerl.arguments import reason
from agilerl.errors import AgileRLError, ConfigError, lacks_memory


@contextmanager
def loading(what: str, name: str, expected: str, *, of_hub: bool = False) -> Iterator[None]:
    """Silence transformers' reports and progress bars, and turn any error it raises into a ConfigError."""
    from transformers.utils import logging

    verbosity, bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with _without_retries(of_hub):
            yield
    except AgileRLError:
        raise
    except Exception as error:  # any of several libraries that read files: no list of their errors is complete
        if lacks_memory(error):
            raise
        raise ConfigError(f"cannot load {what} {name!r}: {reason(error)}; expected {expected}") from error
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()


@contextmanager
def _without_retries(of_hub: bool) -> Iterator[None]:
    """Take a model of the hub from its cache alone, if the hub does not answer: its client would retry for a minute."""
    from huggingface_hub import constants

    kept = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = kept or (of_hub and is_out_of_reach())
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = kept


def check_complete(name: str, found: Mapping[str, Any]) -> None:
    """Raise ConfigError for weights that transformers has left at random values; tied weights are not missing."""
    missing, mismatched = sorted(found["missing_keys"]), sorted(found["mismatched_keys"])
    if missing:
        raise ConfigError(
            f"the weights of {name!r} are incomplete: {_some(missing)} missing from its files; use a complete "
            "copy, or the config.json that belongs to these weights"
        )
    if mismatched:
        key, there, expected = mismatched[0]
        raise ConfigError(
            f"the weights of {name!r} do not fit its config.json: {key} has shape {list(there)}, expected "
            f"{list(expected)}; use the two files of the same model"
        )


def _some(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - 1} more are" if len(keys) > 1 else " is"
    return f"{keys[0]}{more}"
