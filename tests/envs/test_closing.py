"""What was closed says so, or opens again; closing twice is nothing."""

from typing import Any

import pytest

from agilerl.compat.tokenized import SyncMultiTurnVecEnv, TokenObservationWrapper
from agilerl.envs.adapters import as_text_env
from agilerl.envs.tools import SearchTool
from agilerl.errors import EnvError
from tests.envs.scripted import Echo
from tests.envs.test_tokenized import complete


class Closing:
    """An environment that counts how often it is closed, and breaks if it is used afterwards."""

    max_turns = 3
    closed = 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        assert not self.closed
        return "1", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        assert not self.closed
        return "2", 0.0, False, False, {}

    def close(self) -> None:
        self.closed += 1


def test_a_closed_adapter_refuses_to_work() -> None:
    inner = Closing()
    env = as_text_env(inner)
    env.reset(seed=1)
    env.close()
    env.close()
    assert inner.closed == 1
    with pytest.raises(EnvError, match="closed"):
        env.reset(seed=2)
    with pytest.raises(EnvError, match="reset"):
        env.step("1")


def test_closed_wrappers_refuse_to_work(tokenizer: Any) -> None:
    inner = Closing()
    env = TokenObservationWrapper(inner, tokenizer, 3)
    prompt, _ = env.reset(seed=1)
    env.close()
    env.close()
    assert inner.closed == 1
    for use in (lambda: env.reset(seed=2), lambda: env.step(complete(tokenizer, prompt, "a"))):
        with pytest.raises(EnvError, match="closed"):
            use()
    vector = SyncMultiTurnVecEnv(lambda: TokenObservationWrapper(Echo(), tokenizer, 3), 2, 1)
    vector.reset()
    vector.close()
    vector.close()
    with pytest.raises(EnvError, match="closed"):
        vector.reset()


def test_a_search_tool_opens_its_connections_again() -> None:
    tool = SearchTool(search_url="http://127.0.0.1:9/search", timeout=0.2)
    tool.close()
    for _ in range(2):
        with pytest.raises(EnvError, match="did not answer"):
            tool.search("otter")
        tool.close()
        tool.close()
