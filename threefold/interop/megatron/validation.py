"""Megatron's verdict on an export: what it must end up with, the script that asks it, and the call of that script.

`validate.py` of an exported folder is the sources of `judge/` in one file, with what the plan says as its head. It
imports nothing of threefold, so that it runs on a login node, in the interpreter that has Megatron.
"""

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

from threefold.interop.megatron.export_plan import BRIDGE, Export
from threefold.interop.megatron.field_names import PRECISIONS
from threefold.interop.megatron.judge.verdict import NOT_JUDGED
from threefold.interop.megatron.models import BRIDGE_MODELS
from threefold.plan.plan import Plan
from threefold.spec.chips import ChipSpec
from threefold.spec.hf import hf_config_of
from threefold.spec.megatron import version
from threefold.spec.models import MODELS

_JUDGE = Path(__file__).parent / "judge"
_MODULES = ("verdict", "stand_ins", "machine", "values", "bridge", "lm", "process")
_CAPABILITY = {"ampere": (8, 0), "ada": (8, 9), "hopper": (9, 0), "blackwell": (10, 0)}
_ULTRA = ("b300", "gb300")  # compute capability 10.3: CUDA C++ Programming Guide 13, table of compute capabilities
_MULTIPROCESSORS = {"ampere": 108, "ada": 142, "hopper": 132, "blackwell": 148}  # NVIDIA's architecture white papers
# Transformer Engine beside each release, as NVIDIA's containers have it; the newest where a release is not listed.
_TRANSFORMER_ENGINE = {"0.3": "2.12.0", "0.4": "2.13.0", "0.5": "2.15.0", "0.6": "2.16.0"}
_FRAME = "qwen3-30b-a3b"  # whose recipe frames models without one
_GRACE_SECONDS = 30  # validate.py ends by its own limit; this one is for an interpreter that does not


def validation_script(export: Export) -> str:
    head = json.dumps(job_of(export), indent=1, ensure_ascii=True)
    parts = [
        '"""Judges the export in this folder by Megatron\'s own validation, on a CPU: python validate.py --help"""',
        *_judge_parts(),
        f"JOB = json.loads(r'''\n{head}\n''')\n",
        'if __name__ == "__main__":\n    sys.exit(validate_main(JOB, str(Path(__file__).resolve().parent)))\n',
    ]
    return "\n\n".join(parts)


@cache
def _judge_parts() -> tuple[str, ...]:
    """What is the same in every export."""
    return (*_imports(), *(_body(name) for name in _MODULES))


def job_of(export: Export) -> dict[str, Any]:
    """What the judge must know of the plan."""
    plan, release = export.plan, export.release
    short = ".".join(str(number) for number in version(release.bridge)[:2])
    return {
        "to": export.to,
        "stack": export.stack,
        "bridge": release.bridge,
        "core": release.core,
        "gpus": plan.cluster.gpus,
        "gpus_per_node": plan.cluster.node,
        "device": _device(plan.chip),
        "transformer_engine": plan.stack.te or _TRANSFORMER_ENGINE.get(short, _TRANSFORMER_ENGINE["0.6"]),
        "configs": _configs(export) if export.to == BRIDGE else {},
        "expected": expected_values(plan),
    }


def _device(chip: ChipSpec) -> dict[str, Any]:
    """A CPU's plan is judged as one for H100, because Megatron trains on GPUs."""
    is_gpu = chip.architecture in _CAPABILITY
    architecture = chip.architecture if is_gpu else "hopper"
    major, minor = _CAPABILITY[architecture]
    name = chip.name if is_gpu else "h100"
    return {
        "name": f"NVIDIA {name.upper()}",
        "major": major,
        "minor": 3 if name in _ULTRA else minor,
        "total_memory": chip.memory_bytes,
        "multi_processor_count": _MULTIPROCESSORS[architecture],
    }


def _configs(export: Export) -> dict[str, Any]:
    """config.json by name on the Hub, the plan's own model first; a recipe that frames it reads one of its own."""
    plan = export.plan
    name = export.selection.source or BRIDGE_MODELS.get(plan.model_name, BRIDGE_MODELS[_FRAME]).hub or plan.model_name
    if plan.model_name not in BRIDGE_MODELS:
        name = plan.model_name.removeprefix("hf:")
    configs = {name: hf_config_of(plan.model)}
    if not export.selection.function:
        configs[BRIDGE_MODELS[_FRAME].hub] = hf_config_of(MODELS[_FRAME])
    return configs


def _imports() -> list[str]:
    """The modules' imports from Python's library, once each."""
    lines: set[str] = set()
    for name in _MODULES:
        lines |= {ast.unparse(node) for node in _nodes(name) if _is_import(node) and not _is_own(node)}
    return ["\n".join(sorted(lines))]


