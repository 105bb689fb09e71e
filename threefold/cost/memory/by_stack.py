"""Memory of a plan by the model of its stack: the one place where a target picks its memory model.

`estimate`, `rules/memory.py`, `search/` and `dryrun/` call `memory(plan)`; `time/offload.py` asks for the activations
of a layer. A new stack implements `MemoryModel` (`memory/stage_memory.py`) and gets a line in `MEMORY_MODELS`.
"""

import math
from functools import lru_cache

from threefold.cost.expert_load import largest_rows, load_of
from threefold.cost.memory.megatron import MegatronMemory
from threefold.cost.memory.stage_memory import Memory, MemoryModel, Terms, stage_memory
from threefold.cost.memory.threefold.model import ThreefoldMemory
from threefold.plan.plan import Plan
from threefold.spec.model import Layer

MEMORY_MODELS: dict[str, MemoryModel] = {"megatron-bridge": MegatronMemory(), "threefold": ThreefoldMemory()}

_BISECTIONS = 20  # of the skew at which memory is full: finer than chance


@lru_cache(maxsize=64)
def memory(plan: Plan, skew: float | None = None) -> Memory:
    """The peak of every pipeline rank. `skew` is the tokens of the busiest expert rank over the balanced number;
    without it that of a rare step of the plan's load."""
    peaks = MEMORY_MODELS[plan.target].stage_peaks(plan, largest_rows(plan) if skew is None else skew)
    return Memory(tuple(stage_memory(plan, stage, peak) for stage, peak in enumerate(peaks)))


def out_of_memory_chance(plan: Plan, band: float = 0.0) -> float:
    """The part of steps in which some rank has more rows than fit its memory, with the peak raised by `band`."""
    have, low, high = plan.chip.memory_bytes, 1.0, float(plan.layout.ep)
    needs_more = {skew: memory(plan, skew).worst.device_bytes_at(band) > have for skew in (low, high)}
    if not needs_more[high] or needs_more[low]:
        return float(needs_more[low])
    for _ in range(_BISECTIONS):
        middle = math.sqrt(low * high)
        exceeds = memory(plan, middle).worst.device_bytes_at(band) > have
        low, high = (low, middle) if exceeds else (middle, high)
    return load_of(plan).chance_above(low, plan.layout.edp)


def fullest_bytes(plan: Plan, band: float = 0.0, enough: float = math.inf) -> float:
    """Bytes on the device of the fullest rank, its peak raised by `band`.

    Ranks are looked at in order until one needs more than `enough`: a search need not know by how much a plan misfits.
    """
    most = 0.0
    for stage, peak in enumerate(MEMORY_MODELS[plan.target].stage_peaks(plan, largest_rows(plan))):
        most = max(most, stage_memory(plan, stage, peak).device_bytes_at(band))
        if most > enough:
            break
    return most


def layer_activation_bytes(plan: Plan, layer: Layer, skew: float) -> Terms:
    """Activations that one layer saves on the device from forward to backward of one microbatch."""
    return MEMORY_MODELS[plan.target].layer_activation_bytes(plan, layer, skew)
