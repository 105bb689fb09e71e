"""Which attention kernel is fastest, by length and head size: the source of `engine/attention/kernel_speeds.py`.

python benchmarks/attention.py [--shapes qwen3 mla ...] [--lengths 4096 32768 131072] [--repeats 3] [--json FILE]

Causal training attention in bf16: TFLOP/s of forward and backward (causal half counted; the backward as 2.5 forwards,
for the product that it makes again), what the backward allocates beside its results, and how far output and gradients
are from fp32 at 512 tokens, over the largest value.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from threefold.engine.attention.flash_attention_4 import flash_attention_4, has_flash_attention_4
from threefold.engine.attention.torch_kernels import SDPA
from threefold.engine.tune.attention_kernels import AttentionHeads
from threefold.units import GIB

SHAPES = {
    "qwen3": AttentionHeads(32, 4, 128, 128),
    "qwen3-next": AttentionHeads(16, 2, 256, 256),
    "qwen3 of 8 heads": AttentionHeads(8, 1, 128, 128),
    "mla": AttentionHeads(128, 128, 192, 128),
    "mla of 16 heads": AttentionHeads(16, 16, 192, 128),
    "d64": AttentionHeads(64, 8, 64, 64),
}
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
TURN_GFLOP = 5000.0  # about 10 ms


def kernels(heads: AttentionHeads) -> Iterator[tuple[str, Attention]]:
    """By name; `padded` has values widened to the keys' dim."""
    for name, kind in SDPA.items():
        yield name, _plain(heads, kind)
        if heads.value_dim < heads.dim:
            yield f"{name} padded", _padded(heads, _plain(heads, kind))
    if torch.cuda.is_available() and has_flash_attention_4(torch.device("cuda", 0)):
        yield "fa4", lambda q, k, v: flash_attention_4(q, k, v, scale=heads.dim**-0.5)


def _plain(heads: AttentionHeads, kind: SDPBackend) -> Attention:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with _only(kind):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads.num != heads.num_kv)

    return call


def _only(kind: SDPBackend) -> AbstractContextManager[Any]:
    return sdpa_kernel([kind]) if torch.cuda.is_available() else nullcontext()


def _padded(heads: AttentionHeads, inner: Attention) -> Attention:
    return lambda q, k, v: inner(q, k, F.pad(v, (0, heads.dim - heads.value_dim)))[..., : heads.value_dim]


def inputs(heads: AttentionHeads, length: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """As a projection leaves them: heads inside of the sequence."""
    draw = torch.Generator(device).manual_seed(length)
    sizes = (heads.num, heads.dim), (heads.num_kv, heads.dim), (heads.num_kv, heads.value_dim)
    made = [torch.randn(1, length, *size, generator=draw, device=device, dtype=torch.float32) for size in sizes]
    return [x.to(dtype).transpose(1, 2).requires_grad_() for x in made]


def error(call: Attention, heads: AttentionHeads, device: torch.device) -> float:
    """The largest of output and gradients, against fp32 with every score in memory."""
    given = inputs(heads, 512, torch.bfloat16, device)
    slope = torch.randn(1, heads.num, 512, heads.value_dim, device=device).bfloat16()
    out = call(*given)
    found = [out.detach(), *torch.autograd.grad(out, given, slope)]
    wide = [x.detach().float().requires_grad_() for x in given]
    with sdpa_kernel(SDPBackend.MATH):
        exact = F.scaled_dot_product_attention(*wide, is_causal=True, scale=heads.dim**-0.5, enable_gqa=True)
    wanted = [exact.detach(), *torch.autograd.grad(exact, wide, slope.float())]
    pairs = zip(found, wanted, strict=True)
    return max(float((a.float() - b).abs().max() / b.abs().max()) for a, b in pairs)


def timed(call: Attention, heads: AttentionHeads, length: int, repeats: int, device: torch.device) -> dict[str, float]:
    """The best of some turns, each of as many calls in a row as hide what the host takes to start one."""
    given = inputs(heads, length, torch.bfloat16, device)
    flops = heads.flops(length) / 1e9
    calls = max(1, round(TURN_GFLOP / flops))
    out = call(*given)
    slope = torch.randn_like(out)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    grads = torch.autograd.grad(out, given, slope, retain_graph=True)
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in grads)
    del grads
    forward = min(_ms(lambda: call(*given), calls) for _ in range(repeats))
    backward = min(
        _ms(lambda: torch.autograd.grad(out, given, slope, retain_graph=True), calls) for _ in range(repeats)
    )
    return {
        "forward_ms": forward,
        "backward_ms": backward,
        "forward_tflops": flops / forward,
        "backward_tflops": 2.5 * flops / backward,
        "both_tflops": 3.5 * flops / (forward + backward),
        "extra_gib": extra / GIB,
    }


def _ms(work: Callable[[], Any], calls: int) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    for _ in range(calls):
        work()
    ended.record()
    torch.cuda.synchronize()
    return began.elapsed_time(ended) / calls


def measure(name: str, length: int, repeats: int, device: torch.device) -> Iterator[dict[str, Any]]:
    heads = SHAPES[name]
    for kind, call in kernels(heads):
        row: dict[str, Any] = {"shape": name, "length": length, "kernel": kind}
        try:
            row["error"] = error(call, heads, device)
            if device.type == "cuda":
                row |= timed(call, heads, length, repeats, device)
        except (RuntimeError, TypeError) as problem:
            row["problem"] = " ".join(str(problem).split())[:160]
        torch.cuda.empty_cache()
        yield row


def show(row: dict[str, Any]) -> str:
    head = f"{row['shape']:16} {row['length']:7} {row['kernel']:13}"
    if "problem" in row:
        return f"{head} {row['problem']}"
    if "forward_ms" not in row:
        return f"{head} error {row['error']:.1e}"
    times = f"{row['forward_tflops']:7.0f} {row['backward_tflops']:7.0f} {row['both_tflops']:7.0f}"
    return f"{head} {times} {row['extra_gib']:8.2f} {row['error']:9.1e}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=tuple(SHAPES), default=list(SHAPES))
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    machine = {"torch": torch.__version__, "cudnn": torch.backends.cudnn.version()}
    if device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(device)
    print(
        f"{machine}\n{'shape':16} {'length':>7} {'kernel':13} {'fwd':>7} {'bwd':>7} {'both':>7} {'GiB more':>8} error"
    )
    rows = []
    for name in args.shapes:
        for length in args.lengths:
            for row in measure(name, length, args.repeats, device):
                rows.append(row)
                print(show(row), flush=True)
                if args.json:  # as far as it got
                    args.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
