"""The pipeline layout string: `Et*3|(tt|)*29m|L`.

E is the embedding, t a decoder layer, m an MTP layer, L the loss; a bar ends a chunk; `x*n` and `(...)*n`
repeat; commas and blanks are decoration. Chunk i sits on pipeline rank i mod PP (interleaved), or runs down
the ranks and back up (V-shaped).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from threefold.findings import Finding, FindingsError

LETTERS = "EtmL"
MAX_ITEMS = 100_000  # no model has as many layers; keeps '(t*9999)*9999' from filling the memory


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one virtual stage holds."""

    layers: tuple[int, ...]
    embedding: bool = False
    mtp: int = 0
    loss: bool = False

    def __str__(self) -> str:
        return "E" * self.embedding + "t" * len(self.layers) + "m" * self.mtp + "L" * self.loss


@lru_cache(maxsize=1024)
def parse_stages(text: str) -> tuple[Chunk, ...]:
    """Chunks in order; layer numbers count up along the string. Raises findings on bad text."""
    flat = _expand(text)
    chunks, first = [], 0
    for part in flat.split("|"):
        count = part.count("t")
        chunks.append(
            Chunk(
                layers=tuple(range(first, first + count)),
                embedding="E" in part,
                mtp=part.count("m"),
                loss="L" in part,
            )
        )
        first += count
    _check_order(text, flat)
    return tuple(chunks)


def format_stages(chunks: Sequence[Chunk]) -> str:
    """The shortest plain string: runs of equal letters and of equal chunks are folded."""
    parts = [_fold_letters(str(chunk)) for chunk in chunks]
    runs = [(part, len(list(run))) for part, run in groupby(parts)]
    *inner, (last, times) = runs
    out = [f"({part}|)*{count}" if count > 1 else f"{part}|" for part, count in inner]
    if times > 1:
        out.append(f"({last}|)*{times - 1}" if times > 2 else f"{last}|")
    return "".join([*out, last])


def balance(
    num_layers: int,
    num_chunks: int,
    mtp: int = 0,
    layer_weights: Sequence[float] | None = None,
    embedding_weight: float = 1.0,
    mtp_weight: float = 1.0,
    loss_weight: float = 1.0,
) -> tuple[Chunk, ...]:
    """Spread a model over chunks so that the heaviest chunk is as light as it can be.

    Without weights, layers that divide evenly stay even; else embedding and loss count as one layer each.
    """
    if num_chunks < 1 or num_layers < 0:
        raise ValueError("a pipeline needs at least one chunk")
    if layer_weights is None and num_layers % num_chunks == 0:
        embedding_weight = mtp_weight = loss_weight = 0.0
    weights = (embedding_weight, *(layer_weights or [1.0] * num_layers), *[mtp_weight] * mtp, loss_weight)
    cuts = _cut(weights, num_chunks)
    kinds = "E" + "t" * num_layers + "m" * mtp + "L"
    flat = "|".join(kinds[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(kinds)], strict=True))
    return parse_stages(flat)


def chunk_rank(chunk: int, pp: int, v_shaped: bool = False) -> int:
    """The pipeline rank that holds a chunk."""
    lap, place = divmod(chunk, pp)
    return pp - 1 - place if v_shaped and lap % 2 else place


@lru_cache(maxsize=4096)
def _cut(weights: tuple[float, ...], parts: int) -> tuple[int, ...]:
    """Ends of all parts but the last: the smallest possible heaviest part, then the most even split."""
    low, high = max(weights, default=0.0), sum(weights)
    for _ in range(60):
        limit = (low + high) / 2
        if _parts_needed(weights, limit) <= parts:
            high = limit
        else:
            low = limit
    limit = high * (1 + 1e-9)
    cuts, start, left = [], 0, float(sum(weights))
    for part in range(parts - 1):
        share = left / (parts - part)
        stop, load = start, 0.0
        while stop < len(weights):
            heavier = load + weights[stop]
            enough = stop > start and heavier - share > share - load
            if heavier > limit or (enough and _parts_needed(weights[stop:], limit) <= parts - part - 1):
                break
            load, stop = heavier, stop + 1
        cuts.append(stop)
        left -= load
        start = stop
    return tuple(cuts)


def _parts_needed(weights: Sequence[float], limit: float) -> int:
    count, load = 1, 0.0
    for weight in weights:
        if load + weight > limit * (1 + 1e-12):
            count, load = count + 1, 0.0
        load += weight
    return count if weights else 0


def _fold_letters(text: str) -> str:
    runs = ((letter, len(list(run))) for letter, run in groupby(text))
    return "".join(
        letter if count == 1 else letter * 2 if count == 2 else f"{letter}*{count}" for letter, count in runs
    )


def _refuse(text: str, problem: str, advice: str) -> FindingsError:
    shown = text if len(text) <= 60 else text[:57] + "..."
    finding = Finding(rule="stages-readable", at="layout.stages", problem=f"{shown!r}: {problem}", advice=advice)
    return FindingsError([finding])


def _expand(text: str) -> str:
    if len(text) > MAX_ITEMS:
        raise _refuse(text, f"more than {MAX_ITEMS} letters", "fold what repeats: (tt|)*29")
    flat, rest = _sequence(text, text.replace(" ", "").replace(",", ""), depth=0)
    if rest:
        raise _refuse(text, f"unexpected {rest[0]!r}", "balance the parentheses")
    return flat


def _sequence(text: str, rest: str, depth: int) -> tuple[str, str]:
    out: list[str] = []
    size = 0
    while rest and rest[0] != ")":
        if rest[0] == "(":
            if depth > 8:
                raise _refuse(text, "parentheses nest too deep", "write it flatter")
            unit, rest = _sequence(text, rest[1:], depth + 1)
            if not rest:
                raise _refuse(text, "a parenthesis is not closed", "add the missing ')'")
            rest = rest[1:]
        elif rest[0] in LETTERS or rest[0] == "|":
            unit, rest = rest[0], rest[1:]
        else:
            raise _refuse(text, f"unexpected {rest[0]!r}", "use E, t, m, L, '|', '*n' and parentheses")
        times, rest = _repeat(text, rest)
        size += len(unit) * times
        if size > MAX_ITEMS:
            raise _refuse(text, f"more than {MAX_ITEMS} items", "shorten the repetition")
        out.append(unit * times)
    return "".join(out), rest


def _repeat(text: str, rest: str) -> tuple[int, str]:
    if not rest.startswith("*"):
        return 1, rest
    digits = len(rest) - len(rest[1:].lstrip("0123456789")) - 1
    if not 1 <= digits <= 6:
        raise _refuse(text, "'*' needs a number of one to six digits behind it", "write t*3")
    return int(rest[1 : 1 + digits]), rest[1 + digits :]


def _check_order(text: str, flat: str) -> None:
    letters = flat.replace("|", "")
    for letter, name in (("E", "embedding"), ("L", "loss")):
        if letters.count(letter) != 1:
            raise _refuse(text, f"{letters.count(letter)} times {letter}", f"place the {name} ({letter}) exactly once")
    order = "".join(sorted(letters, key=LETTERS.index))
    if letters != order:
        raise _refuse(text, "items out of order", "keep the order embedding E, layers t, MTP m, loss L")
