"""The value every verb speaks of. Frozen; every change makes a copy. Cross-field checks live in `rules/`."""

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import gcd
from typing import Any

from threefold.fields import MAX_INT, MAX_RANKS, item
from threefold.layout.degrees import AxisLink, Layout, axis_link, domain_ranks
from threefold.layout.stages import Chunk, balance, parse_stages
from threefold.notebook import ShownAsTable
from threefold.plan.budget import budget_bytes
from threefold.plan.data_entries import parse_entries
from threefold.plan.load import BALANCED, WORKLOADS
from threefold.spec.chips import CHIPS, ChipSpec
from threefold.spec.model import MlaSpec, ModelSpec

PRECISIONS = ("bf16", "fp16", "fp32", "fp8-cs", "fp8-tensor", "fp8-rowwise", "fp8-blockwise", "mxfp8", "nvfp4")
DISPATCHERS = ("local", "alltoall", "deepep", "hybridep")
EXPERT_KERNELS = ("torch", "triton", "cute")
DELTA_KERNELS = ("torch", "fla")
RECOMPUTE_MODULES = (
    "layernorm",
    "core_attn",
    "moe_act",
    "mlp",
    "moe",
    "shared_experts",
    "mla_up_proj",
    "gdn_norm_out",
    "full",
)
INSIDE_MOE = frozenset({"moe_act", "shared_experts"})  # made again with `moe` as it is
GRAPH_SCOPES = ("attn", "mamba", "mlp", "moe", "moe_router", "moe_preprocess", "full_iteration")
VISION_RECOMPUTE = ("full", "attn", "mlp", "projector")
OFFLOAD_MODULES = (
    "attn_norm",
    "qkv_linear",
    "core_attn",
    "attn_proj",
    "mlp_norm",
    "expert_fc1",
    "moe_act",
    "fused_group_mlp",
)
LORA_TARGETS = ("attention", "mlp", "shared_experts", "experts")
CP_COMM = ("p2p", "all_gather", "a2a", "a2a+p2p")
CP_EXCHANGE = ("latents", "expanded")
MEASURABLE = ("dispatcher", "precision", "graphs")
STATE_DTYPES = ("fp32", "bf16", "fp16", "fp8")


@dataclass(frozen=True, slots=True)
class Cluster:
    """The machine: how many of which chip."""

    chip: str = item("chip name, or file:PATH of a chip file of your own", "cpu", choices=tuple(CHIPS))
    gpus: int = item("GPUs (on cpu: processes) in all", 1, at_least=1, at_most=MAX_RANKS)
    gpus_per_node: int | None = item("GPUs in a node; absent: the chip's usual", at_least=1, at_most=MAX_INT)
    domain: int | None = item("GPUs joined by NVLink; absent: the chip's usual", at_least=1, at_most=MAX_INT)
    measured: ChipSpec | None = item("facts of this very machine, from a chip file", in_file=False)
    own: ChipSpec | None = item("facts of the file that `chip` names", in_file=False)

    @property
    def spec(self) -> ChipSpec:
        return self.measured or self.own or CHIPS[self.chip]

    @property
    def node(self) -> int:
        return self.gpus_per_node or self.spec.gpus_per_node

    @property
    def domain_ranks(self) -> int:
        """Consecutive ranks that share an NVLink domain."""
        return domain_ranks(self.spec, self.gpus, self.domain)


