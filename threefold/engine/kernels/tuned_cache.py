"""The cache files of measured kernel speeds, which later runs on the same GPU and the same software read.

`tune/expert_kernels.py` and `tune/attention_kernels.py` write them; `experts/kernel_choice.py` and
`attention/kernel_speeds.py` read them. A file is one JSON object, for example
"experts-nvidia-h200-torch-2.11.0-quack-0.2.json" with an entry for every shape of experts.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch


def cache_path(kind: str, device: torch.device, packages: dict[str, str | None]) -> Path:
    """The file for this GPU, this torch and the installed `packages` (name -> version, None if not installed)."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    installed = "".join(f"-{package}-{version}" for package, version in packages.items() if version)
    return root / "threefold" / f"{kind}-{name}-torch-{torch.__version__}{installed}.json"


def read_entries(path: Path) -> dict[str, Any]:
    """All entries of a cache file; none where it is missing or damaged, as a user can measure again."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def add_entries(path: Path, entries: dict[str, Any]) -> None:
    """Add to a cache file, or replace entries of the same keys."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written to a second file and renamed, because another process may be reading.
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(read_entries(path) | entries, indent=1), encoding="utf-8")
    temporary.replace(path)
