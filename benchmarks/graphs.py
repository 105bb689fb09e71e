"""What CUDA graphs and torch.compile do to a training step: each scope against eager, in one process.

python benchmarks/graphs.py [--layers 8] [--micro 1] [--seq 4096] [--accumulate 1] [--sets alone ...] [--json FILE]
python benchmarks/graphs.py --device cpu --tiny      the same code on a small shape, all eager

The step of `step.py`: Qwen3-30B-A3B cut to a few layers, AdamW. The sets of variants (`--sets`) are scopes in bf16
(`alone`), in FP8 (`fp8`), and with tensor- and context-parallel groups of one rank whose collectives NCCL really runs
(`tp`, `cp`); and torch.compile (`compile`). In a set every variant begins with the same weights and a new optimizer;
eager is measured first and last, and every loss of a variant is held against that of the first eager run (`FAR`): one
that differs is an error.
"""

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from step import BETAS, LR, TINY, facts_of, free, plan_of, timed
from torch import Tensor

from threefold.engine.batch import Batch
from threefold.engine.build import Parts, build, options_of, parts_alone
from threefold.engine.dist.join import leave
from threefold.engine.dist.mesh import Group, Mesh
from threefold.engine.kernels.availability import without_fused_kernels
from threefold.engine.layers.cross_entropy import IGNORE
from threefold.engine.models.build import build_model
from threefold.engine.optim.adamw import AdamW
from threefold.engine.step import train_step
from threefold.layout.degrees import Layout
from threefold.plan.plan import Plan
from threefold.spec.models import MODELS
from threefold.units import GIB


@dataclass(frozen=True)
class Variant:
    """`plain`: torch's own operators where ours are fused, but for the experts. `axes`: groups of one rank."""

    scopes: tuple[str, ...] = ()
    compiled: bool = False
    plain: bool = False
    precision: str = "bf16"
    axes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        how = "+".join(self.scopes) or ("compiled" if self.compiled else "eager")
        beside = [self.precision] if self.precision != "bf16" else []
        beside += [f"{axis} group" for axis in self.axes] + (["plain torch"] if self.plain else [])
        return ", ".join([how, *beside])


THREE = ("attn", "moe_router", "moe_preprocess")
SETS = {
    "alone": [Variant(scopes) for scopes in ((), ("attn",), THREE, ("attn", "moe"), ("full_iteration",), ())],
    "fp8": [Variant(scopes, precision="fp8-blockwise") for scopes in ((), THREE, ("full_iteration",), ())],
    "tp": [Variant(scopes, axes=("tp",)) for scopes in ((), THREE, ("full_iteration",), ())],
    "cp": [Variant(scopes, axes=("cp",)) for scopes in ((), THREE, ("full_iteration",), ())],
    # Our kernels leave it nothing in this model.
    "compile": [Variant(plain=True), Variant(compiled=True, plain=True)],
}


class SomeGroups(Mesh):
    """One rank with a communicator for the groups of some axes only; other collectives do nothing."""

    axes: tuple[str, ...] = ()

    def of_ranks(self, name: str, ranks: Sequence[int]) -> Group:
        made = super().of_ranks(name, ranks)
        named = name.replace(" inner", "").replace(" outer", "").split(" x ")
        return made if set(named) <= set(self.axes) else Group(name, tuple(ranks), 0, None)


def mesh_with_groups(axes: tuple[str, ...], device: torch.device) -> Mesh:
    """The mesh of one rank; the first call joins a process group of one."""
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    kind = type("SomeGroups", (SomeGroups,), {"axes": axes})
    mesh: Mesh = kind(Layout(), device=device, with_single_rank_groups=True)
    return mesh


# The tolerance of the loss. Graphs replay what eager runs; other kernels round each bf16 otherwise, by up to 1 / 512,
# and a loss is the mean of thousands of tokens.
FAR = 1e-3


