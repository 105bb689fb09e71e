"""Scripts for Slurm and commands for torchrun: they hold the plan, restart what failed and stop in time."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from repository import ROOT

from threefold.cli.main import main
from threefold.launch.slurm import (
    Options,
    Shape,
    batch_script,
    faults,
    node_script,
    shape,
    time_limit,
    torchrun_commands,
    tuning_script,
)
from threefold.plan.parse import parse
from threefold.plan.plan import Plan

RECIPE = ROOT / "recipes" / "tiny-qwen3-moe-256-1xcpu-fp32.toml"
HANG_SECONDS = 600.0  # after which a test fails: long enough for a machine with much other work
H100 = {"cluster__chip": "h100", "cluster__gpus": 32, "job__global_batch": 64}


def plan_of(**fields: Any) -> Plan:
    written = {path.replace("__", "."): value for path, value in fields.items()}
    parsed = parse({"model": "tiny-qwen3-moe", **written})
    assert parsed.plan is not None, parsed.findings
    return parsed.plan


def until(happens: Callable[[], bool], seconds: float = HANG_SECONDS) -> None:
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)


def test_nodes_follow_from_the_plan() -> None:
    assert shape(plan_of(**H100)) == Shape(4, 8)  # 32 GPUs, eight a node
    assert shape(plan_of(**H100 | {"cluster__gpus": 4})) == Shape(1, 4)
    assert shape(plan_of(**H100 | {"cluster__gpus_per_node": 4})) == Shape(8, 4)
    assert shape(plan_of(**H100 | {"cluster__gpus": 12})) is None


def test_a_batch_script_holds_the_plan() -> None:
    plan = plan_of(**H100, knobs__max_connections=1)
    script = batch_script(plan, ["my plans/it's.toml", "layout.ep=4"], Options("1-12", "gpu", "team", "a b.sqsh"))
    directives = set(re.findall(r"^#SBATCH --(.*)$", script, flags=re.MULTILINE))
    assert directives >= {"nodes=4", "ntasks-per-node=8", "gpus-per-node=8", "time=1-12", "partition=gpu"}
    assert directives >= {"account=team", "requeue", "signal=B:USR1@300", "job-name=it-s"}
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in script
    assert "'my plans/it'\"'\"'s.toml' layout.ep=4" in script
    assert "'--container-image=a b.sqsh'" in script
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_torchrun_commands_hold_the_plan() -> None:
    one = torchrun_commands(plan_of(**H100 | {"cluster__gpus": 8}), ["p.toml"], Options(max_restarts=5, run="r"))
    assert "torchrun --nnodes=1 --nproc-per-node=8 --max-restarts=5 --standalone" in one
    assert one.endswith("-m threefold train p.toml --run r\n")
    four = torchrun_commands(plan_of(**H100), ["p.toml"], Options())
    assert '--nnodes=4 --nproc-per-node=8 --max-restarts=3 --rdzv-backend=c10d --rdzv-endpoint="$HEAD:29400"' in four
    subprocess.run(["bash", "-n"], input=four, text=True, check=True)


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("10:30", 10.5), ("2:00:00", 120), ("1-0", 1440), ("1-2:30", 1590), ("soon", None), ("0", None)],
)
def test_time_limits_are_read_as_sbatch_reads_them(text: str, minutes: float | None) -> None:
    assert time_limit(text) == minutes  # the formats of man sbatch, counted by hand


@pytest.mark.parametrize(
    ("options", "at"),
    [
        (Options(time="soon"), "--time"),
        (Options(time="4"), "--time"),  # minutes: less than the notice
        (Options(partition="gpu\n#SBATCH --uid=0"), "--partition"),
        (Options(account=""), "--account"),
        (Options(container=" "), "--container"),
    ],
)
def test_nonsense_is_a_finding(options: Options, at: str) -> None:
    assert [finding.at for finding in faults(plan_of(**H100), options)] == [at]


def test_a_plan_that_no_script_can_run_is_a_finding() -> None:
    uneven = plan_of(**H100 | {"cluster__gpus": 12})
    assert [finding.at for finding in faults(uneven, Options())] == ["cluster.gpus"]


def test_launch_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", str(RECIPE), "cluster.chip=h100", "knobs.precision=bf16"]
    assert main([*words, "--slurm"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("#!/bin/bash\n#SBATCH --job-name=tiny-qwen3-moe-256-1xcpu-fp32\n")
    assert main([*words, "--slurm", "--out", str(tmp_path / "job.sh")]) == 0
    assert (tmp_path / "job.sh").read_text() == printed
    assert main([*words, "--torchrun"]) == 0
    capsys.readouterr()
    for kind in ("--slurm", "--torchrun"):
        assert main([*words, "target=megatron-bridge", "--target", "threefold", kind]) == 0
        assert "target=megatron-bridge --target threefold" in capsys.readouterr().out  # as it was judged
    assert main([*words, "--slurm", "--time", "soon"]) == 1
    said = capsys.readouterr()
    assert (said.out, "error[script-options] --time" in said.err) == ("", True)
    assert main([*words, "--slurm", "--time", "soon", "--out", str(tmp_path / "not.sh")]) == 1
    assert "error[script-options] --time" in capsys.readouterr().out
    assert main(["launch", str(tmp_path / "no.toml"), "--slurm"]) == 1
    assert capsys.readouterr().out == ""
    assert main([*words, "--slurm", "--out", str(tmp_path / "no" / "job.sh")]) == 1
    assert main([*words, "--slurm", "--notice", "0"]) == 2
    with pytest.raises(SystemExit):
        main(words)


def test_launch_prints_the_exported_script_of_a_megatron_plan(capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(ROOT / "recipes" / "deepseek-v3-4k-256xgb200-mxfp8.toml")
    assert main(["launch", plan, "--slurm", "--time", "4:00:00"]) == 0
    out, err = capsys.readouterr()
    assert "#SBATCH --segment=16" in out
    assert "apply_flex_dispatcher_backend(cfg.model" in out
    assert err.startswith("For Megatron Bridge 0.6.2.\nNot expressed:\n  job.data = ")
    assert main(["launch", plan, "--torchrun"]) == 0
    assert "torchrun --nnodes=64 --nproc-per-node=4" in capsys.readouterr().out
    assert main(["launch", plan, "layout.ep=48", "--slurm"]) == 1


STUBS = {
    "scontrol": 'if [ "$1" = show ]; then echo node7; echo node8; else echo "$@" >> calls; fi',
    "scancel": 'echo "scancel $@" >> calls; kill -TERM $(cat rank)',
    "srun": 'echo "$MASTER_ADDR:$MASTER_PORT $TORCHELASTIC_RESTART_COUNT" >> calls; exec ./rank.sh',
}
FAILS_TWICE = "echo x >> tries; [ $(wc -l < tries) -gt 2 ] || exit 9"
REFUSES = "exit 78"
WAITS = "trap 'exit 0' TERM; echo $$ > rank.new; mv rank.new rank; while :; do sleep 0.05; done"
SLOW_SCANCEL = STUBS["scancel"] + "; while kill -0 $(cat rank); do sleep 0.02; done"


def batch_job(folder: Path, rank: str, script: str = "", **stubs: str) -> subprocess.Popen[bytes]:
    """The script under bash, with Slurm's commands replaced by ones that note their words."""
    for name, text in {**STUBS, **stubs, "rank.sh": rank}.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    script = script or batch_script(plan_of(**H100), ["plan.toml"], Options())
    slurm = {"SLURM_JOB_ID": "41", "SLURM_JOB_NODELIST": "node[7-8]", "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.Popen(["bash", "-c", script], cwd=folder, env=os.environ | slurm)


def test_the_script_starts_again_after_a_failure(tmp_path: Path) -> None:
    assert batch_job(tmp_path, FAILS_TWICE).wait(HANG_SECONDS) == 0
    assert (tmp_path / "calls").read_text().split("\n") == ["node7:20041 0", "node7:20042 1", "node7:20043 2", ""]


IMAGES = ["$PWD/$(touch ran)", "$PWD/a b", "`touch ran`", "a'; touch ran; '", "registry#team/image:1", "--x=$HOME *"]


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_reaches_srun_as_it_was_given(image: str, tmp_path: Path) -> None:
    """One word, in which bash finds nothing to run; the folder that is mounted is that of the job."""
    options, srun = Options(container=image, nsys=True, run="runs/$(touch ran)"), 'printf "%s\\n" "$@" > words'
    plan, folder = plan_of(**H100), tmp_path / "my folder"
    folder.mkdir()
    setup, command = "true", "train.sh"
    for script in (batch_script(plan, ["plan.toml"], options), node_script(plan, "plan.toml", options, setup, command)):
        assert batch_job(folder, "exit 0", script, srun=srun).wait(HANG_SECONDS) == 0
        words = (folder / "words").read_text().splitlines()
        mounts = [f"--container-mounts={folder}:{folder}", f"--container-workdir={folder}"]
        assert words[2:5] == [f"--container-image={image}", *mounts]
        assert "--output=runs/$(touch ran)/nsys-%q{" in " ".join(words)
        assert not list(tmp_path.rglob("ran"))


def test_the_script_does_not_repeat_a_finding(tmp_path: Path) -> None:
    assert batch_job(tmp_path, REFUSES).wait(HANG_SECONDS) == 78
    assert (tmp_path / "calls").read_text() == "node7:20041 0\n"


@pytest.mark.parametrize(("sign", "more"), [(signal.SIGUSR1, ["requeue 41"]), (signal.SIGTERM, [])])
def test_the_script_saves_before_its_time_is_over(tmp_path: Path, sign: signal.Signals, more: list[str]) -> None:
    """Its notice brings it back into the queue; being canceled does not."""
    job = batch_job(tmp_path, WAITS)
    until((tmp_path / "rank").exists)
    job.send_signal(sign)
    assert job.wait(HANG_SECONDS) == 0
    assert (tmp_path / "calls").read_text().splitlines()[1:] == ["scancel --signal=TERM 41", *more]


@pytest.mark.parametrize(("sign", "more"), [(signal.SIGUSR1, ["requeue 41"]), (signal.SIGTERM, [])])
def test_a_tuning_starts_ranks_by_srun_and_goes_on_later(tmp_path: Path, sign: signal.Signals, more: list[str]) -> None:
    script = tuning_script(plan_of(**H100), ["plan.toml", "layout.ep=4"], Options(tune="60m", run="shared/tuning"))
    stub = f'printf "%s\\n" "$MASTER_ADDR" "$@" > words; {WAITS}'
    job = batch_job(tmp_path, WAITS, script, python=stub)
    until((tmp_path / "rank").exists)
    words = (tmp_path / "words").read_text().splitlines()
    assert words[:6] == ["node7", "-m", "threefold", "tune", "plan.toml", "layout.ep=4"]
    assert words[6:] == [
        *("--budget", "60m", "--launcher", "srun --kill-on-bad-exit=1 --ntasks-per-node=8", "--out", "shared/tuning")
    ]
    job.send_signal(sign)
    assert job.wait(HANG_SECONDS) == 0
    calls = tmp_path / "calls"
    assert (calls.read_text().splitlines() if calls.exists() else []) == more


def test_the_script_has_the_code_of_ranks_that_end_while_it_tells_them(tmp_path: Path) -> None:
    job = batch_job(tmp_path, WAITS, scancel=SLOW_SCANCEL)
    until((tmp_path / "rank").exists)
    job.send_signal(signal.SIGTERM)
    assert job.wait(HANG_SECONDS) == 0  # not 143, of the `wait` that the signal ended
