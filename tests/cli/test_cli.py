"""The command line as a user meets it: exit codes, JSON, garbage, speed of the door."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import GARBAGE, run
from repository import ROOT

from threefold.cli.main import VERBS

COMMAND = [sys.executable, "-m", "threefold"]
RECIPE = str(ROOT / "recipes" / "deepseek-v3-128k-256xh100-fp8.toml")


def as_json(text: str) -> Any:
    return json.loads(text)


def test_check_warns_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("check", RECIPE, capsys=capsys)
    assert code == 0
    assert "warning[dp-at-floor]" in out
    assert out.splitlines()[-2] == "0 errors, 1 warning, 2 notes"


def test_check_json_has_the_agreed_shape(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("check", RECIPE, "layout.ep=48", "--json", capsys=capsys)
    said = as_json(out)
    assert code == 1
    assert set(said) == {"ok", "summary", "findings", "not_judged"}
    assert said["ok"] is False
    assert set(said["findings"][0]) == {
        "rule",
        "severity",
        "at",
        "problem",
        "fix",
        "advice",
        "fix_data",
        "fix_kind",
        "alternatives",
    }
    cure = next(f for f in said["findings"] if f["rule"] == "ep-divides-experts")
    assert cure["fix_data"] == {"layout.ep": 32}
    assert cure["fix"] == "layout.ep=32"


def test_check_fix_writes_a_plan_that_passes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "fixed.toml"
    code, text, _ = run("check", RECIPE, "layout.ep=48", "knobs.ep_overlap=true", "--fix", str(out), capsys=capsys)
    assert code == 0
    assert "applied fix: ep-divides-experts" in text
    assert run("check", str(out), capsys=capsys)[0] == 0
    assert run("check", RECIPE, "--fix", "/no/such/folder/x.toml", capsys=capsys)[0] == 1


def test_check_fix_says_what_a_budget_became(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "fixed.toml"
    code, text, _ = run(
        "check", RECIPE, "knobs.recompute=auto:1000GiB", "--fix=suggestions", "--out", str(out), capsys=capsys
    )
    assert code == 0
    assert "warning[recompute-chosen] knobs.recompute: auto:1000GiB recomputes nothing" in text


def test_overrides_may_stand_anywhere(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["check", RECIPE, "layout.ep=48", "--json"], ["check", RECIPE, "--json", "layout.ep=48"]):
        assert "ep-divides-experts" in run(*words, capsys=capsys)[1]
    assert run("check", RECIPE, "--json", "--nonsense=1", capsys=capsys)[0] == 2


def test_target_changes_the_judge(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("check", RECIPE, "knobs.precision=mxfp8", "--json")
    _, megatron, _ = run(*words, capsys=capsys)
    _, ours, _ = run(*words, "--target", "threefold", capsys=capsys)
    assert "precision-runs-on-chip" in megatron
    assert "precision-is-emulated" in ours


def test_an_answer_has_one_form(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON wherever it is asked for; a page of Markdown at once with it is refused."""
    code, out, _ = run("check", "--explain", "plan-exists", "--json", capsys=capsys)
    assert code == 0
    assert {"rule", "severity", "what", "why", "confirm", "fix"} == set(json.loads(out))
    for verb in ("rules", "schema"):
        code, _, err = run(verb, "--json", "--markdown", capsys=capsys)
        assert code == 2
        assert "not allowed with" in err


