"""What the graphs of a rank did: for the metrics and the summary of a run."""

from collections import Counter
from dataclasses import dataclass, field

from threefold.units import format_bytes


@dataclass
class Tally:
    recorded: int = 0
    replays: int = 0
    fallbacks: Counter[tuple[str, str]] = field(default_factory=Counter)  # by scope and reason
    details: dict[tuple[str, str], str] = field(default_factory=dict)  # of the first of each
    num_bytes: int = 0  # of pools, and of inputs that are copied in

    def fall_back(self, scope: str, reason: str, detail: str = "") -> None:
        self.fallbacks[scope, reason] += 1
        self.details.setdefault((scope, reason), detail)

    def metrics(self) -> dict[str, int]:
        return {
            "graphs/replays": self.replays,
            "graphs/fallbacks": self.fallbacks.total(),
            "graphs/memory_bytes": self.num_bytes,
        }

    def summary(self) -> str:
        said = f"graphs: {self.recorded} recorded, {format_bytes(self.num_bytes)}, {self.replays} replays, "
        said += f"{self.fallbacks.total()} fallbacks to eager"
        for (scope, reason), times in self.fallbacks.most_common():
            detail = self.details[scope, reason]
            said += f"\n  {scope}: {reason}{f' ({detail})' if detail else ''}, {times} times"
        return said
