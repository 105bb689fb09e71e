"""Qwen3-MoE: grouped-query attention with norms on q and k, a softmax router, no shared experts."""

from threefold.engine.models.llama import Llama


class Qwen3Moe(Llama):
    pass
