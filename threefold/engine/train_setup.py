"""Sets a rank up before its first step: cores, threads, other ranks, the folder of the run, watchdog, parts, state.

`train.py` calls `enter_world` and `set_up`.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

import torch

from threefold.engine.build import build, device_of, why_not_fused
from threefold.engine.dist.collectives import observe_collectives
from threefold.engine.dist.consensus import run_on_first_rank
from threefold.engine.dist.join import World, join
from threefold.engine.dist.mesh import Mesh
from threefold.engine.run.checkpoints import Checkpoints
from threefold.engine.run.folder import CHECKPOINTS, open_run
from threefold.engine.run.lock import RunLock
from threefold.engine.run.on_cpu import fast_on_cpu
from threefold.engine.run.progress_display import Progress
from threefold.engine.start import Origin, Start, check_data_is_named, removed_on_failure
from threefold.engine.train_state import TrainState, start_or_resume
from threefold.launch.cpu_cores import choose_threads, pin_to_cores
from threefold.launch.watchdog import Watchdog
from threefold.plan.plan import Plan
from threefold.plan.ranks import rank_environment


def enter_world(plan: Plan) -> World:
    """Pin this process to its cores and join the other ranks. Threads that are started later stay on those cores."""
    if plan.run.cores:
        pin_to_cores(plan.run.cores, *_place_in_node(), on_gpu=device_of(plan).type == "cuda")
    # The watchdog reports a hang before torch does.
    return join(plan, timeout_seconds=4 * plan.run.hang_seconds or None)


def set_up(
    plan: Plan,
    folder: Path,
    world: World,
    progress: Progress,
    tell: Callable[[str], None],
    ending: ExitStack,
    threads: int | None = None,
    origin: Origin | None = None,
) -> TrainState:
    """Open the folder, build the parts, and start or resume. `ending` closes each part, whatever the others raise."""
    num_threads, why = choose_threads(plan, _place_in_node()[1], threads, world.device.type == "cuda")
    torch.set_num_threads(num_threads)
    ending.enter_context(fast_on_cpu() if world.device.type == "cpu" else nullcontext())
    mesh = Mesh(plan.layout, world.rank, world.device)
    group = mesh.checkpoint_group()
    lock = RunLock(folder, tell)
    ending.callback(lock.close)
    start = ending.enter_context(removed_on_failure(folder) if world.is_leader else nullcontext(Start()))
    run_on_first_rank(group, lambda: open_run(folder, plan, lock))
    start.has_folder = True
    run_on_first_rank(group, lambda: check_data_is_named(folder, plan))
    watchdog = ending.enter_context(_watchdog(plan, world))
    if watchdog:
        ending.enter_context(observe_collectives(watchdog.observe))
    parts = build(plan, mesh)
    ending.callback(parts.close)
    ending.callback(progress.close)
    state = TrainState(plan, folder, parts, Checkpoints(folder / CHECKPOINTS, plan.run.keep, group), world, watchdog)
    start_or_resume(state, tell, origin)
    start.has_begun = True
    tell(f"CPU threads of a rank: {num_threads} ({why})")
    _tell_of_parts(state, tell)
    return state


def _place_in_node() -> tuple[int, int]:
    """The local rank, and the number of ranks on this node."""
    env = rank_environment(os.environ)
    return (env.local_rank, env.local_size) if env else (0, 1)


def _watchdog(plan: Plan, world: World) -> AbstractContextManager[Watchdog | None]:
    if world.store is None or not plan.run.hang_seconds:
        return nullcontext()
    return Watchdog(plan.run.hang_seconds, world.store, world.rank, world.size)


def _tell_of_parts(state: TrainState, tell: Callable[[str], None]) -> None:
    """Print which knob has no effect in this layout, and what is to be known of the data."""
    plan, parts = state.plan, state.parts
    reason = why_not_fused(plan)
    if plan.knobs.grad_accum_fusion and reason and plan.knobs.precision != "fp32":
        tell(f"weight gradients are not added in their GEMMs (knobs.grad_accum_fusion): {reason}")
    for loader in (parts.loader, *parts.validation.values()):
        for finding in loader.warnings if loader else ():
            tell(str(finding))
    if parts.loader is not None:
        lines = [parts.loader.packing_summary(), *parts.loader.skipped_images().lines()]
        for line in filter(None, lines):
            tell(line)
