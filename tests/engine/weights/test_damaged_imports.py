"""Hugging Face folders of strangers and of bad downloads: findings, nothing executed, and no folder left behind."""

import json
import os
import random
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors_torch
import torch
from command_line import run
from damaged_files import ANY_FILE, Damage, change_json, changed, time_limit, trap_of
from tiny_models import config_of, spec_of

from threefold.engine.models.build import build_model
from threefold.engine.weights.safetensors_files import INDEX
from threefold.engine.weights.write_hf import write_hf
from threefold.spec.hf import hf_config_of

SEED = int(os.environ.get("THREEFOLD_SEED", time.time_ns() % 1_000_000))
LIMIT_SECONDS = 600  # a hang, however busy the machine: a case takes about a second
CONFIG, WEIGHTS = "config.json", "model.safetensors"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of three models: several files with an index, one file, and fp8 in blocks."""
    root = tmp_path_factory.mktemp("sound")
    for family, most_bytes in (("qwen3_moe", 20_000), ("llama", 10**9), ("deepseek_v3", 10**9)):
        model = build_model(spec_of(family), seed=1)
        write_hf(model, model.spec, root / family, config_of(family), max_shard_bytes=most_bytes)
    quantize(root / "deepseek_v3", [16, 8])
    return root


def quantize(folder: Path, block: list[int]) -> None:
    config = json.loads((folder / CONFIG).read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": block}
    (folder / CONFIG).write_text(json.dumps(config))
    tensors = safetensors_torch.load_file(folder / WEIGHTS)
    for key in [key for key in tensors if key.endswith("proj.weight")]:
        rows, columns = tensors[key].shape
        tensors[key] = (tensors[key] * 1000).clamp(-400, 400).to(torch.float8_e4m3fn)
        tensors[f"{key}_scale_inv"] = torch.ones(-(-rows // block[0]), -(-columns // block[1]))
    safetensors_torch.save_file(tensors, folder / WEIGHTS)


def change_header(path: Path, draw: random.Random, outside: Path) -> None:
    """A dtype, a shape or an offset of a safetensors file is another."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header: dict[str, Any] = json.loads(content[8 : 8 + size])
    key = draw.choice(sorted(header.keys() - {"__metadata__"}))
    what = draw.randrange(5)
    if what == 0:
        header[key]["dtype"] = draw.choice(("F64", "I64", "U8", "F8_E5M2", "F8_E8M0", "F4", "BOOL", "C64", "X"))
    elif what == 1:
        header[key]["shape"] = draw.choice(([2**40, 2**40], [-1], [0], [1] * 70, [], header[key]["shape"][::-1]))
    elif what == 2:
        header[key]["data_offsets"] = draw.choice(([0, 2**60], [5, 1], [0], [-4, 4]))
    elif what == 3:
        header = changed(header, draw)
    else:
        header["x" * 10_000] = header.pop(key)
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + content[8 + size :])


def change_config(path: Path, draw: random.Random, outside: Path) -> None:
    config = json.loads(path.read_text())
    names = sorted(name for name, value in config.items() if type(value) in (int, float))
    config[draw.choice(names)] = draw.choice((0, -1, 10**6, 2**31, 10**30, 1e400, 0.5, "8", None, [], 10_000))
    path.write_text(json.dumps(config))


def change_block(path: Path, draw: random.Random, outside: Path) -> None:
    config = json.loads(path.read_text())
    block = draw.choice(([0, 0], [16, 16], [-1, 8], [10**30, 8], [8], "x", [16.0, 8.0], None, [2**40, 2**40]))
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": block}
    path.write_text(json.dumps(config))


def change_index(path: Path, draw: random.Random, outside: Path) -> None:
    index = json.loads(path.read_text())
    key = draw.choice(sorted(index["weight_map"]))
    bad = ("x" * 300 + ".safetensors", "../outside.safetensors", "/dev/zero", "", 5, [], "a\0.safetensors", "é" * 200)
    index["weight_map"][key] = draw.choice(bad)
    path.write_text(json.dumps(index))


def damage_import(folder: Path, draw: random.Random, outside: Path) -> str:
    files = sorted(folder.iterdir())
    kinds: list[tuple[Path, Damage]] = [(draw.choice(files), draw.choice(ANY_FILE))]
    weights = [path for path in files if path.suffix == ".safetensors"]
    kinds += [(draw.choice(weights), change_header), (folder / CONFIG, change_config), (folder / CONFIG, change_json)]
    kinds += [(folder / CONFIG, change_block)]
    if (folder / INDEX).exists():
        kinds += [(folder / INDEX, change_index), (folder / INDEX, change_json)]
    path, damage = draw.choice(kinds)
    damage(path, draw, outside)
    return f"{damage.__name__} {path.name}"


