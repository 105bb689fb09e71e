"""Every rule, loaded: importing this module fills the registry."""

from threefold.rules import adapters, memory, stacks, vision, walls
from threefold.rules.base import PREDICTED, RULES, blockers, errors, explain, judge, known_slugs, raised_by, severity_of
from threefold.rules.fixes import advice, check, repair, with_fixes
from threefold.rules.knobs import dispatch, engine_graphs, graphs, overlap, precision, recompute
from threefold.rules.layout import batch, context, dynamic_context, fold, pipeline, shape
from threefold.rules.megatron import context as megatron_context
from threefold.rules.megatron import experts as megatron_experts
from threefold.rules.megatron import fsdp as megatron_fsdp
from threefold.rules.megatron import graphs as megatron_graphs
from threefold.rules.megatron import layout as megatron_layout
from threefold.rules.megatron import memory as megatron_memory
from threefold.rules.megatron import packing as megatron_packing
from threefold.rules.stacks import promoted

__all__ = [
    "PREDICTED",
    "RULES",
    "adapters",
    "advice",
    "batch",
    "blockers",
    "check",
    "context",
    "dispatch",
    "dynamic_context",
    "engine_graphs",
    "errors",
    "explain",
    "fold",
    "graphs",
    "judge",
    "known_slugs",
    "megatron_context",
    "megatron_experts",
    "megatron_fsdp",
    "megatron_graphs",
    "megatron_layout",
    "megatron_memory",
    "megatron_packing",
    "memory",
    "overlap",
    "pipeline",
    "precision",
    "promoted",
    "raised_by",
    "recompute",
    "repair",
    "severity_of",
    "shape",
    "stacks",
    "vision",
    "walls",
    "with_fixes",
]
