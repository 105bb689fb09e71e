"""What logs say about runs that go on: configuration, steady speed, health, memory, notices, and several files."""

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from job_logs import SYSTEMS, arguments_table, bridge_summary, megatron_step, titan_config, write_log

from threefold.cli.main import main
from threefold.diagnose.diagnosis import diagnose
from threefold.diagnose.files import kind_of
from threefold.diagnose.logs.health import judge_steps
from threefold.diagnose.logs.job_logs import JobLogs
from threefold.diagnose.logs.scan import Scan


def write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def read(*paths: Path) -> JobLogs:
    found = diagnose(paths)
    [part] = found.parts
    assert isinstance(part, JobLogs)
    return part


def steps(count: int, **over: dict[int, float]) -> list[str]:
    """Lines of steps of 4 s; `over` has other values by step."""
    rng = random.Random(3)
    lines = []
    for step in range(1, count + 1):
        values = {name: by_step[step] for name, by_step in over.items() if step in by_step}
        lines.append(megatron_step(rng, step, count, **values))
    return lines


@pytest.mark.parametrize(
    ("lines", "system", "expected"),
    [
        (arguments_table(16), "Megatron-LM", {"cluster.gpus": 16, "layout.ep": 8, "job.global_batch": 256}),
        (bridge_summary(), "Megatron Bridge", {"layout.ep": 8, "job.global_batch": 256, "job.seq_len": 4096}),
        (titan_config(), None, {"cluster.gpus": 16, "layout.ep": 8, "cluster.chip": "h100", "job.seq_len": 4096}),
    ],
    ids=["arguments", "summary", "torchtitan"],
)
def test_printed_configuration_becomes_a_plan(
    lines: list[str], system: str | None, expected: dict[str, object], tmp_path: Path
) -> None:
    for prefix in ("", "[default3]:", "  3: "):
        found = read(write(tmp_path / "a.log", [prefix + line for line in lines]))
        plan = found.configuration.plan
        assert plan is not None
        assert plan.model.name == "qwen3-30b-a3b"
        values = {"cluster.gpus": plan.cluster.gpus, "cluster.chip": plan.cluster.chip, "layout.ep": plan.layout.ep}
        values |= {"job.global_batch": plan.job.global_batch, "job.seq_len": plan.job.seq_len}
        assert {name: values[name] for name in expected} == expected
        assert found.facts["system"] == system


def test_older_torchtitan_prints_a_dict_over_several_lines_or_one(tmp_path: Path) -> None:
    config = {"model": {"name": "deepseek_v3", "flavor": "671B"}, "training": {"seq_len": 4096, "local_batch_size": 1},
              "parallelism": {"data_parallel_shard_degree": 256, "expert_parallel_degree": 64}}  # fmt: skip
    for text in (f"Running with args: {config}", f"Running with configs: {json.dumps(config, indent=2)}"):
        lines = [f"[rank0]:{line}" for line in f"[titan] 2026-03-03 10:00:00,101 - root - INFO - {text}".splitlines()]
        plan = read(write(tmp_path / "a.log", lines)).configuration.plan
        assert plan is not None
        assert (plan.model.name, plan.cluster.gpus, plan.layout.ep) == ("deepseek-v3", 256, 64)