@dataclass(frozen=True, slots=True)
class Job:
    """What is trained. Changing a job changes the result; changing a knob does not."""

    seq_len: int = item("tokens in a sequence", 4096, at_least=1, at_most=MAX_INT)
    global_batch: int = item("sequences in an optimizer step", 1, at_least=1, at_most=MAX_INT)
    micro_batch: int = item("sequences in a microbatch on one data-parallel rank", 1, at_least=1, at_most=MAX_INT)
    task: str = item("what kind of training", "pretrain", choices=("pretrain", "sft"))
    optimizer: str = item("optimizer", "adamw", choices=("adamw", "muon"))
    data: str | tuple[str, ...] = item(
        "'embedded' (made of this machine's Python sources), 'scenes' (drawn pictures with questions), "
        "'synthetic' (benchmark-only), shards, folders, JSONL, or tar shards of pictures",
        "embedded",
    )
    tokenizer: str | None = item("tokenizer.json, or its folder, that encodes text; absent: a token is a byte")
    val_data: str | tuple[str, ...] | None = item("validation sets, as in job.data, or NAME=entry; absent: a split")
    val_fraction: float = item("share of the data that the split holds out", 0.02, at_least=0.0001, at_most=0.5)
    text_field: str = item("field of a record that holds its text, where it has one text only", "text")
    max_bad_records: float = item("share of a file's records that may be bad: skipped", 0.01, at_least=0, at_most=1)
    packing: bool = item("pack documents into sequences, with their boundaries kept by attention", False)
    dynamic_length: bool = item("sequence lengths differ between microbatches, unpadded", False)
    routing: str = item("who chooses the experts", "learned", choices=("learned", "forced-balance"))
    load: str = item(
        "how the router loads experts, for prediction and rehearsal alone: a workload, or file:PATH of a run's record",
        BALANCED,
        choices=(BALANCED, *WORKLOADS),
    )
    capacity_factor: float | None = item(
        "tokens an expert may take, over its fair share; absent: dropless", at_least=0.1, at_most=65_536
    )
    capacity_scope: str = item(
        "capacity per expert (drop and pad) or per rank (static buffers)", "expert", choices=("expert", "rank")
    )
    mtp: int | None = item("multi-token-prediction depths trained; absent: all the model has", at_least=0, at_most=64)
    freeze: tuple[str, ...] = item(
        "what does not train: vision, projector, language, or patterns of parameter names such as layers.0.*", ()
    )
    lora_rank: int | None = item(
        "rank of LoRA adapters, beside which all other weights are frozen; absent: none", at_least=1, at_most=4096
    )
    lora_alpha: float | None = item(
        "adapters are scaled by alpha over the rank; absent: twice the rank", at_least=1e-6, at_most=1e6
    )
    lora_targets: tuple[str, ...] = item(
        "which weights get adapters", ("attention", "mlp", "shared_experts"), choices=LORA_TARGETS
    )
    images: float | None = item("images in a sequence, on average; absent: unknown", at_least=0, at_most=MAX_INT)
    max_pixels: int | None = item(
        "pixels that a picture is resized to, at most; absent: as the model's image processor",
        at_least=1,
        at_most=2**26,
    )
    steps: int = item("optimizer steps", 100, at_least=1, at_most=MAX_INT)
    seed: int = item("of initialization and of the order of data", 0, at_least=0, at_most=MAX_INT)
    lr: float = item("peak learning rate", 3e-4, at_least=0, at_most=100)
    min_lr: float = item("learning rate at the end, over the peak", 0.1, at_least=0, at_most=1)
    warmup_steps: int = item("steps of linear warm-up", 10, at_least=0, at_most=MAX_INT)
    lr_schedule: str = item("after warm-up", "cosine", choices=("cosine", "wsd", "constant"))
    decay_fraction: float = item("of the steps, how many the wsd schedule decays", 0.1, at_least=0, at_most=1)
    weight_decay: float = item("decoupled weight decay of matrices", 0.1, at_least=0, at_most=10)
    adam_beta1: float = item("decay of Adam's first moment", 0.9, at_least=0, at_most=0.999999)
    adam_beta2: float = item("decay of Adam's second moment", 0.95, at_least=0, at_most=0.999999)
    adam_eps: float = item("added to the root of Adam's second moment", 1e-8, at_least=1e-15, at_most=1)
    clip_norm: float = item("gradient norm to clip to; 0: never", 1.0, at_least=0)
    initial_loss_scale: float | None = item(
        "loss scale that fp16 begins with; it halves where gradients overflow; absent: 256 a token of the step",
        at_least=1,
        at_most=2**60,
    )
    loss_scale_window: int = item(
        "steps without an overflow after which fp16's loss scale doubles", 1000, at_least=1, at_most=MAX_INT
    )
    mtp_weight: float = item("weight of the multi-token-prediction loss", 0.3, at_least=0, at_most=10)
    aux_loss: float = item("weight of the load-balancing loss", 0.001, at_least=0, at_most=10)
    seq_aux_loss: float = item("weight of the load-balancing loss within a sequence", 0.0, at_least=0, at_most=10)
    z_loss: float = item("weight of the router's z loss", 0.0, at_least=0, at_most=10)
    bias_rate: float = item("step of the aux-loss-free bias", 0.001, at_least=0, at_most=1)


