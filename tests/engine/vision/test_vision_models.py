"""Vision-language models against transformers: the same weights, logits and gradients, positions, and weights written.

Shapes: B batch, S sequence.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from tiny_vision import CONFIGS, IMAGE, MERGE, SAMPLES, VIDEO, Sample, sample, spec_of

from threefold.engine.model_options import Options
from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder, Output
from threefold.engine.vision import multimodal_positions
from threefold.engine.weights.hf_names import hf_layouts
from threefold.engine.weights.read_hf import read_hf
from threefold.engine.weights.write_hf import write_hf
from threefold.spec.hf import model_from_config

EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
LOGITS, GRADIENTS = 1e-5, 1e-4  # relative, fp32: sums in another order differ by about 1e-6

pytestmark = pytest.mark.usefixtures("one_thread")


def peer(family: str) -> Any:
    """A transformers model in which nothing is zero or one that could hide a wrong weight."""
    config = transformers.AutoConfig.for_model(**CONFIGS[family])
    model = transformers.AutoModelForImageTextToText.from_config(config, **EAGER)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("A_log"):
                tensor.zero_()  # where the state decays at once, its gradients are too small for fp32 to be compared
            if "inv_freq" not in name:
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return model.eval()


def ours(model: Any, folder: Path, **options: Any) -> Decoder:
    model.save_pretrained(folder, max_shard_size="20KB")
    engine = build_model(model_from_config(folder), options=Options(**options))
    assert not read_hf(folder, engine)
    return engine


def run(engine: Decoder, given: Sample, labels: bool = False) -> Output:
    wanted = given.labels_BS if labels else None
    output: Output = engine(given.tokens_BS, wanted, images=given.images, positions_3BS=given.positions_3BS)
    return output


def relative(found: Any, expected: Any) -> float:
    return float((found - expected).norm() / expected.norm().clamp(min=1e-12))


def compare_gradients(engine: Decoder, model: Any) -> None:
    theirs, seen = dict(model.named_parameters()), set()
    for name, parameter in engine.named_parameters():
        layouts = hf_layouts(name, engine.spec)
        layout = next(layout for layout in layouts if all(piece.key in theirs for piece in layout))
        for piece in layout:
            seen.add(piece.key)
            assert parameter.grad is not None, name
            expected, found = theirs[piece.key].grad, piece.read(parameter.grad)
            if expected is None:  # transformers does not run its encoder without pictures
                assert not found.any(), name
                continue
            assert found.shape == expected.shape
            assert relative(found, expected) < GRADIENTS, name
    assert seen == set(theirs)


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_and_gradients_equal_transformers(family: str, name: str, tmp_path: Path) -> None:
    model, given = peer(family), sample(name)
    engine = ours(model, tmp_path)
    logits = model(**given.for_transformers(), use_cache=False).logits
    found = run(engine, given).logits
    assert (found - logits).abs().max() <= LOGITS * logits.abs().max()

    loss = F.cross_entropy(logits.flatten(0, 1), given.labels_BS.flatten(), ignore_index=-100)
    loss.backward()
    out = run(engine, given, labels=True)
    assert out.loss is not None
    assert float(out.loss.detach()) == pytest.approx(float(loss.detach()), rel=LOGITS)
    out.loss.backward()
    compare_gradients(engine, model)


@pytest.mark.parametrize("name", [name for name in SAMPLES if name != "none"])
def test_positions_equal_transformers(name: str) -> None:
    """Tokens of text, pictures of any aspect, and videos, whose frames have a position of their own each."""
    model, given = peer("qwen3_vl_moe"), sample(name)
    theirs = given.for_transformers()
    grids = {key: theirs.get(key) for key in ("image_grid_thw", "video_grid_thw")}
    expected, _ = model.model.get_rope_index(given.tokens_BS, given.kinds_BS, **grids)
    assert torch.equal(given.positions_3BS, expected)


def test_positions_of_a_cut_picture_are_refused() -> None:
    tokens_S = torch.tensor([1, IMAGE, IMAGE])
    with pytest.raises(AssertionError, match="cut by the end"):
        multimodal_positions(tokens_S, [(4, 4)], (IMAGE, VIDEO), MERGE)
    with pytest.raises(AssertionError, match="more than 0 images"):
        multimodal_positions(tokens_S, [], (IMAGE, VIDEO), MERGE)


@pytest.mark.parametrize("family", CONFIGS)
def test_weights_written_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Exported weights load into transformers without a missing or unknown one, and give the same logits."""
    spec, given = spec_of(family), sample("pictures and a video")
    engine = build_model(spec, seed=3)
    write_hf(engine, spec, tmp_path)
    model, report = transformers.AutoModelForImageTextToText.from_pretrained(
        tmp_path, output_loading_info=True, **EAGER
    )
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    logits = model.eval()(**given.for_transformers(), use_cache=False).logits
    found = run(engine, given).logits
    assert found is not None
    assert (found - logits).abs().max() <= LOGITS * logits.abs().max()
    again = model_from_config(tmp_path)
    assert {f: getattr(again, f) for f in ("vision", "attention", "moe", "delta", "layers")} == {
        f: getattr(spec, f) for f in ("vision", "attention", "moe", "delta", "layers")
    }


