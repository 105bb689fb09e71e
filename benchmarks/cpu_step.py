"""A training step on a CPU beside one of transformers with grouped experts, in one run.

python benchmarks/cpu_step.py [--steps 8] [--threads 2] [--json FILE]

Qwen3-MoE with 4 layers, 32 experts (4 a token) and dim 512, four sequences of 512 tokens, fp32: forward, backward,
clipping and AdamW, from the same weights on the same tokens. transformers has its grouped experts, scaled dot-product
attention and torch's fused AdamW. Each side is a process of its own, because ours keeps freed memory and multiplies
matrices as a run does (`engine/run/on_cpu.py`), and they take turns, step by step, so that a busy
machine slows both; medians and minimums of the time by the clock and of the process's CPU time are printed, and losses
are compared.
"""

import argparse
import json
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threefold.engine.batch import Batch
from threefold.engine.build import options_of, parts_alone
from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder
from threefold.engine.optim.adamw import AdamW
from threefold.engine.run.on_cpu import fast_on_cpu
from threefold.engine.step import train_step
from threefold.engine.weights.read_hf import read_hf
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.spec.hf import model_from_dict

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
SEQUENCES, LENGTH, LR = 4, 512, 1e-4
SIDES = ("threefold", "transformers")
Step = Callable[[], float]


def our_side(plan: Plan, model: Decoder, tokens_BS: Tensor, labels_BS: Tensor) -> Step:
    job = plan.job
    optimizer = AdamW(model.named_parameters(), job.weight_decay, betas=(job.adam_beta1, job.adam_beta2))
    parts = parts_alone(model, optimizer)
    return lambda: train_step(parts, [Batch(tokens_BS, labels_BS)], LR, job).loss


def their_side(plan: Plan, model: Any, tokens_BS: Tensor, labels_BS: Tensor) -> Step:
    """The same groups of weight decay as ours: matrices have it, vectors have none."""
    job, parameters = plan.job, list(model.parameters())
    groups = [
        {"params": [p for p in parameters if (p.dim() > 1) == decays], "weight_decay": job.weight_decay * decays}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups, LR, (job.adam_beta1, job.adam_beta2), fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        logits_BSV = model(input_ids=tokens_BS).logits
        loss = torch.nn.functional.cross_entropy(logits_BSV.flatten(0, 1), labels_BS.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, job.clip_norm, foreach=True)
        optimizer.step()
        return float(loss.detach())

    return step


def make_side(name: str) -> Step:
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = model_from_dict(CONFIG, name="cpu-step", source="benchmarks/cpu_step.py")
    fields = {"model": "cpu-step", "target": "threefold", "cluster.chip": "cpu", "knobs.precision": "fp32"}
    fields |= {"job.seq_len": LENGTH, "job.micro_batch": SEQUENCES, "job.global_batch": SEQUENCES, "job.aux_loss": 0.0}
    plan = parse(fields, model=spec).plan
    assert plan is not None
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{name: value for name, value in CONFIG.items() if name != "architectures"})
    kinds = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32, **kinds)
    tokens_BS = torch.randint(spec.vocab, (SEQUENCES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    batch = tokens_BS[:, :-1], tokens_BS[:, 1:].contiguous()
    if name == "transformers":
        return their_side(plan, theirs, *batch)
    ours = build_model(spec, 0, torch.float32, torch.device("cpu"), options_of(plan), seed=0)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        read_hf(Path(folder), ours)
    return our_side(plan, ours, *batch)


def serve(name: str, threads: int, turns: Connection) -> None:
    """Make a step for each True that comes, and send its loss, its times and the most memory so far."""
    torch.set_num_threads(threads)
    with fast_on_cpu() if name == "threefold" else nullcontext():
        take_turns(make_side(name), turns)


def take_turns(step: Step, turns: Connection) -> None:
    while turns.recv():
        wall, cpu = time.perf_counter(), time.process_time()
        loss = step()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        turns.send((loss, time.perf_counter() - wall, time.process_time() - cpu, peak))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    rows: dict[str, dict[str, Any]] = {}
    turns: dict[str, Connection] = {}
    for name in SIDES:
        turns[name], theirs_end = context.Pipe()
        context.Process(target=serve, args=(name, args.threads, theirs_end), daemon=True).start()
        rows[name] = {"losses": [], "seconds": [], "cpu": [], "peak_bytes": 0}
    for _ in range(2 + args.steps):
        for name, row in rows.items():
            turns[name].send(True)
            loss, wall, cpu, row["peak_bytes"] = turns[name].recv()
            for key, value in (("losses", loss), ("seconds", wall), ("cpu", cpu)):
                row[key].append(value)
    for end in turns.values():
        end.send(False)
    results = {name: summary(row) for name, row in rows.items()}
    for name, row in results.items():
        print(f"{name:14} {row}")
    ours, theirs = results["threefold"], results["transformers"]
    ratios = {key: round(theirs[key] / ours[key], 3) for key in ours}
    print("transformers over threefold:", ratios)
    gap = max(abs(a - b) for a, b in zip(*(row["losses"] for row in rows.values()), strict=True))
    print(f"largest difference of losses: {gap:.1e}")
    if args.json:
        machine = {"torch": torch.__version__, "machine": platform.machine(), "load": os.getloadavg()}
        written = {
            "threads": args.threads,
            **machine,
            "rows": rows,
            "results": results,
            "ratios": ratios,
            "loss_gap": gap,
        }
        args.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return 0


def summary(row: dict[str, Any]) -> dict[str, float]:
    """Seconds of a step, without the first two: by the clock and of the CPU, the median and the least."""
    found = {}
    for name in ("seconds", "cpu"):
        found |= {f"{name} median": statistics.median(row[name][2:]), f"{name} least": min(row[name][2:])}
    return {name: round(value, 3) for name, value in found.items()} | {"peak GiB": round(row["peak_bytes"] / 2**30, 2)}


if __name__ == "__main__":
    sys.exit(main())
