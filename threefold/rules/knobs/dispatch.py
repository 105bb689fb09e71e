"""Dispatchers and the router."""

from collections.abc import Iterator

from threefold.findings import Changes, Finding
from threefold.plan.plan import Plan
from threefold.rules.base import divisors, rule
from threefold.spec.candidates import FLEX, dispatcher_candidates, runs_dispatcher
from threefold.spec.megatron import release_of
from threefold.spec.stacks import BRIDGE_FLEX

_WIDE = ("fp32", "fp16")  # rows that the flex dispatchers do not carry


@rule(rows="DI-GATE-DE DI-GATE-HE")
def flex_dispatch_on_gpus(plan: Plan) -> Iterator[Finding]:
    """The flex dispatchers run on GPUs.

    Why: DeepEP and HybridEP move rows by CUDA kernels over NVLink and RDMA.
    Confirm: cluster.chip.
    Fix: alltoall, which also runs on gloo.
    """
    if plan.knobs.dispatcher in FLEX and plan.chip.architecture == "cpu":
        problem = f"{plan.knobs.dispatcher} does not run on {plan.chip.name}"
        yield Finding(at="knobs.dispatcher", problem=problem, fix={"knobs.dispatcher": "alltoall"})


@rule(severity="warning", rows="DI-GATE-DE DI-GATE-HE EO-D11", follows=f"{BRIDGE_FLEX}: falls back to alltoall")
def dispatcher_supports_chip(plan: Plan) -> Iterator[Finding]:
    """A flex dispatcher is one that upstream applies on this chip.

    Why: Megatron Bridge applies DeepEP on Ampere, Hopper, B200 and B300, and HybridEP on these and GB200/GB300. On
        other chips it writes a line to the log and runs alltoall (Bridge 0.6; until then a recipe's flex settings
        stayed, and validation refused them, as it does where a backend is set directly). Published runs
        did use DeepEP on GB200, with their own settings: the gate is dated, and a measurement overrides it.
    Confirm: `Falling back to alltoall` in the log; compare the chip with `threefold chips`.
    Fix: alltoall or another candidate of the chip, or stack.measured=dispatcher where yours was measured to run.
    """
    name, flex = plan.knobs.dispatcher, [one.value for one in dispatcher_candidates(plan.chip)[1:]]
    gated = name in FLEX and not runs_dispatcher(name, plan.chip)
    if gated and plan.chip.architecture != "cpu" and "dispatcher" not in plan.stack.measured:
        release = f"Megatron Bridge {release_of(plan.stack.release).bridge}"
        yield Finding(
            at="knobs.dispatcher",
            problem=f"{release} runs alltoall for {name} on {plan.chip.name} "
            "(as of 2026-08; published runs with it exist)",
            fix={"knobs.dispatcher": "alltoall"},
            advice=f"or an A/B with {' or '.join(flex)}; stack.measured=dispatcher where {name} was measured",
        )


@rule(rows="DI-GATE-DE DI-GATE-HE", follows="DeepEP and HybridEP buffers: bf16 rows, or fp8 with scales")
def flex_dispatch_in_bf16(plan: Plan) -> Iterator[Finding]:
    """The flex dispatchers carry bf16 or narrower.

    Why: their buffers hold bf16 rows, or fp8 with scales; fp32 and fp16 rows have no kernel. A fact of run time:
        Megatron's validation accepts such a configuration.
    Confirm: knobs.precision.
    Fix: alltoall carries any dtype.
    """
    if plan.knobs.dispatcher in FLEX and plan.knobs.precision in _WIDE:
        problem = f"{plan.knobs.dispatcher} with {plan.knobs.precision} rows"
        fixes = [{"knobs.dispatcher": "alltoall"}, {"knobs.precision": "bf16"}]
        yield Finding(at="knobs.dispatcher", problem=problem, fixes=fixes)


@rule(rows="DI-A2A EX-EMPTY")
def local_dispatch_needs_local_experts(plan: Plan) -> Iterator[Finding]:
    """The local dispatcher moves nothing, so all experts must be here.

    Why: with EP or ETP above 1 tokens have to travel.
    Confirm: layout.ep and layout.etp.
    Fix: alltoall.
    """
    if plan.knobs.dispatcher == "local" and plan.layout.ep * plan.layout.etp > 1:
        problem = f"local dispatch with EP {plan.layout.ep} x ETP {plan.layout.etp}"
        fixes = [{"knobs.dispatcher": one.value} for one in dispatcher_candidates(plan.chip)]
        yield Finding(at="knobs.dispatcher", problem=problem, fixes=fixes)


