"""The small plans whose steps calibrate a machine: each rate of the estimate shows in at least one of them.

A model is cut to a few layers, so that a step takes a fraction of a second. Names say what differs.
"""

from typing import Any

Fields = dict[str, Any]

_GPU = {"target": "threefold", "cluster.gpus": 1, "job.data": "synthetic", "knobs.expert_fusion": True}
_QWEN = {"model": "qwen3-30b-a3b", "model.num_layers": 4, "job.seq_len": 4096}
_DEEPSEEK = {
    "model": "deepseek-v3",
    "model.num_layers": 2,
    "model.num_experts": 32,
    "model.num_dense_layers": 1,
    "job.seq_len": 4096,
    "job.mtp": 0,
    "knobs.optimizer_dtype": "bf16",
}
_FP8 = {"knobs.precision": "fp8-blockwise"}
_SIXTEEN = {"knobs.optimizer_dtype": "bf16", "knobs.grad_dtype": "bf16", "knobs.master_weights": False}

_SHORT = {**_QWEN, "model.num_layers": 6, "model.num_experts": 16, "job.seq_len": 1024}
_SINKS = {"model": "gpt-oss-20b", "model.num_layers": 4, **_SIXTEEN}

_ON_ONE_GPU: dict[str, Fields] = {
    "16K tokens": {**_QWEN, "job.micro_batch": 4},
    "host-bound": _SHORT,
    "host-bound, no fusion": {**_SHORT, "knobs.expert_fusion": False},
    "host-bound, graphs": {**_SHORT, "knobs.graphs": ["attn"]},
    "host-bound, fp8": {**_SHORT, **_FP8},
    "no fusion": {**_QWEN, "job.micro_batch": 4, "knobs.expert_fusion": False},
    "4 microbatches": {**_QWEN, "job.global_batch": 4},
    "long": {**_QWEN, "job.seq_len": 32768, "model.num_layers": 2},
    "fp8": {**_QWEN, **_FP8, "job.micro_batch": 4},
    "latent attention": {**_DEEPSEEK, "job.micro_batch": 2},
    "latent attention, long, fp8": {**_DEEPSEEK, **_FP8, "job.seq_len": 16384},
    "dense": {"model": "llama3-8b", "model.num_layers": 4, "job.seq_len": 8192, **_SIXTEEN},
    "large experts": {"model": "mixtral-8x7b", "model.num_layers": 2, "job.seq_len": 4096, **_SIXTEEN},
    "sinks": {**_SINKS, "job.seq_len": 4096, "job.micro_batch": 2},
    "sinks, long": {**_SINKS, "job.seq_len": 16384},
    "delta rule": {
        "model": "qwen3-next-80b-a3b",
        "model.num_layers": 4,
        "model.num_experts": 64,
        "job.seq_len": 4096,
        **_SIXTEEN,
    },
}
_WITH_FP8 = ("fp8", "latent attention, long, fp8", "host-bound, fp8")

_CPU = {"target": "threefold", "cluster.chip": "cpu", "job.data": "synthetic", "knobs.precision": "fp32"}
_TINY = {"model": "tiny-qwen3-moe", "job.seq_len": 256, "job.global_batch": 4}
_ON_ONE_CPU: dict[str, Fields] = {
    "short": {**_TINY, "job.seq_len": 32, "job.global_batch": 1},
    "256 tokens": {**_TINY, "job.global_batch": 1},
    "1K tokens": {**_TINY, "job.micro_batch": 4},
    "4 microbatches": _TINY,
    "long": {**_TINY, "job.seq_len": 2048, "job.global_batch": 1},
    "demo": {"model": "demo-qwen3-moe", "job.seq_len": 256, "job.micro_batch": 8, "job.global_batch": 8},
    "latent attention": {**_TINY, "model": "tiny-deepseek-v3", "job.micro_batch": 2},
    "delta rule": {**_TINY, "model": "tiny-qwen3-next", "job.micro_batch": 2},
    "sinks": {**_TINY, "model": "tiny-gpt-oss", "job.micro_batch": 2},
}
_ON_TWO_CPUS: dict[str, Fields] = {
    "dp": {**_TINY, "job.micro_batch": 2},
    "ep": {**_TINY, "job.micro_batch": 2, "layout.ep": 2},
    "ep, 4 microbatches": {**_TINY, "job.global_batch": 8, "layout.ep": 2},
    "tp": {**_TINY, "job.micro_batch": 4, "layout.tp": 2},
    "cp": {**_TINY, "job.micro_batch": 4, "layout.cp": 2},
    "pp": {**_TINY, "layout.pp": 2},
    "dp, long": {**_TINY, "job.seq_len": 1024, "job.global_batch": 2},
    "ep, long": {**_TINY, "job.seq_len": 1024, "job.global_batch": 2, "layout.ep": 2},
    "tp, long": {**_TINY, "job.seq_len": 1024, "job.global_batch": 1, "layout.tp": 2},
}


def calibration_plans(chip: str, ranks: int, has_fp8: bool = True) -> dict[str, Fields]:
    """The fields of the plans for one rank of a chip, or for two processes of a CPU, by name."""
    if chip == "cpu":
        return {
            name: {**_CPU, "cluster.gpus": ranks, **fields}
            for name, fields in (_ON_ONE_CPU if ranks == 1 else _ON_TWO_CPUS).items()
        }
    plans = {name: fields for name, fields in _ON_ONE_GPU.items() if has_fp8 or name not in _WITH_FP8}
    return {
        name: {**_GPU, "cluster.chip": chip, "job.global_batch": fields.get("job.micro_batch", 1), **fields}
        for name, fields in plans.items()
    }
