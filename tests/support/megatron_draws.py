"""Seeded random plans for Megatron: every model that it can be told of, and changes of any field of a plan."""

import json
import random
from typing import Any

from plans import build

from threefold.plan.plan import Plan
from threefold.plan.table import FIELDS
from threefold.spec.megatron import bridge_releases
from threefold.spec.models import MODELS

# Megatron refuses every plan of a family that no release trains, so that those are not drawn.
_TRAINED = bridge_releases()[-1].families
DRAWN_MODELS = sorted(name for name, model in MODELS.items() if model.family in _TRAINED and "tiny" not in name)
# The judge of a plan is its own field, and files and versions of this machine are none of Megatron's.
_FIXED = {"model", "target", "job.tokenizer", "job.val_data", "job.data", "job.task"}
_CHIPS = ("h100", "h200", "b200", "gb200", "gb300")
_VALUES: dict[str, tuple[Any, ...]] = {
    "cluster.chip": _CHIPS,
    "cluster.gpus": (16, 32, 64, 96, 128, 256, 512),
    "job.seq_len": (2048, 4096, 4098, 4100, 8192, 32768, 131072),
    "job.global_batch": (64, 96, 100, 256, 512, 1024),
    "job.micro_batch": (1, 2, 3, 4),
    "job.mtp": (0, 1, 2),
    "layout.tp": (1, 2, 4, 8),
    "layout.cp": (1, 2, 4, 8, 16),
    "layout.pp": (1, 2, 3, 4, 6, 8),
    "layout.vpp": (1, 2, 3, 4, 6),
    "layout.ep": (1, 2, 4, 8, 12, 16, 32, 48, 64),
    "layout.etp": (1, 2, 4),
    "layout.replicate": (1, 2),
    "layout.stages": (None,),
    "knobs.recompute_layers": (None, 1, 2, 4),
    "knobs.dispatch_sms": (None, 16, 24, 32),
    "knobs.max_connections": (None, 1, 8, 32),
    "knobs.activation_offload_layers": (None, 1, 2, 8),
}
_TOGETHER = (  # fields that mean something only with others
    {"layout.pp": (2, 4, 8), "layout.vpp": (1, 2, 3, 4)},
    {"layout.cp": (2, 4, 8), "knobs.cp_comm": ("p2p", "a2a", "all_gather", "a2a+p2p")},
    {"knobs.ep_overlap": (True,), "knobs.delay_wgrad": (False, True)},
    {"knobs.precision": ("fp8-blockwise", "mxfp8", "fp8-tensor", "fp8-cs"), "knobs.fp8_params": (False, True)},
    {"job.capacity_factor": (1.25, 1.5), "job.capacity_scope": ("expert", "rank")},
    {"layout.tp": (2, 4), "knobs.tp_overlap": (False, True)},
)


def draw_plan(seed: int) -> tuple[Plan, dict[str, Any]]:
    """The plan of a seed, and the changes that made it: none to five, alone or together."""
    rng = random.Random(seed)
    name = rng.choice(DRAWN_MODELS)
    changes: dict[str, Any] = {}
    for _ in range(rng.choice([0, 1, 1, 2, 2, 3, 4, 5])):
        if rng.random() < 0.3:
            changes |= {path: rng.choice(values) for path, values in rng.choice(_TOGETHER).items()}
        else:
            path = rng.choice(_DRAWN)
            changes[path] = _value(path, rng)
    return build({**_base(name, rng), **changes}), changes


def _base(name: str, rng: random.Random) -> dict[str, Any]:
    """A layout that fits the model: experts over as many of 64 GPUs as divide them, stages for the largest."""
    spec = MODELS[name]
    ep = next((n for n in (32, 16, 8, 4, 2) if spec.moe and spec.moe.num_experts % n == 0), 1)
    images = {"job.images": 1.0, "job.max_pixels": 1 << 20} if spec.vision is not None else {}
    return {
        **images,
        "model": name,
        "target": "megatron-bridge",
        "cluster.chip": rng.choice(_CHIPS),
        "cluster.gpus": 256 if spec.dim >= 7000 else 64,
        "job.seq_len": 4096,
        "job.global_batch": 512,
        "job.micro_batch": 1,
        "job.task": rng.choice(["pretrain", "pretrain", "sft"]) if spec.vision is None else "sft",
        "layout.ep": ep,
        "layout.tp": 1 if spec.is_moe else 8,
        "layout.pp": 4 if spec.dim >= 7000 else 1,
        "knobs.recompute": ["full"] if rng.random() < 0.3 else ["layernorm"],
    }


def _is_drawn(path: str) -> bool:
    return path not in _FIXED and not path.startswith(("stack.", "run.", "model.")) and path != "cluster.spec"


# Knobs and layout are what Megatron's validation speaks of most: 2,000 plans draw each knob about 50 times.
_SHARES = {"knobs": 4, "layout": 3}
_DRAWN = [path for path in FIELDS if _is_drawn(path) for _ in range(_SHARES.get(path.partition(".")[0], 1))]


def _value(path: str, rng: random.Random) -> Any:
    field = FIELDS[path]
    if path in _VALUES:
        return rng.choice(_VALUES[path])
    if list in field.types and field.choices:
        return rng.sample(field.choices, rng.randint(0, min(3, len(field.choices))))
    if field.choices:
        return rng.choice(field.choices)
    if bool in field.types:
        return rng.choice([True, False])
    if float in field.types or int in field.types:
        low = 0 if field.at_least is None else field.at_least
        high = 4 if field.at_most is None else field.at_most
        numbers = [number for number in (0.01, 0.1, 0.5, 0.95, 1, 2, 4) if low < number <= high]
        whole = [number for number in numbers if int(number) == number]
        return rng.choice((numbers if float in field.types else whole) or [None])
    return None


def shown(name: str, changes: dict[str, Any]) -> str:
    return f"{name} {' '.join(f'{path}={json.dumps(value)}' for path, value in changes.items())}"
