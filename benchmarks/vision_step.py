"""Steps of a vision-language model with real pictures: ours in several settings, and Hugging Face `transformers`.

python benchmarks/vision_step.py [--layers 8] [--only NAME ...] [--steps 6] [--json FILE]
python benchmarks/vision_step.py --device cpu --tiny         the same code on a small model; its times mean nothing

The shape is Qwen3-VL-30B-A3B with its whole encoder and a decoder cut to a few layers, at 4096 tokens a sequence that
is packed with drawn scenes and questions about them (`job.data = "scenes"`). Our steps go through the loader: pictures
are decoded and cut into patches while they run. The peer gets the same batches, already on the device, and attends over
whole packed sequences. Weights, gradients and moments are bf16 on both sides. "image-free" is the same decoder on text
alone: a benchmark that says nothing of training on pictures, measured to show how much it flatters.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from threefold.engine.batch import Batch
from threefold.engine.build import build, device_of
from threefold.engine.dist.mesh import Mesh
from threefold.engine.tune.trial_steps import TrialWindow, free_gpu_memory, run_trial, synchronized_time
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.spec.hf import hf_config_of

BASE: dict[str, Any] = {
    "model": "qwen3-vl-30b-a3b",
    "cluster.chip": "h200",
    "cluster.gpus": 1,
    "job.seq_len": 4096,
    "job.task": "sft",
    "job.data": "scenes",
    "job.packing": True,
    "job.steps": 1000,
    "knobs.optimizer_dtype": "bf16",
    "knobs.grad_dtype": "bf16",
    "knobs.master_weights": False,
    "knobs.expert_fusion": True,
}
TINY: dict[str, Any] = {
    "model": "tiny-qwen3-vl-moe",
    "cluster.chip": "cpu",
    "job.seq_len": 256,
    "knobs.precision": "fp32",
}
TINY |= {"knobs.expert_fusion": False, "knobs.optimizer_dtype": "fp32", "knobs.master_weights": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "micro 1": {},
    "micro 2": {"job.micro_batch": 2},
    "micro 4": {"job.micro_batch": 4},
    "micro 8": {"job.micro_batch": 8},
    "micro 4, frozen encoder": {"job.micro_batch": 4, "job.freeze": ["vision"]},
    "micro 4, frozen encoder and projector": {"job.micro_batch": 4, "job.freeze": ["vision", "projector"]},
    "micro 4, encoder recomputed": {"job.micro_batch": 4, "knobs.vision_recompute": ["full"]},
    "micro 4, image-free": {"job.micro_batch": 4, "job.data": "embedded", "job.task": "pretrain", "job.images": 0},
    "micro 4, FSDP": {"job.micro_batch": 4, "knobs.data_parallel": "fsdp"},
}
PEER_MICRO = (1, 4)


def plan_of(tiny: bool, layers: int, more: dict[str, Any]) -> Plan:
    fields = {**BASE, **(TINY if tiny else {"model.num_layers": layers}), **more}
    fields["job.global_batch"] = fields.get("job.micro_batch", 1)
    if tiny and "job.images" in more:
        fields.pop("knobs.vision_recompute", None)
    parsed = parse(fields)
    assert parsed.plan is not None, parsed.findings
    return parsed.plan


def ours(plan: Plan, warmup: int, steps: int) -> dict[str, Any]:
    mesh = Mesh(plan.layout, device=device_of(plan))
    found = run_trial(plan, mesh, TrialWindow(warmup, steps))
    return {
        "ms": 1e3 * statistics.median(found["steps"]),
        "peak_bytes": found["peak_bytes"],
        "useful_tokens": found["work"]["useful_tokens"],
        "losses": found["losses"],
        "fields": {path: list(value) if isinstance(value, tuple) else value for path, value in plan.written},
    }


def batches_of(plan: Plan, count: int) -> list[Batch]:
    parts = build(plan, Mesh(plan.layout, device=torch.device("cpu")), with_weights=False)
    assert parts.loader is not None
    try:
        return [parts.loader.batch(step, 0) for step in range(count)]
    finally:
        parts.close()


def peer(plan: Plan, warmup: int, steps: int) -> dict[str, Any]:
    """Hugging Face's model of the same configuration, in training as its documentation shows it."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    device, dtype = device_of(plan), torch.bfloat16 if plan.knobs.precision == "bf16" else torch.float32
    facts = hf_config_of(plan.model)
    config = AutoConfig.for_model(facts.pop("model_type"), **facts)
    torch.manual_seed(0)
    with device:
        kinds = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype, **kinds)
    model.train()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, 1e-5, (0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda")
    given = [_for_transformers(batch, plan, device, dtype) for batch in batches_of(plan, 3)]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds, losses = [], []
    for number in range(warmup + steps):
        began = synchronized_time(device)
        optimizer.zero_grad(set_to_none=True)
        loss = model(**given[number % len(given)], use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, plan.job.clip_norm, foreach=True)
        optimizer.step()
        losses.append(float(loss.detach()))
        seconds.append(synchronized_time(device) - began)
    peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else None
    return {"ms": 1e3 * statistics.median(seconds[warmup:]), "peak_bytes": peak, "losses": losses}


def _for_transformers(batch: Batch, plan: Plan, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    assert batch.images is not None
    grids_I2 = batch.images.grids_I2
    grids_I3 = torch.cat([torch.ones_like(grids_I2[:, :1]), grids_I2], dim=1)
    kinds_BS = torch.zeros_like(batch.tokens_BS)
    kinds_BS.view(-1)[batch.images.token_index_V] = 1
    labels_BS = torch.roll(batch.labels_BS, 1, dims=1)  # transformers shifts labels itself
    labels_BS[:, 0] = -100
    found = {
        "input_ids": batch.tokens_BS,
        "labels": labels_BS,
        "pixel_values": batch.images.patches_PC.to(dtype),
        "image_grid_thw": grids_I3,
        "mm_token_type_ids": kinds_BS,
    }
    return {name: value.to(device) for name, value in found.items()}


def attempt(what: Any, plan: Plan, args: argparse.Namespace) -> dict[str, Any]:
    """One case; whatever goes wrong is its result, and must not lose the others."""
    gc.collect()
    free_gpu_memory()
    began = time.monotonic()
    try:
        found: dict[str, Any] = what(plan, args.warmup, args.steps)
    except torch.OutOfMemoryError:
        found = {"error": "out of memory"}
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    return {**found, "seconds": time.monotonic() - began}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--only", nargs="+", choices=[*SETTINGS, "transformers"])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}

    def tell(name: str, found: dict[str, Any]) -> None:
        results[name] = found
        said = found.get("error") or f"{found['ms']:9.1f} ms, peak {(found['peak_bytes'] or 0) / 2**30:.1f} GiB"
        print(f"{name:40} {said}", flush=True)
        if args.json:
            args.json.write_text(json.dumps({"torch": torch.__version__, "rows": results}, indent=1) + "\n")

    for name, more in SETTINGS.items():
        if args.only is None or name in args.only:
            tell(name, attempt(ours, plan_of(args.tiny, args.layers, more), args))
    for micro in PEER_MICRO if args.only is None or "transformers" in args.only else ():
        plan = plan_of(args.tiny, args.layers, {"job.micro_batch": micro})
        tell(f"transformers, micro {micro}", attempt(peer, plan, args))
        both = [results.get(name, {}).get("ms") for name in (f"transformers, micro {micro}", f"micro {micro}")]
        if all(both):
            print(f"ratio at micro {micro}: {both[0] / both[1]:.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
