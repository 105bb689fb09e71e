"""Runs that begin with imported weights: with all of them, and with no others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_runs import DEEPSEEK, tiny_plan
from torch import Tensor

from threefold.engine.models.build import build_model
from threefold.engine.run.checkpoints import read_checkpoint
from threefold.engine.run.folder import CHECKPOINTS
from threefold.engine.train import train
from threefold.engine.weights.imported_weights import INITIAL, start_from_initial_weights
from threefold.findings import FindingsError


def differing(left: dict[str, Tensor], right: dict[str, Tensor]) -> set[str]:
    both = left.keys() & right.keys()
    return (left.keys() ^ right.keys()) | {name for name in both if not torch.equal(left[name], right[name])}


def imported(folder: Path, fields: dict[str, Any], depths: int | None = None) -> dict[str, Tensor]:
    """Weights of the plan's model in two shards, as `import-hf` leaves them."""
    model = build_model(tiny_plan(fields).model, depths, seed=5)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    write_initial(folder, state)
    return state


def write_initial(folder: Path, state: dict[str, Tensor]) -> None:
    (folder / INITIAL).mkdir(parents=True, exist_ok=True)
    names = sorted(state)
    for number, part in enumerate((names[::2], names[1::2])):
        save_file({name: state[name] for name in part}, folder / INITIAL / f"{number:05d}.safetensors")


def begin_from(folder: Path, fields: dict[str, Any]) -> dict[str, Tensor]:
    """A run of one step that changes nothing, and its weights."""
    train(tiny_plan({"job.data": "synthetic", "job.steps": 1, "job.lr": 0.0, **fields}), folder, lambda text: None)
    tensors, _ = read_checkpoint(folder / CHECKPOINTS / "step-00000001")
    return {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}


def test_a_run_begins_with_imported_weights(tmp_path: Path) -> None:
    state = imported(tmp_path, {})
    assert differing(begin_from(tmp_path, {}), state) == set()


def test_imported_weights_that_are_missing_surplus_or_misshapen_are_findings(tmp_path: Path) -> None:
    """All at once; a weight that is missing would start as noise."""
    state = imported(tmp_path, {})
    del state["layers.0.ffn.experts.down"]
    write_initial(tmp_path, state | {"norm.weight": torch.ones(3), "layers.7.norm": torch.ones(2)})
    with pytest.raises(FindingsError) as caught:
        begin_from(tmp_path, {})
    assert [finding.problem for finding in caught.value.findings] == [
        "no weights for layers.0.ffn.experts.down",
        "weights for layers.7.norm, which the plan's model has not",
        f"norm.weight has shape [3] there and [{tiny_plan({}).model.dim}] in the plan",
    ]
    assert all(finding.rule == "convertible" and finding.fix_text for finding in caught.value.findings)


@pytest.mark.parametrize("keep", [0, 4, -100], ids=["empty", "no header", "cut off"])
def test_a_damaged_file_of_imported_weights_is_a_finding(keep: int, tmp_path: Path) -> None:
    imported(tmp_path, {})
    file = tmp_path / INITIAL / "00001.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(FindingsError, match=r"00001\.safetensors: cannot be read: .*\n  advice: import"):
        begin_from(tmp_path, {})


@pytest.mark.parametrize(("stored", "trained"), [(1, 0), (0, 1)])
def test_mtp_depths_may_be_left_out_or_new(stored: int, trained: int, tmp_path: Path) -> None:
    """Fewer than were imported are trained, or more than the model has."""
    fields = {**(DEEPSEEK if stored else {}), "job.mtp": trained}
    state = imported(tmp_path, fields, stored)
    begun = begin_from(tmp_path, fields)
    assert any(name.startswith("mtp.") for name in state) == bool(stored)
    differs = differing(begun, state)
    assert {name.split(".")[0] for name in begun.keys() ^ state.keys()} == {"mtp"}
    assert all(name.startswith("mtp.") or "balance_bias" in name for name in differs)  # moved by a rule of its own


def test_a_depth_of_the_model_is_not_left_to_chance(tmp_path: Path) -> None:
    imported(tmp_path, DEEPSEEK, 0)
    with pytest.raises(FindingsError, match=r"no weights for mtp\.0\."):
        begin_from(tmp_path, DEEPSEEK)


def test_a_stage_takes_its_own_of_the_imported_weights(tmp_path: Path) -> None:
    """Others are for other stages; what no stage wants is a finding on each."""
    plan = tiny_plan({})
    state = imported(tmp_path, {})
    stage = {name: torch.zeros_like(value) for name, value in state.items() if name.startswith("layers.")}
    assert start_from_initial_weights(tmp_path, stage, plan)
    assert all(torch.equal(value, state[name]) for name, value in stage.items())
    write_initial(tmp_path, state | {"vision.weight": torch.ones(2)})
    with pytest.raises(FindingsError, match=r"weights for vision\.weight, which the plan's model has not"):
        start_from_initial_weights(tmp_path, stage, plan)
