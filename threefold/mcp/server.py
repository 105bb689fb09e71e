"""The server: each tool is a verb with its answer as JSON. Only this module needs the `mcp` package.

A plan is the path of a TOML file inside the server's folders, or the text of one. Nothing is written but in a scratch
folder, which goes with the call.
"""

import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

from mcp.server import MCPServer

from threefold import __version__
from threefold.report.output_schemas import output_schema

INSTRUCTIONS = """\
Threefold plans, checks, prices and explains Mixture-of-Experts training. Look words up with `find` first. A number from
`estimate` or `plan` is a prediction with a band: quote both. An error of `check` cannot run; silence is no approval."""

Answer = dict[str, Any]
# The outputs (`threefold schema --list`) that a tool may return, where they have another name than the tool.
_OUTPUTS = {
    "setting": ("find-name",),
    "explain": ("check-explain", "check-explain-death"),
    "compare_plans": ("compare",),
    "published_pairs": ("find-ab",),
}


def build_server(folders: Sequence[Path]) -> MCPServer:
    """A server whose tools read plans, runs and logs inside these folders."""
    server: MCPServer = MCPServer("threefold", version=__version__, instructions=INSTRUCTIONS)
    for tool in _tools([folder.resolve() for folder in folders]):
        server.add_tool(tool)
        if (added := server._tool_manager.get_tool(tool.__name__)) is not None:
            added.fn_metadata.output_schema = answer_schema(tool.__name__)
    return server


def answer_schema(tool: str) -> dict[str, Any]:
    """What a tool returns: the exit code with the verb's own JSON, or a message."""
    answers = [output_schema(name) for name in _OUTPUTS.get(tool, (tool,))]
    findings = {"type": "object", "required": ["ok", "summary", "findings"]}
    inner = [_loosened(schema) | {"required": schema.get("required", [])} for schema in answers]
    return {
        "type": "object",
        "required": ["exit_code"],
        "properties": {
            "exit_code": {"type": "integer"},
            "message": {"type": "string"},
            "answer": {"anyOf": [*inner, findings]},
        },
    }


