"""Deaths that are planted in logs of four systems: named, and never wrongly; what nobody knows stays unknown."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from job_logs import DEATHS, HARMLESS, PREFIXES, SYSTEMS, UNKNOWN, Planted, write_log
from repository import ROOT

from threefold.diagnose.deaths.catalogue import catalogue, death_named, deaths_in
from threefold.diagnose.deaths.verdict import Verdict, judge, read_shortage
from threefold.diagnose.logs.scan import Scan
from threefold.plan.parse import parse


def verdict_on(path: Path) -> Verdict:
    return judge([Scan(path).read()])


def draw(seed: int, planted: Planted, folder: Path) -> tuple[Verdict, int | None]:
    """The verdict on a drawn log with that death, and the rank that died, where the log says ranks."""
    rng = random.Random(seed)
    style = PREFIXES[rng.randrange(len(PREFIXES))]
    path = folder / f"{seed}.log"
    failed = write_log(path, rng, SYSTEMS[seed % len(SYSTEMS)], planted, style)
    return verdict_on(path), None if style in ("none", "kubernetes") else failed


def test_planted_deaths_are_named(tmp_path: Path) -> None:
    """At least 95 % of 200 logs are named, and none wrongly with high confidence."""
    named, wrong = 0, []
    for seed in range(200):
        planted = DEATHS[seed % len(DEATHS)]
        found, failed = draw(seed, planted, tmp_path)
        is_right = found.slug == planted.slug
        named += is_right
        if not is_right and found.confidence == "high":
            wrong.append((planted.slug, found.slug))
        if is_right and failed is not None and planted.is_exception:
            assert found.evidence is not None
            assert found.evidence.rank == failed
    assert wrong == []
    assert named >= 190


def test_unknown_deaths_stay_unknown(tmp_path: Path) -> None:
    """Each shows the first error of the rank that had it, although others print known ones later."""
    for seed in range(50):
        planted = UNKNOWN[seed % len(UNKNOWN)]
        found, failed = draw(seed, planted, tmp_path)
        assert found.evidence is not None
        assert (found.slug, found.evidence.text) == ("unknown", planted.lines[0])
        if failed is not None:
            assert found.evidence.rank == failed


def test_altered_deaths_are_unknown(tmp_path: Path) -> None:
    """Words written backwards are in no catalogue."""
    for seed in range(60):
        planted = DEATHS[(seed * 7) % len(DEATHS)]
        text = re.sub(r"[A-Za-z]{3,}", lambda word: word[0][::-1], planted.lines[0].partition(": ")[2] or "odd end")
        line = f"Odd{seed}Error: {text}" if planted.is_exception else f"FATAL {text}"
        found, _ = draw(seed, replace(planted, lines=(line,)), tmp_path)
        assert found.evidence is not None
        assert (found.slug, found.evidence.text) == ("unknown", line.strip())


def _wrapped(line: str, number: int) -> str:
    return "\n".join(line[start : start + 110] for start in range(0, len(line), 110))


# What launchers, containers and people do to the lines of a log.
FORMS: dict[str, Callable[[str, int], str]] = {
    "ray": lambda line, number: f"(WorkerDict pid={1000 + number % 7}, ip=10.0.0.{number % 9}) {line}",
    "mpirun": lambda line, number: f"[1,{number % 8}]<stderr>:{line}",
    "windows": lambda line, number: line + "\r",
    "logger": lambda line, number: f"2026-03-03 10:00:{number % 60:02d},123 [ERROR] stderr: {line}",
    "indented": lambda line, number: "\t" + line,
    "colored": lambda line, number: f"\x1b[31m{line}\x1b[0m",
    "quoted": lambda line, number: f"> {line}",
    "docker": lambda line, number: json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-03-03T10:00:00Z"}),
    "numbered": lambda line, number: f"[{1700 + number}] {line}",
    "pod": lambda line, number: f"llm-train-worker-{number % 4} pytorch {line}",
    "wrapped": _wrapped,
}


def test_logs_of_other_forms_are_named(tmp_path: Path) -> None:
    """66 logs whose lines got heads, colors, quotes or line ends that no parser was written for: 95 % are named."""
    named = 0
    for seed in range(66):
        planted = DEATHS[(seed * 11) % len(DEATHS)]
        path = tmp_path / f"{seed}.log"
        rng = random.Random(seed)
        write_log(path, rng, SYSTEMS[seed % 4], planted, rng.choice(("none", "torchrun")))
        lines = path.read_text(encoding="utf-8").split("\n")
        form = list(FORMS.values())[seed % len(FORMS)]
        path.write_text("\n".join(form(line, number) for number, line in enumerate(lines)), encoding="utf-8")
        found = verdict_on(path)
        named += found.slug == planted.slug
        assert found.slug == planted.slug or found.confidence != "high"
    assert named >= 63


def test_catalogue_is_whole() -> None:
    """At least 50 entries; plan fields that exist, rows with ids, no slug twice."""
    entries = catalogue()
    assert sum(entry.role != "notice" for entry in entries) >= 50
    assert [slug for slug, count in Counter(entry.slug for entry in entries).items() if count > 1] == []
    base = {"model": "qwen3-30b-a3b", "cluster.chip": "h100", "cluster.gpus": 16, "layout.pp": 2, "layout.ep": 8}
    for entry in entries:
        assert all((entry.cause, entry.confirm, entry.fix, entry.source))
        assert not parse(base | dict(entry.fields)).findings
        assert all(re.fullmatch(r"[A-Z]{2}-[A-Z0-9]+", row) for row in entry.rows)


def test_every_symptom_of_ep_overlap_is_there() -> None:
    rows = {row for entry in catalogue() for row in entry.rows}
    assert {f"EO-D{number}" for number in range(1, 12)} <= rows


@pytest.mark.parametrize("text", ["INFO: nccl and cuda are fine", "> loading doc-idx mapping", "step 3: loss 2.1"])
def test_ordinary_lines_are_no_deaths(text: str) -> None:
    assert deaths_in(text) == []


@pytest.mark.parametrize("line", HARMLESS)
def test_what_healthy_jobs_print_is_no_death(line: str, tmp_path: Path) -> None:
    """Not even where the log has no step after it."""
    found = verdict_on(write(tmp_path / "a.log", "step 1", line))
    assert (found.status, found.slug) == ("no death seen", "")


OOM = (
    "CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of 80.00 GiB of which 1.00 GiB is free. "
    "Including non-PyTorch memory, this process has {own} memory in use. Of the allocated memory {held} is allocated "
    "by PyTorch, and {idle} is reserved by PyTorch but unallocated."
)


@pytest.mark.parametrize(
    ("asked", "own", "held", "idle", "kind"),
    [
        ("2.00 GiB", "79.00 GiB", "60.00 GiB", "18.00 GiB", "fragmentation"),  # 18 GiB lie idle, 2 are wanted
        ("2.00 GiB", "79.00 GiB", "77.50 GiB", "500.00 MiB", "shortage"),
        ("2.00 GiB", "40.00 GiB", "38.00 GiB", "500.00 MiB", "other process"),  # 39 GiB are held by others
    ],
)
def test_kind_of_shortage(asked: str, own: str, held: str, idle: str, kind: str) -> None:
    text = OOM.format(asked=asked, own=own, held=held, idle=idle)
    found = read_shortage(text, ['File "a/megatron/core/pipeline_parallel/schedules.py", line 9, in custom_backward'])
    assert (found.kind, found.phase, found.requested) == (kind, "backward", 2 * 2**30)


def test_old_form_of_the_shortage() -> None:
    text = "Tried to allocate 10.84 GiB (GPU 0; 23.65 GiB total capacity; 1.06 GiB already allocated; 10.26 GiB free; "
    found = read_shortage(text + "12.53 GiB reserved in total by PyTorch)", [])
    assert found.kind == "fragmentation"  # 12.53 - 1.06 GiB are reserved and idle


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


STEP = " iteration {0:8d}/    1000 | elapsed time per iteration (ms): 4000.0 | lm loss: 2.5E+00 | grad norm: 1.000 |"


def test_an_error_that_steps_came_after_is_no_death(tmp_path: Path) -> None:
    error = "RuntimeError: CUDA error: an illegal memory access was encountered"
    steps = [STEP.format(step) for step in range(1, 10)]
    assert verdict_on(write(tmp_path / "a", error, *steps)).status == "no death seen"
    assert verdict_on(write(tmp_path / "b", *steps, error)).slug == "illegal-memory-access"
    # The last rank may still report the step that another one died in.
    assert verdict_on(write(tmp_path / "c", error, steps[0])).slug == "illegal-memory-access"


def test_the_first_of_two_ranks_counts_by_time(tmp_path: Path) -> None:
    """Two files, of which the second has the earlier error."""
    late = write(
        tmp_path / "rank-0.log",
        "2026-03-03 11:30:00 RuntimeError: DeepEP error: timeout (dispatch CPU)",
        "2026-03-03 11:30:01 RuntimeError: CUDA error: uncorrectable ECC error encountered",
    )
    early = write(tmp_path / "rank-5.log", "2026-03-03 11:20:00 OSError: [Errno 28] No space left on device")
    found = judge([Scan(late).read(), Scan(early).read()])
    assert (found.slug, found.confidence, found.evidence and found.evidence.rank) == ("disk-full", "high", 5)


def test_rivals_without_an_order_are_not_certain(tmp_path: Path) -> None:
    one = write(tmp_path / "a.log", "RuntimeError: CUDA error: uncorrectable ECC error encountered")
    other = write(tmp_path / "b.log", "OSError: [Errno 28] No space left on device")
    assert judge([Scan(one).read(), Scan(other).read()]).confidence == "medium"


def test_a_wrapped_exception_is_one_error(tmp_path: Path) -> None:
    """The first of a chain is unknown and the second, which comes from it, says what it is."""
    path = write(
        tmp_path / "a.log",
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in <module>',
        "KeyError: 'deep_ep'",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        '  File "a.py", line 3, in <module>',
        "ImportError: DeepEP is not installed. Please install DeepEP package from https://github.com/deepseek-ai/deepep.",
    )
    assert verdict_on(path).slug == "deepep-not-installed"


def test_an_exception_without_words_is_known_by_its_frames(tmp_path: Path) -> None:
    """`assert self.lr_warmup_steps < self.lr_decay_steps` of Megatron Core has no message."""
    path = write(
        tmp_path / "a.log",
        "[rank0]: Traceback (most recent call last):",
        '[rank0]:   File "/x/megatron/core/optimizer_param_scheduler.py", line 160, in __init__',
        "[rank0]:     assert self.lr_warmup_steps < self.lr_decay_steps",
        "[rank0]:            ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "[rank0]: AssertionError",
    )
    assert verdict_on(path).slug == "warmup-longer-than-training"


def test_complaints_of_shell_tools_are_no_death(tmp_path: Path) -> None:
    """As in the start script of a container; the job died later."""
    complaint = "rm: cannot remove '/usr/local/cuda/compat/lib': Read-only file system"
    timeout = (
        "[rank0]:[E1010 11:50:05.315 ProcessGroupNCCL.cpp:565] [Rank 0] Watchdog caught collective operation timeout:"
    )
    assert verdict_on(write(tmp_path / "a.log", complaint, timeout)).slug == "nccl-timeout"
    alone = verdict_on(write(tmp_path / "b.log", complaint))
    assert (alone.slug, alone.confidence) == ("permission-denied", "low")


def test_what_an_abort_says_counts_before_the_abort(tmp_path: Path) -> None:
    path = write(
        tmp_path / "a.log",
        "terminate called after throwing an instance of 'c10::DistBackendError'",
        "  what():  [PG 1 Rank 1] Process group watchdog thread terminated with exception: [Rank 1] Watchdog caught "
        "collective operation timeout: WorkNCCL(SeqNum=199, OpType=ALLREDUCE)",
    )
    assert verdict_on(path).slug == "nccl-timeout"


def test_a_log_that_ends_inside_of_a_traceback(tmp_path: Path) -> None:
    head = ["Traceback (most recent call last):", '  File "a.py", line 3, in main']
    found = verdict_on(write(tmp_path / "a.log", *head))
    assert (found.status, found.slug) == ("died", "unknown")
    assert found.evidence is not None
    assert found.evidence.text == 'the log ends inside of a traceback, at File "a.py", line 3, in main'


def test_a_word_alone_gives_low_confidence(tmp_path: Path) -> None:
    """A hint, and the file that an exception of unknown words was raised in."""
    hint = verdict_on(write(tmp_path / "a.log", "RuntimeError: unexpected pos 4996040960 vs 4996040856"))
    assert (hint.slug, hint.confidence) == ("disk-full", "low")
    frames = ["Traceback (most recent call last):", '  File "/x/torch/serialization.py", line 493, in persistent_load']
    frame = verdict_on(write(tmp_path / "b.log", *frames, "    assert isinstance(saved_id, tuple)", "AssertionError"))
    assert (frame.slug, frame.confidence) == ("unpickling-refused", "low")


def test_what_is_clear_counts_before_a_fault_of_the_program(tmp_path: Path) -> None:
    """In one text, and where one exception comes from the other."""
    found = deaths_in("TypeError: Caught TypeError in DataLoader worker process 0.")
    assert [death.slug for death in found][:2] == ["data-worker-died", "type-does-not-fit"]
    lines = (
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in load',
        "KeyError: 'iteration'",
        "",
        "During handling of the above exception, another exception occurred:",
        "",
        "Traceback (most recent call last):",
        '  File "a.py", line 3, in load',
        "OSError: [Errno 28] No space left on device",
    )
    assert verdict_on(write(tmp_path / "a.log", *lines)).slug == "disk-full"


def test_death_named() -> None:
    assert death_named("nccl-timeout") is not None
    assert death_named("no-such-death") is None


def test_the_reference_names_every_death() -> None:
    page = (ROOT / "docs" / "reference" / "diagnose.md").read_text(encoding="utf-8")
    table = set(re.findall(r"`([a-z0-9-]+)`", page.partition("## Deaths")[2].partition("`--fail-on")[0]))
    assert {entry.slug for entry in catalogue()} <= table
