import random
import threading
import time
from contextlib import suppress

import numpy as np
import pytest

from agilerl.envs.core import fit_panels, is_held_out, score_completions
from agilerl.envs.procedural import ReasoningGymTask
from agilerl.envs.upstream import quiet
from agilerl.errors import ConfigError, EnvError, RewardError
from agilerl.streams import sealed

SPELL = {"min_word_len": 3, "max_word_len": 6}
MIXTURE = {
    "datasets": [{"name": "gcd", "weight": 1.0}, {"name": "chain_sum", "weight": 2.0, "config": {"max_terms": 3}}]
}
TASKS = [
    ("spell_backward", SPELL),
    ("gcd", {"max_value": 60}),
    ("chain_sum", {}),
    ("letter_counting", {}),
    ("composite", MIXTURE),
]


def questions(task, split, count):
    return [task.row(split, i)["question"] for i in range(count)]


@pytest.mark.parametrize("holdout", ["reserved", "any"])
@pytest.mark.parametrize(("name", "params"), TASKS, ids=[name for name, _ in TASKS])
def test_nothing_leaks(name, params, holdout):
    sizes = {"exam_prompts": 40, "test_prompts": 60}
    tasks = [ReasoningGymTask(name, params, seed=seed, holdout=holdout, **sizes) for seed in (0, 1)]
    seen = []
    for task in tasks:
        exam, test = questions(task, "exam", 40), questions(task, "test", 60)
        train = set(questions(task, "train", 1500))
        assert len(set(exam) | set(test)) == 100
        assert train.isdisjoint(exam)
        assert train.isdisjoint(test)
        seen.append((train, {*exam, *test}))
    assert seen[0] != seen[1]
    if holdout == "reserved":
        # Stronger: no seed trains on another seed's panels, nor on anything that the embedded base may not see.
        for train, panel in seen:
            assert all(is_held_out(q) for q in panel)
            assert not any(is_held_out(q) for q in train)


