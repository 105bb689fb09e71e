"""Settings of Megatron as fields of a plan: the way back from `write_settings.py`.

`fields_of` takes settings from any of the formats that `import_text.py` reads. What no field of a plan stands for comes
back as a warning, so that nobody takes an import for more than it is.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from threefold.findings import Finding, did_you_mean, shown
from threefold.interop.megatron.field_names import (
    IMPLIED,
    LR_SCHEDULES,
    PACKED_SIZE,
    PLAIN,
    PRECISIONS,
    READ_ALSO,
    SHAPE,
    TORCH_DTYPES,
    Settings,
)
from threefold.interop.megatron.releases import every_override, is_override
from threefold.interop.megatron.setting_facts import conflicts_of
from threefold.interop.megatron.setting_notes import note_of
from threefold.interop.megatron.settings_writer import data_of_paths
from threefold.plan.aliases import MODULES
from threefold.plan.plan import GRAPH_SCOPES
from threefold.plan.table import FIELDS
from threefold.spec.candidates import FLEX
from threefold.spec.model import ModelSpec

Fields = dict[str, Any]
_WITHOUT_LIMIT = ("checkpoint.most_recent_k", -1)  # every checkpoint is kept, which no plan says
_FEW = 8  # settings without a counterpart that are named one by one

_DTYPES = {name: short for short, name in TORCH_DTYPES.items()} | {short: short for short in TORCH_DTYPES}
_DTYPES |= {"torch.half": "fp16", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}


@dataclass
class Reader:
    """Settings of one import, and the fields and findings that came of them."""

    settings: Settings
    model: ModelSpec | None
    fields: Fields = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    used: set[str] = field(default_factory=set)
    has_arguments: bool = False  # the settings stand for arguments of Megatron-LM, whose names were looked up before

    def has(self, path: str) -> bool:
        return path in self.settings

    def take(self, path: str, otherwise: Any = None) -> Any:
        self.used.add(path)
        return self.settings.get(path, otherwise)

    def warn(self, path: str, problem: str, advice: str) -> None:
        self.findings.append(
            Finding(rule="import-without-counterpart", at=path, problem=problem, advice=advice, severity="warning")
        )


def fields_of(
    settings: Settings, model: ModelSpec | None, has_arguments: bool = False
) -> tuple[Fields, list[Finding], Settings]:
    """Fields of a plan, without model and cluster, findings, and the settings that no field stands for. `model` is the
    one without cuts, to tell a cut from its own size."""
    reader = Reader(_in_one_spelling(settings), model, has_arguments=has_arguments)
    for row in PLAIN:
        if reader.has(row.path) and (row.path, reader.settings[row.path]) != _WITHOUT_LIMIT:
            value = reader.take(row.path)
            value = row.null if value is None else value
            if value is not None:
                reader.fields[row.field] = str(value) if FIELDS[row.field].types == (str,) else value
    for read in _THEMES:
        read(reader)
    _without_own_sizes(reader)
    rest = [path for path in sorted(set(reader.settings) - reader.used) if not _is_implied(reader, path)]
    _name_the_rest(reader, rest)
    spellings = Counter(READ_ALSO.get(path, path) for path in settings)
    said_twice = {path: value for path, value in settings.items() if spellings[READ_ALSO.get(path, path)] > 1}
    reader.findings += conflicts_of(said_twice | reader.settings)
    return reader.fields, reader.findings, {path: reader.settings[path] for path in rest}


def _name_the_rest(reader: Reader, rest: list[str]) -> None:
    """Warn of settings that no field stands for: one by one where they are few, a complete file's in one finding."""
    if not reader.has_arguments:
        unknown = [path for path in rest if not is_override(path)]
        rest = [path for path in rest if path not in unknown]
        _name_the_unknown(reader, unknown)
    if len(rest) > _FEW:
        rest = [path for path in rest if reader.settings[path] not in (None, False, (), "")] or rest  # what is on
        problem = f"{len(rest)} settings have no counterpart in a plan: {', '.join(rest)}"
        reader.warn(rest[0].partition(".")[0], problem, "the plan goes without them")
        return
    for path in rest:
        problem = f"{shown(reader.settings[path])} has no counterpart in a plan"
        reader.warn(path, problem, "; ".join(filter(None, ("the plan goes without it", note_of(path)))))


