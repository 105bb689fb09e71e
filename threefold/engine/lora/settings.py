"""The LoRA settings of a job, and the names of adapters. The model's options hold a `LoraSettings` (`model_options`).

An adapter is two matrices beside a frozen weight W: the output x W^T becomes x W^T + (alpha / rank) (x A^T) B^T. They
are parameters of the module that holds the weight, for example `layers.0.mixer.q.lora_a` (rank x in) and
`layers.0.mixer.q.lora_b` (out x rank); of routed experts `layers.0.ffn.experts.down_lora_a` (experts x rank x in).
"""

from dataclasses import dataclass

from threefold.plan.plan import Job

LORA_A, LORA_B = "lora_a", "lora_b"  # what the names of adapters end in


@dataclass(frozen=True)
class LoraSettings:
    """What adapters a model gets."""

    rank: int
    scale: float  # of the adapters' output: alpha over the rank
    targets: tuple[str, ...]  # of LORA_TARGETS in `plan.py`
    draws_b: bool = False  # whether B begins with random numbers and not with zeros: then A has a gradient at once


def lora_settings(job: Job) -> LoraSettings | None:
    """The adapters that a job asks for; None where it trains the weights themselves."""
    if job.lora_rank is None:
        return None
    alpha = 2 * job.lora_rank if job.lora_alpha is None else job.lora_alpha
    return LoraSettings(job.lora_rank, alpha / job.lora_rank, job.lora_targets)


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return name.endswith((LORA_A, LORA_B))