def test_published_experts_with_the_input_dim_first_are_read(tmp_path: Path) -> None:
    """The published Qwen3-VL checkpoints hold the experts transposed to what transformers 5 writes."""
    spec = spec_of("qwen3_vl_moe")
    engine = build_model(spec, seed=3)
    write_hf(engine, spec, tmp_path)
    path = next(tmp_path.glob("*.safetensors"))
    tensors = load_file(path)
    turned = {k: v.transpose(1, 2).contiguous() if "experts" in k else v for k, v in tensors.items()}
    save_file(turned, path)
    read = build_model(spec, seed=4)
    assert not read_hf(tmp_path, read)
    for name, value in engine.state_dict().items():
        assert torch.equal(read.state_dict()[name], value), name


def gradients(engine: Decoder, given: Sample) -> dict[str, torch.Tensor]:
    loss = run(engine, given, labels=True).loss
    assert loss is not None
    loss.backward()
    return {name: p.grad for name, p in engine.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "options",
    [
        {"vision_recompute": ("full",)},
        {"vision_recompute": ("attn", "mlp", "projector")},
        {"recompute": ("full",), "vision_recompute": ("full",)},
        {"recompute": ("full",), "recompute_method": "uniform", "recompute_layers": 2},
        {"recompute": ("full",), "recompute_method": "block", "recompute_layers": 1, "vision_recompute": ("mlp",)},
    ],
    ids=str,
)
def test_recompute_changes_no_gradient(options: dict[str, Any]) -> None:
    spec, given = spec_of("qwen3_vl_moe"), sample("a batch with and without")
    expected = gradients(build_model(spec, seed=5), given)
    found = gradients(build_model(spec, options=Options(**options), seed=5), given)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.equal(found[name], grad), name


@pytest.mark.parametrize("frozen", [("vision.",), ("vision.", "projector.")], ids=["encoder", "both"])
def test_a_frozen_encoder_runs_without_autograd(frozen: tuple[str, ...]) -> None:
    """Nothing of it is saved, and what trains gets the gradients that it gets beside a trained encoder."""
    spec, given = spec_of("qwen3_vl_moe"), sample("one picture")
    expected = gradients(build_model(spec, seed=5), given)
    engine = build_model(spec, seed=5)
    for name, parameter in engine.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    assert engine.vision is not None
    assert given.images is not None
    assert not any(state.requires_grad for state in engine.vision(given.images))
    found = gradients(engine, given)
    assert found.keys() == {name for name in expected if not name.startswith(frozen)}
    for name, grad in found.items():
        assert torch.equal(grad, expected[name]), name


def test_packed_documents_do_not_see_each_other() -> None:
    """Two documents with pictures in one row give the losses that they give in rows of their own."""
    spec = spec_of("qwen3_vl_moe")
    apart = Sample([[2, (4, 4), 4], [1, (2, 6), 6]], 12)
    engine = build_model(spec, seed=5)
    expected = run(engine, apart).logits
    assert expected is not None
    positions_3BS = torch.cat([apart.positions_3BS[:, :1], apart.positions_3BS[:, 1:]], dim=2)
    found = engine(
        apart.tokens_BS.view(1, -1),
        documents_BS=torch.arange(2).repeat_interleave(12)[None],
        images=apart.images,
        positions_3BS=positions_3BS,
    ).logits
    assert (found.view_as(expected) - expected).abs().max() <= LOGITS * expected.abs().max()
