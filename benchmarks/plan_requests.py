"""Whether the answers of `plan` hold: 40 requests, the first plan of each checked, on request rehearsed.

python benchmarks/plan_requests.py [--target megatron-bridge] [--model NAME] [--rehearse] [--plans FOLDER] [--json FILE]
python benchmarks/plan_requests.py --log FILE [--target ...]   # a row for each request and each shipped model

A request holds where its first plan passes `check` as `train` would see it and, with --rehearse, every distinct stage
rehearses within memory; or where no plan is returned, whose reason is printed to be read. With --plans the first ten
candidates of every request are written there, for `threefold export PLAN --verify` or `make test-megatron` to judge.
With --log the rows of `docs/log/plan-requests.md` are written to a file: each with a checklist (`plan_checklist.py`).
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plan_checklist import write_rows

from threefold.api.searches import with_defaults
from threefold.findings import FindingsError
from threefold.plan.file import dump_plan
from threefold.plan.plan import Plan
from threefold.rules.all import check, errors, promoted
from threefold.search.search import SearchResult, search
from threefold.spec.models import MODELS as MODEL_SPECS
from threefold.spec.stacks import TARGETS
from threefold.units import GIB, format_tokens

MODELS = (
    "deepseek-v3",
    "kimi-k2",
    "qwen3-235b-a22b",
    "qwen3-30b-a3b",
    "qwen3-next-80b-a3b",
    "gpt-oss-120b",
    "mixtral-8x7b",
    "moonlight-16b-a3b",
)
PLACES = ((64, "h100", 4096), (256, "h100", 32768), (256, "h100", 131072), (128, "gb200", 131072), (512, "b200", 8192))
LIMIT_SECONDS = 3.0  # of CPU time, for one request
CANDIDATES = 10  # of a request that --plans writes


@dataclass
class Answer:
    """What one request gave."""

    model: str
    gpus: int
    chip: str
    seq_len: int
    cpu_seconds: float
    plan: str = ""  # its degrees and knobs
    tflops: float = 0.0
    gib: float = 0.0  # at the top of the band
    warnings: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()  # why the answer does not hold
    reason: str = ""  # why there is no plan

    @property
    def holds(self) -> bool:
        return not self.faults and self.cpu_seconds <= LIMIT_SECONDS


def answer(
    model: str, gpus: int, chip: str, seq_len: int, rehearse: bool, target: str = "threefold", plans: Path | None = None
) -> Answer:
    draft = {"model": model, "cluster.chip": chip, "cluster.gpus": gpus, "job.seq_len": seq_len, "target": target}
    start = time.process_time()
    found = search(with_defaults(draft)[0], top=CANDIDATES if plans else 5)
    for number, candidate in enumerate(found.candidates if plans else ()):
        assert plans is not None
        name = f"{model}-{gpus}x{chip}-{seq_len}-{number}.toml"
        (plans / name).write_text(dump_plan(candidate.plan), encoding="utf-8")
    told = Answer(model, gpus, chip, seq_len, time.process_time() - start)
    if not found.candidates:
        told.reason = str(found.finding)
        return told
    _judge(told, found, rehearse)
    return told


def _judge(told: Answer, found: SearchResult, rehearse: bool) -> None:
    first = found.candidates[0]
    told.plan, told.tflops = _words(first.plan), first.estimate.model_tflops_per_gpu
    told.gib = first.estimate.device_bytes_band[1] / GIB
    findings = promoted(check(first.plan), first.plan.target)
    told.warnings = tuple(finding.rule for finding in findings if finding.severity == "warning")
    told.faults = tuple(finding.rule for finding in errors(findings))
    if rehearse and not told.faults:
        told.faults = tuple(_misfits(first.plan))


def _misfits(plan: Plan) -> list[str]:
    """What the rehearsal of every distinct stage says against the plan."""
    from threefold.cli.command_line.rehearse import verdict_of

    try:
        return [f"{finding.rule}: {finding.problem}" for finding in errors(verdict_of(plan))]
    except FindingsError as error:
        return [f"{finding.rule}: {finding.problem}" for finding in error.findings]


def _words(plan: Plan) -> str:
    layout, knobs = plan.layout, plan.knobs
    axes = ("tp", "cp", "pp", "vpp", "ep", "etp", "dp")
    words = [f"{axis}{layout.degree(axis)}" for axis in axes if layout.degree(axis) > 1]
    words += [f"mb{plan.job.micro_batch}", knobs.precision, knobs.dispatcher]
    switches = ("ep_overlap", "delay_wgrad", "expert_fusion", "optimizer_offload")
    words += [name for name in switches if getattr(knobs, name)]
    words += ["+".join(names) for names in (knobs.recompute, knobs.graphs) if names]
    return " ".join([*words, *([knobs.data_parallel] if knobs.data_parallel != "zero1" else [])])


def _line(one: Answer) -> str:
    where = f"{one.model:20} {one.gpus:4} {one.chip:6} {format_tokens(one.seq_len):>5} {one.cpu_seconds:6.2f} s"
    if one.reason:
        return f"{where}  no plan: {one.reason}"
    said = f"{where}  {one.tflops:6.1f} TFLOP/s {one.gib:6.1f} GiB  {one.plan}"
    said += f"  warnings: {', '.join(one.warnings)}" if one.warnings else ""
    return f"{said}  FAULTS: {'; '.join(one.faults)}" if one.faults else said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", help="only this one (can be given again)")
    parser.add_argument("--rehearse", action="store_true", help="rehearse every distinct stage too (slow)")
    parser.add_argument("--target", choices=TARGETS, default="threefold")
    parser.add_argument("--plans", type=Path, metavar="FOLDER", help="write the first ten candidates here")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--log", type=Path, metavar="FILE", help="write rows with a checklist here, and nothing else")
    args = parser.parse_args()
    if args.log:
        models = args.model or MODELS
        requests = [(model, *place) for model in models for place in PLACES]
        shipped = [] if args.model else [one for one in MODEL_SPECS if one not in MODELS and not one.startswith("tiny")]
        write_rows(args.log, args.target, [*requests, *((model, 64, "h100", 4096) for model in shipped)])
        return
    if args.plans:
        args.plans.mkdir(parents=True, exist_ok=True)
    answers = []
    for model in args.model or MODELS:
        for gpus, chip, seq_len in PLACES:
            answers.append(answer(model, gpus, chip, seq_len, args.rehearse, args.target, args.plans))
            print(_line(answers[-1]), flush=True)
    planned = [one for one in answers if not one.reason]
    print(
        f"\n{sum(one.holds for one in answers)} of {len(answers)} hold; {len(planned)} plans, "
        f"{sum(not one.faults for one in planned)} without faults, {sum(not one.warnings for one in planned)} without "
        f"warnings; CPU seconds: most {max(one.cpu_seconds for one in answers):.2f}, "
        f"sum {sum(one.cpu_seconds for one in answers):.1f}"
    )
    if args.json:
        said: list[dict[str, Any]] = [{**vars(one), "holds": one.holds} for one in answers]
        args.json.write_text(json.dumps(said, indent=2, default=list), encoding="utf-8")


if __name__ == "__main__":
    main()
