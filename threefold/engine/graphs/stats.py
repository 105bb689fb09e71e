"""Counts of the CUDA graphs of a rank: recorded, replayed, fallbacks to eager by reason, and bytes.

`graphed_part.py` counts, and `schedule/microbatch_runners.py` passes the counts on.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from threefold.units import format_bytes


@dataclass
class GraphStats:
    """Counts of recorded graphs, replays and eager runs."""

    recorded: int = 0
    replays: Counter[str] = field(default_factory=Counter)  # by scope
    fallbacks: Counter[tuple[str, str]] = field(default_factory=Counter)  # runs without a graph, by scope and reason
    details: dict[tuple[str, str], str] = field(default_factory=dict)  # of the first fallback of each reason
    num_bytes: int = 0  # memory pools and static inputs

    @property
    def num_replays(self) -> int:
        """Graphs that were launched. That of the router sorts rows too and counts for two scopes."""
        return self.replays.total() - self.replays["moe_preprocess"]

    def count_fallback(self, scope: str, reason: str, detail: str = "") -> None:
        self.fallbacks[scope, reason] += 1
        self.details.setdefault((scope, reason), detail)

    def tally(self) -> str:
        """Replays by scope, then the runs without a graph by scope and reason: "attn 8, moe_router 8"."""
        replays = [f"{scope} {times}" for scope, times in sorted(self.replays.items())]
        fallbacks = [f"{scope} eager {times} ({why})" for (scope, why), times in sorted(self.fallbacks.items())]
        return ", ".join([*replays, *fallbacks])

    def as_json(self) -> dict[str, Any]:
        """The counts as RUN/effects.json has them for each rank."""
        fallbacks = [{"scope": scope, "reason": why, "times": n} for (scope, why), n in sorted(self.fallbacks.items())]
        return {
            "recorded": self.recorded,
            "replays": dict(sorted(self.replays.items())),
            "fallbacks": fallbacks,
            "memory_bytes": self.num_bytes,
        }

    def metrics(self) -> dict[str, int]:
        return {
            "graphs/replays": self.num_replays,
            **{f"graphs/replays/{scope}": times for scope, times in sorted(self.replays.items())},
            "graphs/fallbacks": self.fallbacks.total(),
            "graphs/memory_bytes": self.num_bytes,
        }

    def summary(self) -> str:
        text = f"graphs: {self.recorded} recorded, {format_bytes(self.num_bytes)}, {self.num_replays} replays"
        if self.replays:
            text += " (" + ", ".join(f"{scope} {times}" for scope, times in sorted(self.replays.items())) + ")"
        text += ", "
        text += f"{self.fallbacks.total()} fallbacks to eager"
        for (scope, reason), times in self.fallbacks.most_common():
            detail = self.details[scope, reason]
            text += f"\n  {scope}: {reason}{f' ({detail})' if detail else ''}, {times} times"
        return text
