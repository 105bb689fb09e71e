"""The catalogue of remedies, in the recommended order of the workflow, for each bottleneck that holds a plan back.

A remedy says which fields it sets together, which bottlenecks it answers, what it needs, what it does to the numbers of
a training, and from which release of the stack on it is there. `advise.py` tries them; nothing else in the package
names a change that could help.
"""

from dataclasses import dataclass
from typing import Literal

from threefold.remedies import for_memory as room
from threefold.remedies import for_time as faster
from threefold.remedies.for_time import Ways

Bottleneck = Literal["memory", "communication", "host", "compute", "slow ranks", "router", "data", "allocator"]
TIME_WALLS = ("communication", "host", "compute")


@dataclass(frozen=True, slots=True)
class Remedy:
    """One change that could help."""

    name: str
    what: str  # in words, for whoever has no plan
    answers: tuple[Bottleneck, ...]
    fields: tuple[str, ...] = ()  # that it may set, together
    ways: Ways | None = None  # the mildest first; None where no field does it
    axes: tuple[str, ...] = ()  # of communication, whose exposed time it shortens
    frees: str = ""  # the axis whose ranks it gives to others
    kernels: tuple[str, ...] = ()  # kinds: where a trace has one, the remedy is in use
    needs: str = ""
    numbers: Literal["same", "rounded", "another training"] = "same"
    since: str = "0.3.1"  # the first of the supported releases of Megatron Bridge that has it; ours has all of them
    is_priced: bool = True
    is_mild: bool = False  # leaves layout and format alone: offered also where a plan fits, with little room
    on_cpu: bool = False
    is_ours: bool = False  # only the threefold engine has it, so that it takes a plan to be offered


_EXPERTS, _DATA, _TENSOR = ("ep", "etp"), ("dp", "edp"), ("tp", "etp")
_STATES = ("knobs.store_param_remainders", "knobs.optimizer_dtype", "knobs.grad_dtype")
_CHUNKS = ("layout.vpp", "layout.stages", "layout.schedule")
_DEGREES = ("layout.cp", "layout.ep", "layout.etp", "layout.pp", *_CHUNKS)
_LEAN = (*_DEGREES, "layout.tp", "job.micro_batch", "knobs.recompute")  # what goes with a harsher remedy
_EXCLUDED = ("knobs.ep_overlap", "knobs.delay_wgrad", "knobs.graphs", "knobs.activation_offload")  # by full recompute

