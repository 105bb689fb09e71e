"""Activations that our own engine keeps on the host under `knobs.activation_offload`: bytes by layer and memory term.

Tensors are counted one by one, as in `activations.py`. A tensor that several modules save leaves the device only when
the plan names all of these modules. `model.py` subtracts the result from a layer's activations; `peak.py` adds what has
come back.

Mirrors `engine/autograd/offload.py`, `engine/autograd/saved_tensors.py`, `engine/models/activation_memory.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from threefold.cost.memory.stage_memory import Terms, add_terms
from threefold.cost.memory.threefold.activations import (
    chosen_key_bytes,
    exchanged_latent_bytes,
    expert_bytes,
    gathered_input_bytes,
    layer_activations,
    mixer_bytes,
    mixer_saves_norm,
    mla_latent_bytes,
    mla_up_bytes,
    saves_output_twice,
)
from threefold.cost.memory.threefold.local_sizes import FP32, LocalSizes, for_layer
from threefold.cost.memory.threefold.timelines.grouped_heads import saved_output_bytes
from threefold.cost.memory.threefold.timelines.norm_inputs import (
    norm_bytes,
    norms_in_fp32,
    out_norm_bytes,
    value_norm_bytes,
)
from threefold.cost.stage_contents import PlacedLayer, first_gradient_in
from threefold.layout.stages import Chunk
from threefold.spec.model import CompressedSpec, GqaSpec, Layer, MlaSpec
from threefold.units import MIB

MIN_BYTES = MIB  # smaller tensors stay on a GPU
_MIXER = ("attn_norm", "qkv_linear", "core_attn", "attn_proj")
_FUSED = "fused_group_mlp"
# Modules that "fused_group_mlp" offloads; FC2's input has no name of its own that a plan could write.
_INSIDE_EXPERTS = ("expert_fc1", "moe_act", "expert_fc2")
_WHOLE_LAYER = "combine"  # a step of the experts' backward that no named module saves anything for
_BEFORE_ATTENTION = frozenset({"attn_norm", "qkv_linear"})  # the backward reaches them after attention's


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A saved tensor, or several with the same modules."""

    num_bytes: float
    term: str  # the memory term that counts it
    saved_by: tuple[str, ...]  # all modules that save it


@dataclass(frozen=True, slots=True)
class OffloadedActivations:
    """Bytes of a layer that are on the host between forward and backward."""

    mixer: Terms = field(default_factory=dict)  # tensors that the mixer and its norm save
    ffn: Terms = field(default_factory=dict)  # tensors that the feed-forward part and its norm save
    modules: frozenset[str] = frozenset()  # the modules whose tensors these are

    @property
    def terms(self) -> Terms:
        return add_terms((self.mixer, self.ffn))

    @property
    def total(self) -> float:
        return sum(self.mixer.values()) + sum(self.ffn.values())

    @property
    def is_whole_layer(self) -> bool:
        """Whether everything that the layer saves is on the host, the inputs of what it recomputes too."""
        return _WHOLE_LAYER in self.modules

    @property
    def is_needed_by_attention(self) -> bool:
        """Whether the backward reads one of the tensors before attention's backward is over."""
        return not self.modules <= _BEFORE_ATTENTION

    def received_input_bytes(self, local: LocalSizes, chunk: Chunk) -> float:
        """What is counted here of the input of a pipeline chunk whose first layer this is. It stays on the device: the
        chunk holds what it has received for the gradient that it sends back."""
        is_received = local.plan.layout.pp > 1 and not chunk.embedding and "attn_norm" in self.modules
        return local.residual_bytes if is_received else 0.0


NOTHING_OFFLOADED = OffloadedActivations()