@dataclass(frozen=True, slots=True)
class Knobs:
    """What trades time for memory and leaves the model alone."""

    precision: str = item("format of GEMM inputs; the base stays bf16 below 16 bits", "bf16", choices=PRECISIONS)
    dispatcher: str = item("how tokens travel to experts", "alltoall", choices=DISPATCHERS)
    dispatch_sms: int | None = item("multiprocessors given to the flex dispatcher", at_least=1, at_most=1024)
    recompute: tuple[str, ...] = item(
        "modules whose forward is redone in backward; auto:60GiB: the cheapest that meet a peak",
        (),
        choices=RECOMPUTE_MODULES,
    )
    recompute_method: str | None = item("how full recompute takes layers", choices=("uniform", "block"))
    recompute_layers: int | None = item(
        "layers per unit (uniform) or of a pipeline rank (block); absent: 1", at_least=1, at_most=MAX_INT
    )
    recompute_save: tuple[str, ...] = item(
        "modules inside fully recomputed layers whose outputs are saved", (), choices=("core_attn",)
    )
    ep_overlap: bool = item("hide dispatch and combine behind another microbatch", False)
    delay_wgrad: bool = item("run weight gradients where they hide communication", False)
    wgrad_overlap: bool = item(
        "run experts' weight gradients during the backward of dispatch; not with ep_overlap", False
    )
    shared_expert_overlap: bool = item("run shared experts beside dispatch; not with ep_overlap", False)
    grad_reduce_overlap: bool = item("reduce gradients during backward", True)
    param_gather_overlap: bool = item("gather parameters during forward", True)
    tp_overlap: bool = item("overlap tensor-parallel communication with GEMMs", False)
    graphs: tuple[str, ...] = item("CUDA graph scopes", (), choices=GRAPH_SCOPES)
    graph_memory_gb: float | None = item("GiB that CUDA graphs may hold on a rank; absent: any", at_least=0)
    compile: bool = item("torch.compile of norms, routers and dense MLPs", False)
    optimizer_offload: float = item("fraction of optimizer states kept on the host", 0.0, at_least=0, at_most=1)
    vision_recompute: tuple[str, ...] | None = item(
        "of the image encoder and projector; absent: as the decoder, in full or not at all", choices=VISION_RECOMPUTE
    )
    activation_offload: tuple[str, ...] = item(
        "modules whose saved tensors go to the host", (), choices=OFFLOAD_MODULES
    )
    activation_offload_layers: int = item(
        "whole layers whose saved tensors go to the host", 0, at_least=0, at_most=MAX_INT
    )
    optimizer_dtype: str = item("dtype of the optimizer's moments", "fp32", choices=STATE_DTYPES)
    master_weights: bool = item("weights in fp32 beside narrower ones, for the optimizer to update", True)
    store_param_remainders: bool = item("of master weights, store only the 16 bits that bf16 weights lack", False)
    muon_dtype: str | None = item(
        "dtype of Muon's GEMMs; absent: bf16 for 16-bit weights on a GPU, else fp32", choices=("bf16", "fp32")
    )
    grad_dtype: str = item("dtype of accumulated gradients", "fp32", choices=("fp32", "bf16"))
    data_parallel: str = item("who shards what over data parallel", "zero1", choices=("zero1", "fsdp", "hsdp"))
    grad_accum_fusion: bool = item("weight-gradient GEMMs add into the gradient buffer", True)
    expert_balance: str = item(
        "how experts that get more rows than others are balanced; replicate: each step copies them to other EP ranks",
        "none",
        choices=("none", "replicate"),
    )
    expert_copies: int = item("slots of an EP rank for copies of other ranks' experts", 1, at_least=1, at_most=64)
    expert_balance_every: int = item("steps after which copies are placed anew", 1, at_least=1, at_most=1000)
    permute_fusion: bool = item("fused permutation kernels", True)
    expert_fusion: bool = item("one fused kernel for an expert's two GEMMs, activation and quantization", False)
    expert_kernels: str | None = item(
        "kernels of fused experts, of one kind; absent: the fastest that was measured here", choices=EXPERT_KERNELS
    )
    delta_kernels: str | None = item(
        "kernels of the gated delta rule; absent: fla where it is installed, with memory estimated as for torch",
        choices=DELTA_KERNELS,
    )
    loss_fusion: bool = item("cross entropy fused with its gradient, in place", True)
    router_dtype: str = item("dtype of the router", "fp32", choices=("fp32", "bf16"))
    router_padding: bool = item("pad tokens per expert to what quantized GEMMs want", False)
    fp8_params: bool = item("keep weights in the GEMM format, not in bf16", False)
    fp8_attention: bool = item("FP8 inside the attention kernel", False)
    fp8_output: bool = item("the output layer in the GEMM format, not in bf16", False)
    fp8_dispatch: bool = item("rows travel to their experts in FP8 with scales; results and gradients in bf16", False)
    cp_comm: str | tuple[str, ...] = item(
        "context-parallel communication, for all layers or one a layer", "p2p", choices=CP_COMM
    )
    cp_exchange: str | None = item(
        "what context-parallel ranks exchange in MLA: latents, or expanded heads; absent: the cheaper by estimate",
        choices=CP_EXCHANGE,
    )
    cp_inner: int | None = item(
        "ranks that trade heads in a2a+p2p; absent: those of a CP group in one NVLink domain",
        at_least=1,
        at_most=MAX_RANKS,
    )
    cp_dynamic: bool = item("each sequence is sharded over as few CP ranks as its length needs", False)
    max_connections: int | None = item(
        "CUDA_DEVICE_MAX_CONNECTIONS; absent: the launcher chooses", at_least=1, at_most=32
    )


