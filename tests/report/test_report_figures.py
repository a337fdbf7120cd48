import json
import math
import re
from dataclasses import replace

import pytest
from small_run import birth, fitness, train, write_run

from agilerl.hpo.fitness import Fitness
from agilerl.report.figures import (
    agent_colour,
    clock,
    curve_figure,
    fitness_figure,
    hyperparameter_figure,
    hyperparameter_names,
    overlay_figure,
    thin_out,
    throughput_figure,
    tree_figure,
    tree_width,
)
from agilerl.report.life import lives, short_value
from agilerl.report.load import find_differences, load_run
from agilerl.report.page import (
    comparison,
    configuration,
    facts,
    lineage_table,
    phase_table,
    render,
    sample_groups,
    verdict,
)
from agilerl.runs.completions import CompletionRecord, write_completions


@pytest.fixture
def load(tmp_path):
    count = iter(range(100))
    return lambda **parts: load_run(write_run(tmp_path / str(next(count)), **parts))


def of_agent(figure, agent, **wanted):
    traces = [t for t in figure["data"] if (t.get("meta") or {}).get("agent") == agent]
    return [t for t in traces if wanted.items() <= t.items()]


def test_the_fitness_band_is_one_standard_error_and_starts_at_the_parent(load):
    lineage = [birth(0, None, 0), fitness(0, 0, 0.5, 0.1), birth(1, 0, 1), fitness(1, 1, 0.7, 0.2)]
    run = load(lineage=lineage)
    figure = fitness_figure(run)
    (band,) = of_agent(figure, 1, fill="toself")
    assert (band["x"], band["y"]) == ([10, 20, 20, 10], [0.6, 0.9, 0.5, 0.4])
    (line,) = of_agent(figure, 1, mode="lines+markers")
    assert (line["x"], line["y"]) == ([20], [0.7])
    (alone,) = of_agent(figure, 0, fill="toself")
    assert (alone["x"], alone["y"]) == ([10, 10], [0.6, 0.4])
    assert alone["line"]["width"] > band["line"]["width"]
    dotted = next(t for t in figure["data"] if (t.get("meta") or {}).get("inheritance"))
    assert (dotted["x"], dotted["y"]) == ([10, 20, None], [0.5, 0.7, None])


def test_the_base_is_a_line_in_the_fitness_once_it_was_tested(load):
    lineage = [birth(0, None, 0), fitness(0, 0, 0.5), fitness(0, 1, 0.6)]
    test = {"kind": "test", "who": "base", "agent": None, "eval/reward_mean": 0.25, "eval/stderr": 0.1, "eval/n": 9}
    for metrics, drawn in (
        ([test], [([0, 20], [0.25, 0.25])]),
        ([], []),
        ([test | {"eval/reward_mean": math.nan}], []),
    ):
        run = load(lineage=lineage, metrics=metrics)
        traces = fitness_figure(run)["data"]
        assert [(t["x"], t["y"]) for t in traces if t.get("name") == "base"] == drawn


def test_a_value_that_is_not_finite_is_a_gap(load):
    run = load(metrics=[train(0, i, loss=v) for i, v in enumerate([1.0, math.nan, 2.0, math.inf, 3.0])])
    figure = curve_figure(run, "loss")
    assert of_agent(figure, 0)[0]["y"] == [1.0, None, 2.0, None, 3.0]
    assert curve_figure(run, "kl") is None
    json.dumps(figure, allow_nan=False)


@pytest.mark.parametrize("count", [1, 2, 999, 1000, 1001, 1999, 2000, 5000])
def test_a_long_line_has_a_thousand_points_and_both_ends(load, count):
    run = load(lineage=[birth(0, None, 0)], metrics=[train(0, step, loss=float(step)) for step in range(1, count + 1)])
    (line,) = of_agent(curve_figure(run, "loss"), 0)
    flat = load(lineage=[birth(0, None, 0)], metrics=[train(0, step, loss=0.0) for step in range(1, count + 1)])
    axes = [curve_figure(one, "loss")["layout"]["yaxis"].get("range") for one in (run, flat)]
    assert axes == [None, [-0.05, 1]]  # not from -1
    assert (len(line["x"]), line["x"][0], line["x"][-1]) == (min(count, 1000), 1, count)


