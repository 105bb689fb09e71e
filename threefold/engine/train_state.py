"""The state of a run on one rank: what is saved and loaded, where it resumes, and what the loop counts.

`train.py` advances it step by step. A checkpoint holds `model.*` (weights and router biases), `optimizer.*`, `rng.*`
and a few facts: the step, the number of skipped steps, the position in the data, and fp16's loss scale.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from threefold.engine.build import Parts, device_of, dtype_of, options_of
from threefold.engine.data.text.tokenizer import tokenizer_facts
from threefold.engine.dist.consensus import (
    capture_outcome,
    check_alike_on_ranks,
    run_on_all_ranks,
    run_on_first_rank,
)
from threefold.engine.dist.join import World
from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder
from threefold.engine.run.checkpoints import BestEvaluation, Checkpoints
from threefold.engine.run.dcp import CheckpointShard
from threefold.engine.run.folder import CHECKPOINTS, check_same_data, read_run_plan, record_plan, write_contract
from threefold.engine.run.rng_state import random_state, restore_random_state
from threefold.engine.start import (
    FilledFrom,
    Origin,
    check_context,
    fill_from_run,
    inherit_files,
    unused_weights_finding,
)
from threefold.engine.weights.imported_weights import (
    INITIAL,
    list_initial_weights,
    load_initial_weights,
    start_from_initial_weights,
)
from threefold.engine.weights.model_shapes import MODEL, check_is_model
from threefold.engine.weights.read_hf import read_hf
from threefold.engine.weights.run_files import keep_tokenizer
from threefold.findings import Finding, FindingsError, shown
from threefold.launch.watchdog import Watchdog
from threefold.plan.plan import Plan
from threefold.units import format_many

Tensors = dict[str, Tensor | CheckpointShard]
MAX_COUNT = 2**62  # of steps and samples


@dataclass
class TrainState:
    """A run in progress on one rank."""

    plan: Plan
    folder: Path
    parts: Parts
    checkpoints: Checkpoints
    world: World  # this process among all ranks
    watchdog: Watchdog | None = None
    step: int = 0  # steps that are done
    bad_steps: int = 0  # steps whose loss or gradient was not finite, and which changed nothing
    overflow_steps: int = 0  # steps that changed nothing because fp16's loss scale was too large
    asked_to_stop: bool = False  # set by the signal handler of this rank and by nothing else, so that no signal is lost
    stop_at: int | None = None  # the step after which the run stops as if it were asked to
    stopping: bool = False  # agreed by all ranks between two steps
    best: BestEvaluation = field(default_factory=BestEvaluation)
    last: dict[str, Any] = field(default_factory=dict)  # metrics of the last step
    seconds: list[float] = field(default_factory=list)  # duration of each step since the start or resume
    load_LE: Tensor | None = None  # tokens of each expert in the last step

    def tensors(self) -> Tensors:
        """The tensors that this rank saves, by name. Over all ranks every element is saved once."""
        parts = self.parts
        parts.data.finish_param_sync()
        placed = {owned.name: owned for owned in parts.data.owned}
        state: Tensors = {
            f"model.{name}": CheckpointShard(o.placement, o.value.to(o.dtype), o.start) for name, o in placed.items()
        }
        for name, value in parts.optimizer.state_dict().items():
            of = name.partition(".")[2]
            if of in placed:
                state[f"optimizer.{name}"] = CheckpointShard(placed[of].placement, value.view(-1), placed[of].start)
            elif not of and self.world.is_leader:
                state[f"optimizer.{name}"] = value
        if not any(parts.mesh.coordinate(axis) for axis in ("dp", "cp", "tp")):
            state |= {f"model.{name}": buffer for name, buffer in self.buffers()}
        if self.world.is_leader:
            state |= random_state()
        return state

    def buffers(self) -> Iterator[tuple[str, Tensor]]:
        return (pair for chunk in self.parts.chunks.values() for pair in chunk.named_buffers())

    def weights(self) -> Tensors:
        """Every weight and buffer that this rank holds."""
        held = self.parts.data.local_tensors()
        state: Tensors = {
            f"model.{name}": CheckpointShard(placement, memory, start) for name, placement, memory, start in held
        }
        state |= {f"model.{name}": buffer for name, buffer in self.buffers()}
        return state

    def tensors_to_load(self) -> Tensors:
        """The tensors that this rank reads from a checkpoint: all that it holds, whichever rank saved it."""
        parts = self.parts
        updated = {owned.name: owned for owned in parts.data.updated}
        # FSDP's weights are master weights: the optimizer's state fills them.
        masters = {f"model.{name}" for name, owned in updated.items() if owned.value.dtype != owned.dtype}
        state: Tensors = {name: value for name, value in self.weights().items() if name not in masters}
        for name, value in parts.optimizer.state_dict().items():
            of = name.partition(".")[2]
            owned = updated.get(of)
            state[f"optimizer.{name}"] = (
                CheckpointShard(owned.placement, value.view(-1), owned.start) if owned else value
            )
        state |= random_state()
        return state

    def facts(self) -> dict[str, Any]:
        assert self.parts.loader is not None
        facts = {"step": self.step, "bad_steps": self.bad_steps, "loader": self.parts.loader.state()}
        if self.parts.loss_scaler:
            facts |= {"loss_scaler": self.parts.loss_scaler.state(), "overflow_steps": self.overflow_steps}
        if self.parts.copies:
            facts["expert_copies"] = self.parts.copies.state()
        if self.best.step:
            facts["best"] = asdict(self.best)
        return facts

    def restore(self, found: Tensors, facts: dict[str, Any]) -> None:
        """Take over counters and random state after the tensors were filled in place."""
        try:
            self._restore(found, facts)
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError) as error:
            reason = f"they lack {error}" if isinstance(error, KeyError) else str(error).splitlines()[0]
            problem = f"the facts of the newest checkpoint are not those of a run: {reason}"
            folder, advice = self.checkpoints.folder, "delete that checkpoint: then the one before it is used"
            found_here = Finding(rule="checkpoint-whole", at=str(folder), problem=problem, advice=advice)
            raise FindingsError([found_here]) from None

    def _restore(self, found: Tensors, facts: dict[str, Any]) -> None:
        assert self.parts.loader is not None
        loader = facts["loader"]
        for table, name in ((facts, "step"), (facts, "bad_steps"), (loader, "step"), (loader, "sample")):
            if type(table[name]) is not int or not 0 <= table[name] < MAX_COUNT:
                raise ValueError(f"{name} is {shown(table[name])}")
        self.load_optimizer(found)
        restore_random_state({name: value for name, value in found.items() if isinstance(value, Tensor)})
        self.parts.loader.load_state(loader)
        self.step, self.bad_steps = facts["step"], facts["bad_steps"]
        self.best = BestEvaluation.of(facts) or self.best
        if self.parts.copies and "expert_copies" in facts:  # the first step of a run that had none copies nothing
            self.parts.copies.load_state(facts["expert_copies"])
        if self.parts.loss_scaler and "loss_scaler" in facts:  # runs of earlier versions have none
            self.parts.loss_scaler.load_state(facts["loss_scaler"])
            self.overflow_steps = int(facts["overflow_steps"])

    def load_optimizer(self, found: Tensors) -> None:
        """Take over the optimizer's count of steps, and the master weights that it keeps in another form, after the
        tensors were filled in place."""
        optimizer = self.parts.optimizer
        optimizer.steps = int(cast(Tensor, found["optimizer.steps"]))
        memory = {name: value.memory if isinstance(value, CheckpointShard) else value for name, value in found.items()}
        optimizer.load_split_masters({name.removeprefix("optimizer."): value for name, value in memory.items()})

    def ask_to_stop(self) -> None:
        """Ask the loop to end after its step. A signal handler calls it: one that prints could fall into a print."""
        self.asked_to_stop = True

    def during(self, phase: str) -> AbstractContextManager[None]:
        """Tell the watchdog of a phase between the steps, which may take as long as it likes."""
        return self.watchdog.phase(phase) if self.watchdog else nullcontext()

    def save(self, wait: bool = False) -> None:
        kept = self.best.step if self.plan.run.keep_best else None
        self.checkpoints.save(self.step, self.tensors(), self.facts(), wait, kept)

    @property
    def last_step(self) -> int:
        """The step after which this start ends."""
        return self.plan.job.steps if self.stop_at is None else min(self.stop_at, self.plan.job.steps)

    def why_it_stops(self) -> str:
        if not self.has_stopped_improving or self.asked_to_stop:
            return f"stopping after step {self.step}, saving"
        evaluations = format_many(self.best.num_since, "evaluation")
        return (
            f"ending early after step {self.step}: the last {evaluations} were no better than {self.best.loss:.4f} of "
            f"step {self.best.step} (run.early_stop)"
        )

    @property
    def has_stopped_improving(self) -> bool:
        """Return whether so many evaluations in a row were no better than the best that the run ends
        (`run.early_stop`)."""
        return 0 < self.plan.run.early_stop <= self.best.num_since


def start_or_resume(state: TrainState, tell: Callable[[str], None], origin: Origin | None = None) -> None:
    """Continue from the newest checkpoint, or start: from another run, from imported weights, or from random ones."""
    plan, folder, parts = state.plan, state.folder, state.parts
    assert parts.loader is not None
    group, loader = state.checkpoints.group, parts.loader
    check_alike_on_ranks(group, "data", "job.data", loader.fingerprint)
    sets = parts.validation.items()
    check_alike_on_ranks(group, "validation data", "job.val_data", lambda: {n: set_.fingerprint() for n, set_ in sets})
    tokenizer = tokenizer_facts(loader.tokenizer) if plan.job.tokenizer else None
    run_on_first_rank(group, lambda: check_same_data(folder, loader.content(), tokenizer))
    state.checkpoints.remove_partial()
    tensors = state.tensors_to_load()
    facts = state.checkpoints.load_latest(tell, tensors)
    if facts:
        state.restore(tensors, facts)
        run_on_first_rank(group, lambda: record_plan(folder, plan))
        is_past = state.step > plan.job.steps
        of_steps = f", past job.steps = {plan.job.steps}" if is_past else f" of {plan.job.steps}"
        tell(f"resuming after step {state.step}{of_steps}")
        return
    run_on_first_rank(group, lambda: check_context(folder, plan, origin is not None))
    lineage = _start_from_run(state, origin, tell).lineage if origin else []
    if not lineage:
        _start_from_imported(state, tell)
    run_on_first_rank(group, lambda: record_plan(folder, plan))
    run_on_first_rank(group, lambda: keep_tokenizer(folder, plan.job.tokenizer))
    if state.world.is_leader:
        is_benchmark = loader.benchmark_only or plan.is_benchmark_only
        data = loader.fingerprint(), loader.content()
        write_contract(folder, plan, parts.device, data, is_benchmark, lineage, tokenizer)


def _start_from_run(state: TrainState, origin: Origin, tell: Callable[[str], None]) -> FilledFrom:
    """Fill the weights from the newest checkpoint of another run, and with `--with-optimizer` the optimizer's state."""
    group, optimizer = state.checkpoints.group, state.parts.optimizer
    wanted = state.weights()
    if origin.with_optimizer:
        wanted = {name: value for name, value in state.tensors_to_load().items() if not name.startswith("rng.")}
    filled = fill_from_run(origin, wanted, state.plan, group, tell)
    if origin.with_optimizer:
        state.load_optimizer(wanted)
    else:
        optimizer.refresh()
    run_on_first_rank(group, lambda: inherit_files(origin, state.folder, state.plan))
    what = "weights and optimizer" if origin.with_optimizer else "weights"
    tell(f"starting from the {what} of {origin.run} at step {filled.step}")
    return filled


