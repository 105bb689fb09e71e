"""Mutations of data and pipeline parallelism."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mutation_registry import breaks, completed_call, replace_attribute, skip_reduction, wrap_attribute
from torch import Tensor

from threefold.engine import build, step
from threefold.engine.autograd.delayed_wgrad import WgradQueue
from threefold.engine.data_parallel import fsdp
from threefold.engine.data_parallel.buckets import Bucket
from threefold.engine.data_parallel.fsdp import FsdpWrapper
from threefold.engine.data_parallel.full_matrices import ShardedMatrix
from threefold.engine.data_parallel.zero1 import Zero1
from threefold.engine.models import decoder
from threefold.engine.schedule import microbatch_runners as runner

# Data parallel


@breaks("dp", often=True)
def loss_is_of_its_own_labels() -> None:
    def counted(old: Callable[..., Any], *args: Any) -> Any:
        shares, labels = old(*args)
        return shares / shares.sum(), labels

    wrap_attribute(step, "count_labels", counted)


@breaks("dp")
def clipped_by_its_own_norm() -> None:
    wrap_attribute(step, "add_over_ranks", lambda old, parts, sums, x: {**old(parts, sums, x), "squares": x.double()})


@breaks("dp")
def one_rank_does_not_clip() -> None:
    def scale(old: Callable[..., None], data: Zero1, factor: Tensor) -> None:
        if not data.buckets[0].group.rank:
            old(data, factor)

    wrap_attribute(Zero1, "scale_grads", scale)


@breaks("dp")
def owned_part_begins_one_early() -> None:
    def part(self: Bucket, flat: Tensor) -> Tensor:
        first = self.shard_numel * self.group.rank - (self.group.rank > 0)
        return flat[first : first + self.shard_numel]

    replace_attribute(Bucket, "local_shard", part)


@breaks("dp")
def weights_are_not_gathered() -> None:
    replace_attribute(Bucket, "start_gather", lambda bucket: None)


@breaks("fsdp tp")
def rest_of_fsdp_is_not_reduced() -> None:
    replace_attribute(fsdp, "all_reduce", completed_call)


@breaks("fsdp")
def fsdp_averages() -> None:
    def unit(old: Callable[..., Any], *args: Any, **more: Any) -> Any:
        made = old(*args, **more)
        made.set_gradient_divide_factor(2.0)
        return made

    wrap_attribute(FsdpWrapper, "_unit", unit)


@breaks("hsdp")
def copies_of_hsdp_are_not_reduced() -> None:
    def unit(old: Callable[..., Any], *args: Any, **more: Any) -> Any:
        made = old(*args, **more)
        made.set_requires_all_reduce(False)
        return made

    wrap_attribute(FsdpWrapper, "_unit", unit)


@breaks("muon, cut matrices")
def muon_takes_the_part_of_another() -> None:
    replace_attribute(
        ShardedMatrix,
        "extract_shard",
        lambda matrix, full: full if matrix.is_replicated else matrix.placements[0].extract_shard(full),
    )


# Pipeline


@breaks("pp", often=True)
def loss_sees_another_microbatch() -> None:
    def forward(old: Callable[..., Tensor], chunk: Any, x: Tensor | None, microbatch: int) -> Tensor:
        return old(chunk, x, len(chunk.batches) - 1 - microbatch if chunk.model.has_loss else microbatch)

    wrap_attribute(runner.ChunkForward, "forward", forward)


@breaks("vpp")
def losses_of_inner_chunks_are_lost() -> None:
    replace_attribute(runner, "attach_loss", lambda x, loss: x)


@breaks("vpp")
def losses_of_inner_chunks_are_not_shares() -> None:
    wrap_attribute(runner, "attach_loss", lambda old, x, loss: old(x, loss * 4))


@breaks("embedding alone")
def tied_embedding_is_not_summed() -> None:
    skip_reduction("pp")


@breaks("embedding alone")
def tied_embedding_has_two_owners() -> None:
    wrap_attribute(build, "replica_group", lambda old, mesh, place: old(mesh, replace(place, also_on_pp_ranks=())))


@breaks("zero-bubble")
def a_delayed_weight_gradient_is_lost() -> None:
    def finish(old: Callable[..., None], delay: WgradQueue) -> None:
        delay.pending.pop()
        old(delay)

    wrap_attribute(WgradQueue, "finish", finish)


@breaks("m and L in chunks of their own")
def mtp_depths_read_the_wrong_state() -> None:
    def forward_chunk(old: Callable[..., Any], model: Any, states: list[Tensor], given: Any) -> Any:
        return old(model, states[:1] * len(states), given)

    wrap_attribute(decoder.Decoder, "forward_chunk", forward_chunk)
