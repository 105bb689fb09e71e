"""`threefold env` and `check --here`: what this machine has, and whether a plan can do with it."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import tomli_w
from repository import ROOT

import threefold
from threefold.cli.env import env_text
from threefold.cli.main import main
from threefold.findings import Finding
from threefold.machine import inventory
from threefold.machine.inventory import PACKAGES, Gpu, KernelProbe, Machine, Package, PackageStatus, check_package
from threefold.machine.plan_check import machine_findings
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.rules.base import explain

GIB = 2**30
VERSIONS: dict[str, str | None] = {"torch": "2.11.0+cu130", "cuda": "13.0", "cudnn": "9.19.0", "nccl": "2.30.4"}


def machine(chips: int = 8, name: str = "NVIDIA H200", memory: int = 141 * GIB, **lacks: str | None) -> Machine:
    """A machine with everything; `lacks`: versions of packages, None for a missing one."""
    packages = tuple(
        PackageStatus(
            package, lacks.get(package.name.replace("-", "_"), "9.9.9" if package.name != "torch" else "2.11.0")
        )
        for package in PACKAGES
    )
    kernels = (KernelProbe("attention (cuDNN)", True),)
    return Machine("3.12.0", "Linux", (Gpu(name, memory, (9, 0)),) * chips, "580.1", VERSIONS, packages, kernels)


def plan_of(**changes: Any) -> Plan:
    from threefold.plan.file import read_plan

    plan = read_plan(str(ROOT / "recipes" / "qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml"), []).plan
    assert plan is not None
    fields = {"cluster.chip": "h200", "target": "threefold", "knobs.dispatcher": "alltoall"}
    return change(plan, {**fields, **{path.replace("__", "."): value for path, value in changes.items()}})


def said(findings: list[Finding]) -> set[tuple[str, str, str]]:
    return {(finding.rule, finding.severity, finding.at) for finding in findings}


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA GeForce RTX 4090", None),
    ],
)
def test_a_gpu_is_known_by_its_name(name: str, chip: str | None) -> None:
    assert Gpu(name, 80 * GIB).chip == chip


def test_a_machine_with_everything_lacks_nothing() -> None:
    assert machine_findings(plan_of(), machine()) == []


@pytest.mark.parametrize(
    ("here", "changes", "expected"),
    [
        (machine(torch=None), {}, {("here-has-torch", "error", "stack.torch")}),
        (machine(torch="2.9.1"), {}, {("here-has-torch", "error", "stack.torch")}),
        (machine(torch="2.14.0"), {}, {("here-has-torch", "error", "stack.torch")}),
        (machine(0), {}, {("here-has-chips", "error", "cluster.chip")}),
        (machine(4), {}, {("here-has-chips", "error", "cluster.gpus_per_node")}),
        (machine(name="NVIDIA H100 NVL"), {}, {("here-has-chips", "warning", "cluster.chip")}),
        (machine(memory=100 * GIB), {}, {("here-has-chips", "warning", "cluster.chip")}),
        (machine(deep_ep=None), {"knobs__dispatcher": "deepep"}, {("here-has-packages", "error", "knobs.dispatcher")}),
        (
            machine(triton=None),
            {"knobs__expert_fusion": True},
            {("here-has-packages", "warning", "knobs.expert_fusion")},
        ),
        (
            machine(quack_kernels=None),
            {"knobs__expert_fusion": True, "knobs__expert_kernels": "cute"},
            {("here-has-packages", "error", "knobs.expert_kernels")},
        ),
        (machine(), {"stack__torch": "2.12.0"}, {("here-has-torch", "warning", "stack.torch")}),
    ],
)
def test_what_a_machine_lacks_is_said(here: Machine, changes: dict[str, Any], expected: set[Any]) -> None:
    findings = machine_findings(plan_of(**changes), here)
    assert said(findings) == expected
    assert all(finding.fix_text and explain(finding.rule) for finding in findings)


def test_a_package_that_does_not_import_is_not_there() -> None:
    here = machine()
    broken = tuple(
        replace(found, trouble="ImportError: libnvshmem") if found.package.name == "deep_ep" else found
        for found in here.packages
    )
    [finding] = machine_findings(plan_of(knobs__dispatcher="deepep"), replace(here, packages=broken))
    assert "libnvshmem" in finding.problem
    assert finding.fix_data == {"knobs.dispatcher": "alltoall"}


def test_long_sequences_lean_on_more() -> None:
    long = plan_of(job__seq_len=131_072, layout__cp=8)
    old = replace(machine(triton=None), versions={**VERSIONS, "cudnn": "9.1.0"}, kernels=())
    assert ("here-at-length", "warning", "job.seq_len") in said(machine_findings(long, old))
    problems = " ".join(finding.problem for finding in machine_findings(long, old))
    assert "cuDNN 9.1.0" in problems
    assert "triton" in problems
    assert not [finding for finding in machine_findings(plan_of(), old) if finding.rule == "here-at-length"]


def test_rules_about_versions_speak_of_those_that_are_here() -> None:
    """Megatron's EP overlap hangs before torch 2.6: a plan that states no version is judged by the one here."""
    plan = plan_of(knobs__ep_overlap=True, layout__ep=8, target="megatron-bridge")
    old = replace(machine(torch="2.5.1"), versions={**VERSIONS, "torch": "2.5.1"})
    assert any("hangs with torch 2.5.1" in finding.problem for finding in machine_findings(plan, old))


