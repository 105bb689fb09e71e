"""Writes the plan of `threefold finetune`: settings that follow from the checkpoint, the data and this machine.

The learning rate follows the size of the model, the number of steps the size of the data, and the first set of memory
settings that passes every rule, the predicted peak among them, is taken. What the user overrides is never changed.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from threefold.cost.estimate import estimate
from threefold.engine.weights.run_files import HF_CONFIG, TOKENIZER_FOLDER
from threefold.findings import Finding, FindingsError, shown
from threefold.machine.finetune.checkpoint_facts import CheckpointFacts, DataFacts
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.plan.ranks import host_memory_bytes
from threefold.plan.words import EPOCH_WORDS, looked_up
from threefold.rules.all import check, errors, judge, promoted
from threefold.rules.stacks import text_has_a_tokenizer
from threefold.spec.chips import CHIPS, chip_of_device
from threefold.spec.longer_context import check_positions
from threefold.spec.params import count_params
from threefold.units import format_many

Fields = dict[str, Any]
MAX_LENGTH = {"cpu": 1024}  # tokens of a sequence that are chosen at most; a user may ask for more
MAX_LENGTH_GPU = 4096
MAX_BATCH = 16  # sequences
LEAST_STEPS = 50  # that a small data set is cut into, by smaller batches
EPOCHS = {True: 3, False: 1}  # of answers, of text
BYTES_A_TOKEN = 4  # of published tokenizers on English text, about; only steps are counted by it
RECORDS_TO_SPLIT = 500  # fewer give too few for an evaluation
EVALUATIONS, MIN_EVAL_BATCHES, MAX_EVAL_BATCHES = 10, 8, 256
# Learning rates: 1e-5 is what published fine-tunings of models with some billion parameters use; small models take
# more, by the inverse square root of their size. Adapters take ten times as much as the weights themselves.
LR, LR_PARAMETERS, MAX_LR = 1e-5, 3e9, 3e-4
LORA_FACTOR, MIN_LORA_LR, MAX_LORA_LR = 10, 1e-4, 1e-3


@dataclass(frozen=True, slots=True)
class Request:
    """What the user asked for."""

    run: Path
    lora_rank: int | None = None
    val_data: tuple[str, ...] = ()
    overrides: Mapping[str, Any] | None = None
    epochs: float | None = None  # passes over the data; None: as many as suit its kind
    warmup_share: float | None = None  # of the steps
    rope_scaling: str | None = None  # how positions reach longer sequences; None: the checkpoint's do


@dataclass(frozen=True, slots=True)
class FinetunePlan:
    """The plan, the fields that it was made of, and what a user should know about them."""

    plan: Plan
    fields: Fields
    notes: tuple[str, ...]


def words_of_finetune(overrides: Sequence[str]) -> tuple[list[str], float | None]:
    """The overrides without those that count epochs, and the epochs; the batch under the names of other trainers.

    A plan counts steps, and leaves open which batch is meant: here the data is known, and a batch is that of a step.
    """
    words, epochs = [], None
    for override in overrides:
        name, _, value = override.partition("=")
        _, name = looked_up(name.strip())
        if name in EPOCH_WORDS:
            try:
                epochs = float(value)
            except ValueError:
                epochs = math.nan
            if not 0 < epochs < math.inf:
                problem, advice = f"{shown(value)} is no number above 0", "write epochs=3, or --epochs 3"
                raise FindingsError([Finding(rule="wrong-type", at=name, problem=problem, advice=advice)])
        else:
            words.append(f"job.global_batch={value}" if name == "batch_size" else override)
    return words, epochs


CountSequences = Callable[[Plan], float]


def plan_finetune(
    checkpoint: CheckpointFacts,
    data: DataFacts,
    request: Request,
    chip: str,
    gpus: int,
    memory_bytes: int,
    count_sequences: CountSequences | None = None,
) -> FinetunePlan:
    """The plan for `gpus` devices of this machine. Raises the findings of the last try where nothing fits.

    `count_sequences` opens the data of a plan and counts the sequences of an epoch: where epochs are asked for, the
    steps are exactly as many.
    """
    chosen = _plan_by_size(checkpoint, data, request, chip, gpus, memory_bytes)
    overrides = dict(request.overrides or {})
    if request.epochs is None or "job.steps" in overrides or count_sequences is None:
        return chosen
    sequences, job = count_sequences(chosen.plan), chosen.plan.job
    num_steps = _steps(request.epochs, sequences, chosen.plan)
    fixed = {"job.global_batch": job.global_batch, "job.seq_len": job.seq_len, "job.steps": num_steps}
    request = replace(request, overrides={**overrides, **fixed})
    exact = _plan_by_size(checkpoint, data, request, chip, gpus, memory_bytes)
    steps = format_many(num_steps, "step")
    epochs = "1 epoch" if request.epochs == 1 else f"{request.epochs:g} epochs"
    counted = f"{steps} of {exact.plan.tokens_per_step:,} tokens: {epochs} of {sequences:,.0f} sequences"
    return replace(exact, notes=(*exact.notes[:-1], counted))


def _steps(epochs: float, sequences: float, plan: Plan) -> int:
    return max(1, math.ceil(epochs * sequences / plan.job.global_batch))


def resume_finetune(draft: Fields, data: DataFacts, request: Request, count_sequences: CountSequences) -> FinetunePlan:
    """The plan of a run that the same command began, by the draft in its folder: what was chosen then stays."""
    fields = dict(draft)
    config, tokenizer = request.run / HF_CONFIG, request.run / TOKENIZER_FOLDER  # where the folder is by now
    fields |= {"model": f"hf:{config.resolve()}", "job.data": _data_field(data)}
    fields |= {"job.tokenizer": str(tokenizer.resolve())} if tokenizer.is_dir() else {}
    fields |= {"job.val_data": list(request.val_data)} if request.val_data else {}
    fields |= {} if request.lora_rank is None else {"job.lora_rank": request.lora_rank}
    overrides = dict(request.overrides or {})
    plan = _parsed(fields | overrides)
    if request.epochs is not None and "job.steps" not in overrides:
        fields["job.steps"] = _steps(request.epochs, count_sequences(plan), plan)
    if request.warmup_share is not None:
        fields["job.warmup_steps"] = _warmup_steps(int((fields | overrides)["job.steps"]), request.warmup_share)
    fields |= overrides
    return FinetunePlan(_parsed(fields), fields, (f"the run in {request.run} resumes",))


def _parsed(fields: Fields) -> Plan:
    parsed = parse(fields)
    if parsed.plan is None:
        raise FindingsError(parsed.findings)
    return parsed.plan


def _plan_by_size(
    checkpoint: CheckpointFacts, data: DataFacts, request: Request, chip: str, gpus: int, memory_bytes: int
) -> FinetunePlan:
    common = {**_of_checkpoint(checkpoint, request, chip), "cluster.chip": chip, "cluster.gpus": gpus}
    overrides = dict(request.overrides or {})
    refused: Plan | None = None
    tight: FinetunePlan | None = None  # the smallest plan that no rule refuses, though its peak is near the memory
    for memory in memory_settings(checkpoint, chip, gpus):
        fields = {**common, **memory}
        fields = {**fields, **_of_data(checkpoint, data, request, {**fields, **overrides}), **overrides}
        plan = _parsed(fields)
        if request.rope_scaling is None:
            check_positions(checkpoint.max_len, plan.job.seq_len)
        _check_text_has_tokenizer(plan)
        measured = plan.on_chip(replace(CHIPS[chip], memory_bytes=memory_bytes)) if chip == "cpu" else plan
        if errors(promoted(judge(measured))):
            refused = measured
            continue
        tight = FinetunePlan(plan, fields, tuple(_notes(checkpoint, data, plan, request.rope_scaling)))
        if estimate(measured).fits:
            return tight
    if tight is None:
        assert refused is not None
        raise FindingsError(errors(promoted(check(refused, notes=False))))
    return replace(tight, notes=(*tight.notes, "memory is tight: the predicted peak is near what the device has"))


def checkpoint_plan(checkpoint: CheckpointFacts, chip: str) -> Plan:
    """The plan that a checkpoint is measured by as it is: precision, tokenizer and length as if it were finetuned."""
    request = Request(checkpoint.folder)
    limit = MAX_LENGTH.get(chip, MAX_LENGTH_GPU)
    length = min(limit, checkpoint.max_len or limit)
    fields = {**_of_checkpoint(checkpoint, request, chip), "cluster.chip": chip, "job.seq_len": length}
    return _parsed(fields)


def _check_text_has_tokenizer(plan: Plan) -> None:
    """Raise where text would be encoded as bytes for a checkpoint that was trained on other tokens."""
    found = [replace(finding, severity="error", rule="text-has-a-tokenizer") for finding in text_has_a_tokenizer(plan)]
    if found:
        raise FindingsError(found)


def _of_checkpoint(checkpoint: CheckpointFacts, request: Request, chip: str) -> Fields:
    fields: Fields = {
        "model": f"hf:{checkpoint.folder.resolve() / 'config.json'}",
        "target": "threefold",
        "job.lr": learning_rate(count_params(checkpoint.spec).total, request.lora_rank is not None),
        "job.weight_decay": 0.0,
        # On a CPU fp32 is as fast as bf16, and holds every stored dtype exactly.
        "knobs.precision": "fp32" if chip == "cpu" else "bf16",
    }
    if checkpoint.has_tokenizer:
        fields["job.tokenizer"] = str(checkpoint.folder.resolve())
    if checkpoint.spec.mtp_layers and not checkpoint.has_mtp:
        fields["job.mtp"] = 0
    if checkpoint.spec.moe and checkpoint.spec.moe.balance_bias:
        fields["job.bias_rate"] = 0.0  # as at the end of pretraining: DeepSeek-V3 technical report, section 4.2
    if request.lora_rank is not None:
        fields["job.lora_rank"] = request.lora_rank
    return fields


def learning_rate(num_parameters: float, is_lora: bool) -> float:
    rate = min(MAX_LR, max(LR, LR * math.sqrt(LR_PARAMETERS / num_parameters)))
    rate = min(MAX_LORA_LR, max(MIN_LORA_LR, LORA_FACTOR * rate)) if is_lora else rate
    return float(f"{rate:.1e}")


def _of_data(checkpoint: CheckpointFacts, data: DataFacts, request: Request, chosen: Fields) -> Fields:
    """Task, length, batch, steps and intervals. `chosen` has what is settled: dp, the length, the user's fields."""
    limit = MAX_LENGTH.get(chosen["cluster.chip"], MAX_LENGTH_GPU)
    length = int(chosen.get("job.seq_len", min(limit, checkpoint.max_len or limit)))
    num_tokens = _num_tokens(checkpoint, data)
    epochs = EPOCHS[data.has_answers] if request.epochs is None else request.epochs
    sequences = max(1.0, epochs * num_tokens / length)
    least = int(chosen["cluster.gpus"])  # of a batch: each data-parallel rank has a sequence
    wanted = max(1, min(MAX_BATCH, int(sequences / LEAST_STEPS)))
    batch = int(chosen.get("job.global_batch", least * max(1, 2 ** int(math.log2(max(1.0, wanted / least))))))
    steps = int(chosen.get("job.steps", max(1, math.ceil(sequences / batch))))
    evaluates = request.val_data or (data.num_records or 0) >= RECORDS_TO_SPLIT
    return {
        "job.task": "sft" if data.has_answers else "pretrain",
        "job.data": _data_field(data),
        "job.seq_len": length,
        "job.global_batch": batch,
        "job.steps": steps,
        "job.warmup_steps": _warmup_steps(steps, request.warmup_share),
        "run.save_every": min(500, max(10, steps // 5)),
        **(_evaluation(steps, batch) if evaluates else {}),
        **({"job.val_data": list(request.val_data)} if request.val_data else {}),
    }


def _data_field(data: DataFacts) -> str | list[str]:
    return data.entries[0] if len(data.entries) == 1 else list(data.entries)


def _warmup_steps(steps: int, share: float | None) -> int:
    return min(100, max(1, steps // 30)) if share is None else round(share * steps)


def _evaluation(steps: int, batch: int) -> Fields:
    """Ten evaluations, which together take about a twentieth of the time: a forward is a third of a training step."""
    batches = min(MAX_EVAL_BATCHES, max(MIN_EVAL_BATCHES, round(0.05 * steps * batch * 3 / EVALUATIONS)))
    return {"run.eval_every": max(1, steps // EVALUATIONS), "run.eval_batches": batches}


def _num_tokens(checkpoint: CheckpointFacts, data: DataFacts) -> float:
    return data.num_tokens + data.num_bytes / (BYTES_A_TOKEN if checkpoint.has_tokenizer else 1)


def memory_settings(checkpoint: CheckpointFacts, chip: str, gpus: int) -> Iterator[Fields]:
    """Layouts and knobs to try, the fastest first and the smallest last."""
    layout: Fields = {"job.packing": True}
    experts = checkpoint.spec.num_experts
    if gpus > 1 and experts:
        layout["layout.ep"] = max(degree for degree in range(1, gpus + 1) if gpus % degree == experts % degree == 0)
    fast = {} if chip == "cpu" else {"knobs.expert_fusion": True}
    some, full = {"knobs.recompute": ["layernorm", "moe_act"]}, {"knobs.recompute": ["full"]}
    small = {"knobs.optimizer_dtype": "bf16"}
    offload = {"knobs.optimizer_offload": 1.0}
    ladder: list[Fields] = [{**fast}, {}, some, full, {**full, **small}, {**full, **offload}]
    if gpus > 1:
        ladder += [{**full, "knobs.data_parallel": "fsdp"}, {**full, **small, "knobs.data_parallel": "fsdp"}]
    yield from ({**layout, **one} for one in ladder)
    yield {**layout, "job.packing": False}
    for length in (2048, 1024, 512):
        if chip != "cpu" and length < (checkpoint.max_len or MAX_LENGTH_GPU):
            yield {**layout, **full, **offload, "job.seq_len": length}


def _notes(checkpoint: CheckpointFacts, data: DataFacts, plan: Plan, rope_scaling: str | None) -> Iterator[str]:
    if rope_scaling is not None and checkpoint.max_len is not None and plan.job.seq_len > checkpoint.max_len:
        scaling = "" if rope_scaling == "none" else f", rotary positions by {rope_scaling}"
        reach = f"{checkpoint.max_len} to {plan.job.seq_len}{scaling}"
        yield f"max_position_embeddings of the run and of its export goes from {reach}"
    if checkpoint.dtype in ("F32", "F64", "F16") and plan.knobs.precision != "fp32":
        yield f"the checkpoint is in {checkpoint.dtype}; its weights are rounded to {plan.knobs.precision} here"
    if not checkpoint.has_tokenizer:
        yield "the checkpoint has no tokenizer.json: text is read as one token a byte; give job.tokenizer=FILE"
    if checkpoint.spec.mtp_layers and plan.mtp == 0:
        yield "the checkpoint has no weights of multi-token prediction: none is trained"
    if plan.run.eval_every == 0:
        yield "nothing is held out for evaluation: give --val FILE"
    if checkpoint.has_tokenizer and not checkpoint.has_template and plan.job.task == "sft":
        yield "the tokenizer has no chat template: conversations are written in ChatML"
    epochs = plan.job.steps * plan.tokens_per_step / max(1.0, _num_tokens(checkpoint, data))
    about = f"{epochs:.0f}" if epochs >= 10 else f"{epochs:.2g}"
    steps = format_many(plan.job.steps, "step")
    yield f"{steps} of {plan.tokens_per_step:,} tokens: about {about} epochs, by the data's size"


def devices_here() -> tuple[str, int, int]:
    """The chip that torch sees on this machine, how many of it, and the memory of one; else the CPU. Loads torch."""
    from threefold.engine.tune.runnable_kernels import local_gpus

    gpus = local_gpus()
    if not gpus:
        return "cpu", 1, host_memory_bytes()
    name, memory_bytes, _ = gpus[0]
    chip = chip_of_device(name)
    if chip is None:
        known = ", ".join(sorted(set(CHIPS) - {"cpu"}))
        problem, advice = f"this machine has {name}, of which no figures are known", f"known are {known}"
        raise FindingsError([Finding(rule="ranks-start-here", at="cluster.chip", problem=problem, advice=advice)])
    return chip.name, len(gpus), memory_bytes
