"""What recompute and offload give and cost: bytes that a forward leaves for its backward, and the time of both.

python benchmarks/recompute.py [--shapes qwen3-30b-a3b deepseek-v3 qwen3-next] [--repeats 5] [--fusion] [--json FILE]
python benchmarks/recompute.py --device cpu        small shapes; their times mean nothing

Every row is the same model on the same tokens, on one device, without an optimizer: kept is what lives behind the
forward and not before it, saved the difference to keeping everything, time forward and backward together. Gradients are
compared with those of the first row; "again" is that row once more, for what the device itself does not repeat.
The last table is a whole optimizer step with states on the host.
"""

import argparse
import gc
import json
import platform
import statistics
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder
from threefold.engine.optim.adamw import AdamW
from threefold.plan.parse import parse
from threefold.spec.model import DeltaSpec, MlaSpec, ModelSpec
from threefold.units import GIB


@dataclass(frozen=True)
class Shape:
    """A published model, cut to what one device holds."""

    model: str
    layers: int
    experts: int
    seq_len: int
    micro_batch: int
    dense_layers: int | None = None

    @property
    def spec(self) -> ModelSpec:
        fields = {"model": self.model, "model.num_layers": self.layers, "model.num_experts": self.experts}
        if self.dense_layers is not None:
            fields["model.num_dense_layers"] = self.dense_layers
        parsed = parse(fields)
        assert parsed.plan, parsed.findings
        return parsed.plan.model


SHAPES = {
    "cuda": {
        "qwen3-30b-a3b": Shape("qwen3-30b-a3b", 4, 128, 4096, 4),
        # Experts of one of eight ranks; tokens of all top-8 stay with them.
        "deepseek-v3": Shape("deepseek-v3", 3, 32, 4096, 1, dense_layers=1),
        "qwen3-next": Shape("qwen3-next-80b-a3b", 4, 64, 4096, 1),
    },
    "cpu": {
        "qwen3-30b-a3b": Shape("tiny-qwen3-moe", 2, 8, 64, 2),
        "deepseek-v3": Shape("tiny-deepseek-v3", 3, 8, 64, 2, dense_layers=1),
    },
}
OFFLOAD = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act")


def rows_of(spec: ModelSpec) -> Iterator[tuple[str, dict[str, Any]]]:
    has = {
        "layernorm": True,
        "core_attn": True,
        "mla_up_proj": isinstance(spec.attention, MlaSpec),
        "gdn_norm_out": isinstance(spec.delta, DeltaSpec),
        "moe_act": spec.is_moe,
        "shared_experts": bool(spec.moe and spec.moe.shared_width),
        "mlp": any(layer.ffn == "dense" for layer in spec.layers),
    }
    names = tuple(name for name, there in has.items() if there)
    yield "nothing", {}
    yield "again", {}
    yield from ((name, {"recompute": (name,)}) for name in (*names, "moe"))
    cheap = tuple(name for name in names if name != "core_attn")
    yield "all but core_attn, moe", {"recompute": cheap}
    yield "all but core_attn", {"recompute": (*cheap, "moe")}
    yield "full", {"recompute": ("full",)}
    yield from ((f"offload {name}", {"activation_offload": (name,)}) for name in OFFLOAD)
    yield "offload all", {"activation_offload": OFFLOAD}
    yield "offload 1 layer", {"activation_offload_layers": 1}


