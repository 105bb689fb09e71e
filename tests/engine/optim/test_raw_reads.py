"""An inventory of what goes around the wait of a pending tensor: code that torch's operators do not see, and memory
that was taken before the tensor was marked. Whoever is new here must say why it reads no old values."""

import ast
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from alias_holders import holders_of_aliases
from mutations_pending import deliver_gathers_late
from oracle_layouts import case
from repository import ROOT
from test_pending_updates import GRAPHS, KINDS, parts_of, stand_in_graphs

from threefold.engine.build import Parts, build
from threefold.engine.dist.mesh import Mesh
from threefold.engine.optim.pending_tensors import is_pending
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
    "exp_avg": "is a state that may be on its way to the host",
    "exp_avg_sq": "is a state that may be on its way to the host",
}
SETS_GRADIENTS = "sets gradients, and reads nothing"
STATES = "the optimizer: it waits for all updates before it reads states (`step`, `state_dict`, `refresh`)"
ALIASES = "while a graph is recorded, for which a parameter has been waited (`make_aliases` detaches it)"
ALLOWED = {
    ("data_parallel/single_rank.py", "without_waiting"): SETS_GRADIENTS,
    ("data_parallel/zero1.py", "without_waiting"): SETS_GRADIENTS,
    ("optim/pending_tensors.py", "without_waiting"): "what describes a tensor",
    ("optim/pending_tensors.py", "DisableTorchFunctionSubclass"): "the one place that switches waits off",
    ("optim/pending_tensors.py", "__class__"): "the one place that marks tensors",
    ("optim/adamw.py", "exp_avg"): STATES,
    ("optim/adamw.py", "exp_avg_sq"): STATES,
    ("graphs/graphed_function.py", "use_aliases"): ALIASES,
    ("graphs/full_iteration.py", "use_aliases"): ALIASES,
}
# Who may hold memory of a parameter whose values are still to come.
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