@rule(rows="LB-ECHO DI-A2A", target="threefold")
def expert_copies_by_alltoall(plan: Plan) -> Iterator[Finding]:
    """Rows go to copies of experts by the all-to-all dispatcher.

    Why: it numbers the slots of owned and copied experts alike; the packages of the flex dispatchers know one owner of
        each expert.
    Confirm: knobs.expert_balance and knobs.dispatcher.
    Fix: alltoall, or no copies.
    """
    knobs = plan.knobs
    if knobs.expert_balance == "replicate" and knobs.dispatcher not in ("alltoall", "local") and _can_copy(plan):
        problem = f"copies of experts with {knobs.dispatcher}"
        fixes = [{"knobs.dispatcher": "alltoall"}, _NO_COPIES]
        yield Finding(at="knobs.expert_balance", problem=problem, fixes=fixes)


@rule(severity="warning", rows="LB-ECHO")
def expert_copies_have_use(plan: Plan) -> Iterator[Finding]:
    """Experts are copied where a router chooses them and other ranks have some.

    Why: with EP 1 each rank has all experts, forced balance leaves nothing to balance, and a rank has no use for more
        slots than there are experts elsewhere.
    Confirm: knobs.expert_balance, knobs.expert_copies, layout.ep and job.routing.
    Fix: delete what has no effect.
    """
    knobs, elsewhere = plan.knobs, plan.model.num_experts - plan.model.num_experts // plan.layout.ep
    if knobs.expert_balance == "none":
        unused = {
            f"knobs.{name}": None for name in ("expert_copies", "expert_balance_every") if getattr(knobs, name) != 1
        }
        if unused:
            problem = "slots and times of copies without expert_balance = replicate"
            yield Finding(at=next(iter(unused)), problem=problem, fix=unused)
    elif not _can_copy(plan):
        why = (
            "forced balance" if plan.job.routing == "forced-balance" and plan.layout.ep > 1 else f"EP {plan.layout.ep}"
        )
        yield Finding(at="knobs.expert_balance", problem=f"copies of experts have no effect with {why}", fix=_NO_COPIES)
    elif knobs.expert_copies > elsewhere:
        problem = f"{knobs.expert_copies} slots for copies, and {elsewhere} experts on other ranks"
        yield Finding(at="knobs.expert_copies", problem=problem, fix={"knobs.expert_copies": elsewhere})


_NO_COPIES: Changes = dict.fromkeys(("knobs.expert_balance", "knobs.expert_copies", "knobs.expert_balance_every"))


def _can_copy(plan: Plan) -> bool:
    return plan.model.is_moe and plan.layout.ep > 1 and plan.job.routing != "forced-balance"


@rule(
    rows="LB-ECHO", target="megatron-bridge", follows="Megatron-Core 0.19: no setting copies experts; a prototype does"
)
def megatron_copies_no_experts(plan: Plan) -> Iterator[Finding]:
    """Copies of hot experts are our engine's.

    Why: Megatron balances by losses and a bias. Its development branch has a prototype (Echo) without a setting of a
        release.
    Confirm: knobs.expert_balance.
    Fix: none.
    """
    if plan.knobs.expert_balance == "replicate" and _can_copy(plan):
        yield Finding(at="knobs.expert_balance", problem="Megatron copies no experts", fix=_NO_COPIES)


