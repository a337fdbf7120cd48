"""What rows begin with in common: found whole, from the ids alone, and kept by every part of a batch."""

from collections.abc import Sequence
from itertools import combinations, takewhile

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from agilerl.data.tree import SHORTEST, TokenTree, token_tree

PIECES = ([1] * 5, [2] * 9, [3] * 12, [1] * 5 + [4] * 9, [0], [0] * 3)
"""Rows are made of these, so that they have a lot in common."""


@st.composite
def padded_rows(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    pieces = st.lists(st.sampled_from(PIECES), min_size=1, max_size=5)
    rows = [sum(row, list[int]()) for row in draw(st.lists(pieces, min_size=1, max_size=9))]
    width = max(map(len, rows)) + draw(st.integers(0, 3))
    return torch.tensor([row + [0] * (width - len(row)) for row in rows]), torch.tensor([len(row) for row in rows])


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Return how many numbers two lists begin with in common."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b))))


def parts_of(tree: TokenTree, row: int) -> list[tuple[int, int]]:
    return [(int(tree.starts[part]), int(tree.ends[part])) for part in tree.paths[row]]


@settings(max_examples=200)
@given(padded_rows())
def test_every_row_is_its_common_parts_and_a_rest(rows: tuple[Tensor, Tensor]) -> None:
    ids, lengths = rows
    tree = token_tree(ids, lengths)
    for row in range(len(ids)):
        depth = 0
        for part, (start, end) in zip(tree.paths[row], parts_of(tree, row)):
            assert start == depth
            assert end - start >= SHORTEST
            assert ids[tree.rows[part], start:end].tolist() == ids[row, start:end].tolist()
            depth = end
        assert depth == tree.own[row] < lengths[row]


@settings(max_examples=200)
@given(padded_rows())
def test_two_rows_compute_less_than_the_shortest_part_twice(rows: tuple[Tensor, Tensor]) -> None:
    ids, lengths = rows
    tree = token_tree(ids, lengths)
    said = [row[:length].tolist() for row, length in zip(ids, lengths)]
    for a, b in combinations(range(len(ids)), 2):
        once = common(tree.paths[a], tree.paths[b])
        shared = parts_of(tree, a)[once - 1][1] if once else 0
        most = min(common(said[a], said[b]), len(said[a]) - 1, len(said[b]) - 1)
        assert shared <= most < shared + SHORTEST


@given(padded_rows())
def test_parts_are_of_several_rows_and_come_after_those_before_them(rows: tuple[Tensor, Tensor]) -> None:
    tree = token_tree(*rows)
    having = [[row for row, path in enumerate(tree.paths) if part in path] for part in range(len(tree.rows))]
    assert all(len(own) > 1 for own in having)
    assert tree.rows.tolist() == [own[0] for own in having]
    assert all(parent < part for part, parent in enumerate(tree.parents.tolist()))
    # Rows in the order of their last parts have what they share side by side.
    order = tree.of.argsort(stable=True).tolist()
    for own in having:
        places = sorted(order.index(row) for row in own)
        assert places == list(range(places[0], places[0] + len(own)))


@given(padded_rows(), st.randoms(use_true_random=False))
def test_some_rows_keep_the_parts_of_all(rows: tuple[Tensor, Tensor], random: st.DataObject) -> None:
    ids, lengths = rows
    tree = token_tree(ids, lengths)
    chosen = random.sample(range(len(ids)), random.randint(1, len(ids)))  # type: ignore[attr-defined]
    some = tree.select(torch.tensor(chosen))
    assert [parts_of(some, place) for place in range(len(chosen))] == [parts_of(tree, row) for row in chosen]
    for place, path in enumerate(some.paths):
        for part in path:
            first = chosen[int(some.rows[part])]
            assert ids[first, : some.ends[part]].tolist() == ids[chosen[place], : some.ends[part]].tolist()
