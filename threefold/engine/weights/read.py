"""A Hugging Face checkpoint folder into the engine, one engine tensor at a time."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from threefold.engine.models.build import build_model
from threefold.engine.models.decoder import Decoder
from threefold.engine.weights.files import Checkpoint, finding, some
from threefold.engine.weights.names import Piece, copies, covers, tensors_of
from threefold.engine.weights.quantized import from_fp8_blocks, from_mxfp4
from threefold.findings import Finding, FindingsError
from threefold.spec.model import ModelSpec

_PLAIN = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class Source:
    """What a checkpoint offers for a model: the pieces of every engine tensor, and what to tell the user."""

    checkpoint: Checkpoint
    pieces: dict[str, list[Piece]]
    shapes: dict[str, tuple[int, ...]]
    findings: list[Finding]  # warnings: dequantised, unused

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Engine name and tensor, in the stored dtype (bf16 where it was quantised)."""
        for name, pieces in self.pieces.items():
            yield name, self._assemble(name, pieces)

    def _assemble(self, name: str, pieces: list[Piece]) -> Tensor:
        whole = None
        for piece in pieces:
            value = _load(self.checkpoint, piece)
            if whole is None:
                whole = torch.empty(self.shapes[name], dtype=value.dtype)
            piece.write(whole, value)
        assert whole is not None
        return whole


def open_hf(folder: Path, spec: ModelSpec, mtp: int | None = None) -> Source:
    """Find every tensor and check its shape before any is read; raises all that is wrong at once."""
    checkpoint = Checkpoint(folder)
    model = build_model(spec, mtp, device="meta")
    pieces, problems, used = {}, [], set(copies(spec, max(spec.mtp_layers, model.num_mtp)))
    for name, tensor in model.state_dict().items():
        options = covers(name, spec)
        found = next((option for option in options if _held(option, checkpoint)), None)
        if found is None:
            lost = [key for piece in options[0] for key in tensors_of(piece) if key not in checkpoint.file_of]
            problems.append(finding(f"no weights for {name}: {some(lost)} missing", "complete the checkpoint"))
            continue
        problems += [problem for piece in found for problem in _check(piece, tensor, checkpoint)]
        used |= {key for piece in found for key in tensors_of(piece)}
        pieces[name] = found
    if problems:
        raise FindingsError(problems)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return Source(checkpoint, pieces, shapes, list(_tell(checkpoint, pieces, used)))


def read_hf(folder: Path, model: Decoder) -> list[Finding]:
    """Fill `model`, converting to its dtype. Returns warnings: what was dequantised, what was not used."""
    source = open_hf(folder, model.spec, model.num_mtp)
    state = model.state_dict()
    with torch.no_grad():
        for name, tensor in source:
            state[name].copy_(tensor)
    return source.findings


def _held(option: list[Piece], checkpoint: Checkpoint) -> bool:
    return all(key in checkpoint.file_of for piece in option for key in tensors_of(piece))


def _scale_key(piece: Piece, checkpoint: Checkpoint) -> str | None:
    key = f"{piece.key}_scale_inv"
    return key if key in checkpoint.file_of else None


def _check(piece: Piece, tensor: Tensor, checkpoint: Checkpoint) -> Iterator[Finding]:
    keys = tensors_of(piece)
    expected, found = piece.shape(tensor), checkpoint.shape(keys[0])
    if piece.stored == "mxfp4":
        found = (*found[:-2], found[-2] * found[-1] * 2)
    elif checkpoint.dtype(keys[0]) not in _PLAIN and _scale_key(piece, checkpoint) is None:
        problem = f"{keys[0]} is stored as {checkpoint.dtype(keys[0])} without a known scale"
        yield finding(problem, "use the bf16, block-fp8 or MXFP4 checkpoint")
    if expected != found:
        yield finding(f"{keys[0]} has shape {found}, the model wants {expected}", "use the config.json beside it")


def _load(checkpoint: Checkpoint, piece: Piece) -> Tensor:
    parts = [checkpoint.tensor(key) for key in tensors_of(piece)]
    if piece.stored == "mxfp4":
        return from_mxfp4(*parts)
    scale = _scale_key(piece, checkpoint)
    return parts[0] if scale is None else from_fp8_blocks(parts[0], checkpoint.tensor(scale), checkpoint.block)


def _tell(checkpoint: Checkpoint, pieces: dict[str, list[Piece]], used: set[str]) -> Iterator[Finding]:
    kinds: Counter[str] = Counter()
    for piece in (piece for option in pieces.values() for piece in option):
        scale = _scale_key(piece, checkpoint)
        if piece.stored == "mxfp4":
            kinds["MXFP4"] += 1
        elif scale is not None:
            kinds["block fp8"] += 1
            used.add(scale)
    for kind, number in kinds.items():
        yield _warning(f"{number} {kind} tensors were dequantised to bf16", "training goes on from the rounded weights")
    unused = sorted(key for key in checkpoint.file_of if key not in used and not key.endswith("rotary_emb.inv_freq"))
    if unused:
        yield _warning(f"{len(unused)} tensors were not used: {some(unused)}", "expected when MTP is off or tied")


def _warning(problem: str, advice: str) -> Finding:
    return Finding(rule="hf-weights", at="weights", problem=problem, advice=advice, severity="warning")