@pytest.mark.parametrize("system", SYSTEMS)
def test_steady_steps(system: str, tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    write_log(path, random.Random(5), system, None, "torchrun")
    found = read(path)
    assert (found.health.first, found.health.last, found.health.num_steps) == (1, 1000, 1000)
    assert found.verdict.status == ("no death seen" if system == "torchtitan" else "finished")
    if system in ("megatron-lm", "bridge"):
        assert found.health.step_seconds == pytest.approx(4.04, rel=0.01)  # 4 s and up to 2 % more
    assert found.health.tflops == pytest.approx({"torchtitan": 228.68, "threefold": 228}.get(system, 240))
    if system == "torchtitan":
        assert found.health.memory_percent == 82.85


def test_first_steps_and_slow_ones_do_not_move_the_median(tmp_path: Path) -> None:
    over = {1: 90.0, 2: 30.0, **dict.fromkeys(range(50, 200, 50), 60.0)}
    health = read(write(tmp_path / "a.log", steps(200, seconds=over))).health
    assert health.step_seconds == pytest.approx(4.04, rel=0.01)
    assert [step for step, _ in health.outliers] == [50, 100, 150]


def test_health_of_losses(tmp_path: Path) -> None:
    over = {
        "loss": {150: 9.0, 180: float("nan")},
        "norm": {160: 90.0},
        "skipped": {170: 1},
        "balance": dict.fromkeys(range(1, 201), 6.0),
    }
    text = "\n".join(read(write(tmp_path / "a.log", steps(200, **over))).lines)
    assert "loss spikes at steps 150\n" in text
    assert "gradient norm above 10 x its median at steps 160\n" in text
    assert "1 step with a loss or gradient norm that is not finite, from step 180" in text
    assert "1 step skipped" in text
    assert "load-balancing loss 6 (1 is level)" in text


def test_the_last_start_counts(tmp_path: Path) -> None:
    """A job that was started again from step 50, twice as slow."""
    rng = random.Random(1)
    again = [megatron_step(rng, step, 200, seconds=8.0) for step in range(51, 120)]
    found = read(write(tmp_path / "a.log", [*steps(100), *again]))
    assert (found.health.first, found.facts["starts"]) == (51, 2)
    assert found.health.step_seconds == pytest.approx(8.08, rel=0.01)


def test_a_configuration_without_an_end_swallows_no_error(tmp_path: Path) -> None:
    lines = [*bridge_summary()[:-1], "OSError: [Errno 28] No space left on device: '/ckpt'"]
    found = read(write(tmp_path / "a.log", lines))
    assert found.verdict.slug == "disk-full"


@pytest.mark.parametrize(
    ("tflops", "head", "gpus", "why"),
    [
        (189.0, [], 32, "TFLOP/s and seconds are the work of a step"),
        (150.0, ["[rank17]: warming up"], 40, "TFLOP/s and seconds are the work of a step"),
        (1900.0, ["[rank17]: warming up"], 24, "the fewest for this layout and the ranks in the log"),
    ],
)
def test_a_log_of_bridge_says_how_many_gpus_ran(
    tflops: float, head: list[str], gpus: int, why: str, tmp_path: Path
) -> None:
    """By hand: 6 x 3.04e9 weights of a token and 4.8e9 FLOP of causal scores at 4096 are 23.1 GFLOP a token; 256
    sequences are 2.42e16 FLOP, on 32 GPUs in 4 s 189 TFLOP/s each. EP is 8, so that ranks come by eight."""
    lines = [megatron_step(random.Random(3), step, 60, tflops=tflops) for step in range(1, 40)]
    found = read(write(tmp_path / "a.log", [*bridge_summary(), *head, *lines]))
    assert found.configuration.plan is not None
    assert found.configuration.plan.cluster.gpus == gpus
    assert any(one.at == "cluster.gpus" and f"{gpus}, " in one.problem and why in one.problem for one in found.findings)


def test_numbers_of_another_job_are_not_judged_by_the_plan(tmp_path: Path) -> None:
    lines = [megatron_step(random.Random(3), step, 60, tflops=4 * 240.0) for step in range(1, 40)]
    found = read(write(tmp_path / "a.log", [*arguments_table(16), *lines]))
    text = "\n".join(found.lines)
    assert "its number of GPUs, batch, length or model is another" in text
    assert "as estimated" not in text


def test_a_full_job_gets_no_advice_that_takes_memory(tmp_path: Path) -> None:
    """A plan of some 30 GiB, and 71 GiB that were allocated: what holds the rest is the question."""
    summary = bridge_summary()
    at = summary.index("  hidden_size: 2048  (Mcore default: None)")
    summary[at:at] = ["  recompute_granularity: 'full'", "  recompute_method: 'uniform'", "  recompute_num_layers: 1"]
    died = (
        "[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.51 GiB. GPU 1 has a total capacity "
        "of 79.11 GiB of which 1.93 GiB is free. Including non-PyTorch memory, this process has 77.17 GiB memory in "
        "use. Of the allocated memory 71.02 GiB is allocated by PyTorch, and 3.20 GiB "
        "is reserved by PyTorch but unallocated."
    )
    lines = [megatron_step(random.Random(3), step, 60, tflops=189.0) for step in range(1, 10)]
    slow, full = (read(write(tmp_path / "a.log", [*summary, *lines, *more])) for more in ([], [died]))
    assert "selective-before-full" in [one.rule for one in slow.findings]
    assert "selective-before-full" not in [one.rule for one in full.findings]
    assert any("GiB are not of it: another plan ran" in line for line in full.lines)


def test_memory_and_versions(tmp_path: Path) -> None:
    lines = [
        "NCCL version 2.27.5+cuda12.9",
        "[Rank 0] (after 2 iterations) memory (MB) | allocated: 1000.00 | max reserved: 3072.00",
        "[Rank 8] (after 2 iterations) memory (GB) | mem-reserved-gigabytes: 1.0 | mem-max-reserved-gigabytes: 10.0",
    ]
    found = read(write(tmp_path / "a.log", lines))
    assert found.facts["versions"] == {"nccl": "2.27.5"}
    assert any("peak 9.31 GiB on rank 8, 3.00 GiB on rank 0" in line for line in found.lines)  # 10e9 and 3072 * 2**20


def test_what_fell_back_explains_a_slow_run(tmp_path: Path) -> None:
    warning = "WARNING:megatron.bridge:DeepEP is only applicable to Ampere, Hopper, and Blackwell (B200/B300) GPUs. "
    warning += "Current GPU: NVIDIA X. Falling back to alltoall."
    rng = random.Random(1)
    slow = [megatron_step(rng, step, 200, seconds=40.0, tflops=30.0) for step in range(1, 100)]
    found = read(write(tmp_path / "a.log", [*arguments_table(), warning, *slow]))
    assert found.facts["notices"] == {"dispatcher-fell-back": 1}
    assert found.speed.is_slow
    [head, *causes] = found.speed.lines()
    assert head.startswith("30 of about ")
    assert "dispatcher-fell-back" in causes[0]
    assert f"a.log:{len(arguments_table()) + 1})" in causes[0]  # the line of the warning


@pytest.mark.parametrize(("held", "idle", "is_short"), [("77.00", "0.20", True), ("58.00", "18.00", False)])
def test_a_shortage_has_remedies_that_make_room(held: str, idle: str, is_short: bool, tmp_path: Path) -> None:
    """Two GiB were asked for beyond a full device; fragments alone ask for no other plan."""
    oom = (
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 "
        "GiB of which 1.00 GiB is free. Including non-PyTorch memory, this process has 78.10 GiB memory in use. Of the "
        f"allocated memory {held} GiB is allocated by PyTorch, and {idle} GiB is reserved by PyTorch but unallocated."
    )
    found = read(write(tmp_path / "a.log", [*arguments_table(), *steps(5), oom]))
    remedies = found.to_json()["remedies"]
    assert bool(remedies) == is_short
    assert all(one["wall"] == "memory" and one["set"] and one["freed_bytes"] >= 2 * 2**30 for one in remedies)


def test_packed_and_cut_logs(tmp_path: Path) -> None:
    content = "\n".join([*steps(300), "OSError: [Errno 28] No space left on device"]).encode()
    packed = tmp_path / "a.log.gz"
    packed.write_bytes(gzip.compress(content))
    assert read(packed).verdict.slug == "disk-full"
    packed.write_bytes(gzip.compress(random.Random(1).randbytes(2**20) + content)[:-2000])
    assert "a packed file is cut off" in read(packed).lines[0]


def test_files_are_told_apart_by_content(tmp_path: Path) -> None:
    kinds = {
        "log": b"[rank0]: {} lines\n",
        "trace": b'{"schemaVersion": 1, "traceEvents": []}',
        "flight recorder": b'{"version": "2.10", "pg_config": {}}',
        "snapshot": b"\x80\x04\x95}\x94\x8c\x08segments\x94]",
    }
    for kind, content in kinds.items():
        path = tmp_path / "file"
        path.write_bytes(content)
        assert kind_of(path) == kind
    path.write_bytes(bytes(4000))
    with pytest.raises(ValueError, match="neither text"):
        kind_of(path)


def test_long_lines_and_many_templates_stay_bounded(tmp_path: Path) -> None:
    rng = random.Random(2)
    words = ["".join(rng.choices("abcdefgh", k=30)) for _ in range(3000)]
    path = tmp_path / "a.log"
    path.write_bytes(b"error " * 2**20 + b"\n" + "\n".join(f"{word} error {word}" for word in words).encode())
    scan = Scan(path).read()
    assert scan.num_lines <= 3002
    assert all(len(one.text) <= 1500 for one in scan.sightings)


def test_a_column_that_is_full_is_thinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threefold.diagnose.logs.steps._MOST_STEPS", 64)
    scan = Scan(write(tmp_path / "a.log", steps(1000))).read()
    assert len(scan.steps.columns["step"]) < 64
    assert scan.steps.num_read == 1000
    assert judge_steps(scan.steps).step_seconds == pytest.approx(4.04, rel=0.01)


def test_verb_prints_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "a.log", [*steps(5), "RuntimeError: DeepEP error: timeout (dispatch CPU)"])
    assert main(["diagnose", str(path)]) == 0
    assert "died of deepep-timeout (medium confidence) after step 5" in capsys.readouterr().out
    assert main(["diagnose", str(path), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["parts"]["log"]["verdict"]["death"] == "deepep-timeout"
    assert main(["diagnose", str(tmp_path / "absent")]) == 1
    assert "error[file-readable]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lines", "code"),
    [
        (["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."], 1),
        (["OSError: [Errno 28] No space left on device"], 125),
        (["ValueError: nobody knows"], 125),
        (["[after training is done] datetime: 2026-03-03 10:00:00"], 0),
    ],
    ids=["same", "other", "unknown", "good"],
)
def test_exit_codes_of_a_bisection(lines: list[str], code: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", [*steps(5), *lines])
    assert main(["diagnose", str(path), "--fail-on", "cuda-out-of-memory"]) == code


def test_a_log_without_a_step_is_no_good_commit(tmp_path: Path) -> None:
    path = write(tmp_path / "a.log", ["the machine has no GPU to spare"])
    assert main(["diagnose", str(path), "--fail-on", "cuda-out-of-memory"]) == 125


def test_git_bisect_finds_the_commit(tmp_path: Path) -> None:
    """Of eight commits the fifth brings an OOM. The second, sixth and seventh do not start for another reason."""
    died = [*steps(5), "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."]
    other = ["ImportError: cannot import name 'x' from 'y'"]

    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    for number, lines in enumerate([steps(5), other, steps(6), steps(7), died, other, other, died], start=1):
        write(tmp_path / "a.log", [*lines, f"commit {number}"])
        git("add", "a.log")
        git("commit", "-q", "-m", f"commit number {number}")
    git("bisect", "start", "HEAD", "HEAD~7")
    words = (sys.executable, "-m", "threefold", "diagnose", "a.log", "--fail-on", "cuda-out-of-memory")
    said = git("bisect", "run", *words)
    assert "is the first bad commit" in said
    assert "commit number 5" in said.partition("is the first bad commit")[2]


def test_bisection_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(tmp_path / "absent"), "--fail-on", "unknown"]) == 125
    with pytest.raises(SystemExit) as error:
        main(["diagnose", "a.log", "--fail-on", "cuda-out-of-memry"])
    assert error.value.code == 2
    assert "did you mean cuda-out-of-memory" in capsys.readouterr().err


