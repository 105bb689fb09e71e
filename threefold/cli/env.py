"""`threefold env`: this machine, its software, the kernels that run here, and packages that are missing."""

import argparse

from threefold.cli.command_line.out import print_json
from threefold.machine.inventory import Machine, this_machine
from threefold.report.terminal import table
from threefold.units import format_many


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    parser.add_argument("--no-kernels", action="store_true", help="do not try kernels on the GPU")
    parser.add_argument("--tune", metavar="PLAN", help=argparse.SUPPRESS)  # as `threefold calibrate PLAN`


def run(args: argparse.Namespace) -> int:
    """0 whether or not much is missing: a planner needs none of it. `check --here` judges a plan by it."""
    if args.tune:
        return _calibrate(args)
    here = this_machine(try_kernels=not args.no_kernels)
    if args.json:
        print_json(here.to_json())
    else:
        print(env_text(here))
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    """`env --tune PLAN` is what `calibrate PLAN` was called before it measured the whole machine."""
    from threefold.cli import calibrate

    return calibrate.run(calibrate.arguments(args.tune, args.json))


def env_text(here: Machine) -> str:
    parts = [
        table(["machine", ""], _machine(here)),
        table(["package", "version", "state"], _packages(here)),
        "Each package is imported in a process of its own; `threefold env --json` shows the statements.",
    ]
    if here.kernels:
        rows = [[probe.kernel, "runs" if probe.works else f"no: {probe.trouble}"] for probe in here.kernels]
        parts.append(table(["kernel", "here"], rows))
    elif not here.gpus:
        parts.append("No GPU here: the engine runs on the CPU in plain torch; planning and rehearsal need none.")
    return "\n\n".join(parts)


def _machine(here: Machine) -> list[list[str]]:
    rows = [["threefold", here.threefold], ["python", here.python], ["system", here.system]]
    if here.num_cores:
        memory = f", {here.host_memory_bytes / 2**30:.1f} GiB" if here.host_memory_bytes else ""
        rows.append(["CPU", f"{format_many(here.num_cores, 'core')}{memory}"])
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
