"""Data parallelism against one rank in fp64: every rank's loss uses its shards of parameters with data of its own.

The loss of a rank in a microbatch is the sum over parameters of tanh(shard * data). The loss of one rank is the sum of
the losses of all ranks.
"""

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from threefold.engine.data_parallel.fsdp import Fsdp, WrapPolicy
from threefold.engine.data_parallel.full_matrices import FullMatrices
from threefold.engine.data_parallel.protocol import DataParallelSettings
from threefold.engine.data_parallel.zero1 import Zero1
from threefold.engine.dist.collectives import CollectiveCall, observe_collectives
from threefold.engine.dist.mesh import Group, Mesh
from threefold.engine.dist.shard_placement import Placement, even_range, replicated
from threefold.engine.optim.adamw import AdamW
from threefold.engine.optim.muon import Muon
from threefold.engine.shard.order import fsdp_groups, replica_group, shard_group
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.layout.degrees import Layout

STEPS, MICROBATCHES, LR, DECAY, CLIP = 3, 2, 1e-2, 0.1, 0.5
# No size is a multiple of the buckets' alignment, so that owned shards end inside parameters.
SHAPES = {
    "embed.weight": (11, 10),
    "layers.0.norm.weight": (10,),
    "layers.0.mixer.proj": (16, 10),
    "layers.0.mixer.out": (10, 8),
    "layers.0.mixer.gate_up": (24, 10),
    "layers.0.experts.gate_up": (4, 12, 10),
    "layers.0.experts.down_bias": (4, 10),
    "layers.1.norm.weight": (10,),
    "layers.1.mixer.router": (4, 10),
    "layers.1.experts.down": (4, 10, 6),
    "head.weight": (11, 10),
}


def unsharded(parameter: Tensor) -> Tensor:
    """The parameter as the model uses it. All ranks that share it must call this."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def placements(layout: Layout, rank: int) -> dict[str, Placement]:
    tp, ep, etp = (layout.coordinate(axis, rank) for axis in ("tp", "ep", "etp"))
    dense, experts = ("dp", "cp"), ("edp",)
    cut = {
        name: replicated(
            shape, (*experts, "etp") if "bias" in name else experts if "experts" in name else (*dense, "tp")
        )
        for name, shape in SHAPES.items()
    }

    def set_ranges(name: str, copies: tuple[str, ...], **dims: Any) -> None:
        ranges = list(cut[name].ranges)
        for dim, parts in dims.items():
            ranges[int(dim[1:])] = parts
        cut[name] = replace(cut[name], ranges=tuple(ranges), replica_axes=copies)

    def two(width: int, place: int, degree: int) -> tuple[tuple[int, int], ...]:
        low, high = even_range(width, place, degree)
        return ((0, 2 * width),) if degree == 1 else ((low, high), (width + low, width + high))

    set_ranges("layers.0.mixer.proj", dense, d0=(even_range(16, tp, layout.tp),))
    set_ranges("layers.0.mixer.out", dense, d1=(even_range(8, tp, layout.tp),))
    set_ranges("layers.0.mixer.gate_up", dense, d0=two(12, tp, layout.tp))
    mine = (even_range(4, ep, layout.ep),)
    set_ranges("layers.0.experts.gate_up", experts, d0=mine, d1=two(6, etp, layout.etp))
    set_ranges("layers.0.experts.down_bias", (*experts, "etp"), d0=mine)
    set_ranges("layers.1.experts.down", experts, d0=mine, d2=(even_range(6, etp, layout.etp),))
    return cut


class Leaf(nn.Module):
    def __init__(self, path: str, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.path = path
        for name, value in weights.items():
            self.register_parameter(name, nn.Parameter(value.clone()))

    def forward(self, x: Tensor, data: dict[str, Tensor]) -> Tensor:
        for name, weight in self.named_parameters():
            if self.path + name in data:
                x = x + torch.tanh(weight * data[self.path + name]).sum()
        return x


class Experts(Leaf): ...


class Block(nn.Module):
    def __init__(self, path: str, leaves: dict[str, dict[str, Tensor]]) -> None:
        super().__init__()
        for name, weights in leaves.items():
            setattr(self, name, (Experts if name == "experts" else Leaf)(f"{path}{name}.", weights))

    def forward(self, x: Tensor, data: dict[str, Tensor]) -> Tensor:
        for child in self.children():
            x = child(x, data)
        return x


class Model(nn.Module):
    """The head's weight is used without calling the head, as in a fused loss."""

    def __init__(self, shards: dict[str, Tensor]) -> None:
        super().__init__()
        tree: dict[str, dict[str, dict[str, Tensor]]] = defaultdict(lambda: defaultdict(dict))
        for name, shard in shards.items():
            if name.startswith("layers"):
                _, number, leaf, last = name.split(".")
                tree[number][leaf][last] = shard
        self.embed = Leaf("embed.", {"weight": shards["embed.weight"]})
        self.layers = nn.ModuleList(Block(f"layers.{n}.", leaves) for n, leaves in tree.items())
        self.head = Leaf("head.", {"weight": shards["head.weight"]})

    def forward(self, data: dict[str, Tensor]) -> "Output":
        return self.conclude(self.advance(data), data)

    def advance(self, data: dict[str, Tensor]) -> Tensor:
        x = self.embed(torch.zeros((), dtype=self.embed.weight.dtype), data)
        for layer in self.layers:
            x = layer(x, data)
        return x

    def conclude(self, x: Tensor, data: dict[str, Tensor]) -> "Output":
        return Output(x + torch.tanh(self.head.weight * data["head.weight"]).sum())


