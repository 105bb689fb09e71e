"""How fast a layer's experts are: ours against torch's grouped product, eager and compiled, and against the layers of
other libraries that are installed (`moe_peers.py`), in one process.

python benchmarks/moe_layer.py [--cases qwen3-16k ...] [--precision bf16 fp8-block fp8-row] [--repeats 40]
    [--tune] [--peers [search]] [--router] [--out FILE]

Forward and backward, from tokens and their experts (or rows already sorted) to the layer's output, with the gradients
of input, router weights and expert weights: sorting is in, the router is not, on all sides. They take turns at every
run, back and forth, so that all see the same clocks: a GPU at the limit of its power is as slow as the last second has
made it, whoever ran then. A ratio is their time over ours in bf16. In FP8 weights are quantized beforehand, as once an
optimizer step is enough; what that takes is said beside. Saved: bytes a token that the forward leaves for the backward,
the layer's input included (in FP8 a copy in one byte is kept in its place), its output not. As dense products: the
layer's six products with one weight for all rows, and nothing before, between or behind them. With `--router` whole
layers are measured, from tokens on (`moe_whole.py`).

Shapes: T tokens, K experts of a token, R rows, D model dim, E experts, H expert dim, X = 2 H.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from moe_peers import Side, peers
from moe_torch import gathered_layer, grouped_layer, grouped_rows, split_rows
from moe_whole import HOST_SIZES, both, count_launches, host_seconds, whole_sides
from torch import Tensor

from threefold.engine.kernels.experts.fused_experts import fused_experts, grouped_experts
from threefold.engine.kernels.experts.kernel_choice import ExpertShape, choose_kernels
from threefold.engine.kernels.fp8.fused_experts import (
    fp8_experts,
    fp8_experts_of_tokens,
    quantize_weights,
    supports_sizes,
)


@dataclass(frozen=True)
class Case:
    num_tokens: int
    top_k: int  # 0: rows already sorted by expert, as they come from other ranks
    num_experts: int
    dim: int
    expert_dim: int

    @property
    def num_rows(self) -> int:
        return self.num_tokens * max(self.top_k, 1)

    @property
    def flops(self) -> float:
        """Three products forward (gate, up, down), each twice more backward."""
        return 18.0 * self.num_rows * self.dim * self.expert_dim


CASES = {
    "qwen3-4k": Case(4096, 8, 128, 2048, 768),
    "qwen3-16k": Case(16384, 8, 128, 2048, 768),
    "qwen3-32k": Case(32768, 8, 128, 2048, 768),
    "deepseek-v3-ep32": Case(32768, 0, 8, 7168, 2048),
    "deepseek-v3-ep32-tokens": Case(4096, 8, 8, 7168, 2048),
    "gpt-oss-shape": Case(16384, 4, 32, 2880, 2880),
    "tiny": Case(64, 2, 4, 64, 128),
}
WARMUP = 20  # turns
RECIPES = {"fp8-block": "blockwise", "fp8-row": "rowwise"}
DEFAULT = [name for name in CASES if name != "tiny"]
Layer = Callable[..., Tensor]


def inputs(case: Case, device: torch.device) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """-> (arguments in order, those that get gradients, gradient of the output)."""
    torch.manual_seed(0)
    kind = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(case.num_tokens, case.dim, **kind)
    gate_up = torch.randn(case.num_experts, 2 * case.expert_dim, case.dim, **kind) * case.dim**-0.5
    down = torch.randn(case.num_experts, case.dim, case.expert_dim, **kind) * case.expert_dim**-0.5
    if case.top_k:
        # Random routers: the loads of experts differ by a few percent, as with a balanced one.
        chosen = torch.rand(case.num_tokens, case.num_experts, device=device).topk(case.top_k, dim=1).indices
        weight = torch.rand(case.num_tokens, case.top_k, device=device)
    else:
        share = torch.full((case.num_experts,), case.num_tokens // case.num_experts, device=device)
        chosen, weight = share, torch.rand(case.num_tokens, device=device)
    wanted = [tensor.requires_grad_() for tensor in (x, weight, gate_up, down)]
    return [x, weight, chosen, gate_up, down], wanted, torch.randn_like(x)


def sides(case: Case, precisions: list[str]) -> dict[str, Layer]:
    found = {} if "bf16" not in precisions else bf16_sides(case)
    names = [name for name in precisions if name in RECIPES and supports_sizes(case.dim, case.expert_dim)]
    return found | {"threefold": fused_experts if case.top_k else grouped_experts} | {n: in_fp8(case, n) for n in names}


def in_fp8(case: Case, name: str) -> Layer:
    recipe, kept = RECIPES[name], []
    call: Any = fp8_experts_of_tokens if case.top_k else fp8_experts

    def layer(x: Tensor, weight: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        if not kept:
            kept.append(quantize_weights(gate_up, down, recipe))
        return call(x, weight, chosen, gate_up, down, kept[0], recipe)

    return layer


def bf16_sides(case: Case) -> dict[str, Layer]:
    torch.compiler.reset()
    theirs = grouped_layer if case.top_k else grouped_rows
    found = {"eager": theirs, "compiled": torch.compile(theirs, dynamic=False)}
    if case.top_k:
        found["compiled, gathered"] = torch.compile(gathered_layer, dynamic=False)
    else:
        found["compiled, split"] = torch.compile(split_rows, dynamic=False)
    return found


def measure(
    case: Case, device: torch.device, repeats: int, precisions: list[str], others: str | None
) -> dict[str, Any]:
    arguments, wanted, slope = inputs(case, device)
    layers = {name: Side(layer, arguments, wanted) for name, layer in sides(case, precisions).items()}
    missing: dict[str, str] = {}
    if others and case.top_k:
        clock = partial(turns, device=device, repeats=max(repeats // 4, 1))
        for name, side in peers(layers["threefold"], slope, clock, others == "search"):
            if isinstance(side, Side):
                layers[name] = side
            else:
                missing[name] = side
    found: dict[str, Any] = {}
    for name, side in layers.items():
        kept = saved(side, case, name not in RECIPES)
        found[name] = {"saved_bytes_per_token": kept}
    forward = turns({name: side.forward for name, side in layers.items()}, device, repeats // 2)
    six = {"dense": dense(case, device)}
    whole = turns({name: partial(side.both, slope) for name, side in layers.items()} | six, device, repeats)
    for name, one in found.items():
        one["forward_ms"], one["ms"] = forward[name], whole[name]
        one["tflops"] = case.flops / one["ms"] / 1e9
    for name in (name for name in RECIPES if name in found):
        work = partial(quantize_weights, *arguments[3:], RECIPES[name])
        found[name]["quantize_weights_ms"] = turns({name: work}, device, repeats)[name]
    ratio = {name: found[name]["ms"] / found["threefold"]["ms"] for name in layers if name != "threefold"}
    return found | {
        "ratio": ratio,
        "missing": missing,
        "dense": {"ms": whole["dense"], "tflops": case.flops / whole["dense"] / 1e9},
    }


def measure_whole(case: Case, device: torch.device, repeats: int) -> Iterator[dict[str, Any]]:
    """Whole layers: first their times where they take turns, then those alone and what the host does for them."""
    layers = whole_sides(case, device)
    slope = torch.randn_like(layers["threefold"].arguments[0])
    forward = turns({name: side.forward for name, side in layers.items()}, device, repeats // 2)
    whole = turns({name: partial(both, side, slope) for name, side in layers.items()}, device, repeats)
    found: dict[str, Any] = {
        name: {"forward_ms": forward[name], "ms": whole[name], "tflops": case.flops / whole[name] / 1e9}
        for name in layers
    }
    found["ratio"] = {name: whole[name] / whole["threefold"] for name in layers if name != "threefold"}
    yield found
    few = whole_sides(replace(case, **HOST_SIZES), device, compiled=False)
    few_slope = torch.randn_like(few["threefold"].arguments[0])
    for name, side in layers.items():
        # While sides take turns, the host runs ahead in one that keeps the GPU busy, and the next one need not wait.
        found[name]["alone_ms"] = turns({name: partial(both, side, slope)}, device, repeats)[name]
        if device.type == "cuda":
            found[name]["launches"] = count_launches(side, slope)
        if device.type == "cuda" and name in few:
            calls = {"host_forward_ms": few[name].forward, "host_ms": partial(both, few[name], few_slope)}
            found[name] |= {key: 1e3 * host_seconds(call) for key, call in calls.items()}
    yield found


def print_whole(name: str, row: dict[str, Any]) -> None:
    for side in (side for side in row if side != "ratio"):
        one, ratio = row[side], row["ratio"].get(side)
        said = f"{name:20} {side:20} {one['forward_ms']:8.3f} {one['ms']:8.3f} {one['tflops']:8.0f} {'':14}"
        said += f" {ratio:12.3f}x" if ratio else " " * 14
        said += f"  alone {one['alone_ms']:.3f} ms" if "alone_ms" in one else ""
        if "launches" in one:
            launches = one["launches"]
            said += f", launches {launches['forward']} + {launches['both'] - launches['forward']}"
        if "host_ms" in one:
            said += f", host {one['host_forward_ms']:.3f} / {one['host_ms']:.3f} ms"
        print(said, flush=True)


def saved(side: Side, case: Case, keeps_input: bool) -> float | None:
    for _ in range(2):  # what is made once, compiled code among it, must not count
        side.forward()
    x = side.arguments[0]
    if x.device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    y = side.forward()
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    return float(kept + (x.nbytes if keeps_input else 0)) / case.num_tokens


def dense(case: Case, device: torch.device) -> Callable[[], object]:
    num_rows, dim, half = case.num_rows, case.dim, case.expert_dim
    sizes = (num_rows, dim), (2 * half, dim), (dim, half), (num_rows, 2 * half), (num_rows, half)
    x_RD, gate_up_XD, down_DH, gate_up_RX, act_RH = (
        torch.randn(size, device=device, dtype=torch.bfloat16) for size in sizes
    )

    def six() -> None:
        for left, right in (
            (x_RD, gate_up_XD.t()),
            (act_RH, down_DH.t()),
            (x_RD, down_DH),
            (gate_up_RX, gate_up_XD),
            (gate_up_RX.t(), x_RD),
            (x_RD.t(), act_RH),
        ):
            left @ right

    return six


def turns(calls: dict[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, float]:
    """Median milliseconds of each; nothing but the order of things where there is no CUDA device."""
    if device.type != "cuda":
        return {name: float("nan") for name, call in calls.items() if call() is not calls}
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    for turn in range(WARMUP + repeats):
        order = list(calls.items())
        for name, call in order if turn % 2 else reversed(order):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            call()
            end.record()
            if turn >= WARMUP:
                marks[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in taken) for name, taken in marks.items()}


def facts_of(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "device": str(device)}
    if device.type == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    if "triton" in sys.modules:
        facts["triton"] = sys.modules["triton"].__version__
    for name in ("quack-kernels", "nvidia-cutlass-dsl", "sonic-moe", "torchtitan"):
        with suppress(PackageNotFoundError):
            facts[name] = version(name)
    return facts


def shape_of(case: Case) -> ExpertShape:
    return ExpertShape(case.num_rows, case.num_experts, case.dim, case.expert_dim, gathered=case.top_k > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=DEFAULT, choices=list(CASES))
    parser.add_argument("--precision", nargs="+", default=["bf16"], choices=("bf16", *RECIPES))
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--tune", action="store_true", help="measure the kernels of each shape first, and keep the best"
    )
    parser.add_argument(
        "--peers",
        nargs="?",
        const="some",
        choices=("some", "search"),
        help="beside the layers of other libraries that are installed; search: SonicMoE by its own search, too",
    )
    parser.add_argument("--router", action="store_true", help="whole layers, with their routers")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    rows: dict[str, Any] = {}
    print(f"{'case':20} {'side':20} {'fwd ms':>8} {'ms':>8} {'TFLOP/s':>8} {'saved B/token':>14} {'over ours':>13}")
    for name in args.cases:
        case = CASES[name]
        if args.tune:
            from threefold.engine.tune.expert_kernels import tune_experts

            tune_experts(shape_of(case), max(case.top_k, 1), device)
        if args.router:
            for found in measure_whole(case, device, args.repeats):  # the second time with more about each side
                rows[name] = {"case": asdict(case), **found}
                print_whole(name, found)
                save(args.out, device, rows)
            continue
        row = measure(case, device, args.repeats, args.precision, args.peers)
        choice = choose_kernels(shape_of(case), torch.empty(0, dtype=torch.bfloat16, device=device))
        rows[name] = {"case": asdict(case), "choice": asdict(choice) if choice else None, **row}
        for side in (side for side in row if side not in ("ratio", "missing", "dense")):
            one, ratio = row[side], row["ratio"].get(side)
            kept = "-" if one["saved_bytes_per_token"] is None else f"{one['saved_bytes_per_token']:,.0f}"
            said = f"{name:20} {side:20} {one['forward_ms']:8.3f} {one['ms']:8.3f} {one['tflops']:8.0f} {kept:>14}"
            said += f" {ratio:12.3f}x" if ratio else ""
            weights = one.get("quantize_weights_ms")
            print(said + (f"  (weights {weights:.3f} ms)" if weights else ""), flush=True)
        for side, reason in row["missing"].items():
            print(f"{name:20} {side:20} not measured: {reason}", flush=True)
        ms, tflops = row["dense"]["ms"], row["dense"]["tflops"]
        print(f"{name:20} {'as dense products':20} {'':8} {ms:8.3f} {tflops:8.0f}", flush=True)
        gc.collect()
        save(args.out, device, rows)
    return 0


def save(path: Path | None, device: torch.device, rows: dict[str, Any]) -> None:
    """Write what was measured so far."""
    if path is not None:
        path.write_text(json.dumps({"machine": facts_of(device), "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
