"""A mutation moves, stays in range, prefers no direction and reaches the whole range."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agilerl.hpo.mutation import mutate_value
from agilerl.hpo.parameters import Gene
from agilerl.streams import stream

LR = Gene("lr", "float", min=1e-7, max=1e-3)
DOCUMENTED = Gene("lr", "float", min=1e-7, max=1e-3, factors=(0.8, 1.2))


@st.composite
def genes_and_values(draw):
    scale = draw(st.sampled_from(["log", "linear"]))
    factors = draw(st.sampled_from([None, (0.8, 1.2), (0.5, 3.0)]))
    seed = draw(st.integers(0, 2**32))
    if draw(st.booleans()):
        low = draw(st.integers(1 if scale == "log" else -5, 50))
        high = low + draw(st.integers(1, 100))
        value = draw(st.integers(low, high))
        return Gene("g", "int", min=low, max=high, scale=scale, factors=factors), value, seed
    low = draw(st.floats(1e-8, 1.0) if scale == "log" else st.floats(-1.0, 1.0))
    high = low + draw(st.floats(1e-3, 1e3))
    value = min(max(draw(st.floats(low, high)), low), high)
    return Gene("g", "float", min=low, max=high, scale=scale, factors=factors), value, seed


@settings(max_examples=400, deadline=None, derandomize=True, database=None)
@given(genes_and_values())
def test_every_mutation_moves_and_stays_in_range(case):
    gene, value, seed = case
    moved = mutate_value(gene, value, stream(seed, "test"))
    assert moved != value
    assert gene.contains(moved)
    assert type(moved) is (int if gene.dtype == "int" else float)
    if gene.dtype == "int":
        assert abs(moved - value) >= 1
    assert moved == mutate_value(gene, value, stream(seed, "test"))


def moves(gene, value, count=400):
    return [mutate_value(gene, value, stream(seed, "moves")) for seed in range(count)]


def test_integers_can_grow_under_the_documented_factors():
    # int(4 * 1.2) is 4: rounded towards zero, integers could only ever shrink.
    gene = Gene("g", "int", min=1, max=64, factors=(0.8, 1.2))
    assert set(moves(gene, 4)) == {3, 5}
    assert set(moves(gene, 1)) == {2}
    assert set(moves(gene, 64)) == {51}
    assert set(moves(gene, 20)) == {16, 24}


def test_documented_factors_are_a_fair_coin():
    moved = moves(DOCUMENTED, 1e-5, 1000)
    assert sorted(set(moved)) == pytest.approx([0.8e-5, 1.2e-5])
    grown = sum(value > 1e-5 for value in moved)
    assert 430 < grown < 570  # 500 +- 4.4 standard deviations


def test_factors_cannot_move_a_zero_so_it_is_drawn_from_the_range():
    gene = Gene("beta", "float", min=0.0, max=0.1, scale="linear", factors=(0.8, 1.2))
    moved = moves(gene, 0.0)
    assert min(moved) > 0
    assert np.mean(moved) == pytest.approx(0.05, abs=0.008)


def test_a_value_outside_its_range_comes_back_into_it():
    assert all(1e-7 <= value <= 1e-3 for value in moves(LR, 1.0))


def test_log_kernel_is_symmetric_in_log_space_with_a_heavy_tail():
    middle = 1e-5  # the middle of [1e-7, 1e-3]
    steps = np.array([math.log10(value / middle) for value in moves(LR, middle, 4000)])
    assert abs(np.mean(steps > 0) - 0.5) < 0.03
    # Student(2) of scale 0.4 decades has its median at 0.33, and 10 % are fresh draws over +-2 decades.
    assert np.median(np.abs(steps)) == pytest.approx(0.38, abs=0.04)
    assert 0.08 < np.mean(np.abs(steps) > 1.2) < 0.20  # a normal step of the same median: 0.013


def test_ten_percent_are_drawn_afresh():
    tiny = Gene("lr", "float", min=1e-7, max=1e-3, step=1e-9)
    far = np.mean([abs(math.log10(value / 1e-5)) > 1e-3 for value in moves(tiny, 1e-5, 4000)])
    assert far == pytest.approx(0.1, abs=0.02)


def walk(gene, start, steps, seed):
    path = [start]
    for step in range(steps):
        path.append(mutate_value(gene, path[-1], stream(seed, "walk", step)))
    return path


def test_without_selection_there_is_no_drift():
    # Reflection at the ends keeps the uniform distribution over the range; clipping would pile values up there.
    assert not {1e-7, 1e-3} & set(moves(LR, 2e-7))
    ends = np.array([LR.to_unit(walk(LR, 1e-5, 30, seed)[-1]) for seed in range(400)])
    counts = np.histogram(ends, bins=4, range=(0, 1))[0]
    assert (np.abs(counts - 100) < 40).all()  # binomial(400, 1/4): standard deviation 8.7


def test_twenty_mutations_cross_decades_where_the_documented_factors_stay():
    spans = [max(path) / min(path) for seed in range(100) if (path := walk(LR, 1e-5, 20, seed))]
    documented = [max(path) / min(path) for seed in range(100) if (path := walk(DOCUMENTED, 1e-5, 20, seed))]
    assert np.median(spans) > 100
    assert np.median(documented) < 10


def test_a_choice_moves_to_every_other_choice():
    gene = Gene("loss", "choice", choices=("a", "b", "c"))
    moved = moves(gene, "b")
    assert set(moved) == {"a", "c"}
    assert 140 < moved.count("a") < 260


def test_a_range_of_two_integers_flips():
    gene = Gene("g", "int", min=3, max=4)
    assert set(moves(gene, 3, 100)) == {4}
    assert set(moves(gene, 4, 100)) == {3}


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(genes_and_values(), st.sampled_from(["up", "down"]))
def test_a_monotone_gene_moves_one_way_and_stays_at_its_end(case, way):
    gene, value, seed = case
    gene = replace(gene, monotone=way)
    moved = mutate_value(gene, value, stream(seed, "test"))
    assert gene.contains(moved)
    assert type(moved) is (int if gene.dtype == "int" else float)
    end = gene.max if way == "up" else gene.min
    assert moved == value if value == end else (moved > value) == (way == "up") and moved != value
    assert Gene(**json.loads(json.dumps(gene.state()))) == gene


def test_a_monotone_gene_next_to_its_end_does_not_turn_back():
    low = 0.12290001634898663  # exp(log(low)) is above it
    gene = Gene("g", "float", min=low, max=low + 1, monotone="down")
    value = math.nextafter(low, 1)
    assert {mutate_value(gene, value, stream(seed, "test")) for seed in range(20)} == {low}


def test_a_monotone_gene_steps_as_far_as_any_other():
    both, up = moves(LR, 1e-5), moves(replace(LR, monotone="up"), 1e-5)
    distances = [abs(math.log(value / 1e-5)) for value in both]
    assert [math.log(value / 1e-5) for value in up] == pytest.approx([min(d, math.log(100)) for d in distances])
