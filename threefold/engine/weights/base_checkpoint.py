"""The checkpoint that the weights of a run came from: recorded at the import, named in exported adapters.

`convert.py` records it in the run's folder and names it in `adapter_config.json`; `threefold finetune` asks whether a
run in its folder began with the checkpoint that it is given; `start.py` passes it on where a run of adapters
starts from another one.
"""

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from threefold.findings import Finding, FindingsError
from threefold.safe_files import open_regular, read_json_object, write_aside

BASE = "base.json"
_ENDS = 2**16  # bytes at both ends of a file of weights that tell it from another one of its size
# A folder of the cache that huggingface_hub keeps: models--ORGANIZATION--NAME/snapshots/REVISION.
_CACHED = re.compile(r"/models--([^/]+?)--([^/]+)/snapshots/([^/]+)$")


@dataclass(frozen=True, slots=True)
class BaseCheckpoint:
    """A checkpoint by its name, which is its place where it came from no hub, and by its content."""

    name: str
    digest: str
    revision: str | None = None  # of a checkpoint of the hub


def describe_checkpoint(folder: Path) -> BaseCheckpoint:
    """The checkpoint in a folder, as adapters name it. OSError where it cannot be read."""
    place = str(folder.absolute())
    digest = hashlib.sha256()
    for path in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        with open_regular(path) as file:
            size = path.stat().st_size
            digest.update(f"{path.name} {size} ".encode() + file.read(_ENDS))
            file.seek(max(0, size - _ENDS))
            digest.update(file.read(_ENDS))
    cached = _CACHED.search(place)
    if cached is None:
        return BaseCheckpoint(place, digest.hexdigest())
    return BaseCheckpoint(f"{cached[1]}/{cached[2]}", digest.hexdigest(), cached[3])


def record_base(run: Path, base: BaseCheckpoint) -> None:
    write_aside(run / BASE, (json.dumps(asdict(base), indent=2) + "\n").encode())


def read_base(run: Path) -> BaseCheckpoint | None:
    """The checkpoint that a run began with; None where that is not known."""
    try:
        facts = read_json_object(run / BASE, within=run)
    except (OSError, ValueError):
        return None
    name, digest, revision = (facts.get(key) for key in ("name", "digest", "revision"))
    if not isinstance(name, str) or not isinstance(digest, str):
        return None
    return BaseCheckpoint(name, digest, revision if isinstance(revision, str) else None)


def check_same_checkpoint(run: Path, folder: Path) -> None:
    """Raise where a run began with another checkpoint than that in the folder, which may be gone by now."""
    base = read_base(run)
    if base is None or not folder.exists():
        return
    try:
        given = describe_checkpoint(folder)
    except OSError:
        return
    if given.digest != base.digest:
        problem = f"the run began with another checkpoint: {base.name}, not {given.name}"
        advice = f"give the checkpoint that it began with, or another --out folder; `threefold train {run}` resumes it"
        raise FindingsError([Finding(rule="run-is-this-plan", at=str(run), problem=problem, advice=advice)])
