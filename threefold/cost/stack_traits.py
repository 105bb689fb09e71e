"""What differs between the two stacks in number formats and in time, as data.

`format_support` and the modules of `time/` ask `STACK_TRAITS[plan.target]`. Memory and traffic differ too much for a
few traits: there each stack has a whole model (`memory/by_stack.py`, `traffic/by_stack.py`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StackTraits:
    """How a stack behaves where the estimate of time depends on it."""

    # A format without kernels is rounded as the format does and multiplied in 16 bits.
    emulates_formats: bool
    # Recomputing "moe" covers every module inside the MoE layer, and the backward of fused experts recomputes
    # the activation whether the plan names it or not.
    recomputes_moe_as_one: bool
    # "gdn_norm_out" is a module that can be recomputed, and "core_attn" covers the delta rule too.
    recomputes_delta_rule: bool
    # Weight gradients can be delayed even where FSDP shards the weights.
    delays_sharded_wgrad: bool
    # 16-bit attention with sinks is slower than without: published runs were, and ours has one kernel for both.
    sinks_slow_attention: bool
    # Attention with an indexer scores all keys and masks those that were not chosen, where others skip them.
    scores_unchosen_keys: bool
    # Fused experts of one rank gather and sum rows in their GEMMs: no rows are permuted.
    fuses_permutation: bool
    # The gradients of a single microbatch on one rank are written by their GEMMs, and not added to a sum.
    adds_single_gradient: bool
    # Bytes that move for each logit of the loss: in fp32 back and forth, or in 16 bits in one fused kernel.
    logit_bytes: float
    # The host waits for the GPU in every layer, whatever the dispatcher; else only where the dispatcher does.
    waits_every_layer: bool
    # Ranks of context and tensor parallelism deal out the pictures of their sequences; else each encodes all of them.
    shares_pictures: bool
    # The rate of the optimizer step was fitted with fp32 gradients, and with their norm in it.
    optimizer_rate_has_norm: bool
    # The host updates offloaded optimizer states, and gradients and weights travel; else the states do.
    updates_on_host: bool
    # The fraction of a format's peak at which Muon's orthogonalization in that format is priced, on a GPU and on a CPU.
    muon_fractions_gpu: dict[str, float]
    muon_fractions_cpu: dict[str, float]


STACK_TRAITS = {
    "megatron-bridge": StackTraits(
        emulates_formats=False,
        recomputes_moe_as_one=False,
        recomputes_delta_rule=False,
        delays_sharded_wgrad=True,
        sinks_slow_attention=True,
        scores_unchosen_keys=False,
        fuses_permutation=False,
        adds_single_gradient=True,
        logit_bytes=14,
        waits_every_layer=True,
        shares_pictures=False,
        optimizer_rate_has_norm=True,
        updates_on_host=True,
        muon_fractions_gpu={"bf16": 1 / 2},
        muon_fractions_cpu={"bf16": 1 / 2},
    ),
    "threefold": StackTraits(
        emulates_formats=True,
        recomputes_moe_as_one=True,
        recomputes_delta_rule=True,
        delays_sharded_wgrad=False,
        sinks_slow_attention=False,
        scores_unchosen_keys=True,
        fuses_permutation=True,
        adds_single_gradient=False,
        logit_bytes=5,
        waits_every_layer=False,
        shares_pictures=True,
        optimizer_rate_has_norm=False,
        updates_on_host=False,
        # A GPU's fp32 rate is about an eighth of its TF32 rate, which the chip's facts give.
        muon_fractions_gpu={"bf16": 1 / 2, "fp32": 1 / 8},
        muon_fractions_cpu={"bf16": 1 / 2, "fp32": 1.0},
    ),
}
