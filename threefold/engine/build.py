"""Builds the parts of a training step on one rank from a plan. `train.py`, `verify/` and `dryrun/` call `build`.

The parts are the model chunks, the microbatch runner, data parallelism, the optimizer and the data loader.
"""

from dataclasses import dataclass, field, replace
from functools import cache, partial

import torch

from threefold.engine.attention.fused_delta import require_delta_kernels
from threefold.engine.data.dynamic_cp import DynamicGrid
from threefold.engine.data.images.decode import image_workers
from threefold.engine.data.loader import Loader
from threefold.engine.data.validation import held_out_share, open_validation
from threefold.engine.data_parallel.fsdp import Fsdp, WrapPolicy
from threefold.engine.data_parallel.full_matrices import FullMatrices
from threefold.engine.data_parallel.protocol import DataParallel, data_parallel_settings
from threefold.engine.data_parallel.single_rank import SingleRank
from threefold.engine.data_parallel.zero1 import Zero1
from threefold.engine.dist.mesh import Mesh
from threefold.engine.kernels.experts.kernel_choice import require_kernels
from threefold.engine.lora import lora_settings
from threefold.engine.model_options import Options
from threefold.engine.models.block import Block
from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder
from threefold.engine.moe.copies import ExpertCopies
from threefold.engine.moe.experts import Experts
from threefold.engine.moe.layer import MoeLayer
from threefold.engine.optim.adamw import AdamW
from threefold.engine.optim.loss_scaler import LossScaler, initial_scale
from threefold.engine.optim.muon import Muon
from threefold.engine.precision.recipes import RECIPES
from threefold.engine.run.rng_state import seed_all
from threefold.engine.schedule.microbatch_runners import MicrobatchRunner, Overlapped, Pipelined, Sequential
from threefold.engine.shard.order import fsdp_groups, replica_group, shard_group, shard_model
from threefold.engine.vision import PatchEmbedding, Projector, VisionBlock
from threefold.layout.degrees import Layout
from threefold.plan.plan import Job, Plan
from threefold.spec.flops import flops_per_token
from threefold.units import GIB

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_WRAPPING = WrapPolicy(
    # Encoder and projector of images are units apart from the rest: each layer, the patch embedding, the projector.
    is_block=lambda module: isinstance(module, Block | VisionBlock | PatchEmbedding | Projector),
    is_experts=lambda module: isinstance(module, Experts),
    methods=("forward_chunk", "compute_loss", "run_with_parameters"),
    block_methods=("run_with_parameters",),  # of those that have them
    experts_methods=("forward_tokens",),
)


@dataclass(frozen=True)
class Parts:
    """Everything that a training step needs on one rank."""

    chunks: dict[int, Decoder]  # pipeline chunks by number; the whole model is chunk 0 without a pipeline
    runner: MicrobatchRunner
    data: DataParallel
    optimizer: AdamW | Muon
    mesh: Mesh
    loader: Loader | None = None
    validation: dict[str, Loader] = field(default_factory=dict)  # validation sets by name
    loss_scaler: LossScaler | None = None  # of an fp16 model
    copies: ExpertCopies | None = None  # of hot experts of other ranks

    @property
    def model(self) -> Decoder:
        """The whole model, where there is no pipeline."""
        (only,) = self.chunks.values()
        return only

    @property
    def device(self) -> torch.device:
        return self.mesh.device

    def close(self) -> None:
        for loader in (self.loader, *self.validation.values()):
            if loader:
                loader.close()


def device_of(plan: Plan) -> torch.device:
    return torch.device("cuda" if plan.cluster.chip != "cpu" and torch.cuda.is_available() else "cpu")


def dtype_of(plan: Plan) -> torch.dtype:
    """The dtype of the weights: that of the precision, or bf16 below sixteen bits."""
    return DTYPES.get(plan.knobs.precision, torch.bfloat16)


def options_of(plan: Plan) -> Options:
    """The fields of the plan that the model's forward depends on."""
    job = plan.job
    assert plan.recompute_budget is None, "search/recompute.py turns a budget into names before a plan is run"
    return Options(
        aux_loss=job.aux_loss,
        seq_aux_loss=job.seq_aux_loss,
        z_loss=job.z_loss,
        mtp_loss=job.mtp_weight,
        capacity_factor=job.capacity_factor if job.capacity_scope == "expert" else None,
        block_factor=plan.block_factor,
        forced_balance=job.routing == "forced-balance",
        wgrad_overlap=plan.knobs.wgrad_overlap,
        shared_overlap=plan.knobs.shared_expert_overlap,
        expert_fusion=plan.knobs.expert_fusion,
        expert_kernels=plan.knobs.expert_kernels,
        delta_kernels=plan.knobs.delta_kernels,
        recipe=RECIPES.get(plan.knobs.precision),
        fp8_output=plan.knobs.fp8_output,
        cache_quantized_weights=plan.knobs.data_parallel == "zero1",
        recompute=plan.knobs.recompute,
        recompute_method=plan.knobs.recompute_method,
        recompute_layers=plan.knobs.recompute_layers,
        recompute_save=plan.knobs.recompute_save,
        vision_recompute=plan.vision_recompute,
        activation_offload=plan.knobs.activation_offload,
        activation_offload_layers=plan.knobs.activation_offload_layers,
        graphs=plan.knobs.graphs,
        graph_memory_bytes=None if plan.knobs.graph_memory_gb is None else plan.knobs.graph_memory_gb * GIB,
        compile=plan.knobs.compile,
        freeze=job.freeze,
        lora=lora_settings(job),
    )