@dataclass
class Output:
    loss: Tensor


def start() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in SHAPES.items()}


def data_of(layout: Layout, rank: int, step: int, microbatch: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1 + rank + 100 * microbatch + 10_000 * step)
    return {
        name: torch.randn(place.local_shape, generator=draw, dtype=torch.float64)
        for name, place in placements(layout, rank).items()
    }


def one_rank(layout: Layout, kind: str, unused: tuple[int, str] | None = None) -> tuple[dict[str, Tensor], list[float]]:
    weights = {name: nn.Parameter(value) for name, value in start().items()}
    flat = [name for name, p in weights.items() if p.dim() == 1 or "bias" in name]
    optimizer: Any = Muon(weights.items(), DECAY)
    if kind == "adamw":
        groups = [
            {"params": [p for name, p in weights.items() if (name in flat) == is_flat], "weight_decay": decay}
            for is_flat, decay in ((True, 0.0), (False, DECAY))
        ]
        optimizer = torch.optim.AdamW(groups, LR, (0.9, 0.95))
    norms = []
    for step in range(STEPS):
        for p in weights.values():
            p.grad = None
        for rank in range(layout.gpus):
            for microbatch in range(MICROBATCHES):
                data = data_of(layout, rank, step, microbatch)
                for name, place in placements(layout, rank).items():
                    if (rank, name) != unused:
                        torch.tanh(place.extract_shard(weights[name]) * data[name]).sum().backward()
        norms.append(float(nn.utils.clip_grad_norm_(weights.values(), CLIP)))
        optimizer.step() if kind == "adamw" else optimizer.step(LR)
    return {name: p.detach() for name, p in weights.items()}, norms


@dataclass(frozen=True)
class Case:
    layout: Layout
    kind: str = "zero1"
    optimizer: str = "adamw"
    settings: DataParallelSettings = field(default_factory=lambda: DataParallelSettings(bucket_elements=300))
    unused: tuple[int, str] | None = None
    methods: tuple[str, ...] = ()
    split: bool = False  # call them in place of forward
    in_flight: bool = False  # all forwards before the first backward, as in a pipeline


@dataclass
class Seen:
    weights: dict[str, Tensor]
    norms: list[float]
    owned: dict[str, tuple[int, int]]
    state: dict[str, tuple[int, ...]]
    calls: list[tuple[str, str, int]]
    calls_during_backward: int


def make(case: Case, mesh: Mesh, chunks: list[nn.Module], where: dict[str, Placement]) -> Zero1 | Fsdp:
    def replicas(placement: Placement) -> Group:
        return replica_group(mesh, placement)

    if case.kind == "zero1":
        return Zero1(chunks, where, replicas, case.settings)
    policy = WrapPolicy(lambda m: isinstance(m, Block), lambda m: isinstance(m, Experts), case.methods)
    return Fsdp(
        chunks, where, lambda place: fsdp_groups(mesh, place), replicas, mesh.device_mesh, case.settings, policy
    )


def train(rank: int, cases: list[Case]) -> list[Seen]:
    meshes: dict[Layout, Mesh] = {}
    for case in cases:
        if case.layout not in meshes:
            meshes[case.layout] = Mesh(case.layout, rank)
    return [train_one(meshes[case.layout], case) for case in cases]