def _loosened(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema with inner keys that may be absent or null: clients refuse an answer for one that is."""
    kept = {key: value for key, value in schema.items() if key[0] not in "$x" and key != "required"}
    kinds = kept.get("type", [])
    if "type" in kept and "null" not in kinds:
        kept["type"] = [kinds, "null"] if isinstance(kinds, str) else [*kinds, "null"]
    if "properties" in kept:
        kept["properties"] = {name: _loosened(inner) for name, inner in kept["properties"].items()}
    for name in ("items", "additionalProperties"):
        if isinstance(kept.get(name), dict):
            kept[name] = _loosened(kept[name])
    return kept


def _tools(folders: Sequence[Path]) -> list[Callable[..., Answer]]:
    def on_plan(verb: str, plans: Sequence[str], overrides: Sequence[str], *flags: str) -> Answer:
        """A verb on plans that are paths or texts."""
        with tempfile.TemporaryDirectory() as scratch:
            allowed = [*folders, Path(scratch).resolve()]
            try:
                check_overrides(overrides, allowed)
                files = [_plan_file(plan, number, Path(scratch), allowed) for number, plan in enumerate(plans)]
            except (OutsideError, OSError) as error:
                return {"exit_code": 2, "message": str(error)}
            return run_verb([verb, *map(str, files), *overrides, *flags], folders[0])

    def find(words: str, kind: str = "", most: int = 8, full: bool = False) -> Answer:
        """Search rules, plan fields, commands, pages, recipes, published runs, deaths of jobs and settings of Megatron,
        in any words. kind: rule, field, name, command, word, doc, recipe, card, run, row, death or remedy; empty: all.
        full: with the whole text of each entry."""
        flags = [*(["--kind", kind] if kind else []), *(["--full"] if full else [])]
        return run_verb(["find", *flags, "--most", str(most), "--", *words.split()], folders[0])

    def setting(name: str) -> Answer:
        """What a setting of Megatron or torchtitan is: class, file, type, default, releases, plan field, rules."""
        return run_verb(["find", "--kind", "name", "--", name], folders[0])

    def explain(slug: str) -> Answer:
        """What a finding means, why, how to confirm it and how to fix it. slug: as `check` and `find` print it."""
        return run_verb(["check", "--explain", slug], folders[0])

    def plan(
        model: str, chip: str, gpus: str, seq_len: str = "4096", target: str = "", overrides: list[str] | None = None
    ) -> Answer:
        """Choose layout and knobs for a model on a cluster. gpus: a number or "auto"; seq_len: such as 4096 or 128K;
        target: threefold or megatron-bridge; overrides: field=value, such as job.global_batch=256."""
        given = [*(overrides or []), f"model={model}"]
        try:
            check_overrides(given, folders)
        except OutsideError as error:
            return {"exit_code": 2, "message": str(error)}
        flags = ["--model", model, "--chip", chip, "--gpus", gpus, "--seq-len", seq_len]
        return run_verb(["plan", *(overrides or []), *flags, *(["--target", target] if target else [])], folders[0])

    def check(plan: str, overrides: list[str] | None = None) -> Answer:
        """Judge a plan by every rule, with fixes that were tried. plan: the path or the text of a TOML file."""
        return on_plan("check", [plan], overrides or [])

    def estimate(plan: str, overrides: list[str] | None = None) -> Answer:
        """Predict memory by stage and term, step time by term, throughput with its band, and the bottleneck."""
        return on_plan("estimate", [plan], overrides or [])

    def fit(model: str, chip: str = "h100", seq_len: str = "4096", target: str = "", gpus: str = "") -> Answer:
        """Does a model fit, and from how many GPUs on: a line for each number of them. gpus: such as 8,16,32; empty for
        the usual ones."""
        try:
            check_overrides([f"model={model}"], folders)
        except OutsideError as error:
            return {"exit_code": 2, "message": str(error)}
        flags = [*(["--target", target] if target else []), *(["--gpus", gpus] if gpus else [])]
        return run_verb(["fit", model, "--chip", chip, "--seq-len", seq_len, *flags], folders[0])

    def diagnose(files: list[str], plan: str = "") -> Answer:
        """What a dead, slow or full job left behind: causes with evidence and fixes. files: logs, memory snapshots,
        flight recorder dumps, traces or run folders in the server's folders; plan: the path of the plan that ran."""
        try:
            inputs = [inside(file, folders) for file in files]
            ran = [inside(plan, folders)] if plan else []
            for path in (*inputs, *ran):
                check_tree(path, folders)
                check_plan(path, folders)
        except (OutsideError, OSError) as error:
            return {"exit_code": 2, "message": str(error)}
        flags = ["--plan", str(ran[0])] if ran else []
        return run_verb(["diagnose", *map(str, inputs), *flags], folders[0])

    def published_pairs(words: str = "") -> Answer:
        """Published runs that vary one setting, side by side, with what differs, their status and their caveats."""
        return run_verb(["find", "--ab", "--", *words.split()], folders[0])

    def compare_plans(first: str, second: str) -> Answer:
        """Set two plans side by side: what differs, and how much each difference is predicted to change."""
        return on_plan("compare", [first, second], [])

    def export(plan: str, to: str = "megatron-bridge", overrides: list[str] | None = None) -> Answer:
        """A plan as the overrides, script and environment of megatron-bridge, or as arguments of megatron-lm."""
        return on_plan("export", [plan], overrides or [], "--to", to)

    tools = [find, setting, published_pairs, explain, plan, fit, check, estimate, compare_plans, diagnose, export]
    return cast(list[Callable[..., Answer]], tools)


def _plan_file(plan: str, number: int, scratch: Path, allowed: Sequence[Path]) -> Path:
    """The plan's file: the one that is named, or a new one with the text."""
    if "\n" in plan or "=" in plan:
        file = scratch / f"plan-{number}.toml"
        file.write_text(plan, encoding="utf-8")
    else:
        file = inside(plan, allowed)
        check_tree(file, allowed)
    check_plan(file, allowed)
    return file


_REFERENCE = re.compile(r"(?:hf|file):(.+)")  # values of a plan that name a file or folder
_PATH_FIELDS = ("job.data", "job.val_data", "job.tokenizer")
MOST_PLAN_BYTES = 2**20
MOST_ENTRIES = 20_000


class OutsideError(ValueError):
    """A path that the server was not started for."""


def inside(path: str, folders: Sequence[Path]) -> Path:
    """The path with links resolved, where it lies inside one of the folders. A relative path starts at the first."""
    full = (folders[0] / path).resolve()
    if not any(full.is_relative_to(folder) for folder in folders):
        shown = ", ".join(str(folder) for folder in folders)
        raise OutsideError(f"{path} is outside of {shown}: start the server with `threefold mcp --folder DIR`")
    return full


def check_tree(path: Path, folders: Sequence[Path]) -> None:
    """Refuse a folder in which a link leads outside, or that holds too many files to be looked through."""
    for number, entry in enumerate(path.rglob("*") if path.is_dir() else ()):
        if entry.is_symlink():
            inside(str(entry), folders)
        if number >= MOST_ENTRIES:
            raise OutsideError(f"{path} holds more than {MOST_ENTRIES:,} files: name the file that is meant")


def check_overrides(overrides: Sequence[str], folders: Sequence[Path]) -> None:
    """Refuse overrides that name a file outside, or that are no override of a field."""
    for text in overrides:
        path, equals, value = text.partition("=")
        if not equals or path.startswith("-"):
            raise OutsideError(f"{text!r} is no override: write field=value, such as layout.ep=16")
        for named in _paths_in(path.strip(), value):
            inside(named, folders)


def check_plan(file: Path, folders: Sequence[Path]) -> None:
    """Refuse a plan file whose values name files outside. What cannot be read is left to the verb, which says so."""
    if not file.is_file() or file.stat().st_size > MOST_PLAN_BYTES:
        return
    try:
        plan = tomllib.loads(file.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError):
        return
    for path, value in _leaves(plan, ""):
        for named in _paths_in(path, str(value)):
            inside(str(file.parent / named) if not Path(named).is_absolute() else named, folders)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item, path)
    else:
        yield path, value


