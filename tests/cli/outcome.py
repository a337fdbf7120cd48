"""What a call of the command line ends with."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    code: int
    output: str
    errors: str
