"""The gated delta rule in our engine: which kernels run it, for the estimates of memory and of time."""

from threefold.plan.plan import Plan

DELTA_CHUNK = 64  # tokens of a chunk; states pass from chunk to chunk


def cp_comm_of(plan: Plan, mixer: str) -> str:
    """How context-parallel ranks communicate in layers with a mixer; by a list, as in the first of them."""
    kinds = plan.knobs.cp_comm
    if isinstance(kinds, str):
        return kinds
    here = (kind for kind, layer in zip(kinds, plan.model.layers, strict=False) if layer.mixer == mixer)
    return next(here, (kinds or ("p2p",))[0])  # a rule refuses an empty list


def heads_in_delta_layers(plan: Plan) -> tuple[str, ...]:
    """The list for `knobs.cp_comm` by which layers of the delta rule trade sequence for heads, so that its kernels see
    whole sequences, and the others pass keys and values round a ring; empty where it does not go."""
    delta, shards = plan.model.delta, plan.layout.tp * plan.layout.cp
    if plan.target != "threefold" or delta is None or plan.layout.cp == 1 or delta.num_k_heads % shards:
        return ()
    return tuple("a2a" if layer.mixer == "delta" else "p2p" for layer in plan.model.layers)


def last_cp_comm(plan: Plan, layer_cp_comm: str | None = None) -> str:
    """How context-parallel ranks communicate in a layer, which may have an entry of its own; of several kinds, the last
    one."""
    kind = layer_cp_comm or plan.knobs.cp_comm
    return kind if isinstance(kind, str) else (kind or ("p2p",))[-1]  # a rule refuses an empty list


def passes_delta_states(plan: Plan, cp_comm: str) -> bool:
    """Whether context-parallel ranks exchange states of the rule, instead of trading sequence for heads."""
    return plan.layout.cp > 1 and cp_comm != "a2a"


def uses_fla(plan: Plan, cp_comm: str) -> bool:
    """Whether the kernels of flash-linear-attention run the rule: where the plan says so, not in fp32, and not on spans
    of a sequence."""
    in_16_bits = plan.knobs.precision != "fp32"
    return plan.knobs.delta_kernels == "fla" and in_16_bits and not passes_delta_states(plan, cp_comm)
