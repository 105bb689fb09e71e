"""The way from a training step to an expert's GEMM: short enough to read, and printed truly in the docs."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plans import build as build_plan
from repository import ROOT

from threefold.engine.batch import Batch
from threefold.engine.build import build
from threefold.engine.step import train_step

PLAN = {
    "model": "tiny-qwen3-moe",
    "cluster.chip": "cpu",
    "cluster.gpus": 1,
    "job.seq_len": 16,
    "job.global_batch": 1,
    "knobs.precision": "fp32",
    "knobs.dispatcher": "local",
}
ENGINE = ROOT / "threefold" / "engine"
MAX_FILES = 8


def files_on_stack() -> list[str]:
    """Our own files between engine/step.py and the caller of this function, outermost first, each once."""
    found: list[str] = []
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if ENGINE in path.parents:
            found.append(str(path.relative_to(ENGINE)))
            if found[-1] == "step.py":
                break
        frame = frame.f_back
    return list(dict.fromkeys(reversed(found)))


@pytest.fixture
def path(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files on the stack at the grouped GEMM of an expert in the forward."""
    stacks: list[list[str]] = []
    grouped_mm = F.grouped_mm

    def traced(*args: Any, **kwargs: Any) -> Any:
        stacks.append(files_on_stack())
        return grouped_mm(*args, **kwargs)

    plan = build_plan(PLAN)
    parts = build(plan, with_data=False)
    tokens = torch.randint(plan.model.vocab, (1, 17), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(F, "grouped_mm", traced)
    train_step(parts, [Batch(tokens[:, :-1], tokens[:, 1:])], 1e-3, plan.job)
    return max(stacks, key=len)  # the forward: a backward has fewer files on its stack


def test_few_files_from_the_step_to_the_gemm(path: list[str]) -> None:
    assert path[0] == "step.py"
    assert len(path) <= MAX_FILES, path


def test_the_docs_print_the_path(path: list[str]) -> None:
    """Every file of the path, in its order, in the block of docs/architecture.md that begins with cli/train.py."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = next(block for block in text.split("```")[1::2] if block.startswith("\ncli/train.py"))
    printed = re.findall(r"engine/([\w/]+\.py)", block)
    assert [name for name in printed if name in path] == path
