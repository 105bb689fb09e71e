"""Everything that a run does besides its steps, hung on named moments of the training loop (`train.py`).

A hook overrides the moments that it needs:

    around_run            the loop and the last save
    wants_to_stop         between two steps: whether this rank asks all ranks to stop
    around_step           a step and the count of its work
    around_compute        the step alone, inside of that
    around_microbatches   the forward and backward of all microbatches, inside of that
    after_compute         the step has ended; still inside `around_step`
    after_step            hooks add their metrics to those of the step, and log them
    between_steps         what may take long, such as saving: the watchdog waits as long as it takes
    after_last_save       what is gathered from all ranks
    at_end                what the first rank prints and writes

The last two are called in the reverse order of hooks, as contexts are left. Every rank has the same hooks and calls
them alike, so that a hook may communicate.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from threefold.engine.batch import Batch
from threefold.engine.data.images.batch_images import SkippedImages
from threefold.engine.dist.consensus import run_on_all_ranks
from threefold.engine.effects.recorder import RunEffects, RunReport
from threefold.engine.profiler import StepProfiler, profiled_window
from threefold.engine.run.folder import Metrics, append_timing, write_effects, write_expert_loads
from threefold.engine.run.progress_display import ExperimentTrackers, Progress
from threefold.engine.run.routing_record import RoutingRecord
from threefold.engine.step import StepResult, evaluate_set
from threefold.engine.throughput import PartTimes, StepWork, Throughput
from threefold.engine.train_state import TrainState
from threefold.findings import Finding, FindingsError
from threefold.launch.stop_signals import stop_between_steps

Tell = Callable[[str], None]  # prints a line on the first rank


@dataclass
class Step:
    """A step as hooks see it."""

    number: int  # from 1
    batches: list[Batch]
    lr: float
    data_seconds: float  # until the batches were there
    result: StepResult
    seconds: float = 0.0  # in all; known from `after_step` on
    metrics: dict[str, Any] = field(default_factory=dict)


class Hook:
    """A hook that does nothing."""

    def around_run(self) -> AbstractContextManager[None]:
        return nullcontext()

    def wants_to_stop(self) -> bool:
        return False

    def around_step(self, number: int) -> AbstractContextManager[None]:
        return nullcontext()

    def around_compute(self, number: int) -> AbstractContextManager[None]:
        return nullcontext()

    def around_microbatches(self) -> AbstractContextManager[None]:
        return nullcontext()

    def after_compute(self, step: Step) -> None: ...

    def after_step(self, step: Step) -> None: ...

    def between_steps(self, step: Step) -> None: ...

    def after_last_save(self) -> None: ...

    def at_end(self) -> None: ...


class MeasureThroughput(Hook):
    """Count the work of each step; at the end print where the time of a vision-language model went."""

    def __init__(self, state: TrainState, tell: Tell) -> None:
        self.tell, self.is_vlm = tell, state.plan.is_vlm
        self.throughput, self.part_times = Throughput(state.plan, state.parts.mesh), PartTimes(state.parts)
        self._work: StepWork | None = None

    def around_microbatches(self) -> AbstractContextManager[None]:
        return self.part_times.microbatches()

    def after_compute(self, step: Step) -> None:
        self._work = self.throughput.count_work(step.batches, self.part_times.seconds(), step.data_seconds)

    def after_step(self, step: Step) -> None:
        assert self._work is not None
        step.metrics |= self.throughput.metrics(self._work, step.seconds)
        if self.is_vlm:
            self.part_times.remember(step.metrics)

    def at_end(self) -> None:
        for line in self.part_times.summary():
            self.tell(line)


class ReportSkippedImages(Hook):
    """Count the images that no rank could decode, and name some of them."""

    def __init__(self, state: TrainState, tell: Tell) -> None:
        self.state, self.tell = state, tell
        self._skipped: list[SkippedImages] | None = None

    def after_last_save(self) -> None:
        loader = self.state.parts.loader
        assert loader is not None
        if self.state.plan.is_vlm:
            self._skipped = run_on_all_ranks(self.state.checkpoints.group, loader.skipped_images)

    def at_end(self) -> None:
        for line in SkippedImages.joined(self._skipped).lines() if self._skipped else ():
            self.tell(line)


class ReportEffects(Hook):
    """Observe one step, and report which settings took effect, slow ranks and CUDA graphs."""

    def __init__(self, state: TrainState, tell: Tell) -> None:
        self.state, self.tell = state, tell
        self.effects = RunEffects(state.plan, state.parts, state.world.rank, state.step, state.last_step)
        self._report: RunReport | None = None

    def around_step(self, number: int) -> AbstractContextManager[None]:
        return self.effects.step(number)

    def after_step(self, step: Step) -> None:
        self.effects.end_step(step.seconds)

    def after_last_save(self) -> None:
        self._report = self.effects.report(self.state.checkpoints.group)

    def at_end(self) -> None:
        if self._report is not None and self._report.observed_step is not None:
            self._report.say(self.tell)
            write_effects(self.state.folder, self._report.as_json())
        if stats := self.state.parts.runner.graph_stats:
            self.tell(stats.summary())


class CountSkippedSteps(Hook):
    """Count steps that changed nothing, and end the run where there are too many (`run.bad_steps`)."""

    def __init__(self, state: TrainState, progress: Progress) -> None:
        self.state, self.progress = state, progress

    def after_step(self, step: Step) -> None:
        state, result = self.state, step.result
        if result.overflowed:  # no bad step: the loss scale was too large
            assert state.parts.loss_scaler is not None
            state.overflow_steps += 1
            self.progress.say(
                f"step {step.number}: gradients overflow at loss scale {result.loss_scale:g}: skipped, "
                f"next {state.parts.loss_scaler.scale:g}"
            )
        elif not result.applied:
            state.bad_steps += 1
            self.progress.say(f"step {step.number}: loss {result.loss}, gradient norm {result.grad_norm}: skipped")
        step.metrics["skipped_steps"] = state.bad_steps
        if result.loss_scale is not None:
            step.metrics |= {"loss_scale": result.loss_scale, "overflow_steps": state.overflow_steps}

    def between_steps(self, step: Step) -> None:
        state, result = self.state, step.result
        if result.applied or result.overflowed or state.bad_steps <= state.plan.run.bad_steps:
            return
        with state.during("saving after steps that were not finite"):  # they changed nothing: the weights are sound
            state.save(wait=True)
        finding = Finding(
            rule="loss-is-finite",
            at=f"step {state.step}",
            problem=f"{state.bad_steps} steps had a loss or gradient that is not finite",
            advice="lower job.lr, check the data; the last checkpoint is intact",
        )
        raise FindingsError([finding])


class ProfileSteps(Hook):
    """Profile a window of steps (`train --profile`)."""

    def __init__(self, state: TrainState, by: str, tell: Tell) -> None:
        first, count = profiled_window(state.step, state.last_step)
        self.profiler = StepProfiler(state.folder, state.parts, state.world.rank, first, count, by_nsys=by == "nsys")
        tell(f"profiling steps {self.profiler.first} to {self.profiler.last} into {self.profiler.folder}")

    def around_compute(self, number: int) -> AbstractContextManager[None]:
        return self.profiler.step(number)

    def between_steps(self, step: Step) -> None:
        self.profiler.finish(step.number)


class LogMetrics(Hook):
    """Write the metrics of steps and evaluations to the terminal, RUN/metrics.jsonl, TensorBoard and W&B."""

    def __init__(self, state: TrainState, progress: Progress, tell: Tell, ending: ExitStack) -> None:
        plan, is_leader = state.plan, state.world.is_leader
        self.state, self.progress, self.first_step = state, progress, state.step
        self.profiled: tuple[int, int] | None = None  # steps whose times are no evidence
        boards = (plan.run.tensorboard, plan.run.wandb) if is_leader else (False, None)
        self.board = ExperimentTrackers(state.folder, *boards, dict(plan.written), tell)
        ending.callback(self.board.close)
        self.metrics = Metrics(state.folder, state.step) if is_leader else None
        if self.metrics:
            ending.callback(self.metrics.close)

    def wants_to_stop(self) -> bool:
        return self.metrics is not None and self.metrics.problem is not None

    def after_step(self, step: Step) -> None:
        stats = self.state.parts.runner.graph_stats
        step.metrics |= {**(stats.metrics() if stats else {}), **step.result.aux}
        if step.number % self.state.plan.run.log_every == 0 or step.number in (1, self.state.plan.job.steps):
            self.write(step.number, step.metrics, step.result.layer_metrics() if self.board.is_used else {})
            self.progress.show(step.number, step.metrics)

    def write(self, number: int, metrics: dict[str, Any], for_boards: dict[str, Any]) -> None:
        if self.metrics:
            self.metrics.write(metrics)
        self.board.write(number, metrics | for_boards)

    def at_end(self) -> None:
        if self.metrics and self.metrics.problem:
            raise FindingsError([self.metrics.problem])
        if self.state.world.is_leader:
            append_timing(self.state.folder, self.state.seconds, self.first_step, self.profiled)
            write_expert_loads(self.state.folder, self.state.load_LE)


class RecordLoads(Hook):
    """Record how the router loads the experts (`routing.json`)."""

    def __init__(self, state: TrainState) -> None:
        self.state, self.record = state, RoutingRecord(state.parts.mesh)

    def after_step(self, step: Step) -> None:
        self.record.add(step.number, step.result.load_LE, step.result.own_load_LE)

    def after_last_save(self) -> None:
        if self.state.plan.model.is_moe:
            self.record.gather_sources(self.state.checkpoints.group)

    def at_end(self) -> None:
        if self.state.world.is_leader:
            self.record.write(self.state.folder)


class Evaluate(Hook):
    """Compute the loss of each validation set every `run.eval_every` steps; stop where it no longer improves."""

    def __init__(self, state: TrainState, log: LogMetrics) -> None:
        self.state, self.log = state, log

    def wants_to_stop(self) -> bool:
        return self.state.has_stopped_improving

    def between_steps(self, step: Step) -> None:
        if not (every := self.state.plan.run.eval_every) or step.number % every:
            return
        losses = evaluate(self.state)
        loss = sum(losses.values()) / len(losses)
        values = {"eval_loss": loss} | {f"eval/{name}/loss": of_set for name, of_set in losses.items()}
        if self.log.metrics:
            self.log.metrics.write({"step": step.number, **values})
        self.log.board.write(step.number, values)
        each = ", ".join(f"{name} {of_set:.4f}" for name, of_set in losses.items())
        listed = f" ({each})" if len(losses) > 1 else ""
        self.log.progress.say(f"step {step.number}: evaluation loss {loss:.4f}{listed}")
        self.state.best = self.state.best.after(step.number, loss)


def evaluate(state: TrainState) -> dict[str, float]:
    """The mean loss of each validation set, by name; leaves every state as it was."""
    parts = state.parts
    return {name: evaluate_set(state.plan, parts, loader) for name, loader in parts.validation.items()}


class SaveCheckpoints(Hook):
    """Save every `run.save_every` steps, and where an evaluation is the best one so far."""

    def __init__(self, state: TrainState) -> None:
        self.state = state

    def between_steps(self, step: Step) -> None:
        run = self.state.plan.run
        is_best = run.keep_best and self.state.best.step == step.number
        is_due = run.save_every and step.number % run.save_every == 0 and step.number < self.state.plan.job.steps
        if is_best or is_due:
            self.state.save()


class CollectGarbage(Hook):
    """Collect garbage every `run.gc_every` steps, so that no pause falls into the middle of one."""

    def __init__(self, every: int) -> None:
        self.every = every

    @contextmanager
    def around_run(self) -> Iterator[None]:
        if self.every:
            gc.disable()
        try:
            yield
        finally:
            gc.enable()

    def between_steps(self, step: Step) -> None:
        if self.every and step.number % self.every == 0:
            gc.collect()


class StopOnSignals(Hook):
    """Stop after the step that runs when a signal comes."""

    def __init__(self, state: TrainState) -> None:
        self.state = state

    def around_run(self) -> AbstractContextManager[None]:
        return stop_between_steps(self.state.ask_to_stop)

    def wants_to_stop(self) -> bool:
        return self.state.asked_to_stop


def make_hooks(
    state: TrainState, progress: Progress, tell: Tell, ending: ExitStack, profile: str | None = None
) -> list[Hook]:
    """The hooks of a run in their order. `ending` closes what they open; `profile` is "torch" or "nsys"."""
    log = LogMetrics(state, progress, tell, ending)
    profiling: list[Hook] = []
    if profile:
        hook = ProfileSteps(state, profile, tell)
        ending.callback(hook.profiler.close)
        log.profiled = hook.profiler.first, hook.profiler.last
        profiling.append(hook)
    return [
        StopOnSignals(state),
        MeasureThroughput(state, tell),
        ReportSkippedImages(state, tell),
        ReportEffects(state, tell),
        CountSkippedSteps(state, progress),
        RecordLoads(state),
        *profiling,
        log,
        Evaluate(state, log),
        SaveCheckpoints(state),
        CollectGarbage(state.plan.run.gc_every),
    ]
