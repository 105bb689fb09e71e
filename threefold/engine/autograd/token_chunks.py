"""Runs a function that treats every token alike over chunks of tokens, to bound the memory of its largest tensor.

`moe/layer.py` uses it for the experts of one rank, and `models/activation_memory.py` for dense MLPs that are
recomputed. With 128K tokens and top-8 routing the rows of all experts at once would take more memory than the model;
chunks of 2 GiB of rows cost no speed.

Shapes: T tokens, ... any dims after.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from threefold.engine.autograd.recompute import recompute as recompute_function

# The limit for the largest tensor of a chunk. Every chunk adds to the whole weight gradients: with the experts of
# Qwen3-30B-A3B that costs as much as the GEMMs of 2,000 tokens, and a chunk of 2 GiB has 65,536.
MAX_CHUNK_BYTES = 2 * 2**30
_TILE = 128


def chunk_size(num_tokens: int, token_bytes: int, requested: int | None = None) -> int:
    """Tokens of one chunk: `requested`, or equal chunks in whole GEMM tiles whose largest tensor fits the limit.

    `token_bytes` is the size of that tensor for one token. The result is `num_tokens` where no chunks are needed.
    """
    if requested is not None:
        return min(requested, num_tokens)
    num_chunks = max(1, -(-num_tokens * token_bytes // MAX_CHUNK_BYTES))
    return min(-(-num_tokens // (num_chunks * _TILE)) * _TILE, num_tokens)


def run_in_chunks(
    function: Callable[..., Tensor], size: int, *inputs_T: Tensor, recompute: bool, name: str = ""
) -> Tensor:
    """`function(*inputs)`, `size` tokens at a time.

    With `recompute` the backward makes the saved tensors of one chunk at a time; `name` is what a plan calls it.
    """
    parts = zip(*(x.split(size) for x in inputs_T), strict=True)
    return torch.cat([recompute_function(function, *part, enabled=recompute, name=name) for part in parts])
