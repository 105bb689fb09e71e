"""How many vocabulary tables a pipeline rank of our own engine holds, and which of them FSDP leaves unsharded.

`states.py` and `fsdp.py` ask. The tables are the embedding's and the output layer's, which may be one.
"""

from threefold.cost.stage_contents import StageContents, stage_contents
from threefold.layout.stages import Chunk
from threefold.plan.plan import Plan


def num_vocab_tables(plan: Plan, contents: StageContents) -> int:
    """Vocabulary tables of a rank: embedding and output layer. Multi-token prediction needs the first on its rank, and
    so does a tied output layer."""
    tied = plan.model.tied
    has_embedding = contents.embedding or contents.mtp > 0 or (tied and contents.loss)
    return has_embedding + (contents.loss and not tied)


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