class Living(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes on the CPU: tensors made inside that still live. Host copies are bytes, and not counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.dtype != torch.uint8 and x.untyped_storage()._cdata not in given:
                self.seen[x.untyped_storage()._cdata] = weakref.ref(x.untyped_storage()), x.untyped_storage().nbytes()
        return out

    def num_bytes(self) -> int:
        return sum(size for storage, size in self.seen.values() if storage() is not None)


class Bench:
    def __init__(self, shape: Shape, device: torch.device, repeats: int, fusion: bool) -> None:
        self.shape, self.spec, self.device, self.repeats, self.fusion = shape, shape.spec, device, repeats, fusion
        draw = torch.Generator(device).manual_seed(0)
        size = (shape.micro_batch, shape.seq_len)
        self.tokens_BS = torch.randint(self.spec.vocab, size, generator=draw, device=device)
        self.model = self.made({})
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p)

    def made(self, options: dict[str, Any]) -> Decoder:
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        return build_model(self.spec, 0, dtype, self.device, Options(**options))

    def row(self, options: dict[str, Any]) -> dict[str, float]:
        """The model is made anew with the same weights in it: options are built in."""
        model = build_model(
            self.spec, 0, next(self.model.parameters()).dtype, "meta", Options(expert_fusion=self.fusion, **options)
        )
        model.load_state_dict(self.model.state_dict(), assign=True)
        for p, old in zip(model.parameters(), self.model.parameters(), strict=True):
            p.requires_grad_()
            p.grad = old.grad
        kept = self.kept(model)
        self.seconds(model)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        before = self.allocated()
        times = [self.seconds(model) for _ in range(self.repeats)]
        found = {"ms": 1e3 * statistics.median(times), "kept_gib": kept / GIB}
        if self.device.type == "cuda":
            found["peak_gib"] = (torch.cuda.max_memory_allocated() - before) / GIB
        return found

    def kept(self, model: Decoder) -> float:
        gc.collect()
        before = self.allocated()
        if self.device.type == "cuda":
            out = model(self.tokens_BS, self.tokens_BS.roll(-1, 1))
            torch.cuda.synchronize()
            # Behind the wait, so that what was sent to the host is let go of.
            torch.empty(1, device=self.device)
            kept = self.allocated() - before
        else:
            with Living() as living:
                out = model(self.tokens_BS, self.tokens_BS.roll(-1, 1))
            kept = living.num_bytes()
        del out
        return kept

    def seconds(self, model: Decoder) -> float:
        for p in model.parameters():
            assert p.grad is not None
            p.grad.zero_()
        began = self.now()
        out = model(self.tokens_BS, self.tokens_BS.roll(-1, 1))
        assert out.loss is not None
        out.loss.backward()
        return self.now() - began

    def allocated(self) -> float:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0.0

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def table(self) -> Iterator[dict[str, Any]]:
        first: list[Tensor] = []
        base: dict[str, Any] = {}
        tokens = self.tokens_BS.numel()
        for name, options in rows_of(self.spec):
            try:
                row: dict[str, Any] = {"name": name, **self.row(options)}
            except torch.OutOfMemoryError:
                yield {"name": name, "error": "out of memory"}
                continue
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            if name == "nothing":
                first, base = [grad.clone() for grad in grads], row
            row["saved_gib"] = base["kept_gib"] - row["kept_gib"]
            row["saved_bytes_per_token"] = row["saved_gib"] * GIB / tokens
            row["added_percent"] = 100 * (row["ms"] / base["ms"] - 1)
            row["largest_difference"] = max(
                ((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() for a, b in zip(grads, first, strict=True)
            )
            yield row


def optimizer_row(shape: Shape, part: float, device: torch.device, repeats: int) -> dict[str, Any]:
    """AdamW alone, fp32 masters and moments, gradients that stay as they are."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = build_model(shape.spec, 0, dtype, device)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    optimizer = AdamW(model.named_parameters(), 0.1, offload=part)
    times = []
    for _ in range(repeats + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        optimizer.step(1e-4)
        optimizer.host.synchronize()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    after = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    return {
        "offload": part,
        "ms": 1e3 * statistics.median(times[1:]),
        "states_on_device_gib": (after - before) / GIB,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def show(row: dict[str, Any], small: bool) -> str:
    if "error" in row:
        return f"{row['name']:24} {row['error']}"
    unit, text = (GIB / 2**20, "MiB") if small else (1.0, "GiB")
    peak = f"{row['peak_gib']:9.2f}" if "peak_gib" in row else f"{'-':>9}"
    bits = "same bits" if not row["largest_difference"] else f"{row['largest_difference']:.1e}"
    return (
        f"{row['name']:24} {row['kept_gib'] * unit:9.3f} {row['saved_gib'] * unit:9.3f} {text} "
        f"{row['saved_bytes_per_token']:12.0f} {peak} {row['ms']:10.2f} {row['added_percent']:8.1f} %  {bits}"
    )


def facts_of(device: torch.device) -> dict[str, Any]:
    facts = {"python": platform.python_version(), "torch": torch.__version__, "device": str(device)}
    return facts | ({"gpu": torch.cuda.get_device_name(device)} if device.type == "cuda" else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--shapes", nargs="+", default=["qwen3-30b-a3b", "deepseek-v3"])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fusion", action="store_true", help="knobs.expert_fusion: experts that keep less themselves")
    parser.add_argument("--optimizer", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, small = torch.device(args.device), args.device == "cpu"
    result: dict[str, Any] = {"machine": facts_of(device), "fusion": args.fusion, "shapes": {}, "optimizer": []}
    print(result["machine"])

    def write() -> None:
        if args.json:  # as far as it got
            args.json.write_text(json.dumps(result, indent=1))

    for name in args.shapes:
        shape = SHAPES[args.device][name]
        print(f"\n{name}: {shape}")
        head = f"{'kept':>9} {'saved':>9}     {'bytes/token':>12} {'peak':>9} {'ms':>10} {'added':>8}"
        print(f"{'':24} {head}")
        rows = result["shapes"].setdefault(name, [])
        for row in Bench(shape, device, args.repeats, args.fusion).table():
            print(show(row, small), flush=True)
            rows.append(row)
            write()
    if args.optimizer:
        print(f"\n{'optimizer states on host':26} {'on device':>10} {'ms a step':>10}")
        shape = SHAPES[args.device]["qwen3-30b-a3b"]
        for part in (0.0, 0.5, 1.0):
            row = optimizer_row(Shape(shape.model, 2, shape.experts, 1, 1), part, device, args.repeats)
            result["optimizer"].append(row)
            print(f"{row['offload']:26.0%} {row['states_on_device_gib']:6.2f} GiB {row['ms']:10.2f}")
        write()


if __name__ == "__main__":
    main()
