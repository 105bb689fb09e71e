"""Made-up layouts of a handful of tensors, as a sharded model and its optimizer would hold them.

Nothing here is of the engine but `Placement`: ranks and owners are counted by hand.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.engine.mesh import Group, alone
from threefold.engine.pieces import Piece
from threefold.engine.shard.placement import Placement, Range

# name: shape, dtype, what it is cut by (dim, how), and whether it lies in the first stage or the last.
TENSORS = {
    "embed.weight": ((11, 5), torch.bfloat16, [(0, "tp")], 0),
    "layer.q": ((12, 5), torch.bfloat16, [(0, "tp")], 0),
    "layer.k": ((4, 5), torch.bfloat16, [(0, "kv")], 0),
    "layer.out": ((5, 12), torch.bfloat16, [(1, "tp")], 0),
    "experts.gate_up": ((8, 12, 5), torch.bfloat16, [(0, "ep"), (1, "two etp")], -1),
    "experts.down": ((8, 5, 6), torch.bfloat16, [(0, "ep"), (2, "etp")], -1),
    "norm.weight": ((7,), torch.float32, [], -1),
    "scale": ((), torch.float32, [], -1),
}
STATE = "optimizer.first."
WITH_STATE = ("layer.q", "layer.out", "experts.gate_up", "scale")
PLAIN = {"model.balance_bias": (8,), "optimizer.steps": ()}


@dataclass(frozen=True)
class Made:
    """`split`: how the copies of a piece share it: evenly, at odd places inside rows, or all with the last."""

    world: int
    tp: int = 1
    ep: int = 1
    etp: int = 1
    pp: int = 1
    split: str = "even"

    def places(self, rank: int) -> dict[str, tuple[int, int]]:
        """Place and degree along each axis."""
        rest = rank % (self.world // self.pp)
        return {
            "pp": (rank // (self.world // self.pp), self.pp),
            "tp": (rest % self.tp, self.tp),
            "etp": (rest % self.etp, self.etp),
            "ep": (rest // self.etp % self.ep, self.ep),
        }

    def placement(self, name: str, rank: int) -> Placement | None:
        shape, _, cuts, stage = TENSORS[name]
        places = self.places(rank)
        if places["pp"][0] != stage % self.pp:
            return None
        ranges: list[tuple[Range, ...]] = [((0, size),) for size in shape]
        for dim, how in cuts:
            ranges[dim] = _cut(shape[dim], how, places)
        return Placement(shape, tuple(ranges), ())

    def owned(self, name: str, rank: int) -> tuple[int, int]:
        """Elements of the flattened piece that this one of its copies owns."""
        mine = self.placement(name, rank)
        assert mine is not None
        count = torch.Size(mine.local_shape).numel()
        copies = [other for other in range(self.world) if self.placement(name, other) == mine]
        place, num = copies.index(rank), len(copies)
        if self.split == "last":
            return (0, count) if place == num - 1 else (0, 0)
        odd = 1 if self.split == "odd" else 0
        cut = [0, *(min(count, count * n // num + odd) for n in range(1, num)), count]
        return cut[place], cut[place + 1]

    def group(self, rank: int, handles: dict[int, dist.ProcessGroup]) -> Group:
        return Group("checkpoint", tuple(range(self.world)), rank, handles[self.world]) if self.world > 1 else alone("")


LAYOUTS = [
    Made(1),
    Made(2, tp=2),
    Made(2, ep=2, split="odd"),
    Made(4, tp=2, ep=2, etp=2),
    Made(4, tp=4, ep=4, split="last"),
    Made(4, pp=2, ep=2, split="odd"),
    Made(3, tp=3, etp=3),
    Made(8, tp=2, ep=4, etp=2, split="odd"),
    Made(4, pp=2, tp=2, ep=2, split="last"),
    Made(6, pp=3, tp=2, ep=2),
]


def _cut(size: int, how: str, places: dict[str, tuple[int, int]]) -> tuple[Range, ...]:
    if how == "two etp":  # gate rows, then up rows
        [(start, stop)] = _cut(size // 2, "etp", places)
        return (start, stop), (size // 2 + start, size // 2 + stop)
    if how == "kv":  # two heads; more ranks than heads share them
        place, degree = places["tp"]
        heads = min(2, degree)
        return _even(size, place * heads // degree, heads)
    return _even(size, *places[how])


def _even(size: int, place: int, degree: int) -> tuple[Range, ...]:
    return ((size * place // degree, size * (place + 1) // degree),)


def noise(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Any bits at all, NaNs of every kind among them."""
    made = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (size,), dtype=torch.uint8, generator=made).view(dtype).view(tuple(shape))


@cache
def wholes() -> dict[str, Tensor]:
    """What a checkpoint of one rank holds."""
    found = {f"model.{name}": noise(shape, dtype, n) for n, (name, (shape, dtype, _, _)) in enumerate(TENSORS.items())}
    found |= {f"{STATE}{name}": noise(TENSORS[name][0], torch.float32, 50 + n) for n, name in enumerate(WITH_STATE)}
    return found | {name: noise(shape, torch.float32, 99) for name, shape in PLAIN.items()}


def within(values: Tensor) -> Tensor:
    """The same values as a view into a larger buffer, as buckets hold them."""
    buffer = torch.full((values.numel() + 9,), -7.0, dtype=values.dtype)
    view = buffer[4 : 4 + values.numel()].view(values.shape)
    return view.copy_(values)


def bare(name: str) -> str:
    """The parameter that a checkpoint's name is about."""
    return name.removeprefix("model.").removeprefix(STATE)


def to_save(layout: Made, rank: int) -> dict[str, Tensor | Piece]:
    """Each element once: what the rank owns."""
    state: dict[str, Tensor | Piece] = {}
    for name, whole in wholes().items():
        tensor = bare(name)
        if name in PLAIN:
            if rank == (0 if "steps" in name else layout.world - 1):
                state[name] = whole
        elif placement := layout.placement(tensor, rank):
            first, after = layout.owned(tensor, rank)
            piece = placement.take(whole)
            if layout.split == "last" and after:
                state[name] = Piece(placement, within(piece))
            else:
                state[name] = Piece(placement, within(piece.flatten()[first:after]), first)
    return state


def to_fill(layout: Made, rank: int) -> tuple[dict[str, Tensor | Piece], dict[str, Tensor]]:
    """What the rank wants: whole pieces of weights, owned parts of optimizer states, and what they must become."""
    want: dict[str, Tensor | Piece] = {}
    expected: dict[str, Tensor] = {}
    for name, whole in wholes().items():
        tensor = bare(name)
        if name in PLAIN:
            want[name], expected[name] = torch.zeros_like(whole), whole
        elif placement := layout.placement(tensor, rank):
            piece = placement.take(whole)
            first: int | None = None
            if name.startswith(STATE):
                first, after = layout.owned(tensor, rank)
                piece = piece.flatten()[first:after]
            want[name], expected[name] = Piece(placement, within(torch.zeros_like(piece)), first), piece
    return want, expected


def same_bits(left: Tensor, right: Tensor) -> bool:
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    return torch.equal(left.contiguous().flatten().view(torch.uint8), right.contiguous().flatten().view(torch.uint8))


def folder_of(root: Path, layout: Made) -> Path:
    return root / f"layout-{LAYOUTS.index(layout)}"
