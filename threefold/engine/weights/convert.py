"""Converts a Hugging Face checkpoint into a run that can be trained, and a run's checkpoint back, tensor by tensor.

`threefold import-hf` calls `import_hf`, `threefold export-hf` calls `export_hf`. Both yield lines of text to print.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from threefold.engine.lora import lora_settings
from threefold.engine.run.checkpoint_io import OpenCheckpoint, step_of_folder
from threefold.engine.run.checkpoints import Checkpoints
from threefold.engine.run.folder import CHECKPOINTS, read_run_plan
from threefold.engine.weights.base_checkpoint import (
    BASE,
    BaseCheckpoint,
    describe_checkpoint,
    read_base,
    record_base,
)
from threefold.engine.weights.claimed_folder import claimed_folder
from threefold.engine.weights.hf_names import hf_layouts, names_of, stored_keys
from threefold.engine.weights.imported_weights import INITIAL, convertible_finding
from threefold.engine.weights.model_shapes import MODEL, check_is_model, tensors_on_meta
from threefold.engine.weights.peft import MergedTensors, open_adapter, refused_targets, write_adapter
from threefold.engine.weights.read_hf import HfWeights, open_hf
from threefold.engine.weights.run_files import DRAFT, HF_CONFIG, TOKENIZER_FOLDER, copy_model_files
from threefold.engine.weights.safetensors_files import SafetensorsFolder
from threefold.engine.weights.write_hf import write_hf
from threefold.findings import FindingsError
from threefold.plan.file import dump_fields
from threefold.plan.plan import Plan
from threefold.safe_files import MAX_JSON_BYTES, read_bounded, read_json_object
from threefold.spec.chips import chip_of_device
from threefold.spec.hf import hf_config_of, model_from_config, model_from_dict
from threefold.spec.model import ModelSpec

SHARD_BYTES = 1 << 30  # a file of initial weights is complete when it has this size
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUTER_BIAS = ".router.balance_bias"
AS_STORED = "auto"  # the dtype that loses no bit of the checkpoint
_OF_TEXT_MODEL = ("architectures", "model_type", "tie_word_embeddings")  # keys that its own table has otherwise
_LENGTH = 4096  # tokens of a sequence in the draft, where the model was made for as many


def import_hf(folder: Path, out: Path, dtype: str, adapter: Path | None = None) -> Iterator[str]:
    """Make a run's folder that starts from these weights. At most one file of SHARD_BYTES is in memory.

    Where that fails nothing is left behind.
    """
    with claimed_folder(out) as was_there:
        yield from import_into(folder, out, dtype, adapter, was_there)


def import_into(folder: Path, out: Path, dtype: str, adapter: Path | None, was_there: bool) -> Iterator[str]:
    """`import_hf` into a folder that is claimed already. One that was not there before is removed on failure."""
    spec = model_from_config(folder)
    weights = open_hf(folder, spec, stored_mtp(folder, spec))
    peft = None if adapter is None else open_adapter(adapter, spec)
    dtype = _stored_dtype(weights) if dtype == AS_STORED else dtype
    try:
        config = read_bounded(folder / "config.json", MAX_JSON_BYTES, within=folder)
    except OSError as error:
        raise _refuse(folder / "config.json", f"is not read: {error}", "give a folder that holds the file") from None
    for finding in weights.findings:
        yield str(finding)
    initial, draft = out / INITIAL, out / DRAFT
    try:
        initial.mkdir(parents=True)
        count, num_rounded = _write_initial_weights(weights, initial, _DTYPES[dtype])
        (out / HF_CONFIG).write_bytes(config)
        record_base(out, describe_checkpoint(folder))
        copied = copy_model_files(folder, out / TOKENIZER_FOLDER)
        fields_of_draft = _draft_fields(out, config, weights, dtype, copied)
        if peft is not None:
            save_file({name: value.to(_DTYPES[dtype]) for name, value in peft}, initial / "adapter.safetensors")
            fields_of_draft |= peft.plan_fields
        draft.write_text(dump_fields(fields_of_draft), encoding="utf-8")
    except BaseException as error:
        shutil.rmtree(initial if was_there else out, ignore_errors=True)
        if was_there:
            shutil.rmtree(out / TOKENIZER_FOLDER, ignore_errors=True)
        for path in (out / HF_CONFIG, out / BASE, draft) if was_there else ():
            path.unlink(missing_ok=True)
        if isinstance(error, OSError | SafetensorError):
            raise _refuse(out, f"cannot be written: {error}", "free space, or choose another --out folder") from None
        raise
    yield f"{count:,} weights of {spec.family} in {initial}, in {dtype}"
    if peft is not None:
        yield peft.summary
    if num_rounded:
        yield f"{num_rounded} tensors were rounded to {dtype}; --dtype fp32 keeps them as they are"
    has_tokenizer = "tokenizer.json" in copied
    yield f"tokenizer and templates in {out / TOKENIZER_FOLDER}" if has_tokenizer else "the checkpoint has no tokenizer"


def stored_mtp(folder: Path, spec: ModelSpec) -> int | None:
    """0 where the checkpoint has no weight of any MTP depth, as transformers saves DeepSeek-V3; None for all depths."""
    if not spec.mtp_layers:
        return None
    stored = SafetensorsFolder(folder).file_of
    try:
        names = [name for name in tensors_on_meta(spec, None, len(stored)) if name.startswith("mtp.")]
    except ValueError:  # `open_hf` says it
        return None
    keys = (key for name in names for layout in hf_layouts(name, spec) for part in layout for key in stored_keys(part))
    return None if any(key in stored for key in keys) else 0


def _stored_dtype(weights: HfWeights) -> str:
    """bf16 where the embedding is stored in it, or quantized; otherwise fp32, which holds fp16 exactly too."""
    stored = weights.checkpoint.dtype(weights.hf_tensors["embed.weight"][0].key)
    return "bf16" if stored == "BF16" else "fp32"


def _draft_fields(out: Path, config: bytes, weights: HfWeights, dtype: str, copied: list[str]) -> dict[str, Any]:
    """The fields of a plan that follow from the checkpoint. Data is not among them: it must be named."""
    longest = json.loads(config).get("max_position_embeddings")
    has_tokenizer = "tokenizer.json" in copied
    chip = chip_of_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return {
        "model": f"hf:{(out / HF_CONFIG).resolve()}",
        **({"cluster.chip": chip.name} if chip else {}),
        "knobs.precision": dtype,
        "job.mtp": len({name.split(".")[1] for name in weights.shapes if name.startswith("mtp.")}),
        "job.seq_len": min(longest, _LENGTH) if isinstance(longest, int) and longest > 0 else _LENGTH,
        "job.lr": 1e-5,  # of fine-tuning; the default is one for pretraining
        **({"job.tokenizer": str((out / TOKENIZER_FOLDER).resolve())} if has_tokenizer else {}),
    }


def _write_initial_weights(weights: HfWeights, folder: Path, dtype: torch.dtype) -> tuple[int, int]:
    """Write all tensors in files of about SHARD_BYTES. Returns the number of weights, and of rounded tensors."""
    file_number, num_weights, num_rounded, tensors = 0, 0, 0, {}
    for name, tensor in weights:
        # A model in bf16 chooses experts with biases in fp32.
        is_converted = tensor.is_floating_point() and tensor.dim() and not name.endswith(ROUTER_BIAS)
        tensors[name] = tensor.to(dtype) if is_converted else tensor
        num_weights += tensor.numel()
        num_rounded += tensors[name].dtype != tensor.dtype and not torch.equal(tensors[name].to(tensor.dtype), tensor)
        if sum(value.numel() * value.element_size() for value in tensors.values()) >= SHARD_BYTES:
            save_file(tensors, folder / f"{file_number:05d}.safetensors")
            file_number, tensors = file_number + 1, {}
    if tensors:
        save_file(tensors, folder / f"{file_number:05d}.safetensors")
    return num_weights, num_rounded


class _CheckpointTensors(Mapping[str, Tensor]):
    """The full tensors of the model in a checkpoint of any layout. Each is read when it is asked for."""

    def __init__(self, opened: OpenCheckpoint, with_mtp: bool = True) -> None:
        self.opened = opened
        left_out = () if with_mtp else (f"{MODEL}mtp.",)
        self.dtypes_and_shapes = {
            name.removeprefix(MODEL): value
            for name, value in opened.manifest.tensors.items()
            if name.startswith(MODEL) and not name.startswith(left_out)
        }

    def __getitem__(self, name: str) -> Tensor:
        dtype, shape = self.dtypes_and_shapes[name]
        tensor = torch.zeros(shape, dtype=dtype)
        self.opened.fill({f"{MODEL}{name}": tensor})
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.dtypes_and_shapes)

    def __len__(self) -> int:
        return len(self.dtypes_and_shapes)


def export_hf(
    run: Path, out: Path, adapter: bool = False, base: str | None = None, newest: bool = False
) -> Iterator[str]:
    """Write the newest checkpoint of a run as a folder that transformers loads, with its tokenizer and templates.

    Where the run keeps its best checkpoint, it is that one, unless `newest` is asked for.

    LoRA adapters are merged into the weights; with `adapter` they alone are written, as a folder that PEFT loads,
    for the checkpoint that the run came from, or for `base` where that is given.
    """
    with claimed_folder(out):
        yield from _export_into(run, out, adapter, base, newest)


def _export_into(run: Path, out: Path, adapter: bool, base: str | None, newest: bool) -> Iterator[str]:
    plan = read_run_plan(run)
    checkpoints = Checkpoints(run / CHECKPOINTS, plan.run.keep)
    opened = checkpoints.open_newest()
    if opened is None:
        raise _refuse(run, "the run has no checkpoint", "train it first")
    if plan.run.keep_best and not newest:
        lines: list[str] = []
        opened = checkpoints.open_best(opened, lines.append)
        yield from lines
    check_is_model(opened, plan)
    settings, step = lora_settings(plan.job), step_of_folder(opened.folder.name)
    if adapter and settings is None:
        raise _refuse(run, "the run has no LoRA adapters", "leave --adapter out: then its weights are written")
    if adapter and settings is not None:
        checkpoint = BaseCheckpoint(base, "") if base else read_base(run)
        count = write_adapter(_CheckpointTensors(opened), plan.model, settings, out, checkpoint)
        of = checkpoint.name if checkpoint else plan.model.name
        yield f"step {step}: {count:,} weights of adapters of {of} for PEFT in {out}"
        if checkpoint is None:
            yield "adapter_config.json names no base: the frozen weights are of no checkpoint; --base NAME names one"
        if refused := sorted(refused_targets(out, plan.model)):
            yield (
                f"PEFT refuses adapters of {', '.join(refused)} in {plan.model.family}: leave --adapter out to merge "
                "them, or import them here again"
            )
    else:
        yield from _write_weights(run, out, plan, opened)
        yield f"step {step} of {plan.model.name} in {out}"
    copied = copy_model_files(tokenizer_folder(run, plan), out)
    yield f"with {', '.join(copied)}" if copied else "without a tokenizer: the run has none"


def _write_weights(run: Path, out: Path, plan: Plan, opened: OpenCheckpoint) -> Iterator[str]:
    """Write the weights, with adapters merged into them."""
    own_config = _imported_config(run, plan.model) or hf_config_of(plan.model)
    config, settings = _with_mtp_depths(own_config, plan), lora_settings(plan.job)
    state: Mapping[str, Tensor] = _CheckpointTensors(opened, with_mtp=config is not None)
    if settings is not None:
        state = MergedTensors(state, settings)
        yield f"LoRA adapters of rank {settings.rank} are merged into the weights"
    if config is None:
        yield f"without its MTP depths: a checkpoint of {plan.model.family} cannot hold them"
    write_hf(state, plan.model, out, config or own_config)


def _with_mtp_depths(config: dict[str, Any], plan: Plan) -> dict[str, Any] | None:
    """The configuration with the MTP depths that the plan trains, which may be others than those of the model; None
    where checkpoints of the family cannot hold them."""
    spec = plan.model
    if plan.mtp > 1 and names_of(spec.family).mtp == "one":
        return None
    if plan.mtp in (0, spec.mtp_layers):  # without depths it stays as it is, as transformers leaves it
        return config
    kinds = {key: value for key, value in hf_config_of(spec).items() if key == "mtp_layers_block_type"}
    depths = {"num_nextn_predict_layers": plan.mtp, **kinds}
    text = config.get("text_config") if spec.vision is not None else None
    changed = {**config, **depths} if text is None else {**config, "text_config": {**text, **depths}}
    read = model_from_dict(changed, name=spec.name, source=spec.source)
    return changed if read.mtp_layers == plan.mtp else None


def tokenizer_folder(run: Path, plan: Plan) -> Path:
    """The folder of the tokenizer that belongs to a run: its own copy, or the one that the plan names."""
    own = run / TOKENIZER_FOLDER
    if own.is_dir() or plan.job.tokenizer is None:
        return own
    named = Path(plan.job.tokenizer)
    return named if named.is_dir() else named.parent


def _imported_config(run: Path, spec: ModelSpec) -> dict[str, Any] | None:
    """The config.json that was imported, where the run has one and it is that of the plan's model."""
    path = run / HF_CONFIG
    if not os.path.lexists(path):
        return None
    advice = f"import the checkpoint again, or delete {HF_CONFIG}: then a configuration is made from the plan"
    try:
        config = read_json_object(path, within=run)
        found = replace(model_from_dict(config, spec.name, spec.source), name=spec.name, source=spec.source)
    except (OSError, ValueError) as error:
        raise _refuse(path, f"cannot be read: {error}", advice) from None
    except FindingsError as error:
        raise _refuse(path, error.findings[0].problem, advice) from None
    if found != spec:
        other = [field.name for field in fields(spec) if getattr(found, field.name) != getattr(spec, field.name)]
        raise _refuse(path, f"this is the configuration of another model: {', '.join(other)} differ", advice)
    if spec.vision is None and isinstance(config.get("text_config"), dict):  # the text model of one with pictures
        own = hf_config_of(spec)
        return {**config["text_config"], **{key: own[key] for key in _OF_TEXT_MODEL}}
    return config


def _refuse(at: Path, problem: str, advice: str) -> FindingsError:
    return FindingsError([convertible_finding(at, problem, advice)])
