"""How a cluster is run: what fails, how soon a run is back, how fast storage is, and what a server draws.

`cost/training_run/` computes with these figures. Each default has a published source where there is one; a figure that
nobody publishes says so. `threefold estimate PLAN --tokens N --assume name=value` replaces one of them, and so does the
table `[operations]` of a chip file (`spec/clusters/chip_description.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

from threefold.fields import Field, fields_of, item

# Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 H100.
_LLAMA3 = "The Llama 3 Herd of Models, arXiv:2407.21783"
_LLAMA3_GPU_HOURS = 16_384 * 54 * 24 / 419


@dataclass(frozen=True, slots=True)
class Operations:
    """Figures about running a cluster, none of which the plan itself holds."""

    gpu_mtbf_hours: float = item(
        "GPU-hours between two unexpected interruptions", round(_LLAMA3_GPU_HOURS), at_least=1, at_most=1e12
    )
    hardware_fraction: float = item(
        "fraction of the interruptions after which a node goes to repair", 0.78, at_least=0, at_most=1
    )
    restart_seconds: float = item(
        "from a failure to the start of loading: detection, diagnosis, a new start", 600.0, at_least=0, at_most=1e7
    )
    repair_hours: float = item("hours until a failed node is back", 24.0, at_least=0, at_most=1e5)
    spare_nodes: float | None = item(
        "nodes held ready; absent: as few as keep waiting below a thousandth of the time", at_least=0, at_most=1e6
    )
    storage_bandwidth: float = item(
        "bytes/s that storage takes and gives for each node of the run", 1e9, at_least=1e3, at_most=1e15
    )
    power_fraction: float = item(
        "of a server's highest power, what training draws on average", 0.76, at_least=0.01, at_most=1
    )
    pue: float = item("power of the data center over that of its servers", 1.1, at_least=1, at_most=5)


FIELDS: dict[str, Field] = {
    path.removeprefix("operations."): each for path, each in fields_of(Operations, "operations").items()
}
SOURCES: dict[str, str] = {
    "gpu_mtbf_hours": f"{_LLAMA3}, table 5: 419 interruptions of 16,384 H100 in 54 days",
    "hardware_fraction": f"{_LLAMA3}, section 3.3.4: 78 % were confirmed or suspected hardware",
    "restart_seconds": "MegaScale, arXiv:2402.15627: detection and diagnosis take less than ten minutes on average",
    "repair_hours": "assumed; no published figure",
    "spare_nodes": "computed",
    "storage_bandwidth": f"{_LLAMA3}, section 3.3.1: 2 TB/s sustained for 16K GPUs, 8 in a node",
    "power_fraction": "Newkirk et al., arXiv:2506.14551: 76 % of 10.2 kW in intensive training on 8-GPU H100 nodes",
    "pue": "LLaMA, arXiv:2302.13971, its table of carbon footprints",
}


def problem_with(name: str, value: object) -> str:
    """What is wrong with a value of one of the figures; empty where nothing is."""
    if name not in FIELDS:
        return "no such figure"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return "not a number"
    low, high = FIELDS[name].at_least, FIELDS[name].at_most
    if low is None or high is None or not low <= value <= high:  # false of NaN
        return f"not between {low:g} and {high:g}"
    if name == "spare_nodes" and value != round(value):
        return "not a whole number"
    return ""


def operations_of(given: Mapping[str, float]) -> Operations:
    """The defaults with some figures replaced. The names and values were checked with `problem_with`."""
    return Operations(**dict(given))
