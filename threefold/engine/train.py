"""The loop: batches, steps, evaluation, saving, stopping."""

import gc
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from threefold.engine.agree import attempt, each, first
from threefold.engine.build import Parts, build, device_of, dtype_of, options_of
from threefold.engine.checkpoint import Checkpoints
from threefold.engine.convert import INITIAL, start_from_initial
from threefold.engine.data.loader import Batch
from threefold.engine.launch import World, join
from threefold.engine.lock import RunLock
from threefold.engine.log import NOWHERE, Board, Progress
from threefold.engine.mesh import Mesh
from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder
from threefold.engine.optim.schedule import learning_rate
from threefold.engine.pieces import Piece
from threefold.engine.rng import random_state, restore_random_state
from threefold.engine.run import CHECKPOINTS, Metrics, note_loads, note_timing, open_run, plan_of_run, write_contract
from threefold.engine.shard.collectives import all_reduce
from threefold.engine.step import StepResult, count_labels, train_step
from threefold.engine.watch import Watch
from threefold.findings import Finding, FindingsError
from threefold.plan.plan import Plan
from threefold.spec.flops import flops_per_token

Kept = dict[str, Tensor | Piece]


@dataclass
class Trainer:
    """A run in progress."""

    plan: Plan
    folder: Path
    parts: Parts
    checkpoints: Checkpoints
    world: World
    watch: Watch | None = None
    step: int = 0
    bad_steps: int = 0
    asked_to_stop: bool = False  # this rank; nothing but its signal handler sets it, so that no moment loses a signal
    stopping: bool = False  # all ranks, agreed between two steps
    last: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)  # of each step of this stretch
    load_LE: Tensor | None = None  # tokens of each expert in the last step

    def tensors(self) -> Kept:
        """Everything that must survive, by name; over all ranks every element once."""
        parts = self.parts
        parts.data.wait_gathered()
        placed = {owned.name: owned for owned in parts.data.owned}
        state: Kept = {f"model.{name}": Piece(o.placement, o.value.to(o.dtype), o.first) for name, o in placed.items()}
        for name, value in parts.optimizer.state_dict().items():
            of = name.partition(".")[2]
            if of in placed:
                state[f"optimizer.{name}"] = Piece(placed[of].placement, value.view(-1), placed[of].first)
            elif not of and self.world.leads:
                state[f"optimizer.{name}"] = value
        if not any(parts.mesh.place(axis) for axis in ("dp", "cp", "tp")):
            state |= {f"model.{name}": buffer for name, buffer in self.buffers()}
        if self.world.leads:
            state |= random_state()
        return state

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        return (pair for chunk in self.parts.chunks.values() for pair in chunk.named_buffers())

    def weights(self) -> Kept:
        """All of the model that this rank holds."""
        held = self.parts.data.held()
        state: Kept = {f"model.{name}": Piece(place, memory, first) for name, place, memory, first in held}
        state |= {f"model.{name}": buffer for name, buffer in self.buffers()}
        return state

    def wanted(self) -> Kept:
        """What this rank needs of a checkpoint: what it holds, whoever saved it."""
        parts = self.parts
        updated = {owned.name: owned for owned in parts.data.updated}
        # FSDP's weights are master weights: the optimizer's state fills them.
        masters = {f"model.{name}" for name, owned in updated.items() if owned.value.dtype != owned.dtype}
        state: Kept = {name: value for name, value in self.weights().items() if name not in masters}
        for name, value in parts.optimizer.state_dict().items():
            of = name.partition(".")[2]
            owned = updated.get(of)
            state[f"optimizer.{name}"] = Piece(owned.placement, value.view(-1), owned.first) if owned else value
        state |= random_state()
        return state

    def facts(self) -> dict[str, Any]:
        assert self.parts.loader is not None
        return {"step": self.step, "bad_steps": self.bad_steps, "loader": self.parts.loader.state()}

    def restore(self, found: Kept, facts: dict[str, Any]) -> None:
        """From what was filled in place."""
        assert self.parts.loader is not None
        self.parts.optimizer.steps = int(cast(Tensor, found["optimizer.steps"]))
        restore_random_state({name: value for name, value in found.items() if isinstance(value, Tensor)})
        self.parts.loader.load_state(facts["loader"])
        self.step, self.bad_steps = int(facts["step"]), int(facts["bad_steps"])

    def during(self, where: str) -> AbstractContextManager[None]:
        """Something beside the steps, which may take as long as it likes."""
        return self.watch.during(where) if self.watch else nullcontext()

    def save(self, wait: bool = False) -> None:
        self.checkpoints.save(self.step, self.tensors(), self.facts(), wait)


