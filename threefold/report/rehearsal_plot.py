"""Draws live bytes over a rehearsed step (`threefold dry-run --plot`). Needs `pip install threefold[report]`."""

from matplotlib.figure import Figure

from threefold.dryrun.rehearse_plan import Rehearsal
from threefold.units import GIB


def plot_rehearsal(found: Rehearsal, path: str) -> None:
    """Write a picture with one line for each rank and the chip's memory as a dashed line."""
    figure = Figure(figsize=(9.0, 4.5), dpi=130, layout="constrained")
    axes = figure.subplots()
    for rank in found.ranks:
        x = [point["change"] / max(1, rank.timeline[-1]["change"]) for point in rank.timeline]
        axes.plot(x, [point["bytes"] / GIB for point in rank.timeline], linewidth=0.9, label=f"stage {rank.stage}")
    chip_gib = found.plan.chip.memory_bytes / GIB
    axes.axhline(chip_gib, color="black", linestyle="--", linewidth=0.8, label=f"memory of {found.plan.chip.name}")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("one step, by allocations and releases")
    axes.set_ylabel("live tensors, GiB")
    axes.set_title(f"{found.plan.model_name} on {found.plan.layout.gpus} x {found.plan.chip.name}: rehearsed")
    axes.legend(fontsize=7, ncols=2)
    figure.savefig(path)
