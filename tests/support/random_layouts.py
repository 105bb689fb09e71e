"""Made-up layouts of a few tensors, as a sharded model and its optimizer would hold them, for checkpoint tests.

Of the engine only `Placement` and `CheckpointShard` are used: shards and owners are computed here a second time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.engine.dist.mesh import Group, trivial_group
from threefold.engine.dist.shard_placement import Placement, Range
from threefold.engine.run.dcp import CheckpointShard

# name: shape, dtype, how it is sharded (dim, axis), and whether it lies in the start pipeline stage or the last.
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
class TensorLayout:
    """Degrees of a layout, and how the replicas of a shard own it."""

    world: int
    tp: int = 1
    ep: int = 1
    etp: int = 1
    pp: int = 1
    split: str = "even"  # ownership among replicas: "even", "odd" (uneven, inside rows) or "last" (all with the last)

    def coordinates(self, rank: int) -> dict[str, tuple[int, int]]:
        """Coordinate and degree along each axis."""
        rest = rank % (self.world // self.pp)
        return {
            "pp": (rank // (self.world // self.pp), self.pp),
            "tp": (rest % self.tp, self.tp),
            "etp": (rest % self.etp, self.etp),
            "ep": (rest // self.etp % self.ep, self.ep),
        }

    def placement(self, name: str, rank: int) -> Placement | None:
        shape, _, shardings, stage = TENSORS[name]
        coordinates = self.coordinates(rank)
        if coordinates["pp"][0] != stage % self.pp:
            return None
        ranges: list[tuple[Range, ...]] = [((0, size),) for size in shape]
        for dim, how in shardings:
            ranges[dim] = _ranges(shape[dim], how, coordinates)
        return Placement(shape, tuple(ranges), ())

    def owned(self, name: str, rank: int) -> tuple[int, int]:
        """The range of the flattened shard that this one of its replicas owns."""
        mine = self.placement(name, rank)
        assert mine is not None
        count = torch.Size(mine.local_shape).numel()
        replicas = [other for other in range(self.world) if self.placement(name, other) == mine]
        index, num = replicas.index(rank), len(replicas)
        if self.split == "last":
            return (0, count) if index == num - 1 else (0, 0)
        odd = 1 if self.split == "odd" else 0
        ends = [0, *(min(count, count * n // num + odd) for n in range(1, num)), count]
        return ends[index], ends[index + 1]

    def group(self, rank: int, handles: dict[int, dist.ProcessGroup]) -> Group:
        return (
            Group("checkpoint", tuple(range(self.world)), rank, handles[self.world])
            if self.world > 1
            else trivial_group("")
        )


LAYOUTS = [
    TensorLayout(1),
    TensorLayout(2, tp=2),
    TensorLayout(2, ep=2, split="odd"),
    TensorLayout(4, tp=2, ep=2, etp=2),
    TensorLayout(4, tp=4, ep=4, split="last"),
    TensorLayout(4, pp=2, ep=2, split="odd"),
    TensorLayout(3, tp=3, etp=3),
    TensorLayout(8, tp=2, ep=4, etp=2, split="odd"),
    TensorLayout(4, pp=2, tp=2, ep=2, split="last"),
    TensorLayout(6, pp=3, tp=2, ep=2),
]


def _ranges(size: int, how: str, coordinates: dict[str, tuple[int, int]]) -> tuple[Range, ...]:
    if how == "two etp":  # gate rows, then up rows
        [(start, stop)] = _ranges(size // 2, "etp", coordinates)
        return (start, stop), (size // 2 + start, size // 2 + stop)
    if how == "kv":  # two heads; more ranks than heads share them
        place, degree = coordinates["tp"]
        heads = min(2, degree)
        return _even(size, place * heads // degree, heads)
    return _even(size, *coordinates[how])


def _even(size: int, place: int, degree: int) -> tuple[Range, ...]:
    return ((size * place // degree, size * (place + 1) // degree),)


def noise(shape: Sequence[int], dtype: torch.dtype, seed: int) -> Tensor:
    """Random bits, which include NaNs of every kind."""
    made = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(256, (size,), dtype=torch.uint8, generator=made).view(dtype).view(tuple(shape))


@cache
def full_tensors() -> dict[str, Tensor]:
    """The tensors of a checkpoint of one rank."""
    found = {f"model.{name}": noise(shape, dtype, n) for n, (name, (shape, dtype, _, _)) in enumerate(TENSORS.items())}
    found |= {f"{STATE}{name}": noise(TENSORS[name][0], torch.float32, 50 + n) for n, name in enumerate(WITH_STATE)}
    return found | {name: noise(shape, torch.float32, 99) for name, shape in PLAIN.items()}


def inside_buffer(values: Tensor) -> Tensor:
    """The same values as a view into a larger buffer, as buckets hold them."""
    buffer = torch.full((values.numel() + 9,), -7.0, dtype=values.dtype)
    view = buffer[4 : 4 + values.numel()].view(values.shape)
    return view.copy_(values)


def parameter_name(name: str) -> str:
    """The parameter's name without the prefix of the checkpoint."""
    return name.removeprefix("model.").removeprefix(STATE)


def state_to_save(layout: TensorLayout, rank: int) -> dict[str, Tensor | CheckpointShard]:
    """The elements that the rank owns: over all ranks each element once."""
    state: dict[str, Tensor | CheckpointShard] = {}
    for name, full in full_tensors().items():
        tensor = parameter_name(name)
        if name in PLAIN:
            if rank == (0 if "steps" in name else layout.world - 1):
                state[name] = full
        elif placement := layout.placement(tensor, rank):
            start, stop = layout.owned(tensor, rank)
            shard = placement.extract_shard(full)
            if layout.split == "last" and stop:
                state[name] = CheckpointShard(placement, inside_buffer(shard))
            else:
                state[name] = CheckpointShard(placement, inside_buffer(shard.flatten()[start:stop]), start)
    return state


def state_to_fill(layout: TensorLayout, rank: int) -> tuple[dict[str, Tensor | CheckpointShard], dict[str, Tensor]]:
    """Empty tensors for full shards of weights and owned parts of optimizer states, and the values they must get."""
    want: dict[str, Tensor | CheckpointShard] = {}
    expected: dict[str, Tensor] = {}
    for name, full in full_tensors().items():
        tensor = parameter_name(name)
        if name in PLAIN:
            want[name], expected[name] = torch.zeros_like(full), full
        elif placement := layout.placement(tensor, rank):
            shard = placement.extract_shard(full)
            start: int | None = None
            if name.startswith(STATE):
                start, stop = layout.owned(tensor, rank)
                shard = shard.flatten()[start:stop]
            want[name], expected[name] = (
                CheckpointShard(placement, inside_buffer(torch.zeros_like(shard)), start),
                shard,
            )
    return want, expected


def same_bits(left: Tensor, right: Tensor) -> bool:
    assert left.dtype == right.dtype
    assert left.shape == right.shape
    return torch.equal(left.contiguous().flatten().view(torch.uint8), right.contiguous().flatten().view(torch.uint8))


def folder_of(root: Path, layout: TensorLayout) -> Path:
    return root / f"layout-{LAYOUTS.index(layout)}"
