"""The openenv adapter against the real package: an environment in this process, and one on a server on loopback."""

import socket
import threading
import time
from typing import Any, ClassVar

import pytest

from agilerl.envs import GuessTheNumber
from agilerl.envs.adapters import as_text_env, make_env
from agilerl.envs.check import check_env
from agilerl.errors import ConfigError, EnvError

openenv = pytest.importorskip("openenv.core", reason="the package openenv is not installed; make setup installs it")
uvicorn = pytest.importorskip("uvicorn", reason="openenv's server needs uvicorn")

from agilerl.envs.adapters.openenv import OpenEnv  # noqa: E402


class Guess(openenv.Action):
    message: str


class Hint(openenv.Observation):
    text: str
    turn: int = 0


class Server(openenv.Environment):
    """Guess the number, as an openenv environment."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    closed: ClassVar[int] = 0

    def __init__(self) -> None:
        super().__init__()
        self.game = GuessTheNumber(style="hint")
        self.turn = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self.turn = 0
        return Hint(text=self.game.reset(seed=seed)[0])

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self.turn += 1
        observation, reward, done, _, _ = self.game.step(action.message)
        return Hint(text=observation, turn=self.turn, reward=reward if done else None, done=done)

    @property
    def state(self) -> openenv.State:
        return openenv.State(step_count=self.turn)

    def close(self) -> None:
        Server.closed += 1


@pytest.fixture(scope="module")
def url():
    app = openenv.create_fastapi_app(Server, Guess, Hint, max_concurrent_envs=8)
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    server.should_exit = True
    thread.join(timeout=20)
    listening.close()


def episode(env, seed, actions):
    seen = [env.reset(seed=seed)[0]]
    for action in actions:
        seen.append(env.step(action)[:4])
        if seen[-1][2] or seen[-1][3]:
            break
    return seen


ACTIONS = ("5", "?", "2", "7")


def expected(seed):
    """What the same game says without openenv."""
    return episode(GuessTheNumber(style="hint"), seed, ACTIONS)


def test_in_this_process():
    env = as_text_env(Server(), max_turns=4)
    assert isinstance(env, OpenEnv)
    assert [episode(env, seed, ACTIONS) for seed in range(6)] == [expected(seed) for seed in range(6)]
    closed = Server.closed
    env.close()
    assert Server.closed == closed + 1
    assert check_env(lambda: OpenEnv(Server(), 4)) == []


def test_over_a_server_on_loopback(url):
    first, second = make_env(f"openenv:{url}", max_turns=4), make_env(f"openenv:{url}", max_turns=4)
    assert [episode(first, seed, ACTIONS) for seed in range(6)] == [expected(seed) for seed in range(6)]
    first.reset(seed=0)
    second.reset(seed=1)  # two clients are two sessions
    assert first.step(first_best(0))[0] != "?"
    assert episode(second, 1, ACTIONS) == expected(1)
    first.close()
    second.close()


def first_best(seed):
    game = GuessTheNumber()
    game.reset(seed=seed)
    return game.best_action()


def test_clients_of_either_kind_and_own_conversions(url):
    client = openenv.GenericEnvClient(base_url=url)
    assert episode(as_text_env(client, max_turns=4), 2, ACTIONS) == expected(2)
    client.sync().close()
    own = OpenEnv(
        openenv.GenericEnvClient(base_url=url).sync(),
        max_turns=2,
        action=lambda text: {"message": text.upper()},
        observation=lambda seen: f"{seen['turn']}: {seen['text']}",
    )
    assert own.reset(seed=0)[0] == "0: 1-9"
    assert own.step("x") == ("1: ?", 0.0, False, False, {})
    assert own.step("x")[2:4] == (False, True)  # max_turns of the adapter
    own.close()


def test_an_action_that_the_server_refuses_raises(url):
    env = OpenEnv(openenv.GenericEnvClient(base_url=url), 4, action=lambda text: {"wrong": text})
    env.reset(seed=0)
    with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
        env.step("5")
    env.close()


class Two(Server):
    """Its action has two texts, its observation none."""

    def step(self, action: "TwoTexts", timeout_s: float | None = None, **kwargs: Any) -> Hint:
        return super().step(action)


class TwoTexts(openenv.Action):
    message: str
    reason: str


class Silent(openenv.Observation):
    number: int = 0


class NoText(Server):
    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Silent:
        return Silent()


class Unsaid(Server):
    def step(self, action, timeout_s=None, **kwargs):  # no annotation
        return super().step(action)


def test_what_cannot_be_found_out_is_said():
    with pytest.raises(ConfigError, match=r"Server: expected .*max_turns"):
        as_text_env(Server())
    with pytest.raises(ConfigError, match=r"TwoTexts.*OpenEnv\("):
        as_text_env(Two(), max_turns=4)
    with pytest.raises(ConfigError, match=r"Unsaid\.step .*annotated"):
        as_text_env(Unsaid(), max_turns=4)
    with pytest.raises(EnvError, match=r"observation.*, found none .*number"):
        as_text_env(NoText(), max_turns=4).reset(seed=0)
    assert OpenEnv(Unsaid(), 4, action=lambda text: Guess(message=text)).reset(seed=0)[0] == "1-9"
