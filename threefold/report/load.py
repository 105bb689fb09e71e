"""A recorded load of the experts as text and as a page."""

from collections.abc import Sequence

import numpy as np

from threefold.findings import Finding
from threefold.profile.expert_loads import LoadSummary, lost_text
from threefold.report.html.markup import join, tag
from threefold.report.html.page import Section, Tile, findings_list, page, tiles
from threefold.report.html.run_pictures import curve_figure, loads_figure
from threefold.report.terminal import table


def load_text(found: LoadSummary, findings: Sequence[Finding] = ()) -> str:
    """The summary, a line for each layer, the cost and the findings."""
    return "\n\n".join(
        filter(None, (found.summary(), table(*found.table()), "\n".join(lost_text(found)), *map(str, findings)))
    )


def load_page(found: LoadSummary, findings: Sequence[Finding] = ()) -> str:
    """Loads by layer and expert, the busiest expert over the steps, and what it costs."""
    counts = np.array(found.record.counts)
    busiest = counts.max(axis=2) / np.maximum(counts.mean(axis=2), 1e-300)
    columns = {"step": np.array(found.record.steps, dtype=float), "busiest": busiest.max(axis=1)}
    worst = max(found.layers, key=lambda layer: layer.busiest_expert)
    marks = [
        Tile("Busiest expert", f"{worst.busiest_expert:.2f}", "times the mean", f"layer {worst.layer}"),
        Tile(
            "Largest expert rank",
            f"{max(layer.largest_rank for layer in found.layers):.2f}",
            "times the mean",
            f"EP {found.ep}",
        ),
        Tile(
            "Entropy", f"{min(layer.entropy for layer in found.layers):.3f}", "of a level load", "the least of a layer"
        ),
    ]
    if found.lost_fraction is not None:
        marks.append(Tile("Lost to imbalance", f"{found.lost_fraction:.1%}", "of a step", "predicted"))
    figures = [
        loads_figure(counts.sum(axis=0).tolist(), "in all recorded steps"),
        curve_figure(
            columns, "busiest", "Busiest expert over the mean, worst layer", "times the mean load; 1 is level"
        ),
    ]
    sections = [Section("load", "Load", join([each for each in figures if each is not None]))]
    sections += [Section("findings", "Findings", findings_list(findings))] if findings else []
    head = join([tag("h1", "Load of the experts"), tag("p", found.summary()), tiles(marks)])
    return page("Load of the experts", head, sections)
