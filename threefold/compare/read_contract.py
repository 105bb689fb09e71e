"""Reads the contract of a plan file, a run's folder, the logs of a foreign job, or a contract that was written before.

`threefold contract`, `validate` and `compare` call `read_contract`. A run's contract is its complete plan with what its
contract.json says: versions, device, environment, content of the data. Logs state what the job printed: of Megatron-LM
all arguments, of Megatron Bridge and torchtitan the fields that were set; what is printed nowhere stays unstated.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from threefold.compare.contract import MOST_FACTS, Contract, Facts, flat, plain, plan_facts, why_benchmark
from threefold.diagnose.files import kind_of
from threefold.diagnose.logs.job_logs import JobLogs, read_logs
from threefold.diagnose.part import Context
from threefold.findings import Finding, FindingsError
from threefold.plan.file import read_plan
from threefold.plan.plan import Plan
from threefold.plan.same_run import DATA, TOKENIZER
from threefold.profile.readers.run_record import CONTRACT, PLAN
from threefold.rules.all import errors
from threefold.safe_files import read_json_object

MAX_FILE_BYTES = 2**22
# Where the facts of a run's contract.json stand in a contract; what is not here is no fact of the work.
_OF_RUN = {
    "threefold": "software.threefold",
    "torch": "software.torch",
    "python": "software.python",
    "device": "hardware.device",
    "threads": "hardware.threads",
    "data": "data.fingerprint",
    DATA: "data.sources",
    TOKENIZER: "tokenizer",
    "environment": "environment",
    "lineage": "lineage",
    "effective": "effective",
}
# Settings of another system that say how a job is kept and where, not what it computes.
_OF_KEEPING = (
    *("checkpoint.", "logger.", "profiling.", "straggler.", "ft.", "nvrx_", "inference_", "dist.", "env."),
    *("save", "load", "log_", "tensorboard", "wandb", "path", "dir", "exit", "timing", "rank", "world_size", "master"),
    *("nccl_communicator", "port", "_interval", "verbose", "cache", "num_workers", "name", "progress", "report"),
)


def read_contract(names: Sequence[str], log_plan: Plan | None = None) -> Contract:
    """The contract behind one plan, run or contract file, or behind the logs of one job. Raises findings."""
    path = Path(names[0])
    try:
        if len(names) == 1 and path.is_dir():
            return contract_of_run(path)
        if len(names) == 1 and path.suffix == ".toml":
            return contract_of_plan(_plan_of(names[0]), names[0])
        if len(names) == 1 and path.suffix == ".json" and (found := _of_file(path)):
            return found
    except (OSError, ValueError) as error:
        raise _unreadable(names[0], f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return contract_of_logs(job_logs(names, log_plan), names)


def contract_of_plan(plan: Plan, source: str) -> Contract:
    return Contract(source, "plan", plan_facts(plan), why_benchmark(plan))


def contract_of_run(folder: Path) -> Contract:
    """The contract of a run from its plan and contract.json; it may be one that is still under way."""
    plan = _plan_of(str(folder / PLAN), f"{folder}: the folder holds no run")
    try:
        stated = read_json_object(folder / CONTRACT, within=folder)
    except FileNotFoundError:
        stated = {}
    return contract_of_facts(plan, stated, str(folder))


def contract_of_facts(plan: Plan, stated: Mapping[str, Any], source: str) -> Contract:
    """The contract of a run from its plan and from what its contract.json states."""
    facts: Facts = plan_facts(plan)
    for name, prefix in _OF_RUN.items():
        if name in stated:
            facts |= dict(_numbered({prefix: stated[name]}))
    why = why_benchmark(plan)
    if stated.get("benchmark_only") is True and not why:
        why = ("the run says that its data is that of a benchmark",)
    return Contract(source, "run", dict(list(facts.items())[:MOST_FACTS]), why)


def contract_of_logs(logs: JobLogs, names: Sequence[str]) -> Contract:
    """What the logs of a job state."""
    printed, configuration = logs.printed, logs.configuration
    facts: Facts = {}
    why: tuple[str, ...] = ()
    if plan := configuration.plan:
        facts |= plan_facts(plan, is_complete=configuration.is_complete or configuration.source == "--plan")
        why = why_benchmark(plan)
        if "job.data" not in dict(plan.written):  # the default is that of the threefold engine
            facts.pop("job.data", None)
        for finding in configuration.findings:
            if finding.rule == "import-needs-cluster":  # the import guessed it
                facts.pop(finding.at, None)
    rest = {path: value for path, value in configuration.rest.items() if not _is_of_keeping(path)}
    facts |= {f"settings.{path}": plain(value) for path, value in rest.items()}
    facts |= {f"software.{name}": version for name, version in printed.versions.items()}
    facts |= {f"environment.{name}": value for name, value in printed.environment.items()}
    if printed.device:
        facts["hardware.device"] = printed.device
    if not facts:
        advice = "give the log in which the job printed its configuration, or a plan or a run"
        raise _unreadable(names[0], "no log of the job prints a configuration, versions or a device", advice)
    facts = dict(list(facts.items())[:MOST_FACTS])
    return Contract(", ".join(names), "log", facts, why, has_all_settings=configuration.is_complete)


def job_logs(names: Sequence[str], plan: Plan | None) -> JobLogs:
    """Read the logs of one job. Raises findings where one of them is no log."""
    for name in names:
        try:
            kind = kind_of(Path(name))
        except (OSError, ValueError) as error:
            raise _unreadable(name, str(getattr(error, "strerror", None) or error)) from None
        if kind != "log":
            raise _unreadable(name, f"it is a {kind}, which states no contract")
    logs = read_logs([Path(name) for name in names], Context(plan=plan, judges_plans=False))
    if any(finding.rule == "file-readable" for finding in logs.findings):
        raise FindingsError(logs.findings)
    return logs


def _plan_of(name: str, missing: str = "") -> Plan:
    if missing and not Path(name).exists():
        raise _unreadable(name, missing)
    parsed = read_plan(name)
    if parsed.plan is None or errors(parsed.findings):
        raise FindingsError(parsed.findings)
    return parsed.plan


def _of_file(path: Path) -> Contract | None:
    """A contract that `write_contract_file` wrote; None where the file is another JSON. Raises where it was changed."""
    stated = read_json_object(path, MAX_FILE_BYTES)
    facts, why = stated.get("facts"), stated.get("why_benchmark")
    if "contract" not in stated or not isinstance(facts, dict) or not isinstance(why, list):
        return None
    is_whole = stated.get("has_all_settings") is True
    found = Contract(str(path), "contract", dict(list(facts.items())[:MOST_FACTS]), tuple(map(str, why)), is_whole)
    if found.hash != stated.get("hash"):
        problem = f"its facts have the hash {found.hash}, and the file says {str(stated.get('hash'))[:40]}"
        raise _unreadable(str(path), problem, "it was changed after it was written: write it anew from its source")
    return found


def write_contract_file(contract: Contract, path: Path) -> None:
    path.write_text(json.dumps(contract.to_json(), indent=1) + "\n", encoding="utf-8")


def _numbered(facts: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Values of nested tables and lists of tables by dotted path."""
    found: list[tuple[str, Any]] = []
    for path, value in flat(facts):
        if isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
            for number, each in enumerate(value[:32]):
                found += _numbered({f"{path}.{number}": each})
        else:
            found.append((path, plain(value)))
    return found


def _is_of_keeping(path: str) -> bool:
    name = path.rpartition(".")[2]
    return any(word in name if not word.endswith(".") else path.startswith(word) for word in _OF_KEEPING)


def _unreadable(at: str, problem: str, advice: str = "") -> FindingsError:
    advice = advice or "give a plan file, the folder of a run, the logs of a job, or a contract that was written before"
    return FindingsError([Finding(rule="contract-readable", at=at, problem=problem, advice=advice)])
