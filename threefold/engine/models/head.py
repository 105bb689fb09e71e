"""What the head multiplies to get logits over the vocabulary: its matrix, and hidden states behind the final norm.

A bias of the head (Phi-MoE) is one more column of the matrix, which a column of ones multiplies, so that the loss in
chunks and over vocabulary shards knows nothing of it. `decoder.py` calls the functions of the matrix and its input,
`build.py` that of the precision.

Shapes: V vocabulary, D model dim.
"""

import torch
from torch import Tensor, nn

from threefold.engine.layers.head_gemms import HeadPrecision
from threefold.engine.model_options import Options
from threefold.engine.precision.emulated_backend import QuantizedWeights
from threefold.engine.precision.recipes import RECIPES
from threefold.engine.precision.weight_cache import WeightCache
from threefold.spec.model import ModelSpec

_BIAS_COLUMNS = 16  # the bias, and zeros up to a width that GEMMs like


def head_matrix(owner: nn.Module, spec: ModelSpec) -> Tensor:
    """The weight of the head or of the embedding that it is tied to, with the column of a bias."""
    weight_VD = owner.get_parameter("weight")
    if not spec.head_bias:
        return weight_VD
    column_V1 = owner.get_parameter("bias")[:, None]
    return torch.cat([weight_VD, column_V1, column_V1.new_zeros(len(column_V1), _BIAS_COLUMNS - 1)], dim=1)


def head_input(hidden: Tensor, spec: ModelSpec) -> Tensor:
    """Hidden states as `head_matrix` takes them: divided by Granite's divisor, and with the column of ones."""
    if spec.logit_divisor != 1.0:
        hidden = hidden / spec.logit_divisor
    if not spec.head_bias:
        return hidden
    one, zeros = hidden.new_ones(*hidden.shape[:-1], 1), hidden.new_zeros(*hidden.shape[:-1], _BIAS_COLUMNS - 1)
    return torch.cat([hidden, one, zeros], dim=-1)


def cap_logits(logits: Tensor, spec: ModelSpec) -> Tensor:
    """Logits bounded by Gemma's softcap; the loss caps those of its chunks by itself."""
    return logits if spec.logit_softcap is None else spec.logit_softcap * (logits / spec.logit_softcap).tanh()


def head_precision(options: Options) -> HeadPrecision | None:
    """How the GEMMs of the head are quantized in training; None leaves them in the dtype of the weight.

    A softmax over a large vocabulary has gradients near 1 at the label and near 1e-6 elsewhere, more than e4m3 spans
    under one scale: gradients are in blocks of 128 where other layers have a scale a row. Logits have a scale a row in
    both recipes, which is the fastest GEMM and as exact.
    """
    if options.recipe is None or not options.fp8_output:
        return None
    recipe, cache = options.recipe, WeightCache[QuantizedWeights](options.cache_quantized_weights)
    if recipe.name not in ("fp8-blockwise", "fp8-rowwise"):
        return HeadPrecision(recipe, cache)
    blocks = recipe if recipe.name == "fp8-blockwise" else RECIPES["fp8-blockwise"]
    return HeadPrecision(blocks, cache, logits=RECIPES["fp8-rowwise"])
