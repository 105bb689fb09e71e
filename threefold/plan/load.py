"""The load that a router puts on its experts: `job.load`, a named workload by formula or what a run recorded. No torch.

`expert_shares` returns the share of each expert in the token copies that a source rank routes in a step and layer, and
`drawn_choices` the experts of its tokens, drawn by these shares. Equal arguments give equal results, on any machine.
`cost/` prices a load by it, `dry-run --load` rehearses it, benchmarks and tests of `knobs.expert_balance` route by it.
The formulas are those of docs/reference/load.md.

A recorded file is JSON: the tokens of each expert as a list, one such list a layer (`loads.json` in the folder of a
run), or an object `{"steps": [...], "counts": [step][layer][expert], "sources": [rank][layer][expert]}` (`routing.json`
there). `sources` may be absent: then all ranks route alike.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threefold.findings import Finding, FindingsError, shown
from threefold.safe_files import check_inside, read_json

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

BALANCED = "balanced"
WORKLOADS = (
    "uniform",  # W0: all experts alike, uneven by chance alone
    "zipf",
    "hot-experts",  # W1 and W3: hot experts, spread over the ranks
    "hot-rank",  # W2: as many hot experts side by side
    "ragged-sources",  # W4: each source rank has hot experts of its own
    "idle-experts",  # W5: a quarter of the experts side by side gets nothing
    "drift",  # W6: the hot rank is another one in every step
    "burst",  # W7: uniform, and every eighth step a hot rank
)
PREFIX = "file:"
LOADS, ROUTING = "loads.json", "routing.json"  # in the folder of a run
MOST_TOKENS = 1e18  # of an expert; sums stay far from where a float gives out
PERIOD = 16  # steps and source ranks after which every named workload repeats itself
_HOT_PART, _HEAT = 1 / 16, 0.5  # of the experts, and of the copies that these get
_IDLE_PART, _BURST_EVERY = 1 / 4, 8


@dataclass(frozen=True)
class RecordedLoad:
    """The record of a run: tokens of each expert, by step and layer, and by source rank and layer."""

    steps: tuple[int, ...]
    counts: tuple[tuple[tuple[float, ...], ...], ...]
    sources: tuple[tuple[tuple[float, ...], ...], ...] = ()

    @property
    def num_experts(self) -> int:
        return len(self.counts[0][0])

    def shares(self, layer: int, step: int, rank: int) -> list[float]:
        """A source rank's part of a step is taken to be its part of all steps."""
        row = self.counts[step % len(self.counts)][layer % len(self.counts[0])]
        if self.sources:
            by_rank = [source[layer % len(source)] for source in self.sources]
            mean = [sum(column) / len(by_rank) for column in zip(*by_rank, strict=True)]
            own = by_rank[rank % len(by_rank)]
            row = tuple(n * (o / m if m else 1.0) for n, o, m in zip(row, own, mean, strict=True))
        total = sum(row)
        return [n / total for n in row] if total else [1 / len(row)] * len(row)


def expert_shares(
    load: str, num_experts: int, layer: int = 0, step: int = 0, rank: int = 0, top_k: int = 1
) -> list[float]:
    """The share of each expert; no share is above 1 / `top_k`, because a token chooses an expert once."""
    if load.startswith(PREFIX):
        recorded = read_load(load.removeprefix(PREFIX))
        if recorded.num_experts != num_experts:
            problem = f"it has the loads of {recorded.num_experts} experts, the model has {num_experts}"
            raise FindingsError([_finding(load, problem)])
        return _capped(recorded.shares(layer, step, rank), top_k)
    return list(_named_shares(load, num_experts, layer, step % PERIOD, rank % PERIOD, top_k))