@rule(severity="note", rows="DI-MAP DI-NOMAP DI-EVID DI-FAMILY DI-APPLY EO-D10")
def dispatcher_candidates_left(plan: Plan) -> Iterator[Finding]:
    """Past EP 8 a matched A/B chooses the dispatcher: chip and EP only name candidates.

    Why: on one chip every dispatcher has won somewhere: on H100 HybridEP with Qwen3-30B on 16 GPUs, alltoall with EP
        overlap with Qwen3-235B on 256, DeepEP in a snapshot of DeepSeek-V3. Until 2026-08-01 upstream had a default for
        each chip (DeepEP on H100 and B200, HybridEP on NVL72), which is withdrawn. Naming the backend is all it takes
        here; upstream, a backend that is set but not applied changes nothing.
    Confirm: 50 steps of both in turn, one setting apart, without a profiler; the backend in the log or trace.
    Fix: none before the A/B; stack.measured=dispatcher where it was made.
    """
    flex = dispatcher_candidates(plan.chip)[1:]
    is_open = plan.model.is_moe and plan.layout.ep > 8 and plan.knobs.dispatcher == "alltoall"
    if is_open and flex and "dispatcher" not in plan.stack.measured and plan.knobs.precision not in _WIDE:
        said = "; ".join(f"{one.value} ({one.since}: {one.evidence})" for one in flex)
        yield Finding(
            at="knobs.dispatcher",
            problem=f"alltoall at EP {plan.layout.ep} on {plan.chip.name} is where to start; not compared with {said}",
            advice="an A/B decides; then stack.measured=dispatcher",
        )


@rule(
    rows="DI-NVLDOM",
    target="megatron-bridge",
    follows="Megatron Bridge 067f987 (2026-08-22), scripts/performance: EP of HybridEP stays in an NVLink domain of 72",
)
def hybridep_inside_rack(plan: Plan) -> Iterator[Finding]:
    """On NVL72 the ranks of HybridEP share one NVLink domain.

    Why: NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN is EP there, up to 72, which Bridge's scripts refuse to exceed; a card
        of its skills says 16 for GB200, and the code takes EP. On nodes of eight it is the smaller of EP and 8, and
        more ranks are reached by RDMA.
    Confirm: layout.ep x layout.etp against the domain in `threefold chips`.
    Fix: EP inside the rack, or alltoall.
    """
    ranks, domain = plan.layout.ep * plan.layout.etp, plan.cluster.domain or plan.chip.domain
    if plan.model.is_moe and plan.knobs.dispatcher == "hybridep" and plan.chip.is_rack_scale and ranks > domain:
        inside = [ep for ep in divisors(plan.layout.ep) if ep * plan.layout.etp <= domain]
        fixes: list[Changes] = [*({"layout.ep": ep} for ep in reversed(inside[-2:])), {"knobs.dispatcher": "alltoall"}]
        problem = f"hybridep over {ranks} ranks, and NVLink joins {domain} of {plan.chip.name}"
        yield Finding(at="knobs.dispatcher", problem=problem, fixes=fixes)


COMBINE_CHUNKS = (128, 64)  # NUM_OF_TOKENS_PER_CHUNK_COMBINE_API in Bridge's recipes, the usual one first


@rule(
    severity="warning",
    rows="DI-CHUNK",
    target="megatron-bridge",
    follows="Megatron Bridge 067f987 (2026-08-22): recipes and its guide on packing",
)
def hybridep_takes_whole_chunks(plan: Plan) -> Iterator[Finding]:
    """With HybridEP a rank has a whole number of chunks of tokens.

    Why: its combine sends 128 or 64 tokens at a time (NUM_OF_TOKENS_PER_CHUNK_COMBINE_API, which an export sets), and
        all ranks send equally many. Uneven ranks are padded in eager runs only.
    Confirm: microbatch x sequence over CP x TP.
    Fix: a sequence or a layout that divides, or alltoall.
    """
    tokens = tokens_of_rank(plan)
    if plan.model.is_moe and plan.knobs.dispatcher == "hybridep" and tokens % COMBINE_CHUNKS[-1]:
        problem = f"hybridep with {tokens:g} tokens on a rank, which chunks of {COMBINE_CHUNKS[-1]} do not divide"
        yield Finding(at="knobs.dispatcher", problem=problem, fix={"knobs.dispatcher": "alltoall"})


@rule(severity="warning", rows="DI-SMS")
def dispatch_sms_have_use(plan: Plan) -> Iterator[Finding]:
    """Multiprocessors are set aside for a flex dispatcher.

    Why: DeepEP and HybridEP move rows by kernels of their own (20 and 16 multiprocessors unless told otherwise;
        upstream sweeps 16 to 32). All-to-all is NCCL's, which takes what NCCL takes.
    Confirm: knobs.dispatch_sms and knobs.dispatcher.
    Fix: delete it.
    """
    if plan.knobs.dispatch_sms is not None and plan.knobs.dispatcher not in FLEX:
        problem = f"dispatch_sms has no effect with {plan.knobs.dispatcher}"
        yield Finding(at="knobs.dispatch_sms", problem=problem, fix={"knobs.dispatch_sms": None})


