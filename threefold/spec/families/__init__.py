"""The model families that we know, one file each. A new one is a file, and a line here."""

from threefold.spec.families.deepseek import DEEPSEEK_V3_FAMILY, DEEPSEEK_V32, GLM4_MOE_LITE, GLM_MOE_DSA
from threefold.spec.families.deepseek_v4 import DEEPSEEK_V4
from threefold.spec.families.dots1 import DOTS1
from threefold.spec.families.ernie4_5_moe import ERNIE4_5_MOE
from threefold.spec.families.exaone_moe import EXAONE_MOE
from threefold.spec.families.gemma4 import GEMMA4
from threefold.spec.families.glm4_moe import GLM4_MOE, SOLAR_OPEN
from threefold.spec.families.gpt_oss import GPT_OSS
from threefold.spec.families.granitemoe import GRANITEMOE
from threefold.spec.families.hunyuan_v1_moe import HUNYUAN_V1_MOE
from threefold.spec.families.hy_v3 import HY_V3
from threefold.spec.families.llama import LLAMA, MIXTRAL
from threefold.spec.families.minimax_m2 import MINIMAX_M2_FAMILY
from threefold.spec.families.nemotron_h import NEMOTRON_H
from threefold.spec.families.olmoe import OLMOE
from threefold.spec.families.phimoe import PHIMOE
from threefold.spec.families.qwen2_moe import QWEN2_MOE
from threefold.spec.families.qwen3 import QWEN3, QWEN3_MOE, QWEN3_VL_MOE
from threefold.spec.families.qwen3_next import QWEN3_NEXT_FAMILY, QWEN35
from threefold.spec.family import Family

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        DEEPSEEK_V3_FAMILY,
        QWEN3_MOE,
        QWEN3_NEXT_FAMILY,
        QWEN35,
        QWEN3_VL_MOE,
        GPT_OSS,
        MIXTRAL,
        NEMOTRON_H,
        GLM_MOE_DSA,
        DEEPSEEK_V32,
        DEEPSEEK_V4,
        GEMMA4,
        LLAMA,
        QWEN3,
        GLM4_MOE,
        QWEN2_MOE,
        OLMOE,
        MINIMAX_M2_FAMILY,
        ERNIE4_5_MOE,
        DOTS1,
        HUNYUAN_V1_MOE,
        GRANITEMOE,
        PHIMOE,
        EXAONE_MOE,
        GLM4_MOE_LITE,
        HY_V3,
        SOLAR_OPEN,
    )
}
BY_TYPE: dict[str, Family] = {kind: family for family in FAMILIES.values() for kind in family.types}  # by model_type
