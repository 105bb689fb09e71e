"""The loop: batches, steps, evaluation, saving, stopping."""

import gc
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from threefold.engine.build import Parts, build, device_of, dtype_of, options_of
from threefold.engine.checkpoint import Checkpoints
from threefold.engine.convert import INITIAL, load_initial
from threefold.engine.data.loader import Batch
from threefold.engine.log import Board, Progress
from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder
from threefold.engine.optim.schedule import learning_rate
from threefold.engine.rng import random_state, restore_random_state
from threefold.engine.run import CHECKPOINTS, Metrics, note_timing, open_run, plan_of_run, write_contract
from threefold.engine.step import StepResult, train_step
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Plan
from threefold.spec.flops import flops_per_token


@dataclass
class Trainer:
    """A run in progress."""

    plan: Plan
    folder: Path
    parts: Parts
    checkpoints: Checkpoints
    step: int = 0
    bad_steps: int = 0
    stopping: bool = False
    last: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # of each step of this stretch

    def tensors(self) -> dict[str, Tensor]:
        """Everything that must survive, by name."""
        state = {f"model.{name}": value for name, value in self.parts.model.state_dict().items()}
        state |= {f"optimizer.{name}": value for name, value in self.parts.optimizer.state_dict().items()}
        return state | random_state()

    def facts(self) -> dict[str, Any]:
        return {"step": self.step, "bad_steps": self.bad_steps, "loader": self.parts.loader.state()}

    def restore(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        def under(prefix: str) -> dict[str, Tensor]:
            return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

        self.parts.model.load_state_dict(under("model."))
        self.parts.optimizer.load_state_dict(under("optimizer."))
        restore_random_state(tensors)
        self.parts.loader.load_state(facts["loader"])
        self.step, self.bad_steps = int(facts["step"]), int(facts["bad_steps"])

    def save(self, wait: bool = False) -> None:
        self.checkpoints.save(self.step, self.tensors(), self.facts(), wait)


def train(plan: Plan, folder: Path, say: Callable[[str], None] | None = None, threads: int | None = None) -> Trainer:
    """Run a plan to its last step, or go on with the run in the folder."""
    if threads:
        torch.set_num_threads(threads)
    if plan.run.cores:
        stay_on(plan.run.cores)
    open_run(folder, plan)
    progress = Progress(plan.job.steps)
    tell = say or progress.say
    parts = build(plan)
    trainer = Trainer(plan, folder, parts, Checkpoints(folder / CHECKPOINTS, plan.run.keep))
    trainer.checkpoints.sweep()
    found = trainer.checkpoints.load_latest(tell)
    if found:
        trainer.restore(*found)
        tell(f"resuming behind step {trainer.step} of {plan.job.steps}")
    else:
        if load_initial(folder, parts.model):
            parts.optimizer.refresh()
            tell(f"starting from the weights in {folder / INITIAL}")
        write_contract(folder, plan, parts.device, parts.loader.fingerprint(), parts.loader.benchmark_only)
    first_step = trainer.step
    metrics = Metrics(folder, first_step)
    board = Board(folder, plan.run.tensorboard, plan.run.wandb, dict(plan.written), tell)
    try:
        with _quiet_gc(plan.run.gc_every), _stop_on_signal(trainer):
            _loop(trainer, metrics, board, progress)
            if trainer.stopping:
                tell(f"stopping behind step {trainer.step}, saving")
            trainer.save(wait=True)
        note_timing(folder, trainer.seconds, first_step)
    finally:
        metrics.close()
        board.close()
        progress.close()
        parts.close()
    return trainer


def stay_on(cores: str) -> None:
    """Keep this process on some cores, so that its launches are not moved about."""
    try:
        chosen = {core for part in cores.split(",") for core in _span(part)}
        os.sched_setaffinity(0, chosen)
    except (ValueError, OSError) as error:
        problem = f"{cores!r} names no cores of this machine: {error}"
        finding = Finding(rule="cores-exist", at="run.cores", problem=problem, advice="write cores as 0-7,16")
        raise FindingsError([finding]) from None


def _span(part: str) -> range:
    first, _, last = part.strip().partition("-")
    return range(int(first), int(last or first) + 1)


def load_run(folder: Path) -> Decoder:
    """The model of a run at its newest checkpoint."""
    plan = plan_of_run(folder)
    found = Checkpoints(folder / CHECKPOINTS, plan.run.keep).load_latest(lambda text: None)
    if found is None:
        problem = Finding(
            rule="run-has-checkpoint", at=str(folder), problem="no checkpoint yet", advice="train it first"
        )
        raise FindingsError([problem])
    model = build_model(plan.model, plan.mtp, dtype_of(plan), device_of(plan), options_of(plan))
    prefix = "model."
    model.load_state_dict({n.removeprefix(prefix): v for n, v in found[0].items() if n.startswith(prefix)})
    return model


def _loop(trainer: Trainer, metrics: Metrics, board: Board, progress: Progress) -> None:
    plan, parts = trainer.plan, trainer.parts
    flops = flops_per_token(plan.model, plan.job.seq_len, plan.mtp)
    while trainer.step < plan.job.steps and not trainer.stopping:
        began = time.perf_counter()
        batches = [to_device(parts.loader.batch(trainer.step, m), parts.device) for m in range(plan.num_microbatches)]
        lr = learning_rate(plan.job, trainer.step)
        result = train_step(parts.model, parts.optimizer, batches, lr, plan.job)
        if not result.applied:
            trainer.bad_steps += 1
            progress.say(f"step {trainer.step + 1}: loss {result.loss}, gradient norm {result.grad_norm}: skipped")
        values = _measured(trainer, result, lr, time.perf_counter() - began, flops)
        if trainer.step % plan.run.log_every == 0 or trainer.step == plan.job.steps - 1:
            metrics.write(values)
            board.write(trainer.step, values)
            progress.show(trainer.step, values)
        trainer.last = values
        trainer.seconds.append(values["seconds"])
        trainer.step += 1
        if trainer.bad_steps > plan.run.bad_steps and not result.applied:
            raise _too_many_bad(trainer)
        _at_intervals(trainer, metrics, progress)


def _at_intervals(trainer: Trainer, metrics: Metrics, progress: Progress) -> None:
    run, step = trainer.plan.run, trainer.step
    if run.eval_every and step % run.eval_every == 0:
        loss = evaluate(trainer)
        metrics.write({"step": step - 1, "eval_loss": loss})
        progress.say(f"step {step}: evaluation loss {loss:.4f}")
    if run.save_every and step % run.save_every == 0 and step < trainer.plan.job.steps:
        trainer.save()
    if run.gc_every and step % run.gc_every == 0:
        gc.collect()


@torch.no_grad()
def evaluate(trainer: Trainer) -> float:
    """Mean loss over the held-out part of the data; leaves every state as it was."""
    plan, parts = trainer.plan, trainer.parts
    if parts.held_out is None:
        return float("nan")
    parts.model.eval()
    total, count = 0.0, 0
    for number in range(plan.run.eval_batches):
        batch = to_device(parts.held_out.batch(*divmod(number, parts.held_out.num_microbatches)), parts.device)
        labels = int((batch.labels_BS != -100).sum())
        out = parts.model(batch.tokens_BS, batch.labels_BS, batch.documents_BS, batch.positions_BS)
        total, count = total + float(out.aux["ce"]) * labels, count + labels
    parts.model.train()
    return total / max(1, count)


def to_device(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    names = ("tokens_BS", "labels_BS", "documents_BS", "positions_BS")
    moved = {name: getattr(batch, name) for name in names}
    return replace(batch, **{n: v.to(device, non_blocking=True) for n, v in moved.items() if v is not None})


def _too_many_bad(trainer: Trainer) -> FindingsError:
    """Steps that were not finite changed nothing: what is saved is what was trained before them."""
    trainer.save(wait=True)
    found = Finding(
        rule="loss-is-finite",
        at=f"step {trainer.step}",
        problem=f"{trainer.bad_steps} steps had a loss or gradient that is not finite",
        advice="lower job.lr, check the data; the last checkpoint is intact",
    )
    return FindingsError([found])


def _measured(trainer: Trainer, result: StepResult, lr: float, seconds: float, flops: float) -> dict[str, Any]:
    tokens = trainer.plan.tokens_per_step
    return {
        "step": trainer.step,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": lr,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "tflops": flops * tokens / seconds / 1e12,
        "memory_bytes": _memory(trainer.parts.device),
        "skipped_steps": trainer.bad_steps,
        **result.aux,
    }


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@contextmanager
def _quiet_gc(every: int) -> Iterator[None]:
    """Collect by hand at chosen steps, so that no pause falls into the middle of one."""
    if every:
        gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def _stop_on_signal(trainer: Trainer) -> Iterator[None]:
    """SIGTERM ends the run after the step under way, with a checkpoint."""

    def stop(number: int, frame: Any) -> None:
        trainer.stopping = True  # and no more: a handler that prints can fall into the middle of a print

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread: whoever runs us stops us
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
