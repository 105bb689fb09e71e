"""What names of kernels, operators and annotations say: communication, compute or a copy.

`classify.py` asks in the order of its evidence. Each function returns None for a name that says nothing, so that the
next evidence decides. Names are those that profilers write: demangled C++ (`void at::native::...`), Triton's
(`triton_poi_fused_add_0`), torch's operators (`aten::mm`) and ranges of programs (`nccl:all_reduce`).
"""

import re
from functools import lru_cache

COMMUNICATION, COMPUTE, COPY, UNKNOWN = "communication", "compute", "copy", "unknown"
CLASSES = (COMMUNICATION, COMPUTE, COPY, UNKNOWN)

SYNC_CALLS = re.compile(r"Synchronize|cudaEventQuery")  # of the runtime, in which the host waits for the device
COLLECTIVE_KINDS = (
    "alltoall", "allgather", "allreduce", "reducescatter", "broadcast", "send", "recv", "barrier", "gather",
)  # fmt: skip

_FLAGS = re.IGNORECASE
_COLLECTIVE_WORDS = (
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|\ba2a|all2all|send_?recv|\birecv\b|\bisend\b|broadcast_?coll"
)

# Kernels of communication libraries that move nothing: they count tokens or lay out buffers.
_LAYOUT_KERNELS = re.compile(
    r"get_dispatch_layout|deep_?ep::layout|hybrid_?ep::\w*(scan|permute|preprocess)|permute_preprocessing_kernel"
    r"|\b(un)?permute_kernel",
    _FLAGS,
)
_COMMUNICATION_KERNELS = re.compile(
    r"nccl|rccl|oneccl|mscclpp?|deep_?ep|hybrid_?ep|nvshmem|rocshmem|userbuffers|\bub_|multimem|symm_?mem"
    r"|(intranode|internode|internode_ll|low_latency)\w*::|\b(cached_)?notify_(dispatch|combine)"
    r"|\b(dispatch|combine)_kernel\b|device_sync_kernel|update_expected_value_kernel|pplx|cross_device_reduce"
    rf"|(one|two)_?shot_?all|{_COLLECTIVE_WORDS}|barrier_all|\bgloo\b",
    _FLAGS,
)
_COPY_KERNELS = re.compile(
    r"^\s*\[?(cuda |cu|hip)?_?mem(cpy|set)|CatArrayBatchedCopy|direct_copy_kernel|\bcopy_kernel\b", _FLAGS
)
_GEMM_KERNELS = re.compile(
    r"gemm|gemv|cutlass|cublas|nvjet|xmma|hmma|imma|\bsm\d+_|ampere_|volta_|turing_|hopper_|blackwell_|wgmma|tcgen05"
    r"|matmul|_mm_|\bmm_|wgrad|dgrad|fprop|cijk_|splitk|^aten::(_scaled_|_grouped_)?(mm|addmm|bmm|baddbmm|linear)\b|mmBackward",
    _FLAGS,
)
_ATTENTION_KERNELS = re.compile(r"flash|fmha|attention|attn|softmax|sdpa|mla_|paged", _FLAGS)
_OTHER_COMPUTE_KERNELS = re.compile(
    r"at::native|at_cuda_detail|c10::|\bcub::|thrust::|cudnn|transformer_engine|apex|multi_tensor|triton|elementwise"
    r"|reduce_kernel|norm|rope|rotary|swiglu|silu|gelu|relu|topk|top_k|router|sort|permute|gather|scatter|index"
    r"|embedding|cross_?entropy|nll_?loss|adam|sgd|muon|lamb|optimizer|quant|cast|transpose|conv|pool|dropout|philox"
    r"|distribution|fill|arange|cumsum|scan|unrolled|vectorized|tensor_kernel|causal|mamba|delta_rule|chunk_",
    _FLAGS,
)
# Triton kernels of our own engine whose names no family covers; a test compares them with the engine.
_OWN_KERNELS = re.compile(
    r"^(_fc1_forward|_fc2_backward|_sum_(rows|partials|squares|routing)|_scale|_rotate(_grad)?|_fill_table|_block_ends"
    r"|_(count|rank)_experts|_split_bf16|_weight_amax|_activation_grad|_join_keys(_grad)?|_rotate_tails"
    r"|_sum_squares_of_many|_pack_tokens|_unpack_rows)$"
)

