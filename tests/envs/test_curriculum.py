"""Training that gets harder along reasoning_gym's curricula."""

import json
from pathlib import Path

import pytest

from agilerl import PreferenceTask, SFTTask
from agilerl.config.manifest import load_manifest
from agilerl.envs.core import is_held_out
from agilerl.envs.graded import GradedTask, TaskGrader
from agilerl.envs.procedural import Curriculum, ReasoningGymTask
from agilerl.envs.upstream import build_dataset, curricula, known_tasks
from agilerl.errors import ConfigError, EnvError
from agilerl.training.run import train
from agilerl.training.setup import build
from tests.training.small_runs import lines

SPELL_LEVELS = [{"min_word_len": 3, "max_word_len": n} for n in (3, 5, 7, 9, 11)]
MIXTURE = {
    "datasets": [
        {"name": "spell_backward", "weight": 1.0, "config": {"min_word_len": 3}},
        {"name": "gcd", "weight": 3.0},
        {"name": "gsm_symbolic", "weight": 1.0},
    ]
}
REFUSED = {
    "caesar_cipher": ("level 2", "1,25"),
    "knight_swap": ("level 0", "min_nodes must be >= 6"),
    "modulo_grid": ("level 1", "max_target must be greater than 0"),
    "survo": ("level 2", "max_empty must be <= 9"),
}
"""Curricula of reasoning_gym 0.1.25 that leave what the dataset itself accepts, by level 2."""
SLOW = {
    "bf",
    "jugs",
    "n_queens",
    "sokoban",
    "zebra_puzzles",
    "arc_agi",
    "codeio",
    "figlet_font",
    "group_anagrams",
    "word_ladder",
}
"""Half a second or more."""


def made(name="spell_backward", params=None, seed=3, exam_prompts=20, test_prompts=20, **curriculum):
    levels = Curriculum(**{"prompts_per_level": 50, **curriculum})
    return ReasoningGymTask(
        name, params, seed=seed, exam_prompts=exam_prompts, test_prompts=test_prompts, curriculum=levels
    )


def without_level(row):
    return {key: value for key, value in row.items() if key != "level"}


# -- levels -----------------------------------------------------------------------------------------------------------


def test_levels_are_those_of_reasoning_gym():
    assert made().levels == SPELL_LEVELS
    assert made(max_level=2).levels == SPELL_LEVELS[:3]


def test_the_level_is_a_function_of_the_position_and_the_last_one_never_ends():
    task = made(max_level=2)
    positions = [0, 49, 50, 99, 100, 149, 150, 10**6]
    assert [task.level(p) for p in positions] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert [task.row("train", p)["level"] for p in positions] == [0, 0, 1, 1, 2, 2, 2, 2]
    assert ReasoningGymTask("spell_backward").level(7) is None
    assert "level" not in ReasoningGymTask("spell_backward").row("train", 7)


def test_problems_get_harder():
    task = made(max_level=2, prompts_per_level=200)
    lengths = [{len(task.row("train", i)["answer"]) for i in range(200 * n, 200 * n + 200)} for n in range(3)]
    assert lengths == [{3}, {3, 4, 5}, {3, 4, 5, 6, 7}]


@pytest.mark.parametrize(("name", "params"), [("chain_sum", {}), ("composite", MIXTURE)])
@pytest.mark.processes
def test_a_problem_is_that_of_a_plain_task_with_the_parameters_of_its_level(name, params):
    task = made(name, params, max_level=2)
    for level, values in enumerate(task.levels):
        plain = ReasoningGymTask(name, values, seed=3, exam_prompts=20, test_prompts=20)
        for position in (level * 50, level * 50 + 31):
            assert without_level(task.row("train", position)) == plain.row("train", position)


@pytest.mark.parametrize("holdout", ["reserved", "any"])
def test_rows_do_not_depend_on_what_was_asked_before(holdout):
    options = {"exam_prompts": 5, "test_prompts": 5, "holdout": holdout, "curriculum": Curriculum(700, max_level=3)}
    asked = [("train", i) for i in (0, 699, 700, 999, 1000, 1400, 2100, 5003)] + [("exam", 4), ("test", 3)]
    for name, params in (("gcd", {}), ("composite", MIXTURE)):
        first, second = (ReasoningGymTask(name, params, seed=3, **options) for _ in range(2))
        second.prepare()
        forwards = [first.row(*key) for key in asked]
        assert forwards == [second.row(*key) for key in reversed(asked)][::-1]


