"""Shell completion: what may stand at the end of a line, and the scripts in the shells themselves."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from repository import ROOT

from threefold.cli.command_line.reference import flags_by_verb
from threefold.cli.completion import SCRIPTS, candidates, split_line
from threefold.cli.main import VERBS, main
from threefold.plan.table import FIELDS
from threefold.spec.chips import CHIPS
from threefold.spec.models import MODELS

PLAN = "threefold check plan.toml "


def test_verbs_come_first() -> None:
    assert set(candidates("threefold ")) == {*VERBS, "--help", "--version"}
    assert candidates("threefold est") == ["estimate"]
    assert candidates("threefold nonsense ") == []
    assert candidates("") == [*VERBS, "--help", "--version"]


@pytest.mark.parametrize("verb", VERBS)
def test_flags_are_those_of_the_verb(verb: str) -> None:
    assert candidates(f"threefold {verb} --") == sorted([*flags_by_verb()[verb], "--help"])


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("threefold plan --model ", list(MODELS)),
        ("threefold plan --model deepseek-v3 --chip ", list(CHIPS)),
        ("threefold models tiny", [name for name in MODELS if name.startswith("tiny")]),
        (PLAN + "--target m", ["megatron-bridge"]),
        (PLAN + "--explain ep-div", ["ep-divides-experts"]),
        (PLAN + "layout.e", ["layout.ep=", "layout.etp="]),
        (PLAN + "knobs.ep_overlap=", ["knobs.ep_overlap=true", "knobs.ep_overlap=false"]),
        (PLAN + "knobs.recompute=moe,ml", ["knobs.recompute=moe,mlp", "knobs.recompute=moe,mla_up_proj"]),
        (PLAN + "knobs.recompute=moe,mo", ["knobs.recompute=moe,moe_act"]),
        (PLAN + "cluster.chip=gb", ["cluster.chip=gb200", "cluster.chip=gb300"]),
        (PLAN + "nonsense=", []),
        (PLAN + "layout.ep=", []),  # any number
        ("threefold tune plan.toml --keep job.micro", ["job.micro_batch"]),
        ("threefold sweep plan.toml --over job.seq_l", ["job.seq_len="]),
        ("threefold completion ", ["bash", "zsh", "fish"]),
        ("threefold card ", ["check", "list"]),
        ("threefold regress a.toml b.toml -- py", []),
        ("threefold check 'a b", []),
    ],
)
def test_what_may_stand_there(line: str, found: list[str]) -> None:
    assert candidates(line) == found


def test_plans_are_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    for name in ("mine.toml", "notes.txt", ".hidden.toml", "recipes/a.toml"):
        (tmp_path / name).touch()
    assert candidates("threefold check ") == ["mine.toml", "recipes/", "recipes/a.toml"]
    assert candidates("threefold check rec") == ["recipes/"]
    assert candidates("threefold compare mine.toml recipes/") == ["recipes/a.toml"]
    assert candidates("threefold check nowhere/x") == []
    assert candidates(f"threefold check {tmp_path}/mi") == [f"{tmp_path}/mine.toml"]
    assert candidates("threefold check mine.toml ") == [f"{path}=" for path in FIELDS]


def test_a_line_is_split_as_a_shell_does() -> None:
    assert split_line("threefold check 'my plan.toml' lay") == (["threefold", "check", "my plan.toml"], "lay")
    assert split_line("threefold check ") == (["threefold", "check"], "")
    assert split_line("threefold check job.data=#1") == (["threefold", "check"], "job.data=#1")


def test_the_verb_prints_scripts_and_candidates(capsys: pytest.CaptureFixture[str]) -> None:
    for shell, script in SCRIPTS.items():
        assert main(["completion", shell]) == 0
        assert capsys.readouterr().out == script
    assert main(["completion", "fish", "--line", "threefold dry"]) == 0
    assert capsys.readouterr().out == "dry-run\n"
    assert main(["completion", "bash", "--line", "threefold chec"]) == 0
    assert capsys.readouterr().out == "check\n"


def replies_of_bash(line: str, tmp_path: Path) -> list[str]:
    """What bash would offer at the end of the line."""
    (tmp_path / "threefold").write_text(f'#!/bin/sh\nexec {sys.executable} -m threefold "$@"\n')
    (tmp_path / "threefold").chmod(0o755)
    script = 'eval "$(threefold completion bash)"; COMP_LINE="$1"; COMP_POINT=${#1}; _threefold 2>/dev/null;'
    script += ' printf "%s\\n" "${COMPREPLY[@]}"'
    words = ["bash", "--norc", "-c", script, "bash", line]
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=600, check=True)
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("threefold check plan.toml knobs.precision=fp8-b", ["fp8-blockwise"]),  # bash replaces what is behind the =
        ("threefold check recipes/deepseek-v3-128k-256xh1", ["recipes/deepseek-v3-128k-256xh100-fp8.toml"]),
        ("threefold est", ["estimate"]),
    ],
)
def test_bash_completes(line: str, found: list[str], tmp_path: Path) -> None:
    assert replies_of_bash(line, tmp_path) == found


@pytest.mark.parametrize(("shell", "check"), [("bash", "-n"), ("zsh", "-n"), ("fish", "--no-execute")])
def test_the_script_parses(shell: str, check: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    file = tmp_path / "script"
    file.write_text(SCRIPTS[shell])
    subprocess.run([shell, check, str(file)], check=True, timeout=60)