_COMMUNICATION_OPERATORS = re.compile(
    r"^(_?c10d(_functional)?(_autograd)?::|nccl:|gloo:|ucc:|mpi:|xccl:|hccl:|symm_mem::|record_param_comms)"
    rf"|{_COLLECTIVE_WORDS}",
    _FLAGS,
)
_COPY_OPERATORS = re.compile(r"^aten::(copy_|_to_copy|to|clone|contiguous|cat|_copy_from|pin_memory)$")
_COMPUTE_OPERATORS = re.compile(
    r"^(aten|torchvision|torchao|flash_attn\w*|_flash_attn\w*|xformers|fbgemm|prims|quantized|transformer_engine|te|tex"
    r"|triton|torch_scatter|mamba\w*|causal_conv1d\w*|flash_mla|deep_gemm)::"
    r"|^(triton_|graph_\d+_cpp_|Optimizer\.step#)|Backward\d+$",
)
# Ranges and autograd functions of a module: most of their work is of one class, and some is not.
_COMMUNICATION_REGIONS = re.compile(
    r"^_?(threefold\.|moe[ _.]?|fused_?|token_?)*(dispatch|combine)(\b|_|backward|forward)"
    r"|deep_?ep|hybrid_?ep|nvshmem|fused_?a2a",
    _FLAGS,
)
_COMPUTE_REGIONS = re.compile(
    r"^_?(threefold\.|moe[ _.]?|self_?|shared_?|chunked_?)*(attention|attn|router|experts|mlp|loss|cross_?entropy"
    r"|optimizer|encoder|projector|embedding|linear|rms_?norm|layer_?norm|rope|rotary|swiglu|forward|backward)"
    r"(\b|_|backward|forward)",
    _FLAGS,
)


@lru_cache(maxsize=65_536)
def kernel_class(name: str) -> str | None:
    """The class of a kernel by families of names."""
    if _COPY_KERNELS.search(name):
        return COPY
    if _LAYOUT_KERNELS.search(name):
        return COMPUTE
    if _COMMUNICATION_KERNELS.search(name):
        return COMMUNICATION
    families = (_GEMM_KERNELS, _ATTENTION_KERNELS, _OTHER_COMPUTE_KERNELS, _OWN_KERNELS)
    return COMPUTE if any(family.search(name) for family in families) else None


@lru_cache(maxsize=65_536)
def operator_class(name: str) -> str | None:
    """The class of what an operator launches, by the operator's name."""
    name = name.partition(",")[0]  # torch.autograd.profiler.emit_nvtx adds sizes behind a comma
    if _COMMUNICATION_OPERATORS.search(name):
        return COMMUNICATION
    if _COPY_OPERATORS.search(name):
        return COPY
    return COMPUTE if _COMPUTE_OPERATORS.search(name) else None


@lru_cache(maxsize=65_536)
def collective_kind(name: str) -> int:
    """The index in `COLLECTIVE_KINDS` of what a name says, -1 for none: `gloo:all_to_all`, `c10d::alltoall_base_`."""
    bare = re.sub(r"[^a-z]", "", name.lower().rpartition(":")[2])
    return next((number for number, kind in enumerate(COLLECTIVE_KINDS) if kind in bare), -1)


@lru_cache(maxsize=65_536)
def annotation_class(name: str) -> str | None:
    """The class that a range states outright: it names a collective or an operator."""
    return operator_class(name)


@lru_cache(maxsize=65_536)
def region_class(name: str) -> str | None:
    """The class of most work in a module, by a range or an autograd function. Every other evidence goes first."""
    if _COMMUNICATION_REGIONS.search(name):
        return COMMUNICATION
    return COMPUTE if _COMPUTE_REGIONS.search(name) else None


@lru_cache(maxsize=65_536)
def compute_family(name: str) -> str:
    """The kind of compute of a kernel, by its name: gemm, attention or other."""
    if _ATTENTION_KERNELS.search(name):
        return "attention"
    return "gemm" if _GEMM_KERNELS.search(name) or name in ("_fc1_forward", "_fc2_backward") else "other"
