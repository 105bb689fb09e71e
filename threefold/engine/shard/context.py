"""Context parallel: each rank holds a share of every sequence, and attention reads over all of them.

Shapes: B batch, H query heads, G key/value heads, s this rank's share of the sequence, S the whole, D head dim.
"""

from dataclasses import dataclass
from functools import partial
from math import gcd

from torch import Tensor

from threefold.engine.attention.backend import attend
from threefold.engine.attention.delta import GatedDelta
from threefold.engine.attention.gqa import GqaAttention
from threefold.engine.attention.mla import MlaAttention
from threefold.engine.attention.sight import Sight, documents_of
from threefold.engine.mesh import ALONE, Group, Mesh
from threefold.engine.models.decoder import Decoder
from threefold.engine.places import Bounds
from threefold.engine.shard.delta import DeltaContext
from threefold.engine.shard.ring import Gathered, Reading, Ring
from threefold.engine.shard.zigzag import cut, trade_for_heads, trade_for_sequence
from threefold.plan.plan import Plan


@dataclass(frozen=True)
class ContextAttention:
    """`backend.attend` where each rank holds a zigzag share; documents and bounds are of the whole sequence.

    Kinds: `p2p` passes keys and values round a ring, `all_gather` gathers them, `a2a` trades sequence for heads,
    `a2a+p2p` trades among `inner` neighbours and passes on round the `outer` ring.
    """

    kind: str
    group: Group
    inner: Group = ALONE
    outer: Group = ALONE

    def __post_init__(self) -> None:
        if self.kind == "a2a+p2p":
            assert self.inner.size * self.outer.size == self.group.size
            assert self.outer.rank * self.inner.size + self.inner.rank == self.group.rank

    def __call__(
        self,
        q_BHSD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        *,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
        documents_BS: Tensor | None = None,
        bounds: Bounds | None = None,
    ) -> Tensor:
        traders = {"a2a": self.group, "a2a+p2p": self.inner}.get(self.kind, ALONE)
        readers = {"a2a": ALONE, "a2a+p2p": self.outer}.get(self.kind, self.group)
        length = self.group.size * q_BHSD.shape[2]
        q, k, v = _trade_in((q_BHSD, k_BGSD, v_BGSD), traders)
        if sinks is not None:
            sinks = sinks.chunk(traders.size)[traders.rank]
        if readers.alone:
            out = attend(q, k, v, scale=scale, window=window, sinks=sinks, documents_BS=documents_BS, bounds=bounds)
        else:
            documents = None if documents_BS is None else documents_of(documents_BS, bounds)
            reading = Reading(readers, Sight(window, documents), length, scale)
            function = Gathered if self.kind == "all_gather" else Ring
            out = function.apply(q, k, v, sinks, reading)
        return trade_for_sequence(out.transpose(1, 2), traders).transpose(1, 2)


def _trade_in(parts: tuple[Tensor, ...], group: Group) -> list[Tensor]:
    return [x.transpose(1, 2) for x in trade_for_heads([x.transpose(1, 2) for x in parts], group)]


def shard_context(model: Decoder, mesh: Mesh, plan: Plan) -> None:
    """Give every mixer its way over the ranks of `cp`, and the model its share of a sequence."""
    group = mesh.group("cp")
    if group.alone:
        return
    inner, outer = _inner_and_outer(mesh, plan)
    model.cut = partial(cut, group=group, dim=1)
    for name, module in model.named_modules():
        kind = _kind(plan, name)
        if isinstance(module, GatedDelta):
            module.context = DeltaContext(kind, group)
        elif isinstance(module, GqaAttention | MlaAttention):
            module.attend = ContextAttention(kind, group, inner, outer)


def _kind(plan: Plan, name: str) -> str:
    """Of the layer in a module's name; MTP depths do as the last layer does."""
    kinds = plan.knobs.cp_comm
    if isinstance(kinds, str):
        return kinds
    parts = name.split(".")
    return kinds[int(parts[1])] if parts[0] == "layers" and len(parts) > 1 else kinds[-1]


def _inner_and_outer(mesh: Mesh, plan: Plan) -> tuple[Group, Group]:
    """Neighbours within a fast domain trade heads; where one domain holds all of them, a ring does."""
    group, link = mesh.group("cp"), plan.link("cp")
    if "a2a+p2p" not in {plan.knobs.cp_comm, *plan.knobs.cp_comm}:
        return ALONE, ALONE
    size = gcd(group.size, link.in_domain) if link.link == "network" else 1
    first = group.rank // size * size
    inner = mesh.of_ranks("cp inner", group.ranks[first : first + size])
    return inner, mesh.of_ranks("cp outer", group.ranks[group.rank % size :: size])
