"""`threefold launch` says where a job would train on the corpus that is only meant for a first try."""

import pytest
from repository import ROOT

from threefold.cli.main import main

RECIPE = str(ROOT / "recipes" / "deepseek-v3-4k-1024xh100-fp8.toml")


def test_a_job_without_data_of_its_own_is_remarked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", RECIPE, "--target", "threefold", "--slurm", "--run", "/shared/runs/dsv3"]
    assert main(words) == 0
    assert "the plan names no job.data" in capsys.readouterr().err
    assert main([*words, "job.data=embedded"]) == 0
    assert "job.data" not in capsys.readouterr().err
