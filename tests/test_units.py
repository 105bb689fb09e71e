"""Numbers for readers: as many digits as a band allows."""

import pytest

from threefold.units import format_range, format_rounded


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (1_249_081.0, 0.5, "1,200,000"),
        (17.67, 0.08, "17.7"),
        (2.628, 0.3, "2.6"),
        (0.00456, 0.25, "0.0046"),
        (0.0, 0.5, "0"),
        (341.2, 0.75, "340"),
    ],
)
def test_digits_are_those_that_the_error_leaves(value: float, error: float, text: str) -> None:
    assert format_rounded(value, error) == text


def test_a_range_is_about_its_middle() -> None:
    assert format_range(189.7, 131.2, 288.6, " days") == "about 190 days, 130 to 290"
