"""How fast a layer's experts are: ours against torch's grouped product, eager and compiled, in one process.

python benchmarks/moe_layer.py [--cases qwen3-16k ...] [--precision bf16 fp8-block fp8-row] [--rounds 3] [--repeats 10]
    [--tune] [--out FILE]

Forward and backward, from tokens and their experts (or rows already sorted) to the layer's output, with the
gradients of input, router weights and expert weights. The sides take turns, so that all see the same clocks; a ratio is
their time over ours in bf16. In FP8 weights are quantised beforehand, as once an optimizer step is enough; what that
takes is said beside. Saved: bytes a token that the forward leaves behind for the backward, the layer's input included
(in FP8 a copy in one byte is kept in its place), its output not.

Shapes: T tokens, K experts of a token, R rows, D model dim, E experts, H expert dim, X = 2 H.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from threefold.engine.kernels.choose import Shape, choose
from threefold.engine.kernels.experts import fused_experts, grouped_experts
from threefold.engine.kernels.fp8.experts import fits, fp8_experts, fp8_experts_of_tokens, quantize_weights


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
RECIPES = {"fp8-block": "blockwise", "fp8-row": "rowwise"}
SIDES = ("eager", "compiled", "compiled, gathered", "threefold", *RECIPES)
DEFAULT = [name for name in CASES if name != "tiny"]
Layer = Callable[..., Tensor]


def grouped_layer(x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As it is commonly written."""
    token_R, rows = prepared(x_TD, weight_TK, expert_TK, len(down))
    return torch.zeros_like(x_TD).index_add(0, token_R[0], grouped_rows(*rows, gate_up, down))


def gathered_layer(x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Of several ways to write it, the one that compiles to the fastest code."""
    (_, order_R), rows = prepared(x_TD, weight_TK, expert_TK, len(down))
    place_R = torch.arange(len(order_R), device=order_R.device)
    row_TK = torch.empty_like(order_R).scatter_(0, order_R, place_R).view_as(expert_TK)
    return grouped_rows(*rows, gate_up, down)[row_TK].sum(dim=1)


def prepared(
    x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, num_experts: int
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """-> ((token of each row, slot of each row), arguments of `grouped_rows`)."""
    flat = expert_TK.flatten()
    order_R = flat.argsort(stable=True)
    count_E = torch.zeros(num_experts, dtype=torch.long, device=flat.device).scatter_add_(
        0, flat, torch.ones_like(flat)
    )
    token_R = order_R // expert_TK.shape[1]
    return (token_R, order_R), (x_TD[token_R], weight_TK.flatten()[order_R], count_E)


def grouped_rows(x_RD: Tensor, weight_R: Tensor, count_E: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    ends_E = count_E.cumsum(0).to(torch.int32)
    gate_RH, up_RH = F.grouped_mm(x_RD, gate_up.mT, offs=ends_E).chunk(2, dim=-1)
    y_RD = F.grouped_mm(F.silu(gate_RH) * up_RH, down.mT, offs=ends_E)
    return (y_RD * weight_R[:, None]).to(x_RD.dtype)


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
    names = [name for name in precisions if name in RECIPES and fits(case.dim, case.expert_dim)]
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
    return found


def measure(case: Case, device: torch.device, rounds: int, repeats: int, precisions: list[str]) -> dict[str, Any]:
    arguments, wanted, slope = inputs(case, device)
    found: dict[str, Any] = {}
    layers = sides(case, precisions)

    def both(layer: Layer) -> None:
        torch.autograd.grad(layer(*arguments), wanted, slope)

    for name, layer in layers.items():
        kept = saved(layer, arguments, case, name not in RECIPES)
        found[name] = {"saved_bytes_per_token": kept, "forward": [], "both": []}
    for _ in range(rounds):
        for name, layer in layers.items():
            found[name]["forward"] += times(lambda layer=layer: layer(*arguments), device, repeats)
            found[name]["both"] += times(lambda layer=layer: both(layer), device, repeats)
    for one in found.values():
        one["forward_ms"], one["ms"] = (statistics.median(one.pop(part)) for part in ("forward", "both"))
        one["tflops"] = case.flops / one["ms"] / 1e9
    for name in (name for name in RECIPES if name in found):
        work = partial(quantize_weights, *arguments[3:], RECIPES[name])
        found[name]["quantize_weights_ms"] = statistics.median(times(work, device, repeats))
    found["ratio"] = {name: found[name]["ms"] / found["threefold"]["ms"] for name in layers if name != "threefold"}
    return found


def saved(layer: Layer, arguments: list[Tensor], case: Case, keeps_input: bool) -> float | None:
    for _ in range(2):  # what is made once, compiled code among it, must not count
        layer(*arguments)
    if arguments[0].device.type != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    y = layer(*arguments)
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    return (kept + (arguments[0].nbytes if keeps_input else 0)) / case.num_tokens


def times(work: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Milliseconds of each; nothing but the order of things where there is no CUDA device."""
    if device.type != "cuda":
        work()
        return [float("nan")]
    for _ in range(3):
        work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def facts_of(device: torch.device) -> dict[str, Any]:
    facts: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__, "device": str(device)}
    if device.type == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    if "triton" in sys.modules:
        facts["triton"] = sys.modules["triton"].__version__
    return facts


def shape_of(case: Case) -> Shape:
    return Shape(case.num_rows, case.num_experts, case.dim, case.expert_dim, gathered=case.top_k > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=DEFAULT, choices=list(CASES))
    parser.add_argument("--precision", nargs="+", default=["bf16"], choices=("bf16", *RECIPES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--tune", action="store_true", help="measure the kernels of each shape first, and keep the best"
    )
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    rows: dict[str, Any] = {}
    print(f"{'case':20} {'side':18} {'fwd ms':>8} {'ms':>8} {'TFLOP/s':>8} {'saved B/token':>14} {'over ours':>13}")
    for name in args.cases:
        case = CASES[name]
        if args.tune:
            from threefold.engine.kernels.tune import tune

            tune(shape_of(case), max(case.top_k, 1), device)
        row = measure(case, device, args.rounds, args.repeats, args.precision)
        choice = choose(shape_of(case), torch.empty(0, dtype=torch.bfloat16, device=device))
        rows[name] = {"case": asdict(case), "choice": asdict(choice) if choice else None, **row}
        for side in (side for side in SIDES if side in row):
            one, ratio = row[side], row["ratio"].get(side)
            kept = "-" if one["saved_bytes_per_token"] is None else f"{one['saved_bytes_per_token']:,.0f}"
            said = f"{name:20} {side:18} {one['forward_ms']:8.3f} {one['ms']:8.3f} {one['tflops']:8.0f} {kept:>14}"
            said += f" {ratio:12.3f}x" if ratio else ""
            weights = one.get("quantize_weights_ms")
            print(said + (f"  (weights {weights:.3f} ms)" if weights else ""), flush=True)
        gc.collect()
        if args.out:  # as far as it got
            args.out.write_text(json.dumps({"machine": facts_of(device), "rows": rows}, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
