"""Copies of hot experts: which ranks they fill, and how the rows of an expert are split."""

import random
from itertools import pairwise

import pytest

from threefold.layout.replicas import SPLITS, Replicas, place_replicas


def test_rows_are_split_as_counted_by_hand() -> None:
    """Rank 0 owns 14 of 16 rows; a mean of 8 leaves it 6 too many, which a copy of its hottest expert takes."""
    placed = place_replicas([12, 2, 1, 1], num_ranks=2, slots=1)
    assert placed.rows == {0: {0: 6.0, 1: 6.0}}
    assert placed.copied_to == ((), (0,))
    # Slots of rank 0: experts 0 and 1 and an empty one; of rank 1: experts 2 and 3 and the copy.
    assert [placed.slot(0, 0), placed.slot(3, 1), placed.slot(0, 1)] == [0, 4, 5]
    # Each rank is the source of 6 rows of expert 0 and keeps them.
    assert placed.split(0, source=0) == [0] * SPLITS
    assert placed.split(0, source=1) == [5] * SPLITS


def test_a_source_without_a_copy_fills_what_is_left() -> None:
    """Four sources of 4 rows each; rank 0 may compute 7 and rank 1 9: each keeps its own 4, and gets 3 and 5 more."""
    placed = Replicas(4, 4, 1, {0: {0: 7.0, 1: 9.0}})
    assert placed.shares(0, source=0) == {0: 1.0, 1: 0.0}
    assert placed.shares(0, source=2) == pytest.approx({0: 3 / 8, 1: 5 / 8})


@pytest.mark.parametrize("seed", range(20))
def test_placement_fills_ranks_to_the_mean(seed: int) -> None:
    draw = random.Random(seed)
    num_ranks, local = draw.choice((2, 3, 4, 8, 32)), draw.choice((2, 4, 8))
    slots = draw.choice((1, 2))
    load = [draw.random() ** draw.choice((1, 4, 8)) for _ in range(num_ranks * local)]
    placed = place_replicas(load, num_ranks, slots)
    mean = sum(load) / num_ranks
    before = max(sum(load[rank * local : (rank + 1) * local]) for rank in range(num_ranks))
    after = placed.rank_loads(load)
    assert sum(after) == pytest.approx(sum(load))
    assert max(after) <= before + 1e-9
    for rank, experts in enumerate(placed.copied_to):
        assert len(experts) <= slots
        assert all(expert // local != rank for expert in experts)
        assert all(first < second for first, second in pairwise(experts))
    # A rank is above the mean only where no slot is left, or for less than a copy is worth.
    has_room = any(len(experts) < slots and after[r] < 0.98 * mean for r, experts in enumerate(placed.copied_to))
    assert max(after) <= 1.02 * mean or not has_room


@pytest.mark.parametrize("seed", range(5))
def test_tables_send_what_was_planned(seed: int) -> None:
    """The rows that ranks get by the tables of all sources are those of the placement, but for the 64 parts."""
    draw = random.Random(seed)
    num_ranks, local = draw.choice((2, 4, 8)), 4
    load = [draw.random() ** 6 for _ in range(num_ranks * local)]
    placed = place_replicas(load, num_ranks, 2)
    by_slot = [0.0] * num_ranks * (local + 2)
    for expert, by_rank in placed.rows.items():
        for source in range(num_ranks):
            for slot in placed.split(expert, source):
                by_slot[slot] += load[expert] / num_ranks / SPLITS
        for rank, rows in by_rank.items():
            assert by_slot[placed.slot(expert, rank)] == pytest.approx(rows, abs=load[expert] / SPLITS)


def test_even_and_empty_loads_need_no_copies() -> None:
    assert place_replicas([5, 5, 5, 5], 2, 1).rows == {}
    assert place_replicas([0, 0, 0, 0], 2, 1).rows == {}
    assert place_replicas([9, 0, 0, 0], 1, 1).rows == {}
