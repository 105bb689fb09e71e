"""The server answers the client of the official SDK, and reads no file outside of its folders."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters
from repository import ROOT

from threefold.mcp import verbs
from threefold.mcp.folders import OutsideError, check_overrides, check_plan, inside

PLAN = 'model = "qwen3-30b-a3b"\ntarget = "megatron-bridge"\ncluster = {chip = "h100", gpus = 16}\n[layout]\nep = 16\n'


def call(folder: Path, calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The structured answers of some tools, from a server in a process of its own."""

    async def ask() -> list[dict[str, Any]]:
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "threefold", "mcp", "--folder", str(folder)],
            env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
        )
        async with Client(server) as client:
            results = [await client.call_tool(name, arguments) for name, arguments in calls]
        return [result.structured_content or {} for result in results]

    return asyncio.run(asyncio.wait_for(ask(), 300))


def test_tools_answer_as_their_verbs() -> None:
    found, judged, told, exported = call(
        ROOT / "recipes",
        [
            ("find", {"words": "ulysses", "most": 3}),
            ("check", {"plan": PLAN, "overrides": ["layout.ep=48"]}),
            ("setting", {"name": "moe_paged_stash"}),
            ("export", {"plan": "qwen3-30b-a3b-4k-16xh100-bf16-overlap.toml"}),
        ],
    )
    assert len(found["answer"]) == 3
    assert judged["exit_code"] == 1
    assert "ep-divides-experts" in {finding["rule"] for finding in judged["answer"]["findings"]}
    assert told["answer"]["plan_field"] is None
    assert exported["answer"]["overrides"]["model.expert_model_parallel_size"] == 16


@pytest.mark.parametrize(
    ("plan", "overrides"),
    [
        ("/etc/passwd", []),
        ("../README.md", []),
        (PLAN, ["model=hf:/etc/config.json"]),
        (PLAN, ["cluster.chip=file:/etc/chip.toml"]),
        (PLAN.replace("qwen3-30b-a3b", "hf:/etc/config.json"), []),
        (PLAN, ["--out=/tmp/written"]),
        (PLAN, ["job.tokenizer=/etc/tokenizer.json"]),
    ],
)
def test_no_file_outside_is_read(plan: str, overrides: list[str], tmp_path: Path) -> None:
    with pytest.raises(OutsideError):
        allow(plan, overrides, tmp_path)


def allow(plan: str, overrides: list[str], folder: Path) -> None:
    """What a tool does before it runs its verb."""
    check_overrides(overrides, [folder.resolve()])
    if "\n" not in plan:
        inside(plan, [folder.resolve()])
    (folder / "plan.toml").write_text(plan)
    check_plan(folder / "plan.toml", [folder.resolve()])


def test_a_link_that_leads_outside_is_outside(tmp_path: Path) -> None:
    (tmp_path / "link.toml").symlink_to("/etc/hostname")
    with pytest.raises(OutsideError):
        inside("link.toml", [tmp_path.resolve()])


def test_an_answer_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(verbs, "SECONDS", 0.01)
    assert verbs.run_verb(["rules"], tmp_path)["exit_code"] == 124
