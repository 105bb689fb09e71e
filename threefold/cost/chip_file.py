"""Chip files: TOML files with facts and rates measured on the user's own machine, which replace the shipped ones.

    chip = "h100"                 # or "file:..." of a chip that is not shipped (spec/chip_description.py)
    measured = "2026-11-15 on 1 x H100, torch 2.11"
    precisions = ["bf16"]
    [facts]
    memory_bandwidth = 3.2e12
    [peak_flops]
    bf16 = 7.5e14
    [rates]
    gemm = 0.74
    [fit]
    error = 0.05
    gpus = 1

Every table is optional. Rates that are fractions of a peak refer to the peaks of the same file. `threefold calibrate`
writes one, with the error of its fit and the GPUs of the steps behind it; `machine/own_chip_file.py` finds it again.
`threefold estimate --chip-file FILE` and `threefold plan --chip-file FILE` read any other.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import tomli_w

from threefold.cost.rates import Rates, rates_to
from threefold.findings import Finding, FindingsError, did_you_mean, nearest, shown
from threefold.plan.plan import Plan
from threefold.spec.chip_description import find_chip, is_file_name
from threefold.spec.chips import CHIPS, ChipSpec
from threefold.toml_file import load_toml

FACTS = ("memory_bytes", "memory_bandwidth", "domain_bandwidth", "network_bandwidth", "host_bandwidth", "cores")
TABLES = ("facts", "peak_flops", "rates", "fit")
EXAMPLE = 'chip = "h100"'
SMALLEST, LARGEST = 1e-9, 1e18  # bounds of any number in a chip file: seconds, fractions, bytes/s and FLOP/s


@dataclass(frozen=True, slots=True)
class ChipFile:
    """A chip as it was measured."""

    spec: ChipSpec  # the chip's facts with the measured ones in place of them, and the rates that were measured

    def applied(self, plan: Plan) -> Plan:
        """The plan on the measured chip."""
        return plan.on_chip(self.spec)

    def rates_over(self, shipped: Rates) -> Rates:
        """The shipped rates with the measured ones in place of them."""
        return replace(shipped, **self.spec.measured_rates)

    def mismatch(self, chip: str) -> list[Finding]:
        """A finding where the file describes another chip than `chip`, which a plan names."""
        described = self.spec.plan_name
        if chip == described:
            return []
        problem = f"the plan runs on {chip}, the chip file describes {described}"
        fix = {"cluster.chip": described}
        return [Finding(rule="known-value", at="chip", problem=problem, fix=fix, advice="or leave the chip file out")]


def read_chip_file(path: str) -> tuple[ChipFile | None, list[Finding]]:
    """Read a chip file; every problem comes back as a finding, all at once."""
    raw, findings = load_toml(Path(path), "chip", EXAMPLE)
    if findings:
        return None, findings
    known = ("chip", "measured", "precisions", *TABLES)
    findings += [_unknown(name, known) for name in raw if name not in known]
    shipped = _described(raw.get("chip"), Path(path).parent, findings)
    measured = raw.get("measured", "")
    if not isinstance(measured, str):
        findings.append(_wrong_type("measured", measured, "text: when and on what it was measured"))
    precisions = raw.get("precisions", [])
    if not isinstance(precisions, list) or not all(isinstance(name, str) for name in precisions):
        findings.append(_wrong_type("precisions", precisions, "a list of texts: those that were measured"))
    tables = {name: _table(raw, name, findings) for name in TABLES}
    prior = Rates()
    numbers = [f.name for f in fields(Rates) if isinstance(getattr(prior, f.name), float)]
    drift = _numbers(tables["rates"].pop("drift", {}), "rates.drift", None, findings)
    rates = _numbers(tables["rates"], "rates", (*numbers, "drift"), findings)
    fit = _numbers(tables["fit"], "fit", ("error", "gpus"), findings)
    facts: dict[str, Any] = dict(_numbers(tables["facts"], "facts", FACTS, findings))
    peaks = _numbers(tables["peak_flops"], "peak_flops", tuple(shipped.peak_flops) if shipped else None, findings)
    if findings or shipped is None:
        return None, findings
    facts |= {name: round(facts[name]) for name in ("memory_bytes", "cores") if name in facts}
    sources = {**shipped.sources, "measured": measured or f"{Path(path).name}, without a date"}
    measured_rates = {**rates, **({"drift": drift} if drift else {})}
    return ChipFile(
        replace(
            shipped,
            **facts,
            peak_flops={**shipped.peak_flops, **peaks},
            sources=sources,
            measured_rates=measured_rates,
            measured_error=fit.get("error"),
            measured_gpus=round(fit.get("gpus", 1)),
            measured_precisions=tuple(precisions),
        )
    ), []


def chip_file_text(
    spec: ChipSpec, measured: str, precisions: Sequence[str], rates: Rates, error: float, gpus: int
) -> str:
    """A chip file with the rates of a fit to steps in some precisions and of so many GPUs at most."""
    rated = {name: value for name, value in rates_to(rates).items() if isinstance(value, float) and value}
    numbers = {name: float(f"{value:.6g}") for name, value in rated.items()}
    fit = {"error": float(f"{error:.3g}"), "gpus": gpus}
    facts = {"facts": {"cores": spec.cores}} if spec.architecture == "cpu" else {}
    head = {"chip": spec.plan_name, "measured": measured, "precisions": list(precisions)}
    return tomli_w.dumps({**head, "fit": fit, **facts, "rates": numbers})


def _described(name: Any, folder: Path, findings: list[Finding]) -> ChipSpec | None:
    """The chip whose facts the file replaces: a shipped one, or that of a file of the user's own."""
    if isinstance(name, str) and name in CHIPS:
        return CHIPS[name]
    if isinstance(name, str) and is_file_name(name):
        try:
            return find_chip(name, folder)[1]
        except FindingsError as error:
            findings.extend(error.findings)
            return None
    if name is None:
        findings.append(Finding(rule="known-value", at="chip", problem="no chip is named", advice=f"add {EXAMPLE}"))
    elif not isinstance(name, str):
        findings.append(_wrong_type("chip", name, "text: a chip name"))
    else:
        near = nearest(name.lower(), CHIPS)
        fix, advice = ({"chip": near[0]}, "") if near else (None, did_you_mean(name, CHIPS))
        problem = f"no chip named {name!r}"
        findings.append(Finding(rule="known-value", at="chip", problem=problem, fix=fix, advice=advice))
    return None