def train_one(mesh: Mesh, case: Case) -> Seen:
    where = placements(case.layout, mesh.rank)
    model = Model({name: where[name].extract_shard(value) for name, value in start().items()})
    data = make(case, mesh, [model], where)
    if case.optimizer == "adamw":
        optimizer: Any = AdamW(data.updated, DECAY)
    else:
        optimizer = Muon(data.updated, DECAY, gatherer=FullMatrices(data, lambda place: shard_group(mesh, place)))
    calls: list[CollectiveCall] = []
    norms, during = [], 0
    with observe_collectives(calls.append):
        for step in range(STEPS):
            data.begin_step(MICROBATCHES)
            before = len(calls)
            losses = []
            for microbatch in range(MICROBATCHES):
                losses.append(run(model, case, mesh.rank, step, microbatch))
                if not case.in_flight:
                    losses.pop().backward()
            for loss in losses:
                loss.backward()
            during += len(calls) - before
            data.finish_grad_sync()
            squares = data.grad_sum_of_squares()
            torch.distributed.all_reduce(squares)
            norms.append(float(squares.sqrt()))
            data.scale_grads(torch.clamp(CLIP / (squares.sqrt() + 1e-6), max=1.0))
            optimizer.step(LR)
            data.start_param_sync()
        data.finish_param_sync()
    return Seen(
        {name: unsharded(p).detach().clone() for name, p in model.named_parameters()},
        norms,
        {owned.name: (owned.start, owned.stop) for owned in data.owned},
        {name: tuple(value.shape) for name, value in optimizer.state_dict().items()},
        [(call.group.name, call.operation, call.num_bytes) for call in calls],
        during,
    )


def run(model: Model, case: Case, rank: int, step: int, microbatch: int) -> Tensor:
    given = data_of(case.layout, rank, step, microbatch)
    if case.unused and case.unused[0] == rank:
        del given[case.unused[1]]
    return (model.conclude(model.advance(given), given) if case.split else model(given)).loss


def launch(cases: list[Case]) -> list[list[Seen]]:
    """For each case what each rank saw; in one launch, because starting ranks takes longer than training them."""
    ranks = run_ranks(cases[0].layout.gpus, train, cases)
    return [list(seen) for seen in zip(*ranks, strict=True)]


def check(case: Case, ranks: list[Seen]) -> None:
    """Every copy on every rank, and that each element is owned once."""
    weights, norms = one_rank(case.layout, case.optimizer, case.unused)
    counts = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for rank, seen in enumerate(ranks):
        assert seen.norms == pytest.approx(norms, rel=1e-12)
        for name, place in placements(case.layout, rank).items():
            difference = (seen.weights[name] - place.extract_shard(weights[name])).abs().max()
            assert difference < CLOSE[case.optimizer], (case, name)
            for box in place.flat_regions(*seen.owned.get(name, (0, 0))):
                box.in_full(counts[name]).add_(1)
    for name, count in counts.items():
        assert (count == 1).all(), (case, name)


FOLDED = Layout(tp=2, ep=2, gpus=4)
WIDE_EXPERTS = Layout(tp=2, etp=2, gpus=4)
# fp64 rounds at 1e-16; sums in another order, divided by small gradients in AdamW, lose three digits or so. Muon's
# iteration multiplies differences by its slope of 3.4 in each of five rounds, and there are three steps.
CLOSE = {"adamw": 1e-12, "muon": 1e-10}


@pytest.mark.parametrize("kind", ["zero1", "fsdp"])
def test_steps_equal_one_rank(kind: str) -> None:
    cases = [
        Case(FOLDED, kind),
        Case(FOLDED, kind, "muon"),
        Case(WIDE_EXPERTS, kind, "muon"),
        Case(Layout(tp=4, ep=2, gpus=4), kind, "muon"),  # dense parameters have nobody to share with
        Case(FOLDED, kind, in_flight=True),
    ]
    for case, seen in zip(cases, launch(cases), strict=True):
        check(case, seen)


def test_hsdp_equals_one_rank() -> None:
    cases = [
        Case(Layout(replicate=2, gpus=4), "fsdp"),
        Case(Layout(replicate=2, ep=2, gpus=4), "fsdp", "muon"),  # experts: copies only
        Case(FOLDED, "fsdp", methods=("advance", "conclude"), split=True, in_flight=True),
        Case(FOLDED, "fsdp", methods=("advance", "conclude")),
    ]
    for case, seen in zip(cases, launch(cases), strict=True):
        check(case, seen)


def test_uneven_pieces_make_whole_matrices() -> None:
    cases = [Case(Layout(tp=3, gpus=3), kind, "muon") for kind in ("zero1", "fsdp")]
    for case, seen in zip(cases, launch(cases), strict=True):
        check(case, seen)


