"""The files that start an exported plan: a training script, overrides, the environment, and commands.

`threefold export` writes or prints them, `threefold launch` prints the script. Nothing here decides anything; it all
stands in `Export`.
"""

import json
import re
import shlex
from typing import Any

from threefold.interop.megatron.argument_line import as_line
from threefold.interop.megatron.export_plan import BRIDGE, Export
from threefold.interop.megatron.field_names import DTYPE_PATHS, PRECISIONS, SCRIPT_CHIPS, TORCH_DTYPES
from threefold.interop.megatron.validation import validation_script
from threefold.launch.slurm import Options, node_script, shape, time_limit
from threefold.plan.parse import change
from threefold.plan.plan import Plan
from threefold.rules.all import blockers, judge

AB_STEPS = 8  # steps of an arm in Bridge's expert-parallel-overlap guide
_SCRIPT = "scripts/performance/run_script.py"
_OVERLAP = ("comm_overlap.overlap_moe_expert_parallel_comm", "comm_overlap.delay_wgrad_compute")
_ARMS = {
    "without EP overlap": (False, False),
    "with EP overlap": (True, False),
    "with EP overlap and delayed weight gradients": (True, True),
}
_FAULT_TOLERANCE = (
    "cfg.ft = FaultToleranceConfig(enable_ft_package=True, calc_ft_timeouts=True)",
    "cfg.nvrx_straggler = NVRxStragglerDetectionConfig(enabled=True)  # reports slow GPUs, and stops at none",
)
_SHORT_PRECISIONS = ("bf16", "fp8_cs", "fp8_mx", "fp8_sc", "nvfp4")  # values of `-c`


def override(path: str, value: Any) -> str:
    """A setting as a Hydra override; a shell must still quote it."""
    return f"{path}={_text(path, value)}"


