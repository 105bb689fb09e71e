"""The output head and its loss, forward and backward: in bf16, in FP8, and the plain GEMMs of the same shapes beside.

    python benchmarks/output_head.py [--model qwen3-30b-a3b] [--tokens 4096 16384] [--json FILE]

The sides take turns in one process. "loss" is `cross_entropy_sum` with gradients of its input and of the weight, which
the FP8 side has quantized beforehand, as in all microbatches of a step but the first; the first is timed too. "gemms"
are the three GEMMs alone (logits, input gradient, weight gradient), each for all tokens at once: the limit of either
format under the same clock. Losses and gradients of both sides are compared, and `--profile` lists the kernels.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from step import facts_of
from torch import Tensor

from threefold.engine.layers.cross_entropy import cross_entropy_sum
from threefold.engine.layers.head_gemms import HeadPrecision
from threefold.engine.model_options import Options
from threefold.engine.models.head import head_precision
from threefold.engine.precision.recipes import RECIPES
from threefold.engine.precision.scaled_mm_backends import BlockwiseBackend, RowwiseBackend
from threefold.engine.precision.weight_cache import WeightCache
from threefold.spec.models import MODELS

Call = Callable[[], Any]
FIRST = "fp8, weight quantized too"


def time_ms(call: Call, calls: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(calls):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / calls


def by_turns(sides: dict[str, Call], rounds: int, calls: int) -> dict[str, float]:
    """The median milliseconds of each side, after two turns that do not count."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(rounds + 2):
        for name, call in sides.items():
            ms = time_ms(call, calls)
            if turn > 1:
                taken[name].append(ms)
    return {name: statistics.median(each) for name, each in taken.items()}


class Head:
    """The head of a model, with so many tokens."""

    def __init__(self, dim: int, vocab: int, tokens: int) -> None:
        torch.manual_seed(0)
        self.flops = 6 * dim * vocab * tokens
        self.x_TD = torch.randn(tokens, dim, device="cuda").bfloat16().requires_grad_()
        self.weight_VD = (0.02 * torch.randn(vocab, dim, device="cuda")).bfloat16().requires_grad_()
        self.labels_T = torch.randint(vocab, (tokens,), device="cuda")
        precision = head_precision(Options(recipe=RECIPES["fp8-blockwise"], fp8_output=True))
        assert precision is not None
        self.precision: HeadPrecision = precision
        self.uncached = replace(precision, cache=WeightCache(enabled=False))

    def loss(self, precision: HeadPrecision | None) -> tuple[Tensor, Tensor, Tensor]:
        loss = cross_entropy_sum(self.x_TD, self.weight_VD, self.labels_T, precision=precision) / len(self.x_TD)
        x_grad, weight_grad = torch.autograd.grad(loss, (self.x_TD, self.weight_VD))
        return loss, x_grad, weight_grad

    def gemms(self) -> dict[str, Call]:
        """The plain GEMMs of both formats, on numbers like those of the loss."""
        x_TD, weight_VD, recipe = self.x_TD.detach(), self.weight_VD.detach(), self.precision.recipe
        grad_TV = (x_TD @ weight_VD.T).softmax(dim=1)
        grad_TV[torch.arange(len(x_TD)), self.labels_T] -= 1
        blocks, rows = BlockwiseBackend(), RowwiseBackend()
        by_rows = RECIPES["fp8-rowwise"]
        x_8, weight_8 = rows.quantize_rows(x_TD, by_rows.input), rows.quantize_rows(weight_VD, by_rows.weight)
        weight_t = blocks.quantize_transposed(weight_VD, replace(recipe.weight, scale="power"))
        assert recipe.grad_t is not None
        assert recipe.input_t is not None
        grad_8, grad_t = blocks.quantize_both(grad_TV, recipe.grad, recipe.grad_t)
        x_t = blocks.quantize_transposed(x_TD, recipe.input_t)

        def logits(fast: bool) -> Tensor:
            scales = x_8.scales, weight_8.scales.T
            return torch._scaled_mm(
                x_8.values, weight_8.values.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast
            )

        return {
            "bf16 logits": lambda: x_TD @ weight_VD.T,
            "bf16 input gradient": lambda: grad_TV @ weight_VD,
            "bf16 weight gradient": lambda: grad_TV.T @ x_TD,
            "fp8 logits": lambda: logits(fast=True),
            "fp8 logits, exact sums": lambda: logits(fast=False),
            "fp8 input gradient": lambda: blocks.matmul(grad_8, weight_t, torch.bfloat16),
            "fp8 weight gradient": lambda: blocks.matmul(grad_t, x_t, torch.bfloat16),
        }


def kernels(call: Call) -> dict[str, list[float]]:
    """The kernels of one call: name -> calls and milliseconds, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    rows = sorted(trace.key_averages(), key=lambda row: -row.self_device_time_total)[:10]
    return {row.key[:80]: [row.count, round(row.self_device_time_total / 1e3, 3)] for row in rows}


def peak_gib(call: Call) -> float:
    """What a call allocates above what was there."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def measure(head: Head, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The results, more of them each time."""
    sides: dict[str, Call] = {
        "bf16": lambda: head.loss(None),
        "fp8": lambda: head.loss(head.precision),
        FIRST: lambda: head.loss(head.uncached),
    }
    row: dict[str, Any] = {"ms": by_turns(sides, args.rounds, 2)}
    for name, taken in row["ms"].items():
        say(head, name, taken, head.flops)
    yield row
    row["gemms_ms"] = by_turns(head.gemms(), args.rounds, 2)
    for name, taken in row["gemms_ms"].items():
        say(head, f"GEMM, {name}", taken, head.flops / 3)
    yield row
    row["peak_gib"] = {name: peak_gib(call) for name, call in sides.items()}
    (wide, *wide_grads), (low, *low_grads) = sides["bf16"](), sides["fp8"]()
    row["loss_difference"] = float(low.detach() / wide.detach()) - 1
    row["gradient_errors"] = [relative_error(*pair) for pair in zip(low_grads, wide_grads, strict=True)]
    print({name: row[name] for name in ("peak_gib", "loss_difference", "gradient_errors")}, flush=True)
    del wide_grads, low_grads
    yield row
    for side in sides if args.profile else ():
        row.setdefault("kernels", {})[side] = kernels(sides[side])
        for name, (count, taken) in row["kernels"][side].items():
            print(f"    {side:5} {taken:8.3f} ms x{count:<3} {name}", flush=True)
        yield row


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def say(head: Head, name: str, ms: float, flops: float) -> None:
    print(f"{len(head.x_TD):6} tokens, {name:28} {ms:8.3f} ms {flops / ms / 1e9:6.0f} TFLOP/s", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-30b-a3b", choices=MODELS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--profile", action="store_true", help="list the kernels of each side")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    spec = MODELS[args.model]
    said: dict[str, Any] = {"machine": facts_of(torch.device("cuda")), "model": args.model, "rows": {}}
    for tokens in args.tokens:
        for row in measure(Head(spec.dim, spec.vocab, tokens), args):
            said["rows"][str(tokens)] = row
            if args.json:  # as far as it got
                args.json.write_text(json.dumps(said, indent=1), encoding="utf-8")
        torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
