"""The settings of a run and of its parts: typed, checked, and without torch."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of the manifest: unknown keys, infinity and NaN are errors."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
