"""An inventory of what goes around the wait of a pending tensor: code that torch's operators do not see, and memory
that was taken before the tensor was marked. Whoever is new here must say why it reads no old values."""

import ast
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from alias_holders import holders_of_aliases
from mutations_pending import deliver_gathers_late
from oracle_layouts import case
from repository import ROOT
from test_pending_updates import GRAPHS, KINDS, parts_of, stand_in_graphs
from tiny_mixtures import MIXTURES
from tiny_models import FAMILIES

from threefold.engine.build import Parts, build
from threefold.engine.dist.collectives import all_gather, all_reduce, send_recv
from threefold.engine.dist.mesh import Group, Mesh
from threefold.engine.optim.pending_updates import is_pending, mark_pending, mark_ready
from threefold.engine.step import train_step
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import synthetic_batch
from threefold.plan.plan import Plan

# Names by which code gets at memory without an operator on the tensor, or at states on the host.
RAW = {
    "without_waiting": "switches waits off",
    "DisableTorchFunctionSubclass": "switches waits off",
    "DisableTorchFunction": "switches waits off",
    "_make_subclass": "makes another tensor of the same memory",
    "__class__": "changes the class that waits",
    "use_aliases": "puts an alias in the place of a parameter",
    "vmap": "works on the tensor below, which waits for nothing",
    "to_dlpack": "gives out the memory",
    "as_subclass": "makes another tensor of the same memory",
    "set_": "puts memory into another tensor",
    "nested_tensor": "copies without asking the class",
    **dict.fromkeys(
        ("allreduce", "allgather", "_allgather_base", "_reduce_scatter_base", "alltoall_base"),
        "is a method of a process group; torch's functions of this kind, which `dist/collectives.py` calls, wait",
    ),
    "exp_avg": "is a state that may be on its way to the host",
    "exp_avg_sq": "is a state that may be on its way to the host",
}
SETS_GRADIENTS = "sets gradients, and reads nothing"
STATES = "the optimizer: it waits for all updates before it reads states (`step`, `state_dict`, `refresh`)"
ALIASES = "while a graph is recorded, for which a parameter has been waited (`make_aliases` detaches it)"
ALLOWED = {
    ("data_parallel/single_rank.py", "without_waiting"): SETS_GRADIENTS,
    ("data_parallel/zero1.py", "without_waiting"): SETS_GRADIENTS,
    ("optim/pending_updates.py", "without_waiting"): "what describes a tensor",
    ("optim/pending_updates.py", "DisableTorchFunctionSubclass"): "the one place that switches waits off",
    ("optim/pending_updates.py", "__class__"): "the one place that marks tensors",
    ("optim/adamw.py", "exp_avg"): STATES,
    ("optim/adamw.py", "exp_avg_sq"): STATES,
    ("train_state.py", "set_"): "is a name here, of validation data",
    ("autograd/offload.py", "set_"): "of a storage, and who asks a tensor for its storage waits",
    ("graphs/graphed_function.py", "use_aliases"): ALIASES,
    ("graphs/full_iteration.py", "use_aliases"): ALIASES,
}
# Modules that may hold memory of a parameter whose values are still to come.
UPDATE = "the update itself"
BUCKET = "the buffer that a gather fills, and its part of this rank, which is complete"
GRAPH = "a recorded graph: before a replay it asks the parameters for their addresses, which waits"
HOLDERS = {
    "AdamW._update_offloaded": UPDATE,
    "Bucket": BUCKET,
    "OwnedShard": BUCKET,
    "PendingUpdates": BUCKET,
    "_LateGather": "the gather of this test",
    "GraphedFunction": GRAPH,
    "WeightCache": "to quantize again for a graph, which has waited by then",
}


def raw_names() -> set[tuple[str, str]]:
    folder = ROOT / "threefold" / "engine"
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            if name in RAW:
                found.add((str(path.relative_to(folder)), name))
    return found


def test_code_that_goes_around_waits_has_a_reason() -> None:
    assert raw_names() == ALLOWED.keys()


READS_AROUND: dict[str, Callable[[torch.Tensor, Any], object]] = {
    "vmap": lambda p, group: torch.vmap(lambda row: row * 1.0)(p),
    "to_dlpack": lambda p, group: torch.utils.dlpack.to_dlpack(p),
    "allreduce": lambda p, group: group.allreduce([p]).wait(),
}
COLLECTIVES: dict[str, Callable[[torch.Tensor, Group], object]] = {
    "all_reduce": lambda p, group: all_reduce(p, group).wait(),
    "all_gather": lambda p, group: all_gather(torch.zeros(6), p, group).wait(),
    "send_recv": lambda p, group: send_recv([torch.zeros(3)], [p], group, 1 - group.rank, 1 - group.rank).wait(),
}


def waits_of_reads(rank: int) -> dict[str, bool]:
    """Whether each read waited."""
    group, found = Group("dp", (0, 1), rank, dist.group.WORLD), {}
    for name, read in {**READS_AROUND, **COLLECTIVES}.items():
        parameter = torch.zeros(3)
        mark_pending([parameter], partial(mark_ready, [parameter]))
        with torch.no_grad():
            read(parameter, group.handle if name in READS_AROUND else group)
        found[name] = not is_pending(parameter)
    return found


def test_collectives_wait_and_what_is_listed_here_does_not() -> None:
    for found in run_ranks(2, waits_of_reads):
        assert found == dict.fromkeys(READS_AROUND, False) | dict.fromkeys(COLLECTIVES, True)
    assert READS_AROUND.keys() <= RAW.keys()


def after_two_steps(parts: Parts, plan: Plan, rank: int = 0) -> set[str]:
    for step in range(2):
        batches = [synthetic_batch(plan, step, m, rank) for m in range(plan.num_microbatches)]
        train_step(parts, batches, 1e-2, plan.job)
    parameters = [p for chunk in parts.chunks.values() for p in chunk.parameters()]
    assert any(map(is_pending, parameters))
    return holders_of_aliases(parameters)


@pytest.mark.parametrize("kind", ["one microbatch", "sums in fp32", "quantized once a step", "adapters"])
def test_nobody_keeps_memory_of_parameters_that_are_updated(kind: str) -> None:
    plan, _ = KINDS[kind]
    allowed = {"AdamW._update_offloaded"} | ({"WeightCache"} if kind == "quantized once a step" else set())
    assert after_two_steps(parts_of(plan, 1.0), plan) <= allowed


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_no_layer_of_a_family_keeps_memory(family: str) -> None:
    plan = case("", family, 1, job={"global_batch": 1}).plan
    assert after_two_steps(parts_of(plan, 1.0), plan) <= {"AdamW._update_offloaded"}


def test_graphs_keep_memory_and_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _ = KINDS["sums in fp32"]
    plan = replace(plan, knobs=replace(plan.knobs, graphs=GRAPHS[0]))
    stand_in_graphs(monkeypatch)
    found = after_two_steps(parts_of(plan, 1.0), plan)
    assert "GraphedFunction" in found
    assert found <= HOLDERS.keys()


def holders_on_rank(rank: int, plan: Plan, prepare: Callable[[], None]) -> set[str]:
    prepare()
    return after_two_steps(build(plan, Mesh(plan.layout, rank), torch.float32, with_data=False), plan, rank)


def test_nobody_keeps_memory_of_parameters_that_are_gathered() -> None:
    plan = case("", "qwen3_moe", 2, ep=2, knobs={"optimizer_offload": 1.0}).plan
    for found in run_ranks(2, holders_on_rank, plan, deliver_gathers_late):
        assert "Bucket" in found
        assert found <= HOLDERS.keys()