def _text(path: str, value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ",".join(_text(path, item) for item in value) + "]"
    if path in DTYPE_PATHS:
        return TORCH_DTYPES[str(value)]
    text = str(value)
    return text if re.fullmatch(r"[A-Za-z0-9_.+-]+", text) else json.dumps(text, ensure_ascii=False)


def overrides(export: Export) -> list[str]:
    return [override(path, value) for path, value in export.settings.items()]


def overrides_yaml(export: Export) -> str:
    """The overrides as a file for Bridge's `config_filepath`; JSON scalars and lists are YAML."""
    groups: dict[str, dict[str, Any]] = {}
    for path, value in export.settings.items():
        group, _, name = path.partition(".")
        groups.setdefault(group, {})[name] = TORCH_DTYPES[str(value)] if path in DTYPE_PATHS else value
    lines = [f"# Megatron Bridge {export.release.bridge}; mixed_precision is {export.precision} with these changes."]
    for group, fields in groups.items():
        lines.append(f"{group}:")
        lines += [f"  {name}: {json.dumps(value)}" for name, value in fields.items()]
    return "\n".join(lines) + "\n"


def train_script(export: Export, fault_tolerant: bool = False) -> str:
    """A Python script for torchrun: recipe, precision, overrides, dispatcher, training."""
    plan, selection = export.plan, export.selection
    module, function = (selection.module, selection.function) if selection.function else selection.frame
    verb = "pretrain" if plan.job.task == "pretrain" else "finetune"
    step = "vlm_step" if plan.is_vlm else "gpt_step"
    imports = [
        f"from {module} import {function}",
        "from megatron.bridge.training.comm_overlap import CommOverlapConfig",
        f"from megatron.bridge.training.{verb} import {verb}",
        f"from megatron.bridge.training.{step} import forward_step",
        "from megatron.bridge.training.mixed_precision import get_mixed_precision_config",
        "from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides",
    ]
    body = [f"cfg = {function}()"]
    if not selection.function:
        imports.append("from megatron.bridge import AutoBridge")
        source = json.dumps(selection.source) if selection.source else 'os.environ["HF_MODEL"]'
        body += [
            f"source = {source}",
            "cfg.model = AutoBridge.from_hf_pretrained(source).to_megatron_provider(load_weights=False)",
            "cfg.tokenizer.tokenizer_model = source",
            *(["cfg.dataset.hf_processor_path = source"] if plan.is_vlm else []),
        ]
    body += [
        f"cfg.mixed_precision = get_mixed_precision_config({json.dumps(export.precision)})",
        "if cfg.comm_overlap is None:  # overrides need an object to go to",
        "    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)",
        *(_FAULT_TOLERANCE if fault_tolerant else ()),
        "cfg = process_config_with_overrides(cfg, cli_overrides=[*OVERRIDES, *sys.argv[1:]])",
    ]
    if fault_tolerant:
        names = "FaultToleranceConfig, NVRxStragglerDetectionConfig"
        imports.append(f"from megatron.bridge.training.config import {names}")
    if export.backend:
        imports.append("from megatron.bridge.training.flex_dispatcher_backend import apply_flex_dispatcher_backend")
        body += [
            "# The backend's name alone changes nothing: this also sets the dispatcher's type.",
            f"apply_flex_dispatcher_backend(cfg.model, moe_flex_dispatcher_backend={json.dumps(export.backend)})",
        ]
    body.append(f"{verb}(config=cfg, forward_step_func=forward_step)")
    first = "import os\nimport sys" if "os.environ" in "".join(body) else "import sys"
    listed = "\n".join(f"    {json.dumps(text, ensure_ascii=False)}," for text in overrides(export))
    head = f"# {json.dumps(plan.model_name)} for {export.stack}, exported by threefold."
    parts = [head, "", first, "", *sorted(imports), "", "OVERRIDES = [", listed, "]", "", *body, ""]
    return "\n".join(parts)


def performance_words(export: Export, steps: int | None = None, settings: dict[str, Any] | None = None) -> list[str]:
    """The command line of Bridge's performance script for this plan: flags that select, then every override."""
    plan, selection = export.plan, export.selection
    words = ["uv", "run", "python", _SCRIPT]
    if selection.stem and not plan.model_name.startswith("hf:"):
        words += ["-m", selection.family, "-mr", selection.stem]
    if plan.is_vlm:
        words += ["--domain", "qwen3vl" if plan.model.family == "qwen3_vl_moe" else "vlm"]
    words += ["--task", plan.job.task]
    if plan.cluster.chip in SCRIPT_CHIPS:
        words += ["-g", plan.cluster.chip]
    known = PRECISIONS.get(plan.knobs.precision)
    is_short = known is not None and known.short in _SHORT_PRECISIONS
    words += ["-c", known.short if known and is_short else "bf16", "-ng", str(plan.cluster.gpus)]
    words += ["-gn", str(plan.cluster.node)]
    if steps is not None:
        words += ["--max_steps", str(steps)]
    words += ["--config_variant", "v1", "--cuda_graph_impl", *_graph_flags(plan)]
    if plan.model.is_moe:
        words += ["--moe_flex_dispatcher_backend", export.backend or "None", "--moe_a2a_overlap", "false"]
    if plan.job.data == "synthetic" and plan.job.task == "pretrain":
        words += ["--tokenizer_type", "NullTokenizer"]
    chosen = export.settings if settings is None else settings
    return [*words, *(override(path, value) for path, value in chosen.items())]


def _graph_flags(plan: Plan) -> list[str]:
    if not plan.knobs.graphs:
        return ["none"]
    if "full_iteration" in plan.knobs.graphs:
        return ["local", "--cuda_graph_scope", "full_iteration"]
    return ["transformer_engine", "--cuda_graph_scope", ",".join(plan.knobs.graphs)]


def performance_command(
    export: Export, steps: int | None = None, settings: dict[str, Any] | None = None, arm: Plan | None = None
) -> str:
    """`arm`: the plan as this arm of an A/B runs it, where it is not the exported one."""
    words = performance_words(export, steps, settings)
    connections = _connections(arm or export.plan)
    first = [] if connections is None else [f"CUDA_DEVICE_MAX_CONNECTIONS={connections}"]
    lines, flags = [], words[4:]
    while flags:
        size = 2 if flags[0].startswith("-") else 1
        lines.append(" ".join(shlex.quote(word) for word in flags[:size]))
        flags = flags[size:]
    return " \\\n  ".join([" ".join([*first, *words[:4]]), *lines])


def performance_script(export: Export) -> str:
    """The plan's own line, and for experts that travel the arms of an A/B of their overlap, one variable at a time."""
    lines = ["#!/bin/bash", "# From the root of Megatron Bridge's repository.", ""]
    arms = {name: (pair, arm) for name, pair in _ARMS.items() if (arm := _arm(export.plan, pair))}
    if len(arms) < 2:
        return "\n".join([*lines, "# this plan", performance_command(export, AB_STEPS), ""])
    for name, (pair, arm) in arms.items():
        settings = {**export.settings, **dict(zip(_OVERLAP, pair, strict=True))}
        lines += [f"# {name}", performance_command(export, AB_STEPS, settings, arm), ""]
    return "\n".join(lines)


def _arm(plan: Plan, overlaps: tuple[bool, bool]) -> Plan | None:
    """The plan with EP overlap and delayed weight gradients so set; None where rules refuse it."""
    if not plan.model.is_moe:
        return None
    arm = change(plan, {"target": BRIDGE, "knobs.ep_overlap": overlaps[0], "knobs.delay_wgrad": overlaps[1]})
    return None if blockers(judge(arm)) else arm


def _connections(plan: Plan) -> int | None:
    """CUDA_DEVICE_MAX_CONNECTIONS of a plan that states it, as `check` wants it: EP overlap needs another than TP."""
    stated, at = plan.knobs.max_connections, "knobs.max_connections"
    if stated is None:
        return None
    fixes = (finding.fix for finding in judge(plan) if finding.at == at and finding.fix)
    return next((fix[at] for fix in fixes), stated)


def environment_script(export: Export) -> str:
    lines = []
    for item in export.environment:
        lines += [f"# {item.reason}", f"export {item.name}={shlex.quote(item.value)}"]
    return "\n".join(lines) + "\n"


def launch_words(export: Export) -> list[str]:
    """torchrun and what it runs, for one node or as a part of a batch script."""
    place = shape(export.plan)
    nodes, tasks = (place.nodes, place.per_node) if place else (1, export.plan.cluster.gpus)
    return ["torchrun", f"--nnodes={nodes}", f"--nproc-per-node={tasks}"]


def argument_line(export: Export) -> str:
    connections = export.plan.knobs.max_connections
    first = [] if connections is None else [f"CUDA_DEVICE_MAX_CONNECTIONS={connections}"]
    start = " ".join([*first, *launch_words(export), "pretrain_gpt.py"])
    return f"{start} \\\n  {as_line(export.arguments)}\n"


def inexpressible_text(export: Export) -> str:
    """The release and the table of an export."""
    lines = [f"For {export.stack}.", *([f"{export.remark[0].upper()}{export.remark[1:]}."] if export.remark else [])]
    if not export.inexpressible:
        lines.append("Every field of the plan is expressed.")
    for title, items in (
        ("Not expressed:", export.lost),
        ("Expressed, but read back in another spelling:", export.respelled),
    ):
        if items:
            lines += [title, *(f"  {item.field} = {_shown(item.value)}: {item.reason}" for item in items)]
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value, ensure_ascii=False)


