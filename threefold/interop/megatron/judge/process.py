"""The command `python validate.py`: judges the export next to it, in processes of their own with limits.

Megatron is imported in a child. Each rank is judged in a child of that child, so that no rank sees what another one
left behind, and a constructor that hangs or fills the memory ends there.
"""

import argparse
import contextlib
import io
import json
import os
import resource
import select
import shlex
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from threefold.interop.megatron.judge.bridge import BridgeExport
from threefold.interop.megatron.judge.lm import LmExport
from threefold.interop.megatron.judge.machine import Device, simulated_machine
from threefold.interop.megatron.judge.stand_ins import StandInFinder, install_stand_ins
from threefold.interop.megatron.judge.verdict import (
    EXIT_CODES,
    NOT_JUDGED,
    NotJudgedError,
    Verdict,
    summary,
    summary_text,
    verdict_of,
)

SECONDS, GIGABYTES = 120.0, 16.0  # limits unless others are given
KINDS: dict[str, Any] = {"megatron-bridge": BridgeExport, "megatron-lm": LmExport}


def in_child(work: Callable[[], Any], seconds: float, gigabytes: float, own_group: bool = True) -> Any:
    """What `work` returns in a forked process, as JSON takes it. NotJudgedError where it goes past a limit or dies.

    `own_group`: whether processes that the work starts end with it. A child of a child leaves them to its parent.
    Temporary files of the work are removed with it: it ends without its own clean-up.
    """
    with tempfile.TemporaryDirectory(prefix="validate-") as scratch:
        return _in_child(work, seconds, gigabytes, own_group, scratch)


def _in_child(work: Callable[[], Any], seconds: float, gigabytes: float, own_group: bool, scratch: str) -> Any:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        tempfile.tempdir = os.environ["TMPDIR"] = scratch
        if own_group:
            os.setsid()
        _work_as_child(work, writer, gigabytes)
    os.close(writer)
    try:
        text = _read_line(reader, time.monotonic() + seconds)
    finally:
        os.close(reader)
        _, status = _end(child, own_group)
    if text is None:
        raise NotJudgedError(f"no answer within {seconds:g} seconds")
    if not text.endswith(b"\n"):
        raise NotJudgedError(f"the process ended without an answer ({_end_of(status)})")
    answer = json.loads(text)
    if "limit" in answer:
        raise NotJudgedError(answer["limit"])
    return answer["answer"]


def _end(child: int, own_group: bool) -> tuple[int, int]:
    """Kill a child with everything that it started; one that has answered is ending by itself."""
    with contextlib.suppress(ProcessLookupError):
        (os.killpg if own_group else os.kill)(child, signal.SIGKILL)
    return os.waitpid(child, 0)


def _work_as_child(work: Callable[[], Any], writer: int, gigabytes: float) -> None:
    """Write what `work` returns, and end without anything that the parent would do at its end."""
    try:
        with contextlib.suppress(ValueError, OSError):  # a system without this limit
            resource.setrlimit(resource.RLIMIT_DATA, (int(gigabytes * 2**30),) * 2)
        try:
            answer = {"answer": work()}
        except MemoryError:
            answer = {"limit": f"it asked for more than {gigabytes:g} GB of memory"}
        except NotJudgedError as error:
            answer = {"limit": str(error)}
        left = json.dumps(answer, default=str).encode() + b"\n"
        while left:
            left = left[os.write(writer, left) :]
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _read_line(reader: int, deadline: float) -> bytes | None:
    """Up to the end of a line or of the stream; None where the time is over."""
    text = b""
    while not text.endswith(b"\n"):
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return None
        part = os.read(reader, 1 << 16)
        if not part:
            break
        text += part
    return text


def _end_of(status: int) -> str:
    return f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {os.WEXITSTATUS(status)}"


def judge_rank(job: dict[str, Any], folder: str, rank: int, finder: StandInFinder) -> Verdict:
    """Every stage of one rank in this process, which is not fit for another one afterwards."""
    export = KINDS[job["to"]](job, folder, rank)
    os.environ.update(exported_variables(Path(folder) / "environment.sh"))
    printed, stage = io.StringIO(), ""
    device = Device(**job["device"])
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
        simulated_machine(device, job["gpus_per_node"], job["gpus"], rank),
    ):
        try:
            for stage in export.stages:
                getattr(export, stage)()
            verdict = Verdict(stage=stage, values=export.values())
        except MemoryError:
            raise
        except (Exception, SystemExit) as error:
            verdict = verdict_of(error, stage, export.script)
    if verdict.error == "SystemExit":  # argparse prints what it refuses
        verdict.message = next((line for line in reversed(printed.getvalue().splitlines()) if line.strip()), "")
    verdict.rank, verdict.stand_ins = rank, sorted(finder.used)
    return verdict


