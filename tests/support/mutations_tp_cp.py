"""Mutations of tensor and context parallelism."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from mutation_registry import breaks, completed_call, local_chunk, replace_attribute, skip_reduction, wrap_attribute
from torch import Tensor

from threefold.engine import build, step
from threefold.engine.attention.mask_tiles import AttentionMask
from threefold.engine.dist import collectives
from threefold.engine.dist.collectives import PendingCollective
from threefold.engine.dist.mesh import Mesh
from threefold.engine.layers import cross_entropy as loss
from threefold.engine.layers.cross_entropy import VocabShard
from threefold.engine.layers.positions import Positions
from threefold.engine.models import decoder, inputs
from threefold.engine.shard import context_parallel as context
from threefold.engine.shard import latent_attention as latents
from threefold.engine.shard import recurrent_context as delta
from threefold.engine.shard import ring_attention as ring
from threefold.engine.shard import sequence_layout as zigzag
from threefold.engine.shard import tensor_parallel as tensor

# Tensor parallel


@breaks("tp", often=True)
def scatter_does_not_sum() -> None:
    replace_attribute(collectives._ReduceScatterAlong, "forward", staticmethod(_forward_cut))


def _forward_cut(ctx: Any, x: Tensor, group: Any, dim: int) -> Tensor:
    ctx.call = group, dim
    return local_chunk(x, group, dim)


@breaks("tp")
def gathers_backward_does_not_reduce() -> None:
    replace_attribute(
        collectives._GatherAlong, "backward", staticmethod(lambda ctx, grad: (local_chunk(grad, *ctx.call), None, None))
    )


@breaks("tp with latents")
def gradient_of_norms_is_not_summed_over_tp() -> None:
    skip_reduction("tp")


@breaks("tp")
def vocabulary_begins_one_late() -> None:
    replace_attribute(tensor, "VocabShard", lambda first, width, group: VocabShard(first + group.rank, width, group))


@breaks("tp with an odd vocabulary")
def loss_takes_the_maximum_of_its_own_columns() -> None:
    wrap_attribute(
        loss, "all_reduce", lambda old, x, group, op="sum": completed_call() if op == "max" else old(x, group, op)
    )


@breaks("tp")
def alike_losses_are_counted_by_every_rank() -> None:
    replace_attribute(step, "_SAME_ON_TP_RANKS", ())


@breaks("tp")
def sinks_of_other_heads() -> None:
    def cuts(old: Callable[..., Any], module: Any, place: int, degree: int) -> Any:
        for name, dim, ranges, shared in old(module, place, degree):
            yield name, dim, [(0, ranges[0][1] - ranges[0][0])] if name == "sinks" else ranges, shared

    wrap_attribute(tensor, "_gqa_shards", cuts)


@breaks("tp with copied key heads", often=True)
def copied_key_heads_are_not_reduced() -> None:
    skip_reduction("kv")


@breaks("tp with copied key heads")
def copied_key_heads_have_two_owners() -> None:
    wrap_attribute(build, "replica_group", lambda old, mesh, place: old(mesh, replace(place, tp_replicas=1)))


@breaks("tp cp")
def tp_and_cp_change_places() -> None:
    other = {("tp",): ("cp",), ("cp",): ("tp",)}
    wrap_attribute(Mesh, "group", lambda old, mesh, *axes: old(mesh, *other.get(axes, axes)))


# Context parallel


@breaks("cp", often=True)
def sequence_is_cut_without_zigzag() -> None:
    replace_attribute(context, "shard_sequence", local_chunk)


@breaks("cp")
def positions_begin_at_zero_on_every_rank() -> None:
    def inputs(old: Callable[..., Any], *args: Any, **more: Any) -> Any:
        made = old(*args, **more)
        local = torch.arange(made.tokens_BS.shape[1]).expand_as(made.tokens_BS)
        return replace(made, positions=replace(made.positions, positions_BS=local))

    wrap_attribute(decoder, "make_inputs", inputs)


@breaks("cp")
def ring_reads_the_future() -> None:
    wrap_attribute(
        ring.ShardedMask, "tiles_for_rank", lambda old, *args: [replace(tile, causal=False) for tile in old(*args)]
    )


@breaks("cp p2p, windows and sinks")
def ring_turns_the_other_way() -> None:
    def turned(x: list[Tensor], group: Any) -> tuple[list[Tensor], PendingCollective]:
        out = [torch.empty_like(t) for t in x]
        before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        return out, collectives.send_recv(out, x, group, before, after)

    replace_attribute(ring, "_pass_to_next", turned)


@breaks("cp p2p, windows and sinks")
def sinks_join_twice() -> None:
    wrap_attribute(ring, "add_sink", lambda old, out, lse, sinks: old(*old(out, lse, sinks), sinks))


@breaks("cp p2p, windows and sinks")
def documents_are_not_kept_apart() -> None:
    replace_attribute(context, "host_documents", lambda *args: None)


@breaks("cp p2p, windows and sinks")
def window_is_forgotten() -> None:
    replace_attribute(context, "AttentionMask", lambda window, documents: AttentionMask(None, documents))


@breaks("cp all-gather, latents")
def gathered_keys_stay_in_the_order_of_ranks() -> None:
    replace_attribute(zigzag, "undo_zigzag", lambda x, cp, dim: x)


@breaks("cp a2a, latents")
def traded_heads_stay_in_the_order_of_ranks() -> None:
    replace_attribute(zigzag, "undo_zigzag", lambda x, cp, dim: x)


@breaks("cp passes states")
def states_pass_in_the_order_of_ranks() -> None:
    replace_attribute(delta, "undo_zigzag", lambda x, cp, dim: x)


@breaks("cp all-gather, latents")
def mtp_looks_ahead_within_the_share() -> None:
    def targets(old: Callable[..., Any], tokens: Tensor, *rest: Any, **more: Any) -> Any:
        made, cut = old(tokens, *rest, **more), rest[-1]
        ahead = [replace(t, tokens_BS=inputs.shift_left(cut(tokens), n, 0)) for n, t in enumerate(made.targets)]
        return replace(made, targets=tuple(ahead))

    wrap_attribute(decoder, "make_inputs", targets)


@breaks("dp cp")
def gradients_are_not_summed_over_cp() -> None:
    skip_reduction("cp")


@breaks("cp all-gather, sinks")
def gradients_of_gathered_keys_are_not_summed() -> None:
    def scatter(out: Tensor, x: Tensor, group: Any) -> PendingCollective:
        out.copy_(local_chunk(x, group, 0))
        return completed_call()

    replace_attribute(zigzag, "reduce_scatter", scatter)


@breaks("latents by a2a+p2p", often=True)
def latents_are_expanded_for_the_heads_of_another_rank() -> None:
    def rows(old: Callable[..., Any], up: Any, weight: Tensor, group: Any, recipe: Any) -> None:
        old(up, weight, replace(group, rank=(group.rank + 1) % group.size), recipe)

    wrap_attribute(latents._UpProjection, "__init__", rows)


@breaks("latents by a2a+p2p")
def gradients_of_latents_are_not_summed_over_heads() -> None:
    def own(old: Callable[..., Any], x: Tensor, group: Any, dim: int, in_zigzag: bool = False) -> Any:
        return lambda: local_chunk(x, group, dim) if in_zigzag else zigzag.shard_sequence(x, group, dim)

    wrap_attribute(latents, "start_sequence_reduce", own)


@breaks("latents by p2p")
def gradients_of_latents_do_not_come_home() -> None:
    def forgetful(grads: ring.GradientRing, parts: list[Tensor]) -> None:
        if grads._pending is not None:
            grads._pending.wait()

    replace_attribute(ring.GradientRing, "_add_passed", forgetful)


@breaks("latents by all-gather")
def gathered_latents_belong_to_the_next_rank() -> None:
    wrap_attribute(
        latents.LatentExchange,
        "latents",
        lambda old, own, x: ((rank ^ 1, part) for rank, part in old(own, x)),
    )


@breaks("latents by a2a+p2p")
def gathered_queries_have_the_positions_of_one_span() -> None:
    wrap_attribute(Positions, "at", lambda old, own, spans: old(own, [spans[0]] * len(spans)))


@breaks("latents by p2p")
def weight_gradient_is_that_of_the_last_block() -> None:
    def last(old: Callable[..., Any], up: Any, *args: Any) -> Any:
        up.weight_grad = None
        return old(up, *args)

    wrap_attribute(latents._UpProjection, "backward", last)


@breaks("latents by a2a+p2p")
def outputs_return_in_the_order_of_heads() -> None:
    wrap_attribute(latents, "heads_to_sequence", lambda old, x, group: old(x.flip(2).contiguous(), group))


@breaks("cp passes states")
def convolution_begins_anew_on_every_span() -> None:
    wrap_attribute(delta, "gather_along", lambda old, x, group, dim=0: old(x, group, dim) * (0 if dim == 1 else 1))
