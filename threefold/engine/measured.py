"""What was measured on a GPU, kept in a file for later runs: by device, torch and the packages that took part."""

import json
import os
from pathlib import Path
from typing import Any

import torch


def kept_at(kind: str, device: torch.device, packages: dict[str, str | None]) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    there = "".join(f"-{package}-{version}" for package, version in packages.items() if version)
    return root / "threefold" / f"{kind}-{name}-torch-{torch.__version__}{there}.json"


def read_kept(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}  # not there, or not whole: measured again when asked


def add_kept(path: Path, more: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside and renamed: another process may be reading.
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(read_kept(path) | more, indent=1), encoding="utf-8")
    beside.replace(path)
