"""Plans that several tests start from."""

from typing import Any

from threefold.plan.parse import parse
from threefold.plan.plan import Plan

# The 1,024-GPU recipe: every axis but CP in use, and no finding at all.
CLEAN: dict[str, Any] = {
    "model": "deepseek-v3",
    "target": "megatron-bridge",
    "cluster.chip": "h100",
    "cluster.gpus": 1024,
    "job.seq_len": 4096,
    "job.global_batch": 8192,
    "layout.tp": 2,
    "layout.pp": 8,
    "layout.vpp": 4,
    "layout.ep": 64,
    "knobs.precision": "fp8-blockwise",
    "knobs.dispatcher": "deepep",
    "knobs.ep_overlap": True,
    "knobs.delay_wgrad": True,
    "knobs.recompute": ["mla_up_proj", "mlp"],
    "knobs.max_connections": 32,
}


def make(**changes: Any) -> Plan:
    """CLEAN with changes; `tp=4` means layout.tp, `None` deletes."""
    return build({**CLEAN, **{_path(name): value for name, value in changes.items()}})


def build(fields: dict[str, Any]) -> Plan:
    parsed = parse({path: value for path, value in fields.items() if value is not None})
    assert parsed.plan is not None, parsed.findings
    return parsed.plan


def _path(name: str) -> str:
    for table in ("layout", "job", "knobs", "cluster", "stack", "model"):
        if name.startswith(f"{table}_"):
            return f"{table}.{name.removeprefix(f'{table}_')}"
    return name
