"""What frozen weights and LoRA adapters save and cost: GEMMs of weight gradients, inputs saved for them, parameters.

`time/` asks how many GEMMs a weight takes part in, `memory/threefold` which inputs are saved for weight gradients.
Plans in which everything trains take the short way through each function.
"""

from functools import lru_cache
from math import prod

from threefold.cost.local_parameters import (
    Training,
    language_parameters,
    stage_parameters,
    training_of,
)
from threefold.plan.plan import Plan
from threefold.spec.model import CompressedSpec, MlaSpec, ModelSpec
from threefold.spec.params import PARTS

_ALL_GEMMS = (3.0, 1.0)  # forward, gradient of the input, gradient of the weight; how many are the last
_FROZEN_GEMMS = (2.0, 0.0)
# The tensor that the weight gradient of a GEMM reads, by the end of the weight's name.
_INPUTS = {
    "mixer": (
        *("mixer.q", "mixer.k", "mixer.v", "mixer.q_down", "mixer.kv_down", "mixer.qkvz", "mixer.ba"),
        "mixer.in_proj",
    ),
    "latents": ("mixer.q_up", "mixer.kv_up"),
    "attention_output": ("mixer.out",),
    "mlp": ("ffn.gate", "ffn.up"),
    "mlp_product": ("ffn.down",),
    "shared": ("shared.gate", "shared.up"),
    "shared_product": ("shared.down",),
    "shared_gate": ("shared_gate",),
    "router": ("router",),
    "normed": ("ffn.routed_scale", "ffn.shared_scale", "router.input_scale"),
    "expert_rows": ("experts.gate_up",),
    "expert_product": ("experts.down",),
    "head": ("head",),
    "embedding": ("embed",),
}
ALL_INPUTS = frozenset(_INPUTS)


def is_partly_frozen(plan: Plan) -> bool:
    """Whether some parameters of the plan's model do not train."""
    return bool(plan.job.freeze) or plan.job.lora_rank is not None or _has_frozen_indexers(plan)


def is_frozen_by_name(plan: Plan) -> bool:
    """Whether more is frozen than whole parts of a vision-language model."""
    by_name = plan.job.lora_rank is not None or any(entry not in PARTS for entry in plan.job.freeze)
    return by_name or _has_frozen_indexers(plan)


def _has_frozen_indexers(plan: Plan) -> bool:
    """Whether the model has indexers, which our own engine never trains."""
    spec = plan.model.attention
    return plan.target == "threefold" and isinstance(spec, MlaSpec | CompressedSpec) and spec.indexer is not None


def gemms_per_weight(plan: Plan, kind: str = "dense") -> tuple[float, float]:
    """GEMMs that a weight takes part in, forward and backward, and how many of them make its own gradient.

    `kind` is dense, experts or head. The numbers are means over weights; an adapter's own GEMMs count as a part of one
    of its weight. Gradients pass through frozen weights: a frozen one has two GEMMs.
    """
    if not is_partly_frozen(plan):
        return _ALL_GEMMS
    if not is_frozen_by_name(plan):
        return _FROZEN_GEMMS if "language" in plan.job.freeze else _ALL_GEMMS
    return _gemms_by_kind(plan.model, plan.mtp, training_of(plan)).get(kind, _FROZEN_GEMMS)


@lru_cache(maxsize=64)
def _gemms_by_kind(model: ModelSpec, num_depths: int, training: Training) -> dict[str, tuple[float, float]]:
    weights, trained, adapters = ({"dense": 0.0, "experts": 0.0, "head": 0.0} for _ in range(3))
    for one in language_parameters(model, num_depths, training):
        if len(one.shape) < 2 or one.name.endswith("bias"):
            continue
        kind = "experts" if ".experts." in one.name else "dense"
        if one.name in ("head.weight", "embed.weight"):
            if one.name.startswith("embed") and not model.tied:
                continue
            kind = "head"
        if one.name.endswith(("lora_a", "lora_b")):
            adapters[kind] += prod(one.shape)
        else:
            weights[kind] += prod(one.shape)
            trained[kind] += 0 if one.is_frozen else prod(one.shape)
    return {
        kind: (2 + (trained[kind] + 3 * adapters[kind]) / size, trained[kind] / size)
        for kind, size in weights.items()
        if size
    }


