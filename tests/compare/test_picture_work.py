"""Comparisons of vision-language runs: by useful work, with their images, and never without any."""

import json
from pathlib import Path
from typing import Any

import pytest
from run_folders import run_plan, write_run

from threefold.cli.main import main
from threefold.compare.comparison import Comparison, compare_sides
from threefold.compare.sides import open_side
from threefold.compare.work import plan_differences
from threefold.findings import FindingsError
from threefold.plan.plan import Plan
from threefold.spec.flops import flops_per_token

ENOUGH = 40


def seeing_plan(**more: Any) -> Plan:
    return run_plan(**{"model": "tiny-qwen3-vl-moe", "job_data": "scenes", **more})


def text_flops(plan: Plan) -> float:
    """TFLOP of the text in one step, without encoding pictures."""
    return plan.tokens_per_step * flops_per_token(plan.model, plan.job.seq_len, plan.mtp) / 1e12


def compared(tmp_path: Path, a: dict[str, Any], b: dict[str, Any], **more: Any) -> Comparison:
    """Runs of a plan, each with its seconds, images and FLOPs of encoding them in a step (as a part of the text's)."""
    sides = []
    for name, side in (("a", a), ("b", b)):
        plan = side.get("plan", seeing_plan())
        columns = {"images": side["images"], "vision_tflops": side["encoding"] * text_flops(plan) / side["seconds"]}
        columns |= {"encoder_seconds": 0.4 * side["seconds"], "projector_seconds": 0.1, "decoder_seconds": 0.2}
        folder = write_run(tmp_path / name, plan, [side["seconds"]] * ENOUGH, useful=side.get("useful", 1.0), **columns)
        sides.append(open_side(str(folder)))
    return compare_sides(*sides, **more)


def test_the_same_images_are_compared_by_step(tmp_path: Path) -> None:
    a, b = {"seconds": 2.0, "images": 8, "encoding": 0.5}, {"seconds": 3.0, "images": 8, "encoding": 0.5}
    found = compared(tmp_path, a, b)
    assert found.unit == "step"
    shown = {metric.name: (metric.a, metric.b) for metric in found.metrics}
    assert shown["images"] == pytest.approx((4.0, 8 / 3))
    assert shown["encoder"] == pytest.approx((0.8, 1.2))


def test_half_the_batch_is_compared_by_useful_tokens(tmp_path: Path) -> None:
    """Half of the tokens and half of the images: a useful token costs the same, and the times of both are alike."""
    a = {"seconds": 2.0, "images": 8, "encoding": 0.5}
    b = {"seconds": 1.0, "images": 4, "encoding": 0.5, "plan": seeing_plan(job_global_batch=4)}
    found = compared(tmp_path, a, b)
    assert found.unit == "useful token"
    assert found.speed is not None
    assert found.speed.ratio == pytest.approx(1.0)
    assert any("8 and 4 images: times are compared per useful token" in _words(each.problem) for each in found.findings)


def _words(text: str) -> str:
    """Without the FLOPs between the images and the unit."""
    first, _, rest = text.partition(" images; ")
    return f"{first} images:{rest.rpartition(':')[2]}"


def test_other_images_a_token_are_compared_by_flops_that_include_encoding(tmp_path: Path) -> None:
    """The same tokens with twice the work of encoding: 1.5 and 2 times the FLOPs of the text."""
    a, b = {"seconds": 1.5, "images": 4, "encoding": 0.5}, {"seconds": 4.0, "images": 8, "encoding": 1.0}
    found = compared(tmp_path, a, b)
    assert found.unit == "model FLOP"
    assert found.speed is not None
    assert found.speed.ratio == pytest.approx(2.0)


def test_stated_numbers_of_images_matter_only_where_runs_do_not_count_them(tmp_path: Path) -> None:
    plans = [seeing_plan(job_images=images) for images in (1.0, 3.0)]
    assert "job.images" in dict(plan_differences(*plans))
    a, b = ({"seconds": 1.0, "images": 8, "encoding": 0.5, "plan": plan} for plan in plans)
    assert compared(tmp_path, a, b).unit == "step"


def test_runs_without_images_are_no_evidence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where both have none: `compare` refuses, and --anyway says so."""
    none = {"seconds": 1.0, "images": 0, "encoding": 0.0}
    for name, other in (("one", {"seconds": 2.0, "images": 8, "encoding": 0.5}), ("both", none)):
        with pytest.raises(FindingsError) as caught:
            compared(tmp_path / name, other, none)
        [finding] = caught.value.findings
        assert (finding.rule, finding.at) == ("work-is-comparable", "job.images")
        assert "no evidence of its speed" in finding.problem
    folders = [str(tmp_path / "both" / side) for side in "ab"]
    assert main(["compare", *folders, "--json"]) == 1
    capsys.readouterr()
    assert main(["compare", *folders, "--json", "--anyway"]) == 0
    warned = json.loads(capsys.readouterr().out)["findings"]
    assert [each["at"] for each in warned if each["rule"] == "work-is-comparable"] == ["job.images"]
