"""A plan shrunk to a few ranks that keep its pattern of axes.

`scale_down` also shrinks the model and what does not run on a CPU: `threefold verify` computes the small plan.
`scale_ranks` leaves widths and knobs as they are: `threefold dry-run --ranks all` rehearses every rank of it.
"""

import math
from dataclasses import replace

from threefold.layout.degrees import Layout
from threefold.layout.stages import Chunk, format_stages
from threefold.plan.plan import Knobs, Plan
from threefold.spec.model import (
    CompressedSpec,
    DeltaSpec,
    GqaSpec,
    MambaSpec,
    MlaSpec,
    ModelSpec,
    MoeSpec,
    VisionSpec,
    VisionTokens,
)

MAX_RANKS = 16
MAX_REHEARSED_RANKS = 32
_MAX_RANK_LAYERS = 256  # ranks times layers of the model
MAX_TOKENS = 8192  # of a sequence of a plan with the widths it had
_TOKENS_A_SHARE = 16
_VOCAB = 61  # odd: the vocabulary's parts differ in size
_WIDTH = 4  # of a head, in multiples that rotary embedding and every cut like


def scale_down(plan: Plan) -> tuple[Plan, list[str]]:
    """The small plan, and what was replaced, in words."""
    layout, said = _layout(plan)
    chunks = _chunks(plan, layout)
    layers = sum(len(chunk.layers) for chunk in chunks)
    shares = layout.tp * layout.cp
    model = _model(plan.model, layers, shares, layout)
    step = max(1, layout.dp)
    count = layout.pp * (2 if layout.pipeline_schedule == "dualpipev" else 1) if layout.pp > 1 else 2
    job = replace(
        plan.job,
        seq_len=4 * (4 if model.vision else 2) * shares,
        micro_batch=min(2, plan.job.micro_batch),
        global_batch=min(2, plan.job.micro_batch) * step * count,
        mtp=min(2, plan.mtp),
        dynamic_length=False,
        data="synthetic",
        images=1.0 if model.vision and not plan.job.images else plan.job.images,
    )
    if plan.job.dynamic_length:
        said.append("dynamic lengths by full ones")
    if model != plan.model:
        said.append(
            f"{plan.model.name} by {layers} layers of width {model.dim} with {model.num_experts or 'no'} experts"
        )
    knobs, more = _knobs(plan, layers)
    stages = format_stages(chunks) if layout.pp > 1 else None
    small = replace(
        plan,
        model=model,
        job=job,
        knobs=knobs,
        layout=replace(layout, stages=stages),
        cluster=replace(
            plan.cluster, chip="cpu", gpus=layout.gpus, domain=_domain(plan, layout), measured=None, own=None
        ),
    )
    return small, [*said, *more]


