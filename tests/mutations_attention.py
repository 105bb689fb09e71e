"""What can go wrong along tp and cp."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from mutation import breaks, nothing, own_share, put, reduces_nothing, wrap
from torch import Tensor

from threefold.engine import build, inputs, loss, step
from threefold.engine.attention.sight import Sight
from threefold.engine.loss import VocabPart
from threefold.engine.mesh import Mesh
from threefold.engine.models import decoder
from threefold.engine.shard import collectives, context, delta, ring, tensor, zigzag
from threefold.engine.shard.collectives import Pending

# Tensor parallel


@breaks("tp", often=True)
def scatter_does_not_sum() -> None:
    put(collectives._Scatter, "forward", staticmethod(_forward_cut))


def _forward_cut(ctx: Any, x: Tensor, group: Any, dim: int) -> Tensor:
    ctx.call = group, dim
    return own_share(x, group, dim)


@breaks("tp")
def gathers_backward_does_not_reduce() -> None:
    put(collectives._Gather, "backward", staticmethod(lambda ctx, grad: (own_share(grad, *ctx.call), None, None)))


@breaks("tp with latents")
def gradient_of_norms_is_not_summed_over_tp() -> None:
    reduces_nothing("tp")


@breaks("tp")
def vocabulary_begins_one_late() -> None:
    put(tensor, "VocabPart", lambda first, width, group: VocabPart(first + group.rank, width, group))


@breaks("tp with an odd vocabulary")
def loss_takes_the_maximum_of_its_own_columns() -> None:
    wrap(loss, "all_reduce", lambda old, x, group, op="sum": nothing() if op == "max" else old(x, group, op))


@breaks("tp")
def alike_losses_are_counted_by_every_rank() -> None:
    put(step, "_ALIKE", ())


@breaks("tp")
def sinks_of_other_heads() -> None:
    def cuts(old: Callable[..., Any], module: Any, place: int, degree: int) -> Any:
        for name, dim, ranges, shared in old(module, place, degree):
            yield name, dim, [(0, ranges[0][1] - ranges[0][0])] if name == "sinks" else ranges, shared

    wrap(tensor, "_gqa", cuts)


@breaks("tp with copied key heads", often=True)
def copied_key_heads_are_not_reduced() -> None:
    reduces_nothing("kv")


@breaks("tp with copied key heads")
def copied_key_heads_have_two_owners() -> None:
    wrap(build, "copies_group", lambda old, mesh, place: old(mesh, replace(place, shared_by=1)))


@breaks("tp cp")
def tp_and_cp_change_places() -> None:
    other = {("tp",): ("cp",), ("cp",): ("tp",)}
    wrap(Mesh, "group", lambda old, mesh, *axes: old(mesh, *other.get(axes, axes)))


# Context parallel


@breaks("cp", often=True)
def sequence_is_cut_without_zigzag() -> None:
    put(context, "cut", own_share)


@breaks("cp")
def positions_begin_at_zero_on_every_rank() -> None:
    def places(old: Callable[..., Any], *args: Any) -> Any:
        made = old(*args)
        share = torch.arange(made.tokens_BS.shape[1]).expand_as(made.tokens_BS)
        return replace(made, places=replace(made.places, positions_BS=share))

    wrap(decoder, "make_inputs", places)


@breaks("cp")
def ring_reads_the_future() -> None:
    wrap(ring.Reading, "of_rank", lambda old, *args: [replace(tile, causal=False) for tile in old(*args)])


@breaks("cp p2p, windows and sinks")
def ring_turns_the_other_way() -> None:
    def turned(x: list[Tensor], group: Any) -> tuple[list[Tensor], Pending]:
        out = [torch.empty_like(t) for t in x]
        before, after = (group.rank - 1) % group.size, (group.rank + 1) % group.size
        return out, collectives.pass_on(out, x, group, before, after)

    put(ring, "_pass", turned)


@breaks("cp p2p, windows and sinks")
def sinks_join_twice() -> None:
    wrap(ring, "shrink", lambda old, out, lse, sinks: old(*old(out, lse, sinks), sinks))


@breaks("cp p2p, windows and sinks")
def documents_are_not_kept_apart() -> None:
    put(context, "documents_of", lambda *args: None)


@breaks("cp p2p, windows and sinks")
def window_is_forgotten() -> None:
    put(context, "Sight", lambda window, documents: Sight(None, documents))


@breaks("cp all-gather, latents")
def gathered_keys_stay_in_the_order_of_ranks() -> None:
    put(ring, "to_natural", lambda x, cp, dim: x)


@breaks("cp a2a, latents")
def traded_heads_stay_in_the_order_of_ranks() -> None:
    put(zigzag, "to_natural", lambda x, cp, dim: x)


@breaks("cp passes states")
def states_pass_in_the_order_of_ranks() -> None:
    put(delta, "to_natural", lambda x, cp, dim: x)


@breaks("cp all-gather, latents")
def mtp_looks_ahead_within_the_share() -> None:
    def targets(old: Callable[..., Any], tokens: Tensor, *rest: Any) -> Any:
        made, cut = old(tokens, *rest), rest[-1]
        ahead = [replace(t, tokens_BS=inputs.ahead(cut(tokens), n, 0)) for n, t in enumerate(made.targets)]
        return replace(made, targets=tuple(ahead))

    wrap(decoder, "make_inputs", targets)


@breaks("dp cp")
def gradients_are_not_summed_over_cp() -> None:
    reduces_nothing("cp")


@breaks("cp all-gather, sinks")
def gradients_of_gathered_keys_are_not_summed() -> None:
    def scatter(out: Tensor, x: Tensor, group: Any) -> Pending:
        out.copy_(own_share(x, group, 0))
        return nothing()

    put(ring, "reduce_scatter", scatter)


@breaks("cp passes states")
def convolution_begins_anew_on_every_span() -> None:
    wrap(delta, "gather", lambda old, x, group, dim=0: old(x, group, dim) * (0 if dim == 1 else 1))
