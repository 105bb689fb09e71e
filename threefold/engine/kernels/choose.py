"""Which kernel computes which product: measured once for a shape on a device, kept in a file; a sane choice before.

No triton and no CUDA device: plain torch (`reference.py`).
"""

import json
import os
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from threefold.engine.kernels.launch import Config

EACH: Literal["each"] = "each"
How = Config | Literal["each"] | None
STEPS = ("up", "down", "act_grad", "input_grad", "up_grad", "down_grad")


@dataclass(frozen=True)
class Choice:
    """How each product is computed.

    Tiles: by our own kernel. None: torch's grouped product, the rest in passes beside it. EACH: the same with a product
    for every expert, faster where they are few and large; wants counts on the host.
    """

    up: How = None
    down: How = None
    act_grad: How = None
    input_grad: How = None
    up_grad: How = None
    down_grad: How = None


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
    """What won on an H200: gathers in the loads pay, and torch's product wins where nothing is left to fuse."""
    if not shape.gathered:
        return Choice()
    return Choice(
        up=Config(n=128, stages=4),
        down=Config(group=4),
        act_grad=Config(stages=4),
        up_grad=Config(m=256, n=128, stages=5),
        down_grad=Config(stages=5),
    )


def candidates(step: str) -> list[How]:
    wide, tall = Config(stages=4), Config(m=256, n=128, stages=5)
    found: dict[str, list[How]] = {
        "up": [None, Config(n=128, stages=4), Config(n=128, stages=3)],
        "down": [None, Config(group=4), wide],
        "act_grad": [None, wide, Config(stages=3)],
        "input_grad": [None, Config(group=4), wide],
        "up_grad": [None, tall, replace(wide, stages=5)],
        "down_grad": [None, replace(wide, stages=5), wide],
    }
    return found[step]


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
    return {key: _choice(facts) for key, facts in _read(cache_file(device)).items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}  # not there, or not whole: measured again when asked


def _choice(facts: dict[str, Any]) -> Choice:
    return Choice(**{step: Config(**config) if isinstance(config, dict) else config for step, config in facts.items()})