def test_training_avoids_the_panels_of_a_tiny_space():
    """210 questions in all, half of them in the panels."""
    task = ReasoningGymTask(
        "chain_sum",
        {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
        exam_prompts=50,
        test_prompts=50,
        holdout="any",
    )
    panel = {*questions(task, "exam", 50), *questions(task, "test", 50)}
    train = set(questions(task, "train", 2000))
    assert train.isdisjoint(panel)
    assert len(train) > 50


def test_changing_the_test_panel_leaves_exam_and_training_alone():
    small = ReasoningGymTask("gcd", exam_prompts=20, test_prompts=5)
    large = ReasoningGymTask("gcd", exam_prompts=20, test_prompts=50)
    assert questions(small, "exam", 20) == questions(large, "exam", 20)
    assert questions(small, "train", 50) == questions(large, "train", 50)


def test_panels_are_drawn_once_for_tasks_that_are_alike(monkeypatch):
    drawn = ReasoningGymTask("gcd", exam_prompts=20, test_prompts=5, seed=77)
    first = questions(drawn, "exam", 20)
    assert questions(ReasoningGymTask("gcd", exam_prompts=20, test_prompts=5, seed=78), "exam", 20) != first
    again = ReasoningGymTask("gcd", exam_prompts=20, test_prompts=5, seed=77)
    monkeypatch.setattr(again, "_draw", lambda *args: pytest.fail("drawn again"))
    assert questions(again, "exam", 20) == first
    again.row("exam", 0)["question"] = "changed"
    again._panel[first[0]]["question"] = "changed"
    assert questions(ReasoningGymTask("gcd", exam_prompts=20, test_prompts=5, seed=77), "exam", 20) == first


def test_training_visits_all_lengths_and_most_questions_are_new():
    task = ReasoningGymTask("spell_backward", SPELL)
    rows = [task.row("train", i) for i in range(2000)]
    assert {len(row["answer"]) for row in rows} == {3, 4, 5, 6}
    assert len({row["question"] for row in rows}) > 1800


def test_a_returned_row_can_be_changed_without_harm():
    task = ReasoningGymTask("gcd", exam_prompts=2, test_prompts=0)
    task.row("exam", 0)["question"] = "spoilt"
    assert task.row("exam", 0)["question"] != "spoilt"


@pytest.mark.parametrize("name", ["gcd", "list_functions", "pool_matrix", "codeio"])
def test_global_generators_are_left_alone_and_not_read(name):
    first = ReasoningGymTask(name, exam_prompts=1, test_prompts=0)
    before = random.getstate(), np.random.get_state()  # noqa: NPY002
    rows = [first.row("train", i) for i in range(60)]
    after = random.getstate(), np.random.get_state()  # noqa: NPY002
    assert before[0] == after[0]
    assert all(np.array_equal(a, b) for a, b in zip(before[1], after[1]))
    if name == "codeio":
        return  # 5 of its first 1000 problems read the clock, an address or the system's entropy
    random.random()
    np.random.random()  # noqa: NPY002
    second = ReasoningGymTask(name, exam_prompts=1, test_prompts=0)
    assert [second.row("train", i) for i in range(60)] == rows


@pytest.mark.parametrize("answer", ["elppa", "gnirts"])
def test_spell_backward_is_rewarded_for_exactly_the_answer(answer):
    """Upstream adds 1/6 six times, which misses 1.0, so its deduction for trailing junk never happens."""
    exact = ReasoningGymTask("spell_backward", SPELL)
    dense = ReasoningGymTask("spell_backward", SPELL, reward="score")
    row = {"question": "", "answer": answer, "metadata": {"source_dataset": "spell_backward"}}
    assert exact.reward(answer, row) == dense.reward(answer, row) == 1.0
    junk = dense.reward(answer + "zz", row)
    assert junk == (0.9999999999999999 if len(answer) == 6 else 0.8)
    assert exact.reward(answer + "zz", row) == 0.0
    assert exact.reward(answer[:-1], row) == 0.0


def test_an_answer_that_the_scorer_cannot_read_is_wrong():
    task = ReasoningGymTask("prime_factorization")
    row = task.row("train", 0)
    with pytest.raises(ValueError, match="invalid literal"):
        task._scorers.datasets[0].score_answer("two times three", row)
    assert task.reward("two times three", row) == 0.0
    assert task.reward(row["answer"], row) == 1.0


def test_a_scorer_that_cannot_read_its_own_answer_is_at_fault():
    task = ReasoningGymTask("prime_factorization")
    rows = [{**task.row("train", i), "answer": "seven"} for i in range(2)]
    with pytest.raises(RewardError, match=r"prime_factorization fails on .*'seven'"):
        task.reward("7", rows[0])
    good = task.row("train", 5)
    assert score_completions(task, [rows[0], good], ["7", good["answer"]]) == [None, 1.0]
    with pytest.raises(RewardError, match="correct answer"):
        score_completions(task, rows, ["7", "7"])


def test_composite_scores_each_row_by_its_own_dataset():
    task = ReasoningGymTask("composite", MIXTURE)
    rows = [task.row("train", i) for i in range(300)]
    sources = [row["metadata"]["source_dataset"] for row in rows]
    assert set(sources) == {"gcd", "chain_sum"}
    assert 0.5 < sources.count("chain_sum") / 300 < 0.8  # weight 2 of 3; five standard errors are 0.14
    assert score_completions(task, rows, [row["answer"] for row in rows]) == [1.0] * 300


def test_scoring_a_thousand_completions_takes_well_under_a_second():
    task = ReasoningGymTask("spell_backward", SPELL)
    rows = [task.row("train", i) for i in range(1000)]
    texts = [row["answer"] if i % 2 else row["answer"] + "x" for i, row in enumerate(rows)]
    start = time.process_time()
    scores = score_completions(task, rows, texts)
    assert time.process_time() - start < 0.5
    assert scores == [0.0, 1.0] * 500


def test_the_question_is_what_the_user_says():
    task = ReasoningGymTask("reasoning_gym:spell_backward", SPELL)
    row = task.row("train", 0)
    assert task.name == "spell_backward"
    assert task.messages(row) == [{"role": "user", "content": row["question"]}]


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("spel_backwards", {}, r"found 'spel_backwards'; .* 'spell_backward'"),
        ("sum", {}, "did you mean 'chain_sum'"),
        ("zzzz", {}, "known: ab, acre"),
        ("gcd", {"params": {"max_valu": 3}}, r"'max_valu'; .* 'max_value'"),
        (
            "gcd",
            {"params": {"max_value": "60"}},
            r"expected a whole number .* 'max_value' .* found '60'",
        ),
        ("gcd", {"params": {"max_value": True}}, r"expected a whole number .* 'max_value'"),
        ("gcd", {"params": {"max_value": -1}}, r"max_value=-1: max_value .* > min_value"),
        ("gcd", {"params": {"seed": 3}}, "'seed' of gcd is set by the run"),
        ("gcd", {"params": {"size": 3}}, "'size' of gcd is set by the run"),
        ("composite", {}, "composite: expected a list for params.datasets, found None; give a list"),
        ("composite", {"params": {"datasets": [{"weight": 1}]}}, "expected text for the name of a dataset, found None"),
        ("composite", {"params": {"datasets": [{"name": "gdc"}]}}, "did you mean 'gcd'"),
        ("composite", {"params": {"datasets": [{"name": "gcd", "wieght": 1}]}}, r"no 'wieght'; .* 'weight'"),
        ("composite", {"params": {"datasets": [{"name": "gcd", "weight": 0}]}}, "above 0 for the weight of gcd"),
        ("composite", {"params": {"datasets": [{"name": "composite"}]}}, "cannot hold a composite"),
        ("composite", {"params": {"datasets": [{"name": "gcd", "config": {"max_valu": 1}}]}}, "gcd has no parameter"),
        ("composite", {"params": {"datasets": [{"name": "gcd"}, {"name": "gcd"}]}}, "Duplicate dataset names"),
    ],
)
def test_bad_settings_say_what_to_do(name, options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        ReasoningGymTask(name, **options)


def test_parameters_that_leave_no_problem():
    with pytest.raises(EnvError, match=r"spell_backward .*'min_word_len': 90"):
        ReasoningGymTask("spell_backward", {"min_word_len": 90, "max_word_len": 99})


def test_a_task_with_too_few_questions_says_how_many_there_are():
    tiny = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(EnvError, match=r"only (\d+) distinct .*holdout to 'any'"):
        ReasoningGymTask("chain_sum", tiny).prepare()
    with pytest.raises(EnvError, match=r"has only \d+ distinct questions \("):
        ReasoningGymTask("chain_sum", tiny, holdout="any").prepare()


TINY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.mark.parametrize("holdout", ["reserved", "any"])
def test_panels_shrink_to_the_questions_that_there_are(holdout):
    asked = {"exam_prompts": 128, "test_prompts": 400, "holdout": holdout, "shrink_panels": True}
    task = ReasoningGymTask("chain_sum", TINY, **asked)
    with pytest.warns(UserWarning, match=r"distinct questions.* 128 and 400"):
        task.prepare()
    panels = {
        split: [task.row(split, i)["question"] for i in range(task.panel_size(split))] for split in ("exam", "test")
    }
    assert abs(len(panels["exam"]) - len(panels["test"])) <= 1
    assert len({*panels["exam"], *panels["test"]}) == len(panels["exam"]) + len(panels["test"])
    trained = {task.row("train", position)["question"] for position in range(2000)}
    assert trained.isdisjoint({*panels["exam"], *panels["test"]})
    if holdout == "any":
        assert len(trained) >= len(panels["exam"]) + len(panels["test"])
    lazy = ReasoningGymTask("chain_sum", TINY, **asked)
    with pytest.warns(UserWarning, match="distinct questions"):
        assert lazy.row("test", 0)["question"] == panels["test"][0]
    with pytest.raises(EnvError, match=f"0 to {len(panels['exam']) - 1} in the exam"):
        lazy.row("exam", 127)


def test_panels_of_enough_questions_do_not_shrink():
    plain, allowed = (
        ReasoningGymTask("gcd", exam_prompts=8, test_prompts=9, shrink_panels=shrink) for shrink in (False, True)
    )
    for split, size in (("exam", 8), ("test", 9), ("train", 20)):
        assert [allowed.row(split, i) for i in range(size)] == [plain.row(split, i) for i in range(size)]


@pytest.mark.parametrize(
    ("asked", "available", "found"),
    [
        ((128, 400), 527, (128, 399)),
        ((128, 400), 17, (9, 8)),
        ((128, 2), 17, (15, 2)),
        ((2, 400), 17, (2, 15)),
        ((128, 400), 4, (2, 2)),
        ((128, 400), 3, None),
        ((128, 0), 3, (3, 0)),
        ((1, 0), 1, (1, 0)),
        ((1, 0), 0, None),
    ],
)
def test_how_few_questions_are_divided(asked, available, found):
    assert fit_panels(*asked, available) == found


def test_a_panel_that_takes_every_question_leaves_no_training():
    params = {"datasets": [{"name": "coin_flip", "config": {"min_trials": 3, "max_trials": 3}}]}
    task = ReasoningGymTask("composite", params, exam_prompts=1, test_prompts=0, holdout="any")
    known = {task.row("train", i)["question"] for i in range(300)} | {task.row("exam", 0)["question"]}
    greedy = ReasoningGymTask("composite", params, exam_prompts=len(known), test_prompts=0, holdout="any")
    with pytest.raises(EnvError, match="exam or test panel"):
        greedy.row("train", 0)


@pytest.mark.parametrize("key", [("train", -1), ("exam", 128), ("test", 400), ("test", -1), ("dev", 0)])
def test_rows_that_do_not_exist(key):
    with pytest.raises(EnvError, match="expected"):
        ReasoningGymTask("gcd").row(*key)


def test_a_panel_and_a_sealed_environment_do_not_wait_for_each_other():
    """One thread draws a panel of a dataset that needs sealing, another a problem inside a sealed environment."""
    task = ReasoningGymTask("list_functions", exam_prompts=1, test_prompts=0)
    meeting = threading.Barrier(2)

    def meet():
        with suppress(threading.BrokenBarrierError):  # with one lock the other thread does not get there
            meeting.wait(0.5)

    def panel():
        with quiet():
            meet()
            task._draw("panel", 0, 0)

    def environment():
        with sealed(0):
            meet()
            task._draw("train", 0, 0)

    threads = [threading.Thread(target=target, daemon=True) for target in (panel, environment)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
