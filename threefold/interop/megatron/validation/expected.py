"""Fields of a plan as Megatron must end up with them. `judge/values.py` reads the same names from Megatron."""

from typing import Any

from threefold.interop.megatron.field_names import PRECISIONS
from threefold.plan.plan import Plan


def expected_values(plan: Plan) -> dict[str, Any]:
    """From the plan alone and not from its export, so that an export that says something else is seen."""
    knobs, layout, job, model = plan.knobs, plan.layout, plan.job, plan.model
    is_full = "full" in knobs.recompute
    expected = {
        "layout.tp": layout.tp,
        "layout.cp": layout.cp,
        "layout.pp": layout.pp,
        "layout.vpp": layout.vpp,
        "dp": plan.cluster.gpus // (layout.tp * layout.cp * layout.pp),
        "job.seq_len": job.seq_len,
        "dataset.seq_len": job.seq_len,
        "job.global_batch": job.global_batch,
        "job.micro_batch": job.micro_batch,
        "job.mtp": plan.mtp,
        "sequence_parallel": layout.tp > 1,
        "knobs.recompute": ["full"] if is_full else sorted(knobs.recompute),
        "knobs.recompute_method": (knobs.recompute_method or "uniform") if is_full else None,
        "knobs.recompute_layers": (knobs.recompute_layers or 1) if is_full else None,
        "knobs.ep_overlap": knobs.ep_overlap,
        "knobs.delay_wgrad": knobs.delay_wgrad,
        "knobs.tp_overlap": bool(knobs.tp_overlap and layout.tp > 1),
        "knobs.graphs": ["full_iteration"] if "full_iteration" in knobs.graphs else sorted(knobs.graphs),
        "knobs.activation_offload": sorted(knobs.activation_offload),
        "knobs.optimizer_offload": knobs.optimizer_offload,
        "knobs.precision": knobs.precision if knobs.precision in PRECISIONS else "fp32",
        "knobs.grad_dtype": knobs.grad_dtype,
        "knobs.optimizer_dtype": knobs.optimizer_dtype,
        "knobs.grad_reduce_overlap": knobs.grad_reduce_overlap,
        "knobs.param_gather_overlap": knobs.param_gather_overlap,
        "fsdp": knobs.data_parallel in ("fsdp", "hsdp"),
        "model.num_layers": model.num_layers,
        "model.dim": model.dim,
        "model.vocab": model.vocab,
        "layers of the chunks": [
            [len(plan.chunks[chunk * layout.pp + stage].layers) for chunk in range(layout.vpp)]
            for stage in range(layout.pp)
        ],
    }
    if model.moe is not None:
        expected |= {
            "layout.ep": layout.ep,
            "layout.etp": layout.etp,
            "knobs.dispatcher": "alltoall" if knobs.dispatcher == "local" else knobs.dispatcher,
            "knobs.shared_expert_overlap": knobs.shared_expert_overlap,
            "knobs.router_dtype": knobs.router_dtype,
            "model.num_experts": model.moe.num_experts,
            "model.top_k": model.moe.top_k,
            "model.expert_dim": model.moe.expert_dim,
        }
    return expected
