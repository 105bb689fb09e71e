"""Every command in README and docs: the planner's are run, the engine's are run by the slow suite, and all are parsed.

`NOT_RUN` says why some are only parsed. A command that is in no list fails, so that a new one is looked at.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import run
from doc_commands import PAGES, Command, commands_of, saved_files, write_reader_files
from repository import ROOT

from threefold.cli.main import TAKE_A_COMMAND, VERBS, build_parser

PLANNER = (
    *(
        "plan",
        "fit",
        "check",
        "show",
        "estimate",
        "sweep",
        "launch",
        "export",
        "compare",
        "card",
        "rules",
        "find",
        "models",
    ),
    *("chips", "schema", "completion", "report", "skills"),
)
# Why a command is parsed and not run: a pattern of the command line, and the reason.
NOT_RUN = {
    r"^diagnose ": "reads what a job of the reader's left behind; tests/diagnose/ has such files",
    r"^contract ": "reads a log of the reader's; tests/compare/test_contract.py",
    r"^mcp": "serves until its client leaves; tests/mcp speaks to it",
    r"--device cuda": "needs a GPU",
    r" /tmp/": "writes outside the folder of the test",
    r"^calibrate": "measures this machine for minutes; tests/machine/test_calibrate.py runs it with a fake measurer",
    r"^tune .*(--rank|--launcher)": "needs a GPU or a cluster",
    r"^tune ": "takes its budget of minutes; tests/tune/ runs tunings",
    r"^regress ": "starts tens of trials; tests/compare/ runs regressions",
    r"^card check($| cards| --json)": "measures claims for minutes; tests/tune/test_cards.py",
    r"^import ": "tests/interop/ has the files that it reads; those of this page are the reader's",
    r"^profile (trace|rank-)": "names a trace of the reader's; tests/cli/test_profile_cli.py",
    r"^explore": "serves a page until it is stopped",
    r"^(?!train (a|b|plan)\.toml).* runs/(?!eight)": "makes or reads a run of the reader's; tests/cli/ has runs",
    r"(^| )(hf|peft|imported|run|exported)( |/|$)": "needs a checkpoint; tests/cli/test_finetune_cli.py has one",
    r"(sft|4k|32k|128k)\.toml": "a plan of the reader's; tests/cli/test_train_cli.py",
    r"hf:hf/config": "needs a configuration; tests/spec/ reads many",
    r"^plan .*--rehearse": "a synopsis without chip and GPUs; tests/dryrun/test_dry_run_verb.py",
    r"--ranks 0,128": "needs a plan of more than 128 ranks, which takes a minute",
    r"--loads runs/": "needs a run",
    r"--loads loads.json": "needs loads for the experts of the plan; tests/dryrun/",
    r"^export .*--verify": "needs Megatron; tests/interop/megatron/test_validate_script.py, and make test-megatron",
    r"knobs.graphs": "needs a GPU",
    r"^train recipes/(demo|tiny-qwen3-vl).*(?<!--stop-at 2)$": "trains for minutes",
}
RUN_SLOWLY = ("env", "check", "train", "dry-run", "verify", "overlap-ab", "tokenize", "sample", "eval")
COMMANDS = [command for page in PAGES for command in commands_of(page)]


def why_not_run(command: Command) -> str:
    line = " ".join(command.words)
    return next((reason for pattern, reason in NOT_RUN.items() if re.search(pattern, line)), "")


def is_planner(command: Command) -> bool:
    """Whether a command plans or judges, from files that the repository or the page has."""
    line = " ".join(command.words)
    on_runs = re.search(r"(^| )runs/|/tmp/", line) and command.verb != "launch"
    elsewhere = r"^card check($| cards| --json)|--rehearse|--verify|hf:hf/config"
    return command.verb in PLANNER and not on_runs and not re.search(elsewhere, line)


def test_there_are_commands() -> None:
    assert len(COMMANDS) > 120
    assert len({command.words for command in COMMANDS if is_planner(command)}) > 40
    assert {command.verb for command in COMMANDS} <= set(VERBS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_is_parsed(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Flags exist, choices are among theirs, and what is needed is there."""
    for command in commands_of(page):
        words = list(command.words)
        if command.verb in TAKE_A_COMMAND and "--" in words:
            words = words[: words.index("--")]
        try:
            _, rest = build_parser(command.verb).parse_known_args(words)
        except SystemExit:
            pytest.fail(f"{command}: {capsys.readouterr().err}")
        assert [word for word in rest if word.startswith("-") or "=" not in word] == [], str(command)


