"""The training loop: batches, steps, evaluation, saving, stopping. `threefold train` calls `train` on every rank."""

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from threefold.engine.batch import Batch
from threefold.engine.build import Parts, build, device_of, why_not_fused
from threefold.engine.data.images.batch_images import SkippedPictures
from threefold.engine.data.loader import Loader
from threefold.engine.dist.collectives import all_reduce, observe_collectives
from threefold.engine.dist.consensus import run_on_all_ranks, run_on_first_rank
from threefold.engine.dist.join import World, join
from threefold.engine.dist.mesh import Mesh
from threefold.engine.effects.recorder import RunEffects
from threefold.engine.layers.cross_entropy import IGNORE
from threefold.engine.layers.positions import move_documents
from threefold.engine.optim.lr_schedule import learning_rate
from threefold.engine.profiler import StepProfiler, profiled_window
from threefold.engine.run.checkpoints import Checkpoints
from threefold.engine.run.cpu_memory import keep_freed_memory
from threefold.engine.run.folder import (
    CHECKPOINTS,
    Metrics,
    append_timing,
    open_run,
    write_effects,
    write_expert_loads,
)
from threefold.engine.run.lock import RunLock
from threefold.engine.run.progress_display import NULL_STREAM, ExperimentTrackers, Progress
from threefold.engine.start import Origin, Start, check_data_is_named, removed_on_failure
from threefold.engine.step import StepResult, evaluate_batches, train_step
from threefold.engine.throughput import PartTimes, Throughput
from threefold.engine.train_state import TrainState, start_or_resume
from threefold.findings import Finding, FindingsError
from threefold.launch.cpu_cores import choose_threads, pin_to_cores
from threefold.launch.stop_signals import stop_between_steps
from threefold.launch.watchdog import Watchdog
from threefold.plan.plan import Plan
from threefold.plan.ranks import rank_environment
from threefold.units import format_many


def train(
    plan: Plan,
    folder: Path,
    say: Callable[[str], None] | None = None,
    threads: int | None = None,
    world: World | None = None,
    stop_at: int | None = None,
    profile: str | None = None,
    origin: Origin | None = None,
) -> TrainState:
    """Run a plan to its last step, or go on with the run in the folder. Every rank of `world` calls it alike.

    With `stop_at` the run stops and saves behind that step, as it does after SIGTERM. With `profile` some steps after
    the first ones are profiled, by "torch" or "nsys". A new run starts from the weights of `origin`, if one is given.
    """
    world = world or enter_world(plan)
    num_threads, why = choose_threads(plan, _local_size(), threads, world.device.type == "cuda")
    torch.set_num_threads(num_threads)
    if world.device.type == "cpu":
        keep_freed_memory()
    mesh = Mesh(plan.layout, world.rank, world.device)
    apart = mesh.checkpoint_group()
    with ExitStack() as ending:  # each part is closed, whatever the others raise
        progress = Progress(plan.job.steps, None if world.is_leader else NULL_STREAM)
        tell = (say or progress.say) if world.is_leader else (lambda text: None)
        lock = RunLock(folder, tell)
        ending.callback(lock.close)
        start = ending.enter_context(removed_on_failure(folder) if world.is_leader else nullcontext(Start()))
        run_on_first_rank(apart, lambda: open_run(folder, plan, lock))
        start.has_folder = True
        run_on_first_rank(apart, lambda: check_data_is_named(folder, plan))
        watchdog = ending.enter_context(_watchdog(plan, world))
        if watchdog:
            ending.enter_context(observe_collectives(watchdog.observe))
        parts = build(plan, mesh)
        ending.callback(parts.close)
        ending.callback(progress.close)
        state = TrainState(
            plan, folder, parts, Checkpoints(folder / CHECKPOINTS, plan.run.keep, apart), world, watchdog
        )
        state.stop_at = stop_at
        start_or_resume(state, tell, origin)
        start.has_begun = True
        tell(f"CPU threads of a rank: {num_threads} ({why})")
        _say_what_is_off(plan, tell)
        for loader in (parts.loader, *parts.validation.values()):
            for finding in loader.warnings if loader else ():
                tell(str(finding))
        if parts.loader is not None and (summary := parts.loader.packing_summary()):
            tell(summary)
        if parts.loader is not None:
            _say_skipped(parts.loader.skipped_pictures(), tell)
        boards = (plan.run.tensorboard, plan.run.wandb) if world.is_leader else (False, None)
        board = ExperimentTrackers(folder, *boards, dict(plan.written), tell)
        ending.callback(board.close)
        metrics = Metrics(folder, state.step) if world.is_leader else None
        if metrics:
            ending.callback(metrics.close)
        last_step = plan.job.steps if stop_at is None else min(stop_at, plan.job.steps)
        if profile:
            first, count = profiled_window(state.step, last_step)
            state.profiler = StepProfiler(folder, parts, world.rank, first, count, by_nsys=profile == "nsys")
            ending.callback(state.profiler.close)
            tell(f"profiling steps {state.profiler.first} to {state.profiler.last} into {state.profiler.folder}")
        state.effects = RunEffects(plan, parts, world.rank, state.step, last_step)
        _run(state, metrics, board, progress, tell)
    return state


