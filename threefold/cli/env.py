"""`threefold env`: this machine, its software, the kernels that run here, and packages that are missing."""

import argparse
import json
import sys

from threefold.cli.inputs import missing_package, print_findings
from threefold.findings import in_order
from threefold.machine.inventory import Machine, this_machine
from threefold.plan.file import read_plan
from threefold.plan.parse import free_findings
from threefold.report.terminal import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--no-kernels", action="store_true", help="do not try kernels on the GPU")
    parser.add_argument(
        "--tune", metavar="PLAN", help="measure the kernels of a plan's experts and attention, keep the fastest"
    )


def run(args: argparse.Namespace) -> int:
    """0 whether or not much is missing: a planner needs none of it. `check --here` judges a plan by it."""
    if args.tune:
        return _tune(args)
    here = this_machine(try_kernels=not args.no_kernels)
    if args.json:
        json.dump(here.to_json(), sys.stdout, indent=2)
        print()
    else:
        print(env_text(here))
    return 0


def _tune(args: argparse.Namespace) -> int:
    parsed = read_plan(args.tune, [])
    if parsed.plan is None:
        return print_findings(in_order([*parsed.findings, *free_findings(parsed.free)]), args.json)
    try:
        from threefold.engine.tune.attention_kernels import tune_attention_of_plan
        from threefold.engine.tune.expert_kernels import tune_experts_of_plan
    except ModuleNotFoundError as error:
        return missing_package("env", error)
    found = {key: str(choice) for key, choice in tune_experts_of_plan(parsed.plan).items()}
    for one in tune_attention_of_plan(parsed.plan, lambda text: print(text, file=sys.stderr)):
        found[f"attention dim {one.dim} length {one.length}"] = ", ".join(f"{n} {t} TFLOP/s" for n, t in one.ranked())
    if not found:
        print("threefold env: nothing to tune, or no GPU here that has kernels for it", file=sys.stderr)
        return 1
    print(json.dumps(found, indent=2) if args.json else table(["shape", "fastest"], [[*one] for one in found.items()]))
    return 0


def env_text(here: Machine) -> str:
    parts = [table(["machine", ""], _machine(here)), table(["package", "version", "state"], _packages(here))]
    if here.kernels:
        rows = [[probe.kernel, "runs" if probe.works else f"no: {probe.trouble}"] for probe in here.kernels]
        parts.append(table(["kernel", "here"], rows))
    elif not here.gpus:
        parts.append("No GPU here: the engine runs on the CPU in plain torch; planning and rehearsal need none.")
    return "\n\n".join(parts)


def _machine(here: Machine) -> list[list[str]]:
    rows = [["python", here.python], ["system", here.system]]
    for gpu in here.gpus:
        known = gpu.chip or "not among our chips"
        able = "" if gpu.capability is None else f", capability {gpu.capability[0]}.{gpu.capability[1]}"
        rows.append(["GPU", f"{gpu.name} ({known}), {gpu.memory_bytes / 2**30:.1f} GiB{able}"])
    rows.append(["driver", here.driver or "-"])
    return [*rows, *([name, version or "-"] for name, version in here.versions.items())]


def _packages(here: Machine) -> list[list[str]]:
    rows = []
    for found in here.packages:
        package = found.package
        state = package.gives
        if found.version is None:
            state = f"missing: would give {package.gives}; {package.install}"
        elif found.trouble:
            state = f"BROKEN: {found.trouble}; {package.install}"
        rows.append([package.name, found.version or "-", state])
    return rows