def _table(raw: Mapping[str, Any], name: str, findings: list[Finding]) -> dict[str, Any]:
    value = raw.get(name, {})
    if not isinstance(value, dict):
        findings.append(_wrong_type(name, value, f"a table: [{name}]"))
        return {}
    return dict(value)


def _numbers(table: Any, prefix: str, known: tuple[str, ...] | None, findings: list[Finding]) -> dict[str, float]:
    """The entries of a table that are known, finite and positive. `known=None` accepts every name."""
    if not isinstance(table, dict):
        findings.append(_wrong_type(prefix, table, f"a table: [{prefix}]"))
        return {}
    found: dict[str, float] = {}
    for name, value in table.items():
        at = f"{prefix}.{name}"
        if known is not None and name not in known:
            findings.append(_unknown(name, known, prefix))
        elif isinstance(value, bool) or not isinstance(value, int | float):
            findings.append(_wrong_type(at, value, "a number"))
        elif not SMALLEST <= value <= LARGEST:
            problem = f"{shown(value)} is {'no positive number' if value <= 0 else 'beyond any machine'}"
            findings.append(Finding(rule="in-range", at=at, problem=problem, advice="write what was measured"))
        else:
            found[name] = float(value)
    return found


def _unknown(name: str, known: tuple[str, ...], prefix: str = "") -> Finding:
    at = f"{prefix}.{name}" if prefix else name
    advice = did_you_mean(name, known)
    return Finding(rule="unknown-field", at=at, problem="no such key in a chip file", advice=advice)


def _wrong_type(at: str, value: Any, wanted: str) -> Finding:
    return Finding(rule="wrong-type", at=at, problem=f"{shown(value)} is not {wanted}", advice=f"write {wanted}")
