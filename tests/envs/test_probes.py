import pytest

from agilerl.envs.core import score_completions
from tests.probes import ConditionalTarget, ConstantTarget, GridNavigation, MultiInputConditional

PROBES = [ConstantTarget, ConditionalTarget, MultiInputConditional]


@pytest.mark.parametrize(
    ("probe", "question", "answer"),
    [
        (ConstantTarget(), "0", "3"),
        (ConstantTarget(target=9), "4", "9"),
        (ConditionalTarget(), "0", "1"),
        (ConditionalTarget(), "7", "2"),  # 7 mod 3 = 1
        (ConditionalTarget(), "8", "3"),
        (MultiInputConditional(), "00", "1"),
        (MultiInputConditional(), "47", "3"),  # 11 mod 3 = 2
        (MultiInputConditional(), "99", "1"),
    ],
)
def test_targets(probe, question, answer):
    row = probe.row("exam", int(question))
    assert row == {"question": question, "answer": answer}
    assert probe.reward(answer, row) == 1.0
    assert probe.reward(answer + "0", row) == probe.reward("", row) == 0.0


@pytest.mark.parametrize("kind", PROBES)
def test_training_is_pure_and_covers_the_space(kind):
    probe = kind(seed=1)
    rows = [probe.row("train", i) for i in range(1000)]
    assert rows[::-1] == [kind(seed=1).row("train", i) for i in reversed(range(1000))]
    assert rows != [kind(seed=2).row("train", i) for i in range(1000)]
    assert {row["question"] for row in rows} == {probe.row("exam", i)["question"] for i in range(probe.exam_prompts)}
    assert score_completions(probe, rows, [row["answer"] for row in rows]) == [1.0] * 1000


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


def test_navigation_starts_are_pure_and_different():
    starts = [GridNavigation(9).reset(seed=seed)[0] for seed in range(50)]
    env = GridNavigation(9)
    assert starts[::-1] == [env.reset(seed=seed)[0] for seed in reversed(range(50))]
    assert len(set(starts)) > 20
    assert all(s[0] != s[1] and {*s} <= set("123456789") for s in starts)


def test_an_invalid_action_stays():
    env = GridNavigation()
    before, _ = env.reset(seed=0)
    after, reward, _, _, info = env.step("left please")
    assert (after, reward, info) == (before, 0.0, {"valid": False})