def test_every_command_is_run_or_has_a_reason() -> None:
    unclear = [
        str(command)
        for command in COMMANDS
        if not is_planner(command) and command.verb not in RUN_SLOWLY and not why_not_run(command)
    ]
    assert unclear == []
    lines = [" ".join(command.words) for command in COMMANDS if not is_planner(command)]
    stale = [pattern for pattern in NOT_RUN if pattern != "^explore" and not any(re.search(pattern, x) for x in lines)]
    assert stale == []


PLANNED = [page for page in PAGES if any(is_planner(command) for command in commands_of(page))]


@pytest.mark.parametrize("page", PLANNED, ids=lambda page: str(page.relative_to(ROOT)))
def test_planner_commands_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of the page, in a folder with what it names. An error is one that the page wants to show."""
    write_reader_files(tmp_path, page)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    seen: set[tuple[str, ...]] = set()
    for command in commands_of(page):
        if is_planner(command) and command.words not in seen:
            code, out, err = run(*command.words, capsys=capsys)
            assert code == 0 or (code == 1 and "error[" in out and "file-readable" not in out), f"{command}\n{out}{err}"
            assert out or err, str(command)
        seen.add(command.words)


SLOW = {
    command.words: command
    for command in COMMANDS
    if command.verb in RUN_SLOWLY and not is_planner(command) and not why_not_run(command)
}


@pytest.mark.slow
@pytest.mark.parametrize("command", sorted(SLOW.values(), key=str), ids=str)
def test_engine_commands_run(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    write_reader_files(tmp_path, ROOT / command.page)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    done = subprocess.run(
        [sys.executable, "-m", "threefold", *command.words], capture_output=True, text=True, timeout=850
    )
    assert done.returncode == 0 or (done.returncode == 1 and "error[" in done.stdout), done.stdout + done.stderr


READ_RUNS = ("sample", "eval", "export-hf", "profile", "compare", "report")
ON_RUNS = [
    command
    for command in dict.fromkeys(COMMANDS)
    if command.verb in READ_RUNS and " runs/" in " ".join(command.words) and "/tmp/" not in " ".join(command.words)
]


@pytest.mark.slow
@pytest.mark.timeout(3600)  # two minutes on a free machine
def test_commands_on_runs_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On copies of one small run under every name that the pages give to theirs."""
    pytest.importorskip("torch")
    write_reader_files(tmp_path, ROOT / "README.md")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    program = [sys.executable, "-m", "threefold"]
    train = [*program, "train", "plan.toml", "job.steps=8", "--profile", "--run", "trained"]
    subprocess.run(train, check=True, capture_output=True, timeout=400)
    names = {word for command in ON_RUNS for word in command.words if word.startswith("runs/")}
    for name in names:
        shutil.copytree("trained", name)
    failed = []
    for command in ON_RUNS:
        done = subprocess.run([*program, *command.words], capture_output=True, text=True, timeout=400)
        if done.returncode not in (0, 1) or (done.returncode == 1 and "error[" not in done.stdout):
            failed.append(f"{command}\n{done.stdout[-500:]}{done.stderr[-500:]}")
        for made in ("out", "hf", "my-model", "exported"):
            shutil.rmtree(made, ignore_errors=True)
    assert len(ON_RUNS) > 12
    assert failed == []


DEMO = (ROOT / "docs" / "demo.sh").read_text(encoding="utf-8")


def test_commands_of_the_demo_are_parsed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = re.findall(r"^threefold .*", DEMO.replace("\\\n", " "), flags=re.MULTILINE)
    assert len(lines) > 12
    for line in lines:
        words = shlex.split(re.split(r"\s(?:\|\|?|2?>)", line)[0])[1:]
        _, rest = build_parser(words[0]).parse_known_args(words)
        assert [word for word in rest if word.startswith("-") or "=" not in word] == [], line


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demo_goes_through(tmp_path: Path) -> None:
    """Three minutes on two free cores."""
    pytest.importorskip("torch")
    programs = Path(sys.executable).parent
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = ["bash", str(ROOT / "docs" / "demo.sh"), str(tmp_path / "demo")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3500, env=environment)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "the same as one rank" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert "<html" in (tmp_path / "demo" / "report.html").read_text(encoding="utf-8")


def test_the_checks_can_fail(tmp_path: Path) -> None:
    page = ROOT / "docs" / "guide" / "first-plan.md"
    assert "draft.toml" in saved_files(page)
    assert why_not_run(Command("x", ("schema", "--json"))) == ""
    with pytest.raises(SystemExit):
        build_parser("check").parse_args(["check", "plan.toml", "--target", "nowhere"])
