"""Dynamic context parallelism as arithmetic: the CP degree that a sequence needs, and the aligned blocks of ranks.

With `knobs.cp_dynamic` a sequence is sharded over as few of the `cp` ranks of a group as its length needs. The packer
(`engine/data/dynamic_cp`), the process groups (`engine/shard/context_parallel.py`) and the rules ask here.

Example: with 128K tokens over cp 8 a rank holds at most 16K tokens of a sequence. A sequence of 3K tokens has degree 1,
one of 20K tokens degree 2 (10K a rank), and one of 100K tokens degree 8.
"""


def cp_degrees(cp: int) -> tuple[int, ...]:
    """The degrees that a sequence can have: the powers of two up to `cp`, which is one itself."""
    return tuple(2**power for power in range(cp.bit_length()))


def cp_degree(length: int, seq_len: int, cp: int) -> int:
    """The smallest degree that leaves a rank at most the tokens of a full sequence over all `cp` ranks."""
    return next(degree for degree in cp_degrees(cp) if length * cp <= seq_len * degree)


def row_multiple(degree: int, tp: int) -> int:
    """Lengths of sequences are multiples of this: two zigzag pieces a rank, and equal parts for tensor parallelism."""
    return (2 * degree if degree > 1 else 1) * tp


def num_dynamic_groups(cp: int, tp: int) -> int:
    """Process groups of a rank beyond those of its layout: for each degree between 1 and `cp` the block of CP ranks,
    and with tensor parallelism the block with all its TP ranks."""
    return max(0, len(cp_degrees(cp)) - 2) * (2 if tp > 1 else 1)
