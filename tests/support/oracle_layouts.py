"""Layouts that must give one rank's gradients: every axis alone, every pair, published layouts scaled down.

A case holds what differs from BASE. `often` cases run in the default suite; together they cover every pair of axes.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from plans import build
from tiny_models import spec_of

from threefold.plan.plan import Plan

BASE: dict[str, Any] = {
    "model": "tiny-qwen3-moe",
    "target": "threefold",
    "cluster.chip": "cpu",
    "job.seq_len": 16,
    "job.global_batch": 4,
    "job.data": "synthetic",
    "job.aux_loss": 0.01,
    "job.z_loss": 0.001,
    "job.seq_aux_loss": 0.01,
    "job.clip_norm": 0.5,
    "job.bias_rate": 0.01,
    "knobs.precision": "fp32",
}
AXES = ("dp", "tp", "cp", "pp", "vpp", "ep", "etp", "edp")
SHARDED = ("fsdp", "hsdp")  # kinds of data parallelism other than ZeRO-1


@dataclass(frozen=True)
class Case:
    """One layout, with the model, job and knobs that it is tested with."""

    name: str
    family: str
    layout: dict[str, Any]
    job: dict[str, Any] = field(default_factory=dict)
    knobs: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    domain: int | None = None
    often: bool = False  # whether the default suite runs it

    @property
    def gpus(self) -> int:
        return int(self.layout["gpus"])

    @property
    def plan(self) -> Plan:
        fields = {**BASE, "cluster.gpus": self.gpus, "cluster.domain": self.domain}
        fields |= {f"layout.{name}": value for name, value in self.layout.items() if name != "gpus"}
        fields |= {f"job.{name}": value for name, value in self.job.items()}
        fields |= {f"knobs.{name}": value for name, value in self.knobs.items()}
        return replace(build(fields), model=spec_of(self.family, **self.spec))

    def written(self) -> set[str]:
        """The axes that the case names."""
        return {axis for axis in AXES if self.layout.get(axis, 1) > 1} | {self.data_parallel} - {"zero1"}

    def active(self) -> set[str]:
        """The axes in use, also those that follow from the number of ranks; counted here, not by the engine."""
        degree = {axis: self.layout.get(axis, 1) for axis in AXES}
        follow = {
            "dp": self.gpus // (degree["tp"] * degree["cp"] * degree["pp"]),
            "edp": self.gpus // (degree["etp"] * degree["ep"] * degree["pp"]),
        }
        if self.family in ("llama", "qwen3"):
            follow["edp"] = 1
        return self.written() | {axis for axis, size in follow.items() if size > 1}

    @property
    def data_parallel(self) -> str:
        return str(self.knobs.get("data_parallel", "zero1"))


def case(name: str, family: str, gpus: int, often: bool = False, **more: Any) -> Case:
    tables = {key: more.pop(key) for key in ("job", "knobs", "spec", "domain") if key in more}
    return Case(name, family, {"gpus": gpus, **more}, often=often, **tables)


FSDP, HSDP, MUON = {"data_parallel": "fsdp"}, {"data_parallel": "hsdp"}, {"optimizer": "muon"}
PADDED = {"task": "sft"}  # samples of the oracle end in padding then
PACKED, NO_OVERLAP = {"packing": True}, {"grad_reduce_overlap": False, "param_gather_overlap": False}
LATENTS = {"cp_exchange": "latents"}
FOUR, FIVE, SIX = ({"num_hidden_layers": n} for n in (4, 5, 6))
ODD, TIED = {"odd": True}, {"tie_word_embeddings": True}
MTP1, MTP2 = {"num_nextn_predict_layers": 1}, {"num_nextn_predict_layers": 2}

COPIES = {"expert_balance": "replicate"}

ALONE = [
    case("dp", "mixtral", 2, often=True),
    case("dp of four", "qwen3_next", 4, job=PACKED),
    case("dp without experts", "llama", 2, spec=ODD),
    case("tp", "gpt_oss", 2, tp=2),
    case("tp with copied key heads", "qwen3_moe", 4, often=True, tp=4),
    case("tp with one key head", "qwen3", 2, tp=2, spec=ODD),
    case("tp with latents", "deepseek_v3", 4, tp=4, spec=MTP1),
    case("tp with an odd vocabulary", "llama", 4, tp=4, spec=ODD),
    case("tp by the delta rule", "qwen3_next", 2, tp=2, spec=ODD),
    case("cp", "llama", 4, cp=4, spec=ODD),
    case("pp", "qwen3", 2, pp=2),
    case("pp of three", "mixtral", 3, pp=3, spec=FIVE),
    case("vpp", "qwen3_moe", 2, pp=2, vpp=2, spec=FOUR),
    case("vpp of three", "gpt_oss", 2, pp=2, vpp=3, spec=SIX),
    case("ep", "gpt_oss", 3, ep=3, job={"global_batch": 6}),
    case("ep, odd width", "qwen3_moe", 2, ep=2, spec=ODD),
    case("expert copies", "qwen3_moe", 2, ep=2, job={"load": "hot-rank"}, knobs=COPIES),
    case("ep with shared experts beside it", "deepseek_v3", 4, ep=4, knobs={"shared_expert_overlap": True}),
    case("etp", "mixtral", 2, etp=2),
    case("etp with biases", "gpt_oss", 4, etp=4),
    case("edp", "deepseek_v3", 4, spec=ODD),
    case("fsdp", "qwen3_moe", 2, knobs=FSDP),
    case("fsdp of four, tied", "qwen3_next", 4, knobs=FSDP, spec=ODD),
    case("hsdp", "llama", 4, replicate=2, knobs=HSDP),
    case("hsdp with experts", "gpt_oss", 4, replicate=2, knobs=HSDP, spec=ODD),
]
COMMUNICATION = [
    case("cp p2p, windows and sinks", "gpt_oss", 4, cp=4, job=PACKED),
    case("cp all-gather, latents", "deepseek_v3", 4, cp=4, knobs={"cp_comm": "all_gather"}, job=PACKED, spec=MTP2),
    case("cp all-gather, sinks", "gpt_oss", 2, cp=2, knobs={"cp_comm": "all_gather"}),
    case("cp a2a", "gpt_oss", 2, cp=2, knobs={"cp_comm": "a2a"}, job=PACKED),
    case("cp a2a, latents", "deepseek_v3", 4, cp=4, knobs={"cp_comm": "a2a"}),
    case("cp a2a, delta rule", "qwen3_next", 2, cp=2, knobs={"cp_comm": "a2a"}, job=PACKED),
    case("cp a2a+p2p", "qwen3_moe", 4, cp=4, domain=2, knobs={"cp_comm": "a2a+p2p"}, job=PACKED),
    case("cp a2a+p2p, sinks", "gpt_oss", 4, cp=4, domain=2, knobs={"cp_comm": "a2a+p2p"}),
    case("cp by layer", "deepseek_v3", 2, cp=2, knobs={"cp_comm": ["p2p", "a2a", "all_gather"]},
         spec={"num_hidden_layers": 3, **MTP1}),
    case("cp by layer, delta rule", "qwen3_next", 4, cp=4, knobs={"cp_comm": ["a2a", "p2p"]}, job=PACKED,
         spec={"linear_num_key_heads": 4, "linear_num_value_heads": 8}),
    case("cp passes states", "qwen3_next", 4, cp=4, job=PACKED, spec=ODD),
    case("latents by p2p", "deepseek_v3", 4, cp=4, knobs=LATENTS, job=PACKED, spec=MTP2),
    case("latents by all-gather", "deepseek_v3", 2, cp=2, knobs={**LATENTS, "cp_comm": "all_gather"}, job=PACKED),
    case("latents by a2a", "deepseek_v3", 4, cp=4, knobs={**LATENTS, "cp_comm": "a2a"}, spec=MTP1),
    case("latents by a2a+p2p", "deepseek_v3", 4, cp=4, job=PACKED, spec=MTP1,
         knobs={**LATENTS, "cp_comm": "a2a+p2p", "cp_inner": 2, "recompute": ["mla_up_proj", "layernorm", "moe"]}),
    case("latents of a ring, recomputed", "deepseek_v3", 4, cp=2, ep=2, job=PACKED, spec=MTP1,
         knobs={**LATENTS, "recompute": ["core_attn", "mla_up_proj"]}),
    case("latents, full recompute", "deepseek_v3", 4, cp=4, job=PACKED,
         knobs={**LATENTS, "cp_comm": "a2a+p2p", "cp_inner": 2, "recompute": ["full"]}),
    case("latents tp", "deepseek_v3", 4, tp=2, cp=2, job=MUON, knobs=LATENTS, spec=MTP1),
    case("latents tp a2a", "deepseek_v3", 4, tp=2, cp=2, knobs={**LATENTS, "cp_comm": "a2a"}),
    case("latents pp vpp", "deepseek_v3", 4, cp=2, pp=2, vpp=2, ep=2, knobs=LATENTS, spec={**FOUR, **MTP1}),
    case("latents zero-bubble", "deepseek_v3", 4, cp=2, pp=2, schedule="zero-bubble", knobs=LATENTS, spec=FOUR),
    case("latents ep overlap", "deepseek_v3", 4, cp=4, ep=4,
         knobs={**LATENTS, "ep_overlap": True, "delay_wgrad": True, "cp_comm": "a2a+p2p", "cp_inner": 2}),
    case("latents fsdp", "deepseek_v3", 4, cp=2, ep=2, knobs={**LATENTS, **FSDP}, job=PACKED),
]  # fmt: skip
PAIRS = [
    case("dp tp", "qwen3", 4, tp=2, knobs=NO_OVERLAP),
    case("dp tp ep edp", "qwen3_moe", 4, often=True, tp=2, ep=2, job=PACKED),
    case("dp cp", "mixtral", 4, cp=2, spec=ODD),
    case("dp cp ep", "qwen3_next", 4, often=True, cp=2, ep=4, job={"mtp": 1}),
    case("dp pp", "gpt_oss", 4, pp=2, job={"global_batch": 6}),
    case("dp pp vpp ep", "qwen3_moe", 4, often=True, pp=2, vpp=2, ep=2, spec={**FOUR, **TIED}),
    case("dp pp vpp etp edp", "mixtral", 8, often=True, pp=2, vpp=2, etp=2, spec=FOUR, job={"global_batch": 8}),
    case("dp etp", "qwen3_moe", 4, etp=2, knobs=NO_OVERLAP, spec=TIED),
    case("tp cp", "qwen3_next", 4, tp=2, cp=2, job=PACKED),
    case("tp cp ep etp", "gpt_oss", 4, often=True, tp=2, cp=2, ep=2, etp=2, job=PACKED),
    case("tp cp edp", "deepseek_v3", 4, often=True, tp=2, cp=2, job={**PACKED, **MUON}, spec=MTP1),
    case("tp pp", "llama", 4, tp=2, pp=2, spec=ODD),
    case("tp pp vpp etp", "deepseek_v3", 4, often=True, tp=2, pp=2, vpp=2, etp=2, spec={**FOUR, **MTP1},
         knobs={"shared_expert_overlap": True}),
    case("tp pp edp", "gpt_oss", 4, tp=2, pp=2, spec=ODD),
    case("tp etp", "qwen3_moe", 4, tp=2, etp=4),
    case("cp pp", "qwen3_next", 4, cp=2, pp=2, job=PACKED),
    case("cp pp vpp ep", "qwen3_moe", 4, often=True, cp=2, pp=2, vpp=2, ep=2, spec=FOUR, knobs={"cp_comm": "a2a"}),
    case("cp pp etp edp", "mixtral", 8, often=True, cp=4, pp=2, etp=2, spec={"sliding_window": 5}),
    case("cp edp", "gpt_oss", 4, cp=4, ep=2, job=MUON),
    case("cp etp", "deepseek_v3", 2, cp=2, etp=2, job=PACKED),
    case("ep etp edp", "qwen3_moe", 8, often=True, ep=2, etp=2, knobs={**NO_OVERLAP, "wgrad_overlap": True},
         job={"global_batch": 8}),
    case("tp cp pp dp", "llama", 16, tp=2, cp=2, pp=2, job=PACKED),
    case("tp cp pp vpp dp ep", "deepseek_v3", 16, tp=2, cp=2, pp=2, vpp=2, ep=8, spec=FOUR),
    case("fsdp tp", "deepseek_v3", 4, often=True, tp=2, knobs=FSDP, spec=MTP1),
    case("fsdp cp ep", "gpt_oss", 4, often=True, cp=2, ep=2, knobs=FSDP, job=PACKED),
    case("fsdp pp vpp etp", "qwen3_moe", 8, often=True, pp=2, vpp=2, etp=2, knobs=FSDP, spec={**FOUR, **TIED},
         job={"global_batch": 8}),
    case("fsdp tp ep etp", "mixtral", 8, tp=2, ep=2, etp=2, knobs=FSDP),
    case("fsdp tp cp pp", "qwen3_next", 8, tp=2, cp=2, pp=2, knobs=FSDP),
    case("hsdp tp ep", "qwen3_next", 8, often=True, tp=2, replicate=2, ep=2, knobs=HSDP),
    case("hsdp cp etp", "deepseek_v3", 8, often=True, cp=2, replicate=2, etp=2, knobs=HSDP, job={"global_batch": 8}),
    case("hsdp pp vpp", "llama", 8, often=True, pp=2, vpp=2, replicate=2, knobs=HSDP, spec={**FOUR, **TIED},
         job={"global_batch": 8}),
    case("hsdp pp ep", "mixtral", 8, pp=2, ep=2, replicate=2, knobs=HSDP),
]  # fmt: skip
SHAPES = [
    case("ep wholly over cp", "qwen3_moe", 4, often=True, cp=4, ep=4, job=PACKED),
    case("ep wholly over cp, eight", "deepseek_v3", 8, cp=8, ep=8, job=PACKED, spec=MTP1),
    case("ep over cp, pipeline", "qwen3_moe", 8, cp=4, ep=4, pp=2, job={"mtp": 1}),
    case("ep beyond dp", "deepseek_v3", 8, often=True, tp=2, cp=2, ep=8,
         job={"capacity_factor": 1.0, **PADDED}),
    case("etp without tp", "qwen3_moe", 4, ep=2, etp=2, job={"capacity_factor": 1.25}),
    case("tp 4 cp 4 into ep 16", "qwen3_moe", 16, tp=4, cp=4, ep=16, spec={"num_experts": 16}, job={"seq_len": 32}),
    case("uneven stages", "deepseek_v3", 2, pp=2, vpp=2, stages="Ett|t|tt|mL", spec={**FIVE, **MTP1}),
    case("m and L in chunks of their own", "deepseek_v3", 4, pp=4, vpp=2, stages="E|t|tt|t|t|m|m|L",
         spec={**FIVE, **MTP2}),
    case("embedding alone", "qwen3_moe", 4, pp=4, stages="E|tt|tt|L", spec={**FOUR, **TIED}, job={"mtp": 0}),
    case("an empty chunk", "mixtral", 3, often=True, pp=3, stages="Et||tL"),
    case("zero-bubble", "qwen3_moe", 3, often=True, pp=3, schedule="zero-bubble", spec=SIX),
    case("zero-bubble of chunks", "gpt_oss", 2, pp=2, vpp=2, schedule="zero-bubble", spec=FOUR, job=MUON),
    case("zero-bubble, fsdp", "qwen3_moe", 4, pp=2, schedule="zero-bubble", knobs=FSDP),
    case("dualpipev", "deepseek_v3", 2, often=True, pp=2, vpp=2, schedule="dualpipev", spec={**FOUR, **MTP2}),
    case("dualpipev, tied, ep", "qwen3_moe", 4, pp=2, vpp=2, ep=2, schedule="dualpipev", spec={**FOUR, **TIED},
         job={"global_batch": 8}),
    case("1f1b, more than enough microbatches", "qwen3_next", 2, pp=2, schedule="1f1b", job={"global_batch": 7}),
]  # fmt: skip
JOBS = [
    case("capacity over all axes", "qwen3_moe", 8, tp=2, cp=2, ep=2, etp=2, job={"capacity_factor": 1.0}),
    case("capacity, two sequences", "mixtral", 4, cp=2, ep=2, job={"capacity_factor": 0.8, "micro_batch": 2}),
    case("two sequences", "deepseek_v3", 4, tp=2, ep=2, spec=MTP1, job={"micro_batch": 2, **PACKED}),
    case("two sequences, pipeline", "gpt_oss", 4, pp=2, tp=2, job={"micro_batch": 2, "global_batch": 8, **PACKED}),
    case("muon, cut matrices", "deepseek_v3", 4, tp=2, ep=2, etp=2, job=MUON),
    case("muon, copied key heads", "qwen3_moe", 8, tp=4, ep=2, job=MUON),
    case("muon, fsdp", "qwen3_next", 4, tp=2, ep=2, knobs=FSDP, job=MUON),
    case("mtp and tied over tp, cp", "deepseek_v3", 4, tp=2, cp=2, spec={**MTP2, **TIED}, job=PACKED),
    case("mtp and tied over pp", "deepseek_v3", 4, pp=2, ep=2, stages="Et|tmmL", spec={**MTP2, **TIED}),
    case("no clipping", "qwen3_moe", 4, tp=2, ep=2, job={"clip_norm": 0.0}),
    # One rank's order of tokens: along tp, and where a rank's copies of tokens are no whole rounds of experts.
    case("forced balance", "gpt_oss", 2, tp=2, ep=2, job={"routing": "forced-balance"}),
]
KNOBS = [
    case("tp overlap", "qwen3_moe", 4, tp=4, ep=2, knobs={"tp_overlap": True}, job=PACKED),
    case("tp overlap, latents", "deepseek_v3", 4, tp=2, cp=2, knobs={"tp_overlap": True}, spec=MTP1),
    case("tp overlap, pipeline", "qwen3_next", 4, tp=2, pp=2, knobs={"tp_overlap": True}),
    case("ep overlap", "qwen3_moe", 4, ep=2, tp=2, knobs={"ep_overlap": True, "delay_wgrad": True}),
    case("padded, pp mtp ep overlap", "deepseek_v3", 4, pp=2, vpp=2, ep=2, job={**PADDED, **PACKED},
         knobs={"ep_overlap": True}, spec={**FOUR, **MTP1}),
    case("padded, tp cp ep, full recompute", "qwen3_moe", 4, tp=2, cp=2, ep=4, job={**PADDED, "micro_batch": 2},
         knobs={"recompute": ["full"]}),
    case("ep, wgrads during dispatch", "deepseek_v3", 4, ep=2, etp=2, knobs={"wgrad_overlap": True}),
    case("ep, wgrads during dispatch, moe recomputed", "gpt_oss", 4, ep=2, tp=2,
         knobs={"wgrad_overlap": True, "recompute": ("moe",)}),
    case("ep overlap, mtp", "deepseek_v3", 2, ep=2, knobs={"ep_overlap": True}, spec=MTP1),
    case("ep overlap, chunks", "gpt_oss", 4, pp=2, vpp=2, ep=2, knobs={"ep_overlap": True, "delay_wgrad": True},
         spec=FOUR),
    case("ep overlap, fsdp", "mixtral", 4, ep=2, knobs={"ep_overlap": True, **FSDP}),
    case("experts in one, fsdp", "gpt_oss", 2, knobs={"expert_fusion": True, **FSDP}),
    case("experts in one, hsdp", "deepseek_v3", 8, cp=2, replicate=2, knobs={"expert_fusion": True, **HSDP},
         job={"global_batch": 8}),
    case("experts in one, recomputed", "mixtral", 4, tp=2, knobs={"expert_fusion": True, "recompute": ["moe"], **FSDP}),
    case("experts in one, ep x etp", "gpt_oss", 4, often=True, ep=2, etp=2, knobs={"expert_fusion": True, **FSDP}),
    case("experts in one, ep overlap", "qwen3_moe", 4, ep=4, tp=2, knobs={"expert_fusion": True, "ep_overlap": True,
         "delay_wgrad": True}),
    case("recompute of modules", "deepseek_v3", 4, tp=2, ep=4, spec=MTP1,
         knobs={"recompute": ["layernorm", "mla_up_proj", "moe_act", "mlp"]}),
    case("recompute of experts", "gpt_oss", 4, cp=2, ep=2, etp=2, knobs={"recompute": ["moe", "core_attn"]}),
    case("full recompute", "qwen3_next", 4, pp=2, tp=2, ep=2, knobs={"recompute": ["full"]}, job=PACKED),
    case("full recompute, fsdp", "qwen3_moe", 4, cp=2, ep=2, knobs={"recompute": ["full"], **FSDP}),
]  # fmt: skip
# Optimizer states on the host, whose updates are pending when the next forward begins: each chunk waits for its own.
HOSTED = {"optimizer_offload": 1.0}
OFFLOADED = [
    case("offload, head shared by m and L", "qwen3_moe", 2, often=True, pp=2, stages="Ettm|L", job={"mtp": 1},
         knobs=HOSTED),
    case("offload, head in two chunks", "deepseek_v3", 2, pp=2, vpp=2, stages="Et|tt|mm|L", knobs=HOSTED,
         spec={"num_hidden_layers": 3, **MTP2}),
    case("offload, head alone, dualpipev", "qwen3_moe", 2, pp=2, vpp=2, schedule="dualpipev", stages="Et|tt|tm|L",
         spec=FOUR, job={"mtp": 1}, knobs=HOSTED),
    case("offload, m of five stages", "deepseek_v3", 4, pp=4, vpp=2, stages="E|t|t|t|t|t|mm|L", knobs=HOSTED,
         spec={**FIVE, **MTP2}),
    case("offload of most, tp", "deepseek_v3", 4, pp=2, tp=2, stages="Ettm|L", knobs={"optimizer_offload": 0.9},
         spec=MTP1),
    case("offload, default stages", "deepseek_v3", 2, pp=2, knobs=HOSTED, spec=MTP1),
    case("offload, tied and mtp", "deepseek_v3", 2, pp=2, stages="Et|tmmL", knobs=HOSTED, spec={**MTP2, **TIED}),
    case("offload, loss alone, dp", "qwen3_moe", 4, pp=2, stages="Ettm|L", job={"mtp": 1}, knobs=HOSTED),
]  # fmt: skip
# Layers that are a mixer or a feed-forward network alone, Mamba-2 among them, and experts without a gate.
HYBRIDS = [
    case("mamba packed", "nemotron_h", 2, job=PACKED),
    case("mamba tp", "nemotron_h", 4, tp=4, spec={"n_groups": 4}),
    case("mamba tp cp packed", "nemotron_h", 4, often=True, tp=2, cp=2, ep=2, job=PACKED),
    case("mamba cp passes states", "nemotron_h", 4, cp=4, job=PACKED, spec=ODD),
    case("mamba cp exchanges groups", "nemotron_h", 4, cp=2, tp=2, knobs={"cp_comm": "a2a"}, job=PACKED,
         spec={"num_attention_heads": 4, "num_key_value_heads": 4}),
    case("mamba pp vpp ep", "nemotron_h", 4, pp=2, vpp=2, ep=2, stages="Et|t|tt|tL"),
    case("mamba etp", "nemotron_h", 4, etp=2, ep=2, spec={"moe_intermediate_size": 10}),
    case("mamba fsdp, full recompute", "nemotron_h", 4, cp=2, ep=2, knobs={"recompute": ["full"], **FSDP}, job=PACKED),
    case("mamba recompute of modules", "nemotron_h", 4, tp=2, ep=4,
         knobs={"recompute": ["layernorm", "core_attn", "moe_act", "mlp", "shared_experts"]}),
    case("mamba ep overlap", "nemotron_h", 4, ep=2, tp=2, knobs={"ep_overlap": True, "delay_wgrad": True}),
    case("mamba mtp, muon", "nemotron_h", 4, tp=2, cp=2, job={"mtp": 2, **MUON}, spec=MTP2),
]  # fmt: skip
DYNAMIC, LENGTHS = {"cp_dynamic": True}, {"packing": True, "seq_len": 64}
DYNAMIC_CP = [
    case("dynamic cp", "qwen3_moe", 4, cp=4, job=LENGTHS, knobs=DYNAMIC),
    case("dynamic cp, dp and ep", "qwen3_moe", 4, cp=2, ep=4, job=LENGTHS, knobs=DYNAMIC),
    case("dynamic cp, empty microbatches", "qwen3_moe", 4, cp=4, ep=4, knobs=DYNAMIC,
         job={**LENGTHS, "global_batch": 1}),
    case("dynamic cp over eight ranks", "deepseek_v3", 8, cp=4, ep=8, knobs=DYNAMIC,
         job={**LENGTHS, "global_batch": 2}),
    case("dynamic cp tp ep etp", "gpt_oss", 4, tp=2, cp=2, ep=2, etp=2, job=LENGTHS, knobs=DYNAMIC),
    case("padded, dynamic cp", "deepseek_v3", 4, cp=4, ep=2, job={**LENGTHS, **PADDED}, knobs=DYNAMIC, spec=MTP1),
    case("dynamic cp, two depths", "deepseek_v3", 4, cp=4, ep=2, job=LENGTHS, knobs=DYNAMIC, spec=MTP2),
    case("dynamic cp all-gather", "gpt_oss", 4, cp=4, job=LENGTHS, knobs={**DYNAMIC, "cp_comm": "all_gather"}),
    case("dynamic cp a2a", "deepseek_v3", 4, cp=4, job=LENGTHS, knobs={**DYNAMIC, "cp_comm": "a2a"}),
    case("dynamic cp a2a+p2p", "qwen3_moe", 4, cp=4, job=LENGTHS,
         knobs={**DYNAMIC, "cp_comm": "a2a+p2p", "cp_inner": 2}),
    case("dynamic cp by layer", "deepseek_v3", 4, cp=4, job=LENGTHS,
         knobs={**DYNAMIC, "cp_comm": ["p2p", "a2a", "all_gather"]}, spec={"num_hidden_layers": 3, **MTP1}),
    case("dynamic cp latents", "deepseek_v3", 4, cp=4, job=LENGTHS, spec=MTP1,
         knobs={**DYNAMIC, **LATENTS, "recompute": ["full"]}),
    case("dynamic cp latents a2a+p2p", "deepseek_v3", 4, cp=4, job=LENGTHS,
         knobs={**DYNAMIC, **LATENTS, "cp_comm": "a2a+p2p", "cp_inner": 2, "recompute": ["mla_up_proj", "moe"]}),
    case("dynamic cp by the delta rule", "qwen3_next", 4, cp=2, ep=2, job=LENGTHS, knobs={**DYNAMIC, **FSDP}),
    case("dynamic cp hsdp", "llama", 4, cp=2, replicate=2, job=LENGTHS, knobs={**DYNAMIC, **HSDP}),
    case("dynamic cp muon", "qwen3_moe", 4, cp=2, tp=2, job={**LENGTHS, **MUON},
         knobs={**DYNAMIC, "recompute": ["core_attn", "moe_act", "layernorm"]}),
    case("dynamic cp of full sequences", "mixtral", 4, cp=4, job={"seq_len": 32}, knobs=DYNAMIC),
]  # fmt: skip
# Attention to the keys that an indexer chose. The indexer does not train.
SPARSE = [
    case("sparse tp packed", "deepseek_v32", 4, tp=2, ep=2, job=PACKED),
    case("sparse pp vpp, recomputed", "glm_moe_dsa", 4, pp=2, vpp=2, ep=2, spec=FOUR, job=PACKED,
         knobs={"recompute": ["core_attn", "mla_up_proj", "layernorm"]}),
    case("sparse fsdp, full recompute", "deepseek_v32", 4, tp=2, knobs={"recompute": ["full"], **FSDP}, spec=MTP1),
    case("sparse ep overlap", "glm_moe_dsa", 4, ep=4, knobs={"ep_overlap": True, "delay_wgrad": True}, spec=ODD),
]  # fmt: skip
CASES = [*ALONE, *COMMUNICATION, *PAIRS, *SHAPES, *JOBS, *KNOBS, *OFFLOADED, *HYBRIDS, *DYNAMIC_CP, *SPARSE]
