"""Checkpoints and run folders that somebody else made: nothing in them is executed, followed or believed unseen."""

import errno
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import run
from damaged_files import DEEP, Trap, sign, time_limit, trap_of
from safetensors import SafetensorError
from tiny_runs import TINY, tiny_plan

import threefold
from threefold.engine.run import dcp_format as dcp_index
from threefold.engine.run.checkpoint_io import step_of_folder
from threefold.engine.run.checkpoints import Checkpoints, read_checkpoint
from threefold.engine.run.folder import CHECKPOINTS, Metrics
from threefold.engine.run.lock import LOCK, RunLock
from threefold.engine.train import train
from threefold.engine.weights import write_hf as write_hf_module
from threefold.findings import Finding, FindingsError
from threefold.inert_pickle import Global, Record, read_inert
from threefold.plan.file import dump_fields

FIELDS = {**TINY, "job.data": "synthetic", "job.steps": 4, "run.save_every": 2, "run.keep": 3}
FACTS = {"bad_steps": 0, "loader": {"step": 1, "sample": 4, "fingerprint": "f"}}
LIMIT_SECONDS = 600  # a hang, however busy the machine: a case takes about a second


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 2 and 4."""
    root = tmp_path_factory.mktemp("sound")
    train(tiny_plan(FIELDS), root / "run", lambda text: None)
    return root / "run"


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    shutil.copytree(sound, tmp_path / "run")
    return tmp_path / "run"


def filled(folder: Path, steps: list[int], keep: int = 9) -> Checkpoints:
    kept = Checkpoints(folder, keep)
    for step in steps:
        kept.save(step, {"model.weight": torch.full((30, 7), float(step))}, {**FACTS, "step": step})
    kept.finish()
    return kept


def finding_of(action: Callable[[], object]) -> Finding:
    with time_limit(LIMIT_SECONDS), pytest.raises(FindingsError) as caught:
        action()
    [finding] = caught.value.findings
    assert finding.fix_text
    return finding


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(content)


def said_by(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with time_limit(LIMIT_SECONDS):
        code, out, err = run(*words, capsys=capsys)
    assert "Traceback" not in out + err
    return code, out, err


# Nothing is executed


def test_a_signed_index_executes_nothing(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The audit's case: `sample`, `export-hf` and a resume ran a shell command."""
    (tmp_path / "plan.toml").write_text(dump_fields({**FIELDS, "job.steps": 5}))
    for step in (2, 4):
        path = folder / CHECKPOINTS / f"step-{step:08d}"
        (path / ".metadata").write_bytes(pickle.dumps(Trap(trap_of(tmp_path))))
        sign(path)
    for words in (
        ("sample", str(folder)),
        ("export-hf", str(folder), "--out", str(tmp_path / "hf")),
        ("train", str(tmp_path / "plan.toml"), "--run", str(folder)),
    ):
        code, out, _ = said_by(words, capsys)
        assert code == 1
        assert "error[checkpoint-whole]" in out
        assert "it names posix.system, which is no part of a checkpoint" in out
        assert not trap_of(tmp_path).exists()


@pytest.mark.parametrize("listed", [[], [".metadata"], ["facts.json", "__0_0.distcp"], [".metadata", "facts.json"]])
def test_a_manifest_that_lists_less_than_is_read(listed: list[str], tmp_path: Path) -> None:
    """`"files": {}` passed with nothing checked."""
    kept = filled(tmp_path, [1])

    def leave_out(manifest: dict[str, Any]) -> dict[str, Any]:
        files = {name: value for name, value in manifest["files"].items() if name in listed}
        return {**manifest, "files": files, "sizes": {name: manifest["sizes"][name] for name in listed}}

    sign(kept.path(1), leave_out)
    finding = finding_of(lambda: read_checkpoint(kept.path(1)))
    assert finding.rule == "checkpoint-whole"
    assert "does not list" in finding.problem


