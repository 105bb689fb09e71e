"""Every rule, loaded: importing this module fills the registry."""

from threefold.rules import (
    batch,
    context,
    dispatch,
    fold,
    graphs,
    memory,
    overlap,
    precision,
    recompute,
    shape,
    stacks,
    vision,
)
from threefold.rules.base import PREDICTED, RULES, blockers, check, errors, explain, known_slugs, repair
from threefold.rules.stacks import promoted

__all__ = [
    "PREDICTED",
    "RULES",
    "batch",
    "blockers",
    "check",
    "context",
    "dispatch",
    "errors",
    "explain",
    "fold",
    "graphs",
    "known_slugs",
    "memory",
    "overlap",
    "precision",
    "promoted",
    "recompute",
    "repair",
    "shape",
    "stacks",
    "vision",
]
