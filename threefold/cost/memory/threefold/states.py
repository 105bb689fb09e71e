"""Weights, gradients and optimizer states of a pipeline rank in our own engine, by memory term.

`model.py` calls `state_terms` once per stage. `peak.py` asks which gradients have no buffer yet at the peak: on one GPU
with one microbatch, and under FSDP, a gradient takes memory only from its layer's backward on.

Mirrors `engine/data_parallel/zero1.py`, `engine/data_parallel/single_rank.py`, `engine/data_parallel/fsdp.py`,
`engine/optim/adamw.py`, `engine/optim/muon.py`, `engine/optim/param_remainders.py`, `engine/optim/cpu_offload.py`,
`engine/models/build.py`.
"""

from threefold.cost.format_support import STATE_BYTES, master_weight_bytes
from threefold.cost.local_parameters import LocalParameter
from threefold.cost.memory.stage_memory import Terms
from threefold.cost.memory.threefold.fsdp import expert_shards, fsdp_units, num_unsharded_tables, num_vocab_tables
from threefold.cost.memory.threefold.local_sizes import FP32, LocalSizes
from threefold.cost.memory.threefold.peak_points import at_chunk_end
from threefold.cost.memory.threefold.timelines.optimizer_step import device_fraction, host_slot_bytes, rank_parameters
from threefold.cost.rank_params import stage_params
from threefold.cost.stage_contents import StageContents, chunk_layers
from threefold.cost.trained_weights import is_partly_frozen
from threefold.plan.plan import Plan
from threefold.spec.flops import padded_vocab
from threefold.spec.model import MlaSpec
from threefold.spec.params import dense_params, expert_params, mixer_params, shared_params

