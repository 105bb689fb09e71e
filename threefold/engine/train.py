"""The training loop. `threefold train` calls `train` on every rank.

Evaluating, saving, profiling, logging and stopping hang on its named moments (`train_hooks.py`).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

import torch

from threefold.engine.dist.collectives import all_reduce
from threefold.engine.dist.join import World
from threefold.engine.optim.lr_schedule import learning_rate
from threefold.engine.run.progress_display import NULL_STREAM, Progress
from threefold.engine.start import Origin
from threefold.engine.step import to_device, train_step
from threefold.engine.train_hooks import Hook, Step, make_hooks
from threefold.engine.train_setup import enter_world, set_up
from threefold.engine.train_state import TrainState
from threefold.plan.plan import Plan


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
    """Run a plan to its last step, or resume the run in the folder. Every rank of `world` calls it alike.

    With `stop_at` the run stops and saves after that step, as it does after SIGTERM. With `profile` some steps after
    the first ones are profiled, by "torch" or "nsys". A new run starts from the weights of `origin`, if one is given.
    """
    world = world or enter_world(plan)
    with ExitStack() as ending:
        progress = Progress(plan.job.steps, None if world.is_leader else NULL_STREAM)
        tell = (say or progress.say) if world.is_leader else (lambda text: None)
        state = set_up(plan, folder, world, progress, tell, ending, threads, origin)
        state.stop_at = stop_at
        hooks = make_hooks(state, progress, tell, ending, profile)
        with _within(hook.around_run() for hook in hooks):
            while state.step < plan.job.steps and not _agree_to_stop(state, hooks):
                _run_step(state, hooks)
            if state.stopping:
                tell(state.why_it_stops())
            with state.during("saving the last checkpoint"):
                state.save(wait=True)
                for hook in reversed(hooks):
                    hook.after_last_save()
        for hook in reversed(hooks):
            hook.at_end()
    return state


def _run_step(state: TrainState, hooks: Sequence[Hook]) -> None:
    plan, parts, number = state.plan, state.parts, state.step + 1
    assert parts.loader is not None
    began = time.perf_counter()
    if state.watchdog:
        state.watchdog.enter_phase(f"step {number}", plan.run.hang_seconds)
    num_batches = parts.loader.num_batches(state.step)
    batches = [to_device(parts.loader.batch(state.step, m), parts.device) for m in range(num_batches)]
    data_seconds = time.perf_counter() - began
    lr = learning_rate(plan.job, state.step)
    with _within(hook.around_step(number) for hook in hooks):
        with _within(hook.around_compute(number) for hook in hooks):
            result = train_step(parts, batches, lr, plan.job, lambda: _within(h.around_microbatches() for h in hooks))
        step = Step(number, batches, lr, data_seconds, result)
        for hook in hooks:
            hook.after_compute(step)
    step.seconds = time.perf_counter() - began
    step.metrics = {
        "step": number,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": lr,
        "seconds": step.seconds,
    }
    state.step = number
    for hook in hooks:
        hook.after_step(step)
    state.last, state.load_LE = step.metrics, result.load_LE
    state.seconds.append(step.seconds)
    with state.during("evaluating or saving"):
        for hook in hooks:
            hook.between_steps(step)


@contextmanager
def _within(contexts: Iterable[AbstractContextManager[None]]) -> Iterator[None]:
    """All contexts, the first one outermost."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _agree_to_stop(state: TrainState, hooks: Sequence[Hook]) -> bool:
    """Return whether a hook of any rank wants to stop: all ranks stop after the same step."""
    is_there = state.stop_at is not None and state.step >= state.stop_at
    wanted = is_there or any(hook.wants_to_stop() for hook in hooks)
    asked = torch.tensor(int(wanted), device=state.parts.device)
    all_reduce(asked, state.parts.mesh.world, "max").wait()
    state.stopping = bool(asked)
    return state.stopping
