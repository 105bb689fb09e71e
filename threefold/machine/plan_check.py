"""Checks whether this machine can run a plan: GPUs, memory, versions, packages. `threefold check --here` calls it."""

from collections.abc import Iterator, Mapping

from threefold.findings import Finding
from threefold.machine.inventory import Machine
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.rules.all import check, judge
from threefold.rules.base import PREDICTED, older, version

_TORCH = ("2.11", "2.14")  # the engine is tested from the first of these versions to below the second
_CUDNN = "9.19"  # sequences of 128K and more were measured with it
_NCCL = "2.30.4"  # required by DeepEP V2 (its README)
_LONG_TOKENS = 131_072
_MEMORY_TOLERANCE = 0.97  # a GPU reports a little less memory than its data sheet


def machine_findings(plan: Plan, here: Machine) -> list[Finding]:
    """Findings about this machine, which are not among those that `check` reports for the plan itself."""
    found = [*_check_torch(plan, here), *_check_gpus(plan, here), *_check_packages(plan, here)]
    found += _check_versions(plan, here)
    if plan.job.seq_len >= _LONG_TOKENS:
        found += _check_long_context(plan, here)
    return found


def _check_torch(plan: Plan, here: Machine) -> Iterator[Finding]:
    torch = here.package("torch")
    stated = torch.version or ""
    if torch.version is None or torch.trouble:
        problem = f"torch does not import here: {torch.trouble}" if torch.trouble else "torch is not installed here"
        yield _finding("here-has-torch", "stack.torch", problem, torch.package.install)
    elif plan.target == "threefold" and not version(_TORCH[0]) <= version(stated) < version(_TORCH[1]):
        problem = f"torch {stated} is here; the engine runs on {_TORCH[0]} and newer, below {_TORCH[1]}"
        yield _finding("here-has-torch", "stack.torch", problem, torch.package.install)


def _check_gpus(plan: Plan, here: Machine) -> Iterator[Finding]:
    chip, at = plan.chip.name, "cluster.chip"
    if chip == "cpu":
        return
    if not here.gpus:
        yield _finding(
            "here-has-chips", at, f"the plan is for {chip}, and there is no GPU here", "run it where GPUs are"
        )
        return
    if not here.versions.get("cuda") and here.package("torch").works:
        yield _finding("here-has-torch", "stack.torch", "torch here is built for the CPU", "install torch's CUDA build")
    wanted = min(plan.cluster.gpus, plan.cluster.node)
    if len(here.gpus) < wanted:
        problem = f"{wanted} GPUs of a node are used, {len(here.gpus)} are here"
        yield _finding("here-has-chips", "cluster.gpus_per_node", problem, "run it on a node with as many")
    if not _is_here(plan, here):
        name = here.chip or here.gpus[0].name
        fix = {at: here.chip} if here.chip else None
        problem = f"the plan is for {chip}, the GPU here is {name}"
        yield Finding(rule="here-has-chips", at=at, problem=problem, fix=fix, severity="warning")
    if here.chip and not _is_here(plan, here):
        yield from (f for f in check(change(plan, {at: here.chip}), notes=False) if f.rule in PREDICTED)
    smallest = min(gpu.memory_bytes for gpu in here.gpus)
    planned = plan.chip.memory_bytes
    if _is_here(plan, here) and smallest < planned * _MEMORY_TOLERANCE:
        problem = f"a GPU here has {smallest / 2**30:.0f} GiB, the plan counts on {planned / 2**30:.0f}"
        yield _finding("here-has-chips", at, problem, "leave more room, or free the GPU from other work", "warning")


def _is_here(plan: Plan, here: Machine) -> bool:
    """Whether the GPU here is the plan's chip. One of a file of the user's own is known by its name."""
    if plan.cluster.own is None:
        return here.chip == plan.chip.name
    name, device = plan.chip.name.lower(), here.gpus[0].name.lower()
    return name.startswith(here.chip) if here.chip else name in device


