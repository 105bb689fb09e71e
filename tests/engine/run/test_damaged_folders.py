"""Run folders of strangers and of bad disks: one finding each, nothing executed or written elsewhere, nothing lost."""

import hashlib
import json
import os
import random
import shutil
import time
from pathlib import Path

import pytest
from command_line import run
from damaged_files import ANY_FILE, SIGNED, change_json, time_limit, trap_of
from tiny_runs import TINY, tiny_plan

from threefold.engine.run.checkpoints import Checkpoints, read_checkpoint
from threefold.engine.run.folder import CHECKPOINTS
from threefold.engine.train import train
from threefold.findings import FindingsError
from threefold.plan.file import dump_fields

FIELDS = {**TINY, "job.data": "synthetic", "job.steps": 4, "run.save_every": 2, "run.keep": 3}
SEED = int(os.environ.get("THREEFOLD_SEED", time.time_ns() % 1_000_000))
LIMIT_SECONDS = 600  # a hang, however busy the machine: a case takes about a second
SENTINEL = "what belongs to the user\n"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps with two checkpoints, the plan that goes on with it, and exports of both checkpoints."""
    root = tmp_path_factory.mktemp("sound")
    train(tiny_plan(FIELDS), root / "run", lambda text: None)
    (root / "plan.toml").write_text(dump_fields({**FIELDS, "job.steps": 5}), encoding="utf-8")
    assert Checkpoints(root / "run" / CHECKPOINTS, 3).steps() == [2, 4]
    return root


def digest_of(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def swap(folder: Path, draw: random.Random, outside: Path) -> None:
    """The folders of two steps change their names."""
    first, second = sorted((folder / CHECKPOINTS).iterdir())
    first.rename(folder / "aside")
    second.rename(first)
    (folder / "aside").rename(second)


def odd_names(folder: Path, draw: random.Random, outside: Path) -> None:
    for name in ("step-²", "step-1", "step-99999999999999999999", "step-", "step-00000009"):
        (folder / CHECKPOINTS / name).mkdir()


def checkpoints_elsewhere(folder: Path, draw: random.Random, outside: Path) -> None:
    """Whoever trains on would write to, and remove from, another folder of the user."""
    target = outside / "checkpoints"
    shutil.move(folder / CHECKPOINTS, target)
    if draw.random() < 0.5:
        (folder / CHECKPOINTS).symlink_to(target)
    else:
        (folder / CHECKPOINTS).mkdir()
        for step in target.iterdir():
            (folder / CHECKPOINTS / step.name).symlink_to(step)


def checkpoints_are_a_file(folder: Path, draw: random.Random, outside: Path) -> None:
    shutil.rmtree(folder / CHECKPOINTS)
    (folder / CHECKPOINTS).write_text("no folder")


def planted_link(folder: Path, draw: random.Random, outside: Path) -> None:
    """A link at a name that the run writes to."""
    name = draw.choice(
        ("plan.toml.partial", "metrics.jsonl", "run.lock", "contract.json.partial", "loads.json.partial")
    )
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside / "sentinel.txt")


def broken_config(folder: Path, draw: random.Random, outside: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 8, "vocab_size": 9, "num_attention_heads": 2}
    content = draw.choice((b"[" * 100_000, b"[]", b"{}", json.dumps(config).encode(), b"\xff"))
    (folder / "hf_config.json").write_bytes(content)


def broken_metrics(folder: Path, draw: random.Random, outside: Path) -> None:
    lines = (b'{"step": 1e400}', b'{"step": ' + b"[" * 50_000, b'{"step": null}', b'{"step": 0}', b"\xff\xfe", b'"x"')
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b"\n".join(draw.sample(lines, 3)) + b"\n")


def another_model(folder: Path, draw: random.Random, outside: Path) -> None:
    path = folder / "plan.toml"
    old, new = draw.choice(
        (
            ("num_layers = 1", "num_layers = 2"),
            ("num_experts = 4", "num_experts = 2000000"),
            ("qwen3-moe", "deepseek-v3"),
        )
    )
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


WHOLE = (
    swap,
    odd_names,
    checkpoints_elsewhere,
    checkpoints_are_a_file,
    planted_link,
    broken_config,
    broken_metrics,
    another_model,
)


def damage_run(folder: Path, draw: random.Random, outside: Path) -> tuple[str, bool]:
    """Damage a run's folder once. Returns what was done, and whether a manifest vouches for it."""
    kind = draw.random()
    if kind < 0.35:
        files = sorted(path for path in folder.rglob("*") if path.is_file() and "tensorboard" not in path.parts)
        path, damage = draw.choice(files), draw.choice(ANY_FILE)
        damage(path, draw, outside)
        return f"{damage.__name__} {path.relative_to(folder)}", False
    if kind < 0.45:
        path = draw.choice(sorted(folder.rglob("*.json")))
        change_json(path, draw, outside)
        return f"change_json {path.relative_to(folder)}", False
    if kind < 0.75:
        step = draw.choice(sorted((folder / CHECKPOINTS).iterdir()))
        damage = draw.choice(SIGNED)
        damage(step, draw, outside)
        return f"{damage.__name__} {step.name}", True
    damage = draw.choice(WHOLE)
    damage(folder, draw, outside)
    return damage.__name__, False