@lru_cache(maxsize=4096)
def _named_shares(load: str, num_experts: int, layer: int, step: int, rank: int, top_k: int) -> tuple[float, ...]:
    E = num_experts
    hot, stride = max(1, round(E * _HOT_PART)), _stride(E)

    def placed(weights: Sequence[float], start: int) -> list[float]:
        """Weights at places that a golden ratio apart scatters over the experts."""
        shares = [0.0] * E
        for q, weight in enumerate(weights):
            shares[(q + start) * stride % E] = weight
        return shares

    def block(width: int, inside: float, shift: int = 0) -> list[float]:
        """Neighboring experts, from a multiple of their number on, that get the share `inside` together."""
        first = (layer * stride % E // width + shift) * width % E
        rest = (1 - inside) / max(1, E - width)
        return [inside / width if (e - first) % E < width else rest for e in range(E)]

    heated = [_HEAT / hot] * hot + [(1 - _HEAT) / max(1, E - hot)] * (E - hot)
    match load:
        case "zipf":
            shares = placed([1 / (q + 1) for q in range(E)], layer)
        case "hot-experts":
            shares = placed(heated, layer)
        case "hot-rank":
            shares = block(hot, _HEAT)
        case "ragged-sources":
            shares = block(hot, _HEAT, shift=rank)
        case "idle-experts":
            shares = block(max(1, round(E * _IDLE_PART)), 0.0)
        case "drift":
            shares = block(hot, _HEAT, shift=step)
        case "burst" if step % _BURST_EVERY == _BURST_EVERY - 1:
            shares = block(hot, _HEAT)
        case _:
            shares = [1 / E] * E
    return tuple(_capped(shares, top_k))


def _stride(num_experts: int) -> int:
    """The number without a common divisor with the experts that is nearest to their golden section."""
    wanted = num_experts * (math.sqrt(5) - 1) / 2
    coprime = [n for n in range(1, num_experts + 1) if math.gcd(n, num_experts) == 1]
    return min(coprime, key=lambda n: abs(n - wanted))


def _capped(shares: Sequence[float], top_k: int) -> list[float]:
    """The shares with what is above 1 / `top_k` spread over the others: by their shares, and evenly where all others
    are full or idle."""
    most, total = 1 / top_k, sum(shares)
    capped = [n / total for n in shares]
    for _ in range(len(capped)):
        excess = sum(n - most for n in capped if n > most)
        if excess <= 1e-12:
            break
        room = [n if n < most else 0.0 for n in capped]
        if not any(room):
            room = [float(n == 0.0) for n in capped]
        scale = excess / sum(room)
        capped = [min(n, most) + r * scale for n, r in zip(capped, room, strict=True)]
    return capped


def drawn_choices(
    load: str,
    num_experts: int,
    num_tokens: int,
    top_k: int,
    layer: int = 0,
    step: int = 0,
    rank: int = 0,
    seed: int = 0,
) -> "NDArray[np.int64]":
    """The `top_k` different experts of each token. `balanced` takes them in turn, as forced balance does.

    This is systematic sampling. The experts lie on a line, each as long as its expected copies of a token, and points
    at distance 1 from a drawn start choose those that they hit: an expert's chance is its share, and none is hit twice.
    Each draw orders the experts anew, so that neighbors are as often chosen together as others.
    """
    import numpy as np

    if load == BALANCED:
        first = rank * num_tokens * top_k
        return ((first + np.arange(num_tokens * top_k)) % num_experts).reshape(num_tokens, top_k)
    draw = np.random.default_rng((seed, layer, step, rank))
    shares = np.array(expert_shares(load, num_experts, layer, step, rank, top_k))
    choices, at = np.empty((num_tokens, top_k), dtype=np.int64), 0
    for part in np.array_split(np.arange(num_tokens), max(1, num_tokens // 16)):
        order = draw.permutation(num_experts)
        ends = np.cumsum(shares[order] * top_k)
        points = draw.random(len(part))[:, None] + np.arange(top_k)
        places = np.searchsorted(ends / ends[-1] * top_k, points, side="right")
        choices[at : at + len(part)] = order[np.minimum(places, num_experts - 1)]
        at += len(part)
    return choices


def drawn_counts(
    load: str,
    num_experts: int,
    num_tokens: int,
    top_k: int,
    layer: int = 0,
    step: int = 0,
    rank: int = 0,
    seed: int = 0,
) -> list[int]:
    """Token copies of each expert among the tokens of a source rank."""
    import numpy as np

    choices = drawn_choices(load, num_experts, num_tokens, top_k, layer, step, rank, seed)
    return [int(n) for n in np.bincount(choices.ravel(), minlength=num_experts)]


def load_problems(load: str, num_experts: int) -> list[Finding]:
    """Faults of a file that a plan names."""
    try:
        if load.startswith(PREFIX):
            expert_shares(load, num_experts)
    except FindingsError as error:
        return error.findings
    return []


def read_load(path: str | Path) -> RecordedLoad:
    """The loads in a file or in the folder of a run. Raises findings."""
    file = folder = Path(path).expanduser()
    try:
        if folder.is_dir():
            file = next((folder / name for name in (ROUTING, LOADS) if (folder / name).exists()), folder / LOADS)
            check_inside(file, folder)
        stamp = file.stat()
        return _read_load(file, stamp.st_mtime_ns, stamp.st_size)
    except (OSError, ValueError) as error:
        problem = f"{file.name} cannot be read: {getattr(error, 'strerror', None) or error}"
        raise FindingsError([_finding(str(path), problem)]) from None


@lru_cache(maxsize=16)
def _read_load(file: Path, modified: int, size: int) -> RecordedLoad:
    value = read_json(file)
    if isinstance(value, list) and value:
        value = {"counts": [value if isinstance(value[0], list) else [value]]}
    if not isinstance(value, Mapping):
        raise ValueError("it holds no loads")
    counts, sources = _table(value.get("counts")), _table(value.get("sources") or [], may_be_empty=True)
    wide = {len(row) for table in (*counts, *sources) for row in table}
    deep = {len(table) for table in (*counts, *sources)}
    if len(wide) != 1 or len(deep) != 1 or not any(any(row) for table in counts for row in table):
        raise ValueError("its layers do not have equally many experts, or no expert has a token")
    steps = value.get("steps")
    known = isinstance(steps, list) and len(steps) == len(counts) and all(type(step) is int for step in steps)
    return RecordedLoad(tuple(steps) if known and steps else tuple(range(len(counts))), counts, sources)


def _table(value: Any, may_be_empty: bool = False) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Numbers by three indices."""
    wrong = ValueError(f"loads are numbers from 0 to {MOST_TOKENS:g}, in a list for each layer")
    if not isinstance(value, list) or not (value or may_be_empty):
        raise wrong
    for table in value:
        if not isinstance(table, list) or not table or not all(isinstance(row, list) and row for row in table):
            raise wrong
        if not all(type(n) in (int, float) and 0 <= n <= MOST_TOKENS for row in table for n in row):
            raise wrong  # false of NaN
    return tuple(tuple(tuple(map(float, row)) for row in table) for table in value)


def _finding(load: str, problem: str) -> Finding:
    advice = f"write {BALANCED}, {', '.join(WORKLOADS)}, or file:PATH of a run's folder or of its {ROUTING}"
    name = load if load.startswith(PREFIX) else PREFIX + load
    return Finding(rule="load-is-readable", at="job.load", problem=f"{shown(name)}: {problem}", advice=advice)
