"""`threefold finetune`: a Hugging Face checkpoint and data become a plan for this machine, and the plan is trained."""

import argparse
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from types import FrameType
from typing import Any

from threefold.cli import train
from threefold.cli.command_line.inputs import (
    add_rope_scaling,
    missing_package,
    print_findings,
    say_too_small,
    sequence_length,
    share_of_one,
)
from threefold.engine.launch.stop_signals import STOP_SIGNALS, install_handlers
from threefold.engine.weights.base_checkpoint import check_same_checkpoint
from threefold.engine.weights.run_files import DRAFT, HF_CONFIG, TOKENIZER_FOLDER, write_longer_config
from threefold.findings import Finding, FindingsError
from threefold.machine.finetune.checkpoint_facts import checkpoint_facts, data_facts, validation_entries
from threefold.machine.finetune.plan_finetune import (
    FinetunePlan,
    Request,
    devices_here,
    plan_finetune,
    resume_finetune,
    words_of_finetune,
)
from threefold.plan.file import dump_fields, parse_overrides
from threefold.plan.parse import normalise
from threefold.plan.plan import Plan
from threefold.profile.readers.run_record import CONTRACT
from threefold.toml_file import load_toml


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="config.json with safetensors beside it")
    parser.add_argument("overrides", nargs="*", metavar="path=value", help="fields to override, such as job.lr=2e-5")
    parser.add_argument(
        "--data", action="append", required=True, metavar="FILE", help="file or folder to learn; may come several times"
    )
    parser.add_argument("--val", action="append", default=[], metavar="FILE", help="data to evaluate on")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank beside frozen weights")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="RUN",
        help="the run folder to make, or to resume",
    )
    parser.add_argument("--epochs", *_also("num-epochs", "num-train-epochs"), type=float, help="passes over the data")
    parser.add_argument("--learning-rate", *_also("lr"), type=float, metavar="LR", help="the peak (job.lr)")
    parser.add_argument(
        "--batch-size",
        *_also("global-batch-size"),
        type=int,
        metavar="N",
        help="sequences of a step",
    )
    parser.add_argument(
        "--warmup", *_also("warmup-steps", "warmup-ratio"), type=float, help="steps, or below 1 a share of them"
    )
    parser.add_argument(
        "--max-length",
        *_also("seq-len", "max-seq-length"),
        type=sequence_length,
        metavar="S",
        help="tokens of a sequence",
    )
    add_rope_scaling(parser)
    parser.add_argument("--field", metavar="NAME", help="the field of a record that holds its text (job.text_field)")
    parser.add_argument(
        "--max-bad-records",
        type=share_of_one,
        metavar="SHARE",
        help="of a file's records, how many may be skipped",
    )
    parser.add_argument(
        "--early-stopping", type=int, metavar="N", help="end after N evaluations without a lower loss; keeps the best"
    )
    parser.add_argument("--keep-best", action="store_true", help="keep the checkpoint of the lowest evaluation loss")
    parser.add_argument("--plan-only", action="store_true", help="show the plan and stop: nothing is written")
    parser.add_argument("--threads", type=int, help="CPU threads of a rank")
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="save and stop behind this step")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def _also(*names: str) -> tuple[str, ...]:
    return tuple(f"--{name}" for name in names)


def run(args: argparse.Namespace) -> int:
    if say_too_small(args, "finetune", {"threads": 1, "stop_at": 1, "batch_size": 1, "early_stopping": 1}):
        return 2
    if any(value is not None and not 0 < value < math.inf for value in (args.epochs, args.warmup)):
        print("threefold finetune: --epochs and --warmup are above 0", file=sys.stderr)
        return 2
    try:
        is_resumed = (args.out / DRAFT).is_file() and "job.data" in _draft_fields(args.out / DRAFT)
        if is_resumed:
            check_same_checkpoint(args.out, args.checkpoint)
        chosen = _plan(args, is_resumed)
        if args.plan_only and args.json:
            print(json.dumps({"ok": True, "plan": dump_fields(chosen.fields), "notes": list(chosen.notes)}, indent=2))
            return 0
        lines = [dump_fields(chosen.fields).rstrip(), *(f"# {note}" for note in chosen.notes)]
        print("\n".join(lines), file=sys.stderr if args.json else None, flush=True)
        if args.plan_only:
            return 0
        return _resume(args, chosen) if is_resumed else _import_and_train(args, chosen)
    except FindingsError as error:
        return print_findings(error.findings, args.json)
    except ModuleNotFoundError as error:
        return missing_package("finetune", error)


