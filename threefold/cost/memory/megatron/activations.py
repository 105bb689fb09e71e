"""Activations that a layer of Megatron saves from forward to backward: bytes on one rank for one microbatch, by term.

`megatron/model.py` calls `layer_activations` for each kind of layer. All functions below it return bytes per token
unless they say otherwise. `input_bytes` is the size of an element of a saved GEMM input: 2 in bf16, about 1 in FP8
formats.
"""

from functools import lru_cache

from threefold.cost.layer_work import BF16, LayerCase
from threefold.cost.memory.stage_memory import Terms
from threefold.spec.model import GqaSpec, Layer, MlaSpec, ModelSpec, VisionSpec

FP32 = 4
ROUTER_VALUES = 4.0  # fp32 values that the router saves per token and expert


@lru_cache(maxsize=65536)
def layer_activations(case: LayerCase, recompute: frozenset[str], input_bytes: float) -> Terms:
    """Bytes that one layer saves, where the modules named in `recompute` are recomputed."""
    model, layer = case.model, case.layer
    tokens = case.tokens / case.tp
    if "full" in recompute:
        return {"norms": BF16 * model.dim * tokens}
    saved = {"norms": _norms(model, layer, "layernorm" in recompute, input_bytes) * tokens}
    saved["attention"] = _mixer(model, layer, recompute, input_bytes) * tokens
    if layer.ffn == "dense":
        saved["mlp"] = 0.0 if "mlp" in recompute else _mlp(model, model.dense_dim, input_bytes, False) * tokens
    elif layer.ffn == "moe":
        saved |= _moe(case, recompute, input_bytes, tokens)
    return saved


def _norms(model: ModelSpec, layer: Layer, recomputed: bool, input_bytes: float) -> float:
    """The input of each norm (the residual stream) and its output, which the next GEMM saves."""
    parts = (layer.mixer != "none") + (layer.ffn != "none")
    output = 0 if recomputed else input_bytes
    return parts * model.dim * (BF16 + output)


def _mixer(model: ModelSpec, layer: Layer, recompute: frozenset[str], input_bytes: float) -> float:
    """What the mixer saves: attention (GQA or MLA), the gated delta rule, or Mamba."""
    spec = model.attention_of(layer)
    if layer.mixer == "mamba" and model.mamba:
        m = model.mamba
        channels = m.inner_dim + 2 * m.num_groups * m.state_dim
        # Projection output, convolution output, gated output, normed output; states between chunks of 128.
        states = m.num_heads * m.head_dim * m.state_dim * FP32 / 128
        outputs = BF16 * (m.inner_dim + channels + m.num_heads + channels + m.inner_dim)
        return outputs + input_bytes * m.inner_dim + states
    if layer.mixer == "delta" and model.delta:
        d = model.delta
        channels = 2 * d.keys + d.values
        states = d.num_v_heads * d.k_dim * d.v_dim * FP32 / 64
        norm_out = 0 if "gdn_norm_out" in recompute else input_bytes * d.values + BF16 * d.values
        return BF16 * (2 * channels + d.values + 4 * d.num_v_heads) + norm_out + states
    if spec is None:
        return 0.0
    if isinstance(spec, MlaSpec):
        return _mla(spec, recompute, input_bytes)
    assert isinstance(spec, GqaSpec)
    gate = spec.q_dim if spec.gated else 0
    qkv = BF16 * (spec.q_dim + 2 * spec.kv_dim)
    before_norm = BF16 * (spec.q_dim + spec.kv_dim) if spec.qk_norm else 0
    return qkv + before_norm + BF16 * 2 * gate + input_bytes * spec.q_dim + FP32 * spec.num_heads


def _mla(spec: MlaSpec, recompute: frozenset[str], input_bytes: float) -> float:
    latents = BF16 * (2 * (spec.q_rank or 0) + 2 * spec.kv_rank + spec.rope_dim)
    heads = spec.num_heads
    up_proj = 0.0
    if "mla_up_proj" not in recompute:
        # Queries before and after rotation, keys joined with their rotary part, values.
        up_proj = BF16 * heads * (2 * spec.qk_dim + spec.qk_dim + spec.nope_dim + 2 * spec.v_dim)
    return latents + up_proj + input_bytes * heads * spec.v_dim + FP32 * heads


def _mlp(model: ModelSpec, hidden: int, input_bytes: float, recomputes_act: bool) -> float:
    """FC1's output and, unless the activation is recomputed, the input of FC2."""
    num_fc1 = 2 if model.glu else 1
    return BF16 * num_fc1 * hidden + (0 if recomputes_act else input_bytes * hidden)


def _moe(case: LayerCase, recompute: frozenset[str], input_bytes: float, tokens: float) -> Terms:
    """Bytes of all tokens: router, permuted input of the experts, the experts, shared experts."""
    model, moe = case.model, case.model.moe
    assert moe is not None
    router = FP32 * ROUTER_VALUES * moe.num_experts * tokens
    if "moe" in recompute:
        return {"router": 0.0, "dispatch": 0.0, "experts": 0.0, "shared_experts": 0.0}
    rows = tokens * moe.top_k * case.capacity
    dispatch = input_bytes * (moe.latent_dim or model.dim) * rows
    experts = _mlp(model, moe.expert_dim, input_bytes, "moe_act" in recompute) * rows
    shared = 0.0
    if moe.shared_width and "shared_experts" not in recompute:
        shared = _mlp(model, moe.shared_width, input_bytes, False) * tokens
    return {"router": router, "dispatch": dispatch, "experts": experts, "shared_experts": shared}


def vision_activations(vision: VisionSpec, patches: float, frozen: bool) -> float:
    """Bytes that the image encoder saves for all patches; a frozen encoder saves nothing."""
    if frozen:
        return 0.0
    per_patch = BF16 * (2 * 2 * vision.dim + 4 * vision.dim + 2 * vision.mlp_dim) + FP32 * vision.num_heads
    return patches * vision.depth * per_patch
