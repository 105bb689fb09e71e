"""Wheel and sdist: what is in them, and the planner installed from the wheel into an environment without torch."""

import json
import shutil
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from repository import ROOT

BUILD = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
PLANNER_NEEDS = {"msgspec", "numpy", "tomli-w"}
PLAN = ["plan", "--model", "qwen3-30b-a3b", "--chip", "h100", "--gpus", "8", "--seq-len", "4K", "--global-batch", "64"]


def build(kind: str, folder: Path) -> Path:
    """A wheel or an sdist, built from a copy of the sources, so that the tree stays as it is."""
    source = folder / "source"
    if not source.exists():
        hidden = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / "threefold", source / "threefold", ignore=hidden)
        for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, source / name)
        for name in ("docs", "recipes", "cards", "data", "skills"):
            shutil.copytree(ROOT / name, source / name)
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


def files_of_the_package() -> set[str]:
    """Modules, and the data that they read."""
    kinds = {".py", ".json", ".toml", ".css", ".js", ".typed"}
    found = (path for path in (ROOT / "threefold").rglob("*") if path.suffix in kinds or path.name == "py.typed")
    return {path.relative_to(ROOT).as_posix() for path in found if "__pycache__" not in path.parts}


@pytest.mark.slow
def test_wheel_and_sdist_hold_the_whole_package(tmp_path: Path) -> None:
    with zipfile.ZipFile(build("wheel", tmp_path)) as wheel:
        inside = set(wheel.namelist())
    assert {"threefold/shipped/docs/glossary.md", "threefold/shipped/data/published_runs.json"} <= inside
    assert files_of_the_package() - inside == set()
    assert {name.partition("/")[0] for name in inside} - {"threefold"} == {
        next(name.partition("/")[0] for name in inside if ".dist-info/" in name)
    }
    with tarfile.open(build("sdist", tmp_path)) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert files_of_the_package() - names == set()
    assert {"pyproject.toml", "README.md", "LICENSE", "docs/glossary.md"} <= names


def install_planner(folder: Path) -> Path:
    """A new environment with the wheel and the packages that it requires, and nothing else; returns its programs."""
    wheel = build("wheel", folder)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder / "venv")], check=True, timeout=600)
    [packages] = (folder / "venv" / "lib").glob("python*/site-packages")
    for name in PLANNER_NEEDS:  # from here, so that the test needs no network
        for file in distribution(name).files or ():
            if ".." not in file.parts:
                target = packages / file
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(str(file.locate()), target)
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "venv" / "bin" / "python")]
    subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", str(wheel)], check=True, timeout=600)
    return folder / "venv" / "bin"


@pytest.mark.slow
def test_the_planner_works_where_only_its_requirements_are(tmp_path: Path) -> None:
    programs = install_planner(tmp_path)
    (tmp_path / "empty").mkdir()

    def threefold(*words: str) -> subprocess.CompletedProcess[str]:
        command = [str(programs / "threefold"), *words]
        clean = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
        return subprocess.run(command, cwd=tmp_path / "empty", env=clean, capture_output=True, text=True, timeout=600)

    requires = "from importlib.metadata import requires; print(*[r for r in requires('threefold') if ';' not in r])"
    done = subprocess.run([str(programs / "python"), "-c", requires], capture_output=True, text=True, timeout=60)
    assert {word.partition(">")[0] for word in done.stdout.split()} == PLANNER_NEEDS
    assert threefold("--version").stdout.startswith("threefold ")
    made = threefold(*PLAN, "--out", "plan.toml")
    assert made.returncode == 0, made.stderr
    for words in (
        ["check", "plan.toml"],
        ["show", "plan.toml"],
        ["estimate", "plan.toml"],
        ["sweep", "plan.toml", "--over", "job.seq_len=4K,8K"],
        ["export", "plan.toml", "--target", "megatron-bridge"],
        ["launch", "plan.toml", "--slurm"],
        ["compare", "plan.toml", "plan.toml"],
        ["report", "plan.toml", "--out", "report.html"],
        ["completion", "bash"],
        ["rules"],
        ["find", "ulysses"],
    ):
        done = threefold(*words)
        assert done.returncode == 0, (words, done.stderr)
        assert "Traceback" not in done.stderr
    found = json.loads(threefold("env", "--json").stdout)
    assert next(package for package in found["packages"] if package["name"] == "torch")["version"] is None
    for verb in ("train", "dry-run"):
        done = threefold(verb, "plan.toml")
        assert done.returncode == 1
        assert "Traceback" not in done.stderr
    assert "pip install 'threefold[train]'" in threefold("dry-run", "plan.toml").stderr
