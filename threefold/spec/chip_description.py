"""Chips and clusters of the user's own: a TOML file with facts, named in a plan as `cluster.chip = "file:PATH"`.

    chip = "l40s"                 # its name in tables
    architecture = "ada"          # which formats it multiplies, which kernels it runs
    gpus_per_node = 8
    domain = 8                    # GPUs joined by NVLink or its like
    [facts]
    memory_bytes = 48_305_799_168
    ...                           # every name of FACTS
    [peak_flops]
    bf16 = 362.05e12              # dense FLOP/s by GEMM format: fp32, bf16, fp8, fp4
    [sources]
    memory = "where the figure comes from"
    [operations]
    gpu_mtbf_hours = 30_000       # how the cluster is run: the fields of Operations

With `like = "a100"` the file describes a shipped chip in another system: what it leaves out is that chip's.
`plan/parse.py` reads it with the plan. Rates that were measured go into another file, for `--chip-file`.
`cost/training_run/` computes with the operations; each default has a published source, or says that there is none.
`threefold estimate PLAN --tokens N --assume name=value` replaces one.
"""

import stat
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from threefold.fields import Field, fields_of, item
from threefold.findings import Finding, FindingsError, did_you_mean, shown
from threefold.spec.chips import CHIPS, NATIVE_FORMATS, ChipSpec
from threefold.toml_file import load_toml

PREFIX = "file:"
FACTS = ("memory_bytes", "memory_bandwidth", "domain_bandwidth", "network_bandwidth", "host_bandwidth")
OPTIONAL_FACTS = ("power_watts", "server_watts")
FORMATS = ("fp32", "bf16", "fp8", "fp4")
COUNTS = ("gpus_per_node", "domain")
ARCHITECTURES = tuple(name for name in NATIVE_FORMATS if name != "cpu")
TABLES = ("facts", "peak_flops", "sources", "operations")
_KNOWN = ("chip", "like", "architecture", *COUNTS, *TABLES)
_SMALLEST, _LARGEST = 1.0, 1e18  # of any fact: bytes, bytes/s, FLOP/s and watts
_MOST_GPUS = 2**20
_EXAMPLE = 'chip = "my-chip"'


def is_file_name(chip: str) -> bool:
    """Whether `cluster.chip` names a file and not a shipped chip."""
    return chip.startswith(PREFIX)


def find_chip(chip: str, folder: Path | None = None) -> tuple[str, ChipSpec]:
    """The chip of a name `file:PATH`, and the name with its absolute path. Raises findings.

    A relative path starts at `folder`, that of the plan file, or else at the current one.
    """
    path = Path(chip.removeprefix(PREFIX))
    try:
        path = path.expanduser()
        if folder and not path.is_absolute() and (folder / path).exists():
            path = folder / path
        path = path.resolve()
        stamp = path.stat()
        if not stat.S_ISREG(stamp.st_mode):  # a plan may come from a stranger, and a pipe would never answer
            raise OSError("it is no regular file")
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        problem = f"{shown(str(path))} cannot be read: {reason}"
        advice = 'give the path of a chip file, such as "file:chip.toml"'
        raise FindingsError([_finding("file-readable", "", problem, advice)]) from None
    chip_name = f"{PREFIX}{path}"
    return chip_name, replace(_read(path, stamp.st_mtime_ns, stamp.st_size), file=chip_name)


def chip_named(chip: str) -> ChipSpec:
    """The chip that `cluster.chip` of a plan names: a shipped one, or that of a file. Raises findings."""
    return find_chip(chip)[1] if is_file_name(chip) else CHIPS[chip]


@lru_cache(maxsize=64)
def _read(path: Path, modified: int, size: int) -> ChipSpec:
    """The chip of a file, once for each state of it: a search reads its plan thousands of times."""
    raw, findings = load_toml(path, "chip", _EXAMPLE)
    if findings:
        raise FindingsError(findings)
    findings += [_unknown(name, _KNOWN) for name in raw if name not in _KNOWN]
    base = _base(raw, findings)
    name = _text(raw, "chip", findings) or ""
    if not name and "chip" not in raw:
        findings.append(_finding("known-value", "chip", "the file names no chip", f"add {_EXAMPLE}"))
    architecture = _architecture(raw, base, findings)
    counts = _counts(raw, base, findings)
    tables = {table: _table(raw, table, findings) for table in TABLES}
    facts = _numbers(tables["facts"], "facts", (*FACTS, *OPTIONAL_FACTS), findings)
    peaks = _numbers(tables["peak_flops"], "peak_flops", FORMATS, findings)
    sources = {key: str(text) for key, text in tables["sources"].items()}
    operations = _operations(tables["operations"], findings)
    if base is None:
        findings += [_absent(f"facts.{fact}") for fact in FACTS if fact not in tables["facts"]]
        findings += [_absent(f"peak_flops.{each}") for each in ("fp32", "bf16") if each not in tables["peak_flops"]]
    if findings:
        raise FindingsError(findings)
    return _chip(base, name, architecture, counts, facts, peaks, sources, operations)


