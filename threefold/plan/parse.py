"""Fields in, plan out: strict, and every error at once, each with the nearest known name."""

import math
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from threefold.fields import Field
from threefold.findings import Changes, Finding, FindingsError, did_you_mean, known_name, nearest, shown
from threefold.layout.degrees import Layout
from threefold.layout.stages import parse_stages
from threefold.plan import aliases
from threefold.plan.budget import EXAMPLE, budget_bytes, is_budget
from threefold.plan.plan import Cluster, Job, Knobs, Plan, Run, Stack
from threefold.plan.table import AUTO, FIELDS, FILE_FIELDS, FREE, TABLES
from threefold.plan.words import difference
from threefold.spec.chip_description import PREFIX, find_chip, is_file_name
from threefold.spec.chips import ChipSpec, chip_name
from threefold.spec.hf import model_from_config
from threefold.spec.model import ModelSpec
from threefold.spec.models import MODELS

Fields = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parsed:
    """What a file gave: a plan where possible, the fields left free, and everything found on the way."""

    plan: Plan | None
    fields: Fields
    free: tuple[str, ...]
    findings: list[Finding]
    readable: Plan | None = None  # the plan of what could be read, defaults in place of the rest, for rules to judge


def parse(
    raw: Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    folder: Path | None = None,
    model: ModelSpec | None = None,
    own_chip: ChipSpec | None = None,
) -> Parsed:
    """Turn nested or dotted fields into a plan. `folder` is where relative hf: and file: paths start.

    An override of None takes a field back, also one that is not known.
    """
    overrides = overrides or {}
    deleted = {path for path, value in overrides.items() if value is None}
    fields, findings = normalize({path: value for path, value in _flatten(raw) if path not in deleted})
    changes, more = normalize({path: value for path, value in overrides.items() if value is not None}, fields)
    for path in deleted:
        fields.pop(aliases.field_of(path), None)
    fields, findings = {**fields, **changes}, findings + more
    if fields.get("knobs.dispatcher") in aliases.FLEX_BACKENDS:
        findings = [finding for finding in findings if finding.rule != "flex-needs-backend"]
    free = tuple(path for path, value in fields.items() if value == AUTO and path in FREE)
    set_fields = {path: value for path, value in fields.items() if path not in free}
    name = set_fields.get("model")
    if name is None:
        findings.append(_missing_model())
    elif model is None:
        name, model = _find_model(str(name), folder, findings)
        set_fields["model"] = name
    chip = set_fields.get("cluster.chip", "")
    if is_file_name(chip) and own_chip is None:
        try:
            set_fields["cluster.chip"], own_chip = find_chip(chip, folder)
        except FindingsError as error:
            return Parsed(None, set_fields, free, [*findings, *error.findings])
    if is_file_name(load := set_fields.get("job.load", "")):
        record = Path(load.removeprefix(PREFIX))
        is_beside = folder is not None and not record.is_absolute() and (folder / record).exists()
        set_fields["job.load"] = f"{PREFIX}{_absolute(folder / record if folder and is_beside else record)}"
    readable = dict(set_fields)
    if model and not model.is_moe and "model.num_experts" in set_fields:
        findings.append(_no_experts(model))
        del readable["model.num_experts"]
    if stage_findings := _stage_findings(set_fields):
        findings.extend(stage_findings)
        del readable["layout.stages"]
    if model is None or free or any(finding.at == "model" for finding in findings):
        return Parsed(None, set_fields, free, findings)
    built = _build(readable, model, own_chip if is_file_name(chip) else None)
    is_wrong = any(finding.severity == "error" for finding in findings)
    return Parsed(None if is_wrong else built, set_fields, free, findings, built)


def change(plan: Plan, changes: Mapping[str, Any]) -> Plan:
    """A copy of the plan with some fields set, or put back to their defaults with None."""
    touches_model = any(path == "model" or path.startswith("model.") for path in changes)
    own_chip = None if "cluster.chip" in changes else plan.cluster.own
    parsed = parse(dict(plan.written), changes, model=None if touches_model else plan.model, own_chip=own_chip)
    if parsed.plan is None:
        raise FindingsError(parsed.findings or free_findings(parsed.free))
    changed = replace(parsed.plan, stated=parsed.plan.stated | (plan.stated - set(changes)))
    same_chip = changed.cluster.chip == plan.cluster.chip
    return changed.on_chip(plan.cluster.measured) if same_chip and plan.cluster.measured else changed


def free_findings(free: tuple[str, ...]) -> list[Finding]:
    """What `check` says about a draft."""
    return [
        Finding(
            rule="no-free-field",
            at=path,
            problem='"auto" is a question, not a value: this is a draft',
            fix={path: FIELDS[path].default} if FIELDS[path].default is not None else None,
            kind="suggestion",
            advice="" if FIELDS[path].default is not None else "write a value",
        )
        for path in free
    ]


