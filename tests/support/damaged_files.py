"""Damages a file or a folder in one way, drawn at random: what a crash, a bad disk or a stranger could leave behind.

`TRAP` is an object whose pickle makes a file when it is loaded: where that file appears, something was executed.
"""

import hashlib
import io
import json
import os
import pickle
import random
import shutil
import signal
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

Damage = Callable[[Path, random.Random, Path], None]  # of a file, with a folder outside of what is damaged
DEEP = b"[" * 100_000
WRONG_VALUES: tuple[Any, ...] = (None, -1, 0, 2**63, 10**30, 1e400, "", "x" * 5000, [], [[]], {}, True, 0.5, "../x")


class HangError(BaseException):
    """A case took too long. No handler of Exception swallows it."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


class Trap:
    """Its pickle runs a command."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.path}'",)


def trap_of(outside: Path) -> Path:
    return outside / "executed"


# Any file


def cut_off(path: Path, draw: random.Random, outside: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(draw.randrange(path.stat().st_size + 1))


def flip_bit(path: Path, draw: random.Random, outside: Path) -> None:
    content = bytearray(path.read_bytes())
    if content:
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def overwrite(path: Path, draw: random.Random, outside: Path) -> None:
    path.write_bytes(draw.choice((b"", b"\0" * 64, b"{}", b"[]", b"null", b"1e400", DEEP, draw.randbytes(300))))


def delete(path: Path, draw: random.Random, outside: Path) -> None:
    path.unlink()


def make_fifo(path: Path, draw: random.Random, outside: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_folder(path: Path, draw: random.Random, outside: Path) -> None:
    path.unlink()
    path.mkdir()


def link_to_nothing(path: Path, draw: random.Random, outside: Path) -> None:
    path.unlink()
    path.symlink_to(outside / "nothing")


def link_to_device(path: Path, draw: random.Random, outside: Path) -> None:
    path.unlink()
    path.symlink_to(draw.choice(("/dev/zero", "/dev/tty", "/dev/stdin", "/proc/kcore")))


def link_to_itself(path: Path, draw: random.Random, outside: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def link_out(path: Path, draw: random.Random, outside: Path) -> None:
    """A link to the very same content, in a folder of the user's."""
    target = outside / f"private-{path.name}"
    shutil.move(path, target)
    path.symlink_to(target)


def grow(path: Path, draw: random.Random, outside: Path) -> None:
    """A sparse file of many gigabytes."""
    with path.open("r+b") as file:
        file.truncate(2**36)


def replace_by_pickle(path: Path, draw: random.Random, outside: Path) -> None:
    path.write_bytes(pickle.dumps(Trap(trap_of(outside)), protocol=draw.choice((0, 2, 4))))


def change_json(path: Path, draw: random.Random, outside: Path) -> None:
    """One value of a JSON file, at any depth, becomes another."""
    value = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(changed(value, draw)), encoding="utf-8")


def changed(value: Any, draw: random.Random) -> Any:
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(sorted(value))
        rest = {name: each for name, each in value.items() if name != key}
        return rest if draw.random() < 0.15 else {**value, key: changed(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.8:
        place = draw.randrange(len(value))
        return [*value[:place], changed(value[place], draw), *value[place + 1 :]]
    return draw.choice(WRONG_VALUES)


ANY_FILE: tuple[Damage, ...] = (
    cut_off,
    flip_bit,
    overwrite,
    delete,
    make_fifo,
    make_folder,
    link_to_nothing,
    link_to_device,
    link_to_itself,
    link_out,
    grow,
    replace_by_pickle,
)


# Checkpoints whose manifest vouches for the damage, as only somebody with a purpose writes it


def sign(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda manifest: None) -> None:
    """Write the manifest of a checkpoint again, with the checksums that the files have now."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text(encoding="utf-8"))
    manifest.pop("sha256")
    for name in manifest["files"]:
        if (folder / name).is_file():
            content = (folder / name).read_bytes()
            manifest["files"][name] = hashlib.sha256(content).hexdigest()
            if "sizes" in manifest:
                manifest["sizes"][name] = len(content)
    manifest = change(manifest) or manifest
    manifest = manifest if isinstance(manifest, dict) else {"files": manifest}
    text = json.dumps(manifest, sort_keys=True)
    manifest["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(manifest), encoding="utf-8")


def signed_index_of_traps(folder: Path, draw: random.Random, outside: Path) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    trap = Trap(trap_of(outside))
    where = draw.randrange(4)
    if where == 0:
        index = trap
    elif where == 1:
        index.planner_data = trap
    elif where == 2:
        index.storage_meta = [trap]
    else:
        index.state_dict_metadata[draw.choice(sorted(index.state_dict_metadata))] = trap
    (folder / ".metadata").write_bytes(pickle.dumps(index, protocol=draw.choice((2, 4, 5))))
    sign(folder)


def signed_other_index(folder: Path, draw: random.Random, outside: Path) -> None:
    """A number or a name of the index is another."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    name = draw.choice(sorted(index.state_dict_metadata))
    tensor = index.state_dict_metadata[name]
    place = draw.choice([key for key in index.storage_data if key.fqn == name])
    entry = index.storage_data[place]
    what = draw.randrange(7)
    if what == 0:
        entry.relative_path = draw.choice(("../../plan.toml", "/dev/zero", "nothing", "x" * 9000, "manifest.json", ""))
    elif what == 1:
        entry.offset = draw.choice((-1, 2**40, 10**30, entry.offset + 1, "0", None))
    elif what == 2:
        entry.length = draw.choice((-1, 0, 2**62, entry.length - 7, 1.5))
    elif what == 3:
        tensor.size = torch.Size((2**40, 2**20)) if draw.random() < 0.5 else torch.Size((1,) * 3)
    elif what == 4:
        tensor.chunks = draw.choice(([], tensor.chunks * 2, None, tensor))
    elif what == 5:
        tensor.properties.dtype = draw.choice((torch.float64, torch.complex128, torch.int8, torch.bool))
    else:
        del index.storage_data[place]
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    sign(folder)


def signed_flip(folder: Path, draw: random.Random, outside: Path) -> None:
    """Bits of the index, the facts or the tensors are others, and the manifest says that this is right."""
    path = folder / draw.choice((".metadata", "facts.json", "__0_0.distcp"))
    for _ in range(draw.randrange(1, 6)):
        flip_bit(path, draw, outside)
    sign(folder)


def signed_tensor_of_traps(folder: Path, draw: random.Random, outside: Path) -> None:
    """The bytes of a tensor are a pickle that executes something, alone or in torch's archive."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    entry = draw.choice([entry for entry in index.storage_data.values() if entry.length > 1000])
    trap = pickle.dumps(Trap(trap_of(outside)), protocol=2)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", draw.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as archive:
        archive.writestr("archive/data.pkl", trap)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/data/0", b"\0" * draw.choice((4, 10**7)))
    content = trap if draw.random() < 0.3 else buffer.getvalue()
    path = folder / entry.relative_path
    if draw.random() < 0.5 and len(content) <= entry.length:
        data = bytearray(path.read_bytes())
        data[entry.offset : entry.offset + entry.length] = content.rjust(entry.length, b"\0")
        path.write_bytes(data)
    else:
        entry.offset, entry.length = path.stat().st_size, len(content)
        path.write_bytes(path.read_bytes() + content)
        (folder / ".metadata").write_bytes(pickle.dumps(index))
    sign(folder)


def signed_less(folder: Path, draw: random.Random, outside: Path) -> None:
    """A manifest that lists less, or else, than what is read."""

    def change(manifest: dict[str, Any]) -> Any:
        what = draw.randrange(6)
        names = sorted(manifest["files"])
        if what == 0:
            manifest["files"], manifest["sizes"] = {}, {}
        elif what == 1:
            name = draw.choice(names)
            del manifest["files"][name], manifest["sizes"][name]
        elif what == 2:
            manifest["files"][draw.choice(("/dev/zero", "../../plan.toml", "..", "a\0b", "x" * 5000))] = "0" * 64
        elif what == 3:
            manifest["tensors"][draw.choice(sorted(manifest["tensors"]))] = ["torch.float32", [2**40, 2**40]]
        elif what == 4:
            manifest["tensors"] = dict(list(manifest["tensors"].items())[: draw.randrange(3)])
        else:
            return changed(manifest, draw)
        return None

    index = folder / ".metadata"
    if draw.random() < 0.3:  # what the manifest leaves out is a trap
        index.write_bytes(pickle.dumps(Trap(trap_of(outside))))
        sign(folder, lambda m: {**m, "files": {}, "sizes": {}})
    else:
        sign(folder, change)


def signed_facts(folder: Path, draw: random.Random, outside: Path) -> None:
    change_json(folder / "facts.json", draw, outside)
    sign(folder)


SIGNED: tuple[Damage, ...] = (
    signed_index_of_traps,
    signed_other_index,
    signed_flip,
    signed_tensor_of_traps,
    signed_less,
    signed_facts,
)
