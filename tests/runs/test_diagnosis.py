"""What an agent's metrics say about why it does not learn: each rule fires on what it is for, and on nothing else."""

from typing import Any

import pytest

from agilerl.runs.diagnosis import (
    WINDOW,
    Observer,
    advice,
    count_failed_grades,
    early_elite,
    name_agents,
    symptoms,
)

HEALTHY: dict[str, Any] = {
    "reward": 0.5,
    "reward_std": 0.4,
    "frac_reward_zero_std": 0.3,
    "completions/clipped_ratio": 0.1,
    "completions/max_length": 12.0,
    "grad_norm": 0.5,
    "clip_ratio/region_mean": 0.02,
    "entropy": 0.6,
    "learning_rate": 1e-3,
    "reward_errors/exact": 0.0,
    "loss": 0.01,
}

CASES = [
    ("failing grader", {"reward_errors/exact": 39.7, "reward_error": "it raised KeyError"}, "to about 40 completions"),
    ("failing grader", {"env/errors": 4.2, "reward_error": "it raised KeyError"}, "4 episodes an iteration failed"),
    (
        "constant reward",
        {"reward_std": 0.0, "reward": 0.0, "frac_reward_zero_std": 1.0, "grad_norm": 0.0},
        "so no answer",
    ),
    (
        "constant reward",
        {"reward_std": 0.0, "reward": 1.0, "frac_reward_zero_std": 1.0, "completions/ungraded": 0.75},
        "75% of the completions of the last 8 iterations got no grade (the grader returned None,",
    ),
    ("constant reward", {"reward_std": 0.0, "reward": 1.0, "frac_reward_zero_std": 1.0}, "the task is solved, or"),
    ("constant reward", {"reward_std": 0.0, "reward": 0.0, "frac_reward_zero_std": 1.0}, "no answer is right, or"),
    ("equal groups", {"frac_reward_zero_std": 0.95}, "95%"),
    ("cut answers", {"completions/clipped_ratio": 0.75}, "limit of 12"),
    ("no gradient", {"grad_norm": 0.0}, "gradient is 0"),
    ("clipped updates", {"clip_ratio/region_mean": 0.3}, "30%"),
    ("no exploration", {"entropy": 0.001}, "0.001"),
    ("low learning rate", {"learning_rate": 9e-5}, "9e-05"),
]


def run(iterations: int = 12, **changed: Any) -> list[dict[str, Any]]:
    return [HEALTHY | changed] * iterations


@pytest.mark.parametrize(("name", "changed", "number"), CASES, ids=[case[0] for case in CASES])
def test_each_rule_names_what_it_saw(name: str, changed: dict[str, Any], number: str) -> None:
    (found,) = symptoms(run(**changed), usual_rate=1e-3)
    assert found.name == name
    assert number in found.found
    assert str(found) == f"{found.found}: {found.remedy}"


@pytest.mark.parametrize("changed", [case[1] for case in CASES], ids=[case[0] for case in CASES])
def test_what_has_passed_or_is_too_short_is_not_told(changed: dict[str, Any]) -> None:
    assert symptoms(run(2, **changed), usual_rate=1e-3) == []
    if "learning_rate" not in changed:
        assert symptoms(run(**changed) + run(WINDOW), usual_rate=1e-3) == []


def test_rewards_that_differ_between_groups_only_have_rightly_no_gradient() -> None:
    changed: dict[str, Any] = {"grad_norm": 0.0, "reward_std": 0.2}
    assert "no gradient" in [one.name for one in symptoms(run(**changed, frac_reward_zero_std=0.5))]
    assert "no gradient" not in [one.name for one in symptoms(run(**changed, frac_reward_zero_std=1.0))]


def test_a_healthy_run_has_no_symptoms() -> None:
    assert symptoms(run(), usual_rate=1e-3) == []
    assert symptoms([], usual_rate=1e-3) == []
    assert symptoms([{"loss": 0.3, "learning_rate": 1e-5}] * 9) == []  # from data, where no rate is known


def test_a_low_rate_that_pays_or_is_annealed_is_not_called_low() -> None:
    climbing = [HEALTHY | {"learning_rate": 5e-5, "reward": 0.3 + 0.01 * step} for step in range(20)]
    assert symptoms(climbing, usual_rate=1e-3) == []
    assert symptoms(run(8) + run(8, learning_rate=1e-6), usual_rate=1e-3) == []


def test_a_reward_that_fell_is_told_alone() -> None:
    broken = {"reward": 0.02, "reward_std": 0.1, "learning_rate": 0.1, "entropy": 0.001}
    lines = run(2, learning_rate=0.1) + run(6, **broken)
    (found,) = symptoms(lines, usual_rate=1e-3)  # what else is seen follows from it
    assert found.name == "fallen reward"
    assert all(number in found.found for number in ("0.5", "0.02", "0.1", "0.001"))
    failing, fallen = symptoms([line | {"reward_errors/exact": 9.0} for line in lines])
    assert (failing.name, fallen.name) == ("failing grader", "fallen reward")
    # The first iteration is enough: the model answered, and its first step broke it.
    assert [s.name for s in symptoms(run(1) + run(2, reward=0.0, reward_std=0.0))] == ["fallen reward"]