def _is_implied(reader: Reader, path: str) -> bool:
    """Whether a plan takes a setting for granted as it is, or the model says it."""
    value = reader.settings[path]
    if path in IMPLIED:
        granted = IMPLIED[path]
        return granted is None or value is None or value == granted
    return path.removeprefix("model.") in SHAPE


def _name_the_unknown(reader: Reader, unknown: list[str]) -> None:
    """Warn of names that no release of Megatron Bridge has, with the nearest that one has."""
    for path in unknown[:_FEW]:
        group, _, name = path.partition(".")
        known = [other.partition(".")[2] for other in every_override() if other.startswith(f"{group}.")]
        advice = did_you_mean(name, known) if known else ""
        others = (
            f", nor {len(unknown) - _FEW} others in this text" if len(unknown) > _FEW and path == unknown[0] else ""
        )
        reader.findings.append(
            Finding(
                rule="import-unknown-name",
                at=path,
                problem=f"no override of Megatron Bridge in the releases that were read{others}",
                advice=note_of(path) or advice or "correct it, or leave it out: the plan goes without it",
                severity="warning",
            )
        )


def _in_one_spelling(settings: Settings) -> Settings:
    """Other spellings under the newest name; a value under that name itself counts more. Of names by backend that of
    the one in use counts."""
    backend = settings.get("model.moe_flex_dispatcher_backend")
    others = {f"model.moe_{name}_num_sms" for name in FLEX if name != backend} if backend in FLEX else set()
    also = {
        READ_ALSO[path]: value
        for path, value in settings.items()
        if path in READ_ALSO and value is not None and path not in others
    }
    return also | {path: value for path, value in settings.items() if path not in READ_ALSO}


def _read_layout(reader: Reader) -> None:
    if (stages := reader.take("model.pipeline_model_parallel_layout")) is not None:
        reader.fields["layout.stages"] = _layout_text(stages) if isinstance(stages, tuple) else stages
    copies = reader.take("ddp.num_distributed_optimizer_instances")
    if copies not in (None, 1):
        reader.fields["layout.replicate"] = copies
    reader.take("ddp.data_parallel_sharding_strategy")
    if reader.take("ddp.use_megatron_fsdp", False):
        reader.fields["knobs.data_parallel"] = "fsdp" if copies in (None, 1) else "hsdp"


def _layout_text(stages: Any) -> str:
    """Bridge also writes a layout as a list of lists of names."""
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    return "|".join("".join(letters.get(str(name), "?") for name in _as_tuple(chunk)) for chunk in stages)


def _read_precision(reader: Reader) -> None:
    named = reader.take("mixed_precision")
    fields = {path: reader.take(path) for path in _PRECISION_FIELDS}
    found = None
    if isinstance(named, str):
        recipes = {known.recipe: name for name, known in PRECISIONS.items()}
        found = recipes.get(named.replace("-", "_"))
        if found is None:
            reader.warn("mixed_precision", f"no precision of ours is {named}", "set knobs.precision")
    if fields["mixed_precision.fp4"]:
        found = "nvfp4"
    elif fields["mixed_precision.fp8"]:
        recipe = fields["mixed_precision.fp8_recipe"] or "delayed"
        pairs = ((name, dict(known.fields).get("mixed_precision.fp8_recipe")) for name, known in PRECISIONS.items())
        found = next((name for name, own in pairs if own == recipe), found)
    elif fields["mixed_precision.fp32"]:
        found = "fp32"
    elif fields["mixed_precision.fp16"]:
        found = "fp16"
    elif fields["mixed_precision.bf16"] and found is None:
        found = "bf16"
    elif fields["mixed_precision.bf16"] is False and found is None:
        found = "fp32"
    if found is not None:
        reader.fields["knobs.precision"] = found
    own = dict(PRECISIONS[found].fields) if found in PRECISIONS else {}
    for path in _IN_BF16:  # as the recipe of the precision has them, or else no field stands for them
        if reader.settings.get(path) in (own.get(path, False), None):
            reader.take(path)
    for kind in ("fp8", "fp4"):
        if reader.take(f"mixed_precision.{kind}_param_gather"):
            reader.fields["knobs.fp8_params"] = True


