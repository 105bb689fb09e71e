"""How long a sequence trains on one GPU, and how fast: ours against Hugging Face with its gradient checkpointing.

python benchmarks/long_context.py [--lengths 16384 65536 131072 262144] [--peer-lengths 32768 49152 65536] [--json FILE]
python benchmarks/long_context.py --lengths 1048576 --peer-lengths --progress       one step of minutes, told as it goes
python benchmarks/long_context.py --device cpu --tiny --lengths 64 128 --peer-lengths 64       its times mean nothing

Four layers of Qwen3-30B-A3B (or two of DeepSeek-V3: a dense one and one with 16 experts), microbatch 1, synthetic
tokens: forward, backward, clip, AdamW; weights, gradients and moments in bf16 on both sides (`benchmarks/step.py`).
TFLOP/s by `threefold.spec.flops`: three forwards a step, causal attention counted as half the square, 2 S (heads x dim)
FLOPs a token, layer and forward; nothing that is made again counts. Each length says what is recomputed, what is saved
although the layer around it is recomputed, and what waits on the host.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from step import TINY, Step, facts_of, free, ours, peak_gib, peer, timed

from threefold.engine.models.block import Block
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.spec.model import ModelSpec


@dataclass(frozen=True)
class Settings:
    """What a length is trained with."""

    up_to: int
    recompute: tuple[str, ...] = ()
    save: tuple[str, ...] = ()  # inside recomputed layers
    offload_layers: int = 0

    @property
    def said(self) -> str:
        words = [f"recompute {'+'.join(self.recompute)}"] if self.recompute else []
        words += [f"save {'+'.join(self.save)}"] if self.save else []
        words += [f"offload {self.offload_layers} layers"] if self.offload_layers else []
        return ", ".join(words) or "keep all"


# The least that fits, by `threefold dry-run` (139 GiB, weights and states in bf16 without masters).
SETTINGS = {
    "qwen3-30b-a3b": (
        Settings(262144),
        Settings(524288, ("layernorm", "moe")),
        Settings(1048576, ("full",), ("core_attn",)),
        Settings(2**30, ("full",), ("core_attn",), offload_layers=4),
    ),
    "deepseek-v3": (Settings(2**30, ("layernorm", "moe", "mlp", "mla_up_proj")),),
}
CUTS: dict[str, dict[str, int]] = {
    "qwen3-30b-a3b": {"model.num_layers": 4},
    "deepseek-v3": {"model.num_layers": 2, "model.num_dense_layers": 1, "model.num_experts": 16, "job.mtp": 0},
}
PEER = "gradient checkpointing"


def settings_for(shape: str, length: int) -> Settings:
    return next(one for one in SETTINGS[shape] if length <= one.up_to)


def plan_of(shape: str, model: ModelSpec | None, length: int, settings: Settings) -> Plan:
    fields = {
        "model": shape,
        **CUTS[shape],
        "job.seq_len": length,
        "job.micro_batch": 1,
        "job.global_batch": 1,
        "job.aux_loss": 0.0,
        "knobs.optimizer_dtype": "bf16",
        "knobs.expert_fusion": True,
        "knobs.recompute": settings.recompute,
        "knobs.recompute_save": settings.save,
        "knobs.activation_offload_layers": settings.offload_layers,
    }
    parsed = parse(fields, model=model)
    assert parsed.plan, parsed.findings
    return parsed.plan


def measure(make: Callable[[], Step], plan: Plan, device: torch.device, steps: int, warmup: int) -> dict[str, Any]:
    """Whatever goes wrong is the result."""
    free(device)
    try:
        found = timed(make(), plan, device, steps, warmup)
    except torch.OutOfMemoryError:
        found = {"error": "out of memory", "peak_gib": peak_gib(device)}
    except Exception as error:  # one length must not lose the others
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    free(device)
    return found


def tell_layers(device: torch.device) -> None:
    """Print when each layer ends its forward and begins its backward, and the peak so far. It waits for the device."""
    began = time.perf_counter()

    def tell(what: str) -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()
        peak = peak_gib(device)
        print(f"{time.perf_counter() - began:7.1f} s {what}, {peak or 0:.1f} GiB", file=sys.stderr, flush=True)

    def after_forward(module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        if isinstance(module, Block):
            tell("a layer's forward is over")
            outputs[0].register_hook(lambda grad: tell("a layer's backward begins"))

    torch.nn.modules.module.register_module_forward_hook(after_forward)


def show(row: dict[str, Any]) -> str:
    head = f"{row['length']:9,}  {row['side']:12} {row['settings']:34}"
    if "error" in row:
        return f"{head} {row['error']}"
    peak = "-" if row["peak_gib"] is None else f"{row['peak_gib']:.1f}"
    return f"{head} {row['ms'] / 1e3:9.2f} {row['tflops']:8.1f} {peak:>7}"


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """The two numbers that count."""
    done = [row for row in rows if "error" not in row]
    longest = {side: max((row["length"] for row in done if row["side"] == side), default=0) for side in SIDES}
    said = []
    if all(longest.values()):
        mine, theirs = longest[SIDES[0]], longest[SIDES[1]]
        said.append(f"longest: {mine:,} against {theirs:,}: {mine / theirs:.2f}x")
    speed = {row["length"]: row["tflops"] for row in done if row["side"] == SIDES[0]}
    if 16384 in speed:
        said += [f"{n:,} over 16,384: {value / speed[16384]:.3f}" for n, value in speed.items() if n != 16384]
    return said


SIDES = ("threefold", "transformers")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=tuple(CUTS), default="qwen3-30b-a3b")
    parser.add_argument("--lengths", type=int, nargs="+", default=[16384, 32768, 65536, 131072, 196608, 262144])
    parser.add_argument("--peer-lengths", type=int, nargs="*", default=[32768, 49152, 65536])
    parser.add_argument("--recompute", nargs="+", help="modules to recompute, in place of those of each length")
    parser.add_argument("--save", nargs="+", default=(), help="modules inside full recompute whose outputs are saved")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--progress", action="store_true", help="tell of each layer, for steps of minutes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, model = torch.device(args.device), TINY if args.tiny else None
    rows: list[dict[str, Any]] = []
    if args.progress:
        tell_layers(device)
    for side, lengths in zip(SIDES, (args.lengths, args.peer_lengths), strict=True):
        for length in lengths:
            settings = settings_for(args.shape, length) if side == SIDES[0] else Settings(length)
            if args.recompute and side == SIDES[0]:
                settings = Settings(length, tuple(args.recompute), tuple(args.save))
            plan = plan_of(args.shape, model, length, settings)
            make = (lambda p=plan: ours(p, device)) if side == SIDES[0] else (lambda p=plan: peer(p, device, True))
            said = settings.said if side == SIDES[0] else PEER
            # A step of minutes needs no warm-up of its own: kernels were built by the shorter ones.
            steps, warmup = (args.steps, args.warmup) if length < 196608 else (1, 0)
            found = measure(make, plan, device, steps, warmup)
            rows.append({"shape": args.shape, "length": length, "side": side, "settings": said, **found})
            print(show(rows[-1]), file=sys.stderr, flush=True)
            if args.json:  # as far as it got
                facts = {"machine": facts_of(device), "rows": rows, "summary": summary(rows)}
                args.json.write_text(json.dumps(facts, indent=1))
    print(f"\n{facts_of(device)}\n{'tokens':>9}  {'side':12} {'settings':34} {'s/step':>9} {'TFLOP/s':>8} {'GiB':>7}")
    print("\n".join([*map(show, rows), *summary(rows)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
