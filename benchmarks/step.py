"""How fast a training step is: ours against Hugging Face `transformers`, one after the other in one process.

python benchmarks/step.py [--model NAME] [--layers 8] [--micro 1 4] [--sides ...] [--set FIELD=VALUE] [--json FILE]
python benchmarks/step.py --device cpu --tiny        the same code on a small shape; its times mean nothing

A model cut to a few layers, synthetic tokens: forward, backward, clip, AdamW. DeepSeek-V3 is cut to one dense layer and
32 experts besides, and no model has multi-token prediction; Qwen3-Next runs on flash-linear-attention where installed.
All sides keep weights, gradients and moments in bf16 without fp32 masters, but for "threefold, fp32", which has both in
fp32, "fp32 split", which keeps of masters what bf16 weights lack (`store_param_remainders`), and "masters split", which
has such masters and bf16 moments; "one graph" replays forward and backward as one CUDA graph, and "as planned" has the
knobs that `plan` chooses for one H200 (graphs, recompute, fused experts; precision and states are those of the other
sides). "GEMMs and attention" are those of a step and nothing else (`gemms_and_attention.py`): no side in bf16 can be
faster. All choose experts by their own routers, and compute no balancing loss. Experts run on what `threefold env
--tune` found here, else on the default kernels. The ceilings are a bf16 product of 8192^3 in the same run: by a cool
card, and after a second of it, when the card has come down to the clock that its power allows.
"""

import argparse
import gc
import json
import platform
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gemms_and_attention import gemms_and_attention
from torch import Tensor

from threefold.engine.attention.fused_delta import load_kernels
from threefold.engine.batch import Batch
from threefold.engine.build import options_of, parts_alone
from threefold.engine.kernels.experts.kernel_choice import choose_kernels
from threefold.engine.layers.cross_entropy import IGNORE
from threefold.engine.models.build import build_model
from threefold.engine.optim.adamw import AdamW
from threefold.engine.step import train_step
from threefold.engine.tune.expert_kernels import expert_shape_of
from threefold.plan.parse import parse
from threefold.plan.plan import Knobs, Plan
from threefold.search.search import search
from threefold.spec.flops import flops_per_token
from threefold.spec.hf import hf_config_of
from threefold.spec.model import GqaSpec, ModelSpec, MoeSpec
from threefold.spec.models import MODELS
from threefold.units import GIB

TINY = replace(
    MODELS["qwen3-30b-a3b"],
    dim=64,
    dense_dim=128,
    vocab=512,
    attention=GqaSpec(num_heads=4, num_kv_heads=2, head_dim=16, qk_norm=True, rope_theta=1e6),
    moe=MoeSpec(num_experts=8, top_k=2, expert_dim=32),
)
assert MODELS["deepseek-v3"].moe is not None
MODELS = {
    "qwen3-30b-a3b": MODELS["qwen3-30b-a3b"],
    "deepseek-v3": replace(
        MODELS["deepseek-v3"], mtp_layers=0, num_dense_layers=1, moe=replace(MODELS["deepseek-v3"].moe, num_experts=32)
    ),
    "qwen3-next-80b-a3b": replace(MODELS["qwen3-next-80b-a3b"], mtp_layers=0),
}
BETAS, LR, NUM_BATCHES = (0.9, 0.95), 1e-5, 4
SIDES = (
    "threefold",
    "threefold, one graph",
    "threefold, as planned",
    "threefold, fp32",
    "threefold, fp32 split",
    "threefold, masters split",
    "transformers",
    "transformers, compiled",
    "GEMMs and attention",
)
Step = Callable[[Tensor], float | Tensor | None]  # tokens of one microbatch -> loss, where there is one