_PRECISION_FIELDS = tuple(
    f"mixed_precision.{name}" for name in ("fp32", "fp16", "bf16", "fp8", "fp8_recipe", "fp4", "fp4_recipe")
)
_IN_BF16 = tuple(
    f"mixed_precision.{name}"
    for name in ("first_last_layers_bf16", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
)


def _read_optimizer_states(reader: Reader) -> None:
    is_fp32 = reader.take("mixed_precision.grad_reduce_in_fp32")
    if is_fp32 is False:
        reader.fields["knobs.grad_dtype"] = "bf16"
    reader.take("optimizer.main_grads_dtype")
    moment = reader.take("optimizer.exp_avg_dtype")
    reader.take("optimizer.exp_avg_sq_dtype")
    is_aware = reader.take("optimizer.use_precision_aware_optimizer")
    if is_aware and moment is not None:
        reader.fields["knobs.optimizer_dtype"] = _DTYPES.get(str(moment), moment)
    if is_aware is False:  # else a complete file's default would count
        reader.fields.pop("knobs.store_param_remainders", None)
    if reader.settings.get("mixed_precision.fp16") is False:
        for name in ("initial_loss_scale", "loss_scale_window"):
            reader.fields.pop(f"job.{name}", None)
    fraction = reader.take("optimizer.optimizer_offload_fraction", 1.0)
    if reader.take("optimizer.optimizer_cpu_offload"):
        reader.fields["knobs.optimizer_offload"] = fraction


def _read_dispatcher(reader: Reader) -> None:
    kind, backend = reader.take("model.moe_token_dispatcher_type"), reader.take("model.moe_flex_dispatcher_backend")
    sms = reader.take("model.moe_flex_dispatcher_num_sms")
    is_flex = kind == "flex" or (kind is None and backend is not None)
    if is_flex:
        reader.fields["knobs.dispatcher"] = backend or "deepep"
        if sms is not None:
            reader.fields["knobs.dispatch_sms"] = sms
    elif kind == "allgather":
        reader.warn("model.moe_token_dispatcher_type", "a plan has no dispatcher by all-gather", "it says alltoall")
    elif kind is not None:
        reader.fields["knobs.dispatcher"] = kind
    if backend is not None and kind != "flex":
        problem = f"{backend} alone does not activate the flex dispatcher in Megatron Bridge"
        advice = "call apply_flex_dispatcher_backend, as an export does"
        reader.warn("model.moe_flex_dispatcher_backend", problem, advice)
    if reader.has("model.moe_shared_expert_overlap"):
        reader.fields["knobs.shared_expert_overlap"] = bool(reader.take("model.moe_shared_expert_overlap"))


def _read_routing(reader: Reader) -> None:
    if reader.take("model.moe_router_force_load_balancing"):
        reader.fields["job.routing"] = "forced-balance"
    if reader.has("model.moe_router_dtype"):
        reader.fields["knobs.router_dtype"] = "fp32" if reader.take("model.moe_router_dtype") else "bf16"
    reader.take("model.moe_pad_expert_input_to_capacity")
    if (factor := reader.take("model.moe_expert_capacity_factor")) is not None:
        reader.fields["job.capacity_factor"] = factor
    if (factor := reader.take("model.moe_expert_rank_capacity_factor")) is not None:
        reader.fields |= {"job.capacity_factor": factor, "job.capacity_scope": "rank"}
    types, coefficients = (
        _as_tuple(reader.take("model.moe_router_load_balancing_type")),
        _as_tuple(reader.take("model.moe_aux_loss_coeff")),
    )
    if coefficients:
        weights = dict(zip(types or ("aux_loss",), coefficients, strict=False))
        for name in ("aux_loss", "seq_aux_loss"):
            reader.fields[f"job.{name}"] = weights.get(name, 0.0)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def _is_number(value: Any) -> bool:
    """Parsing refuses what is none where a field wants one; until then it is handed on as it is."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _read_recompute(reader: Reader) -> None:
    granularity, modules = reader.take("model.recompute_granularity"), reader.take("model.recompute_modules")
    method, layers = reader.take("model.recompute_method"), reader.take("model.recompute_num_layers")
    if reader.take("model.recompute_activations"):  # Megatron-LM's short form (training/arguments.py)
        granularity = "selective"
    if granularity == "full":
        reader.fields["knobs.recompute"] = ["full"]
        if method not in (None, "uniform"):
            reader.fields["knobs.recompute_method"] = method
        if layers not in (None, 1):
            reader.fields["knobs.recompute_layers"] = layers
    elif granularity == "selective" or (modules and not reader.has("model.recompute_granularity")):
        # Where no modules are named Megatron recomputes core_attn; an empty list is the control of an A/B.
        names = ["core_attn"] if modules is None else _names(modules)
        reader.fields["knobs.recompute"] = [MODULES.get(name, name) for name in names]


def _names(value: Any) -> list[str]:
    if isinstance(value, str):
        value = value.replace(",", " ").split()
    return [str(name).rpartition(".")[2] for name in _as_tuple(value)]


def _read_graphs(reader: Reader) -> None:
    kind, names = reader.take("model.cuda_graph_impl"), _names(reader.take("model.cuda_graph_modules"))
    reader.take("model.cuda_graph_scope")
    if kind is None or kind == "none":
        return
    if kind == "full_iteration" or "full_iteration" in names:
        reader.fields["knobs.graphs"] = ["full_iteration"]
        return
    known = [name for name in names if name in GRAPH_SCOPES]
    routing = ["moe_router", "moe_preprocess"]
    if kind == "local":
        reader.warn(
            "model.cuda_graph_impl", "'local' has no counterpart in a plan", "an export says transformer_engine"
        )
        known = list(dict.fromkeys([*known, *(routing if set(routing) & set(known) else [])]))  # one is both there
    if known:
        reader.fields["knobs.graphs"] = known
    if not known or len(known) < len(names):
        problem = f"graphs of {', '.join(names) or 'whole layers'} with {kind}"
        reader.warn("model.cuda_graph_modules", problem, f"a plan knows {', '.join(GRAPH_SCOPES)}")


def _read_memory(reader: Reader) -> None:
    names = _names(reader.take("model.offload_modules"))
    if reader.take("model.fine_grained_activation_offloading") and names:
        reader.fields["knobs.activation_offload"] = names
    layers = reader.take("model.cpu_offloading_num_layers", 0)
    if reader.take("model.cpu_offloading", bool(layers)) and layers:
        reader.fields["knobs.activation_offload_layers"] = layers
    if (kind := reader.take("model.cp_comm_type")) is not None:
        reader.fields["knobs.cp_comm"] = list(kind) if isinstance(kind, list | tuple) else kind
    reader.take("model.max_seqlen_per_dp_cp_rank")  # follows: job.seq_len over layout.cp
    if sizes := reader.take("model.hierarchical_context_parallel_sizes"):
        reader.fields["knobs.cp_inner"] = sizes[0] if isinstance(sizes, list | tuple) else sizes
    fusion, kind = reader.take("model.cross_entropy_loss_fusion"), reader.take("model.cross_entropy_fusion_impl")
    if fusion is False or kind == "native":
        reader.fields["knobs.loss_fusion"] = False


def _read_model(reader: Reader) -> None:
    if reader.has("model.mtp_num_layers"):
        reader.fields["job.mtp"] = reader.take("model.mtp_num_layers") or 0
        if not reader.fields["job.mtp"]:
            reader.fields.pop("job.mtp_weight", None)
    frequency = reader.take("model.moe_layer_freq")
    if isinstance(frequency, list | tuple):
        reader.fields["model.num_dense_layers"] = list(frequency).index(1) if 1 in frequency else len(frequency)
    names = {"vision": "vision_model", "projector": "vision_projection", "language": "language_model"}
    frozen = [part for part, name in names.items() if reader.take(f"model.freeze_{name}")]
    if frozen:
        reader.fields["job.freeze"] = frozen


def _read_data(reader: Reader) -> None:
    has_blend = reader.has("dataset.blend")
    blend, is_mock = reader.take("dataset.blend"), reader.take("dataset.mock_data")
    is_null = reader.take("tokenizer.tokenizer_type") == "NullTokenizer"
    if (data := data_of_paths(reader.take("dataset.data_path"))) is not None:
        reader.fields["job.data"] = data
    elif is_mock or is_null or (has_blend and blend is None):
        reader.fields["job.data"] = "synthetic"
    elif blend is not None:
        reader.warn("dataset.blend", "Megatron's datasets are none of ours", "set job.data")
    is_packed, size = (reader.take(f"dataset.{name}") for name in ("enable_offline_packing", PACKED_SIZE))
    if is_packed is True or (is_packed is None and _is_number(size) and size > 0):
        reader.fields |= {"job.packing": True, "job.task": "sft"}
    if reader.take("train.sft"):
        reader.fields["job.task"] = "sft"


def _read_schedule(reader: Reader) -> None:
    if (name := reader.take("optimizer.optimizer")) is not None:
        known = {"adam": "adamw", "dist_muon": "muon"}
        reader.fields["job.optimizer"] = known.get(name, name)
    rate, least = reader.take("optimizer.lr"), reader.take("optimizer.min_lr")
    if rate is not None:
        reader.fields["job.lr"] = rate
        if least is not None and rate:
            is_ratio = _is_number(least) and _is_number(rate)
            reader.fields["job.min_lr"] = float(f"{least / rate:.9g}") if is_ratio else least
    if (style := reader.take("scheduler.lr_decay_style")) is not None:
        ours = {theirs: name for name, theirs in LR_SCHEDULES.items()}
        reader.fields["job.lr_schedule"] = ours.get(style, style)
    decay, steps = reader.take("scheduler.lr_wsd_decay_iters"), reader.settings.get("train.train_iters")
    reader.take("scheduler.lr_wsd_decay_style")
    if decay is not None and steps:
        is_ratio = _is_number(decay) and _is_number(steps)
        reader.fields["job.decay_fraction"] = decay / steps if is_ratio else decay


def _read_run(reader: Reader) -> None:
    if reader.has("checkpoint.save_interval"):
        reader.fields["run.save_every"] = reader.take("checkpoint.save_interval") or 0
    interval, batches = reader.take("validation.eval_interval"), reader.take("validation.eval_iters")
    if batches == 0:
        reader.fields["run.eval_every"] = 0
    elif interval is not None:
        reader.fields["run.eval_every"] = interval
    is_manual, every = reader.take("train.manual_gc"), reader.take("train.manual_gc_interval")
    if is_manual is False:
        reader.fields["run.gc_every"] = 0
    elif is_manual and every is not None:
        reader.fields["run.gc_every"] = every
    if (minutes := reader.take("dist.distributed_timeout_minutes")) is not None:
        reader.fields["run.hang_seconds"] = minutes * 60.0 if _is_number(minutes) else minutes


_THEMES: tuple[Callable[[Reader], None], ...] = (
    _read_layout,
    _read_precision,
    _read_optimizer_states,
    _read_dispatcher,
    _read_routing,
    _read_recompute,
    _read_graphs,
    _read_memory,
    _read_model,
    _read_data,
    _read_schedule,
    _read_run,
)


def _without_own_sizes(reader: Reader) -> None:
    """A size that is the model's own is no cut of it."""
    if reader.model is None:
        return
    for name in ("num_layers", "num_experts", "vocab"):
        if reader.fields.get(f"model.{name}") == getattr(reader.model, name):
            del reader.fields[f"model.{name}"]
    num_layers = reader.fields.get("model.num_layers", reader.model.num_layers)
    if isinstance(num_layers, int) and reader.fields.get("model.num_dense_layers") == min(
        reader.model.num_dense_layers, num_layers
    ):
        del reader.fields["model.num_dense_layers"]
