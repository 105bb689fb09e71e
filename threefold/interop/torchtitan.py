"""A plan from the configuration that torchtitan prints when it starts.

It is JSON, or in older releases a dict as Python prints it. What torchtitan runs is priced as our own engine: both are
PyTorch without Transformer Engine, with FSDP2 and EP.
"""

import ast
import json
from collections.abc import Mapping
from typing import Any

from threefold.findings import Finding, in_order
from threefold.interop.megatron.import_text import Imported
from threefold.plan.parse import change, parse

MAX_CHARS = 2**20
_MODELS = {  # by model.name and model.flavor
    ("deepseek_v3", "671b"): "deepseek-v3",
    ("deepseek_v3", "16b"): "moonlight-16b-a3b",
    ("qwen3", "30b-a3b"): "qwen3-30b-a3b",
    ("qwen3", "235b-a22b"): "qwen3-235b-a22b",
    ("qwen3", "8b"): "qwen3-8b",
    ("gpt_oss", "20b"): "gpt-oss-20b",
    ("gpt_oss", "120b"): "gpt-oss-120b",
    ("llama3", "8b"): "llama3-8b",
    ("llama3", "70b"): "llama3-70b",
    ("llama3", "405b"): "llama3.1-405b",
}
_DEGREES = {
    "tensor_parallel_degree": "layout.tp",
    "context_parallel_degree": "layout.cp",
    "pipeline_parallel_degree": "layout.pp",
    "expert_parallel_degree": "layout.ep",
    "expert_tensor_parallel_degree": "layout.etp",
    "data_parallel_replicate_degree": "layout.replicate",
}
_SCHEDULES = {
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "zero-bubble",
    "dualpipev": "dualpipev",
}


def read_config(text: str) -> dict[str, Any]:
    """The printed configuration. Raises ValueError where it is none."""
    if len(text) > MAX_CHARS:
        raise ValueError("it is too long for a configuration")
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        try:
            value = ast.literal_eval(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError) as error:
            raise ValueError(f"it is neither JSON nor a dict: {type(error).__name__}") from None
    if not isinstance(value, dict):
        raise ValueError("it is no table")
    return value


def import_torchtitan(
    text: str, mesh: Mapping[str, int] | None = None, given: Mapping[str, Any] | None = None
) -> Imported:
    """The plan behind a configuration. `mesh` are the degrees that the job printed, which know the number of ranks."""
    try:
        config = read_config(text)
    except ValueError as error:
        return Imported(
            None, [_finding("import-readable", "import", str(error), "give torchtitan's JSON", "error")], ""
        )
    fields, findings = _fields(config, mesh or {})
    fields |= given or {}
    if "model" not in fields:
        model = _table(config, "model")
        problem = f"no model of ours is torchtitan's {model.get('name')} {model.get('flavor')}"
        findings.append(_finding("import-needs-model", "model", problem, "name it: model=NAME", "error"))
        return Imported(None, in_order(findings), "torchtitan")
    if "cluster.chip" not in fields:
        fields["cluster.chip"] = "h100"
        findings.append(_finding("import-needs-cluster", "cluster.chip", "no chip named: h100", "give the chip"))
    parsed = parse(fields)
    findings += parsed.findings
    plan = parsed.plan
    if plan and "cluster.gpus" not in fields:
        plan = change(plan, {"cluster.gpus": plan.layout.min_gpus})
    return Imported(plan, in_order(findings), "torchtitan")


def _finding(rule: str, at: str, problem: str, advice: str, severity: Any = "warning") -> Finding:
    return Finding(rule=rule, at=at, problem=problem, advice=advice, severity=severity)


def _table(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = config.get(name)
    return value if isinstance(value, dict) else {}


def _fields(config: Mapping[str, Any], mesh: Mapping[str, int]) -> tuple[dict[str, Any], list[Finding]]:
    training, parallelism = _table(config, "training"), _table(config, "parallelism")
    fields: dict[str, Any] = {"target": "threefold", **_model(config)}
    for name, path in _DEGREES.items():
        if isinstance(degree := parallelism.get(name), int) and degree > 1:
            fields[path] = degree
    for name in ("pp", "cp", "tp", "ep", "etp"):
        if mesh.get(name, 1) > 1:
            fields[f"layout.{name}"] = mesh[name]
    ranks = _ranks(parallelism, mesh)
    if ranks:
        fields["cluster.gpus"] = ranks
    schedule = _SCHEDULES.get(str(parallelism.get("pipeline_parallel_schedule", "")).lower())
    if fields.get("layout.pp", 1) > 1 and schedule:
        fields["layout.schedule"] = schedule
        if schedule != "1f1b":
            fields["layout.vpp"] = 2
    for name, path in (("seq_len", "job.seq_len"), ("local_batch_size", "job.micro_batch"), ("steps", "job.steps")):
        if isinstance(value := training.get(name), int) and value > 0:
            fields[path] = value
    if (batch := _global_batch(training, fields, ranks)) is not None:
        fields["job.global_batch"] = batch
    findings = [] if ranks else [_finding("import-needs-cluster", "cluster.gpus", "no number of ranks", "give --plan")]
    return fields | _knobs(config), findings


def _model(config: Mapping[str, Any]) -> dict[str, Any]:
    model = _table(config, "model")
    name, flavor = str(model.get("name", "")).split(".")[-1].lower(), str(model.get("flavor", "")).lower()
    known = _MODELS.get((name, flavor))
    return {"model": known} if known else {}


def _ranks(parallelism: Mapping[str, Any], mesh: Mapping[str, int]) -> int | None:
    if mesh:
        dp = mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
        return dp * mesh.get("cp", 1) * mesh.get("tp", 1) * mesh.get("pp", 1)
    shard = parallelism.get("data_parallel_shard_degree")
    if not isinstance(shard, int) or shard < 1:
        return None  # -1: all ranks that are left
    ranks = shard
    for name in ("data_parallel_replicate", "context_parallel", "tensor_parallel", "pipeline_parallel"):
        degree = parallelism.get(f"{name}_degree", 1)
        ranks *= degree if isinstance(degree, int) and degree > 0 else 1
    return ranks


def _global_batch(training: Mapping[str, Any], fields: Mapping[str, Any], ranks: int | None) -> int | None:
    given, local = training.get("global_batch_size"), training.get("local_batch_size")
    if isinstance(given, int) and given > 0:
        return given
    if ranks is None or not isinstance(local, int):
        return None
    apart = 1
    for axis in ("tp", "cp", "pp"):
        apart *= fields.get(f"layout.{axis}", 1)
    return local * max(1, ranks // apart)


def _knobs(config: Mapping[str, Any]) -> dict[str, Any]:
    knobs: dict[str, Any] = {"knobs.precision": "bf16"}
    mode = _table(config, "activation_checkpoint").get("mode")
    knobs["knobs.recompute"] = ["full"] if mode == "full" else []
    compiles = _table(config, "compile").get("enable", _table(config, "training").get("compile"))
    if isinstance(compiles, bool):
        knobs["knobs.compile"] = compiles
    converters = _table(config, "model").get("converters")
    named = [str(one) for one in converters] if isinstance(converters, list) else []
    if any("float8" in one for one in named):
        knobs["knobs.precision"] = "fp8-tensor"
    if any("mx" in one for one in named):
        knobs["knobs.precision"] = "mxfp8"
    if "deepep" in str(_table(config, "parallelism").get("expert_parallel_comm_backend", "")).lower():
        knobs["knobs.dispatcher"] = "deepep"
    return knobs
