"""Models, chips and Hugging Face configurations against published figures and transformers."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hf_configs import CONFIGS, TOTALS
from hypothesis import given
from hypothesis import strategies as st

from threefold.findings import FindingsError
from threefold.plan.parse import parse
from threefold.spec.candidates import FLEX, dispatcher_candidates, precision_candidates, runs_dispatcher
from threefold.spec.chips import CHIPS, NATIVE_FORMATS, ChipSpec
from threefold.spec.families import BY_TYPE
from threefold.spec.hf import check_sizes, model_from_config, model_from_dict
from threefold.spec.model import GqaSpec, MlaSpec, ModelSpec, RopeScaling
from threefold.spec.models import MODELS
from threefold.spec.params import Params, count_params
from threefold.spec.stacks import LACKS, STACKS, bridge_lacks

# transformers 5.22.2 models of the published configurations on the meta device, MTP not among them.
EXACT = {
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "qwen3-8b": 8_190_735_360,
    "mixtral-8x7b": 46_702_792_704,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
}
WITH_TOTAL = [name for name, model in MODELS.items() if model.published_total]
WITH_ACTIVE = [name for name, model in MODELS.items() if model.published_active]


@pytest.mark.parametrize("name", EXACT)
def test_exact_counts(name: str) -> None:
    assert count_params(MODELS[name]).main == EXACT[name]


def last_digit(published: float) -> float:
    """What one unit in the last published digit is worth: 0.1e9 for 30.5e9, 1e9 for 671e9."""
    billions = f"{published / 1e9:g}"
    return 1e9 * 10.0 ** -len(billions.partition(".")[2])


@pytest.mark.parametrize("name", WITH_TOTAL)
def test_total_is_the_published_one(name: str) -> None:
    model = MODELS[name]
    assert model.published_total
    # One unit in the last digit: some authors round, some cut off.
    tolerance = last_digit(model.published_total)
    if name == "kimi-k2":
        tolerance = 14e9  # the report says 1.04T; the published configuration gives 1.026T
    params = count_params(model)
    total = params.main
    if name == "glm-4.5":
        total += params.mtp - params.embedding - params.head  # the report says: with MTP, without both tables
    assert total == pytest.approx(model.published_total, abs=tolerance)


def active(name: str, params: Params) -> int:
    """Authors differ in what a token meets."""
    if name.startswith("gpt-oss"):
        return params.active_matmul  # the model card says: without the embedding
    if name in ("deepseek-v3", "deepseek-v3-no-mtp", "kimi-k2", "glm-5.2", "nemotron-3-ultra", "minimax-m2"):
        return params.active_matmul  # unsaid; of the two counts the one that rounds to their figure
    if name.startswith("glm-4.5"):
        return params.active_matmul - params.head  # the report says: without both tables
    if name == "qwen3-next-80b-a3b":
        return params.active_matmul - params.head  # unsaid; 3.9B with both tables, 3.3B without
    return params.active


@pytest.mark.parametrize("name", WITH_ACTIVE)
def test_active_is_the_published_one(name: str) -> None:
    model = MODELS[name]
    assert model.published_active
    # One unit in the last digit, as for the total.
    tolerance = last_digit(model.published_active)
    assert active(name, count_params(model)) == pytest.approx(model.published_active, abs=tolerance)


def test_deepseek_mtp_by_hand() -> None:
    query = 7168 * 1536 + 1536 + 1536 * 128 * 192
    key_value = 7168 * 576 + 512 + 512 * 128 * 256
    attention = query + key_value + 128 * 128 * 7168
    moe = 257 * 3 * 7168 * 2048 + 256 * 7168  # routed and shared experts, router
    join = 2 * 7168 * 7168
    norms = 5 * 7168  # two of the layer; one each for hidden state, embedding and output
    assert count_params(MODELS["deepseek-v3"]).mtp == attention + moe + join + norms == 11_610_067_968


def test_shared_mtp_depths_count_once() -> None:
    lightning = MODELS["nemotron-3.5-lightning"]
    assert count_params(lightning, mtp_layers=2).mtp == count_params(lightning, mtp_layers=1).mtp
    deepseek = MODELS["deepseek-v3"]
    assert count_params(deepseek, mtp_layers=2).mtp == 2 * count_params(deepseek, mtp_layers=1).mtp


@pytest.mark.parametrize("model", MODELS.values(), ids=str)
def test_catalogue_is_sane(model: ModelSpec) -> None:
    check_sizes(model)
    assert MODELS[model.name] is model
    assert model.source
    assert model.family in BY_TYPE
    assert len(model.layers) == model.num_layers
    # A pattern repeats whole, or a layer of the last period would be missing.
    assert model.num_layers % len(model.pattern) == 0
    mixers = {layer.mixer for layer in model.layers}
    assert ("attention" in mixers) == (model.attention is not None)
    assert ("window" in mixers) == (model.local_attention is not None)
    assert ("delta" in mixers) == (model.delta is not None)
    assert ("mamba" in mixers) == (model.mamba is not None)
    ffns = [layer.ffn for layer in model.layers]
    assert ("moe" in ffns) == model.is_moe
    assert "dense" not in ffns or model.dense_dim > 0
    if model.is_moe and model.num_dense_layers:
        assert ffns[: model.num_dense_layers + 1] == ["dense"] * model.num_dense_layers + ["moe"]
    if model.moe:
        assert model.moe.num_experts % model.moe.num_groups == 0
        assert model.moe.top_k <= model.moe.num_experts // model.moe.num_groups * model.moe.top_groups


def test_every_stack_family_is_readable() -> None:
    assert all(stack.families <= set(BY_TYPE) for stack in STACKS.values())


@pytest.mark.parametrize(
    "family",
    [
        *("qwen3_moe", "deepseek_v3", "qwen3_next", "gpt_oss", "mixtral", "qwen3_vl_moe"),
        *("glm4_moe", "minimax_m2", "qwen2_moe"),
    ],
)
def test_a_tiny_model_for_each_trainable_family(family: str) -> None:
    tiny = [m for m in MODELS.values() if m.family == family and m.name.startswith("tiny-")]
    # A laptop CPU trains it: under five million parameters.
    assert any(count_params(model).total < 5_000_000 for model in tiny)


def test_cutting_a_model() -> None:
    cut = MODELS["deepseek-v3"].cut(num_layers=4, num_experts=64, vocab=1000)
    assert (cut.num_layers, cut.num_experts, cut.vocab, cut.published_total) == (4, 64, 1000, None)
    # By hand: 3 of the 4 layers are dense; an expert is 3 x 7168 x 2048.
    assert count_params(cut).experts == 64 * 3 * 7168 * 2048
    assert MODELS["deepseek-v3"].num_experts == 256


def write(folder: Path, config: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


def read(model_type: str, **changes: Any) -> ModelSpec:
    return model_from_dict({"model_type": model_type, **CONFIGS[model_type], **changes}, model_type, "here")


def read_text(model_type: str, **changes: Any) -> ModelSpec:
    """With changes of the text model, which may be a table of its own."""
    inner = CONFIGS[model_type].get("text_config")
    return read(model_type, **({"text_config": {**inner, **changes}} if inner else changes))


def test_there_is_a_configuration_for_each_reader() -> None:
    assert set(CONFIGS) == set(BY_TYPE) == set(TOTALS)


@pytest.mark.parametrize("model_type", CONFIGS)
def test_counts_are_those_of_transformers(model_type: str, tmp_path: Path) -> None:
    write(tmp_path, {"model_type": model_type, **CONFIGS[model_type]})
    parsed = parse({"model": f"hf:{tmp_path}"})
    assert not parsed.findings
    assert parsed.plan
    assert count_params(parsed.plan.model).main == TOTALS[model_type]


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("deepseek_v3", "deepseek-v3"),
        ("gemma4", "gemma-4-26b-a4b"),
        ("glm_moe_dsa", "glm-5.2"),
        ("gpt_oss", "gpt-oss-20b"),
        ("kimi_k2", "kimi-k2"),
        ("llama", "llama3-8b"),
        ("mixtral", "mixtral-8x7b"),
        ("nemotron_h", "nemotron-3-nano"),
        ("qwen3", "qwen3-8b"),
        ("qwen3_moe", "qwen3-30b-a3b"),
        ("qwen3_vl_moe", "qwen3-vl-30b-a3b"),
    ],
)
def test_configuration_and_catalogue_agree(model_type: str, name: str) -> None:
    """Two ways to one fact: the widths of a published configuration, and the entry of the catalogue."""
    found, known = read(model_type), MODELS[name]
    assert (found.dim, found.vocab, found.tied) == (known.dim, known.vocab, known.tied)
    assert (found.glu, found.vision, found.mamba) == (known.glu, known.vision, known.mamba)
    assert found.family == known.family
    assert found.moe == known.moe
    assert set(found.pattern) <= set(known.pattern) | {"-"}
    same_shape = ("num_heads", "num_kv_heads", "head_dim", "bias", "qk_norm", "sinks", "shared_kv", "window")
    for mine, theirs in ((found.attention, known.attention), (found.local_attention, known.local_attention)):
        if isinstance(mine, MlaSpec):
            assert mine == theirs
        elif isinstance(mine, GqaSpec):
            assert all(getattr(mine, part) == getattr(theirs, part) for part in same_shape)


ACTIVATION_KEYS = {"gemma4": "hidden_activation", "gemma4_text": "hidden_activation", "nemotron_h": "mlp_hidden_act"}


@pytest.mark.parametrize("model_type", [name for name in CONFIGS if name != "gpt_oss"])  # there transformers has one
def test_no_family_ignores_its_activation(model_type: str) -> None:
    key = ACTIVATION_KEYS.get(model_type, "hidden_act")
    with pytest.raises(FindingsError, match=f"{key} is null"):  # as transformers, which takes no null here
        read_text(model_type, **{key: None})
    found = read_text(model_type, **{key: "quick_gelu"})
    assert found.activation == "quick_gelu"
    assert read_text(model_type, **{key: "swish"}).activation == ("limited silu" if found.streams else "silu")
    for target, lacks in LACKS.items():
        if found.family in STACKS[target].families:
            assert any("'quick_gelu'" in problem for problem, _ in lacks(found)), target


OWN_ROPE = ("gemma4", "gemma4_text", "nemotron_h", "phimoe")


@pytest.mark.parametrize("model_type", [name for name in CONFIGS if name not in OWN_ROPE])
@pytest.mark.parametrize("kind", ["dynamic", "ntk"])
def test_a_rotary_scaling_that_a_stack_has_not_is_said(model_type: str, kind: str) -> None:
    scaling = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 4096}
    found = read_text(model_type, rope_scaling=scaling, rope_parameters=None)
    for target, lacks in LACKS.items():
        if found.family in STACKS[target].families:
            said = any(f"rotary scaling '{kind}'" in problem for problem, _ in lacks(found))
            assert said or (target == "threefold" and kind == "dynamic" and found.vision is None), target


def test_megatron_bridge_has_the_scaling_of_llama_for_llama_only() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert not list(bridge_lacks(read("llama", rope_scaling=scaling, hidden_act="gelu")))
    assert list(bridge_lacks(read("qwen3", rope_scaling=scaling)))


def test_models_of_the_catalogue_lack_nothing_where_their_family_runs() -> None:
    for model in MODELS.values():
        if model.family in STACKS["megatron-bridge"].families:
            assert not list(bridge_lacks(model)), model.name


def test_fields_known_by_hand() -> None:
    deepseek = read("deepseek_v3")
    assert (deepseek.num_layers, deepseek.num_dense_layers, deepseek.mtp_layers) == (5, 3, 1)
    assert [layer.ffn for layer in deepseek.layers] == ["dense", "dense", "dense", "moe", "moe"]
    assert read("qwen3_next").pattern == "dddt"
    assert read("qwen3_next", full_attention_interval=2).pattern == "dtdt"
    assert read("gpt_oss", layer_types=None, num_hidden_layers=3).pattern == "wtw"
    assert read("nemotron_h").pattern == "MEM*E-"
    blocks = ["mamba", "moe", "attention", "mlp"]
    assert read("nemotron_h", hybrid_override_pattern=None, layers_block_type=blocks).pattern == "ME*-"
    vision = read("qwen3_vl_moe").vision
    assert vision
    assert (vision.depth, vision.deepstack) == (27, (8, 16, 24))


def refused(config: Any, folder: Path) -> str:
    """The one finding of a configuration that cannot be used."""
    with pytest.raises(FindingsError) as caught:
        model_from_config(write(folder, config))
    (finding,) = caught.value.findings
    assert (finding.rule, finding.at) == ("model-config", "model")
    assert finding.fix_text
    return finding.problem


@pytest.mark.parametrize("model_type", CONFIGS)
def test_missing_keys_are_named(model_type: str, tmp_path: Path) -> None:
    config = {"model_type": model_type, **copy.deepcopy(CONFIGS[model_type])}
    del config.get("text_config", config)["hidden_size"]
    assert "'hidden_size'" in refused(config, tmp_path)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ([], "no JSON object"),
        ("qwen3_moe", "no JSON object"),
        ({}, "model_type None"),
        ({"model_type": "qwen4_moe"}, "'qwen4_moe' is not supported"),
        ({"model_type": ["llama"]}, "is not supported"),
        ({"model_type": "qwen3_vl_moe", "text_config": 3}, "text_config is 3"),
        ({"model_type": "qwen3_vl_moe", **CONFIGS["qwen3_moe"]}, "lacks"),  # transformers reads text_config only
        ({"model_type": "llama", **CONFIGS["llama"], "num_attention_heads": 0}, "no usable"),
        ({"model_type": "llama", **CONFIGS["llama"], "vocab_size": "4096"}, "vocab is '4096'"),
        ({"model_type": "llama", **CONFIGS["llama"], "hidden_size": 4096.5}, "dim is 4096.5"),
        ({"model_type": "llama", **CONFIGS["llama"], "vocab_size": -1}, "vocab is -1"),
        ({"model_type": "deepseek_v3", **CONFIGS["deepseek_v3"], "hidden_size": None}, "dim is None"),
        ({"model_type": "llama", **CONFIGS["llama"], "num_hidden_layers": 10**12}, "num_layers is"),
        ({"model_type": "gpt_oss", **CONFIGS["gpt_oss"], "num_hidden_layers": 10**12}, "num_hidden_layers is"),
        ({"model_type": "llama", **CONFIGS["llama"], "intermediate_size": 0}, "intermediate_size"),
        (
            {"model_type": "llama", **CONFIGS["llama"], "num_attention_heads": 4, "num_key_value_heads": 3},
            "4 heads cannot share 3 key/value heads",
        ),
        (
            {"model_type": "qwen3_next", **CONFIGS["qwen3_next"], "linear_num_key_heads": 5},
            "value heads cannot share 5 key heads",
        ),
        (
            {"model_type": "nemotron_h", **CONFIGS["nemotron_h"], "n_groups": 7},
            "Mamba heads cannot share 7 groups",
        ),
        ({"model_type": "llama", **CONFIGS["llama"], "rope_theta": 10**400}, "no usable"),
        (
            {"model_type": "gpt_oss", **CONFIGS["gpt_oss"], "layer_types": ["full_attention"]},
            "layer_types has 1 layers",
        ),
        ({"model_type": "gpt_oss", **CONFIGS["gpt_oss"], "layer_types": ["a", "b"]}, "unknown layer types"),
        ({"model_type": "nemotron_h", **CONFIGS["nemotron_h"], "hybrid_override_pattern": "MXE"}, "unknown layers"),
        ({"model_type": "qwen3_moe", **CONFIGS["qwen3_moe"], "mlp_only_layers": [0]}, "mlp_only_layers"),
    ],
)
def test_bad_configurations(config: Any, said: str, tmp_path: Path) -> None:
    assert said in refused(config, tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff\xfe", b"\0" * 100, b"[" * 100_000, b'{"a": ' * 50_000, b"9" * 5000]
)
def test_files_that_are_no_json(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(FindingsError) as caught:
        model_from_config(tmp_path)
    assert len(caught.value.findings) == 1


@pytest.mark.parametrize("path", ["", "nowhere", "a\0b", "x" * 5000, "~nobody-of-this-name/config.json"])
def test_paths_that_lead_nowhere(path: str, tmp_path: Path) -> None:
    parsed = parse({"model": f"hf:{path}"}, folder=tmp_path)
    assert parsed.plan is None
    assert [finding.rule for finding in parsed.findings] == ["model-config"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(list(CONFIGS)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def spoilt_configs(draw: st.DrawFn) -> dict[str, Any]:
    """A good configuration with some keys taken away or overwritten."""
    model_type = draw(st.sampled_from(list(CONFIGS)))
    config = {"model_type": model_type, **copy.deepcopy(CONFIGS[model_type])}
    extra = ["rope_parameters", "layer_types", "per_layer_config", "full_attention_interval", "mtp_num_hidden_layers"]
    for _ in range(draw(st.integers(1, 3))):
        places = [config, *(part for part in config.values() if isinstance(part, dict))]
        place = draw(st.sampled_from(places))
        key = draw(st.sampled_from([*place, *extra]))
        if draw(st.booleans()):
            place.pop(key, None)
        else:
            place[key] = draw(JSON)
    return config


def usable_or_refused(config: dict[str, Any]) -> None:
    refusal = None
    try:
        model = model_from_dict(config, "fuzzed", "here")
    except FindingsError as error:
        refusal = error
    if refusal:
        assert len(refusal.findings) == 1
        return
    assert len(model.layers) == model.num_layers
    assert count_params(model).total > 0


@given(spoilt_configs())
def test_spoilt_configurations_never_raise_anything_else(config: dict[str, Any]) -> None:
    usable_or_refused(config)


@given(st.dictionaries(st.sampled_from(["model_type", "text_config", "hidden_size"]) | st.text(), JSON))
def test_random_configurations_never_raise_anything_else(config: dict[str, Any]) -> None:
    usable_or_refused(config)


@pytest.mark.parametrize("chip", CHIPS.values(), ids=str)
def test_chips_are_complete(chip: ChipSpec) -> None:
    assert CHIPS[chip.name] is chip
    assert chip.sources
    assert all(chip.sources.values())
    facts = [chip.memory_bytes, chip.memory_bandwidth, chip.domain, chip.domain_bandwidth, chip.network_bandwidth]
    assert all(fact > 0 for fact in [*facts, chip.host_bandwidth, chip.gpus_per_node, *chip.peak_flops.values()])
    assert {"fp32", "bf16"} <= set(chip.peak_flops)
    assert chip.domain >= chip.gpus_per_node
    assert chip.domain_bandwidth > chip.network_bandwidth
    assert chip.architecture in NATIVE_FORMATS
    assert all(one.value in NATIVE_FORMATS[chip.architecture] for one in precision_candidates(chip))


@pytest.mark.parametrize("chip", [chip for chip in CHIPS.values() if chip.name != "cpu"], ids=str)
def test_halving_the_width_doubles_the_rate(chip: ChipSpec) -> None:
    peak = chip.peak_flops
    # Datasheets round each rate for itself: a thousandth. TF32, listed as fp32, is half of bf16.
    assert peak["bf16"] == pytest.approx(2 * peak["fp32"], rel=1e-3)
    assert ("fp8" in peak) == (chip.architecture in ("hopper", "blackwell"))
    if "fp8" in peak:
        assert peak["fp8"] == pytest.approx(2 * peak["bf16"], rel=1e-3)
    if "fp4" in peak:
        # Blackwell Ultra gave FP4 three times the rate of FP8.
        assert peak["fp4"] / peak["fp8"] == pytest.approx(3 if chip.name.endswith("b300") else 2, rel=1e-3)


def test_published_chip_figures() -> None:
    # NVIDIA's datasheets: 80, 141, 192 and 288 GB of HBM; what a driver shows is never more than that by 1%.
    for name, gigabytes in {"a100": 80, "h100": 80, "h200": 141, "b200": 192, "gb200": 192, "gb300": 288}.items():
        assert CHIPS[name].memory_bytes <= gigabytes * 2**30 * 1.01
        assert CHIPS[name].memory_bytes >= gigabytes * 1e9 * 0.93  # and not less by more than reserves take
    assert CHIPS["h100"].peak_flops["bf16"] == pytest.approx(989e12, rel=1e-3)  # the datasheet rounds to 1 TFLOP/s
    assert (CHIPS["gb200"].domain, CHIPS["gb200"].gpus_per_node, CHIPS["gb200"].is_rack_scale) == (72, 4, True)
    assert not CHIPS["h100"].is_rack_scale


def test_dispatchers_know_their_chips() -> None:
    """What Bridge 0.6.2 activates: DeepEP up to capability 9 and on B200 and B300, HybridEP up to capability 10."""
    runs = {name: {chip.name for chip in CHIPS.values() if runs_dispatcher(name, chip)} for name in FLEX}
    assert {"a100", "h100", "h200", "b200", "b300"} == runs["deepep"]
    assert runs["hybridep"] == runs["deepep"] | {"gb200", "gb300"}


@pytest.mark.parametrize("chip", CHIPS.values(), ids=str)
def test_hardware_only_names_candidates(chip: ChipSpec) -> None:
    """A plan starts with all-to-all and BF16 on every GPU, as upstream's workflow of 2026-08-01 has it."""
    assert dispatcher_candidates(chip)[0].value == "alltoall"
    assert precision_candidates(chip)[0].value == ("fp32" if chip.architecture == "cpu" else "bf16")
    assert all(one.since >= "2026-08" and one.evidence for one in dispatcher_candidates(chip))


def test_rope_parameters_win_over_older_keys() -> None:
    """transformers 5 writes both for Qwen3-Next and runs rope_parameters."""
    rope = {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5}
    config = {**CONFIGS["qwen3_next"], "model_type": "qwen3_next", "rope_theta": 1e4, "rope_parameters": rope}
    model = model_from_dict(config, name="m", source="test")
    assert isinstance(model.attention, GqaSpec)
    assert (model.attention.rope_theta, model.attention.rope_fraction) == (5e5, 0.5)


def test_yarn_reads_from_either_key() -> None:
    """gpt-oss has rope_scaling before transformers 5, rope_parameters since."""
    old = {**CONFIGS["gpt_oss"], "model_type": "gpt_oss"}
    new = {key: value for key, value in old.items() if key not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = {**old["rope_scaling"], "rope_theta": old["rope_theta"]}
    models = [model_from_dict(config, name="m", source="test") for config in (old, new)]
    assert models[0] == models[1]
    assert isinstance(models[0].attention, GqaSpec)
    assert models[0].attention.rope_scaling == RopeScaling(factor=32.0, original_len=4096, truncate=False)