def scale_ranks(plan: Plan) -> tuple[Plan, list[str]]:
    """The plan on few ranks and with few layers, each as wide as it was; and what was replaced, in words."""
    # Four stages have ones in the middle; four ranks of a hierarchical CP group have an inner and an outer group.
    max_cp = 4 if _is_hierarchical(plan) else 2
    tried = [_layout(plan, cp, pp) for cp, pp in ((max_cp, 4), (max_cp, 2), (2, 2))]
    layout, said = next((one for one in tried if one[0].gpus <= MAX_REHEARSED_RANKS), tried[-1])
    chunks = _chunks(plan, layout)
    layers = sum(len(chunk.layers) for chunk in chunks)
    model = replace(
        plan.model,
        num_layers=layers,
        pattern=short_pattern(plan.model),
        num_dense_layers=min(1, plan.model.num_dense_layers),
        mtp_layers=min(2, plan.model.mtp_layers),
        moe=_fewer_experts(plan, plan.model.moe, layout) if plan.model.moe else None,
    )
    if layers != plan.model.num_layers:
        said.append(f"{plan.model.num_layers} layers by {layers}")
    if model.num_experts != plan.model.num_experts:
        said.append(f"{plan.model.num_experts} experts by {model.num_experts}")
    shares = 2 * layout.tp * layout.cp
    num_microbatches = 2 * layout.pp if layout.pp > 1 else 2 + plan.knobs.ep_overlap
    job = replace(
        plan.job,
        seq_len=max(_TOKENS_A_SHARE * shares, min(plan.job.seq_len, MAX_TOKENS) // shares * shares),
        global_batch=plan.job.micro_batch * layout.dp * min(num_microbatches, plan.num_microbatches),
        mtp=min(2, plan.mtp),
    )
    knobs = replace(plan.knobs, cp_comm=_cp_comm(plan.knobs, layers), cp_inner=None)
    small = replace(
        plan,
        model=model,
        job=job,
        knobs=knobs,
        layout=replace(layout, stages=format_stages(chunks) if layout.pp > 1 else None),
        cluster=replace(plan.cluster, gpus=layout.gpus, domain=_domain(plan, layout)),
    )
    return small, said


def _fewer_experts(plan: Plan, old: MoeSpec, layout: Layout) -> MoeSpec:
    """As many experts on a rank as before, and enough for the router to choose from."""
    unit = math.lcm(layout.ep, 2 * old.num_groups)
    wanted = max(old.num_experts // plan.layout.ep * layout.ep, 2 * old.top_k * old.num_groups // old.top_groups)
    return replace(old, num_experts=-(-wanted // unit) * unit)


def is_small(plan: Plan) -> bool:
    """Whether every rank of a plan can be rehearsed in a minute, without scaling it down."""
    return plan.layout.gpus <= MAX_REHEARSED_RANKS and plan.layout.gpus * plan.model.num_layers <= _MAX_RANK_LAYERS


def _is_hierarchical(plan: Plan) -> bool:
    """Whether context parallelism trades heads in an inner group, which takes four ranks to show."""
    kinds = (plan.knobs.cp_comm,) if isinstance(plan.knobs.cp_comm, str) else plan.knobs.cp_comm
    return "a2a+p2p" in kinds


def _layout(plan: Plan, max_cp: int = 2, max_pp: int = 2) -> tuple[Layout, list[str]]:
    """Every axis in use stays in use, at 2 or the limits given; what EP folds over stays folded."""
    old = plan.layout
    limits = {"tp": 2, "cp": max_cp, "pp": max_pp, "dp": 2, "etp": 2}
    degrees = {axis: min(limit, old.degree(axis)) for axis, limit in limits.items()}
    etp = degrees["etp"]
    stage = degrees["tp"] * degrees["cp"] * degrees["dp"]
    if old.ep == 1:
        ep, stage = 1, math.lcm(stage, etp)
    elif old.edp == 1:  # EP as wide as the stage, as it was
        stage = math.lcm(stage, 2 * etp)
        ep = stage // etp
    else:  # half as wide, so that EDP stays in use; wide enough to reach over DP where it did
        stage = math.lcm(stage, 4 * etp)
        ep = stage // (2 * etp) if old.ep > old.dp else 2
    used = [axis for axis in ("dp", "cp", "tp") if old.degree(axis) > 1]
    degrees[used[0] if used else "dp"] *= stage // (degrees["tp"] * degrees["cp"] * degrees["dp"])
    vpp = min(2, old.vpp) if degrees["pp"] > 1 else 1
    new = Layout(
        tp=degrees["tp"],
        cp=degrees["cp"],
        pp=degrees["pp"],
        vpp=vpp,
        ep=ep,
        etp=etp,
        replicate=min(2, old.replicate) if degrees["dp"] > 1 else 1,
        schedule=old.schedule,
        gpus=degrees["pp"] * stage,
    )
    named = ("tp", "cp", "dp", "pp", "vpp", "ep", "etp", "edp")
    changed = [f"{axis.upper()} {old.degree(axis)} by {new.degree(axis)}" for axis in named if differs(old, new, axis)]
    return new, changed


def differs(old: Layout, new: Layout, axis: str) -> bool:
    return old.degree(axis) != new.degree(axis)


def _chunks(plan: Plan, layout: Layout) -> list[Chunk]:
    """As many chunks as the small pipeline has: the first ones, and the last ones with what they end in."""
    wanted = layout.chunks
    if wanted == 1:
        old = [Chunk((0, 1), True, min(2, plan.mtp), True)]
    else:
        head = wanted // 2
        old = [*plan.chunks[:head], *plan.chunks[len(plan.chunks) - (wanted - head) :]]
    floor = _least_layers(plan.model)
    counts = [min(2, len(chunk.layers)) for chunk in old]
    while sum(counts) < floor:
        counts[counts.index(max(counts))] += 1
    chunks, first, depths = [], 0, min(2, plan.mtp)
    for place, (chunk, count) in enumerate(zip(old, counts, strict=True)):
        mtp = min(chunk.mtp, depths)
        depths -= mtp
        layers = tuple(range(first, first + count))
        chunks.append(Chunk(layers, place == 0, mtp, place == len(old) - 1))
        first += count
    if depths:
        chunks[-1] = replace(chunks[-1], mtp=chunks[-1].mtp + depths)
    return chunks


def _least_layers(model: ModelSpec) -> int:
    """One of every kind: dense and expert layers, each mixer."""
    dense = min(1, model.num_dense_layers) if model.moe else 0
    return max(len(short_pattern(model)), dense + 1, 2)


def short_pattern(model: ModelSpec) -> str:
    """The pattern of layers, or of one that does not repeat the beginning that has every kind of layer."""
    if len(model.pattern) < model.num_layers:
        return model.pattern
    sizes = (size for size in range(1, len(model.pattern)) if set(model.pattern[:size]) == set(model.pattern))
    return model.pattern[: next(sizes, len(model.pattern))]


def _model(old: ModelSpec, layers: int, shares: int, layout: Layout) -> ModelSpec:
    return replace(
        old,
        num_layers=layers,
        pattern=short_pattern(old),
        dim=8 * max(2, shares),
        vocab=_VOCAB,
        attention=_attention(old.attention, shares),
        local_attention=_gqa(old.local_attention, shares) if old.local_attention else None,
        pooled_attention=_gqa(old.pooled_attention, shares) if old.pooled_attention else None,
        delta=_delta(old.delta, shares) if old.delta else None,
        mamba=_mamba(old.mamba, shares) if old.mamba else None,
        moe=_moe(old.moe, layout) if old.moe else None,
        vision=_vision(old.vision, layers) if old.vision else None,
        dense_dim=4 * shares if old.dense_dim else 0,
        num_dense_layers=min(1, old.num_dense_layers),
        mtp_layers=min(2, old.mtp_layers),
        published_total=None,
        published_active=None,
    )


def _attention(old: GqaSpec | MlaSpec | None, shares: int) -> GqaSpec | MlaSpec | None:
    if isinstance(old, MlaSpec):
        rank = None if old.q_rank is None else 6
        heads = max(2, shares)
        # Fewer keys than a short sequence has, and so many heads that no two of them have equal scores.
        indexer = old.indexer and replace(old.indexer, num_heads=8, head_dim=2 * _WIDTH, top_k=5)
        return replace(
            old, num_heads=heads, q_rank=rank, kv_rank=8, nope_dim=_WIDTH, rope_dim=_WIDTH, v_dim=6, indexer=indexer
        )
    return _gqa(old, shares) if old else None


def _gqa(old: GqaSpec, shares: int) -> GqaSpec:
    """Queries share keys as they did, as far as every rank still has a whole head of each."""
    if isinstance(old, CompressedSpec):
        return _compressed(old, max(2, shares))
    grouped = 2 if old.num_heads > old.num_kv_heads else 1
    heads = grouped * max(2, shares)
    window = None if old.window is None else 5
    sections = (2, 1, 1) if old.rope_sections else ()
    return replace(
        old,
        num_heads=heads,
        num_kv_heads=heads // grouped,
        head_dim=2 * _WIDTH,
        window=window,
        rope_sections=sections,
    )


def _compressed(old: CompressedSpec, groups: int) -> CompressedSpec:
    """Groups of two heads, and entries of which a short sequence has some."""
    indexer = old.indexer and replace(old.indexer, num_heads=8, head_dim=2 * _WIDTH, top_k=3)
    heads = replace(old, num_heads=2 * groups, head_dim=2 * _WIDTH, rope_fraction=0.5, window=5)
    return replace(heads, q_rank=6, out_groups=groups, out_rank=3, rate=min(old.rate, 6), indexer=indexer)


def _vision(old: VisionSpec, layers: int) -> VisionSpec:
    """As many deepstack features as before and as the decoder has layers for. Ids of pictures end the vocabulary."""
    deepstack = tuple(range(min(len(old.deepstack), layers)))
    return replace(
        old,
        depth=max(2, len(deepstack)),
        dim=16,
        mlp_dim=12,
        num_heads=2,
        patch=2,
        num_positions=9,
        deepstack=deepstack,
        tokens=VisionTokens(_VOCAB - 4, _VOCAB - 3, _VOCAB - 2, _VOCAB - 1),
    )


def _delta(old: DeltaSpec, shares: int) -> DeltaSpec:
    each = min(2, old.num_v_heads // old.num_k_heads)
    keys = max(2, shares)
    return replace(old, num_k_heads=keys, num_v_heads=each * keys, k_dim=4, v_dim=6)


def _mamba(old: MambaSpec, shares: int) -> MambaSpec:
    groups = max(2, shares)
    heads = groups * min(2, old.num_heads // old.num_groups)
    return replace(old, num_heads=heads, num_groups=groups, head_dim=4, state_dim=6)


def _moe(old: MoeSpec, layout: Layout) -> MoeSpec:
    groups = 2 if old.num_groups > 1 else 1
    experts = math.lcm(2 * layout.ep, 4 * groups)
    width = 4 * layout.etp * layout.tp
    return replace(
        old,
        num_experts=experts,
        top_k=min(2, old.top_k),
        expert_dim=width,
        shared_dim=None if old.shared_dim is None else 2 * width,
        hash_layers=min(1, old.hash_layers),
        num_groups=groups,
        top_groups=1 if groups > 1 else old.top_groups,
    )


def _knobs(plan: Plan, layers: int) -> tuple[Knobs, list[str]]:
    """What runs on a CPU in place of what does not."""
    old, said = plan.knobs, []
    changes: dict[str, object] = {"precision": "fp32"}
    said.append(f"{old.precision} by fp64")
    if old.dispatcher not in ("local", "alltoall"):
        changes["dispatcher"] = "alltoall"
        said.append(f"dispatcher {old.dispatcher} by alltoall")
    changes |= {"cp_comm": _cp_comm(old, layers), "cp_inner": None}
    off = {
        "graphs": (),
        "compile": False,
        "ep_overlap": False,
        "delay_wgrad": False,
        "fp8_params": False,
        "fp8_attention": False,
        "fp8_output": False,
        "fp8_dispatch": False,
    }
    for name, value in off.items():
        if getattr(old, name) != value:
            changes[name] = value
            said.append(f"{name} by nothing")
    changes |= {"grad_dtype": "fp32", "optimizer_dtype": "fp32"}
    return replace(old, **changes), said  # type: ignore[arg-type]


def _cp_comm(knobs: Knobs, layers: int) -> str | tuple[str, ...]:
    """One kind for all layers, or the kinds of the layers that are left."""
    if isinstance(knobs.cp_comm, str):
        return knobs.cp_comm
    return tuple(knobs.cp_comm[i % len(knobs.cp_comm)] for i in range(layers))


def _domain(plan: Plan, layout: Layout) -> int | None:
    """The hierarchical kind of context parallelism trades heads inside a domain: of two neighbors here."""
    return layout.tp * max(1, layout.cp // 2) if _is_hierarchical(plan) else plan.cluster.domain
