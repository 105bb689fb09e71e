"""Megatron-LM's argument line: settings as arguments, and arguments back as settings."""

import re
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

from threefold.findings import Finding, did_you_mean
from threefold.interop.megatron.field_names import ARGUMENT_AGAINST, ARGUMENT_FIELDS, BRIDGE_ONLY, Settings
from threefold.interop.megatron.releases import Argument, Release, known_releases
from threefold.interop.megatron.settings_writer import argument_for, plain_value

# What Megatron-LM does where an argument is absent, for settings that stand for a field of a plan.
DEFAULTS: Settings = {
    "comm_overlap.tp_comm_overlap": False,
    "comm_overlap.overlap_grad_reduce": False,
    "comm_overlap.overlap_param_gather": False,
    "model.cross_entropy_loss_fusion": False,
    "model.mtp_num_layers": None,
    "mixed_precision.bf16": False,
}
MOE_DEFAULTS: Settings = {  # the same for models with experts
    "model.moe_permute_fusion": False,
    "model.moe_router_dtype": None,
    "model.moe_token_dispatcher_type": "allgather",
}
_PATHS = {  # fields of Megatron whose setting is not in the group `model`
    "global_batch_size": "train.global_batch_size",
    "micro_batch_size": "train.micro_batch_size",
    "train_iters": "train.train_iters",
    "manual_gc": "train.manual_gc",
    "manual_gc_interval": "train.manual_gc_interval",
    "sft": "train.sft",
    "seed": "rng.seed",
    "te_rng_tracker": "rng.te_rng_tracker",
    "overlap_moe_expert_parallel_comm": "comm_overlap.overlap_moe_expert_parallel_comm",
    "delay_wgrad_compute": "comm_overlap.delay_wgrad_compute",
    "tp_comm_overlap": "comm_overlap.tp_comm_overlap",
    "overlap_grad_reduce": "comm_overlap.overlap_grad_reduce",
    "overlap_param_gather": "comm_overlap.overlap_param_gather",
    "bf16": "mixed_precision.bf16",
    "fp16": "mixed_precision.fp16",
    "fp8": "mixed_precision.fp8",
    "fp8_recipe": "mixed_precision.fp8_recipe",
    "fp8_param_gather": "mixed_precision.fp8_param_gather",
    "fp4": "mixed_precision.fp4",
    "fp4_recipe": "mixed_precision.fp4_recipe",
    "fp4_param_gather": "mixed_precision.fp4_param_gather",
    "initial_loss_scale": "mixed_precision.initial_loss_scale",
    "loss_scale_window": "mixed_precision.loss_scale_window",
    "grad_reduce_in_bf16": "mixed_precision.grad_reduce_in_fp32",
    "cuda_graph_scope_deprecated": "model.cuda_graph_modules",
    "mock_data": "dataset.mock_data",
    "data_path": "dataset.data_path",
    "tokenizer_type": "tokenizer.tokenizer_type",
    "eval_interval": "validation.eval_interval",
    "eval_iters": "validation.eval_iters",
    "save_interval": "checkpoint.save_interval",
    "ckpt_format": "checkpoint.ckpt_format",
    "log_interval": "logger.log_interval",
    "wandb_project": "logger.wandb_project",
    "distributed_timeout_minutes": "dist.distributed_timeout_minutes",
    **{f"lr_{name}": f"scheduler.lr_{name}" for name in ("warmup_iters", "decay_style")},
    **{f"lr_wsd_decay_{name}": f"scheduler.lr_wsd_decay_{name}" for name in ("iters", "style")},
    **{name: f"optimizer.{name}" for name in ("optimizer", "lr", "min_lr", "weight_decay", "clip_grad")},
    **{f"adam_{name}": f"optimizer.adam_{name}" for name in ("beta1", "beta2", "eps")},
    **{
        name: f"optimizer.{name}"
        for name in (
            "use_precision_aware_optimizer",
            "main_grads_dtype",
            "exp_avg_dtype",
            "exp_avg_sq_dtype",
            "optimizer_cpu_offload",
            "optimizer_offload_fraction",
        )
    },
    **{
        name: f"ddp.{name}"
        for name in (
            "use_distributed_optimizer",
            "use_megatron_fsdp",
            "data_parallel_sharding_strategy",
            "num_distributed_optimizer_instances",
        )
    },
    **{field: path for path, field in ARGUMENT_FIELDS.items()},
}


def write_arguments(settings: Settings, release: Release) -> list[str]:
    """Settings as words of a command line. What Megatron-LM does without an argument is not written."""
    words: dict[str, list[str]] = {}
    has_layout = settings.get("model.pipeline_model_parallel_layout") is not None
    backend = settings.get("model.moe_flex_dispatcher_backend")
    for path, value in settings.items():
        argument = argument_for(path, release, backend)
        if argument is None or path in BRIDGE_ONLY or value is None:
            continue
        if path == "model.virtual_pipeline_model_parallel_size" and has_layout:
            continue  # the layout says it, and Megatron-LM takes only one of the two
        if isinstance(value, bool):
            is_wanted = value is (argument.kind == "flag" and path not in ARGUMENT_AGAINST)
            if is_wanted and argument.kind in ("flag", "off"):
                words[argument.name] = [argument.name]
        else:
            words[argument.name] = [argument.name, *_words(path, value, argument)]
    return [word for group in words.values() for word in group]


def _words(path: str, value: Any, argument: Argument) -> list[str]:
    if path == "model.moe_layer_freq" and isinstance(value, tuple):
        dense = value.index(1) if 1 in value else len(value)
        return [f"([0]*{dense}+[1]*{len(value) - dense})"]
    if isinstance(value, tuple):
        return [str(item) for item in value] if argument.kind == "list" else [",".join(str(item) for item in value)]
    return [str(value)]


