"""What an export leaves out, and why: reasons for plan fields that Megatron has no name for, as data."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Inexpressible:
    """A field of a plan that an export could not say, or that an import reads back as something else."""

    field: str
    value: Any
    reason: str
    is_said: bool = False  # Megatron will do what the field asks for; only the way back gives another spelling

    def to_json(self) -> dict[str, Any]:
        value = list(self.value) if isinstance(self.value, tuple) else self.value
        return {"field": self.field, "value": value, "reason": self.reason, "said": self.is_said}


SAME_AS_ABSENT = "it is what an absent field means, and is read back as absent"
NO_EFFECT = "it has no effect in this plan"
NO_EXPERTS = "the model has no experts"

_ADAPTERS = "this export trains every weight; Bridge has recipes of their own for adapters (STEM_peft_config), with "
PACKING = "Megatron packs conversations: of other data the dataset's own options say what belongs together"
# Fields without any counterpart. Others depend on their value: `write_settings.py` says why where it happens.
NO_COUNTERPART: dict[str, str] = {
    "cluster.domain": "Megatron takes the NVLink domain of the machine that it runs on",
    "job.tokenizer": "Megatron's tokenizer is part of the recipe: set tokenizer.tokenizer_model",
    "job.val_data": "Megatron's datasets have a split of their own: set dataset.split or its validation paths",
    "job.val_fraction": "Megatron's datasets have a split of their own: set dataset.split",
    "job.text_field": "Megatron reads tokens; the field of text is named where they are prepared",
    "job.max_bad_records": "Megatron reads data that was prepared before, without unreadable records",
    "job.lora_rank": _ADAPTERS + "peft.dim",
    "job.lora_alpha": _ADAPTERS + "peft.alpha",
    "job.lora_targets": _ADAPTERS + "peft.target_modules",
    "job.max_pixels": "Megatron's dataset takes the size of pictures from the model's image processor",
    "knobs.recompute_save": "Megatron's full recompute runs attention once more; no setting saves its output",
    "knobs.vision_recompute": "Megatron recomputes the encoder as its model class decides",
    "run.early_stop": "Bridge has no early stopping by an evaluation loss; train.exit_interval ends a run at a step",
    "run.keep_best": "Bridge keeps checkpoints by their step, not by an evaluation loss",
    "run.image_workers": "a matter of the dataset: set dataset.num_workers",
    "job.images": "a fact about the data: Megatron sees whatever images its dataset has",
    "knobs.compile": "Megatron fuses its elementwise parts by itself; no switch compiles norms and routers",
    "knobs.muon_dtype": "Megatron's muon_fp32_matmul_prec rounds the inputs of fp32 GEMMs, which is another choice",
    "knobs.master_weights": "Megatron's distributed optimizer always has main parameters",
    "knobs.graph_memory_gb": "Megatron holds no budget for the memory of its graphs",
    "knobs.expert_kernels": "a choice between kernels of Threefold's engine",
    "knobs.delta_kernels": "a choice between kernels of Threefold's engine",
    "knobs.fp8_dispatch": "Megatron's dispatchers send rows in bf16",
    "knobs.cp_exchange": "a choice of Threefold's engine; Megatron exchanges expanded heads",
    "run.eval_batches": "Megatron counts evaluations in global batches, this field in microbatches",
    "run.tensorboard": "Megatron writes TensorBoard events to a folder: set logger.tensorboard_dir",
    "run.bad_steps": "Megatron skips or stops at non-finite gradients by ddp.check_for_nan_in_grad",
    "run.cores": "a matter of the launcher: numactl or srun --cpu-bind",
    "stack.torch": "a fact about the machine; it changes no setting",
    "stack.te": "a fact about the machine; it changes no setting",
    "stack.measured": "what was measured is no setting",
}
SAID_BY_NAMES = {"stack.release": "it chooses the names of the export, and is not read back from them"}
UNKNOWN_FIELD = "no setting of Megatron is known for this field"