def job_script(export: Export, file: str, options: Options, script: str | None = None) -> str:
    """A Slurm script. `file` gives the job its name; `script` is the path of `train.py`, which is written by the job
    itself where there is none."""
    setup = [environment_script(export)]
    if export.to == BRIDGE and not options.run:
        setup.append("# Bridge resumes from nemo_experiments/ without a word: remove it for a fresh run.")
    if export.to != BRIDGE:
        command = " ".join(["pretrain_gpt.py", as_line(export.arguments).replace("\n  ", "\n    ")])
    else:
        command = shlex.quote(script) if script else '"train-$SLURM_JOB_ID.py"'
        command = " ".join([command, *(shlex.quote(text) for text in _job_overrides(options))])
        if script is None:
            setup.append(_here_document(export, '"train-$SLURM_JOB_ID.py"', options.fault_tolerant))
    return node_script(export.plan, file, options, "\n".join(setup), command)


def _job_overrides(options: Options) -> list[str]:
    """Overrides that the job asks for and not the plan: where checkpoints go, and steps to trace."""
    folder = [override(f"checkpoint.{name}", f"{options.run}/checkpoints") for name in ("save", "load") if options.run]
    more = ["profiling.use_nsys_profiler=true"] if options.nsys else []
    if options.fault_tolerant:
        more.append("checkpoint.async_save=true")
        minutes = time_limit(options.time) if options.time else None
        if minutes is not None:  # torchrun and ft_launcher end ranks 30 s after a signal, too soon for a checkpoint
            more.append(f"train.exit_duration_in_mins={int(minutes - options.notice_seconds / 60)}")
    return [*folder, *more]


def torchrun_script(export: Export) -> str:
    """The commands to run on each node; a training script is written first."""
    words = launch_words(export)
    if words[1] != "--nnodes=1":
        words += ["--rdzv-backend=c10d", '--rdzv-endpoint="$HEAD:29400"', "--rdzv-id=threefold"]
        first = f"# on each node; HEAD is the name of one of them\n{environment_script(export)}"
    else:
        words.append("--standalone")
        first = environment_script(export)
    return f"{first}{_here_document(export, 'train.py')}\n{' '.join([*words, 'train.py'])}\n"


def _here_document(export: Export, path: str, fault_tolerant: bool = False) -> str:
    return f"cat > {path} <<'PYTHON'\n{train_script(export, fault_tolerant)}PYTHON"


def export_files(export: Export, file: str, options: Options, folder: str) -> dict[str, str]:
    """Every file of an export by name. The job runs `train.py` of `folder`, seen from where it is submitted."""
    if export.to == BRIDGE:
        own = {
            "train.py": train_script(export, options.fault_tolerant),
            "overrides.txt": "".join(f"{text}\n" for text in overrides(export)),
            "overrides.yaml": overrides_yaml(export),
            "performance.sh": performance_script(export),
        }
    else:
        own = {"arguments.sh": argument_line(export)}
    job = job_script(export, file, options, f"{folder.rstrip('/')}/train.py")
    own |= {"environment.sh": environment_script(export), "job.sbatch": job, "validate.py": validation_script(export)}
    return {**own, "table.txt": inexpressible_text(export)}
