"""Multi-head latent attention in which an indexer chooses the keys of each query (DeepSeek-V3.2, GLM-5).

`models/mixers.py` makes it where a spec has an indexer. It is `MlaAttention` with two more tensors of each token, the
indexer's key and the weights of its heads, which tensor parallelism gathers together with the latents. A rule refuses
context parallelism, in which the keys of other ranks would have to be scored.

Shapes: B batch, S sequence, D model dim, X other widths, d head dim of the indexer, I its heads, r rotated head dim, K
chosen keys.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from threefold.engine.attention.mla import MlaAttention
from threefold.engine.attention.query_blocks import attend_in_blocks
from threefold.engine.attention.sparse.chosen_keys import ChosenKeys
from threefold.engine.attention.sparse.indexer import Indexer
from threefold.engine.context import count_event
from threefold.engine.layers.input_linears import identity
from threefold.engine.layers.positions import Positions
from threefold.spec.model import MlaSpec


class SparseMlaAttention(MlaAttention):
    def __init__(self, spec: MlaSpec, dim: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__(spec, dim, norm)
        self.indexer = Indexer(spec, dim)

    def forward(self, x_BSD: Tensor, positions: Positions) -> Tensor:
        latents = self.compress(x_BSD)
        return self.attend_chosen(positions, *latents, *self.read_for_indexer(x_BSD))

    def read_for_indexer(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """The indexer's keys and the weights of its heads, of the whole sequence."""
        parts = self.indexer.read_tokens(x_BSD)
        if self.gather_latents is identity:
            return parts
        with torch.no_grad():
            whole = self.gather_latents(torch.cat(parts, dim=-1))
        k_BSd, weight_BSI = whole.split([part.shape[-1] for part in parts], dim=-1)
        return k_BSd, weight_BSI

    def attend_chosen(
        self,
        positions: Positions,
        q_BSX: Tensor,
        latent_BSX: Tensor,
        k_BSr: Tensor,
        index_k_BSd: Tensor,
        index_weight_BSI: Tensor,
    ) -> Tensor:
        spec = self.spec
        table = positions.rope(spec.rope_dim, spec.rope_theta, spec.rope_scaling)
        chosen_BSK = self.indexer.choose(q_BSX, index_k_BSd, index_weight_BSI, table, positions.documents_BS)
        q_BHSd, k_BHSd, v_BHSv = self.expand(positions, q_BSX, latent_BSX, k_BSr)
        return self.project_out(self.core_of_chosen(positions, chosen_BSK, q_BHSd, k_BHSd, v_BHSv).flatten(2))

    def core_of_chosen(
        self, positions: Positions, chosen_BSK: Tensor, q_BHSd: Tensor, k_BHSd: Tensor, v_BHSv: Tensor
    ) -> Tensor:
        """The outputs of the heads by token."""
        count_event("attention", "chosen keys in torch")
        mask_tensors = chosen_BSK, positions.documents_BS
        out_BHSv = attend_in_blocks(q_BHSd, k_BHSd, v_BHSv, self.scale, ChosenKeys, *mask_tensors)
        return out_BHSv.transpose(1, 2)