def _start_from_imported(state: TrainState, tell: Callable[[str], None]) -> None:
    """Fill the weights from `initial/` of the folder where the run has one; otherwise they stay random."""
    folder, plan, group = state.folder, state.plan, state.checkpoints.group
    model = {name.removeprefix("model."): value for name, value in state.weights().items()}
    check_alike_on_ranks(group, "imported weights", str(folder / INITIAL), lambda: list_initial_weights(folder))
    filled = capture_outcome(group, lambda: start_from_initial_weights(folder, model, plan))
    run_on_all_ranks(group, filled.result)
    if filled.value:
        state.parts.optimizer.refresh()
        tell(f"starting from the imported weights in {folder / INITIAL}")
        return
    tell(f"starting from random weights (job.seed {plan.job.seed})")
    if finding := unused_weights_finding(plan):
        tell(str(finding))


def load_run(folder: Path, say: Callable[[str], None], newest: bool = False) -> Decoder:
    """The model of a run at its newest sound checkpoint, whole, for sampling. `say` prints damaged ones.

    Where the run keeps its best checkpoint, it is that one, unless `newest` is asked for.
    """
    plan = read_run_plan(folder)
    checkpoints = Checkpoints(folder / CHECKPOINTS, plan.run.keep)
    checkpoint = checkpoints.open_latest(say)
    if checkpoint is None:
        problem = Finding(
            rule="run-has-checkpoint", at=str(folder), problem="no checkpoint yet", advice="train it first"
        )
        raise FindingsError([problem])
    if checkpoint.folder != checkpoints.path(checkpoints.steps()[-1]):
        say(f"answering from step {checkpoint.facts.get('step')}, not from the newest checkpoint")
    if plan.run.keep_best and not newest:
        checkpoint = checkpoints.open_best(checkpoint, say)
    check_is_model(checkpoint, plan)
    model = build_for_inference(plan)
    tensors = checkpoint.allocate_tensors(MODEL)
    checkpoint.fill(tensors)
    model.load_state_dict({name.removeprefix(MODEL): value for name, value in tensors.items()})
    return model


def load_untrained(folder: Path, plan: Plan, say: Callable[[str], None]) -> Decoder:
    """The model of a Hugging Face checkpoint, or of a folder with imported weights that were never trained."""
    model = build_for_inference(plan)
    if load_initial_weights(folder, model):
        say(f"the imported weights in {folder / INITIAL}, before any training")
        return model
    for finding in read_hf(folder, model):
        say(str(finding))
    say(f"the checkpoint in {folder} as it is")
    return model


def build_for_inference(plan: Plan) -> Decoder:
    return build_model(plan.model, plan.mtp, dtype_of(plan), device_of(plan), _inference_options(plan))


def _inference_options(plan: Plan) -> Options:
    """The plan's options without those of a training step: no token is dropped, and GEMMs are in the weights' dtype."""
    return replace(
        options_of(plan),
        capacity_factor=None,
        recipe=None,
        recompute=(),
        activation_offload=(),
        activation_offload_layers=0,
        graphs=(),
        compile=False,
    )