# fmt: off
CATALOGUE: tuple[Remedy, ...] = (
    # What was seen in a run comes first: no setting makes up for it.
    Remedy("slow-rank",
           "look at the slow rank's node before anything else: clocks and throttling, ECC errors, other "
           "processes, its link and its cores; then run without it", ("slow ranks",),
           needs="steps long enough to tell a slow rank from noise", on_cpu=True),
    Remedy("balance-router",
           "balance the router: a larger weight of the load-balancing loss, or bias updates; then look at the "
           "loads of each layer again", ("router",), ("job.aux_loss",), numbers="another training", on_cpu=True),
    Remedy("feed-data",
           "feed the step: read and decode in more processes, tokenize beforehand, keep the data on local disks",
           ("data",), ("run.image_workers",), on_cpu=True),
    Remedy("expandable-segments",
           "let the allocator grow its segments (PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True): it calls the "
           "driver within the step", ("allocator",), needs="no NCCL user buffers"),
    # Memory: selective before full, degrees before formats, offload last.
    Remedy("selective-recompute", "recompute selectively: norms and expert activations first, whole layers last",
           ("memory",), ("knobs.recompute",), room.recompute, is_mild=True, on_cpu=True),
    Remedy("smaller-microbatch", "use a smaller microbatch", ("memory",), ("job.micro_batch", "knobs.recompute"),
           room.smaller_microbatch, is_mild=True, on_cpu=True),
    Remedy("spread", "spread the model: CP where activations fill the memory, else EP and then PP", ("memory",),
           _LEAN, room.spread, on_cpu=True),
    Remedy("fewer-bits", "keep optimizer states and gradients in fewer bits", ("memory",),
           (*_STATES, *_LEAN), room.fewer_bits,
           numbers="rounded", is_mild=True),
    Remedy("low-precision-weights", "train in a format below sixteen bits", ("memory",),
           ("knobs.precision", "knobs.fp8_params", *_LEAN),
           room.low_precision, kernels=("fp8",), needs="a sound run in BF16 of the same job", numbers="rounded"),
    Remedy("full-recompute", "recompute whole layers, where no selective set fits", ("memory",),
           (*_EXCLUDED, *_LEAN), room.full_recompute, on_cpu=True),
    Remedy("offload", "offload optimizer states to the host, last of all", ("memory",),
           ("knobs.optimizer_offload", *_EXCLUDED, *_LEAN), room.offload, needs="memory and cores of the host"),
    # Communication: overlap, then the dispatcher, then where ranks are placed.
    Remedy("overlap-data-parallel", "overlap gradient reduction and parameter gathering with compute",
           ("communication",), ("knobs.grad_reduce_overlap", "knobs.param_gather_overlap"),
           faster.turned_on("grad_reduce_overlap", "param_gather_overlap"), _DATA, on_cpu=True),
    Remedy("overlap-experts", "overlap the expert-parallel exchange with another microbatch", ("communication",),
           ("knobs.ep_overlap", "knobs.shared_expert_overlap", *_CHUNKS, "knobs.max_connections"),
           faster.ep_overlap, _EXPERTS, needs="two microbatches in flight, and more than one hardware queue",
           on_cpu=True),
    Remedy("delay-weight-gradients", "delay weight gradients, so that they hide more of the exchange",
           ("communication",), ("knobs.delay_wgrad",),
           faster.turned_on("delay_wgrad", only_if=lambda plan: plan.knobs.ep_overlap), _EXPERTS,
           needs="the overlap of experts", on_cpu=True),
    Remedy("overlap-tensor-parallel", "overlap tensor-parallel communication with its GEMMs", ("communication",),
           ("knobs.tp_overlap",), faster.turned_on("tp_overlap", only_if=lambda plan: plan.layout.tp > 1), _TENSOR),
    Remedy("copy-experts", "copy hot experts to other ranks in each step", ("communication", "compute", "router"),
           ("knobs.expert_balance", "knobs.expert_copies"), faster.copy_experts, _EXPERTS,
           needs="a slot of memory a rank, and a load that changes slowly", on_cpu=True, is_ours=True),
    Remedy("dispatcher", "compare the platform's dispatchers: DeepEP and HybridEP with alltoall", ("communication",),
           ("knobs.dispatcher",), faster.dispatcher, _EXPERTS, kernels=("deepep", "hybridep")),
    Remedy("ep-before-etp", "give the ranks of expert tensor parallelism to expert parallelism", ("communication",),
           ("layout.ep", "layout.etp"), faster.ep_before_etp, _EXPERTS, "etp", on_cpu=True),
    Remedy("tp-inside-domain", "keep tensor parallelism inside NVLink", ("communication",), ("layout.tp",),
           faster.tp_inside_domain, _TENSOR),
    Remedy("ep-inside-domain", "keep the expert-parallel exchange inside NVLink", ("communication",), ("layout.ep",),
           faster.ep_inside_domain, _EXPERTS),
    Remedy("exchange-of-keys", "exchange keys and values of context parallelism another way", ("communication",),
           ("knobs.cp_comm",), faster.exchange_of_keys, ("cp",)),
    # Fewer ranks a group, and more groups: all of a step gets shorter, not only the exchange.
    Remedy("less-tensor-parallelism", "use fewer tensor-parallel ranks: the smallest model parallelism that fits",
           ("communication", "compute"), ("layout.tp",), faster.less_tp, frees="tp", on_cpu=True),
    # The host: graphs, a larger microbatch, then what has no price.
    Remedy("graphs", "capture CUDA graphs of router and dispatch preprocessing, then of attention", ("host",),
           ("knobs.graphs",), faster.graphs, kernels=("graphs",),
           needs="static addresses, and memory for their pools"),
    Remedy("larger-microbatch", "use a larger microbatch, so that a kernel works longer than its launch",
           ("host", "compute"), ("job.micro_batch",), faster.larger_microbatch, on_cpu=True),
    Remedy("collect-garbage", "collect garbage by hand between steps", ("host",), ("run.gc_every",),
           faster.collect_garbage, is_priced=False, on_cpu=True),
    Remedy("pin-cores", "pin each rank to the cores next to its GPU", ("host",), ("run.cores",), faster.pin_cores,
           is_priced=False),
    # Compute: what is done twice, fused kernels, then fewer bits.
    Remedy("less-recompute", "recompute less, as far as memory allows", ("compute",),
           ("knobs.recompute", "knobs.recompute_method", "knobs.recompute_layers"), faster.less_recompute,
           on_cpu=True),
    Remedy("heads-of-delta", "trade sequence for heads in layers of the delta rule: its kernels see whole sequences",
           ("compute",), ("knobs.cp_comm",), faster.heads_of_delta),
    Remedy("fused-experts", "use grouped GEMMs and fused kernels for experts", ("compute",), ("knobs.expert_fusion",),
           faster.turned_on("expert_fusion", only_if=lambda plan: plan.model.is_moe), kernels=("fused experts",)),
    Remedy("fused-permutation", "fuse the permutation of tokens", ("compute",), ("knobs.permute_fusion",),
           faster.turned_on("permute_fusion", only_if=lambda plan: plan.model.is_moe and plan.target != "threefold"),
           kernels=("fused permutation",)),
    Remedy("low-precision", "train in a format below sixteen bits that the chip multiplies", ("compute",),
           ("knobs.precision",), faster.precision, kernels=("fp8",), needs="a sound run in BF16 of the same job",
           numbers="rounded"),
    Remedy("fewer-dispatch-sms", "give the dispatcher fewer multiprocessors", ("compute",), ("knobs.dispatch_sms",),
           faster.fewer_dispatch_sms),
)
# fmt: on
BY_NAME = {remedy.name: remedy for remedy in CATALOGUE}
