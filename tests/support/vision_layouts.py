"""Layouts of vision-language models that must give one rank's gradients. Some microbatches have no picture."""

from dataclasses import dataclass, field, replace
from typing import Any

import tiny_vision
from oracle_layouts import BASE
from plans import build

from threefold.plan.plan import Plan


@dataclass(frozen=True)
class VisionCase:
    """One layout, with the model, job and knobs that it is tested with; `often` ones run in the default suite."""

    name: str
    gpus: int
    layout: dict[str, Any]
    family: str = "qwen3_vl_moe"
    job: dict[str, Any] = field(default_factory=dict)
    knobs: dict[str, Any] = field(default_factory=dict)
    layers: int = 3
    often: bool = False

    @property
    def plan(self) -> Plan:
        fields = {**BASE, "cluster.gpus": self.gpus, "job.images": 1.0}
        fields |= {f"layout.{name}": value for name, value in self.layout.items()}
        fields |= {f"job.{name}": value for name, value in self.job.items()}
        fields |= {f"knobs.{name}": value for name, value in self.knobs.items()}
        spec = tiny_vision.spec_of(self.family).cut(num_layers=self.layers)
        return replace(build(fields), model=spec)


def case(name: str, gpus: int, **more: Any) -> VisionCase:
    own = {key: more.pop(key) for key in ("family", "job", "knobs", "layers", "often") if key in more}
    return VisionCase(name, gpus, more, **own)


FSDP, PACKED, OVERLAP = {"data_parallel": "fsdp"}, {"packing": True}, {"ep_overlap": True, "delay_wgrad": True}
CASES = [
    case("dp", 2),
    case("fsdp ep, full recompute", 4, ep=2, job=PACKED, knobs={**FSDP, "recompute": ["full"]}),
    case("hsdp", 4, replicate=2, knobs={"data_parallel": "hsdp"}),
    case("tp", 2, tp=2),
    case("tp cp", 4, often=True, tp=2, cp=2, job=PACKED),
    case("cp by all-to-all", 2, cp=2, job=PACKED, knobs={"cp_comm": "a2a"}),
    case("tp ep etp", 4, tp=2, ep=2, etp=2),
    case("pp", 2, pp=2, layers=4),
    case("encoder on its own stage", 3, often=True, pp=3, stages="E|t|ttL"),
    case("encoder on its own stage, tp ep", 8, pp=2, tp=2, ep=2, stages="E|tttL", job={"micro_batch": 2}),
    case("pp vpp ep", 4, pp=2, vpp=2, ep=2, layers=4, knobs={"vision_recompute": ["attn", "projector"]}),
    case("pp vpp ep overlap", 4, often=True, pp=2, vpp=2, ep=2, layers=4, knobs={"ep_overlap": True}),
    case("pp cp", 4, pp=2, cp=2, layers=4, job=PACKED),
    case("zero-bubble", 2, pp=2, schedule="zero-bubble", layers=4),
    case("dualpipev", 2, pp=2, vpp=2, schedule="dualpipev", layers=4),
    case("ep overlap", 2, ep=2, knobs=OVERLAP),
    case("fsdp ep overlap", 2, ep=2, knobs={**FSDP, "ep_overlap": True}),
    case("delta rule, fsdp", 2, family="qwen3_5_moe", knobs=FSDP),
    case("delta rule, cp ep", 4, often=True, family="qwen3_5_moe", cp=2, ep=2, job=PACKED),
    case("delta rule, tp pp", 4, family="qwen3_5_moe", tp=2, pp=2, layers=4),
    case("mtp over pp", 2, family="qwen3_5_moe", pp=2, layers=4, job={"mtp": 1}),
    case("mtp over pp, tp cp", 8, family="qwen3_5_moe", pp=2, tp=2, cp=2, layers=4, job={"mtp": 1, **PACKED}),
    case("mtp over pp, overlap", 4, family="qwen3_5_moe", pp=2, vpp=2, ep=2, layers=4, job={"mtp": 1}, knobs=OVERLAP),
    case("frozen encoder", 2, job={"freeze": ["vision"]}),
    case("frozen encoder and projector, fsdp", 2, job={"freeze": ["vision", "projector"]}, knobs=FSDP),
    case("frozen decoder, fsdp", 2, often=True, job={"freeze": ["language"]}, knobs=FSDP),
    case("frozen decoder, pp", 2, pp=2, layers=4, job={"freeze": ["language"]}),
]