@rule(rows="OV-SHEXP", target="megatron-bridge", follows=f"{BRIDGE_FLEX}: flex backends switch the overlap off")
def shared_overlap_needs_alltoall(plan: Plan) -> Iterator[Finding]:
    """Shared-expert overlap belongs to the alltoall dispatcher.

    Why: the flex backends schedule their own streams; upstream turns the overlap off with them.
    Confirm: knobs.dispatcher and knobs.shared_expert_overlap.
    Fix: turn the overlap off.
    """
    if plan.knobs.shared_expert_overlap and plan.knobs.dispatcher in FLEX:
        problem = f"shared_expert_overlap with {plan.knobs.dispatcher}"
        yield Finding(at="knobs.shared_expert_overlap", problem=problem, fix={"knobs.shared_expert_overlap": False})


@rule(severity="warning", rows="OV-SHEXP")
def shared_overlap_needs_shared_experts(plan: Plan) -> Iterator[Finding]:
    """Shared-expert overlap needs shared experts.

    Why: without them there is nothing to run beside dispatch.
    Confirm: `threefold models` shows the shared experts.
    Fix: delete the knob.
    """
    moe = plan.model.moe
    if plan.knobs.shared_expert_overlap and not (moe and moe.shared_width):
        problem = f"shared_expert_overlap on {plan.model.name}, which has no shared experts"
        yield Finding(at="knobs.shared_expert_overlap", problem=problem, fix={"knobs.shared_expert_overlap": None})


@rule(severity="warning", rows="RT-FP32", target="megatron-bridge")
def router_in_fp32(plan: Plan) -> Iterator[Finding]:
    """The router computes in FP32.

    Why: its scores decide which experts a token visits; rounding flips near ties and destabilises training,
        and the matrix is too small to gain from less precision. Our engine has no choice (engine-has-a-choice).
        Upstream's skill on its workflow wants FP32 always (2026-08-01), while its HSDP recipe of DeepSeek-V3 has bf16.
    Confirm: knobs.router_dtype.
    Fix: fp32.
    """
    if plan.model.is_moe and plan.knobs.router_dtype != "fp32":
        problem = f"router in {plan.knobs.router_dtype}"
        yield Finding(at="knobs.router_dtype", problem=problem, fix={"knobs.router_dtype": "fp32"})


def tokens_of_rank(plan: Plan) -> float:
    """Tokens of a microbatch on one rank of TP and CP."""
    return plan.job.micro_batch * plan.job.seq_len / (plan.layout.cp * plan.layout.tp)


def tokens_per_expert(plan: Plan) -> float:
    """Rows of one expert's GEMM in a microbatch when routing is balanced."""
    moe, layout = plan.model.moe, plan.layout
    if not moe:
        return 0.0
    return tokens_of_rank(plan) * layout.ep * layout.etp * moe.top_k / moe.num_experts