def test_overlap_and_buckets_change_nothing() -> None:
    """Bit for bit with overlap; another order of sums with other buckets. Rank 1 never uses one parameter."""
    unused = (1, "layers.0.mixer.out")
    cases = [
        Case(
            FOLDED,
            settings=DataParallelSettings(overlap_grad_reduce=a, overlap_param_gather=b, bucket_elements=300),
            unused=unused,
        )
        for a, b in ((False, False), (True, False), (False, True), (True, True))
    ]
    cases += [Case(FOLDED, settings=DataParallelSettings(bucket_elements=n)) for n in (1, 10_000)]
    plain, *others, small, large = launch(cases)
    check(cases[0], plain)
    for seen in others:
        for one, other in zip(plain, seen, strict=True):
            assert all(torch.equal(one.weights[name], other.weights[name]) for name in SHAPES)
    for case, seen in zip(cases[4:], (small, large), strict=True):
        check(case, seen)
    for seen, num_buckets in ((small, 11), (large, 3)):
        assert [one.calls_during_backward for one in seen] == [STEPS * num_buckets] * 4
    assert [one.calls_during_backward for one in plain] == [0] * 4
    # Rank 1 cannot know that the parameter's gradient will not come: its buckets wait for finish().
    assert [one.calls_during_backward for one in others[0]] == [9, 3, 9, 9]


@pytest.fixture(scope="module")
def folded() -> list[Seen]:
    return launch([Case(FOLDED)])[0]


def test_collectives_are_as_counted_by_hand(folded: list[Seen]) -> None:
    """Bytes of elements of 8 bytes: each parameter in multiples of 64, each bucket in multiples of 64 a rank."""
    # down 120, down_bias 20, gate_up 240 -> 128 + 64 + 256, padded to 512: half of it to the other rank.
    experts = 512 // 2 * 8
    # gate_up 120, out 40, proj 80 -> 128 + 64 + 128, padded to 384.
    cut = 384 // 2 * 8
    # head 110, router 40, two norms 10, embed 110 -> 128 + 64 + 64 + 64 + 128, padded to 512: three quarters.
    copied = 512 * 3 // 4 * 8
    sent = [("edp", experts), ("dp x cp", cut), ("dp x cp x tp", copied)]
    reduced = [(name, "reduce_scatter", num_bytes) for name, num_bytes in sent]
    gathered = [(name, "all_gather", num_bytes) for name, num_bytes in reversed(sent)]
    assert [seen.calls for seen in folded] == [(reduced + gathered) * STEPS] * 4


def test_state_is_kept_once(folded: list[Seen]) -> None:
    """Over all ranks each element of the whole has its moments once; experts are sharded, not replicated, over ep."""
    for kind in ("first", "second"):
        for name, shape in SHAPES.items():
            kept = sum(torch.Size(seen.state.get(f"{kind}.{name}", (0,))).numel() for seen in folded)
            assert kept == torch.Size(shape).numel()
    assert not [name for seen in folded for name in seen.state if "master" in name]


class Stage(nn.Module):
    """A chunk of a pipeline, in its simplest form."""

    def __init__(self, leaves: dict[str, Leaf]) -> None:
        super().__init__()
        for name, leaf in leaves.items():
            setattr(self, name, leaf)

    def forward(self, data: dict[str, Tensor]) -> Tensor:
        x = torch.zeros((), dtype=torch.float64)
        for child in self.children():
            x = child(x, data)
        return x


def leaf(name: str, shape: tuple[int, ...]) -> Leaf:
    return Leaf(f"{name}.", {"weight": torch.full(shape, 0.5, dtype=torch.float64)})


def gradient(data: Tensor) -> Tensor:
    """The gradient of tanh(0.5 x data), by the textbook."""
    return data / torch.cosh(0.5 * data).square()


