"""Which quantized formats of published weights are read. `read_hf` and `threefold finetune` ask before they read any.

Imported without torch.
"""

from collections.abc import Mapping
from typing import Any

from threefold.findings import Finding, FindingsError, shown

READ_FORMATS = "F64, F32, F16, BF16, fp8 in blocks with weight_scale_inv (DeepSeek) and MXFP4 (GPT-OSS)"
_METHODS = ("fp8", "mxfp4")  # quant_method of config.json


def check_stored_format(config: Mapping[str, Any]) -> None:
    """Raise one finding where config.json says that the weights are quantized in a way that nothing here reads."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return
    method = quantization.get("quant_method")
    if method is None and (quantization.get("load_in_4bit") or quantization.get("load_in_8bit")):
        method = "bitsandbytes"  # its older checkpoints say no more
    if method is None or str(method).lower() in _METHODS:
        return
    problem = f"the weights are quantized by {shown(str(method))}, which is not read"
    advice = f"give the checkpoint that they were quantized from: read are {READ_FORMATS}"
    raise FindingsError([Finding(rule="hf-weights", at="quantization_config", problem=problem, advice=advice)])
