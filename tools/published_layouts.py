"""Reads the layouts that somebody ran from `data/published_runs.json` and from recipes, for the search to stay near.

    python tools/published_layouts.py

It writes `threefold/spec/published_layouts.json`: each layout once for a model, chip, number of GPUs and length, with
what was recomputed and offloaded and where it stands. Runs whose layout a source leaves open are left out, and so are
tiny models.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from threefold.interop.published import Row, cannot_express, load_rows, plan_from_row
from threefold.plan.file import read_plan
from threefold.plan.plan import Plan

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "threefold" / "spec" / "published_layouts.json"
AXES = ("tp", "cp", "pp", "vpp", "ep", "etp")
TASKS = ("pretrain", "sft")


def published_plans() -> Iterator[tuple[str, Plan]]:
    """Recipes for Megatron Bridge, then published runs, with their names."""
    for path in sorted((ROOT / "recipes").glob("*.toml")):
        plan = read_plan(str(path)).plan
        if plan and plan.target == "megatron-bridge" and plan.chip.architecture != "cpu":
            yield path.stem, plan
    for row in load_rows(ROOT / "data" / "published_runs.json"):
        if is_stated(row) and (plan := plan_from_row(row).plan):
            yield row["id"], plan


def is_stated(row: Row) -> bool:
    """Whether a row states a layout, a length and a machine on which it ran."""
    if cannot_express(row) or not row["is_moe"] or row["status"] != "ok" or row["superseded"] or not row["seq_len"]:
        return False
    named = row.get("knobs_match") in ("exact", "recipe") and row["ep"] and row["tp"]
    return bool(named or (row["ep"] and row["pp"] and row["tp"]))


def layouts() -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, plan in published_plans():
        if plan.job.task not in TASKS or plan.job.lora_rank or not plan.layout.fits_ranks or not plan.model.is_moe:
            continue
        degrees = {axis: plan.layout.degree(axis) for axis in AXES}
        where = {"model": plan.model_name, "chip": plan.chip.name, "gpus": plan.layout.gpus}
        key = {
            **where,
            "seq_len": plan.job.seq_len,
            "task": plan.job.task,
            **degrees,
            "data_parallel": plan.knobs.data_parallel,
        }
        more = {"recompute": list(plan.knobs.recompute), "optimizer_offload": plan.knobs.optimizer_offload}
        found.setdefault(json.dumps(key), {"name": name, **key, **more})
    return list(found.values())


def page() -> str:
    return "[\n" + ",\n".join(f" {json.dumps(one)}" for one in layouts()) + "\n]\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