def train(
    plan: Plan,
    folder: Path,
    say: Callable[[str], None] | None = None,
    threads: int | None = None,
    world: World | None = None,
) -> Trainer:
    """Run a plan to its last step, or go on with the run in the folder. Every rank of `world` calls it alike."""
    if threads:
        torch.set_num_threads(threads)
    if plan.run.cores:
        stay_on(plan.run.cores)
    world = world or join(plan, limit_seconds=4 * plan.run.hang_seconds or None)  # the watch speaks first
    mesh = Mesh(plan.layout, world.rank, world.device)
    apart = mesh.for_checkpoints()
    with ExitStack() as ending:  # each is closed, whatever the others raise
        progress = Progress(plan.job.steps, None if world.leads else NOWHERE)
        tell = (say or progress.say) if world.leads else (lambda text: None)
        lock = RunLock(folder, tell)
        ending.callback(lock.close)
        first(apart, lambda: open_run(folder, plan, lock))
        watch = ending.enter_context(_watched(plan, world))
        parts = build(plan, mesh)
        ending.callback(parts.close)
        ending.callback(progress.close)
        trainer = Trainer(plan, folder, parts, Checkpoints(folder / CHECKPOINTS, plan.run.keep, apart), world, watch)
        _begin(trainer, tell)
        boards = (plan.run.tensorboard, plan.run.wandb) if world.leads else (False, None)
        board = Board(folder, *boards, dict(plan.written), tell)
        ending.callback(board.close)
        metrics = Metrics(folder, trainer.step) if world.leads else None
        if metrics:
            ending.callback(metrics.close)
        _run(trainer, metrics, board, progress, tell)
    return trainer


def _run(
    trainer: Trainer, metrics: Metrics | None, board: Board, progress: Progress, tell: Callable[[str], None]
) -> None:
    """From where the run stands to its end, or to where it is asked to stop; saved in either case."""
    plan, folder, first_step = trainer.plan, trainer.folder, trainer.step
    with _quiet_gc(plan.run.gc_every), _stop_on_signal(trainer):
        _loop(trainer, metrics, board, progress)
        if trainer.stopping:
            tell(f"stopping behind step {trainer.step}, saving")
        with trainer.during("saving the last checkpoint"):
            trainer.save(wait=True)
    if metrics and metrics.problem:
        raise FindingsError([metrics.problem])
    if trainer.world.leads:
        note_timing(folder, trainer.seconds, first_step)
        note_loads(folder, trainer.load_LE)
    if trainer.parts.runner.tally:
        tell(trainer.parts.runner.tally.summary())


def _begin(trainer: Trainer, tell: Callable[[str], None]) -> None:
    """Where the newest checkpoint ends, with imported weights, or afresh."""
    plan, folder, parts = trainer.plan, trainer.folder, trainer.parts
    assert parts.loader is not None
    trainer.checkpoints.sweep()
    wanted = trainer.wanted()
    facts = trainer.checkpoints.load_latest(tell, wanted)
    if facts:
        trainer.restore(wanted, facts)
        tell(f"resuming behind step {trainer.step} of {plan.job.steps}")
        return
    model = {name.removeprefix("model."): value for name, value in trainer.weights().items()}
    filled = attempt(trainer.checkpoints.group, lambda: start_from_initial(folder, model, plan))
    each(trainer.checkpoints.group, filled.get)
    if filled.value:
        parts.optimizer.refresh()
        tell(f"starting from the weights in {folder / INITIAL}")
    if trainer.world.leads:
        write_contract(folder, plan, parts.device, parts.loader.fingerprint(), parts.loader.benchmark_only)


