"""What a configuration resolves to: one typed object that nothing changes, and what a process of several sees of it."""

from dataclasses import FrozenInstanceError

import pytest

from agilerl.algorithms import CISPO, GRPO
from agilerl.config.manifest import load_manifest
from agilerl.config.run import RunConfig
from agilerl.training.resolved import resolve


def test_all_that_follows_from_a_configuration_is_in_one_typed_object() -> None:
    found = resolve(
        load_manifest(
            None,
            [
                *("algorithm={name: 'choice[GRPO, CISPO]', lr: 2e-4}", "training.seed=7"),
                *("mutation.rl_hp_selection={lr: {max: 1e-3}}", "network.attn_implementation=eager"),
                "network.use_sequence_packing=true",
                *("mutation.mutate_elite=true", "selection_strategy.tournament_size=3"),
            ],
        )
    )
    assert (found.algorithm, found.algorithms) == (GRPO, (GRPO, CISPO))
    assert (found.hyperparameters.lr, found.hyperparameters.seed) == (2e-4, 7)  # type: ignore[attr-defined]
    assert found.hyperparameters.model_fields_set == {"lr", "max_output_tokens", "seed"}
    assert (found.options.use_sequence_packing, found.options.attn_implementation) == (True, "eager")
    assert (found.genes["lr"].max, set(found.genes)) == (1e-3, {"lr", "algorithm"})
    assert (found.mutations.mutate_elite, found.selection.tournament_size) == (True, 3)  # type: ignore[attr-defined]
    with pytest.raises(FrozenInstanceError):
        found.genes = {}  # type: ignore[misc]


GIVEN = "mutation.rl_hp_selection={group_size: {min: 4, max: 12}, beta: {min: 0, max: 0.01}, lr: {min: 1e-4}}"


def test_a_start_outside_a_given_range_is_moved_to_its_nearer_end() -> None:
    with pytest.warns(UserWarning, match=r"outside the range it evolves in, \[.*\]: it starts at") as said:
        found = resolve(load_manifest(None, [GIVEN, "algorithm.group_size=16", "algorithm.beta=0.04"]))
    start = found.hyperparameters
    assert (start.group_size, start.beta, start.lr) == (12, 0.01, 1e-4)  # type: ignore[attr-defined]
    assert sorted(str(one.message).partition("=")[0] for one in said) == ["beta", "group_size", "lr"]
    again = resolve(RunConfig.from_dict(found.document()))
    assert again.document() == found.document()  # without a further warning
    # A rate that was not given is still that of the base, within the range.
    assert found.settled(1e-3).hyperparameters.lr == 1e-3  # type: ignore[attr-defined]


def test_a_range_from_zero_is_linear() -> None:
    found = resolve(load_manifest(None, ["mutation.rl_hp_selection={beta: {min: 0, max: 0.01}, lr: {}}"]))
    assert [found.genes[name].scale for name in ("beta", "lr")] == ["linear", "log"]
    assert found.genes["beta"].from_unit(0.0) == 0.0
