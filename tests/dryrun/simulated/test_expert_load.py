"""Loads of experts: shares, skew, and the loads that a run recorded."""

from pathlib import Path

import pytest

from threefold.api.rehearsals import shares_from
from threefold.dryrun.simulated.expert_load import ExpertLoads, split_total


def test_loads_split_by_share() -> None:
    assert split_total(10, [1, 1, 1]) == [3, 4, 3]
    loads = ExpertLoads((3.0, 1.0, 1.0, 1.0), ep_rank=0)
    assert loads.size_source()(2, 60, True) == [40, 20]
    # Two ranks send 60 rows each; two thirds of all come here.
    assert loads.size_source()(2, 60, False) == [40, 40]
    assert loads.skew(2) == pytest.approx(4 / 3)


def test_loads_of_a_run_are_read_from_its_folder(tmp_path: Path) -> None:
    """Two layers of four experts, of which two ranks hold two each: 10 of 16 tokens come to the first rank."""
    (tmp_path / "loads.json").write_text("[[4, 2, 1, 1], [3, 1, 2, 2]]")
    assert shares_from(str(tmp_path), 4) == ((7.0, 3.0, 3.0, 3.0), "")
    assert "has no 8 loads" in shares_from(str(tmp_path), 8)[1]
    assert "No such file" in shares_from(str(tmp_path / "nothing"), 4)[1]
