"""Which degrees of tensor parallelism cut a model into equal parts."""

from threefold.spec.model import CompressedSpec, MlaSpec, ModelSpec


def _tp_parts(model: ModelSpec) -> dict[str, int]:
    """What tensor parallel cuts, by name. Key/value heads are not here: they may be copied."""
    parts: dict[str, int] = {}
    if model.attention:
        parts["attention heads"] = model.attention.num_heads
    if model.local_attention:
        parts["window attention heads"] = model.local_attention.num_heads
    if isinstance(model.attention, CompressedSpec):
        parts["groups of heads"] = model.attention.out_groups
    if model.delta:
        parts["delta-rule key heads"] = model.delta.num_k_heads
        parts["delta-rule value heads"] = model.delta.num_v_heads
    if model.mamba:
        parts["Mamba heads"] = model.mamba.num_heads
        parts["Mamba groups"] = model.mamba.num_groups
    if any(layer.ffn == "dense" for layer in model.layers):
        parts["dense feed-forward width"] = model.dense_dim
    if model.moe and model.moe.shared_width:
        parts["shared expert width"] = model.moe.shared_width
    return parts


def tp_fits(model: ModelSpec, tp: int) -> str | None:
    """The first thing this degree cannot cut, or None."""
    for name, size in _tp_parts(model).items():
        if size % tp:
            return f"{size} {name}"
    for spec in model.attention_kinds:
        if spec and not isinstance(spec, MlaSpec) and spec.num_kv_heads % tp and tp % spec.num_kv_heads:
            return f"{spec.num_kv_heads} key/value heads"
    return None
