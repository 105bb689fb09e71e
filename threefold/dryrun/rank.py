"""One rank rehearsed: the engine's own build and step, without the other ranks, without a GPU, without memory."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from threefold.dryrun.faults import told
from threefold.dryrun.fewer import fewer_microbatches
from threefold.dryrun.flex import flex_stand_ins
from threefold.dryrun.ledger import Entry, Ledger
from threefold.dryrun.loads import Loads
from threefold.dryrun.meta import META, MetaOperators, messages_one_by_one
from threefold.dryrun.operators import LIBRARIES, STAND_INS, WORKSPACES, as_on_a_gpu
from threefold.dryrun.step import step
from threefold.dryrun.terms import by_term, expert_paths, label_gradients, label_narrow, label_states, term_of
from threefold.dryrun.timeline import timeline
from threefold.dryrun.tracker import Block, Tracker
from threefold.dryrun.where import Where
from threefold.dryrun.world import fake_ranks, one_thread, sharding_without_memory
from threefold.engine.build import Parts, build
from threefold.engine.dispatch.splits import sizes_from
from threefold.engine.mesh import Mesh
from threefold.engine.runner import Piped
from threefold.engine.shard.collectives import observed
from threefold.engine.ways import standing_for
from threefold.plan.plan import Plan

GRANULE = 512  # bytes: torch's CUDA allocator rounds up to these
TOP = 10


@dataclass(frozen=True, slots=True)
class Live:
    """A tensor that was there at the peak; `owner` is a weight's name, or the module whose work made it."""

    bytes: int
    term: str
    owner: str
    shape: tuple[int, ...]
    dtype: str
    operation: str


@dataclass(frozen=True)
class RankRehearsal:
    """One rank, which stands for the ranks of all `stages`."""

    rank: int
    stages: tuple[int, ...]
    peak_bytes: int
    at: str
    terms: dict[str, int]
    top: tuple[Live, ...]
    collectives: tuple[Entry, ...]
    timeline: tuple[dict[str, Any], ...]
    seconds: float
    num_microbatches: int  # that were run, as many as it takes to reach the peak

    @property
    def stage(self) -> int:
        return self.stages[0]

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "stage": self.stage,
            "stages": list(self.stages),
            "peak_bytes": self.peak_bytes,
            "terms": self.terms,
            "at": self.at,
            "top": [asdict(live) for live in self.top],
            "microbatches": self.num_microbatches,
            "seconds": round(self.seconds, 2),
        }


def rehearse_rank(plan: Plan, rank: int = 0, loads: Loads | None = None, stages: Sequence[int] = ()) -> RankRehearsal:
    """In this process. The engine must be able to run the plan: rules say so."""
    began = time.perf_counter()
    stage = plan.layout.coordinate("pp", rank)
    small = fewer_microbatches(plan, stage)
    where = Where()
    tracker = _tracker(plan, where)
    times = plan.num_microbatches / small.num_microbatches
    ledger = Ledger(plan.cluster.domain_ranks, times, lambda: where.phase in ("reduce", "optimizer"))
    tracker.watchers.append(ledger.watch)
    with told(plan, rank, where), _stand_ins(small, rank, loads or Loads(), ledger), tracker, where.watching():
        with observed(ledger.observe):
            mesh = Mesh(small.layout, rank, META)
            parts = build(small, mesh, with_data=False, with_weights=False)
            where.name(parts.chunks)
            label_states(tracker, parts)
            if plan.chip.architecture != "cpu":
                tracker.hold(LIBRARIES, "cuBLAS")
            tracker.begin()
            ledger.begin(mesh)
            step(parts, small, where, plan.num_microbatches)
        label_gradients(tracker, parts)
        label_narrow(tracker, parts)
        if isinstance(parts.runner, Piped):
            ledger.add_pipeline(parts.runner.pipeline, mesh.group("pp"))
        found = _summary(tracker, parts)
    return RankRehearsal(
        rank=rank,
        stages=tuple(stages) or (stage,),
        peak_bytes=tracker.peak,
        at=str(tracker.peak_spot),
        collectives=tuple(ledger.entries()),
        timeline=tuple(timeline(tracker)),
        seconds=time.perf_counter() - began,
        num_microbatches=small.num_microbatches,
        **found,
    )


def _tracker(plan: Plan, where: Where) -> Tracker:
    on_gpu = plan.chip.architecture != "cpu"
    granule, workspaces = (GRANULE, WORKSPACES) if on_gpu else (1, {})
    return Tracker(where, granule, workspaces, MetaOperators(STAND_INS), ignored="cpu")


@contextmanager
def _stand_ins(plan: Plan, rank: int, loads: Loads, ledger: Ledger) -> Iterator[None]:
    """For the other ranks, the tensors' memory, the GPU, and what routing would say."""
    with ExitStack() as stack:
        stack.enter_context(one_thread())
        stack.enter_context(fake_ranks(rank, plan.layout.gpus))
        stack.enter_context(messages_one_by_one())
        stack.enter_context(sharding_without_memory())
        stack.enter_context(sizes_from(loads.source()))
        if plan.chip.architecture != "cpu":
            stack.enter_context(standing_for("cuda"))
            stack.enter_context(as_on_a_gpu())
            top_k = plan.model.moe.top_k if plan.model.moe else 1
            stack.enter_context(flex_stand_ins(loads.source(), top_k, ledger.travel))
        else:
            stack.enter_context(standing_for("cpu"))
        yield


def _summary(tracker: Tracker, parts: Parts) -> dict[str, Any]:
    blocks, experts = list(tracker.at_peak()), expert_paths(parts.chunks.values())
    largest = sorted(blocks, key=lambda pair: -pair[1])[:TOP]
    loss = any(chunk.has_loss for chunk in parts.chunks.values())
    terms = by_term(blocks, experts, loss)
    return {"terms": terms, "top": tuple(_live(*pair, experts, loss) for pair in largest)}


def _live(block: Block, size: int, experts: set[str], has_loss: bool) -> Live:
    owner = block.name or str(block.spot)
    return Live(size, term_of(block, experts, has_loss), owner, block.shape, block.dtype, block.operation)
