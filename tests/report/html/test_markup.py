"""Markup: everything that is no markup is escaped."""

from hypothesis import given
from hypothesis import strategies as st
from markup_reader import read

from threefold.report.html.markup import Markup, html_table, tag
from threefold.report.html.svg import nice_ticks, tick_text


@given(st.text(max_size=40), st.text(max_size=40))
def test_text_and_attributes_stay_text_and_attributes(inside: str, value: str) -> None:
    reader = read(tag("p", inside, title=value))
    assert [name for name, _ in reader.tags] == ["p"]
    assert set(reader.tags[0][1]) == {"title"}
    if all(ch >= " " and not 0x7F <= ord(ch) < 0xA0 and not 0xD800 <= ord(ch) < 0xE000 for ch in inside + value):
        assert reader.text == inside
        assert reader.tags[0][1]["title"] == value


def test_markup_goes_in_as_it_is_and_text_does_not() -> None:
    assert tag("b", Markup("<i>x</i>"), "<i>") == "<b><i>x</i>&lt;i&gt;</b>"
    assert tag("input", class_="a b", data_x_y=1.504, hidden=True, checked=False, title=None) == (
        '<input class="a b" data-x-y="1.5" hidden>'
    )


def test_characters_that_cannot_be_written_are_replaced() -> None:
    assert tag("p", "a\ud800\x00b").encode() == "<p>a\ufffd\ufffdb</p>".encode()


def test_cells_of_a_table_are_escaped() -> None:
    assert "<script" not in html_table(["<script>"], [["<script>"]])


def test_ticks_are_round_and_short() -> None:
    assert nice_ticks(0, 83) == [0, 20, 40, 60, 80]
    assert [tick_text(tick, nice_ticks(0, 1)) for tick in nice_ticks(0, 1)] == [
        "0.0",
        "0.2",
        "0.4",
        "0.6",
        "0.8",
        "1.0",
    ]
    assert nice_ticks(3, 3) == [3]
    assert [tick_text(tick, [0.0, 0.25]) for tick in (0.0, 0.25)] == ["0.00", "0.25"]
