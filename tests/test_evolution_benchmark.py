"""The arms of ``benchmarking/evolution.py`` start from one configuration, and are summed up right."""

import json
from pathlib import Path

import pytest

from agilerl.config.manifest import load_manifest
from agilerl.training.resolved import resolve
from benchmarking import genes
from benchmarking.evolution import (
    ALONE,
    ARMS,
    ROOT,
    STRATA,
    Run,
    interquartile_mean,
    interval,
    one,
    pack,
    plot,
    reached,
    results,
    run_all,
    table,
)


@pytest.mark.parametrize("stratum", STRATA)
@pytest.mark.parametrize("arm", ARMS)
def test_every_arm_is_a_valid_run_from_the_same_configuration(arm: str, stratum: str) -> None:
    resolved = resolve(load_manifest(None, Run("gcd", stratum, arm, 3, 80_000).settings()))
    rate = 1e-3 * STRATA[stratum]
    assert resolved.hyperparameters.lr == pytest.approx(rate)  # type: ignore[attr-defined]
    assert resolved.config.training.max_tokens == (20_000 if arm == "quarter" else 80_000)
    assert resolved.config.training.seed == 3
    if arm in ALONE:
        assert (resolved.config.training.pop_size, dict(resolved.genes)) == (1, {})
        return
    founders = resolved.founder_genes()
    assert (founders["lr"].min, founders["lr"].max) == pytest.approx((rate / 10, min(3 * rate, founders["lr"].max)))
    assert len(founders) == (4 if stratum == "four_genes" else 1)


def test_numbers_of_the_table() -> None:
    assert interquartile_mean([1.0, 2.0, 4.0, 100.0]) == 3.0
    assert interquartile_mean([1.0, 4.0]) == 2.5
    low, high = interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    assert 1.0 <= low < 4.5 < high <= 8.0
    row = {"task": "gcd", "stratum": "right", "tokens": 1000, "cpu_seconds": 2.0, "elsewhere": {"chain_sum": 0.5}}
    row |= {"curve": [[0.5, 0.7], [1.0, 0.8]], "base": 0.6}
    found = [
        {**row, "arm": arm, "seed": seed, "test": test}
        for arm, tests in (("ours", (0.8, 0.9)), ("formula_decay", (0.7, 0.9)))
        for seed, test in enumerate(tests)
    ]
    assert "| ours | 2 | 0.850 | +5.0 | +0.0 +10.0 | 0.800 | 1k | 0.500 | 2 |" in table(found)


def test_what_is_done_or_being_done_is_not_done_again(tmp_path: Path) -> None:
    done, busy = (Run("gcd", "right", "ours", seed, 1000) for seed in (1, 2))
    (tmp_path / done.name).write_text(json.dumps({"seed": 1}))
    (tmp_path / f"{busy.name}.running").touch()
    run_all(tmp_path, [done, busy])
    assert results(tmp_path) == [{"seed": 1}]


def test_packed_results_are_read_again_and_drawn(tmp_path: Path) -> None:
    row = {"task": "gcd", "stratum": "right", "tokens": 1000, "arm": "ours", "seed": 1, "test": 0.8, "base": 0.6}
    never, early = {**row, "curve": [[1.0, 0.7]]}, {**row, "seed": 2, "curve": [[0.25, 0.8], [1.0, 0.7]]}
    for result in (never, early):
        (tmp_path / f"{result['seed']}.json").write_text(json.dumps(result))
    pack(tmp_path, tmp_path / "all.txt")
    assert results(tmp_path / "all.txt") == [never, early]
    assert [reached(result) for result in (never, early)] == [float("inf"), 250]
    drawn = plot([never, early], tmp_path / "figure")
    assert [path.name for path in drawn] == ["figure_curves_1k.svg", "figure_seeds_1k.svg"]
    assert "best exam so far" in drawn[0].read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("arm", ["tpe", "replayed"])
def test_arms_of_several_runs_count_their_own_tokens(arm: str) -> None:
    found = one(Run("gcd", "right", arm, 1, 60_000))
    # Each of the trials has at least an iteration and an exam.
    assert 60_000 <= found["spent"] < (120_000 if arm == "tpe" else 72_000)
    assert found["test"] > found["base"] - 3 * found["stderr"]
    assert found["curve"][-1][0] == 1.0


def test_the_pages_show_the_committed_results() -> None:
    committed = ROOT / "benchmarking" / "results"
    for name, shown, page in (
        ("evolution", table, "evolution"),
        ("operators", lambda found: table(found, against="often"), "search_appendix"),
        ("genes", genes.table, "evolution"),
    ):
        assert shown(results(committed / f"{name}.json")).strip() in (ROOT / "docs" / f"{page}.md").read_text(), name


def test_the_readme_shows_the_committed_results() -> None:
    found = results(ROOT / "benchmarking" / "results" / "evolution.json")
    readme = (ROOT / "README.md").read_text()
    names = {"formula": "one agent", "formula_decay": "one agent, annealed", "ours": "**the default search**"}
    for arm, name in (*names.items(), ("random", "four agents, no selection (random)")):
        tests = [
            [r["test"] for r in found if (r["task"], r["arm"], r["stratum"]) == ("gcd", arm, stratum)]
            for stratum in ("right", "high", "low")
        ]
        shown = next(line for line in readme.splitlines() if line.startswith(f"| {name} |"))
        cells = [float(cell) for cell in shown.split("|")[2:5]]
        assert cells == pytest.approx([interquartile_mean(own) for own in tests], abs=6e-4), name