def enter_world(plan: Plan) -> World:
    """Pin this process to its cores and join the other ranks. Threads that are started later stay on those cores."""
    if plan.run.cores:
        env = rank_environment(os.environ)
        place = (env.local_rank, env.local_size) if env else (0, 1)
        pin_to_cores(plan.run.cores, *place, on_gpu=device_of(plan).type == "cuda")
    return join(
        plan, timeout_seconds=4 * plan.run.hang_seconds or None
    )  # the watchdog reports a hang before torch does


def _local_size() -> int:
    env = rank_environment(os.environ)
    return env.local_size if env else 1


def _run(
    state: TrainState,
    metrics: Metrics | None,
    board: ExperimentTrackers,
    progress: Progress,
    tell: Callable[[str], None],
) -> None:
    """Run to the last step, or until the run is asked to stop; save in either case."""
    plan, folder, first_step = state.plan, state.folder, state.step
    part_times = PartTimes(state.parts)
    with _quiet_gc(plan.run.gc_every), stop_between_steps(state.ask_to_stop):
        _loop(state, metrics, board, progress, part_times)
        if state.stopping:
            tell(_why_it_stops(state))
        with state.during("saving the last checkpoint"):
            state.save(wait=True)
            # Gathered from all ranks, before the first one may find something to raise.
            report = state.effects.report(state.checkpoints.group) if state.effects else None
            assert state.parts.loader is not None
            skipped = (
                run_on_all_ranks(state.checkpoints.group, state.parts.loader.skipped_pictures) if plan.is_vlm else None
            )
    if metrics and metrics.problem:
        raise FindingsError([metrics.problem])
    if state.world.is_leader:
        profiled = (state.profiler.first, state.profiler.last) if state.profiler else None
        append_timing(folder, state.seconds, first_step, profiled)
        write_expert_loads(folder, state.load_LE)
    if report is not None and report.observed_step is not None:
        report.say(tell)
        write_effects(folder, report.as_json())
    if state.parts.runner.graph_stats:
        tell(state.parts.runner.graph_stats.summary())
    if skipped:
        _say_skipped(SkippedPictures.joined(skipped), tell)
    for line in part_times.summary():
        tell(line)


def _why_it_stops(state: TrainState) -> str:
    if not state.has_stopped_improving or state.asked_to_stop:
        return f"stopping behind step {state.step}, saving"
    evaluations = format_many(state.best.num_since, "evaluation")
    return (
        f"ending early behind step {state.step}: the last {evaluations} were no better than {state.best.loss:.4f} of "
        f"step {state.best.step} (run.early_stop)"
    )


def _say_skipped(skipped: SkippedPictures, tell: Callable[[str], None]) -> None:
    for line in skipped.lines():
        tell(line)


