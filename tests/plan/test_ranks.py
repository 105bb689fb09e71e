"""Which rank a process is by its environment, and a plan on another number of ranks."""

from typing import Any

import pytest

from threefold.findings import FindingsError
from threefold.plan.parse import parse
from threefold.plan.plan import Plan
from threefold.plan.ranks import RankEnvironment, on_ranks, rank_environment
from threefold.rules.all import check, errors

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_TASKS_PER_NODE": "8(x2)",
}


def test_a_rank_from_the_environment() -> None:
    assert rank_environment({}) is None
    assert rank_environment(TORCHRUN) == RankEnvironment(3, 8, 1, 2)
    agent = {"TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    assert rank_environment(TORCHRUN | agent) == RankEnvironment(3, 8, 1, 2, attempt=2, agent_store=True)
    assert rank_environment(SLURM) == RankEnvironment(9, 16, 1, 8)
    batch_shell = {name: value for name, value in SLURM.items() if name != "SLURM_STEP_ID"}
    assert rank_environment(batch_shell) is None
    assert rank_environment(SLURM | TORCHRUN) == rank_environment(TORCHRUN)  # torchrun inside a Slurm task


@pytest.mark.parametrize(
    "wrong", [{"RANK": "0"}, {"WORLD_SIZE": "2"}, {**TORCHRUN, "RANK": "8"}, {**TORCHRUN, "RANK": "first"}]
)
def test_half_an_environment_is_a_finding(wrong: dict[str, str]) -> None:
    with pytest.raises(FindingsError, match="ranks-meet"):
        rank_environment(wrong)


def plan_of(**fields: Any) -> Plan:
    written = {path.replace("__", "."): value for path, value in fields.items()}
    parsed = parse({"model": "tiny-qwen3-moe", **written})
    assert parsed.plan is not None, parsed.findings
    return parsed.plan


def rule_errors(plan: Plan) -> list[Any]:
    return errors(check(plan))


def test_a_plan_goes_on_with_other_ranks_where_its_layout_allows() -> None:
    plan = plan_of(cluster__gpus=4, layout__tp=2, layout__ep=2, job__global_batch=8)
    assert on_ranks(plan, 4, rule_errors) is plan
    changed = on_ranks(plan, 8, rule_errors)
    assert (changed.cluster.gpus, changed.layout.dp, changed.layout.edp) == (8, 4, 4)
    with pytest.raises(FindingsError, match=r"multiples of 2.*\n.*start 2 or 4 ranks"):
        on_ranks(plan, 3, rule_errors)
    with pytest.raises(FindingsError, match="batch-divides-dp: 8 sequences a step cannot be shared out by DP 3"):
        on_ranks(plan, 6, rule_errors)