def exported_variables(file: Path) -> dict[str, str]:
    lines = file.read_text().splitlines() if file.exists() else []
    words = [shlex.split(line, comments=True) for line in lines]
    exported = [word[1].partition("=") for word in words if len(word) == 2 and word[0] == "export"]
    return {name: value for name, _, value in exported}


def judge_export(
    job: dict[str, Any],
    folder: str,
    finder: StandInFinder,
    seconds: float,
    gigabytes: float,
    ranks: tuple[int, ...] = (),
) -> list[Any]:
    """Rank 0 and the last rank, which differs from it on every axis; the verdicts as data. The limits are a rank's."""
    verdicts = []
    for rank in ranks or sorted({0, job["gpus"] - 1}):
        try:
            work = partial(_judge_as_data, job, folder, rank, finder)
            verdicts.append(in_child(work, seconds, gigabytes, own_group=False))
        except NotJudgedError as error:
            verdicts.append(asdict(Verdict(NOT_JUDGED, "limits", "Limit", str(error), rank=rank)))
    return verdicts


def _judge_as_data(job: dict[str, Any], folder: str, rank: int, finder: StandInFinder) -> dict[str, Any]:
    return asdict(judge_rank(job, folder, rank, finder))


def import_megatron(job: dict[str, Any], megatron: str | None) -> tuple[StandInFinder, dict[str, str]]:
    """Megatron in this process, and the versions of its parts."""
    warnings.simplefilter("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    finder = install_stand_ins(megatron, job["transformer_engine"])
    device = Device(**job["device"])
    try:
        with (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            simulated_machine(device, job["gpus_per_node"], job["gpus"], 0),
        ):
            KINDS[job["to"]].load()
    except ImportError as error:
        remedy = "It is no part of Megatron: install it"
        if (error.name or "").partition(".")[0] == "megatron":
            remedy = "Name the folder of Megatron's unpacked wheels with --megatron, or run a Python that has it"
        raise NotJudgedError(f"{type(error).__name__}: {error}. {remedy}") from error
    except Exception as error:
        raise NotJudgedError(f"Megatron does not import: {type(error).__name__}: {error}") from error
    return finder, _versions()


def _versions() -> dict[str, str]:
    versions = {}
    for part in ("core", "bridge"):
        with contextlib.suppress(ImportError, AttributeError):
            module = __import__(f"megatron.{part}.package_info", fromlist=["__version__"])
            versions[part] = str(module.__version__)
    return versions


def validate(
    job: dict[str, Any], folder: str, megatron: str | None, seconds: float, gigabytes: float
) -> dict[str, Any]:
    """The whole answer of one command."""

    def work() -> Any:
        finder, versions = import_megatron(job, megatron)
        return [judge_export(job, folder, finder, seconds / 3, gigabytes), versions]  # import and two ranks

    try:
        ranks, versions = in_child(work, seconds, gigabytes)
    except NotJudgedError as error:
        ranks, versions = [asdict(Verdict(NOT_JUDGED, "import", "Limit", str(error)))], {}
    return summary(job, ranks, versions)


def validate_main(job: dict[str, Any], folder: str) -> int:
    about = f"Let {job['stack']} judge the export in this folder, on a CPU."
    parser = argparse.ArgumentParser(description=about, epilog="Exit codes: 0 accepted, 1 refused, 3 not judged.")
    parser.add_argument("--megatron", metavar="DIR", help="folder with unpacked wheels (default: as installed)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"limit of time (default {SECONDS:g})")
    parser.add_argument("--gigabytes", type=float, default=GIGABYTES, help=f"limit of memory (default {GIGABYTES:g})")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    args = parser.parse_args()
    found = validate(job, folder, args.megatron, args.seconds, args.gigabytes)
    sys.stdout.write(json.dumps(found) + "\n" if args.json else summary_text(found))
    return EXIT_CODES[found["verdict"]]