@pytest.mark.parametrize(
    ("values", "kind"), [([1e-5, 1e-2], "log"), ([0.1, 0.5], None), ([0.0, 5.0], None), (["a<b", "c"], "category")]
)
def test_the_axis_fits_the_values(load, values, kind):
    run = load(lineage=[birth(i, None, 0, x=value, same=1) for i, value in enumerate(values)])
    assert hyperparameter_names(run) == (["x"], {"same": 1})
    course = {"training": {"lr_schedule": {"name": "cosine"}}}
    annealed = load(lineage=[birth(0, None, 0, lr=0.001, same=1)], config=course)
    assert hyperparameter_names(annealed) == ([], {"lr": "0.001 (before annealing)", "same": 1})
    figure = hyperparameter_figure(run, "x")
    assert figure["layout"]["yaxis"].get("type") == kind
    assert "a<b" not in json.dumps(figure)


def test_the_clock_counts_the_tokens_of_all_agents_once(load):
    lines = [train(0, 1, num_tokens=10, **{"time/elapsed": 2.0}), train(1, 1, num_tokens=20, **{"time/elapsed": 2.0})]
    # Agent 2 is a clone of agent 1, and continues its count.
    lines += [train(1, 2, num_tokens=30, **{"time/elapsed": 5.0}), train(2, 2, num_tokens=25, **{"time/elapsed": 5.0})]
    run = load(lineage=[birth(0, None, 0), birth(1, None, 0), birth(2, 1, 0)], metrics=lines)
    assert clock(run) == {"tokens": {0: 0, 1: 30, 2: 45}, "seconds": {0: 0, 1: 2.0, 2: 5.0}}
    assert clock(load()) == {}


def test_runs_are_laid_over_one_another(load):
    runs = [load(lineage=[birth(0, None, 0), fitness(0, 0, mean), fitness(0, 1, 1.0)]) for mean in (0.5, 0.75)]
    figure = overlay_figure(dict(zip("ab", runs)))
    lines = [trace for trace in figure["data"] if trace["mode"] == "lines+markers"]
    assert [(t["name"], t["y"], t["meta"]) for t in lines] == [
        ("a", [0.5, 1.0], {"run": 0}),
        ("b", [0.75, 1.0], {"run": 1}),
    ]
    assert len({trace["line"]["color"] for trace in lines}) == 2
    assert overlay_figure({"a": load()}) is None


def test_a_band_of_shares_stays_between_0_and_1(load):
    assert Fitness(0.99, 0.02, 20).band == (pytest.approx(0.97), 1.0)
    assert Fitness(0.01, 0.02, 20).band == (0.0, pytest.approx(0.03))
    assert Fitness(0.99, 0.05, 20).band == (pytest.approx(0.94), pytest.approx(1.04))  # no such shares exist
    assert Fitness(3.0, 0.5, 20).band == (2.5, 3.5)


def test_no_two_agents_have_one_colour():
    assert len({agent_colour(index) for index in range(60)}) == 60


def test_few_decades_have_labels_between_them(load):
    run = load(lineage=[birth(i, None, 0, x=value) for i, value in enumerate((2e-5, 3e-4))])
    axis = hyperparameter_figure(run, "x")["layout"]["yaxis"]
    assert (axis["type"], axis["dtick"], axis["tickformat"]) == ("log", "D2", "~g")


@pytest.mark.parametrize(("speeds", "total"), [((500.0, 500.0), 500.0), ((500.0, 300.0), 800.0)])
def test_shared_values_count_once_and_shares_add_up(load, speeds, total):
    metrics = [train(i, 1, tokens_per_second=speed, **{"time/update": speed}) for i, speed in enumerate(speeds)]
    run = load(metrics=metrics)
    assert throughput_figure(run)["data"][0]["y"] == [total]
    assert phase_table(run) == [("update", f"{total:,.4g} s", "100.0 %")]