def test_chosen_attributes_rise_and_the_others_keep_the_parameters():
    own = {"min_digits": 2, "max_digits": 3}
    task = made("chain_sum", own, attributes=["num_terms"], max_level=2)
    assert task.levels == [{**own, "min_terms": 2, "max_terms": n} for n in (2, 3, 4)]
    sums = [{task.row("train", i)["question"].count(" + ") for i in range(50 * n, 50 * n + 50)} for n in range(2)]
    assert max(sums[0]) <= 1
    # Attributes that are not named are those of the dataset, not those of the curriculum's level 0.
    assert made("chain_sum", attributes=["num_terms"], max_level=1).levels == [
        {"min_terms": 2, "max_terms": 2},
        {"min_terms": 2, "max_terms": 3},
    ]


def test_explicit_parameters_win():
    task = made("chain_sum", {"max_digits": 1, "allow_negation": True}, max_level=3)
    assert [level["max_digits"] for level in task.levels] == [1] * 4
    assert [level["max_terms"] for level in task.levels] == [2, 3, 4, 5]
    assert all(level["allow_negation"] for level in task.levels)


def test_an_attribute_with_fewer_levels_stays_at_its_last():
    levels = made("knights_knaves").levels
    assert [level["n_people"] for level in levels] == [2, 3, 4, 5]
    assert [level["depth_constraint"] for level in levels] == [2, 3, 3, 3]


# -- exam and test ----------------------------------------------------------------------------------------------------


def test_panels_are_those_of_the_last_level():
    task = made(max_level=3)
    plain = ReasoningGymTask("spell_backward", SPELL_LEVELS[3], seed=3, exam_prompts=20, test_prompts=20)
    for split in ("exam", "test"):
        rows = [task.row(split, i) for i in range(20)]
        assert [without_level(row) for row in rows] == [plain.row(split, i) for i in range(20)]
        assert {row["level"] for row in rows} == {3}


@pytest.mark.parametrize("holdout", ["reserved", "any"])
@pytest.mark.parametrize(("name", "params"), [("spell_backward", {}), ("composite", MIXTURE)])
def test_no_level_shows_what_is_held_out(name, params, holdout):
    levels = Curriculum(400, max_level=3)
    task = ReasoningGymTask(
        name, params, exam_prompts=60, test_prompts=60, holdout=holdout, curriculum=levels, reward="score"
    )
    panel = {task.row(split, i)["question"] for split in ("exam", "test") for i in range(60)}
    train = {task.row("train", i)["question"] for i in range(2000)}
    assert len(panel) == 120
    assert train.isdisjoint(panel)
    if holdout == "reserved":
        assert all(map(is_held_out, panel))
        assert not any(map(is_held_out, train))


def test_every_level_is_scored_with_its_own_parameters():
    """decimal_arithmetic compares as many places as its parameters have."""
    task = made("decimal_arithmetic", max_level=3)
    easy, hard = task.row("train", 0), task.row("train", 170)
    assert task.reward(easy["answer"], easy) == task.reward(hard["answer"], hard) == 1.0
    nearly = f"{float(easy['answer']) + 1e-7:.8f}"
    scores = [task._scorers.datasets[level].score_answer(nearly, easy) for level in (easy["level"], 3)]
    assert [score == 1.0 for score in scores] == [True, False]
    assert task.reward(nearly, easy) == 1.0


# -- composites -------------------------------------------------------------------------------------------------------


def test_a_composite_raises_each_of_its_datasets_and_keeps_the_weights():
    task = made("composite", MIXTURE, prompts_per_level=300, max_level=3)
    configs = [{spec["name"]: spec["config"] for spec in level["datasets"]} for level in task.levels]
    assert [config["spell_backward"] for config in configs] == SPELL_LEVELS[:4]
    assert [config["gcd"]["max_value"] for config in configs] == [1000, 10000, 100000, 100000]
    assert [config["gsm_symbolic"] for config in configs] == [{}] * 4  # it has no curriculum
    assert {spec["weight"] for level in task.levels for spec in level["datasets"]} == {1.0, 3.0}
    for level in range(3):
        names = [task.row("train", i)["metadata"]["source_dataset"] for i in range(300 * level, 300 * level + 300)]
        assert 0.5 < names.count("gcd") / 300 < 0.7