def offloaded_activations(local: LocalSizes, layer: Layer) -> OffloadedActivations:
    """What one layer keeps on the host for one microbatch."""
    local = for_layer(local, layer)
    if isinstance(layer, PlacedLayer) and layer.is_offloaded:
        return _whole_layer(layer_activations(local, layer))
    names = set(local.plan.knobs.activation_offload)
    if "full" in local.recompute:  # nothing is saved inside a layer but outputs that a plan names
        outputs = saved_output_bytes(local, layer) if "core_attn" in names else 0.0
        return (
            OffloadedActivations({"attention": outputs}, {}, frozenset({"core_attn"})) if outputs else NOTHING_OFFLOADED
        )
    if not names:
        return NOTHING_OFFLOADED
    if _FUSED in names:
        names |= {*_INSIDE_EXPERTS}
    min_bytes = MIN_BYTES if local.has_fused_kernels else 1
    offloaded = [
        tensor
        for tensor in _saved_tensors(local, layer)
        if tensor.num_bytes >= min_bytes and names.issuperset(tensor.saved_by)
    ]
    sides: tuple[Terms, Terms] = ({}, {})
    for tensor in offloaded:
        side = sides[tensor.saved_by[0] not in _MIXER]
        side[tensor.term] = side.get(tensor.term, 0.0) + tensor.num_bytes
    return OffloadedActivations(*sides, frozenset(name for tensor in offloaded for name in tensor.saved_by))


def _whole_layer(saved: Terms) -> OffloadedActivations:
    """Everything that a layer saves. Any step of its backward needs some of it."""
    mixer = {"norms": saved.get("norms", 0.0) / 2, "attention": saved.get("attention", 0.0)}
    ffn = {name: size - mixer.get(name, 0.0) for name, size in saved.items()}
    return OffloadedActivations(mixer, ffn, frozenset((*_MIXER, *_INSIDE_EXPERTS, _FUSED, _WHOLE_LAYER, "dense")))


def _saved_tensors(local: LocalSizes, layer: Layer) -> Iterator[SavedTensor]:
    """Tensors of a layer that can be offloaded."""
    residual, begins = norm_bytes(local, local.model.dim) * local.tokens, first_gradient_in(layer)
    if begins == "none":
        return
    if layer.mixer != "none" and begins == "input":
        yield SavedTensor(residual, "norms", ("attn_norm",))
        if mixer_saves_norm(local, layer):
            # Attention over latents saves the input of queries too, which without latents of their own is this one.
            spec = local.model.attention
            is_query = isinstance(spec, MlaSpec) and not spec.q_rank and layer.mixer == "attention"
            also = ("core_attn",) if is_query and local.plan.exchanges_latents and not local.quantized_bytes else ()
            normed = local.gemm_input_bytes * local.model.dim * local.tokens
            yield SavedTensor(normed, "norms", ("qkv_linear", *also))
        yield from _mixer_tensors(local, layer)
    if layer.ffn != "none" and begins != "ffn":
        yield SavedTensor(residual, "norms", ("mlp_norm",))
    if layer.ffn == "moe" and "moe" not in local.recompute:
        yield from _expert_tensors(local)


def _mixer_tensors(local: LocalSizes, layer: Layer) -> Iterator[SavedTensor]:
    model, b = local.model, local.element_bytes
    spec = model.attention_of(layer)
    if layer.mixer == "delta" and model.delta:
        output = 0.0
        if "gdn_norm_out" not in local.recompute:
            output = b * model.delta.values / local.tp * local.gathered_tokens
        yield _attention(gathered_input_bytes(local, "mixer"), "qkv_linear")
        yield _attention(mixer_bytes(local, layer) - gathered_input_bytes(local, "mixer") - output, "core_attn")
        yield _attention(output, "attn_proj")
    elif layer.mixer == "mamba" and model.mamba:
        output = local.gemm_input_bytes * model.mamba.inner_dim / local.tp * local.gathered_tokens
        yield _attention(gathered_input_bytes(local, "mixer"), "qkv_linear")
        yield _attention(mixer_bytes(local, layer) - gathered_input_bytes(local, "mixer") - output, "core_attn")
        yield _attention(output, "attn_proj")
    elif isinstance(spec, MlaSpec):
        # Latents as ranks exchange them are saved by attention over ranks.
        exchanged = exchanged_latent_bytes(local, spec) if local.plan.exchanges_latents else 0.0
        yield _attention(mla_latent_bytes(local, spec) - exchanged, "qkv_linear")
        yield _attention(exchanged, "core_attn")
        if "mla_up_proj" not in local.recompute:
            yield _attention(mla_up_bytes(local, spec), "core_attn")
        yield from _core_attention_tensors(local, spec, spec.num_heads * spec.v_dim / local.tp)
    elif isinstance(spec, CompressedSpec):
        s, is_saved = local.gathered_tokens, "core_attn" not in local.recompute
        queries, keys = b * spec.q_dim / local.tp * s, b * spec.head_dim * (s + (s / spec.rate if spec.rate else 0.0))
        core = queries + keys + is_saved * (queries + FP32 * spec.num_heads / local.tp * s)
        out = is_saved * queries + b * spec.out_groups * spec.out_rank / local.tp * s
        yield _attention(mixer_bytes(local, layer) - core - out, "qkv_linear")
        yield _attention(core, "core_attn")
        yield _attention(out, "attn_proj")
    elif isinstance(spec, GqaSpec):
        yield _attention(gathered_input_bytes(local, "mixer"), "qkv_linear")
        yield from _gqa_tensors(local, spec)
        yield _attention(out_norm_bytes(local, spec), "attn_proj")
        yield from _core_attention_tensors(local, spec, spec.q_dim / local.tp)