def test_exams_and_evolution_take_time_too(load):
    eval_lines = [{"kind": "eval", "agent": i, "generation": 1, "step": 4, "time/eval": 2.0} for i in range(3)]
    evolution = {"kind": "evolution", "generation": 1, "step": 4, "time/evolve": 1.0}
    run = load(metrics=[train(0, 4, 1, **{"time/rollout": 1.0}), *eval_lines, evolution])
    assert phase_table(run) == [("rollout", "1 s", "25.0 %"), ("eval", "2 s", "50.0 %"), ("evolve", "1 s", "25.0 %")]


def test_the_tree_shows_births_deaths_mutations_and_elites(load):
    change = {"gene": "learning_rate_of_actor", "old": 1e-4, "new": 3.14159e-4}
    lineage = [
        birth(0, None, 0),
        birth(1, None, 0),
        fitness(0, 0, 0.8),
        fitness(1, 0, math.nan, math.nan),
        {"event": "death", "agent": 1, "generation": 0, "reason": "<b>sick</b>"},
        {"event": "elite", "agent": 0, "generation": 0},
        birth(2, 0, 1),
        {"event": "mutation", "agent": 2, "generation": 1, "kind": "hyperparameters", "changes": [change]},
        fitness(0, 1, 0.8),
        fitness(2, 1, 0.9),
    ]
    run = load(lineage=lineage)
    figure = tree_figure(run)
    text = json.dumps(figure, ensure_ascii=False)
    nodes = next(t for t in figure["data"] if t.get("mode") == "markers+text")
    assert list(zip(nodes["x"], nodes["y"], nodes["text"])) == [(0, 0, "0"), (1, 0, "0"), (0, 1, "1"), (1, 1, "2")]
    labels = next(t for t in figure["data"] if t.get("mode") == "text")["text"]
    assert labels == ["0.800", "0.800", "<b>not finite</b>", "0.900<br>learning… 0.00031"]
    assert "learning_rate_of_actor 0.0001 → 0.000314" in text
    assert "agent 1 left: &lt;b&gt;sick" in text
    assert "agent 0 had the best exam of generation 0" in text


def test_the_winner_of_a_finished_run_has_a_star_in_the_last_generation(load):
    lineage = [
        birth(0, None, 0),
        fitness(0, 0, 0.5),
        {"event": "elite", "agent": 0, "generation": 0},
        fitness(0, 1, 0.5),
    ]
    run = load(lineage=lineage, summary={"elite": {"index": 0}})
    stars = next(t for t in tree_figure(run)["data"] if t.get("marker", {}).get("symbol") == "star")
    assert stars["x"] == [0, 1]
    assert stars["hovertext"] == ["agent 0 had the best exam of generation 0", "agent 0 is the elite"]


def test_the_tree_of_26_generations_fits_a_screen_of_1200_pixels(load):
    run = load(lineage=[birth(0, None, 0), *(fitness(0, generation, 0.5) for generation in range(26))])
    assert tree_width(run) <= 1095  # without the paddings of the page


@pytest.mark.parametrize(
    ("value", "text"), [(1e-5, "1e-5"), (0.00031416, "0.000314"), (8, "8"), (12345678.0, "1.23e+7"), ("grpo", "grpo")]
)
def test_values_are_short(value, text):
    assert short_value(value) == text