def build(
    plan: Plan,
    mesh: Mesh | None = None,
    dtype: torch.dtype | None = None,
    options: Options | None = None,
    with_data: bool = True,
    with_weights: bool = True,
) -> Parts:
    """Build this rank's parts of the plan. `mesh` is None where there is one rank.

    Without `with_weights` parameters stay uninitialized, for callers that look at sizes only.
    """
    mesh = mesh or Mesh(plan.layout, device=device_of(plan))
    require_kernels(plan.knobs.expert_kernels, mesh.device)
    require_delta_kernels(plan.knobs.delta_kernels, mesh.device)
    seed_all(plan.job.seed)
    seed = plan.job.seed if with_weights else None
    chunks, data = _model_and_data(plan, mesh, dtype or dtype_of(plan), options or options_of(plan), seed)
    _count_uses(plan, chunks, data)
    optimizer = _optimizer(plan, mesh, chunks, data)
    _defer_updates(optimizer, data, chunks)
    dtype = dtype or dtype_of(plan)
    scaler = LossScaler(initial_scale(plan), plan.job.loss_scale_window) if dtype == torch.float16 else None
    runner, copies = _runner(plan, mesh, chunks, data, dtype), _expert_copies(plan, mesh, chunks, data, dtype)
    parts = Parts(chunks, runner, data, optimizer, mesh, loss_scaler=scaler, copies=copies)
    if not with_data:
        return parts
    loader = open_loader(plan, mesh, plan.job)
    return replace(parts, loader=loader, validation=_validation(plan, mesh, loader))


def parts_alone(model: Decoder, optimizer: AdamW | Muon) -> Parts:
    """The parts for a model that exists already, on one rank."""
    device, data = next(model.parameters()).device, SingleRank(model)
    _defer_updates(optimizer, data, {0: model})
    return Parts({0: model}, Sequential(model), data, optimizer, Mesh(Layout(), device=device))


def _defer_updates(optimizer: AdamW | Muon, data: SingleRank | Zero1 | Fsdp, chunks: dict[int, Decoder]) -> None:
    """Run the updates of states on the host during the next forward, where nothing stands against it.

    A compiled module waits for all its parameters before it runs, so that there is little to hide. Gradients that lie
    in no bucket may be memory of a CUDA graph, to which the graphs of the next forward write.
    """
    has_buckets = isinstance(data, Zero1) and not data.unbucketed
    stands_against = any(
        chunk.options.compile or (chunk.options.graphs and not has_buckets) for chunk in chunks.values()
    )
    if isinstance(optimizer, AdamW) and optimizer.offloaded and not stands_against:
        data.defer_updates(optimizer.updates)


def _model_and_data(
    plan: Plan, mesh: Mesh, dtype: torch.dtype, options: Options, seed: int | None
) -> tuple[dict[int, Decoder], SingleRank | Zero1 | Fsdp]:
    fuses = plan.knobs.grad_accum_fusion and why_not_fused(plan) is None
    settings = replace(data_parallel_settings(plan.knobs, mesh.device), grad_accumulation_fusion=fuses)
    # The gradients of one microbatch need no sum; those of several are summed in the dtype that the plan names.
    sums_wider = plan.num_microbatches > 1 and torch.promote_types(dtype, settings.grad_dtype) != dtype
    if plan.layout.gpus == 1 and not mesh.with_single_rank_groups and not sums_wider:
        model = build_model(plan.model, plan.mtp, dtype, mesh.device, options, seed)
        return {0: model}, SingleRank(model)
    sharded = shard_model(plan, mesh, options, dtype, seed)
    models = list(sharded.chunks.values())
    copies = partial(replica_group, mesh)
    if plan.knobs.data_parallel == "zero1":
        return sharded.chunks, Zero1(models, sharded.placements, copies, settings)
    return sharded.chunks, Fsdp(
        models, sharded.placements, partial(fsdp_groups, mesh), copies, mesh.device_mesh, settings, _WRAPPING
    )


