"""Calibration: machines are measured, their rates are kept, and later estimates use them and say so."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from threefold.cli.main import main
from threefold.cost.rates import calibration
from threefold.cost.time.step import step_time
from threefold.findings import FindingsError
from threefold.launch.plan_session import Speed
from threefold.machine import calibrate as machine
from threefold.machine.calibrate import assumed_rates, calibrate, calibration_plans, write_chip_file
from threefold.machine.own_chip_file import own_chip_path, priced_here
from threefold.plan.parse import parse
from threefold.rules.all import errors, judge, promoted
from threefold.spec.chips import CHIPS

RECIPE = str(Path(__file__).parents[2] / "recipes" / "tiny-qwen3-moe-256-1xcpu-fp32.toml")
SHIPPED = calibration("threefold").rates
SLOW = replace(SHIPPED, gemm=SHIPPED.gemm / 3, host_moe_seconds=SHIPPED.host_moe_seconds * 2)
VERSIONS = {"torch": "2.13.0"}


class FakeSession:
    """Steps as a slow machine would take them; some plans run out of memory."""

    def __init__(self, broken: tuple[str, ...], ranks: int) -> None:
        self.broken = [dict(calibration_plans("cpu", ranks)[name]) for name in broken]

    def __enter__(self) -> "FakeSession":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def speeds(self, fields: Mapping[str, Any], limit: float) -> list[Speed]:
        return [Speed("gemm fp32", 1024, 3e10)]

    def measure(self, fields: Mapping[str, Any], window: Mapping[str, Any], limit: float) -> dict[str, Any]:
        plan = parse(fields).plan
        assert plan
        taken = step_time(plan, SLOW).step_seconds
        return {"error": "out of memory"} if fields in self.broken else {"steps": [taken] * 3}


def fake_sessions(*broken: str) -> Callable[..., FakeSession]:
    def start(folder: Path, ranks: int, env: Mapping[str, str]) -> FakeSession:
        return FakeSession(tuple(name for name in broken if name in calibration_plans("cpu", ranks)), ranks)

    return start


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *broken: str) -> machine.Calibrated:
    monkeypatch.setattr(machine, "PlanSession", fake_sessions(*broken))
    monkeypatch.setattr("threefold.launch.cpu_cores.num_cores", lambda: 1)  # as the shipped chip has it
    return calibrate("cpu", None, tmp_path, 60.0, lambda text: None, two_ranks=True)


@pytest.mark.parametrize(("chip", "ranks"), [("h200", 1), ("a100", 1), ("cpu", 1), ("cpu", 2)])
def test_the_plans_of_a_calibration_run(chip: str, ranks: int) -> None:
    found = calibration_plans(chip, ranks, has_fp8="fp8" in CHIPS[chip].peak_flops)
    assert len(found) >= 6
    for name, fields in found.items():
        parsed = parse(fields)
        assert parsed.plan, (name, parsed.findings)
        assert not errors(promoted(judge(parsed.plan))), name


def test_a_calibration_predicts_the_machine(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measured(monkeypatch, tmp_path, "sinks")
    assert [step.name for step in found.steps if step.seconds is None] == ["sinks"]
    assert max(map(abs, found.before)) > 0.2
    assert max(map(abs, found.after)) < 0.1
    assert (found.fitted.gpus, found.fitted.precisions) == (2, ("fp32",))
    write_chip_file(found, VERSIONS)
    plan = parse({"model": "tiny-mixtral", "target": "threefold", "cluster.chip": "cpu"}).plan
    assert plan
    there = priced_here(plan)
    truth = step_time(plan, SLOW).step_seconds
    assert step_time(there, replace(SHIPPED, **there.chip.measured_rates)).step_seconds == pytest.approx(
        truth, rel=0.15
    )
    steps = json.loads(own_chip_path("cpu").with_suffix(".steps.json").read_text())
    assert len(steps["steps"]) == len(found.measured)


def test_later_commands_use_what_was_measured_and_say_so(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def estimated(*more: str) -> dict[str, Any]:
        assert main(["estimate", RECIPE, "--json", *more]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    before = estimated()
    write_chip_file(measured(monkeypatch, tmp_path), VERSIONS)
    after = estimated()
    assert after["time"]["step_seconds"] > 1.2 * before["time"]["step_seconds"]
    assert after["calibrated"]
    assert "steps measured on this machine" in after["basis"]
    assert estimated("--chip-file", "none") == before
    assert estimated("--target", "megatron-bridge") == estimated("--target", "megatron-bridge", "--chip-file", "none")
    own_chip_path("cpu").write_text("chip = 3")
    assert estimated() == before


def test_another_precision_is_not_calibrated(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_chip_file(measured(monkeypatch, tmp_path), VERSIONS)
    assert main(["estimate", RECIPE, "--json", "knobs.precision=bf16"]) == 0
    assert not json.loads(capsys.readouterr().out)["calibrated"]


def test_a_folder_that_cannot_be_written_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FindingsError) as caught:
        write_chip_file(measured(monkeypatch, tmp_path), VERSIONS, tmp_path / "file" / "cpu.toml")
    assert caught.value.findings[0].rule == "file-writable"


def test_speeds_become_rates() -> None:
    speeds = [
        Speed("gemm bf16", 256, 2e14),
        Speed("gemm bf16", 16384, 7e14),
        Speed("attention", 2048, 3e14),
        Speed("attention", 32768, 6e14),
        Speed("copy from the host", 2**30, 5e10),
        Speed("all-to-all ep", 2**16, 1e9),
        Speed("all-to-all ep", 2**24, 9e10),
    ]
    chip = CHIPS["h200"]
    found = assumed_rates(SHIPPED, chip, speeds)
    assert found.gemm == pytest.approx(7e14 / chip.peak_flops["bf16"])
    assert found.attention_tokens == pytest.approx(2048)
    assert found.host_copy == pytest.approx(5e10 / chip.host_bandwidth)
    assert found.alltoall == pytest.approx(9e10 / chip.domain_bandwidth)
    assert found.latency_seconds == pytest.approx(2**16 / 1e9)
    assert found.passes == SHIPPED.passes


def test_a_plan_for_another_chip_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    assert main(["calibrate", RECIPE, "cluster.chip=h100"]) == 1
    assert "cluster.chip=cpu" in capsys.readouterr().out


def test_nothing_measured_is_a_finding(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = (*calibration_plans("cpu", 1), *calibration_plans("cpu", 2))
    monkeypatch.setattr(machine, "PlanSession", fake_sessions(*names))
    assert main(["calibrate"]) == 1
    assert "error[steps-are-measured]" in capsys.readouterr().out
    assert not own_chip_path("cpu").exists()
