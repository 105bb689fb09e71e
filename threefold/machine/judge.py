"""Can this machine run a plan? What it lacks, as findings."""

from collections.abc import Iterator, Mapping

from threefold.findings import Finding
from threefold.machine.facts import Machine
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.rules.all import check
from threefold.rules.base import PREDICTED, older, version

_TORCH = ("2.11", "2.14")  # from, below: what the engine is tested with
_CUDNN = "9.19"  # with which 128K and more was measured
_NCCL = "2.30.4"  # DeepEP V2: its README
_LONG = 131_072
_SPARE = 0.97  # a chip shows a little less memory than it is sold with


def judge(plan: Plan, here: Machine) -> list[Finding]:
    """Beside what `check` says of the plan itself."""
    found = [*_torch(plan, here), *_chips(plan, here), *_packages(plan, here), *_versions(plan, here)]
    if plan.job.seq_len >= _LONG:
        found += _at_length(plan, here)
    return found


def _torch(plan: Plan, here: Machine) -> Iterator[Finding]:
    torch = here.found("torch")
    stated = torch.version or ""
    if torch.version is None or torch.trouble:
        problem = f"torch does not import here: {torch.trouble}" if torch.trouble else "torch is not installed here"
        yield _lack("here-has-torch", "stack.torch", problem, torch.package.install)
    elif plan.target == "threefold" and not version(_TORCH[0]) <= version(stated) < version(_TORCH[1]):
        problem = f"torch {stated} is here; the engine runs on {_TORCH[0]} and newer, below {_TORCH[1]}"
        yield _lack("here-has-torch", "stack.torch", problem, torch.package.install)


def _chips(plan: Plan, here: Machine) -> Iterator[Finding]:
    chip, at = plan.cluster.chip, "cluster.chip"
    if chip == "cpu":
        return
    if not here.gpus:
        yield _lack("here-has-chips", at, f"the plan is for {chip}, and there is no GPU here", "run it where GPUs are")
        return
    if not here.versions.get("cuda") and here.found("torch").works:
        yield _lack("here-has-torch", "stack.torch", "torch here is built for the CPU", "install torch's CUDA build")
    wanted = min(plan.cluster.gpus, plan.cluster.node)
    if len(here.gpus) < wanted:
        problem = f"{wanted} GPUs of a node are used, {len(here.gpus)} are here"
        yield _lack("here-has-chips", "cluster.gpus_per_node", problem, "run it on a node with as many")
    if here.chip != chip:
        name = here.chip or here.gpus[0].name
        fix = {at: here.chip} if here.chip else None
        problem = f"the plan is for {chip}, the GPU here is {name}"
        yield Finding(rule="here-has-chips", at=at, problem=problem, fix=fix, severity="warning")
    if here.chip and here.chip != chip:
        yield from (f for f in check(change(plan, {at: here.chip})) if f.rule in PREDICTED)
    smallest = min(gpu.memory_bytes for gpu in here.gpus)
    planned = plan.chip.memory_bytes
    if here.chip == chip and smallest < planned * _SPARE:
        problem = f"a GPU here has {smallest / 2**30:.0f} GiB, the plan counts on {planned / 2**30:.0f}"
        yield _lack("here-has-chips", at, problem, "leave more room, or free the GPU from other work", "warning")


def _packages(plan: Plan, here: Machine) -> Iterator[Finding]:
    if plan.target == "megatron-bridge":
        yield from _needs(here, "transformer-engine", "target", "target megatron-bridge", "error")
        return
    knobs = plan.knobs
    if knobs.dispatcher in ("deepep", "hybridep") and plan.layout.ep > 1:
        fix = {"knobs.dispatcher": "alltoall"}
        yield from _needs(here, "deep_ep", "knobs.dispatcher", f"dispatcher {knobs.dispatcher}", "error", fix)
        if here.found("deep_ep").works and older(here.versions.get("nccl"), _NCCL):
            problem = f"DeepEP's newer interface wants NCCL {_NCCL}, here is {here.versions['nccl']}"
            yield _lack("here-has-packages", "knobs.dispatcher", problem, "install a newer nvidia-nccl", "warning")
    if knobs.expert_kernels == "cute":
        gone = {"knobs.expert_kernels": None}
        yield from _needs(here, "quack-kernels", "knobs.expert_kernels", "expert_kernels cute", "error", gone)
    if knobs.expert_fusion and plan.cluster.chip != "cpu":
        yield from _needs(here, "triton", "knobs.expert_fusion", "expert_fusion", "warning")


def _versions(plan: Plan, here: Machine) -> Iterator[Finding]:
    """The plan's rules once more with the versions that are here; what they say beyond what they said."""
    stated = {"stack.torch": plan.stack.torch, "stack.te": plan.stack.te}
    present = {"stack.torch": here.versions.get("torch"), "stack.te": here.found("transformer-engine").version}
    for at, text in stated.items():
        if text and present[at] and version(text) != version(present[at] or ""):
            problem = f"the plan states {text}, {present[at]} is here"
            yield _lack("here-has-torch", at, problem, "state what the plan runs on", "warning")
    known = {at: text for at, text in present.items() if text and version(text)}
    if known:
        before = set(map(str, check(plan)))
        yield from (finding for finding in check(change(plan, known)) if str(finding) not in before)


def _at_length(plan: Plan, here: Machine) -> Iterator[Finding]:
    """Long sequences lean on kernels that short ones can do without."""
    model, slug, at = plan.model, "here-at-length", "job.seq_len"
    if any(layer.mixer == "delta" for layer in model.layers) and not here.found("flash-linear-attention").works:
        package = here.found("flash-linear-attention").package
        yield _lack(
            slug, at, "gated delta layers run in plain torch without fla, many times slower", package.install, "warning"
        )
    if plan.target != "threefold" or not here.gpus:
        return
    if older(here.versions.get("cudnn"), _CUDNN):
        problem = f"cuDNN {here.versions['cudnn']} is older than {_CUDNN}, with which 128K was measured"
        yield _lack(slug, at, problem, "install a newer nvidia-cudnn, or measure attention first", "warning")
    attention = [probe for probe in here.kernels if probe.kernel.startswith("attention")]
    if attention and not any(probe.works for probe in attention):
        problem = f"no fused attention kernel runs here: {attention[0].trouble}"
        yield _lack(slug, at, problem, "without one every score is kept: install torch's CUDA build")
    if not here.found("triton").works:
        problem = "without triton the loss and the norms take several passes over memory"
        yield _lack(slug, at, problem, here.found("triton").package.install, "warning")


def _needs(
    here: Machine, name: str, at: str, what: str, severity: str, fix: Mapping[str, str | None] | None = None
) -> Iterator[Finding]:
    found = here.found(name)
    if found.works:
        return
    problem = f"{what} needs {name}, which is not installed here"
    if found.trouble:
        problem = f"{what} needs {name}, and {name} {found.version} does not import here: {found.trouble}"
    yield _lack("here-has-packages", at, problem, found.package.install, severity, fix)


def _lack(
    rule: str, at: str, problem: str, advice: str, severity: str = "error", fix: Mapping[str, str | None] | None = None
) -> Finding:
    return Finding(
        rule=rule, at=at, problem=problem, advice=f"or {advice}" if fix else advice, fix=fix,
        severity="warning" if severity == "warning" else "error",
    )  # fmt: skip
