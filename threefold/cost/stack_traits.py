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
    # The format of Muon's orthogonalization, and the fraction of that format's peak at which it is priced.
    muon_format: str
    muon_fraction_gpu: float
    muon_fraction_cpu: float


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
        muon_format="bf16",
        muon_fraction_gpu=1 / 2,
        muon_fraction_cpu=1 / 2,
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
        muon_format="fp32",
        muon_fraction_gpu=1 / 8,  # a GPU's fp32 rate is about an eighth of its TF32 rate, which the chip's facts give
        muon_fraction_cpu=1.0,
    ),
}
