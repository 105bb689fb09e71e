"""Finetuning from the library and from `threefold finetune`: a checkpoint and data become a plan, which is trained.

Torch loads with the functions that look at the machine or at weights.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from threefold.api.trainings import train
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
)
from threefold.plan.file import dump_fields, read_plan
from threefold.plan.parse import normalize
from threefold.plan.plan import Plan
from threefold.profile.readers.run_record import CONTRACT, RunRecord
from threefold.toml_file import load_toml


def finetune(
    checkpoint: str | Path,
    data: str | Path | Sequence[str | Path],
    out: str | Path,
    fields: Mapping[str, Any] | None = None,
    lora: int | None = None,
    val: Sequence[str | Path] = (),
    epochs: float | None = None,
    rope_scaling: str | None = None,
    threads: int | None = None,
    stop_at: int | None = None,
    say: Callable[[str], None] | None = None,
) -> RunRecord:
    """Train a Hugging Face checkpoint on data of your own in the folder `out`, or resume the run there.

    The plan is made for this machine; `fields` of a plan override it, such as {"job.lr": 2e-5}. `lora` is the rank of
    adapters; without it all weights are trained. `say` gets the lines of one rank. Raises what is refused.
    """
    source, run = Path(checkpoint), Path(out)
    entries = [str(each) for each in ([data] if isinstance(data, str | Path) else data)]
    held_back = validation_entries([str(each) for each in val])
    request = Request(run, lora, held_back, dict(fields or {}), epochs, None, rope_scaling)
    chosen = plan_finetuning(source, entries, request)
    tell = say or (lambda line: None)
    if is_begun(run):
        with tempfile.TemporaryDirectory() as aside:
            draft = Path(aside) / DRAFT
            draft.write_text(dump_fields(chosen.fields), encoding="utf-8")
            return train(_plan_of(draft), run, threads=threads, stop_at=stop_at, say=say)
    with NewRun(run) as new:
        with new.claimed() as was_there:
            count_sequences(chosen.plan)
            draft = import_checkpoint(source, chosen, run, was_there, rope_scaling, tell)
        return train(_plan_of(draft), run, threads=threads, stop_at=stop_at, say=say)


def plan_finetuning(checkpoint: Path, data: Sequence[str], request: Request) -> FinetunePlan:
    """The plan of a new run, or of the one in the folder if the same call began it."""
    given, findings = normalize(dict(request.overrides or {}))
    if findings:
        raise FindingsError(findings)
    if "model" in given:
        problem, advice = f"the model is that of {checkpoint}", "leave it out, or give another checkpoint"
        raise FindingsError([Finding(rule="convertible", at="model", problem=problem, advice=advice)])
    request = replace(request, overrides=given)
    if is_begun(request.run):
        check_same_checkpoint(request.run, checkpoint)
        return resume_finetune(_draft_fields(request.run / DRAFT), data_facts(data), request, count_sequences)
    _check_is_new(request.run)
    return plan_finetune(checkpoint_facts(checkpoint), data_facts(data), request, *devices_here(), count_sequences)


def is_begun(run: Path) -> bool:
    """Whether the folder holds a run that a finetuning began."""
    return (run / DRAFT).is_file() and "job.data" in _draft_fields(run / DRAFT)


def import_checkpoint(
    checkpoint: Path,
    chosen: FinetunePlan,
    run: Path,
    was_there: bool,
    rope_scaling: str | None,
    say: Callable[[str], None],
) -> Path:
    """Import the checkpoint into the run's folder; returns the plan that trains it, in the folder too."""
    from threefold.engine.weights.convert import AS_STORED, import_into

    for line in import_into(checkpoint, run, AS_STORED, None, was_there):
        say(line)
    if rope_scaling is not None:
        write_longer_config(run / HF_CONFIG, run, chosen.plan.job.seq_len, rope_scaling)
    fields = {**chosen.fields, "model": f"hf:{(run / HF_CONFIG).resolve()}"}
    own = run / TOKENIZER_FOLDER
    if fields.get("job.tokenizer") == str(checkpoint.resolve()) and own.is_dir():
        fields["job.tokenizer"] = str(own.resolve())
    draft = run / DRAFT
    draft.write_text(dump_fields(fields), encoding="utf-8")
    return draft


@dataclass
class NewRun:
    """The folder of a run that a finetuning begins: claimed while it is filled, left as it was if no run started."""

    folder: Path

    def __post_init__(self) -> None:
        self._was_there, self._is_ours = self.folder.exists(), False

    @contextmanager
    def claimed(self) -> Iterator[bool]:
        """Keep other commands out. Yields whether the folder was there before."""
        from threefold.engine.weights.claimed_folder import claimed_folder

        with claimed_folder(self.folder):
            self._is_ours = True
            yield self._was_there

    def __enter__(self) -> "NewRun":
        return self

    def __exit__(self, *error: object) -> None:
        if not self._is_ours or (self.folder / CONTRACT).exists():
            return
        if not (self._was_there and self.folder.is_dir()):
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def count_sequences(plan: Plan) -> float:
    """The training sequences of the plan's data. Raises what is wrong with it."""
    from threefold.engine.data.validation import check_data

    return check_data(plan)


def _plan_of(draft: Path) -> Plan:
    parsed = read_plan(str(draft))
    if parsed.plan is None:
        raise FindingsError(parsed.findings)
    return parsed.plan


def _draft_fields(path: Path) -> dict[str, Any]:
    raw, findings = load_toml(path)
    fields, more = normalize(raw)
    if findings or more:
        raise FindingsError([*findings, *more])
    return fields


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
