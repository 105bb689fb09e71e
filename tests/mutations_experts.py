"""What can go wrong between routers and experts."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mutation import breaks, nothing, put, reduces_nothing, wrap
from torch import Tensor

from threefold.engine import build, step
from threefold.engine.dispatch import alltoall, rows
from threefold.engine.dispatch.arrival import Arrival, exchange, reorder
from threefold.engine.dispatch.capacity import Capacity
from threefold.engine.mesh import Mesh
from threefold.engine.moe import balance
from threefold.engine.moe.experts import Experts
from threefold.engine.moe.router import Router
from threefold.engine.shard import expert

# Experts


@breaks("ep wholly over cp", often=True, error="[Ss]plit sizes|[Cc]onnection closed")
def splits_are_swapped() -> None:
    wrap(alltoall, "swap", lambda old, group, sizes, out_sizes: old(group, out_sizes, sizes))


@breaks("ep, odd width")
def gradients_of_experts_are_divided_by_dp() -> None:
    def backward(old: Callable[..., Any], *grads: Any) -> Any:
        return tuple(grad / 2 if isinstance(grad, Tensor) else grad for grad in old(*grads))

    old = rows._Gather.backward
    put(rows._Gather, "backward", staticmethod(lambda *args: backward(old, *args)))


@breaks("dp tp ep edp")
def gradients_of_experts_are_not_summed_over_edp() -> None:
    reduces_nothing("edp")


@breaks("cp edp")
def experts_are_summed_over_dp() -> None:
    def copies(old: Callable[..., Any], mesh: Mesh, place: Any) -> Any:
        return old(mesh, replace(place, copies=("dp", "cp")) if "edp" in place.copies else place)

    wrap(build, "copies_group", copies)


@breaks("etp", often=True)
def parts_of_etp_are_not_added() -> None:
    def leave(self: Arrival, y_RD: Tensor) -> Tensor:
        if self._index is not None:
            y_RD = reorder(y_RD, *reversed(self._index))
        parts = exchange(y_RD, self._etp, self._each, self._sizes)
        return parts.view(self._etp.size, self._own, *y_RD.shape[1:])[self._etp.rank]

    put(Arrival, "leave", leave)


@breaks("etp with biases")
def every_rank_of_etp_adds_the_bias() -> None:
    put(Experts, "adds_bias", property(lambda self: True, lambda self, value: None))


@breaks("etp")
def gate_and_up_are_cut_as_one() -> None:
    def places(old: Callable[..., Any], experts: Any, mesh: Mesh) -> Any:
        made = old(experts, mesh)
        place = made["gate_up"]
        (start, _), (_, stop) = place.ranges[1]
        part = (stop - place.shape[1] // 2 - start) * 2
        first = mesh.place("etp") * part
        return made | {"gate_up": replace(place, ranges=(place.ranges[0], ((first, first + part),), place.ranges[2]))}

    wrap(expert, "_places", places)


@breaks("tp cp ep etp")
def ep_and_etp_change_places() -> None:
    other = {("ep",): ("etp",), ("etp",): ("ep",)}
    wrap(Mesh, "group", lambda old, mesh, *axes: old(mesh, *other.get(axes, axes)))


@breaks("ep beyond dp")
def capacity_is_of_a_rank() -> None:
    def drop(self: Capacity, expert_TK: Tensor, weight_TK: Tensor) -> Tensor:
        rows, _ = self.fill(expert_TK, weight_TK.detach())
        return expert_TK.masked_fill(rows.row_TK < 0, -1)

    put(Capacity, "drop", drop)


@breaks("tp")
def balance_counts_its_own_tokens() -> None:
    put(balance, "all_reduce", nothing)


@breaks("tp")
def z_loss_is_not_a_part() -> None:
    put(balance, "_part", lambda mean, tokens: mean)


@breaks("edp", often=True)
def router_bias_follows_its_own_load() -> None:
    def added(old: Callable[..., Any], parts: Any, sums: Any, squares: Tensor) -> Any:
        found = old(parts, sums, squares)
        found["load_LE"] = sums["load_LE"]
        return found

    wrap(step, "add_over_ranks", added)


@breaks("forced balance")
def forced_balance_begins_anew_on_every_rank() -> None:
    put(Router, "turn", property(lambda self: 0, lambda self, value: None))