def trained_share(plan: Plan, module: str) -> float:
    """The part of a module's matrices that trains, over all layers. `module` is mixer, mlp, shared_experts or experts;
    adapters do not count."""
    if not is_partly_frozen(plan):
        return 1.0
    if not is_frozen_by_name(plan):
        return 0.0 if "language" in plan.job.freeze else 1.0
    return _trained_shares(plan.model, plan.mtp, training_of(plan)).get(module, 0.0)


@lru_cache(maxsize=64)
def _trained_shares(model: ModelSpec, num_depths: int, training: Training) -> dict[str, float]:
    sizes: dict[str, list[float]] = {}
    for one in language_parameters(model, num_depths, training):
        words = one.name.split(".")
        is_matrix = len(one.shape) > 1 and not one.name.endswith(("bias", "lora_a", "lora_b"))
        if not is_matrix or not {"mixer", "ffn"} & {*words} or "router" in words:
            continue
        module = "mixer" if "mixer" in words else "experts" if "experts" in words else "mlp"
        size = sizes.setdefault("shared_experts" if "shared" in words else module, [0.0, 0.0])
        size[0] += prod(one.shape)
        size[1] += 0 if one.is_frozen else prod(one.shape)
    # Dense layers of a model without a width for them have empty matrices; `dense-layers-exist` refuses them.
    return {module: trained / every for module, (every, trained) in sizes.items() if every}


def saved_inputs(plan: Plan) -> frozenset[str]:
    """The tensors that are saved because a weight gradient reads them, in some layer at least (names in `_INPUTS`).

    An adapter reads the input of its weight. Patterns that freeze some layers only count as if they froze none.
    """
    if not is_frozen_by_name(plan):
        is_frozen = "language" in plan.job.freeze
        return frozenset() if is_frozen else ALL_INPUTS
    return _saved_inputs(plan.model, plan.mtp, training_of(plan))


@lru_cache(maxsize=64)
def _saved_inputs(model: ModelSpec, num_depths: int, training: Training) -> frozenset[str]:
    owners = set()
    for one in language_parameters(model, num_depths, training):
        if not one.is_frozen and not one.name.endswith(("bias", "lora_b")):
            owners.add(one.name.removesuffix(".weight").removesuffix("lora_a").rstrip("._"))
    found = {name for name, ends in _INPUTS.items() if any(owner.endswith(ends) for owner in owners)}
    return frozenset(found | {"head"}) if model.tied and "embedding" in found else frozenset(found)


def first_gradient(plan: Plan) -> tuple[int, str]:
    """Where gradients begin in a forward: the number of a layer and the part of it, as `layers.3.ffn_norm` names it.

    The part is `input` where what enters the first layer has a gradient. Layers before this one save nothing for a
    backward, and have none.
    """
    has_pictures = plan.model.vision is not None and plan.job.lora_rank is None
    if not is_partly_frozen(plan) or (has_pictures and not {"vision", "projector"} <= {*plan.job.freeze}):
        return 0, "input"
    return _first_gradient(plan.model, plan.mtp, training_of(plan))


@lru_cache(maxsize=64)
def _first_gradient(model: ModelSpec, num_depths: int, training: Training) -> tuple[int, str]:
    for one in language_parameters(model, num_depths, training):
        if one.is_frozen:
            continue
        if not one.name.startswith("layers."):
            return (0, "input") if one.name.startswith("embed") else (model.num_layers, "input")
        _, number, part, *_ = one.name.split(".")
        return int(number), part
    return model.num_layers, "input"


def trained_by_name(plan: Plan) -> tuple[float, float]:
    """Parameters that train on a rank of an average pipeline stage, outside the experts and inside."""
    vocab_rows = -(-plan.model.vocab // plan.layout.tp)
    trained = [one for stage in stage_parameters(plan, vocab_rows) for one in stage if not one.is_frozen]
    experts = sum(one.elements for one in trained if one.is_expert)
    return (sum(one.elements for one in trained) - experts) / plan.layout.pp, experts / plan.layout.pp
