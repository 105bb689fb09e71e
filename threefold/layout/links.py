"""Which link an axis crosses: the NVLink domain or the network, under the rank order of the grids."""

from dataclasses import dataclass
from typing import Literal

from threefold.layout.degrees import Layout
from threefold.spec.chips import ChipSpec

Link = Literal["none", "domain", "network"]


@dataclass(frozen=True, slots=True)
class AxisLink:
    """Where the traffic of one axis goes."""

    axis: str
    degree: int
    stride: int
    in_domain: int  # members of a group that share one domain
    link: Link


def domain_ranks(chip: ChipSpec, gpus: int, domain: int | None = None) -> int:
    """Consecutive ranks that share a domain.

    A job larger than one 72-GPU rack is scheduled in equal blocks, by custom of the largest power of two,
    so that groups do not straddle racks: 64 of 72.
    """
    size = domain or chip.domain
    if gpus <= size:
        return gpus
    return int(2 ** (size.bit_length() - 1))


def axis_link(layout: Layout, axis: str, ranks_per_domain: int) -> AxisLink:
    """All groups of an axis look alike when domains hold whole blocks; the first one is the model."""
    degree, stride = layout.degree(axis), layout.stride(axis)
    in_domain = min(degree, -(-ranks_per_domain // stride))
    link: Link = "none" if degree <= 1 else "domain" if in_domain == degree else "network"
    return AxisLink(axis, degree, stride, in_domain, link)
