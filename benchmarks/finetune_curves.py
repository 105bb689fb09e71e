"""Loss curves of full and LoRA finetuning beside those of transformers and peft: same weights, data, order and rates.

python benchmarks/finetune_curves.py [--steps 40] [--json FILE]

A small Qwen3-MoE (4 layers of dim 128, 16 experts, 4 a token, fp32) that transformers saved is finetuned on chats of a
task that can be learned: sums of small numbers in words. Our loader makes the microbatches, one conversation in a
sequence, and both sides learn the answers with AdamW, clipping, warm-up and cosine decay. peft gets the adapters that
the engine begins with. The sides take turns, step by step; times are of the process's CPU.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from threefold.engine.batch import Batch
from threefold.engine.build import build
from threefold.engine.dist.mesh import Mesh
from threefold.engine.lora import lora_settings
from threefold.engine.optim.lr_schedule import learning_rate
from threefold.engine.step import train_step
from threefold.engine.weights.base_checkpoint import describe_checkpoint
from threefold.engine.weights.peft import write_adapter
from threefold.engine.weights.read_hf import read_hf
from threefold.plan.parse import parse
from threefold.plan.plan import Plan

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 384,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
UP_TO_FIFTEEN = """zero one two three four five six seven
eight nine ten eleven twelve thirteen fourteen fifteen"""
NUMBERS = UP_TO_FIFTEEN.split()
SETTINGS: dict[str, dict[str, Any]] = {
    "full": {"job.lr": 1e-3},
    "LoRA 16": {"job.lr": 5e-3, "job.lora_rank": 16, "job.lora_targets": ["attention"]},
}
Step = Callable[[list[Batch], float], float]


def write_inputs(folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG), dtype=torch.float32).save_pretrained(folder)
    with (folder / "chats.jsonl").open("w", encoding="utf-8") as file:
        for a in range(8):
            for b in range(8):
                chat = [("user", f"{NUMBERS[a]} and {NUMBERS[b]}?"), ("assistant", NUMBERS[a + b])]
                messages = [{"role": role, "content": content} for role, content in chat]
                file.write(json.dumps({"messages": messages}) + "\n")


def plan_of(folder: Path, steps: int, more: dict[str, Any]) -> Plan:
    fields = {
        "model": f"hf:{folder / 'config.json'}",
        "target": "threefold",
        "cluster.chip": "cpu",
        "knobs.precision": "fp32",
        "job.task": "sft",
        "job.data": str(folder / "chats.jsonl"),
        "job.seq_len": 96,
        "job.global_batch": 16,
        "job.micro_batch": 8,
        "job.steps": steps,
        "job.warmup_steps": 5,
        "job.weight_decay": 0.01,
        "job.aux_loss": 0.0,
        **more,
    }
    parsed = parse(fields)
    assert parsed.plan is not None, parsed.findings
    return parsed.plan


def sides(folder: Path, plan: Plan) -> tuple[dict[str, Step], Callable[[int], list[Batch]]]:
    """Both steps, and the microbatches of a step."""
    parts = build(plan, Mesh(plan.layout))
    (model,) = parts.chunks.values()
    read_hf(folder, model)
    parts.optimizer.refresh()
    loader = parts.loader
    assert loader is not None
    theirs = their_side(folder, plan, model.state_dict())

    def ours(batches: list[Batch], lr: float) -> float:
        return train_step(parts, batches, lr, plan.job).loss

    steps = {"threefold": ours, "transformers": theirs}
    return steps, lambda n: [loader.batch(n, m) for m in range(loader.num_batches(n))]


def their_side(folder: Path, plan: Plan, state: dict[str, Any]) -> Step:
    from transformers import AutoModelForCausalLM

    job, settings = plan.job, lora_settings(plan.job)
    kinds = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **kinds)
    if settings is not None:
        from peft import PeftModel

        write_adapter(state, plan.model, settings, folder / "adapter", describe_checkpoint(folder))
        model = PeftModel.from_pretrained(model, folder / "adapter", is_trainable=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if (p.dim() > 1) == decays], "weight_decay": job.weight_decay * decays}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], 1.0, (job.adam_beta1, job.adam_beta2), fused=True)

    def step(batches: list[Batch], lr: float) -> float:
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad(set_to_none=True)
        num_labels = sum(int((batch.labels_BS >= 0).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            logits_BSV = model(input_ids=batch.tokens_BS).logits
            flat = logits_BSV.flatten(0, 1), batch.labels_BS.flatten()
            loss = torch.nn.functional.cross_entropy(*flat, reduction="sum") / num_labels
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, job.clip_norm, foreach=True)
        optimizer.step()
        return total

    return step


def run(plan: Plan, folder: Path) -> dict[str, Any]:
    steps, batches_of = sides(folder, plan)
    rows: dict[str, dict[str, list[float]]] = {name: {"losses": [], "cpu": []} for name in steps}
    for n in range(plan.job.steps):
        batches, lr = batches_of(n), learning_rate(plan.job, n)
        for name, step in steps.items():
            began = time.process_time()
            rows[name]["losses"].append(step(batches, lr))
            rows[name]["cpu"].append(time.process_time() - began)
    return dict(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name, more in SETTINGS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_inputs(Path(folder))
            rows = run(plan_of(Path(folder), args.steps, more), Path(folder))
        ours, theirs = (rows[side]["losses"] for side in ("threefold", "transformers"))
        gap = max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True))
        rates = {side: round(1 / statistics.median(row["cpu"]), 2) for side, row in rows.items()}
        results[name] = {"largest_relative_gap": gap, "steps_per_cpu_second": rates, "rows": rows}
        shown = "  ".join(f"{n}: {ours[n]:.4f} {theirs[n]:.4f}" for n in range(0, args.steps, max(1, args.steps // 6)))
        print(f"{name}: {shown}  last: {ours[-1]:.4f} {theirs[-1]:.4f}")
        print(f"{name}: largest relative difference {gap:.1e}, steps a second of CPU {rates}", flush=True)
    if args.json:
        written = {"torch": torch.__version__, "steps": args.steps, "results": results}
        args.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