def test_explain_tells_the_four_things(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("check", "--explain", "delay-wgrad-fusion-te", capsys=capsys)
    assert code == 0
    assert all(f"\n{word}" in out for word in ("why", "confirm", "fix", "follows"))
    code, _, err = run("check", "--explain", "ep-divides-expert", capsys=capsys)
    assert code == 2
    assert "ep-divides-experts" in err


@pytest.mark.parametrize(
    "words",
    [
        ["check"],
        ["no-such-verb"],
        [],
        ["check", RECIPE, "--target", "x"],
        ["show", RECIPE, "--rank", "9999"],
        ["models", "x"],
    ],
)
def test_a_wrong_command_line_is_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(*words, capsys=capsys)
    assert code == 2
    assert err
    assert "Traceback" not in out + err


@pytest.mark.parametrize("verb", ["check", "show"])
@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_gives_findings(name: str, verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.toml"
    path.write_bytes(GARBAGE[name])
    code, out, err = run(verb, str(path), "--json", capsys=capsys)
    said = as_json(out)
    assert code == 1
    assert said["ok"] is False
    assert all(finding["problem"] for finding in said["findings"])
    assert "Traceback" not in err
    assert path.read_bytes() == GARBAGE[name]  # nothing is lost


def test_a_folder_or_a_missing_file_is_a_finding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (str(tmp_path), str(tmp_path / "none.toml"), "a\0b"):
        code, out, _ = run("check", path, "--json", capsys=capsys)
        assert code == 1
        assert as_json(out)["findings"][0]["rule"] == "file-readable"


def test_show_draws_both_grids_and_the_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("show", RECIPE, "--rank", "40", capsys=capsys)
    assert code == 0
    assert "PP 8 x DP 1 x CP 32 x TP 1" in out
    assert "PP 8 x EDP 1 x EP 32 x ETP 1" in out
    assert "group of rank 40" in out
    assert "stages 1-6  tt | tt | tt | tt" in out
    code, out, _ = run("show", RECIPE, "--rank", "40", "--json", capsys=capsys)
    assert as_json(out)["groups"]["pp"] == [8, 40, 72, 104, 136, 168, 200, 232]  # 40 = stage 1, place 8 of 32


@pytest.mark.parametrize("verb", ["rules", "models", "chips"])
def test_catalogues_print_and_parse(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(verb, capsys=capsys)
    assert code == 0
    assert len(out.splitlines()) > 8
    assert as_json(run(verb, "--json", capsys=capsys)[1])


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert as_json(run("schema", capsys=capsys)[1])["title"] == "Threefold plan"


def test_one_model_with_its_source(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("models", "qwen3-30b-a3b", capsys=capsys)
    assert code == 0
    assert "30,532,122,624" in out


def test_every_verb_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in VERBS:
        code, out, _ = run(verb, "--help", capsys=capsys)
        assert code == 0
        assert "usage: threefold" in out


def test_a_closed_pipe_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m threefold rules | head -1", shell=True, cwd=ROOT, capture_output=True, timeout=600
    )
    assert b"Traceback" not in done.stderr


WRONG = ["check", RECIPE, "layout.ep=48"]


@pytest.mark.parametrize("words", [["rules"], WRONG, [*WRONG, "--json"], ["check", RECIPE], ["rules", "--help"]])
def test_without_a_reader_the_exit_code_stays(words: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        for err in (subprocess.PIPE, writer):
            done = subprocess.run(COMMAND + words, cwd=ROOT, timeout=600, stdout=writer, stderr=err)
            assert done.returncode == (1 if "layout.ep=48" in words else 0)
            assert not done.stderr
    finally:
        os.close(writer)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is full")
@pytest.mark.parametrize("words", [["rules"], WRONG, ["check", RECIPE, "--json"]])
def test_a_full_disk_is_said(words: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(COMMAND + words, cwd=ROOT, timeout=600, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr == b"threefold: cannot write the answer: No space left on device\n"


@pytest.mark.parametrize("words", [["rules", "--json"], WRONG, [*WRONG, "--json"]])
def test_without_output_the_exit_code_stays(words: list[str]) -> None:
    command = shlex.join(COMMAND + words)
    done = subprocess.run(["sh", "-c", f"{command} >&-"], cwd=ROOT, timeout=600, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (1 if words[0] == "check" else 0, b"")
    done = subprocess.run(["sh", "-c", f"{command} 2>&-"], cwd=ROOT, timeout=600, stdout=subprocess.PIPE)
    assert done.returncode == (1 if words[0] == "check" else 0)
    assert done.stdout


def test_bytes_that_are_no_text_are_a_finding(tmp_path: Path) -> None:
    out = tmp_path / "fixed.toml"
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    for word in (b"run.wandb=a\xff", b"job.data=a\xff", b"model=hf:a\xff"):
        words = [*COMMAND, "check", RECIPE, word, "--fix", str(out)]
        done = subprocess.run(words, cwd=ROOT, timeout=600, capture_output=True, env=strict)
        assert done.returncode == 1
        assert b"1 error" in done.stdout
        assert out.exists() is not word.startswith(
            b"model"
        )  # what could be read is written, and that something was not
        assert (b"was not written" in done.stderr) is not out.exists()
        assert (b"could not be read" in done.stdout) is out.exists()
        out.unlink(missing_ok=True)
    words = [*COMMAND, "check", RECIPE, b"layout.a\xff=1", "--fix", str(out)]
    done = subprocess.run(words, cwd=ROOT, timeout=600, capture_output=True, env=strict)
    assert (done.returncode, done.stderr) == (1, b"")
    assert b"could not be read" in done.stdout


def test_the_door_loads_little() -> None:
    """`check` answers at once because of what it does not import; benchmarks/startup.py measures the time."""
    code = "import sys, threefold.cli.main as m; m.main(['check', sys.argv[1]]); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, RECIPE], capture_output=True, text=True, cwd=ROOT, timeout=600)
    loaded = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert "threefold" in loaded
    assert not loaded & {"numpy", "torch", "rich", "matplotlib"}


def test_chips_shows_the_one_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run("chips", "H100", "--json", capsys=capsys)
    assert code == 0
    assert [chip["name"] for chip in json.loads(out)] == ["h100"]
