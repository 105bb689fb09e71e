"""Which dense GEMMs pay in FP8: forward, gradient of the input and of the weight, by shape, against bf16.

python benchmarks/dense_fp8.py [--shapes 16384x2048x4096 ...] [--json FILE]       needs a Hopper GPU

A shape is tokens x width in x width out; of layers that share an input the widths out are added up, as their backward
is one GEMM. Beside the GEMMs stands what quantizing takes: the input and the output's gradient in both directions, in
every microbatch, and the weight, once a step. `whole` is one layer, forward and backward, with all of that but the
weight's. Sides take turns; a turn repeats each call without a wait, so that the host's time shows only where it is
longer than the GPU's. `host_ms` is the host's time for `whole` on 128 tokens.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from step import facts_of
from torch import Tensor, nn

from threefold.engine.precision.low_precision_linear import LowPrecisionLinear
from threefold.engine.precision.recipes import RECIPES
from threefold.engine.precision.scaled_mm_backends import BlockwiseBackend

RECIPE = RECIPES["fp8-blockwise"]
SHAPES = (  # Qwen3-30B-A3B with 16,384 and 4,096 tokens: q, k and v; output. DeepSeek-V3 with 4,096: the projections of
    # MLA (both down, q up, kv up, output), gate and up of a shared expert, its down projection, gate of a dense layer.
    *((16384, 2048, 5120), (16384, 4096, 2048), (4096, 2048, 5120), (4096, 4096, 2048)),
    *((4096, 7168, 2112), (4096, 1536, 24576), (4096, 512, 32768), (4096, 16384, 7168)),
    *((4096, 7168, 4096), (4096, 2048, 7168), (4096, 7168, 18432)),
)
CALLS, WARMUP, TURNS = 4, 3, 9


def turns(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median milliseconds of one call of each."""
    marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
    for turn in range(WARMUP + TURNS):
        for name, call in calls.items() if turn % 2 else reversed(calls.items()):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(CALLS):
                call()
            end.record()
            if turn >= WARMUP:
                marks[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: statistics.median(a.elapsed_time(b) for a, b in taken) / CALLS for name, taken in marks.items()}


def both(layer: nn.Module, x_TI: Tensor, grad_TO: Tensor) -> None:
    layer(x_TI).backward(grad_TO)


def measure(tokens: int, width: int, height: int, device: torch.device) -> dict[str, float]:
    sizes = (tokens, width), (height, width), (tokens, height)
    x_TI, weight_OI, grad_TO = (torch.randn(size, device=device, dtype=torch.bfloat16) for size in sizes)
    backend = BlockwiseBackend()
    rows, columns = backend.quantize_both(x_TI, RECIPE.input, RECIPE.input_t)
    grad_rows, grad_columns = backend.quantize_both(grad_TO, RECIPE.grad, RECIPE.grad_t)
    forward, transposed = backend.quantize_weight(weight_OI, RECIPE.weight)
    plain = nn.Linear(width, height, bias=False, device=device, dtype=torch.bfloat16)
    low, x = LowPrecisionLinear(plain, RECIPE), x_TI.clone().requires_grad_()
    return turns(
        {
            "forward, bf16": lambda: x_TI @ weight_OI.T,
            "forward, fp8": lambda: backend.matmul(rows, forward, torch.bfloat16),
            "dgrad, bf16": lambda: grad_TO @ weight_OI,
            "dgrad, fp8": lambda: backend.matmul(grad_rows, transposed, torch.bfloat16),
            "wgrad, bf16": lambda: grad_TO.T @ x_TI,
            "wgrad, fp8": lambda: backend.matmul(grad_columns, columns, torch.bfloat16),
            "input": lambda: backend.quantize_both(x_TI, RECIPE.input, RECIPE.input_t),
            "gradient": lambda: backend.quantize_both(grad_TO, RECIPE.grad, RECIPE.grad_t),
            "weight": lambda: backend.quantize_weight(weight_OI, RECIPE.weight),
            "whole, bf16": partial(both, plain, x, grad_TO),
            "whole, fp8": partial(both, low, x, grad_TO),
        }
    )


def host_ms(make: Callable[[nn.Linear], nn.Module], device: torch.device) -> float:
    layer = make(nn.Linear(512, 512, bias=False, device=device, dtype=torch.bfloat16))
    x = torch.randn(128, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(20):
        both(layer, x, x.detach())
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(50):
        both(layer, x, x.detach())
    torch.cuda.synchronize()
    return 20 * (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["x".join(map(str, shape)) for shape in SHAPES])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda")
    host = {
        "bf16": host_ms(lambda plain: plain, device),
        "fp8": host_ms(lambda p: LowPrecisionLinear(p, RECIPE), device),
    }
    said: dict[str, Any] = {"machine": facts_of(device), "host_ms": host, "rows": {}}
    print(f"host: {host}\n{'bf16 / fp8, ms':20} {'forward':>15} {'dgrad':>15} {'wgrad':>15} {'whole':>15}", flush=True)
    for shape in args.shapes:
        row = measure(*map(int, shape.split("x")), device)
        said["rows"][shape] = row
        pairs = (
            f"{row[part + ', bf16']:.3f} / {row[part + ', fp8']:.3f}" for part in ("forward", "dgrad", "wgrad", "whole")
        )
        quantized = f"input {row['input']:.3f} gradient {row['gradient']:.3f} weight {row['weight']:.3f}"
        print(f"{shape:20} {' '.join(f'{pair:>15}' for pair in pairs)}   {quantized}", flush=True)
        if args.json:  # as far as it got
            args.json.write_text(json.dumps(said, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
