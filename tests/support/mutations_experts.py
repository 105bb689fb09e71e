"""Mutations of routing, expert parallelism and experts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from mutation_registry import breaks, completed_call, replace_attribute, skip_reduction, wrap_attribute
from torch import Tensor

from threefold.engine import build, step
from threefold.engine.autograd import delayed_wgrad, recompute
from threefold.engine.batch import Padding
from threefold.engine.dispatch import alltoall, received_rows, rows
from threefold.engine.dispatch.capacity import Capacity
from threefold.engine.dispatch.received_rows import ReceivedRows, all_to_all_rows
from threefold.engine.dist.mesh import Mesh
from threefold.engine.models import decoder
from threefold.engine.moe import balance
from threefold.engine.moe.copies import CopiedExperts
from threefold.engine.moe.experts import Experts
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.moe.router import Router
from threefold.engine.schedule import overlappable_pass
from threefold.engine.shard import expert_parallel as expert

# Experts


@breaks("ep wholly over cp", often=True, error="[Ss]plit sizes|[Cc]onnection closed")
def splits_are_swapped() -> None:
    wrap_attribute(alltoall, "all_to_all_exchange", lambda old, group, sizes, out_sizes: old(group, out_sizes, sizes))


@breaks("ep, odd width")
def gradients_of_experts_are_divided_by_dp() -> None:
    def backward(old: Callable[..., Any], *grads: Any) -> Any:
        return tuple(grad / 2 if isinstance(grad, Tensor) else grad for grad in old(*grads))

    old = rows._UnpermuteSum.backward
    replace_attribute(rows._UnpermuteSum, "backward", staticmethod(lambda *args: backward(old, *args)))


@breaks("dp tp ep edp")
def gradients_of_experts_are_not_summed_over_edp() -> None:
    skip_reduction("edp")


@breaks("cp edp")
def experts_are_summed_over_dp() -> None:
    def copies(old: Callable[..., Any], mesh: Mesh, place: Any) -> Any:
        return old(mesh, replace(place, replica_axes=("dp", "cp")) if "edp" in place.replica_axes else place)

    wrap_attribute(build, "replica_group", copies)


@breaks("etp", often=True)
def parts_of_etp_are_not_added() -> None:
    def reduce(self: ReceivedRows, y_RD: Tensor) -> Tensor:
        parts = all_to_all_rows(y_RD, self._etp, self._own_sizes, self._sizes)
        return parts.view(self._etp.size, self._num_received, *y_RD.shape[1:])[self._etp.rank]

    replace_attribute(ReceivedRows, "reduce", reduce)


def order_of_received_rows(field: str) -> None:
    """Let one side of the order of received rows be the order in which they arrived."""

    def order(old: Callable[..., Any], count_Be: Tensor, num_rows: int) -> Any:
        made = old(count_Be, num_rows)
        as_arrived = torch.arange(num_rows, dtype=torch.int32).view_as(getattr(made, field))
        return replace(made, **{field: as_arrived})

    wrap_attribute(received_rows, "order_of_blocks", order)


@breaks("experts in one, ep x etp", often=True)
def received_rows_are_read_as_they_lie() -> None:
    order_of_received_rows("token_R")


@breaks("experts in one, ep overlap")
def results_of_received_rows_are_stored_by_expert() -> None:
    order_of_received_rows("row_TK")


@breaks("ep, wgrads during dispatch")
def weight_gradients_during_dispatch_are_forgotten() -> None:
    node = delayed_wgrad._FinishInBackward
    replace_attribute(node, "backward", staticmethod(lambda ctx, grad: (grad, None)))


@breaks("etp with biases")
def every_rank_of_etp_adds_the_bias() -> None:
    replace_attribute(Experts, "adds_bias", property(lambda self: True, lambda self, value: None))


@breaks("etp")
def gate_and_up_are_cut_as_one() -> None:
    def places(old: Callable[..., Any], experts: Any, mesh: Mesh) -> Any:
        made = old(experts, mesh)
        place = made["gate_up"]
        (start, _), (_, stop) = place.ranges[1]
        part = (stop - place.shape[1] // 2 - start) * 2
        first = mesh.coordinate("etp") * part
        return made | {"gate_up": replace(place, ranges=(place.ranges[0], ((first, first + part),), place.ranges[2]))}

    wrap_attribute(expert, "_expert_placements", places)


@breaks("tp cp ep etp")
def ep_and_etp_change_places() -> None:
    other = {("ep",): ("etp",), ("etp",): ("ep",)}
    wrap_attribute(Mesh, "group", lambda old, mesh, *axes: old(mesh, *other.get(axes, axes)))


@breaks("ep beyond dp")
def capacity_is_of_a_rank() -> None:
    def mark_dropped(self: Capacity, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        rows, _ = self.sort_and_pad(expert_TK, weight_TK.detach())
        return expert_TK.masked_fill(rows.row_TK < 0, -1)

    replace_attribute(Capacity, "mark_dropped", mark_dropped)


@breaks("tp")
def balance_counts_its_own_tokens() -> None:
    replace_attribute(balance, "all_reduce", completed_call)


@breaks("tp")
def z_loss_is_not_a_part() -> None:
    replace_attribute(balance, "_part_of_mean", lambda mean, tokens: mean)


@breaks("ep beyond dp", often=True)
def padding_counts_in_statistics_of_routers() -> None:
    replace_attribute(balance, "_useful", lambda value, routing: value)


@breaks("ep beyond dp")
def padding_takes_places_of_useful_tokens() -> None:
    wrap_attribute(Router, "_choose_and_weigh", lambda old, router, *args: old(router, *args[:3], None))


@breaks("padded, tp cp ep, full recompute", error="what the first run saved|the second run saved")
def recompute_forgets_the_padding() -> None:
    wrap_attribute(recompute, "override", lambda old, name, value: old(name, None))


@breaks("padded, pp mtp ep overlap")
def overlapped_passes_forget_the_padding() -> None:
    wrap_attribute(overlappable_pass, "override", lambda old, name, value: old(name, None))


@breaks("padded, dynamic cp")
def every_rank_counts_its_own_useful_tokens() -> None:
    def inputs(old: Callable[..., Any], *args: Any, **more: Any) -> Any:
        made = old(*args, **more)
        is_padding_BS = made.padding.is_padding_BS
        return replace(made, padding=Padding(is_padding_BS, (~is_padding_BS).sum(dim=1)))

    wrap_attribute(decoder, "make_inputs", inputs)


@breaks("edp", often=True)
def router_bias_follows_its_own_load() -> None:
    def added(old: Callable[..., Any], parts: Any, sums: Any, squares: Tensor) -> Any:
        found = old(parts, sums, squares)
        found["load_LE"] = sums["load_LE"]
        return found

    wrap_attribute(step, "add_over_ranks", added)


@breaks("forced balance")
def forced_balance_begins_anew_on_every_rank() -> None:
    replace_attribute(Router, "expert_group_rank", property(lambda self: 0, lambda self, value: None))


# Copies of hot experts


@breaks("expert copies", often=True)
def gradients_of_copies_are_lost() -> None:
    wrap_attribute(CopiedExperts, "send_home", lambda old, self, grads: old(self, grads).zero_())


@breaks("expert copies", often=True)
def copies_keep_the_weights_of_the_first_step() -> None:
    def place(old: Callable[..., Any], self: CopiedExperts, replicas: Any) -> None:
        filled = self.__dict__.setdefault("was_filled", False)
        old(self, replicas)
        self.filling = [] if filled and self.replicas is not None else None
        self.was_filled = filled or self.replicas is not None

    wrap_attribute(CopiedExperts, "place", place)


@breaks("expert copies")
def tokens_of_copies_count_twice() -> None:
    wrap_attribute(MoeLayer, "run_copies", lambda old, *args: 2 * old(*args))


@breaks("expert copies")
def an_evaluation_reads_old_copies() -> None:
    wrap_attribute(
        CopiedExperts, "place", lambda old, self, replicas: None if replicas is None else old(self, replicas)
    )


@breaks("expert copies")
def rows_of_copies_go_to_the_owner_s_weights_of_another_expert() -> None:
    old = CopiedExperts.sent.fget
    replace_attribute(CopiedExperts, "sent", property(lambda self: [(n + 1) % self.num_own for n in old(self)]))