@dataclass(frozen=True, slots=True)
class Run:
    """How a run is kept: saving, evaluating, watching. None of it changes the result."""

    save_every: int = item("steps between checkpoints; 0: only at the end", 500, at_least=0, at_most=MAX_INT)
    keep: int = item("checkpoints kept", 2, at_least=1, at_most=MAX_INT)
    eval_every: int = item("steps between evaluations; 0: never", 0, at_least=0, at_most=MAX_INT)
    eval_batches: int = item("microbatches of one evaluation", 8, at_least=1, at_most=MAX_INT)
    early_stop: int = item(
        "evaluations in a row without a lower loss that end the run; 0: none does", 0, at_least=0, at_most=MAX_INT
    )
    keep_best: bool = item(
        "keep the checkpoint of the lowest evaluation loss too; eval, sample and export-hf then take it", False
    )
    log_every: int = item("steps between lines of metrics", 1, at_least=1, at_most=MAX_INT)
    tensorboard: bool = item("write TensorBoard events where the package is installed", True)
    wandb: str | None = item("Weights & Biases project to log to; absent: none")
    bad_steps: int = item("non-finite steps skipped before the run stops", 5, at_least=0, at_most=MAX_INT)
    cores: str | None = item(
        "CPU cores to stay on: one set (0-7,16), one a local rank (0-7;8-15), or auto: near the rank's GPU; absent: any"
    )
    hang_seconds: float = item(
        "seconds a collective may take before the run ends and names the ranks that did not come; 0: for ever",
        600.0,
        at_least=0,
        at_most=MAX_INT,
    )
    image_workers: int | None = item(
        "processes of a rank that decode pictures; 0: its loader does; absent: by its cores", at_least=0, at_most=256
    )
    gc_every: int = item(
        "steps between garbage collections by hand; 0: leave it to Python", 50, at_least=0, at_most=MAX_INT
    )