def noise(rank: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def shared_gradients(rank: int, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The gradients this rank owns of a tied embedding, on two pipeline ranks and then in two chunks of one."""
    found: list[dict[str, Any]] = []
    for layout in (Layout(pp=2, gpus=4), Layout(gpus=4)):
        mesh = Mesh(layout, rank)
        here = mesh.coordinate("pp")
        tied = replicated((11, 10), ("dp", "cp", "tp"))
        others = (1 - here,) if layout.pp > 1 else ()
        where = {"embed.weight": replace(tied, also_on_pp_ranks=others, in_several_chunks=layout.pp == 1)}
        where |= {f"{name}.weight": replicated((7,), ("dp", "cp", "tp")) for name in ("first", "last")}
        embed = leaf("embed", (11, 10))
        chunks = [
            Stage({"embed": embed, "first": leaf("first", (7,))}),
            Stage({"last": leaf("last", (7,)), "embed": embed}),
        ]
        chunks = chunks[here : here + 1] if layout.pp > 1 else chunks
        data = make(Case(layout, kind), mesh, list(chunks), where)
        data.begin_step(dict.fromkeys(range(len(chunks)), 1))
        for chunk in chunks:
            chunk({name: noise(rank, place.shape) for name, place in where.items()}).backward()
        data.finish_grad_sync()
        found.append({owned.name: (owned.start, owned.grad) for owned in data.owned})
    return found[0], found[1]


@pytest.mark.parametrize("kind", ["zero1", "fsdp"])
def test_shared_parameters_get_the_sum_of_all_uses(kind: str) -> None:
    ranks = run_ranks(4, shared_gradients, kind)
    # Two stages of two ranks, each using it once; then four ranks, each using it in both chunks.
    for times, uses in ((1, [seen[0] for seen in ranks]), (2, [seen[1] for seen in ranks])):
        total = torch.full((110,), float("nan"), dtype=torch.float64)
        for use in uses:
            first, grad = use.get("embed.weight", (0, total[:0]))
            assert total[first : first + len(grad)].isnan().all()
            total[first : first + len(grad)] = grad
        wanted = times * sum(gradient(noise(rank, (11, 10))) for rank in range(4)).flatten()
        assert torch.allclose(total, wanted, rtol=1e-13)


def narrow_steps(rank: int, kind: str) -> dict[str, Any]:
    mesh = Mesh(Layout(gpus=2), rank)
    model = Model({name: value.bfloat16() for name, value in start().items()})
    data = make(Case(mesh.layout, kind), mesh, [model], placements(mesh.layout, rank))
    optimizer = AdamW(data.updated, DECAY)
    for step in range(STEPS):
        data.begin_step(MICROBATCHES)
        for microbatch in range(MICROBATCHES):
            given = data_of(mesh.layout, rank, step, microbatch)
            model({name: value.bfloat16() for name, value in given.items()}).loss.backward()
        data.finish_grad_sync()
        optimizer.step(LR)
        data.start_param_sync()
    data.finish_param_sync()
    state = optimizer.state_dict()
    masters = {owned.name: (owned.start, state[f"master.{owned.name}"].clone()) for owned in data.owned}
    return {
        "masters": masters,
        "weights": {n: unsharded(p).detach().clone() for n, p in model.named_parameters()},
    }


@pytest.mark.parametrize("kind", ["zero1", "fsdp"])
def test_narrow_weights_have_wide_masters_and_gradients(kind: str) -> None:
    """bf16 weights and products, summed in fp32, moved by torch's AdamW on fp32 weights that are rounded for use."""
    layout = Layout(gpus=2)
    ranks = run_ranks(2, narrow_steps, kind)
    masters = {name: nn.Parameter(value.bfloat16().float()) for name, value in start().items()}
    flat = [p for name, p in masters.items() if p.dim() == 1 or "bias" in name]
    matrices = [p for name, p in masters.items() if p.dim() > 1 and "bias" not in name]
    groups = [{"params": flat, "weight_decay": 0.0}, {"params": matrices, "weight_decay": DECAY}]
    oracle = torch.optim.AdamW(groups, LR, (0.9, 0.95))
    for step in range(STEPS):
        for name, master in masters.items():
            master.grad = torch.zeros_like(master)
            for rank in range(2):
                for microbatch in range(MICROBATCHES):
                    weight = master.detach().bfloat16().requires_grad_()
                    given = data_of(layout, rank, step, microbatch)[name].bfloat16()
                    torch.tanh(weight * given).sum().backward()
                    master.grad += weight.grad
        oracle.step()
    for seen in ranks:
        for name, (first, values) in seen["masters"].items():
            # fp32 sums in another order move a master by some 1e-8, which may tip the rounding of a later weight.
            assert (values - masters[name].detach().flatten()[first : first + len(values)]).abs().max() < 1e-4
        for name, weight in seen["weights"].items():
            wanted = masters[name].detach().to(weight.dtype)
            assert torch.allclose(weight, wanted, rtol=2**-7, atol=1e-4), name


def one_pass_too_many(rank: int) -> str:
    mesh = Mesh(Layout(gpus=1), rank, with_single_rank_groups=True)
    model = Model(start())
    data = make(Case(mesh.layout), mesh, [model], placements(mesh.layout, rank))
    data.begin_step(1)
    model(data_of(mesh.layout, rank, 0, 0)).loss.backward()
    try:
        model(data_of(mesh.layout, rank, 0, 1)).loss.backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_gradient_after_the_reduction_is_refused() -> None:
    (said,) = run_ranks(1, one_pass_too_many)
    assert "came after its reduction had begun" in said
