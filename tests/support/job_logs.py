"""Logs of jobs, written after what Megatron-LM, Megatron Bridge, torchtitan and the threefold engine print.

What deaths print is in tests/data/job_logs/printed.tsv, after the upstream sources and not after the catalogue.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SYSTEMS = ("megatron-lm", "bridge", "torchtitan", "threefold")
PREFIXES = ("none", "torchrun", "srun", "torchrun twice", "kubernetes")


@dataclass(frozen=True)
class Planted:
    """A death: what a rank prints, and what it is."""

    slug: str
    lines: tuple[str, ...]
    is_exception: bool = True  # printed behind a traceback


def _read() -> list[Planted]:
    text = (Path(__file__).parents[1] / "data" / "job_logs" / "printed.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in text.splitlines() if not line.startswith("#")]
    return [Planted(slug, tuple(said.split("\\n")), kind == "exception") for slug, kind, said in rows]


_ROWS = _read()
DEATHS = [row for row in _ROWS if row.slug not in ("unknown", "harmless")]
UNKNOWN = [row for row in _ROWS if row.slug == "unknown"]
HARMLESS = [row.lines[0] for row in _ROWS if row.slug == "harmless"]


def arguments_table(world: int = 16) -> list[str]:
    """The table of Megatron-LM for Qwen3-30B-A3B (megatron/training/arguments.py `_print_args`)."""
    values = {
        "bf16": True, "context_parallel_size": 1, "expert_model_parallel_size": 8, "expert_tensor_parallel_size": 1,
        "ffn_hidden_size": 6144, "global_batch_size": 256, "group_query_attention": True, "hidden_size": 2048,
        "kv_channels": 128, "micro_batch_size": 1, "moe_ffn_hidden_size": 768, "moe_grouped_gemm": True,
        "moe_permute_fusion": True, "moe_router_topk": 8, "moe_token_dispatcher_type": "alltoall",
        "num_attention_heads": 32, "num_experts": 128, "num_layers": 48, "num_query_groups": 4,
        "pipeline_model_parallel_size": 1, "qk_layernorm": True, "seq_length": 4096, "sequence_parallel": False,
        "swiglu": True, "tensor_model_parallel_size": 1, "train_iters": 1000, "padded_vocab_size": 151936,
        "untie_embeddings_and_output_weights": True,
        "use_distributed_optimizer": True, "vocab_size": 151936, "world_size": world, "moe_router_dtype": "fp32",
    }  # fmt: skip
    rows = [f"  {name} {'.' * (48 - len(name))} {value}" for name, value in sorted(values.items())]
    return [
        "------------------------ arguments ------------------------",
        *rows,
        "-------------------- end of arguments ---------------------",
    ]


def bridge_summary() -> list[str]:
    """Bridge's `ConfigContainer.log_non_default_values`."""
    model = {
        "bf16": True, "expert_model_parallel_size": 8, "ffn_hidden_size": 6144, "hidden_size": 2048, "kv_channels": 128,
        "moe_ffn_hidden_size": 768, "moe_grouped_gemm": True, "moe_router_topk": 8, "num_attention_heads": 32,
        "num_layers": 48, "num_moe_experts": 128, "num_query_groups": 4, "moe_token_dispatcher_type": "'alltoall'",
        "seq_length": 4096, "vocab_size": 151936,
    }  # fmt: skip
    return [
        "", "=" * 70, "Configuration Summary (Non-Default Values vs Megatron Core)", "=" * 70, "",
        "[model] Non-default values (vs Mcore TransformerConfig):",
        *(f"  {name}: {value}  (Mcore default: None)" for name, value in model.items()),
        "", "-" * 70, "Other Configuration Values:", "-" * 70, "", "[train]:",
        "  global_batch_size: 256", "  micro_batch_size: 1", "  train_iters: 1000", "", "=" * 70,
    ]  # fmt: skip


def titan_config() -> list[str]:
    """torchtitan's `JobConfig.maybe_log`, and its mesh and device lines."""
    config = (
        '{"model": {"name": "qwen3", "flavor": "30B-A3B", "converters": []}, "training": {"seq_len": 4096, '
        '"local_batch_size": 1, "global_batch_size": 256, "steps": 1000}, '
        '"parallelism": {"data_parallel_shard_degree": -1, "expert_parallel_degree": 8}, '
        '"activation_checkpoint": {"mode": "full"}, "compile": {"enable": true}}'
    )
    head = "[titan] 2026-03-03 10:00:00,101 - root - INFO - "
    return [
        head + "Running with configs: " + config,
        head + "Building device mesh with parallelism: pp=1, dp_replicate=1, dp_shard=16, cp=1, tp=1, ep=8, etp=1",
        head + "CUDA capacity: NVIDIA H100 80GB HBM3 with 79.11GiB memory",
        head + "Peak FLOPS used for computing MFU: 9.890e+14",
    ]


def _clock(step: int) -> str:
    return f"2026-03-03 {10 + step // 900:02d}:{step // 15 % 60:02d}:{step * 4 % 60:02d}"


