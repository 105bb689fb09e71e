"""The CP degree that a sequence needs, by hand counts."""

import pytest

from threefold.layout.degrees import cp_degree, cp_degrees, num_dynamic_groups, row_multiple


@pytest.mark.parametrize(
    ("length", "degree"),
    [(1, 1), (16_384, 1), (16_385, 2), (32_768, 2), (32_769, 4), (65_537, 8), (131_072, 8)],
)
def test_degree_leaves_a_rank_at_most_its_share_of_a_full_sequence(length: int, degree: int) -> None:
    assert cp_degree(length, 131_072, 8) == degree


def test_degrees_are_the_powers_of_two_up_to_cp() -> None:
    assert [cp_degrees(cp) for cp in (1, 2, 8)] == [(1,), (1, 2), (1, 2, 4, 8)]


def test_rows_split_into_zigzag_pieces_and_parts_for_tp() -> None:
    assert [row_multiple(degree, tp) for degree, tp in ((1, 1), (1, 4), (2, 1), (8, 4))] == [1, 4, 4, 64]


@pytest.mark.parametrize(("cp", "tp", "count"), [(1, 1, 0), (2, 8, 0), (4, 1, 1), (8, 1, 2), (8, 2, 4)])
def test_groups_between_one_rank_and_all(cp: int, tp: int, count: int) -> None:
    assert num_dynamic_groups(cp, tp) == count