def _chip(
    base: ChipSpec | None,
    name: str,
    architecture: str,
    counts: Mapping[str, int],
    facts: Mapping[str, float],
    peaks: Mapping[str, float],
    sources: Mapping[str, str],
    operations: Mapping[str, float],
) -> ChipSpec:
    given: dict[str, Any] = {**facts, **counts, "name": name, "architecture": architecture, "operations": operations}
    if "memory_bytes" in facts:
        given["memory_bytes"] = round(facts["memory_bytes"])
    if base is None:
        return ChipSpec(**given, peak_flops=dict(peaks), sources=dict(sources))
    if "power_watts" in facts and "server_watts" not in facts:
        given["server_watts"] = None  # follows from the chip's own power
    return replace(base, **given, peak_flops={**base.peak_flops, **peaks}, sources={**base.sources, **sources})


def _base(raw: Mapping[str, Any], findings: list[Finding]) -> ChipSpec | None:
    name = _text(raw, "like", findings)
    if name is None or (name in CHIPS and name != "cpu"):
        return CHIPS.get(name or "")
    names = [chip for chip in CHIPS if chip != "cpu"]
    advice = did_you_mean(name, names)
    findings.append(_finding("known-value", "like", f"no chip named {shown(name)}", advice))
    return None


def _architecture(raw: Mapping[str, Any], base: ChipSpec | None, findings: list[Finding]) -> str:
    name = _text(raw, "architecture", findings)
    if name in ARCHITECTURES:
        return str(name)
    if name is not None:
        advice = f"choices: {', '.join(ARCHITECTURES)}"
        findings.append(_finding("known-value", "architecture", f"{shown(name)} is not known here", advice))
    elif base is None and "architecture" not in raw:
        findings.append(_absent("architecture", f"choices: {', '.join(ARCHITECTURES)}"))
    return base.architecture if base else ""


def _counts(raw: Mapping[str, Any], base: ChipSpec | None, findings: list[Finding]) -> dict[str, int]:
    counts = {}
    for name in COUNTS:
        value = raw.get(name)
        if value is None and base is None:
            findings.append(_absent(name, "write how many GPUs"))
        elif value is not None and (type(value) is not int or not 1 <= value <= _MOST_GPUS):
            findings.append(_finding("in-range", name, f"{shown(value)} is no number of GPUs", "write a whole number"))
        elif value is not None:
            counts[name] = value
    return counts


def _operations(table: Mapping[str, Any], findings: list[Finding]) -> dict[str, float]:
    for name, value in table.items():
        if problem := problem_with(name, value):
            advice = did_you_mean(name, OPERATIONS) if name not in OPERATIONS else OPERATIONS[name].doc
            slug = "in-range" if name in OPERATIONS else "unknown-field"
            findings.append(_finding(slug, f"operations.{name}", f"{shown(value)}: {problem}", advice))
    return dict(table)


def _text(raw: Mapping[str, Any], name: str, findings: list[Finding]) -> str | None:
    value = raw.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or not value.strip() or len(value) > 60 or not value.isprintable():
        findings.append(_finding("wrong-type", name, f"{shown(value)} is no name", "write a short text"))
        return None
    return value


def _table(raw: Mapping[str, Any], name: str, findings: list[Finding]) -> dict[str, Any]:
    value = raw.get(name, {})
    if not isinstance(value, dict):
        findings.append(_finding("wrong-type", name, f"{shown(value)} is no table", f"write a table: [{name}]"))
        return {}
    return dict(value)


