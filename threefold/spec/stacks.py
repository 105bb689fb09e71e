"""Software stacks: who runs a plan, and what each one can run."""

from collections.abc import Iterator
from dataclasses import dataclass

from threefold.spec.derived import DerivedModel
from threefold.spec.families import FAMILIES
from threefold.spec.megatron import bridge_releases
from threefold.spec.model import CompressedSpec, MlaSpec, ModelSpec

TARGETS = ("threefold", "megatron-bridge")
CORE_CONFIG = "core/transformer/transformer_config.py"  # under `megatron/`: what most rules of Megatron follow
BRIDGE_COMM_OVERLAP = "bridge/training/comm_overlap.py"  # what those of overlaps follow
# Upstream code that other rules follow, with the release that was read.
BRIDGE_FLEX = "megatron-bridge 0.6.2, bridge/training/flex_dispatcher_backend.py"
MEGATRON_ARGUMENTS = "megatron-core 0.19.2, training/arguments.py"
MEGATRON_SCHEDULES = "megatron-core 0.19.2, core/pipeline_parallel/schedules.py"
MEGATRON_FSDP = "megatron-core 0.19.2, core/distributed/fsdp"
FLA_RELEASES = ("0.6.",)  # beginnings of the releases of flash-linear-attention that our engine was compared with


@dataclass(frozen=True, slots=True)
class StackSpec:
    """What a stack runs. `families` are Hugging Face model types."""

    name: str
    families: frozenset[str]
    source: str


STACKS = {
    "threefold": StackSpec(
        "threefold",
        frozenset(FAMILIES),
        "the families under spec/families",
    ),
    "megatron-bridge": StackSpec(
        "megatron-bridge",
        bridge_releases()[-1].families,
        "bridges that the newest release registers (spec/megatron.json); the rule bridge-trains-family asks the plan's",
    ),
}


ENGINE_ACTIVATIONS = (
    "silu",
    "clamped swiglu",
    "relu2",
    "gelu_tanh",
    "limited silu",
)  # those of `engine/moe/experts.py`
ENGINE_DENSE_ACTIVATIONS = ("silu", "relu2", "gelu_tanh", "limited silu")  # those of `engine/layers/mlp.py`
ENGINE_UNGATED = ("relu2",)  # those of networks without a gate; all others have one
FUSED_ACTIVATIONS = ("silu", "clamped swiglu")  # those of the fused expert kernels
# The last one is what transformers calls `dynamic` with an alpha.
ENGINE_ROPE_SCALING = ("yarn", "llama3", "linear", "dynamic", "longrope", "proportional", "ntk_alpha")


def engine_lacks(model: ModelSpec) -> Iterator[tuple[str, str]]:
    """What our own engine lacks for a model: a problem and an advice for each part. The engine itself asks here too."""
    families = STACKS["threefold"].families
    if isinstance(model, DerivedModel):
        parts = ", ".join(model.parts[:6])
        yield f"the engine has no {model.family} model: its layers have {parts}", "plan it for target megatron-bridge"
    elif model.family not in families:
        yield f"the engine has no {model.family} model", f"choose one of {', '.join(sorted(families))}"
    if isinstance(model.attention, MlaSpec) and (indexer := model.attention.indexer):
        if indexer.is_reused:
            problem = "the engine has no layers that read what the indexer of another layer chose (indexer_types)"
            yield problem, "choose a model with an indexer in every layer"
        if model.attention.q_rank is None:
            yield "the engine has no indexer without latents of queries", "choose a model with a q_lora_rank"
    if model.activation not in ENGINE_ACTIVATIONS:
        yield f"the engine has no activation {model.activation!r}", f"known: {', '.join(ENGINE_ACTIVATIONS)}"
    elif model.glu == (model.activation in ENGINE_UNGATED):
        gating = "gated" if model.glu else "ungated"
        yield (
            f"the engine has no {gating} feed-forward network with {model.activation!r}",
            "relu2 goes without a gate, others with one",
        )
    elif model.activation not in ENGINE_DENSE_ACTIVATIONS and _has_dense_parts(model):
        yield f"the engine has no dense feed-forward network with {model.activation!r}", "use silu"
    if model.moe and model.moe.latent_dim:
        yield "the engine has no experts behind a latent projection (moe_latent_size)", "choose a model without it"
    scaling = _rope_scaling(model)
    if scaling and scaling not in ENGINE_ROPE_SCALING:
        yield f"the engine has no rotary scaling {scaling!r}", f"use {', '.join(ENGINE_ROPE_SCALING[:-1])}, or none"
    if scaling not in (None, "yarn", "llama3", "linear") and isinstance(model.attention, CompressedSpec):
        yield f"the engine has no rotary scaling {scaling!r} for compressed attention", "use yarn, llama3 or linear"
    if scaling in ("dynamic", "longrope") and model.vision is not None:
        yield f"the engine has no rotary scaling {scaling!r} for models with pictures", "use yarn, llama3 or linear"
    if isinstance(model.attention, MlaSpec) and model.attention.v_dim > model.attention.qk_dim:
        problem = f"the engine has no latent attention with values ({model.attention.v_dim}) wider than keys"
        yield problem, f"v_head_dim of at most qk_nope_head_dim + qk_rope_head_dim ({model.attention.qk_dim})"


def _has_dense_parts(model: ModelSpec) -> bool:
    """Whether some layer has a dense feed-forward network, or shared experts beside the routed ones."""
    return any(layer.ffn == "dense" for layer in model.layers) or bool(model.moe and model.moe.num_shared)


def _rope_scaling(model: ModelSpec) -> str | None:
    """The kind of rotary scaling, where the model has some."""
    scaling = model.attention.rope_scaling if model.attention else None
    return scaling.kind if scaling else None


# What Megatron Bridge turns into its own (`models/conversion/model_bridge.py`, and the bridge of Llama), beside the
# activations that it has for GPT-OSS and Gemma 4 alone. It refuses other activations, and goes without other scalings.
BRIDGE_ACTIVATIONS = ("silu", "gelu", "relu", "relu2", "tanh", "gelu_pytorch_tanh", "clamped swiglu", "gelu_tanh")
BRIDGE_ROPE_SCALING = {"llama": ("yarn", "llama3"), "gemma4": ("proportional",)}


def bridge_lacks(model: ModelSpec) -> Iterator[tuple[str, str]]:
    """What Megatron Bridge lacks for a model of a family that it has, as `engine_lacks` says it of our engine."""
    if model.activation not in BRIDGE_ACTIVATIONS:
        known = ", ".join(BRIDGE_ACTIVATIONS)
        yield f"megatron-bridge has no activation {model.activation!r}", f"known: {known}"
    kind, kinds = _rope_scaling(model), BRIDGE_ROPE_SCALING.get(model.family, ("yarn",))
    if kind and kind not in kinds:
        problem = f"megatron-bridge goes without the rotary scaling {kind!r} of {model.family} models"
        yield problem, f"use {' or '.join(kinds)}, or none"


LACKS = {"threefold": engine_lacks, "megatron-bridge": bridge_lacks}


# Numbers along a product's sum that share a scale.
SCALE_BLOCKS = {"fp8-blockwise": 128, "mxfp8": 32, "nvfp4": 16}
# Formats below sixteen bits in which our own engine has kernels for experts, on Hopper; and what a rank's width of an
# expert is a multiple of, and the model's.
FUSED_EXPERTS = ("fp8-blockwise", "fp8-rowwise")
FUSED_WIDTH, FUSED_DIM = 128, 16
