"""Sizes on one rank of our own engine: tokens and rows of a microbatch, bytes of their elements, and chunk sizes.

Every module of this folder takes a `LocalSizes` and multiplies. For 4,096 tokens on CP 2 and TP 2, `gathered_tokens` is
2048 (inside a tensor-parallel module), `tokens` is 1024 (between modules), and with top-8 routing `dispatched_rows` is
8192.

Mirrors `engine/models/head_groups.py`, `engine/models/activation_memory.py`, `engine/autograd/token_chunks.py`,
`engine/kernels/experts/kernel_choice.py`, `engine/precision/recipes.py`, `engine/attention/backend.py`.
"""

import math
from dataclasses import dataclass, replace

from threefold.cost import stage_contents
from threefold.cost.delta_rule import last_cp_comm
from threefold.cost.format_support import uses_fused_experts
from threefold.cost.trained_weights import gemms_per_weight, saved_inputs
from threefold.plan.plan import Plan
from threefold.spec.model import CompressedSpec, GqaSpec, MlaSpec, ModelSpec
from threefold.units import GIB

FP32, INT64 = 4, 8  # bytes
# Bytes of an element of a quantized GEMM input, scales included.
_BLOCK_SCALED = 1 + FP32 / 128**2
_QUANTIZED_BYTES = {
    "fp8-blockwise": _BLOCK_SCALED,
    "fp8-rowwise": _BLOCK_SCALED,
    "mxfp8": 1 + 1 / 32,
    "nvfp4": 0.5 + 1 / 16,
}
MAX_FLASH_DIM, FLASH_DIM_MULTIPLE = 256, 8  # of the heads that flash kernels on GPUs take
SCALE_ROWS = 128  # rows of an expert that share scales in FP8
CHUNK_LIMIT_BYTES = 2 * GIB  # the largest tensor of a chunk, where the engine works in chunks