@rule(severity="warning", rows="PW-COMPSIG HO-MBS")
def experts_see_enough_tokens(plan: Plan) -> Iterator[Finding]:
    """An expert gets at least 128 tokens a microbatch.

    Why: below that a grouped GEMM is bound by reading weights: low utilisation after communication and host
        are in order is the compute wall.
    Confirm: microbatch x sequence x top-k x EP / experts; in a trace, short grouped GEMMs.
    Fix: a larger microbatch, or more EP.
    """
    rows = tokens_per_expert(plan)
    if plan.chip.architecture == "cpu" or not 0 < rows < 128 or not plan.layout.fits_ranks:
        return
    yield Finding(
        at="job.micro_batch",
        problem=f"{rows:.0f} tokens an expert and microbatch",
        fixes=_more_rows(plan, int(-(-128 // rows))),
        otherwise=lambda: "raise job.micro_batch or layout.ep, or the global batch with them",
    )


def _more_rows(plan: Plan, need: int) -> Iterator[Changes]:
    """A microbatch as large as needed, then more EP, which brings an expert the tokens of more ranks."""
    job, layout = plan.job, plan.layout
    factor = 2 ** max(1, (need - 1).bit_length())
    if job.global_batch % (layout.dp * job.micro_batch * factor) == 0:
        yield {"job.micro_batch": job.micro_batch * factor}
    for ep in (layout.ep * factor, layout.ep * 2 * factor):
        if plan.model.num_experts % ep == 0:
            yield {"layout.ep": ep}


@rule(severity="warning", rows="PW-COMPSIG EX-PERM OP-GAF")
def fusions_stay_on(plan: Plan) -> Iterator[Finding]:
    """Permutation and gradient-accumulation fusion stay on outside experiments.

    Why: both remove memory-bound passes over activations or gradients at no cost. Where Transformer Engine's
        permutation fails at bring-up, a smoke run goes without, and is tried with it again (Bridge's card, 2026-07-25).
    Confirm: knobs.permute_fusion and knobs.grad_accum_fusion.
    Fix: delete the setting; the default is on.
    """
    if plan.model.is_moe and not plan.knobs.permute_fusion and plan.target != "threefold":  # engine-has-a-choice
        yield Finding(
            at="knobs.permute_fusion",
            problem="permutation is not fused",
            fix={"knobs.permute_fusion": None},
            kind="suggestion",
        )
    if not plan.knobs.grad_accum_fusion:
        problem = "gradient accumulation is not fused"
        yield Finding(
            at="knobs.grad_accum_fusion", problem=problem, fix={"knobs.grad_accum_fusion": None}, kind="suggestion"
        )


def fuses_experts(plan: Plan) -> bool:
    """Whether our engine has fused experts on the chip; a CPU runs them one after another, for tests."""
    return plan.target != "threefold" or plan.chip.architecture in ("hopper", "blackwell", "cpu")


@rule(severity="warning", rows="EX-GG", target="threefold")
def expert_kernels_have_use(plan: Plan) -> Iterator[Finding]:
    """Experts are fused, and kernels for that chosen, where there are any.

    Why: without expert_fusion experts run on torch's grouped products, whatever kernels are named, and so they do with
        it on Ampere: the kernels lean on what Hopper and Blackwell have. Cute ones are written for Hopper alone.
    Confirm: knobs.expert_fusion, knobs.expert_kernels and the chip.
    Fix: turn fusion on where it runs and off where it does not; leave the kernels to what is measured.
    """
    kernels, runs = plan.knobs.expert_kernels, fuses_experts(plan)
    unnamed = {"knobs.expert_kernels": None} if kernels else {}
    if plan.model.is_moe and plan.knobs.expert_fusion and not runs:
        problem = f"no fused kernels of experts run on {plan.chip.name}: torch's grouped products do"
        yield Finding(at="knobs.expert_fusion", problem=problem, fix={"knobs.expert_fusion": None} | unnamed)
    elif kernels and not plan.knobs.expert_fusion:
        problem = f"expert_kernels {kernels} without expert_fusion has no effect"
        fixes: list[Changes] = [{"knobs.expert_fusion": True}] if runs else []
        yield Finding(at="knobs.expert_kernels", problem=problem, fixes=[*fixes, unnamed])
    elif kernels == "cute" and plan.chip.architecture != "hopper":
        problem = f"the cute kernels run on Hopper, not on {plan.chip.name}"
        yield Finding(at="knobs.expert_kernels", problem=problem, fix={"knobs.expert_kernels": None})


@rule(severity="warning", rows="EX-GG", target="threefold")
def delta_kernels_have_use(plan: Plan) -> Iterator[Finding]:
    """Kernels of the gated delta rule are named where a model has such layers, and fla where it can run.

    Why: flash-linear-attention runs on GPUs, in sixteen bits; its matmuls of fp32 numbers would be in TF32. Elsewhere
        the rule runs in plain torch, whatever is named, and a model without such layers has no use for either.
    Confirm: knobs.delta_kernels, knobs.precision, the chip, and the mixers of the model's layers.
    Fix: leave the kernels to what is installed.
    """
    kernels, at = plan.knobs.delta_kernels, "knobs.delta_kernels"
    if kernels is None:
        return
    if not any(layer.mixer == "delta" for layer in plan.model.layers):
        yield Finding(at=at, problem=f"{plan.model.name} has no layers of the gated delta rule", fix={at: None})
    elif kernels == "fla" and (plan.knobs.precision == "fp32" or plan.chip.architecture == "cpu"):
        where = "in fp32" if plan.knobs.precision == "fp32" else f"on {plan.chip.name}"
        yield Finding(at=at, problem=f"flash-linear-attention does not run {where}: plain torch does", fix={at: None})