def test_a_composite_ends_where_its_longest_curriculum_does():
    task = made("composite", {"datasets": [{"name": "gcd"}, {"name": "spell_backward"}]})
    ends = [{spec["name"]: spec["config"] for spec in level["datasets"]} for level in task.levels[3:]]
    assert len(task.levels) == 5
    assert ends[0]["gcd"] == ends[1]["gcd"]
    assert ends[0]["spell_backward"] != ends[1]["spell_backward"]


def test_attributes_of_a_composite_rise_wherever_they_are():
    params = {"datasets": [{"name": "gcd"}, {"name": "chain_sum"}, {"name": "spell_backward"}]}
    last = {
        s["name"]: s["config"]
        for s in made("composite", params, attributes=["num_terms"], max_level=1).levels[1]["datasets"]
    }
    assert last == {
        "gcd": {"min_numbers": 2, "max_numbers": 3},
        "chain_sum": {"min_terms": 2, "max_terms": 3},
        "spell_backward": {},
    }


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "params", "curriculum", "sentence"),
    [
        ("acre", {}, {}, "found acre; known:"),
        ("list_functions", {}, {}, "found list_functions"),
        ("composite", {"datasets": [{"name": "acre"}, {"name": "gsm_symbolic"}]}, {}, "found acre, gsm_symbolic;"),
        ("gcd", {}, {"attributes": ["valu"]}, r"'valu'; .* 'value'"),
        ("gcd", {}, {"max_level": 4}, "max_level .*at most 3.* gcd.*, found 4"),
        ("gcd", {}, {"attributes": ["num_terms"], "max_level": 9}, "max_level .*at most 3"),
        ("spell_backward", SPELL_LEVELS[0], {}, r"spell_backward .*\(max_word_len, min_word_len\).* params"),
        ("syllogism", {}, {"attributes": ["allow_all"]}, "changes nothing up to level 3"),
        ("spell_backward", {"min_word_len": 4}, {}, r"level 0 .* params or"),
    ],
)
def test_bad_settings_say_what_to_do(name, params, curriculum, sentence):
    with pytest.raises(ConfigError, match=sentence):
        made(name, params, **curriculum)


@pytest.mark.parametrize("name", REFUSED)
def test_a_level_that_the_dataset_refuses_is_found_at_the_start(name):
    level, reason = REFUSED[name]
    with pytest.raises(ConfigError, match=f"{reason}.*{level} of its curriculum"):
        made(name)


def test_parameters_or_attributes_mend_a_level_that_is_refused():
    assert made("survo", attributes=["board_size"], max_level=2, exam_prompts=1, test_prompts=0).levels[2] == {
        "min_board_size": 4,
        "max_board_size": 6,
    }
    assert made("caesar_cipher", {"max_rotation": 25}, max_level=3, exam_prompts=1, test_prompts=0)


def test_a_level_without_problems_is_found_by_prepare(monkeypatch):
    monkeypatch.setattr("agilerl.envs.procedural.MOST_ATTEMPTS", 2)  # each rebuilds the dataset
    task = made(max_level=1)
    task.prepare()
    task.levels[0] = {"min_word_len": 40, "max_word_len": 50}  # the data have no such words
    task._datasets.clear()
    with pytest.raises(EnvError, match=r"problem 0.*spell_backward \(level 0 .*'min_word_len': 40"):
        task.prepare()


# -- all of them ------------------------------------------------------------------------------------------------------


def test_there_are_as_many_as_expected():
    assert sorted(set(known_tasks()) - set(curricula())) == ["acre", "composite", "gsm_symbolic", "list_functions"]


@pytest.mark.parametrize("name", sorted({*curricula()} - set(REFUSED) - SLOW))
@pytest.mark.processes
def test_every_curriculum(name):
    task = made(name, exam_prompts=1, test_prompts=0, max_level=2)
    assert task.levels[0] != task.levels[2]
    for position in (0, 100):
        row = task.row("train", position)
        assert row["level"] == position // 50
        assert row["answer"] is None or task.reward(row["answer"], row) == 1.0