def test_checkpoints_of_earlier_versions_have_no_sizes(tmp_path: Path) -> None:
    kept = filled(tmp_path, [1])
    sign(kept.path(1), lambda manifest: {name: value for name, value in manifest.items() if name != "sizes"})
    assert float(read_checkpoint(kept.path(1))[0]["model.weight"][0, 0]) == 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"files": []},
        {"files": {".metadata": 5, "facts.json": []}},
        {"tensors": []},
        {"tensors": {"a": 5}},
        {"tensors": {"a": ["torch.nn", [1]]}},
        {"tensors": {"a": ["torch.float32", [2**40, 2**40]]}},
        {"tensors": {"a": ["torch.float32", [10**9]]}},
        {"tensors": {"a": ["torch.float32", [1.5]]}},
        {"sizes": 5},
        {"sizes": {".metadata": -1}},
    ],
    ids=str,
)
def test_manifests_of_wrong_types_and_sizes(change: dict[str, Any], tmp_path: Path) -> None:
    kept = filled(tmp_path, [1])
    sign(kept.path(1), lambda manifest: {**manifest, **change})
    assert finding_of(lambda: read_checkpoint(kept.path(1))).rule == "checkpoint-whole"


@pytest.mark.parametrize("kind", ["fifo", "device", "link out", "folder"])
@pytest.mark.parametrize("name", ["manifest.json", "facts.json", ".metadata", "__0_0.distcp"])
def test_what_is_no_regular_file_is_not_opened(name: str, kind: str, tmp_path: Path) -> None:
    kept = filled(tmp_path / "run", [1])
    path = kept.path(1) / name
    shutil.move(path, tmp_path / name)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else tmp_path / name)
    finding = finding_of(lambda: read_checkpoint(kept.path(1)))
    assert finding.at == str(path)
    assert "regular file" in finding.problem or "link out of" in finding.problem


def test_nothing_in_the_package_unpickles_a_file() -> None:
    """But for the results of forked ranks, which are in a folder that only their parent can write to."""
    forbidden = re.compile(
        r"pickle\.loads?\b|\bUnpickler\b|torch\.load\(|np\.load\(|FileSystemReader|\bmarshal\b|[^.\w](eval|exec)\("
    )
    package = Path(threefold.__file__).parent
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if forbidden.search(path.read_text(encoding="utf-8"))
    }
    assert found == {"engine/verify/forked_ranks.py"}


# What an inert pickle is


def test_a_pickle_is_read_as_data() -> None:
    value = {"a": [1, -5, 2**40, 0.5, None, True, "é"], "b": (1, (2, 3), ()), "c": torch.Size((3, 4))}
    for protocol in (2, 3, 4, 5):
        found = read_inert(pickle.dumps(value, protocol), {"torch.Size"}.__contains__)
        assert {**found, "c": None} == {**value, "c": None}
        size = found["c"]
        assert isinstance(size, Record)
        assert (size.name, size.arguments) == ("torch.Size", ((3, 4),))
    assert read_inert(pickle.dumps(torch.float32, 4), {"torch.float32"}.__contains__) == Global("torch.float32")


def test_pickles_that_take_for_ever_elsewhere_are_refused() -> None:
    """A memo of four billion entries, numbers of gigabytes, and tuples of which each holds the one before twice."""
    doubled = b")\x94" + b"".join(b"h%c\x86\x94" % number for number in range(60))  # 2**60 when it is hashed or printed
    with time_limit(LIMIT_SECONDS):
        assert read_inert(b"\x80\x02K\x05r\xff\xff\xff\xff.", bool) == 5  # LONG_BINPUT
        for content in (
            b"\x80\x02\x8b\xff\xff\xff\x7f.",  # LONG4
            b"\x80\x05\x96" + b"\xff" * 7 + b"\x00.",  # BYTEARRAY8
            b"\x80\x04" + doubled + b"}" + b"h\x3c" + b"K\x01s.",  # as the key of a dict
            b"\x80\x04" + doubled + b"\x8c\x01a\x93.",  # as the module of a class
            b"\x80\x04" + doubled + b")R.",  # as what is called
            b"",
            b"(" * 1000,
            b"cos\nsystem\n(X\x04\x00\x00\x00truetR.",
        ):
            with pytest.raises(ValueError, match=r"."):
                read_inert(content, {"torch.Size"}.__contains__)