@dataclass(frozen=True, slots=True)
class Stack:
    """Versions of the software, where they matter. Absent: unknown, and no rule speaks of it."""

    torch: str | None = item("PyTorch version, such as 2.11.0")
    te: str | None = item("Transformer Engine version")
    release: str | None = item("container or package release, such as 26.06")
    measured: tuple[str, ...] = item(
        "choices that were measured on this machine: dated defaults say no more of them", (), choices=MEASURABLE
    )


@dataclass(frozen=True, repr=False)
class Plan(ShownAsTable):
    """A complete plan."""

    model: ModelSpec
    model_name: str  # as written: a name or hf:path
    target: str
    cluster: Cluster
    job: Job
    layout: Layout
    knobs: Knobs
    run: Run
    stack: Stack
    written: tuple[tuple[str, Any], ...] = ()  # the fields that differ from their defaults, in order
    stated: frozenset[str] = field(default=frozenset(), compare=False)  # the fields given, also at their defaults

    def summary(self) -> str:
        where = f"{self.layout.gpus} x {self.chip.name}"
        return f"{self.hash}, {self.model_name} on {where} for {self.target}, {self.knobs.precision}"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The fields that differ from their defaults."""
        return ["field", "value"], [[path, str(value)] for path, value in self.written]

    @property
    def chip(self) -> ChipSpec:
        return self.cluster.spec

    def on_chip(self, measured: ChipSpec | None) -> "Plan":
        """This plan with the facts of a chip file in place of the shipped ones; None puts those back."""
        return replace(self, cluster=replace(self.cluster, measured=measured))

    @property
    def mtp(self) -> int:
        """MTP depths trained."""
        return self.model.mtp_layers if self.job.mtp is None else self.job.mtp

    @property
    def expert_capacity_factor(self) -> float | None:
        """The capacity of an expert over its balanced load; None where none is set for each expert.

        It is at most the number of experts over top-k: such an expert takes every token, and nothing is dropped.
        """
        job, moe = self.job, self.model.moe
        if job.capacity_factor is None or job.capacity_scope != "expert" or moe is None:
            return None
        return min(job.capacity_factor, moe.num_experts / moe.top_k)

    @property
    def has_rank_capacity(self) -> bool:
        """Whether buffers of a fixed size hold the rows of all experts of a rank."""
        return self.model.is_moe and self.job.capacity_scope == "rank" and self.job.capacity_factor is not None

    @property
    def block_factor(self) -> float | None:
        """Room for rows in the blocks of a fixed size that the threefold engine's graph of a whole microbatch sends to
        each rank, over the balanced number; None where exchanges are as large as their rows. Nothing is dropped."""
        in_blocks = self.has_rank_capacity and self.target == "threefold" and "full_iteration" in self.knobs.graphs
        return self.job.capacity_factor if in_blocks and self.layout.ep > 1 else None

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one data-parallel rank in a step; 0 where the batch does not divide."""
        sequences = self.layout.dp * self.job.micro_batch
        return self.job.global_batch // sequences if sequences else 0

    @property
    def tokens_per_step(self) -> int:
        return self.job.global_batch * self.job.seq_len

    @property
    def is_long(self) -> bool:
        """Long context begins where a rank no longer holds a short sequence whole: past 32K."""
        return self.job.seq_len >= 32_768

    @property
    def is_vlm(self) -> bool:
        return self.model.vision is not None

    @property
    def is_synthetic(self) -> bool:
        """Part of the data is made up: the run can only be a benchmark."""
        given = (self.job.data,) if isinstance(self.job.data, str) else self.job.data
        return any(entry.startswith("synthetic") for entry in given)

    @property
    def vision_recompute(self) -> tuple[str, ...]:
        """What is recomputed of the image encoder and projector."""
        if self.knobs.vision_recompute is None:
            return ("full",) if self.is_vlm and "full" in self.knobs.recompute else ()
        return self.knobs.vision_recompute

    @property
    def packs_offline(self) -> bool:
        """Whether conversations are packed before training, as text is; those about images are packed in the batch."""
        return self.job.packing and self.job.task == "sft" and not self.is_vlm

    @property
    def pads_sequences(self) -> bool:
        """Whether conversations and documents with images stay whole, so that sequences end in padding."""
        return self.job.task == "sft" or self.is_vlm

    @property
    def is_image_free(self) -> bool:
        """A vision-language model that sees no images: `job.images` is 0, or absent while all data is the engine's own
        text."""
        images, entries = self.job.images, parse_entries(self.job.data)
        is_text = all(entry.is_built_in and not entry.has_drawn_pictures for entry in entries)
        return self.is_vlm and (images == 0 or (images is None and is_text))

    @property
    def is_benchmark_only(self) -> bool:
        """Neither loss nor speed of the run is evidence for a real one: its data is made up, its experts are chosen by
        force, or its vision-language model sees no images."""
        forced = self.model.is_moe and self.job.routing == "forced-balance"
        return self.is_synthetic or forced or self.is_image_free

    @property
    def expert_slots(self) -> int:
        """Slots of a rank for copies of other ranks' experts, in each layer with experts; 0 where nothing is copied."""
        knobs, experts, ep = self.knobs, self.model.num_experts, self.layout.ep
        copies = knobs.expert_balance == "replicate" and knobs.dispatcher == "alltoall" and ep > 1
        if not copies or self.job.routing == "forced-balance":
            return 0
        return min(knobs.expert_copies, experts - experts // ep)

    @property
    def full_recompute(self) -> bool:
        return "full" in self.knobs.recompute

    @property
    def recompute_budget(self) -> float | None:
        """Bytes, where the plan names a budget and no modules."""
        return budget_bytes(self.knobs.recompute[0]) if self.knobs.recompute else None

    @property
    def low_precision(self) -> bool:
        return self.knobs.precision not in ("bf16", "fp16", "fp32")

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """What each virtual stage holds: the written string, or a balanced one."""
        if self.layout.stages is not None:
            return parse_stages(self.layout.stages)
        most = self.model.num_layers + self.mtp + 2  # more chunks than items: a rule says so
        return balance(self.model.num_layers, min(self.layout.chunks, most), self.mtp)

    @property
    def exchanges_latents(self) -> bool:
        """Whether context-parallel ranks of our engine exchange MLA's latents. An absent `cp_exchange` is resolved when
        a plan is read (`cost/cp_exchange.py`); in a plan that nobody resolved it means expanded heads."""
        can = isinstance(self.model.attention, MlaSpec) and self.layout.cp > 1 and self.target == "threefold"
        return can and self.knobs.cp_exchange == "latents"

    @property
    def shards_dynamically(self) -> bool:
        """Whether sequences have CP degrees of their own, which takes more than one CP rank."""
        return self.knobs.cp_dynamic and self.layout.cp > 1

    @property
    def cp_inner(self) -> int:
        """Ranks that trade heads in `a2a+p2p`: the knob's, or those of a CP group that share a fast domain; 1 where
        one domain holds the whole group, so that only the ring is left."""
        if self.knobs.cp_inner is not None:
            return self.knobs.cp_inner
        link = self.link("cp")
        return gcd(self.layout.cp, link.in_domain) if link.link == "network" else 1

    def link(self, axis: str) -> AxisLink:
        return axis_link(self.layout, axis, self.cluster.domain_ranks)

    @property
    def hash(self) -> str:
        """Twelve hex digits: equal for equal plans, whatever the order or spelling of their file."""
        facts = asdict(self.model) if self.model_name.startswith("hf:") else None
        text = json.dumps([sorted(self.written), facts], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]
