"""Environment variables that a Megatron run must find set, each with its reason.

They follow Megatron Bridge's performance scripts (`scripts/performance/perf_plugins.py` and `utils/executors.py`) and
the defaults of its recipes (`recipes/utils/environment_utils.py`, release 0.6).
"""

from dataclasses import dataclass

from threefold.interop.megatron.field_names import FLEX
from threefold.plan.plan import Plan
from threefold.rules.knobs.dispatch import COMBINE_CHUNKS, tokens_of_rank
from threefold.rules.megatron.graphs import has_paged_stash

# What an export sets. An import passes over them: they follow from the plan.
EXPORTED_VARIABLES = frozenset(
    {
        "NCCL_GRAPH_REGISTER",
        "NCCL_NET_GDR_C2C",
        "NCCL_NET_GDR_LEVEL",
        "NCCL_NVLS_ENABLE",
        "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN",
        "NUM_OF_TOKENS_PER_CHUNK_COMBINE_API",
        "NVLINK_DOMAIN_SIZE",
        "NVTE_BWD_LAYERNORM_SM_MARGIN",
        "NVTE_CPU_OFFLOAD_V1",
        "NVTE_CUTEDSL_FUSED_GROUPED_MLP",
        "NVTE_FWD_LAYERNORM_SM_MARGIN",
        "NVTE_USE_FAST_MATH",
        "NCCL_P2P_NET_CHUNKSIZE",
        "PYTORCH_CUDA_ALLOC_CONF",
        "TORCH_NCCL_AVOID_RECORD_STREAMS",
        "TORCH_NCCL_HIGH_PRIORITY",
        "USE_MNNVL",
    }
)
_NODE_DOMAIN = 8  # GPUs that NVLink joins in an HGX server


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable."""

    name: str
    value: str
    reason: str


def environment_of(plan: Plan) -> list[Variable]:
    """The variables in the order in which a script exports them."""
    backend = plan.knobs.dispatcher if plan.model.is_moe and plan.knobs.dispatcher in FLEX else None
    margin = "20" if backend else "16"
    is_paged = has_paged_stash(plan)
    streams = "0" if is_paged else "1"
    reason = "a graph reuses what streams recorded" if is_paged else "buffers of collectives are free at once"
    segments = "expandable_segments:True" + (",graph_capture_record_stream_reuse:True" if is_paged else "")
    found = [
        _connections(plan, backend),
        Variable("NVTE_FWD_LAYERNORM_SM_MARGIN", margin, "norms leave multiprocessors to communication beside them"),
        Variable("NVTE_BWD_LAYERNORM_SM_MARGIN", margin, "the same in backward"),
        Variable("TORCH_NCCL_AVOID_RECORD_STREAMS", streams, reason),
        Variable("TORCH_NCCL_HIGH_PRIORITY", "1", "collectives are not queued behind GEMMs"),
        Variable("NCCL_NVLS_ENABLE", "0", "NVLink SHARP takes memory that no plan counts"),
        Variable("PYTORCH_CUDA_ALLOC_CONF", segments, "less memory is lost to fragments"),
    ]
    if plan.knobs.graphs:
        reason = "NCCL cannot register graph buffers in expandable segments"
        found.append(Variable("NCCL_GRAPH_REGISTER", "0", reason))
    if backend == "hybridep":
        found += _hybridep(plan)
    if plan.chip.is_rack_scale:
        reason = "the network card reads GPU memory over NVLink-C2C"
        found += [Variable("NCCL_NET_GDR_LEVEL", "PHB", reason), Variable("NCCL_NET_GDR_C2C", "1", reason)]
    if plan.knobs.activation_offload:
        reason = "Bridge refuses activation offload without it: weights would be offloaded too"
        found.append(Variable("NVTE_CPU_OFFLOAD_V1", "1", reason))
    if plan.model.is_moe and plan.knobs.expert_fusion:
        reason = "Megatron refuses the fused experts of knobs.expert_fusion without it"
        found.append(Variable("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1", reason))
    if not plan.model.is_moe and plan.layout.pp > 1:
        reason = "larger pieces between stages over the network, as Bridge's recipes of large dense models have them"
        found.append(Variable("NCCL_P2P_NET_CHUNKSIZE", "2097152", reason))
    if plan.knobs.precision == "nvfp4":
        found.append(Variable("NVTE_USE_FAST_MATH", "1", "quantization to four bits by the faster instructions"))
    return found


def _connections(plan: Plan, backend: str | None) -> Variable:
    name, layout = "CUDA_DEVICE_MAX_CONNECTIONS", plan.layout
    if plan.knobs.max_connections is not None:
        return Variable(name, str(plan.knobs.max_connections), "knobs.max_connections of the plan")
    if plan.chip.architecture == "blackwell":
        return Variable(name, "32", "from Blackwell on streams must not share a hardware queue")
    if (layout.tp > 1 or layout.cp > 1) and not plan.knobs.ep_overlap and plan.knobs.data_parallel == "zero1":
        reason = "one hardware queue: TP and CP communication starts before the GEMM that hides it"
        return Variable(name, "1", reason)
    if backend:
        return Variable(name, "32", f"{backend} and the GEMMs beside it must not share a hardware queue")
    if plan.knobs.data_parallel != "zero1":
        return Variable(name, "8", "Megatron's FSDP refuses to run with one hardware queue")
    return Variable(name, "8", "streams that overlap must not share a hardware queue")


def _hybridep(plan: Plan) -> list[Variable]:
    ep, domain = plan.layout.ep, plan.cluster.domain or plan.chip.domain
    is_rack = plan.chip.is_rack_scale
    inside = min(ep, domain if is_rack else _NODE_DOMAIN)
    chunk = next((size for size in COMBINE_CHUNKS if tokens_of_rank(plan) % size == 0), COMBINE_CHUNKS[-1])
    return [
        Variable("NVLINK_DOMAIN_SIZE", str(domain), "GPUs that NVLink joins, for HybridEP's choice of path"),
        Variable("USE_MNNVL", "1" if is_rack else "0", "whether NVLink reaches past the node"),
        Variable(
            "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN", str(inside), "expert-parallel ranks that reach each other by it"
        ),
        Variable("NUM_OF_TOKENS_PER_CHUNK_COMBINE_API", str(chunk), "tokens that a combine sends at a time"),
    ]