class Bench:
    """`rows`: sequences of a microbatch; the plan's are those of a step."""

    def __init__(self, plan: Plan, device: torch.device, rows: int) -> None:
        self.plan, self.device, self.rows = plan, device, rows
        self.losses: list[float] = []  # of the first variant of a set

    def measure(self, variant: Variant, steps: int, warmup: int) -> dict[str, Any]:
        free(self.device)
        with without_fused_kernels() if variant.plain else nullcontext():
            row = self._measure(variant, steps, warmup)
        self.losses = self.losses or row.get("losses", [])
        if "error" not in row:
            row |= held(row["losses"], self.losses)
        return row

    def _parts(self, variant: Variant) -> Parts:
        knobs = replace(self.plan.knobs, graphs=variant.scopes, compile=variant.compiled, precision=variant.precision)
        plan = replace(self.plan, knobs=knobs)
        if variant.axes:
            return build(plan, mesh_with_groups(variant.axes, self.device), with_data=False)
        model = build_model(plan.model, plan.mtp, torch.bfloat16, self.device, options_of(plan), seed=0)
        named, decay = model.named_parameters(), plan.job.weight_decay
        return parts_alone(model, AdamW(named, decay, plan.knobs.optimizer_dtype, BETAS, master=False))

    def _measure(self, variant: Variant, steps: int, warmup: int) -> dict[str, Any]:
        parts = self._parts(variant)

        def step(tokens_BS: Tensor) -> float:
            labels_BS = torch.nn.functional.pad(tokens_BS[:, 1:], (0, 1), value=IGNORE)
            parts_BS = zip(tokens_BS.split(self.rows), labels_BS.split(self.rows), strict=True)
            return train_step(parts, [Batch(*part) for part in parts_BS], LR, self.plan.job).loss

        row: dict[str, Any] = {"name": variant.name}
        try:
            row |= timed(step, self.plan, self.device, steps, warmup)
        except Exception as error:  # one variant must not lose the others
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}".splitlines()[0][:100]
        graph_stats = parts.runner.graph_stats
        if graph_stats is not None:
            row |= {
                "graph_gib": graph_stats.num_bytes / GIB,
                "replays": graph_stats.num_replays,
                "said": graph_stats.summary(),
            }
        return row


def held(losses: list[float], eager: list[float]) -> dict[str, str]:
    """An error, where a loss is not that of the first variant."""
    for step, (one, other) in enumerate(zip(losses, eager, strict=True)):
        if not abs(one - other) <= FAR * abs(other):  # no number is an error too
            return {"error": f"loss {one:.4f} in step {step}, {other:.4f} at first"}
    return {}


def show(row: dict[str, Any], base: dict[str, Any]) -> str:
    name = f"{row['name']:36}"
    if "error" in row:
        return f"{name} {row['error']}"
    peak = f"{row['peak_gib']:.2f}" if row["peak_gib"] is not None else "-"
    gained = 100 * (base["ms"] / row["ms"] - 1)
    low, high = row["spread_ms"]
    return (
        f"{name} {row['ms']:8.2f} ({low:.2f} to {high:.2f}) {gained:+6.1f} % {row['tflops']:7.1f} {peak:>8} "
        f"{row.get('graph_gib', 0):6.2f} {row.get('replays', 0):7} {row['losses'][-1]:.4f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--micro", type=int, default=1, help="sequences of a microbatch")
    parser.add_argument("--accumulate", type=int, default=1, help="microbatches of a step")
    parser.add_argument("--sets", nargs="+", default=["alone"], choices=SETS)
    parser.add_argument("--seq", type=int)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--fusion", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, model = torch.device(args.device), TINY if args.tiny else MODELS["qwen3-30b-a3b"]
    seq_len = args.seq or (64 if args.tiny else 4096)
    each = args.micro * args.accumulate
    plan = plan_of(model, args.layers, each, seq_len, {"knobs.expert_fusion": args.fusion})
    bench, rows = Bench(plan, device, args.micro), []
    facts = {name: getattr(args, name) for name in ("layers", "micro", "accumulate", "fusion")} | {"seq_len": seq_len}
    for name in args.sets:
        bench.losses = []
        for variant in SETS[name]:
            rows.append({"set": name, **bench.measure(variant, args.steps, args.warmup)})
            print(f"{variant.name}: {rows[-1]}", file=sys.stderr, flush=True)
            if args.json:  # as far as it got
                args.json.write_text(json.dumps({"machine": facts_of(device), **facts, "rows": rows}, indent=2))
    print(f"\n{facts_of(device)}\n{facts}\n")
    print(f"{'scopes':36} {'ms/step':>8} {'(spread)':>18} {'faster':>8} TFLOP/s {'peak GiB':>8} graphs replays loss")
    for row in rows:
        print(show(row, next(each for each in rows if each["set"] == row["set"])))
    if dist.is_initialized():
        leave()
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