def sound_steps(folder: Path) -> dict[int, str]:
    """The steps whose checkpoint can be loaded, with a digest of their tensors."""
    found = {}
    for path in (folder / CHECKPOINTS).glob("step-*"):
        try:
            tensors, facts = read_checkpoint(path)
        except FindingsError:
            continue
        content = b"".join(name.encode() + value.numpy().tobytes() for name, value in sorted(tensors.items()))
        found[facts["step"]] = hashlib.sha256(content).hexdigest()
    return found


def one_case(sound: Path, tmp_path: Path, draw: random.Random, capsys: pytest.CaptureFixture[str]) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    shutil.copytree(sound / "run", folder)
    outside.mkdir()
    (outside / "sentinel.txt").write_text(SENTINEL)
    with time_limit(LIMIT_SECONDS):
        what, vouched = damage_run(folder, draw, outside)
        before, elsewhere = sound_steps(folder), digest_of(outside)
        words = {
            "sample": ("sample", str(folder), "--tokens", "2"),
            "export-hf": ("export-hf", str(folder), "--out", str(tmp_path / "hf")),
            "train": ("train", str(sound / "plan.toml"), "--run", str(folder)),
        }
        for verb in ("sample", "export-hf", "train"):
            code, out, err = run(*words[verb], capsys=capsys)
            where = f"{what}: {verb} gave {code}\n{out[-2000:]}\n{err[-2000:]}"
            assert code in (0, 1), where
            assert "Traceback" not in out + err, where
            assert not trap_of(outside).exists(), f"executed: {where}"
            assert digest_of(outside) == elsewhere, f"written elsewhere: {where}"
            if code:
                assert 1 <= out.count("error[") <= 2, where  # two where both checkpoints are unusable
            elif verb == "export-hf" and not vouched:
                step = int(out.split()[1])
                assert (tmp_path / "hf" / "model.safetensors").read_bytes() == exported(sound, step, tmp_path), where
        after = sound_steps(folder)
        assert before.items() <= after.items(), f"lost: {what}: {before.keys()} to {after.keys()}"


def exported(sound: Path, step: int, tmp_path: Path) -> bytes:
    """The export of one step of the sound run."""
    out = sound / f"hf-{step}"
    if not out.exists():
        from threefold.engine.weights.convert import export_hf

        copy = tmp_path / "copy"
        shutil.copytree(sound / "run", copy)
        for path in (copy / CHECKPOINTS).iterdir():
            if path.name != f"step-{step:08d}":
                shutil.rmtree(path)
        list(export_hf(copy, out))
    return (out / "model.safetensors").read_bytes()


@pytest.mark.parametrize("number", range(24))
def test_damaged_run_folders(number: int, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_case(sound, tmp_path, random.Random(f"run {number}"), capsys)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(200))
def test_damaged_run_folders_drawn_anew(
    number: int, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print(f"THREEFOLD_SEED={SEED}")
    one_case(sound, tmp_path, random.Random(f"{SEED} {number}"), capsys)
