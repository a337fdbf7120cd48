"""The built-in environments obey the laws, and an environment that breaks a law does not."""

import random
from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from agilerl.envs import GuessTheNumber
from agilerl.envs.contract import LAWS
from tests.contracts.env_contract import BUILT_IN


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_law(law: Any, name: str) -> None:
    law(BUILT_IN[name])


class OfAnyKind(GuessTheNumber):
    """Draws from a global generator."""

    def begin(self) -> str:
        return super().begin()[:-1] + random.choice("123456789")


class Shared(GuessTheNumber):
    """Keeps its state in the class."""

    state: ClassVar[dict[str, int]] = {}

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        begun = super().reset(seed=seed, options=options)
        Shared.state["number"] = self._number
        return begun

    def step(self, action: str) -> Any:
        self._number = Shared.state["number"]
        return super().step(action)


class Fragile(GuessTheNumber):
    """Takes numbers only."""

    def step(self, action: str) -> Any:
        int(action)
        return super().step(action)


class Talkative(GuessTheNumber):
    """Sends what its space does not contain."""

    def step(self, action: str) -> Any:
        return (f"{action}!", *super().step(action)[1:])


class Endless(GuessTheNumber):
    """Says one limit and has another."""

    def reset(self, *, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Any:
        begun = super().reset(seed=seed, options=options)
        self._turn = -5
        return begun


@pytest.mark.parametrize(
    ("broken", "laws"),
    [
        (OfAnyKind, {"episodes_are_functions_of_seed_and_actions"}),
        (Shared, {"instances_do_not_disturb_each_other"}),
        (Fragile, {"any_text_is_answered", "episodes_end_within_max_turns"}),
        (Talkative, {"any_text_is_answered"}),
        (Endless, {"episodes_end_within_max_turns"}),
    ],
)
def test_each_law_catches_what_it_is_for(broken: Any, laws: set[str]) -> None:
    caught = set()
    for law in LAWS:
        try:
            law(broken)
        except (AssertionError, ValueError):  # a law, or the environment itself
            caught.add(law.__name__)
    assert caught >= laws
    assert ("check_env_finds_no_error" in caught) is (broken is not Shared)
