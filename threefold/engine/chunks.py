"""Work on tokens in chunks, so that what it holds at a time does not grow with their number.

Shapes: T tokens, ... any dims behind.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from threefold.engine.recompute import again

# Of the widest tensor that a chunk makes. Every chunk adds to the whole weight gradients: with the experts of
# Qwen3-30B-A3B that costs as much as the products of 2,000 tokens, and these are 65,536.
WIDEST_BYTES = 2 * 2**30
_TILE = 128


def chunk_tokens(num_tokens: int, token_bytes: int, asked: int | None = None) -> int:
    """Tokens of one chunk: as many as `asked`, or chunks of equal size, in whole tiles of a matrix product, whose
    widest tensor of `token_bytes` a token stays within the limit. As many as there are: not to be cut."""
    if asked is not None:
        return min(asked, num_tokens)
    num_chunks = max(1, -(-num_tokens * token_bytes // WIDEST_BYTES))
    return min(-(-num_tokens // (num_chunks * _TILE)) * _TILE, num_tokens)


def in_chunks(function: Callable[..., Tensor], size: int, *given_T: Tensor, repeated: bool) -> Tensor:
    """`function(*given)`, which does to each token the same, for `size` of them at a time; `repeated`: what a chunk
    keeps is made again when the backward comes to it, so that one chunk of it lives at a time."""
    parts = zip(*(x.split(size) for x in given_T), strict=True)
    return torch.cat([again(function, *part, on=repeated) for part in parts])
