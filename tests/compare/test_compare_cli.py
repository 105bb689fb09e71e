"""`threefold compare`: what it prints, its exit codes, and that bad input gives one finding and no traceback."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import GARBAGE, run
from repository import ROOT
from run_folders import noisy_seconds, run_plan, write_run

RECIPES = ROOT / "recipes"
NO_OVERLAP = str(RECIPES / "qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml")
OVERLAP = str(RECIPES / "qwen3-30b-a3b-4k-16xh100-bf16-overlap-wgrad.toml")
CPU = str(RECIPES / "tiny-qwen3-moe-256-1xcpu-fp32.toml")


@pytest.fixture
def runs(tmp_path: Path) -> tuple[str, str]:
    """A run, and one that is 20 % slower."""
    fast = write_run(tmp_path / "fast", run_plan(), noisy_seconds(0.1, 60, 1))
    slow = write_run(tmp_path / "slow", run_plan(knobs_recompute=["full"]), noisy_seconds(0.12, 60, 2))
    return str(fast), str(slow)


def test_two_plans_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("compare", NO_OVERLAP, OVERLAP, capsys=capsys)
    assert code == 0
    assert "B is predicted to be faster" in out
    assert re.search(r"^knobs +execution +knobs\.ep_overlap +false +true$", out, re.M)
    assert re.search(r"^knobs\.ep_overlap false -> true +-", out, re.M)
    assert "= change" in out


def test_json_of_runs(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("compare", *runs, "--json", capsys=capsys)
    assert code == 0
    found = json.loads(out)
    assert found["speed"]["verdict"] == "slower"
    assert found["speed"]["ratio"] == pytest.approx(1.2, rel=0.02)
    assert found["losses"]["verdict"] == "same to the bit"
    explained = found["explained"]["step_seconds"]
    total = sum(part["amount"] for part in explained["parts"]) + explained["unexplained"]
    assert total == pytest.approx(explained["change"])


def test_text_of_runs(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("compare", *runs, capsys=capsys)
    assert code == 0
    assert "B is certainly slower" in out
    assert "unexplained" in out
    assert "scaled to A's measured step" in out


@pytest.mark.parametrize(("percent", "code"), [("0", 1), ("10", 1), ("19.9", 0), ("30", 0)])
def test_fail_above(percent: str, code: int, runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    """The slower run is 20 % slower, and 19.9 % lies inside the interval: that is not certain."""
    assert run("compare", *runs, "--fail-above", percent, capsys=capsys)[0] == code
    assert run("compare", *reversed(runs), "--fail-above", percent, capsys=capsys)[0] == 0


def test_fail_above_skips_what_it_cannot_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = [str(write_run(tmp_path / name, run_plan(), [1.0, 2.0])) for name in ("a", "b")]
    assert run("compare", *short, "--fail-above", "5", capsys=capsys)[0] == 125
    assert run("compare", short[0], str(tmp_path / "nowhere"), "--fail-above", "5", capsys=capsys)[0] == 125
    assert run("compare", *short, capsys=capsys)[0] == 0


def test_fail_above_of_plans_is_the_prediction(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("compare", OVERLAP, NO_OVERLAP, "--fail-above", "5", capsys=capsys)[0] == 1
    assert run("compare", NO_OVERLAP, OVERLAP, "--fail-above", "5", capsys=capsys)[0] == 0


def test_a_window_is_declared(runs: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("compare", *runs, "--window", "11:40", "--json", capsys=capsys)
    assert code == 0
    assert json.loads(out)["speed"]["a"]["window"] == [11, 40]
    assert run("compare", *runs, "--window", "70:80", capsys=capsys)[0] == 1


@pytest.mark.parametrize("name", GARBAGE)
def test_no_plan_gives_a_traceback(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.toml").write_bytes(GARBAGE[name])
    for words in ([str(tmp_path / "plan.toml"), CPU], [CPU, str(tmp_path / "plan.toml")]):
        code, out, err = run("compare", *words, "--json", capsys=capsys)
        assert code == 1
        assert json.loads(out)["findings"]
        assert "Traceback" not in err


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"{}", b"[" * 100_000, b"\x1f\x8bgarbage", b"\x00" * 99]
)
@pytest.mark.parametrize("suffix", ["json", "json.gz", "sqlite"])
def test_no_trace_gives_a_traceback(
    content: bytes, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / f"trace.{suffix}"
    trace.write_bytes(content)
    code, out, err = run("compare", str(trace), str(trace), "--json", capsys=capsys)
    assert code == 1
    assert len(json.loads(out)["findings"]) == 1
    assert "Traceback" not in err


@pytest.mark.parametrize("name", ["", "nul\0", "x" * 5000, "/dev/null", "/dev/zero", "."])
def test_odd_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run("compare", name, CPU, "--json", capsys=capsys)
    assert code == 1
    assert json.loads(out)["findings"]
    assert "Traceback" not in err


@pytest.mark.parametrize(
    "words",
    [["--window", "5"], ["--window", "9:3"], ["--window", "a:b"], ["--fail-above", "-1"], ["--fail-above", "nan"]],
)
def test_wrong_words(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run("compare", CPU, CPU, *words, capsys=capsys)
    assert code == 2
    assert "Traceback" not in err


def test_a_picture(runs: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "change.svg"
    assert run("compare", *runs, "--plot", str(picture), capsys=capsys)[0] == 0
    assert "<svg" in picture.read_text()
    assert run("compare", *runs, "--plot", str(tmp_path / "no" / "x.png"), capsys=capsys)[0] == 1


def test_git_bisect_finds_the_slow_commit(runs: tuple[str, str], tmp_path: Path) -> None:
    """Eight commits: one cannot be judged, and from the sixth on the run is slow."""
    repository = tmp_path / "repository"
    repository.mkdir()
    short = write_run(tmp_path / "short", run_plan(), [1.0, 2.0])
    tried = [runs[0], runs[0], runs[0], str(short), runs[0], runs[1], runs[1], runs[1]]
    words = ["-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "init.defaultBranch=main"]

    def git(*more: str) -> str:
        done = subprocess.run(
            ["git", *words, *more], cwd=repository, check=True, capture_output=True, text=True, timeout=300
        )
        return done.stdout

    git("init")
    for number, folder in enumerate(tried):
        (repository / "run").write_text(f"{folder}\n")
        (repository / "number").write_text(f"{number}\n")
        git("add", ".")
        git("commit", "-m", f"commit {number}")
    judge = f'"{sys.executable}" -m threefold compare {runs[0]} "$(cat run)" --fail-above 5 --chip-file none'
    (tmp_path / "bisect.sh").write_text(f"#!/bin/sh\n{judge}\n")
    git("bisect", "start", "HEAD", "HEAD~7")
    out = git("bisect", "run", "sh", str(tmp_path / "bisect.sh"))
    assert "is the first bad commit" in out
    assert re.search(r"^ +commit 5$", out, re.M)
    assert "skip" in git("bisect", "log")
