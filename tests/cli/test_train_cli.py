"""Training as a user meets it: train, go on, sample, export, import."""

import json
from pathlib import Path

import pytest
import torch
from repository import ROOT
from tiny_runs import closed_pipe

from threefold.cli.main import is_out_of_memory, main, out_of_memory
from threefold.engine.moe import experts
from threefold.plan.file import read_plan

RECIPE = str(ROOT / "recipes" / "tiny-qwen3-moe-256-1xcpu-fp32.toml")
SHORT = ["job.seq_len=32", "run.tensorboard=false", "job.data=synthetic", "--threads", "1"]


def train(folder: Path, *words: str) -> int:
    return main(["train", RECIPE, *SHORT, "--run", str(folder), *words])


def test_a_run_trains_goes_on_and_samples(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert train(run, "job.steps=2") == 0
    assert "finished at step 2 of 2" in capsys.readouterr().out
    assert train(run, "job.steps=4") == 0  # a run may go on for longer
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]  # as in the terminal
    assert "\nstep 4/4  loss " in capsys.readouterr().err
    contract = json.loads((run / "contract.json").read_text())
    assert contract["benchmark_only"] is True
    assert contract["torch"] == torch.__version__
    assert [stretch["steady_steps"] for stretch in contract["timing"]] == [[2, 2], [4, 4]]  # half is warm-up here
    loads = json.loads((run / "loads.json").read_text())
    assert [sum(layer) for layer in loads] == [8 * 32 * 4] * 4  # sequences, tokens, experts of a token; four layers
    capsys.readouterr()
    assert main(["sample", str(run), "--prompt", "def ", "--tokens", "3"]) == 0
    assert capsys.readouterr().out.startswith("def ")
    assert main(["sample", str(run), "--prompt", "def ", "--tokens", "3", "--temperature", "1e-45"]) == 0  # greedy
    words = ["--temperature", "1e-30", "--tokens", "3", "--seed", "9"]
    assert main(["sample", str(run), "--prompt", "def ", *words]) == 0
    pytest.importorskip("tokenizers")
    assert main(["sample", str(run), "--prompt", "w2", "--tokenizer", large_tokenizer(tmp_path), "--tokens", "1"]) == 0
    capsys.readouterr()
    assert main(["sample", str(run), "--prompt", "w1999", "--tokenizer", large_tokenizer(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "prompt-fits-vocab" in out
    assert "token 1999 of the prompt is beyond the model's vocabulary of 512" in out


@pytest.mark.parametrize(("words", "is_benchmark"), [((), False), (("job.routing=forced-balance",), True)])
def test_a_run_with_forced_routing_is_a_benchmark_only(
    words: tuple[str, ...], is_benchmark: bool, tmp_path: Path
) -> None:
    assert train(tmp_path, "job.steps=1", "job.data=embedded", *words) == 0
    assert json.loads((tmp_path / "contract.json").read_text())["benchmark_only"] is is_benchmark


def test_a_run_whose_first_experts_are_recomputed(tmp_path: Path) -> None:
    """Nothing of a layer has run before it is recomputed."""
    experts._probe.cache_clear()
    assert train(tmp_path / "run", "job.steps=1", "model.num_layers=1", "knobs.recompute=moe") == 0


def test_memory_that_gives_out_is_known_by_what_torch_and_python_raise() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**55, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert "asked for at once" in out_of_memory(caught.value).problem
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert not is_out_of_memory(RuntimeError("shapes differ"))


def large_tokenizer(folder: Path) -> str:
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({f"w{n}": n for n in range(2000)}, unk_token="w0")).save(str(folder / "large.json"))
    return str(folder / "large.json")


@pytest.mark.parametrize(
    "words",
    [
        ["--temperature", "nan"],
        ["--temperature", "inf"],
        ["--seed", "9" * 23],
        ["--seed", "-" + "9" * 22],
        ["--tokens=-1"],
    ],
)
def test_numbers_that_no_sample_can_be_drawn_with_are_a_wrong_command_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sample", str(tmp_path), *words]) == 2
    assert "threefold sample: " in capsys.readouterr().err


def test_a_run_that_nobody_reads_any_more_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    with closed_pipe() as out, closed_pipe() as err:
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", err)
        assert train(run, "job.steps=2", "target=megatron-bridge") == 0
        err.write("later words, of others too, go nowhere\n")
        err.flush()
    assert (run / "checkpoints" / "step-00000002").exists()


def test_export_and_import_close_the_circle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, folder, again = tmp_path / "run", tmp_path / "hf", tmp_path / "again"
    assert train(run, "job.steps=1") == 0
    assert main(["export-hf", str(run), "--out", str(folder)]) == 0
    assert (folder / "config.json").exists()
    assert main(["import-hf", str(folder), "--out", str(again), "--dtype", "fp32"]) == 0
    words = ["job.steps=1", "job.seq_len=32", "job.data=synthetic", "run.tensorboard=false", "job.lr=0"]
    assert main(["train", str(again / "plan.draft.toml"), *words, "--run", str(again), "--threads", "1"]) == 0
    assert main(["export-hf", str(again), "--out", str(tmp_path / "hf2")]) == 0
    from safetensors.torch import load_file

    before, after = (load_file(path / "model.safetensors") for path in (folder, tmp_path / "hf2"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)  # a rate of 0 trains nothing
    assert main(["import-hf", str(folder), "--out", str(again)]) == 1  # not empty: refused
    assert "not empty" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["cluster.gpus=2", "cluster.chip=h100"], "ranks-start-here"),
        (["cluster.gpus=65536", "job.global_batch=65536", "job.micro_batch=1"], "ranks-start-here"),
        (["knobs.precision=fp8-tensor"], "engine-has-knob"),
        (["model=nemotron-3-super"], "stack-runs-family"),
        (["run.cores=999"], "cores-exist"),
        (["run.cores=3-1"], "cores-exist"),
        (["cluster.gpus=4", "job.global_batch=4", "job.micro_batch=1", "run.cores=0-1;2-3"], "cores-exist"),
        (["knobs.optimizer_dtype=fp8"], "engine-has-knob"),
        (["knobs.optimizer_dtype=fp16"], "engine-has-knob"),
        (["job.data=/no/such/shard.tok"], "shard-readable"),
        (["job.global_batch=7"], "batch-divides-dp"),
    ],
)
def test_what_cannot_run_is_a_finding(
    words: list[str], rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = [word for word in SHORT if not (word.startswith("job.data") and words[0].startswith("job.data"))]
    assert main(["train", RECIPE, *kept, "--run", str(tmp_path / "run"), *words]) == 1
    out, err = capsys.readouterr()
    assert rule in out
    assert "Traceback" not in out + err


OTHER_STACK = ["target=megatron-bridge", "job.steps=1"]


@pytest.mark.parametrize(
    ("words", "rule"),
    [
        (["job.capacity_factor=1.0", "job.capacity_scope=rank"], "engine-has-capacity"),
        (["knobs.precision=fp8-cs", "knobs.fp8_params=true"], "engine-has-knob"),
    ],
)
def test_a_plan_for_another_stack_meets_the_limits_of_this_engine(
    words: list[str], rule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(tmp_path / "run", *OTHER_STACK, *words) == 1
    assert rule in capsys.readouterr().out
    assert not (tmp_path / "run").exists()


def test_a_run_that_kept_another_stack_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As before in the folder that the plan's own hash names."""
    monkeypatch.chdir(tmp_path)
    words = ["train", RECIPE, *SHORT]
    assert main([*words, *OTHER_STACK]) == 0
    assert "target: megatron-bridge; it is this engine that trains" in capsys.readouterr().err
    [run] = (tmp_path / "runs").iterdir()
    given = read_plan(RECIPE, [*SHORT[:3], *OTHER_STACK]).plan
    assert given is not None
    assert run.name == f"{Path(RECIPE).stem}-{given.hash}"
    kept = run / "plan.toml"
    assert 'target = "threefold"' in kept.read_text()
    kept.write_text(kept.read_text().replace('target = "threefold"', 'target = "megatron-bridge"'))
    assert main([*words, *OTHER_STACK, "job.steps=2", "--run", str(run)]) == 0
    assert "finished at step 2 of 2" in capsys.readouterr().out


def test_missing_runs_and_folders_are_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sample", str(tmp_path / "none")]) == 1
    assert main(["export-hf", str(tmp_path / "none"), "--out", str(tmp_path / "x")]) == 1
    assert main(["import-hf", str(tmp_path / "none"), "--out", str(tmp_path / "y")]) == 1
    assert capsys.readouterr().out.count("error[") == 3


def test_places_that_cannot_be_written_are_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, folder, blocked = tmp_path / "run", tmp_path / "hf", tmp_path / "file"
    blocked.write_text("not a folder")
    assert train(run, "job.steps=1") == 0
    assert main(["export-hf", str(run), "--out", str(folder)]) == 0
    assert main(["import-hf", str(folder), "--out", str(blocked / "in")]) == 1
    assert train(blocked / "run", "job.steps=1") == 1
    assert train(blocked / "run", "job.steps=1", "--nproc", "2") == 1
    for out in (".", "", "/", str(folder)):
        assert main(["tokenize", RECIPE, "--suffix", ".toml", "--out", out]) == 1
    assert main(["export-hf", str(run), "--out", str(blocked / "hf")]) == 1
    assert "Traceback" not in "".join(capsys.readouterr())
    assert main(["train", RECIPE, "--threads", "0"]) == 2


def test_a_missing_package_is_named_and_our_own_fault_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from threefold.cli.command_line.inputs import missing_package

    assert missing_package("train", ModuleNotFoundError(name="torch")) == 1
    assert "pip install 'threefold[train]'" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError):
        missing_package("train", ModuleNotFoundError(name="threefold.engine.nothing"))


def test_another_plan_is_refused_in_a_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert train(run, "job.steps=1") == 0
    assert train(run, "job.steps=1", "job.lr=0.5") == 1
    assert "run-is-this-plan" in capsys.readouterr().out


def test_every_finding_of_the_engine_explains_itself() -> None:
    """Slugs in the engine's sources are known to `check --explain`."""
    import re

    from threefold.rules.all import explain

    root = ROOT / "threefold" / "engine"
    text = "\n".join(path.read_text() for path in root.rglob("*.py"))
    slugs = set(re.findall(r'(?:rule=|_(?:refuse|one|finding)\(\s*)"([a-z]+(?:-[a-z]+)+)"', text))
    assert len(slugs) > 10
    assert [slug for slug in sorted(slugs) if explain(slug) is None] == []


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_moments_in_each_dtype_that_is_not_refused(dtype: str, tmp_path: Path) -> None:
    assert train(tmp_path / "run", "job.steps=2", f"knobs.optimizer_dtype={dtype}") == 0


def test_a_run_stops_at_a_step_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", RECIPE, *SHORT, "job.steps=4", "--run", str(tmp_path / "run")]
    assert main([*words, "--stop-at", "2"]) == 0
    assert "stopped at step 2 of 4" in capsys.readouterr().out
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert "resuming after step 2 of 4" in err
    assert "finished at step 4 of 4" in out


def test_a_run_says_how_many_threads_it_chose_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "run", "job.steps=1") == 0
    assert "CPU threads of a rank: 1 (as --threads says)" in capsys.readouterr().err
