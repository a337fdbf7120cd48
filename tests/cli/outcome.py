"""What a call of the command line ends with."""

import re
from collections.abc import Callable
from dataclasses import dataclass

ANNOUNCED = re.compile(r"(Starting a run of|Checking|Resuming) .*: loading the libraries and the model\.\n")
"""What `agilerl train` and `resume` say before they load anything, once the command line names what there is."""


@dataclass(frozen=True)
class Outcome:
    code: int
    output: str
    errors: str

    @property
    def results(self) -> str:
        """The output without the line that says what is about to be loaded."""
        return ANNOUNCED.sub("", self.output, count=1)


Agilerl = Callable[..., Outcome]
"""The command line in this process, as the fixture ``agilerl`` gives it."""
