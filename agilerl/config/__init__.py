"""The settings of a run and of its parts: typed, checked, and without torch."""

from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from agilerl.checks.arguments import shown
from agilerl.checks.redaction import keys_in_addresses, texts_in
from agilerl.checks.validation import checked_numbers


class Section(BaseModel):
    """A part of the manifest: unknown keys, infinity and NaN are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    # Pydantic makes 1 of true, and takes integers of any size.
    _numbers = field_validator("*", mode="wrap")(checked_numbers)

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
