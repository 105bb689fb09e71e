"""The parameters of a pipeline rank of our own engine, tensor by tensor, and the buckets in which ZeRO-1 keeps them.

They are in the order in which the engine registers them, without small vectors. `optimizer_step.py` and `states.py` ask
for them where it matters which tensor is whose: for Muon, and for optimizer states on the host.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from threefold.cost.stage_contents import StageContents, stage_contents
from threefold.layout.stages import Chunk
from threefold.plan.plan import Plan
from threefold.spec.model import GqaSpec, Layer, MlaSpec

BUCKET_ELEMENTS = 40_000_000


@dataclass(frozen=True, slots=True)
class RankTensor:
    """One parameter on a rank: a matrix, or a stack of matrices."""

    rows: float
    columns: float
    count: float = 1.0  # matrices of a stack
    shards: int = 1  # ranks that share each matrix: those of tp or etp
    copies: int = 1  # ranks that hold the same part
    is_expert: bool = False
    is_table: bool = False  # of the vocabulary, which Muon leaves to AdamW

    @property
    def elements(self) -> float:
        return self.rows * self.columns * self.count / self.shards


def num_vocab_tables(plan: Plan, contents: StageContents) -> int:
    """Vocabulary tables of a rank: embedding and output layer. Multi-token prediction needs the first on its rank."""
    has_head = not plan.model.tied and contents.loss
    return (contents.embedding or contents.mtp > 0) + has_head


def num_unsharded_tables(plan: Plan, contents: StageContents) -> int:
    """Vocabulary tables of a rank that FSDP leaves to ZeRO-1, because some pipeline rank uses them in several of its
    chunks."""
    if plan.knobs.data_parallel == "zero1" or plan.layout.vpp == 1:
        return 0
    in_several = [[_uses_tables(plan, chunk) for chunk in stage.chunks] for stage in stage_contents(plan)]
    several = [max(sum(uses[n] for uses in of_stage) for of_stage in in_several) > 1 for n in range(2)]
    ends = Chunk((), contents.embedding, contents.mtp, contents.loss)
    return sum(used and apart for used, apart in zip(_uses_tables(plan, ends), several, strict=True))


def _uses_tables(plan: Plan, chunk: Chunk) -> tuple[bool, bool]:
    """Whether a chunk uses the embedding's table, and that of the output layer where it is another one."""
    tied = plan.model.tied
    return chunk.embedding or chunk.mtp > 0 or (chunk.loss and tied), chunk.loss and not tied


def rank_tensors(plan: Plan, contents: StageContents) -> list[RankTensor]:
    """The parameters of a rank with the contents of a stage."""
    model, layout = plan.model, plan.layout
    replicas = layout.dp * layout.cp
    table = RankTensor(model.vocab, model.dim, shards=layout.tp, copies=replicas, is_table=True)
    depths = min(contents.mtp, 1) if model.mtp_shared else contents.mtp
    has_embedding = contents.embedding or contents.mtp > 0
    tensors = [table] if has_embedding else []
    for layer in contents.layers:
        tensors += _layer_tensors(plan, layer)
    tensors += [table] * (num_vocab_tables(plan, contents) - has_embedding)
    for layer in model.mtp_depth * depths:
        tensors.append(RankTensor(model.dim, 2 * model.dim, copies=replicas * layout.tp))
        tensors += _layer_tensors(plan, layer)
    return tensors


def _layer_tensors(plan: Plan, layer: Layer) -> Iterator[RankTensor]:
    model, layout, moe = plan.model, plan.layout, plan.model.moe
    replicas = layout.dp * layout.cp

    def split(rows: float, columns: float) -> RankTensor:
        return RankTensor(rows, columns, shards=layout.tp, copies=replicas)

    def whole(rows: float, columns: float) -> RankTensor:
        return RankTensor(rows, columns, copies=replicas * layout.tp)

    spec = model.attention if layer.mixer == "attention" else model.local_attention
    if layer.mixer == "delta" and model.delta:
        yield split(2 * model.delta.keys + 2 * model.delta.values, model.dim)
        yield split(model.dim, model.delta.values)
    elif layer.mixer in ("attention", "window") and isinstance(spec, MlaSpec):
        if spec.q_rank:
            yield whole(spec.q_rank, model.dim)
        yield split(spec.num_heads * spec.qk_dim, spec.q_rank or model.dim)
        yield whole(spec.kv_rank + spec.rope_dim, model.dim)
        yield split(spec.num_heads * (spec.nope_dim + spec.v_dim), spec.kv_rank)
        yield split(model.dim, spec.num_heads * spec.v_dim)
    elif layer.mixer in ("attention", "window") and isinstance(spec, GqaSpec):
        yield split(spec.q_dim * (2 if spec.gated else 1), model.dim)
        yield split(spec.kv_dim, model.dim)
        yield split(spec.kv_dim, model.dim)
        yield split(model.dim, spec.q_dim)
    width = model.dense_dim if layer.ffn == "dense" else 0
    if layer.ffn == "moe" and moe:
        for rows, columns in ((2 * moe.expert_dim, model.dim), (model.dim, moe.expert_dim)):
            count = moe.num_experts / layout.ep
            yield RankTensor(rows, columns, count, layout.etp, layout.edp, is_expert=True)
        width = moe.shared_width
    if width:
        yield split(width, model.dim)
        yield split(width, model.dim)
        yield split(model.dim, width)


def buckets(tensors: Sequence[RankTensor]) -> list[list[RankTensor]]:
    """Tensors by bucket: from the last to the first, each kind by itself, until a bucket is full."""
    filled: list[list[RankTensor]] = []
    filling: dict[object, list[RankTensor]] = {}
    for tensor in reversed(tensors):
        key = tensor.copies, tensor.is_expert
        row = filling.setdefault(key, [])
        row.append(tensor)
        if sum(each.elements for each in row) >= BUCKET_ELEMENTS:
            filled.append(filling.pop(key))
    return [*filled, *filling.values()]


def owned_parts(bucket: Sequence[RankTensor]) -> list[float]:
    """Elements that the first rank owns of each tensor of a bucket: its equal part is a run of them."""
    left, parts = sum(tensor.elements for tensor in bucket) / max(1, bucket[0].copies), []
    for tensor in bucket:
        part = min(left, tensor.elements)
        if part <= 0:
            break
        parts.append(part)
        left -= part
    return parts