def fields_of(layers: int, micro: int, seq_len: int) -> dict[str, Any]:
    """What all of our sides have in common."""
    return {
        "model.num_layers": layers,
        "job.seq_len": seq_len,
        "job.micro_batch": micro,
        "job.global_batch": micro,
        "job.aux_loss": 0.0,
        "knobs.optimizer_dtype": "bf16",
        "knobs.grad_dtype": "bf16",
        "knobs.master_weights": False,
    }


def plan_of(model: ModelSpec, layers: int, micro: int, seq_len: int, more: dict[str, Any] | None = None) -> Plan:
    given = {"model": model.name, **fields_of(layers, micro, seq_len), "knobs.expert_fusion": True, **(more or {})}
    parsed = parse(given, model=model)
    assert parsed.plan, parsed.findings
    return parsed.plan


def planned_knobs(plan: Plan) -> dict[str, Any]:
    """The knobs that the planner sets where they are left to it; numbers have as many bits as on the other sides."""
    job, model = plan.job, plan.model
    draft = {
        "model": model.name,
        "target": "threefold",
        "cluster.chip": "h200",
        "cluster.gpus": 1,
        **fields_of(model.num_layers, job.micro_batch, job.seq_len),
        "knobs.precision": plan.knobs.precision,
    }
    if model.moe is not None:
        draft["model.num_experts"] = model.moe.num_experts
    if model.num_dense_layers:
        draft["model.num_dense_layers"] = model.num_dense_layers
    draft["job.mtp"] = plan.mtp
    chosen = search(draft, top=1).candidates[0].plan.knobs
    return {f.name: getattr(chosen, f.name) for f in fields(chosen) if getattr(chosen, f.name) != f.default}


def ours(
    plan: Plan, device: torch.device, moments: str | None = None, master: bool = False, split: bool = False
) -> Step:
    """`moments` is their dtype. With `master` there are fp32 master weights; `split` stores them as remainders."""
    model = build_model(plan.model, plan.mtp, torch.bfloat16, device, options_of(plan), seed=0)
    named, dtype = model.named_parameters(), moments or plan.knobs.optimizer_dtype
    optimizer = AdamW(named, plan.job.weight_decay, dtype, BETAS, master=master, store_param_remainders=split)
    parts = parts_alone(model, optimizer)

    def step(tokens_BS: Tensor) -> float:
        labels_BS = torch.nn.functional.pad(tokens_BS[:, 1:], (0, 1), value=IGNORE)
        return train_step(parts, [Batch(tokens_BS, labels_BS)], LR, plan.job).loss

    return step


def in_one_graph(plan: Plan, device: torch.device) -> Step:
    return ours(replace(plan, knobs=replace(plan.knobs, graphs=("full_iteration",))), device)


def as_planned(plan: Plan, device: torch.device) -> Step:
    chosen = planned_knobs(plan)
    print("planned:", ", ".join(f"{name} = {value}" for name, value in chosen.items()), file=sys.stderr, flush=True)
    return ours(replace(plan, knobs=replace(Knobs(), **chosen)), device)


def peer(plan: Plan, device: torch.device, recompute: bool = False, compiled: bool = False) -> Step:
    from transformers import AutoConfig, AutoModelForCausalLM

    if any(layer.mixer == "delta" for layer in plan.model.layers) and device.type == "cuda":
        # transformers takes the package by itself. On Hopper the package has no backward with torch's Triton: our
        # kernel, which is registered with it here, serves both sides.
        assert load_kernels() is not None, "flash-linear-attention is not usable here"
        use_fla_convolution()
    facts = hf_config_of(plan.model)
    config = AutoConfig.for_model(facts.pop("model_type"), **facts, use_cache=False)
    torch.manual_seed(0)
    kinds = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **kinds)
    used = (model.config._attn_implementation, model.config._experts_implementation)
    assert used == ("sdpa", "grouped_mm"), used
    if recompute:
        model.gradient_checkpointing_enable()
    model.train()
    parameters = list(model.parameters())
    assert all(p.dtype == torch.bfloat16 and p.device.type == device.type for p in parameters)
    decay = plan.job.weight_decay
    optimizer = torch.optim.AdamW(parameters, LR, BETAS, weight_decay=decay, fused=True)

    if compiled:
        torch.compiler.reset()
        model.compile(dynamic=False)

    def step(tokens_BS: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=tokens_BS, labels=tokens_BS).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, plan.job.clip_norm, foreach=True)
        optimizer.step()
        return loss.detach()

    return step


