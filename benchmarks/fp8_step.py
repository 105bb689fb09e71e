"""What FP8 gains in a whole step: our `fp8-blockwise` over our bf16, several microbatches a step, sides by turns.

python benchmarks/fp8_step.py [--cases qwen3-step qwen3-layers deepseek-v3-layers] [--set FIELD=VALUE] [--json FILE]
python benchmarks/fp8_step.py --profile          the kernels of one microbatch of each side, by name
python benchmarks/fp8_step.py --device cpu --cases tiny-step tiny-layers      the same code; its times mean nothing

"step" is forward, backward, clip and AdamW of a model cut to a few layers, with its embedding and output head, all
states in bf16; "train" is the same built as `threefold train` does, which sums gradients in fp32 by default.
"layers" is the forward and backward of its layers alone, from random hidden states to their gradient, without
embedding, head and optimizer. Both quantize the weights once a step, and that is in the time. "deepseek-v3-layers" has
the experts that one rank of EP 32 holds: 8, each of which gets every token, so that 32,768 rows are computed as there.
Both sides are built from the same seed and stay in memory; each turn runs both, in alternating order. How far their
results are apart is said beside: of the first loss, or of the mean square of the gradients of the hidden states.
"""

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from step import LR, TINY, Clock, facts_of, peak_gib, plan_of
from torch import Tensor, nn

from threefold.engine.batch import Batch
from threefold.engine.build import Parts, build, options_of, parts_alone
from threefold.engine.dist.mesh import Mesh
from threefold.engine.layers.cross_entropy import IGNORE
from threefold.engine.layers.positions import Positions
from threefold.engine.models.block import run_layers
from threefold.engine.models.build import build_model
from threefold.engine.optim.adamw import AdamW
from threefold.engine.precision.weight_cache import mark_weights_changed
from threefold.engine.step import train_step
from threefold.plan.plan import Plan
from threefold.spec.model import ModelSpec
from threefold.spec.models import MODELS

PRECISIONS = ("bf16", "fp8-blockwise")
assert MODELS["deepseek-v3"].moe is not None
_EP32_MOE = replace(MODELS["deepseek-v3"].moe, num_experts=8, num_groups=1, top_groups=1)
EP32_SHARE = replace(MODELS["deepseek-v3"], mtp_layers=0, num_dense_layers=0, moe=_EP32_MOE, vocab=1024)
_TINY_128 = replace(TINY, dim=128, moe=replace(TINY.moe, expert_dim=128))


@dataclass(frozen=True)
class Case:
    model: ModelSpec
    layers: int
    sequences: int  # of a microbatch
    seq_len: int
    whole: bool  # a step; else its layers alone
    built: bool = False  # a step as `threefold train` builds it


CASES = {
    "qwen3-step": Case(MODELS["qwen3-30b-a3b"], 8, 4, 4096, whole=True),
    "qwen3-layers": Case(replace(MODELS["qwen3-30b-a3b"], vocab=1024), 4, 4, 4096, whole=False),
    "deepseek-v3-layers": Case(EP32_SHARE, 2, 1, 4096, whole=False),
    "qwen3-train": Case(MODELS["qwen3-30b-a3b"], 4, 4, 4096, whole=True, built=True),
    "qwen3-layers-4k": Case(replace(MODELS["qwen3-30b-a3b"], vocab=1024), 4, 1, 4096, whole=False),
    "tiny-step": Case(_TINY_128, 2, 1, 128, whole=True),
    "tiny-train": Case(_TINY_128, 2, 1, 128, whole=True, built=True),
    "tiny-layers": Case(_TINY_128, 2, 1, 128, whole=False),
}
DEFAULT = ("qwen3-step", "qwen3-layers", "deepseek-v3-layers")
Step = Callable[[int], Tensor | float]  # runs a step of so many microbatches -> loss, or a sum of what came out


def make_plan(case: Case, precision: str, more: dict[str, Any], microbatches: int = 1) -> Plan:
    fields = {"knobs.precision": precision, **(more if precision != "bf16" else {})}
    if case.built:
        fields |= {"job.global_batch": case.sequences * microbatches, "knobs.grad_dtype": "fp32", "target": "threefold"}
    return plan_of(case.model, case.layers, case.sequences, case.seq_len, fields)


def make_step(case: Case, plan: Plan, device: torch.device) -> Step:
    if case.built:
        return run_parts(build(plan, Mesh(plan.layout, device=device), with_data=False), plan, device)
    model = build_model(plan.model, plan.mtp, torch.bfloat16, device, options_of(plan), seed=0)
    return whole_step(model, plan, device) if case.whole else layers_step(model, plan, device)


def whole_step(model: Any, plan: Plan, device: torch.device) -> Step:
    optimizer = AdamW(model.named_parameters(), plan.job.weight_decay, plan.knobs.optimizer_dtype, master=False)
    return run_parts(parts_alone(model, optimizer), plan, device)


