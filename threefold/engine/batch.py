"""One microbatch of token ids as the loader hands it to a rank.

`data/loader.py` makes batches; `step.py` and `schedule/microbatch_runners.py` read them.

Shapes: B sequences of a microbatch, S tokens of a sequence.
"""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """A microbatch of one rank, int64.

    Labels are shifted already: label i is the token after token i, and -100 where nothing is learned. With packed
    documents, `documents_BS` numbers the documents of each sequence from 0 and `positions_BS` restarts in each.
    `lengths` are the tokens of each sequence that are no padding; None where there is none.
    """

    tokens_BS: Tensor
    labels_BS: Tensor
    documents_BS: Tensor | None = None
    positions_BS: Tensor | None = None
    lengths: tuple[int, ...] | None = None
