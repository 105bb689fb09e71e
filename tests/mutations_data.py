"""What can go wrong along dp, edp and pp."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mutation import breaks, nothing, put, reduces_nothing, wrap
from torch import Tensor

from threefold.engine import build, runner, step
from threefold.engine.models import decoder
from threefold.engine.pipeline.delay import Delay
from threefold.engine.shard import fsdp
from threefold.engine.shard.buckets import Bucket
from threefold.engine.shard.data import Zero1
from threefold.engine.shard.matrices import Cut
from threefold.engine.shard.wrap import Wrapper

# Data parallel


@breaks("dp", often=True)
def loss_is_of_its_own_labels() -> None:
    def counted(old: Callable[..., Any], *args: Any) -> Any:
        shares, labels = old(*args)
        return shares / shares.sum(), labels

    wrap(step, "count_labels", counted)


@breaks("dp")
def clipped_by_its_own_norm() -> None:
    wrap(step, "add_over_ranks", lambda old, parts, sums, x: {**old(parts, sums, x), "squares": x.double()})


@breaks("dp")
def one_rank_does_not_clip() -> None:
    def scale(old: Callable[..., None], data: Zero1, factor: Tensor) -> None:
        if not data.buckets[0].group.rank:
            old(data, factor)

    wrap(Zero1, "scale", scale)


@breaks("dp")
def owned_part_begins_one_early() -> None:
    def part(self: Bucket, flat: Tensor) -> Tensor:
        first = self.part * self.group.rank - (self.group.rank > 0)
        return flat[first : first + self.part]

    put(Bucket, "own_part", part)


@breaks("dp")
def weights_are_not_gathered() -> None:
    put(Bucket, "start_gather", lambda bucket: None)


@breaks("fsdp tp")
def rest_of_fsdp_is_not_reduced() -> None:
    put(fsdp, "all_reduce", nothing)


@breaks("fsdp")
def fsdp_averages() -> None:
    def unit(old: Callable[..., Any], *args: Any, **more: Any) -> Any:
        made = old(*args, **more)
        made.set_gradient_divide_factor(2.0)
        return made

    wrap(Wrapper, "_unit", unit)


@breaks("hsdp")
def copies_of_hsdp_are_not_reduced() -> None:
    def unit(old: Callable[..., Any], *args: Any, **more: Any) -> Any:
        made = old(*args, **more)
        made.set_requires_all_reduce(False)
        return made

    wrap(Wrapper, "_unit", unit)


@breaks("muon, cut matrices")
def muon_takes_the_part_of_another() -> None:
    put(Cut, "take", lambda cut, whole: whole if cut.whole_here else cut.placements[0].take(whole))


# Pipeline


@breaks("pp", often=True)
def loss_sees_another_microbatch() -> None:
    def forward(old: Callable[..., Tensor], chunk: Any, x: Tensor | None, microbatch: int) -> Tensor:
        return old(chunk, x, len(chunk.batches) - 1 - microbatch if chunk.model.has_loss else microbatch)

    wrap(runner.ChunkRun, "forward", forward)


@breaks("vpp")
def losses_of_inner_chunks_are_lost() -> None:
    put(runner, "attach", lambda x, loss: x)


@breaks("vpp")
def losses_of_inner_chunks_are_not_shares() -> None:
    wrap(runner, "attach", lambda old, x, loss: old(x, loss * 4))


@breaks("embedding alone")
def tied_embedding_is_not_summed() -> None:
    reduces_nothing("pp")


@breaks("embedding alone")
def tied_embedding_has_two_owners() -> None:
    wrap(build, "copies_group", lambda old, mesh, place: old(mesh, replace(place, also_on=())))


@breaks("zero-bubble")
def a_delayed_weight_gradient_is_lost() -> None:
    def finish(old: Callable[..., None], delay: Delay) -> None:
        delay.left.pop()
        old(delay)

    wrap(Delay, "finish", finish)


@breaks("m and L in chunks of their own")
def mtp_depths_read_the_wrong_state() -> None:
    def advance(old: Callable[..., Any], model: Any, states: list[Tensor], given: Any) -> Any:
        return old(model, states[:1] * len(states), given)

    wrap(decoder.Decoder, "advance", advance)
