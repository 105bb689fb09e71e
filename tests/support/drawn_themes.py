"""Combinations of fields that drawing each for itself rarely meets, for `drawn_layouts.py`.

Each theme is a set of layouts, and values that go over the fields of a draw. A tuple of values is chosen from; a `Some`
draws several names of a list.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from drawn_fields import BY_GRAPHS, EIGHT_BITS, FROZEN
from drawn_models import LATENT, SEEING, Fields
from tiny_mixtures import MIXTURES
from tiny_models import FAMILIES

from threefold.plan.plan import LORA_TARGETS, OFFLOAD_MODULES, VISION_RECOMPUTE

_ALL = (*FAMILIES, *MIXTURES, *SEEING)
_WITH_DEPTHS = (*LATENT, "glm4_moe", "nemotron_h", "dots1", "qwen3_next")
_BESIDE_OVERLAP: Fields = {
    "knobs.ep_overlap": True,
    "knobs.shared_expert_overlap": None,
    "knobs.recompute_method": None,
    "knobs.recompute_layers": None,
    "knobs.recompute_save": None,
    "knobs.activation_offload": None,
    "knobs.activation_offload_layers": None,
    "knobs.dispatcher": None,
    "knobs.cp_dynamic": None,
}
_SEQUENTIAL: Fields = {"knobs.ep_overlap": None, "knobs.delay_wgrad": None}
_SHARDED = ("zero1", "fsdp")


@dataclass(frozen=True)
class Some:
    """Several of these names."""

    names: Sequence[str]
    least: int
    most: int


@dataclass(frozen=True)
class Theme:
    """Layouts ("8 pp=2 ep=4": eight ranks and their degrees), and what their plans have together."""

    layouts: Sequence[str]
    fields: Mapping[str, Any]
    families: Sequence[str] = _ALL
    formats: Sequence[str] = ()  # that the model is trained in; none: fp64 shows it
    draws_stages: bool = False
    weight: int = field(default=1)

    def draw_layout(self, draw: random.Random) -> Fields:
        gpus, *degrees = draw.choice(self.layouts).split()
        fields: Fields = {
            "cluster.gpus": int(gpus),
            **{f"layout.{axis}": 1 for axis in ("pp", "tp", "cp", "ep", "etp")},
        }
        for degree in degrees:
            axis, _, value = degree.partition("=")
            fields[f"layout.{axis}"] = int(value) if value.isdigit() else value
        return fields | ({"layout.vpp": fields.get("layout.vpp", 1)} if fields["layout.pp"] > 1 else {})

    def draw_fields(self, draw: random.Random) -> Fields:
        return {path: _draw_value(draw, given) for path, given in self.fields.items()}


def _draw_value(draw: random.Random, given: Any) -> Any:
    if isinstance(given, Some):
        return draw.sample(given.names, draw.randint(given.least, given.most))
    return _draw_value(draw, draw.choice(given)) if isinstance(given, tuple) else given


THEMES: dict[str, Theme] = {
    "adapters over pipelines": Theme(
        ("4 pp=2 ep=2", "8 pp=2 ep=4 tp=2", "8 pp=2 ep=2 etp=2 cp=2", "8 pp=2 vpp=2 ep=4", "8 pp=4 ep=2",
         "4 pp=2 ep=2 vpp=2 schedule=dualpipev", "6 pp=3 ep=2 schedule=zero-bubble"),
        {"job.lora_rank": (1, 2, 3, 5), "job.lora_alpha": (None, 0.7, 9.0), "job.freeze": None,
         "job.lora_targets": Some(LORA_TARGETS, 1, 4), "job.mtp": (None, None, 1),

         "knobs.data_parallel": _SHARDED, "knobs.tp_overlap": None,
         "knobs.activation_offload": (None, ["expert_fc1", "moe_act"]), "job.optimizer": ("adamw", "muon"),
         "knobs.ep_overlap": (True, None), "knobs.delay_wgrad": (True, None)},
    ),
    "frozen parts, FSDP and MTP": Theme(
        ("4 ep=2", "4 tp=2 ep=2", "8 pp=2 ep=2 cp=2", "4 pp=2 ep=2", "8 pp=2 vpp=2 ep=2", "4 cp=2 ep=4"),
        {"job.freeze": Some(FROZEN, 1, 3), "job.lora_rank": None, "knobs.data_parallel": "fsdp", "job.mtp": (1, 1, 2),
         "knobs.graphs": None},
        _WITH_DEPTHS, weight=2,
    ),
    "dynamic CP, packing and router losses": Theme(
        ("4 cp=4", "4 cp=2 ep=4", "8 cp=4 ep=4", "8 cp=4 tp=2 ep=2", "6 cp=2 ep=3", "8 cp=8 ep=2 etp=2",
         "8 cp=2 ep=4 etp=2", "2 cp=2", "4 cp=2 ep=2"),
        {"knobs.cp_dynamic": True, "job.packing": True, "knobs.cp_comm": ("p2p", "a2a", "all_gather", "a2a+p2p"),
         "job.mtp": (None, 1), **_SEQUENTIAL, "knobs.data_parallel": _SHARDED, "job.task": ("sft", "pretrain"),
         "job.lora_rank": (None, None, 2), "job.micro_batch": 1, "job.aux_loss": (0.0, 0.01, 0.05),
         "job.seq_aux_loss": (None, 0.01), "job.z_loss": (None, 0.001), "job.capacity_factor": None,
         "knobs.dispatcher": None, "knobs.graphs": None},
        weight=2,
    ),
    "capacity and EP overlap": Theme(
        ("4 ep=4", "4 ep=2 tp=2", "8 ep=4 etp=2 cp=2", "4 pp=2 vpp=2 ep=2", "6 ep=3", "8 tp=2 cp=2 ep=4",
         "4 cp=2 ep=2"),
        {**_BESIDE_OVERLAP, "job.capacity_factor": (0.3, 0.75, 1.1, 2.0), "knobs.delay_wgrad": (True, False),
         "knobs.recompute": Some(("layernorm", "core_attn", "moe_act", "mlp", "shared_experts", "mla_up_proj"), 3, 3),
         "job.mtp": (None, 0, 1), "knobs.expert_fusion": (True, False)},
    ),
    "offload over pipelines": Theme(
        ("4 pp=2 ep=2", "4 pp=4", "8 pp=2 vpp=3 ep=4", "4 pp=2 vpp=2 tp=2 schedule=dualpipev", "6 pp=3 ep=2",
         "4 pp=2 cp=2"),
        {"knobs.activation_offload": Some(OFFLOAD_MODULES, 2, 5), "knobs.optimizer_offload": (0.2, 0.9, 1.0),
         "knobs.activation_offload_layers": (None, 1, 2), "job.optimizer": ("adamw", "muon"), **_SEQUENTIAL},
    ),
    "states on the host, MTP, strings of stages and DP 1": Theme(
        ("2 pp=2 vpp=2", "4 pp=4 vpp=2", "2 pp=2", "4 pp=4", "4 pp=2 vpp=2 tp=2",
         "4 pp=2 vpp=2 cp=2 schedule=dualpipev", "4 pp=2 vpp=3 tp=2 ep=2", "3 pp=3 vpp=2"),
        {"knobs.optimizer_offload": (0.2, 0.5, 0.9, 1.0), "job.optimizer": "adamw", "job.mtp": (1, 1, 2),
         "knobs.param_gather_overlap": (None, None, False), "knobs.data_parallel": "zero1", "knobs.cp_dynamic": None,
         "job.freeze": None},
        _WITH_DEPTHS, draws_stages=True, weight=2,
    ),
    "Muon": Theme(
        ("4 ep=2", "4 ep=4 tp=2", "8 ep=4 tp=4", "8 ep=2 etp=2 cp=2", "6 ep=3", "5 ep=5", "8 ep=2 tp=2 pp=2", "7"),
        {"job.optimizer": "muon", "knobs.data_parallel": _SHARDED, "knobs.optimizer_offload": (None, None, 0.6),
         "knobs.expert_fusion": (True, False)},
    ),
    "eight bits and below over TP and EP": Theme(
        ("4 tp=2 ep=2", "4 ep=4", "4 tp=4 ep=2 etp=2", "4 pp=2 ep=2", "8 tp=2 cp=2 ep=4", "2 cp=2 ep=2", "2 tp=2 ep=2"),
        {"knobs.fp8_output": (True, None), "knobs.fp8_dispatch": (True, None, None),
         "job.lora_rank": (None, None, None, 4), "knobs.router_padding": (True, None), "knobs.data_parallel": _SHARDED},
        formats=EIGHT_BITS, weight=2,
    ),
    "latents over CP": Theme(
        ("4 cp=4 ep=2", "4 cp=4 ep=4", "8 cp=4 tp=2 ep=4", "8 cp=4 pp=2 ep=2", "8 cp=8"),
        {"knobs.cp_comm": "a2a+p2p", "knobs.cp_inner": 2, "knobs.cp_exchange": "latents", "job.mtp": (1, 2),
         "job.packing": (True, False),
         "knobs.recompute": (None, ["mla_up_proj"], ["full"], ["core_attn", "mla_up_proj", "layernorm"])},
        LATENT,
    ),
    "delayed weight gradients": Theme(
        ("4 pp=2 vpp=2 ep=2 schedule=dualpipev", "8 pp=4 vpp=2 ep=2 schedule=dualpipev",
         "4 pp=2 vpp=2 ep=2 schedule=zero-bubble", "8 pp=2 vpp=3 ep=4 schedule=zero-bubble",
         "8 pp=2 vpp=2 tp=2 ep=2 etp=2 schedule=dualpipev", "6 pp=3 vpp=2 ep=2 schedule=dualpipev"),
        {**_BESIDE_OVERLAP, "knobs.delay_wgrad": True, "job.mtp": (None, 0, 1), "knobs.data_parallel": _SHARDED,
         "knobs.recompute": (None, ["layernorm"], ["moe_act", "core_attn"])},
    ),
    "uneven stages": Theme(
        ("4 pp=4", "8 pp=4 ep=2", "4 pp=2 vpp=3 ep=2", "6 pp=3 vpp=2 ep=2", "5 pp=5", "7 pp=7"),
        {"knobs.data_parallel": _SHARDED, "job.lora_rank": (None, None, 2), "job.mtp": (None, 1)},
        draws_stages=True,
    ),
    "HSDP": Theme(
        ("8 replicate=2 ep=2", "8 replicate=4 ep=2", "8 replicate=2 pp=2 ep=2", "8 replicate=2 tp=2 ep=4",
         "6 replicate=3 ep=2", "8 replicate=2 cp=2 ep=2 etp=2", "4 replicate=2 ep=2", "4 replicate=4"),
        {"knobs.data_parallel": "hsdp", "job.lora_rank": (None, None, 2), "job.mtp": (None, 1),
         "job.freeze": (None, None, ["*.experts.*"], ["embed.weight", "*norm*"]), "job.optimizer": ("adamw", "muon"),
         "knobs.optimizer_offload": (None, 0.5), "knobs.graphs": None},
    ),
    "attention saved in full recompute": Theme(
        ("4 cp=2 ep=2", "4 tp=2 ep=2", "4 pp=2 ep=2", "8 pp=2 cp=4 ep=4", "4 cp=4"),
        {"knobs.recompute": ["full"], "knobs.recompute_save": ["core_attn"], **_SEQUENTIAL, "job.mtp": (None, 1),
         "knobs.recompute_method": (None, "uniform", "block"), "knobs.recompute_layers": (None, 1, 2),
         "job.packing": (True, False), "job.lora_rank": (None, 2), "knobs.data_parallel": _SHARDED},
    ),
    "states of 16-bit weights": Theme(
        ("4 ep=2 tp=2", "4 pp=2 ep=2", "8 pp=2 ep=4 vpp=2", "3 ep=3"),
        {"knobs.store_param_remainders": (True, None), "knobs.optimizer_offload": (None, 0.4, 1.0),
         "knobs.optimizer_dtype": (None, "bf16"), "knobs.grad_dtype": (None, "bf16"),
         "job.optimizer": ("adamw", "muon"), "knobs.data_parallel": _SHARDED, "knobs.muon_dtype": (None, "bf16")},
        formats=("bf16",),
    ),
    "pictures": Theme(
        ("4 pp=2 ep=2", "4 cp=2 ep=2", "8 pp=2 tp=2 ep=2 cp=2", "4 ep=4", "4 pp=2 vpp=2 ep=2 schedule=dualpipev"),
        {"job.images": (1.0, 2.0), "job.lora_rank": (None, 2), "job.mtp": None, "knobs.data_parallel": _SHARDED,
         "job.freeze": (None, ["vision"], ["projector"], ["language"], ["vision", "projector"]),
         "knobs.vision_recompute": (None, Some(VISION_RECOMPUTE, 1, 2)), "job.packing": (True, False)},
        SEEING,
    ),
    "graphs and adapters": Theme(
        ("2", "4 tp=2", "4 ep=2", "2 cp=2", "2 pp=2", "4 pp=2 vpp=2", "4 tp=2 ep=2", "4 pp=2 ep=2"),
        {**BY_GRAPHS, "job.packing": False, "job.capacity_factor": (None, None, 1.25), "knobs.dispatcher": None,
         "knobs.graphs": (Some(("attn", "mlp", "moe_router"), 1, 3), ["attn", "moe_router", "moe_preprocess"], ["moe"],
                          ["full_iteration"]),
         "knobs.graph_memory_gb": (None, None, 0.0, 1.0), "job.lora_rank": (1, 2, 4, None), "job.freeze": None,
         "job.lora_targets": Some(LORA_TARGETS, 1, 4), "knobs.tp_overlap": None, **_SEQUENTIAL},
        weight=2,
    ),
}  # fmt: skip
