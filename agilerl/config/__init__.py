"""The settings of a run and of its parts: typed, checked, and without torch."""

from typing import Any

from pydantic import model_validator

from agilerl.checks.arguments import shown
from agilerl.checks.redaction import keys_in_addresses, texts_in
from agilerl.checks.validation import Settings


class Section(Settings):
    """A part of the manifest."""

    @model_validator(mode="before")
    @classmethod
    def _can_be_written(cls, values: Any) -> Any:
        """Refuse addresses with a key, and halves of characters: settings go to files, trackers and servers."""
        for path, text in texts_in(values):
            if any("\ud800" <= character <= "\udfff" for character in path + text):
                raise ValueError(f"{shown(path)}: expected text, found half of a character in it; write it whole")
        for path in keys_in_addresses(values):
            raise ValueError(
                f"{path}: an address with a user, a query or a fragment may hold a key, and settings are written down; "
                "leave that part out, and put a key into an environment variable"
            )
        return values
