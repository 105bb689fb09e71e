"""A plan as a Slurm batch script, or as torchrun commands: nodes and ranks follow from the plan.

The script starts one task a GPU and no torchrun: Slurm's signals then reach the ranks themselves, which save and
leave when they are done, where torchrun would kill them 30 seconds after a SIGTERM.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from threefold.findings import Finding
from threefold.plan.plan import Plan
from threefold.units import format_many

_WORD = re.compile(r"[A-Za-z0-9_.,@:+-]+")  # what an #SBATCH line takes without quotes
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")  # D-H:M:S, D-H, H:M:S, M:S or M: man sbatch


@dataclass(frozen=True, slots=True)
class Options:
    """Facts about the cluster that a plan does not hold."""

    time: str | None = None
    partition: str | None = None
    account: str | None = None
    container: str | None = None  # an image for pyxis
    max_restarts: int = 3
    notice_seconds: int = 300  # before the time limit: for the step under way and its checkpoint
    run: str | None = None  # the run's folder
    nsys: bool = False  # under Nsight Systems, which traces the steps that `train --profile` chooses
    tune: str | None = None  # the budget of a tuning, in place of a training
    fault_tolerant: bool = False  # under NVIDIA's ft_launcher, for a program that is not ours


@dataclass(frozen=True, slots=True)
class Shape:
    nodes: int
    per_node: int


def shape(plan: Plan) -> Shape | None:
    """Whole nodes; a part of one where it is enough. None where the ranks fill no number of nodes evenly."""
    gpus, node = plan.cluster.gpus, plan.cluster.node
    if gpus <= node:
        return Shape(1, gpus)
    return Shape(gpus // node, node) if gpus % node == 0 else None


def segment_nodes(plan: Plan) -> int | None:
    """Nodes that Slurm must place in one NVLink rack, as `--segment` takes them; None where NVLink ends at the node.

    A job inside one rack is one segment. A larger one is cut into equal segments that each fit a rack, so that groups
    of ranks do not straddle racks: 16 nodes of 4 GPUs hold EP 64 in a rack of 72.
    """
    place = shape(plan)
    if place is None or place.nodes == 1 or not plan.chip.is_rack_scale:
        return None
    in_rack = plan.cluster.domain_ranks // place.per_node
    return max((size for size in range(1, min(in_rack, place.nodes) + 1) if place.nodes % size == 0), default=None)


def faults(plan: Plan, options: Options) -> Iterator[Finding]:
    """Findings about options for which no script can be written."""
    if shape(plan) is None:
        node = plan.cluster.node
        problem = f"{format_many(plan.cluster.gpus, 'rank')} cannot fill nodes of {node} evenly"
        advice = f"use a multiple of {node}, or write cluster.gpus_per_node"
        yield _fault("cluster.gpus", problem, advice)
    for name in ("partition", "account"):
        given = getattr(options, name)
        if given is not None and not _WORD.fullmatch(given):
            yield _fault(f"--{name}", f"{given!r} is no name Slurm takes", "letters, digits and _ . , @ : + - only")
    if options.container is not None and (not options.container.strip() or "\n" in options.container):
        yield _fault("--container", f"{options.container!r} is no image", "give a path or registry#image:tag")
    if options.tune is not None and options.container is not None:
        advice = "install threefold where the batch script runs, and leave --container out"
        yield _fault("--container", "a tuning starts its ranks with srun, which an image lacks", advice)
    if options.fault_tolerant and options.nsys:
        problem = "fault tolerance and Nsight Systems exclude each other: upstream drops Nsight with a warning"
        yield _fault("--fault-tolerance", problem, "trace a run without fault tolerance")
    if options.time is None:
        return
    minutes = time_limit(options.time)
    if minutes is None:
        yield _fault("--time", f"{options.time!r} is no time limit", "write hours:minutes:seconds or days-hours")
    elif minutes * 60 <= options.notice_seconds:
        problem = (
            f"{options.time} ends before the notice to save, {options.notice_seconds} s before the limit, has effect"
        )
        yield _fault("--time", problem, "ask for longer, or set a shorter --notice")


def _fault(at: str, problem: str, advice: str) -> Finding:
    return Finding(rule="script-options", at=at, problem=problem, advice=advice)


def time_limit(text: str) -> float | None:
    """Minutes of a time limit as sbatch reads it; None where it does not."""
    match = _TIME.fullmatch(text)
    if not match:
        return None
    days, *parts = ((int(part) if part else None) for part in match.groups())
    given = [part for part in parts if part is not None]
    if days is not None:  # D-H[:M[:S]]
        hours, minutes, seconds = [*given, 0, 0][:3]
    elif len(given) == 3:
        hours, minutes, seconds = given
    else:  # M or M:S
        hours, minutes, seconds = 0, given[0], given[1] if len(given) > 1 else 0
    total = ((days or 0) * 24 + hours) * 60 + minutes + seconds / 60
    return total or None


def batch_script(plan: Plan, words: list[str], options: Options) -> str:
    """`words`: the plan file and its overrides. Without `faults`."""
    place = shape(plan)
    assert place is not None
    lines = [f"#SBATCH --{line}" for line in _directives(plan, words[0], place, options)]
    srun = ["srun", "--kill-on-bad-exit=1", f"--ntasks-per-node={place.per_node}", *_container(options)]
    tracer = _nsys(options, "SLURM_PROCID") if options.nsys else []
    start = [*srun, *(shlex.quote(word) for word in [*tracer, *_train(words, options)])]
    body = _BODY.format(head=_head(plan), restarts=options.max_restarts, command=" ".join(start), end=_END)
    return "\n".join(["#!/bin/bash", *lines, "", body])


def _directives(plan: Plan, file: str, place: Shape, options: Options) -> Iterator[str]:
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", Path(file).stem).strip("-.") or "threefold"
    yield f"job-name={name}"
    yield f"nodes={place.nodes}"
    yield f"ntasks-per-node={place.per_node}"
    if plan.cluster.chip != "cpu":
        yield f"gpus-per-node={place.per_node}"
    if place.per_node == plan.cluster.node:
        yield "exclusive"
        yield "mem=0"
    if (segment := segment_nodes(plan)) is not None:
        yield f"segment={segment}"
    for option in ("time", "partition", "account"):
        if given := getattr(options, option):
            yield f"{option}={given}"
    yield f"output={name}-%j.log"
    yield "open-mode=append"
    yield "requeue"
    yield f"signal=B:USR1@{options.notice_seconds}"


def node_script(plan: Plan, file: str, options: Options, setup: str, command: str) -> str:
    """A batch script that starts one torchrun a node, for a program that is not ours.

    `setup` are lines before the start: comments, exports, a file to write. `command` is what torchrun runs.
    """
    place = shape(plan)
    assert place is not None
    own = ("requeue", "signal=")  # the program would neither save at the signal nor resume after a requeue
    lines = [
        f"#SBATCH --{line.replace(f'ntasks-per-node={place.per_node}', 'ntasks-per-node=1')}"
        for line in _directives(plan, file, place, options)
        if not line.startswith(own)
    ]
    srun = ["srun", "--kill-on-bad-exit=1", "--ntasks-per-node=1", *_container(options)]
    tracer = [shlex.quote(word) for word in _nsys(options, "SLURM_NODEID")] if options.nsys else []
    run = [
        *(_FT_LAUNCHER if options.fault_tolerant else ["torchrun"]),
        f"--nnodes={place.nodes}",
        f"--nproc-per-node={place.per_node}",
        f"--max-restarts={options.max_restarts}",
        "--rdzv-backend=c10d",
        '--rdzv-endpoint="$HEAD:$PORT"',
        '--rdzv-id="$SLURM_JOB_ID"',
    ]
    start = " \\\n    ".join([" ".join([*srun, *tracer, *run]), command])
    return "\n".join(["#!/bin/bash", *lines, "", _NODE_BODY.format(setup=setup.strip(), start=start)])


def _container(options: Options) -> list[str]:
    """The words of srun for an image, quoted for the shell: only the mount of the job's own folder has a variable."""
    if not options.container:
        return []
    image = shlex.quote(f"--container-image={options.container}")
    return [image, '--container-mounts="$PWD:$PWD"', '--container-workdir="$PWD"']