def _body(name: str) -> str:
    """The text of a module without its imports; its docstring becomes a comment."""
    lines = (_JUDGE / f"{name}.py").read_text(encoding="utf-8").splitlines()
    kept = dict(enumerate(lines, 1))
    nodes = _nodes(name)
    for node in nodes:
        if _is_import(node) or node is nodes[0]:
            for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                del kept[number]
    doc = ast.get_docstring(ast.parse("\n".join(lines))) or ""
    comment = "\n".join(f"# {line}".rstrip() for line in doc.splitlines())
    text = "\n".join(kept.values()).strip()
    return f"{comment}\n\n{text}\n"


def _nodes(name: str) -> list[ast.stmt]:
    return ast.parse((_JUDGE / f"{name}.py").read_text(encoding="utf-8")).body


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _is_own(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").startswith("threefold.")


def expected_values(plan: Plan) -> dict[str, Any]:
    """Fields of a plan as Megatron must end up with them; `judge/values.py` reads the same names from Megatron.

    From the plan alone and not from its export, so that an export that says something else is seen.
    """
    knobs, layout, job, model = plan.knobs, plan.layout, plan.job, plan.model
    is_full = "full" in knobs.recompute
    expected = {
        "layout.tp": layout.tp,
        "layout.cp": layout.cp,
        "layout.pp": layout.pp,
        "layout.vpp": layout.vpp,
        "dp": plan.cluster.gpus // (layout.tp * layout.cp * layout.pp),
        "job.seq_len": job.seq_len,
        "dataset.seq_len": job.seq_len,
        "job.global_batch": job.global_batch,
        "job.micro_batch": job.micro_batch,
        "job.mtp": plan.mtp,
        "sequence_parallel": layout.tp > 1,
        "knobs.recompute": ["full"] if is_full else sorted(knobs.recompute),
        "knobs.recompute_method": (knobs.recompute_method or "uniform") if is_full else None,
        "knobs.recompute_layers": (knobs.recompute_layers or 1) if is_full else None,
        "knobs.ep_overlap": knobs.ep_overlap,
        "knobs.delay_wgrad": knobs.delay_wgrad,
        "knobs.tp_overlap": bool(knobs.tp_overlap and layout.tp > 1),
        "knobs.graphs": ["full_iteration"] if "full_iteration" in knobs.graphs else sorted(knobs.graphs),
        "knobs.activation_offload": sorted(knobs.activation_offload),
        "knobs.optimizer_offload": knobs.optimizer_offload,
        "knobs.precision": knobs.precision if knobs.precision in PRECISIONS else "fp32",
        "knobs.grad_dtype": knobs.grad_dtype,
        "knobs.optimizer_dtype": knobs.optimizer_dtype,
        "knobs.grad_reduce_overlap": knobs.grad_reduce_overlap,
        "knobs.param_gather_overlap": knobs.param_gather_overlap,
        "fsdp": knobs.data_parallel in ("fsdp", "hsdp"),
        "model.num_layers": model.num_layers,
        "model.dim": model.dim,
        "model.vocab": model.vocab,
        "layers of the chunks": [
            [len(plan.chunks[chunk * layout.pp + stage].layers) for chunk in range(layout.vpp)]
            for stage in range(layout.pp)
        ],
    }
    if model.moe is not None:
        expected |= {
            "layout.ep": layout.ep,
            "layout.etp": layout.etp,
            "knobs.dispatcher": "alltoall" if knobs.dispatcher == "local" else knobs.dispatcher,
            "knobs.shared_expert_overlap": knobs.shared_expert_overlap,
            "knobs.router_dtype": knobs.router_dtype,
            "model.num_experts": model.moe.num_experts,
            "model.top_k": model.moe.top_k,
            "model.expert_dim": model.moe.expert_dim,
        }
    return expected


def run_validation(
    stack: str, folder: Path, python: str | None, megatron: Path | None, seconds: float
) -> dict[str, Any]:
    """The verdict as `validate.py --json` prints it; without an answer "not judged", with the reason as a remark.

    `python` is the interpreter that has Megatron.
    """
    words = [python or sys.executable, str(folder / "validate.py"), "--json", "--seconds", str(seconds)]
    if megatron is not None:
        words += ["--megatron", str(megatron.resolve())]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=seconds + _GRACE_SECONDS)
    except OSError as error:
        return _not_judged(stack, f"{words[0]} cannot be started: {error.strerror}")
    except subprocess.TimeoutExpired:
        return _not_judged(stack, f"{words[0]} did not answer within {seconds:g} seconds")
    try:
        answer: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        return _not_judged(stack, f"{words[0]}: {lines[-1]}")
    return answer


def _not_judged(stack: str, reason: str) -> dict[str, Any]:
    return {"stack": stack, "verdict": NOT_JUDGED, "ranks": [], "differs": {}, "stood_in": [], "remark": reason}
