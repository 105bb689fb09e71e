"""The pictures that a plan expects in a microbatch: how many, and of what size.

A plan says how many there are in a sequence (`job.images`) and not how large they are; each is taken as a square of
about one megapixel, or of `job.max_pixels`, as far as it fits into the sequence. Memory and time are priced for them,
and a rehearsal runs them.
"""

import math
from dataclasses import dataclass

from threefold.plan.plan import Plan

_PIXELS = 2**20


@dataclass(frozen=True, slots=True)
class PlannedPictures:
    """The pictures of a microbatch, all of one size."""

    count: int
    grid: tuple[int, int]  # rows and columns of patches
    tokens: int  # of one picture in the decoder

    @property
    def patches(self) -> int:
        """Patches of one picture."""
        return self.grid[0] * self.grid[1]


def planned_pictures(plan: Plan) -> PlannedPictures | None:
    """The pictures of a microbatch; None for a text model and for a plan without images."""
    vision, job = plan.model.vision, plan.job
    images = 1.0 if job.images is None else job.images
    if vision is None or not images:
        return None
    pixels = min(_PIXELS, job.max_pixels or _PIXELS)
    side = max(1, min(math.isqrt(pixels) // (vision.patch * vision.merge), math.isqrt(job.seq_len)))
    most = job.seq_len // side**2 * job.micro_batch
    count = min(math.ceil(images * job.micro_batch), most)
    return PlannedPictures(count, (side * vision.merge, side * vision.merge), side**2)


def pictures_of_rank(plan: Plan) -> int:
    """The pictures that the busiest rank of our own engine encodes: those of a sequence are dealt out over CP x TP."""
    pictures = planned_pictures(plan)
    return 0 if pictures is None else -(-pictures.count // (plan.layout.cp * plan.layout.tp))


def expected_patches(plan: Plan) -> tuple[float, int]:
    """Patches of a microbatch on average, where `planned_pictures` counts whole pictures; and those of one picture."""
    pictures = planned_pictures(plan)
    if pictures is None:
        return 0.0, 0
    images = 1.0 if plan.job.images is None else plan.job.images
    return min(images * plan.job.micro_batch, pictures.count) * pictures.patches, pictures.patches