@pytest.mark.parametrize(
    "lines",
    [
        run(4) + run(4, reward=0.14),  # lower, and not by that much
        run(4, reward=0.03, reward_std=0.17) + run(4, reward=0.0, reward_std=0.1),  # rare successes
        run(4, **{"curriculum/level": 0.0}) + run(4, **{"curriculum/level": 2.0, "reward": 0.1}),
        run(8, reward=-0.5),
        run(4, reward=-0.1) + run(4, reward=-0.9),  # no scale below zero
    ],
)
def test_a_reward_that_is_low_or_noisy_has_not_fallen(lines: list[dict[str, Any]]) -> None:
    assert "fallen reward" not in [symptom.name for symptom in symptoms(lines)]


def test_values_that_are_no_numbers_are_passed_over() -> None:
    hostile = dict(zip(HEALTHY, ["x", None, [], {}, 10**400, float("nan"), "1", True, "", 0]))
    assert symptoms([hostile] * 9, usual_rate=1e-3) == []


@pytest.mark.parametrize("most", [1e200, 9e299])
def test_rewards_whose_squares_are_no_floats_are_compared(most: float) -> None:
    rising = [HEALTHY | {"reward": most * step / 30, "learning_rate": 1e-6} for step in range(30)]
    assert symptoms(rising, usual_rate=1e-3) == []
    (low,) = symptoms([HEALTHY | {"reward": most * (step % 2), "learning_rate": 1e-6} for step in range(30)], 1e-3)
    assert low.name == "low learning rate"


def test_an_observer_sees_the_first_and_the_last_iterations() -> None:
    observer = Observer(1e-3)
    for step in range(50):
        rising = HEALTHY | {"agent": 0, "learning_rate": 5e-5, "reward": 0.3 + 0.01 * step}
        observer.add([rising, HEALTHY | {"agent": 3, "entropy": 0.0}])
    found = observer.symptoms([0, 3, 7])
    assert {index: [s.name for s in each] for index, each in found.items()} == {0: [], 3: ["no exploration"], 7: []}
    (sentence,) = name_agents({3: found[3], 5: found[3]})
    assert sentence.startswith("agents 3, 5: entropy is 0")


@pytest.mark.parametrize(
    "between",
    [
        {"reward": 0.9},  # a peak from which the reward fell
        {"learning_rate": 0.5},  # the highest of an annealed rate
        {"reward": 0.9, "curriculum/level": 1.0},  # a peak before the questions became harder
        {},
    ],
    ids=str,
)
@pytest.mark.parametrize("since", [1, WINDOW - 1, WINDOW, 3 * WINDOW])
def test_an_observer_says_what_the_lines_of_the_whole_run_say(between: dict[str, Any], since: int) -> None:
    low = HEALTHY | {"reward": 0.05, "reward_std": 0.1, "learning_rate": 1e-5}
    lines = [low] * (2 * WINDOW) + [low | between] + [low] * 3 + [low | between] + [low] * since
    observer = Observer(1e-3)
    for line in lines:
        observer.add([line | {"agent": 0}])
    assert observer.symptoms([0]) == {0: symptoms(lines, usual_rate=1e-3)}


def test_failed_grades_of_a_run_are_counted_and_the_first_error_is_named() -> None:
    lines = [HEALTHY | {"reward_errors/mine": count} for count in (0.0, 2.0, 1.0)]
    lines[1] |= {"reward_error": "it raised KeyError: 1 (graders.py:3)"}
    sentence = "mine gave no grade to 3 completions of the run, the first because it raised KeyError: 1 (graders.py:3)"
    assert count_failed_grades(lines) == sentence
    assert list(advice({"failed_grades": sentence, "advice": ["early"]})) == [sentence, "early"]
    assert count_failed_grades(lines[2:]) == "mine gave no grade to 1 completion of the run"
    assert count_failed_grades(lines[:1]) == ""
    episodes = [line | {"env/episodes": 64.0, "env/errors": count} for line, count in zip(lines, (0.0, 5.0, 21.0))]
    assert count_failed_grades(episodes).startswith(
        "26 of 192 episodes failed, the first because it raised KeyError: 1"
    )
    (failing,) = symptoms([line | {"reward_errors/mine": 2.0} for line in lines])
    assert "to about 2 completions an iteration, for instance because it raised KeyError: 1 (gr" in failing.found


@pytest.mark.parametrize(("step", "panel", "said"), [(5, "exam", "in its exam it had 0.610"), (9, "second", "panel")])
def test_an_elite_of_the_beginning_says_that_later_training_was_no_gain(step: int, panel: str, said: str) -> None:
    decided = {"panel": panel, "elite": 0.61, "last": 0.5, "n": 64}
    elite = {"index": 2, "step": step, "decided_by": decided}
    (sentence,) = early_elite(elite, 40)
    for words in (f"agent 2 as it was after iteration {step} of 40", said, "0.500 (64 questions)", "algorithm.lr"):
        assert words in sentence
    assert early_elite(elite, 4 * step - 1) == []