def use_fla_convolution() -> None:
    """Give transformers the package's causal convolution, where causal-conv1d, which needs a CUDA build, is missing."""
    from fla.modules.causal_conv1d import causal_conv1d
    from transformers.models.qwen3_next import modeling_qwen3_next

    def convolve(x_BDS: Tensor, weight_DW: Tensor, bias_D: Tensor | None = None, **named: Any) -> Tensor:
        y_BSD, _ = causal_conv1d(x_BDS.mT, weight_DW, bias_D, activation=named.get("activation"))
        return y_BSD.mT

    modeling_qwen3_next.causal_conv1d_fn = convolve


MAKERS: dict[str, Callable[[Plan, torch.device], Step]] = dict(
    zip(
        SIDES,
        (
            ours,
            in_one_graph,
            as_planned,
            partial(ours, moments="fp32", master=True),
            partial(ours, moments="fp32", master=True, split=True),
            partial(ours, master=True, split=True),
            peer,
            partial(peer, compiled=True),
            gemms_and_attention,
        ),
        strict=True,
    )
)


def measure(side: str, plan: Plan, device: torch.device, steps: int, warmup: int) -> dict[str, Any]:
    """One side on one shape; whatever goes wrong is the result."""
    free(device)
    try:
        return timed(MAKERS[side](plan, device), plan, device, steps, warmup)
    except torch.OutOfMemoryError:
        return {"error": "out of memory", "peak_gib": peak_gib(device)}
    except Exception as error:  # one case must not lose the others
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0]}


def timed(step: Step, plan: Plan, device: torch.device, steps: int, warmup: int) -> dict[str, Any]:
    job = plan.job
    generator = torch.Generator(device).manual_seed(1)
    shape = (NUM_BATCHES, job.micro_batch, job.seq_len)
    tokens_NBS = torch.randint(plan.model.vocab, shape, generator=generator, device=device)
    losses = [step(tokens_NBS[n % NUM_BATCHES]) for n in range(warmup)]
    gc.collect()
    gc.disable()  # for both sides alike, as our training loop does
    try:
        clock = Clock(device)
        for n in range(steps):
            losses.append(step(tokens_NBS[n % NUM_BATCHES]))
            clock.tick()
        each_ms, wall_ms = clock.read()
    finally:
        gc.enable()
    middle_ms = statistics.median(each_ms)
    flops = flops_per_token(plan.model, job.seq_len, plan.mtp) * job.micro_batch * job.seq_len
    return {
        "ms": middle_ms,
        "spread_ms": [min(each_ms), max(each_ms)],
        "wall_ms": wall_ms / steps,
        "tflops": flops / middle_ms / 1e9,
        "peak_gib": peak_gib(device),
        "losses": [float(loss) for loss in losses if loss is not None],
    }


class Clock:
    """Times between ticks: CUDA events, or the host's clock where there is no device to wait for."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        if self.cuda:
            torch.cuda.synchronize()
        self.began = time.perf_counter()
        self.marks: list[Any] = []
        self.tick()

    def tick(self) -> None:
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def read(self) -> tuple[list[float], float]:
        """Milliseconds of each step, and of all by the host's clock."""
        if self.cuda:
            torch.cuda.synchronize()
        wall = 1e3 * (time.perf_counter() - self.began)
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        return [a.elapsed_time(b) if self.cuda else 1e3 * (b - a) for a, b in pairs], wall


def free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device: torch.device) -> float | None:
    return torch.cuda.max_memory_allocated(device) / GIB if device.type == "cuda" else None