@dataclass(frozen=True)
class LocalSizes:
    """Sizes of one microbatch on one rank."""

    plan: Plan
    skew: float = 1.0  # tokens at the busiest expert rank over the balanced number
    layer_cp_comm: str | None = None  # the layer's entry of a list in `knobs.cp_comm`

    @property
    def model(self) -> ModelSpec:
        return self.plan.model

    @property
    def without_recompute(self) -> "LocalSizes":
        """The sizes of the same plan with nothing recomputed."""
        if not self.recompute:
            return self
        return replace(self, plan=replace(self.plan, knobs=replace(self.plan.knobs, recompute=())))

    @property
    def element_bytes(self) -> int:
        """Bytes of an element of activations and weights."""
        return 4 if self.plan.knobs.precision == "fp32" else 2

    @property
    def is_16_bit(self) -> bool:
        return self.element_bytes == 2

    @property
    def quantized_bytes(self) -> float:
        """Bytes of an element of a quantized GEMM input, which is saved beside what other modules save of that tensor;
        0 where GEMMs are not in low precision."""
        return _QUANTIZED_BYTES.get(self.plan.knobs.precision, 1.0) if self.plan.low_precision else 0.0

    @property
    def gemm_input_bytes(self) -> float:
        """Bytes of an element of a tensor that only a GEMM saves. A LoRA adapter saves it as it is."""
        return self.element_bytes if self.has_adapters else self.quantized_bytes or self.element_bytes

    @property
    def has_adapters(self) -> bool:
        return self.plan.job.lora_rank is not None

    @property
    def saved_inputs(self) -> frozenset[str]:
        """The tensors that some weight gradient reads; inputs of frozen weights are not among them."""
        return saved_inputs(self.plan)

    @property
    def trained_fraction(self) -> float:
        """The part of the dense weights that has gradients."""
        return gemms_per_weight(self.plan)[1]

    @property
    def trained_expert_fraction(self) -> float:
        """The part of the experts' weights that has gradients."""
        return gemms_per_weight(self.plan, "experts")[1]

    def adapter_bytes(self, target: str, num_adapters: int, tokens: float) -> float:
        """What adapters of a target save between their two GEMMs; 0 where the plan has none."""
        rank = self.plan.job.lora_rank
        if rank is None or target not in self.plan.job.lora_targets:
            return 0.0
        return self.element_bytes * rank * num_adapters * tokens

    @property
    def expert_adapter_copies(self) -> int:
        """Tensors in which adapters of experts make their part of a result: one, and the parts of single experts where
        no grouped GEMM takes their rank; 0 without such adapters."""
        rank = self.plan.job.lora_rank
        if rank is None or "experts" not in self.plan.job.lora_targets:
            return 0
        return 2 if rank * self.element_bytes % 16 else 1

    @property
    def num_fc1(self) -> int:
        """Matrices of a feed-forward network's first GEMM: gate and up, or up alone."""
        return 2 if self.model.glu else 1

    @property
    def has_fused_kernels(self) -> bool:
        """Whether norms, rotary embedding, router and activations are the engine's own kernels, which save less."""
        return self.plan.chip.architecture != "cpu"

    @property
    def routes_in_fp32(self) -> bool:
        """Whether routers save tokens in fp32, to multiply them in fp32: but for bf16 on a GPU, which has a kernel."""
        return self.is_16_bit and (not self.has_fused_kernels or self.plan.knobs.precision == "fp16")

    def attends_in_blocks(self, spec: GqaSpec | MlaSpec) -> bool:
        """Whether attention runs in plain torch in blocks of queries, whose scores are recomputed: for chosen keys, and
        for what flash kernels do not take, on a CPU windows."""
        if is_sparse(spec):
            return True
        if not self.has_fused_kernels:
            window = spec.window if isinstance(spec, GqaSpec) else None
            return not self.attends_in_tiles and window is not None and window < self.plan.job.seq_len
        width = spec.head_dim if isinstance(spec, GqaSpec) else spec.qk_dim
        return not self.is_16_bit or width > MAX_FLASH_DIM or width % FLASH_DIM_MULTIPLE > 0

    @property
    def tp(self) -> int:
        return self.plan.layout.tp

    @property
    def gathered_tokens(self) -> float:
        """Tokens inside a tensor-parallel module, which gathers the sequence."""
        return self.plan.job.micro_batch * self.plan.job.seq_len / self.plan.layout.cp

    @property
    def tokens(self) -> float:
        """Tokens that the rank holds between modules (sequence parallel)."""
        return self.gathered_tokens / self.tp

    @property
    def residual_bytes(self) -> float:
        """The residual stream between layers, or all streams of a model with several."""
        return self.element_bytes * self.model.stream_dim * self.tokens

    @property
    def dispatched_rows(self) -> float:
        """Rows that the rank sends to experts, one for each token and chosen expert."""
        return self.tokens * self.model.moe.top_k if self.model.moe else 0.0

    @property
    def expert_rows(self) -> float:
        """Rows that the rank's experts receive. With expert tensor parallelism each slice of an expert gets all
        rows. On one rank with all tokens experts are padded to their capacity; else only rows that are kept are
        sent."""
        layout, capacity = self.plan.layout, self.plan.expert_capacity_factor
        is_padded = capacity is not None and layout.ep * layout.etp * layout.tp * layout.cp == 1
        load = capacity if is_padded and capacity is not None else self.skew
        return self.dispatched_rows * load * layout.etp

    @property
    def padded_expert_rows(self) -> float:
        """The same, where each expert's rows are padded to whole blocks of scales, in every chunk of tokens."""
        assert self.model.moe is not None
        num_experts = self.model.moe.num_experts / self.plan.layout.ep
        return self.expert_rows + SCALE_ROWS * num_experts / self.expert_chunk_fraction

    @property
    def experts_are_local(self) -> bool:
        """Whether tokens find all experts on their own rank, and none is dropped."""
        return self.plan.layout.ep * self.plan.layout.etp == 1 and self.plan.job.capacity_factor is None

    @property
    def experts_read_in_place(self) -> bool:
        """Whether expert kernels read tokens in place by index, without permuted copies."""
        return self.experts_are_local and self.uses_fused_experts and self.plan.knobs.expert_fusion

    @property
    def uses_fused_experts(self) -> bool:
        return uses_fused_experts(self.plan)

    @property
    def fuses_grad_accumulation(self) -> bool:
        """Whether kernels of fused experts add weight gradients straight into the main gradients, which are wider."""
        knobs, layout = self.plan.knobs, self.plan.layout
        accumulates = layout.gpus > 1 or self.plan.num_microbatches > 1
        fuses = knobs.grad_accum_fusion and knobs.data_parallel == "zero1"
        return fuses and accumulates and self.accumulates_wider

    @property
    def accumulates_wider(self) -> bool:
        """Whether gradients are accumulated in another dtype than weights have."""
        return self.plan.knobs.precision == "fp16" or (self.is_16_bit and self.plan.knobs.grad_dtype == "fp32")

    @property
    def reduced_bytes(self) -> int:
        """Bytes of an element of a gradient as FSDP reduces it."""
        is_wide = self.accumulates_wider or not self.is_16_bit or not self.has_fused_kernels
        return FP32 if is_wide else self.element_bytes

    @property
    def expert_chunk_fraction(self) -> float:
        """The fraction of its tokens that a rank sends to experts at a time; less than 1 where all experts are
        local."""
        return self._chunk_fraction(self.dispatched_rows * self.model.dim) if self.experts_are_local else 1.0

    @property
    def mlp_chunk_fraction(self) -> float:
        """The fraction of its tokens that a recomputed dense MLP works on at a time."""
        return 1.0 if self.gathers_sequence else self._chunk_fraction(self.tokens * self.model.dense_dim)

    @property
    def head_chunk_fraction(self) -> float:
        """The fraction of MLA's heads that is recomputed at a time; all in low precision, whose weights are quantized
        as a whole, and with adapters."""
        spec = self.model.attention
        adapts = self.has_adapters and "attention" in self.plan.job.lora_targets
        if not isinstance(spec, MlaSpec) or self.plan.layout.cp > 1 or self.plan.low_precision or adapts:
            return 1.0
        return self._chunk_fraction(self.gathered_tokens * spec.num_heads / self.tp * spec.qk_dim)

    def _chunk_fraction(self, elements: float) -> float:
        return 1 / max(1, math.ceil(elements * self.element_bytes / CHUNK_LIMIT_BYTES))

    @property
    def cp_comm(self) -> str:
        """How context-parallel ranks communicate in the layer; of several kinds, the last one."""
        return last_cp_comm(self.plan, self.layer_cp_comm)

    @property
    def attends_in_tiles(self) -> bool:
        """Whether attention merges tiles of a sequence that context-parallel ranks hold, or of latents."""
        return self.plan.layout.cp > self.cp_inner or self.plan.exchanges_latents

    @property
    def cp_inner(self) -> int:
        """Context-parallel ranks that trade sequence for heads."""
        return {"a2a": self.plan.layout.cp, "a2a+p2p": self.plan.cp_inner}.get(self.cp_comm, 1)

    @property
    def layers_per_recompute(self) -> int:
        return stage_contents.layers_per_recompute(self.plan)

    @property
    def recompute_units_per_layer(self) -> float:
        """Units of full recompute, each of which saves its input, over the layers of a chunk: units of 3 layers are two
        in a chunk of 4, and one in a chunk of 2."""
        unit = self.layers_per_recompute
        return max(math.ceil(len(chunk.layers) / unit) / max(1, len(chunk.layers)) for chunk in self.plan.chunks)

    @property
    def recompute(self) -> frozenset[str]:
        """Names of the recomputed modules."""
        return frozenset(self.plan.knobs.recompute)

    @property
    def overlaps_tp(self) -> bool:
        """Whether tensor-parallel GEMMs work on pieces that travel. They save what they gathered in any case, and make
        weight gradients at once."""
        return self.tp > 1 and self.plan.knobs.tp_overlap

    @property
    def gathers_sequence(self) -> bool:
        """Whether tensor-parallel modules gather the sequence, and so save the gathered copy."""
        return self.tp > 1


def for_layer(local: LocalSizes, layer: object) -> LocalSizes:
    """The sizes that hold for a layer: without recompute where "block" recompute leaves it out, with its own kind
    of CP communication, and as if all were frozen where it has no adapters."""
    if not isinstance(layer, stage_contents.PlacedLayer):
        return local
    if layer.cp_comm != local.layer_cp_comm:
        local = replace(local, layer_cp_comm=layer.cp_comm)
    if not layer.is_adapted:
        job = replace(local.plan.job, lora_rank=None, freeze=("language",))
        local = replace(local, plan=replace(local.plan, job=job))
    return local.without_recompute if isinstance(layer, stage_contents.NotRecomputedLayer) else local


def is_sparse(spec: GqaSpec | MlaSpec) -> bool:
    """Whether queries read the keys that an indexer chose, or entries of several tokens."""
    return isinstance(spec, CompressedSpec) or (isinstance(spec, MlaSpec) and spec.indexer is not None)