def normalize(raw: Mapping[str, Any], before: Mapping[str, Any] | None = None) -> tuple[Fields, list[Finding]]:
    """Flatten, resolve aliases, check every value on its own. `before` are the fields that these override."""
    fields: Fields = {}
    findings: list[Finding] = []
    said: dict[str, str] = {}
    base_dtypes: dict[str, Any] = {}
    for path, value in _flatten(raw):
        lower = path.lower()
        renamed = {lower: value} if lower in FIELDS else None
        if renamed is None:
            if name := aliases.base_dtype(path):
                base_dtypes[name] = (path, value)
                continue
            resolved = aliases.resolve(path, value)
            if resolved is None:
                findings.append(_unknown(path, value))
                continue
            renamed, more = resolved
            findings.extend(more)
        for target, given in renamed.items():
            checked, problem = _coerce(FIELDS[target], given)
            if problem:
                findings.append(problem)
            elif fields.get(target, checked) != checked:
                findings.append(_contradiction(target, said[target], path, fields[target], checked))
            else:
                fields[target], said[target] = checked, path
    if base_dtypes:
        _set_base_dtype(base_dtypes, before or {}, fields, findings)
    return fields, findings


def _set_base_dtype(
    given: Mapping[str, tuple[str, Any]], before: Mapping[str, Any], fields: Fields, findings: list[Finding]
) -> None:
    """Megatron's switches `bf16` and `fp16` name the base together: with both off it is fp32. FP8 formats have a bf16
    base, so that bf16 beside one of them says nothing new."""
    wrong = [(path, value) for path, value in given.values() if not isinstance(value, bool)]
    for path, value in wrong:
        problem = f"{shown(value)} is not true or false"
        findings.append(Finding(rule="wrong-type", at=path, problem=problem, advice="write true or false"))
    switches = {name: value for name, (_, value) in given.items()}
    if wrong or switches == {"fp16": False}:
        return
    base = "fp16" if switches.get("fp16") else "bf16" if switches.get("bf16") else "fp32"
    path = given["fp16" if base == "fp16" else "bf16"][0]
    stated = fields.get("knobs.precision")
    if all(switches.values()) and len(switches) == 2:
        findings.append(_contradiction("knobs.precision", given["bf16"][0], given["fp16"][0], "bf16", "fp16"))
    elif stated is None:
        has_base = base == "bf16" and before.get("knobs.precision") not in (None, "fp32", "fp16")
        fields["knobs.precision"] = before["knobs.precision"] if has_base else base
    elif base != (stated if stated in ("fp32", "fp16") else "bf16"):
        findings.append(_contradiction("knobs.precision", "knobs.precision", path, stated, base))


def _contradiction(target: str, first: str, second: str, kept: Any, other: Any) -> Finding:
    return Finding(
        rule="one-value-per-field",
        at=target,
        problem=f"{first} says {shown(kept)}, {second} says {shown(other)}",
        fix={path: None for path in (first, second) if path != target} | {target: kept},
        kind="did you mean",
        advice=f"keep one of the two; {target} alone is enough",
    )


def _no_experts(model: ModelSpec) -> Finding:
    problem = f"{model.name} has no routed experts to cut"
    fix = {"model.num_experts": None}
    return Finding(rule="unknown-field", at="model.num_experts", problem=problem, fix=fix)


def _stage_findings(fields: Fields) -> list[Finding]:
    if "layout.stages" not in fields:
        return []
    try:
        parse_stages(fields["layout.stages"])
    except FindingsError as error:
        return error.findings
    return []


