"""Chips of the user's own: the shipped examples in every verb, and files that are wrong."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from command_line import run
from repository import ROOT

from threefold.cost.chip_file import chip_file_text
from threefold.cost.estimate import estimate
from threefold.cost.rates import calibration, rates_of
from threefold.findings import FindingsError
from threefold.machine.own_chip_file import own_chip_path, priced_here
from threefold.plan.file import dump_plan, read_plan
from threefold.plan.parse import change, parse
from threefold.plan.plan import Plan
from threefold.spec.chip_description import find_chip
from threefold.spec.chips import CHIPS

CHIPS_FOLDER = ROOT / "recipes" / "chips"
EXAMPLES = sorted(CHIPS_FOLDER.glob("*.toml"))
# Published: memory in GB as sold, dense bf16 TFLOP/s, bytes/s of memory, watts.
PUBLISHED = {
    "a100-40g": (40, 312, 1.555e12, 400),
    "h20": (96, 148, 4.0e12, 400),
    "l40s": (48, 362, 864e9, 350),
    "mi300x": (192, 1307, 5.3e12, 750),
}
WHOLE = """
chip = "mine"
architecture = "hopper"
gpus_per_node = 4
domain = 4
[facts]
memory_bytes = 80_000_000_000
memory_bandwidth = 3e12
domain_bandwidth = 4e11
network_bandwidth = 5e10
host_bandwidth = 6e10
[peak_flops]
fp32 = 4e14
bf16 = 9e14
[operations]
gpu_mtbf_hours = 1000
"""


def plan_on(chip: str, gpus: int = 32) -> Plan:
    parsed = parse({"model": "qwen3-30b-a3b", "cluster.chip": chip, "cluster.gpus": gpus, "layout.ep": 8})
    assert parsed.plan is not None, parsed.findings
    return parsed.plan


def write(folder: Path, text: str, name: str = "chip.toml") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return f"file:{folder / name}"


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_examples_are_as_published(file: Path) -> None:
    memory, bf16, bandwidth, watts = PUBLISHED[file.stem]
    chip = find_chip(f"file:{file}")[1]
    assert chip.name == file.stem
    assert chip.memory_bytes == pytest.approx(memory * 1e9, rel=0.08)  # GB or GiB, less what ECC takes
    assert chip.peak_flops["bf16"] == pytest.approx(bf16 * 1e12, rel=0.005)
    assert (chip.memory_bandwidth, chip.power_watts) == (bandwidth, watts)
    assert chip.sources


def test_every_example_is_published() -> None:
    assert {file.stem for file in EXAMPLES} == set(PUBLISHED)


@pytest.mark.parametrize(
    "file",
    [EXAMPLES[0], *(pytest.param(file, marks=pytest.mark.slow) for file in EXAMPLES[1:])],
    ids=lambda file: file.stem,
)
def test_verbs_take_a_chip_of_a_file(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One plan file through the verbs that need no torch; its path is relative to the plan's own folder."""
    (tmp_path / "chip.toml").write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    words = ["plan", "--model", "qwen3-30b-a3b", "--chip", f"file:{tmp_path / 'chip.toml'}", "--gpus", "16"]
    plan = tmp_path / "plan.toml"
    assert run(*words, "--seq-len", "4096", "--out", str(plan), "--top", "1", capsys=capsys)[0] == 0
    text = plan.read_text(encoding="utf-8").replace(str(tmp_path / "chip.toml"), "chip.toml")
    assert 'chip = "file:chip.toml"' in text
    plan.write_text(text, encoding="utf-8")
    for verb in ("check", "show", "estimate"):
        code, out, err = run(verb, str(plan), capsys=capsys)
        assert code == 0, out + err
        assert file.stem in out or verb == "check"
        assert "file:" not in out or verb == "show"
    assert run("sweep", str(plan), "--over", "layout.ep=1,2,4", capsys=capsys)[0] in (0, 1)
    code, out, err = run("launch", str(plan), "--torchrun", capsys=capsys)
    assert code == 0, err
    assert "torchrun" in out
    code, out, err = run("estimate", str(plan), "--tokens", "1B", "--json", capsys=capsys)
    assert json.loads(out)["energy_mwh"] > 0


def test_facts_count_and_nothing_is_called_calibrated(tmp_path: Path) -> None:
    """A file with a shipped chip's facts gives its times, but no run was seen on it."""
    fast = plan_on("h100")
    same = plan_on(write(tmp_path, 'chip = "h100-of-mine"\nlike = "h100"\n'))
    slow = plan_on(write(tmp_path, 'chip = "slow"\nlike = "h100"\n[facts]\nnetwork_bandwidth = 1e9\n', "slow.toml"))
    assert estimate(same).time == estimate(fast).time
    assert not estimate(same).calibrated
    assert estimate(slow).time.step_seconds > estimate(fast).time.step_seconds
    assert same.chip.watts == CHIPS["h100"].watts