def _watched(plan: Plan, world: World) -> AbstractContextManager[Watch | None]:
    if world.store is None or not plan.run.hang_seconds:
        return nullcontext()
    return Watch(plan.run.hang_seconds, world.store, world.rank, world.size)


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


def _loop(trainer: Trainer, metrics: Metrics | None, board: Board, progress: Progress) -> None:
    plan, parts = trainer.plan, trainer.parts
    assert parts.loader is not None
    flops = flops_per_token(plan.model, plan.job.seq_len, plan.mtp)
    while trainer.step < plan.job.steps and not _agree_to_stop(trainer, metrics):
        began = time.perf_counter()
        if trainer.watch:
            trainer.watch.beat(f"step {trainer.step + 1}", plan.run.hang_seconds)
        batches = [to_device(parts.loader.batch(trainer.step, m), parts.device) for m in range(plan.num_microbatches)]
        lr = learning_rate(plan.job, trainer.step)
        result = train_step(parts, batches, lr, plan.job)
        if not result.applied:
            trainer.bad_steps += 1
            progress.say(f"step {trainer.step + 1}: loss {result.loss}, gradient norm {result.grad_norm}: skipped")
        values = _measured(trainer, result, lr, time.perf_counter() - began, flops)
        if trainer.step % plan.run.log_every == 0 or trainer.step == plan.job.steps - 1:
            if metrics:
                metrics.write(values)
            board.write(trainer.step, values)
            progress.show(trainer.step, values)
        trainer.last, trainer.load_LE = values, result.load_LE
        trainer.seconds.append(values["seconds"])
        trainer.step += 1
        if trainer.bad_steps > plan.run.bad_steps and not result.applied:
            raise _too_many_bad(trainer)
        with trainer.during("evaluating or saving"):
            _at_intervals(trainer, metrics, progress)


def _agree_to_stop(trainer: Trainer, metrics: Metrics | None) -> bool:
    """Whether any rank was asked to, or cannot say any more how it goes: all stop behind the same step."""
    mute = metrics is not None and metrics.problem is not None
    asked = torch.tensor(int(trainer.asked_to_stop or mute), device=trainer.parts.device)
    all_reduce(asked, trainer.parts.mesh.world, "max").wait()
    trainer.stopping = bool(asked)
    return trainer.stopping


def _at_intervals(trainer: Trainer, metrics: Metrics | None, progress: Progress) -> None:
    run, step = trainer.plan.run, trainer.step
    if run.eval_every and step % run.eval_every == 0:
        loss = evaluate(trainer)
        if metrics:
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
    # A pipeline is made for one number of microbatches.
    each = plan.num_microbatches if plan.layout.pp > 1 else 1
    runs = -(-plan.run.eval_batches // (each * plan.layout.dp))
    numbers = [divmod(n, parts.held_out.num_microbatches) for n in range(runs * each)]
    batches = [to_device(parts.held_out.batch(*number), parts.device) for number in numbers]
    for chunk in parts.chunks.values():
        chunk.eval()
    share_M, _ = count_labels(parts, batches)
    total = torch.zeros((), dtype=torch.float64, device=parts.device)
    for start in range(0, len(batches), each):
        part = slice(start, start + each)
        sums = parts.runner.run(batches[part], list(share_M[part]), train=False)
        if "ce" in sums:
            total += sums["ce"] / plan.layout.tp
    all_reduce(total, parts.mesh.world).wait()
    for chunk in parts.chunks.values():
        chunk.train()
    return float(total)


def to_device(batch: Batch, device: torch.device) -> Batch:
    if device.type == "cpu":
        return batch
    names = ("tokens_BS", "labels_BS", "documents_BS", "positions_BS")
    moved = {name: getattr(batch, name) for name in names}
    return replace(batch, **{n: v.to(device, non_blocking=True) for n, v in moved.items() if v is not None})


def _too_many_bad(trainer: Trainer) -> FindingsError:
    """Steps that were not finite changed nothing: what is saved is what was trained before them."""
    with trainer.during("saving behind steps that were not finite"):
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
        **(trainer.parts.runner.tally.metrics() if trainer.parts.runner.tally else {}),
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
        trainer.asked_to_stop = True  # and no more: a handler that prints can fall into the middle of a print

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread: whoever runs us stops us
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
