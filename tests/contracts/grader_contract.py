"""The contract of graders as a test class: subclass it, give ``case``, and pytest runs every check.

The checks themselves are ``agilerl.rewards.contract``, which an installed package has.
"""

from collections.abc import Callable

import pytest

from agilerl.rewards import GRADER_CHECKS, GraderCase


class GraderContract:
    """What every grader owes its callers."""

    @pytest.fixture
    def case(self) -> GraderCase:
        """A grader with completions and rows."""
        raise NotImplementedError("a subclass gives the fixture case: GraderCase(grader, completions, rows)")

    @pytest.mark.parametrize("check", GRADER_CHECKS, ids=lambda check: check.__name__)
    def test_contract(self, case: GraderCase, check: Callable[[GraderCase], None]) -> None:
        check(case)
