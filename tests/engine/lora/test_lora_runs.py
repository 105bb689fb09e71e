"""A LoRA run from a checkpoint of transformers: saved, resumed under other layouts, exported, and gone on from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import build as plan_of
from tiny_models import config_of
from torch import Tensor

from threefold.engine.build import build
from threefold.engine.dist.join import World
from threefold.engine.dist.mesh import Mesh
from threefold.engine.run.checkpoints import Checkpoints, read_checkpoint
from threefold.engine.run.folder import CHECKPOINTS, record_plan
from threefold.engine.step import train_step
from threefold.engine.train_state import TrainState, load_run
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.verify.oracle import synthetic_batch
from threefold.engine.weights.convert import export_hf, import_hf
from threefold.engine.weights.imported_weights import start_from_initial_weights
from threefold.findings import FindingsError
from threefold.plan.plan import Plan

FP32 = 1e-5  # rounding through a few layers
LORA = {
    "job.lora_rank": 4,
    "job.lora_alpha": 6.0,
    "job.lora_targets": ["attention", "mlp", "shared_experts", "experts"],
}
LAYOUTS: list[dict[str, Any]] = [
    {"cluster.gpus": 1},
    {"cluster.gpus": 2, "layout.ep": 2},
    {"cluster.gpus": 2, "layout.tp": 2, "layout.etp": 2},
    {"cluster.gpus": 2, "knobs.data_parallel": "fsdp"},
    {"cluster.gpus": 2, "layout.pp": 2},
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as transformers saves it."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(0)
    settings = dict(config_of("deepseek_v3"))
    kind = settings.pop("model_type")
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **settings)).save_pretrained(
        folder
    )
    return folder


def plan_in(run: Path, layout: dict[str, Any], lora: dict[str, Any] = LORA) -> Plan:
    return plan_of(
        {
            "model": f"hf:{run / 'hf_config.json'}",
            "target": "threefold",
            "cluster.chip": "cpu",
            "job.seq_len": 16,
            "job.global_batch": 4,
            "job.data": "synthetic",
            "job.mtp": 0,
            "knobs.precision": "fp32",
            **lora,
            **layout,
        }
    )


def opened(rank: int, plan: Plan, run: Path) -> TrainState:
    mesh = Mesh(plan.layout, rank)
    kept = Checkpoints(run / CHECKPOINTS, 3, mesh.checkpoint_group())
    world = World(rank, plan.layout.gpus, rank, mesh.device, 0)
    return TrainState(plan, run, build(plan, mesh), kept, world)


def step_once(state: TrainState) -> float:
    plan, dp_rank = state.plan, state.parts.mesh.coordinate("dp")
    batches = [synthetic_batch(plan, state.step, m, dp_rank) for m in range(plan.num_microbatches)]
    result = train_step(state.parts, batches, 1e-2, plan.job)
    assert result.applied
    state.step += 1
    return result.loss


def start(rank: int, plan: Plan, run: Path) -> float:
    """Train a step from the imported weights, and save."""
    state = opened(rank, plan, run)
    model = {name.removeprefix("model."): value for name, value in state.weights().items()}
    assert start_from_initial_weights(run, model, plan)
    state.parts.optimizer.refresh()
    loss = step_once(state)
    state.save(wait=True)
    return loss


def resume(rank: int, plan: Plan, run: Path) -> float:
    """Train a step more; nothing is saved."""
    state = opened(rank, plan, run)
    wanted = state.tensors_to_load()
    facts = state.checkpoints.load_latest(print, wanted)
    assert facts is not None
    state.restore(wanted, facts)
    return step_once(state)


@pytest.fixture(scope="module")
def run(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    assert list(import_hf(checkpoint, folder, "fp32"))
    plan = plan_in(folder, {})
    record_plan(folder, plan)
    run_ranks(1, start, plan, folder, limit=120)
    return folder


def test_a_run_goes_on_under_any_layout(run: Path) -> None:
    losses = [run_ranks(lay["cluster.gpus"], resume, plan_in(run, lay), run, limit=120)[0] for lay in LAYOUTS]
    assert losses == pytest.approx([losses[0]] * len(LAYOUTS), rel=1e-6)


def test_frozen_weights_are_those_of_the_checkpoint(run: Path) -> None:
    from safetensors.torch import load_file

    tensors, _ = read_checkpoint(run / CHECKPOINTS / "step-00000001")
    initial = {
        name: value for path in (run / "initial").glob("*.safetensors") for name, value in load_file(path).items()
    }
    assert all(torch.equal(tensors[f"model.{name}"], value) for name, value in initial.items())
    states = {name.partition(".")[2].partition(".")[2] for name in tensors if name.startswith("optimizer.")}
    assert {name for name in states if name} == {
        name.removeprefix("model.")
        for name in tensors
        if name.endswith(("lora_a", "lora_b")) and name.startswith("model.")
    }
    assert any(value.any() for name, value in tensors.items() if name.startswith("model.") and name.endswith("lora_b"))


def logits_of(run: Path, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        found = load_run(run, print)(tokens).logits
    assert found is not None
    return found


def test_exports_give_the_engines_logits(run: Path, checkpoint: Path, tmp_path: Path) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    tokens = torch.randint(67, (2, 16), generator=torch.Generator().manual_seed(1))
    logits = logits_of(run, tokens)
    said = [*export_hf(run, tmp_path / "merged"), *export_hf(run, tmp_path / "adapter", adapter=True)]
    assert any("merged" in line for line in said)

    def load(folder: Path) -> Any:
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **eager).eval()

    with torch.no_grad():
        merged = load(tmp_path / "merged")(tokens).logits
        unmerged = peft.PeftModel.from_pretrained(load(checkpoint), tmp_path / "adapter")(tokens).logits
    for found in (merged, unmerged):
        assert float((found - logits).abs().max()) <= FP32 * float(logits.abs().max())


def test_an_exported_adapter_is_gone_on_from(run: Path, checkpoint: Path, tmp_path: Path) -> None:
    list(export_hf(run, tmp_path / "adapter", adapter=True))
    said = list(import_hf(checkpoint, tmp_path / "next", "fp32", tmp_path / "adapter"))
    assert any("adapters of rank 4" in line for line in said)
    plan = plan_in(tmp_path / "next", {})
    state = opened(0, plan, tmp_path / "next")
    model = {name.removeprefix("model."): value for name, value in state.weights().items()}
    assert start_from_initial_weights(tmp_path / "next", model, plan)
    tokens = torch.randint(67, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found = state.parts.model(tokens).logits
    assert found is not None
    assert torch.equal(found, logits_of(run, tokens))


def test_adapters_of_a_run_without_any_are_refused(checkpoint: Path, tmp_path: Path) -> None:
    list(import_hf(checkpoint, tmp_path / "run", "fp32"))
    plan = plan_in(tmp_path / "run", {}, lora={})
    record_plan(tmp_path / "run", plan)
    run_ranks(1, start, plan, tmp_path / "run", limit=120)
    with pytest.raises(FindingsError, match="no LoRA adapters"):
        list(export_hf(tmp_path / "run", tmp_path / "adapter", adapter=True))
    assert not (tmp_path / "adapter").exists()


def test_imported_adapters_need_a_plan_with_lora(run: Path, checkpoint: Path, tmp_path: Path) -> None:
    list(export_hf(run, tmp_path / "adapter", adapter=True))
    list(import_hf(checkpoint, tmp_path / "next", "fp32", tmp_path / "adapter"))
    draft = (tmp_path / "next" / "plan.draft.toml").read_text(encoding="utf-8")
    assert "lora_rank = 4" in draft
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))["lora_alpha"] == 6
    plan = plan_in(tmp_path / "next", {}, lora={})
    state = opened(0, plan, tmp_path / "next")
    model = {name.removeprefix("model."): value for name, value in state.weights().items()}
    with pytest.raises(FindingsError, match="lora_a"):
        start_from_initial_weights(tmp_path / "next", model, plan)
