"""Mutations of what the families of `spec/families` add to tensor and context parallelism."""

from dataclasses import replace

from mutation_registry import breaks, completed_call, replace_attribute, wrap_attribute

from threefold.engine.layers import norm
from threefold.engine.layers.positions import Positions
from threefold.engine.models import decoder
from threefold.engine.shard import tensor_parallel


@breaks("olmoe tp ep", often=True)
def norms_over_all_heads_see_the_heads_of_one_rank() -> None:
    replace_attribute(norm, "all_reduce", completed_call)


@breaks("olmoe tp ep")
def gradients_of_norms_over_all_heads_are_not_summed() -> None:
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        summed = replace_attribute(norm, "all_reduce", completed_call)
        try:
            return old(ctx, grad)
        finally:
            norm.all_reduce = summed

    old = norm._ShardedRmsNorm.backward
    norm._ShardedRmsNorm.backward = staticmethod(backward)


@breaks("minimax tp of copied key heads")
def copies_of_key_heads_count_as_different_heads() -> None:
    wrap_attribute(tensor_parallel, "NormShard", lambda old, *args: replace(old(*args), copies=1))


@breaks("qwen2 cp beyond the context")
def each_rank_takes_its_own_tokens_for_the_length() -> None:
    Positions.length = property(lambda self: self.positions_BS.max() + 1)  # type: ignore[assignment]


@breaks("phi tp ep")
def the_bias_of_the_head_is_left_out() -> None:
    def without_ones(old, x, spec):  # type: ignore[no-untyped-def]
        joined = old(x, spec).clone()
        joined[..., spec.dim :] = 0
        return joined

    wrap_attribute(decoder, "head_input", without_ones)
