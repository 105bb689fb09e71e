"""The source lines of allocations: which frame of a stack to blame, and which of the plan's terms it belongs to.

The innermost frame outside of PyTorch is the line that asked for the memory. Where that is code of Threefold's engine,
or of a predicted snapshot, the allocation also has a term of `plan/terms.py`, so that it can be set against an
estimate.
"""

import re
from typing import Any

from threefold.plan.terms import MEMORY_TERMS

PREDICTED = "threefold predicts"  # the file name of frames in predicted snapshots; the frame's name is the term
NO_SOURCE = "no source recorded"
_MAX_FRAMES = 256
_NOT_THE_PROGRAM = re.compile(
    r"(^|/)torch/|(^|/)(contextlib|functools|threading)\.py$|\.(cpp|cc|cu|h|hpp|so[\d.]*)$|^\?\?$|^<|^$|^:0$"
)
# Part of a path in the engine -> term. The first match counts.
_TERMS = (
    ("/autograd/recompute", "recompute"),
    ("/optim/", "optimizer"),
    ("/data_parallel/", "gradients"),
    ("/models/init_weights", "weights"),
    ("/models/build", "weights"),
    ("/weights/", "weights"),
    ("/precision/weight_cache", "quantised_weights"),
    ("/vision/", "vision"),
    ("/attention/", "attention"),
    ("/moe/router", "router"),
    ("/moe/balance", "router"),
    ("/moe/experts", "experts"),
    ("/precision/low_precision_experts", "experts"),
    ("/dispatch/", "dispatch"),
    ("/models/head", "logits"),
    ("/graphs/", "graphs"),
    ("/layers/", "norms"),
    ("/moe/layer", "dispatch"),
    ("/models/", "norms"),
)


class Sources:
    """Stacks by number, each with its line and its term. A pickle has equal stacks once, and each is looked at once."""

    def __init__(self) -> None:
        self.lines: list[str] = [NO_SOURCE]
        self.terms: list[str] = [""]
        self._known: dict[tuple[str, str], int] = {(NO_SOURCE, ""): 0}
        self._of_object: dict[int, int] = {}

    def index(self, frames: Any) -> int:
        """The number of a stack's line and term. The caller keeps the frames alive."""
        key = id(frames)
        if key not in self._of_object:
            place = _line_and_term(frames if isinstance(frames, list) else [])
            if place not in self._known:
                self._known[place] = len(self.lines)
                self.lines.append(place[0])
                self.terms.append(place[1])
            self._of_object[key] = self._known[place]
        return self._of_object[key]


def _line_and_term(frames: list[Any]) -> tuple[str, str]:
    line, term = "", ""
    for frame in frames[:_MAX_FRAMES]:
        if not isinstance(frame, dict):
            continue
        file, name = str(frame.get("filename"))[:1000], str(frame.get("name"))[:200]
        if file == PREDICTED:
            return f"{PREDICTED}: {name}", name if name in MEMORY_TERMS else ""
        if not line and not _NOT_THE_PROGRAM.search(file):
            number = frame.get("line")
            line = f"{file}:{number if isinstance(number, int) else 0} {name}"
        if not term and "threefold/engine/" in file:
            term = next((found for part, found in _TERMS if part in file), "")
    if not line and frames and isinstance(frames[0], dict):
        line = f"PyTorch alone: {str(frames[0].get('name'))[:100]}"
    return line or NO_SOURCE, term
