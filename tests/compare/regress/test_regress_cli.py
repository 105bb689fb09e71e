"""`threefold regress` with real commands: small scripts that are slow, crash, lack memory, hang or print nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import run
from run_folders import run_plan

from threefold.compare.regress.command import Command, run_command
from threefold.plan.file import dump_plan

# A stand-in for training that starts in a millisecond: looks into the plan, and does what the case says.
SCRIPT = """
case=$1; plan=$2; seconds=0.1
grep -q "keep = 5" "$plan" && bad=yes || bad=no
grep -q "lr = 0.01" "$plan" && hot=yes || hot=no
case $case-$bad in
  slow-yes) seconds=0.2;;
  pair-yes) [ $hot = yes ] && seconds=0.2;;
  oom-yes) echo "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB" >&2; exit 1;;
  crash-yes) exit 3;;
  hang-yes) sleep 60;;
  signal-yes) kill -9 $$;;
esac
case $case in
  slow) echo "log line"; echo "{\\"step_seconds\\": $seconds, \\"loss\\": 3}"; echo done;;
  pair) printf '{"time":\\n {"step_seconds": %s}}\\n' $seconds;;
esac
exit 0
"""


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """The command line up to the case: two plans with four differences, and the script."""
    (tmp_path / "a.toml").write_text(dump_plan(run_plan()))
    (tmp_path / "b.toml").write_text(dump_plan(run_plan(job_lr=0.01, job_steps=7, run_keep=5, run_gc_every=9)))
    (tmp_path / "script.sh").write_text(SCRIPT)
    plans = [str(tmp_path / "a.toml"), str(tmp_path / "b.toml")]
    return ["regress", *plans, "--out", str(tmp_path / "hunt"), "--json", "--repeats", "3"]


def behind(words: list[str], case: str) -> list[str]:
    return [*words, "--", "sh", str(Path(words[1]).parent / "script.sh"), case, "{plan}"]


@pytest.mark.parametrize(
    ("case", "regression", "failure", "culprit"),
    [
        ("slow", "slower", "", {"run.keep"}),
        ("pair", "slower", "", {"run.keep", "job.lr"}),
        ("oom", "fails", "out of memory", {"run.keep"}),
        ("crash", "fails", "failed (exit 3)", {"run.keep"}),
        ("signal", "fails", "failed (signal 9)", {"run.keep"}),
    ],
)
def test_culprits_of_real_commands(
    case: str, regression: str, failure: str, culprit: set[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(*behind(words, case), capsys=capsys)
    assert code == 0, err
    found = json.loads(out)
    assert found["regression"] == regression
    assert found["failure"] == failure
    assert [set(each["fields"]) for each in found["culprits"]] == [culprit]
    assert "trial 1: plan A: ok" in err
    # The same command again answers from the folder, without a trial.
    again = run(*behind(words, case), capsys=capsys)
    assert json.loads(again[1]) == found
    assert "trial 1" not in again[2]


@pytest.mark.slow
def test_a_hang_is_a_result(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(*behind([*words, "--limit", "2"], "hang"), capsys=capsys)
    assert code == 0
    assert json.loads(out)["failure"] == "time limit"
    assert [set(each["fields"]) for each in json.loads(out)["culprits"]] == [{"run.keep"}]


def test_the_text_names_the_field_with_evidence(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    words.remove("--json")
    code, out, _ = run(*behind(words, "slow"), capsys=capsys)
    assert code == 0
    assert "run.keep = 5  (A: 2)" in out
    assert "2.000 x" in out
    assert "it is certainly slower" in out


def test_a_command_without_a_time_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(*behind(words, "nothing"), capsys=capsys)
    assert code == 1
    assert [each["rule"] for each in json.loads(out)["findings"]] == ["enough-steps"]


@pytest.mark.parametrize(
    ("change", "code", "rule"),
    [
        (lambda words: [*words, "--", "/no/such/program"], 1, "command-starts"),
        (lambda words: [*words, "--", "nul\0"], 1, "command-starts"),
        (lambda words: words, 2, ""),
        (lambda words: ["regress", "nowhere.toml", *words[2:], "--", "true"], 1, "file-readable"),
        (lambda words: ["regress", words[1], words[1], *words[3:], "--", "true"], 1, "work-is-comparable"),
        (lambda words: [*words, "--", "false"], 1, "good-plan-runs"),
        (lambda words: [*words, "--repeats", "0", "--", "true"], 2, ""),
        (lambda words: [*words, "--limit", "nan", "--", "true"], 2, ""),
    ],
)
def test_bad_input(change: object, code: int, rule: str, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = run(*change(words), capsys=capsys)  # type: ignore[operator]
    assert found[0] == code
    if rule:
        assert [each["rule"] for each in json.loads(found[1])["findings"]] == [rule]
    assert "Traceback" not in found[2]


def test_a_folder_of_another_hunt_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    run(*behind(words, "slow"), capsys=capsys)
    code, out, _ = run(*behind(words, "pair"), capsys=capsys)
    assert code == 1
    assert [each["rule"] for each in json.loads(out)["findings"]] == ["same-hunt"]
    (Path(words[4]) / "question.json").write_text("[" * 10_000)
    assert run(*behind(words, "slow"), capsys=capsys)[0] == 1


def test_an_interrupt_ends_the_trial_and_keeps_the_rest(words: list[str], tmp_path: Path) -> None:
    """Ctrl-C while the command sleeps: its process is gone, and the exit code says so."""
    argv = [sys.executable, "-m", "threefold", *words, "--", sys.executable, "-S", "-c", SLEEPER, str(tmp_path / "pid")]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True)
    try:
        pid = _wait_for_pid(tmp_path / "pid")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "the same command goes on" in err
    assert "Traceback" not in err
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


SLEEPER = "import os, pathlib, sys, time; pathlib.Path(sys.argv[1]).write_text(str(os.getpid()) + ' '); time.sleep(600)"


def _wait_for_pid(path: Path) -> int:
    for _ in range(600):
        if path.exists() and path.read_text().endswith(" "):
            return int(path.read_text())
        time.sleep(0.1)
    raise AssertionError("the command was never started")


def test_words_are_put_in_place() -> None:
    plan, folder = Path("p.toml"), Path("r")
    assert Command(("x", "--p={plan}", "{run}"), 1.0).argv(plan, folder) == ["x", "--p=p.toml", "r"]
    assert Command(("x", "y"), 1.0).argv(plan, folder) == ["x", "y", "p.toml"]


@pytest.mark.parametrize(
    ("printed", "seconds"),
    [
        ('{"step_seconds": 0.5}', 0.5),
        ('noise\n{"step_seconds": 1}\n{"step_seconds": 2}\n{"other": 3}\nend', 2.0),
        ('{"step_seconds": NaN}', None),
        ('{"step_seconds": -1}', None),
        ('{"step_seconds": true}', None),
        ('{"step_seconds": "1"}', None),
        ("[1, 2]\n7\n", None),
        ("", None),
    ],
)
def test_the_time_is_read_from_what_is_printed(printed: str, seconds: float | None, tmp_path: Path) -> None:
    command = Command((sys.executable, "-S", "-c", f"print({printed!r})"), 60.0)
    outcome = run_command(command, tmp_path / "plan.toml", tmp_path / "trial")
    assert (outcome.kind, outcome.seconds) == ("ok", seconds)


def test_children_that_a_command_leaves_behind_are_ended(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    words = ("sh", "-c", f'sleep 600 & echo "$! " > {pid_file}')
    assert run_command(Command(words, 60.0), tmp_path / "p", tmp_path / "trial").kind == "ok"
    pid = int(pid_file.read_text())
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split(")")[1][:3]:
            return
        time.sleep(0.1)
    raise AssertionError("the child is still there")
