"""`threefold models`: the catalogue."""

import argparse
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from threefold.cli.command_line.inputs import print_findings
from threefold.cli.command_line.out import UsageError, print_json
from threefold.dryrun.derive_shape import derive
from threefold.findings import Finding, FindingsError, did_you_mean
from threefold.report.terminal import table
from threefold.safe_files import read_json
from threefold.spec.derived import SHAPE_FILE, keep_shape, kept_shape
from threefold.spec.families import BY_TYPE
from threefold.spec.hf import model_from_config
from threefold.spec.model import CompressedSpec, MlaSpec, ModelSpec
from threefold.spec.models import MODELS
from threefold.spec.params import count_params
from threefold.units import format_count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="show one model with its source, or hf:path of a config.json")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    if args.name and args.name.startswith("hf:"):
        return _run_file(Path(args.name.removeprefix("hf:")), args.json)
    if args.name and args.name not in MODELS:
        advice = did_you_mean(args.name, MODELS) or "`threefold models` lists those that are known"
        raise UsageError(f"no model {args.name!r}; {advice}")
    chosen = [MODELS[args.name]] if args.name else list(MODELS.values())
    if args.json:
        print_json([_facts(model) for model in chosen])
    elif args.name:
        print(_details(chosen[0]))
    else:
        print(
            table(
                ["model", "total", "active", "layers", "dim", "mixers", "experts", "top", "mtp"],
                [_row(m) for m in chosen],
            )
        )
        print(
            "\nActive counts what one text token meets, embedding included. `threefold models NAME` gives the source."
        )
    return 0


def _run_file(path: Path, as_json: bool) -> int:
    """A model of a config.json. The shape of an unknown type is derived, and kept next to the file."""
    path = path / "config.json" if path.is_dir() else path
    try:
        config = read_json(path)
        is_unknown = isinstance(config, dict) and str(config.get("model_type")) not in BY_TYPE
        if is_unknown and kept_shape(path.parent, config, "") is None:
            keep_shape(path.parent, config, derive(path))
        model = model_from_config(path)
    except FindingsError as error:
        return print_findings(error.findings, as_json)
    except (OSError, ValueError) as error:
        problem = f"cannot read {path}, or write {SHAPE_FILE} next to it: {error}"
        advice = "give a folder with a config.json that can be written to"
        return print_findings([Finding(rule="model-config", at="model", problem=problem, advice=advice)], as_json)
    if as_json:
        print_json([_facts(model)])
    else:
        print(_details(model))
    return 0


def _facts(model: ModelSpec) -> dict[str, Any]:
    params = count_params(model)
    return {**dataclasses.asdict(model), "total_params": params.main, "active_params": params.active}


def _row(model: ModelSpec) -> list[str]:
    params, moe = count_params(model), model.moe
    mixers = "+".join(dict.fromkeys(layer.mixer for layer in model.layers if layer.mixer != "none"))
    return [
        model.name,
        format_count(params.main),
        format_count(params.active),
        str(model.num_layers),
        str(model.dim),
        mixers + _attention_kind(model) + (" + vision" if model.vision else ""),
        str(moe.num_experts) if moe else "-",
        str(moe.top_k) if moe else "-",
        str(model.mtp_layers),
    ]


def _attention_kind(model: ModelSpec) -> str:
    if isinstance(model.attention, CompressedSpec):
        return " (compressed)"
    if not isinstance(model.attention, MlaSpec):
        return ""
    return " (latent)" if model.attention.indexer is None else " (latent, indexer)"


def _details(model: ModelSpec) -> str:
    params = count_params(model)
    facts = {name: value for name, value in dataclasses.asdict(model).items() if name != "pattern"}
    layers = (model.pattern * model.num_layers)[: model.num_layers]
    totals = f"total {params.main:,}  active {params.active:,}  mtp {params.mtp:,}"
    parts = [f"{f.name} {format_count(getattr(params, f.name))}" for f in dataclasses.fields(params)]
    rows = [*_lines(facts), ("mixers", layers), ("parameters", totals), ("by part", "  ".join(parts))]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}} {value}" for name, value in rows)


def _lines(facts: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values for people: a part of a part is a line `attention.num_heads`, and what is absent is left out."""
    for name, value in facts.items():
        if isinstance(value, Mapping):
            yield from _lines(value, f"{prefix}{name}.")
        elif value not in (None, "", ()):
            yield f"{prefix}{name}", _text(value)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return f"{value:,.15g}" if isinstance(value, float) else str(value)
