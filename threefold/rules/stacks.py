"""What the chosen stack can run. A warning here is an error where the plan is executed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from threefold.findings import Finding, shown
from threefold.plan.data_entries import file_exists, parse_entries, parse_validation
from threefold.plan.plan import Plan
from threefold.rules.base import rule
from threefold.spec.derived import DerivedModel
from threefold.spec.model import ModelSpec
from threefold.spec.stacks import LACKS, STACKS, engine_lacks
from threefold.units import format_many


@rule(severity="warning", rows="CF-ONE")
def stack_runs_family(plan: Plan) -> Iterator[Finding]:
    """The chosen stack has the model's family and every part of the model.

    Why: a plan can be checked and priced for a model that its target cannot train yet.
    Confirm: the family of the model in `threefold models`.
    Fix: another target, or wait for the family.
    """
    if plan.model.family in STACKS[plan.target].families or isinstance(plan.model, DerivedModel):
        parts = LACKS[plan.target](plan.model)
        yield from (Finding(at="model", problem=problem, advice=advice) for problem, advice in parts)
        return
    if plan.target == "megatron-bridge":  # bridge-trains-family
        return
    yield Finding(
        at="target",
        problem=f"{plan.target} does not train {plan.model.family} models yet",
        advice="the plan can be checked and shown; choose another target to run it",
    )


@rule(target="threefold")
def mtp_with_one_residual_stream(plan: Plan) -> Iterator[Finding]:
    """MTP depths belong to models with one residual stream.

    Why: a depth joins an embedding with one hidden state. transformers, which the engine follows, defines no depth of a
        model with several streams (DeepSeek-V4), and passes the weights of one over.
    Confirm: `threefold models NAME`: streams.
    Fix: train without.
    """
    if plan.mtp and plan.model.streams is not None:
        problem = f"{plan.mtp} MTP depths with the {plan.model.streams.count} residual streams of {plan.model.name}"
        yield Finding(at="job.mtp", problem=problem, fix={"job.mtp": 0})


@rule(severity="warning")
def stack_runs_chip(plan: Plan) -> Iterator[Finding]:
    """The chip is one that the stack was run on.

    Why: both stacks are written for NVIDIA's GPUs. On others a plan can be priced from the figures of the data sheet,
        but kernels and dispatchers were never run there.
    Confirm: the architecture in the chip file.
    Fix: another chip; or a fork of the stack for this one, and a measurement of your own.
    """
    if plan.chip.architecture == "cdna3":
        problem = f"{plan.target} was never run on {plan.chip.name} ({plan.chip.architecture})"
        yield Finding(at="cluster.chip", problem=problem, advice="take the estimate for a bound, and measure there")


_NOT_YET = {
    "fp8_params": False,
    "fp8_attention": False,
}
_MOMENTS_NEED_SCALES = ("fp16", "fp8")
# What the engine does in one way only: its default, and that way.
_NO_CHOICE: dict[str, tuple[object, str]] = {
    "permute_fusion": (True, "its kernels permute in one pass"),
    "loss_fusion": (True, "a chunk of logits becomes its loss and gradient at once"),
    "router_dtype": ("fp32", "routers compute in fp32"),
    "router_padding": (False, "experts get the rows that they have"),
}


@rule(severity="warning", rows="CF-ONE", target="threefold")
def engine_has_knob(plan: Plan) -> Iterator[Finding]:
    """The threefold engine has the knobs the plan turns.

    Why: some forms of FP8 are planned and priced, not built. Moments in FP8 or fp16 need scales of their own: squares
        of gradients are below the smallest number of either format, and become 0.
    Confirm: the names in the message.
    Fix: put them back to their defaults; moments in bf16.
    """
    if plan.knobs.optimizer_dtype in _MOMENTS_NEED_SCALES:
        problem = f"the engine has no scales for moments in {plan.knobs.optimizer_dtype}"
        yield Finding(at="knobs.optimizer_dtype", problem=problem, fix={"knobs.optimizer_dtype": "bf16"})
    if plan.knobs.precision == "fp8-tensor":
        problem = "the engine has no delayed scaling (fp8-tensor)"
        yield Finding(at="knobs.precision", problem=problem, fix={"knobs.precision": "fp8-cs"})
    for name, off in _NOT_YET.items():
        if getattr(plan.knobs, name) != off:
            problem = f"the engine has no {name} yet"
            yield Finding(at=f"knobs.{name}", problem=problem, fix={f"knobs.{name}": None})


@rule(severity="warning", target="threefold")
def engine_has_a_choice(plan: Plan) -> Iterator[Finding]:
    """Knobs of what the threefold engine does in one way only are left alone.

    Why: they change nothing there, and their prices are those of other stacks; a run goes its one way all the same.
    Confirm: the names in the message.
    Fix: put them back to their defaults.
    """
    for name, (default, way) in _NO_CHOICE.items():
        if getattr(plan.knobs, name) != default:
            problem = f"the engine has no choice of {name}: {way}"
            yield Finding(at=f"knobs.{name}", problem=problem, fix={f"knobs.{name}": None})


@rule(severity="warning", rows="OP-GAF", target="threefold")
def grad_accum_fusion_takes_effect(plan: Plan) -> Iterator[Finding]:
    """Fused gradient accumulation is asked for where the threefold engine can do it.

    Why: FSDP reduces the gradients that autograd makes; there each weight gradient is made in sixteen bits before it is
        added. The engine goes without the fusion in silence unless a plan states it.
    Confirm: knobs.grad_accum_fusion beside knobs.data_parallel.
    Fix: delete the line, or go without what keeps the fusion off.
    """
    if "knobs.grad_accum_fusion" not in plan.stated or not plan.knobs.grad_accum_fusion:
        return
    if plan.knobs.data_parallel != "zero1":
        yield Finding(
            at="knobs.grad_accum_fusion",
            problem=f"the fusion is off with {plan.knobs.data_parallel}",
            advice="delete the line: nothing changes",
        )


@rule(severity="warning", rows="EX-DROP", target="threefold")
def engine_has_capacity(plan: Plan) -> Iterator[Finding]:
    """The threefold engine drops by expert, in microbatches of one length.

    Why: a capacity per rank is the room in the exchanges of a graph of the whole microbatch with EP, which needs fixed
        sizes; what does not fit runs without the graph, and nothing is dropped. Elsewhere exchanges are as large as
        their rows. Where a microbatch is spread over TP x CP, which token came first is known only at full length.
    Confirm: job.capacity_scope with knobs.graphs and layout.ep; job.dynamic_length.
    Fix: no capacity, which is what runs; full sequences.
    """
    job = plan.job
    if job.capacity_factor is None:
        return
    if job.capacity_scope == "rank":
        if plan.block_factor is None:
            problem = "a capacity per rank without a graph of full_iteration over EP has no effect: nothing is dropped"
            fix = {"job.capacity_factor": None, "job.capacity_scope": None}
            yield Finding(at="job.capacity_scope", problem=problem, fix=fix)
    elif job.dynamic_length and plan.layout.tp * plan.layout.cp > 1:
        problem = "capacity with dynamic lengths over TP x CP"
        yield Finding(at="job.dynamic_length", problem=problem, fix={"job.dynamic_length": None})


def target_for(model: ModelSpec) -> tuple[str, str]:
    """The stack to plan for where nobody names one, and why. Our engine runs on every chip that is known."""
    lacks = [problem for problem, _ in engine_lacks(model)]
    if not lacks:
        return "threefold", f"our engine trains {model.family} models"
    return "megatron-bridge", f"{lacks[0]} ({model.name})"


ENGINE_LIMITS = (
    "stack-runs-family",
    "engine-has-knob",
    "engine-has-capacity",
    "engine-has-graphs",
)


BRIDGE_LIMITS = ("stack-runs-family", "dispatcher-supports-chip", "tp-overlap-stays-on")
LIMITS = {"threefold": ENGINE_LIMITS, "megatron-bridge": BRIDGE_LIMITS}


def promoted(findings: list[Finding], target: str = "threefold") -> list[Finding]:
    """Findings as the stack sees them: what it cannot run, or runs otherwise, is an error where a plan is executed."""
    return [replace(f, severity="error") if f.rule in LIMITS[target] else f for f in findings]


BYTE_MODEL_VOCAB = 1024  # no published tokenizer is smaller; the demo models have 512
SHORTEST = 8  # tokens; below it a sequence has next to no context to learn from


@rule(severity="warning")
def data_exists(plan: Plan) -> Iterator[Finding]:
    """The files and folders that `job.data`, `job.val_data` and `job.tokenizer` name are here.

    Why: a run opens them when its ranks have started, and ends there. Relative paths are those of the folder that the
        command is given in, as in `train`; on a cluster that is the folder that the job starts in.
    Confirm: list the paths from that folder.
    Fix: correct the path, give a full one, or make the data (`threefold tokenize`).
    """
    job = plan.job
    validation = tuple(parse_validation(job.val_data).values())
    advice = f"correct the path (relative ones begin in {Path.cwd()}), or make it with `threefold tokenize`"
    for at, data in (("job.data", job.data), ("job.val_data", validation)):
        missing = [entry.name for entry in parse_entries(data) if not entry.exists]
        if missing:
            yield Finding(at=at, problem=f"not here: {', '.join(map(shown, missing))}", advice=advice)
    if job.tokenizer is not None and not file_exists(job.tokenizer):
        yield Finding(at="job.tokenizer", problem=f"not here: {shown(job.tokenizer)}", advice="correct the path")


@rule(severity="warning", target="threefold")
def text_has_a_tokenizer(plan: Plan) -> Iterator[Finding]:
    """Text for a model with a vocabulary of more than bytes is encoded with the model's tokenizer.

    Why: without `job.tokenizer` a token of text is a byte. A model that was trained with a tokenizer of its own takes
        these numbers for other words, and a new one would use 260 rows of its embedding.
    Confirm: the vocabulary in the message; shards carry their tokenizer with them and need no job.tokenizer.
    Fix: name the tokenizer.json, or its folder, in job.tokenizer.
    """
    if plan.job.tokenizer is not None or plan.model.vocab <= BYTE_MODEL_VOCAB:
        return
    texts = [entry.name for entry in parse_entries(plan.job.data) if entry.is_text]
    if texts:
        problem = f"{', '.join(map(shown, texts))} would be encoded as bytes, for a vocabulary of {plan.model.vocab}"
        yield Finding(at="job.tokenizer", problem=problem, advice="name the model's tokenizer.json, or its folder")


@rule(severity="warning", target="threefold")
def validation_data_is_used(plan: Plan) -> Iterator[Finding]:
    """Validation data is named where a run evaluates.

    Why: run.eval_every says how often a run evaluates, and 0, its default, is never: the data is not even opened.
    Confirm: job.val_data beside run.eval_every.
    Fix: set run.eval_every, or delete job.val_data.
    """
    if plan.job.val_data is not None and not plan.run.eval_every:
        every = max(1, plan.job.steps // 10)
        yield Finding(
            at="run.eval_every", problem="job.val_data is named and never used", fix={"run.eval_every": every}
        )


@rule(target="threefold")
def best_needs_evaluations(plan: Plan) -> Iterator[Finding]:
    """A run that stops early, or keeps its best checkpoint, evaluates.

    Why: both go by the evaluation loss. Without evaluations the run goes to its last step and keeps the newest.
    Confirm: run.early_stop or run.keep_best with run.eval_every = 0.
    Fix: set run.eval_every, best with validation data (job.val_data).
    """
    asked = [f"run.{name}" for name in ("early_stop", "keep_best") if getattr(plan.run, name)]
    if asked and not plan.run.eval_every:
        problem = f"{' and '.join(asked)} without evaluations, by whose loss to go"
        yield Finding(at="run.eval_every", problem=problem, fix={"run.eval_every": max(1, plan.job.steps // 10)})


@rule(severity="warning")
def sequence_has_context(plan: Plan) -> Iterator[Finding]:
    """A sequence is long enough to learn from.

    Why: each token is predicted from those before it; in a sequence of a few tokens there are next to none, and the
        first one is never predicted at all. A length like that is most often a slip: 4 for 4096, or thousands.
    Confirm: job.seq_len.
    Fix: the length that was meant, usually 4096 or more.
    """
    if plan.job.seq_len < SHORTEST:
        problem = f"sequences of {format_many(plan.job.seq_len, 'token')} are too short to train on"
        yield Finding(at="job.seq_len", problem=problem, advice="write tokens: 4096, or 32K for 32768")
