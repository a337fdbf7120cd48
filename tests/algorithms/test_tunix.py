"""docs/coming_from_tunix.md: our names in it exist, our values are accepted, and what was asked for is there."""

from pathlib import Path

import pytest

from agilerl.algorithms import ALGORITHMS, GRPO

PAGE = (Path(__file__).parents[2] / "docs" / "coming_from_tunix.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    lines = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0].splitlines()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return table[2:]


def code(cell: str) -> str:
    return cell.split("`")[1]


SETTINGS = [(code(r[0]), code(r[1]), r[2]) for r in rows("Settings")]
VALUES = [(code(r[0]), code(r[1]), code(r[2])) for r in rows("Values")]


@pytest.mark.parametrize(("theirs", "ours", "algorithm"), SETTINGS)
def test_our_name_exists(theirs: str, ours: str, algorithm: str) -> None:
    assert ours in ALGORITHMS[algorithm].Config.model_fields, theirs


@pytest.mark.parametrize(("setting", "theirs", "ours"), VALUES)
def test_our_value_is_accepted(setting: str, theirs: str, ours: str) -> None:
    config = GRPO.Config(**{setting: ours, "max_output_tokens": 8})
    assert getattr(config, setting) == ours


def test_nothing_that_was_promised_is_missing() -> None:
    promised = {"loss_agg_mode", "kl_clamp_value", "kl_loss_mode", "epsilon_high", "epsilon_c", "num_iterations"}
    assert promised | {"advantage_estimator"} <= {theirs for theirs, _, _ in SETTINGS}
    assert len({theirs for theirs, _, _ in SETTINGS}) == len(SETTINGS)
    assert {"seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "fixed-length"} == {
        ours for setting, _, ours in VALUES if setting == "loss_norm"
    }
