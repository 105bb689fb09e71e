"""Writes the JSON Schemas of what the verbs print with `--json`: `python tools/write_schemas.py [VERB ...]`.

A schema is made from the outputs of `SAMPLES`, which are run in a scratch folder: a key that every sample has is
required, other keys may come along, and an object whose keys are names of something (fields, terms, files) has values
of one form. Every verb may print findings in place of its answer. A version is raised where a key that readers could
rely on is gone or has another type; keys that are added leave it.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from threefold.cli.main import main
from threefold.report.output_schemas import SCHEMAS, required_paths

ROOT = Path(__file__).parents[1]
BRIDGE = str(ROOT / "recipes" / "qwen3-30b-a3b-4k-16xh100-bf16-overlap.toml")
LONG = str(ROOT / "recipes" / "deepseek-v3-128k-256xh100-fp8.toml")
VISION = str(ROOT / "recipes" / "qwen3-vl-235b-a22b-4k-64xgb200-bf16-fsdp.toml")
TINY = str(ROOT / "recipes" / "tiny-qwen3-moe-256-1xcpu-fp32.toml")
LOG = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
SHORT = ("job.seq_len=64", "job.global_batch=2", "job.micro_batch=1", "job.steps=6", "run.tensorboard=false")
PLAN = ("--model", "qwen3-30b-a3b", "--chip", "h100", "--seq-len", "4096", "--top", "2")
# By verb: command lines of which every one has to end with 0 or 1.
SAMPLES: dict[str, list[tuple[str, ...]]] = {
    "plan": [
        ("plan", *PLAN, "--gpus", "16"),
        ("plan", *PLAN, "--gpus", "8", "--target", "megatron-bridge"),
        ("plan", *PLAN, "--gpus", "1"),
    ],
    "fit": [("fit", "qwen3-30b-a3b", "--gpus", "1,4,16"), ("fit", "olmoe-1b-7b", "--gpus", "8")],
    "check": [("check", BRIDGE, "layout.ep=48"), ("check", TINY, "--unjudged"), ("check", LONG)],
    "check-explain": [("check", "--explain", "ep-divides-experts"), ("check", "--explain", "unknown-field")],
    "check-explain-death": [("check", "--explain", "deepep-timeout"), ("check", "--explain", "nccl-timeout")],
    "show": [("show", LONG), ("show", BRIDGE)],
    "estimate": [("estimate", LONG), ("estimate", BRIDGE), ("estimate", VISION)],
    "estimate-training": [
        ("estimate", LONG, "--tokens", "1T"),
        ("estimate", BRIDGE, "--tokens", "1T", "--sizes", "auto"),
    ],
    "sweep": [("sweep", LONG, "--over", "job.seq_len=4096,32768"), ("sweep", TINY, "--over", "job.lr=1,2")],
    "export": [("export", LONG), ("export", BRIDGE, "--to", "megatron-lm"), ("export", VISION)],
    "import": [("import", "overrides.txt", "--model", "qwen3-30b-a3b", "--chip", "h100", "--gpus", "8")],
    "compare": [("compare", BRIDGE, BRIDGE.replace("-overlap", "-no-overlap")), ("compare", BRIDGE, BRIDGE)],
    "diagnose": [("diagnose", *files) for files in (("job.log",), ("quiet.log",), ("job.log", "runs/a"), ("no.log",))],
    "load": [("load", "runs/a"), ("load", "runs/a/loads.json", "--ep", "2")],
    "find": [("find", "ulysses"), ("find", "oom", "--full")],
    "find-name": [("find", "moe_paged_stash", "--kind", "name"), ("find", "nothing_at_all", "--kind", "name")],
    "find-ab": [("find", "--ab")],
    "rules": [("rules",)],
    "models": [("models",)],
    "chips": [("chips",)],
    "chips-one": [("chips", "h100"), ("chips", "gb200")],
    "models-one": [("models", "qwen3-30b-a3b"), ("models", "deepseek-v3")],
    "skills": [("skills",)],
    "card": [("card", "list")],
    "env": [("env", "--no-kernels")],
    "report": [("report", LONG, "--out", "a.html"), ("report", "runs/a", "--out", "b.html")],
    "launch": [("launch", LONG, "--target", "threefold", "--slurm"), ("launch", TINY, "--torchrun")],
    "tokenize": [("tokenize", "notes.md", "--out", "shard")],
    "train": [("train", TINY, *SHORT, "--run", "runs/a"), ("train", TINY, *SHORT, "--run", "runs/b", "--stop-at", "3")],
    "dry-run": [("dry-run", TINY, *SHORT)],
    "verify": [("verify", TINY, *SHORT)],
    "eval": [("eval", "runs/a", "--data", "notes.md")],
    "sample": [("sample", "runs/a", "--prompt", "Once", "--max-tokens", "4")],
    "export-hf": [("export-hf", "runs/a", "--out", "hf")],
    "import-hf": [("import-hf", "hf", "--out", "runs/c")],
    "profile": [("profile", "runs/a"), ("profile", "runs/b")],
    "contract": [("contract", BRIDGE), ("contract", "runs/a")],
    "validate": [("validate", "runs/a"), ("validate", "runs/b")],
    "tune": [("tune", TINY, *SHORT, "--budget", "20s", "--out", "tuning"), ("tune", "--show", "tuning")],
    "overlap-ab": [("overlap-ab", TINY, *SHORT, "cluster.gpus=2", "layout.ep=2", "--warmup", "1", "--steps", "2")],
    "calibrate": [("calibrate", "--budget", "30s", "--out", "chip.toml")],
    "regress": [("regress", TINY, "longer.toml", "--repeats", "2", "--", "sh", "-c", "! grep -q 128 {plan}")],
    "finetune": [("finetune", "hf", "--data", "notes.md", "--out", "runs/d", "--plan-only")],
    "completion": [("completion", "bash")],
}
ORDER = ("train", "export-hf")  # first, because others read what they leave
# What may hold a value of any kind: fields of a plan and settings of Megatron.
ANY = {"value", "fix_data", "plan", "fields", "overrides", "changes", "moved", "settings", "default", "set"}
ANY |= {"a", "b", "ours", "theirs"}  # sides of a comparison
# Objects whose keys are names of something, by the key that holds them.
MAPS = {"fields", "plan", "overrides", "terms", "reserve", "degrees", "links", "groups", "files", "fix_data", "moved"}
MAPS |= {"changes", "rules", "read", "metrics", "settings", "sizes", "counts", "packages", "versions", "by_axis"}


def run(words: tuple[str, ...]) -> Any:
    """What a command prints as JSON."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([words[0], "--json", *words[1:]])
    if code not in (0, 1, 3) or not out.getvalue().strip():
        raise SystemExit(f"{' '.join(words)} ended with {code}: {err.getvalue()[-500:]}")
    return json.loads(out.getvalue())