def _numbers(
    table: Mapping[str, Any], prefix: str, known: tuple[str, ...], findings: list[Finding]
) -> dict[str, float]:
    found = {}
    for name, value in table.items():
        at = f"{prefix}.{name}"
        if name not in known:
            findings.append(_unknown(name, known, prefix))
        elif isinstance(value, bool) or not isinstance(value, int | float):
            findings.append(_finding("wrong-type", at, f"{shown(value)} is no number", "write a number in base units"))
        elif not _SMALLEST <= value <= _LARGEST:  # false of NaN
            problem = f"{shown(value)} is not between {_SMALLEST:g} and {_LARGEST:g}"
            findings.append(_finding("in-range", at, problem, "write it in bytes, bytes/s, FLOP/s or watts"))
        else:
            found[name] = float(value)
    return found


def _unknown(name: str, known: tuple[str, ...], prefix: str = "") -> Finding:
    advice = did_you_mean(name, known)
    if name in ("rates", "fit", "measured", "precisions"):
        advice = "what was measured goes into a file of its own, for --chip-file"
    return _finding("unknown-field", f"{prefix}.{name}" if prefix else name, "no such key in a chip file", advice)


def _absent(at: str, advice: str = "write the figure of the data sheet, or begin with like = ...") -> Finding:
    return _finding("known-value", at, "the file does not say it", advice)


def _finding(rule: str, at: str, problem: str, advice: str) -> Finding:
    where = f"cluster.chip: {at}" if at else "cluster.chip"
    return Finding(rule=rule, at=where, problem=problem, advice=advice)


# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100.
_LLAMA3 = "The Llama 3 Herd of Models, arXiv:2407.21783"
_LLAMA3_GPU_HOURS = 16_384 * 54 * 24 / 419


@dataclass(frozen=True, slots=True)
class Operations:
    """Figures about running a cluster, none of which the plan itself holds."""

    gpu_mtbf_hours: float = item(
        "GPU-hours between two unexpected interruptions", round(_LLAMA3_GPU_HOURS), at_least=1, at_most=1e12
    )
    hardware_fraction: float = item(
        "fraction of the interruptions after which a node goes to repair", 0.78, at_least=0, at_most=1
    )
    restart_seconds: float = item(
        "from a failure to the start of loading: detection, diagnosis, a new start", 600.0, at_least=0, at_most=1e7
    )
    repair_hours: float = item("hours until a failed node is back", 24.0, at_least=0, at_most=1e5)
    spare_nodes: float | None = item(
        "nodes held ready; absent: as few as keep waiting below a thousandth of the time", at_least=0, at_most=1e6
    )
    storage_bandwidth: float = item(
        "bytes/s that storage takes and gives for each node of the run", 1e9, at_least=1e3, at_most=1e15
    )
    power_fraction: float = item(
        "of a server's highest power, what training draws on average", 0.76, at_least=0.01, at_most=1
    )
    pue: float = item("power of the data center over that of its servers", 1.1, at_least=1, at_most=5)


OPERATIONS: dict[str, Field] = {
    path.removeprefix("operations."): each for path, each in fields_of(Operations, "operations").items()
}
SOURCES: dict[str, str] = {
    "gpu_mtbf_hours": f"{_LLAMA3}, table 5: 419 interruptions of 16,384 H100 in 54 days",
    "hardware_fraction": f"{_LLAMA3}, section 3.3.4: 78 % were confirmed or suspected hardware",
    "restart_seconds": "MegaScale, arXiv:2402.15627: detection and diagnosis take less than ten minutes on average",
    "repair_hours": "assumed; no published figure",
    "spare_nodes": "computed",
    "storage_bandwidth": f"{_LLAMA3}, section 3.3.1: 2 TB/s sustained for 16K GPUs, 8 in a node",
    "power_fraction": "Newkirk et al., arXiv:2506.14551: 76 % of 10.2 kW in intensive training on 8-GPU H100 nodes",
    "pue": "LLaMA, arXiv:2302.13971, its table of carbon footprints",
}


def problem_with(name: str, value: object) -> str:
    """What is wrong with a value of one of the figures; empty where nothing is."""
    if name not in OPERATIONS:
        return "no such figure"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "not a number"
    low, high = OPERATIONS[name].at_least, OPERATIONS[name].at_most
    if low is None or high is None or not low <= value <= high:  # false of NaN
        return f"not between {low:g} and {high:g}"
    if name == "spare_nodes" and value != round(value):
        return "not a whole number"
    return ""


def operations_of(given: Mapping[str, float]) -> Operations:
    """The defaults with some figures replaced. The names and values were checked with `problem_with`."""
    return Operations(**dict(given))
