"""Settings of Megatron as they are collected from a plan, their names in a release, and what an export leaves out.

A setting is a dotted path, spelled as in the newest release of Megatron Bridge, with a plain value: a number, text, a
truth value, a tuple of these, or None for Megatron's null.
"""

from dataclasses import dataclass, field
from typing import Any

from threefold.interop.megatron.field_names import ARGUMENT_AGAINST, ARGUMENT_FIELDS, BRIDGE_ONLY, MOVED, Settings
from threefold.interop.megatron.models import dataset_kind, model_kind
from threefold.interop.megatron.releases import Argument, Release
from threefold.plan.data_entries import MEGATRON_SUFFIXES, megatron_prefix, parse_entries
from threefold.plan.plan import Plan

LARGEST_BITS = 64  # of a whole number; a larger one stays text, which no field takes for a number


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


@dataclass
class Writer:
    """Settings of one plan as they are collected."""

    plan: Plan
    release: Release
    to: str  # megatron-bridge or megatron-lm
    settings: Settings = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)  # the plan field behind each setting
    lost: list[Inexpressible] = field(default_factory=list)

    def put(self, source: str, path: str, value: Any) -> None:
        self.settings[path], self.sources[path] = value, source

    def lose(self, source: str, reason: str) -> None:
        """Name a field in the table, where the plan gives it another value than its default."""
        self._name(source, reason, is_said=False)

    def respell(self, source: str, reason: str) -> None:
        """Name a field that Megatron is told, but that an import reads back in another spelling."""
        self._name(source, reason, is_said=True)

    def always_lose(self, source: str, value: Any, reason: str) -> None:
        """Name a field also at its default, which Megatron does not share."""
        self.lost.append(Inexpressible(source, value, reason))

    def always_respell(self, source: str, value: Any, reason: str) -> None:
        """Name a field also at its default, which an import would take for something else."""
        self.lost.append(Inexpressible(source, value, reason, is_said=True))

    def _name(self, source: str, reason: str, is_said: bool) -> None:
        written = dict(self.plan.written)
        if source in written and source not in {item.field for item in self.lost}:
            self.lost.append(Inexpressible(source, written[source], reason, is_said))

    def is_stated(self, *paths: str) -> bool:
        """Whether an export says a field that a recipe would fill in. An argument line has no recipe behind it: it says
        the whole job."""
        if self.to == "megatron-lm" and any(path.startswith("job.") for path in paths):
            return True
        return any(path in self.plan.stated or path in dict(self.plan.written) for path in paths)


def value_of(plan: Plan, path: str) -> Any:
    table, _, name = path.rpartition(".")
    return dict(plan.written).get(path) if table == "model" else getattr(getattr(plan, table), name)


def paths_of_data(data: str | tuple[str, ...]) -> tuple[Any, ...] | None:
    """Prefixes of Megatron's datasets (PREFIX.bin and PREFIX.idx), with a weight before each where they have weights.

    None where an entry of `job.data` is something else.
    """
    entries = parse_entries(data)
    prefixes = [
        entry.name[: -len(MEGATRON_SUFFIXES[0])]
        if entry.name.endswith(MEGATRON_SUFFIXES)
        else megatron_prefix(entry.name)
        for entry in entries
    ]
    weights = [entry.weight for entry in entries]
    is_mixed = any(weight is None for weight in weights) and any(weight is not None for weight in weights)
    if is_mixed or not all(prefixes) or any(entry.is_built_in or entry.epochs for entry in entries):
        return None
    if weights[0] is None:
        return tuple(prefixes)
    return tuple(item for pair in zip(weights, prefixes, strict=True) for item in pair)


def data_of_paths(paths: Any) -> str | tuple[str, ...] | None:
    """`job.data` behind Megatron's data paths, as `paths_of_data` or a command line has them."""
    words = paths.split() if isinstance(paths, str) else list(paths) if isinstance(paths, tuple | list) else []
    if len(words) > 1 and isinstance(plain_value(str(words[0])), int | float):
        pairs = zip(words[0::2], words[1::2], strict=False)
        words = [f"{path}:{float(weight):g}" for weight, path in pairs if _is_weight(weight)]
    texts = tuple(str(word) for word in words)
    return texts[0] if len(texts) == 1 else texts or None


def _is_weight(word: Any) -> bool:
    return isinstance(plain_value(str(word)), int | float)


def plain_value(text: str) -> Any:
    """A number, a truth value or null where the text is one; else the text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    if text.lower() in ("none", "null"):
        return None
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        return text if isinstance(number, int) and number.bit_length() > LARGEST_BITS else number
    return text


def spell(path: str, release: Release, backend: str | None = None, dataset: str = "") -> str:
    """The name of a setting in a release. `backend` is the flex dispatcher's, `dataset` a kind of dataset."""
    for moved in MOVED:
        if path.startswith(f"{moved.path}.") and release.number[:2] <= moved.until:
            return moved.older + path.removeprefix(moved.path)
        if moved.path == path and release.number[:2] <= moved.until and moved.dataset in ("", dataset):
            return moved.older.format(backend=backend or "deepep")
    return path


def argument_for(path: str, release: Release, backend: str | None = None) -> Argument | None:
    """Megatron-LM's argument for a setting."""
    if path in ARGUMENT_AGAINST:
        return release.by_argument.get(ARGUMENT_AGAINST[path])
    name = spell(path, release, backend).rpartition(".")[2]
    return release.by_field.get(ARGUMENT_FIELDS.get(path, name))


def leave_out_unknown(writer: Writer) -> None:
    """Drop settings that the release has no name for. What they would have said is named where the plan asks for it."""
    plan, release, kind = writer.plan, writer.release, model_kind(writer.plan.model)
    dataset = dataset_kind(plan)
    for path in list(writer.settings):
        name = spell(path, release, plan.knobs.dispatcher, dataset)
        if writer.to == "megatron-lm":
            is_known = path in BRIDGE_ONLY or argument_for(path, release, plan.knobs.dispatcher) is not None
            reason = f"Megatron-LM {release.core} has no argument for it"
        else:
            is_known = release.has_field(name, kind, dataset)
            reason = f"Megatron Bridge {release.bridge} has no field {name}"
        if not is_known:
            writer.lose(writer.sources.pop(path), reason)
            del writer.settings[path]


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
    "job.load": "how experts are loaded is predicted, not set: Megatron trains with whatever its router chooses",
    "job.images": "a fact about the data: Megatron sees whatever images its dataset has",
    "knobs.compile": "Megatron fuses its elementwise parts by itself; no switch compiles norms and routers",
    "knobs.muon_dtype": "Megatron's muon_fp32_matmul_prec rounds the inputs of fp32 GEMMs, which is another choice",
    "knobs.master_weights": "Megatron's distributed optimizer always has main parameters",
    "knobs.graph_memory_gb": "Megatron holds no budget for the memory of its graphs",
    "knobs.expert_kernels": "a choice between kernels of Threefold's engine",
    "knobs.delta_kernels": "a choice between kernels of Threefold's engine",
    "knobs.fp8_dispatch": "Megatron's dispatchers send rows in bf16",
    "knobs.expert_balance": "no setting of Megatron copies hot experts; it balances by losses and a bias",
    "knobs.expert_copies": "no setting of Megatron copies hot experts",
    "knobs.expert_balance_every": "no setting of Megatron copies hot experts",
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
