"""`threefold finetune`: a Hugging Face checkpoint and data become a plan for this machine, and the plan is trained."""

import argparse
import json
import shutil
import sys
from pathlib import Path
from types import FrameType

from threefold.cli import train
from threefold.cli.command_line.inputs import missing_package, print_findings, say_too_small
from threefold.engine.launch.stop_signals import STOP_SIGNALS, install_handlers
from threefold.engine.weights.run_files import DRAFT, HF_CONFIG, TOKENIZER_FOLDER
from threefold.findings import Finding, FindingsError
from threefold.machine.finetune.checkpoint_facts import checkpoint_facts, data_facts, validation_entries
from threefold.machine.finetune.plan_finetune import FinetunePlan, Request, devices_here, plan_finetune
from threefold.plan.file import dump_fields, parse_overrides
from threefold.plan.parse import normalise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="config.json with safetensors beside it")
    parser.add_argument("overrides", nargs="*", metavar="path=value", help="fields to override, such as job.lr=2e-5")
    parser.add_argument(
        "--data", action="append", required=True, metavar="FILE", help="file or folder to learn; may come several times"
    )
    parser.add_argument("--val", action="append", default=[], metavar="FILE", help="data to evaluate on")
    parser.add_argument("--lora", type=int, metavar="RANK", help="train adapters of this rank beside frozen weights")
    parser.add_argument("--out", type=Path, required=True, metavar="RUN", help="the run folder to make")
    parser.add_argument("--plan-only", action="store_true", help="show the plan and stop: nothing is written")
    parser.add_argument("--threads", type=int, help="CPU threads of a rank")
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="save and stop behind this step")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    if say_too_small(args, "finetune", {"threads": 1, "stop_at": 1}):
        return 2
    try:
        chosen = _plan(args)
        if args.plan_only and args.json:
            print(json.dumps({"ok": True, "plan": dump_fields(chosen.fields), "notes": list(chosen.notes)}, indent=2))
            return 0
        lines = [dump_fields(chosen.fields).rstrip(), *(f"# {note}" for note in chosen.notes)]
        print("\n".join(lines), file=sys.stderr if args.json else None, flush=True)
        return 0 if args.plan_only else _import_and_train(args, chosen)
    except FindingsError as error:
        return print_findings(error.findings, args.json)
    except ModuleNotFoundError as error:
        return missing_package("finetune", error)


def _plan(args: argparse.Namespace) -> FinetunePlan:
    _check_is_new(args.out)
    overrides, findings = parse_overrides(args.overrides)
    given, more = normalise(overrides)
    if findings or more:
        raise FindingsError([*findings, *more])
    if "model" in given:
        problem, advice = f"the model is that of {args.checkpoint}", "leave it out, or give another checkpoint"
        raise FindingsError([Finding(rule="convertible", at="model", problem=problem, advice=advice)])
    chip, gpus, memory_bytes = devices_here()
    data = data_facts(args.data)
    request = Request(args.out, args.lora, validation_entries(args.val), given)
    return plan_finetune(checkpoint_facts(args.checkpoint), data, request, chip, gpus, memory_bytes)


def _check_is_new(out: Path) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    is_run = (out / "plan.toml").exists()
    problem = "the folder holds a run already" if is_run else "the folder is not empty"
    problem = problem if out.is_dir() else "this is no folder"
    advice = "choose another --out folder"
    if is_run:
        advice = f"`threefold train {out}` goes on with it"
    elif (out / DRAFT).exists():
        advice = f"`threefold train {out / DRAFT} --run {out}` starts from what was imported, or choose another folder"
    raise FindingsError([Finding(rule="convertible", at=str(out), problem=problem, advice=advice)])


def _import_and_train(args: argparse.Namespace, chosen: FinetunePlan) -> int:
    from threefold.engine.data.validation import check_data
    from threefold.engine.run.folder import CONTRACT
    from threefold.engine.weights.claimed_folder import claimed_folder

    was_there, is_ours = args.out.exists(), False
    try:
        with install_handlers(dict.fromkeys(STOP_SIGNALS, _interrupt)), claimed_folder(args.out):
            is_ours = True
            check_data(chosen.plan)
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