def test_an_index_is_as_long_as_its_manifest_makes_likely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A byte of a pickle can be a list of 72 bytes: 256 MiB of them would take 18 GiB."""
    kept = filled(tmp_path, [1])
    path = kept.path(1) / ".metadata"
    monkeypatch.setattr(dcp_index, "_OPERATIONS", 0)
    assert read_checkpoint(kept.path(1))
    path.write_bytes(b"\x80\x02(" + b"]" * 20_000 + b"t.")
    sign(kept.path(1))
    assert "operations, too many for a checkpoint" in finding_of(lambda: read_checkpoint(kept.path(1))).problem


def test_a_list_that_many_tensors_share_is_read_once(tmp_path: Path) -> None:
    """Tensors times rectangles would be billions."""
    kept = filled(tmp_path, [1])
    path = kept.path(1) / ".metadata"
    index = pickle.loads(path.read_bytes())
    [tensor] = index.state_dict_metadata.values()
    [(place, entry)] = index.storage_data.items()
    for number in range(20_000):
        tensor.chunks.append(tensor.chunks[0])
        name = f"model.{number}"
        index.state_dict_metadata[name] = tensor
        index.storage_data[type(place)(name, place.offset)] = entry
    path.write_bytes(pickle.dumps(index))
    sign(kept.path(1))
    assert "it lacks" in finding_of(lambda: read_checkpoint(kept.path(1))).problem


# Steps


def test_swapped_folders_are_not_what_they_say(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = sorted((folder / CHECKPOINTS).iterdir())
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)
    code, out, _ = said_by(("export-hf", str(folder), "--out", str(tmp_path / "hf")), capsys)
    assert code == 1
    assert "step-00000004 holds the checkpoint of step 2" in out
    assert not (tmp_path / "hf").exists()


def test_names_that_are_no_steps(tmp_path: Path) -> None:
    assert step_of_folder("step-00000012") == 12
    assert step_of_folder("step-123456789") == 123456789
    for name in ("step-²", "step-٣", "step-12", "step-", "step--0000001", "x", "step-0000000012", "step-" + "9" * 30):
        assert step_of_folder(name) is None
        (tmp_path / name).mkdir()
    assert Checkpoints(tmp_path, 2).steps() == []


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_damaged_ones_take_no_places(keep: int, tmp_path: Path) -> None:
    """With 2, 4 (damaged), 6 (damaged) and keep 3 the sound one went. So it did where loading had not seen them."""
    filled(tmp_path / "a", [2, 4, 6])
    filled(tmp_path / "b", [2, 4, 6, 8])
    for root, newest in (("a", 2), ("b", 8)):
        for step in (4, 6):
            flip(tmp_path / root / f"step-{step:08d}" / "__0_0.distcp")
        kept = Checkpoints(tmp_path / root, keep)
        found = kept.load_latest(lambda text: None)
        assert found is not None
        assert found[1]["step"] == newest
        kept.save(9, {"model.weight": torch.ones(3)}, {**FACTS, "step": 9}, wait=True)
        sound = [step for step in kept.steps() if step not in (4, 6)]
        assert sound == ([2, 8, 9][-keep:] if root == "b" else [2, 9][-keep:])


# What verbs say


def test_sample_says_which_checkpoint_answers(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(folder / CHECKPOINTS / "step-00000004" / "__0_0.distcp")
    code, _, err = said_by(("sample", str(folder), "--tokens", "1"), capsys)
    assert code == 0
    assert "step-00000004/__0_0.distcp is damaged; trying the one before" in err
    assert "step 2" in err


@pytest.mark.parametrize("verb", ["sample", "export-hf"])
@pytest.mark.parametrize(
    "change",
    [
        ("num_layers = 1", "num_layers = 3"),
        ("num_experts = 4", "num_experts = 8"),
        ("num_layers = 1", "num_layers = 9999"),
    ],
    ids=lambda pair: pair[1],
)
def test_a_plan_of_another_model(
    change: tuple[str, str], verb: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (folder / "plan.toml").read_text()
    assert change[0] in text
    (folder / "plan.toml").write_text(text.replace(*change))
    (folder / "contract.json").unlink()
    words = (verb, str(folder), *(("--out", str(tmp_path / "hf")) if verb == "export-hf" else ()))
    code, out, _ = said_by(words, capsys)
    assert code == 1
    assert "error[checkpoint-fits]" in out
    assert not (tmp_path / "hf").exists()


@pytest.mark.parametrize(
    "content", [b"", b"[]", DEEP, b"\xff", b'{"timing": 5'], ids=["empty", "list", "deep", "raw", "cut"]
)
@pytest.mark.parametrize("name", ["contract.json", "hf_config.json"])
def test_broken_json_in_the_folder(
    name: str, content: bytes, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / name).write_bytes(content)
    (tmp_path / "plan.toml").write_text(dump_fields({**FIELDS, "job.steps": 5}))
    words = {
        "contract.json": ("train", str(tmp_path / "plan.toml"), "--run", str(folder)),
        "hf_config.json": ("export-hf", str(folder), "--out", str(tmp_path / "hf")),
    }
    code, out, _ = said_by(words[name], capsys)
    assert code == 1
    assert out.count("error[") == 1
    assert name in out


def test_metrics_of_any_kind_are_read(tmp_path: Path) -> None:
    lines = [b'{"step": 0}', b'{"step": 1e400}', b'{"step": ' + DEEP, b"\xff", b"5", b'{"step": "x"}', b'{"step": 1}']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    Metrics(tmp_path, 5).close()
    found = [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert found == [1, 2]


def test_checkpoints_that_are_a_file_or_elsewhere(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.move(folder / CHECKPOINTS, tmp_path / "elsewhere")
    for make in (lambda path: path.write_text("x"), lambda path: path.symlink_to(tmp_path / "elsewhere")):
        make(folder / CHECKPOINTS)
        code, out, _ = said_by(("sample", str(folder)), capsys)
        assert code == 1
        assert out.count("error[") == 1
        assert str(folder / CHECKPOINTS) in out
        (folder / CHECKPOINTS).unlink()
    assert len(list((tmp_path / "elsewhere").iterdir())) == 2


# Nothing is written through links


@pytest.mark.parametrize("name", ["plan.toml.partial", "metrics.jsonl", LOCK, "contract.json.partial", "logs"])
def test_a_run_writes_through_no_link(
    name: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").write_text("mine")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "mine")
    (tmp_path / "plan.toml").write_text(dump_fields({**FIELDS, "job.steps": 5}))
    code, out, _ = said_by(("train", str(tmp_path / "plan.toml"), "--run", str(folder)), capsys)
    assert code == 1
    assert "error[run-readable]" in out
    assert "link out of" in out
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_lock_that_is_a_link_is_not_truncated(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "mine")
    lock = RunLock(tmp_path / "run", lambda text: None)
    with pytest.raises(OSError, match="link"):
        lock.acquire()
    assert (tmp_path / "mine").read_text() == "mine"


# Disks that are full or read-only


def test_export_to_a_full_disk(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """safetensors has an error of its own for it."""

    def save(tensors: Any, path: str, metadata: Any) -> None:
        Path(path).write_bytes(b"half")
        raise SafetensorError(f"Error while serializing: I/O error: {os.strerror(errno.ENOSPC)} (os error 28)")

    monkeypatch.setattr(write_hf_module, "save_file", save)
    code, out, _ = said_by(("export-hf", str(folder), "--out", str(tmp_path / "hf")), capsys)
    assert code == 1
    assert out.count("error[") == 1
    assert os.strerror(errno.ENOSPC) in out
    assert not (tmp_path / "hf").exists()


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """The folder on a file system that may not be written."""
    bind = ["mount", "--bind", str(folder), str(folder)]
    if os.geteuid() or not shutil.which("mount") or subprocess.run(bind, capture_output=True, check=False).returncode:
        pytest.skip("nothing can be mounted here")
    try:
        done = subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], capture_output=True, check=False)
        if done.returncode:
            pytest.skip("nothing can be mounted read-only here")
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resume_on_a_read_only_mount(ranks: int, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(dump_fields({**FIELDS, "job.steps": 5, "cluster.gpus": ranks}))
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "rank-1.log").touch()
    with read_only(folder):
        words = [sys.executable, "-m", "threefold", "train", str(tmp_path / "plan.toml"), "--run", str(folder)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout.count("error[run-writable]") == 1
    assert os.strerror(errno.EROFS) in done.stdout
