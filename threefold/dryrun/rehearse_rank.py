"""Rehearses one rank: builds it and runs one step with the engine's own code, on meta tensors and without a GPU.

`rehearse_plan` calls `rehearse_rank` for one rank of each distinct stage. The result is a `RankRehearsal`: the peak
memory by term, the largest live tensors, and the collectives of a step.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any

from threefold.dryrun.optimizer_step import run_step
from threefold.dryrun.representatives import reduce_microbatches
from threefold.dryrun.simulated.byte_ledger import ByteLedger
from threefold.dryrun.simulated.deepep_package import fake_deepep_package
from threefold.dryrun.simulated.expert_load import ExpertLoads
from threefold.dryrun.simulated.gpu_operators import (
    CUBLAS_WORKSPACE_BYTES,
    META_REPLACEMENTS,
    WORKSPACES,
    use_gpu_operators,
)
from threefold.dryrun.simulated.graph_recorder import record_graphs_in
from threefold.dryrun.simulated.meta_operators import META, MetaOperators, unbatched_p2p
from threefold.dryrun.simulated.process_group import fake_process_group, fsdp_on_meta, single_threaded
from threefold.dryrun.simulated.recurrences import use_single_recurrences
from threefold.dryrun.tracking.allocation_origin import OriginTracker
from threefold.dryrun.tracking.call_recorder import CallRecorder, CallSequence
from threefold.dryrun.tracking.collective_ledger import CollectiveLedger, LedgerEntry
from threefold.dryrun.tracking.memory_terms import (
    bytes_by_term,
    label_gradients,
    label_quantized_weights,
    label_states,
    label_static_copies,
    messages_labeled,
    moe_layer_paths,
    term_of,
)
from threefold.dryrun.tracking.memory_tracker import (
    Allocation,
    LiveChange,
    MemoryTracker,
    OperatorObserver,
    live_bytes_timeline,
    live_changes,
)
from threefold.engine.build import Parts, build
from threefold.engine.device import simulate
from threefold.engine.dist.collectives import observe_collectives
from threefold.engine.dist.host_sizes import SizeSource, sizes_from
from threefold.engine.dist.mesh import Mesh
from threefold.engine.schedule.microbatch_runners import Pipelined
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Plan

ALLOCATOR_GRANULE_BYTES = 512  # torch's CUDA allocator rounds sizes up to a multiple
PHASES = ("forward", "backward")  # of the bytes that kernels move
NUM_LARGEST = 10  # live tensors that are listed
SAY_SECONDS = 0.5
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LiveTensor:
    """A tensor that was live at the peak. `to_json` prints the fields under these names."""

    bytes: int
    term: str
    owner: str  # the name of a weight or state, or the phase and module that made the tensor
    shape: tuple[int, ...]
    dtype: str
    operation: str


@dataclass(frozen=True)
class RankRehearsal:
    """The rehearsal of one rank."""

    rank: int
    stages: tuple[int, ...]  # pipeline stages that this rank represents
    peak_bytes: int
    at: str  # phase, microbatch and module of the peak
    terms: dict[str, int]  # bytes at the peak by memory term
    top: tuple[LiveTensor, ...]  # the largest tensors at the peak
    collectives: tuple[LedgerEntry, ...]
    timeline: tuple[dict[str, Any], ...]
    seconds: float
    num_microbatches: int  # microbatches that were run, enough to reach the peak
    calls: CallSequence | None = None  # where all ranks are compared
    row_bytes: Mapping[str, Mapping[str, float]] = field(default_factory=dict)  # of kernels, a token and MoE layer
    changes: tuple[LiveChange, ...] = ()  # every allocation and release of the step, where they are asked for
    num_initial_changes: int = 0  # the first of them state what is live when the step starts
    skew: float | None = None  # rows that its experts got over the mean, where they were drawn

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
            **({} if self.skew is None else {"skew": round(self.skew, 4)}),
            "row_bytes": {phase: round(sum(self.row_bytes.get(phase, {}).values())) for phase in PHASES},
            "seconds": round(self.seconds, 2),
        }


def rehearse_rank(
    plan: Plan,
    rank: int = 0,
    loads: ExpertLoads | None = None,
    stages: Sequence[int] = (),
    with_calls: bool = False,
    with_changes: bool = False,
    say: Say | None = None,
) -> RankRehearsal:
    """Rehearse a rank in this process.

    Args:
        plan: a plan without errors that the engine can run; `api/rehearsals.py` makes it from any other plan.
        rank: global rank.
        loads: how tokens are distributed over experts; None if balanced.
        stages: pipeline stages that the rank represents; by default its own.
        with_calls: record the calls of the rank in their order, and run as many microbatches on every stage.
        with_changes: also return every allocation and release.
        say: called with a line of text twice a second.
    """
    began = time.perf_counter()
    stage = plan.layout.coordinate("pp", rank)
    reduced = reduce_microbatches(plan, None if with_calls else stage)
    origins = OriginTracker()
    recorder = CallRecorder(rank, origins) if with_calls else None
    tracker = _make_tracker(plan, origins, recorder)
    microbatch_factor = plan.num_microbatches / reduced.num_microbatches
    ledger = CollectiveLedger(
        plan.cluster.domain_ranks, microbatch_factor, lambda: origins.phase in ("reduce", "optimizer")
    )
    tracker.observers.append(ledger.record_operator)
    moved = ByteLedger(plan, origins)
    tracker.run_operator = moved.run_operator(tracker.run_operator)
    if say:
        tracker.observers.append(_say_where(say, rank, reduced.num_microbatches, origins))
    loads = loads or ExpertLoads()
    sizes = loads.size_source(lambda: _layer_number(origins.current().module))
    with (
        errors_as_findings(plan, rank, origins),
        _simulated_machine(reduced, rank, sizes, ledger, recorder),
        record_graphs_in(tracker) if plan.chip.architecture != "cpu" else nullcontext(),
        tracker,
        origins.module_hooks(),
        moved.watch_kernels(),
        messages_labeled(tracker),
    ):
        with observe_collectives(ledger.record_call):
            mesh = Mesh(reduced.layout, rank, META)
            parts = build(reduced, mesh, with_data=False, with_weights=False)
            origins.register_modules(parts.chunks)
            label_states(tracker, parts)
            if plan.chip.architecture != "cpu":
                tracker.reserve(CUBLAS_WORKSPACE_BYTES, "cuBLAS")
            tracker.start_step()
            ledger.start(mesh)
            moe_paths = moe_layer_paths(parts.chunks.values())
            with moved.counting(moe_paths):
                run_step(parts, reduced, origins, plan.num_microbatches)
        if isinstance(parts.runner, Pipelined):
            ledger.record_pipeline(parts.runner.pipeline, mesh.group("pp"))
        collectives, calls = tuple(ledger.entries()), recorder.sequence() if recorder else None
        _replay_graphs(parts, tracker, lambda: run_step(parts, reduced, origins, plan.num_microbatches))
        label_gradients(tracker, parts)
        label_quantized_weights(tracker, parts)
        summary = _summarize_peak(tracker, parts)
        if with_changes:
            context = _term_context(parts)
            summary["changes"] = live_changes(tracker, lambda one: term_of(one, *context))
            summary["num_initial_changes"] = tracker.num_initial_changes
    return RankRehearsal(
        rank=rank,
        stages=tuple(stages) or (stage,),
        peak_bytes=tracker.peak_bytes,
        at=str(tracker.peak_origin),
        collectives=collectives,
        timeline=tuple(live_bytes_timeline(tracker)),
        seconds=time.perf_counter() - began,
        num_microbatches=reduced.num_microbatches,
        calls=calls,
        skew=loads.skew_of_rank(),
        row_bytes=moved.by_phase(_routed_tokens(reduced, len(moe_paths))),
        **summary,
    )


def _layer_number(path: str) -> int:
    """The number in the path of a layer, such as layers.3.ffn; 0 where a path has none."""
    return next((int(part) for part in path.split(".") if part.isdecimal()), 0)


def _routed_tokens(plan: Plan, num_layers: int) -> float:
    """Tokens of a rank that all its MoE layers route in the microbatches that are run; 1 where there are none."""
    layout, job = plan.layout, plan.job
    return max(1, plan.num_microbatches * num_layers) * job.micro_batch * job.seq_len / layout.cp / layout.tp


def _say_where(say: Say, rank: int, num_microbatches: int, origins: OriginTracker) -> OperatorObserver:
    """Tell where the rank is in its step, every now and then."""
    due = time.monotonic() + SAY_SECONDS

    def observe(func: Any, args: tuple[Any, ...]) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + SAY_SECONDS
            say(f"rank {rank}, {num_microbatches} microbatches: {origins.current()}")

    return observe


def _replay_graphs(parts: Parts, tracker: MemoryTracker, run_next_step: Callable[[], None]) -> None:
    """Run steps behind one that recorded CUDA graphs, up to the first that records none.

    It is the one to look at: all memory of the graphs is held from its beginning to its end.
    """
    graph_stats, num_recorded = parts.runner.graph_stats, 0
    while graph_stats is not None and graph_stats.recorded > num_recorded:
        num_recorded = graph_stats.recorded
        label_static_copies(tracker, parts)
        tracker.start_step()
        run_next_step()


def _make_tracker(plan: Plan, origins: OriginTracker, recorder: CallRecorder | None) -> MemoryTracker:
    is_gpu = plan.chip.architecture != "cpu"
    granule_bytes, workspaces = (ALLOCATOR_GRANULE_BYTES, WORKSPACES) if is_gpu else (1, {})
    operators = MetaOperators(META_REPLACEMENTS, recorder.record_operator if recorder else None)
    return MemoryTracker(origins, granule_bytes, workspaces, operators, ignored_device="cpu")


@contextmanager
def _simulated_machine(
    plan: Plan, rank: int, sizes: SizeSource, ledger: CollectiveLedger, recorder: CallRecorder | None
) -> Iterator[None]:
    """Everything that stands in for the other ranks, the GPU, its packages and the results of routing."""
    with ExitStack() as stack:
        stack.enter_context(single_threaded())
        stack.enter_context(fake_process_group(rank, plan.layout.gpus))
        stack.enter_context(unbatched_p2p())
        if recorder:
            stack.enter_context(recorder.watch())
        stack.enter_context(fsdp_on_meta())
        stack.enter_context(use_single_recurrences())
        stack.enter_context(sizes_from(sizes))
        if plan.chip.architecture != "cpu":
            stack.enter_context(simulate("cuda"))
            stack.enter_context(use_gpu_operators())
            top_k = plan.model.moe.top_k if plan.model.moe else 1

            def record_dispatcher(operation: str, num_bytes: int, ranks: Sequence[int]) -> None:
                ledger.record_dispatcher(operation, num_bytes, ranks)
                if recorder:
                    recorder.record_dispatcher(operation, ranks)

            stack.enter_context(fake_deepep_package(sizes, top_k, record_dispatcher))
        else:
            stack.enter_context(simulate("cpu"))
        yield


def _summarize_peak(tracker: MemoryTracker, parts: Parts) -> dict[str, Any]:
    """The fields `terms` and `top` of a `RankRehearsal`."""
    allocations, (moe_layers, has_loss) = list(tracker.live_at_peak()), _term_context(parts)
    largest = sorted(allocations, key=lambda pair: -pair[1])[:NUM_LARGEST]
    terms = bytes_by_term(allocations, moe_layers, has_loss)
    return {"terms": terms, "top": tuple(_live_tensor(*pair, moe_layers, has_loss) for pair in largest)}


def _term_context(parts: Parts) -> tuple[set[str], bool]:
    """What `term_of` has to know of the model: paths of MoE layers, and whether the rank computes the loss."""
    return moe_layer_paths(parts.chunks.values()), any(chunk.has_loss for chunk in parts.chunks.values())


def _live_tensor(allocation: Allocation, size: int, moe_layers: set[str], has_loss: bool) -> LiveTensor:
    return LiveTensor(
        bytes=size,
        term=term_of(allocation, moe_layers, has_loss),
        owner=allocation.name or str(allocation.origin),
        shape=tuple(allocation.shape),
        dtype=allocation.dtype_name,
        operation=str(allocation.operation),
    )


@contextmanager
def errors_as_findings(plan: Plan, rank: int, origins: OriginTracker) -> Iterator[None]:
    """Raise any exception of the block as a `FindingsError` with rank, stage, phase and module; findings pass."""
    try:
        yield
    except FindingsError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        finding = Finding(
            rule="rehearsal-runs",
            at=f"rank {rank}, stage {plan.layout.coordinate('pp', rank)}: {origins.failed_at or origins.current()}",
            problem=f"the engine stopped: {type(error).__name__}: {lines[0][:300]}",
            advice="the plan cannot train as it is; change what the place names, or report it with the plan",
        )
        raise FindingsError([finding]) from error
