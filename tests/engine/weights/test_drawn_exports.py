"""Exports of drawn runs are read by transformers and PEFT, with the run's bits and logits, and are imported again.

The default suite runs a few fixed draws. The slow test draws anew each time, or again with THREEFOLD_SEED; hundreds are
run by hand with `benchmarks/drawn_cases.py export`.
"""

import os
import time
from pathlib import Path

import pytest
from drawn_exports import read_by_transformers, run_export
from layout_runs import FAULTS
from safetensors.torch import load_file, save_file
from tiny_models import spec_of

from threefold.engine.models.build import build_model
from threefold.engine.weights.write_hf import write_hf

SEED = os.environ.get("THREEFOLD_SEED", str(time.time_ns() % 1_000_000))
SLOW_COUNT = 60
SAMPLE = (5, 7, 26)  # adapters, a checkpoint of transformers, MTP

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and PEFT, about classes of theirs


@pytest.mark.parametrize("number", SAMPLE)
def test_drawn_export_is_read_back(number: int, tmp_path: Path) -> None:
    outcome = run_export(f"0/{number}", tmp_path)
    assert outcome.kind == "equal", str(outcome)


@pytest.mark.slow
def test_more_drawn_exports_are_read_back(tmp_path: Path) -> None:
    outcomes = [run_export(f"{SEED}/{number}", tmp_path / str(number)) for number in range(SLOW_COUNT)]
    faults = [str(outcome) for outcome in outcomes if outcome.kind in FAULTS]
    assert not faults, f"THREEFOLD_SEED={SEED}\n" + "\n".join(faults)


def test_a_weight_that_is_missing_or_too_many_is_seen(tmp_path: Path) -> None:
    write_hf(build_model(spec_of("qwen3")), spec_of("qwen3"), tmp_path)
    assert not read_by_transformers(tmp_path).problems
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.no_such.weight"] = tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    problems = read_by_transformers(tmp_path).problems
    assert [problem.partition(":")[0] for problem in problems] == ["missing_keys", "unexpected_keys"]
