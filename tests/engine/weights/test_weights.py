"""Weights in and out: bit for bit, quantized checkpoints, and every damaged one refused with a finding."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as safetensors_torch
import torch
from tiny_models import FAMILIES, spec_of

from threefold.engine.models.build import build_model
from threefold.engine.weights.read_hf import dequantize_mxfp4, open_hf, read_hf
from threefold.engine.weights.write_hf import write_hf
from threefold.findings import FindingsError
from threefold.spec.hf import hf_config_of, model_from_dict
from threefold.spec.models import MODELS

load_file, save_file = safetensors_torch.load_file, safetensors_torch.save_file


def all_tensors(folder: Path) -> dict[str, Any]:
    return {key: tensor for path in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(path).items()}


def bits(tensor: Any) -> Any:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_keeps_every_bit(family: str, dtype: Any, tmp_path: Path) -> None:
    spec = spec_of(family, odd=True)
    mtp = {"deepseek_v3": 2, "qwen3_next": 1}.get(family, 0)
    first = build_model(spec, mtp=mtp, dtype=dtype, seed=7)
    for router in first.routers():
        if router.balance_bias is not None:
            router.balance_bias.normal_()
    write_hf(first, spec, tmp_path / "one", max_shard_bytes=9_000)
    second = build_model(spec, mtp=mtp, dtype=dtype)
    assert not read_hf(tmp_path / "one", second)
    for (name, one), (other_name, other) in zip(first.state_dict().items(), second.state_dict().items(), strict=True):
        assert name == other_name
        assert one.dtype == other.dtype
        assert torch.equal(bits(one), bits(other)), name
    write_hf(second, spec, tmp_path / "two")
    one, two = all_tensors(tmp_path / "one"), all_tensors(tmp_path / "two")
    assert one.keys() == two.keys()
    assert all(torch.equal(bits(one[key]), bits(two[key])) for key in one)
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > 1
    assert [path.name for path in (tmp_path / "two").glob("*.safetensors")] == ["model.safetensors"]


def test_names_are_those_of_published_checkpoints(tmp_path: Path) -> None:
    """Keys as they stand in the index files of deepseek-ai/DeepSeek-V3, Qwen3-Next, Mixtral-8x7B and gpt-oss."""
    published = {
        "deepseek_v3": [
            "model.embed_tokens.weight",
            "model.layers.0.mlp.gate_proj.weight",
            "model.layers.1.mlp.gate.e_score_correction_bias",
            "model.layers.1.mlp.experts.7.up_proj.weight",
            "model.layers.1.mlp.shared_experts.down_proj.weight",
            "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
            "model.layers.2.eh_proj.weight",
            "model.layers.2.enorm.weight",
            "model.layers.2.shared_head.head.weight",
            "lm_head.weight",
        ],
        "qwen3_next": [
            "model.layers.0.linear_attn.in_proj_qkvz.weight",
            "model.layers.0.linear_attn.A_log",
            "model.layers.0.linear_attn.conv1d.weight",
            "model.layers.1.mlp.shared_expert_gate.weight",
            "mtp.fc.weight",
            "mtp.layers.0.mlp.experts.0.gate_proj.weight",
            "mtp.pre_fc_norm_hidden.weight",
        ],
        "mixtral": [
            "model.layers.0.block_sparse_moe.gate.weight",
            "model.layers.1.block_sparse_moe.experts.3.w2.weight",
        ],
        "gpt_oss": [
            "model.layers.0.self_attn.sinks",
            "model.layers.0.mlp.router.bias",
            "model.layers.0.mlp.experts.gate_up_proj_bias",
        ],
    }
    for family, keys in published.items():
        model = build_model(spec_of(family), mtp=1 if family in ("deepseek_v3", "qwen3_next") else 0)
        write_hf(model, model.spec, tmp_path / family)
        assert not set(keys) - set(all_tensors(tmp_path / family))


def test_stacked_expert_keys_load(tmp_path: Path) -> None:
    model = build_model(spec_of("qwen3_moe"), seed=3)
    write_hf(model, model.spec, tmp_path)
    tensors = all_tensors(tmp_path)
    home = "model.layers.1.mlp.experts."
    halves = [[tensors.pop(f"{home}{e}.{half}_proj.weight") for e in range(8)] for half in ("gate", "up")]
    tensors[f"{home}gate_up_proj"] = torch.cat([torch.stack(half) for half in halves], dim=1)
    tensors[f"{home}down_proj"] = torch.stack([tensors.pop(f"{home}{e}.down_proj.weight") for e in range(8)])
    save_file(tensors, tmp_path / "model.safetensors")
    other = build_model(model.spec)
    assert not read_hf(tmp_path, other)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("odd", [False, True])
def test_configuration_of_a_spec_reads_back(family: str, odd: bool) -> None:
    spec = spec_of(family, odd)
    assert model_from_dict(hf_config_of(spec), name=spec.name, source=spec.source) == spec


@pytest.mark.parametrize("family", ["deepseek_v3", "glm_moe_dsa"])
def test_configuration_says_how_the_router_scores(family: str) -> None:
    """As config.json of deepseek-ai/DeepSeek-V3 and zai-org/GLM-5 do, for readers that do not take it for granted."""
    config = hf_config_of(spec_of(family))
    assert (config["scoring_func"], config["topk_method"]) == ("sigmoid", "noaux_tc")


def test_fp8_blocks_load_dequantized_and_say_so(tmp_path: Path) -> None:
    """Blocks of 16 x 8 over matrices that they do not divide; expected value by value."""
    model = build_model(spec_of("deepseek_v3"), mtp=1, seed=3)
    config = {**hf_config_of(model.spec), "num_nextn_predict_layers": 1}
    write_hf(model, model.spec, tmp_path, config)
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 8]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = all_tensors(tmp_path)
    names = [key for key in tensors if key.endswith("proj.weight") and "eh_proj" not in key]
    for key in names:
        rows, columns = tensors[key].shape
        tensors[key] = (tensors[key] * 1000).clamp(-400, 400).to(torch.float8_e4m3fn)
        tensors[f"{key}_scale_inv"] = torch.rand(-(-rows // 16), -(-columns // 8)) + 0.5
    save_file(tensors, tmp_path / "model.safetensors")
    told = read_hf(tmp_path, model)
    assert [finding.severity for finding in told] == ["warning"]
    assert f"{len(names)} block fp8 tensors were dequantized" in told[0].problem
    key, found = "model.layers.0.mlp.gate_proj.weight", model.layers["0"].ffn.gate.weight
    for i in range(found.shape[0]):
        for j in range(0, found.shape[1], 5):
            scale = float(tensors[f"{key}_scale_inv"][i // 16, j // 8])
            expected = torch.tensor(float(tensors[key][i, j]) * scale).bfloat16()
            assert found[i, j].item() == pytest.approx(expected.item(), rel=2**-8)


def test_mxfp4_values_are_those_of_the_specification() -> None:
    """Bytes 0x10 .. hold value 0 then 0.5; exponent byte 127 is a factor of 1, 128 of 2."""
    blocks = torch.zeros(1, 2, 16, dtype=torch.uint8)
    blocks[0, 0, :3] = torch.tensor([0x10, 0x72, 0xF9], dtype=torch.uint8)
    blocks[0, 1, 0] = 0x5A
    values = dequantize_mxfp4(blocks, torch.tensor([[127, 128]], dtype=torch.uint8))
    assert values.shape == (1, 64)
    assert values[0, :6].tolist() == [0.0, 0.5, 1.0, 6.0, -0.5, -6.0]
    assert values[0, 32:34].tolist() == [-2.0, 6.0]


def test_mxfp4_experts_load_dequantized_and_say_so(tmp_path: Path) -> None:
    """gate and up rows alternate in the stored matrix (gpt-oss), output dim first."""
    spec = spec_of("gpt_oss", intermediate_size=32)
    model = build_model(spec, dtype=torch.bfloat16)
    write_hf(model, spec, tmp_path)
    tensors = all_tensors(tmp_path)
    expected = {}
    for layer in range(2):
        for name, rows in (("gate_up_proj", 64), ("down_proj", 32)):
            key = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[key]
            blocks = torch.randint(0, 256, (6, rows, 1, 16), dtype=torch.uint8)
            scales = torch.randint(120, 130, (6, rows, 1), dtype=torch.uint8)
            tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            expected[key] = dequantize_mxfp4(blocks, scales)
    save_file(tensors, tmp_path / "model.safetensors")
    told = read_hf(tmp_path, model)
    assert ["4 MXFP4 tensors were dequantized" in finding.problem for finding in told] == [True]
    experts = model.layers["1"].ffn.experts
    stored = expected["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(experts.gate_up[:, :32], stored[:, 0::2])
    assert torch.equal(experts.gate_up[:, 32:], stored[:, 1::2])
    assert torch.equal(experts.down, expected["model.layers.1.mlp.experts.down_proj"])


def test_reading_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    model = build_model(spec_of("mixtral"))
    write_hf(model, model.spec, tmp_path, max_shard_bytes=10_000)
    source = iter(open_hf(tmp_path, model.spec))
    for name, expected in model.state_dict().items():
        found_name, found = next(source)
        assert found_name == name
        assert torch.equal(found, expected)


def _truncate(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-50])


def _cut_header(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:20])


def _edit_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        change(index)
        path.write_text(json.dumps(index))

    return damage


def _rename_shard(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[1]
    path.rename(path.with_name("model-oops.safetensors"))


def _reshape(folder: Path) -> None:
    path = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1].contiguous()
    save_file(tensors, path)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (_truncate, "no whole safetensors file"),
    "header cut": (_cut_header, "no whole safetensors file"),
    "missing": (lambda folder: sorted(folder.glob("*.safetensors"))[1].unlink(), "is missing"),
    "misnamed": (_rename_shard, "is missing"),
    "outside": (
        _edit_index(lambda i: i["weight_map"].update({"lm_head.weight": "../x.safetensors"})),
        "no safetensors file of the folder",
    ),
    "pickle": (
        _edit_index(lambda i: i["weight_map"].update({"lm_head.weight": "x.bin"})),
        "no safetensors file of the folder",
    ),
    "wrong shard": (
        _edit_index(lambda i: i["weight_map"].update({"no.such.key": i["weight_map"]["lm_head.weight"]})),
        "lacks no.such.key",
    ),
    "index without map": (_edit_index(dict.clear), "no index of weights"),
    "index no JSON": (lambda folder: (folder / "model.safetensors.index.json").write_text("{"), "no index of weights"),
    "tensor lost": (_edit_index(lambda i: i["weight_map"].pop("model.norm.weight")), "no weights for norm.weight"),
    "wrong shape": (_reshape, "has shape"),
}


@pytest.mark.parametrize(("damage", "says"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_a_finding(damage: Callable[[Path], object], says: str, tmp_path: Path) -> None:
    model = build_model(spec_of("mixtral"))
    write_hf(model, model.spec, tmp_path, max_shard_bytes=20_000)
    damage(tmp_path)
    with pytest.raises(FindingsError, match=says):
        read_hf(tmp_path, model)


def test_an_empty_folder_is_a_finding(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"no")
    with pytest.raises(FindingsError, match="only safetensors is loaded"):
        read_hf(tmp_path, build_model(spec_of("mixtral")))


def test_an_unknown_quantization_is_a_finding(tmp_path: Path) -> None:
    model = build_model(spec_of("mixtral"))
    write_hf(model, model.spec, tmp_path)
    tensors = all_tensors(tmp_path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(FindingsError, match="without a known scale"):
        read_hf(tmp_path, model)


def test_unused_tensors_are_told(tmp_path: Path) -> None:
    model = build_model(spec_of("qwen3_next"), mtp=1)
    write_hf(model, model.spec, tmp_path)
    told = read_hf(tmp_path, build_model(model.spec, mtp=0))
    assert [finding.severity for finding in told] == ["warning"]
    assert "tensors were not used: mtp.fc.weight" in told[0].problem


def test_every_name_of_the_real_models_is_known() -> None:
    """Built on the meta device: no memory, all names."""
    from threefold.engine.weights.hf_names import hf_layouts

    for name in ("deepseek-v3", "qwen3-30b-a3b", "qwen3-next-80b-a3b", "gpt-oss-20b", "mixtral-8x7b", "llama3-8b"):
        spec = MODELS[name].cut(num_layers=4)
        state = build_model(spec, device="meta").state_dict()
        keys = [piece.key for tensor in state for piece in hf_layouts(tensor, spec)[0]]
        assert len(keys) == len(set(keys))
