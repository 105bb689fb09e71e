"""Adds up tensors that are made and freed one after the other, and remembers the highest sum.

The modules of this folder go through a forward or a backward of the engine line by line. A tensor that a local variable
of a caller still holds is freed only where that function returns.

Mirrors no file of the engine.
"""


class Timeline:
    """Live bytes above those at the start."""

    def __init__(self) -> None:
        self.live = self.peak = 0.0

    def make(self, *sizes: float) -> None:
        self.live += sum(sizes)
        self.peak = max(self.peak, self.live)

    def free(self, *sizes: float) -> None:
        self.live -= sum(sizes)

    def replace(self, made: float, freed: float) -> None:
        """Make a tensor from another one, which is freed then."""
        self.make(made)
        self.free(freed)

    def pass_through(self, *sizes: float) -> None:
        """Make tensors that are freed at once."""
        self.make(*sizes)
        self.free(*sizes)

    def take_peak(self) -> float:
        """The highest sum since the last call."""
        peak, self.peak = self.peak, self.live
        return peak
