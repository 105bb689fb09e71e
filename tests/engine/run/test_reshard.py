"""A checkpoint of any layout loads into any other, into one process, and into Hugging Face files; bit for bit."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from random_layouts import (
    LAYOUTS,
    PLAIN,
    STATE,
    TENSORS,
    WITH_STATE,
    TensorLayout,
    folder_of,
    full_tensors,
    noise,
    same_bits,
    state_to_fill,
    state_to_save,
)
from safetensors.torch import load_file, save_file
from tiny_runs import DEEPSEEK, tiny_plan
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from threefold.engine.build import device_of, dtype_of, options_of
from threefold.engine.dist.mesh import Group
from threefold.engine.dist.shard_placement import Placement
from threefold.engine.models.build import build_model
from threefold.engine.run.checkpoints import Checkpoints, read_checkpoint
from threefold.engine.run.dcp import CheckpointShard, StoredTensors
from threefold.engine.run.folder import CHECKPOINTS, open_run, record_plan
from threefold.engine.verify.forked_ranks import run_ranks
from threefold.engine.weights.convert import export_hf
from threefold.engine.weights.imported_weights import INITIAL, load_initial_weights
from threefold.findings import FindingsError

WORLD = max(layout.world for layout in LAYOUTS)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# Every pair of ten layouts


def save_and_load_all(rank: int, root: Path) -> int:
    """Each layout saves once, on as many of the ranks as it has; then each loads all ten."""
    handles = {size: dist.new_group(list(range(size)), backend="gloo") for size in range(2, WORLD + 1)}
    mine = [layout for layout in LAYOUTS if rank < layout.world]
    for layout in mine:
        kept = Checkpoints(folder_of(root, layout), 2, layout.group(rank, handles))
        kept.save(1, state_to_save(layout, rank), {"step": 1}, wait=True)
    dist.barrier()
    pairs = 0
    for layout in mine:
        for saved in LAYOUTS:
            want, expected = state_to_fill(layout, rank)
            kept = Checkpoints(folder_of(root, saved), 2, layout.group(rank, handles))
            assert kept.load_latest(print, want) == {"step": 1}
            for name, value in want.items():
                memory = value.memory if isinstance(value, CheckpointShard) else value
                assert same_bits(memory, expected[name]), (saved, layout, name)
                assert not isinstance(value, CheckpointShard) or untouched(memory), (saved, layout, name)
            pairs += 1
    return pairs


def untouched(view: Tensor) -> bool:
    """The buffer around what was loaded."""
    buffer = view.as_strided((view.numel() + 9,), (1,), 0)
    return bool((torch.cat([buffer[:4], buffer[-5:]]) == -7).all())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layouts")
    pairs = run_ranks(WORLD, save_and_load_all, root)
    assert pairs[0] == len(LAYOUTS) ** 2
    return root


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_process_reads_whole_tensors_of_any_layout(layout: TensorLayout, saved: Path) -> None:
    folder = folder_of(saved, layout) / "step-00000001"
    tensors, facts = read_checkpoint(folder)
    assert facts == {"step": 1}
    assert tensors.keys() == full_tensors().keys()
    assert all(same_bits(tensors[name], value) for name, value in full_tensors().items())
    assert len(list(folder.glob("*.distcp"))) == layout.world


def test_ranks_write_only_what_they_own(saved: Path) -> None:
    """Eight ranks shard everything but norm and scale; the rectangles in the index cover each full tensor once."""
    index = FileSystemReader(folder_of(saved, LAYOUTS[7]) / "step-00000001").read_metadata()
    for name, facts in index.state_dict_metadata.items():
        assert sum(chunk.sizes.numel() for chunk in facts.chunks) == facts.size.numel(), name
    files = {entry.relative_path for entry in index.storage_data.values()}
    assert len(files) == 8


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_ours_and_we_read_torchs(saved: Path, tmp_path: Path) -> None:
    """The format is torch's own, also that of checkpoints written by one rank."""
    state = {name: torch.zeros_like(value) for name, value in full_tensors().items()}
    torch_load(state, checkpoint_id=str(folder_of(saved, LAYOUTS[7]) / "step-00000001"), no_dist=True)
    assert all(same_bits(state[name], value) for name, value in full_tensors().items())
    torch_save(full_tensors(), checkpoint_id=str(tmp_path), no_dist=True)
    want, expected = state_to_fill(LAYOUTS[7], 5)
    StoredTensors(tmp_path).fill(want)
    for name, value in want.items():
        assert same_bits(value.memory if isinstance(value, CheckpointShard) else value, expected[name])


def test_names_are_those_of_one_rank() -> None:
    names = {f"model.{name}" for name in TENSORS} | {f"{STATE}{name}" for name in WITH_STATE} | set(PLAIN)
    for layout in LAYOUTS:
        assert set().union(*(state_to_save(layout, rank) for rank in range(layout.world))) == names


# Hugging Face


def tiny_weights(run: Path) -> dict[str, Tensor]:
    """A run of a DeepSeek-like model (fused gate_up, balance bias, MTP), and its weights."""
    plan = tiny_plan({"job.data": "synthetic", **DEEPSEEK})
    open_run(run, plan)
    record_plan(run, plan)
    torch.manual_seed(1)
    model = build_model(plan.model, plan.mtp, dtype_of(plan), device_of(plan), options_of(plan))
    return {f"model.{name}": value for name, value in model.state_dict().items()}


