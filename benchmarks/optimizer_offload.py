"""What optimizer states on the host cost in a training step: the time that shows, and the rate of the link.

python benchmarks/optimizer_offload.py [--layers 2] [--experts 64] [--micro 4] [--kinds fp32] [--sweep] [--json FILE]
python benchmarks/optimizer_offload.py --device cpu --tiny        the same code on a small shape; its times mean nothing

Qwen3-30B-A3B cut to a few layers, and where asked for to fewer experts and a smaller vocabulary, one microbatch a step.
Pinned host memory is allocated at about 1 GB/s, so that large shapes take long to start. All sides share one model and
take turns; a step is measured from the end of one `train_step` to the end of the next, so that what it leaves running
counts in the next one.

- no update: forward, backward, gradient norm.
- on the device: AdamW with its states on the GPU.
- one after the other: all states on the host, and the next forward begins when all updates are done.
- deferred: the same beside the next forward, as the engine runs it.

`exposed` is what a side takes longer than "no update". The forward is that of the layers: head and loss come behind all
updates. The link alone is the update with nothing beside it: its bytes
in each direction over its time. `--sweep` measures the link alone with other chunks.
"""

import argparse
import gc
import itertools
import json
import statistics
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from step import LR, MODELS, TINY, plan_of

from threefold.engine.batch import Batch
from threefold.engine.build import Parts, options_of, parts_alone
from threefold.engine.layers.cross_entropy import IGNORE
from threefold.engine.models.build import build_model
from threefold.engine.optim.adamw import AdamW
from threefold.engine.step import train_step
from threefold.plan.plan import Plan
from threefold.units import GIB

KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "remainders": {"store_param_remainders": True},
    "remainders, bf16 moments": {"store_param_remainders": True, "state_dtype": "bf16"},
}
SIDES = ("no update", "deferred", "one after the other", "on the device")
SWEEP = ((32, 4), (128, 8), (512, 4))  # chunks a step, slots


