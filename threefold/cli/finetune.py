"""`threefold finetune`: a Hugging Face checkpoint and data become a plan for this machine, and the plan is trained."""

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from types import FrameType

from threefold.api.finetunings import NewRun, count_sequences, import_checkpoint, is_begun, plan_finetuning
from threefold.cli import train
from threefold.cli.command_line.inputs import (
    add_rope_scaling,
    refuse_too_small,
    sequence_length,
    share_of_one,
)
from threefold.cli.command_line.out import UsageError, print_json
from threefold.engine.weights.run_files import DRAFT
from threefold.findings import FindingsError
from threefold.launch.stop_signals import STOP_SIGNALS, install_handlers
from threefold.machine.finetune.checkpoint_facts import validation_entries
from threefold.machine.finetune.plan_finetune import (
    FinetunePlan,
    Request,
    words_of_finetune,
)
from threefold.plan.file import dump_fields, parse_overrides


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
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="save and stop after this step")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def _also(*names: str) -> tuple[str, ...]:
    return tuple(f"--{name}" for name in names)


def run(args: argparse.Namespace) -> int:
    refuse_too_small(args, {"threads": 1, "stop_at": 1, "batch_size": 1, "early_stopping": 1})
    if any(value is not None and not 0 < value < math.inf for value in (args.epochs, args.warmup)):
        raise UsageError("--epochs and --warmup are above 0")
    is_resumed = is_begun(args.out)
    chosen = _plan(args)
    if args.plan_only and args.json:
        print_json({"ok": True, "plan": dump_fields(chosen.fields), "notes": list(chosen.notes)})
        return 0
    lines = [dump_fields(chosen.fields).rstrip(), *(f"# {note}" for note in chosen.notes)]
    print("\n".join(lines), file=sys.stderr if args.json else None, flush=True)
    if args.plan_only:
        return 0
    return _resume(args, chosen) if is_resumed else _import_and_train(args, chosen)


def _plan(args: argparse.Namespace) -> FinetunePlan:
    words, epochs = words_of_finetune(args.overrides)
    overrides, findings = parse_overrides([*_fields_of_flags(args), *words])
    if findings:
        raise FindingsError(findings)
    share = args.warmup if args.warmup is not None and args.warmup < 1 else None
    held_back = validation_entries(args.val)
    request = Request(args.out, args.lora, held_back, overrides, args.epochs or epochs, share, args.rope_scaling)
    return plan_finetuning(args.checkpoint, args.data, request)


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


def _import_and_train(args: argparse.Namespace, chosen: FinetunePlan) -> int:
    with NewRun(args.out) as new:
        with install_handlers(dict.fromkeys(STOP_SIGNALS, _interrupt)), new.claimed() as was_there:
            count_sequences(chosen.plan)  # raises what is wrong with the data, before weights are imported
            draft = _import(args, chosen, was_there)
        return train.run(_train_arguments(args, draft))


def _interrupt(number: int, frame: FrameType | None) -> None:
    """An import is interrupted by an exception, so that what it has written is removed."""
    raise KeyboardInterrupt


def _import(args: argparse.Namespace, chosen: FinetunePlan, was_there: bool) -> Path:
    def say(line: str) -> None:
        print(line, file=sys.stderr)

    return import_checkpoint(args.checkpoint, chosen, args.out, was_there, args.rope_scaling, say)


def _train_arguments(args: argparse.Namespace, draft: Path) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    words = [str(draft), "--run", str(args.out)]
    words += ["--threads", str(args.threads)] if args.threads is not None else []
    words += ["--stop-at", str(args.stop_at)] if args.stop_at is not None else []
    words += ["--json"] if args.json else []
    return parser.parse_args(words)