def megatron_step(
    rng: random.Random, step: int, total: int, seconds: float = 4.0, tflops: float = 240.0, **over: float
) -> str:
    """Megatron-LM's `training_log` and Bridge's of the same name."""
    values = {
        "loss": 2.5 + rng.random() / 50,
        "norm": 0.8 + rng.random() / 10,
        "balance": 1.05,
        "skipped": 0,
        "nan": 0,
    } | over
    milliseconds = seconds * 1000 * (1 + rng.random() / 50)
    parts = [
        f" [{_clock(step)}] iteration {step:8d}/{total:8d} |",
        f"consumed samples: {step * 256:12d} |",
        f"elapsed time per iteration (ms): {milliseconds:.1f} |",
        f"throughput per GPU (TFLOP/s/GPU): {tflops:.1f} |",
        "learning rate: 3.000000E-04 | global batch size:   256 |",
        f"lm loss: {values['loss']:.6E} | load_balancing_loss: {values['balance']:.6E} |",
        f"loss scale: 1.0 | grad norm: {values['norm']:.3f} |",
        f"number of skipped iterations: {values['skipped']:3.0f} |",
        f"number of nan iterations: {values['nan']:3.0f} |",
    ]
    return " ".join(parts)


def titan_step(rng: random.Random, step: int, total: int) -> str:
    """torchtitan's `MetricsProcessor.log`."""
    return (
        f"[titan] {_clock(step)},812 - root - INFO - step: {step:2}  loss: {2.5 + rng.random() / 50:7.4f}  grad_norm: "
        f"{0.8:7.4f}  memory: 65.54GiB(82.85%)  tps: 9,111  tflops: 228.68  mfu: 23.12%"
    )


def own_step(rng: random.Random, step: int, total: int) -> str:
    """`Progress.show` of our engine."""
    return (
        f"step {step}/{total}  loss {2.5 + rng.random() / 50:.4f}  grad norm 0.8  lr 0.0003  145,000 tokens/s  "
        f"228 TFLOP/s a rank  MFU 23.1% of h100 bf16 dense  61.20 GiB  1:02:11 left"
    )


_STEP: dict[str, Callable[[random.Random, int, int], str]] = {
    "megatron-lm": megatron_step,
    "bridge": megatron_step,
    "torchtitan": titan_step,
    "threefold": own_step,
}
_START: dict[str, Callable[[], list[str]]] = {
    "megatron-lm": arguments_table,
    "bridge": bridge_summary,
    "torchtitan": titan_config,
    "threefold": lambda: ["starting from random weights", "CPU threads of a rank: 8 (cores over ranks)"],
}


def _prefix(style: str, rank: int) -> str:
    return {
        "none": "",
        "torchrun": f"[rank{rank}]:",
        "srun": f"{rank:3d}: ",
        "torchrun twice": f"[rank{rank}]:[rank{rank}]: ",
        "kubernetes": "2026-03-03T10:00:01.123456789+00:00 stderr F ",
    }[style]


def _traceback(planted: Planted, module: str) -> list[str]:
    return [
        "Traceback (most recent call last):",
        '  File "/workspace/train.py", line 88, in <module>',
        "    main()",
        f'  File "/opt/venv/lib/python3.12/site-packages/{module}.py", line 412, in train_step',
        "    losses = forward_backward_func(",
        "             ^^^^^^^^^^^^^^^^^^^^^^",
        *planted.lines,
    ]


_TIMEOUT = (
    "[E1105 06:28:1{0}.000123 ProcessGroupNCCL.cpp:632] [Rank {1}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=77, OpType=_ALLGATHER_BASE, Timeout(ms)=600000) ran for 600010 milliseconds before timing out."
)
_PEER_GONE = (
    "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a "
    "network error"
)
_ELASTIC = "1105 06:28:31.000000 881 torch/distributed/elastic/multiprocessing/api.py:"


def _cascade(rng: random.Random, ranks: int, failed: int) -> list[tuple[int, str]]:
    """What other ranks and the launcher say after a rank has died."""
    others = [rank for rank in range(ranks) if rank != failed]
    said = [(rank, _TIMEOUT.format(rank % 10, rank)) for rank in others if rng.random() < 0.7]
    said += [(rank, _PEER_GONE) for rank in others if rng.random() < 0.3]
    said.append((0, f"W{_ELASTIC}900] Sending process 1001 closing signal SIGTERM"))
    end = f"failed (exitcode: 1) local_rank: {failed} (pid: 1002) of binary: /usr/bin/python"
    said.append((0, f"E{_ELASTIC}874] {end}"))
    said.append((0, "srun: error: node17: task 0: Exited with exit code 1"))
    return said


def write_log(path: Path, rng: random.Random, system: str, planted: Planted | None, style: str, ranks: int = 8) -> int:
    """A log with a death, of which the rank is returned."""
    failed, total, dies_at = rng.randrange(ranks), 1000, rng.choice((0, 1, 40))
    lines = [_prefix(style, 0) + line for line in _START[system]()]
    noise = [(rng.randrange(ranks), rng.choice(HARMLESS)) for _ in range(30)]
    lines += [_prefix(style, rank) + line for rank, line in noise]
    for step in range(1, (dies_at if planted else total) + 1):
        lines.append(_prefix(style, ranks - 1) + _STEP[system](rng, step, total))
        if step % 20 == 5:
            lines.append(_prefix(style, rng.randrange(ranks)) + rng.choice(HARMLESS))
    if planted:
        own = (
            _traceback(planted, rng.choice(("megatron/training/training", "torchtitan/train")))
            if planted.is_exception
            else list(planted.lines)
        )
        mine = [(failed, line) for line in own]
        others = _cascade(rng, ranks, failed) if rng.random() < 0.8 else []
        lines += [_prefix(style, rank) + line for rank, line in [*mine, *others]]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return failed