def run_parts(parts: Parts, plan: Plan, device: torch.device) -> Step:
    generator = torch.Generator(device).manual_seed(1)
    shape = plan.job.micro_batch, plan.job.seq_len
    tokens_BS = torch.randint(plan.model.vocab, shape, generator=generator, device=device)
    labels_BS = torch.nn.functional.pad(tokens_BS[:, 1:], (0, 1), value=IGNORE)

    def step(num_microbatches: int) -> float:
        return train_step(parts, [Batch(tokens_BS, labels_BS)] * num_microbatches, LR, plan.job).loss

    return step


def layers_step(model: Any, plan: Plan, device: torch.device) -> Step:
    generator = torch.Generator(device).manual_seed(1)
    shape = plan.job.micro_batch, plan.job.seq_len, plan.model.dim
    x_BSD, grad_BSD = (torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(2))
    positions = Positions.from_tokens(x_BSD[..., 0])
    layers: nn.ModuleDict = model.layers

    def step(num_microbatches: int) -> Tensor:
        for parameter in layers.parameters():
            parameter.grad = None
        total = x_BSD.new_zeros((), dtype=torch.float32)
        for _ in range(num_microbatches):
            x = x_BSD.detach().requires_grad_()
            y_BSD, _ = run_layers(layers.values(), x, positions)
            y_BSD.backward(grad_BSD)
            assert x.grad is not None
            total += x.grad.float().square().mean()
        mark_weights_changed()
        return total

    return step


def measure(case: Case, device: torch.device, args: argparse.Namespace, more: dict[str, Any]) -> dict[str, Any]:
    plans = {name: make_plan(case, name, more, args.microbatches) for name in PRECISIONS}
    steps = {name: make_step(case, plan, device) for name, plan in plans.items()}
    each_ms: dict[str, list[float]] = {name: [] for name in PRECISIONS}
    results: dict[str, list[float]] = {name: [] for name in PRECISIONS}
    gc.collect()
    for turn in range(args.warmup + args.repeats):
        for name in PRECISIONS if turn % 2 else reversed(PRECISIONS):
            clock = Clock(device)
            result = steps[name](args.microbatches)
            clock.tick()
            ms = clock.read()[0][0]
            results[name].append(float(result))
            if turn >= args.warmup:
                each_ms[name].append(ms)
    ms = {name: statistics.median(taken) for name, taken in each_ms.items()}
    return {
        "ms": ms,
        "spread_ms": {name: [min(taken), max(taken)] for name, taken in each_ms.items()},
        "ratio": ms["bf16"] / ms[PRECISIONS[1]],
        "difference": results[PRECISIONS[1]][0] / results["bf16"][0] - 1,
        "results": results,
        "peak_gib": peak_gib(device),
    }


def profile(case: Case, device: torch.device, more: dict[str, Any], rows: int = 45) -> dict[str, list[Any]]:
    """The kernels of one microbatch (weights quantized with it): name -> calls and milliseconds."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    found: dict[str, list[Any]] = {}
    for precision in PRECISIONS:
        step = make_step(case, make_plan(case, precision, more), device)
        for _ in range(3):
            step(1)
        torch.cuda.synchronize()
        with record(activities=[ProfilerActivity.CUDA]) as trace:
            step(1)
            torch.cuda.synchronize()
        kernels = sorted(trace.key_averages(), key=lambda row: -row.device_time_total)
        table = [(row.key, row.count, row.device_time_total / 1e3) for row in kernels if row.device_time_total]
        found[precision] = [list(row) for row in table]
        clock = Clock(device)
        for _ in range(5):
            step(1)
        clock.tick()
        wall = clock.read()[0][0] / 5
        busy = sum(ms for *_, ms in table)
        print(f"\n{precision}: kernels {busy:.2f} ms, one microbatch {wall:.2f} ms", flush=True)
        for name, count, ms in table[:rows]:
            print(f"{ms:9.3f} {count:5}  {name[:110]}", flush=True)
        del step
        gc.collect()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(DEFAULT), choices=CASES)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--layers", type=int, help="instead of each case's own number")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="of the plan, for the FP8 side")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    more = {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in args.set)}
    said: dict[str, Any] = {"machine": facts_of(device), "microbatches": args.microbatches, "set": more, "rows": {}}
    for name in args.cases:
        case = CASES[name] if args.layers is None else replace(CASES[name], layers=args.layers)
        row = profile(case, device, more) if args.profile else measure(case, device, args, more)
        said["rows"][name] = {"layers": case.layers, "tokens": case.sequences * case.seq_len, **row}
        if not args.profile:
            bf16, fp8 = row["ms"].values()
            times = f"bf16 {bf16:9.2f} ms   fp8-blockwise {fp8:9.2f} ms   {row['ratio']:.3f}x"
            print(f"{name:20} {times}   results {row['difference']:+.2%}", flush=True)
        if args.json:  # as far as it got
            args.json.write_text(json.dumps(said, indent=1), encoding="utf-8")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    return 0


if __name__ == "__main__":
    sys.exit(main())