def _paths_in(field: str, value: str) -> Iterator[str]:
    """Files that a value names: behind `hf:` or `file:`, or as data or a tokenizer."""
    bare = value.strip("\"' ")
    match = _REFERENCE.match(bare)
    if match:
        yield match[1]
    elif field in _PATH_FIELDS and ("/" in bare or "." in bare):
        yield bare.partition("=")[2] or bare


SECONDS, BYTES, CHARACTERS = 120.0, 4 * 2**30, 200_000


def run_verb(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """The exit code (0 clean, 1 errors in the plan or a file, 2 a wrong call) with the verb's JSON, or what it said."""
    command = [sys.executable, "-m", "threefold", words[0], "--json", *words[1:]]
    environment = {**os.environ, "NO_COLOR": "1", "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            preexec_fn=_limit,
        )
    except subprocess.TimeoutExpired:
        return {"exit_code": 124, "message": f"no answer after {SECONDS:g} s: ask for less, such as fewer candidates"}
    said = done.stderr.strip()[-2000:]
    if not done.stdout.strip():
        return {"exit_code": done.returncode, "message": said or "no answer"}
    if len(done.stdout) > CHARACTERS:
        return {"exit_code": done.returncode, "message": f"an answer of {len(done.stdout):,} characters: ask for less"}
    try:
        answer = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"exit_code": done.returncode, "message": done.stdout[:2000]}
    return {"exit_code": done.returncode, "answer": answer} | ({"message": said} if said else {})


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
