"""`threefold models`: the catalogue."""

import argparse
import dataclasses
import json
import sys
from typing import Any

from threefold.findings import did_you_mean
from threefold.report.terminal import table
from threefold.spec.model import ModelSpec
from threefold.spec.models import MODELS
from threefold.spec.params import count_params
from threefold.units import format_count


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="show one model with its source")
    parser.add_argument("--json", action="store_true", help="machine-readable output")


def run(args: argparse.Namespace) -> int:
    if args.name and args.name not in MODELS:
        print(f"threefold models: no model {args.name!r}; {did_you_mean(args.name, MODELS)}", file=sys.stderr)
        return 2
    chosen = [MODELS[args.name]] if args.name else list(MODELS.values())
    if args.json:
        json.dump([_facts(model) for model in chosen], sys.stdout, indent=2)
        print()
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
        mixers + (" (latent)" if hasattr(model.attention, "kv_rank") else "") + (" + vision" if model.vision else ""),
        str(moe.num_experts) if moe else "-",
        str(moe.top_k) if moe else "-",
        str(model.mtp_layers),
    ]


def _details(model: ModelSpec) -> str:
    params = count_params(model)
    facts = {k: v for k, v in dataclasses.asdict(model).items() if v not in (None, "", ()) and k != "pattern"}
    counts = {f.name: format_count(getattr(params, f.name)) for f in dataclasses.fields(params)}
    lines = [f"{name:18} {value}" for name, value in facts.items()]
    layers = "".join(
        {"attention": "t", "window": "w", "delta": "d", "mamba": "M", "none": "-"}[x.mixer] for x in model.layers
    )
    totals = f"total {params.main:,}  active {params.active:,}  mtp {params.mtp:,}"
    return "\n".join([*lines, f"{'mixers':18} {layers}", f"{'parameters':18} {totals}", f"{'by part':18} {counts}"])