def placement_for(name: str, shape: tuple[int, ...], rank: int) -> Placement:
    """Experts are sharded two by two (gate and up each by half), matrices by rows or by columns, vectors not at all."""
    ranges = [((0, size),) for size in shape]
    if len(shape) == 3:
        ranges[0] = half(shape[0], rank // 2)
        if name.endswith("gate_up"):
            [(start, stop)], middle = half(shape[1] // 2, rank % 2), shape[1] // 2
            ranges[1] = ((start, stop), (middle + start, middle + stop))
        else:
            ranges[2] = half(shape[2], rank % 2)
    elif len(shape) == 2:
        dim = 1 if "down" in name or "out" in name else 0
        ranges[dim] = half(shape[dim], rank % 2)
    return Placement(shape, tuple(ranges), ())


def half(size: int, index: int) -> tuple[tuple[int, int], ...]:
    return ((size // 2 * index, size // 2 * (index + 1)),)


def save_in_four(rank: int, folder: Path, weights: dict[str, Tensor]) -> None:
    shards: dict[str, Tensor | CheckpointShard] = {}
    for name, full in weights.items():
        if name.endswith("balance_bias"):  # a buffer, alike everywhere
            shards |= {name: full} if rank == 3 else {}
            continue
        placements = [placement_for(name, tuple(full.shape), other) for other in range(4)]
        replicas = [other for other in range(4) if placements[other] == placements[rank]]
        flat = placements[rank].extract_shard(full).flatten()
        ends = [0, *(flat.numel() * n // len(replicas) + 3 for n in range(1, len(replicas))), flat.numel()]
        start, stop = ends[replicas.index(rank)], ends[replicas.index(rank) + 1]
        shards[name] = CheckpointShard(placements[rank], flat[start:stop], start)
    group = Group("checkpoint", (0, 1, 2, 3), rank, dist.new_group(backend="gloo"))
    Checkpoints(folder, 1, group).save(1, shards, {"step": 1}, wait=True)


def test_export_is_the_same_from_four_ranks_as_from_one(tmp_path: Path) -> None:
    weights = tiny_weights(tmp_path / "one")
    Checkpoints(tmp_path / "one" / CHECKPOINTS, 1).save(1, weights, {"step": 1}, wait=True)
    tiny_weights(tmp_path / "four")
    run_ranks(4, save_in_four, tmp_path / "four" / CHECKPOINTS, weights)
    for run in ("one", "four"):
        list(export_hf(tmp_path / run, tmp_path / f"{run}-hf"))
    [one], [four] = (list((tmp_path / f"{run}-hf").glob("*.safetensors")) for run in ("one", "four"))
    left, right = load_file(one), load_file(four)
    assert left.keys() == right.keys()
    assert all(same_bits(left[name], right[name]) for name in left)
    assert torch.equal(right["model.embed_tokens.weight"], weights["model.embed.weight"])


class Share(nn.Module):
    """A rank's part of a model: shards as parameters, without memory for what it does not have."""

    def __init__(self, layout: TensorLayout, rank: int) -> None:
        super().__init__()
        self.placements: dict[str, Placement] = {}
        for name, (_, dtype, _, _) in TENSORS.items():
            if placement := layout.placement(name, rank):
                self.placements[name] = placement
                module, _, leaf = name.rpartition(".")
                if module and not hasattr(self, module):
                    self.add_module(module, nn.Module())
                memory = nn.Parameter(torch.zeros(placement.local_shape, dtype=dtype))
                self.get_submodule(module).register_parameter(leaf, memory)
        self.register_buffer("balance_bias", torch.zeros(8))


@pytest.mark.parametrize("layout", [LAYOUTS[0], LAYOUTS[5], LAYOUTS[6], LAYOUTS[7]], ids=str)
def test_imported_weights_go_into_pieces(layout: TensorLayout, tmp_path: Path) -> None:
    full = {name: noise(shape, dtype, 3) for name, (shape, dtype, _, _) in TENSORS.items()}
    names = sorted(full)
    (tmp_path / INITIAL).mkdir()
    save_file({n: full[n] for n in names[:3]} | {"balance_bias": torch.ones(8)}, tmp_path / INITIAL / "0.safetensors")
    save_file({n: full[n] for n in names[3:]}, tmp_path / INITIAL / "1.safetensors")
    for rank in range(layout.world):
        share = Share(layout, rank)
        placements = None if layout.world == 1 else share.placements
        assert load_initial_weights(tmp_path, share, placements)
        for name, value in share.named_parameters():
            assert same_bits(value.detach(), share.placements[name].extract_shard(full[name]))
        assert torch.equal(share.balance_bias, torch.ones(8))


def test_imported_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    assert not load_initial_weights(tmp_path, Share(LAYOUTS[1], 0), Share(LAYOUTS[1], 0).placements)
    (tmp_path / INITIAL).mkdir()
    save_file({"layer.q": torch.zeros(12, 7)}, tmp_path / INITIAL / "0.safetensors")
    with pytest.raises(FindingsError, match=r"layer\.q has shape \[12, 7\] there and \[12, 5\]"):
        load_initial_weights(tmp_path, Share(LAYOUTS[1], 0), Share(LAYOUTS[1], 0).placements)
