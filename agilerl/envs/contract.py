"""The laws of an environment as tests for custom environments; needs pytest-like collection and hypothesis.

    import pytest
    from agilerl.envs.contract import LAWS

    @pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
    def test_my_environment(law):
        law(MyEnv)

Each law takes a factory, which returns a new environment, and raises AssertionError if it does not hold.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agilerl.envs.adapters import as_text_env
from agilerl.envs.check import ODD_ACTIONS, check_env, check_result
from agilerl.envs.text_env import TextEnv

Factory = Callable[[], Any]
_SEEDS = st.integers(min_value=0, max_value=2**31)


def check_env_finds_no_error(factory: Factory) -> None:
    """``check_env`` finds nothing worse than warnings."""
    errors = [str(finding) for finding in check_env(factory) if finding.level == "error"]
    assert not errors, "\n".join(errors)


def any_text_is_answered(factory: Factory) -> None:
    """For any text as the action, a step returns a valid five-tuple, whose observation is in the observation space."""
    env = as_text_env(factory())

    def law(seed: int, actions: list[str]) -> None:
        for result in _episode(env, seed, actions):
            problems = list(map(str, check_result(env, "reset" if len(result) == 2 else "step", result)))
            assert not problems, "\n".join(problems)

    _fuzz(env, law, seed=_SEEDS)


def episodes_end_within_max_turns(factory: Factory) -> None:
    """An episode is over after ``max_turns`` actions at the latest, even if all are nonsense."""
    env = as_text_env(factory())
    for action in ("", ODD_ACTIONS[-1]):
        last = _episode(env, 0, [action] * env.max_turns)[-1]
        assert last[2] or last[3], f"the episode continues after {env.max_turns} times {action!r}"
    env.close()


def episodes_are_functions_of_seed_and_actions(factory: Factory) -> None:
    """Equal seeds and actions give equal episodes, in any instance and order, whatever was played before."""
    env, other = as_text_env(factory()), as_text_env(factory())

    def law(seeds: list[int], actions: list[str]) -> None:
        played = {seed: _episode(env, seed, actions) for seed in seeds}
        # In the opposite order, so that what an episode leaves behind for the next one shows.
        for seed in reversed(seeds):
            assert _episode(other, seed, actions) == played[seed]

    _fuzz(env, law, seeds=st.lists(_SEEDS, min_size=2, max_size=3))
    other.close()


def instances_do_not_disturb_each_other(factory: Factory) -> None:
    """Two interleaved episodes are the same as if played one after the other."""
    envs = [as_text_env(factory()), as_text_env(factory())]
    envs[0].action_space.seed(0)
    actions = [str(envs[0].action_space.sample()) for _ in range(min(envs[0].max_turns, 20))]
    alone = [_episode(env, seed, actions) for seed, env in enumerate(envs)]
    together = [_episode(env, seed, ()) for seed, env in enumerate(envs)]
    for turn, action in enumerate(actions, 1):
        for seed, env in enumerate(envs):
            # An episode that is over takes no further step; the other one continues.
            if turn < len(alone[seed]):
                together[seed].append(env.step(action))
    assert together == alone
    for env in envs:
        env.close()


LAWS: Sequence[Callable[[Factory], None]] = (
    check_env_finds_no_error,
    any_text_is_answered,
    episodes_end_within_max_turns,
    episodes_are_functions_of_seed_and_actions,
    instances_do_not_disturb_each_other,
)
"""All laws; each takes a factory of environments."""


def _fuzz(env: TextEnv, law: Callable[..., None], **strategies: st.SearchStrategy[Any]) -> None:
    """Call a law with drawn values and actions (any text, awkward ones, samples of the space), then close ``env``."""
    env.action_space.seed(0)
    samples = [str(env.action_space.sample()) for _ in range(20)]
    one = st.one_of(st.sampled_from(samples), st.sampled_from(ODD_ACTIONS), st.text(max_size=40))
    actions = st.lists(one, min_size=1, max_size=min(env.max_turns, 20))
    # The same examples everywhere, and no files left behind; environments may be slow.
    same = settings(
        max_examples=25, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    same(given(actions=actions, **strategies)(law))()
    env.close()


def _episode(env: TextEnv, seed: int, actions: Sequence[str]) -> list[Any]:
    """Return what ``reset`` and each ``step`` return, until the episode is over or the actions run out."""
    results: list[Any] = [(env.reset(seed=seed)[0], {})]  # the info of a reset may differ
    for action in actions:
        results.append(env.step(action))
        if results[-1][2] or results[-1][3]:
            break
    return results