def find_argument(name: str) -> Argument | None:
    """The argument of that name in the newest release that has it."""
    for release in reversed(known_releases()):
        if name in release.by_argument:
            return release.by_argument[name]
    return None


def read_arguments(words: Sequence[str]) -> tuple[Settings, list[Finding]]:
    """Settings behind the arguments of an argument line, and those that say nothing to a plan."""
    settings: Settings = dict(DEFAULTS)
    findings: list[Finding] = []
    for name, values in _grouped(words):
        argument = find_argument(name)
        if argument is None:
            known = {known for release in known_releases() for known in release.by_argument}
            advice = did_you_mean(name, known) or "it is in none of the releases that were read"
            problem = "no argument of Megatron-LM"
            findings.append(
                Finding(rule="import-unknown-name", at=name, problem=problem, advice=advice, severity="warning")
            )
            continue
        path = _PATHS.get(argument.field, f"model.{argument.field}")
        if argument.kind == "value" and not values:
            findings.append(
                Finding(rule="import-readable", at=name, problem="no value behind it", advice=f"write {name} VALUE")
            )
        elif argument.kind in ("flag", "off"):
            settings[path] = (argument.kind == "flag") is (path not in ARGUMENT_AGAINST)
        elif path == "model.moe_layer_freq":
            settings[path] = layer_frequency(" ".join(values))
        elif argument.kind == "list" and len(values) != 1:
            settings[path] = tuple(plain_value(value) for value in values)
        else:
            settings[path] = plain_value(values[0])
    return settings, findings


# A launcher may write the rank before a row. Names that fill their column have no dots after them.
_TABLE_ROW = re.compile(r"(?:^|[\]:\s])([a-z][a-z0-9_]*)(?: \.+ |  )(.*?)\s*$")
_TABLE_START, _TABLE_END = "--- arguments ---", "--- end of arguments ---"
# What Megatron-LM's table says of the run itself, and not of its job.
_RUN_FACTS = ("rank", "local_rank", "world_size", "data_parallel_size", "transformer_pipeline_model_parallel_size")

# A table has every argument. What nothing reads, because an argument has one of these values, is no size of a model.
_UNREAD = (
    ("multi_latent_attention", ("False",), ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb", "v_head_dim")),
    ("multi_latent_attention", ("True",), ("kv_channels",)),
    ("group_query_attention", ("False",), ("num_query_groups",)),
    ("num_experts", ("None",), ("moe_", "expert_")),
    ("moe_token_dispatcher_type", ("alltoall", "allgather"), ("moe_flex_dispatcher_", "moe_deepep_", "moe_hybridep_")),
    ("moe_flex_dispatcher_backend", ("deepep",), ("moe_hybridep_",)),
    ("moe_flex_dispatcher_backend", ("hybridep",), ("moe_deepep_",)),
    ("fp16", ("False",), ("initial_loss_scale", "loss_scale_window")),
)


def is_table(text: str) -> bool:
    """Whether a text is, or holds, the table of arguments that Megatron-LM prints when it starts."""
    return _TABLE_START in text


def read_table(text: str) -> tuple[Settings, int | None]:
    """The settings of a table that Megatron-LM printed, without those that are off, and the number of ranks."""
    table = text.partition(_TABLE_START)[2].partition(_TABLE_END)[0]
    matches = (_TABLE_ROW.search(line) for line in table.splitlines())
    rows = {match[1]: match[2] for match in matches if match}
    unread = tuple(name for switch, values, names in _UNREAD if rows.get(switch) in values for name in names)
    against = {argument[2:].replace("-", "_"): path for path, argument in ARGUMENT_AGAINST.items()}
    settings: Settings = dict(DEFAULTS)
    for name, written in rows.items():
        value = _table_value(written)
        path = _PATHS.get(name, f"model.{name}")
        if name in _RUN_FACTS or name.startswith(unread) or (path not in settings and value in (None, False, ())):
            continue
        settings[path] = not value if name in against and isinstance(value, bool) else value
    ranks = rows.get("world_size", "")
    return settings, int(ranks) if ranks.isdigit() else None


def _table_value(text: str) -> Any:
    """A value as Python prints it."""
    text = re.sub(r"<\w+\.(\w+): [^>]*>", r"\1", text)  # a member of an enumeration
    if text.startswith(("[", "(")):
        items = re.findall(r"[^\s,'\"\[\]()]+", text)
        return tuple(plain_value(item) for item in items)
    return plain_value(text.strip("'"))


def _grouped(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each argument with the words behind it."""
    name, values = "", list[str]()
    for word in words:
        if word.startswith("--"):
            if name:
                yield name, values
            name, equals, value = word.partition("=")
            values = [value] if equals else []
        elif name:
            values.append(word)
    if name:
        yield name, values


def layer_frequency(text: str) -> Any:
    """`([0]*3+[1]*58)` as numbers; a plain number as it is."""
    parts = re.findall(r"\[\s*([01](?:\s*,\s*[01])*)\s*\](?:\s*\*\s*(\d{1,5}))?", text)
    if not parts:
        return plain_value(text)
    return tuple(int(item) for items, times in parts for _ in range(int(times or 1)) for item in items.split(","))


def as_line(words: Sequence[str]) -> str:
    """Words as a shell reads them, an argument a line."""
    lines = [""]
    for word in words:
        if word.startswith("--"):
            lines.append("")
        lines[-1] += (" " if lines[-1] else "") + shlex.quote(word)
    return " \\\n  ".join(line for line in lines if line)
