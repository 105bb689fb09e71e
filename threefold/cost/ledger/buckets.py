"""What our engine's ZeRO-1 sends in a step: flat buckets of gradients out, and of weights back."""

from collections import Counter
from collections.abc import Iterator, Sequence

from threefold.cost.ledger.calls import Call, Sizes, all_gather, reduce_scatter
from threefold.cost.ledger.pieces import Piece, pieces_of_stages
from threefold.plan.plan import Plan

_ALIGN = 64  # elements, where each parameter begins
_BUCKET_ELEMENTS = 40_000_000
Filled = tuple[str, int, list[Piece]]  # group, its ranks


def bucket_calls(plan: Plan, sizes: Sizes) -> Counter[Call]:
    """Of all ranks together. The last rows of a vocabulary that does not divide are fewer."""
    layout = plan.layout
    found: Counter[Call] = Counter()
    for vocab, places in _vocab_parts(plan.model.vocab, layout.tp).items():
        for stage in pieces_of_stages(plan, vocab):
            for group, size, row in fill(stage, _BUCKET_ELEMENTS):
                for call in _calls(plan, sizes, group, size, row):
                    found[call] += layout.gpus // layout.pp // layout.tp * places
    return found


def _calls(plan: Plan, sizes: Sizes, group: str, size: int, row: Sequence[Piece]) -> Iterator[Call]:
    elements = sum(-(-piece.elements // _ALIGN) * _ALIGN for piece in row)
    share = -(-elements // (_ALIGN * size)) * _ALIGN
    yield from reduce_scatter(group, size, share * _grad_bytes(plan))
    yield from all_gather(group, size, share * sizes.width)


def _grad_bytes(plan: Plan) -> int:
    """Never narrower than the weights; bf16 and fp16 have only fp32 in common."""
    return 2 if plan.knobs.grad_dtype == "bf16" and plan.knobs.precision not in ("fp32", "fp16") else 4


def _vocab_parts(vocab: int, tp: int) -> Counter[int]:
    step = -(-vocab // tp)
    return Counter(min(vocab, (place + 1) * step) - min(vocab, place * step) for place in range(tp))


def fill(pieces: Sequence[Piece], most: int) -> list[Filled]:
    """From the last parameter to the first, those with the same copies together; what other stages share, apart."""
    filled: list[Filled] = []
    filling: dict[tuple[int, bool], list[Piece]] = {}
    names: dict[tuple[int, bool], str] = {}
    for piece in reversed(pieces):
        if piece.shared:
            filled.append((piece.group, piece.copies, [piece]))
            continue
        # Groups of one grid lie in each other: of one size, they are the same ranks.
        key = piece.copies, piece.of_experts
        names[key] = min(names.get(key, piece.group), piece.group, key=len)
        row = filling.setdefault(key, [])
        row.append(piece)
        if sum(one.elements for one in row) >= most:
            filled.append((names[key], piece.copies, filling.pop(key)))
    return filled + [(names[key], key[0], row) for key, row in filling.items()]
