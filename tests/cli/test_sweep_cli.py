"""What `threefold sweep` says of its values, and its picture."""

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from repository import ROOT

from threefold.plan.file import read_plan
from threefold.search.sweep import sweep

QWEN = str(ROOT / "recipes" / "qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml")


def told(over: str, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    answer = json.loads(run("sweep", QWEN, "--over", over, "--json", capsys=capsys)[1])
    return answer, run("sweep", QWEN, "--over", over, capsys=capsys)[1]


def test_settings_are_right_only_where_the_plan_is_accepted_and_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """Few ranks for the experts are refused for want of memory, more of them fit."""
    answer, text = told("layout.ep=1,2,4,8,16", capsys)
    refused, fits = answer["points"][0], answer["points"][4]
    assert refused["estimate"] is None
    assert fits["estimate"]["fits"]
    right = answer["right_at"]
    assert next(point for point in answer["points"] if point["value"] == right)["estimate"]["fits"]
    assert f"settings that are right at layout.ep = {right}, wrong elsewhere:" in text
    assert "right at layout.ep = 1," not in text
    first = answer["outgrown"][0]
    assert (first["value"], first["rule"], first["severity"]) == (1, "states-fit-memory", "error")


def test_memory_gives_out_only_where_no_later_value_fits(capsys: pytest.CaptureFixture[str]) -> None:
    answer, text = told("layout.ep=1,2,4,8,16", capsys)
    assert answer["gives_out"]["memory"] is None
    assert "gives out" not in text
    assert "memory does not suffice at 1, 2, 4, it does from 8 on" in text
    answer, text = told("layout.ep=16,8,4,2,1", capsys)
    assert answer["gives_out"]["memory"] == 4
    assert answer["right_at"] == 16
    assert "memory gives out at 4" in text
    assert "does not suffice" not in text
    answer, text = told("layout.ep=1,16,2", capsys)
    assert answer["gives_out"]["memory"] == 2
    assert "memory does not suffice at 1\nmemory gives out at 2" in text


def test_a_sweep_without_a_right_value_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    answer, text = told("layout.ep=1,2,4", capsys)
    assert answer["right_at"] is None
    assert "no value of layout.ep gives a plan that the rules accept and that fits:" in text
    assert "settings that are right" not in text
    assert {one["severity"] for one in answer["outgrown"]} == {"error"}


def test_dp_that_comes_back_did_not_give_out(capsys: pytest.CaptureFixture[str]) -> None:
    answer, text = told("layout.tp=1,2,4", capsys)
    assert answer["gives_out"]["dp"] is None
    _, text = told("layout.cp=8,16,1", capsys)
    assert "DP gives out" not in text


@pytest.mark.parametrize("values", [(8, 16), (1, 2, 4, 8, 16), (4, 8, 16, 32, 64, 128)])
def test_legends_cover_no_label(values: tuple[int, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    from threefold.report.plots import sweep_figure

    plan = read_plan(QWEN).plan
    assert plan is not None
    figure = sweep_figure(sweep(plan, [{"layout.ep": value} for value in values]))
    FigureCanvasAgg(figure).draw()
    for axes in figure.axes:
        legend = axes.get_legend()
        assert legend is not None
        covered = legend.get_window_extent()
        inside = {id(text) for text in legend.get_texts()}
        assert covered.y0 >= axes.get_window_extent().y1  # above the axes: over no bar and no line
        labels = [text for text in figure.findobj(Text) if text.get_text() and id(text) not in inside]
        assert not [text.get_text() for text in labels if covered.overlaps(text.get_window_extent())]
        assert figure.bbox.x0 <= covered.x0
        assert covered.x1 <= figure.bbox.x1
