"""From a question to a plan: the search behind `threefold plan` and `threefold.find_plan`. No torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from threefold.cost.anchor import anchored
from threefold.cost.chip_file import read_chip_file
from threefold.findings import FindingsError, in_order
from threefold.machine.own_chip_file import NO_CHIP_FILE, own_chip
from threefold.plan.file import read_plan
from threefold.plan.parse import Fields, normalize, parse
from threefold.plan.table import AUTO, FIELDS
from threefold.rules.all import errors
from threefold.rules.stacks import target_for
from threefold.search.fit import FitPoint, fit_points
from threefold.search.search import SearchResult, search
from threefold.spec.chip_description import chip_named
from threefold.spec.chips import ChipSpec


def find_plan(
    draft: str | Path | Mapping[str, Any],
    top: int = 5,
    chip_file: str | None = None,
    progress: Callable[[str], None] | None = None,
    like: str | None = None,
) -> SearchResult:
    """Choose layout and knobs: candidates, best first, with reasons; or the finding that says why there are none.

    `draft` is a plan file or its fields, such as {"model": "qwen3-30b-a3b", "cluster.chip": "h100", "cluster.gpus": 64,
    "job.seq_len": 4096}. Fields of `layout` and `knobs` that are absent or "auto" are searched; cluster.gpus = "auto"
    finds the fewest GPUs. `chip_file` is that of `estimate`. With `like`, a run that was measured, estimates of
    candidates start from there; order and reasons stay those of the search. Raises what is wrong with the draft.
    """
    fields, findings = _draft_fields(draft)
    measured = None
    if chip_file not in (None, NO_CHIP_FILE):
        found, unread = read_chip_file(str(chip_file))
        findings += unread or (found.mismatch(_described(fields).plan_name) if found else [])
        measured = found.spec if found else None
    if errors(findings):
        raise FindingsError(in_order(findings))
    fields, _ = with_defaults(fields)
    if chip_file is None:
        measured = own_chip(_described(fields).plan_name, _value(fields, "target"))
    if like is None:
        return search(fields, top, progress, measured)
    from threefold.api.anchors import read_anchor  # reads runs with numpy, which other searches do without

    target = _value(fields, "target")
    anchor = read_anchor(like, None if target == AUTO else target)
    answer = search(fields, top, progress, measured)
    moved = [
        replace(candidate, estimate=anchored(candidate.estimate, candidate.plan, anchor))
        for candidate in answer.candidates
    ]
    return replace(answer, candidates=tuple(moved))


def fit(fields: Mapping[str, Any], sizes: Sequence[int] = (), chip_file: str | None = None) -> tuple[FitPoint, ...]:
    """Whether a model fits, for each number of GPUs: `sizes`, or doubling from one until it fits easily.

    `fields` are those of a draft without cluster.gpus; `chip_file` is that of `estimate`. Raises what is wrong.
    """
    fields, _ = with_defaults(dict(fields))
    read, unread = (None, []) if chip_file in (None, NO_CHIP_FILE) else read_chip_file(str(chip_file))
    if unread:
        raise FindingsError(in_order(unread))
    measured = read.spec if read else None
    if chip_file is None:
        measured = own_chip(_described(fields).plan_name, _value(fields, "target"))
    return tuple(fit_points(fields, sizes, measured))


def _draft_fields(draft: str | Path | Mapping[str, Any]) -> tuple[Fields, list[Any]]:
    if isinstance(draft, Mapping):
        return normalize({path: value for path, value in draft.items() if value is not None})
    parsed = read_plan(str(draft))
    return {**parsed.fields, **dict.fromkeys(parsed.free, AUTO)}, list(parsed.findings)


def _described(fields: Mapping[str, Any]) -> ChipSpec:
    return chip_named(_value(fields, "cluster.chip"))


def _value(fields: Mapping[str, Any], path: str) -> str:
    return str(fields.get(path, FIELDS[path].default))


def with_defaults(fields: Fields) -> tuple[Fields, str]:
    """The fields with what a search adds, and why the target is what it is where nobody named one.

    A precision that nobody names is searched: the platform's and bf16. A model that sees gets drawn pictures where
    nobody names data, as others get the embedded text.
    """
    fields = {"knobs.precision": AUTO, **fields}
    drafted = parse({path: value for path, value in fields.items() if value != AUTO}).plan
    if drafted is not None and drafted.is_vlm and not drafted.stated & {"job.data", "job.images"}:
        fields = {"job.data": "scenes", **fields}
    if fields.get("target", AUTO) != AUTO or drafted is None:  # the search says what is wrong
        return fields, ""
    target, why = target_for(drafted.model)
    return {**fields, "target": target}, f"for {target}, because {why}"
