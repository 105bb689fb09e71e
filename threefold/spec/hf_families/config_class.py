"""A configuration class of transformers as data, and the fields that most of the classes have.

`spec/hf_defaults.py` and `mixture_defaults.py` hold one `HfClass` for each family; `hf_fields.complete` reads a
config.json with it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Sizes that no two models share. transformers would take those of some model; here a file without them is refused.
REQUIRED = frozenset({"hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size"})


@dataclass(frozen=True, slots=True)
class HfClass:
    """One configuration class of transformers."""

    defaults: Mapping[str, Any]  # fields that are read
    only: Mapping[str, Any] = field(default_factory=dict)  # fields of which one value is supported, the default
    unread: frozenset[str] = frozenset()
    # A key that transformers reads as another field, and before it where a file has both.
    aliases: Mapping[str, str] = field(default_factory=dict)
    # Keys that are no fields of the class and are read all the same; None where nothing stands for an absent one.
    extra: Mapping[str, Any] = field(default_factory=dict)
    null_means: Mapping[str, Any] = field(default_factory=dict)  # what null does in fields whose default is not null
    by_layer: frozenset[str] = frozenset()  # fields that may also be a list with one value for each layer
    theta: float = 10_000.0


ROPE = {
    "rope_theta": None,
    "rope_scaling": None,
    "partial_rotary_factor": None,
    "original_max_position_embeddings": None,
}
BASE = {
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_parameters": None,
}
NO_DROPOUT = {"attention_dropout": 0.0}