def _say_what_is_off(plan: Plan, tell: Callable[[str], None]) -> None:
    """Say which knob of the plan has no effect in this layout."""
    reason = why_not_fused(plan)
    if plan.knobs.grad_accum_fusion and reason and plan.knobs.precision != "fp32":
        tell(f"weight gradients are not added in their GEMMs (knobs.grad_accum_fusion): {reason}")


def _watchdog(plan: Plan, world: World) -> AbstractContextManager[Watchdog | None]:
    if world.store is None or not plan.run.hang_seconds:
        return nullcontext()
    return Watchdog(plan.run.hang_seconds, world.store, world.rank, world.size)


def _loop(
    state: TrainState,
    metrics: Metrics | None,
    board: ExperimentTrackers,
    progress: Progress,
    part_times: PartTimes,
) -> None:
    plan, parts = state.plan, state.parts
    assert parts.loader is not None
    throughput = Throughput(plan, parts.mesh)
    while state.step < plan.job.steps and not _agree_to_stop(state, metrics):
        began = time.perf_counter()
        if state.watchdog:
            state.watchdog.enter_phase(f"step {state.step + 1}", plan.run.hang_seconds)
        count = parts.loader.num_batches(state.step)
        batches = [to_device(parts.loader.batch(state.step, m), parts.device) for m in range(count)]
        data_seconds = time.perf_counter() - began
        lr = learning_rate(plan.job, state.step)
        with state.effects.step(state.step + 1) if state.effects else nullcontext():
            with state.profiler.step(state.step + 1) if state.profiler else nullcontext():
                result = train_step(parts, batches, lr, plan.job, part_times.microbatches)
            work = throughput.count_work(batches, part_times.seconds(), data_seconds)
        _count_skipped(state, result, progress)
        seconds = time.perf_counter() - began
        if state.effects:
            state.effects.end_step(seconds)
        state.step += 1  # from here on the number of this step, which begins at 1
        values = _step_metrics(state, result, lr, seconds, throughput.metrics(work, seconds))
        if state.step % plan.run.log_every == 0 or state.step in (1, plan.job.steps):
            if metrics:
                metrics.write(values)
            board.write(state.step, values | (result.layer_metrics() if board.is_used else {}))
            progress.show(state.step, values)
        state.last, state.load_LE = values, result.load_LE
        state.seconds.append(values["seconds"])
        if plan.is_vlm:
            part_times.remember(values)
        if state.bad_steps > plan.run.bad_steps and not result.applied and not result.overflowed:
            raise _too_many_bad(state)
        with state.during("evaluating or saving"):
            if state.profiler:
                state.profiler.finish(state.step)
            _at_intervals(state, metrics, board, progress)


def _count_skipped(state: TrainState, result: StepResult, progress: Progress) -> None:
    """Count a step that changed nothing. One that overflowed in fp16 is no bad step: the loss scale was too large."""
    if result.applied:
        return
    head = f"step {state.step + 1}:"
    if result.overflowed:
        assert state.parts.loss_scaler is not None
        state.overflow_steps += 1
        progress.say(
            f"{head} gradients overflow at loss scale {result.loss_scale:g}: skipped, "
            f"next {state.parts.loss_scaler.scale:g}"
        )
        return
    state.bad_steps += 1
    progress.say(f"{head} loss {result.loss}, gradient norm {result.grad_norm}: skipped")


def _agree_to_stop(state: TrainState, metrics: Metrics | None) -> bool:
    """Whether any rank was asked to stop or cannot write its metrics any more: all ranks stop after the same step."""
    mute = metrics is not None and metrics.problem is not None
    is_there = state.stop_at is not None and state.step >= state.stop_at
    asked = torch.tensor(
        int(state.asked_to_stop or mute or is_there or state.has_stopped_improving), device=state.parts.device
    )
    all_reduce(asked, state.parts.mesh.world, "max").wait()
    state.stopping = bool(asked)
    return state.stopping


