"""Published runs and matched A/Bs that the estimates stand on, as `threefold find --kind run` prints them."""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from threefold.lookup.entries import Entry, published_runs

Row = Mapping[str, Any]
_AXES = ("tp", "cp", "pp", "vpp", "ep", "etp")


def shape_text(row: Row) -> str:
    """Model, machine, precision and length, as far as the row says them."""
    tokens = f"{row['seq_len']} tokens" if row.get("seq_len") else ""
    machine = f"{row.get('gpus') or '?'} x {row.get('system') or '?'}"
    return ", ".join(filter(None, (row["model"], machine, row.get("precision"), tokens)))


def layout_text(row: Row) -> str:
    degrees = " ".join(f"{axis.upper()} {row[axis]}" for axis in _AXES if (row.get(axis) or 1) > 1)
    return f"{degrees} FSDP".strip() if row.get("fsdp") else degrees


def speed_text(row: Row) -> str:
    """The figure that a row gives: throughput, step time or outcome."""
    if row.get("status") not in ("ok", None):
        return str(row["status"])
    if row.get("tflops_per_gpu"):
        return f"{row['tflops_per_gpu']:.0f} TFLOP/s"
    seconds = row.get("step_time_s")
    return f"{seconds:g} s a step" if seconds else "-"


def knobs_text(row: Row) -> str:
    """Words of a row for dispatcher, overlap, graphs, recompute and offload."""
    graphs = row.get("cuda_graph_scopes") or ([row["cuda_graph_impl"]] if row.get("cuda_graph_impl") else [])
    recompute = row.get("recompute_modules") or (
        [row["recompute_granularity"]] if row.get("recompute_granularity") else []
    )
    said = [
        str(row.get("dispatcher") or ""),
        "overlap" if row.get("ep_overlap") else "",
        f"graphs {'+'.join(graphs)}" if graphs and graphs != ["none"] else "",
        f"recompute {'+'.join(recompute)}" if recompute else "",
        "optimizer offload" if row.get("optimizer_offload") else "",
        "forced balance" if row.get("routing") == "force_balance" else "",
    ]
    return ", ".join(item for item in said if item)


@cache
def run_entries() -> tuple[Entry, ...]:
    return tuple(_entries())


def _entries() -> Iterator[Entry]:
    for row in published_runs():
        plan = ", ".join(filter(None, (shape_text(row), layout_text(row))))
        answer = f"{plan}: {'; '.join(filter(None, (speed_text(row), knobs_text(row))))}"
        caveats = f"{row.get('perf_class')}, {row.get('release')}, {row.get('source')}"
        yield Entry("run", row["id"], answer, f"{row.get('notes') or ''} {row.get('ab_variable') or ''}", caveats)


def matched_pairs(words: list[str]) -> list[dict[str, Any]]:
    """Groups of runs that vary one declared setting, those of which every word of the query is true. Each run says in
    what it differs from the earlier run that is nearest to it, and its speed over that of the first."""
    groups: dict[str, list[Row]] = {}
    for row in published_runs():
        if row.get("ab_group"):
            groups.setdefault(row["ab_group"], []).append(row)
    return [
        {
            "group": group,
            "variable": rows[0]["ab_variable"],
            "runs": [
                {
                    "id": row["id"],
                    "shape": shape_text(row),
                    "settings": ", ".join(filter(None, (layout_text(row), knobs_text(row)))),
                    "speed": speed_text(row),
                    "of_first": _ratio(row, rows[0]),
                    "differs": min((_differences(row, other) for other in rows[:index]), key=len, default=[]),
                    "status": f"{row.get('status')}, {row.get('perf_class')}",
                    "notes": row.get("notes") or "",
                    "source": f"{row.get('source')}, {row.get('release')}",
                }
                for index, row in enumerate(rows)
            ],
        }
        for group, rows in groups.items()
        if all(word in f"{group} {rows}".lower() for word in words)
    ]


# What makes two runs different, by the name that is shown: one difference is an A/B.
_CONTRACT = {
    **{
        name: (name,) for name in ("gpus", "system", "precision", "seq_len", "gbs", "mbs", *_AXES, "fsdp", "dispatcher")
    },
    **{name: (name,) for name in ("routing", "ep_overlap", "delay_wgrad", "optimizer_offload", "activation_offload")},
    "mtp": ("mtp",),
    "other settings": ("extra_knobs",),
    "recompute": ("recompute_granularity", "recompute_modules"),
    "graphs": ("cuda_graph_impl", "cuda_graph_scopes"),
}


def _differences(row: Row, other: Row) -> list[str]:
    """What two runs say differently. What one of them does not say counts as off."""
    return [
        name
        for name, fields in _CONTRACT.items()
        if [row.get(field) or None for field in fields] != [other.get(field) or None for field in fields]
    ]


def _ratio(row: Row, first: Row) -> float | None:
    for field, sign in (("tflops_per_gpu", 1), ("step_time_s", -1)):
        if row.get(field) and first.get(field):
            return round(float(row[field] / first[field]) ** sign, 3)
    return None
