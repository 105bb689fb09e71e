"""`threefold estimate` and `threefold sweep` as a user meets them: shapes, garbage, chip files, pictures."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import GARBAGE, run
from repository import ROOT

from threefold.cli.main import main
from threefold.cost.chip_file import read_chip_file
from threefold.cost.estimate import estimate
from threefold.cost.rates import Rates
from threefold.plan.file import read_plan
from threefold.plan.parse import change
from threefold.plan.terms import MEMORY_TERMS, RESERVE_TERMS

LONG = str(ROOT / "recipes" / "deepseek-v3-128k-256xh100-fp8.toml")
QWEN = str(ROOT / "recipes" / "qwen3-30b-a3b-4k-16xh100-bf16-overlap.toml")
NEXT = str(ROOT / "recipes" / "qwen3-next-80b-a3b-8k-32xgb200-bf16.toml")


def answer(*words: str, capsys: pytest.CaptureFixture[str], code: int = 0) -> Any:
    got, out, err = run(*words, "--json", capsys=capsys)
    assert got == code, out + err
    return json.loads(out)


def test_estimate_json_has_the_agreed_shape(capsys: pytest.CaptureFixture[str]) -> None:
    said = answer("estimate", LONG, capsys=capsys)
    assert said["level"] == "estimated"
    assert isinstance(said["memory"]["peak_bytes"], int)
    assert [stage["stage"] for stage in said["memory"]["stages"]] == list(range(8))
    for stage in said["memory"]["stages"]:
        assert set(stage["terms"]) <= set(MEMORY_TERMS)
        assert set(stage["reserve"]) == set(RESERVE_TERMS)
        assert stage["peak_bytes"] == pytest.approx(sum(stage["terms"].values()), abs=20)  # each is rounded
    assert said["memory"]["peak_bytes"] == max(stage["peak_bytes"] for stage in said["memory"]["stages"])
    assert said["time"]["step_seconds"] == pytest.approx(sum(said["time"]["terms"].values()))
    assert said["tokens_per_second_per_gpu"] > 0
    assert said["model_tflops_per_gpu"] > 0
    assert said["wall"] in ("memory", "communication", "compute", "host")
    assert said["time_wall"] in ("communication", "compute", "host")
    assert set(said["band"]) == {"step_seconds", "peak_bytes", "device_bytes"}
    for name, middle in (("step_seconds", said["time"]["step_seconds"]), ("peak_bytes", said["memory"]["peak_bytes"])):
        low, high = said["band"][name]
        assert low < middle < high
    assert set(said["mfu"]) == {"value", "peak", "peak_tflops"}
    for entry in said["traffic"]:
        assert set(entry) == {"axis", "operation", "bytes", "count", "link"}
        assert entry["link"] in ("domain", "network")
    assert {entry["axis"] for entry in said["traffic"]} == {"cp", "ep", "pp", "dp"}  # the axes this plan uses


def test_estimate_text_tells_what_it_must(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("estimate", LONG, capsys=capsys)
    assert code == 0
    for word in ("uncalibrated", "peak at stage", "headroom", "slack", "context", "communication", "share", "wall"):
        assert word in out
    for word in ("tokens/s/GPU", "TFLOP/s/GPU", "MFU", "of h100 fp8 dense", "band", "operation", "network"):
        assert word in out
    code, out, _ = run("estimate", QWEN, "knobs.precision=fp8-cs", "knobs.dispatcher=hybridep", capsys=capsys)
    assert code == 0
    assert "uncalibrated" not in out


def test_time_says_whose_it_is_and_the_wall_does_not_contradict_it(capsys: pytest.CaptureFixture[str]) -> None:
    """A pipeline's terms are those of one stage; where memory binds, the text also says where the time goes."""
    _, out, _ = run("estimate", LONG, capsys=capsys)
    assert "terms of layers are those of stage" in out
    assert "the slowest" in out
    words = ("knobs.recompute=full", "knobs.ep_overlap=false", "knobs.delay_wgrad=false")
    for length, is_full in ((16384, True), (1024, False)):  # full recompute alone makes no wall of memory
        _, out, _ = run("estimate", QWEN, *words, f"job.seq_len={length}", capsys=capsys)
        assert "terms of layers" not in out  # no pipeline
        wall = next(line for line in out.splitlines() if line.startswith("wall "))
        assert ("memory (whole layers are recomputed" in wall) == is_full
        assert wall.endswith(" of the time")