def one_case(sound: Path, tmp_path: Path, draw: random.Random, capsys: pytest.CaptureFixture[str]) -> None:
    family = draw.choice(("qwen3_moe", "llama", "deepseek_v3"))
    folder, outside, out = tmp_path / "hf", tmp_path / "outside", tmp_path / "run"
    shutil.copytree(sound / family, folder)
    outside.mkdir()
    with time_limit(LIMIT_SECONDS):
        what = damage_import(folder, draw, outside)
        code, said, err = run("import-hf", str(folder), "--out", str(out), capsys=capsys)
        where = f"{family}, {what}: import-hf gave {code}\n{said[-2000:]}\n{err[-2000:]}"
        assert code in (0, 1), where
        assert "Traceback" not in said + err, where
        assert not trap_of(outside).exists(), f"executed: {where}"
        assert ("error[" in said) == bool(code), where
        assert out.exists() != bool(code), f"left behind: {where}"


@pytest.mark.parametrize("number", range(30))
def test_damaged_imports(number: int, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one_case(sound, tmp_path, random.Random(f"import {number}"), capsys)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(150))
def test_damaged_imports_drawn_anew(
    number: int, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print(f"THREEFOLD_SEED={SEED}")
    one_case(sound, tmp_path, random.Random(f"{SEED} {number}"), capsys)


# What was found by hand


def refused(folder: Path, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    code, said, err = run("import-hf", str(folder), "--out", str(out), capsys=capsys)
    assert code == 1
    assert "error[" in said
    assert "Traceback" not in said + err
    return said


@pytest.mark.parametrize("block", [[0, 0], [0, 8], [10**30, 8], [32, 32], ["a", "b"]], ids=str)
def test_wrong_blocks_of_fp8_leave_nothing_behind(
    block: list[Any], sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(sound / "deepseek_v3", folder)
    config = json.loads((folder / CONFIG).read_text())
    config["quantization_config"]["weight_block_size"] = block
    (folder / CONFIG).write_text(json.dumps(config))
    said = refused(folder, tmp_path / "run", capsys)
    assert "scale_inv has shape" in said or "weight_block_size" in said
    assert not (tmp_path / "run").exists()


def test_scales_of_a_wrong_shape(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "hf"
    shutil.copytree(sound / "deepseek_v3", folder)
    tensors = safetensors_torch.load_file(folder / WEIGHTS)
    key = next(key for key in sorted(tensors) if key.endswith("_scale_inv"))
    for wrong in (torch.ones(()), torch.ones(3), torch.ones(1, 1), torch.ones(2, 2, 2)):
        safetensors_torch.save_file({**tensors, key: wrong}, folder / WEIGHTS)
        assert f"{key} has shape" in refused(folder, tmp_path / "run", capsys)
        assert not (tmp_path / "run").exists()


def test_a_failure_in_the_middle_leaves_nothing_behind(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty folder that was there before stays, and empty."""
    from threefold.engine.weights import convert, read_hf

    monkeypatch.setattr(convert, "SHARD_BYTES", 1000)
    loaded: list[Any] = []

    def load(checkpoint: Any, part: Any) -> Any:
        loaded.append(part)
        if len(loaded) > 5:
            raise read_hf.refuse("cannot be read", "download it again")
        return original(checkpoint, part)

    original = read_hf._load
    monkeypatch.setattr(read_hf, "_load", load)
    for out in (tmp_path / "new", tmp_path / "old"):
        if out.name == "old":
            out.mkdir()
        loaded.clear()
        refused(sound / "llama", out, capsys)
        assert not list(out.glob("**/*"))
    assert not (tmp_path / "new").exists()
    assert (tmp_path / "old").is_dir()


def test_out_is_a_file(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("mine")
    assert "no folder" in refused(sound / "llama", tmp_path / "file", capsys)
    assert "error[" in refused(sound / "llama", tmp_path / "file" / "below", capsys)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("experts", [10**6, 2**31 - 1])
def test_a_million_experts_are_refused_at_once(
    experts: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Work is in proportion to the tensors that are there, not to the number that config.json tells of."""
    model = build_model(spec_of("qwen3_moe"), seed=1)
    write_hf(model, model.spec, tmp_path / "hf", {**hf_config_of(model.spec), "num_experts": experts})
    began = time.process_time()
    said = refused(tmp_path / "hf", tmp_path / "run", capsys)
    assert time.process_time() - began < 20  # seconds of CPU time, which other processes do not lengthen much
    assert "the model wants" in said or "missing" in said or "too large" in said


def test_a_snapshot_of_hugging_faces_cache_is_imported(
    sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its files are links to the blobs of its repository, and no others are followed."""
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted((sound / "llama").iterdir())):
        shutil.copy(path, blobs / str(number))
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    code, said, _ = run("import-hf", str(snapshot), "--out", str(tmp_path / "run"), capsys=capsys)
    assert code == 0, said
    blobs.rename(tmp_path / "models--a--b" / "elsewhere")
    for path in snapshot.iterdir():
        target = tmp_path / "models--a--b" / "elsewhere" / path.readlink().name
        path.unlink()
        path.symlink_to(target)
    assert "link out of" in refused(snapshot, tmp_path / "run2", capsys)
