"""Collective calls of our own engine's ZeRO-1 in a step. `traffic/threefold/step.py` adds them to the others.

Every bucket has a reduce-scatter of its gradients and an all-gather of its weights.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from threefold.cost.local_parameters import LocalParameter, fill_buckets, stage_parameters
from threefold.cost.traffic.threefold.calls import Call, MicrobatchSizes, all_gather, reduce_scatter
from threefold.plan.plan import Plan

_ALIGN = 64  # elements; each parameter begins at a multiple


def zero1_calls(plan: Plan, sizes: MicrobatchSizes) -> Counter[Call]:
    """Calls of all ranks together. Where TP does not divide the vocabulary, the last rank has fewer rows."""
    layout = plan.layout
    found: Counter[Call] = Counter()
    for vocab_rows, num_tp_ranks in _vocab_shards(plan.model.vocab, layout.tp).items():
        for parameters in stage_parameters(plan, vocab_rows):
            for group, size, bucket in fill_buckets(parameters):
                for call in _bucket_calls(plan, sizes, group, size, bucket):
                    found[call] += layout.gpus // layout.pp // layout.tp * num_tp_ranks
    return found


def _bucket_calls(
    plan: Plan, sizes: MicrobatchSizes, group: str, size: int, bucket: Sequence[LocalParameter]
) -> Iterator[Call]:
    elements = sum(-(-parameter.elements // _ALIGN) * _ALIGN for parameter in bucket)
    shard = -(-elements // (_ALIGN * size)) * _ALIGN
    yield from reduce_scatter(group, size, shard * grad_bytes(plan))
    yield from all_gather(group, size, shard * sizes.element_bytes)


def grad_bytes(plan: Plan) -> int:
    """Bytes of an element of a reduced gradient: never fewer than the weight's. bf16 and fp16 have only fp32 in
    common."""
    return 2 if plan.knobs.grad_dtype == "bf16" and plan.knobs.precision not in ("fp32", "fp16") else 4


def _vocab_shards(vocab: int, tp: int) -> Counter[int]:
    """The number of tensor-parallel ranks by their rows of the vocabulary."""
    step = -(-vocab // tp)
    return Counter(min(vocab, (rank + 1) * step) - min(vocab, rank * step) for rank in range(tp))
