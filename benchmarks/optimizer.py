"""How fast the optimizer is: bytes a second of AdamW by kinds of states, launches of the host, Muon; and loss curves.

python benchmarks/optimizer.py [--parts bytes host muon curves] [--json FILE]
python benchmarks/optimizer.py --device cpu --tiny        the same code on small tensors; its times mean nothing

`bytes`: one tensor of 2^29 elements, beside a copy. `host`: many small tensors, in one launch and one by one. `muon`:
orthogonalisation of the experts of a Qwen3-30B-A3B layer and of one matrix, beside `torch.optim.Muon`; and a whole step
of that layer. `curves`: losses of a small model over 300 steps with each kind of states. Sides take turns.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from threefold.engine.build import build
from threefold.engine.data.shard_writer import ShardWriter
from threefold.engine.data_parallel.protocol import sum_of_squares
from threefold.engine.kernels.loss_and_optimizer import many_tensors
from threefold.engine.kernels.loss_and_optimizer.adamw_triton import adamw_step
from threefold.engine.optim.adamw import AdamW
from threefold.engine.optim.muon import Muon, orthogonalize
from threefold.engine.step import to_device, train_step
from threefold.plan.parse import parse

PARTS = ("bytes", "host", "muon", "curves")
# Shapes of the parameters of a Qwen3-30B-A3B layer on a rank that holds 4 of its experts.
LAYER = [(4096, 2048), (512, 2048), (512, 2048), (2048, 4096), (128, 2048), (2048,), (2048,), (128,), (128,)]
LAYER += [(4, 1536, 2048), (4, 768, 2048)]
MATRICES = {"q.weight": (4096, 2048), "k.weight": (512, 2048), "v.weight": (512, 2048), "out.weight": (2048, 4096)}
EXPERTS = {"gate_up": (128, 1536, 2048), "down": (128, 2048, 768)}
REMAINDERS, BF16_MOMENTS = {"knobs.store_param_remainders": True}, {"knobs.optimizer_dtype": "bf16"}
MUON = {"job.optimizer": "muon"}
CURVES: dict[str, dict[str, Any]] = {
    "fp32 masters": {},
    "remainders": REMAINDERS,
    "fp32 masters, bf16 moments": BF16_MOMENTS,
    "remainders, bf16 moments": {**REMAINDERS, **BF16_MOMENTS},
    "no masters": {"knobs.master_weights": False},
    "fp32 masters, another seed": {"job.seed": 2},
    "muon fp32": {**MUON, "knobs.muon_dtype": "fp32"},
    "muon bf16": {**MUON, "knobs.muon_dtype": "bf16"},
    "muon bf16, remainders": {**MUON, **REMAINDERS, "knobs.muon_dtype": "bf16"},
    "muon fp32, another seed": {**MUON, "knobs.muon_dtype": "fp32", "job.seed": 2},
}


def median_ms(calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int = 9) -> dict[str, float]:
    """The median time of each call; the calls take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call, device)[1])
    return {name: statistics.median(each) for name, each in times.items()}