def _plan(args: argparse.Namespace, is_resumed: bool) -> FinetunePlan:
    if not is_resumed:
        _check_is_new(args.out)
    words, epochs = words_of_finetune(args.overrides)
    overrides, findings = parse_overrides([*_fields_of_flags(args), *words])
    given, more = normalise(overrides)
    if findings or more:
        raise FindingsError([*findings, *more])
    if "model" in given:
        problem, advice = f"the model is that of {args.checkpoint}", "leave it out, or give another checkpoint"
        raise FindingsError([Finding(rule="convertible", at="model", problem=problem, advice=advice)])
    data, val_data = data_facts(args.data), validation_entries(args.val)
    epochs = args.epochs or epochs
    share = args.warmup if args.warmup is not None and args.warmup < 1 else None
    request = Request(args.out, args.lora, val_data, given, epochs, share, args.rope_scaling)
    if is_resumed:
        return resume_finetune(_draft_fields(args.out / DRAFT), data, request, _count_sequences)
    return plan_finetune(checkpoint_facts(args.checkpoint), data, request, *devices_here(), _count_sequences)


def _draft_fields(path: Path) -> dict[str, Any]:
    raw, findings = load_toml(path)
    fields, more = normalise(raw)
    if findings or more:
        raise FindingsError([*findings, *more])
    return fields


def _count_sequences(plan: Plan) -> float:
    from threefold.engine.data.validation import check_data

    return check_data(plan)


def _fields_of_flags(args: argparse.Namespace) -> list[str]:
    """The flags of the command as overrides of plan fields; overrides that are written out come after them."""
    fields = {
        "job.lr": args.learning_rate,
        "job.global_batch": args.batch_size,
        "job.seq_len": args.max_length,
        "job.max_bad_records": args.max_bad_records,
        "job.warmup_steps": None if args.warmup is None or args.warmup < 1 else args.warmup,
        "run.early_stop": args.early_stopping,
        "run.keep_best": "true" if args.keep_best or args.early_stopping else None,
        "job.text_field": None if args.field is None else json.dumps(args.field),
    }
    return [f"{path}={value}" for path, value in fields.items() if value is not None]


def _resume(args: argparse.Namespace, chosen: FinetunePlan) -> int:
    """Train on in the folder. `train` compares plan and data with those of the run."""
    with tempfile.TemporaryDirectory() as aside:
        plan = Path(aside) / DRAFT
        plan.write_text(dump_fields(chosen.fields), encoding="utf-8")
        return train.run(_train_arguments(args, plan))


def _check_is_new(out: Path) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    is_run = (out / "plan.toml").exists()
    problem = "the folder holds a run that no finetuning began" if is_run else "the folder is not empty"
    problem = problem if out.is_dir() else "this is no folder"
    advice = "choose another --out folder"
    if is_run:
        advice = f"`threefold train {out}` resumes it"
    elif (out / DRAFT).exists():
        advice = f"`threefold train {out / DRAFT} --run {out}` starts from what was imported, or choose another folder"
    raise FindingsError([Finding(rule="convertible", at=str(out), problem=problem, advice=advice)])


def _import_and_train(args: argparse.Namespace, chosen: FinetunePlan) -> int:
    from threefold.engine.weights.claimed_folder import claimed_folder

    was_there, is_ours = args.out.exists(), False
    try:
        with install_handlers(dict.fromkeys(STOP_SIGNALS, _interrupt)), claimed_folder(args.out):
            is_ours = True
            _count_sequences(chosen.plan)  # raises what is wrong with the data, before weights are imported
            draft = _import(args, chosen, was_there)
        return train.run(_train_arguments(args, draft))
    finally:
        if is_ours and not (args.out / CONTRACT).exists():  # the run never started: the folder is left as it was
            _remove(args.out, keep_folder=was_there)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """An import is interrupted by an exception, so that what it has written is removed."""
    raise KeyboardInterrupt


def _remove(folder: Path, keep_folder: bool) -> None:
    if keep_folder and folder.is_dir():
        for path in folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)


def _import(args: argparse.Namespace, chosen: FinetunePlan, was_there: bool) -> Path:
    """Import the checkpoint into the run's folder; returns the plan that trains it, in the folder too."""
    from threefold.engine.weights.convert import AS_STORED, import_into

    for line in import_into(args.checkpoint, args.out, AS_STORED, None, was_there):
        print(line, file=sys.stderr)
    if args.rope_scaling is not None:
        write_longer_config(args.out / HF_CONFIG, args.out, chosen.plan.job.seq_len, args.rope_scaling)
    fields = {**chosen.fields, "model": f"hf:{(args.out / HF_CONFIG).resolve()}"}
    own = args.out / TOKENIZER_FOLDER
    if fields.get("job.tokenizer") == str(args.checkpoint.resolve()) and own.is_dir():
        fields["job.tokenizer"] = str(own.resolve())
    draft: Path = args.out / DRAFT
    draft.write_text(dump_fields(fields), encoding="utf-8")
    return draft


def _train_arguments(args: argparse.Namespace, draft: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    words = [str(draft), "--run", str(args.out)]
    words += ["--threads", str(args.threads)] if args.threads is not None else []
    words += ["--stop-at", str(args.stop_at)] if args.stop_at is not None else []
    words += ["--json"] if args.json else []
    return parser.parse_args(words)
