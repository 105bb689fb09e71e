"""What stands around the experts, as plain torch and as kernels of ours: time of the device, and bytes a second.

python benchmarks/around.py [--tokens 16384] [--repeats 10] [--json FILE]        needs a CUDA device

Qwen3-30B-A3B's sizes in bf16. Each piece is recorded in a CUDA graph and replayed: the host's time is not in it.
Bytes are those that must move: every input and result once, in the backward the gradients too, not what a form of it
moves in between. Products are given no rate.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from threefold.engine.dispatch.rows import sort_by_expert
from threefold.engine.kernels.availability import without_fused_kernels
from threefold.engine.layers import rope
from threefold.engine.layers.input_linears import apply_linears
from threefold.engine.layers.mlp import gated_silu
from threefold.engine.layers.norm import RMSNorm
from threefold.engine.moe import balance
from threefold.engine.moe.router import Router
from threefold.spec.model import MoeSpec

DIM, HEADS, KV_HEADS, HEAD_DIM, EXPERTS, TOP_K, DENSE_DIM, SEQ_LEN = 2048, 32, 4, 128, 128, 8, 6144, 4096
DEVICE, DTYPE, BYTES = torch.device("cuda"), torch.bfloat16, 2


@dataclass
class Piece:
    name: str
    work: Callable[..., Any]
    given: list[Tensor]  # what gets gradients
    read_values: int = 0  # and results that are written, of the forward; 0: no rate
    grad_values: int = 0  # of the backward


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE).requires_grad_()


def pieces(tokens: int) -> Iterator[Piece]:
    batch, values = tokens // SEQ_LEN, tokens * DIM
    x, y, norm = leaf(batch, SEQ_LEN, DIM), leaf(batch, SEQ_LEN, DIM), RMSNorm(DIM).to(DEVICE, DTYPE)
    yield Piece("norm", lambda x, w: norm(x), [x, norm.weight], 2 * values, 3 * values)
    through = Piece("norm, residual goes on", lambda x, w: norm(x, return_residual=True), [x, norm.weight])
    through.read_values, through.grad_values = 2 * values, 4 * values
    yield through
    yield Piece(
        "residual + norm", lambda *g: norm(*g[:2], return_residual=True), [x, y, norm.weight], 4 * values, 4 * values
    )
    table = rope.rope_tables(torch.arange(SEQ_LEN, device=DEVICE).expand(batch, -1), HEAD_DIM, 1e6, None)
    for name, heads in (("queries", HEADS), ("keys", KV_HEADS)):
        q, head_norm = leaf(batch, SEQ_LEN, heads, HEAD_DIM), RMSNorm(HEAD_DIM).to(DEVICE, DTYPE)
        place = lambda q, w, norm=head_norm: rope.norm_and_rotate_heads(q, norm, table)  # noqa: E731
        yield Piece(f"norm and rotary, {name}", place, [q, head_norm.weight], 2 * q.numel(), 3 * q.numel())
    q = leaf(batch, SEQ_LEN, HEADS, HEAD_DIM)
    yield Piece(
        "rotary, queries",
        lambda q: rope.norm_and_rotate_heads(q, nn.Identity(), table),
        [q],
        2 * q.numel(),
        2 * q.numel(),
    )
    gate, up = leaf(tokens, DENSE_DIM), leaf(tokens, DENSE_DIM)
    yield Piece("silu(gate) * up", gated_silu, [gate, up], 3 * gate.numel(), 5 * gate.numel())
    widths = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
    linears = [nn.Linear(DIM, width, bias=False).to(DEVICE, DTYPE) for width in widths]
    yield Piece(
        "q, k, v products", lambda x, *w: apply_linears(x, linears), [x, *(linear.weight for linear in linears)]
    )
    yield from experts(leaf(tokens, DIM))


def experts(x_TD: Tensor) -> Iterator[Piece]:
    router = Router(MoeSpec(EXPERTS, TOP_K, 768), DIM).to(DEVICE, DTYPE)
    nn.init.normal_(router.weight, std=0.02)

    def route(*wanted: str) -> Callable[..., Any]:
        def work(x_TD: Tensor, weight: Tensor) -> Any:
            routing = router(x_TD, wanted, 4)
            measured = balance.compute_router_stats(routing, 4, wanted, torch.zeros((), device=DEVICE))
            return routing.weight_TK, *measured.losses.values()

        return work

    yield Piece("router, loads, entropy", route(), [x_TD, router.weight])
    yield Piece("the same, aux and z loss", route("aux", "z"), [x_TD, router.weight])
    rows, _ = sort_by_expert(router(x_TD).expert_TK, EXPERTS)
    values = x_TD.numel() * (1 + TOP_K)
    yield Piece("tokens to rows", rows.permute_tokens, [x_TD], values, values)
    yield Piece("rows summed by token", rows.unpermute_sum, [leaf(len(x_TD) * TOP_K, DIM)], values, values)


def device_us(work: Callable[[], object], repeats: int) -> float:
    """`work` runs on the stream that it is recorded on: a backward runs where its forward ran."""
    for _ in range(3):
        work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        for _ in range(repeats):
            work()
    times = []
    for _ in range(5):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        graph.replay()
        marks[1].record()
        torch.cuda.synchronize()
        times.append(1e3 * marks[0].elapsed_time(marks[1]) / repeats)
    return statistics.median(times)


def measure(piece: Piece, repeats: int) -> dict[str, Any]:
    row: dict[str, Any] = {"piece": piece.name}
    for kind, mode in (("torch", without_fused_kernels), ("ours", nullcontext)):
        with mode():
            row[f"{kind} forward us"] = device_us(lambda: piece.work(*piece.given), repeats)
            made = piece.work(*piece.given)
            outs = [out for out in (made if isinstance(made, tuple | list) else [made]) if out.requires_grad]
            slopes = [torch.ones_like(out) for out in outs]
            back = lambda o=outs, s=slopes: torch.autograd.grad(o, piece.given, s, retain_graph=True)  # noqa: E731
            row[f"{kind} backward us"] = device_us(back, repeats)
    for way, values in (("forward", piece.read_values), ("backward", piece.grad_values)):
        row[f"{way} TB/s"] = values * BYTES / row[f"ours {way} us"] / 1e6 if values else None
    return row


def show(row: dict[str, Any]) -> str:
    said = [f"{row['piece']:26}"]
    for way in ("forward", "backward"):
        rate = row[f"{way} TB/s"]
        said.append(f"{row[f'torch {way} us']:8.1f} {row[f'ours {way} us']:8.1f} {f'{rate:.2f}' if rate else '-':>6}")
    return "  ".join(said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{args.tokens} tokens, microseconds of the device\n{'':26}{'forward':>16}{'backward':>28}")
    print(f"{'':26}  {'torch':>8} {'ours':>8} {'TB/s':>6}  {'torch':>8} {'ours':>8} {'TB/s':>6}")
    rows = []
    with torch.cuda.stream(torch.cuda.Stream()):
        for piece in pieces(args.tokens):
            rows.append(measure(piece, args.repeats))
            print(show(rows[-1]), flush=True)
    if args.json:
        facts = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "tokens": args.tokens}
        args.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
