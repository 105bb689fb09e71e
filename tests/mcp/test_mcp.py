"""The server answers the client of the official SDK, and reads no file outside of its folders."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from mcp import Client, StdioServerParameters
from repository import ROOT

from threefold.mcp import server
from threefold.mcp.server import OutsideError, check_overrides, check_plan, inside

TOOLS = {"find", "setting", "published_pairs", "explain", "plan", "fit", "check", "estimate", "compare_plans"}
TOOLS |= {"diagnose", "export"}
PLAN = 'model = "qwen3-30b-a3b"\ntarget = "megatron-bridge"\ncluster = {chip = "h100", gpus = 16}\n[layout]\nep = 16\n'
BATCH = "job.global_batch = 64\n"


def call(folder: Path, calls: list[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The structured answers of some tools, from a server in a process of its own. Each holds its tool's schema."""

    async def ask() -> list[dict[str, Any]]:
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "threefold", "mcp", "--folder", str(folder)],
            env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]},
        )
        async with Client(server) as client:
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            results = [await client.call_tool(name, arguments) for name, arguments in calls]
        assert set(tools) == TOOLS
        for (name, _), result in zip(calls, results, strict=True):
            schema = tools[name].output_schema
            assert schema is not None
            assert "anyOf" in schema["properties"]["answer"]
            jsonschema.validate(result.structured_content, schema)
        return [result.structured_content or {} for result in results]

    return asyncio.run(asyncio.wait_for(ask(), 300))


def test_tools_answer_as_their_verbs() -> None:
    found, judged, told, exported = call(
        ROOT / "recipes",
        [
            ("find", {"words": "ulysses", "most": 3}),
            ("check", {"plan": PLAN, "overrides": ["layout.ep=48"]}),
            ("setting", {"name": "moe_paged_stash_page_size"}),
            ("export", {"plan": "qwen3-30b-a3b-4k-16xh100-bf16-overlap.toml"}),
        ],
    )
    assert len(found["answer"]) == 3
    assert judged["exit_code"] == 1
    assert "ep-divides-experts" in {finding["rule"] for finding in judged["answer"]["findings"]}
    assert told["answer"]["plan_field"] is None
    assert exported["answer"]["overrides"]["model.expert_model_parallel_size"] == 16


def test_jobs_are_diagnosed_models_are_fitted_and_plans_compared(tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rank.log").symlink_to("/etc/hostname")
    died, outside, fitted, pairs, compared, death = call(
        tmp_path,
        [
            ("diagnose", {"files": ["job.log"]}),
            ("diagnose", {"files": ["run"]}),
            ("fit", {"model": "olmoe-1b-7b", "gpus": "8"}),
            ("published_pairs", {"words": "hybridep qwen3-30b"}),
            ("compare_plans", {"first": f"{BATCH}{PLAN}", "second": f"{BATCH}{PLAN}".replace("ep = 16", "ep = 8")}),
            ("explain", {"slug": "deepep-timeout"}),
        ],
    )
    assert "cuda-out-of-memory" in "\n".join(died["answer"]["summary"])
    assert outside["exit_code"] == 2
    assert "outside of" in outside["message"]
    assert [point["gpus"] for point in fitted["answer"]["points"]] == [8]
    assert pairs["answer"][0]["runs"][1]["differs"] == ["ep_overlap"]
    assert "layout.ep" in str(compared["answer"])
    assert death["answer"]["death"] == "deepep-timeout"


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
    monkeypatch.setattr(server, "SECONDS", 0.01)
    assert server.run_verb(["rules"], tmp_path)["exit_code"] == 124
