"""The field's words for one thing. Where a query has a phrase of a group, the others of the group count as well."""

import re

SYNONYM, CERTAIN = 0.35, 0.9  # of the weight of a word that the query has itself
# The first of a group is the word that our pages use. A phrase counts where it stands alone, in any case.
GROUPS = (
    ("a2a+p2p", "hcp", "hierarchical context parallel", "hierarchical cp"),
    ("context parallel", "context parallelism", "cp", "ring attention", "long sequences", "sequence sharding"),
    ("a2a", "ulysses", "deepspeed ulysses", "head exchange"),
    ("zero1", "distributed optimizer", "zero 1", "zero-1", "sharded optimizer", "optimizer sharding"),
    ("fsdp", "zero3", "zero 3", "fully sharded", "megatron fsdp", "fsdp2"),
    ("hsdp", "hybrid sharding", "replicate"),
    ("ep_overlap", "a2a overlap", "moe overlap", "expert parallel overlap", "ep overlap", "overlap moe"),
    ("fits memory", "oom", "out of memory", "cuda oom", "does not fit", "memory error"),
    ("cuda-out-of-memory", "oom", "cuda oom"),
    ("recompute", "activation checkpointing", "gradient checkpointing", "checkpoint activations", "rematerialization"),
    ("expert parallel", "ep", "expert_model_parallel_size", "moe parallel"),
    ("tensor parallel", "tp", "sequence parallel", "megatron sp"),
    ("expert tensor parallel", "etp"),
    ("pipeline", "pp", "pipeline parallel"),
    ("virtual stages", "vpp", "interleaved pipeline", "virtual pipeline", "bubble"),
    ("data parallel", "dp"),
    ("delay_wgrad", "delayed weight gradient", "delay wgrad", "wgrad split", "dw"),
    ("dispatcher", "deepep", "hybridep", "token dispatch", "all to all", "alltoall"),
    ("graphs", "cuda graph", "cuda graphs", "cudagraph", "full iteration graph"),
    ("offload", "cpu offload", "host offload", "cpu adam"),
    ("aux_loss", "load balancing", "load balance", "balancing loss", "router collapse", "dead experts"),
    ("bias_rate", "aux free", "loss free balancing", "auxiliary loss free", "expert bias"),
    ("capacity_factor", "token drop", "drop tokens", "drop and pad", "dropless"),
    ("forced-balance", "force balance", "forced routing", "benchmark routing"),
    ("precision", "fp8", "mxfp8", "nvfp4", "blockwise", "low precision", "quantized training"),
    ("hang", "stuck", "deadlock", "timeout", "nccl timeout", "watchdog"),
    ("straggler", "slow rank", "slow node", "jitter"),
    ("lora", "peft", "adapters", "low rank"),
    ("finetune", "sft", "instruction tuning", "fine-tune", "finetuning", "fine tuning"),
    ("packing", "packed sequences", "thd", "cu_seqlens", "sequence packing", "sample packing"),
    ("mtp", "multi token prediction", "multi-token"),
    ("lr", "learning rate"),
    ("global_batch", "batch size", "gbs", "global batch size"),
    ("micro_batch", "mbs", "micro batch size", "microbatch"),
    ("seq_len", "sequence length", "context length", "max length", "context window"),
    ("export", "convert", "save to hugging face", "export hf", "safetensors"),
    ("import", "load hugging face", "from_pretrained", "hf checkpoint"),
    ("profile", "nsys", "nsight", "kineto", "trace", "profiler"),
    ("rehearse", "dry-run", "dry run", "simulate", "without gpu", "fake tensors"),
    ("estimate", "predict", "how long", "how much", "cost"),
    ("tokens/s", "throughput", "tokens per second", "tflops", "mfu", "speed"),
    ("host", "launch bound", "cpu bound", "host bound", "kernel launches", "idle gaps"),
    ("max_connections", "cuda_device_max_connections", "hardware queues"),
    ("expandable_segments", "fragmentation", "allocator", "pytorch_cuda_alloc_conf", "reserved memory"),
    ("mla", "latent attention", "multi-head latent"),
    ("gdn", "gated delta", "linear attention", "deltanet", "gated deltanet"),
    ("images", "vlm", "vision", "multimodal", "vision-language", "pictures"),
    ("verify", "correctness", "same gradients", "numerics", "parity"),
    ("slurm", "sbatch", "srun", "multi node", "cluster job", "torchrun"),
    ("resume", "restart", "continue training", "checkpoint restart", "preempt"),
    ("regress", "bisect", "regression", "slower after", "performance drop"),
    ("chip", "gpu type", "hardware"),
    ("domain", "across nodes", "between nodes", "infiniband", "inter-node"),
    ("nvlink", "domain", "nvl72", "rack"),
    ("expert", "moe", "mixture of experts"),
    ("shared_experts", "shared experts", "shared expert"),
    ("stages", "layout string", "pipeline layout", "layer placement"),
    ("muon", "newton schulz"),
    ("master_weights", "fp32 master", "master weights"),
    ("eval", "evaluate", "evaluation", "perplexity", "benchmark accuracy"),
    ("sample", "generate", "generate text", "inference", "chat with"),
    ("memory-wall", "memory bound"),
    ("compute-wall", "compute bound"),
    ("communication-wall", "communication bound", "network bound"),
    ("grids divide ranks", "how many gpus", "minimum gpus", "gpu floor", "number of gpus"),
    ("diagnose", "job died", "dead job", "flight recorder", "post mortem", "root cause"),
    ("survive", "died", "crashed", "killed"),
    ("installed", "not installed", "missing package", "import error", "available"),
    ("damaged", "corrupt", "broken", "not whole", "cannot be decoded", "readable"),
    ("context", "longer context", "max_position_embeddings", "rope scaling", "rotary"),
    ("clip_norm", "gradient clipping", "clip grad", "grad norm"),
    ("cores", "numa", "pinning", "affinity", "numactl"),
    ("expert", "tokens per expert", "experts see enough tokens"),
    ("training-run", "whole training", "how many days", "energy", "price", "cost per"),
    ("freeze", "frozen", "train only"),
    ("verify", "same gradients", "equals one rank"),
    ("ep-divides-experts", "cannot share", "experts evenly"),
    ("precision-runs-on-chip", "on hopper", "on blackwell", "on ampere"),
    ("global_batch", "gradient accumulation steps", "accumulation steps"),
    ("skew", "imbalance", "imbalanced routing", "load imbalance", "imbalanced"),
    ("library", "python", "python api", "from python"),
    ("grad", "gradient"),
    ("divides", "not divisible", "divisible"),
    ("accum", "accumulation"),
    ("sequence-has-context", "longer context"),
    ("job.freeze", "freeze vision", "freeze encoder", "frozen vision"),
    ("pictures-readable", "corrupt images", "damaged images", "truncated image"),
    ("job.val_data", "validation set", "held out", "eval set"),
    ("inprocess_restart", "in-process restart", "in process restart", "restart inside a process"),
    ("nemo_experiments", "silently resumes", "resumes silently", "resumes an old run", "fresh run"),
    ("multiprocessors", "sms", "streaming multiprocessors"),
    ("tp_overlap", "userbuffers", "tp comm overlap", "ub overlap"),
)
_PHRASES = {phrase: group for group in GROUPS for phrase in group}


def related(query: str) -> dict[str, float]:
    """Phrases that the query does not have, but whose meaning it has, with their weight.

    A phrase of several words means one thing for certain: the word of our pages then counts nearly as if it were asked.
    """
    text = f" {re.sub(r'[^a-z0-9+_./-]+', ' ', query.lower())} "
    weights: dict[str, float] = {}
    for phrase, group in _PHRASES.items():
        if f" {phrase} " in text:
            for other in group:
                is_whole = text.strip() == phrase
                weight = SYNONYM
                if other == group[0] and (is_whole or " " in phrase):
                    weight = 1.0 if is_whole else CERTAIN
                if f" {other} " not in text:
                    weights[other] = max(weight, weights.get(other, 0.0))
    return weights