def test_a_plan_keeps_its_chip_through_changes(tmp_path: Path) -> None:
    """Also when the file is gone; another chip takes it away."""
    plan = plan_on(write(tmp_path, WHOLE))
    assert plan.chip.name == "mine"
    assert (plan.cluster.node, plan.cluster.domain_ranks) == (4, 4)
    assert plan.chip.operations == {"gpu_mtbf_hours": 1000}
    (tmp_path / "plan.toml").write_text(dump_plan(plan), encoding="utf-8")
    again = read_plan(str(tmp_path / "plan.toml")).plan
    assert again == plan
    assert again is not None
    assert again.hash == plan.hash
    (tmp_path / "chip.toml").unlink()
    assert change(plan, {"layout.ep": 4}).chip == plan.chip
    assert change(plan, {"cluster.chip": "h200"}).chip == CHIPS["h200"]
    with pytest.raises(FindingsError, match="cannot be read"):
        change(plan, {"cluster.chip": f"file:{tmp_path / 'chip.toml'}"})


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    name = write(tmp_path, WHOLE)
    assert plan_on(name).chip.memory_bytes == 80_000_000_000
    write(tmp_path, WHOLE.replace("80_000_000_000", "90_000_000_000  # more"))
    assert plan_on(name).chip.memory_bytes == 90_000_000_000


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("", "chip.toml"),
        ("chip = ", "chip.toml"),
        ('chip = "x"\n', "architecture"),
        (WHOLE.replace("hopper", "volta"), "architecture"),
        (WHOLE.replace("hopper", "cpu"), "architecture"),
        (WHOLE.replace("memory_bytes = 80_000_000_000", ""), "facts.memory_bytes"),
        (WHOLE.replace("80_000_000_000", "-1"), "facts.memory_bytes"),
        (WHOLE.replace("80_000_000_000", "nan"), "facts.memory_bytes"),
        (WHOLE.replace("80_000_000_000", '"much"'), "facts.memory_bytes"),
        (WHOLE.replace("memory_bytes", "memory"), "facts.memory"),
        (WHOLE.replace("domain = 4", "domain = 0"), "domain"),
        (WHOLE.replace("domain = 4", "domain = true"), "domain"),
        (WHOLE.replace("bf16 = 9e14", ""), "peak_flops.bf16"),
        (WHOLE.replace("gpu_mtbf_hours", "gpu_mtbf"), "operations.gpu_mtbf"),
        (WHOLE.replace("= 1000", "= 0"), "operations.gpu_mtbf_hours"),
        (WHOLE.replace('"mine"', "7"), "chip"),
        ('chip = "x"\nlike = "h1000"\n', "like"),
        ('chip = "x"\nlike = "h100"\n[rates]\ngemm = 0.5\n', "rates"),
        ('chip = "x"\nlike = "h100"\nfacts = 1\n', "facts"),
    ],
)
def test_wrong_files_are_findings(text: str, at: str, tmp_path: Path) -> None:
    parsed = parse({"model": "qwen3-30b-a3b", "cluster.chip": write(tmp_path, text)})
    assert parsed.plan is None
    assert any(finding.at.endswith(at) for finding in parsed.findings), parsed.findings
    assert all(finding.problem and finding.fix_text for finding in parsed.findings)


def test_a_missing_file_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text('model = "qwen3-30b-a3b"\ncluster = { chip = "file:no.toml", gpus = 8 }\n', encoding="utf-8")
    for verb in ("check", "estimate", "train", "dry-run"):
        code, out, _ = run(verb, str(plan), capsys=capsys)
        assert code == 1
        assert "error[file-readable] cluster.chip" in out


def test_a_chip_file_of_rates_may_be_about_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--chip-file` replaces rates of a chip that is itself described by a file."""
    write(tmp_path, WHOLE)
    rates = tmp_path / "rates.toml"
    rates.write_text('chip = "file:chip.toml"\n[rates]\ngemm = 0.1\n', encoding="utf-8")
    plan = tmp_path / "plan.toml"
    described = change(plan_on(f"file:{tmp_path / 'chip.toml'}", 8), {"job.global_batch": 8})
    plan.write_text(dump_plan(described), encoding="utf-8")
    seconds = []
    for more in ([], ["--chip-file", str(rates)]):
        out = run("estimate", str(plan), "--json", *more, capsys=capsys)[1]
        seconds.append(json.loads(out)["time"]["step_seconds"])
    assert seconds[1] > seconds[0]


def test_what_is_measured_here_counts_for_the_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`threefold calibrate` keeps its rates by the file, not by the name in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "other").mkdir()
    name, other = write(tmp_path, WHOLE), write(tmp_path / "other", WHOLE)
    rates = replace(calibration("threefold").rates, gemm=0.123)
    path = own_chip_path(name)
    path.parent.mkdir(parents=True)
    path.write_text(chip_file_text(plan_on(name).chip, "here", ["bf16"], rates, 0.05, 1), encoding="utf-8")
    assert rates_of(priced_here(plan_on(name))).gemm == 0.123
    assert rates_of(priced_here(plan_on(other))).gemm != 0.123
    assert priced_here(plan_on(name)).chip.memory_bytes == 80_000_000_000


def test_chips_lists_files(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("chips", *map(str, EXAMPLES), capsys=capsys)
    assert code == 0
    assert all(f"\n{file.stem} " in out for file in EXAMPLES)
    code, out, _ = run("chips", "no.toml", capsys=capsys)
    assert code == 1
    assert "error[file-readable]" in out


def test_the_engine_rehearses_a_plan_on_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`dry-run` judges by the memory of the file: a chip with 1 GB is too small for what one with 80 GB holds."""
    fields = {"model": "tiny-qwen3-moe", "cluster.gpus": 2, "job.seq_len": 4096, "job.global_batch": 2, "layout.ep": 2}
    small = WHOLE.replace("80_000_000_000", "1_000_000_000")
    for name, text, code in (("large.toml", WHOLE, 0), ("small.toml", small, 1)):
        parsed = parse({**fields, "cluster.chip": write(tmp_path, text, name)})
        assert parsed.plan is not None
        plan = tmp_path / f"plan-{name}"
        plan.write_text(dump_plan(parsed.plan), encoding="utf-8")
        got, out, err = run("dry-run", str(plan), "--ranks", "0", "--jobs", "1", capsys=capsys)
        assert got == code, out + err
        assert "2 x mine" in out


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """A pipe would be waited for, a device never ends."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(FindingsError, match="no regular file"):
            find_chip(f"file:{path}")