def schema_of(values: list[Any], key: str = "", depth: int = 0) -> dict[str, Any]:
    """A schema that all values have."""
    kinds = {_kind(value) for value in values}
    if depth > 1 or not kinds & {"object", "array"}:
        kinds.add("null")  # what every sample has may be unknown elsewhere
    if kinds == {"null"}:
        return {}  # nothing says what it is where it is known
    if key in ANY:
        return {"type": ["object", "null"]} if "object" in kinds else {}
    schema: dict[str, Any] = {"type": sorted(kinds)[0] if len(kinds) == 1 else sorted(kinds)}
    objects = [value for value in values if isinstance(value, dict)]
    items = [item for value in values if isinstance(value, list) for item in value]
    if objects and _is_map(objects, key):
        inner = [item for value in objects for item in value.values()]
        schema["additionalProperties"] = schema_of(inner, "", depth + 1) if inner else True
    elif objects:
        names = list(dict.fromkeys(name for value in objects for name in value))
        schema["properties"] = {
            name: schema_of([value[name] for value in objects if name in value], name, depth + 1) for name in names
        }
        schema["required"] = [name for name in names if all(name in value for value in objects)]
    if items:
        schema["items"] = schema_of(items, key, depth + 1)
    return schema


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    names = {int: "number", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _is_map(objects: list[dict[str, Any]], key: str) -> bool:
    names = [name for value in objects for name in value]
    return key in MAPS or any(not name.isidentifier() or name != name.lower() for name in names)


def collect(wanted: list[str]) -> Iterator[tuple[str, list[Any]]]:
    """The outputs of the samples of the verbs that are wanted, or of all."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch):
        os.environ["XDG_CACHE_HOME"] = scratch
        Path("cards").symlink_to(ROOT / "cards")
        Path("longer.toml").write_text(Path(TINY).read_text().replace("seq_len = 256", "seq_len = 128"))
        Path("job.log").write_text(LOG)
        Path("quiet.log").write_text("nothing happened\n")
        Path("notes.md").write_text("Some words of a text. " * 400)
        Path("overrides.txt").write_text("model.tensor_model_parallel_size=2\nmodel.context_parallel_size=2\n")
        for verb in sorted(SAMPLES, key=lambda verb: verb not in ORDER):
            if not wanted or verb in wanted or verb in ORDER:
                yield verb, [run(words) for words in SAMPLES[verb]]


def write(verb: str, outputs: list[Any]) -> None:
    path = SCHEMAS / f"{verb}.json"
    answers = [output for output in outputs if not _is_findings(output)] or outputs
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"threefold {verb} --json"}
    schema |= schema_of(answers)
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    kept = set(old.get("x-relied-on", [])) <= set(required_paths(schema))
    version = old.get("x-version", 1) + (0 if kept else 1)
    schema |= {"$id": f"threefold/{verb}/{version}", "x-version": version, "x-relied-on": required_paths(schema)}
    path.write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")
    print(f"{path.name}: version {version}, {len(schema['x-relied-on'])} keys")


def _is_findings(output: Any) -> bool:
    return isinstance(output, dict) and set(output) == {"ok", "summary", "findings"}


if __name__ == "__main__":
    SCHEMAS.mkdir(exist_ok=True)
    for verb, outputs in collect(sys.argv[1:]):
        write(verb, outputs)