def _flatten(raw: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in raw.items():
        path = f"{prefix}{key}"
        is_table = path in TABLES or path == "model"
        # No known name has more than three parts: a deeper table is unknown without looking inside.
        if isinstance(value, Mapping) and (is_table or (value and path.count(".") < 3)):
            yield from _flatten(value, path + ".")
        else:
            yield ("model" if path == "model.name" else path), value


def _find_model(name: str, folder: Path | None, findings: list[Finding]) -> tuple[str, ModelSpec | None]:
    if not name.startswith("hf:"):
        if known := known_name(name, MODELS) or known_name(name.rpartition("/")[2], MODELS):
            return known, MODELS[known]
        if name not in MODELS:
            near = nearest(name, MODELS)
            fix = {"model": near[0]} if near else None
            others = f"or {' or '.join(near[1:])}; " if near[1:] else ""
            advice = f"{others}`threefold models` lists the known ones"
            findings.append(
                Finding(
                    rule="known-model",
                    at="model",
                    problem=f"no model named {shown(name)}",
                    fix=fix,
                    kind="did you mean",
                    advice=advice,
                )
            )
        return name, None
    path = Path(name.removeprefix("hf:"))
    try:
        path = path.expanduser()
        if folder and not path.is_absolute() and (folder / path).exists():
            path = folder / path
        path = _absolute(path)
        return f"hf:{path}", model_from_config(path)
    except FindingsError as error:
        findings.extend(error.findings)
    except (OSError, RuntimeError) as error:  # a name that is too long, an unknown ~user
        problem = f"cannot read {shown(str(path))}: {error}"
        findings.append(Finding(rule="model-config", at="model", problem=problem, advice="give a folder or file"))
    return name, None


def _absolute(path: Path) -> Path:
    """One name whatever folder one stands in; a link to the file itself stays, for caches name files by hashes."""
    if path.is_absolute():
        return path
    return path.resolve() if path.is_dir() else path.parent.resolve() / path.name


def _build(fields: Fields, model: ModelSpec, own_chip: ChipSpec | None) -> Plan:
    cut = {path.removeprefix("model."): value for path, value in fields.items() if path.startswith("model.")}
    tables = {
        name: {path.removeprefix(f"{name}."): v for path, v in fields.items() if path.startswith(f"{name}.")}
        for name in TABLES
    }
    cluster = Cluster(**tables["cluster"], own=own_chip)
    written = tuple(sorted((path, v) for path, v in fields.items() if v != FIELDS[path].default))
    return Plan(
        model=model.cut(**cut) if cut and not _is_cut(model, cut) else model,
        model_name=fields["model"],
        target=fields.get("target", FIELDS["target"].default),
        cluster=cluster,
        job=Job(**tables["job"]),
        layout=Layout(**tables["layout"], gpus=cluster.gpus),
        knobs=Knobs(**tables["knobs"]),
        run=Run(**tables["run"]),
        stack=Stack(**tables["stack"]),
        written=written,
        stated=frozenset(fields),
    )


def _is_cut(model: ModelSpec, cut: Mapping[str, int]) -> bool:
    return all(getattr(model, name) == value for name, value in cut.items())


def _coerce(field: Field, value: Any) -> tuple[Any, Finding | None]:
    if value == AUTO and field.path in FREE:
        return value, None
    value, kind = _as_type(field, value)
    if kind is None:
        return None, _wrong_type(field, value)
    if field.path == "knobs.recompute" and any(is_budget(word) for word in value):
        return value, _budget_problem(field, value)
    if field.path in FILE_FIELDS and is_file_name(value):
        return value, None
    if field.choices:
        value = _as_choices(field, value)
    for word in value if isinstance(value, tuple) else (value,):
        if field.choices and word not in field.choices:
            return None, _not_a_choice(field, value, word)
    if isinstance(value, int | float) and not isinstance(value, bool):
        low, high = field.at_least, field.at_most
        if (low is not None and value < low) or (high is not None and value > high):
            return None, _out_of_range(field, value)
    return value, None


def _as_choices(field: Field, value: Any) -> Any:
    """Words as the field spells them: they are read in any case, and chips and formats by their other names."""
    if isinstance(value, tuple):
        return tuple(_as_choices(field, word) for word in value)
    known = known_name(value, field.choices) or (field.path == "cluster.chip" and chip_name(value))
    return known or (_FORMATS.get(value.lower(), value) if field.path == "knobs.precision" else value)


# Names that PyTorch has for formats without a scale.
_FORMATS = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "float": "fp32"}


def _as_type(field: Field, value: Any) -> tuple[Any, type | None]:
    """The value in one of the field's types, with the type; None as type when it fits none."""
    if bool in field.types:
        return value, bool if isinstance(value, bool) else None
    if isinstance(value, bool):
        return value, None
    if int in field.types and isinstance(value, str):
        value = _thousands(value)
    if int in field.types and isinstance(value, float) and value.is_integer() and math.isfinite(value):
        value = int(value)
    if int in field.types and isinstance(value, int):
        return value, int
    if float in field.types and isinstance(value, int | float) and abs(value) <= sys.float_info.max:
        return float(value), float
    takes_words = list in field.types and (str not in field.types or _is_several_words(field, value))
    if str in field.types and isinstance(value, str) and not takes_words:
        return value, str if _is_unicode(value) else None
    if list in field.types:
        return _as_words(field, value)
    return value, None


def _thousands(text: str) -> Any:
    """32K as 32 x 1024, 1M as 1024 x 1024: how lengths of sequences are written."""
    found = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)([kKmM])", text.strip())
    return float(found[1]) * (1024 if found[2] in "kK" else 1024**2) if found else text


def _is_several_words(field: Field, value: Any) -> bool:
    return bool(field.choices) and isinstance(value, str) and len(re.split(_BETWEEN_WORDS, value.strip())) > 1


