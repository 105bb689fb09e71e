"""Mixtral: grouped-query attention, eight large experts behind a softmax router."""

from threefold.engine.models.llama import Llama


class Mixtral(Llama):
    pass