class Bench:
    def __init__(self, plan: Plan, device: torch.device, repeats: int) -> None:
        self.plan, self.device, self.repeats = plan, device, repeats
        self.model = build_model(plan.model, 0, torch.bfloat16, device, options_of(plan), seed=0)
        shape = (plan.job.micro_batch, plan.job.seq_len)
        self.tokens_BS = torch.randint(plan.model.vocab, shape, device=device)

    def batch(self) -> Batch:
        return Batch(self.tokens_BS, torch.nn.functional.pad(self.tokens_BS[:, 1:], (0, 1), value=IGNORE))

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def forward_ms(self) -> float:
        """The forward from the embedding to the final norm."""
        marks: list[float] = []
        ends = [x for x in (self.model.embed, self.model.norm) if x is not None]
        hooks = [x.register_forward_pre_hook(lambda *_: marks.append(self.now())) for x in ends]
        batch = self.batch()
        for _ in range(self.repeats + 2):
            out = self.model(batch.tokens_BS, batch.labels_BS)
            del out
        for hook in hooks:
            hook.remove()
        return 1e3 * statistics.median(end - start for start, end in zip(marks[2::2], marks[3::2], strict=True))

    def step_ms(self, parts: Parts) -> list[float]:
        """Milliseconds of each step, without the first, which nothing is left running before."""
        marks = []
        for _ in range(self.repeats + 2):
            train_step(parts, [self.batch()], LR, self.plan.job)
            marks.append(time.perf_counter())
        parts.data.finish_param_sync()
        self.now()
        return [1e3 * (b - a) for a, b in itertools.pairwise(marks[1:])]

    def link_ms(self, optimizer: AdamW) -> float:
        """The update alone. `synchronize` drops what was copied ahead, so that all of it is measured."""
        for p in self.model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        times = []
        for _ in range(2):
            optimizer.host.synchronize()
            began = self.now()
            optimizer.step(LR)
            if self.device.type == "cuda":
                optimizer.host._streams[1].synchronize()  # the copies out, and not those for the next step
            times.append(time.perf_counter() - began)
        optimizer.host.synchronize()
        return 1e3 * min(times)

    def kind(self, name: str, sides: list[str], sweep: bool) -> dict[str, Any]:
        began, settings = self.now(), KINDS[name]
        optimizer = AdamW(self.model.named_parameters(), 0.1, offload=1.0, **settings)
        seconds = self.now() - began
        print(f"{name}: states allocated in {seconds:.1f} s", flush=True)
        parts = parts_alone(self.model, optimizer)
        on_device = parts
        if "on the device" in sides:
            on_device = parts_alone(self.model, AdamW(self.model.named_parameters(), 0.1, **settings))
        on_host = [optimizer._on_host(param) for param in optimizer.params if param.name in optimizer.offloaded]
        num_bytes = sum(x.numel() * x.element_size() for states in on_host for x in states)
        slots = sum(slot.numel() for slot in optimizer.host.slot_memory)
        found: dict[str, Any] = {"bytes_each_way": num_bytes, "slot_gib": slots / GIB, "allocate_seconds": seconds}
        found["link_ms"] = self.link_ms(optimizer)
        found["link_gb_per_second_each_way"] = num_bytes / found["link_ms"] / 1e6
        print(f"link alone {found['link_ms']:.1f} ms, {num_bytes / found['link_ms'] / 1e6:.1f} GB/s", flush=True)
        found["all_ms"] = times = {side: [] for side in sides}
        for _ in range(2):
            for side in sides:
                optimizer.updates.is_deferred = side == "deferred"
                with without_update(optimizer) if side == "no update" else nothing():
                    times[side] += self.step_ms(on_device if side == "on the device" else parts)
                print(f"{side}: {[round(ms, 1) for ms in times[side]]} ms", flush=True)
        del on_device
        found["sides_ms"] = {side: statistics.median(each) for side, each in times.items()}
        found["peak_gib"] = torch.cuda.max_memory_allocated() / GIB if self.device.type == "cuda" else None
        if sweep:
            found["sweep"] = [self.with_chunks(optimizer, *each, num_bytes) for each in SWEEP]
        return found

    def with_chunks(self, optimizer: AdamW, chunks: int, slots: int, num_bytes: int) -> dict[str, float]:
        from threefold.engine.optim import cpu_offload

        host, before = optimizer.host, (optimizer.host.chunk_numel, cpu_offload.NUM_SLOTS)
        on_host = [optimizer._on_host(param) for param in optimizer.params if param.name in optimizer.offloaded]
        total = sum(states[0].numel() for states in on_host)
        host.chunk_numel, cpu_offload.NUM_SLOTS = -(-total // chunks // 2048) * 2048, slots
        host._slots.clear()
        host.allocate_slots(on_host)
        ms = self.link_ms(optimizer)
        host.chunk_numel, cpu_offload.NUM_SLOTS = before
        return {"chunks": chunks, "slots": slots, "ms": ms, "gb_per_second": num_bytes / ms / 1e6}


@contextmanager
def without_update(optimizer: AdamW) -> Any:
    optimizer.step = lambda *_: None  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del optimizer.step


@contextmanager
def nothing() -> Any:
    yield


def show(name: str, row: dict[str, Any], forward_ms: float) -> None:
    base = row["sides_ms"]["no update"]
    rate = f"{row['link_gb_per_second_each_way']:.1f} GB/s each way"
    print(f"\n{name}: {row['bytes_each_way'] / 1e9:.1f} GB each way, link alone {row['link_ms']:.0f} ms, {rate}")
    print(
        f"  forward {forward_ms:.1f} ms, slots {row['slot_gib']:.2f} GiB, allocated in {row['allocate_seconds']:.1f} s"
    )
    for side, ms in row["sides_ms"].items():
        print(f"  {side:22} {ms:8.1f} ms a step, exposed {ms - base:8.1f} ms")
    allowed = row["link_ms"] - forward_ms
    print(f"  allowed (link less a forward) {allowed:8.1f} ms")
    for each in row.get("sweep", ()):
        rate = f"{each['gb_per_second']:.1f} GB/s"
        print(f"  {each['chunks']:4} chunks, {each['slots']} slots: {each['ms']:7.1f} ms, {rate}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--experts", type=int, help="fewer than the model's")
    parser.add_argument("--vocab", type=int, help="a smaller one than the model's")
    parser.add_argument("--micro", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--kinds", nargs="+", default=["fp32"], choices=list(KINDS))
    parser.add_argument("--sides", nargs="+", default=SIDES[1:], choices=SIDES[1:])
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device(args.device)
    spec = TINY if args.tiny else MODELS["qwen3-30b-a3b"]
    assert spec.moe is not None
    spec = replace(spec, moe=replace(spec.moe, num_experts=args.experts or spec.moe.num_experts))
    spec = replace(spec, vocab=args.vocab or spec.vocab)
    plan = plan_of(spec, args.layers, args.micro, 64 if args.tiny else args.seq)
    bench = Bench(plan, device, args.repeats)
    gpu = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    asked = {name: value for name, value in vars(args).items() if name not in ("json", "device")}
    result: dict[str, Any] = {"device": gpu, "torch": torch.__version__, **asked, "kinds": {}}
    result["parameters"] = sum(p.numel() for p in bench.model.parameters())
    result["forward_ms"] = bench.forward_ms()
    print(f"forward of the layers {result['forward_ms']:.1f} ms", flush=True)
    for kind in args.kinds:
        gc.collect()
        result["kinds"][kind] = row = bench.kind(kind, ["no update", *args.sides], args.sweep)
        show(kind, row, result["forward_ms"])
        if args.json:
            args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