def test_a_broken_package_is_told_from_a_missing_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "brittle_one").mkdir()
    (tmp_path / "brittle_one" / "__init__.py").write_text("raise ImportError('libfoo.so.9: not found')")
    papers = tmp_path / "brittle_one-1.2.dist-info"
    papers.mkdir()
    (papers / "METADATA").write_text("Metadata-Version: 2.1\nName: brittle-one\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = check_package(Package("brittle-one", "brittle_one", "", ""))
    assert (found.version, found.works) == ("1.2", False)
    assert "libfoo.so.9" in found.trouble
    assert check_package(Package("no-such-thing-here", "no_such_thing_here", "", "")).version is None
    assert check_package(Package("numpy", "numpy", "", "")).works


def test_a_folder_with_the_name_of_a_package_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hollow_one").mkdir()
    (tmp_path / "joint_one" / "part").mkdir(parents=True)
    (tmp_path / "joint_one" / "part" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert check_package(Package("hollow-one", "hollow_one", "", "")).version is None
    assert check_package(Package("hollow-one", "hollow_one.part", "", "")).version is None
    assert check_package(Package("joint-one", "joint_one.part", "", "")) == PackageStatus(
        Package("joint-one", "joint_one.part", "", ""), "?"
    )


def test_the_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nprintf 'NVIDIA H200, 143771, 580.65.06\\nNVIDIA H200, 143771, 580.65.06\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    gpus, driver = inventory._query_driver()
    assert driver == "580.65.06"
    assert [(gpu.chip, gpu.memory_bytes) for gpu in gpus] == [("h200", 143771 * 2**20)] * 2
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert inventory._query_driver() == ((), None)


def test_a_probe_wants_the_name_that_the_engine_calls() -> None:
    assert Package("x", "numpy", "", "", "array").probe == "from numpy import array"
    assert check_package(Package("numpy", "numpy", "", "", "array")).works
    found = check_package(Package("numpy-of-another-branch", "numpy", "", "", "no_such_name", "numpy"))
    assert found.version is not None
    assert "no_such_name" in found.trouble


def test_json_shows_versions_and_probes() -> None:
    said = machine(1).to_json()
    assert said["threefold"] == threefold.__version__
    probes = {package["name"]: package["probe"] for package in said["packages"]}
    assert probes["hybrid-ep"] == "from deep_ep import HybridEPBuffer"
    assert set(probes) == {package.name for package in PACKAGES}


def test_the_table_names_what_is_missing_and_how_to_get_it() -> None:
    text = env_text(machine(1, quack_kernels=None))
    assert "NVIDIA H200 (h200), 141.0 GiB, capability 9.0" in text
    [line] = [line for line in text.splitlines() if line.startswith("quack-kernels")]
    assert "missing" in line
    assert "pip install 'threefold[cute]'" in line


def test_env_needs_no_torch(tmp_path: Path) -> None:
    """As a planner installs it: numpy and tomli-w, nothing else."""
    for module in (numpy, tomli_w):
        home = Path(str(module.__file__)).parent
        (tmp_path / home.name).symlink_to(home)
    libraries = Path(str(numpy.__file__)).parent.parent / "numpy.libs"
    if libraries.exists():
        (tmp_path / "numpy.libs").symlink_to(libraries)
    command = [sys.executable, "-S", "-m", "threefold", "env", "--json"]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=600)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["versions"] == {}
    assert {one["name"]: one["version"] for one in told["packages"]}["torch"] is None


_RECIPE = str(ROOT / "recipes" / "qwen3-30b-a3b-4k-16xh100-bf16-no-overlap.toml")
FOR_GPUS = ["check", _RECIPE, "--target", "threefold", "knobs.dispatcher=alltoall"]
HERE = [*FOR_GPUS, "--here"]


def test_check_here_refuses_a_plan_for_gpus_on_a_machine_without(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "this_machine", lambda: machine(0))
    assert main(FOR_GPUS) == 0
    capsys.readouterr()
    assert main(HERE) == 1
    assert "here-has-chips" in capsys.readouterr().out


def test_what_a_machine_lacks_stands_beside_what_is_wrong_with_a_plan(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inventory, "this_machine", lambda: machine(0))
    assert main([*HERE, "layout.ep=48"]) == 1
    out = capsys.readouterr().out
    assert "error[ep-divides-experts]" in out
    assert "error[here-has-chips]" in out


def test_a_fixed_plan_is_judged_by_the_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(inventory, "this_machine", lambda: machine(0))
    fixed = tmp_path / "fixed.toml"
    assert main([*HERE, "layout.ep=48", "--fix", str(fixed)]) == 1
    out = capsys.readouterr().out
    assert "applied fix: ep-divides-experts" in out
    assert "error[ep-divides-experts]" not in out
    assert "error[here-has-chips]" in out
    assert main(["check", str(fixed)]) == 0


def test_a_draft_is_not_tuned(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    draft = tmp_path / "draft.toml"
    draft.write_text('model = "tiny-qwen3-moe"\nlayout.ep = "auto"\n')
    assert main(["env", "--tune", str(draft)]) == 1
    assert "error[no-free-field] layout.ep" in capsys.readouterr().out
