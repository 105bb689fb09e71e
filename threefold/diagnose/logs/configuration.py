"""The plan behind the configuration that a job printed."""

import re
import shlex
from dataclasses import dataclass, field, replace
from typing import Any

from threefold.diagnose.logs.printed import Printed
from threefold.diagnose.part import Context
from threefold.findings import Finding
from threefold.interop.megatron.import_text import Imported, import_text
from threefold.interop.torchtitan import import_torchtitan
from threefold.plan.plan import Plan
from threefold.rules.all import check
from threefold.spec.chips import chip_of_device

_GROUP = re.compile(r"^\s*\[(\w+)\](?: Non-default values.*)?:\s*$")
_FIELD = re.compile(r"^\s+(\w+): (.*?)(?:\s+\(Mcore default: .*\))?\s*$")
_GUESSED = "import-needs-cluster"
_GROUPS = ("model", "train", "ddp", "optimizer", "scheduler", "dataset", "rng", "comm_overlap", "mixed_precision")


@dataclass
class Configuration:
    """A plan, where there is one, with what its import and the rules say."""

    source: str = ""  # what the plan comes from; empty: nothing was printed
    plan: Plan | None = None
    findings: list[Finding] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)  # settings that no field of the plan stands for
    is_complete: bool = False  # whether a setting that was not printed has its default


def read_configuration(printed: Printed, context: Context, num_ranks: int) -> Configuration:
    """The plan that the user gives, else that behind the printed configuration, judged by the rules if asked for."""
    plan = context.plan
    found = Configuration(context.plan_source, plan) if plan else _imported(printed, num_ranks)
    if found.plan and context.judges_plans:
        found.findings += check(found.plan, notes=False)
    return found


def _imported(printed: Printed, num_ranks: int) -> Configuration:
    chip = chip_of_device(printed.device)
    given: dict[str, object] = {"cluster.chip": chip.name} if chip else {}
    if printed.arguments:
        return _as_configuration("Megatron-LM's arguments", import_text(printed.arguments, given))
    if num_ranks > 1 and not printed.mesh:
        given["cluster.gpus"] = num_ranks
    if printed.summary:
        return _as_configuration("Megatron Bridge's summary", import_text(overrides(printed.summary), given))
    if printed.titan:
        return _as_configuration("torchtitan's configuration", import_torchtitan(printed.titan, printed.mesh, given))
    return Configuration()


def _as_configuration(source: str, imported: Imported) -> Configuration:
    said = [one for one in imported.findings if one.severity == "error" or one.rule == _GUESSED]
    said = [replace(one, advice="give the plan that ran: --plan PLAN") if one.rule == _GUESSED else one for one in said]
    return Configuration(source, imported.plan, said, imported.rest, is_complete=imported.kind == "arguments")


def overrides(summary: str) -> str:
    """Bridge's summary as a list of overrides, one a line."""
    group, lines = "", list[str]()
    for line in summary.splitlines():
        if match := _GROUP.match(line):
            group = match[1]
        elif group in _GROUPS and (match := _FIELD.match(line)):
            value = re.sub(r"<\w+\.(\w+): .*>|torch\.(\w+)", lambda m: m[1] or f"torch.{m[2]}", match[2])
            if value not in ("None", "") and not value.startswith(("<", "functools")):
                lines.append(shlex.quote(f"{group}.{match[1]}={value.strip(chr(39))}"))
    return "\n".join(lines)