def _is_unicode(text: str) -> bool:
    """Not so of other bytes on a command line: they cannot be written into a plan file."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_BETWEEN_WORDS = r"[\s,\[\]'\"]+"  # a list may be written with or without brackets and quotes


def _as_words(field: Field, value: Any) -> tuple[Any, type | None]:
    if isinstance(value, str):
        value = [word for word in re.split(_BETWEEN_WORDS, value) if word]
    if not isinstance(value, list | tuple) or not all(isinstance(word, str) and _is_unicode(word) for word in value):
        return value, None
    words = [aliases.MODULES.get(word, word) if field.path == "knobs.recompute" else word for word in value]
    if len(words) == 1 and field.choices and str in field.types:  # as an override writes it, which has no brackets
        return words[0], str
    return tuple(words if field.path == "knobs.cp_comm" else dict.fromkeys(words)), list


_TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", list: "a list of names"}


def _wrong_type(field: Field, value: Any) -> Finding:
    wanted = " or ".join(_TYPE_NAMES[kind] for kind in field.types)
    problem = f"{shown(value)} is not {wanted}"
    return Finding(rule="wrong-type", at=field.path, problem=problem, advice=f"write {wanted}: {field.doc}")


def _not_a_choice(field: Field, value: Any, word: str) -> Finding:
    begins = [choice for choice in field.choices if word and choice.startswith(str(word))]
    near = list(dict.fromkeys([*begins, *nearest(str(word), field.choices)]))
    problem = f"{shown(word)} is not known here"
    advice = f"choices: {', '.join(field.choices)}"
    if field.path == "cluster.chip":
        advice += "; another board (PCIe, NVL) is described in a file of its own: cluster.chip=file:PATH"
    elif field.path in FILE_FIELDS:
        advice += f"; or {FILE_FIELDS[field.path]}: {field.path}=file:PATH"
    fixes: list[Changes] = [
        {field.path: [choice if w == word else w for w in value] if isinstance(value, tuple) else choice}
        for choice in near
    ]
    return Finding(
        rule="known-value",
        at=field.path,
        problem=problem,
        fix=fixes[0] if fixes else None,
        kind="did you mean",
        advice=advice,
        fixes=fixes[1:],
    )


def _budget_problem(field: Field, words: tuple[str, ...]) -> Finding | None:
    readable = [word for word in words if budget_bytes(word)]
    if readable and len(words) == 1:
        return None
    said = shown(words[0] if len(words) == 1 else words)
    problem = f"{said}: a memory budget stands alone" if readable else f"{said} is no memory budget"
    fix = {field.path: [readable[0]]} if readable else None
    advice = f'write "{EXAMPLE}", or the names of modules'
    return Finding(rule="known-value", at=field.path, problem=problem, fix=fix, kind="did you mean", advice=advice)


def _out_of_range(field: Field, value: float) -> Finding:
    low, high = field.at_least, field.at_most
    too_low = low is not None and value < low
    bound = low if too_low else high
    assert bound is not None
    edge = int(bound) if int in field.types else bound
    problem = f"{shown(value)} is {'below' if too_low else 'above'} {edge}"
    fix = {field.path: edge}
    return Finding(rule="in-range", at=field.path, problem=problem, fix=fix, kind="suggestion", advice=field.doc)


def _unknown(path: str, value: Any) -> Finding:
    """A field that no plan has: what another trainer means by the name, else the nearest names that take the value."""
    if said := difference(path):
        problem = "no field means what this name says elsewhere"
        return Finding(rule="unknown-field", at=path, problem=problem, advice=said)
    table, _, name = path.rpartition(".")
    siblings = [p for p in FIELDS if p.rpartition(".")[0] == table]
    close = nearest(path, FIELDS) or [
        p for p in FIELDS if p.rpartition(".")[2] in nearest(name, [q.rpartition(".")[2] for q in FIELDS])
    ]
    if close:
        advice = f"did you mean {' or '.join(close[:3])}?"
    elif near := nearest(name, aliases.known_names()):
        advice = f"did you mean {' or '.join(near)}?"
    elif siblings and table:
        advice = f"fields of {table}: {', '.join(p.rpartition('.')[2] for p in siblings)}"
    else:
        advice = did_you_mean(path.partition(".")[0], ["model", "target", *TABLES])
    is_name = path.strip() and not path.startswith("-")
    meant = [{path: None, p: value} for p in close[:3] if is_name and _coerce(FIELDS[p], value)[1] is None]
    return Finding(
        rule="unknown-field",
        at=path or '""',
        problem="no such field",
        fix=meant[0] if meant else None,
        kind="did you mean",
        advice=advice or "delete it",
        fixes=meant[1:],
    )


def _missing_model() -> Finding:
    return Finding(
        rule="known-model", at="model", problem="the plan names no model", advice='add model = "qwen3-30b-a3b"'
    )