def test_stages_alike_share_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("layout.pp=16", "layout.ep=1", "job.global_batch=1", "knobs.ep_overlap=false", "cluster.gpus=16")
    _, out, _ = run("estimate", QWEN, *words, capsys=capsys)
    assert "stage 0  stages 1-14  stage 15" in out  # one microbatch: the middle holds the same everywhere


def test_target_override_and_skew_change_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    plain = answer("estimate", QWEN, capsys=capsys)
    skewed = answer("estimate", QWEN, "--skew", "1.2", capsys=capsys)
    ours = answer("estimate", QWEN, "--target", "threefold", capsys=capsys)
    fewer = answer("estimate", QWEN, "job.global_batch=512", capsys=capsys)
    assert skewed["memory"]["peak_bytes"] > plain["memory"]["peak_bytes"]
    assert ours["memory"]["peak_bytes"] != plain["memory"]["peak_bytes"]
    assert fewer["time"]["step_seconds"] < plain["time"]["step_seconds"]


def test_an_impossible_plan_gets_findings_and_no_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    said = answer("estimate", LONG, "layout.ep=48", capsys=capsys, code=1)
    assert said["ok"] is False
    assert "ep-divides-experts" in {finding["rule"] for finding in said["findings"]}
    code, out, _ = run("estimate", LONG, "cluster.gpus=8", "layout.pp=1", "layout.vpp=1", capsys=capsys)
    assert code == 1
    assert "TFLOP/s" not in out


def test_a_plan_that_does_not_fit_is_priced_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    """Far over the memory is an error of the plan, within the margin of the prediction a remark."""
    words = ("estimate", QWEN, "job.micro_batch=4")
    code, out, _ = run(*words, capsys=capsys)
    assert code == 1
    assert "TFLOP/s/GPU" in out
    assert "headroom -" in out
    assert "error[peak-fits-memory]" in out
    said = answer(*words, capsys=capsys, code=1)
    assert said["fits"] is False
    assert [finding["rule"] for finding in said["findings"]] == ["peak-fits-memory"]
    # Skew is not in the plan, so no rule knows of it: the estimate says it by itself.
    code, out, _ = run("estimate", QWEN, "--skew", "3", capsys=capsys)
    assert code == 0
    assert "does not fit: stage 0" in out


