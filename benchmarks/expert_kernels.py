"""How fast the kinds of expert kernels are on this GPU, each measured by `tune` first, beside compiled grouped_mm; and
attention by cuDNN beside FlashAttention-4 where that is installed. `moe_layer.py --peers` has the layers of others.

python benchmarks/expert_kernels.py [--cases qwen3-16k deepseek-v3-ep32] [--repeats 40] [--out FILE]

Forward and backward in bf16, the sides taking turns at every run, so that all see the same clocks: a GPU at the limit
of its power slows down whoever runs on it. Ratios are times over that of `auto`.

Shapes: B batch, T tokens, K experts of a token, E experts, D model dim, H expert dim, S sequence.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from moe_layer import CASES, Case, facts_of, inputs, shape_of, turns
from moe_torch import gathered_layer, grouped_rows
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from threefold.engine.attention.flash_attention_4 import flash_attention_4, has_flash_attention_4
from threefold.engine.kernels.availability import has_cute_kernels, quack_version
from threefold.engine.kernels.experts.fused_experts import fused_experts, grouped_experts
from threefold.engine.kernels.experts.kernel_choice import choose_kernels
from threefold.engine.tune.expert_kernels import tune_experts

DEVICE = torch.device("cuda")
HEADS, KV_HEADS, HEAD_DIM = 32, 4, 128  # Qwen3-30B-A3B


def sides(case: Case, arguments: list[Tensor], wanted: list[Tensor], slope: Tensor) -> dict[str, Callable[[], object]]:
    ours = fused_experts if case.top_k else grouped_experts
    theirs = torch.compile(gathered_layer if case.top_k else grouped_rows, dynamic=False)
    layers: dict[str, Callable[[], Tensor]] = {"compiled grouped_mm": partial(theirs, *arguments)}
    for kernels in ("torch", "triton", "auto", *(["cute"] if has_cute_kernels(DEVICE) else [])):
        layers[kernels] = partial(ours, *arguments, choice=kernels)
    return {name: partial(both, layer, wanted, slope) for name, layer in layers.items()}


def both(layer: Callable[[], Tensor], wanted: list[Tensor], slope: Tensor) -> object:
    return torch.autograd.grad(layer(), wanted, slope)


def experts(name: str, repeats: int) -> dict[str, Any]:
    case = CASES[name]
    best = tune_experts(shape_of(case), max(case.top_k, 1), DEVICE)
    arguments, wanted, slope = inputs(case, DEVICE)
    found = measured(sides(case, arguments, wanted, slope), case.flops, repeats)
    kinds = {
        kind: str(choose_kernels(shape_of(case), arguments[0], kind))
        for kind in ("triton", "cute", "auto")
        if kind in found
    }
    shown(name, found, "auto")
    return {"auto": str(best), "choices": kinds, "sides": found}


def attention(length: int, repeats: int) -> dict[str, Any]:
    batch = max(16384 // length, 1)
    q, k, v, slope = (
        torch.randn(batch, heads, length, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )

    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    layers: dict[str, Callable[[], Tensor]] = {"cudnn": cudnn}
    if has_flash_attention_4(DEVICE):
        layers["fa4"] = partial(flash_attention_4, q, k, v, scale=HEAD_DIM**-0.5)
    flops = 2.0 * batch * length**2 * HEADS * HEAD_DIM  # two products of half a square
    forward = measured(layers, flops, repeats)
    calls = {name: partial(both, layer, [q, k, v], slope.detach()) for name, layer in layers.items()}
    whole = measured(calls, 3.5 * flops, repeats)
    shown(f"attention {length}", forward, "cudnn")
    shown(f"attention {length} both", whole, "cudnn")
    return {"forward": forward, "both": whole}


def measured(calls: dict[str, Callable[[], object]], flops: float, repeats: int) -> dict[str, dict[str, float]]:
    running = dict(calls)
    for name, call in calls.items():
        try:
            call()
        except Exception as error:
            print(f"{name} does not run: {str(error)[:300]}", flush=True)
            del running[name]
    ms = turns(running, DEVICE, repeats)
    return {name: {"ms": one, "tflops": flops / one / 1e9} for name, one in ms.items()}


def shown(name: str, found: dict[str, dict[str, float]], base: str) -> None:
    for side, one in sorted(found.items(), key=lambda item: item[1]["ms"]):
        ratio = one["ms"] / found[base]["ms"] if base in found else float("nan")
        print(f"{name:24} {side:28} {one['ms']:8.3f} ms {one['tflops']:6.0f} TFLOP/s {ratio:7.3f}x", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=["qwen3-16k", "deepseek-v3-ep32"], choices=list(CASES))
    parser.add_argument("--lengths", nargs="*", type=int, default=[4096, 32768, 131072])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    found: dict[str, Any] = {"machine": {**facts_of(DEVICE), "quack": quack_version()}, "experts": {}, "attention": {}}
    for name in args.cases:
        found["experts"][name] = experts(name, args.repeats)
        torch.cuda.empty_cache()
        _write(args.out, found)
    for length in args.lengths:
        found["attention"][length] = attention(length, max(args.repeats // 4, 2))
        torch.cuda.empty_cache()
        _write(args.out, found)
    return 0


def _write(path: Path | None, found: dict[str, Any]) -> None:
    if path:  # as far as it got
        path.write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
