"""Megatron Bridge's names for our models: the recipe, the model of its performance scripts, and the weights' home.

Recipe functions are checked against the wheels by tests. Names of the performance scripts are those of
`scripts/performance` in Megatron Bridge's repository, which is not in the wheels.
"""

from dataclasses import dataclass

from threefold.interop.megatron.releases import Release
from threefold.plan.plan import Plan
from threefold.spec.model import MlaSpec, ModelSpec

_TASK_WORDS = {"pretrain": ("pretrain", "pretrain_mock"), "sft": ("sft", "finetune")}


@dataclass(frozen=True, slots=True)
class BridgeModel:
    """How Megatron Bridge names one of our models."""

    module: str = ""  # under megatron.bridge.recipes
    stem: str = ""  # a recipe is STEM_pretrain_config or STEM_sft_config
    family: str = ""  # `-m` of the performance scripts; its `-mr` is the stem
    hub: str = ""  # name on the Hugging Face Hub, for a model without a recipe


BRIDGE_MODELS: dict[str, BridgeModel] = {
    "deepseek-v3": BridgeModel("deepseek.deepseek_v3", "deepseek_v3", "deepseek", "deepseek-ai/DeepSeek-V3"),
    "kimi-k2": BridgeModel("kimi.kimi_k2", "kimi_k2", "kimi", "moonshotai/Kimi-K2-Instruct"),
    "moonlight-16b-a3b": BridgeModel(
        "moonlight.moonlight_16b", "moonlight_16b", "moonlight", "moonshotai/Moonlight-16B-A3B"
    ),
    "qwen3-30b-a3b": BridgeModel("qwen.qwen3_moe", "qwen3_30b_a3b", "qwen", "Qwen/Qwen3-30B-A3B"),
    "qwen3-235b-a22b": BridgeModel("qwen.qwen3_moe", "qwen3_235b_a22b", "qwen", "Qwen/Qwen3-235B-A22B"),
    "qwen3-next-80b-a3b": BridgeModel(
        "qwen.qwen3_next", "qwen3_next_80b_a3b", "qwen", "Qwen/Qwen3-Next-80B-A3B-Instruct"
    ),
    "qwen3.5-35b-a3b": BridgeModel("qwen_vl.qwen35_vl", "qwen35_vl_35b_a3b", "qwen_vl", "Qwen/Qwen3.5-35B-A3B"),
    "qwen3.5-397b-a17b": BridgeModel("qwen_vl.qwen35_vl", "qwen35_vl_397b_a17b", "qwen_vl", "Qwen/Qwen3.5-397B-A17B"),
    "qwen3-vl-30b-a3b": BridgeModel(
        "qwen_vl.qwen3_vl", "qwen3_vl_30b_a3b", "qwen_vl", "Qwen/Qwen3-VL-30B-A3B-Instruct"
    ),
    "qwen3-vl-235b-a22b": BridgeModel(
        "qwen_vl.qwen3_vl", "qwen3_vl_235b_a22b", "qwen_vl", "Qwen/Qwen3-VL-235B-A22B-Instruct"
    ),
    "gpt-oss-20b": BridgeModel("gpt_oss.gpt_oss", "gpt_oss_20b", "gpt_oss", "openai/gpt-oss-20b"),
    "gpt-oss-120b": BridgeModel("gpt_oss.gpt_oss", "gpt_oss_120b", "gpt_oss", "openai/gpt-oss-120b"),
    "mixtral-8x7b": BridgeModel(hub="mistralai/Mixtral-8x7B-v0.1"),
    # The base model has a vocabulary of 32,000, this one the 32,768 of ours.
    "mixtral-8x22b": BridgeModel(hub="mistralai/Mixtral-8x22B-Instruct-v0.1"),
    "nemotron-3-nano": BridgeModel(
        "nemotronh.nemotron_3_nano", "nemotron_3_nano", "nemotronh", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"
    ),
    "nemotron-3.5-lightning": BridgeModel("nemotronh.nemotron_3_nano", "nemotron_3_5_lightning", "nemotronh"),
    "nemotron-3-super": BridgeModel(
        "nemotronh.nemotron_3_super", "nemotron_3_super", "nemotronh", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16"
    ),
    "nemotron-3-ultra": BridgeModel("nemotronh.nemotron_3_ultra", "nemotron_3_ultra", "nemotronh"),
    "llama3-8b": BridgeModel("llama.llama3", "llama3_8b", "llama", "meta-llama/Meta-Llama-3-8B"),
    "llama3-70b": BridgeModel("llama.llama3", "llama3_70b", "llama", "meta-llama/Meta-Llama-3-70B"),
    "llama3.1-405b": BridgeModel("llama.llama3", "llama31_405b", "llama", "meta-llama/Meta-Llama-3.1-405B"),
    "qwen3-8b": BridgeModel("qwen.qwen3", "qwen3_8b", "qwen", "Qwen/Qwen3-8B"),
}


