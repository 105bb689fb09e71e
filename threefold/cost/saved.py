"""What a layer keeps from forward to backward: bytes on one rank for one microbatch, by memory term."""

from dataclasses import dataclass
from functools import lru_cache

from threefold.cost.work import BF16, Case
from threefold.spec.model import GqaSpec, Layer, MlaSpec, ModelSpec, VisionSpec

FP32 = 4


@dataclass(frozen=True, slots=True)
class Saves:
    """What a stack keeps. Data, not code: published runs calibrate Megatron's, our own engine ours."""

    norm_output: bool = True  # beside the norm's input
    qk_before_norm: bool = True  # queries and keys before the head norm, beside those after
    permuted_input: bool = True  # the experts' input, one row a routed copy
    act_output: bool = True  # the input of FC2
    fc2_output: bool = False  # needed only where router weights are applied behind FC2
    router_floats: float = 4.0  # fp32 values a token and expert


MEGATRON = Saves()
THREEFOLD = Saves(norm_output=False, permuted_input=False, act_output=False, router_floats=2.0)
SAVES = {"megatron-bridge": MEGATRON, "threefold": THREEFOLD}


@lru_cache(maxsize=65536)
def layer_saved(case: Case, saves: Saves, recompute: frozenset[str], act_bytes: float) -> dict[str, float]:
    """Bytes kept for one layer. `act_bytes` is the width of saved GEMM inputs."""
    model, layer = case.model, case.layer
    share = case.tokens / case.tp
    if "full" in recompute:
        return {"norms": BF16 * model.dim * share}
    kept = {"norms": _norms(model, layer, saves, "layernorm" in recompute, act_bytes) * share}
    kept["attention"] = _mixer(model, layer, saves, recompute, act_bytes) * share
    if layer.ffn == "dense":
        kept["mlp"] = 0.0 if "mlp" in recompute else _mlp(model, model.dense_dim, saves, act_bytes, False) * share
    elif layer.ffn == "moe":
        kept |= _moe(case, saves, recompute, act_bytes, share)
    return kept


def _norms(model: ModelSpec, layer: Layer, saves: Saves, again: bool, act_bytes: float) -> float:
    """Input of each norm (the residual stream) and its output, which the next GEMM keeps."""
    parts = (layer.mixer != "none") + (layer.ffn != "none")
    output = act_bytes if saves.norm_output and not again else 0
    return parts * model.dim * (BF16 + output)


def _mixer(model: ModelSpec, layer: Layer, saves: Saves, recompute: frozenset[str], act_bytes: float) -> float:
    spec = model.attention if layer.mixer == "attention" else model.local_attention
    if layer.mixer == "mamba" and model.mamba:
        m = model.mamba
        channels = m.inner_dim + 2 * m.num_groups * m.state_dim
        # Projection output, convolution output, gated output, normed output; states between chunks of 128.
        states = m.num_heads * m.head_dim * m.state_dim * FP32 / 128
        return BF16 * (m.inner_dim + channels + m.num_heads + channels + m.inner_dim) + act_bytes * m.inner_dim + states
    if layer.mixer == "delta" and model.delta:
        d = model.delta
        channels = 2 * d.keys + d.values
        states = d.num_v_heads * d.k_dim * d.v_dim * FP32 / 64
        norm_out = 0 if "gdn_norm_out" in recompute else act_bytes * d.values + BF16 * d.values
        return BF16 * (2 * channels + d.values + 4 * d.num_v_heads) + norm_out + states
    if layer.mixer not in ("attention", "window") or spec is None:
        return 0.0
    if isinstance(spec, MlaSpec):
        return _mla(spec, recompute, act_bytes)
    assert isinstance(spec, GqaSpec)
    gate = spec.q_dim if spec.gated else 0
    qkv = BF16 * (spec.q_dim + 2 * spec.kv_dim)
    before = BF16 * (spec.q_dim + spec.kv_dim) if spec.qk_norm and saves.qk_before_norm else 0
    return qkv + before + BF16 * 2 * gate + act_bytes * spec.q_dim + FP32 * spec.num_heads


def _mla(spec: MlaSpec, recompute: frozenset[str], act_bytes: float) -> float:
    low = BF16 * (2 * (spec.q_rank or 0) + 2 * spec.kv_rank + spec.rope_dim)
    heads = spec.num_heads
    up = 0.0
    if "mla_up_proj" not in recompute:
        # Queries before and after rotation, keys joined with their rotary part, values.
        up = BF16 * heads * (2 * spec.qk_dim + spec.qk_dim + spec.nope_dim + 2 * spec.v_dim)
    return low + up + act_bytes * heads * spec.v_dim + FP32 * heads


def _mlp(model: ModelSpec, width: int, saves: Saves, act_bytes: float, act_again: bool) -> float:
    """FC1 output and, unless it is made again, the input of FC2."""
    wide = 2 if model.glu else 1
    return BF16 * wide * width + (act_bytes * width if saves.act_output and not act_again else 0)


def _moe(case: Case, saves: Saves, recompute: frozenset[str], act_bytes: float, share: float) -> dict[str, float]:
    model, moe = case.model, case.model.moe
    assert moe is not None
    router = FP32 * saves.router_floats * moe.num_experts * share
    if "moe" in recompute:
        return {"router": 0.0, "dispatch": 0.0, "experts": 0.0, "shared_experts": 0.0}
    rows = share * moe.top_k * case.capacity
    width = moe.latent_dim or model.dim
    dispatch = act_bytes * width * rows if saves.permuted_input else 0.0
    experts = _mlp(model, moe.expert_dim, saves, act_bytes, "moe_act" in recompute) * rows
    if saves.fc2_output:
        experts += BF16 * width * rows
    shared = 0.0
    if moe.shared_width and "shared_experts" not in recompute:
        shared = _mlp(model, moe.shared_width, saves, act_bytes, False) * share
    return {"router": router, "dispatch": dispatch, "experts": experts, "shared_experts": shared}


def vision_saved(vision: VisionSpec, patches: float, frozen: bool) -> float:
    """The encoder's activations; a frozen one keeps none."""
    if frozen:
        return 0.0
    per_patch = BF16 * (2 * 2 * vision.dim + 4 * vision.dim + 2 * vision.mlp_dim) + FP32 * vision.num_heads
    return patches * vision.depth * per_patch