@pytest.mark.parametrize("name", sorted(SLOW))
def test_every_slow_curriculum_has_its_levels(name):
    levels = Curriculum(max_level=2).levels(name, {})
    assert levels[0] != levels[2]
    assert all(len(build_dataset(name, level, seed=1, size=2)) == 2 for level in levels[::2])


# -- training ---------------------------------------------------------------------------------------------------------


def test_tasks_that_wrap_a_task_have_its_levels():
    task = made(max_level=2)
    wrapped = [SFTTask(task), PreferenceTask(task), GradedTask(task, TaskGrader(task))]
    assert [[w.level(p) for p in (0, 60, 999)] for w in wrapped] == [[0, 1, 2]] * 3
    assert PreferenceTask(task).row("train", 60)["level"] == 1


MANIFEST = """
algorithm: {name: GRPO, lr: 1e-4, group_size: 2, batch_size: 8, max_output_tokens: 4}
environment:
  task: reasoning_gym:spell_backward
  curriculum: {prompts_per_level: 6, max_level: 2, attributes: [word_len]}
  data_batch_size_per_gpu: 4
  eval_prompts: 4
  test_prompts: 4
training: {pop_size: 2, max_steps: 80, evo_steps: 10}
"""


@pytest.mark.model
def test_a_run_from_a_manifest_logs_the_level(tmp_path: Path):
    (tmp_path / "run.yaml").write_text(MANIFEST)
    session = build(load_manifest(tmp_path / "run.yaml"))
    assert session.task.levels == SPELL_LEVELS[:3]
    out = tmp_path / "run"
    for _ in train(session, out, command=["test"]):
        pass
    steps = [r for r in lines(out / "metrics.jsonl") if r["kind"] == "train"]
    for agent in {r["agent"] for r in steps}:
        # Batches of 4 prompts, 6 to a level: 0000 0011 1111 2222 2222
        assert [r["curriculum/level"] for r in steps if r["agent"] == agent] == [0.0, 0.5, 1.0, 2.0, 2.0]
    assert json.loads((out / "run.json").read_text())["config"]["environment"]["curriculum"] == {
        "prompts_per_level": 6,
        "max_level": 2,
        "attributes": ["word_len"],
    }


@pytest.mark.model
@pytest.mark.parametrize(
    ("curriculum", "levels"), [("{prompts_per_level: 2, max_level: 1}", [0, 0, 1, 1]), ("null", [])]
)
def test_batches_of_demonstrations_have_the_level(curriculum, levels):
    data = ["algorithm={name: SFT, lr: 1e-4, batch_size: 4}", "environment.env_type=sft", "environment.params={}"]
    small = ["training.pop_size=1", "environment.data_batch_size_per_gpu=4", "selection_strategy={name: none}"]
    small += ["mutation={}", "environment.eval_prompts=4", "environment.test_prompts=4"]
    population = build(load_manifest(None, [*data, *small, f"environment.curriculum={curriculum}"])).population
    drawn = population.draw()
    assert drawn.levels == {0: levels}
    assert population.learn(drawn)[0].get("curriculum/level") == (0.5 if levels else None)


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["environment.curriculum={}"], r"max_value=60.*level 0"),
        (["environment.curriculum.levels=3"], r"unknown key 'environment.curriculum.levels'; .* 'max_level'"),
        (
            ["environment.dataset=rows.jsonl", "environment.curriculum={}"],
            r"environment.curriculum=.* environment.task, found environment.dataset",
        ),
        (
            [
                "environment.env_type=multiturn",
                "environment.env_id=agilerl/GuessTheNumber-v0",
                "environment.curriculum={}",
            ],
            r"environment.curriculum=.*, found env_type: multiturn",
        ),
        (["environment.task=reasoning_gym:acre", "environment.curriculum={}"], "found acre"),
    ],
)
def test_manifests_that_cannot_have_a_curriculum(overrides, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n' * 9)
    with pytest.raises(ConfigError, match=sentence):
        build(load_manifest(None, overrides))


def test_another_source_on_the_command_line_drops_the_curriculum_of_the_file(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(MANIFEST)
    (tmp_path / "rows.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    assert load_manifest(tmp_path / "run.yaml", ["environment.dataset=rows.jsonl"]).environment.curriculum is None