@pytest.mark.parametrize(
    ("base", "elite", "sentence"),
    [
        ((0.5, 0.025), (0.52, 0.025), "not clearly different from the base: +2.0 points ± 3.5 (one standard error)."),
        ((0.5, 0.025), (0.9, 0.015), "better than the base by 40.0 points ± 2.9"),
        ((0.9, 0.015), (0.5, 0.025), "worse than the base by 40.0 points ± 2.9"),
        ((2.0, 0.1), (3.0, 0.1), "better than the base by 1.000 ± 0.141"),
        ((math.nan, math.nan), (3.0, 0.1), "no finite test result"),
        ((0.5, 0.025, 350), (0.9, 0.015), "not comparable: 400 and 350 of their answers got a grade"),
    ],
)
def test_the_verdict_is_honest(load, base, elite, sentence):
    test = {who: dict(zip(("mean", "stderr", "n"), (*r, 400))) for who, r in (("base", base), ("elite", elite))}
    run = load(summary={"test": test})
    found = verdict(run)
    assert sentence in found["sentence"]
    if "±" in sentence:
        scores = {"base": (0.0, 1.0) * 200, "elite": (1.0,) * 400}
        for who, result in run.tests.items():
            score = replace(result.score, scores=scores[who])
            run.tests[who] = replace(result, score=score, questions="digest")
        assert re.search(r"± (2\.5|0\.025) \(one standard error, paired by question\)", verdict(run)["sentence"])
    for bar in found["bars"]:
        assert 0 <= bar["low"] <= bar["low"] + bar["span"] <= 100.01
        assert 0 <= bar["width"] <= 100


@pytest.mark.parametrize(
    ("base", "elite", "zero", "places"),
    [
        (0.5, 0.75, None, [(0.0, 50.0), (0.0, 75.0)]),
        (-1.0, 3.0, 25.0, [(0.0, 25.0), (25.0, 75.0)]),
        (-4.0, -1.0, 100.0, [(0.0, 100.0), (75.0, 25.0)]),
        (-5e-324, 0.0, 0.0, [(0.0, 0.0), (0.0, 0.0)]),
    ],
)
def test_bars_begin_at_zero_on_either_side(load, base, elite, zero, places):
    test = {who: {"mean": mean, "stderr": 0.0, "n": 4} for who, mean in (("base", base), ("elite", elite))}
    run = load(summary={"test": test})
    found = verdict(run)
    assert found["zero"] == zero
    assert [(bar["left"], bar["width"]) for bar in found["bars"]] == places


def test_an_agents_life_names_who_was_better_and_who_was_as_good(load):
    lineage = [birth(index, None, 0) for index in range(3)]
    lineage += [fitness(index, 0, mean) for index, mean in enumerate((0.5, 0.5, 0.25))]
    # Of a tie one has to leave: its place is among those of the exam.
    lineage += [{"event": "death", "agent": 1, "generation": 0, "reason": "left: place 2 of 3, 0.500"}]
    run = load(lineage=lineage)
    [alike, worse] = [[event["sentence"] for event in lives(run)[index]["events"]] for index in (1, 2)]
    assert "exam 0.500 ± 0.100, places 1 to 2 of 3 (a tie with agent 0)" in alike
    assert "exam 0.250 ± 0.100, place 3 of 3; the best, agent 0, had 0.500 ± 0.100" in worse


