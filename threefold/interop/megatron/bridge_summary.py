"""The configuration that Megatron Bridge prints when a job starts: what differs from Megatron Core's defaults."""

import re
import shlex

HEAD = "Configuration Summary (Non-Default Values"
END = re.compile(r"\s*={60,}")
_GROUP = re.compile(r"^\s*\[(\w+)\](?: Non-default values.*)?:\s*$")
_FIELD = re.compile(r"^\s+(\w+): (.*?)(?:\s+\(Mcore default: .*\))?\s*$")
_GROUPS = ("model", "train", "ddp", "optimizer", "scheduler", "dataset", "rng", "comm_overlap", "mixed_precision")


def summary_in(text: str) -> str:
    """The last summary in a log, without what a launcher wrote before each line."""
    head, _, rest = text.rpartition(HEAD)
    prefix = len(head) - head.rfind("\n") - 1
    lines = [line[prefix:] for line in rest.splitlines()[1:]]
    end = next((place for place, line in enumerate(lines) if place > 2 and END.match(line)), len(lines))
    return "\n".join(lines[:end])


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