def ceilings(device: torch.device) -> tuple[float, float] | None:
    """TFLOP/s of a large bf16 product: by a cool card, and when it has run for a second."""
    if device.type != "cuda":
        return None
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))

    def product(warmup: int) -> float:
        for _ in range(warmup):
            a @ b
        clock = Clock(device)
        for _ in range(30):
            a @ b
            clock.tick()
        return 2 * 8192**3 / statistics.median(clock.read()[0]) / 1e9

    return product(10), product(600)


def show(row: dict[str, Any], tops: tuple[float, float] | None) -> Iterator[str]:
    """A line a side; ratios are of TFLOP/s, ours over theirs."""
    mine = row.get(SIDES[0], {})
    for side in (side for side in SIDES if side in row):
        one, head = row[side], f"{row['layers']:6} {row['micro']:5}  {side:24}"
        if "error" in one:
            yield f"{head} {one['error'][:60]}"
            continue
        peak = "-" if one["peak_gib"] is None else f"{one['peak_gib']:.1f}"
        share = " ".join(f"{one['tflops'] / top:7.1%}" for top in tops) if tops else f"{'-':>7} {'-':>7}"
        ratio = f"{mine['tflops'] / one['tflops']:6.3f}x" if "tflops" in mine and side != SIDES[0] else ""
        yield f"{head} {one['ms']:10.2f} {one['tflops']:9.1f} {share} {peak:>7}  {ratio}"


def facts_of(device: torch.device) -> dict[str, Any]:
    facts = {"python": platform.python_version(), "torch": torch.__version__, "device": str(device)}
    if device.type == "cuda":
        facts |= {"gpu": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
        facts |= {"cudnn": torch.backends.cudnn.version()}
    for name in ("transformers", "fla"):
        if name in sys.modules:
            facts[name] = sys.modules[name].__version__
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, nargs="+", default=[8])
    parser.add_argument("--micro", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seq", type=int, help="tokens of a sequence; absent: 4096, or 64 with --tiny")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="of the plan, for our sides")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device, model = torch.device(args.device), TINY if args.tiny else MODELS[args.model]
    seq_len = args.seq or (64 if args.tiny else 4096)
    more = {name: json.loads(value) for name, value in (pair.split("=", 1) for pair in args.set)}
    tops = ceilings(device)
    rows: list[dict[str, Any]] = []
    for layers in args.layers:
        for micro in args.micro:
            plan = plan_of(model, layers, micro, seq_len, more)
            choice = choose_kernels(expert_shape_of(plan), torch.empty(0, dtype=torch.bfloat16, device=device))
            row: dict[str, Any] = {
                "model": model.name,
                "layers": layers,
                "micro": micro,
                "seq_len": seq_len,
                "set": more,
            }
            row["experts"] = str(choice)
            if "threefold, as planned" in args.sides:
                row["planned"] = planned_knobs(plan)
            rows.append(row)
            for side in args.sides:
                row[side] = measure(side, plan, device, args.steps, args.warmup)
                print(f"{layers} layers, microbatch {micro}, {side}: {row[side]}", file=sys.stderr, flush=True)
                if args.json:  # as far as it got
                    said = {"machine": facts_of(device), "ceilings_tflops": tops, "rows": rows}
                    args.json.write_text(json.dumps(said, indent=2))
    print(f"\n{facts_of(device)}\nsequence {seq_len}, median of {args.steps} steps; bf16 product {tops} TFLOP/s\n")
    heads = f"{'ms/step':>10} {'TFLOP/s':>9} {'of cool':>7} {'of held':>7} {'GiB':>7}  ours over it"
    print(f"{'layers':>6} {'micro':>5}  {'':24} {heads}")
    for row in rows:
        print("\n".join(show(row, tops)))
    return 1 if any("error" in row.get(side, {}) for row in rows for side in args.sides) else 0


if __name__ == "__main__":
    sys.exit(main())
