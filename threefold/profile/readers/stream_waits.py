"""Waits between streams, joined to the calls of the host that made them. Both readers call it."""

import numpy as np

from threefold.profile.trace import Floats, HostSpans, Ints, StreamWaits


def resolved(
    launches: HostSpans,
    moment: Floats,
    _end: Floats,
    device: Ints,
    stream: Ints,
    correlation: Ints,
    producer_stream: Ints,
    record_correlation: Ints,
) -> StreamWaits:
    """The waits with the moments of their calls. A wait whose call is missing keeps its own time; an event whose record
    is missing has none."""
    waited, recorded = moment_of(correlation, launches), moment_of(record_correlation, launches)
    return StreamWaits(device, stream, np.where(np.isnan(waited), moment, waited), producer_stream, recorded)


def moment_of(correlation: Ints, launches: HostSpans) -> Floats:
    """When the host began each call, by its correlation; NaN where the trace does not have it."""
    if not len(launches):
        return np.full(len(correlation), np.nan)
    order = np.argsort(launches.link, kind="stable")
    place = np.minimum(np.searchsorted(launches.link[order], correlation), len(order) - 1)
    found = order[place]
    return np.where((correlation >= 0) & (launches.link[found] == correlation), launches.start[found], np.nan)