def test_tables_name_what_is_known(load):
    lineage = [birth(0, None, 0, lr=1e-3), fitness(0, 0, 0.5), birth(1, None, 0), birth(2, None, 0)]
    lineage += [fitness(1, 0, math.nan), {"event": "death", "agent": 1, "generation": 0, "reason": "sick"}]
    run = load(lineage=lineage, config={"environment": {"task": "t"}, "a": {"b": 1}})
    rows = lineage_table(run)
    assert [row["fitness"] for row in rows] == ["0.500 ± 0.100", "not finite", "has not trained yet"]
    assert rows[1]["left"] == "after generation 0: sick"
    won = load(lineage=lineage, summary={"elite": {"index": 0, "reason": "best exam, 0.500"}})
    assert [row["left"] for row in lineage_table(won)] == ["elite: best exam, 0.500", "after generation 0: sick", ""]
    assert facts(run)["Task"] == "t"
    halved = load(config={"training": {"pop_size": 4}}, summary={"agents": 1, "advice": ["the elite is early"]})
    assert list(halved.symptoms) == ["the elite is early"]
    page = render([halved])
    assert "<p>About the run as a whole</p>" in page
    assert "<p>What may keep agents from learning</p>" not in page
    assert facts(halved)["Population"] == "4, at the end 1"
    # What the budget decided is what the run had, whether it was set or not.
    lone, settings = [birth(0, None, 0), birth(4, 0, 1), fitness(0, 0, 0.5)], {"environment": {"eval_prompts": 20}}
    strategy = {"name": "knockout", "tournament_size": 1}
    given = load(lineage=lone, config={**settings, "training": {"pop_size": 1}, "selection_strategy": strategy})
    strategy, settings = {"name": "knockout", "tournament_size": 2}, {"environment": {"eval_prompts": 200}}
    decided = load(lineage=lone, config={**settings, "training": {"pop_size": 4}, "selection_strategy": strategy})
    assert facts(decided)["Population"] == "1"
    assert find_differences([given, decided]) == {}
    assert find_differences([given, halved])["training.pop_size"] == [1, 4]
    ungraded = load(lineage=[birth(0, None, 0), birth(4, 0, 1), fitness(0, 0, 0.5, n=51)], config=given.info["config"])
    assert find_differences([given, ungraded]) == {"exam questions graded": [20, 51]}
    # The ranges that applied, where all runs recorded them; else what was given.
    old = load(config={"mutation": {"rl_hp_selection": {"lr": {"min": None, "max": 0.1, "scale": None}}}})
    new, less = (load(config={"mutation": {"rl_hp_selection": {}}}) for _ in range(2))
    assert list(find_differences([old, new])) == ["mutation.rl_hp_selection", "mutation.rl_hp_selection.lr.max"]
    old.info["genes"], new.info["genes"], less.info["genes"] = {"lr": "[0.001, 0.1]"}, {"lr": "[0.001, 1]"}, {}
    assert find_differences([old, new, less]) == {"mutation.rl_hp_selection.lr": ["[0.001, 0.1]", "[0.001, 1]", None]}
    assert facts(old)["Genes"] == "lr in [0.001, 0.1]"
    assert "lr: '[0.001, 0.1]'" in configuration(old)["Configuration"]
    other = load(config={"environment": {"task": "t"}, "a": {"b": 2}})
    assert ("a.b", ["1", "2"]) in comparison([run, other], ["x", "y"])["settings"]


def test_samples_are_limited_in_number_and_length(tmp_path):
    root = write_run(tmp_path / "run")
    row = CompletionRecord(0, 1, 0, 0, 0, "p" * 5000, "c", "a", 0.0, 1, "stop")
    fields = {name: getattr(row, name) for name in CompletionRecord.__slots__}
    for step in range(30):
        rows = [CompletionRecord(**{**fields, "step": step, "group": group}) for group in range(10)]
        write_completions(root / "completions", step, rows)
    groups = sample_groups(load_run(root))
    assert len(groups) == 20 * 6
    assert {groups[0]["step"], groups[-1]["step"]} == {0, 29}
    assert groups[0]["prompt"].endswith("(truncated, 5,000 characters in total)")
    assert groups[0]["worst"] is None


def test_ungraded_completions_are_shown_without_a_rank(tmp_path):
    root = write_run(tmp_path / "run")
    rows = [
        CompletionRecord(0, 1, 0, 0, i, "p", "c", "a", reward, 1, "stop") for i, reward in enumerate((None, math.nan))
    ]
    write_completions(root / "completions", 1, rows)
    (group,) = sample_groups(load_run(root))
    assert (group["mean"], group["best"]["reward"], group["spread"]) == (None, None, 0)


@pytest.mark.parametrize(("count", "most"), [(3, 5), (10, 4), (10, 1), (0, 3)])
def test_picking_evenly_keeps_both_ends(count, most):
    items = list(range(count))
    found = thin_out(items, most)
    assert len(found) == min(count, most)
    assert sorted(set(found)) == found
    if most > 1 and count:
        assert (found[0], found[-1]) == (items[0], items[-1])
