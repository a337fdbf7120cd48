import pytest

from tests.probes import ConditionalTarget, ConstantTarget, GridNavigation, MultiInputConditional

PROBES = [ConstantTarget, ConditionalTarget, MultiInputConditional]


def test_a_constant_answer_solves_only_the_constant_probe():
    for kind, solved in zip(PROBES, (True, False, False)):
        probe = kind()
        rows = [probe.row("exam", i) for i in range(probe.exam_prompts)]
        best = max(sum(probe.reward(str(d), row) for row in rows) / len(rows) for d in range(10))
        assert (best == 1.0) is solved
        assert best >= 1 / 3


def episode(env, seed, policy):
    observation, _ = env.reset(seed=seed)
    rewards, terminated = [], False
    while not terminated:
        observation, reward, terminated, truncated, info = env.step(policy(observation))
        assert not truncated
        assert set(info) == {"valid"}
        rewards.append(reward)
    return rewards


@pytest.mark.parametrize("size", [2, 4, 9])
def test_navigation_is_solved_by_the_best_action_only_at_the_end(size):
    env = GridNavigation(size)
    for seed in range(30):
        rewards = episode(env, seed, GridNavigation.best_action)
        assert len(rewards) == env.max_turns == size - 1
        assert rewards == [0.0] * (size - 2) + [1.0]


def test_navigation_needs_every_action():
    env = GridNavigation(4, max_turns=5)
    for constant in "123":
        returns = [sum(episode(env, seed, lambda _, action=constant: action)) for seed in range(60)]
        assert sum(returns) / 60 < 0.5
    no_stay = [sum(episode(env, s, lambda o: GridNavigation.best_action(o).replace("2", "1"))) for s in range(60)]
    assert 0 < sum(no_stay) / 60 < 0.9
