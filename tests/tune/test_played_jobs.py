"""Tunings of a plan for Megatron Bridge whose jobs are played: the right winner comes out, or none."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from played_jobs import Overrides, PlayedCluster
from repository import ROOT

from threefold.cli.main import main
from threefold.report.tune import tuned_text

PLAN = ROOT / "recipes" / "qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml"
TRIES = ("knobs.recompute=moe_act", "knobs.permute_fusion=true", "job.micro_batch=2")
MOST_BATCHES = 12


def tuned(
    folder: Path, cluster: PlayedCluster, capsys: pytest.CaptureFixture[str], tries: tuple[str, ...] = TRIES
) -> dict[str, Any]:
    """Give the command and play its jobs in turns, until it has an answer."""
    words = ["tune", str(PLAN), "--out", str(folder), "--trials", str(len(tries)), "--json"]
    words += [word for text in tries for word in ("--try", text)]
    for _ in range(MOST_BATCHES):
        capsys.readouterr()
        code = main(words)
        answer: dict[str, Any] = json.loads(capsys.readouterr().out)
        if code != 3:
            return answer
        assert cluster.run(Path(answer["run"])) == answer["jobs"]
    raise AssertionError("it never ended")


def with_fusion(gain: float) -> Any:
    """Seconds of a step, less with fused permutation, which is the change that helps."""
    return lambda overrides: 20.0 * (1 - gain if overrides["model.moe_permute_fusion"] == "true" else 1.0)


def fused(overrides: Overrides) -> bool:
    return overrides["model.moe_permute_fusion"] == "true"


@pytest.mark.parametrize("drift", [0.0, 0.004, -0.004])
def test_the_change_that_helps_wins_on_a_machine_that_drifts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], drift: float
) -> None:
    answer = tuned(tmp_path, PlayedCluster(with_fusion(0.06), drift=drift), capsys)
    assert answer["verdict"] == "improved"
    assert answer["winner"]["set"] == {"knobs.permute_fusion": True}
    assert answer["speedup"] == pytest.approx(1 / 0.94, rel=0.01)
    assert answer["winner"]["label"] == "benchmark-only"  # its data is synthetic
    assert (tmp_path / "winner.toml").exists()


def test_no_change_wins_where_none_helps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = tuned(tmp_path, PlayedCluster(lambda overrides: 20.0, noise=0.01), capsys)
    assert answer["verdict"] == "no change is certain"
    assert "keep the plan as it is; benchmark-only" in tuned_text(answer)
    assert not (tmp_path / "winner.toml").exists()


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ({"ending": lambda o: "torch.OutOfMemoryError: CUDA out of memory." if fused(o) else ""}, "oom"),
        ({"ending": lambda o: "RuntimeError: planted fault" if fused(o) else ""}, "crash"),
        ({"loss": lambda o: 0.6 if fused(o) else 0.0}, "mean loss"),
        (
            {"edit": lambda o: o | {"train.global_batch_size": "512"} if fused(o) else o},
            "job.global_batch (convergence)",
        ),
        ({"edit": lambda o: o | {"optimizer.adam_beta2": "0.9"} if fused(o) else o}, "job.adam_beta2 (convergence)"),
    ],
    ids=["out of memory", "crash", "other losses", "another batch", "another optimizer"],
)
def test_a_fast_job_that_did_not_do_the_work_never_wins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: dict[str, Any], reason: str
) -> None:
    answer = tuned(tmp_path, PlayedCluster(with_fusion(0.3), **spoil), capsys)
    assert answer["verdict"] == "no change is certain"
    own = next(each for each in answer["verdicts"] if each["change"] == "knobs.permute_fusion=true")
    assert reason in own["reason"]


@pytest.mark.parametrize("says_so", [True, False])
def test_a_job_that_fell_back_to_all_to_all_never_wins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], says_so: bool
) -> None:
    """With the warning that Bridge prints, and without it, where only the configuration shows it."""

    def is_flex(overrides: Overrides) -> bool:
        return overrides["model.moe_flex_dispatcher_backend"] in ("deepep", "hybridep")

    said = "WARNING:megatron.bridge:DeepEP is not applicable to this GPU. Skipping flex dispatcher setup."
    cluster = PlayedCluster(
        lambda overrides: 14.0 if is_flex(overrides) else 20.0,
        notice=lambda overrides: (said if says_so else "an unknown warning") if is_flex(overrides) else "",
    )
    answer = tuned(tmp_path, cluster, capsys, ("knobs.dispatcher=deepep",))
    assert answer["verdict"] == "no change is certain"
    flex = [each for each in answer["verdicts"] if "dispatcher" in each["change"] and each["stage"] == "race 1"]
    assert [each["verdict"] for each in flex] == ["failed"]


def test_a_job_that_is_under_way_is_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log that is half written is no failure of its trial."""
    words = ["tune", str(PLAN), "--out", str(tmp_path), "--trials", "1", "--json"]
    assert main(words) == 3
    log = Path(re.findall(r"--output=(\S+)", (tmp_path / "run-batch.sh").read_text())[0])
    PlayedCluster(with_fusion(0.06)).run(tmp_path / "run-batch.sh")
    whole = log.read_text().splitlines()
    log.write_text("\n".join(whole[:-4]) + "\n")
    capsys.readouterr()
    assert main(words) == 3
    assert json.loads(capsys.readouterr().out)["is_under_way"] is True
    log.write_text("\n".join(whole) + "\n")
    assert main(words) == 3
    assert json.loads(capsys.readouterr().out)["is_under_way"] is False


def test_flags_of_our_own_engine_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", str(PLAN), "--out", str(tmp_path), "--rank", "0"]) == 2
    assert "threefold engine" in capsys.readouterr().err
