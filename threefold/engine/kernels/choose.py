"""Which kernel computes which product: measured once for a shape on a device, kept in a file; a sane choice before.

No triton and no CUDA device: plain torch (`reference.py`).
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threefold.engine.kernels.launch import Config

STEPS = ("up", "down", "act_grad", "input_grad", "up_grad", "down_grad")


@dataclass(frozen=True)
class Choice:
    """For each product the tiles of our own kernel, or None: torch's grouped product, the rest in passes beside it."""

    up: Config | None = None
    down: Config | None = None
    act_grad: Config | None = None
    input_grad: Config | None = None
    up_grad: Config | None = None
    down_grad: Config | None = None


@dataclass(frozen=True)
class Shape:
    num_rows: int
    num_experts: int
    dim: int
    expert_dim: int
    gathered: bool  # rows are read at their tokens

    @property
    def key(self) -> str:
        """Row counts within a power of two share a choice: they change with every microbatch."""
        kind = "tokens" if self.gathered else "rows"
        rows = 1 << max(self.num_rows - 1, 1).bit_length()
        return f"{kind} {rows} experts {self.num_experts} dim {self.dim} expert_dim {self.expert_dim}"


def choose(shape: Shape, x: Tensor) -> Choice | None:
    """None: plain torch."""
    aligned = all(size * x.element_size() % 16 == 0 for size in (shape.dim, shape.expert_dim))  # the copy engine's
    if not works(x.device) or not aligned or x.dtype not in (torch.bfloat16, torch.float16):
        return None
    return _measured(x.device).get(shape.key) or default(shape)


@cache
def works(device: torch.device) -> bool:
    if find_spec("triton") is None:
        return False
    if os.environ.get("TRITON_INTERPRET") == "1":
        return True
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def default(shape: Shape) -> Choice:
    """What won on an H200. Under load its power limits any kernel, and the ways differ by a few percent."""
    fused = Choice(up=Config(n=128, stages=4), act_grad=Config(stages=4) if shape.gathered else None)
    if not shape.gathered or shape.expert_dim > 1024:
        return fused  # torch's products are the better ones where tiles have much to sum
    return replace(fused, down=Config(group=4), input_grad=Config(), down_grad=Config(stages=5))


def candidates(step: str) -> list[Config | None]:
    """What came first or second somewhere on an H200."""
    found: dict[str, list[Config | None]] = {
        "up": [Config(n=128, stages=4), Config(n=128)],
        "down": [Config(group=4), Config(), Config(stages=4)],
        "act_grad": [Config(stages=4), Config(stages=4, strip=32), Config(k=32, stages=6, strip=32)],
        "input_grad": [Config(), Config(group=4), Config(stages=4)],
        "up_grad": [Config(m=256, n=128, stages=5, group=2), Config(m=256, n=128, stages=5), Config(stages=4)],
        "down_grad": [Config(stages=5), Config(stages=5, group=2), Config(stages=4)],
    }
    return [None, *found[step]]


def cache_file(device: torch.device) -> Path:
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = torch.cuda.get_device_name(device).lower().replace(" ", "-")
    return root / "threefold" / f"experts-{name}-torch-{torch.__version__}.json"


def save(device: torch.device, shape: Shape, choice: Choice) -> None:
    path = cache_file(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    kept = _read(path) | {shape.key: asdict(choice)}
    # Beside and renamed: another process may be reading.
    beside = path.with_suffix(f".{os.getpid()}")
    beside.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    beside.replace(path)
    _measured.cache_clear()


@cache
def _measured(device: torch.device) -> dict[str, Choice]:
    if device.type != "cuda":
        return {}
    try:
        return {key: _choice(facts) for key, facts in _read(cache_file(device)).items()}
    except (AttributeError, TypeError):
        return {}  # written by another release


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}  # not there, or not whole: measured again when asked


def _choice(facts: dict[str, Any]) -> Choice:
    return Choice(**{step: Config(**config) if config else None for step, config in facts.items()})