_FRAMES = {  # recipes that lend their frame to a model without one: of text, and of text with images
    False: BRIDGE_MODELS["qwen3-30b-a3b"],
    True: BRIDGE_MODELS["qwen3-vl-30b-a3b"],
}


@dataclass(frozen=True, slots=True)
class Selection:
    """Which model a script asks Megatron Bridge for: a recipe function, or weights that it reads the shape from."""

    module: str = ""  # with the recipe function in it
    function: str = ""
    source: str = ""  # without a recipe: a name on the Hub, or a folder
    frame: tuple[str, str] = ("", "")  # without a recipe: module and function of another model's
    family: str = ""  # of the performance scripts
    stem: str = ""

    @property
    def recipe(self) -> str:
        return f"{self.module}.{self.function}" if self.function else ""


def select_model(plan: Plan, release: Release) -> Selection:
    """Without a recipe and without weights there is a frame, and no source."""
    frame = _recipe_of(_FRAMES[plan.is_vlm], plan, release)
    if plan.model_name.startswith("hf:"):
        return Selection(source=plan.model_name.removeprefix("hf:"), frame=frame)
    known = BRIDGE_MODELS.get(plan.model_name, BridgeModel())
    module, function = _recipe_of(known, plan, release)
    if not function:
        return Selection(source=known.hub, frame=frame, family=known.family, stem=known.stem)
    return Selection(module, function, family=known.family, stem=known.stem)


def _recipe_of(known: BridgeModel, plan: Plan, release: Release) -> tuple[str, str]:
    """The module and the function of a model's recipe for the plan's task; empty where the release has none."""
    offered = release.recipes.get(known.module, [])
    names = [f"{known.stem}_{word}_config" for word in _TASK_WORDS[plan.job.task]]
    function = next((name for name in names if name in offered), "")
    return f"megatron.bridge.recipes.{known.module}", function


def model_of_stem(stem: str) -> str | None:
    """Our model behind `-mr` of the performance scripts or the stem of a recipe function."""
    return next((name for name, known in BRIDGE_MODELS.items() if known.stem and known.stem == stem), None)


def model_of_recipe(function: str) -> tuple[str, str] | None:
    """Our model and task behind a recipe function, also behind one of newer releases (`STEM_pretrain_8gpu_...`)."""
    name = function.rpartition(".")[2].rpartition(":")[2]
    for task, words in _TASK_WORDS.items():
        for word in words:
            stem, found, _ = name.partition(f"_{word}_")
            if found and (model := model_of_stem(stem)):
                return model, task
    return None


def dataset_kind(plan: Plan) -> str:
    """Which of Bridge's dataset classes the recipes for a plan have: vision-language models have their own."""
    return "vlm" if plan.is_vlm else plan.job.task


def model_kind(model: ModelSpec) -> str:
    """Which of Megatron's model classes holds the fields of a model."""
    if model.mamba is not None:
        return "hybrid"
    if model.vision is not None:
        return "vlm"
    return "mla" if isinstance(model.attention, MlaSpec) else "gpt"