def test_ranks_are_counted_in_lines_that_say_nothing(tmp_path: Path) -> None:
    lines = [f"[rank{rank}]: apples and {'x' * rank}" for rank in range(40)]
    assert read(write(tmp_path / "a.log", lines)).facts["ranks"] == list(range(40))


def test_an_error_has_the_time_of_a_line_before_it(tmp_path: Path) -> None:
    """The OOM says no time; a line before it, which says nothing else, does. The other rank's error was earlier."""
    late = ["2026-03-03 11:20:00 apples", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."]
    early = ["2026-03-03 11:10:00 pears", "OSError: [Errno 28] No space left on device"]
    found = read(write(tmp_path / "rank-0.log", late), write(tmp_path / "rank-1.log", early))
    assert (found.verdict.slug, found.verdict.confidence) == ("disk-full", "high")


def test_lines_that_are_never_alike_stay_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log made so that no two lines share a form: memory and looks are bounded, and the last traceback is read."""
    monkeypatch.setattr("threefold.diagnose.logs.scan._LOOKS_IN_ALL", 500)
    monkeypatch.setattr("threefold.diagnose.logs.scan._MOST_TEMPLATE_BYTES", 10_000)
    rng = random.Random(4)
    lines = [f"{''.join(rng.choices('abcdefgh', k=30))} failed" for _ in range(5000)]
    lines += [f"iteration {step:8d}/    9000 | lm loss: 2.5E+00 | grad norm: 1.000 |" for step in range(5)]
    lines += ["Traceback (most recent call last):", '  File "a.py", line 3, in main']
    lines += ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."]
    scan = Scan(write(tmp_path / "a.log", lines)).read()
    assert sum(map(len, scan._templates)) < 20_000
    assert scan._num_looks < 600
    assert [one.deaths[0].slug for one in scan.sightings] == ["cuda-out-of-memory"]


def test_a_packed_file_of_any_length_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("threefold.diagnose.logs.lines.MOST_BYTES", 2**23)
    path = tmp_path / "a.log.gz"
    path.write_bytes(gzip.compress(b"apples\n" * 2**22))
    assert 2**20 < Scan(path).read().num_lines < 2**21


@pytest.mark.parametrize(
    "line",
    [
        f" iteration {'9' * 400}/ 9 | elapsed time per iteration (ms): 1.0 | lm loss: 2.5 |",
        f" iteration 3/ {'9' * 5000} | elapsed time per iteration (ms): 1.0 | lm loss: 1e400 |",
        f"step {'9' * 400}/9  loss 1.0  grad norm 1.0  lr 1.0  1 tokens/s  1 TFLOP/s a rank",
        f"step: {'9' * 400}  loss: 1.0  memory: 1..2GiB(3%)  tps: 4",
        "[Rank 99999999999] (after 3 iterations) memory (MB) | allocated: 1..2 | max reserved: 3.",
        "[titan] CUDA capacity: NVIDIA H100 with 1..2GiB memory",
        f"[titan] Building device mesh with parallelism: pp={'9' * 5000}, tp=2",
        "[titan] Peak FLOPS used for computing MFU: e+e+",
        '[titan] Running with configs: {"model": {"name": "qwen3", "flavor": "30B-A3B", "converters": 3}}',
        f"Root Cause (first observed failure):\n rank : {'9' * 5000}",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1..2 GiB.",
        *(f" iteration {number}/ 99 | elapsed time per iteration (ms): 0.0 | lm loss: nan |" for number in (1, 2)),
    ],
)
def test_numbers_that_are_none_are_no_traceback(line: str, tmp_path: Path) -> None:
    found = diagnose([write(tmp_path / "a.log", [line] * 40)])
    json.dumps(found.to_json(), allow_nan=False)