def _check_packages(plan: Plan, here: Machine) -> Iterator[Finding]:
    if plan.target == "megatron-bridge":
        yield from _check_package(here, "transformer-engine", "target", "target megatron-bridge", "error")
        return
    knobs = plan.knobs
    if knobs.dispatcher in ("deepep", "hybridep") and plan.layout.ep > 1:
        fix = {"knobs.dispatcher": "alltoall"}
        package = "deep_ep" if knobs.dispatcher == "deepep" else "hybrid-ep"
        yield from _check_package(here, package, "knobs.dispatcher", f"dispatcher {knobs.dispatcher}", "error", fix)
        if here.package("deep_ep").works and older(here.versions.get("nccl"), _NCCL):
            problem = f"DeepEP's newer interface wants NCCL {_NCCL}, here is {here.versions['nccl']}"
            yield _finding("here-has-packages", "knobs.dispatcher", problem, "install a newer nvidia-nccl", "warning")
    if knobs.expert_kernels == "cute":
        gone = {"knobs.expert_kernels": None}
        yield from _check_package(here, "quack-kernels", "knobs.expert_kernels", "expert_kernels cute", "error", gone)
    if knobs.delta_kernels == "fla":
        gone, at = {"knobs.delta_kernels": None}, "knobs.delta_kernels"
        yield from _check_package(here, "flash-linear-attention", at, "delta_kernels fla", "error", gone)
    if knobs.expert_fusion and plan.cluster.chip != "cpu":
        yield from _check_package(here, "triton", "knobs.expert_fusion", "expert_fusion", "warning")


def _check_versions(plan: Plan, here: Machine) -> Iterator[Finding]:
    """Versions that differ from those the plan states, and what its rules find only with the versions here."""
    stated = {"stack.torch": plan.stack.torch, "stack.te": plan.stack.te}
    installed = {"stack.torch": here.versions.get("torch"), "stack.te": here.package("transformer-engine").version}
    for at, text in stated.items():
        if text and installed[at] and version(text) != version(installed[at] or ""):
            problem = f"the plan states {text}, {installed[at]} is here"
            yield _finding("here-has-torch", at, problem, "state what the plan runs on", "warning")
    known = {at: text for at, text in installed.items() if text and version(text)}
    if known:
        before = {(finding.rule, finding.at, finding.problem) for finding in judge(plan)}
        found = check(change(plan, known), notes=False)
        yield from (f for f in found if (f.rule, f.at, f.problem) not in before)


def _check_long_context(plan: Plan, here: Machine) -> Iterator[Finding]:
    """Long sequences depend on kernels that short ones can do without."""
    model, slug, at = plan.model, "here-at-length", "job.seq_len"
    if any(layer.mixer == "delta" for layer in model.layers) and not here.package("flash-linear-attention").works:
        package = here.package("flash-linear-attention").package
        trouble = here.package("flash-linear-attention").trouble
        problem = "gated delta layers run in plain torch without fla, many times slower"
        yield _finding(slug, at, f"{problem} ({trouble})" if trouble else problem, package.install, "warning")
    if any(layer.mixer == "mamba" for layer in model.layers) and not here.package("mamba-ssm").works:
        package, problem = here.package("mamba-ssm").package, "Mamba layers run in plain torch without mamba-ssm"
        yield _finding(slug, at, f"{problem}, many times slower", package.install, "warning")
    if plan.target != "threefold" or not here.gpus:
        return
    if older(here.versions.get("cudnn"), _CUDNN):
        problem = f"cuDNN {here.versions['cudnn']} is older than {_CUDNN}, with which 128K was measured"
        yield _finding(slug, at, problem, "install a newer nvidia-cudnn, or measure attention first", "warning")
    attention = [probe for probe in here.kernels if probe.kernel.startswith("attention")]
    if attention and not any(probe.works for probe in attention):
        problem = f"no fused attention kernel runs here: {attention[0].trouble}"
        yield _finding(
            slug,
            at,
            problem,
            "attention is many times slower without: install torch's CUDA build",
        )
    if not here.package("triton").works:
        problem = "without triton the loss and the norms take several passes over memory"
        yield _finding(slug, at, problem, here.package("triton").package.install, "warning")


def _check_package(
    here: Machine, name: str, at: str, what: str, severity: str, fix: Mapping[str, str | None] | None = None
) -> Iterator[Finding]:
    status = here.package(name)
    if status.works:
        return
    problem = f"{what} needs {name}, which is not installed here"
    if status.trouble:
        problem = f"{what} needs {name}, and {name} {status.version} is not usable here: {status.trouble}"
    yield _finding("here-has-packages", at, problem, status.package.install, severity, fix)


def _finding(
    rule: str, at: str, problem: str, advice: str, severity: str = "error", fix: Mapping[str, str | None] | None = None
) -> Finding:
    return Finding(
        rule=rule, at=at, problem=problem, advice=f"or {advice}" if fix else advice, fix=fix,
        severity="warning" if severity == "warning" else "error",
    )  # fmt: skip
