"""`threefold chips`: the catalogue, with the candidates that an A/B compares on each chip."""

import argparse
import dataclasses
from typing import Any

from threefold.cli.command_line.out import print_json
from threefold.report.terminal import table
from threefold.spec.candidates import Candidate, dispatcher_candidates, precision_candidates
from threefold.spec.chip_description import PREFIX, find_chip, is_file_name
from threefold.spec.chips import CHIPS, ChipSpec


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("chips", nargs="*", metavar="CHIP", help="only these (default: all); or chip files of your own")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    names = [name for name in args.chips if name.lower() not in CHIPS]
    own = [find_chip(name if is_file_name(name) else f"{PREFIX}{name}")[1] for name in names]
    named = [CHIPS[name.lower()] for name in args.chips if name.lower() in CHIPS]
    chips = [*(named or CHIPS.values()), *own]
    if args.json:
        print_json([_facts(chip) for chip in chips])
        return 0
    header = [
        "chip",
        "GiB",
        "TB/s",
        "bf16",
        "fp8",
        "fp4",
        "domain",
        "GB/s",
        "net GB/s",
        "host GB/s",
        "W",
        "dispatchers",
        "precisions",
    ]
    print(table(header, [_row(chip) for chip in chips]))
    print(
        "\nPeaks are dense TFLOP/s; link rates are per GPU and direction. Of dispatchers and precisions a plan starts "
        "with the first,\nand an A/B compares the others:"
    )
    for chip in chips:
        for one in dispatcher_candidates(chip)[1:]:
            print(f"  {chip.name:6} {one.value:9} since {one.since}: {_seen(one)}")
    for chip in chips:
        print(f"  {chip.name:6} sources: {'; '.join(f'{what}: {source}' for what, source in chip.sources.items())}")
    return 0


def _facts(chip: ChipSpec) -> dict[str, Any]:
    return {name: value for name, value in dataclasses.asdict(chip).items() if not name.startswith("measured_")}


def _row(chip: ChipSpec) -> list[str]:
    def peak(name: str) -> str:
        return f"{chip.peak_flops[name] / 1e12:.0f}" if name in chip.peak_flops else "-"

    return [
        chip.name,
        f"{chip.memory_bytes / 2**30:.0f}",
        f"{chip.memory_bandwidth / 1e12:.2f}",
        peak("bf16"),
        peak("fp8"),
        peak("fp4"),
        str(chip.domain),
        f"{chip.domain_bandwidth / 1e9:.0f}",
        f"{chip.network_bandwidth / 1e9:.0f}",
        f"{chip.host_bandwidth / 1e9:.0f}",
        f"{chip.power_watts:.0f}" if chip.power_watts else "-",
        _names(dispatcher_candidates(chip)),
        _names(precision_candidates(chip)),
    ]


def _names(candidates: tuple[Candidate, ...]) -> str:
    return ", ".join(one.value for one in candidates)


def _seen(one: Candidate) -> str:
    return one.evidence + (f"; but {one.counterexample}" if one.counterexample else "")