def timed(call: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """Milliseconds until the host has launched, and until the device is done."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    call()
    launched = time.perf_counter()
    wait()
    return 1e3 * (launched - began), 1e3 * (time.perf_counter() - began)


def measure_bytes(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Terabytes a second of each kind of update; the bytes are those that must move."""
    numel = 2**12 if tiny else 2**29
    value, grad = (torch.randn(numel, device=device, dtype=torch.bfloat16) for _ in range(2))
    fp32 = [torch.rand(numel, device=device) for _ in range(3)]
    bf16 = [torch.rand(numel, device=device, dtype=torch.bfloat16) for _ in range(2)]
    remainder, factor = torch.zeros(numel, device=device, dtype=torch.int16), torch.ones((), device=device)
    settings: dict[str, Any] = {"lr": 1e-5, "decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "steps": 3}

    def update(master: Tensor, moments: list[Tensor]) -> Callable[[], None]:
        return lambda: adamw_step(value, grad, master, *moments, factor, **settings)

    calls: dict[tuple[str, int], Callable[[], object]] = {
        ("fp32 masters, fp32 moments", 28): update(fp32[0], fp32[1:]),
        ("remainders, fp32 moments", 26): update(remainder, fp32[1:]),
        ("fp32 masters, bf16 moments", 20): update(fp32[0], bf16),
        ("remainders, bf16 moments", 18): update(remainder, bf16),
        ("no masters, bf16 moments", 14): update(value, bf16),
        ("sum of squares", 2): lambda: sum_of_squares([grad], fp32[0][0]),
        ("copy", 8): lambda: fp32[0].copy_(fp32[1]),
    }
    found = median_ms({name: call for (name, _), call in calls.items()}, device)
    rows = {}
    for name, size in calls:
        rows[name] = {"bytes": size, "ms": found[name], "tb_s": numel * size / found[name] / 1e9}
        print(f"{name:30} {size:3} bytes {found[name]:8.3f} ms {rows[name]['tb_s']:6.2f} TB/s", flush=True)
    return rows


def measure_host(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Milliseconds of the host, and until the device is done, for an update and a norm of many tensors."""
    layers, rows = 1 if tiny else 48, {}
    cases = {
        "10 tensors of 16,384 elements a layer": [(8, 2048)] * 10,
        "a layer of Qwen3-30B-A3B with 4 experts": LAYER,
    }
    for case, shapes in cases.items():
        params = [
            nn.Parameter(torch.zeros(s, device=device, dtype=torch.bfloat16)) for _ in range(layers) for s in shapes
        ]
        for p in params:
            p.grad = torch.ones_like(p)
        grads = [p.grad for p in params if p.grad is not None]
        made, one = AdamW(((f"w{n}", p) for n, p in enumerate(params)), 0.1), torch.ones((), device=device)
        largest = many_tensors.LARGE_NUMEL
        for name, numel in (("in one launch", largest), ("one by one", 0)):
            many_tensors.LARGE_NUMEL = numel
            pairs = [(timed(partial(made.step, 1e-5, one), device), timed(partial(sum_of_squares, grads, one), device))
                     for _ in range(2 if tiny else 8)]  # fmt: skip
            update, norm = (
                [statistics.median(x) for x in zip(*side[1:], strict=True)] for side in zip(*pairs, strict=True)
            )
            rows[f"{case}, {name}"] = {"tensors": len(params), "update_ms": update, "norm_ms": norm}
            texts = (
                f"{kind}: host {ms[0]:6.2f}, all {ms[1]:6.2f} ms" for kind, ms in (("update", update), ("norm", norm))
            )
            print(f"{len(params)} tensors, {case}, {name:13} {'; '.join(texts)}", flush=True)
        many_tensors.LARGE_NUMEL = largest
    return rows


def measure_muon(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Milliseconds and TFLOP/s of orthogonalisation, and the milliseconds of a step of one layer."""
    shapes = {"layers.w": (8, 16), "stack": (2, 8, 16)} if tiny else {**MATRICES, **EXPERTS}
    rows: dict[str, Any] = {}
    for shape in list(shapes.values())[-2:] + list(shapes.values())[:1]:
        x = torch.randn(shape, device=device)
        calls: dict[str, Callable[[], object]] = {
            "fp32": lambda x=x: orthogonalize(x),  # type: ignore[misc]
            "bf16": lambda x=x: orthogonalize(x, dtype=torch.bfloat16),  # type: ignore[misc]
        }
        if len(shape) == 2:
            theirs = nn.Parameter(x.bfloat16())
            theirs.grad = x.bfloat16()
            calls["torch.optim.Muon, whole step"] = torch.optim.Muon([theirs], lr=1e-5).step
        short, long = sorted(shape[-2:])
        flops = x.numel() * 5 * (4 * short + 2 * short**2 / long)
        for name, ms in median_ms(calls, device, rounds=2).items():
            rows[f"{shape} {name}"] = {"ms": ms, "tflops": flops / ms / 1e9}
            print(f"orthogonalize {shape!s:18} {name:30} {ms:8.2f} ms {flops / ms / 1e9:6.0f} TFLOP/s", flush=True)
    params = {name: nn.Parameter(torch.zeros(s, device=device, dtype=torch.bfloat16)) for name, s in shapes.items()}
    for p in params.values():
        p.grad = torch.randn_like(p)
    one = torch.ones((), device=device)
    kinds: dict[str, dict[str, Any]] = {"bf16": {"matmul_dtype": "bf16"}, "fp32": {"matmul_dtype": "fp32"}}
    kinds["bf16, remainders"] = {"matmul_dtype": "bf16", "store_param_remainders": True}
    steps = {name: Muon(params.items(), 0.1, **kind) for name, kind in kinds.items()}
    for name, ms in median_ms({k: lambda m=m: m.step(1e-5, one) for k, m in steps.items()}, device, 2).items():  # type: ignore
        rows[f"step of a layer, {name}"] = {"ms": ms}
        print(f"step of a layer, {name:20} {ms:8.2f} ms", flush=True)
    return rows


def measure_curves(device: torch.device, tiny: bool) -> dict[str, Any]:
    """Losses of a model with two layers that learns to count, in every kind of states."""
    steps, rows = 3 if tiny else 300, {}
    with tempfile.TemporaryDirectory() as folder:
        shard = Path(folder, "shard")
        with ShardWriter(shard, 512, "bytes") as writer:
            for n in range(200):
                writer.add([(7 * n + (1 + n % 4) * k) % 512 for k in range(20 + n % 100)])
        fields = {"model": "tiny-qwen3-moe", "model.num_layers": 2, "target": "threefold", "job.seq_len": 64,
                  "job.global_batch": 8, "job.micro_batch": 8, "job.aux_loss": 0.0, "job.data": str(shard),
                  "cluster.gpus": 1, "cluster.chip": "h200" if device.type == "cuda" else "cpu",
                  "knobs.precision": "bf16"}  # fmt: skip
        for name, changes in CURVES.items():
            plan = parse(fields, changes).plan
            assert plan is not None
            parts = build(plan)
            assert parts.loader is not None
            losses = []
            for step in range(steps):
                batches = [to_device(parts.loader.batch(step, m), device) for m in range(plan.num_microbatches)]
                losses.append(train_step(parts, batches, 1e-3 * min(1.0, (step + 1) / 20), plan.job).loss)
            parts.close()
            rows[name] = losses
            same = next((n for n, (a, b) in enumerate(zip(losses, rows["fp32 masters"], strict=True)) if a != b), steps)
            last = statistics.mean(losses[-20:])
            print(
                f"{name:28} first {losses[0]:.4f}, mean of the last 20 {last:.5f}, {same} steps as fp32 masters",
                flush=True,
            )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    said: dict[str, Any] = {"machine": {"torch": torch.__version__, "device": args.device}}
    if device.type == "cuda":
        said["machine"]["gpu"] = torch.cuda.get_device_name(device)
    for part, measure in zip(PARTS, (measure_bytes, measure_host, measure_muon, measure_curves), strict=True):
        if part in args.parts:
            said[part] = measure(device, args.tiny)
            if args.json:  # as far as it got
                args.json.write_text(json.dumps(said, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