def _expert_copies(
    plan: Plan, mesh: Mesh, chunks: dict[int, Decoder], data: SingleRank | Zero1 | Fsdp, dtype: torch.dtype
) -> ExpertCopies | None:
    blocks = [block for model in chunks.values() for block in model.expert_blocks()]
    layers = [
        (block.router_number, copies)
        for block in blocks
        if isinstance(block.ffn, MoeLayer) and (copies := block.ffn.copies) is not None
    ]
    if not layers or isinstance(data, SingleRank):
        return None
    settings = data_parallel_settings(plan.knobs, mesh.device)
    settings = replace(settings, grad_accumulation_fusion=plan.knobs.grad_accum_fusion)
    return ExpertCopies(layers, plan.knobs.expert_balance_every, data, settings, dtype)


def why_not_fused(plan: Plan) -> str | None:
    """The reason why weight-gradient GEMMs cannot add into the gradient buffer; None where they can."""
    if plan.knobs.data_parallel != "zero1":
        return f"{plan.knobs.data_parallel} reduces the gradients that autograd makes"
    return None


def _count_uses(plan: Plan, chunks: dict[int, Decoder], data: SingleRank | Zero1 | Fsdp) -> None:
    """Tell the gradient reduction that an overlapped pass brings two gradients of a tied embedding."""
    if plan.knobs.ep_overlap and not isinstance(data, SingleRank):
        both = any(model.embed is not None and model.has_loss for model in chunks.values())
        zero1 = data if isinstance(data, Zero1) else data.others
        zero1.grads_per_pass = {"embed.weight": 2} if plan.model.tied and both else {}


def _runner(
    plan: Plan, mesh: Mesh, chunks: dict[int, Decoder], data: SingleRank | Zero1 | Fsdp, dtype: torch.dtype
) -> MicrobatchRunner:
    if plan.layout.pp > 1:
        return Pipelined(chunks, plan, mesh, dtype)
    (model,) = chunks.values()
    # FSDP reduces gradients when the backward leaves a module, so that none may come later.
    delay = plan.knobs.delay_wgrad and plan.knobs.data_parallel == "zero1"
    if plan.knobs.ep_overlap:
        return Overlapped(model, delay)
    return Sequential(model, reduces_grads=not isinstance(data, SingleRank))


def _optimizer(plan: Plan, mesh: Mesh, chunks: dict[int, Decoder], data: SingleRank | Zero1 | Fsdp) -> AdamW | Muon:
    job, knobs = plan.job, plan.knobs
    decay, state_dtype, master = job.weight_decay, knobs.optimizer_dtype, knobs.master_weights
    betas, eps = (job.adam_beta1, job.adam_beta2), job.adam_eps
    named = next(iter(chunks.values())).named_parameters() if isinstance(data, SingleRank) else data.updated
    remainders = knobs.store_param_remainders
    if job.optimizer == "adamw":
        offload = knobs.optimizer_offload
        return AdamW(named, decay, state_dtype, betas, eps, master, offload, store_param_remainders=remainders)
    gatherer = None if isinstance(data, SingleRank) else FullMatrices(data, partial(shard_group, mesh))
    return Muon(
        named,
        decay,
        state_dtype,
        gatherer=gatherer,
        master=master,
        betas=betas,
        eps=eps,
        matmul_dtype=knobs.muon_dtype,
        store_param_remainders=remainders,
    )


def open_loader(plan: Plan, mesh: Mesh, job: Job, evaluation: bool = False, padded_to: int | None = None) -> Loader:
    """The loader of this rank. Microbatches of dynamic length are padded to a multiple of `padded_to`; None chooses the
    multiple that the layout asks for."""
    layout = plan.layout
    dynamic = None if evaluation or not plan.shards_dynamically else dynamic_grid(plan, mesh)
    share = held_out_share(plan.job, bool(plan.run.eval_every))
    return Loader(
        job,
        plan.model.vocab,
        dp_rank=mesh.coordinate("dp"),
        dp_size=layout.dp,
        seed=plan.job.seed,
        held_out=share,
        evaluation=evaluation and share > 0,
        prefetch=0 if evaluation else 2,
        length_multiple=padded_to or length_multiple(layout),
        vision=plan.model.vision,
        image_workers=0 if evaluation else image_workers(plan.run.image_workers),
        dynamic_cp=dynamic,
        device=mesh.device,
    )


def length_multiple(layout: Layout) -> int:
    """The number of which the length of a microbatch is a multiple, for the ranks that share it."""
    return (2 * layout.cp if layout.cp > 1 else 1) * layout.tp


def dynamic_grid(plan: Plan, mesh: Mesh) -> DynamicGrid:
    """The ranks that share the documents of a step. Their cost is what `threefold estimate` counts for a document."""
    layout = plan.layout

    @cache
    def cost_of(length: int) -> float:
        return length * flops_per_token(plan.model, length, plan.mtp, layout.tp)

    rank = mesh.coordinate("dp") * layout.cp + mesh.coordinate("cp")
    return DynamicGrid(layout.dp, layout.cp, layout.tp, rank, cost_of)


def _validation(plan: Plan, mesh: Mesh, training: Loader) -> dict[str, Loader]:
    if not plan.run.eval_every:
        return {}
    return open_validation(plan.job, training, lambda job: open_loader(plan, mesh, job, evaluation=True))