@pytest.mark.parametrize("name", GARBAGE)
@pytest.mark.parametrize("verb", [["estimate"], ["sweep", "--over", "layout.ep=1,2"]], ids=lambda words: words[0])
def test_garbage_gives_findings(verb: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(GARBAGE[name])
    said = answer(verb[0], str(path), *verb[1:], capsys=capsys, code=1)
    assert said["ok"] is False
    assert said["findings"]


@pytest.mark.parametrize(
    "words",
    [
        ["estimate"],
        ["estimate", QWEN, "--skew", "0.5"],
        ["estimate", QWEN, "--skew", "nan"],
        ["estimate", QWEN, "--skew", "much"],
        ["estimate", QWEN, "--skew", "16.5"],  # EP 16: all rows on one rank are 16 times the mean
        ["estimate", QWEN, "--skew", "1e300"],
        ["sweep", QWEN],
        ["sweep", QWEN, "--over", "layout.ep"],
        ["sweep", QWEN, "--over", "layout.ep=,"],
        ["sweep", QWEN, "--over", "=1,2"],
    ],
)
def test_a_wrong_command_line_is_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(*words, capsys=capsys)
    assert code == 2
    assert err


CHIP = """
chip = "h100"
measured = "2026-11-15 on 1 x H100"
[facts]
memory_bandwidth = 3.2e12
memory_bytes = 85_000_000_000
[peak_flops]
bf16 = 7.5e14
[rates]
gemm = 0.9
[rates.drift]
"26.10" = 1.5
"""


def test_a_chip_file_overrides_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "chip.toml"
    path.write_text(CHIP)
    chip, findings = read_chip_file(str(path))
    assert findings == []
    assert chip is not None
    assert (chip.spec.memory_bandwidth, chip.spec.memory_bytes) == (3.2e12, 85_000_000_000)
    assert (chip.spec.peak_flops["bf16"], chip.spec.peak_flops["fp8"]) == (7.5e14, 1978.9e12)
    assert chip.spec.network_bandwidth == 50e9  # as shipped
    assert chip.rates_over(Rates(gemm=0.5, grouped=0.25)) == Rates(gemm=0.9, grouped=0.25, drift={"26.10": 1.5})
    plan = read_plan(QWEN).plan
    assert plan is not None
    measured = chip.applied(plan)
    assert measured.chip.memory_bandwidth == 3.2e12
    assert plan.chip.memory_bandwidth == 3.35e12  # the plan itself is not touched
    assert measured.hash == plan.hash
    assert hash(measured) == hash(chip.applied(plan))
    assert change(measured, {"job.global_batch": 512}).chip == measured.chip
    assert change(measured, {"cluster.chip": "h200"}).chip.name == "h200"
    assert "2026-11-15 on 1 x H100" in estimate(measured).basis
    assert estimate(measured).mfu_peak == "h100 bf16 measured"


def test_a_slower_chip_file_slows_the_estimate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chip.toml"
    path.write_text('chip = "h100"\n[facts]\nmemory_bandwidth = 1e12\n[rates]\ngemm = 0.1\n')
    shipped = answer("estimate", QWEN, capsys=capsys)
    slow = answer("estimate", QWEN, "--chip-file", str(path), capsys=capsys)
    for term in ("gemm", "elementwise"):
        assert slow["time"]["terms"][term] > 2 * shipped["time"]["terms"][term]
    assert slow["calibrated"] is False  # no published run has tested these rates


def test_check_says_whose_rates_it_judged_by(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "slow.toml"
    path.write_text('chip = "h100"\nmeasured = "2026-11-19, a slow node"\n[rates]\ngemm = 0.1\n')
    _, out, _ = run("check", QWEN, "--chip-file", str(path), capsys=capsys)
    assert "rates: of a chip file (2026-11-19, a slow node); --chip-file none takes the shipped ones" in out
    _, out, _ = run("check", QWEN, "--chip-file", "none", capsys=capsys)
    assert "rates:" not in out
    code, out, _ = run("check", QWEN, "--chip-file", str(tmp_path / "nothing.toml"), capsys=capsys)
    assert code == 1
    assert "error[file-readable]" in out


BAD_CHIPS = {
    "no-chip": ("[rates]\ngemm = 0.5\n", {"known-value"}, "chip"),
    "other-chip": ('chip = "h1000"\n', {"known-value"}, "h100"),
    "key": ('chip = "h100"\nmesured = "x"\n', {"unknown-field"}, "measured"),
    "fact": ('chip = "h100"\n[facts]\nmemory_bandwith = 1e12\n', {"unknown-field"}, "memory_bandwidth"),
    "rate": ('chip = "h100"\n[rates]\ngem = 0.5\n', {"unknown-field"}, "gemm"),
    "format": ('chip = "h100"\n[peak_flops]\nfp4 = 1e15\n', {"unknown-field"}, "fp8"),
    "text": ('chip = "h100"\n[rates]\ngemm = "fast"\n', {"wrong-type"}, "a number"),
    "flag": ('chip = "h100"\n[facts]\nmemory_bytes = true\n', {"wrong-type"}, "a number"),
    "table": ('chip = "h100"\nrates = 3\n', {"wrong-type"}, "a table"),
    "drift": ('chip = "h100"\n[rates]\ndrift = 1.0\n', {"wrong-type"}, "a table"),
    "zero": ('chip = "h100"\n[rates]\ngemm = 0\n', {"in-range"}, "positive"),
    "negative": ('chip = "h100"\n[facts]\nmemory_bytes = -1\n', {"in-range"}, "positive"),
    "nan": ('chip = "h100"\n[facts]\nmemory_bytes = nan\n', {"in-range"}, "machine"),
    "huge": (f'chip = "h100"\n[facts]\nmemory_bytes = 1{"0" * 400}\n', {"in-range"}, "machine"),
    "digits": (f'chip = "h100"\n[facts]\nmemory_bytes = 0x{"f" * 5000}\n', {"in-range"}, "machine"),
    "text-digits": (f'chip = "h100"\nmeasured = 0x{"f" * 5000}\n', {"wrong-type"}, "text"),
    "several": ('chip = 3\nx = 1\n[rates]\ngemm = -1\n', {"wrong-type", "unknown-field", "in-range"}, "chip"),
    "truncated": ('chip = "h100"\n[rates\n', {"file-readable"}, "TOML"),
    "empty": ("", {"file-readable"}, "chip"),
    "mismatch": ('chip = "gb200"\n', {"known-value"}, "gb200"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_CHIPS)
def test_a_bad_chip_file_gives_findings(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, rules, word = BAD_CHIPS[name]
    path = tmp_path / "chip.toml"
    path.write_text(text)
    said = answer("estimate", QWEN, "--chip-file", str(path), capsys=capsys, code=1)
    assert {finding["rule"] for finding in said["findings"]} == rules
    assert word in json.dumps(said["findings"])


def test_a_missing_chip_file_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "none.toml"):
        said = answer("estimate", QWEN, "--chip-file", str(path), capsys=capsys, code=1)
        assert said["findings"][0]["rule"] == "file-readable"


LENGTHS = "job.seq_len=4096,16384,65536,131072,262144"


def test_sweep_sizes_cp_along_and_says_what_gives_out(capsys: pytest.CaptureFixture[str]) -> None:
    """The documents' pattern for DeepSeek-V3: CP = sequence / 4096, 256 GPUs up to 128K, 512 at 256K."""
    said = answer("sweep", LONG, "--over", LENGTHS, capsys=capsys)
    points = said["points"]
    assert [point["value"] for point in points] == [4096, 16384, 65536, 131072, 262144]
    assert [point["degrees"]["cp"] for point in points] == [1, 4, 16, 32, 64]
    assert [point["degrees"]["dp"] for point in points] == [32, 8, 2, 1, 1]
    assert [point["gpus"] for point in points] == [256, 256, 256, 256, 512]
    assert {point["global_batch"] * point["value"] for point in points} == {128 * 131072}  # tokens of a step
    assert said["gives_out"]["dp"] == 131072
    assert said["gives_out"]["gpus"] == 262144
    wrong = {one["rule"]: one for one in said["outgrown"]}
    assert wrong["cp-from-shard-target"]["moved_along"] is True
    assert wrong["batch-against-length"]["moved_along"] is True
    assert wrong["dp-at-floor"]["moved_along"] is False
    assert all(point["estimate"]["level"] == "estimated" for point in points)


def test_sweep_text(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("sweep", LONG, "--over", LENGTHS, capsys=capsys)
    assert code == 0
    assert "settings that are right at job.seq_len = 4K, wrong later" in out
    assert "warning[cp-from-shard-target] layout.cp" in out
    assert "DP gives out at 128K" in out
    assert "the GPU count gives out at 256K: it needs a multiple of 512" in out
    assert "uncalibrated" in out


def test_sweep_over_any_field(capsys: pytest.CaptureFixture[str]) -> None:
    said = answer("sweep", QWEN, "--over", "layout.ep=8,16,32,48", capsys=capsys)
    assert [point["gpus"] for point in said["points"]] == [16, 16, 32, 48]
    refused = said["points"][3]
    assert refused["estimate"] is None
    assert "ep-divides-experts" in refused["verdict"]
    said = answer("sweep", QWEN, "--over", 'knobs.recompute=[],["layernorm", "moe_act"],["full"]', capsys=capsys)
    peaks = [point["estimate"]["memory"]["peak_bytes"] for point in said["points"] if point["estimate"]]
    assert peaks == sorted(peaks, reverse=True)
    said = answer("sweep", QWEN, "--over", "knobs.dispatcher=alltoall,deepep", capsys=capsys)
    assert [point["value"] for point in said["points"]] == ["alltoall", "deepep"]
    said = answer("sweep", QWEN, "--over", "expert_model_parallel_size=8,16", capsys=capsys)  # Megatron's name
    assert said["over"] == "layout.ep"
    said = answer("sweep", LONG, "--over", "layout.vpp=2,4", capsys=capsys)
    assert said["points"][0]["estimate"] is not None  # the written stage layout gave way to a balanced one


def test_a_sweep_point_is_the_estimate_of_its_plan(capsys: pytest.CaptureFixture[str]) -> None:
    point = answer("sweep", LONG, "--over", "job.seq_len=131072", capsys=capsys)["points"][0]
    assert point["moved"] == {}
    alone = answer("estimate", LONG, capsys=capsys)
    assert point["estimate"]["time"] == alone["time"]
    assert point["estimate"]["memory"] == alone["memory"]


@pytest.mark.parametrize(
    ("over", "rule"),
    [
        ("layout.epp=1,2", "unknown-field"),
        ("layout.ep=1,two", "wrong-type"),
        ("layout.ep=0,1", "in-range"),
        ("knobs.dispatcher=alltoall,deepp", "known-value"),
        ("model=qwen3-30b-a3b,qwen4", "known-model"),
        ("layout.ep=auto", "no-free-field"),
        ("sequence_parallel=true,false", "known-value"),
        ("bf16=yes,no", "wrong-type"),
        ("moe_token_dispatcher_type=flex", "flex-needs-backend"),
    ],
)
def test_a_bad_value_to_sweep_is_a_finding(over: str, rule: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = answer("sweep", QWEN, "--over", over, capsys=capsys, code=1)
    assert rule in {finding["rule"] for finding in said["findings"]}


def test_a_sweep_meets_a_budget_at_every_value(capsys: pytest.CaptureFixture[str]) -> None:
    """What `estimate` chooses for the same plan; a budget that nothing meets refuses its value alone."""
    plan = str(ROOT / "recipes" / "qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml")
    budgets = ["auto:45GiB", "auto:55GiB", "auto:1GiB"]
    points = answer("sweep", plan, "--over", f"knobs.recompute={','.join(budgets)}", capsys=capsys)["points"]
    for point, budget in zip(points[:2], budgets[:2], strict=True):
        alone = answer("estimate", plan, f"knobs.recompute={budget}", capsys=capsys)
        assert point["estimate"]["memory"] == alone["memory"]
        assert point["estimate"]["time"] == alone["time"]
        assert point["moved"]["knobs.recompute"]
    assert points[0]["moved"] != points[1]["moved"]
    assert points[2]["verdict"] == "refused: recompute-chosen"
    # A budget of the plan itself: more is recomputed where microbatches are larger.
    over = ("--over", "job.micro_batch=1,2", "knobs.recompute=auto:55GiB")
    one, two = answer("sweep", plan, *over, capsys=capsys)["points"]
    assert one["estimate"]["memory"]["peak_bytes"] <= 55 * 2**30
    assert two["estimate"]["memory"]["peak_bytes"] <= 55 * 2**30
    assert one["moved"]["knobs.recompute"] != two["moved"]["knobs.recompute"]
    _, out, _ = run("sweep", plan, *over, capsys=capsys)
    assert "at 2: auto:55GiB recomputes" in out


def test_a_sweep_in_which_nothing_runs_is_1(capsys: pytest.CaptureFixture[str]) -> None:
    said = answer("sweep", QWEN, "--over", "layout.ep=3,5", capsys=capsys, code=1)
    assert all(point["estimate"] is None for point in said["points"])


def test_plot_is_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "sweep.png"
    code, _, err = run("sweep", QWEN, "--over", "layout.ep=8,16,48", "--plot", str(path), capsys=capsys)
    assert code == 0
    assert str(path) in err
    assert path.read_bytes().startswith(b"\x89PNG")
    for bad in (tmp_path / "no" / "folder.png", tmp_path / "x.nosuchformat"):
        code, _, err = run("sweep", QWEN, "--over", "layout.ep=16", "--plot", str(bad), capsys=capsys)
        assert code == 1
        assert "cannot write" in err


def test_plot_without_matplotlib_names_the_extra() -> None:
    program = "import sys; sys.modules['matplotlib'] = None; import threefold.cli.main as m; sys.exit(m.main())"
    words = ["sweep", QWEN, "--over", "layout.ep=16", "--plot", "x.png"]
    done = subprocess.run(
        [sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=ROOT, timeout=600
    )
    assert done.returncode == 1
    assert "threefold[report]" in done.stderr
    assert "Traceback" not in done.stderr


def test_estimating_loads_neither_numpy_nor_matplotlib() -> None:
    program = "import sys, threefold.cli.main as m; m.main(); print(*sys.modules)"
    for words in (["estimate", NEXT], ["sweep", NEXT, "--over", "layout.ep=16,32"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=ROOT, timeout=600
        )
        loaded = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
        assert "threefold" in loaded
        assert not loaded & {"numpy", "torch", "matplotlib"}


def test_capacity_has_a_bound(capsys: pytest.CaptureFixture[str]) -> None:
    said = answer("estimate", QWEN, "job.capacity_factor=1e300", capsys=capsys, code=1)
    assert [(finding["rule"], finding["at"]) for finding in said["findings"]] == [("in-range", "job.capacity_factor")]
    most = said["findings"][0]["fix_data"]["job.capacity_factor"]
    code, out, _ = run("estimate", QWEN, f"job.capacity_factor={most}", capsys=capsys)
    assert code == 1  # more rows than any memory holds
    assert "inf" not in out.split()


def test_loads_of_experts_give_the_skew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """128 experts on 16 ranks, the first eight with twice the load: the busiest rank has 2 / (1 + 1/16) of the mean."""
    plan = str(ROOT / "recipes" / "qwen3-30b-a3b-4k-16xh100-bf16-overlap.toml")
    loads = tmp_path / "loads.json"
    loads.write_text(json.dumps([2] * 8 + [1] * 120))
    assert main(["estimate", plan, "--json", "--loads", str(loads)]) == 0
    skewed = json.loads(capsys.readouterr().out)
    assert main(["estimate", plan, "--json", "--skew", str(2 / (1 + 1 / 16))]) == 0
    given = json.loads(capsys.readouterr().out)
    assert skewed["memory"]["peak_bytes"] == given["memory"]["peak_bytes"]
    assert skewed["time"]["step_seconds"] == pytest.approx(given["time"]["step_seconds"])
    assert main(["estimate", plan, "--loads", str(tmp_path / "none.json")]) == 2


NO_LOADS = {
    "few": "[1, 2]",
    "nan": json.dumps([float("nan")] + [1] * 127),
    "infinite": json.dumps([float("inf")] + [1] * 127),
    "huge": json.dumps([10**400] + [1] * 127),
    "negative": json.dumps([-1] + [1] * 127),
    "none": json.dumps([0] * 128),
    "words": json.dumps([True] + ["1"] * 127),
    "object": '{"a": 1}',
    "ragged": json.dumps([[1] * 128, [1] * 127]),
    "mixed": json.dumps([[1] * 128, 1]),
    "number": "5",
    "null": "null",
    "text": '"abc"',
    "nested": "[" * 100_000,
    "cut off": "[1, ",
}


@pytest.mark.parametrize("name", NO_LOADS)
def test_loads_that_are_none_are_a_message(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loads = tmp_path / "loads.json"
    loads.write_text(NO_LOADS[name])
    code, out, err = run("estimate", QWEN, "--loads", str(loads), capsys=capsys)
    assert (code, out) == (2, "")
    assert err.startswith("threefold estimate: --loads ")
    assert ("no 128 loads, one an expert" if name == "few" else "loads.json cannot be read: ") in err
    assert len(err.splitlines()) == 1
