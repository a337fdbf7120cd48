"""The start covers the ranges evenly, and member 0 is the user's configuration."""

import numpy as np
import pytest

from agilerl.errors import ConfigError
from agilerl.hpo.parameters import Gene
from agilerl.hpo.spread import initial_hyperparameters

GENES = {
    "lr": Gene("lr", "float", min=1e-7, max=1e-3),
    "group_size": Gene("group_size", "int", min=2, max=16),
    "reducer": Gene("reducer", "choice", choices=("mean", "sum")),
}
BASE = {"lr": 1e-5, "group_size": 8, "reducer": "mean"}


@pytest.mark.parametrize("size", [1, 2, 4, 7, 33])
def test_member_zero_is_the_users_and_all_are_in_range(size):
    members = initial_hyperparameters(GENES, {**BASE, "batch_size": 32}, size, seed=3)
    assert len(members) == size
    assert members[0] == BASE
    for member in members:
        assert all(GENES[name].contains(value) for name, value in member.items())
        assert set(member) == set(GENES)


def test_learning_rates_fall_into_different_quarters_of_the_log_range():
    for seed in range(20):
        members = initial_hyperparameters({"lr": GENES["lr"]}, BASE, 9, seed)
        quarters = [int(4 * GENES["lr"].to_unit(member["lr"])) for member in members[1:]]
        # Eight scrambled Sobol points: exactly two in each quarter. Random ones would leave one empty in 38 % of seeds.
        assert np.bincount(quarters, minlength=4).tolist() == [2, 2, 2, 2]


def test_same_seed_same_start_and_a_larger_population_keeps_it():
    small = initial_hyperparameters(GENES, BASE, 4, seed=1)
    assert small == initial_hyperparameters(GENES, BASE, 4, seed=1)
    assert small == initial_hyperparameters(GENES, BASE, 9, seed=1)[:4]
    assert small != initial_hyperparameters(GENES, BASE, 4, seed=2)


def test_init_same_copies_the_configuration():
    members = initial_hyperparameters(GENES, BASE, 3, seed=1, init="same")
    assert members == [BASE, BASE, BASE]
    assert members[0] is not members[1]


def test_a_start_outside_of_its_range_is_refused():
    with pytest.raises(ConfigError, match=r"lr = 1\.0 lies outside"):
        initial_hyperparameters(GENES, {**BASE, "lr": 1.0}, 4, seed=0)
