"""Reads a Hugging Face checkpoint folder as engine tensors, one at a time.

`open_hf` checks names and shapes of the whole checkpoint before any tensor is read. `import_hf` iterates over the
result; `read_hf` fills a model with it.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from threefold.engine.models.decoder import Decoder
from threefold.engine.weights.hf_names import HfTensor, Layout, duplicated_keys, hf_layouts, stored_keys
from threefold.engine.weights.model_shapes import tensors_on_meta
from threefold.engine.weights.safetensors_files import SafetensorsFolder, abbreviate, finding, refuse
from threefold.engine.weights.stored_formats import check_stored_format
from threefold.findings import Finding, FindingsError
from threefold.spec.model import ModelSpec

_PLAIN = {"F64", "F32", "F16", "BF16"}
_MOST_COUNTED = 10_000  # names that are looked for until the rest is left out
_MOST_FINDINGS = 100


@dataclass(frozen=True)
class HfWeights:
    """The weights of a checkpoint for one model. Iterating gives the engine's names and tensors."""

    checkpoint: SafetensorsFolder
    hf_tensors: dict[str, Layout]  # by engine tensor
    shapes: dict[str, tuple[int, ...]]  # of the engine tensors
    findings: list[Finding]  # warnings about tensors that were dequantized or not used

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Engine name and tensor, in the stored dtype, or in bf16 if the tensor was quantized."""
        for name, hf_tensors in self.hf_tensors.items():
            yield name, self._assemble(name, hf_tensors)

    def _assemble(self, name: str, hf_tensors: Layout) -> Tensor:
        engine_tensor = None
        for hf_tensor in hf_tensors:
            value = _load(self.checkpoint, hf_tensor)
            if engine_tensor is None:
                engine_tensor = torch.empty(self.shapes[name], dtype=value.dtype)
            hf_tensor.write(engine_tensor, value)
        assert engine_tensor is not None
        return engine_tensor


def open_hf(folder: Path, spec: ModelSpec, mtp: int | None = None) -> HfWeights:
    """Find every tensor of the model and check its shape. Raises all problems at once; no tensor is read yet."""
    checkpoint = SafetensorsFolder(folder)
    check_stored_format(checkpoint.config)
    try:
        tensors = tensors_on_meta(spec, mtp, len(checkpoint.file_of))
    except ValueError as error:
        raise refuse(
            f"these are no weights of the model in config.json: {error}", "use the config.json beside them"
        ) from None
    num_mtp = len({name.split(".")[1] for name in tensors if name.startswith("mtp.")})
    chosen, problems, used = {}, [], set(duplicated_keys(spec, max(spec.mtp_layers, num_mtp)))
    for name, tensor in tensors.items():
        layouts = hf_layouts(name, spec)
        layout = _choose_layout(layouts, tensor, checkpoint)
        if layout is None:
            wanted = (key for part in layouts[0] for key in stored_keys(part))
            missing = list(islice((key for key in wanted if key not in checkpoint.file_of), _MOST_COUNTED))
            problems.append(finding(f"no weights for {name}: {abbreviate(missing)} missing", "complete the checkpoint"))
            continue
        problems += islice((problem for part in layout for problem in _check(part, tensor, checkpoint)), _MOST_FINDINGS)
        used |= {key for part in layout for key in stored_keys(part)}
        chosen[name] = layout
        if len(problems) >= _MOST_FINDINGS:
            break
    if problems:
        raise FindingsError(problems[:_MOST_FINDINGS])
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    return HfWeights(checkpoint, chosen, shapes, list(_warnings(checkpoint, chosen, used)))


def read_hf(folder: Path, model: Decoder) -> list[Finding]:
    """Fill `model`, converting to its dtype. Returns warnings about tensors that were dequantized or not used."""
    weights = open_hf(folder, model.spec, model.num_mtp)
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in weights:
            state[name].copy_(tensor)
    return weights.findings


def _choose_layout(layouts: list[Layout], tensor: Tensor, checkpoint: SafetensorsFolder) -> Layout | None:
    """The first layout whose tensors are all there, and of several the first whose shapes fit too."""
    complete = [layout for layout in layouts if _is_complete(layout, checkpoint)]
    fitting = (
        layout for layout in complete if not any(next(_check(part, tensor, checkpoint), None) for part in layout)
    )
    return complete[0] if len(complete) == 1 else next(fitting, complete[0] if complete else None)


def _is_complete(layout: Layout, checkpoint: SafetensorsFolder) -> bool:
    return all(key in checkpoint.file_of for part in layout for key in stored_keys(part))


def _scale_key(hf_tensor: HfTensor, checkpoint: SafetensorsFolder) -> str | None:
    key = f"{hf_tensor.key}_scale_inv"
    return key if key in checkpoint.file_of else None


def _check(hf_tensor: HfTensor, tensor: Tensor, checkpoint: SafetensorsFolder) -> Iterator[Finding]:
    key = stored_keys(hf_tensor)[0]
    expected, found, scale = hf_tensor.shape(tensor), checkpoint.shape(key), _scale_key(hf_tensor, checkpoint)
    if hf_tensor.stored == "mxfp4":
        yield from _check_mxfp4(hf_tensor, expected, checkpoint)
        return
    if expected != found:
        yield finding(f"{key} has shape {found}, the model wants {expected}", "use the config.json beside it")
    elif scale is not None:
        yield from _check_fp8_scale(key, scale, checkpoint)
    elif checkpoint.dtype(key) not in (_PLAIN if tensor.is_floating_point() else ("I64", "I32")):
        problem = f"{key} is stored as {checkpoint.dtype(key)} without a known scale"
        yield finding(problem, "use the bf16, block-fp8 or MXFP4 checkpoint")


def _check_mxfp4(hf_tensor: HfTensor, expected: tuple[int, ...], checkpoint: SafetensorsFolder) -> Iterator[Finding]:
    blocks, scales = stored_keys(hf_tensor)
    found, of_scales = checkpoint.shape(blocks), checkpoint.shape(scales)
    whole = (*found[:-2], found[-2] * found[-1] * 2) if len(found) >= 2 else found
    if expected != whole:
        yield finding(f"{blocks} has shape {found}, the model wants {expected}", "use the config.json beside it")
    elif found[-1] != MXFP4_BLOCK_BYTES or of_scales != found[:-1]:
        yield finding(f"{scales} has shape {of_scales} for blocks of {found}", "download the checkpoint again")
    elif {checkpoint.dtype(blocks), checkpoint.dtype(scales)} != {"U8"}:
        yield finding(f"{blocks} and its scales are not stored as bytes", "download the checkpoint again")


def _check_fp8_scale(key: str, scale: str, checkpoint: SafetensorsFolder) -> Iterator[Finding]:
    """One scale for each block of a matrix."""
    shape, found, block = checkpoint.shape(key), checkpoint.shape(scale), checkpoint.fp8_block
    wanted = tuple(-(-size // side) for size, side in zip(shape, block, strict=False))
    if len(shape) != 2 or found != wanted:
        problem = f"{scale} has shape {found}; {key} of shape {shape} in blocks of {block} wants {wanted}"
        yield finding(problem, "use the config.json beside it, or download the checkpoint again")
    elif checkpoint.dtype(scale) not in _PLAIN:
        yield finding(f"{scale} is stored as {checkpoint.dtype(scale)}", "use scales in 16 or 32 bits")


def _load(checkpoint: SafetensorsFolder, hf_tensor: HfTensor) -> Tensor:
    parts = [checkpoint.tensor(key) for key in stored_keys(hf_tensor)]
    if hf_tensor.stored == "mxfp4":
        return dequantize_mxfp4(*parts)
    scale = _scale_key(hf_tensor, checkpoint)
    return (
        parts[0] if scale is None else dequantize_fp8_blocks(parts[0], checkpoint.tensor(scale), checkpoint.fp8_block)
    )


def _warnings(checkpoint: SafetensorsFolder, chosen: dict[str, Layout], used: set[str]) -> Iterator[Finding]:
    kinds: Counter[str] = Counter()
    for hf_tensor in (part for layout in chosen.values() for part in layout):
        scale = _scale_key(hf_tensor, checkpoint)
        if hf_tensor.stored == "mxfp4":
            kinds["MXFP4"] += 1
        elif scale is not None:
            kinds["block fp8"] += 1
            used.add(scale)
    for kind, number in kinds.items():
        yield _warning(f"{number} {kind} tensors were dequantized to bf16", "training goes on from the rounded weights")
    unused = sorted(key for key in checkpoint.file_of if key not in used and not key.endswith("rotary_emb.inv_freq"))
    if unused:
        yield _warning(f"{len(unused)} tensors were not used: {abbreviate(unused)}", "expected when MTP is off or tied")


def _warning(problem: str, advice: str) -> Finding:
    return Finding(rule="hf-weights", at="weights", problem=problem, advice=advice, severity="warning")


# The 16 values of fp4 e2m1: OCP Microscaling Formats specification 1.0, section 5.3.3.
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E8M0_BIAS = 127
MXFP4_BLOCK_BYTES = 16  # 32 values that share a scale


def dequantize_fp8_blocks(weight_MN: Tensor, scale_mn: Tensor, block: tuple[int, int]) -> Tensor:
    """`scale_mn` (`weight_scale_inv` in the file) has one factor for each block; blocks at the edges may be smaller."""
    rows, columns = weight_MN.shape
    factor = scale_mn.repeat_interleave(block[0], dim=0)[:rows].repeat_interleave(block[1], dim=1)[:, :columns]
    return (weight_MN.to(torch.float32) * factor).to(torch.bfloat16)


def dequantize_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """(..., n, 16) bytes of two values each, the low four bits first, and (..., n) exponents -> (..., n * 32)."""
    table = torch.tensor(_FP4, dtype=torch.bfloat16, device=blocks.device)
    values = torch.stack([table[(blocks & 0x0F).long()], table[(blocks >> 4).long()]], dim=-1).flatten(-2)
    exponent = scales.to(torch.int32) - _E8M0_BIAS
    return torch.ldexp(values.to(torch.float32), exponent[..., None]).to(torch.bfloat16).flatten(-2)
