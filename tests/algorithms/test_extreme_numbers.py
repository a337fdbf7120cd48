"""A hyperparameter that no float32 tensor holds is refused by name, whichever way it comes."""

import pytest

from agilerl.algorithms import ALGORITHMS
from agilerl.checks.validation import validated
from agilerl.errors import ConfigError

FLOATS = [
    (algorithm, name)
    for algorithm, made in ALGORITHMS.items()
    for name, field in made.Config.model_fields.items()
    if "float" in str(field.annotation)
]


@pytest.mark.parametrize(("algorithm", "name"), FLOATS)
def test_numbers_beyond_float32_are_refused(algorithm: str, name: str):
    model = ALGORITHMS[algorithm].Config
    start = None if model.model_fields[name].is_required() else model().model_dump()[name]
    for number in (1e39, 1e308):
        value = {"a": number} if isinstance(start, dict) else number
        with pytest.raises(ConfigError, match=name):
            validated(model, {name: value})
        with pytest.raises(ConfigError, match=name):
            setattr(model(), name, value)


def test_a_pair_and_what_float32_holds():
    model = ALGORITHMS["GRPO"].Config
    with pytest.raises(ConfigError, match=r"clip_coef: .* float32"):
        validated(model, {"clip_coef": (0.5, 1e39)})
    assert validated(model, {"adv_clip_range": 3e38, "kl_clamp_value": 3e38, "delta": 3e38})