def tuning_script(plan: Plan, words: list[str], options: Options) -> str:
    """A batch script that runs `threefold tune` on the first node, and the ranks of its trials on all of them."""
    place = shape(plan)
    assert place is not None
    lines = [f"#SBATCH --{line}" for line in _directives(plan, words[0], place, options)]
    launcher = f"srun --kill-on-bad-exit=1 --ntasks-per-node={place.per_node}"
    command = ["python", "-m", "threefold", "tune", *words, "--budget", options.tune or "", "--launcher", launcher]
    command += ["--out", options.run] if options.run else []
    body = _TUNING_BODY.format(head=_head(plan), command=shlex.join(command), end=_END)
    return "\n".join(["#!/bin/bash", *lines, "", body])


def _head(plan: Plan) -> str:
    exports = [f"export {name}={value}" for name, value in environment(plan).items()]
    return _HEAD.format(exports="\n".join(exports))


def environment(plan: Plan) -> dict[str, str]:
    """Variables that must be set before torch is loaded."""
    variables = {}
    if plan.cluster.chip != "cpu":
        variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"  # a collective past its time limit ends the process
        variables["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] = "900"  # above that limit: the first message is the better one
        variables["NCCL_IB_TIMEOUT"] = "22"  # 4.096 us x 2^22: a link that flaps for seconds does not end a run
    if plan.knobs.max_connections is not None:
        variables["CUDA_DEVICE_MAX_CONNECTIONS"] = str(plan.knobs.max_connections)
    return variables


def _train(words: list[str], options: Options) -> list[str]:
    profile = ["--profile", "--profile-with", "nsys"] if options.nsys else []
    return ["python", "-m", "threefold", "train", *words, *(["--run", options.run] if options.run else []), *profile]


def _nsys(options: Options, rank: str) -> list[str]:
    """Nsight Systems around a process. It begins and ends where ranks call cudaProfilerStart and cudaProfilerStop."""
    report = f"{options.run or '.'}/nsys-%q{{{rank}}}"
    capture = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop"]
    return ["nsys", "profile", "--trace=cuda,nvtx,osrt", "--sample=none", *capture, f"--output={report}"]


def torchrun_commands(plan: Plan, words: list[str], options: Options) -> str:
    """One command, the same on every node."""
    place = shape(plan)
    assert place is not None
    settings = environment(plan)
    head = ["torchrun", f"--nnodes={place.nodes}", f"--nproc-per-node={place.per_node}"]
    head.append(f"--max-restarts={options.max_restarts}")
    lines = []
    if place.nodes == 1:
        head.append("--standalone")
    else:
        # Restarts are counted by each agent alone, so agents may disagree; a new store each time needs no count.
        settings["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        lines.append(f"# on each of {place.nodes} nodes; HEAD is the name of one of them")
        head += ["--rdzv-backend=c10d", '--rdzv-endpoint="$HEAD:29400"', "--rdzv-id=threefold"]
    exports = [f"{name}={value}" for name, value in settings.items()]
    if options.nsys:
        head = [*(shlex.quote(word) for word in _nsys(options, "HOSTNAME")), *head]
        lines.append("# then: nsys export --type sqlite REPORT.nsys-rep, and threefold profile REPORT.sqlite")
    start = ["-m", "threefold", *(shlex.quote(word) for word in _train(words, options)[3:])]
    return "\n".join([*lines, " ".join([*exports, *head, *start])]) + "\n"


# Seconds that a section of a run may take before its rank counts as hung, as Bridge's guide on resiliency has them;
# what a run learns later is in ft_state.json next to its checkpoints.
_FT_LAUNCHER = [
    "ft_launcher",
    "--ft-rank_section_timeouts=setup:600,step:180,checkpointing:420",
    "--ft-rank_out_of_section_timeout=300",
]

# What both scripts that run threefold begin and end with.
_HEAD = """\
set -u
{exports}
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR

again=0
wait_for_task() {{  # a signal ends `wait` early; the shell keeps the code of a task that ended meanwhile
    told=1
    while [ "$told" = 1 ]; do
        told=0
        wait "$task"
        code=$?
    done
}}
"""

_END = """\
if [ "$again" = 1 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""

_TUNING_BODY = """\
# The tuning runs on this node and starts one task a GPU for its trials. Its folder must be one that all nodes see.
{head}
# Finished trials are in the ledger: before the time limit the job waits for its next turn and continues with them.
{command} &
task=$!
trap 'again=1; told=1; kill -TERM "$task"' USR1
trap 'told=1; kill -TERM "$task"' TERM
wait_for_task
{end}"""

_NODE_BODY = """\
set -eu
{setup}

HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
PORT=$((20000 + SLURM_JOB_ID % 20000))
{start}
"""

_BODY = """\
# One task a GPU: Slurm's signals reach the ranks themselves.
{head}
# Ranks end after their step and save. Before the time limit the job then waits for its next turn; one that is
# canceled does not.
stopping=0
stop() {{
    stopping=1
    told=1
    scancel --signal=TERM "$SLURM_JOB_ID"  # goes to the tasks, not to this shell
}}
trap 'again=1; stop' USR1
trap stop TERM

code=1
for attempt in $(seq 0 {restarts}); do
    export TORCHELASTIC_RESTART_COUNT=$attempt
    export MASTER_PORT=$((20000 + (SLURM_JOB_ID + attempt) % 20000))
    {command} &
    task=$!
    wait_for_task
    if [ "$stopping" = 1 ] || [ "$code" = 0 ] || [ "$code" = 78 ]; then  # 78: a finding, it would come again
        break
    fi
    echo "attempt $attempt ended with code $code" >&2
done
{end}"""