# Bytes of an element of a quantized weight, scales included; other formats have 1.
_QUANTIZED_WEIGHT_BYTES = {"mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}


def state_terms(plan: Plan, contents: StageContents) -> Terms:
    """Bytes of the states of one rank, sharded as the plan says."""
    megatron_dense, experts = stage_params(plan, contents)
    if is_partly_frozen(plan) or plan.is_vlm:  # every rank of TP has a whole image encoder
        quantized = _quantized_weights(plan, contents, experts)
        by_parameter = states_by_parameter(plan, contents)
        by_parameter["optimizer"] += host_slot_bytes(plan, contents)
        return _with_copies(plan, contents, {**by_parameter, "quantized_weights": quantized})
    dense = _dense_params(plan, contents, megatron_dense)
    tables = num_vocab_tables(plan, contents) * plan.model.vocab / plan.layout.tp * plan.model.dim
    on_device = device_fraction(plan, contents)
    unsharded = num_unsharded_tables(plan, contents) * plan.model.vocab / plan.layout.tp * plan.model.dim
    terms = _sharded_states(plan, dense, experts, _shared_table(plan, contents), tables, on_device, unsharded)
    terms["optimizer"] += host_slot_bytes(plan, contents)
    return _with_copies(plan, contents, {**terms, "quantized_weights": _quantized_weights(plan, contents, experts)})


def _with_copies(plan: Plan, contents: StageContents, terms: Terms) -> Terms:
    """The same with slots for copies of other ranks' experts: whole weights and sums of gradients, never sharded."""
    share = plan.expert_slots * plan.layout.ep / max(1, plan.model.num_experts)
    if share:
        elements = share * sum(one.elements for one in rank_parameters(plan, contents) if one.is_expert)
        weight_bytes = 4 if plan.knobs.precision == "fp32" else 2
        grad_bytes = max(weight_bytes, FP32 if plan.knobs.precision == "fp16" else STATE_BYTES[plan.knobs.grad_dtype])
        terms["weights"] += weight_bytes * elements
        terms["gradients"] += grad_bytes * share * trained_expert_elements(plan, contents)
    return terms


def _sharded_states(
    plan: Plan,
    dense: float,
    experts: float,
    shared_table: float,
    tables: float,
    on_device: float,
    unsharded_tables: float,
) -> Terms:
    """Bytes of states of so many parameters outside and inside the experts.

    `shared_table` of the dense parameters are held by two pipeline ranks; `tables` are the vocabulary's, which Muon
    leaves to AdamW. `on_device` is the fraction of optimizer states that is not on the host, `unsharded_tables` what
    FSDP does not shard.
    """
    layout, knobs = plan.layout, plan.knobs
    weight_bytes = 4 if knobs.precision == "fp32" else 2
    master = master_weight_bytes(plan)
    accumulates = layout.gpus > 1 or plan.num_microbatches > 1  # otherwise gradients are autograd's own
    # Sums of fp16 and bf16 gradients are in fp32, which holds the numbers of both.
    grad_dtype_bytes = FP32 if knobs.precision == "fp16" else STATE_BYTES[knobs.grad_dtype]
    grad_bytes = max(weight_bytes, grad_dtype_bytes) if accumulates else weight_bytes
    moment_bytes = STATE_BYTES[knobs.optimizer_dtype]
    terms = {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
    dp = layout.dp * layout.cp
    # (parameters, ranks that hold copies, pipeline ranks that do, parameters of vocabulary tables)
    # Under FSDP tables that several pipeline chunks use are left to ZeRO-1.
    apart = max(shared_table, unsharded_tables)
    kinds = (
        (dense - apart, dp, 1, tables - apart),
        (apart, dp, 2 if shared_table else 1, apart),
        (experts, layout.edp, 1, 0.0),
    )
    for number, (params, copies, num_stages, table_params) in enumerate(kinds):
        moments = 2 * moment_bytes * params
        if plan.job.optimizer == "muon":  # its momentum is in fp32
            moments = FP32 * (params - table_params) + 2 * moment_bytes * table_params
        num_ranks = max(1, copies // layout.replicate)
        if knobs.data_parallel != "zero1" and num_ranks > 1 and not (number == 1 and unsharded_tables):
            shards = expert_shards(plan, num_ranks) if number == len(kinds) - 1 else num_ranks
            # FSDP's shards are in fp32 and are their own master weights.
            terms["weights"] += 4 * params / shards
            terms["gradients"] += 4 * params / shards
            terms["optimizer"] += moments / shards * on_device
        else:
            terms["weights"] += weight_bytes * params
            terms["gradients"] += grad_bytes * params
            terms["optimizer"] += (master * params + moments) / max(1, copies * num_stages) * on_device
    return terms


def _shared_table(plan: Plan, contents: StageContents) -> float:
    """Elements of an embedding table that another stage holds too: for multi-token prediction, or as the tied head."""
    ends = (contents.embedding, contents.mtp > 0 or (contents.loss and plan.model.tied))
    is_elsewhere = any(chunk.mtp or (chunk.loss and plan.model.tied) for chunk in plan.chunks)
    if plan.layout.pp == 1 or all(ends) or not any(ends) or not is_elsewhere:
        return 0.0
    return plan.model.vocab / plan.layout.tp * plan.model.dim


def _dense_params(plan: Plan, contents: StageContents, megatron_dense: float) -> float:
    """Parameters outside the experts, from those that Megatron would hold. The engine pads no vocabulary, and its
    tensor parallelism leaves more parameters whole: MLA's down projections and the projection of an MTP depth."""
    model, layout, spec = plan.model, plan.layout, plan.model.attention
    depths = min(contents.mtp, 1) if model.mtp_shared else contents.mtp
    num_tables = num_vocab_tables(plan, contents)
    padding = num_tables * (padded_vocab(model, layout.tp) - model.vocab) / layout.tp * model.dim
    if contents.mtp and not contents.loss and not model.tied:  # hidden states of MTP travel on to the output layer
        padding += padded_vocab(model, layout.tp) / layout.tp * model.dim
    replicated = depths * 2.0 * model.dim**2
    if isinstance(spec, MlaSpec):
        num_layers = sum(layer.mixer == "attention" for layer in [*contents.layers, *model.mtp_depth * depths])
        replicated += num_layers * model.dim * ((spec.q_rank or 0) + spec.kv_rank + spec.rope_dim)
    return megatron_dense - padding + replicated * (1 - 1 / layout.tp)


def _quantized_weights(plan: Plan, contents: StageContents, experts: float) -> float:
    """Quantized weights, one copy for each orientation that GEMMs read. FSDP quantizes gathered weights and keeps
    none."""
    if not plan.low_precision or plan.knobs.data_parallel != "zero1":
        return 0.0
    model, params = plan.model, 0.0
    for layer in [*contents.layers, *plan.model.mtp_depth * min(1, contents.mtp)]:
        ffn = {"dense": dense_params, "moe": shared_params}.get(layer.ffn)
        params += mixer_params(model, layer) + (ffn(model) if ffn else 0)
    if plan.knobs.fp8_output and contents.loss:
        params += model.vocab * model.dim
    experts *= 1 + plan.expert_slots * plan.layout.ep / max(1, model.num_experts)
    return 2 * _QUANTIZED_WEIGHT_BYTES.get(plan.knobs.precision, 1.0) * (params / plan.layout.tp + experts)


def late_gradient_bytes(local: LocalSizes, contents: StageContents, gradients: float) -> float:
    """The part of a rank's `gradients` that takes memory only from its layer's backward on."""
    plan, model, layout = local.plan, local.model, local.plan.layout
    if layout.gpus == 1:
        return gradients if plan.num_microbatches == 1 else 0.0
    shards = max(1, layout.edp // layout.replicate) if plan.knobs.data_parallel != "zero1" else 1
    num_moe = sum(layer.ffn == "moe" for chunk in contents.chunks for layer in chunk_layers(plan, chunk))
    experts = num_moe * model.num_experts / layout.ep / layout.etp * (expert_params(model) if num_moe else 0)
    if is_partly_frozen(plan):
        experts = trained_expert_elements(plan, contents)
    # What only this rank holds has no buffer, if its gradients need no other dtype.
    has_no_buffer = not local.accumulates_wider
    expert_bytes = FP32 if shards > 1 or local.accumulates_wider else local.element_bytes
    experts *= expert_bytes / expert_shards(plan, shards)
    replicas = layout.dp * layout.cp
    is_dense_late = replicas > layout.replicate if plan.knobs.data_parallel != "zero1" else False
    is_dense_late = is_dense_late or (replicas == 1 and has_no_buffer)
    are_experts_late = shards > 1 or (layout.edp == 1 and has_no_buffer)
    tables = num_unsharded_tables(plan, contents) * model.vocab / layout.tp * model.dim
    tables *= "embedding" in local.saved_inputs
    tables *= FP32 if local.accumulates_wider else local.element_bytes
    return (gradients - experts - tables if is_dense_late else 0.0) + (experts if are_experts_late else 0.0)


def head_gradient_bytes(local: LocalSizes, contents: StageContents) -> float:
    """The output layer's part of the late gradients, which is there from the loss on."""
    plan = local.plan
    if (
        not contents.loss
        or "head" not in local.saved_inputs
        or (plan.layout.gpus > 1 and plan.knobs.data_parallel == "zero1")
    ):
        return 0.0
    if plan.layout.gpus == 1:
        return local.element_bytes * local.model.vocab * local.model.dim if plan.num_microbatches == 1 else 0.0
    units = fsdp_units(plan, contents, at_chunk_end())
    return FP32 * units.loss_root / units.shards


_TABLES = ("embed.weight", "head.weight")


def states_by_parameter(plan: Plan, contents: StageContents) -> Terms:
    """Bytes of the states of one rank, sharded as the plan says."""
    knobs, layout = plan.knobs, plan.layout
    weight_bytes = 4 if knobs.precision == "fp32" else 2
    master = master_weight_bytes(plan)
    accumulates = layout.gpus > 1 or plan.num_microbatches > 1
    grad_dtype_bytes = FP32 if knobs.precision == "fp16" else STATE_BYTES[knobs.grad_dtype]
    grad_bytes = max(weight_bytes, grad_dtype_bytes) if accumulates else weight_bytes
    on_device = device_fraction(plan, contents)
    terms = {"weights": 0.0, "gradients": 0.0, "optimizer": 0.0}
    for one in rank_parameters(plan, contents):
        shards, moments = fsdp_shards(plan, contents, one), _moment_bytes(plan, one)
        if shards:
            # A trained shard is in fp32 and is its own master weight.
            terms["weights"] += (weight_bytes if one.is_frozen else FP32) * one.elements / shards
            terms["gradients"] += 0.0 if one.is_frozen else FP32 * one.elements / shards
            terms["optimizer"] += 0.0 if one.is_frozen else moments * one.elements / shards * on_device
        else:
            terms["weights"] += weight_bytes * one.elements
            terms["gradients"] += 0.0 if one.is_frozen else grad_bytes * one.elements
            states = (master + moments) * one.elements / one.num_copies * on_device
            terms["optimizer"] += 0.0 if one.is_frozen else states
    return terms


def trained_expert_elements(plan: Plan, contents: StageContents) -> float:
    """Elements of experts on a rank that have gradients."""
    return sum(one.elements for one in rank_parameters(plan, contents) if one.is_expert and not one.is_frozen)


def fsdp_shards(plan: Plan, contents: StageContents, parameter: LocalParameter) -> float:
    """Ranks over which FSDP spreads a parameter; 0 where it is left to ZeRO-1, or on one rank."""
    layout = plan.layout
    if plan.knobs.data_parallel == "zero1":
        return 0
    if parameter.is_expert:
        num_ranks = layout.edp // layout.replicate
        return expert_shards(plan, num_ranks) if num_ranks > 1 else 0
    is_apart = parameter.name in _TABLES and bool(num_unsharded_tables(plan, contents)) and parameter.is_shared
    num_ranks = layout.dp * layout.cp // layout.replicate
    return num_ranks if num_ranks > 1 and not is_apart else 0


def _moment_bytes(plan: Plan, parameter: LocalParameter) -> float:
    """Bytes of the optimizer's moments for each element: Muon has one, in fp32."""
    if plan.job.optimizer == "muon" and parameter.uses_muon:
        return FP32
    return 2 * STATE_BYTES[plan.knobs.optimizer_dtype]
