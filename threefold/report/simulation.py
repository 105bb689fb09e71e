"""Simulated steps as text: what ranks of unequal speed cost."""

from threefold.cost.time.simulation import Simulation
from threefold.units import format_number


def simulation_text(simulated: Simulation, jitter: float) -> str:
    """The median and the longest step, over those of equal ranks and of the closed form."""
    slower = simulated.median_seconds / simulated.even_seconds - 1
    median, longest = format_number(simulated.median_seconds), format_number(simulated.seconds[-1])
    even, closed = format_number(simulated.even_seconds), format_number(simulated.closed_seconds)
    return (
        f"simulated  {len(simulated.seconds)} steps of {simulated.num_ranks:,} ranks in {simulated.num_groups:,} "
        f"groups, each pass off by {jitter:.1%}:\n"
        f"           median {median} s ({slower:+.1%} over equal ranks), longest {longest} s; equal ranks {even} s, "
        f"closed form {closed} s"
    )