def _gqa_tensors(local: LocalSizes, spec: GqaSpec) -> Iterator[SavedTensor]:
    """Queries (with their gate) and keys before their norms; queries, keys and values as the kernel reads them."""
    b, s, head = local.element_bytes, local.gathered_tokens, spec.head_dim
    q, kv = spec.q_dim / local.tp, max(1.0, spec.num_kv_heads / local.tp) * head
    if spec.gated:
        yield _attention(2 * b * q * s, "qkv_linear")
    if spec.qk_norm:
        yield _attention(norm_bytes(local, kv, kv / head) * s, "qkv_linear")
        if not spec.gated or norms_in_fp32(local):
            yield _attention(norm_bytes(local, q, q / head) * s, "qkv_linear")
    yield _attention(value_norm_bytes(local, spec, kv) * s, "qkv_linear")
    for size in (q, kv, kv):
        yield _attention(b * size * s, "core_attn")


def _core_attention_tensors(local: LocalSizes, spec: GqaSpec | MlaSpec, output_dim: float) -> Iterator[SavedTensor]:
    """What the attention kernel saves besides its inputs. The output projection saves the kernel's output too, or a
    copy."""
    if "core_attn" in local.recompute:
        return
    output = local.element_bytes * output_dim * local.gathered_tokens
    yield _attention(FP32 * spec.num_heads / local.tp * local.gathered_tokens, "core_attn")
    if isinstance(spec, MlaSpec):
        yield _attention(chosen_key_bytes(local, spec), "core_attn")
    if isinstance(spec, GqaSpec) and spec.gated:
        yield _attention(output, "core_attn")
    if "attention_output" not in local.saved_inputs:  # a frozen output projection saves none
        yield _attention(output, "core_attn")
    elif saves_output_twice(local, spec):
        yield _attention(output, "core_attn")
        yield _attention(output, "attn_proj")
    else:
        yield _attention(output, "core_attn", "attn_proj")


def _attention(num_bytes: float, *saved_by: str) -> SavedTensor:
    return SavedTensor(num_bytes, "attention", saved_by)


def _expert_tensors(local: LocalSizes) -> Iterator[SavedTensor]:
    """Tensors of the routed experts. Tokens that experts read in place stay on the device: the router saves them
    too."""
    moe, dim, r = local.model.moe, local.model.dim, local.expert_rows
    assert moe is not None
    inputs, b = local.saved_inputs, local.element_bytes
    low = 0.0 if local.has_adapters else local.quantized_bytes
    rows = 0.0 if local.experts_read_in_place or low or "expert_rows" not in inputs else b * dim * r
    if local.uses_fused_experts:
        yield SavedTensor(rows, "dispatch", (_FUSED,))
        yield SavedTensor(expert_bytes(local), "experts", (_FUSED,))
        return
    hidden = b * moe.expert_dim / local.plan.layout.etp * r
    fc2_input = 0.0 if "moe_act" in local.recompute else (low / b or 1.0) * hidden * ("expert_product" in inputs)
    quantized_rows, biases = low * dim * r * ("expert_rows" in inputs), b * dim * r if moe.bias else 0.0
    yield SavedTensor(rows, "dispatch", ("expert_fc1",))
    yield SavedTensor(quantized_rows, "experts", ("expert_fc1",))
    yield SavedTensor(expert_bytes(local) - quantized_rows - fc2_input - biases, "experts", ("moe_act",))
    yield SavedTensor(fc2_input + biases, "experts", ("expert_fc2",))
