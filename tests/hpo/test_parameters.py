"""Ranges are declared once, read off the model, and refuse what does not fit with a sentence."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from agilerl import hpo
from agilerl.errors import ConfigError
from agilerl.hpo.parameters import (
    Evolve,
    Gene,
    HyperparameterConfig,
    RLParameter,
    check_values,
    genes_from,
    genes_in_force,
)


class Config(BaseModel):
    beta: Annotated[float, Field(ge=0), Evolve(1e-4, 1e-2, scale="log")] = 0.001
    group_size: Annotated[int, Field(ge=2), Evolve(2, 16)] = 8
    temperature: Annotated[float | None, Evolve(0.6, 1.2, scale="linear")] = 1.0
    loss: Annotated[Literal["grpo", "dr_grpo"], Evolve(scale="choice")] = "grpo"
    whiten: Annotated[bool, Evolve(scale="choice")] = True
    reducer: Annotated[str, Evolve(choices=("mean", "sum", "token"))] = "mean"
    name: str = "grpo"


def test_genes_are_read_off_the_fields_in_order():
    assert genes_from(Config) == {
        "beta": Gene("beta", "float", min=1e-4, max=1e-2, scale="log"),
        "group_size": Gene("group_size", "int", min=2, max=16, scale="log"),
        "temperature": Gene("temperature", "float", min=0.6, max=1.2, scale="linear"),
        "loss": Gene("loss", "choice", scale="choice", choices=("grpo", "dr_grpo")),
        "whiten": Gene("whiten", "choice", scale="choice", choices=(False, True)),
        "reducer": Gene("reducer", "choice", scale="choice", choices=("mean", "sum", "token")),
    }
    assert list(genes_from(Config)) == ["beta", "group_size", "temperature", "loss", "whiten", "reducer"]


def test_hp_config_replaces_the_declared_genes():
    # The field is an integer, whatever dtype says.
    genes = genes_in_force(Config, HyperparameterConfig(group_size=RLParameter(4, 12)))
    assert genes == {"group_size": Gene("group_size", "int", min=4, max=12, factors=(0.8, 1.2))}
    assert genes_in_force(Config, None) == genes_from(Config)
    assert genes_in_force(Config, HyperparameterConfig()) == {}


def test_a_misspelt_hyperparameter_names_the_nearest():
    with pytest.raises(ConfigError, match=r"'group_sise'.*'group_size'\?"):
        genes_in_force(Config, HyperparameterConfig(group_sise=RLParameter(2, 4)))


def test_hyperparameter_config_is_a_mapping_with_the_documented_names():
    lr, batch = RLParameter(1e-7, 1e-4), RLParameter(8, 64, dtype=int)
    config = HyperparameterConfig(lr=lr, batch_size=batch)
    assert config.names() == ["lr", "batch_size"]
    assert list(config.items()) == [("lr", lr), ("batch_size", batch)]
    assert config["lr"] is lr
    assert "lr" in config
    assert "beta" not in config
    assert config.get("beta") is None
    assert len(config) == 2
    assert repr(config).startswith("HyperparameterConfig(lr=RLParameter(min=1e-07, max=0.0001, shrink_factor=0.8")
    with pytest.raises(ConfigError, match="did you mean 'lr'"):
        config["lrr"]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RLParameter(1.0, 1.0), "min must be below max"),
        (lambda: RLParameter(0.5, 4, dtype=int), "integer bounds, found"),
        (lambda: RLParameter(0, 1, shrink_factor=1.1), r"a number .* for shrink_factor"),
        (lambda: RLParameter(0, 1, grow_factor=0.9), "above 1 for grow_factor"),
        (lambda: Evolve(0, 1), "log range needs min > 0"),
        (lambda: Evolve(1e-3), "a range needs min and max"),
        (lambda: Evolve(1, 2, scale="cubic"), "scale.*'cubic'"),
        (lambda: Evolve(choices=("a", "a")), "two different choices"),
        (lambda: Evolve(1, 2, choices=("a", "b")), "not `min` and `max`"),
        (lambda: Evolve(1, 2, resample=1.5), "for resample"),
        (lambda: genes_from(int), "pydantic model class"),
    ],
)
def test_bad_declarations_raise_a_sentence(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_a_text_field_needs_choices():
    class Bad(BaseModel):
        name: Annotated[str, Evolve(1, 2)] = "x"

    with pytest.raises(ConfigError, match=r"^name: .*choices"):
        genes_from(Bad)


@pytest.mark.parametrize(
    ("gene", "value", "fits"),
    [
        (Gene("lr", "float", min=1e-6, max=1e-3), 1e-6, True),
        (Gene("lr", "float", min=1e-6, max=1e-3), 1e-3, True),
        (Gene("lr", "float", min=1e-6, max=1e-3), 2e-3, False),
        (Gene("lr", "float", min=1e-6, max=1e-3), float("nan"), False),
        (Gene("lr", "float", min=1e-6, max=1e-3), "1e-4", False),
        (Gene("g", "int", min=2, max=16), 8, True),
        (Gene("g", "int", min=2, max=16), 8.5, False),
        (Gene("g", "int", min=0, max=16, scale="linear"), True, False),
        (Gene("r", "choice", choices=("mean", "sum")), "sum", True),
        (Gene("r", "choice", choices=("mean", "sum")), "max", False),
        (Gene("b", "choice", choices=(False, True)), 1, False),
    ],
)
def test_values_are_checked_against_their_range(gene, value, fits):
    assert gene.contains(value) is fits
    if fits:
        check_values({gene.name: gene}, {gene.name: value})
    else:
        with pytest.raises(ConfigError, match=rf"^{gene.name} = {re.escape(repr(value))} lies outside the range"):
            check_values({gene.name: gene}, {gene.name: value})


def test_the_range_error_says_what_to_do():
    with pytest.raises(ConfigError) as caught:
        check_values({"lr": Gene("lr", "float", min=1e-6, max=1e-3)}, {"lr": 0.1})
    assert str(caught.value) == (
        "lr = 0.1 lies outside the range it evolves in, [1e-06, 0.001]; change the value, or widen the range with "
        "hp_config=HyperparameterConfig(lr=RLParameter(min=..., max=...))."
    )
    with pytest.raises(ConfigError, match=r"lr .*found beta"):
        check_values({"lr": Gene("lr", "float", min=1e-6, max=1e-3)}, {"beta": 0.1})


def test_positions_in_a_range():
    lr = Gene("lr", "float", min=1e-6, max=1e-2)
    assert lr.from_unit(0.5) == pytest.approx(1e-4)  # the middle of four decades
    assert lr.to_unit(1e-5) == pytest.approx(0.25)
    linear = Gene("t", "float", min=0.5, max=1.5, scale="linear")
    assert linear.from_unit(0.25) == pytest.approx(0.75)
    whole = Gene("g", "int", min=1, max=3, scale="linear")
    # Each of three integers owns a third: the ends are as likely as the middle.
    assert [whole.from_unit(u) for u in (0.0, 0.32, 0.34, 0.66, 0.68, 1.0)] == [1, 1, 2, 2, 3, 3]
    assert all(type(whole.from_unit(u)) is int for u in (0.0, 0.5, 1.0))


@pytest.mark.processes
def test_evolution_imports_no_torch():
    modules = sorted(path.stem for path in Path(hpo.__file__).parent.glob("*.py"))
    code = ";".join(f"import agilerl.hpo.{name}" for name in modules if name != "__init__")
    check = "import sys; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"{code};{check}"], check=True)
