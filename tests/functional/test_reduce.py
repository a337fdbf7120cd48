"""The metric reducer: no split changes a number."""

import itertools
import json
import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agilerl.functional import MetricReducer

REDUCTIONS = ["mean", "sum", "min", "max", "std"]


def by_hand(values):
    return {
        "mean": statistics.fmean(values),
        "sum": math.fsum(values),
        "min": min(values),
        "max": max(values),
        "std": statistics.stdev(values) if len(values) > 1 else 0.0,
    }


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(-100, 100), min_size=1, max_size=20),
    cuts=st.lists(st.integers(0, 20), max_size=4),
    ranks=st.integers(1, 3),
)
def test_any_split_gives_the_same_numbers(values, cuts, ranks):
    edges = [0, *sorted(min(c, len(values)) for c in cuts), len(values)]
    reducers = [MetricReducer() for _ in range(ranks)]
    for i, (start, stop) in enumerate(itertools.pairwise(edges)):
        for name in REDUCTIONS:
            reducers[i % ranks].add(name, torch.tensor(values[start:stop], dtype=torch.float64), reduction=name)
    total = MetricReducer()
    for reducer in reducers:
        total.merge(MetricReducer.from_state(json.loads(json.dumps(reducer.state()))))
    expected = by_hand(values)
    for name, value in total.result().items():
        assert value == pytest.approx(expected[name], rel=1e-9, abs=1e-9)
    assert list(total.result()) == sorted(REDUCTIONS)


def test_a_mean_weighs_every_token_once():
    reducer = MetricReducer()
    kl = torch.tensor([[1.0, 2.0, 3.0], [8.0, float("nan"), float("nan")]])
    mask = kl.isfinite()
    for row in range(2):
        reducer.add("kl", kl[row], mask[row])
    assert reducer.result() == {"kl": 3.5}  # 14 / 4; an average of the rows' averages would be 5


def test_numbers_ratios_and_counts():
    reducer = MetricReducer()
    for tokens in (3, 10**15, 7):
        reducer.add("num_tokens", tokens, reduction="sum")
    reducer.add_ratio("clip_ratio", torch.tensor(3.0), torch.tensor(4))
    reducer.add_ratio("clip_ratio", 1.0, 12.0)
    reducer.add_ratio("clip_ratio", 0.0, 0.0)
    reducer.add("nothing", torch.zeros(3), torch.zeros(3, dtype=torch.bool))
    assert reducer.result() == {"clip_ratio": 0.25, "num_tokens": 10**15 + 10}


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("first", [True, False])
def test_a_nan_is_not_lost(reduction, first):
    reducer = MetricReducer()
    for value in (math.nan, 1.0) if first else (1.0, math.nan):
        reducer.add("loss", value, reduction=reduction)
    assert math.isnan(reducer.result()["loss"])


def test_one_name_has_one_reduction():
    reducer = MetricReducer()
    reducer.add("loss", 1.0)
    with pytest.raises(ValueError, match=r"'loss' .*'mean'"):
        reducer.add("loss", 1.0, reduction="sum")
    with pytest.raises(ValueError, match=r"^reduction "):
        reducer.add("other", 1.0, reduction="median")