def _at_intervals(state: TrainState, metrics: Metrics | None, board: ExperimentTrackers, progress: Progress) -> None:
    run, step = state.plan.run, state.step
    if run.eval_every and step % run.eval_every == 0:
        losses = evaluate(state)
        values = {"eval_loss": sum(losses.values()) / len(losses)}
        values |= {f"eval/{name}/loss": loss for name, loss in losses.items()}
        if metrics:
            metrics.write({"step": step, **values})
        board.write(step, values)
        each = ", ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
        progress.say(f"step {step}: evaluation loss {values['eval_loss']:.4f}{f' ({each})' if len(losses) > 1 else ''}")
        state.best = state.best.after(step, values["eval_loss"])
    is_best = run.keep_best and state.best.step == step
    if is_best or (run.save_every and step % run.save_every == 0 and step < state.plan.job.steps):
        state.save()
    if run.gc_every and step % run.gc_every == 0:
        gc.collect()


def evaluate(state: TrainState) -> dict[str, float]:
    """Mean loss of each validation set, by name; leaves every state as it was."""
    parts = state.parts
    return {name: evaluate_set(state.plan, parts, loader) for name, loader in parts.validation.items()}


def evaluate_set(plan: Plan, parts: Parts, loader: Loader) -> float:
    """The loss over the first samples of a set. Those that only fill the last microbatches of a layout do not count."""
    # A pipeline is made for one number of microbatches.
    each = plan.num_microbatches if plan.layout.pp > 1 else 1
    in_all = sum(source.num_samples for source in loader.mixture.sources)
    num_samples = min(in_all, plan.run.eval_batches * plan.job.micro_batch)  # whatever the layout
    runs = -(-num_samples // (each * plan.layout.dp * plan.job.micro_batch))
    batches = []
    for n in range(runs * each):
        index = divmod(n, loader.num_microbatches)
        counts_B = torch.tensor([number < num_samples for number in loader.samples(*index)])
        batch = loader.batch(*index)
        labels_BS = batch.labels_BS.where(counts_B[:, None], IGNORE)
        batches.append(to_device(replace(batch, labels_BS=labels_BS), parts.device))
    return evaluate_batches(parts, batches, each)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device. The host does not wait where the loader has pinned it (`Batch.pin`)."""
    if device.type == "cpu":
        return batch
    names = ("tokens_BS", "labels_BS", "positions_BS", "positions_3BS")
    given = {name: getattr(batch, name) for name in names}
    moved: dict[str, Any] = {name: x.to(device, non_blocking=True) for name, x in given.items() if x is not None}
    if batch.documents_BS is not None:
        moved["documents_BS"] = move_documents(batch.documents_BS, device)
    if (images := batch.images) is not None:
        # Grids are read on the host, and patches stay there until the encoder runs: those of a step are many.
        moved["images"] = images._replace(token_index_V=images.token_index_V.to(device, non_blocking=True))
    return replace(batch, **moved)


def _too_many_bad(state: TrainState) -> FindingsError:
    """Save and build the finding. Steps that were not finite changed nothing, so the checkpoint is sound."""
    with state.during("saving behind steps that were not finite"):
        state.save(wait=True)
    found = Finding(
        rule="loss-is-finite",
        at=f"step {state.step}",
        problem=f"{state.bad_steps} steps had a loss or gradient that is not finite",
        advice="lower job.lr, check the data; the last checkpoint is intact",
    )
    return FindingsError([found])


def _step_metrics(
    state: TrainState, result: StepResult, lr: float, seconds: float, speed: dict[str, Any]
) -> dict[str, Any]:
    scaling = {"loss_scale": result.loss_scale, "overflow_steps": state.overflow_steps}
    return {
        "step": state.step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": lr,
        "seconds": seconds,
        **speed,
        "skipped_steps": state.bad_steps,
        **({} if result.loss_scale is None else scaling),
        **(state.parts.runner.graph_stats.metrics() if state.parts.runner.graph_stats else {}),
        **result.aux,
    }


@contextmanager
def _quiet_gc(every: int) -> Iterator[None]:
    """Collect by hand at chosen steps, so that no pause falls into the middle of one."""
    if every:
        gc.disable()
    try:
        yield
    finally:
        gc.enable()
